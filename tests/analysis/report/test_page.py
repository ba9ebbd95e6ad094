"""The parts of a page: tables taken apart and written beside it, cards, words, captions, JSON."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import small, without_rendering
from made_suite import phase_grid, write
from rich.console import Console

from fedmuon import analysis, experiments
from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns, suite_claims
from fedmuon.analysis.report.findings import spread
from fedmuon.analysis.report.latex import table_file
from fedmuon.analysis.report.numbers import digits, number, written
from fedmuon.analysis.report.tables import as_csv, slug, split_intervals
from fedmuon.analysis.report.verdicts import VERDICTS, Slope
from fedmuon.analysis.report.write import blocks, terms_of
from fedmuon.config.load import Config
from fedmuon.experiments.report import gather, write_report
from fedmuon.experiments.studies import training_findings
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.suite import settings_card, shown
from fedmuon.experiments.tables import facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite's with its report."""
    made = write(tmp_path_factory.mktemp("suite") / "A1", *phase_grid())
    with without_rendering():
        return write_report(made).parent


def test_a_standard_deviation_is_called_so() -> None:
    values = np.array([0.1, 0.2, 0.4])
    text = spread(values)  # by hand: mean 0.7 / 3, squares 0.0467 / 2
    assert text == "0.2333 (SD 0.15)" and "±" not in text
    assert spread(values[:1]) == "0.1"
    assert split_intervals(("method", "loss"), [("SGD", text)]) == (
        ["method", "loss", "SD"], [["SGD", "0.2333", "0.15"]],
    )  # fmt: skip


def test_values_and_intervals_have_columns_of_their_own() -> None:
    head = "method", "slope (95%)", "loss", "at"
    rows = [("all:", "", "", ""), ("  SGD", "−0.069 (−0.174 to +0.037)", "0.3 ± 0.02", "9 (c)"),
            ("  lost", "–", "1 of 2 diverged", "3")]  # fmt: skip
    names, cells = split_intervals(head, rows)
    assert names == ["method", "slope", "95%", "loss", "± 95%", "at"]
    assert cells[0] == ["all:", *[""] * 5]
    assert cells[1] == ["  SGD", "−0.069", "−0.174 to +0.037", "0.3", "0.02", "9 (c)"]
    assert cells[2] == ["  lost", "–", "", "1 of 2 diverged", "", "3"]
    plain = ("a ± b", "x"), [("1 ± 2", "bound (1 to 2)")]
    head, rows = plain  # names, and what is no number
    assert split_intervals(*plain) == (list(head), [list(rows[0])])


@pytest.mark.parametrize("value", [-0.5, 1.5e-5, -1.5e-7, -123456.0])
def test_people_read_one_minus_and_programs_another(value: float) -> None:
    """On a page, in a figure, in a terminal U+2212; what is saved beside a page reads back."""
    console = Console(width=80, file=io.StringIO())
    console.print(facts("", [("loss", value)]))
    assert isinstance(console.file, io.StringIO)
    people = [number(value), digits(value), written(value, "+.3g"), f"{Slope(value, value, value)}"]
    people += [style.compact(value), style.plain(value), console.file.getvalue()]
    assert all("-" not in one for one in people) and "−" in "".join(people)
    cells = ["a", number(value), digits(value)]
    (_, *read) = as_csv(["", "x", "y"], [cells]).decode().splitlines()[1].split(",")
    latex = table_file(["", "x", "y"], [cells], "").decode()
    assert [float(one) for one in read] == pytest.approx([value, value], rel=1e-3)
    assert "−" not in latex and "$-$" in latex


def test_a_minus_is_made_at_one_place() -> None:
    rooms = (Path(room.__path__[0]) for room in (analysis, experiments))
    files = [file for room in rooms for file in room.rglob("*.py")]
    swapped = re.compile(r"replace\(.-., .−.\)")
    made = [file.name for file in files if swapped.search(file.read_text(encoding="utf-8"))]
    assert len(files) > 50 and made == ["numbers.py"]


