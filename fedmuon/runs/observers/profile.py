"""Which kinds of work took the time of a run, per round and per process."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from fedmuon.core.files import Record
from fedmuon.federated.experiment import Round
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES, WORKER_PROFILES
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.process_profile import run_sampler
from fedmuon.runs.profile_records import PROFILE, added, grouped, rounded


@runtime_checkable
class Profiled(Protocol):
    """An engine whose client processes sample themselves."""

    def profiles(self) -> list[Record]:
        """Return a record of each client process, and end its profile.

        The entry `rounds` maps the number of a round, from 1, to the seconds of each category.
        """
        ...


class Profile(Observer):
    """Adds a profile to the record of each round and to the summary.

    The time after a round's record, such as that of writing the record, counts for the next round.
    The profile of the summary includes the final evaluation. A resumed run adds to the profile of
    the earlier rounds. Its client processes are new and profile only the rounds after that.
    """

    def __init__(self, engine: object) -> None:
        self.engine = engine
        self.total: Mapping[str, float] = {}

    def begin(self, state: ServerState, earlier: Sequence[Record]) -> None:
        """Start to sample. The sampler ends with the function that calls this method."""
        self.total = added(record.get(PROFILE, {}) for record in earlier)
        self.sampler = run_sampler()
        self.sampler.start(sys._getframe(1).f_code)

    def after(self, finished: Round, record: Record) -> Record:
        """Return the seconds of each category since the last round."""
        seconds = rounded(self.sampler.take())
        self.total = added([self.total, seconds])
        return {PROFILE: seconds}

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the profile of this process, and of each client process if there are any."""
        self.sampler.stop()
        records = self.engine.profiles() if isinstance(self.engine, Profiled) else []
        own = {
            "process": "server" if records else "run",
            "seconds": rounded(added([self.total, self.sampler.take()])),
        }
        workers, files = [], NO_FILES
        for place, worker in enumerate(records, 1):
            seconds = rounded(added(worker["rounds"].values()))
            about = {name: value for name, value in worker.items() if name != "rounds"}
            workers.append({"process": f"worker {place}", **about, "seconds": seconds})
        if workers:
            by_round = {
                worker["process"]: grouped(record["rounds"], state.round)
                for worker, record in zip(workers, records, strict=True)
            }
            files = {WORKER_PROFILES: (json.dumps(by_round) + "\n").encode()}
        return {PROFILE: [own, *workers]}, files
