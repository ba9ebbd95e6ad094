"""A stability suite: a grid of settings, and the stacks of runs that it comes to.

What decides who takes part and which samples there are (n, alpha, K and the seed) makes a stack;
all pairs (eta, lambda), each a run with its neighbours, stand side by side in it.
"""

import dataclasses
import itertools
from typing import Annotated

from pydantic import Field

from fedmuon.config.load import Config
from fedmuon.config.read_if import reads, refusal
from fedmuon.config.schema import Count, Natural, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar, Table
from fedmuon.data.source import Source
from fedmuon.experiments.studies.stability.stack import Stack
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import TEST, Tables, cell, merged

REPLICAS = 256  # of one stack, at most
# 001, section 5 and Table 1; float64, because float32 hides perturbations of 1e-5.
BASE: dict[str, dict[str, Scalar]] = {
    "federation": {"clients": 20, "rounds": 50},
    "local": {"recipe": "fedmuon", "steps": 1, "momentum": 0.9},
    "orthogonalizer": {"name": "smoothed-polar"},
    "engine": {"dtype": "float64"},
}
SETTLED = {
    "data.train": "[grid]",
    "data.alpha": "[grid]",
    "data.name": "--data",
    "federation.per-round": "[grid]",
    "federation.seed": "seeds",
    "local.lr": "[grid]",
    "orthogonalizer.lambda": "[grid]",
    "stability.trials": "trials",
}


class Grid(Table):
    """What varies; every combination is run."""

    train: Annotated[list[Count], Field(min_length=1)]
    per_round: Annotated[list[Count], Field(min_length=1)]
    alpha: Annotated[list[Positive], Field(min_length=1)]
    lr: Annotated[list[Positive], Field(min_length=1)]
    lambda_: Annotated[list[Positive], Field(min_length=1)]


class Published(Table):
    """A line of 001, Table 2."""

    runs: Count
    gap_within_bound: float
    mean_gap: float
    mean_bound: float
    mean_perturbation: float


class Suite(Table):
    """A grid, its seeds, and neighbours a run; `base` has config tables that differ from BASE."""

    title: str
    seeds: Annotated[list[Natural], Field(min_length=1)]
    trials: Natural
    grid: Grid
    base: dict[str, dict[str, Scalar]] = Field(default_factory=dict)
    published: dict[str, Published] = Field(default_factory=dict)


def stacks(suite: Suite, source: Source | None, changes: Tables) -> list[Stack]:
    """The suite's stacks; `changes` are config tables that override its own.

    Sizes are cut to what the source holds; None is a source without an end.
    """
    contents.require_free("--set", changes, SETTLED)
    contents.require_free("[base]", suite.base, {**SETTLED, "data.name": ""})
    base = merged(merged(BASE, suite.base), changes)
    test, most = contents.room(source, base.get("data", {}).get("test", TEST))
    grid, share = suite.grid, max(1, REPLICAS // (1 + suite.trials))
    pairs = list(itertools.product(grid.lr, grid.lambda_))
    sizes = sorted({min(n, most) for n in grid.train})
    every = itertools.product(sizes, grid.alpha, grid.per_round, suite.seeds)
    found = []
    for train, alpha, per_round, seed in every:
        setting: dict[str, dict[str, Scalar]] = {
            "data": {"train": train, "test": test, "alpha": alpha},
            "federation": {"per-round": per_round, "seed": seed},
            "local": {"lr": pairs[0][0]},
            "orthogonalizer": {"lambda": pairs[0][1]},
        }
        shared = cell(base, setting)
        _require_used(suite, shared)
        for first in range(0, len(pairs), share):
            several = tuple(pairs[first : first + share])
            stack = Stack(shared, several, suite.trials)
            found.append(dataclasses.replace(stack, config=stack.at(several[0])))
    for place, asked in (("--set", changes), ("[base]", suite.base)):
        contents.require_read(place, asked, [stack.config for stack in found])
    return found


def _require_used(suite: Suite, config: Config) -> None:
    """Refuse an engine that no stack asks, and several lambdas that no map reads."""
    if config.engine.name != "inline":
        raise InputError(
            f"[engine] name = '{config.engine.name}' has no effect: a stack is one program, so "
            "leave it out, and spread the stacks with --ray-address"
        )
    if len(suite.grid.lambda_) > 1 and not reads(config, "orthogonalizer.lambda"):
        raise InputError(f"[grid] {refusal(config, 'orthogonalizer.lambda', suite.grid.lambda_)}")
