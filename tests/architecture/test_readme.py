"""What README and docs tell people to type does what they say."""

import copy
import functools
import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fedmuon.config.load import parse
from fedmuon.experiments import step_flops
from fedmuon.experiments.cli import main
from fedmuon.experiments.suites import contents

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {
    "--engine ray": "tests/fedmuon/federated/test_engines_agree.py",
    "--engine deployment": "tests/experiments/engines/test_deployment.py",
    "fedmuon plan": "tests/experiments/planning/test_plan.py",
    "flwr run": "tests/fedmuon/config/test_config.py",
    "books.toml": "tests/architecture/test_language_tutorial.py",
    "runs/books": "tests/architecture/test_language_tutorial.py",
    "suite language-models": "tests/experiments/studies/test_language_models.py",
}
# What takes a second or more is typed by `make test-all`, unless the README has it.
LONG = (
    "fedmuon suite", "fedmuon doctor", "privacy audit", "--worst", "--all", "name=network",
    "level=client", "runs/k", "runs/s ", "privacy sigma", "--one-run", "fedmuon sweep", "--seeds",
    "--max-lot", "balls-in-bins", "compression.", "runs/whole", "fedmuon tune", "mode=fedbuff",
    "mode=synchronous", "select=", "report runs", "--band", "--population 42043",
    "runs/clock", "runs/first", "runs/late", "mode=deadline", "runs/useful", "--resume",
)  # fmt: skip


@functools.cache
def blocks(language: str) -> list[tuple[Path, str]]:
    """The fenced blocks of that language, in the order of the pages."""
    marked = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page, block) for page in PAGES for block in marked.findall(page.read_text("utf-8"))]


def typed(shells: Iterable[str]) -> list[str]:
    """The lines of blocks, each once, without its comment."""
    lines = [line for block in shells for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in lines))


def imported(block: str) -> set[str]:
    """The names of the packages that a block of Python imports."""
    names = re.findall(r"^(?:from|import) ([\w., ]+)", block, re.MULTILINE)
    return {name.strip().partition(".")[0] for line in names for name in line.split(",")}


def test_pages_install_the_packages_that_their_code_imports() -> None:
    """Pages whose code imports a package that fedmuon does not require tell how to install it."""
    optional = {"accelerate", "lightning", "peft", "transformers"}
    needed: dict[Path, set[str]] = {}
    for page, block in blocks("python"):
        needed.setdefault(page, set()).update(optional & {
            word.partition(" ")[0] for word in imported(block)
        })  # fmt: skip
    assert set().union(*needed.values()) == optional
    for page, packages in needed.items():
        commands = " ".join(re.findall(r"`pip install ([^`]*)`", page.read_text("utf-8")))
        words = {*commands.split()} | ({"transformers"} if "'.[l" in commands else set())
        assert packages <= words, f"{page} does not say how to install {packages - words}"


def test_the_first_pages_lead_to_language_models() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "start" / "index.md"):
        assert "tutorials/language-model.md)" in page.read_text("utf-8"), page


@functools.cache
def lines() -> list[str]:
    return typed(block for _, block in blocks("sh"))


@functools.cache
def commands() -> list[str]:
    return [
        line
        for line in lines()
        if line.startswith("fedmuon ") and not any(other in line for other in ELSEWHERE)
    ]


@functools.cache
def written(command: str) -> str | None:
    words = shlex.split(command)
    return words[words.index("--out") + 1] if "--out" in words and "--resume" not in words else None


def read(command: str) -> list[str]:
    """The folders, made by other commands, that a command goes on with or reads."""
    words, out = shlex.split(command), written(command)
    return [folder for folder in map(written, commands()) if folder in words and folder != out]


