"""The page that all benchmarks end with; the figures themselves are whoever's machine's."""

import io
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import hierarchy, page, predicted_gap
from benchmarks.__main__ import PARTS, Part
from benchmarks.page import Row
from fedmuon.federated.plan import RandomnessPlan

FASTER = Row("a trajectory / pfl-research", 0.1, 0.42, 4.2, 4, share=0.9, share_aim=0.85)
ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    FASTER,
    Row("a much longer figure than its column is wide / the same <again>", 12.0, 3.0, 0.25),
    Row("first round", 2.5, aim=2, at_most=True, note="a note " * 20),
    Row("memory of a driver", 400.0, 300.0, 4 / 3, 2, unit="MB", at_most=True),
    Row("what has failed", note="ended with 3: no such thing", failed=True),
]


@pytest.mark.parametrize(("row", "met"), [
    (FASTER, True),
    (Row("too slow", 0.1, 0.3, 3.0, 4), False),
    (Row("fast, and far from the best", 0.1, 0.5, 5.0, 4, share=0.5, share_aim=0.85), False),
    (Row("cost", 1.2, 1.0, 1.2, 1.25, at_most=True), True),
    (Row("cost", 1.3, 1.0, 1.3, 1.25, at_most=True), False),
    (Row("first round", 1.9, aim=2, at_most=True), True),
    (Row("aimed at, and not found", aim=2), False),
    (Row("no aim", 1.0, 2.0, 2.0), None),
    (Row("failed", failed=True), False),
])  # fmt: skip
def test_an_aim_is_met_or_not(row: Row, met: bool | None) -> None:
    assert row.met is met


def test_amounts_are_short() -> None:
    for value, said in ((None, ""), (12.345, "12.3 s"), (1234.5, "1234 s"), (0.0123, "12.3 ms"),
                        (2e-5, "20 us")):  # fmt: skip
        assert page.amount(value, "s") == said
    assert page.amount(350.4, "MB") == "350 MB"


def test_rows_travel_as_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.tell(iter(ROWS), tmp_path / "rows.jsonl")
    assert page.read(tmp_path / "rows.jsonl") == ROWS
    assert page.read(tmp_path / "none.jsonl") == []
    printed = capsys.readouterr().out.splitlines()  # the page has the rest
    assert printed == [f"  done: {row.figure}" for row in ROWS]
    page.tell(iter(ROWS))  # on its own a benchmark only prints
    printed = capsys.readouterr().out
    assert "4.2 x" in printed and ">= 4 x" in printed and "FAILED" in printed
    assert "90% (>= 85%)" in printed


def test_the_page_fits_a_terminal_and_says_where_it_was_made(tmp_path: Path) -> None:
    where = page.place((0.1, 1.25), 90.0)
    text = page.write(tmp_path / "bench", {"one (3 s)": ROWS, "two": ROWS[:1]}, where)
    assert max(map(len, text.splitlines())) <= page.WIDTH
    for word in ("commit ", "torch ", " cores, ", " threads", "load 0.1, then 1.2",
                 "in 1.5 minutes", "-- one (3 s) "):  # fmt: skip
        assert word in text
    assert "3 of 4 aims are met" in text and "1 parts failed" in text
    assert (tmp_path / "bench" / "page.txt").read_text() == text
    html = (tmp_path / "bench" / "page.html").read_text()
    assert "&lt;again&gt;" in html and "<again>" not in html and "http" not in html
    assert html.count('class="missed"') == 2 * 5 and html.count("<tr>") == 1 + 6


def tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, *given: str
) -> tuple[int, str]:
    """The exit code, and the page, of all benchmarks where the only one is this module."""
    (tmp_path / "tried.py").write_text(f"import sys\nfrom benchmarks import page\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr("sys.argv", ["benchmarks", "--out", str(tmp_path / "bench"), *given])
    monkeypatch.setattr(bench, "PARTS", {"tried": Part("a part", "--full", "--small", "tried")})
    return bench.main(), (tmp_path / "bench" / "page.txt").read_text()


TELLING = """
parser = page.parser("")
parser.add_argument("--full", action="store_true")
parser.add_argument("--small", action="store_true")
asked = parser.parse_args()
page.tell([page.Row("full" if asked.full else "small", 1.0, 2.0, 2.0, 1.5)], asked.rows)
"""


@pytest.mark.slow
def test_parts_are_processes_whose_rows_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = tried(tmp_path, monkeypatch, TELLING)
    assert code == 0 and "full" in text and "1 of 1 aims are met" in text
    said = capfd.readouterr()  # the page is all of stdout
    assert said.out.startswith(text) and len(said.out.splitlines()) <= len(text.splitlines()) + 2
    assert "1/1 tried: a part" in said.err and "done: full" in said.err


@pytest.mark.slow
def test_a_quick_look_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = tried(tmp_path, monkeypatch, TELLING, "--quick", "--only", "tried")
    assert code == 0 and "small" in text
    missed = TELLING.replace("2.0, 1.5)", "2.0, 9.0, share=0.5, share_aim=0.9)")
    code, text = tried(tmp_path, monkeypatch, f"{missed}\nsys.exit('gone')", "--quick")
    assert code == 1 and "1 parts failed" in text and "no figure is held to an aim" in text
    assert "aims are met" not in text and "!" not in text and ">=" not in text and "2 x" in text
    judged = Row("small", 1.0, 2.0, 2.0, 9.0, share=0.5, share_aim=0.9)  # the control
    assert "2 x !" in page.as_text({"one": [judged]}, []) and judged.met is False
    assert judged.unjudged() == Row("small", 1.0, 2.0, 2.0, share=0.5)


def test_what_is_not_there_is_not_judged() -> None:
    free = Row("no aim", 1.0, 2.0, 2.0)
    assert page.verdict({"one": [free]}) == []
    assert page.verdict({"one": [FASTER]})[1:] == [page.OF_THE_BEST]
    assert page.verdict({"one": [free, ROWS[-1]]}) == ["1 parts failed"]


def test_help_says_what_each_part_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "--help"])
    with pytest.raises(SystemExit):
        bench.main()
    said = capsys.readouterr().out
    assert all(name in said and part.about in said for name, part in PARTS.items())


@pytest.mark.slow
@pytest.mark.parametrize(("more", "said"), [
    ("sys.exit('no such peer')", "ended with 1: no such peer"),
    ("import time; time.sleep(600)", "ended with more than 3 s: it said nothing"),
])  # fmt: skip
def test_a_part_that_fails_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, said: str
) -> None:
    monkeypatch.setattr(bench, "PATIENCE", 3.0 if "sleep" in more else 60.0)
    code, text = tried(tmp_path, monkeypatch, f"{TELLING}\n{more}")
    assert code == 1 and said in text and "FAILED" in text
    assert "sleep" in more or "2 x" in text


@pytest.mark.slow
def test_a_part_without_rows_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = tried(tmp_path, monkeypatch, "")
    assert code == 1 and "ended with 0" in text


def test_every_part_is_a_module_that_takes_what_it_is_given() -> None:
    for name, part in PARTS.items():
        module = part.module or f"benchmarks.{name}"
        file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        known = file.read_text(encoding="utf-8")
        options = {word for word in f"{part.given} {part.quick}".split() if word.startswith("--")}
        assert all(f'"{option}"' in known for option in options), name


def test_an_earlier_commit_takes_turns_with_this_tree(monkeypatch, tmp_path: Path) -> None:
    turns = []

    def measured(name: str, quick: bool, file: Path, tree: Path) -> list[Row]:
        turns.append(tree == ROOT)
        assert (tree / "benchmarks" / "__main__.py").is_file()
        seconds = {True: 2.0, False: 1.0}[tree == ROOT] * len(turns)
        return [Row("a step / torch", seconds, 5.0), Row("memory", 4.0, unit="MB")]

    monkeypatch.setattr(bench, "measured", measured)
    (row,) = bench.beside("HEAD", "optimizer", 2, True, tmp_path)
    assert turns == [False, True, False, True]
    assert row.figure == "a step / torch" and row.ratio == pytest.approx((1 / 4 + 3 / 8) / 2)
    assert row.met is False  # this tree takes longer
    assert not (tmp_path / "before").exists()


