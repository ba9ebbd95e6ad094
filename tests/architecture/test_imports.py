"""Which package may import which; importing is cheap and does no work."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import fedmuon

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("fedmuon", "clients", "server", "analysis", "experiments")  # installed in `fedmuon`
# A package imports only packages above it. `fedmuon/__init__.py` and `__main__.py` load the public
# names and the command when they are first used, and stand outside.
ORDER = (
    "fedmuon.core",  # errors, keyed draws, files, locks, threads, tables
    "fedmuon.orthogonalize",
    "fedmuon.data",
    "fedmuon.tasks",
    "fedmuon.config",
    "fedmuon.privacy",
    "fedmuon.optim",
    "fedmuon.federated",
    "fedmuon.runs",
    "fedmuon.clients",
    "fedmuon.server",
    "fedmuon.analysis",
    "fedmuon.experiments",
)
# The values that a key of the user's may have are declared by packages below, and read when needed.
LATE = {
    ("fedmuon.config.user_objects", "fedmuon.optim.aggregators"),
    ("fedmuon.config.user_objects", "fedmuon.optim.schedules"),
    ("fedmuon.config.user_objects", "fedmuon.runs.callbacks"),
}
ONLY_IN = {
    "flwr": ("clients/", "server/", "experiments/engines/"),
    "ray": ("server/ray/", "experiments/suites/suite.py", "experiments/engines/"),
    "matplotlib": ("analysis/report/style.py", "analysis/report/curves.py", "figure.py",
                   "experiments/results.py", "experiments/gap_result.py",
                   "experiments/studies/"),
    "typer": ("experiments/cli/",),
    "rich": ("experiments/",),
}  # fmt: skip


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(file: Path) -> set[str]:
    """The modules that a file names in its import statements, and those that they may mean."""
    found = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


FILES = sorted(file for top in TOPS for file in (ROOT / top).rglob("*.py"))
OUTSIDE = ("fedmuon", "fedmuon.__main__")


def name_of(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.split(".")[0] == "fedmuon" else f"fedmuon.{name}"


OURS = {name_of(file): file for file in FILES}


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def breaches(module: str, place: str, modules: set[str]) -> list[str]:
    """What a module may not import: packages below its own, a top-level name that is ours only in
    this source tree, and libraries that belong elsewhere."""
    rank = ORDER.index(package_of(module))
    wrong = [
        other
        for other in modules & OURS.keys() - {"fedmuon"}
        if ORDER.index(package_of(other)) > rank and (module, other) not in LATE
    ]
    wrong += [other for other in modules if other.split(".")[0] in TOPS[1:]]
    roots = {other.split(".")[0] for other in modules}
    wrong += [
        root
        for root, homes in ONLY_IN.items()
        if root in roots and not any(place.startswith(h) or place.endswith(h) for h in homes)
    ]
    return sorted(wrong)


def test_a_package_imports_only_packages_above_it() -> None:
    wrong = {
        module: breaches(module, file.relative_to(ROOT).as_posix(), imports(file))
        for module, file in OURS.items() if module not in OUTSIDE
    }  # fmt: skip
    assert not any(wrong.values()), {module: names for module, names in wrong.items() if names}


def test_a_breach_is_seen() -> None:
    matrix = "fedmuon.tasks.matrix", "fedmuon/tasks/matrix.py"
    assert breaches(*matrix, {"flwr.app"}) == ["flwr"]
    assert breaches(*matrix, {"fedmuon.optim.chain"}) == ["fedmuon.optim.chain"]
    assert breaches(*matrix, {"server.strategy"}) == ["server.strategy"]
    client = "fedmuon.clients.client_app", "clients/client_app.py"
    assert breaches(*client, {"fedmuon.server.strategy"}) == ["fedmuon.server.strategy"]
    bound = "fedmuon.analysis.bound", "analysis/bound.py"
    assert breaches(*bound, {"matplotlib.pyplot"}) == ["matplotlib"]


def test_every_package_has_its_place_and_its_own_folder() -> None:
    assert {*map(package_of, OURS)} == {*ORDER, *OUTSIDE}
    loose = {file.name for file in (ROOT / "fedmuon").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py"}


def test_the_core_has_no_circles() -> None:
    require_no_circle({name: imports(OURS[name]) for name in OURS.keys() - {*OUTSIDE}})


def require_no_circle(graph: dict[str, set[str]]) -> None:
    left = dict(graph)
    while free := [one for one, needed in left.items() if not needed & set(left)]:
        left = {one: needed for one, needed in left.items() if one not in free}
    assert not left, f"circle among {sorted(left)}"


@cache
def loaded(code: str) -> set[str]:
    """The modules that a process has loaded after that, even if it exits."""
    code = f"import sys\ntry:\n    {code}\nfinally:\n    print('\\n', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.PIPE
    )
    return set(done.stdout.decode().splitlines()[-1].split())


WITH_TORCH = "import fedmuon.experiments.cli.show, fedmuon.experiments.run"


@pytest.mark.slow
def test_importing_the_core_loads_no_engine() -> None:
    found = loaded(WITH_TORCH)
    assert {"torch", "fedmuon.federated.build", "fedmuon.experiments.cli"} <= found
    heavy = {"flwr", "ray", "matplotlib", "sklearn", "pandas", "mlxtend", "transformers"}
    assert not heavy & found


def folder_of(module: str) -> str:
    """What a reader sees as one: a package, or a folder of analysis and experiments."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["analysis"], ["experiments"]) else 2])


