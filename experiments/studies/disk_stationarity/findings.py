"""Study `disk-stationarity`: measured squared gradients beside 003's bounds."""

from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.columns import where
from fedmuon.analysis.report.findings import Rows, number

KEYS = ("reach", "gain", "lr", "noise", "batch", "steps")
STANDS_ON = (
    "F is the mean of log(1 + (aᵀx − y)²)/2, |a| ≤ 1: not convex, L = 1, a sample's gradient has "
    "variance at most 1/4, F(x₀) − F* ≤ F(x₀). Batches are drawn with replacement, nothing is "
    "clipped, and Gaussian noise is added. The bounds are of the mean over t of E‖∇F(x_t)‖²; means "
    "over seeds are held against them. For γ ≠ −1 the filter's prediction errs, and a slow filter "
    "at a large step size has no bound. 003's Theorem 3 is taken with the smallest β that its "
    "proof allows, and compared from that proof's start."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Below the bound; the bound beside the printed one; Corollary 4; what filtering is worth."""
    grid, best = where(rows, corollary=0), where(rows, corollary=1)
    return [within(grid), printed(grid), corollary(best), falling(best), worth(grid)]


def within(grid: Columns) -> Claim:
    """Setting by setting, where there is a bound."""
    found = _means(grid)
    known = found[~np.isnan(found[:, 1])]
    share = known[:, 0] / known[:, 1]
    return Claim(
        "The mean squared gradient is at most the bound in every setting that has one.",
        bool((share <= 1).all()),
        f"{(share <= 1).sum()} of {len(share)} settings, {len(found) - len(known)} have none; "
        f"measured over bound {share.min():.2g} to {share.max():.2g}",
    )


def printed(grid: Columns) -> Claim:
    """gamma = -1: never above 003's Theorem 3, from the same start."""
    part = where(grid, reach=-1.0)
    finite = np.isfinite(part["printed"])
    ratio = part["printed"][finite] / part["zero_bound"][finite]
    lost = np.unique(np.stack([part[name][~finite] for name in KEYS], 1), axis=0)
    return Claim(
        "For γ = −1 the bound is never above Theorem 3's, and holds where that one's conditions "
        "fail.",
        bool((ratio >= 1).all() and not np.isnan(part["zero_bound"]).any()),
        f"printed over proved here {ratio.min():.3g} to {ratio.max():.3g}; Theorem 3 says nothing "
        f"in {len(lost)} settings",
    )


def corollary(best: Columns) -> Claim:
    """Corollary 4's runs."""
    horizons = np.unique(best["steps"])
    parts = [where(best, steps=steps) for steps in horizons]
    shown = [
        f"T = {steps:.0f}: {number(part['mean_square'].mean())} ≤ {number(part['ceiling'][0])}, "
        f"κ = {part['gain'][0]:.3g}"
        for steps, part in zip(horizons, parts, strict=True)
    ]
    held = [part["mean_square"].mean() <= part["ceiling"][0] for part in parts]
    return Claim(
        "Corollary 4's runs keep to √(6(1 + 1/T) C_κ L D W/T), which has √6 where 003 has 4.",
        all(held),
        "; ".join(shown),
    )


def falling(best: Columns) -> Claim:
    """Longer tuned runs end with smaller means."""
    horizons = np.unique(best["steps"])
    means = [where(best, steps=steps)["mean_square"].mean() for steps in horizons]
    slope = float(np.polyfit(np.log(horizons), np.log(means), 1)[0])
    return Claim(
        "With Corollary 4's step size and gain the mean falls with T.",
        bool((np.diff(means) < 0).all()),
        f"log-log slope {number(slope)} (the bound's is −0.5)",
    )


def worth(grid: Columns) -> Claim:
    """Whether the bound sees what filtering is for: at the most noise, the best gain is below 1."""
    part = where(grid, reach=-1.0, noise=grid["noise"].max(), batch=0.0)
    shown, held = [], []
    for lr in np.unique(part["lr"]):
        one = where(part, lr=lr)
        gains = np.unique(one["gain"])
        both = np.array([
            [where(one, gain=gain)[name].mean() for gain in gains]
            for name in ("bound", "mean_square")
        ])  # fmt: skip
        bound, measured = gains[both.argmin(1)]
        held.append(bool(measured < 1))
        shown.append(f"η = {lr:g}: κ = {measured:g} measured, {bound:g} by the bound")
    return Claim(
        "At the most noise a gain below 1 is best at the largest step size.",
        held[-1],
        "; ".join(shown),
    )


def _means(part: Columns) -> np.ndarray:
    """The mean over seeds and the bound of every setting, [settings, 2]."""
    table = np.stack([part[name] for name in KEYS], 1)
    _, inverse = np.unique(table, axis=0, return_inverse=True)
    at = [inverse.ravel() == k for k in range(inverse.max() + 1)]
    return np.array([[part["mean_square"][one].mean(), part["bound"][one][0]] for one in at])


def numbers(rows: Columns) -> Rows:
    """Settings at the most noise with full batches, then Corollary 4's."""
    lines: Rows = [("γ", "κ", "η", "T", "measured", "bound", "Theorem 3, printed", "Corollary 4")]
    grid = where(rows, corollary=0)
    shown = [where(grid, noise=grid["noise"].max(), batch=0.0), where(rows, corollary=1)]
    for part in shown:
        for key in np.unique(np.stack([part[name] for name in KEYS], 1), axis=0):
            one = where(part, **dict(zip(KEYS, key.tolist(), strict=True)))
            values = (one["mean_square"].mean(), *(one[k][0] for k in ("bound", "printed")))
            cells = [number(float(value)) for value in (*values, one["ceiling"][0])]
            head = f"{key[0]:g}".replace("-", "−"), f"{key[1]:.3g}", f"{key[2]:.3g}"
            lines.append((*head, f"{key[5]:.0f}", *cells))
    return lines