def test_memory_of_a_cohort_does_not_depend_on_the_clients() -> None:
    """Of 10^9 as of 10^6; a Poisson cohort, the control, draws a number for each client."""
    few, many = (hierarchy.drawn(clients, 100) for clients in (10**6, 10**9))
    assert len({*many.cohort.tolist()}) == 100 and many.cohort.max() > 10**8
    assert many.memory < 2 * few.memory + 4096 < 100_000
    tracemalloc.start()
    RandomnessPlan(0, 10**6, 100, 1, poisson=True).participants(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak > 8 * 10**6


def test_edge_servers_combine_as_one_server_does() -> None:
    """The weighted mean by numpy; without the samples behind each edge, the control, another."""
    sent = hierarchy.messages(np.arange(1, 20) * 10**7, (4, 3))
    costs, *_, apart = hierarchy.compared(sent, (4, 3), 4)
    assert apart < 1e-12 and costs.size == len(sent[0][2])
    models = np.stack([np.load(io.BytesIO(data)) for *_, data in sent])
    wanted = np.average(models, axis=0, weights=[samples for _, samples, _ in sent])
    like = {"weight": torch.zeros(1, 4, 3, dtype=torch.float64)}
    edges = [hierarchy.combined(hierarchy.read(sent[place::4], like)) for place in range(4)]
    found = hierarchy.combined(edges).params["weight"].numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
    plain = hierarchy.combined([replace(one, samples=1) for one in edges]).params["weight"]
    assert np.abs(plain.numpy() - wanted).max() > 1e-3
    assert len(hierarchy.table(costs)) == 5


def test_probes_are_counted_from_the_spread_of_single_probes() -> None:
    """The mean of that many probes has a standard error of 10%; of a quarter, 20%."""
    rng = np.random.default_rng(0)
    samples = [2.0 + rng.standard_normal(4000) for _ in range(3)]
    needed = predicted_gap.probes_needed(samples)
    assert needed == pytest.approx((1 / 0.2) ** 2, rel=0.1)
    means = rng.choice(samples[0], (2000, round(needed))).mean(1)
    assert means.std() / 2 == pytest.approx(0.1, rel=0.1)
    means = rng.choice(samples[0], (2000, round(needed / 4))).mean(1)
    assert means.std() / 2 == pytest.approx(0.2, rel=0.1)


def test_a_standard_error_is_over_probes_alone() -> None:
    """Runs that differ have no larger error; a mean over all probes, the control, has."""
    rng = np.random.default_rng(1)
    samples = [run + rng.standard_normal(8) for run in (0.0, 50.0, 100.0)]
    assert predicted_gap.standard_error(samples) == pytest.approx(1 / 24**0.5, rel=0.5)
    assert np.concatenate(samples).std() / 24**0.5 > 5


def test_the_table_of_predicted_gaps_has_every_estimate() -> None:
    case = predicted_gap.Case(
        {"recipe": "fedavg", "lr": 0.2, "steps": 1}, {"clients": 3, "per-round": 2, "rounds": 2}
    )
    tables = [case.tables("mnist5k", 60, seed) for seed in range(2)]
    seeds = [predicted_gap.seed_of(one, None, 2, 2) for one in tables]
    text = "\n".join(predicted_gap.lines_of("small", seeds))
    for words in ("measured", "predicted at held-out samples", "mean of both", "4 replacements",
                  "probes for 10%", "CPU seconds of the rounds"):  # fmt: skip
        assert words in text
    assert max(map(len, text.splitlines())) <= page.WIDTH
