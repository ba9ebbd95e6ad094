"""Seconds of a run, measured in short trials: rounds, evaluations, and writing the run folder.

Trial rounds use the run's participants, samples and engine. If a whole round takes too long, fewer
participants or fewer steps are tried and the rest is inferred. Only the seconds are stored.
"""

import itertools
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedmuon.core.arrays import to_numpy
from fedmuon.core.errors import InputError
from fedmuon.data.partition import weights
from fedmuon.experiments.engines.processes import importable
from fedmuon.federated.accountant import RunAccountant
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import Engine, Experiment, Round, ServerState, risk, sample_weights
from fedmuon.federated.wire import named
from fedmuon.optim.aggregators import mean
from fedmuon.runs.loop import Run, end_bytes, evaluate
from fedmuon.runs.provenance import commit, machine, peak, versions

AFFORD, MOST = 3.0, 100  # seconds for trial rounds, and their maximum number
LOOK = 1.0  # seconds for trial evaluations
PROBES, PART = 3, 1024  # number of first, small rounds; rows of the first evaluation
PATIENCE = 30.0  # seconds within which workers should have started
SURPRISE = 1.3  # a round that takes this many times what is expected is repeated
LEDGER_AFFORD, LEDGER_MOST = 0.5, 50  # seconds and rounds for a trial ledger
NUMBER = 36  # bytes of a client's number in a Python list


@dataclass(frozen=True)
class Pace:
    """Estimates for the rounds of a run from trial rounds.

    Attributes:
        extra: Seconds that the first round takes more than the others.
        round: Seconds of a round of all participants.
        tried: Participants of the largest trial round.
        memory: Bytes that each further participant of a trial round took.
        rounds: Trial rounds that followed each other.
    """

    extra: float
    round: float
    tried: int
    memory: float = 0.0
    rounds: int = 1


@dataclass(frozen=True)
class Trial:
    """An experiment, its first state, and the engine that runs trial rounds."""

    experiment: Experiment
    state: ServerState
    engine: Engine

    def each(self, plan: RandomnessPlan) -> Iterator[float]:
        """The seconds of every round of the plan. A round ends when the next one is asked for."""
        tried = replace(self.experiment, plan=plan)
        if plan.per_round < self.experiment.plan.per_round:  # some rules reject so few replies
            tried = replace(tried, recipe=replace(tried.recipe, aggregate=mean()))
        turns = self.engine(tried, self.state)
        for _ in range(plan.rounds):
            start = time.perf_counter()
            next(turns)
            yield time.perf_counter() - start

    def seconds(self, plan: RandomnessPlan, rounds: int, afford: float) -> list[float]:
        """The seconds of at least one round of the plan, and of more if there is time for them."""
        found: list[float] = []
        for spent in self.each(plan):
            found.append(spent)
            if len(found) >= rounds or sum(found) + spent > afford:
                break
        return found


def seconds(work: Callable[[], Any]) -> float:
    """The time that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def few(plan: RandomnessPlan, clients: int, rounds: int, skipped: int = 0) -> RandomnessPlan:
    """A plan with some participants of each of the run's rounds, after those that are skipped."""
    drawn, rng = plan.schedule(), np.random.default_rng(0)
    chosen = [
        rng.choice(drawn[(skipped + number) % len(drawn)], clients, replace=False)
        for number in range(rounds)
    ]
    return replace(plan, per_round=clients, rounds=rounds, fixed=np.stack(chosen), factor=None)


def rows_of(plan: RandomnessPlan, sizes: np.ndarray, rounds: int | None = None) -> float:
    """Samples in one step of all participants: the mean over the first rounds, or over all."""
    seen = np.minimum(sizes, plan.batch) if plan.batch else sizes
    return float(seen[plan.schedule()[:rounds]].sum(1).mean())


def pace(
    trial: Trial,
    sizes: np.ndarray,
    least: int = 1,
    divisible: bool = True,
    settled: Callable[[], bool] = lambda: True,
) -> Pace:
    """Measure how long rounds take.

    Args:
        trial: Where rounds are tried.
        sizes: Samples of each client.
        least: The number of workers. A trial round has at least that many participants.
        divisible: Whether a round can be as short as one step of one client. Workers know the
            number of steps, so their rounds cannot.
        settled: Says whether all workers have started.
    """
    plan = trial.experiment.plan
    if not divisible:
        small = few(plan, min(least, plan.per_round), MOST)
        return _grown(trial, _probed(trial, small, settled), lambda some, _: some.per_round)
    chosen = plan.schedule()[0]
    ordinary = int(chosen[np.abs(sizes[chosen] - sizes[plan.schedule()].mean()).argmin()])
    # The client whose size is nearest to the mean, again and again: the same seconds each time.
    small = replace(few(plan, 1, MOST), fixed=np.full((MOST, 1), ordinary))
    extra, step, _ = _probed(trial, replace(small, steps=1), settled)
    if (client := step * plan.steps) > AFFORD:
        return Pace(extra, client * rows_of(plan, sizes) / rows_of(small, sizes), 1)
    client = trial.seconds(small, 1, AFFORD)[0]
    return _grown(trial, (extra, client, small), lambda some, n: rows_of(some, sizes, n))


