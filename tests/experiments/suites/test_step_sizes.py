"""Step sizes of the private suites: every method's is the best of equally many that were tried."""

from pathlib import Path

import pytest

from benchmarks.step_sizes import (
    GRIDS,
    TRIED,
    chosen,
    ends,
    family,
    finalists,
    rates,
    tell,
    trials,
)
from fedmuon.experiments.suites import contents

FIRST = """variant,accuracy
"A, b, 0.5",0.6
"A, b, 1",0.55
"A, b, 2",0.2
"C, 1",0.3
"C, 2",0.4
"""
AGAIN = """variant,accuracy
"A, b, 0.5",0.4
"A, b, 1",0.65
"""


@pytest.mark.parametrize("suite", GRIDS)
def test_every_method_has_as_many_trials_and_takes_one_of_them(suite: str) -> None:
    asked = trials(suite, [100])["variants"]
    variants, base = contents.read(suite)["variants"], contents.read(suite)["base"]["local"]
    for name, own in variants.items():
        tried = [one for label, one in asked.items() if label.rpartition(", ")[0] == name]
        assert len(tried) == TRIED == len({one["local"]["lr"] for one in tried})
        settled = base | own["local"]
        assert rates(suite, own["local"]["recipe"], settled["lr"]).items() <= settled.items()
        assert settled["lr"] in [one["local"]["lr"] for one in tried]
    assert len(asked) == TRIED * len(variants)


def test_filters_and_corrections_are_tried_with_the_grid_of_what_they_help() -> None:
    assert [family(name) for name in ("dp-sgd", "disk-adam", "disk-muonbc")] == [
        "sgd", "adam", "muon",
    ]  # fmt: skip


def test_the_better_of_the_two_that_are_run_again_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [tmp_path / name for name in ("first.csv", "again.csv")]
    for file, text in zip(tables, (FIRST, AGAIN), strict=True):
        file.write_text(text)
    first, every = ends(tables[0]), ends(*tables)
    content = {
        "variants": {name: {} for name in ("A, b, 0.5", "A, b, 1", "A, b, 2", "C, 1", "C, 2")}
    }
    assert list(finalists(content, first)) == ["A, b, 0.5", "A, b, 1", "C, 1", "C, 2"]
    assert chosen(first, every) == {"A, b": 1, "C": 2}  # 0.5 was the first time's best
    tell(first, every)
    one, other = capsys.readouterr().err.splitlines()
    assert one.split() == ["A,", "b", "0.5", "0.500", "1", "0.600*", "2", "0.200"]
    assert other.endswith("2 0.400*  at an end of its grid")
