"""Study `bias`: two clients on which Local Muon stalls and `fedmuon-corrected` does not.

The paper is FedMuon (005). Client i has the loss h_i ||X - B_i||_F^2 / 2 for a 2 x 2 matrix X, with
B_1 = -B_2 = diag(sides). Between B_1 and B_2, the clients' gradients point in opposite directions.
The orthogonalizer ignores the lengths of the gradients, so the clients' steps cancel although the
mean gradient is not 0. Local Muon stops at any point where the steps cancel, but only one of these
points is the optimum.

All step sizes and starting points are computed together in one batch. Only the starting point is
random, and a seed determines it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import (
    POSITIVE,
    Claim,
    Effect,
    Rule,
    Slope,
    curve,
    mean_of,
    quotient,
)
from fedmuon.config.schema import Count, Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call, Study, distinct, in_words, levels, seed_rows
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import run_round
from fedmuon.optim import recipes
from fedmuon.optim.orthogonalizers import Orthogonalizer, newton_schulz
from fedmuon.optim.recipe import initial_states
from fedmuon.optim.stage import ServerState
from fedmuon.orthogonalize import exact_sign
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

LOCAL, CORRECTED, EVERY_STEP = "local-muon", "fedmuon-corrected", "fedmuon-corrected, E = 1"
METHODS = (LOCAL, CORRECTED, EVERY_STEP)
EXACT = "exact"  # the exact polar factor, in contrast to `q = 1`, `q = 2`, ...
Pair = Annotated[list[Positive], Field(min_length=2, max_length=2)]


class Settings(Table):
    """The keys that the suite's TOML file may contain."""

    iterations: Annotated[list[Count], Field(min_length=1)]  # q; the exact factor is always added
    coefficients: str
    lrs: Annotated[list[Positive], Field(min_length=2)]
    rounds: Annotated[int, Field(ge=2)]
    steps: Annotated[int, Field(ge=2)]  # E
    memory: Annotated[float, Field(ge=0, lt=1)]
    curvatures: Pair  # h_1 and h_2
    sides: Pair  # B_1 = diag(sides)
    spread: Positive  # standard deviation of the entries of the starting points
    seeds: Annotated[int, Field(ge=2)]
    drawn: Annotated[int, Field(ge=2)]  # number of rounds whose distances are stored for the figure


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each method and orthogonalizer."""
    maps: dict[str, Any] = {
        f"q = {q}": newton_schulz(q, settings.coefficients) for q in settings.iterations
    } | {EXACT: Orthogonalizer(exact_sign)}
    return [
        Call(f"{method}-{name}".replace(" ", ""), partial(measure, settings, method, name, apply))
        for name, apply in maps.items()
        for method in METHODS
    ]


@dataclass(frozen=True)
class Numbered:
    """The data of a client: only the number of the client."""

    number: int
    size: int = 1

    def batch(self, rows: object) -> int:
        """Return the client's number, which the task uses as its batch."""
        return self.number


