"""How large the code is, and how far a reader has to go through it: counts, with their targets.

    python -m tests.architecture.stats              (or `make stats`)
    python -m tests.architecture.stats --details    with the lists behind the counts

This only prints; it never fails. The files are those that git knows in the product's folders. Two
counts come from tracing: the functions that `fedmuon run` and `fedmuon suite A2 --scale small` call
in product files, modules' and classes' own code not counted.

Limits of "functions with one caller": callers are found by name. A function counts if its body has
five lines or less, its name is defined once in the product, and exactly one place outside its body
mentions that name, be it as a name, an attribute or an import's alias (the import itself does not
count). So a method whose name occurs elsewhere with another meaning is missed, and so is what is
found through a string; decorated functions, which a framework may call, dunders and functions that
`fedmuon.__all__` names are left out. What only tests mention is not counted as called.
"""

import argparse
import ast
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .evidence import ROOT, environment

ROOMS = ("fedmuon", "clients", "server", "analysis", "experiments")
TWICE = ("__init__.py", "__main__.py")  # names that every package may have
SHORT = 5
TARGETS = {
    "lines": 40_500,
    "files": 230,
    "functions": 2_300,
    "functions of 5 lines or less with one caller": 60,
    "files that share a name with another": 20,
    "imports inside functions": 60,
    "run: functions": 170,
    "run: files": 25,
    "suite A2: functions": 350,
    "suite A2: files": 60,
    "lines of tests": 38_000,
}
JOBS = {
    "run": ("run", "--set", "federation.rounds=2"),
    "suite A2": ("suite", "A2", "--scale", "small"),
}
# Runs `fedmuon` in a process of its own and writes what it called: [[file, line, name], ...].
TRACER = """
import json, runpy, sys, threading
rooms, out, sys.argv = json.loads(sys.argv[1]), sys.argv[2], ["fedmuon", *sys.argv[3:]]
seen = set()
def watch(frame, event, _):
    if event == "call":
        seen.add(frame.f_code)
threading.setprofile(watch)
sys.setprofile(watch)
try:
    runpy.run_module("fedmuon", run_name="__main__")
finally:
    sys.setprofile(None)
    called = [(one.co_filename, one.co_firstlineno, one.co_qualname) for one in set(seen)]
    ours = [one for one in called if one[0].startswith(tuple(rooms))]
    with open(out, "w") as file:
        json.dump(sorted(ours), file)
"""


@dataclass(frozen=True)
class Function:
    """A definition: where it is, how long its body is without the docstring, and what it is."""

    file: str
    line: int
    last: int
    name: str
    body: int
    plain: bool  # without a decorator

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name} ({self.body})"


@dataclass
class Tree:
    """What the product's files hold; places by name are (file, line)."""

    lines: dict[str, int]
    functions: list[Function]
    classes: int
    inside: list[str]
    mentions: dict[str, list[tuple[str, int]]]