def test_tables_beside_the_page_read_back(folder: Path) -> None:
    names, cells = ["a_b", "x & y"], [["  sub", "−1.5e−05"], ["100%", "–"], ["c", "−∞"]]
    read = list(csv.reader(as_csv(names, cells).decode().splitlines()))
    assert read == [names, ["sub", "-1.5e-05"], ["100%", ""], ["c", "−∞"]]
    assert float(read[1][1]) == -1.5e-5
    spread = as_csv(("", "95%"), [("a", "−0.174 to −0.037"), ("b", "−.5 (−∞ to −1e−05)")])
    assert spread.decode().splitlines()[1:] == ["a,-0.174 to -0.037", "b,-.5 (−∞ to -1e-05)"]
    latex = table_file(names, cells, "T").decode()
    assert r"a\_b & x \& y \\" in latex and r"\quad sub & $-$1.5e$-$05 \\" in latex
    assert r"100\% & --" in latex and r"c & $-$$\infty$" in latex and "{lr}" in latex
    assert latex.startswith("% T\n\\begin{tabular}") and latex.count("rule\n") == 3
    assert slug("Terminal values, ± over seeds") == "terminal-values-over-seeds"
    assert slug("±") == "table"
    head, *lines = csv.reader((folder / "tables" / "measured-and-published-values.csv").open())
    (part,) = gather(folder)
    assert head == ["", "measured", "Stability note, Table 2 (mnist)"] and len(lines) == len(
        part.numbers
    )
    assert (folder / "tables" / "measured-and-published-values.tex").exists()
    runs = list(csv.DictReader((folder / "tables" / "all-runs.csv").open()))
    bounds = sorted(float(row["bound"]) for row in runs)
    np.testing.assert_allclose(bounds, np.sort(phase_grid()[0]["bound"]), rtol=5e-3)
    assert {"gap", "95%", "bound / B"} <= set(runs[0])


def test_claims_lie_beside_the_page_as_json(folder: Path) -> None:
    (part,) = json.loads((folder / "claims.json").read_text())
    wanted = suite_claims(*phase_grid())
    assert part["counts"] == dict.fromkeys(VERDICTS, 0) | {"holds": 6}
    assert [one["claim"] for one in part["claims"]] == [one.sentence for one in wanted]
    gap = part["claims"][0]
    runs, _ = phase_grid()
    worst = int((runs["gap_high"] - runs["bound"]).argmax())
    assert gap["effect"]["high"] == pytest.approx((runs["gap_high"] - runs["bound"])[worst])
    assert gap["rule"] == "≤ 0" and gap["places"] == gap["held"] == 18


def test_a_card_has_every_value_of_what_is_read() -> None:
    configs = [small(local={"lr": lr}) for lr in (0.1, 0.3)]
    held = {symbol: values for symbol, _, values in settings_card(configs)}
    first: Config = configs[0]
    assert held["η"] == "0.1, 0.3" and held["N"] == str(first.federation.clients)
    assert held["model"] == "matrix" and held["λ"] == f"{first.orthogonalizer.lambda_:g}"
    plain = [small(local={"recipe": "fedavg"}, orthogonalizer={})]
    assert "λ" not in {symbol for symbol, *_ in settings_card(plain)}  # which fedavg does not read
    assert shown([5, 3, 0.5, 9, 7]) == "0.5 to 9 (5 values)" and shown(["b", "a"]) == "b, a"


def test_words_are_explained_where_they_occur() -> None:
    found = terms_of("The certificate Δ_i Y_i(C), in a census, with the explicit form of C_hp")
    names = "neighbour", "Y_i(C), exposure", "certificate", "census", "explicit, C_hp"
    assert tuple(found) == names
    assert "Ψ" in terms_of("at most Ψ") and "sharp, paper" in terms_of("the sharp constant")
    assert not terms_of("Nothing of it.")


