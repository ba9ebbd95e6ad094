"""Study `disk-stationarity`: measured squared gradients beside 003's bounds."""

import itertools
from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.columns import Columns, where
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.slopes import Slope, half_width, mean_of, quotient
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, POSITIVE, Claim, Effect, Rule

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
    return [within(grid), printed(grid), corollary(best), falling(best), worth(grid),
            chosen(grid)]  # fmt: skip


def within(grid: Columns) -> Claim:
    """Setting by setting, where there is a bound; of an expectation, so means have intervals."""
    found = _means(grid)
    known = [(mean, bound) for mean, bound in found if not np.isnan(bound)]
    share = np.array([mean.value / bound for mean, bound in known])
    return Claim(
        "The mean squared gradient is at most the bound in every setting that has one.",
        _under(known, ()),
        AT_MOST_ONE,
        f"{(share <= 1).sum()} of {len(share)} settings, {len(found) - len(known)} have none; "
        f"measured over bound {number(share.min(), 2)} to {number(share.max(), 2)}",
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
        Effect.exact(
            "printed over proved",
            np.where(np.isnan(ratio), 0.0, ratio)
            if not np.isnan(part["zero_bound"]).any()
            else 0.0,
        ),
        Rule(low=1.0),
        f"printed over proved here {ratio.min():.3g} to {ratio.max():.3g}; Theorem 3 says nothing "
        f"in {len(lost)} settings",
    )


def corollary(best: Columns) -> Claim:
    """Corollary 4's runs."""
    horizons = np.unique(best["steps"])
    parts = [where(best, steps=steps) for steps in horizons]
    shown = [
        f"T = {steps:.0f}: {number(part['mean_square'].mean())} ≤ {number(part['ceiling'][0])}, "
        f"κ = {number(part['gain'][0], 3)}"
        for steps, part in zip(horizons, parts, strict=True)
    ]
    held = [(mean_of(part["mean_square"]), float(part["ceiling"][0])) for part in parts]
    return Claim(
        "Corollary 4's runs keep to √(6(1 + 1/T) C_κ L D W/T), which has √6 where 003 has 4.",
        _under(held, [f"T = {steps:.0f}" for steps in horizons]),
        AT_MOST_ONE,
        "; ".join(shown),
    )


def _under(means: Sequence[tuple[Slope, float]], places: Sequence[str]) -> Effect:
    """Each mean over seeds, with its interval, over its bound."""
    ends = [[end / bound for end in (mean.value, mean.low, mean.high)] for mean, bound in means]
    return Effect("measured over bound", *np.array(ends).reshape(-1, 3).T, places=places)


def falling(best: Columns) -> Claim:
    """Longer tuned runs end with smaller means."""
    horizons = np.unique(best["steps"])
    means = [where(best, steps=steps)["mean_square"].mean() for steps in horizons]
    slope = float(np.polyfit(np.log(horizons), np.log(means), 1)[0])
    return Claim(
        "With Corollary 4's step size and gain the mean falls with T.",
        Effect.between(
            "mean over that of the run before",
            {
                f"T = {after:.0f}": quotient(
                    *(where(best, steps=one)["mean_square"] for one in (after, before))
                )
                for before, after in itertools.pairwise(horizons)
            },
        ),
        Rule(high=1.0, strict=True),
        f"log-log slope {number(slope)} (the bound's is −0.5)",
    )


def worth(grid: Columns) -> Claim:
    """What filtering is for, seed by seed: at the most noise some gain below 1 is better than none,
    beyond 95% intervals for all gains at once."""
    shown, held = [], np.full(3, np.nan)
    for lr, part in _loudest(grid):
        gains = [gain for gain in np.unique(part["gain"]).tolist() if gain < 1]
        saved = {gain: _saved(part, gain, len(gains)) for gain in gains}
        ends = np.array([(value, value - reach, value + reach) for value, reach in saved.values()])
        held = ends.max(axis=0) if len(ends) else np.full(3, np.nan)  # of the best gain
        shown += [f"η = {lr:g}: " + ", ".join(f"κ = {gain:g} {_percent(*one)}"
                                              for gain, one in saved.items())]  # fmt: skip
    return Claim(
        "At the most noise some gain below 1 beats κ = 1, plain noisy descent, at the largest step "
        "size.",
        Effect("saved by the best gain", *held.reshape(3, 1)),
        POSITIVE,
        "saved of κ = 1's mean: " + "; ".join(shown),
    )


def chosen(grid: Columns) -> Claim:
    """Whether the bound sees that: it names a gain before the run, which then beats none."""
    shown, held = [], (np.nan, np.nan)
    for lr, part in _loudest(grid):
        known = np.where(np.isnan(part["bound"]), np.inf, part["bound"])
        gain = float(part["gain"][known.argmin()])
        saved = _saved(part, gain)
        held = saved
        shown.append(f"η = {lr:g}: κ = {gain:g} {_percent(*saved)}")
    return Claim(
        "At the most noise the gain whose bound is least beats κ = 1 at the largest step size.",
        Effect.around("saved by the gain whose bound is least", *held),
        POSITIVE,
        "saved of κ = 1's mean: " + "; ".join(shown),
    )


def _loudest(grid: Columns) -> list[tuple[float, Columns]]:
    """Each step size with its rows at gamma = -1, the most noise and full batches."""
    part = where(grid, reach=-1.0, noise=grid["noise"].max(), batch=0.0)
    return [(lr, where(part, lr=lr)) for lr in np.unique(part["lr"]).tolist()]


def _saved(part: Columns, gain: float, many: int = 1) -> tuple[float, float]:
    """By how much of kappa = 1's mean that gain's is smaller, seed by seed, with its interval: of
    so many as are right together 95 times in 100."""
    own, plain = (where(part, gain=one) for one in (gain, 1.0))
    if not len(plain["seed"]):
        return float("nan"), float("nan")
    less = plain["mean_square"][plain["seed"].argsort()] - own["mean_square"][own["seed"].argsort()]
    scale = plain["mean_square"].mean()
    half = half_width(less.std(ddof=1) / np.sqrt(len(less)), len(less) - 1, many)
    return less.mean() / scale, half / scale


def _percent(value: float, reach: float) -> str:
    return f"{written(value, '+.1%')} ± {reach:.1%}"


def _means(part: Columns) -> list[tuple[Slope, float]]:
    """The mean over seeds and the bound of every setting."""
    table = np.stack([part[name] for name in KEYS], 1)
    _, inverse = np.unique(table, axis=0, return_inverse=True)
    at = [inverse.ravel() == k for k in range(inverse.max() + 1)]
    return [(mean_of(part["mean_square"][one]), float(part["bound"][one][0])) for one in at]


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
            head = written(key[0], "g"), number(key[1], 3), number(key[2], 3)
            lines.append((*head, f"{key[5]:.0f}", *cells))
    return lines
