"""Study `polar-error`: errors of approximate polar factors, on matrices and in training.

The study is about the Stability note, Proposition D.4. The first part is about maps: the largest
distance between a map and the polar factor, over random matrices whose singular values are at least
a floor. This distance is compared with our bound and with the published bound. The second part is
about runs: one client trains the matrix classifier with an orthogonalizer T, and again with a
smoothed polar factor S in place of T. A run is trained together with its neighbours.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Findings, Rows, number
from fedmuon.analysis.report.tables import Columns, read_table, where
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, Claim, Effect, Rule
from fedmuon.analysis.theory import exact_polar
from fedmuon.analysis.theory.corollaries import Realized, Run, certificate, smoothed_polar, theorem
from fedmuon.analysis.theory.generalization import measured_gap
from fedmuon.analysis.theory.trajectories import Start, reach
from fedmuon.config.schema import Count, OrthogonalizerTable, Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.stability.certificates import size_of
from fedmuon.experiments.studies.study import (
    Call,
    Study,
    assemble,
    distinct,
    heading,
    levels,
    run_chain,
)
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.optim.chain import Chain
from fedmuon.optim.links import descend, gradient, map_matrices, momentum
from fedmuon.optim.orthogonalizers import map_of_table
from fedmuon.orthogonalize import Uncertified, exact_sign, lipschitz, newton_schulz, schedule
from fedmuon.orthogonalize import smoothed_polar as smoothed
from fedmuon.orthogonalize.lipschitz_constants import newton_schulz_error, printed_cubic_error
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params
from fedmuon.tasks.constants import constants

SEED = 0
SURE = 0.05  # the maximum probability that the gap is outside its interval
MAPS = {
    "exact-sign": OrthogonalizerTable(name="exact-sign"),
    # Normalized as M / ||M||_F, because no momentum is as short as eps.
    "cubic": OrthogonalizerTable(
        name="newton-schulz", coefficients="cubic", steps=5, eps=1e-15, normalization="max"
    ),
}


def five_cubic(x: np.ndarray) -> np.ndarray:
    """Return p_5(x), a polynomial that increases from 0 to 1 on [0, 1]."""
    for a, b, _ in schedule("cubic", 5):
        x = a * x + b * x**3
    return x


OWN = {"exact-sign": np.ones_like, "cubic": five_cubic}  # map -> its function of s / ||M||_F


class Settings(Table):
    """The keys that the suite's TOML file may contain."""

    degrees: Annotated[list[str], Field(min_length=1)]
    iterations: Annotated[list[Count], Field(min_length=1)]
    floors: Annotated[list[Positive], Field(min_length=1)]
    rank: Count
    draws: Annotated[int, Field(ge=2)]
    rows: Count
    classes: Count
    samples: Annotated[int, Field(ge=2)]
    held_out: Annotated[int, Field(ge=2)]
    memory: Annotated[float, Field(ge=0, lt=1)]
    lrs: Annotated[list[Positive], Field(min_length=1)]
    lambdas: Annotated[list[Positive], Field(min_length=1)]
    steps: Annotated[int, Field(ge=2)]
    neighbours: Count
    delta: Annotated[float, Field(gt=0, lt=1)]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each family of maps, and for each run (orthogonalizer and step size)."""
    maps = [Call(f"map-{name}", partial(measure_maps, settings, name)) for name in settings.degrees]
    runs = [
        Call(f"run-{name}-{lr:g}", partial(measure_runs, settings, name, lr), 10)
        for name in MAPS
        for lr in settings.lrs
    ]
    return [*maps, *runs]


# Measurements


def measure_maps(settings: Settings, coefficients: str) -> Record:
    """Return a row for each pair of a number of steps and a floor of the singular values."""
    rows, rank = [], settings.rank
    for steps, tau in itertools.product(settings.iterations, settings.floors):
        matrices = draw_matrices(rank, tau, settings.draws)
        image = newton_schulz(matrices, steps, coefficients, normalization="unit")
        distances = torch.linalg.matrix_norm(image - exact_sign(matrices))
        printed = printed_cubic_error(steps, tau, rank)
        rows.append({
            "map": coefficients, "steps": steps, "tau": tau, "measured": float(distances.max()),
            "bound": newton_schulz_error(coefficients, steps, tau, rank),
            "printed": printed if coefficients == "cubic" else math.nan,
        })  # fmt: skip
    return {"rows": rows, "runs": []}


def draw_matrices(rank: int, tau: float, count: int) -> Tensor:
    """Return random matrices with |M|_F <= 1 whose singular values are at least tau.

    The result has the shape [count, r, r + 1]. In the first matrix, all singular values are tau. In
    the last matrix, one singular value is large.
    """
    rng = generator(SEED, Draw.SYNTHETIC, block=rank)
    left, right = (np.linalg.qr(rng.standard_normal((count, rank + k, rank)))[0] for k in (0, 1))
    spare = max(1 - rank * tau**2, 0.0)  # the rest of the sum of squares
    shares = rng.dirichlet(np.full(rank, 0.5), count) * rng.random((count, 1))
    shares[0], shares[-1] = 0, np.eye(rank)[0]
    values = np.sqrt(tau**2 + spare * shares) * (1 - 1e-15)
    return torch.from_numpy(left * values[:, None] @ np.swapaxes(right, 1, 2))


class Classifier:
    """A classifier with a bounded loss, for a run and its neighbours.

    The loss is 1 - p_y, where p = softmax(X^T u) and |u| <= 1. Neighbour i is a run in which
    another sample replaces training sample i.
    """

    def __init__(self, settings: Settings) -> None:
        rng = generator(SEED, Draw.SYNTHETIC)
        count = settings.samples + settings.held_out + settings.neighbours
        points = rng.standard_normal((count, settings.rows))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        scores = points @ rng.standard_normal((settings.rows, settings.classes))
        labels = (scores + 0.5 * rng.gumbel(size=scores.shape)).argmax(1)
        points, labels = torch.from_numpy(points), torch.from_numpy(labels)
        sizes = [settings.samples, settings.held_out, settings.neighbours]
        parts = zip(points.split(sizes), labels.split(sizes), strict=True)
        self.train, self.test, self.others = parts
        self.classes = settings.classes

    def slope(self, x: Tensor) -> Tensor:
        """Return the gradients of the run and of its neighbours, in the shape [S, d, c].

        Replica 0 is the run. In replica s > 0, training sample s - 1 is replaced.
        """
        total, count = self._sum(x, self.train), len(x) - 1
        new, old = (
            [part[:count, None] for part in samples] for samples in (self.others, self.train)
        )
        total[1:] += self._sum(x[1:], new) - self._sum(x[1:], old)
        return total / len(self.train[0])

    def chances(self, x: Tensor, samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the probabilities of the classes, and the probability of the right class.

        The first array p has the shape [S, n, c], and the second array p_y has the shape [S, n].
        """
        chances = torch.softmax(samples[0] @ x, -1)
        return chances, chances.gather(2, samples[1].expand(len(x), -1)[..., None])[..., 0]

    def _sum(self, x: Tensor, samples: Sequence[Tensor]) -> Tensor:
        points, labels = samples
        chances, p_right = self.chances(x, samples)
        hot = torch.nn.functional.one_hot(labels, self.classes)
        return points.mT @ (p_right[..., None] * (chances - hot))