def package_graph() -> dict[str, set[str]]:
    """Package -> those that it needs when it is imported."""
    graph: dict[str, set[str]] = {}
    for name, file in OURS.items():
        here = folder_of(name)
        for node in parsed(file).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                meant = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                needed = {folder_of(module) for module in meant & OURS.keys()}
                graph.setdefault(here, set()).update(needed - {here, "fedmuon"})
    return graph


def test_packages_have_no_circles() -> None:
    graph = package_graph()
    assert len(graph) > 15 and "fedmuon.tasks" in graph["fedmuon.optim"]
    require_no_circle(graph)
    with pytest.raises(AssertionError, match="circle"):  # the control
        require_no_circle({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize(("code", "heavy"), [
    ("import fedmuon", "numpy pydantic torch typer rich"),
    ("import fedmuon.experiments.cli", "numpy pydantic torch scipy jinja2"),
    ("import fedmuon.config.load, fedmuon.runs.directory", "numpy torch scipy"),
    ("import fedmuon.analysis", "numpy"),
    pytest.param(WITH_TORCH, "scipy flwr pandas", marks=pytest.mark.slow),
    ("import fedmuon.experiments.cli.show, fedmuon.experiments.results", "torch scipy matplotlib"),
    ("import fedmuon.clients.client_app", "torch scipy"),
])  # fmt: skip
def test_what_is_not_needed_is_not_loaded(code: str, heavy: str) -> None:
    """Before help is shown, and before a run begins, nobody should wait for it."""
    assert not set(heavy.split()) & loaded(code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run."""
    folder = tmp_path_factory.mktemp("runs")
    data = {"name": "synthetic", "train": 40, "test": 20}
    fedmuon.run({"data": data, "federation": {"clients": 2, "rounds": 2}}, out=folder / "a")
    return folder


@pytest.mark.parametrize(("arguments", "needed"), [
    (["show", "{runs}/a"], "pydantic fedmuon.experiments.inspect.status"),
    (["ls", "{runs}"], "pydantic fedmuon.experiments.inspect.listing"),
    (["compare", "{runs}/a", "{runs}/a"], "pydantic fedmuon.experiments.results"),
    (["show", "--help"], "rich fedmuon.experiments.cli.look"),
    (["list", "recipes"], "rich fedmuon.experiments.cli.keys"),
])  # fmt: skip
def test_a_command_loads_only_what_it_needs(
    finished: Path, arguments: list[str], needed: str
) -> None:
    """Commands that print numbers from files load no arrays, and not the files of the others."""
    words = [one.format(runs=finished) for one in arguments]
    found = loaded(f"from fedmuon.experiments.cli import main; main({words!r})")
    assert set(needed.split()) <= found
    heavy = {"numpy", "torch", "scipy", "matplotlib", "pandas", "ray", "flwr", "sklearn"}
    heavy |= {f"fedmuon.experiments.cli.{name}" for name in ("theory", "privacy", "runs")}
    assert not heavy & found
    assert ("pydantic" in found) == ("pydantic" in needed)


def test_the_help_names_every_command() -> None:
    """The files of all commands are loaded to show it; a wrong place in the table would fail."""
    found = loaded("from fedmuon.experiments.cli import main; main(['--help'])")
    files = (ROOT / "experiments/cli").glob("*.py")
    assert {f"fedmuon.experiments.cli.{file.stem}" for file in files} - found == {
        "fedmuon.experiments.cli.__init__"
    }
    assert not {"pydantic", "torch", "scipy"} & found
