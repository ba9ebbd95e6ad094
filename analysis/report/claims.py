"""Whether measured runs bear out what 001, section 5 says of them, and by how much.

Each claim is judged from columns alone: runs.csv and neighbours.csv of a suite, or neighbours.csv
and bound.json of one run. What varies decides what is claimed; a suite's name does not matter. A
claim about numbers that the theory refused (nan) cannot be judged: `holds` is None.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from fedmuon.analysis.report.columns import Columns

FACTORS = ("n", "lr", "lambda", "alpha", "per_round")
SETTING = (*FACTORS, "seed")
PUBLISHED_RHO = 0.87  # 001, Figure 3(c)
DRAWS = 10  # replacement trials a run (001, Table 1)
QUANTITIES = {"bound": "bound", "mean_perturbation": "mean perturbation"}


@dataclass(frozen=True)
class Claim:
    """One sentence; whether it holds (None: cannot be judged); by how much, with its caveats."""

    sentence: str
    holds: bool | None
    detail: str


def varying(runs: Columns) -> tuple[str, ...]:
    """The factors that take more than one value."""
    return tuple(name for name in FACTORS if len(np.unique(runs[name])) > 1)


def suite_claims(runs: Columns, neighbours: Columns) -> list[Claim]:
    """All that 001, section 5 claims about a suite in which these factors vary."""
    factors = varying(runs)
    claims = [gap_within_bound(runs), within_certificate(neighbours)]
    for factor in ("lr", "lambda", "n"):
        if factor in factors:
            claims += [monotone(runs, factor, quantity) for quantity in QUANTITIES]
    if {"per_round", "alpha"} & set(factors):
        claims.append(exposure_ranks(neighbours))
    return claims


def run_claims(neighbours: Columns, bound: Mapping[str, Any], census: bool) -> list[Claim]:
    """What holds of one run, from its neighbours and its bound.json; a census has them all."""
    names = {"gap": "gap", "gap_high": "gap_high", "bound": "value"}
    row = {name: np.array([bound[key]], dtype=float) for name, key in names.items()}  # None is nan
    row["range"] = np.array([bound.get("range", 1.0)])
    claims = [gap_within_bound(row), within_certificate(neighbours)]
    claims.append(client_by_client(neighbours, census))
    return [*claims, census_needed(neighbours)] if census else claims


def gap_within_bound(runs: Columns) -> Claim:
    """gap <= bound (001, Table 2) in every run [S]; vacuous bounds are counted apart."""
    judged = ~np.isnan(runs["gap"] + runs["bound"])
    if not judged.any():
        return Claim(_GAP, None, _unknown(len(judged), "a gap or a bound"))
    gap, bound, high = (runs[name][judged] for name in ("gap", "bound", "gap_high"))
    top = runs["range"][judged] if "range" in runs else 1.0
    held, vacuous = gap <= bound, int((bound >= top).sum())
    detail = (
        f"{held.sum()} of {_count(len(held), 'run')} ({(high <= bound).sum()} even at the "
        f"upper end of the gap's 95% interval); smallest bound − gap {_signed((bound - gap).min())}"
        f"; {vacuous} of the bounds {'is' if vacuous == 1 else 'are'} vacuous (≥ B)"
    )
    return _judged(_GAP, held, judged, detail, "run")


def within_certificate(neighbours: Columns) -> Claim:
    """||X - X'||_F <= Delta_i Y_i(C) (001, Appendix F) for every neighbour [T]."""
    moved, promised = neighbours["perturbation"], neighbours["certificate"]
    judged = ~np.isnan(promised)
    if not judged.any():
        return Claim(_WITHIN, None, _unknown(len(moved), "a certificate"))
    held, largest = (moved <= promised)[judged], share(neighbours)[judged].max()
    detail = (
        f"{held.sum()} of {_count(len(held), 'neighbour')}; the largest is {largest:.3g} of its "
        f"certificate"
    )
    if idle := int(((promised == 0) & (moved == 0)).sum()):
        detail += f"; {idle} of clients that never took part are 0 ≤ 0"
    return _judged(_WITHIN, held, judged, detail, "neighbour")