def measure_runs(settings: Settings, name: str, lr: float) -> Record:
    """Train a run with the orthogonalizer T, and runs with smoothed polar factors S.

    Return a row for each regularization lambda of S.
    """
    problem = Classifier(settings)
    trained = trajectory(settings, problem, MAPS[name], lr, 1 + settings.neighbours)
    end = trained.path[-1]
    norms = torch.linalg.matrix_norm(trained.momenta[:, 0])
    # The final model is in the ball that T's steps can reach. Training and test samples have the
    # same distribution, so the gap treats them as one class.
    size = size_of(MAPS[name])
    assert size  # known for both maps
    ball = reach(Start(settings.classes), np.full(settings.steps, lr), settings.memory, size)
    train, test = (
        1 - problem.chances(end[:1], samples)[1][0] for samples in (problem.train, problem.test)
    )
    gap = measured_gap(
        [float(train.mean())], [1.0], [[1.0]], test.numpy(), np.zeros(len(test), dtype=int),
        confidence=1 - SURE, interval="shorter", loss_bound=ball.last.loss_bound,
    )  # fmt: skip
    points, labels = problem.test
    right = (points @ end[:1])[0].argmax(-1) == labels
    # if S does not move at all, the drift is the length of T's path
    lengths = torch.linalg.matrix_norm(trained.path[1:, 0] - trained.path[:-1, 0]) / lr
    moved = exact_polar.drift(lengths.numpy().reshape(-1, 1, 1), lr, settings.memory, 0.0, 0.0)
    part = Realized(np.zeros((settings.steps, 1), dtype=int))
    still = theorem(_run(settings, lr), 0.0, part, settings.delta, shares=(1, 1))
    shared = {
        "map": name,
        "lr": lr,
        "perturbation": float(torch.linalg.matrix_norm(end[1:] - end[0]).max()),
        "accuracy": float(right.double().mean()),
        "train_loss": gap.empirical,
        "test_loss": gap.population,
        "gap": gap.gap,
        "gap_low": gap.low,
        "gap_high": gap.high,
        "tube": _neighbours_tube(settings, name, lr, norms.numpy()),
        "still": exact_polar.transferred(still, constants().lipschitz, moved).value,
    }
    comparisons = [_compare(settings, problem, name, trained, lr, lam) for lam in settings.lambdas]
    return {"rows": [], "runs": [shared | comparison for comparison in comparisons]}


