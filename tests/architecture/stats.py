"""How large the code is, and how far a reader has to go through it: counts, with their targets.

    python -m tests.architecture.stats                  (or `make stats`)
    python -m tests.architecture.stats --details        with the lists behind the counts
    python -m tests.architecture.stats --at REVISION    with the counts of a revision beside them

This only prints; it never fails. The files are those that git knows in the product's folders.
`coupling.py` counts what depends on what. Other counts come from tracing: the functions that
`fedmuon run` and `fedmuon suite A2 --scale small` call in product files, modules' and classes' own
code not counted. "round" is what `run_rounds` calls to compute the second round of `fedmuon run`.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .coupling import (
    CHAIN,
    FEATURES,
    LOOP,
    RECIPE,
    ROOMS,
    ROUNDS,
    closure,
    code_lines,
    conditions,
    fields,
    house_words,
    names_feature,
    parse,
)
from .evidence import ROOT, environment, worktree

TWICE = ("__init__.py", "__main__.py")  # names that every package may have
SHORT = 5
TARGETS = {
    "code lines": 44_000,
    "files": 230,
    "functions": 2_300,
    "functions of 5 lines or less with one caller": 60,
    "files that share a name with another": 20,
    "imports inside functions": 60,
    "lines of tests": 52_500,
    "conditions in rounds.py": 12,
    "conditions in loop.py": 18,
    "code lines of rounds.py": 250,
    "files that rounds.py loads": 15,
    "code lines that rounds.py loads": 2_300,
    "files that chain.py loads": 6,
    **{f"files that name {feature}": 8 for feature in FEATURES},
    "fields of Recipe": 12,
    "house words in the product, %": 6,
    "house words in the files of a run, %": 2,
    "run: functions": 260,
    "run: files": 42,
    "round: functions": 60,
    "round: files": 12,
    "suite A2: functions": 350,
    "suite A2: files": 60,
}
JOBS = {
    "run": ("run", "--set", "federation.rounds=2"),
    "suite A2": ("suite", "A2", "--scale", "small"),
}
# Runs `fedmuon` in a process of its own and writes what it called, and what each round called:
# [[file, line, name], ...].
TRACER = """
import json, runpy, sys, threading
rooms, out, sys.argv = json.loads(sys.argv[1]), sys.argv[2], ["fedmuon", *sys.argv[3:]]
called, rounds, running = set(), [], []
def watch(frame, event, _):
    code = frame.f_code
    if code.co_name == "_server_rounds" and event in ("call", "return"):
        running[:] = [set()] if event == "call" else []  # each `yield` of a round is a return
        rounds.extend(running)
    if event == "call":
        for functions in (called, *running):
            functions.add(code)
def product(functions):
    places = [(code.co_filename, code.co_firstlineno, code.co_qualname) for code in functions]
    return sorted(place for place in places if place[0].startswith(tuple(rooms)))
threading.setprofile(watch)
sys.setprofile(watch)
try:
    runpy.run_module("fedmuon", run_name="__main__")
finally:
    sys.setprofile(None)
    with open(out, "w") as file:
        json.dump([product(set(functions)) for functions in (called, *rounds)], file)