def main() -> None:
    """Print the counts, and with `--details` what they count."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.stats")
    parser.add_argument("--details", action="store_true", help="the lists behind the counts")
    parser.add_argument("--no-trace", action="store_true", help="leave out what takes a minute")
    asked = parser.parse_args()
    tree = read(files(*ROOMS))
    alone, shared = one_caller(tree), shared_names(tree)
    traced = {} if asked.no_trace else {job: trace(words) for job, words in JOBS.items()}
    found = {
        "lines": sum(tree.lines.values()),
        "files": len(tree.lines),
        "functions": len(tree.functions),
        "classes": tree.classes,
        "median lines of a file": statistics.median(tree.lines.values()),
        "median lines of a function's body": statistics.median(one.body for one in tree.functions),
        "functions of 5 lines or less with one caller": len(alone),
        "files that share a name with another": sum(shared.values()),
        "imports inside functions": len(tree.inside),
        "loose files in fedmuon/": sum(Path(name).parent == Path("fedmuon") for name in tree.lines),
        **{f"{job}: {what}": n for job, one in traced.items() for what, n in sizes(one).items()},
        "lines of tests": sum(length(ROOT / name) for name in files("tests")),
    }
    print_counts(found)
    if asked.details:
        print_list("functions of 5 lines or less with one caller (body)", map(str, alone))
        print_list("file names that occur more than once", counted(shared))
        print_list("imports inside functions", tree.inside)
        largest = sorted(tree.functions, key=lambda one: -one.body)[:40]
        print_list("the longest functions (body)", map(str, largest))
        for job, calls in traced.items():
            print_list(f"functions by file: {job}", counted(Counter(one[0] for one in calls)))


def files(*rooms: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *rooms]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = (name for name in listed.stdout.splitlines() if name.endswith(".py"))
    return sorted(name for name in names if (ROOT / name).exists())


def length(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def read(names: list[str]) -> Tree:
    tree = Tree({}, [], 0, [], {})
    for name in names:
        parsed = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        tree.lines[name] = length(ROOT / name)
        for node in ast.walk(parsed):
            _add(tree, name, node)
        tree.inside += sorted(
            set(_imports(name, parsed)), key=lambda one: int(one.split(":")[1].split()[0])
        )
    return tree


def _add(tree: Tree, file: str, node: ast.AST) -> None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        last = node.end_lineno or node.lineno
        tree.functions.append(
            Function(file, node.lineno, last, node.name, _body(node), not node.decorator_list)
        )
    elif isinstance(node, ast.ClassDef):
        tree.classes += 1
    elif isinstance(node, ast.Name):
        tree.mentions.setdefault(node.id, []).append((file, node.lineno))
    elif isinstance(node, ast.Attribute):
        tree.mentions.setdefault(node.attr, []).append((file, node.end_lineno or node.lineno))
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:  # renamed: its uses have another name
            if alias.asname:
                tree.mentions.setdefault(alias.name, []).append((file, node.lineno))


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not statements:
        return 0
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1


def _imports(file: str, parsed: ast.Module) -> Iterator[str]:
    for function in ast.walk(parsed):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield f"{file}:{node.lineno} {ast.unparse(node)}"


def one_caller(tree: Tree) -> list[Function]:
    """Short functions that one place mentions, as far as names tell."""
    defined = Counter(one.name for one in tree.functions)
    found = []
    for one in tree.functions:
        outside = [
            place
            for place in tree.mentions.get(one.name, [])
            if place[0] != one.file or not one.line <= place[1] <= one.last
        ]
        special = one.name.startswith("__") or one.name in public()
        if one.body <= SHORT and one.plain and not special and defined[one.name] == 1:
            found += [one] * (len(outside) == 1)
    return found


def public() -> set[str]:
    import fedmuon  # tests of the instrument read trees without it

    return set(fedmuon.__all__)


def shared_names(tree: Tree) -> Counter[str]:
    names = Counter(Path(name).name for name in tree.lines)
    return Counter({name: n for name, n in names.items() if n > 1 and name not in TWICE})


def trace(words: tuple[str, ...]) -> list[tuple[str, int, str]]:
    """The functions (file, line, name) that a command calls, without modules and class bodies."""
    with tempfile.TemporaryDirectory(prefix="stats-") as folder:
        found = Path(folder, "called.json")
        rooms = json.dumps([f"{ROOT / room}/" for room in ROOMS])
        command = [sys.executable, "-c", TRACER, rooms, str(found), *words, "--out", "out"]
        ended = subprocess.run(
            command, cwd=folder, env=environment(ROOT), capture_output=True, text=True
        )
        if not found.exists():
            raise RuntimeError(ended.stderr)
        called = json.loads(found.read_text())
    inner = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
    named = {
        (str(Path(file).relative_to(ROOT)), line, name)
        for file, line, name in called
        if file.endswith(".py") and not name.endswith(inner)  # templates are called like Python
    }
    bodies = class_bodies({one[0] for one in named})
    return sorted(one for one in named if one[:2] not in bodies)


def class_bodies(names: set[str]) -> set[tuple[str, int]]:
    """Where the classes of these files begin: Python runs their bodies like functions."""
    found = set()
    for name in names:
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                found.add((name, first))
    return found


def sizes(called: list[tuple[str, int, str]]) -> dict[str, int]:
    return {"functions": len(called), "files": len({one[0] for one in called})}


def print_counts(found: Mapping[str, float]) -> None:
    for name, value in found.items():
        target = f"{TARGETS[name]:>10,}" if name in TARGETS else ""
        print(f"{name:<46} {value:>10,}  {target}".rstrip())
    print("(the second number is the target)")


def counted(counts: Mapping[str, int]) -> Iterator[str]:
    return (f"{n:>5}  {name}" for name, n in Counter(counts).most_common())


def print_list(title: str, lines: Iterator[str] | list[str]) -> None:
    lines = list(lines)
    print(f"\n{title}: {len(lines)}\n" + "\n".join(f"  {line}" for line in lines))


if __name__ == "__main__":
    main()