@dataclass(frozen=True)
class Trajectory:
    """All models and momenta of a run and its neighbours.

    The models have the shape [T + 1, S, d, c].
    """

    path: Tensor
    momenta: Tensor


def trajectory(
    settings: Settings,
    problem: Classifier,
    table: OrthogonalizerTable,
    lr: float,
    replicas: int = 1,
) -> Trajectory:
    """Train a run and its neighbours with this orthogonalizer. Replica 0 is the run."""
    chain = Chain(
        (gradient(), momentum(settings.memory), map_matrices(map_of_table(table)), descend(lr))
    )
    start = {"X": torch.zeros((replicas, settings.rows, settings.classes), dtype=torch.float64)}
    memory, momenta = torch.zeros_like(start["X"]), []

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        nonlocal memory
        slope = problem.slope(params["X"])
        memory = settings.memory * memory + (1 - settings.memory) * slope
        momenta.append(memory)
        return slope.new_zeros(len(slope)), {"X": slope}  # no link of this chain uses the loss

    steps = run_chain(chain, start, oracle, settings.steps, partial(generator, SEED))
    path = torch.stack([now["X"] for _, now in steps])
    return Trajectory(path, torch.stack(momenta))


def _run(settings: Settings, lr: float) -> Run:
    size = np.array([settings.samples])
    return Run(lr, settings.memory, settings.steps, 1, size, np.ones(1), constants())