"""
Call = tuple[str, int, str]  # file, line and name of a function


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

    root: Path
    modules: dict[str, ast.Module]
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
    parser.add_argument("--at", metavar="REVISION", help="also count the files of this revision")
    options = parser.parse_args()
    columns = {}
    if options.at:
        with worktree(options.at) as root:
            older = read(root, files(root, *ROOMS))
            columns[options.at] = counts(older, {} if options.no_trace else traces(root))
    tree = read(ROOT, files(ROOT, *ROOMS))
    traced = {} if options.no_trace else traces(ROOT)
    columns["now"] = counts(tree, traced)
    print_counts(columns)
    if options.details:
        print_details(tree, traced)


def counts(tree: Tree, traced: Mapping[str, list[Call]]) -> dict[str, float]:
    """Return all counts of a tree, in the order in which they are printed."""
    root, modules = tree.root, tree.modules
    tests = files(root, "tests")
    loaded = closure(root, ROUNDS)
    bodies = [function.body for function in tree.functions]
    return {
        "lines": sum(tree.lines.values()),
        "code lines": lines_of_code(root, modules),
        "files": len(tree.lines),
        "functions": len(tree.functions),
        "classes": tree.classes,
        "median lines of a file": statistics.median(tree.lines.values()),
        "median lines of a function's body": statistics.median(bodies),
        "functions of 5 lines or less with one caller": len(one_caller(tree)),
        "files that share a name with another": sum(shared_names(tree).values()),
        "imports inside functions": len(tree.inside),
        "loose files in fedmuon/": sum(Path(name).parent == Path("fedmuon") for name in modules),
        "lines of tests": sum(length(root / name) for name in tests),
        "conditions in rounds.py": conditions(modules[ROUNDS]),
        "conditions in loop.py": conditions(modules[LOOP]),
        "code lines of rounds.py": lines_of_code(root, [ROUNDS]),
        "files that rounds.py loads": len(loaded),
        "code lines that rounds.py loads": lines_of_code(root, loaded),
        "files that chain.py loads": len(closure(root, CHAIN)),
        **{f"files that name {word}": len(naming(tree, word)) for word in FEATURES},
        "fields of Recipe": len(fields(modules[RECIPE], "Recipe")),
        "house words in the product, %": house_words(modules.values()),
        "house words in tests, %": house_words(parse(root, name) for name in tests),
        **counts_of_calls(tree, traced),
    }


def counts_of_calls(tree: Tree, traced: Mapping[str, list[Call]]) -> dict[str, float]:
    """Return the numbers of functions and files by job, and the house words in files of a run."""
    numbers: dict[str, float] = {}
    files_of = {job: {file for file, _, _ in calls} for job, calls in traced.items()}
    if "run" in traced:
        words = house_words(tree.modules[file] for file in files_of["run"])
        numbers["house words in the files of a run, %"] = words
    for job, calls in traced.items():
        numbers |= {f"{job}: functions": len(calls), f"{job}: files": len(files_of[job])}
    return numbers


def files(root: Path, *rooms: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *rooms]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    names = (name for name in listed.stdout.splitlines() if name.endswith(".py"))
    return sorted(name for name in names if (root / name).exists())


def length(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def lines_of_code(root: Path, names: Iterable[str]) -> int:
    return sum(code_lines((root / name).read_text(encoding="utf-8")) for name in names)


def naming(tree: Tree, feature: str) -> list[str]:
    """The files that name a feature."""
    return [name for name, parsed in tree.modules.items() if names_feature(parsed, feature)]


def read(root: Path, names: list[str]) -> Tree:
    tree = Tree(root, {}, {}, [], 0, [], {})
    for name in names:
        parsed = tree.modules[name] = parse(root, name)
        tree.lines[name] = length(root / name)
        for node in ast.walk(parsed):
            _add(tree, name, node)
        tree.inside += sorted(
            set(_imports(name, parsed)), key=lambda place: int(place.split(":")[1].split()[0])
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
    defined = Counter(function.name for function in tree.functions)
    exported = public(tree)
    functions = []
    for function in tree.functions:
        outside = [
            (file, line)
            for file, line in tree.mentions.get(function.name, [])
            if file != function.file or not function.line <= line <= function.last
        ]
        special = function.name.startswith("__") or function.name in exported
        short = function.body <= SHORT and function.plain and not special
        if short and defined[function.name] == 1 and len(outside) == 1:
            functions.append(function)
    return functions


def public(tree: Tree) -> set[str]:
    """The names in `fedmuon.__all__`."""
    for statement in tree.modules["fedmuon/__init__.py"].body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return set(ast.literal_eval(statement.value))
    return set()


def shared_names(tree: Tree) -> Counter[str]:
    names = Counter(Path(name).name for name in tree.lines)
    return Counter({name: n for name, n in names.items() if n > 1 and name not in TWICE})


def traces(root: Path) -> dict[str, list[Call]]:
    """The functions that each job calls, and those that one round of a run calls."""
    run, rounds = trace(root, JOBS["run"])
    suite, _ = trace(root, JOBS["suite A2"])
    return {"run": run, "round": rounds[1], "suite A2": suite}


def trace(root: Path, words: tuple[str, ...]) -> tuple[list[Call], list[list[Call]]]:
    """The functions that a command calls, without modules and class bodies, and those by round."""
    with tempfile.TemporaryDirectory(prefix="stats-") as folder:
        out = Path(folder, "called.json")
        rooms = json.dumps([f"{root / room}/" for room in ROOMS])
        command = [sys.executable, "-c", TRACER, rooms, str(out), *words, "--out", "out"]
        process = subprocess.run(
            command, cwd=folder, env=environment(root), capture_output=True, text=True
        )
        if not out.exists():
            raise RuntimeError(process.stderr)
        called, *rounds = ([*map(tuple, places)] for places in json.loads(out.read_text()))
    return functions_of(root, called), [functions_of(root, places) for places in rounds]


def functions_of(root: Path, called: Iterable[Call]) -> list[Call]:
    """The functions with a name among the code that ran."""
    inner = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
    functions = {
        (str(Path(file).relative_to(root)), line, name)
        for file, line, name in called
        if file.endswith(".py") and not name.endswith(inner)  # templates are called like Python
    }
    bodies = class_bodies(root, {file for file, _, _ in functions})
    return sorted(call for call in functions if call[:2] not in bodies)


def class_bodies(root: Path, names: set[str]) -> set[tuple[str, int]]:
    """Where the classes of these files begin: Python runs their bodies like functions."""
    return {
        (name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
        for name in names
        for node in ast.walk(parse(root, name))
        if isinstance(node, ast.ClassDef)
    }


def print_counts(columns: Mapping[str, Mapping[str, float]]) -> None:
    """Print one row for each count, and in the last column its target."""
    row = "{:<46}" + " {:>10}" * (len(columns) + 1)
    print(row.format("", *columns, "target"))
    for name in columns["now"]:
        values = [f"{column[name]:,}" for column in columns.values()]
        target = f"{TARGETS[name]:,}" if name in TARGETS else ""
        print(row.format(name, *values, target).rstrip())


def print_details(tree: Tree, traced: Mapping[str, list[Call]]) -> None:
    """Print the lists behind the counts."""
    alone = one_caller(tree)
    print_list("functions of 5 lines or less with one caller (body)", map(str, alone))
    print_list("file names that occur more than once", counted(shared_names(tree)))
    print_list("imports inside functions", tree.inside)
    largest = sorted(tree.functions, key=lambda function: -function.body)[:40]
    print_list("the longest functions (body)", map(str, largest))
    for file in (ROUNDS, CHAIN):
        print_list(f"files that {file} loads", closure(tree.root, file))
    for feature in FEATURES:
        print_list(f"files that name {feature}", naming(tree, feature))
    for job, calls in traced.items():
        print_list(f"functions by file: {job}", counted(Counter(file for file, _, _ in calls)))


def counted(numbers: Mapping[str, int]) -> Iterator[str]:
    return (f"{n:>5}  {name}" for name, n in Counter(numbers).most_common())


def print_list(title: str, lines: Iterator[str] | list[str]) -> None:
    lines = list(lines)
    print(f"\n{title}: {len(lines)}\n" + "\n".join(f"  {line}" for line in lines))


if __name__ == "__main__":
    main()