def one_rate_each(at: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The content of a suite, but without tuning: of each method's step sizes only the first.

    A suite of ten tuned methods takes minutes; `test_certified_networks.py` and its like tune.
    """

    def content(*given: Any) -> dict[str, Any]:
        tables = copy.deepcopy(at(*given))
        for model in tables.get("models", {}).values():
            for method in model.get("methods", {}).values():
                method.update({key: method[key][:1] for key in ("lrs",) if key in method})
        return tables

    return content


class Reader:
    """Types the commands in a folder of its own, and before each what it needs, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: set[str] = set()
        for _, block in blocks("toml"):
            if named := re.match(r"# ([\w-]+\.toml)\n", block):
                (folder / named[1]).write_text(block, encoding="utf-8")

    def types(self, command: str) -> None:
        """Run a command, unless it already ran for the sake of another."""
        if command in self._done:
            return
        needed = read(command)
        for other in commands():
            if written(other) in needed:
                self.types(other)
        if "report runs" in command:  # a page of what is there
            self.types("fedmuon suite dp-muon-printed --out runs/printed")
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command)[1:])
        assert ended.value.code == 0, command
        self._done.add(command)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("readme"))


IN_README = typed(block for page, block in blocks("sh") if page.name == "README.md")


def layer(command: str) -> list[pytest.MarkDecorator]:
    long = any(words in command for words in LONG) and command not in IN_README
    return [pytest.mark.slow, pytest.mark.timeout(900)] if long else []


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=layer(one), id=one[8:88]) for one in commands()]
)
def test_a_command_runs(command: str, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader.folder)
    monkeypatch.setattr(contents, "at", one_rate_each(contents.at))
    reader.types(command)
    if "report runs" in command:
        assert (reader.folder / "runs" / "report.html").exists()


def test_the_commands_are_found() -> None:
    made = [out for one in commands() if (out := written(one))]
    assert len(commands()) >= 30 and len(set(made)) == len(made)
    resumed = [read(one) for one in commands() if "--resume" in one]
    assert ["runs/a"] in resumed and ["runs/mine"] in resumed and read("fedmuon doctor") == []
    assert read(next(one for one in commands() if "bound runs/s" in one)) == ["runs/s"]


@pytest.mark.parametrize("line", [one for one in lines() if one not in commands()])
def test_what_is_not_typed_here_is_there(line: str) -> None:
    """A target of make, a module of ours, or a line that another test types."""
    first, *words = shlex.split(line)
    if first == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    elif first == "python":
        assert words[0] == "-m" and importlib.util.find_spec(words[1])
    else:
        tests = [test for words, test in ELSEWHERE.items() if words in line]
        assert tests and (ROOT / tests[0]).exists()


LOOPS = ("transformers", "accelerate", "lightning", "torch.distributed")  # which warn


def marks(block: str) -> list[pytest.MarkDecorator]:
    warns = any(words in block for words in LOOPS)
    ignored = [pytest.mark.filterwarnings("ignore")] * warns
    return [*ignored, *[pytest.mark.slow] * slow(block)]


def slow(block: str) -> bool:
    """Whether Python code trains a network or starts Flower or Ray, or takes a second."""
    long = (
        "flwr",
        "Conv2d(",
        "Transformer",
        "shared_ray",
        "fedmuon.sweep(",
        "fedmuon.audit(",
        "result.plot(",
        *LOOPS,
    )
    return any(words in block for words in long)


@pytest.mark.parametrize("block", [
    pytest.param(text, id=f"{page.stem}-{k}", marks=marks(text))
    for k, (page, text) in enumerate(blocks("python"))
])  # fmt: skip
def test_python_lines_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # files that it writes lie there
    exec(block, {})


@pytest.mark.parametrize(
    "block", [pytest.param(text, id=f"{page.stem}-{k}")
              for k, (page, text) in enumerate(blocks("toml"))]
)  # fmt: skip
def test_toml_is_a_config_or_a_suite(block: str) -> None:
    content = tomllib.loads(block)
    if "kind" not in content:  # which the command that names it runs
        parse(content)


