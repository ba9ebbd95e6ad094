"""A study is one object: its cells are computed, its rows judged and told."""

from functools import partial
from pathlib import Path

import pytest
from made_suite import summed
from pydantic import Field

from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.verdicts import Claim, counted
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table
from fedmuon.experiments.report import gather, write_report
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies.study import Call, Study
from fedmuon.experiments.suites import suite
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.runs.directory import Record


class Settings(Table):
    sizes: list[int]
    base: dict = Field(default_factory=dict)


def cells(settings: Settings, asked: SuiteRequest) -> list[Call]:
    return [Call(f"n{n}", partial(square, n), size=n) for n in settings.sizes]


def square(n: int) -> Record:
    return {"rows": [{"n": n, "word": "a" * n, "square": n * n}]}


def summary(records: list[Record]) -> Record:
    return {"largest": max(record["rows"][0]["square"] for record in records)}


def claims(rows: Columns) -> list[Claim]:
    held = rows["square"] == rows["n"] ** 2
    return [counted("Squares are squares.", held, "rows", f"{held.sum()} of {len(held)}")]


def numbers(rows: Columns) -> list[tuple[str, ...]]:
    return [("n", "square"), *zip(rows["word"], map(str, rows["square"]), strict=True)]


STUDY = Study("made-up", Settings, cells, claims, numbers, "Arithmetic.", {}, summary=summary)
FILE = """
kind = "made-up"
title = "Squares"
note = "A note."
sizes = [1, 2, 3]

[small]
sizes = [1]
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a suite of a study that is not shipped."""
    monkeypatch.setitem(kinds.KINDS, "made-up", STUDY)
    file = tmp_path / "own.toml"
    file.write_text(FILE)
    return str(file)


def test_a_study_is_computed_judged_and_told(study: str, tmp_path: Path) -> None:
    out, begun, seen = tmp_path / "out", [], []
    work = kinds.find(study, None, "full", {})
    told = suite.execute(
        work, out, on_round_end=seen.append, on_start=lambda *one: begun.append(one)
    )
    assert begun == [(0, 6)] and [record["done"] for record in seen] == [1, 3, 6]
    assert (out / "rows.csv").read_text() == "n,word,square\n1,a,1\n2,aa,4\n3,aaa,9\n"
    assert told["kind"] == "made-up" and told["largest"] == 9 and told["settings"]["sizes"]
    text = write_report(out).read_text()
    for words in (
        "Squares are squares.",
        "3 of 3",
        "A note.",
        "Assumptions and constants",
        "Arithmetic.",
    ):
        assert words in text, words
    (part,) = gather(out)
    assert part.title == "Squares" and part.again == f"fedmuon suite {study} --scale full"
    (out / "rows.csv").write_text("n,word,square\n1,a,1\n2,aa,5\n")
    summed(out)
    assert gather(out)[0].claims[0].holds is False


def test_what_is_refused(study: str, tmp_path: Path) -> None:
    work, changed = (kinds.find(study, None, "full", one) for one in ({}, {"local": {"lr": 2.0}}))
    assert changed.lock != work.lock and changed.request.again.endswith("--set local.lr=2.0")
    with pytest.raises(InputError, match=r"has no data, .* leave --data out"):
        kinds.find(study, "digits", "full", {})
    Path(study).write_text(FILE.replace("made-up", "made-down"))
    with pytest.raises(InputError, match=r"choose one of stability, training, .*made-up"):
        kinds.find(study, None, "full", {})
    Path(study).write_text(FILE.replace("sizes = [1, 2, 3]", "size = [1, 2, 3]"))
    with pytest.raises(InputError, match="did you mean sizes"):
        kinds.find(study, None, "full", {})
    Path(study).write_text(FILE)
    suite.execute(kinds.find(study, None, "small", {}), tmp_path / "out")
    file = tmp_path / "out" / "suite.json"
    file.write_text(file.read_text().replace("made-up", "sharp"))
    summed(file.parent)
    with pytest.raises(InputError, match="unknown kind of suite 'sharp'"):
        gather(tmp_path / "out")
