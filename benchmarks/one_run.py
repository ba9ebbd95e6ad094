"""Audit single runs with canaries: the setting of the DP-Muon paper, and many small runs.

    python -m benchmarks.one_run [--repetitions 50] [--canaries 40000]
    python -m benchmarks.one_run --level client [--repetitions 50] [--trials 1000]

At level example, one run uses the E2E setting of the DP-Muon paper: N = 42043, lots of 1024, 410
steps, sigma = 2.3395, 49 matrices and delta = 8e-6. The published epsilon is 7.985, and joint
accounting gives 61.98. The run consists of real DP-Muon steps on small matrices. Smaller runs are
repeated, in one case with lots that contain all the data. The benchmark counts the bounds that
exceed the epsilon of their ledger. At most 5% may, because each bound has a confidence of 95%.

At level client, the benchmark computes the same share for runs whose canaries are clients, with
noise of the server and with noise of the clients. It also computes a bound from many runs with one
client and the same number of runs without it.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedmuon.config.load import parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.experiments.auditing import one_run
from fedmuon.experiments.auditing.canaries import ClientAuditor
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import begin, simulate
from fedmuon.optim.client_privacy import ClientPrivacy
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.privacy.audit import Statistics, counted

WIDTH, MATRICES = 64, 49
PUBLISHED = {"noise": 2.3395, "lot": 1024.0, "delta": 8e-6}
E2E = {
    "data": {"name": "synthetic", "train": 42043, "test": 100, "dimension": WIDTH,
             "classes": WIDTH},
    "federation": {"clients": 1, "per-round": 1, "rounds": 5},
    "task": {"name": "given"},
    "local": {"recipe": "dp-muon", "steps": 82, "lr": 0.01, "route": "all-matrices"},
    "orthogonalizer": {"name": "newton-schulz"},
    "privacy": PUBLISHED,
    "output": {"evaluate-every": 5},
}  # fmt: skip
SMALL = {
    "data": {"name": "synthetic", "train": 400, "test": 10, "dimension": 200},
    "federation": {"clients": 2, "per-round": 2, "rounds": 2},
    "local": {"recipe": "dp-muon", "steps": 2, "lr": 0.1},
    "privacy": {"noise": 0.5, "lot": 40.0, "delta": 1e-5},
}
CLIENTS = {
    "data": {"name": "synthetic", "train": 800, "test": 10, "dimension": 200, "minimum": 1},
    "federation": {"clients": 400, "per-round": 100, "rounds": 4},
    "local": {"recipe": "fedmuon", "steps": 1, "lr": 0.1},
    "privacy": {"level": "client", "noise": 0.5, "bound": 0.5, "delta": 1e-5},
}
ALL_CLIENTS = CLIENTS | {
    "federation": {"clients": 400, "per-round": 400, "rounds": 1},
    "privacy": CLIENTS["privacy"] | {"noise": 1.0},
}
OWN_NOISE = CLIENTS | {"privacy": CLIENTS["privacy"] | {"cohorts": "fixed", "trust": "local"}}
REMOVED = {
    "data": {"name": "synthetic", "train": 12, "test": 1, "dimension": 10, "minimum": 1},
    "federation": {"clients": 6, "per-round": 3, "rounds": 2},
    "local": {"recipe": "fedmuon", "steps": 1, "lr": 0.1},
    "privacy": {"level": "client", "noise": 1.0, "bound": 0.5, "delta": 0.01},
}
WHOLE = SMALL | {
    "federation": {"clients": 1, "per-round": 1, "rounds": 1},
    "local": {"recipe": "dp-muon", "steps": 1, "lr": 0.1},
    "privacy": {"noise": 1.0, "lot": 400.0, "delta": 1e-5},
}


class Sum(nn.Module):
    """A model with the logits (W_1 + ... + W_m) x.

    It has as many blocks as the model in the table of the DP-Muon paper, but small ones.
    """

    def __init__(self) -> None:
        """Make the linear layers, without biases."""
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES))
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply all layers to the same input, and add the results."""
        found = inputs.new_zeros(len(inputs), WIDTH)
        for layer in self.layers:
            found = found + layer(inputs)
        return found


