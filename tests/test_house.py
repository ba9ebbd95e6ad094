"""Who may import whom; and importing is cheap and does no work."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fedmuon", "clients", "server", "analysis", "experiments")  # `fedmuon` holds the others
MAY_IMPORT = {
    "fedmuon": set(),
    "clients": {"fedmuon"},
    "server": {"fedmuon"},
    "analysis": {"fedmuon"},
    "experiments": {"fedmuon", "clients", "server", "analysis"},
}
ONLY_IN = {
    "flwr": ("clients/", "server/", "experiments/engines/"),
    "ray": (
        "server/grid.py",
        "server/crew.py",
        "experiments/suites/sweep.py",
        "experiments/engines/",
    ),
    "matplotlib": ("analysis/report/style.py", "figure.py"),
    "typer": ("experiments/cli/",),
    "rich": ("experiments/",),
}


# These load the other rooms when they are called.
LATE = (
    "fedmuon/library.py",
    "fedmuon/results.py",
    "fedmuon/__init__.py",
    "fedmuon/__main__.py",
    "fedmuon/flower.py",
)


@cache
def parsed(file: Path) -> ast.Module:
    """What a file says."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(file: Path) -> set[str]:
    """The modules that a file names in its import statements, and those that they may mean."""
    found, tree = set(), parsed(file)
    late = file.relative_to(ROOT).as_posix() in LATE
    for node in [one for part in tree.body for one in ([part] if late else ast.walk(part))]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room_of(module: str) -> str:
    """Which of the rooms a module of ours lies in; for others, the package."""
    first, _, rest = module.partition(".")
    second = rest.split(".")[0]
    return second if first == "fedmuon" and second in ROOMS else first


def breaches(place: str, modules: set[str]) -> list[str]:
    """What a file at `place` may not import."""
    room, roots = place.split("/")[0], {room_of(module) for module in modules}
    wrong = [module for module in modules if module.split(".")[0] in ROOMS[1:]]
    wrong += [root for root in roots & set(ROOMS) - {room} if root not in MAY_IMPORT[room]]
    wrong += [
        root
        for root, homes in ONLY_IN.items()
        if root in roots and not any(place.startswith(h) or place.endswith(h) for h in homes)
    ]
    return sorted(wrong)


FILES = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_stay_within_the_house(file: Path) -> None:
    assert breaches(file.relative_to(ROOT).as_posix(), imports(file)) == []


def name_of(file: Path) -> str:
    """The module that a file is, when installed."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.split(".")[0] == "fedmuon" else f"fedmuon.{name}"


def test_a_breach_is_seen() -> None:
    assert breaches("fedmuon/tasks/matrix.py", {"flwr.app"}) == ["flwr"]
    assert breaches("clients/client_app.py", {"fedmuon.server.strategy"}) == ["server"]
    assert breaches("analysis/bound.py", {"matplotlib.pyplot"}) == ["matplotlib"]


def test_the_core_has_no_circles() -> None:
    graph = {}
    for file in FILES:
        graph[name_of(file)] = imports(file)
    modules = set(graph)
    seen: dict[str, str] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert seen.get(name) != "open", f"circle: {' -> '.join((*path, name))}"
        if name in seen:
            return
        seen[name] = "open"
        for other in sorted(graph[name] & modules):
            visit(other, (*path, name))
        seen[name] = "done"

    for name in sorted(modules):
        visit(name, ())


@cache
def loaded(code: str) -> set[str]:
    """The modules that a process has loaded after that."""
    code = f"import sys; {code}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.PIPE
    )
    return set(done.stdout.decode().split())


WITH_TORCH = "import fedmuon.experiments.cli.show, fedmuon.experiments.run"


@pytest.mark.slow
def test_importing_the_core_loads_no_engine() -> None:
    found = loaded(WITH_TORCH)
    assert {"torch", "fedmuon.federated.setup", "fedmuon.experiments.cli"} <= found
    heavy = {"flwr", "ray", "matplotlib", "sklearn", "pandas", "mlxtend", "transformers"}
    assert not heavy & found


def package_of(module: str) -> str:
    """What a reader sees as one: a package or module of the library, a folder of another room."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["analysis"], ["experiments"]) else 2])


def package_graph() -> dict[str, set[str]]:
    """Package -> those that it needs when it is imported."""
    graph: dict[str, set[str]] = {}
    names = {name_of(file): file for file in FILES}
    for name, file in names.items():
        here = package_of(name)
        for node in parsed(file).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                meant = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                needed = {package_of(one) for one in meant & set(names)}
                graph.setdefault(here, set()).update(needed - {here, "fedmuon"})
    return graph


def test_packages_have_no_circles() -> None:
    graph = package_graph()
    assert len(graph) > 20 and "fedmuon.tasks" in graph["fedmuon.transforms"]
    left = dict(graph)
    while free := [one for one, needed in left.items() if not needed & set(left)]:
        left = {one: needed for one, needed in left.items() if one not in free}
    assert not left, f"circle among {sorted(left)}"


@pytest.mark.parametrize(("code", "heavy"), [
    ("import fedmuon", "numpy pydantic torch typer rich"),
    ("import fedmuon.experiments.cli", "numpy pydantic torch"),
    pytest.param(WITH_TORCH, "scipy flwr pandas", marks=pytest.mark.slow),
    ("import fedmuon.clients.client_app", "torch scipy"),
])  # fmt: skip
def test_what_is_not_needed_is_not_loaded(code: str, heavy: str) -> None:
    """Before help is shown, and before a run begins, nobody should wait for it."""
    assert not set(heavy.split()) & loaded(code)