def test_every_language_is_looked_at() -> None:
    """So no block is there that nothing runs; what is included is run as an example."""
    texts = "\n".join(page.read_text("utf-8") for page in PAGES)
    fences = set(re.findall(r"^```(\S[^\n]*)$", texts, re.MULTILINE))
    included = {one for one in fences if one.startswith("{literalinclude} ../../")}
    known = {"sh", "python", "toml", "{toctree}", "{eval-rst}", "{glossary}"}
    known |= {"{code-cell} python"}  # test_notebooks.py runs these
    assert fences - included <= known
    for one in included:
        assert (ROOT / one.removeprefix("{literalinclude} ../../")).exists()


# What the README found in the papers Nesterov Muon and Newton–Schulz convergence, computed.


def found_row(start: str) -> str:
    """The row of the table "What it found" that begins with these words."""
    (row,) = [one for one in PAGES[0].read_text("utf-8").splitlines() if one.startswith(start)]
    return row


def test_the_costs_of_table_2_fit_another_number_of_parameters() -> None:
    row = found_row("| Nesterov Muon, Table 2: cost of a step |")
    rows = [one for model in ("nanogpt", "airbench") for one in step_flops.beside_table_2(model)]
    assert len(rows) == 14 and all(abs(one["difference"]) < 6e-5 for one in rows)
    assert "all 14 reproduced to four decimals" in row
    # AdamW takes 14 operations per parameter, and SGD with Nesterov momentum 6, by their updates.
    for printed, each in ((7.2621, 14), (3.1123, 6)):
        assert f"{printed * 1e9 / each / 1e6:.1f}M" == "518.7M" and "518.7M" in row
        assert printed > 3.8 * 135e6 * each / 1e9  # the control: 135M do not fit


def test_one_published_row_falls_by_equal_amounts() -> None:
    row = found_row("| Newton–Schulz convergence, Table G.6: losses of Muon with SVD |")
    text = (ROOT / "experiments/studies/wall_clock.toml").read_text(encoding="utf-8")
    straight = []
    for name, table in tomllib.loads(text, parse_float=Decimal)["tables"].items():
        for method, losses in table.items():
            falls = {before - after for before, after in itertools.pairwise(losses)}
            if method != "seconds" and len(falls) == 1:
                straight.append((name.split()[0], method, len(losses), *falls, *losses[::5]))
    assert straight == [("G.6", "svd", 6, *map(Decimal, ("0.1470", "8.2280", "7.4930")))]
    assert all(one in row for one in ("0.1470", "8.2280", "7.4930", "six"))


def test_the_third_contribution_is_shown_by_its_test() -> None:
    row = found_row("| Newton–Schulz convergence, third contribution |")
    (file,) = re.findall(r"`(tests/\S+\.py)`", row)
    assert "def test_the_third_contribution" in (ROOT / file).read_text(encoding="utf-8")


def test_one_pair_of_step_sizes_and_accuracies_on_all_pages() -> None:
    """README, first run and the page on step sizes agree; test_notebooks.py runs the first run."""
    readme = PAGES[0].read_text("utf-8")
    first = (ROOT / "docs" / "start" / "first-run.md").read_text("utf-8")
    choose = (ROOT / "docs" / "choose" / "index.md").read_text("utf-8")
    (shown,) = re.findall(r"# accuracy (\S+) and (\S+), each at the best lr of a grid", readme)
    rates = []
    for recipe, method, accuracy in (
        ("fedmuon", "FedMuon", shown[0]),
        ("fedavg", "FedAvg", shown[1]),
    ):
        pattern = rf'"recipe": "{recipe}".*?"lr": ([\d.]+)'
        (rate,), (again,) = re.findall(pattern, readme), re.findall(pattern, first)
        table = re.search(rf"\| {method}[^|]*\|(.*)\|\n.*\n\| accuracy \|(.*)\|", choose)
        assert table is not None
        grid, found = ([cell.strip(" *`lr") for cell in one.split("|")] for one in table.groups())
        best = max(range(len(found)), key=lambda place: float(found[place]))
        assert 0 < best < len(found) - 1  # inside the grid
        assert (grid[best], found[best]) == (rate, accuracy) and again == rate
        rates.append(rate)
    assert rates[0] != rates[1]  # a rate of one method is no rate of the other