def _compare(
    settings: Settings, problem: Classifier, name: str, trained: Trajectory, lr: float, lam: float
) -> Record:
    """Compare the run with T and the run with the smoothed polar factor S (regularization lambda).

    The entry `certificate` uses only the run with T. The entry `of_both` also uses the drift of the
    neighbour.
    """
    table = OrthogonalizerTable(name="smoothed-polar", lambda_=lam)
    other = trajectory(settings, problem, table, lr).path[-1, 0]
    loss_constants, l_orth = constants(), lipschitz("smoothed-polar", "sharp", lam=lam)
    directions = (trained.path[:-1] - trained.path[1:]) / lr
    errors = torch.linalg.matrix_norm(directions - smoothed(trained.momenta, lam)).numpy()
    drift, widest = (
        exact_polar.drift(
            error.reshape(-1, 1, 1), lr, settings.memory, l_orth, loss_constants.smoothness
        )
        for error in (errors[:, 0], errors.max(1))
    )
    run, part = _run(settings, lr), Realized(np.zeros((settings.steps, 1), dtype=int))
    alone = exact_polar.around(
        torch.linalg.svdvals(trained.momenta[:, :1])[:, None].numpy(), part.schedule,
        [2 * loss_constants.gradient_bound / settings.samples], lr, settings.memory, l_orth,
        loss_constants.smoothness,
        partial(exact_polar.furthest, lam=lam, own=OWN[name]),
    )  # fmt: skip
    # Each bound has an equal share of delta, so the smallest bound over lambda holds at delta.
    delta = settings.delta / len(settings.lambdas)
    bound = smoothed_polar(run, lam, part, delta, shares=(1, 1))
    return {
        "lambda": lam,
        "distance": float(torch.linalg.matrix_norm(trained.path[-1, 0] - other)),
        "drift": drift,
        "certificate": float(alone[0]),
        "of_both": float(certificate(run, l_orth, part)[0]) + drift + widest,
        "bound_of_s": bound.value,
        "bound": exact_polar.transferred(bound, loss_constants.lipschitz, drift).value,
    }


def _neighbours_tube(settings: Settings, name: str, lr: float, norms: np.ndarray) -> float:
    """Return the certificate by Remark D.1 for a Newton–Schulz map T.

    For other maps, the result is nan.
    """
    if name not in settings.degrees:
        return math.nan
    loss_constants = constants()
    schedule = np.zeros((settings.steps, 1), dtype=int)
    inputs = (
        [2 * loss_constants.gradient_bound / settings.samples],
        lr,
        settings.memory,
        loss_constants.smoothness,
    )
    try:
        table = MAPS[name]
        tube = exact_polar.norm_tube(
            norms.reshape(-1, 1, 1), schedule, *inputs,
            coefficients=table.coefficients, steps=table.steps,
        )  # fmt: skip
    except Uncertified:
        return math.nan
    return float(tube.perturbation[0])


# Claims

NAMES = {"exact-sign": "exact sign", "cubic": "five cubic steps from M / ‖M‖"}
ROUNDING = 1e-9  # bounds below this value consist of rounding errors
STANDS_ON = (
    "Orthogonalizers: matrices of one rank are drawn, whose singular values are at least τ after "
    "the normalization. The bound is a maximum over an interval, proved by interval arithmetic. "
    "Runs: one client, full batches, and the matrix classifier with its proved constants. The "
    "bound of a run with the orthogonalizer T has two parts: the bound of Theorem 4.1 for the "
    "same run with a smoothed polar factor S, and 2 L_ℓ times the drift D between both runs. D "
    "is computed from ‖T(M) − S(M)‖ at the momenta of T. Each λ has an equal share of δ, so that "
    "the smallest bound of a run holds at δ. `Moved` is the largest distance of the neighbours "
    "that were run. `Certified` is a certificate for all neighbours of the run with T, by Weyl's "
    "inequality. It is computed after that run, without any neighbour. If the run with S does "
    "not move, the length of T's path also gives a bound, the path bound. Only a bound below the "
    "path bound comes from stability."
)


