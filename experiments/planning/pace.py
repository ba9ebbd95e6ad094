"""Seconds of a round and of an evaluation, from a few seconds of each.

Rounds are those of the run: its participants, their rows, its engine. Where a whole round takes
too long, fewer of its participants are tried, or fewer of their steps, and the rest is inferred.
Nothing that a trial finds is kept but its seconds.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from fedmuon.data.partition import weights
from fedmuon.experiments.planning.folder_seconds import seconds
from fedmuon.federated.evaluate import risk, sample_weights
from fedmuon.federated.plan import Plan
from fedmuon.federated.rounds import Engine, Experiment, ServerState
from fedmuon.optim.aggregators import mean
from fedmuon.runs.loop import Run, evaluate
from fedmuon.runs.provenance import peak

AFFORD, MOST = 3.0, 100  # seconds that rounds may be tried for, and rounds
LOOK = 1.0  # seconds that evaluations may be tried for
PROBES, PART = 3, 1024  # first, small rounds; rows of a first look
PATIENCE = 30.0  # seconds that workers may take to begin
SURPRISE = 1.3  # times what is expected, and a round is tried again


@dataclass(frozen=True)
class Pace:
    """Seconds of a round of all participants, and what the first one takes more; `tried` is the
    largest round that was tried, each client of which took so much `memory`, and `rounds` are how
    many followed each other."""

    extra: float
    round: float
    tried: int
    memory: float = 0.0
    rounds: int = 1


@dataclass(frozen=True)
class Trial:
    """Where rounds are tried: the experiment, its first state, who runs the clients."""

    experiment: Experiment
    state: ServerState
    engine: Engine

    def seconds(self, plan: Plan, rounds: int, least: int, afford: float) -> list[float]:
        """Of rounds of the plan: `least`, and more of them as long as they are affordable."""
        found: list[float] = []
        for spent in self.each(plan):
            found.append(spent)
            if len(found) >= least and (len(found) >= rounds or sum(found) + spent > afford):
                break
        return found

    def each(self, plan: Plan) -> Iterator[float]:
        """Of every round of the plan, which is over when the next one is asked for."""
        tried = replace(self.experiment, plan=plan)
        if plan.per_round < self.experiment.plan.per_round:  # some rules refuse so few replies
            tried = replace(tried, recipe=replace(tried.recipe, aggregate=mean()))
        turns = self.engine(tried, self.state)
        for _ in range(plan.rounds):
            start = time.perf_counter()
            next(turns)
            yield time.perf_counter() - start


def few(plan: Plan, clients: int, rounds: int, skipped: int = 0) -> Plan:
    """Rounds of some of the run's participants, of its first rounds after those skipped."""
    drawn, rng = plan.schedule(), np.random.default_rng(0)
    chosen = [
        rng.choice(drawn[(skipped + number) % len(drawn)], clients, replace=False)
        for number in range(rounds)
    ]
    return replace(plan, per_round=clients, rounds=rounds, fixed=np.stack(chosen), factor=None)


def _ordinary(plan: Plan, sizes: np.ndarray) -> int:
    """The client of the first round whose size is nearest to what is usual."""
    chosen = plan.schedule()[0]
    return int(chosen[np.abs(sizes[chosen] - sizes[plan.schedule()].mean()).argmin()])


def rows_of(plan: Plan, sizes: np.ndarray, rounds: int | None = None) -> float:
    """Rows that a step of all participants sees, on average over the first rounds, or all."""
    seen = np.minimum(sizes, plan.batch) if plan.batch else sizes
    return float(seen[plan.schedule()[:rounds]].sum(1).mean())


def pace(
    trial: Trial,
    sizes: np.ndarray,
    least: int = 1,
    divisible: bool = True,
    settled: Callable[[], bool] = lambda: True,
) -> Pace:
    """How fast rounds are. They are `divisible` down to one step of one client, but not on workers,
    who know the number of steps, are `least` as many as clients are asked, and have all begun when
    they are `settled`."""
    plan = trial.experiment.plan
    if not divisible:
        small = few(plan, min(least, plan.per_round), MOST)
        return _grown(trial, _probed(trial, small, settled), lambda some, _: some.per_round)
    ordinary = np.full((MOST, 1), _ordinary(plan, sizes))  # again and again: the same seconds
    small = replace(few(plan, 1, MOST), fixed=ordinary)
    extra, step, _ = _probed(trial, replace(small, steps=1), settled)
    if (client := step * plan.steps) > AFFORD:
        return Pace(extra, client * rows_of(plan, sizes) / rows_of(small, sizes), 1)
    client = trial.seconds(small, 1, 1, AFFORD)[0]
    return _grown(trial, (extra, client, small), lambda some, n: rows_of(some, sizes, n))


def _probed(trial: Trial, small: Plan, settled: Callable[[], bool]) -> tuple[float, float, Plan]:
    """What the first rounds take more, one of the others, and whose it is."""
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
    trial: Trial, probed: tuple[float, float, Plan], units: Callable[[Plan, int | None], float]
) -> Pace:
    """Rounds of more and more clients, up to all, as long as one is affordable; seconds are a + b
    units, and in proportion to them while nothing else is known."""
    (extra, one, small), plan, held = probed, trial.experiment.plan, peak()
    first, every = units(small, 1), units(plan, None)
    tried, found, seen, whole = small.per_round, [one], first, one * every / first
    while tried < plan.per_round:
        wanted = int(plan.per_round * min(1.0, AFFORD / whole))
        if wanted < 1.2 * tried and wanted < plan.per_round:
            break
        tried, larger = wanted, few(plan, wanted, MOST, PROBES)
        found = trial.seconds(larger, 1, 1, AFFORD)
        seen = units(larger, 1)
        if found[0] > SURPRISE * whole * seen / every:  # as where more clients load more code
            again = trial.seconds(larger, 1, 1, AFFORD)
            extra, found = extra + max(0.0, found[0] - again[0]), again
        whole = found[0] + _slope((first, one), (seen, found[0])) * (every - seen)
    more: list[float] = []
    if found[0] < AFFORD / 2:
        larger = few(plan, tried, MOST, PROBES + 1)
        more = trial.seconds(larger, MOST, 1, AFFORD - found[0])
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
    """Seconds of a unit, from two rounds as (units, seconds); of one alone, if they are alike."""
    (less, one), (more, other) = small, large
    return max(0.0, (other - one) / (more - less)) if more > 1.1 * less else other / more


def evaluation(run: Run, state: ServerState) -> float:
    """Seconds of a look at the model: on all rows, or on as many as are affordable."""
    shards, task = run.experiment.shards, run.experiment.task
    shares = sample_weights(run.data.sizes, weights(run.data.sizes, "size"))
    train, held = len(shards.labels), len(shards.held_out.labels)

    def look(rows: int) -> None:
        part = shards.inputs[:rows], shards.labels[:rows], shares[:rows].to(shards.labels.device)
        risk(task, state.params, *part)

    rows = min(train, PART)
    whole = min(seconds(lambda: look(rows)) for _ in range(2)) * (train + held) / rows
    if whole <= LOOK:
        return statistics.median(seconds(lambda: evaluate(run, state)) for _ in range(3))
    rows = max(rows, min(train, int((train + held) * LOOK / whole)))
    return seconds(lambda: look(rows)) * (train + held) / rows
