"""The report: complete, self-contained, escaped, refused when damaged, and fit for a telephone."""

import io
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import small
from made_suite import made, phase_grid, summed, write
from rich.console import Console

import fedmuon
from fedmuon.analysis.report.claims import suite_claims
from fedmuon.config.load import Config, nested
from fedmuon.core.errors import InputError
from fedmuon.experiments.report import gather, suite_tables, write_report
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability.neighbours import execute, verdict_table

VOID = {"meta", "source", "img", "br", "link"}


class Page(HTMLParser):
    """Text, tags and addresses of a page; open tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags, self.addresses = [], [], []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [] if tag in VOID else [tag]
        named = ("src", "href", "srcset")
        self.addresses += [value or "" for name, value in attrs if name in named]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += [data] if self.open[-1:] != ["style"] else []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite with its report."""
    folder = write(tmp_path_factory.mktemp("suite") / "A1", *phase_grid())
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real census, without a report."""
    folder = tmp_path_factory.mktemp("run") / "census"
    execute(small(stability={"neighbours": "all"}), folder)
    return folder


def test_the_verdict_comes_first_and_every_claim_is_there(suite: Path) -> None:
    page = read(suite / "report.html")
    claims = suite_claims(*phase_grid())
    assert page.text.count("6 of 6 claims hold on fashion-mnist") == 2  # title and verdict
    places = [page.text.index(claim.sentence) for claim in claims]
    assert places == sorted(places)
    assert all(" ".join(claim.detail.split()) in page.text for claim in claims)
    assert page.text.count("✓ holds") == 8 and "✗" not in page.text
    assert (
        page.text.index("claims hold")
        < places[0]
        < page.text.index("Measured and published values")
    )
    assert page.tags.count("img") == 2 and page.tags.count("figcaption") == 2


def test_it_says_what_it_stands_on_and_what_is_comparable(suite: Path) -> None:
    text = read(suite / "report.html").text
    runs, _ = phase_grid()
    for words in (
        "The published line is of MNIST", "0.05061", "1.18e−05", "Every loss lies in [0, B].",
        "certified", "C_hp = the explicit form, which is proved", "sharp Lipschitz", "δ = 0.05",
        "torch 2.13", "52.8", "41%", "small", "fedmuon suite A1 --data fashion-mnist",
        f"{runs['bound'].mean():.4g}",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_models_near_chance_are_told_beside_the_verdicts(tmp_path: Path) -> None:
    """On the page, before the first verdict, and in the terminal; nothing of models that learned,
    and of suites that did not say how many classes they have."""
    runs, neighbours = phase_grid()
    for accuracy, about, near in (
        (0.1, {"guess": [10, 5000]}, True), (0.6, {"guess": [10, 5000]}, False), (0.1, {}, False)
    ):  # fmt: skip
        table = {**runs, "accuracy": np.full(len(runs["n"]), accuracy)}
        folder = write(tmp_path / f"{accuracy}-{len(about)}", table, neighbours, **about)
        text = write_report(folder).read_text(encoding="utf-8")
        assert ("near chance" in text) == near
        assert not near or text.index("near chance") < text.index("Verdicts")
        console = Console(width=200, file=io.StringIO())
        console.print(*suite_tables(*gather(folder)))
        assert isinstance(console.file, io.StringIO)
        assert ("Every run ended near chance" in console.file.getvalue()) == near


@pytest.mark.usefixtures("undrawn")
def test_a_failed_claim_is_said_in_words(tmp_path: Path) -> None:
    runs, neighbours = made()
    for name, value in (("gap", 9.0), ("gap_low", 8.9), ("gap_high", 9.1)):
        runs[name][0] = value
    runs["within"] = np.array(["False", "True"])
    text = read(write_report(write(tmp_path / "a", runs, neighbours))).text
    assert "1 of 2 claims holds on fashion-mnist; 1 is refuted" in text and "✗ refuted" in text
    runs["bound"][:] = np.nan
    text = read(write_report(write(tmp_path / "b", runs, neighbours))).text
    assert "1 is inconclusive" in text and "? inconclusive" in text


def test_the_page_needs_nothing_else(suite: Path) -> None:
    page, kept = read(suite / "report.html"), ("data:image/svg+xml;base64,", "#")
    assert page.addresses and "script" not in page.tags and "link" not in page.tags
    assert all(address.startswith(kept) for address in page.addresses)
    text = (suite / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", text) and "prefers-color-scheme" in text
    assert 'name="viewport"' in text


@pytest.mark.slow
def test_figures_lie_beside_it_and_all_bytes_repeat(suite: Path, tmp_path: Path) -> None:
    held = {file.name for file in (suite / "figures").iterdir()}
    assert held == {"phase.pdf", "phase.png", "gap.pdf", "gap.png"}
    again = write_report(write(tmp_path / "A1", *phase_grid()))
    assert again.read_bytes() == (suite / "report.html").read_bytes()
    assert not [file for file in suite.iterdir() if file.name.startswith(".")]  # no half files


@pytest.mark.parametrize(("levels", "names"), [
    ({"n": [500, 1000]}, {"scaling-n", "gap"}),
    ({"lambda": [0.01, 0.1]}, {"scaling-lambda", "gap"}),
    ({"lr": [0.01, 0.1], "alpha": [0.1, 0.5]}, {"scaling-lr", "exposure", "gap"}),
])  # fmt: skip
def test_what_varies_decides_the_figures(levels: dict, names: set[str], tmp_path: Path) -> None:
    folder = write(tmp_path / "own", *made(**levels), published=None, note="")
    (part,) = gather(folder)
    assert {picture.name for picture in part.pictures} == names
    assert all(picture.draw(True).axes and picture.caption for picture in part.pictures)
    assert part.numbers_title == "Measured" and part.head == ("", "measured") and not part.note


@pytest.mark.usefixtures("undrawn")
def test_all_text_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"&"
    names = ("suite", "data", "title", "note", "status", "constant", "again", "told")
    about = dict.fromkeys(names, evil)
    folder = write(tmp_path / "a", *made(), **about, assumptions=[evil], versions={evil: evil})
    page = read(write_report(folder))
    assert "script" not in page.tags and evil in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_census(census: Path) -> None:
    page = read(write_report(census))
    record = json.loads((census / "bound.json").read_text())
    assert "census of all 90 neighbours" in page.text and "4 claims" in page.text
    assert f"{record['value']:.4g}" in page.text and record["assumptions"][0] in page.text
    assert {file.name for file in (census / "figures").iterdir()} == {"census.pdf", "census.png"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("dtype", "wide"), [("float32", True), ("float64", False)])
def test_a_gap_of_range_one_says_why_and_by_what_it_is_decided(
    dtype: str, wide: bool, tmp_path: Path
) -> None:
    record = execute(lean(dtype, 60), tmp_path / "a")
    console = Console(width=400, file=io.StringIO())
    console.print(verdict_table(tmp_path / "a", record))
    terminal = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (terminal, read(write_report(tmp_path / "a")).text):
        assert ("uses the range 1" in text and "set engine.dtype=float64" in text) == wide
    decided = {**record, "gap_high": record["value"]}  # then nobody asks for a shorter one
    console.print(verdict_table(tmp_path / "a", decided))
    assert console.file.getvalue().count("why so wide") == wide  # type: ignore[attr-defined]
    assert (record["gap_high"] - record["gap_low"] > 0.3) == wide


def lean(dtype: str, test: int, **tables: dict) -> Config:
    """A run whose gap has the range of a ball in float64, with so many samples held out."""
    tables = {"data": {"test": test}, "local": {"lr": 0.01}, "stability": {"trials": 3}} | tables
    return small(engine={"dtype": dtype}, **tables)


@pytest.mark.parametrize(("test", "decides"), [(60, False), (150, True)])
def test_a_command_is_named_where_it_decides(test: int, decides: bool, tmp_path: Path) -> None:
    records, found = {}, {}
    for dtype in ("float32", "float64"):
        records[dtype] = execute(lean(dtype, test), tmp_path / dtype)
        found[dtype] = gather(tmp_path / dtype)[0].claims[0]
    first, second = found.values()
    words = "fedmuon stability float32/config.toml --set engine.dtype=float64"
    command = f"{words} --out float32-shorter"
    assert first.holds is None and (second.holds is not None) == decides
    assert first.command == (command if decides else "") and not second.command
    assert first.also.endswith("may not decide the claim.") != decides
    assert records["float32"]["gap_then"] == [second.verdict] and not records["float64"]["gap_then"]
    assert "may not decide" not in second.also


@pytest.mark.parametrize(("test", "decides"), [(60, False), (130, True)])
def test_objects_handed_over_are_run_again_in_python(
    test: int, decides: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal((90 + test, 7)), rng.integers(0, 3, 90 + test)
    tables = nested(lean("float32", test))
    tables["data"] = {"train": 90, "test": test, "minimum": 5}
    fedmuon.stability(tables, data=data, out=tmp_path / "own")
    (found,) = gather(tmp_path / "own")
    call = "fedmuon.stability('own/config.toml', ..., out='own-again')"
    assert found.again == f"{call} in Python, with its objects"
    command = found.again.replace("again", "shorter") + " and engine.dtype=float64"
    assert found.claims[0].holds is None
    assert found.claims[0].command == (command if decides else "")
    fedmuon.stability(tmp_path / "own" / "config.toml", data=data, out=tmp_path / "own-again")


@pytest.mark.parametrize(("then", "decides"), [
    (["holds"], True), (["refuted"], True), (["holds", "inconclusive"], False),
    (["refuted", "inconclusive"], False), ([], False), (["holds", "not tested here"], True),
    (["not tested here"], False),
])  # fmt: skip
def test_a_suite_names_a_change_where_its_runs_would_decide(
    then: list[str], decides: bool, tmp_path: Path
) -> None:
    """All hold, or all fail, as one of many may by chance; at small scale a larger one is to be
    made, with the change in any case."""
    said = {"gap_notes": ["so wide."], "gap_changes": ["engine.dtype=float64"], "gap_then": then}
    runs, neighbours = phase_grid()
    runs["gap_high"] = runs["bound"] + 0.1
    for scale, end in (("small", "full"), ("full", "shorter")):
        again = f"fedmuon suite A1 --data fashion-mnist --scale {scale}"
        folder = write(tmp_path / scale, runs, neighbours, **said, scale=scale, again=again)
        of_gap, *others = gather(folder)[0].claims
        named = decides or scale == "small"
        assert of_gap.verdict == "inconclusive" and "so wide." in of_gap.also
        assert of_gap.command == named * (
            "fedmuon suite A1 --data fashion-mnist --scale full --set engine.dtype=float64 "
            f"--out runs/A1-{end}"
        )
        assert ("may not decide" in of_gap.also) != decides
        assert ("no built-in suite can decide this claim" in of_gap.also) != named
        assert not any("so wide" in one.also or "dtype" in one.command for one in others)


@pytest.mark.usefixtures("undrawn")
def test_a_refused_bound(tmp_path: Path) -> None:
    execute(small(local={"recipe": "adamw"}, stability={"trials": 3}), tmp_path / "a")
    text = read(write_report(tmp_path / "a")).text
    assert "0 of 3 claims hold on synthetic; 3 are not tested here" in text
    assert "No bound:" in text and "Recipe adamw" in text and "3 random neighbours" in text


@pytest.mark.usefixtures("undrawn")
def test_many_folders_share_a_page(census: Path, tmp_path: Path) -> None:
    write(tmp_path / "A 1", *made(), title="First")
    write(tmp_path / "A-1", *made(), title="Second")
    shutil.copytree(census, tmp_path / "run")
    (tmp_path / "notes").mkdir()
    page = read(write_report(tmp_path))
    assert page.tags.count("h1") == 1 and page.tags.count("h2") == 3
    links = [link for link in page.addresses if link.startswith("#")]
    assert links == ["#part-0", "#part-1", "#part-2"]
    assert "First" in page.text and "Second" in page.text and "2 of 2 claims hold" in page.text
    for name in ("A 1/gap", "A-1/gap", "run/census"):
        assert (tmp_path / "figures" / f"{name}.pdf").exists()
    assert not (tmp_path / "A 1" / "figures").exists()
    assert len(gather(tmp_path)) == 3  # its own figures are no suite


def cut(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    """A damage that whoever did it also put into the sums: the tables must show it."""

    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
        summed(folder)

    return damage


def without_last_line(text: str) -> str:
    return text[: text.rindex("\n", 0, -1) + 1]


DAMAGES = {
    "a column is missing": (cut("runs.csv", lambda t: t.replace("gap_low", "low", 1)), "gap_low"),
    "cut within a line": (cut("neighbours.csv", lambda t: t[:-9]), "is truncated"),
    "cut within a row": (cut("runs.csv", lambda t: t[:-30] + "\n"), "is truncated in line"),
    "cut between lines": (cut("neighbours.csv", without_last_line), "not from the same experiment"),
    "a run is missing": (cut("runs.csv", without_last_line), "not from the same experiment"),
    "a header alone": (cut("runs.csv", lambda t: t.splitlines()[0] + "\n"), "no rows"),
    "empty": (cut("neighbours.csv", lambda t: ""), "is truncated"),
    "not a number": (cut("runs.csv", lambda t: t.replace("0.005", "abc")), "is not a number"),
    "a nan perturbation": (
        cut("neighbours.csv", lambda t: re.sub(r"[^,]+((,[^,]+){4})\n$", r"nan\1\n", t)), " NaN"),
    "another verdict": (cut("runs.csv", lambda t: t.replace("True", "False", 1)),
        "line 2: the column 'within' is False"),
    "no csv": (lambda folder: (folder / "neighbours.csv").unlink(), "missing"),
    "no json": (lambda folder: (folder / "suite.json").unlink(), "missing"),
    "broken json": (cut("suite.json", lambda t: t[:-5]), "not valid JSON"),
    "a list": (cut("suite.json", lambda t: "[]"), "not a JSON object"),
    "a key is missing": (cut("suite.json", lambda t: t.replace('"delta"', '"d"')), "contain delta"),
}  # fmt: skip


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["runs.csv", "neighbours.csv", "suite.json"])
def test_a_flipped_bit_of_a_digit_is_seen(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", *phase_grid())
    file, content = folder / name, bytearray((folder / name).read_bytes())
    place = next(i for i in range(len(content) // 2, len(content)) if chr(content[i]) in "2468")
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=f"{name} does not match its checksum in .*SHA256SUMS"):
        write_report(folder)
    content[place] ^= 1
    file.write_bytes(content)
    assert write_report(folder).exists()


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_suite_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    damage, why = DAMAGES[name]
    folder = write(tmp_path / "a", *phase_grid())
    damage(folder)
    with pytest.raises(InputError, match=why) as error:
        write_report(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    assert not (folder / "report.html").exists() and not (folder / "figures").exists()


@pytest.mark.parametrize(("damage", "why"), [
    (cut("neighbours.csv", without_last_line), "does not contain all neighbours yet"),
    (cut("config.toml", lambda text: "["), "damaged"),
    (cut("bound.json", lambda text: "{}"), "contain value"),
    (lambda folder: (folder / "bound.json").unlink(), "missing"),
    (lambda folder: (folder / "partition.npz").unlink(), "damaged"),
])  # fmt: skip
def test_a_damaged_census_is_refused(
    damage: Callable[[Path], None], why: str, census: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(census, folder, ignore=shutil.ignore_patterns("figures", "report.html"))
    damage(folder)
    with pytest.raises(InputError, match=why):
        write_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_plain_runs_are_on_the_page(census: Path, tmp_path: Path) -> None:
    """One by itself, several side by side; beside what has claims, and without any."""
    first = run(small(), tmp_path / "plain")
    assert [one.title for one in gather(tmp_path / "plain")] == ["fedmuon on synthetic"]
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "fedmuon on synthetic" in text and "; there are no claims" in text
    assert "N = 6, K = 3, R = 8, E = 1" in text and f"{first['test_loss']:.4g}" in text
    assert "data:image/svg" in text and "claims hold" not in text
    run(small(federation={"seed": 4}), tmp_path / "seed")
    shutil.copytree(census, tmp_path / "census")
    found = gather(tmp_path)
    assert [one.title for one in found[1:]] == ["2 runs side by side"] and found[0].claims
    assert len(found[1].numbers) == 1 and found[1].numbers[0][1] == "2"  # of two seeds
    assert len(gather(tmp_path / "census")) == 1


@pytest.mark.usefixtures("undrawn")
def test_the_heading_names_the_data_of_what_is_claimed(tmp_path: Path) -> None:
    """A run of other data beside a suite claims nothing of them; where nothing is claimed, all."""
    write(tmp_path / "A1", *made(), data="digits")
    run(small(), tmp_path / "plain")
    heading = write_report(tmp_path).read_text(encoding="utf-8").partition("</title>")[0]
    assert heading.endswith("claims hold on digits")
    shutil.rmtree(tmp_path / "A1")
    run(small(), tmp_path / "again")
    heading = write_report(tmp_path).read_text(encoding="utf-8").partition("</title>")[0]
    assert heading.endswith("Measured on synthetic; there are no claims")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a finished suite nor a run"):
        write_report(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        write_report(tmp_path / "nowhere")