def audited(settings: dict[str, Any], canaries: int, task: nn.Module | None = None) -> Any:
    """Audit one run of these settings in a temporary folder."""
    chosen = parse(settings).with_objects(UserObjects(task=task))
    with tempfile.TemporaryDirectory() as folder:
        return one_run.execute(chosen, Path(folder) / "run", canaries)


def repeated(settings: dict[str, Any], canaries: int, times: int) -> dict[str, Any]:
    """Repeat an audit, and count how often each bound exceeds the certified epsilon.

    The result also contains the mean and the maximum of each bound.
    """
    start, names = perf_counter(), ("binomial", "trade_off", "declared")
    every = [audited(settings, canaries) for _ in range(times)]
    values = {name: [one[name] for one in every] for name in names}
    above = {name: sum(one[name] > one["epsilon"] for one in every) for name in names}
    return {
        "repetitions": times, "certified": every[0]["epsilon"], "above": above,
        "mean": {name: float(np.mean(one)) for name, one in values.items()},
        "most": {name: max(one) for name, one in values.items()},
        "seconds": perf_counter() - start,
    }  # fmt: skip


def by_removing(settings: dict[str, Any], trials: int, seed: int | None = None) -> dict[str, Any]:
    """Compute a lower bound of epsilon from runs with and without one client.

    There are `trials` runs with the client, which sends the worst update, and `trials` runs without
    it. The result also contains the certified epsilon. With a `seed`, all random draws of a trial
    depend only on its number.
    """
    start, config = perf_counter(), resolve(parse(settings))
    source = read_source(config)
    made = build_experiment(config, build_data(config, source))
    first, level = begin(made.recipe, made.task, 0), made.recipe.client_level
    assert level is not None

    def score(number: int, there: bool) -> float:
        own, plan = level, replace(made.plan)  # a copy that has not drawn a cohort yet
        if seed is not None:
            own, plan = replace(level, seed=number), replace(plan, seed=number, secret="")
        seen = ClientAuditor(own, np.zeros(1, int), np.array([there]), np.zeros(1, int), np.ones(1))
        recipe = replace(made.recipe, stages=(ClientPrivacy(own, made.recipe.returned),))
        simulate(replace(made, recipe=recipe, plan=plan), first, seen.rounds)
        return float(seen.scores()[0])

    numbers = (seed or 0) + np.arange(2 * trials).reshape(2, trials)
    with_it, without = (
        np.array([score(int(number), there) for number in row])
        for row, there in zip(numbers, (True, False), strict=True)
    )
    delta = config.privacy.delta
    found = counted(Statistics(with_it, without), delta).epsilon
    spent = epsilon(level.noise, level.rate, made.plan.rounds, delta, adjacency=level.adjacency)
    return {
        "epsilon_at_least": found, "certified": spent.upper, "below": found <= spent.upper,
        "trials": trials, "delta": delta, "seconds": perf_counter() - start,
    }  # fmt: skip


def main() -> None:
    """Print the results, one JSON object per line."""
    options = argparse.ArgumentParser()
    options.add_argument("--level", choices=("example", "client"), default="example")
    options.add_argument("--trials", type=int, default=1000)
    options.add_argument("--repetitions", type=int, default=50)
    options.add_argument("--canaries", type=int, default=40_000)
    given = options.parse_args()
    if given.level == "client":
        of_clients(given.repetitions, given.trials)
    else:
        of_examples(given.repetitions, given.canaries)


def of_clients(repetitions: int, trials: int) -> None:
    """Audit runs at level client."""
    named = {"clients": CLIENTS, "all clients": ALL_CLIENTS, "own noise": OWN_NOISE}
    for name, settings in named.items():
        print(json.dumps({name: repeated(settings, 300, repetitions)}), flush=True)
    print(json.dumps({"one client removed": by_removing(REMOVED, trials)}), flush=True)


def of_examples(repetitions: int, canaries: int) -> None:
    """Audit small runs, and the setting of the DP-Muon paper."""
    for name, settings in (("small", SMALL), ("whole lots", WHOLE)):
        print(json.dumps({name: repeated(settings, 300, repetitions)}), flush=True)
    found = audited(E2E, canaries, Sum())
    noise, lot, delta = PUBLISHED.values()
    printed = epsilon(noise, lot / 42043, 410, delta, MATRICES, "per-release").rdp
    print(json.dumps({"E2E": found | {"printed": printed}}), flush=True)


if __name__ == "__main__":
    main()