def report(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the section of the report, with a table of the accuracy of the runs."""
    runs = read_table(folder / "runs.csv")
    head = (
        "orthogonalizer, η",
        "accuracy",
        "train loss",
        "test loss",
        "gap (95%)",
        "smallest bound / B",
    )
    lines: Rows = []
    for name, lr in distinct(runs, "map", "lr"):
        part = where(runs, map=name, lr=lr)
        names = ("accuracy", "train_loss", "test_loss", "gap", "gap_low", "gap_high")
        *learnt, gap, low, high = (number(float(part[k][0])) if k in part else "–" for k in names)
        within = f"{gap} ({low} to {high})" if "gap_low" in part else gap
        bound = number(float(part["bound"].min()), 3)
        lines.append((f"{NAMES[name]}, η = {lr:g}", *learnt, within, bound))
    learned = "Results of training, with the smallest bound of each run", head, lines
    return replace(assemble(study, folder, about), more=[learned])


def claims(rows: Columns, runs: Columns) -> Sequence[Claim]:
    """Return the claims about maps, and about the distances, neighbours and gaps of runs."""
    return [*_map_claims(rows), *_distance_claims(runs), *_gap_claims(runs)]


def _map_claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims about our bound.

    The claims say that our bound holds, is sharp, and is at most the published bound.
    """
    holds, share = rows["measured"] <= rows["bound"], rows["measured"] / rows["bound"]
    real = rows["bound"] > ROUNDING
    met = share[(rows["map"] != "jordan") & real]
    ratio = (rows["printed"] / rows["bound"])[(rows["map"] == "cubic") & real]
    return [
        Claim(
            "No drawn matrix is further from its polar factor after Newton–Schulz than "
            "Proposition D.4 with the proved maximum allows.",
            Effect.exact("distance / bound", share, unit="ratio"),
            AT_MOST_ONE,
            f"{holds.sum()} of {len(holds)} settings of map, steps and τ",
        ),
        Claim(
            "For Taylor steps, a matrix whose singular values are all τ attains the bound up to "
            "a relative 10⁻⁶.",
            Effect.exact("1 − distance / bound", 1 - met, unit="ratio"),
            Rule(high=1e-6, strict=True),
            f"distance / bound is at least {met.min():.9f} in {len(met)} settings",
        ),
        Claim(
            "The paper's bound (1 − τ²)^(2^T) for the cubic step also holds, and is larger than "
            "ours.",
            Effect.exact("published / our bound", ratio, unit="ratio"),
            Rule(low=1.0, strict=True),
            f"{number(ratio.min(), 3)} to {number(ratio.max(), 3)} times as large",
        ),
    ]


def _distance_claims(runs: Columns) -> Sequence[Claim]:
    """Return the claims about distances between runs.

    The claims say that the distance ||X_T - X_S|| is at most D, and that perturbations are within
    their certificates.
    """
    share = runs["distance"] / runs["drift"]
    moved, tube = runs["perturbation"], ~np.isnan(runs["tube"])
    alone, with_drifts = moved / runs["certificate"], moved / runs["of_both"]
    inside = moved[tube] / runs["tube"][tube]
    largest = [float(ratios.max()) for ratios in (alone, with_drifts, inside) if len(ratios)]
    smallest = [number(float((runs[k] / moved).min()), 3) for k in ("certificate", "of_both")]
    return [
        Claim(
            "The final model of a run is at most the proved drift D away from that of the same "
            "run with a smoothed polar factor S.",
            Effect.exact("distance / D", share, unit="ratio"),
            AT_MOST_ONE,
            f"{(share <= 1).sum()} of {len(share)} runs; the largest distance is "
            f"{share.max():.2f} of D, the smallest is {number(share.min(), 2)} of D",
        ),
        Claim(
            "Every perturbation is at most each of three certificates: that of the run alone, that "
            "of S plus the drifts of both runs, and that of the norm tube (if Remark D.1 gives a "
            "tube).",
            Effect.exact(
                "perturbation / certificate",
                largest,
                ("alone", "with both drifts", "tube"),
                unit="ratio",
            ),
            AT_MOST_ONE,
            f"{(moved <= runs['certificate']).sum()} of {len(moved)} for the run alone, "
            f"{(moved <= runs['of_both']).sum()} with both drifts, "
            f"{(moved[tube] <= runs['tube'][tube]).sum()} of {len(inside)} for tubes; the "
            f"certificate is at least {smallest[0]} times the largest perturbation for the run "
            f"alone, and {smallest[1]} times with both drifts",
        ),
    ]


def _gap_claims(runs: Columns) -> Sequence[Claim]:
    """Return the claims about the bound for the map T.

    This bound follows from the bound for the smoothed map S.
    """
    low, high = (runs.get(name, runs["gap"]) for name in ("gap_low", "gap_high"))
    gap, bound = runs["gap"], runs["bound"]
    best, details = math.inf, []
    for lr in levels(where(runs, map="exact-sign"), "lr"):
        part = where(runs, map="exact-sign", lr=lr)
        at = int(part["bound"].argmin())
        lam, value, by_path = (float(part[k][at]) for k in ("lambda", "bound", "still"))
        best = min(best, value / min(1.0, by_path))
        details.append(
            f"η = {lr:g}: bound {number(value)} with λ = {lam:g}, bound from the path "
            f"{number(by_path)}"
        )
    return [
        Claim(
            "Every gap is at most the bound that follows from the run with the smoothed polar "
            "factor S.",
            Effect.of_gaps(gap, low, high, bound),
            Rule(high=0.0),
            f"{(gap <= bound).sum()} of {len(gap)} gaps; {(bound >= 1).sum()} of the bounds are "
            "vacuous (≥ 1)",
        ),
        Claim(
            "For the exact sign, which has no Lipschitz constant, the bound at some step size is "
            "below B = 1 and below the bound from the length of the path.",
            Effect.exact("smallest bound / smaller of B and the path bound", best, unit="ratio"),
            Rule(high=1.0, strict=True),
            "; ".join(details),
        ),
    ]


def numbers(rows: Columns, runs: Columns) -> Rows:
    """For each run, return a row with the name of the run, and then a row for each S."""
    names = ("distance", "drift", "perturbation", "certificate", "bound")
    lines: Rows = [
        ("orthogonalizer, η: λ of S", "distance", "drift D", "moved", "certified", "bound")
    ]
    for name, lr in distinct(runs, "map", "lr"):
        part = where(runs, map=name, lr=lr)
        lines.append(heading(f"{NAMES[name]}, η = {lr:g}:", lines[0]))
        for at, lam in enumerate(part["lambda"].tolist()):
            entries = [number(float(part[column][at]), 3) for column in names]
            lines.append((f"  {number(lam)}", *entries))
    return lines


# Figures


@style.styled
def drifts(rows: Columns, runs: Columns, narrow: bool = False) -> Figure:
    """Draw distance and drift against lambda.

    There is a panel for each map and a colour for each step size.
    """
    figure, panels = style.canvas(len(NAMES), narrow, 2.9)
    for axes, (name, title) in zip(panels, NAMES.items(), strict=True):
        for lr, look in zip(np.unique(runs["lr"]), style.SERIES, strict=False):
            part = where(runs, map=name, lr=lr)
            axes.plot(part["lambda"], part["distance"], look[1], color=look[0], ms=4.5,
                      label=f"distance, η = {lr:g}")  # fmt: skip
            drift = np.where(part["drift"] < 100, part["drift"], np.nan)
            axes.plot(part["lambda"], drift, "--", color=look[0], marker=look[1], mfc="none", ms=3,
                      lw=1.2)  # fmt: skip
        axes.plot([], [], "--", color=style.BLACK, lw=1.2, label="drift D (hollow)")
        axes.set_title(title, loc="left")
        axes.set_xscale("log")
        axes.set_xlabel("λ of the smoothed polar factor S")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"$\Vert X_T - X_S\Vert_F$ at the end")
    style.legend_below(figure, panels[0], 2 if narrow else 4)
    return figure


STUDY = Study(
    "polar-error", Settings, cells, claims, numbers, STANDS_ON, {"polar-error": drifts},
    tables=("rows", "runs"), report=report,
)  # fmt: skip