def share(neighbours: Columns) -> np.ndarray:
    """Perturbation / certificate [T]: 0 where both are 0, infinite where only the second is."""
    moved, promised = neighbours["perturbation"], neighbours["certificate"]
    unbounded = np.where(moved > 0, np.inf, 0.0)
    return np.divide(moved, promised, out=unbounded, where=promised != 0)


def monotone(runs: Columns, factor: str, quantity: str) -> Claim:
    """Means over seeds grow with eta or 1/sqrt(lambda), or shrink with n (001, Figures 2, 3).

    Neighbouring levels are compared in order, with every other factor equal; a tie is no growth.
    """
    sentence = _MONOTONE[factor].format(QUANTITIES[quantity])
    pairs = adjacent(runs, factor, quantity)
    judged = ~np.isnan(pairs.sum(axis=1))
    if not judged.any():
        return Claim(sentence, None, _unknown(len(pairs), "a comparison"))
    low, high = pairs[judged].T if factor == "lr" else pairs[judged, ::-1].T
    detail = f"{(low < high).sum()} of {_count(len(low), 'neighbouring pair')} of settings"
    if ties := int((low == high).sum()):
        detail += f"; {_count(ties, 'tie')} counted against it"
    if factor == "n" and not np.isnan(fitted := slope(runs["n"], runs[quantity])):
        detail += f"; fitted slope on log-log axes {_signed(fitted)}"
    return _judged(sentence, low < high, judged, detail, "pair")


def adjacent(runs: Columns, factor: str, quantity: str) -> np.ndarray:
    """Means over seeds at neighbouring levels of a factor, all others equal, [pairs, 2]."""
    others = [runs[name] for name in FACTORS if name != factor]
    pairs = []
    for setting in np.unique(np.stack(others, axis=1), axis=0):
        same = np.all([column == value for column, value in zip(others, setting, strict=True)], 0)
        levels = np.unique(runs[factor][same])
        means = [runs[quantity][same & (runs[factor] == level)].mean() for level in levels]
        pairs += itertools.pairwise(means)
    return np.array(pairs, dtype=float).reshape(-1, 2)


def slope(sizes: np.ndarray, values: np.ndarray) -> float:
    """Least-squares slope of log value on log n; nan unless two sizes have positive values."""
    used = (values > 0) & np.isfinite(values)
    if len(np.unique(sizes[used])) < 2:
        return float("nan")
    return float(np.polyfit(np.log(sizes[used]), np.log(values[used]), 1)[0])


def exposure_ranks(neighbours: Columns) -> Claim:
    """Spearman's rho of Y_i(C) / n_i with the perturbation over all neighbours (001, Figure 3c)."""
    x, y = neighbours["exposure"] / neighbours["size"], neighbours["perturbation"]
    rho = np.nan if np.isnan(x).any() else spearman(x, y)
    if np.isnan(rho):
        return Claim(_RANKS, None, "no exposure is known, or all are equal")
    active = neighbours["exposure"] > 0
    settings = np.stack([neighbours[name] for name in SETTING], axis=1)
    _, run = np.unique(settings, axis=0, return_inverse=True)
    inside = [
        spearman(x[run.ravel() == one], y[run.ravel() == one]) for one in range(run.max() + 1)
    ]
    inside = [value for value in inside if not np.isnan(value)] or [rho]
    detail = f"ρ = {rho:.3f} over {_count(len(x), 'neighbour')} (published {PUBLISHED_RHO})"
    if idle := int((~active).sum()):
        alone = spearman(x[active], y[active])
        detail += f"; {alone:.3f} without the {idle} of clients that never took part"
    detail += f"; run by run between {min(inside):.2f} and {max(inside):.2f}"
    for said, part in zip(("another", "the same"), by_label(neighbours), strict=True):
        if not np.isnan(alone := spearman(x[part], y[part])):
            detail += f"; {alone:.3f} over the {part.sum()} with {said} label"
    return Claim(_RANKS, bool(rho >= PUBLISHED_RHO), detail)


