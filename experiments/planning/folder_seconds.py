"""Seconds that a run spends on its folder: records, checkpoints, the ledger, the end.

All is tried in a folder that goes away, with the first model: nothing in it depends on the samples.
"""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from fedmuon.federated.accountant import RunAccountant
from fedmuon.federated.rounds import Round, ServerState
from fedmuon.runs.loop import Run
from fedmuon.runs.provenance import commit, machine, versions

AFFORD, MOST = 0.5, 50  # seconds and rounds of a ledger that is tried
NUMBER = 36  # bytes of a client's number in a list of Python's


@dataclass(frozen=True)
class FolderSeconds:
    """Seconds of a round's record (and, if private, of its line in the ledger), of a checkpoint, of
    the end; bytes of all records, which the end reads."""

    record: float
    checkpoint: float
    end: float
    memory: int


def of_folder(run: Run, state: ServerState) -> FolderSeconds:
    """Tried in the run's own folder."""
    directory, federation = run.directory, run.config.federation
    chosen = list(range(federation.per_round))
    record = {"round": 1, "participants": chosen, "client_loss": 0.5, "seconds": 1.0}
    added = seconds(lambda: directory.append(record))
    ledger, summed = _ledger(run, state) if run.experiment.recipe.private else (0.0, 0.0)
    checkpoint = min(seconds(lambda: directory.checkpoint(state)) for _ in range(2))
    read = seconds(directory.records) * federation.rounds
    end = seconds(lambda: (versions(), commit(), machine(), directory.finish(state, {})))
    memory = (NUMBER + len(json.dumps(chosen)) // len(chosen)) * len(chosen) * federation.rounds
    return FolderSeconds(added + ledger, checkpoint, end + read + summed, memory)


def _ledger(run: Run, state: ServerState) -> tuple[float, float]:
    """Seconds of a round's line, and of the sum over all clients that the run will have."""
    path, plan = run.directory.path / "ledger.jsonl", run.experiment.plan
    account = RunAccountant.open(path, run.config, run.experiment, run.data.sizes, state)
    lines = account.ahead(itertools.repeat(cast(Round, None)), 0)
    spent: list[float] = []
    while len(spent) < min(plan.rounds, MOST) and sum(spent) < AFFORD:
        spent.append(seconds(lambda: next(lines)))
    summed = seconds(account.summary)
    if plan.poisson:
        return sum(spent) / len(spent), summed
    drawn = plan.schedule()
    more = len(np.unique(drawn)) / len(np.unique(drawn[: len(spent)]))
    return sum(spent) / len(spent), summed * more


def seconds(work: Callable[[], Any]) -> float:
    """That it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
