"""A suite as a TOML file: a grid of settings, and the stacks of runs that it comes to.

What decides who takes part and which samples there are (n, alpha, K and the seed) makes a stack;
all pairs (eta, lambda), each a run with its neighbours, stand side by side in it.
"""

import dataclasses
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from fedmuon import config as tables
from fedmuon.config import Config, Count, Natural, Positive
from fedmuon.data.source import Source
from fedmuon.errors import InputError
from fedmuon.tables import Scalar, Table, read_toml, validate

FOLDER = Path(__file__).parent / "suites"
PUBLISHED_FOR = {"mnist": "mnist", "fashion-mnist": "mnist", "mnist5k": "mnist",
                 "cifar10": "cifar10"}  # fmt: skip
REPLICAS = 256  # of one stack, at most
TEST = 5000  # held-out samples (001, Table 1), or a fifth of a small source
# 001, section 5 and Table 1; float64, because float32 hides perturbations of 1e-5.
BASE: dict[str, dict[str, Scalar]] = {
    "federation": {"clients": 20, "rounds": 50},
    "local": {"recipe": "fedmuon", "steps": 1, "momentum": 0.9},
    "orthogonalizer": {"name": "smoothed-polar"},
    "engine": {"dtype": "float64"},
}
Scale = Literal["small", "full"]
Pair = tuple[float, float]


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


@dataclass(frozen=True)
class Stack:
    """Runs that share samples and schedule; `config` has the first pair (eta, lambda)."""

    config: Config
    pairs: tuple[Pair, ...]
    trials: int

    @property
    def name(self) -> str:
        """What tells it from the other stacks of its suite."""
        data, federation = self.config.data, self.config.federation
        lr, lam = self.pairs[0]
        return (
            f"n{data.train}-alpha{data.alpha:g}-k{federation.per_round}-seed{federation.seed}"
            f"-lr{lr:g}-lambda{lam:g}"
        )

    @property
    def trajectories(self) -> int:
        """Runs and neighbours."""
        return len(self.pairs) * (1 + self.trials)

    def at(self, pair: Pair, **stability: Scalar) -> Config:
        """The config of one of its runs."""
        config = self.config
        return config.model_copy(
            update={
                "local": config.local.model_copy(update={"lr": pair[0]}),
                "orthogonalizer": config.orthogonalizer.model_copy(update={"lambda_": pair[1]}),
                "stability": config.stability.model_copy(update=stability),
            }
        )


def load(name: str, data: str, scale: str) -> Suite:
    """The suite of that name, or in that file, as it is for a data set at a scale."""
    if scale not in get_args(Scale):
        raise InputError(f"--scale {scale} is unknown: choose {' or '.join(get_args(Scale))}")
    file = FOLDER / f"{name}.toml"
    file = file if file.exists() else Path(name)
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))
        raise InputError(f"there is no suite {name}: name one of {known}, or a TOML file")
    content = read_toml(file)
    small, variants = content.pop("small", {}), content.pop("for", {})
    content = merged(content, variants.get(data, {}))
    return validate(Suite, merged(content, small) if scale == "small" else content)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables, those of `above` on top."""
    both = {**below, **above}
    for key in set(below) & set(above):
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            both[key] = merged(below[key], above[key])
    return both


def stacks(
    suite: Suite, source: Source | None, changes: Mapping[str, Mapping[str, Scalar]]
) -> list[Stack]:
    """The suite's stacks; `changes` are config tables that override its own.

    Sizes are cut to what the source holds; None is a source without an end.
    """
    base = merged(merged(BASE, suite.base), changes)
    test, most = _room(source, base.get("data", {}).get("test", TEST))
    grid, share = suite.grid, max(1, REPLICAS // (1 + suite.trials))
    pairs = list(itertools.product(grid.lr, grid.lambda_))
    sizes = sorted({min(n, most) for n in grid.train})
    found = []
    for train, alpha, per_round, seed in itertools.product(
        sizes, grid.alpha, grid.per_round, suite.seeds
    ):
        setting: dict[str, dict[str, Scalar]] = {
            "data": {"train": train, "test": test, "alpha": alpha},
            "federation": {"per-round": per_round, "seed": seed},
            "local": {"lr": pairs[0][0]},
            "orthogonalizer": {"lambda": pairs[0][1]},
        }
        shared = tables.parse(merged(base, setting))
        for first in range(0, len(pairs), share):
            several = tuple(pairs[first : first + share])
            stack = Stack(shared, several, suite.trials)
            found.append(dataclasses.replace(stack, config=stack.at(several[0])))
    return found


def _room(source: Source | None, test: Scalar) -> tuple[int, int]:
    """Held-out samples, and the most that can be trained on."""
    if source is None:
        return int(test), sys.maxsize
    n, parted = len(source.labels), source.official_test
    held = min(int(test), n - parted if parted else n // 5)
    return held, parted or n - held