def by_label(neighbours: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Replacements that bring another label, and those that keep it and move the model less."""
    other = neighbours["old_label"] != neighbours["new_label"]
    return other, ~other


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation of average ranks; nan where a side is constant."""
    a, b = (rankdata(values) - (len(values) + 1) / 2 for values in (x, y))
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else float("nan")


def client_by_client(neighbours: Columns, census: bool) -> Claim:
    """Each client's certificate beside the largest perturbation of its samples that were tried."""
    sentence = _CLIENTS.format("all its samples" if census else "its samples that were tried")
    every = [neighbours["client"] == i for i in np.unique(neighbours["client"])]
    most = np.array([neighbours["perturbation"][mine].max() for mine in every])
    promised = np.array([neighbours["certificate"][mine].max() for mine in every])
    if np.isnan(promised).any():
        return Claim(sentence, None, _unknown(len(every), "a certificate"))
    moved = most > 0
    ratio = promised[moved] / most[moved]
    detail = f"{(most <= promised).sum()} of {_count(len(every), 'client')}"
    if len(ratio):
        detail += _RATIO.format(ratio.min(), np.median(ratio), ratio.max())
    if idle := (~moved).sum():
        detail += f"; nothing moved in {_count(idle, 'client')}"
    return Claim(sentence, bool((most <= promised).all()), detail)


def census_needed(neighbours: Columns) -> Claim:
    """What ten random neighbours, as many as 001, Table 1 tries, would have shown of the worst."""
    moved = neighbours["perturbation"]
    largest, expected = float(moved.max()), expected_maximum(moved, DRAWS)
    near = float((moved >= 0.9 * largest).mean())
    detail = (
        f"largest of all {len(moved)} neighbours {largest:.4g}; largest of {DRAWS} random ones "
        f"{expected:.4g} on average; the chance that {DRAWS} come within 10% of the largest is "
        f"{1 - (1 - near) ** DRAWS:.2g}"
    )
    return Claim(_CENSUS, bool(expected < 0.9 * largest), detail)


def expected_maximum(values: np.ndarray, draws: int) -> float:
    """E of the maximum of k independent uniform draws from the values [n].

    It is sum_j x_(j) ((j/n)^k - ((j-1)/n)^k), as the maximum is <= x_(j) with chance (j/n)^k.
    """
    chances = np.arange(len(values) + 1) / len(values)
    return float(np.sort(values) @ np.diff(chances**draws))


def _judged(sentence: str, held: np.ndarray, judged: np.ndarray, detail: str, noun: str) -> Claim:
    """The verdict: False with one exception, True only if all could be judged."""
    if missing := int((~judged).sum()):
        detail += f"; {_count(missing, noun)} could not be judged"
    return Claim(sentence, False if not held.all() else True if judged.all() else None, detail)


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _unknown(number: int, what: str) -> str:
    return f"{what} is refused or unknown in all {number}"


_GAP = "Every measured gap is at most its bound."
_WITHIN = "Every perturbation is at most its certificate."
_MONOTONE = {
    "lr": "The {} grows with the step size η.",
    "lambda": "The {} grows with 1/√λ.",
    "n": "The {} shrinks as the number of samples n grows.",
}
_RANKS = f"Exposure per sample ranks the perturbations: Spearman's ρ ≥ {PUBLISHED_RHO}."
_CLIENTS = "Each client's certificate covers the largest perturbation of {}."
_RATIO = (
    "; certificate / largest perturbation is {:.3g} at least, {:.3g} in the median, {:.3g} at most"
)
_CENSUS = f"{DRAWS} random neighbours miss the worst case: on average by more than 10%."
