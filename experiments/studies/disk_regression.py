"""Study `disk-regression`: noisy gradient descent on a linear regression (DiSK, Figure 5a).

Three methods are compared: plain descent, a low-pass filter, and DiSK's Kalman filter.

The gradient uses the whole data set and is not clipped. Gaussian noise is added at every step. A
cell has one filter. All step sizes, noise levels and seeds of a cell are computed together in one
batch. At one noise level and seed, all filters and step sizes use the same noise. Different noise
levels use independent noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.verdicts import NEGATIVE, Claim, Effect, Slope, mean_of
from fedmuon.config.schema import Count, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call, Study, levels, run_chain
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.optim.chain import Chain
from fedmuon.optim.links import descend, disk_filter, private_gradient
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

SEED = 0
PLAIN, LOW_PASS, DISK = "noisy-gd", "low-pass", "disk"
Gain = Annotated[float, Field(gt=0, le=1)]


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `gain` and `reach` are DiSK's kappa and gamma.
    """

    noises: Annotated[list[Positive], Field(min_length=2)]
    lrs: Annotated[list[Positive], Field(min_length=1)]
    gains: Annotated[list[Gain], Field(min_length=1)]
    reach: Positive
    shared_lr: Positive  # one of `lrs`, used by all methods in the setting `one step size`
    shared_gain: Gain  # one of `gains`, used by all filters in that setting
    seeds: Annotated[int, Field(ge=2)]
    steps: Count
    samples: Count
    features: Count
    condition: Annotated[float, Field(ge=1)]  # condition number of the inputs' second moments
    label_noise: Positive


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for plain descent, and one for each filter and gain."""
    for key, value, values in (
        ("lr", settings.shared_lr, settings.lrs),
        ("gain", settings.shared_gain, settings.gains),
    ):
        if value not in values:
            raise InputError(
                f"shared-{key} is {value:g}, but the list {key}s does not contain this value. "
                f"Add {value:g} to {key}s."
            )
    pairs = [(PLAIN, 1.0), *((name, gain) for name in (LOW_PASS, DISK) for gain in settings.gains)]
    return [
        Call(f"{name}-{gain:g}", partial(measure, settings, name, gain)) for name, gain in pairs
    ]


@dataclass(frozen=True)
class Regression:
    """A linear regression whose exact loss is known.

    The loss is the mean of (a'x - y)^2 / 2 over the samples. It is computed as F(x) = (x - x*)' H
    (x - x*) / 2 + F*, where x* is the minimizer, F* is the minimum, and H is the Hessian matrix.
    """

    hessian: Tensor  # [d, d], largest eigenvalue 1
    best: Tensor  # [d, 1]
    floor: float

    def loss(self, at: Tensor) -> Tensor:
        offset = at - self.best
        return (offset * (self.hessian @ offset)).sum((1, 2)) / 2 + self.floor

    def gradient(self, at: Tensor) -> Tensor:
        return self.hessian @ (at - self.best)


# Measurements


def regression(samples: int, features: int, condition: float, label_noise: float) -> Regression:
    """Return a random regression whose loss is 1-smooth.

    The features are a = D z, where z is normal and D is a diagonal matrix. The labels are y = a'w +
    noise.
    """
    rng = generator(SEED, Draw.SYNTHETIC)
    scale = np.sqrt(np.geomspace(1, 1 / condition, features))
    inputs = rng.standard_normal((samples, features)) * scale
    truth = rng.standard_normal(features)
    labels = inputs @ truth + label_noise * rng.standard_normal(samples)
    top = np.linalg.norm(inputs, 2) / np.sqrt(samples)
    inputs, labels = inputs / top, labels / top
    best = np.linalg.lstsq(inputs, labels, rcond=None)[0]
    floor = float(np.square(inputs @ best - labels).mean() / 2)
    hessian = torch.from_numpy(inputs.T @ inputs / samples)
    return Regression(hessian, torch.from_numpy(best)[:, None], floor)


def measure(settings: Settings, method: str, gain: float) -> Record:
    """Train all runs of one method and gain, and return a row for each run.

    There is a run for each step size, noise level and seed. A row contains the loss of the last
    model. The loss of a diverged run is infinite. `shared` is True for rows with the step size and
    gain that all methods share.
    """
    data = settings.samples, settings.features, settings.condition, settings.label_noise
    problem = regression(*data)
    shape = (len(settings.lrs), len(settings.noises), settings.seeds)
    lr = torch.tensor(settings.lrs, dtype=torch.float64)[:, None, None].expand(shape).flatten()
    # The low-pass filter is DiSK with one evaluation point and the same start: gamma = inf makes
    # the weight c of the look-ahead point 0.
    smooth = disk_filter(gain, settings.reach if method == DISK else math.inf)
    chain = Chain((private_gradient() if method == PLAIN else smooth, descend(lr)))

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        """Return the loss and the noisy gradient. All points of a step get the same noise."""
        shift = level_noise(step, settings.noises, settings.seeds, settings.features)
        shift = shift.repeat(shape[0], 1, 1)
        return problem.loss(params["x"]), {"x": problem.gradient(params["x"]) + shift}

    params = {"x": torch.zeros((lr.numel(), settings.features, 1), dtype=torch.float64)}
    for _, now in run_chain(chain, params, oracle, settings.steps, partial(generator, SEED)):
        params = now
    losses = problem.loss(params["x"]).view(shape).nan_to_num(math.inf, math.inf)
    usual = gain == settings.shared_gain or method == PLAIN
    return {
        "rows": [
            {
                "method": method,
                "gain": gain,
                "lr": settings.lrs[i],
                "noise": settings.noises[j],
                "shared": int(usual and settings.lrs[i] == settings.shared_lr),
                "seed": seed,
                "loss": float(losses[i, j, seed]),
                "floor": problem.floor,
            }
            for i, j, seed in np.ndindex(shape)
        ]
    }


def level_noise(step: int, noises: Sequence[float], seeds: int, features: int) -> Tensor:
    """Return the noise of one step for all noise levels and seeds.

    The result has the shape [levels * seeds, d, 1]. Each noise level has its own random numbers. If
    all levels used the same random numbers, a quadratic would show the same comparison at every
    level, only at another scale.
    """
    shifts = []
    for level, noise in enumerate(noises):
        rng = generator(SEED, Draw.BATCH, step=step, block=level)
        shifts.append(noise * torch.from_numpy(rng.standard_normal((seeds, features, 1))))
    return torch.cat(shifts)


# Claims

NAMES = {"noisy-gd": "noisy gradient descent", "low-pass": "low-pass filter", "disk": "DiSK"}
# Whether each method uses its best step size and gain at each level, or all use the shared ones.
TUNED = {"one step size": False, "tuned": True}
IN_WORDS = {"one step size": "one step size for all methods", "tuned": "each method tuned"}
STANDS_ON = (
    "The loss is a quadratic with largest curvature 1. Its gradient uses all samples, and "
    "Gaussian noise of the given level is added to every entry at every step. Nothing is "
    "clipped. The DiSK paper states neither the data nor the step size of its figure. In `one "
    "step size`, all methods share one step size at all levels, with the paper's defaults κ = "
    "0.7 and γ = 0.5. In `tuned`, each method has its best step size and κ at each level. The "
    "low-pass filter has first order, and equals DiSK with gradients at a single point. Both "
    "filters start from the first gradient. Each level has its own noise. On a quadratic, "
    "however, losses scale as σ² after the first steps, so the agreement between levels is "
    "theory, not evidence. Tuning chooses the lowest mean loss, on the same runs that are shown."
)


def chosen(rows: Columns, setting: str, name: str, noise: float) -> tuple[float, float, np.ndarray]:
    """Return the gain and step size of a method with the lowest mean loss at a noise level.

    Returns:
        The gain, the step size, and the excess loss of each seed.
    """
    mask = (rows["method"] == name) & (rows["noise"] == noise)
    mask &= TUNED[setting] | (rows["shared"] == 1)
    excess = rows["loss"] - rows["floor"]
    kinds = np.unique(np.stack([rows["gain"][mask], rows["lr"][mask]], 1), axis=0)
    options = [
        (float(gain), float(lr), excess[mask & (rows["gain"] == gain) & (rows["lr"] == lr)])
        for gain, lr in kinds
    ]
    return min(options, key=lambda option: option[2].mean())


def compared(rows: Columns, setting: str, name: str, other: str, noise: float) -> Slope:
    """Return how much the mean excess losses of two methods differ.

    The difference is divided by the mean of `other` and has a 95% interval. At one noise level,
    runs with the same seed use the same noise, so runs with the same seed are compared.
    """
    excess, other_excess = (chosen(rows, setting, method, noise)[2] for method in (name, other))
    return mean_of((excess - other_excess) / other_excess.mean())


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims that DiSK beats the other methods at every noise level and setting."""
    all_claims = []
    for setting in TUNED:
        shares, changes = [], {}
        for noise in levels(rows, "noise"):
            for name in ("noisy-gd", "low-pass"):
                change = compared(rows, setting, "disk", name, noise)
                changes[f"σ = {noise:g} against {name}"] = change
                percent = f"{written(change.low, '+.1%')} to {written(change.high, '+.1%')}"
                shares.append(f"σ = {noise:g}: {percent} against {name}")
        sure = sum(change.high < 0 for change in changes.values())
        sentence = (
            "DiSK has a lower excess loss than noisy gradient descent and the low-pass filter at "
            "every noise level"
        )
        all_claims.append(
            Claim(
                f"{sentence} ({IN_WORDS[setting]}).",
                Effect.between("excess loss, DiSK / other method − 1", changes, unit="ratio"),
                NEGATIVE,
                f"clear in {sure} of {len(changes)} comparisons; excess loss of DiSK relative to "
                "the other method (95% intervals): " + "; ".join(shares),
            )
        )
    return all_claims


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table.

    The rows contain mean excess losses at the chosen gain and step size.
    """
    lines: Rows = [("setting", "noise σ", *NAMES)]
    for setting in TUNED:
        for noise in levels(rows, "noise"):
            entries = []
            for name in NAMES:
                gain, lr, losses = chosen(rows, setting, name, noise)
                gain_text = f", κ = {gain:g}" if name != "noisy-gd" else ""
                entries.append(f"{number(losses.mean())} (η = {lr:g}{gain_text})")
            lines.append((setting, f"{noise:g}", *entries))
    return lines


# Figures


@style.styled
def by_noise(rows: Columns, narrow: bool = False) -> Figure:
    """Draw excess losses relative to noisy gradient descent, with a panel for each setting."""
    figure, panels = style.canvas(len(TUNED), narrow, 2.9)
    noises = np.unique(rows["noise"])
    for axes, setting in zip(panels, TUNED, strict=True):
        for (name, label), look in zip(NAMES.items(), style.SERIES, strict=False):
            changes = [compared(rows, setting, name, "noisy-gd", float(noise)) for noise in noises]
            value, high = np.array([(change.value, change.high) for change in changes]).T
            style.errorbars(axes, noises, 1 + value, high - value, look, label)
        axes.set_title(setting, loc="left")
        style.log_x(axes)
        axes.set_xlabel("noise σ per entry of the gradient")
    style.alike(panels)
    panels[0].set_ylabel("excess loss / excess loss without filter")
    style.legend_below(figure, panels[0], 1 if narrow else 3)
    return figure


STUDY = Study(
    "disk-regression", Settings, cells, claims, numbers, STANDS_ON, {"disk-regression": by_noise}
)
