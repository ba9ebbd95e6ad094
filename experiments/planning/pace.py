"""Measure the seconds of a run in short trials: rounds, evaluations, and writing the run folder.

Trial rounds use the run's participants, samples and engine. If a whole round takes too long, fewer
participants or fewer steps are tried and the rest is extrapolated. The results of trial rounds are
discarded.
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
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedmuon.core.arrays import to_numpy
from fedmuon.core.errors import InputError
from fedmuon.data.partition import weights
from fedmuon.experiments.engines.processes import importable
from fedmuon.experiments.planning.model_memory import evaluated_at_once
from fedmuon.federated.accountant import RunAccountant
from fedmuon.federated.evaluation import risk, sample_weights
from fedmuon.federated.experiment import Engine, Experiment, Round
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.wire import named
from fedmuon.optim.aggregator import mean
from fedmuon.optim.stage import ServerState
from fedmuon.runs.ending import end_bytes
from fedmuon.runs.observers.evaluation import evaluate
from fedmuon.runs.prepare import Run
from fedmuon.runs.provenance import commit, machine, peak, versions

AFFORD, MOST = 3.0, 100  # seconds for trial rounds, and their maximum number
LOOK = 1.0  # seconds for trial evaluations
PROBES, GROWTH = 3, 8  # number of first, small rounds; growth of the rows of a trial evaluation
PATIENCE = 30.0  # seconds within which workers should have started
SURPRISE = 1.3  # repeat a trial round that takes more than this multiple of the expected seconds
LEDGER_AFFORD, LEDGER_MOST = 0.5, 50  # seconds and rounds for a trial ledger
NUMBER = 36  # bytes of one client number in a Python list


@dataclass(frozen=True)
class Pace:
    """Estimates for the rounds of a run, based on trial rounds.

    Attributes:
        extra: Additional seconds of the first round, compared with later rounds.
        round: Seconds of a round with all participants.
        tried: Number of participants of the largest trial round.
        memory: Bytes for each additional participant of a trial round.
        rounds: Number of trial rounds with `tried` participants, without the first such round.
    """

    extra: float
    round: float
    tried: int
    memory: float = 0.0
    rounds: int = 1


@dataclass(frozen=True)
class Trial:
    """An experiment, its initial state, and the engine that runs trial rounds."""

    experiment: Experiment
    state: ServerState
    engine: Engine

    def each(self, plan: RandomnessPlan) -> Iterator[float]:
        """Yield the seconds that each round takes. A round runs when its seconds are requested."""
        tried = replace(self.experiment, plan=plan)
        if plan.per_round < self.experiment.plan.per_round:  # some rules need more replies
            tried = replace(tried, recipe=replace(tried.recipe, aggregate=mean()))
        turns = self.engine(tried, self.state)
        for _ in range(plan.rounds):
            start = time.perf_counter()
            next(turns)
            yield time.perf_counter() - start

    def seconds(self, plan: RandomnessPlan, rounds: int, afford: float) -> list[float]:
        """Run at least one and at most `rounds` rounds, and return the seconds of each round.

        The rounds stop before they would probably take more than `afford` seconds in total.
        """
        times: list[float] = []
        for spent in self.each(plan):
            times.append(spent)
            if len(times) >= rounds or sum(times) + spent > afford:
                break
        return times


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def few(plan: RandomnessPlan, clients: int, rounds: int, skipped: int = 0) -> RandomnessPlan:
    """Return a plan of `rounds` rounds with `clients` participants each.

    The first `skipped` rounds of the original plan are left out.
    """
    drawn, rng = plan.schedule(), np.random.default_rng(0)
    cohorts = [
        rng.choice(drawn[(skipped + number) % len(drawn)], clients, replace=False)
        for number in range(rounds)
    ]
    return replace(plan, per_round=clients, rounds=rounds, fixed=np.stack(cohorts), factor=None)


def rows_of(plan: RandomnessPlan, sizes: np.ndarray, rounds: int | None = None) -> float:
    """Return the number of samples that all participants of a round use in one local step.

    The number is a mean over the first `rounds` rounds, or over all rounds if `rounds` is None.
    """
    rows = np.minimum(sizes, plan.batch) if plan.batch else sizes
    return float(rows[plan.schedule()[:rounds]].sum(1).mean())


def pace(
    trial: Trial,
    sizes: np.ndarray,
    least: int = 1,
    divisible: bool = True,
    settled: Callable[[], bool] = lambda: True,
) -> Pace:
    """Measure how long rounds take.

    Args:
        trial: The experiment and the engine of the trial rounds.
        sizes: Number of samples of each client.
        least: The number of workers. A trial round has at least this many participants.
        divisible: Whether a round can be as short as one step of one client. Rounds on workers
            cannot be shortened, because the workers know the number of steps.
        settled: A function that returns whether all workers have started.
    """
    plan = trial.experiment.plan
    if not divisible:
        small = few(plan, min(least, plan.per_round), MOST)
        return _grown(trial, _probed(trial, small, settled), lambda tried, _: tried.per_round)
    cohort = plan.schedule()[0]
    ordinary = int(cohort[np.abs(sizes[cohort] - sizes[plan.schedule()].mean()).argmin()])
    # Repeat the client whose size is nearest to the mean, so that all rounds take the same time.
    small = replace(few(plan, 1, MOST), fixed=np.full((MOST, 1), ordinary))
    extra, step, _ = _probed(trial, replace(small, steps=1), settled)
    if (client := step * plan.steps) > AFFORD:
        return Pace(extra, client * rows_of(plan, sizes) / rows_of(small, sizes), 1)
    client = trial.seconds(small, 1, AFFORD)[0]
    return _grown(trial, (extra, client, small), lambda tried, n: rows_of(tried, sizes, n))


def _probed(
    trial: Trial, small: RandomnessPlan, settled: Callable[[], bool]
) -> tuple[float, float, RandomnessPlan]:
    """Return the extra seconds of the first rounds, the seconds of a later round, and the plan."""
    times, after = [], 0
    for spent in trial.each(small):
        times.append(spent)
        after += settled()
        if after >= PROBES or (after >= 2 and sum(times[1 - after :]) > AFFORD / 3):
            break
        if len(times) > 1 and sum(times) > PATIENCE:
            break
    fastest = min(times)
    return sum(times) - fastest * len(times), fastest, small


def _grown(
    trial: Trial,
    probed: tuple[float, float, RandomnessPlan],
    units: Callable[[RandomnessPlan, int | None], float],
) -> Pace:
    """Try rounds with more and more clients, as long as a round fits in the available time.

    The seconds of a round are modelled as a + b * units, where `units` measures the work of a
    round. If only one size was tried, a is 0.
    """
    (extra, fastest, small), plan, memory_before = probed, trial.experiment.plan, peak()
    small_work, total = units(small, 1), units(plan, None)
    tried, times, work, guess = small.per_round, [fastest], small_work, fastest * total / small_work
    while tried < plan.per_round:
        clients = int(plan.per_round * min(1.0, AFFORD / guess))
        if clients < 1.2 * tried and clients < plan.per_round:
            break
        tried, larger = clients, few(plan, clients, MOST, PROBES)
        times = trial.seconds(larger, 1, AFFORD)
        work = units(larger, 1)
        if times[0] > SURPRISE * guess * work / total:  # a first larger round may load more code
            measured = trial.seconds(larger, 1, AFFORD)
            extra, times = extra + max(0.0, times[0] - measured[0]), measured
        guess = times[0] + _slope((small_work, fastest), (work, times[0])) * (total - work)
    later: list[float] = []
    if times[0] < AFFORD / 2:
        larger = few(plan, tried, MOST, PROBES + 1)
        later = trial.seconds(larger, MOST, AFFORD - times[0])
        work = (work + len(later) * units(larger, len(later))) / (1 + len(later))
        times += later
    above = tried - small.per_round
    memory = (peak() - memory_before) / above if above else 0.0
    if tried == plan.per_round:
        return Pace(extra, statistics.median(times), tried, memory, len(later))
    measured = sum(times) / len(times)
    per_unit = _slope((small_work, fastest), (work, measured))
    return Pace(extra, measured + per_unit * (total - work), tried, memory, len(later))


def _slope(small: tuple[float, float], large: tuple[float, float]) -> float:
    """Return the seconds per unit, as the slope between two rounds.

    Each round is a pair (units, seconds). If the two rounds have similar sizes, the result is
    computed from the larger round alone.
    """
    (small_units, small_seconds), (large_units, large_seconds) = small, large
    return (
        max(0.0, (large_seconds - small_seconds) / (large_units - small_units))
        if large_units > 1.1 * small_units
        else large_seconds / large_units
    )


def evaluation(run: Run, state: ServerState) -> float:
    """Return the seconds of one evaluation. A long evaluation is estimated from fewer samples."""
    shards, task = run.experiment.shards, run.experiment.task
    shares = sample_weights(run.data.sizes, weights(run.data.sizes, "size"))
    train, held_out = len(shards.labels), len(shards.held_out.labels)
    held_out += len(shards.validation.labels) if shards.validation else 0

    def look(rows: int) -> None:
        part = shards.inputs[:rows], shards.labels[:rows], shares[:rows].to(shards.labels.device)
        risk(task, state.params, *part)

    rows = 1
    look(rows)  # the first call may load more code
    # A sample of a language model takes longer than thousands of samples of a small network.
    while (taken := seconds(partial(look, rows))) < LOOK / 10 and rows < train:
        rows = min(train, GROWTH * rows)
    estimate = taken * (train + held_out) / rows
    if estimate <= LOOK:
        return statistics.median(seconds(lambda: evaluate(run, state)) for _ in range(3))
    least = evaluated_at_once(task)  # so that the trial's memory is that of the run
    rows = max(rows, min(train, max(least, int((train + held_out) * LOOK / estimate))))
    return seconds(partial(look, rows)) * (train + held_out) / rows


# Writing the run folder. The trial writes the initial model to a temporary folder, because the
# time does not depend on the samples.


@dataclass(frozen=True)
class FolderSeconds:
    """The seconds to write a record, a checkpoint and the final files, and the memory in bytes.

    In a private run, a record includes its ledger line. All records are in memory at the end.
    """

    record: float
    checkpoint: float
    end: float
    memory: int


def folder_seconds(run: Run, state: ServerState) -> FolderSeconds:
    """Measure how long writes to the run folder take."""
    directory, federation = run.directory, run.config.federation
    cohort = list(range(federation.per_round))
    record = {"round": 1, "participants": cohort, "client_loss": 0.5, "seconds": 1.0}
    record |= {"bytes_down": 1 << 20, "bytes_up": 1 << 20}
    added = seconds(lambda: directory.append(record))
    ledger, summed = _ledger(run, state) if run.experiment.recipe.private else (0.0, 0.0)
    arrays = to_numpy(named(state.params, state.states))
    checkpoint = min(seconds(lambda: directory.checkpoint(state.round, arrays)) for _ in range(2))
    read = seconds(directory.records) * federation.rounds
    end = seconds(
        lambda: (versions(), commit(), machine(1), directory.finish(*end_bytes(state), {}))
    )
    memory = (NUMBER + len(json.dumps(cohort)) // len(cohort)) * len(cohort) * federation.rounds
    return FolderSeconds(added + ledger, checkpoint, end + read + summed, memory)


def _ledger(run: Run, state: ServerState) -> tuple[float, float]:
    """Return the seconds to write a ledger line, and to compute the epsilon of all participants."""
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


# Deployments. No round is tried. Instead, processes like those that Flower starts for a message are
# timed. The constants were measured with 3 and 4 clients on 2 cores. They do not depend on the
# machine's speed, because they count processes or are seconds between Flower's polls. The start is
# a rough estimate. `python -m benchmarks.plan --only deployment` compares the plan with a run.

WAIT = 1.0  # seconds per round in which every process waits for the next poll
# The next constants count durations of a process that answers which partition it has.
SERIAL = 1.5  # before any SuperNode starts
EACH = 0.75  # for each SuperNode; one SuperNode per core starts at a time
ASKED = 0.5  # for each query; the first queries are answered while other SuperNodes start


def deployed(run: Run, state: ServerState) -> tuple[Pace, float, float, int, int, int, int]:
    """Return the fields of `cost.Engine` for a deployment."""
    from fedmuon.server import message_sizes  # imports Ray and Flower

    federation, cores = run.config.federation, os.cpu_count() or 1
    requests = message_sizes.requests(run.config, run.experiment, state)
    questions = message_sizes.questions(range(federation.clients))
    with tempfile.TemporaryDirectory(prefix="plan-of-fedmuon-") as folder:
        count, place = min(cores, len(requests), len(questions)), Path(folder)
        query, _ = probed(questions[:count], federation.clients, place)
        train, memory = probed(requests[:count], federation.clients, place)
    later = train * math.ceil(len(requests) / count) + WAIT
    turns = len(questions) / count
    first, start = query * ASKED * turns, query * (SERIAL + EACH * turns)
    sent = message_sizes.on_link(run.config, run.experiment, state)
    return Pace(first, later, count), start, 0.0, federation.clients, memory, sent.down, sent.up


def probed(messages: Sequence[object], nodes: int, folder: Path) -> tuple[float, int]:
    """Return the seconds and the maximum memory of processes that answer one message each.

    All processes start at once. The time is measured until the last process has ended. The memory
    is the peak of a single process in bytes.
    """
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
        answers = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    seconds = time.perf_counter() - start
    if any(process.returncode for process in running):
        raise InputError(
            "a client process failed on this machine. Its error message is above. Fix the cause "
            "and run the command again."
        )
    return seconds, max(map(int, answers))
