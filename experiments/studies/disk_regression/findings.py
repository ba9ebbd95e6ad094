"""Study `disk-regression`: which filter has the lowest loss at each noise level (003, Fig. 5a)."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.findings import Findings, Picture, Rows, number
from fedmuon.experiments.studies.disk_regression import figure as filters
from fedmuon.experiments.studies.disk_regression.filtering import (
    NAMES,
    SETTINGS,
    Setting,
    chosen,
    compared,
)
from fedmuon.experiments.studies.findings import assemble

STANDS_ON = (
    "The loss is a quadratic with largest curvature 1, its gradient is that of all samples, and "
    "Gaussian noise of the given level is added to every entry at every step; nothing is clipped. "
    "003 prints neither the data nor the step size of its figure. Under `one step size` all share "
    "it, at all levels, and κ = 0.7, γ = 0.5, 003's defaults; under `tuned` each has its own "
    "best step size and κ at each level. The low-pass filter is the first-order one that DiSK "
    "becomes when it looks at one point; both start from the first gradient. Levels have noise of "
    "their own, but on a quadratic losses scale as σ² once the transient is over: that levels "
    "agree is then theory, not evidence. Tuning takes the lowest mean of the runs that are shown."
)


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of such a folder."""
    return assemble(folder, about, claims, pictures, numbers, stands_on=STANDS_ON)


def claims(rows: Columns) -> Sequence[Claim]:
    """DiSK has the lowest loss at every level, in each setting."""
    return [lowest(rows, setting) for setting in SETTINGS]


def lowest(rows: Columns, setting: Setting) -> Claim:
    """DiSK against each of the others, level by level, on the same noise."""
    told, held = [], []
    for noise in np.unique(rows["noise"]):
        others = {name: compared(rows, setting, "disk", name, float(noise)) for name in NAMES[:2]}
        held += [high < 0 for _, high in others.values()]
        told += [
            f"σ = {noise:g}: {_percent(low, high)} against {name}"
            for name, (low, high) in others.items()
        ]
    return Claim(
        f"DiSK has a lower excess loss than both others at every noise level, {setting.name}.",
        all(held),
        f"{sum(held)} of {len(held)} beyond doubt; DiSK's loss relative to theirs (95%): "
        + "; ".join(told),
    )


def _percent(low: float, high: float) -> str:
    return f"{low:+.1%} to {high:+.1%}".replace("-", "−")


def pictures(rows: Columns) -> Sequence[Picture]:
    """Excess loss by noise level, in each setting."""
    return [
        Picture(
            "disk-regression",
            functools.partial(filters.by_noise, rows),
            "Excess loss of the last iterate by noise level",
            "Relative to noisy gradient descent, which is 1; below 1 is better. Intervals are 95% "
            "of the mean difference from it: methods share the noise of a seed and level. Left one "
            "step size for all, right each method's best step size and gain at each level.",
        )
    ]


def numbers(rows: Columns) -> Rows:
    """Mean excess losses, with what was chosen."""
    found: Rows = [("setting", "noise σ", *NAMES)]
    for setting in SETTINGS:
        for noise in np.unique(rows["noise"]):
            cells = []
            for name in NAMES:
                gain, lr, losses = chosen(rows, setting, name, float(noise))
                kept = f", κ = {gain:g}" if name != NAMES[0] else ""
                cells.append(f"{number(losses.mean())} (η = {lr:g}{kept})")
            found.append((setting.name, f"{noise:g}", *cells))
    return found
