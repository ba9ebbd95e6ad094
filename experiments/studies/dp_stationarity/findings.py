"""Study `dp-stationarity`: measured nuclear norms beside the bound of 000, Theorem 3.4."""

from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.columns import Columns, where
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.slopes import Curve, curve
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, NEGATIVE, Claim, Effect, Rule, counted

MUON, CORRECTED = "dp-muon", "dp-muonbc"
NAMES = {MUON: "DP-Muon", CORRECTED: "DP-MuonBC"}
TERMS = ("descent", "step", "clipping", "noise", "drift")
STANDS_ON = (
    "f is a mean over people of c√(c² + ‖W − Aᵢ‖²) − c²: convex, L = min(m, n) from ‖·‖_op to "
    "‖·‖_*, every person's gradient shorter than c, f(W₀) − f* computed. Lots are Poisson lots "
    "of all people, so the theorem's noise term holds for them; one matrix moves. Step size and "
    "memory are those of Corollary 3.5 with η₀ = √(D/L). The one constant that is not known "
    "beforehand is the error ε of the polar factor: as in Lemma 3.3 it is the largest that was "
    "met, here at any step of any seed. The theorem bounds an expectation; each run is held "
    "against it. DP-MuonBC's steps may be longer than 1 in spectral norm: the theorem does not "
    "cover them, and they are held against the bound for ε = 0, the smallest there is."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Below the bound, for both methods; falling; how loose the bound is, and what it is made of;
    whether it says much."""
    falls = [falling(rows, method) for method in NAMES]
    return [within(rows), outside(rows), *falls, tight(rows), made_of(rows), telling(rows)]


def within(rows: Columns) -> Claim:
    """DP-Muon, run by run."""
    part = where(rows, method=MUON)
    return Claim(
        "DP-Muon: the mean nuclear norm of the gradient is at most the bound of Theorem 3.4 in "
        "every run.",
        Effect.exact("measured over bound", _share(part)),
        AT_MOST_ONE,
        f"{_held(part)}; polar error ε ≤ {number(part['polar_error'].max(), 3)}",
    )


def outside(rows: Columns) -> Claim:
    """DP-MuonBC, of which the theorem says nothing, run by run, and beside DP-Muon."""
    part, ratios = where(rows, method=CORRECTED), []
    for noise in _noises(rows):
        plain, corrected = (_curve(rows, name, noise).means[-1] for name in NAMES)
        ratios.append(f"σ = {noise:g}: {corrected / plain:.3f}")
    return Claim(
        "DP-MuonBC, which the theorem does not cover, keeps to the bound for exact polar factors "
        "in every run.",
        Effect.exact("measured over bound", _share(part)),
        AT_MOST_ONE,
        f"{_held(part)}; longest step {part['longest_step'].max():.3g} in spectral norm; its norm "
        f"over DP-Muon's at T = {rows['steps'].max():.0f}: {'; '.join(ratios)}",
    )


def falling(rows: Columns, method: str) -> Claim:
    """Longer runs have smaller norms on average, at every noise."""
    slopes = {noise: _curve(rows, method, noise).slope for noise in _noises(rows)}
    return Claim(
        f"{NAMES[method]}: the norm falls with T at every noise.",
        Effect.between("log-log slope", {f"σ = {k:g}": one for k, one in slopes.items()}),
        NEGATIVE,
        "log-log slopes (the bound's goes to −1/4): "
        + "; ".join(f"σ = {noise:g}: {slope}" for noise, slope in slopes.items()),
    )


def tight(rows: Columns) -> Claim:
    """How much of the bound is used."""
    part = where(rows, method=MUON)
    shares = {noise: _share(part)[part["noise"] == noise] for noise in _noises(rows)}
    return Claim(
        "The bound is within a factor of 10 of what DP-Muon does, in every run.",
        Effect.exact("measured over bound", _share(part)),
        Rule(low=0.1),
        "measured over bound: "
        + "; ".join(f"σ = {k:g}: {one.min():.2f} to {one.max():.2f}" for k, one in shares.items()),
    )


def made_of(rows: Columns) -> Claim:
    """Which term is the largest at the largest T."""
    part = where(rows, method=MUON, steps=rows["steps"].max())
    largest, shares = [], []
    for noise in _noises(rows):
        one = where(part, noise=noise)
        terms = {name: float(one[f"term_{name}"][0]) for name in TERMS}
        largest.append(max(terms, key=lambda name: terms[name]))
        shares.append(f"σ = {noise:g}: {largest[-1]}, {terms[largest[-1]] / one['bound'][0]:.0%}")
    return counted(
        "The bound's largest term is the momentum's drift at the smallest noise, and the noise's "
        "at the largest.",
        [largest[0] == "drift", largest[-1] == "noise"],
        "two noises",
        "; ".join(shares) + f" of the bound at T = {rows['steps'].max():.0f}",
    )


def telling(rows: Columns) -> Claim:
    """Whether the bound is below what holds of any gradient of this problem."""
    part = where(rows, method=MUON, steps=rows["steps"].max())
    ratio = part["bound"] / part["ceiling"]
    shown = [(noise, ratio[part["noise"] == noise][0]) for noise in _noises(rows)]
    return Claim(
        "At the largest T and the smallest noise the bound says more than ‖∇f‖_* ≤ √r c, which "
        "holds everywhere.",
        Effect.exact("bound over ceiling", ratio[part["noise"] == part["noise"].min()]),
        Rule(high=1.0, strict=True),
        "; ".join(f"σ = {noise:g}: {value:.2f} times that" for noise, value in shown),
    )


def numbers(rows: Columns) -> Rows:
    """The bound's terms by noise and T, and what was measured."""
    lines: Rows = [("σ: T", *TERMS, "bound", *(one.removeprefix("DP-") for one in NAMES.values()))]
    names = (*(f"term_{name}" for name in TERMS), "bound")
    for noise in _noises(rows):
        lines.append((f"{noise:g}:", *("" for _ in lines[0][1:])))
        for steps in np.unique(rows["steps"]).tolist():
            parts = [where(rows, method=name, noise=noise, steps=steps) for name in NAMES]
            bound = [f"{parts[0][name][0]:.2f}" for name in names]
            norms = [f"{one['mean_nuclear'].mean():.2f}" for one in parts]
            lines.append((f"  {steps:.0f}", *bound, *norms))
    return lines


def _held(part: Columns) -> str:
    held = part["mean_nuclear"] <= part["bound"]
    return f"{held.sum()} of {len(held)} runs; the largest is {_share(part).max():.2f} of its bound"


def _share(part: Columns) -> np.ndarray:
    return part["mean_nuclear"] / part["bound"]


def _noises(rows: Columns) -> list[float]:
    return np.unique(rows["noise"]).tolist()


def _curve(rows: Columns, method: str, noise: float) -> Curve:
    return curve(rows, "steps", "mean_nuclear", method=method, noise=noise)
