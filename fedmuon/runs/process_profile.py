"""The profile of a client process, and the sampler of runs.

A client process samples itself while it answers messages. The seconds in which it waits for a
message are idle, and count for the round of this message.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedmuon.core.stack_sampler import Seconds, StackSampler
from fedmuon.core.threads import helper_threads
from fedmuon.runs.profile_records import added
from fedmuon.runs.work_categories import IDLE, TABLE


def run_sampler() -> StackSampler:
    """Return a sampler for a thread that runs rounds or trains clients. It has not started."""
    return StackSampler(TABLE, helper_threads)


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