def _probed(
    trial: Trial, small: RandomnessPlan, settled: Callable[[], bool]
) -> tuple[float, float, RandomnessPlan]:
    """The extra seconds of the first rounds, the seconds of another round, and the plan."""
    found, after = [], 0
    for spent in trial.each(small):
        found.append(spent)
        after += settled()
        if after >= PROBES or (after >= 2 and sum(found[1 - after :]) > AFFORD / 3):
            break
        if len(found) > 1 and sum(found) > PATIENCE:
            break
    one = min(found)
    return sum(found) - one * len(found), one, small


def _grown(
    trial: Trial,
    probed: tuple[float, float, RandomnessPlan],
    units: Callable[[RandomnessPlan, int | None], float],
) -> Pace:
    """Try rounds of more and more clients, up to all of them, while there is time for one.

    The model is seconds = a + b units. It is proportional while only one size has been tried.
    """
    (extra, one, small), plan, held = probed, trial.experiment.plan, peak()
    first, every = units(small, 1), units(plan, None)
    tried, found, seen, whole = small.per_round, [one], first, one * every / first
    while tried < plan.per_round:
        wanted = int(plan.per_round * min(1.0, AFFORD / whole))
        if wanted < 1.2 * tried and wanted < plan.per_round:
            break
        tried, larger = wanted, few(plan, wanted, MOST, PROBES)
        found = trial.seconds(larger, 1, AFFORD)
        seen = units(larger, 1)
        if found[0] > SURPRISE * whole * seen / every:  # more clients may load more code
            again = trial.seconds(larger, 1, AFFORD)
            extra, found = extra + max(0.0, found[0] - again[0]), again
        whole = found[0] + _slope((first, one), (seen, found[0])) * (every - seen)
    more: list[float] = []
    if found[0] < AFFORD / 2:
        larger = few(plan, tried, MOST, PROBES + 1)
        more = trial.seconds(larger, MOST, AFFORD - found[0])
        seen = (seen + len(more) * units(larger, len(more))) / (1 + len(more))
        found += more
    above = tried - small.per_round
    memory = (peak() - held) / above if above else 0.0
    if tried == plan.per_round:
        return Pace(extra, statistics.median(found), tried, memory, len(more))
    again = sum(found) / len(found)
    each = _slope((first, one), (seen, again))
    return Pace(extra, again + each * (every - seen), tried, memory, len(more))


def _slope(small: tuple[float, float], large: tuple[float, float]) -> float:
    """Seconds per unit from two rounds (units, seconds); from the larger one if they are alike."""
    (less, one), (more, other) = small, large
    return max(0.0, (other - one) / (more - less)) if more > 1.1 * less else other / more


def evaluation(run: Run, state: ServerState) -> float:
    """Seconds of one evaluation of the model, inferred from fewer rows if all take too long."""
    shards, task = run.experiment.shards, run.experiment.task
    shares = sample_weights(run.data.sizes, weights(run.data.sizes, "size"))
    train, held = len(shards.labels), len(shards.held_out.labels)
    held += len(shards.validation.labels) if shards.validation else 0

    def look(rows: int) -> None:
        part = shards.inputs[:rows], shards.labels[:rows], shares[:rows].to(shards.labels.device)
        risk(task, state.params, *part)

    rows = min(train, PART)
    whole = min(seconds(lambda: look(rows)) for _ in range(2)) * (train + held) / rows
    if whole <= LOOK:
        return statistics.median(seconds(lambda: evaluate(run, state)) for _ in range(3))
    rows = max(rows, min(train, int((train + held) * LOOK / whole)))
    return seconds(lambda: look(rows)) * (train + held) / rows


# The run folder. Everything is tried with the first model in a temporary folder, because nothing
# depends on the samples.


@dataclass(frozen=True)
class FolderSeconds:
    """Seconds of a round's record (with its ledger line, in a private run), of a checkpoint and of
    the end; bytes of all records, which are read at the end."""

    record: float
    checkpoint: float
    end: float
    memory: int