def test_what_a_suites_file_says_keeps_its_paragraphs_items_and_tables() -> None:
    text = contents.preamble(
        "# What it\n# prints.\n#\n# - One\n#   thing:\n#     a  1\n#     b  2\n# - two\n"
        "key = 1\n# no"
    )
    assert text == "What it\nprints.\n\n- One\n  thing:\n    a  1\n    b  2\n- two"
    assert blocks(text) == [
        ("", "What it prints."), ("item", "- One thing:"), ("pre", "    a  1\n    b  2"),
        ("item", "- two"),
    ]  # fmt: skip
    assert blocks("") == []
    both = contents.told("dp-classification-cnn")
    assert "dp-classification with a" in both
    assert "Accuracy against epsilon" in both  # of the suite that it is like
    for name in contents.shipped():
        assert contents.told(name), name


def curves(*names: str) -> Columns:
    rows = [(name, np.nan, seed, number, (1 + 0.1 * seed) / number)
            for name in names for seed in (0, 1) for number in (1, 2)]  # fmt: skip
    names = "variant", "x", "seed", "round", "train_loss"
    columns = zip(names, zip(*rows, strict=True), strict=True)
    found = {name: np.array(column) for name, column in columns}
    return found | {"test_loss": found["train_loss"], "accuracy": 1 - found["train_loss"]}


def test_captions_say_what_was_drawn() -> None:
    plain = of_curves(curves("SGD", "Muon"))
    assert "Solid lines are held-out values. Dashed lines are train losses. Lines are" in plain
    assert "the gap grows" in plain and "otted" not in plain and "diverged" not in plain
    added = of_curves(curves("SGD", "SGD + DiSK"))
    assert "Dotted lines with hollow marks" in added and "(SGD + DiSK). Dash" in added
    assert "Dash-dotted lines are train losses of the dotted variants" in added
    alone = of_curves(curves("a", "b", "c", "d", "e"))
    assert "Train losses are not drawn" in alone and "ashed" not in alone and "Bands" in alone
    assert "the gap grows" not in alone
    assert "ands" not in of_curves(curves(*"abcdefg"))


def of_curves(rows: Columns) -> str:
    names = list(dict.fromkeys(rows["variant"].tolist()))
    return training_findings.in_words(rows, training_findings.draw_curves(rows, names, "round"))


def test_of_one_seed_no_mean_is_told_and_of_runs_that_lasted_no_end() -> None:
    rows = curves("SGD", "Muon")
    one = of_curves({name: column[rows["seed"] == 0] for name, column in rows.items()})
    assert "mean" not in one and "Bands" not in one and "diverged" not in one
    losses = np.where((rows["variant"] == "SGD") & (rows["round"] == 2), np.nan, 1.0)
    assert "A line ends where a run diverged" in of_curves(dict(rows) | {"test_loss": losses})


def ends(*names: str, seeds: int = 2) -> str:
    rows = [(name, x, seed, x + seed) for name in names for x in (1.0, 2.0)
            for seed in range(seeds)]  # fmt: skip
    columns = zip(("variant", "x", "seed", "accuracy"), zip(*rows, strict=True), strict=True)
    runs = {name: np.array(column) for name, column in columns}
    drawn = training_findings.terminal(runs, names, ["accuracy"], "x")
    return training_findings.ends_in_words(drawn)


def test_bars_and_hollow_marks_are_named_where_there_are_any() -> None:
    assert ends("SGD", seeds=1) == ""
    assert ends("SGD").endswith("95% interval of the mean.") and "mean over seeds" in ends("SGD")
    assert "overlap" in ends("SGD", "Muon") and "hollow" not in ends("SGD", "Muon")
    assert ends("SGD", "SGD + DiSK", seeds=1).startswith("A variant with a hollow mark")
