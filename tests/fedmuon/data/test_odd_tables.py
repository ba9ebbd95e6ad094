"""Some 200 tables of odd kinds end as an oracle says that never calls a reader."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.odd_tables import Odd, Right, cases, judge

EVERY = [case for case in cases() if case.form != "parquet" or find_spec("pyarrow")]
QUICK = 9  # the quick tests take each ninth case


def wrong(chosen: list[Odd], place: Path) -> dict[str, str]:
    ended = {case.name: judge(case, place / str(k)) for k, case in enumerate(chosen)}
    return {name: why for name, why in ended.items() if why}


def test_some_odd_tables_are_read_or_rejected_rightly(tmp_path: Path) -> None:
    assert wrong(EVERY[::QUICK], tmp_path) == {}


@pytest.mark.slow
def test_all_odd_tables_are_read_or_rejected_rightly(tmp_path: Path) -> None:
    assert len(cases()) >= 200 and len({case.name for case in cases()}) == len(cases())
    assert wrong(EVERY, tmp_path) == {}


def test_the_oracle_notices_a_wrong_reader(tmp_path: Path) -> None:
    """Swapped labels, accepted faults and other words of an error are noticed."""
    sound = next(case for case in EVERY if case.name == "csv: labels: words")
    faulty = next(case for case in EVERY if case.name == "csv: empty label 1")
    assert sound.right.labels is not None
    swapped = Right((), sound.right.inputs, sound.right.labels[::-1])
    changed = [
        Odd("swapped", "csv", sound.make, swapped),
        Odd("accepted", "csv", sound.make, faulty.right),
        Odd("rejected", "csv", faulty.make, sound.right),
        Odd("words", "csv", faulty.make, Right(("@2",))),
        Odd(
            "scaled",
            "csv",
            sound.make,
            Right((), 2 * np.array(sound.right.inputs), sound.right.labels),
        ),
    ]
    assert [*wrong(changed, tmp_path)] == [case.name for case in changed]