def folder_seconds(run: Run, state: ServerState) -> FolderSeconds:
    """Measure writes to the run's own folder."""
    directory, federation = run.directory, run.config.federation
    chosen = list(range(federation.per_round))
    record = {"round": 1, "participants": chosen, "client_loss": 0.5, "seconds": 1.0}
    record |= {"bytes_down": 1 << 20, "bytes_up": 1 << 20}
    added = seconds(lambda: directory.append(record))
    ledger, summed = _ledger(run, state) if run.experiment.recipe.private else (0.0, 0.0)
    arrays = to_numpy(named(state.params, state.states))
    checkpoint = min(seconds(lambda: directory.checkpoint(state.round, arrays)) for _ in range(2))
    read = seconds(directory.records) * federation.rounds
    end = seconds(
        lambda: (versions(), commit(), machine(1), directory.finish(*end_bytes(state), {}))
    )
    memory = (NUMBER + len(json.dumps(chosen)) // len(chosen)) * len(chosen) * federation.rounds
    return FolderSeconds(added + ledger, checkpoint, end + read + summed, memory)


def _ledger(run: Run, state: ServerState) -> tuple[float, float]:
    """Seconds of a round's line, and of the account of all clients that take part in the run."""
    path, plan = run.directory.path / "ledger.jsonl", run.experiment.plan
    account = RunAccountant.open(path, run.config, run.experiment, run.data.sizes, state)
    lines = account.ahead(itertools.repeat(cast(Round, None)), 0)
    spent: list[float] = []
    while len(spent) < min(plan.rounds, LEDGER_MOST) and sum(spent) < LEDGER_AFFORD:
        spent.append(seconds(lambda: next(lines)))
    summed = seconds(account.summary)
    if not plan.poisson:
        drawn = plan.schedule()
        summed *= len(np.unique(drawn)) / len(np.unique(drawn[: len(spent)]))
    return sum(spent) / len(spent), summed


# Deployments. No round is tried: processes like those that Flower starts for a message are timed.
# The constants were found with 3 and 4 clients on 2 cores. They count processes, or are seconds of
# Flower's own polling, so they do not depend on the machine's speed. The start is a rough estimate.
# `python -m benchmarks.plan --only deployment` compares them with a run.

WAIT = 1.0  # seconds of a round in which every process waits for the next poll
# The others count processes that answer which partition they hold.
SERIAL = 1.5  # before any SuperNode starts
EACH = 0.75  # for each SuperNode; one starts per core at a time
ASKED = 0.5  # for each question; the first are answered while other nodes start


def deployed(run: Run, state: ServerState) -> tuple[Pace, float, float, int, int, int, int]:
    """The fields of `cost.Engine` for a deployment."""
    from fedmuon.server import message_sizes  # loads Ray and Flower

    federation, cores = run.config.federation, os.cpu_count() or 1
    asked = message_sizes.requests(run.config, run.experiment, state)
    who = message_sizes.questions(range(federation.clients))
    with tempfile.TemporaryDirectory(prefix="plan-of-fedmuon-") as folder:
        some, place = min(cores, len(asked), len(who)), Path(folder)
        query, _ = probed(who[:some], federation.clients, place)
        train, memory = probed(asked[:some], federation.clients, place)
    later = train * math.ceil(len(asked) / some) + WAIT
    turns = len(who) / some
    first, start = query * ASKED * turns, query * (SERIAL + EACH * turns)
    sent = message_sizes.on_link(run.config, run.experiment, state)
    return Pace(first, later, some), start, 0.0, federation.clients, memory, sent.down, sent.up


def probed(messages: Sequence[object], nodes: int, folder: Path) -> tuple[float, int]:
    """Seconds until processes that answer a message each, all at once, have ended; and the most
    bytes that one of them held."""
    environment = {**os.environ, "PYTHONPATH": importable()}
    command = [sys.executable, "-m", "fedmuon.experiments.engines.probe"]
    for number, message in enumerate(messages):
        (folder / f"{number}.pickle").write_bytes(pickle.dumps((message, nodes)))
    start = time.perf_counter()
    running = [
        subprocess.Popen(
            [*command, folder / f"{number}.pickle"], stdout=subprocess.PIPE, env=environment
        )
        for number in range(len(messages))
    ]
    try:
        said = [one.communicate()[0] for one in running]
    finally:
        for one in running:
            one.kill()
    seconds = time.perf_counter() - start
    if any(one.returncode for one in running):
        raise InputError(
            "a client's process does not answer on this machine: see its message above"
        )
    return seconds, max(map(int, said))
