"""Study `dp-text` from its command to its report, and claims that can fail."""

import csv
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from test_pitfalls import unnamed

from fedmuon.experiments.cli import main
from fedmuon.experiments.studies import dp_text
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import merged
from fedmuon.experiments.suites.suite import execute

TINY: dict[str, Any] = {
    "made-tables": 20, "public-tables": 10, "prompts": 2, "beams": 2,
    "base": {
        "data": {"test": 3}, "task": {"width": 8, "depth": 1, "heads": 1},
        "federation": {"rounds": 1}, "local": {"steps": 1}, "privacy": {"lot": 4.0},
        "output": {"evaluate-every": 1},
    },
    "public": {"federation": {"rounds": 1}, "local": {"steps": 1, "batch": 4}},
}  # fmt: skip


def tiny(folder: Path) -> Path:
    file = folder / "dp-text.toml"
    content = contents.read("dp-text")
    small = merged(content.pop("small"), TINY)
    file.write_text(tomli_w.dumps({**content, "small": small}), encoding="utf-8")
    return file


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
def test_the_suite_from_its_command_to_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tiny(tmp_path), tmp_path / "out"
    with pytest.raises(SystemExit, match="0"):
        main(["suite", str(file), "--data", "dart", "--scale", "small", "--out", str(out)])
    ends = list(csv.DictReader((out / "ends.csv").read_text().splitlines()))
    assert [row["recipe"] for row in ends] == ["dp-sgd", "dp-adam", "dp-muon", "dp-muonbc"]
    assert all(7.5 < float(row["epsilon"]) <= 8 for row in ends)
    assert [row["blocks"] for row in ends] == ["1", "1", "5", "5"]
    assert len({row["nll"] for row in ends}) == 4
    written = list(csv.DictReader((out / "written.csv").read_text().splitlines()))
    assert len(written) == 8 and " : food : " in written[0]["table"]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "The text is made up" in page and "000, GPT-2" in page and "0.4531" in page
    assert not unnamed(out)
    ledger = next((out / "runs").glob("*/method-0/ledger.jsonl"))
    assert len(ledger.read_text().splitlines()) == 2
    before = (out / "ends.csv").read_bytes()
    next((out / "cells").iterdir()).unlink()
    execute(kinds.find(str(file), "dart", "small", {}), out, resume=True)
    assert (out / "ends.csv").read_bytes() == before  # finished runs are not released anew
    capsys.readouterr()


def test_one_method_is_tuned_and_writes(tmp_path: Path) -> None:
    (whole,) = kinds.find(str(tiny(tmp_path)), "dart", "small", {}).within(tmp_path)
    assert isinstance(whole, dp_text.TextCell)
    few = {"DP-Muon": whole.settings.variants["DP-Muon"]}
    given = {"variants": few, "prompts": 1, "beams": 1}
    record = replace(whole, settings=whole.settings.model_copy(update=given)).compute()
    (end,), (point,), (one,) = (record[name] for name in ("ends", "curves", "written"))
    assert (end["method"], end["recipe"], end["blocks"]) == ("DP-Muon", "dp-muon", 5)
    assert 7.5 < end["epsilon"] <= end["target"] == 8 and end["note"] == ""
    # A decoder of bytes that has hardly learned anything guesses among 257 of them.
    assert end["nll"] == pytest.approx(np.log(257), abs=0.2)
    assert point["step"] == 1 and point["loss"] == pytest.approx(end["nll"], abs=0.01)
    assert 0 <= end["bleu"] <= 100 and 0 <= end["rouge_l"] <= 100
    assert " : " in one["table"] and one["written"].isprintable() and one["reference"]
    assert record["made_up"] and dp_text.STUDY.summary([record]) == {"made_up": True}


def test_the_table_has_published_numbers_below_ours() -> None:
    for data, scale in itertools.product(("e2e", "dart"), ("small", "full")):
        work = kinds.find("dp-text", data, scale, {})
        settings = json.loads(work.lock)[4]
        assert settings["variants"].keys() == settings["published"][data].keys()
        assert work.cells[0].size == 5 and settings["base"]["privacy"]["epsilon"] == 8.0
    printed = {"DP-Muon": {"bleu": 61.0, "rouge_l": 65.0}}
    head, *lines = dp_text.numbers(printed, columns(), {})
    assert head == ("method", "noise σ", "blocks", "NLL per target token", "BLEU", "ROUGE-L")
    assert [line[0] for line in lines] == ["DP-SGD", "DP-Adam", "DP-Muon", "  000, GPT-2",
                                           "DP-MuonBC"]  # fmt: skip
    assert lines[3][4:] == ("61", "65")


def columns(**values: list) -> dict[str, np.ndarray]:
    methods = ["DP-SGD", "DP-Adam", "DP-Muon", "DP-MuonBC"]
    base: dict[str, list] = {
        "method": methods, "nll": [4.0, 3.0, 2.0, 1.0], "bleu": [1.0, 2.0, 3.0, 4.0],
        "rouge_l": [1.0, 2.0, 3.0, 4.0], "epsilon": [7.9] * 4, "target": [8.0] * 4,
        "delta": [1e-5] * 4, "noise": [1.0] * 4, "blocks": [1.0, 1.0, 9.0, 9.0],
    }  # fmt: skip
    return {name: np.tile(column, 2) for name, column in (base | values).items()}  # two seeds


def test_claims_hold_and_fail() -> None:
    good = dp_text.claims(columns(), {})
    assert len(good) == 6 and all(claim.holds for claim in good)
    for changed, lost in (
        ({"epsilon": [7.9, 8.1, 7.9, 7.9]}, 0),
        ({"nll": [3.0, 4.0, 2.0, 1.0]}, 1),
        ({"nll": [4.0, 3.0, float("nan"), 1.0]}, 2),
        ({"nll": [4.0, 3.0, 1.0, 2.0]}, 3),
        ({"bleu": [1.0, 3.0, 2.0, 4.0]}, 4),
        ({"rouge_l": [1.0, 3.0, 2.0, 4.0]}, 5),
    ):
        assert dp_text.claims(columns(**changed), {})[lost].holds is False
    assert dp_text.ordered(columns(), "DP-Muon", "AdamW", "nll").holds is None
    one = {name: column[:4] for name, column in columns().items()}
    assert {claim.verdict for claim in dp_text.claims(one, {})[1:]} == {
        "not testable at this scale"
    }


def test_made_text_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["make-text", str(tmp_path), "--format", "dart", "--tables", "20"])
    assert capsys.readouterr().out.count("made up") == 3
    assert len(list(tmp_path.glob("made-up-*.json"))) == 3
    with pytest.raises(SystemExit, match="2"):
        main(["make-text", str(tmp_path), "--format", "xml"])
    assert "choose a format of e2e, dart" in capsys.readouterr().err
