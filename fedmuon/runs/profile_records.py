"""The seconds of each kind of work as files contain them: rounded, added up, grouped by rounds."""

from collections.abc import Iterable, Mapping

from fedmuon.core.files import Record
from fedmuon.core.stack_sampler import Seconds
from fedmuon.runs.work_categories import CATEGORIES

PROFILE = "profile_seconds"  # key in the record of a round, and in the summary of a run
DIGITS = 4  # decimal places of seconds in files
GROUPS = 40  # maximum number of groups of rounds that a profile has


def rounded(seconds: Seconds) -> Seconds:
    """Return the seconds as files contain them, in the order of the categories, without zeros."""
    values = {name: round(seconds.get(name, 0.0), DIGITS) for name in CATEGORIES}
    return {name: value for name, value in values.items() if value}


def added(parts: Iterable[Mapping[str, float]]) -> Seconds:
    """Return the sum of several profiles."""
    total: Seconds = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def grouped(by_round: Mapping[int, Mapping[str, float]], last: int) -> list[Record]:
    """Add up the profiles of neighbouring rounds, so that there are at most `GROUPS` groups.

    Args:
        by_round: Profiles by the number of the round, from 1. Rounds may be missing.
        last: Number of the last round of the run, which determines the groups.

    Returns:
        A record for each group that is not empty: the `first` and the `last` round, and `seconds`.
    """
    size = -(-last // GROUPS)
    groups: dict[int, list[Mapping[str, float]]] = {}
    for number in sorted(by_round):
        groups.setdefault((number - 1) // size, []).append(by_round[number])
    return [
        {
            "first": place * size + 1,
            "last": min(last, (place + 1) * size),
            "seconds": rounded(added(parts)),
        }
        for place, parts in groups.items()
    ]
