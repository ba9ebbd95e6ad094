"""Profiles: the seconds of each kind of work, by rounds, and the profile of a client process.

A client process samples itself while it answers messages. The seconds in which it waits for a
message are idle, and count for the round of this message.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from fedmuon.core.files import Record
from fedmuon.core.stack_sampler import Seconds, StackSampler
from fedmuon.core.threads import helper_threads
from fedmuon.runs.work_categories import CATEGORIES, IDLE, TABLE

PROFILE = "profile_seconds"  # key in the record of a round, and in the summary of a run
DIGITS = 4  # decimal places of seconds in files
GROUPS = 40  # maximum number of groups of rounds that a profile has


def run_sampler() -> StackSampler:
    """Return a sampler for a thread that runs rounds or trains clients. It has not started."""
    return StackSampler(TABLE, helper_threads)


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


class ProcessProfile:
    """The profile of a process that trains clients, by rounds."""

    def __init__(self) -> None:
        self._sampler = run_sampler()
        self._by_round: dict[int, Seconds] = {}
        self._free: float | None = None  # the time when the process began to wait

    @contextmanager
    def of_round(self, round: int, wanted: bool = True) -> Iterator[None]:
        """Within this context, the process works for a round, which is counted from 0.

        Without `wanted`, nothing is sampled.
        """
        if not wanted:
            yield
            return
        now = time.perf_counter()
        waited = {IDLE: now - self._free} if self._free is not None else {}
        self._sampler.start()
        try:
            yield
        finally:
            self._sampler.stop()
            parts = [self._by_round.get(round + 1, {}), waited, self._sampler.take()]
            self._by_round[round + 1] = added(parts)
            self._free = time.perf_counter()

    def end(self) -> dict[int, Seconds]:
        """Return the profile of each round, and forget it."""
        by_round = self._by_round
        self._sampler, self._by_round, self._free = run_sampler(), {}, None
        return by_round


this_process = ProcessProfile()
