"""Who may import whom; and importing is cheap and does no work."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fedmuon", "clients", "server", "analysis", "experiments")
MAY_IMPORT = {
    "fedmuon": set(),
    "clients": {"fedmuon"},
    "server": {"fedmuon"},
    "analysis": {"fedmuon"},
    "experiments": {"fedmuon", "clients", "server", "analysis"},
}
ONLY_IN = {
    "flwr": ("clients", "server", "experiments"),
    "ray": ("experiments/sweep.py", "experiments/ray_cluster.py"),
    "matplotlib": ("analysis/figures",),
    "typer": ("experiments/cli/",),
    "rich": ("experiments",),
}


def imports(file: Path) -> set[str]:
    """The modules that a file names in its import statements."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def breaches(place: str, modules: set[str]) -> list[str]:
    """What a file at `place` may not import."""
    room, roots = place.split("/")[0], {module.split(".")[0] for module in modules}
    wrong = [root for root in roots & set(ROOMS) - {room} if root not in MAY_IMPORT[room]]
    wrong += [
        root
        for root, homes in ONLY_IN.items()
        if root in roots and not any(place.startswith(home) for home in homes)
    ]
    return wrong


FILES = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_stay_within_the_house(file: Path) -> None:
    assert breaches(file.relative_to(ROOT).as_posix(), imports(file)) == []


def test_a_breach_is_seen() -> None:
    assert breaches("fedmuon/tasks/matrix.py", {"flwr.app"}) == ["flwr"]
    assert breaches("clients/client_app.py", {"server.strategy"}) == ["server"]
    assert breaches("analysis/bound.py", {"matplotlib.pyplot"}) == ["matplotlib"]


def test_the_core_has_no_circles() -> None:
    graph = {}
    for file in FILES:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = imports(file)
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


def test_importing_the_core_loads_no_engine() -> None:
    code = (
        "import sys, fedmuon.federated.setup, experiments.cli;"
        "heavy = {'flwr', 'ray', 'matplotlib', 'sklearn', 'pandas', 'mlxtend', 'transformers'};"
        "heavy &= set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