@dataclass(frozen=True)
class Quadratics:
    """A task with quadratic losses. Client i has the loss h_i ||X - B_i||_F^2 / 2."""

    curvatures: Tensor  # h [N]
    centres: Tensor  # B [N, m, n]
    stack_limit: int = 1 << 20
    thread_safe: bool = False
    keyed: bool = False
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def gradient(self, params: Params, batches: Sequence[int]) -> tuple[Tensor, Params]:
        """Return the losses and gradients of K clients, each with S replicas.

        The losses have the shape [K S], and the gradients have the shape [K S, m, n].
        """
        at = params["X"]
        owner = torch.tensor(batches).repeat_interleave(len(at) // len(batches))
        offset, scale = at - self.centres[owner], self.curvatures[owner, None, None]
        return (scale * offset.square()).sum((1, 2)) / 2, {"X": scale * offset}

    def optimum(self) -> Tensor:
        """Return the minimizer [m, n] of the clients' mean loss."""
        weights = self.curvatures / self.curvatures.sum()
        return (weights[:, None, None] * self.centres).sum(0)


# Measurements


def two_clients(settings: Settings) -> Quadratics:
    """Return the task with two clients, whose optima are diag(sides) and -diag(sides)."""
    side = torch.diag(torch.tensor(settings.sides, dtype=torch.float64))
    curvatures = torch.tensor(settings.curvatures, dtype=torch.float64)
    return Quadratics(curvatures, torch.stack([side, -side]))


def starting_points(settings: Settings) -> Tensor:
    """Return the starting points [seeds, 2, 2], the same for all methods, maps and step sizes."""
    draws = generator(0, Draw.INITIAL).standard_normal((settings.seeds, 2, 2))
    return torch.from_numpy(draws) * settings.spread


def measure(settings: Settings, method: str, name: str, apply: Orthogonalizer) -> Record:
    """Return the distances to the optimum, averaged over the last tenth of the rounds.

    There is a row for each step size and seed. The table of means contains the mean distance over
    seeds after each round. `near` is the first round after which the distance is at most a tenth of
    the starting distance, or R + 1 if there is no such round.
    """
    task, begin = two_clients(settings), starting_points(settings)
    shape = len(settings.lrs), settings.seeds
    lr = torch.tensor(settings.lrs, dtype=torch.float64).repeat_interleave(settings.seeds)
    if method == LOCAL:
        recipe = recipes.local_muon(lr, settings.memory, apply)
    else:
        recipe = recipes.fedmuon_corrected(lr, settings.memory, apply, clients=2)
    local = 1 if method == EVERY_STEP else settings.steps
    plan = RandomnessPlan(0, 2, 2, settings.rounds, local)
    experiment = Experiment(recipe, cast(Any, task), plan, cast(Any, None))
    params: Params = {"X": begin.repeat(shape[0], 1, 1)}
    state = ServerState(0, params, initial_states(recipe, params))
    clients: Any = [(number, Numbered(number)) for number in range(2)]
    distances = []
    for r in range(settings.rounds + 1):
        distances.append(torch.linalg.matrix_norm(state.params["X"] - task.optimum()).view(shape))
        if r < settings.rounds:
            state, *_ = run_round(experiment, state, clients)
    history = torch.stack(distances).numpy()  # [R + 1, step sizes, seeds]
    last = history[-max(1, settings.rounds // 10) :].mean(0)
    close = history <= SHARE * history[0]
    near = np.where(close.any(0), close.argmax(0), settings.rounds + 1)
    rows, means = [], []
    drawn = np.unique(np.linspace(0, settings.rounds, settings.drawn).round().astype(int))
    for i, step_size in enumerate(settings.lrs):
        head = {"method": method, "map": name, "lr": step_size}
        ends = zip(seed_rows(head, "distance", last[i]), history[0, i], near[i], strict=True)
        rows += [row | {"start": float(start), "near": int(first)} for row, start, first in ends]
        means += [head | {"round": int(r), "mean": float(history[r, i].mean())} for r in drawn]
    return {"rows": rows, "means": means}


# Claims

SHARE = 0.1  # of the starting distance: claims compare Local Muon and `near` with it
FLAT, FALLS = 0.1, 0.8  # slopes in the step size: at most FLAT (no fall), at least FALLS (linear)
SAME = 0.05  # a relative difference that does not count
STANDS_ON = (
    "Two clients with quadratic losses of a 2 × 2 matrix and exact gradients take part in every "
    "round. Local Muon's momentum starts at zero in each round. Seeds are starting points, the "
    "same for all methods, orthogonalizers and step sizes. Intervals are over seeds. The final "
    "distance is the mean over the last tenth of the rounds. We chose the threshold of a tenth "
    "of the starting distance. We made this problem to show the bias: on it, Local Muon can "
    "stall, and the corrected method need not. The problem says nothing about other losses, and "
    "no certificate is known."
)


def end_shares(rows: Columns, method: str, lrs: Sequence[float]) -> dict[str, Slope]:
    """Return the final distance divided by the starting distance, for each map and step size."""
    shares = {}
    for name in distinct(rows, "map"):
        for lr in lrs:
            part = where(rows, method=method, map=name, lr=lr)
            shares[f"{name}, η = {lr:g}"] = mean_of(part["distance"] / part["start"].mean())
    return shares


def in_step_size(rows: Columns, method: str) -> dict[str, Slope]:
    """Return the slope of log final distance against log step size, for each map.

    The slope is a mean over seeds.
    """
    slopes = {}
    x = np.log(levels(rows, "lr"))
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()
    for name in distinct(rows, "map"):
        runs = curve(rows, "lr", "distance", method=method, map=name).runs
        slopes[name] = mean_of(weights @ np.log(np.stack(runs)))
    return slopes


def claims(rows: Columns, means: Columns) -> Sequence[Claim]:
    """Return the claims of the study.

    The claims are about final distances, how these depend on the step size, and how many rounds are
    needed.
    """
    lrs, names = levels(rows, "lr"), distinct(rows, "map")
    flat, falling = in_step_size(rows, LOCAL), in_step_size(rows, CORRECTED)
    ends, small = end_shares(rows, LOCAL, lrs), end_shares(rows, CORRECTED, lrs[:1])
    ratios = {
        name: quotient(*(where(rows, method=method, map=name, lr=lrs[0])["distance"]
                         for method in (CORRECTED, LOCAL)))
        for name in names
    }  # fmt: skip

    def near(method: str, name: str, lr: float) -> np.ndarray:
        return where(rows, method=method, map=name, lr=lr)["near"]

    # Paired by start: rounds that E local steps save, and rounds of a map over those of exact Orth.
    saved = {
        name: mean_of(
            (near(EVERY_STEP, name, lrs[-1]) - near(CORRECTED, name, lrs[-1])).astype(float)
        )
        for name in names
    }
    exact = near(CORRECTED, EXACT, lrs[0])
    pace = {name: mean_of(near(CORRECTED, name, lrs[0]) / exact) for name in names if name != EXACT}
    share = "final distance / starting distance"
    return [
        Claim(
            "With every orthogonalizer and step size, Local Muon ends farther from the optimum "
            "than a tenth of its starting distance.",
            Effect.between(share, ends, unit="ratio"),
            Rule(low=SHARE),
            in_words(ends),
        ),
        Claim(
            "Smaller step sizes bring Local Muon no nearer to the optimum: with every "
            "orthogonalizer, its final distance has a log-log slope of at most 0.1 in the step "
            "size.",
            Effect.between("log-log slope in the step size", flat, unit="slope"),
            Rule(high=FLAT),
            in_words(flat),
        ),
        Claim(
            "At the smallest step size, the corrected method ends nearer to the optimum than a "
            "tenth of its starting distance, with every orthogonalizer.",
            Effect.between(share, small, unit="ratio"),
            Rule(high=SHARE),
            in_words(small),
        ),
        Claim(
            "The final distance of the corrected method falls about in proportion to the step "
            "size: the log-log slope is at least 0.8 with every orthogonalizer.",
            Effect.between("log-log slope in the step size", falling, unit="slope"),
            Rule(low=FALLS),
            in_words(falling),
        ),
        Claim(
            "At the smallest step size, the corrected method ends at less than a tenth of Local "
            "Muon's distance to the optimum, with every orthogonalizer.",
            Effect.between("distance, corrected method / Local Muon", ratios, unit="ratio"),
            Rule(high=SHARE),
            in_words(ratios),
        ),
        Claim(
            "Local steps save rounds: at the largest step size, the corrected method comes near "
            "the optimum in fewer rounds than with one step per round.",
            Effect.between("rounds saved", saved, unit="rounds"),
            POSITIVE,
            in_words(saved),
        ),
        Claim(
            "Further Newton–Schulz steps save no rounds on this problem: at the smallest step "
            "size, the corrected method comes near the optimum after as many rounds as with the "
            "exact polar factor, within 5%.",
            Effect.between("rounds / rounds with the exact polar factor", pace, unit="ratio"),
            Rule(1 - SAME, 1 + SAME),
            in_words(pace),
        ),
    ]


def numbers(rows: Columns, means: Columns) -> Rows:
    """Return the rows of the report's table.

    The rows contain the final distances at the smallest step size, and `near` at the largest step
    size.
    """
    lrs = levels(rows, "lr")
    lines: Rows = [
        (
            "orthogonalizer",
            "Local Muon",
            "corrected",
            "corrected: near after",
            "near after with E = 1",
        )
    ]
    for name in distinct(rows, "map"):
        ends, near = (
            [where(rows, method=method, map=name, lr=lr)[column].mean() for method in methods]
            for methods, lr, column in (
                ((LOCAL, CORRECTED), lrs[0], "distance"),
                ((CORRECTED, EVERY_STEP), lrs[-1], "near"),
            )
        )
        lines.append((name, *map(number, ends), *(f"{value:.0f} rounds" for value in near)))
    return lines


# Figures


@style.styled
def distances(rows: Columns, means: Columns, narrow: bool = False) -> Figure:
    """Draw the distances to the optimum.

    The figure shows mean distances by round at the smallest step size, and final distances by step
    size.
    """
    figure, (left, right) = style.canvas(2, narrow, 2.9)
    lrs = levels(rows, "lr")
    for name, look in zip(distinct(rows, "map"), style.SERIES, strict=False):
        for method, line in ((CORRECTED, "-"), (LOCAL, "--")):
            part = where(means, method=method, map=name, lr=lrs[0])
            label = (name if name == EXACT else f"${name}$") if method == CORRECTED else ""
            left.plot(part["round"], part["mean"], line, color=look[0], lw=1.2, label=label)
            last = curve(rows, "lr", "distance", method=method, map=name)
            right.errorbar(last.sizes, last.means, last.reach, color=look[0], marker=look[1], ms=4,
                           mfc="none", lw=1.2, elinewidth=0.9, ls=line)  # fmt: skip
    left.plot([], [], "-", color=style.BLACK, lw=1.2, label="corrected")
    left.plot([], [], "--", color=style.BLACK, lw=1.2, label="Local Muon")
    style.levels_on_x(right, np.array(lrs))
    style.log_y(left)
    style.log_y(right)
    left.set_xlabel("round")
    left.set_ylabel("mean distance to the optimum")
    right.set_xlabel(r"step size $\eta$")
    right.set_ylabel("final distance")
    style.legend_below(figure, left, 2 if narrow else 4)
    return figure


STUDY = Study(
    "bias", Settings, cells, claims, numbers, STANDS_ON, {"bias": distances}, ("rows", "means")
)
