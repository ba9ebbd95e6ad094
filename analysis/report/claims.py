"""Claims of the Stability note, section 5, compared with measured runs.

The claims of a suite are tested with runs.csv and neighbours.csv. The claims of a single run are
tested with neighbours.csv and bound.json. Claims about a factor are tested only if the factor
varies between the runs.

If the theory gives no bound or certificate, the table contains nan in its place. The claim is then
inconclusive. A claim is `not tested here` if no theorem covers the run, or if no outcome could
refute the claim.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import rankdata

from fedmuon.analysis.report.numbers import count as _count
from fedmuon.analysis.report.numbers import number, written
from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.verdicts import (
    AT_MOST_ONE,
    POSITIVE,
    Claim,
    Effect,
    Rule,
    by_seed,
    correlation_at,
    counted,
    free_of_seeds,
    half_width,
    on_fishers_scale,
    unknown,
)

FACTORS = ("n", "lr", "lambda", "alpha", "per_round")
SETTING = (*FACTORS, "seed")
PUBLISHED_RHO = 0.87  # Stability note, Figure 3(c)
DRAWS = 10  # replacement trials per run (Stability note, Table 1)
QUANTITIES = {"bound": "bound", "mean_perturbation": "mean perturbation"}


def varying(runs: Columns) -> tuple[str, ...]:
    """Return the factors, such as `lr` or `n`, that take more than one value in the runs."""
    return tuple(name for name in FACTORS if len(np.unique(runs[name])) > 1)


def suite_claims(runs: Columns, neighbours: Columns) -> list[Claim]:
    """Return the claims of the Stability note, section 5, for the factors that vary in a suite."""
    factors = varying(runs)
    claims = [gap_within_bound(runs), within_certificate(neighbours)]
    for factor in ("lr", "lambda", "n"):
        if factor in factors:
            claims += [monotone(runs, factor, quantity) for quantity in QUANTITIES]
    if {"per_round", "alpha"} & set(factors):
        claims.append(exposure_ranks(neighbours))
    return claims


def run_claims(neighbours: Columns, bound: Mapping[str, Any], census: bool) -> list[Claim]:
    """Return the claims about one run.

    The claims are tested on the neighbours of the run and on the contents of its bound.json.
    `census` is True if each training sample is replaced in one of the neighbours.
    """
    names = {"gap": "gap", "gap_low": "gap_low", "gap_high": "gap_high", "bound": "value"}
    row = {name: np.array([bound[key]], dtype=float) for name, key in names.items()}  # None is nan
    row["range"] = np.array([bound.get("range", 1.0)])
    claims = [gap_within_bound(row), within_certificate(neighbours)]
    claims.append(client_by_client(neighbours, census))
    claims += [census_needed(neighbours)] if census else []
    claims += [participation_gap_within_bound(bound)] if bound.get("unseen_clients") else []
    if bound.get("status") != "refused":
        return claims
    reason = "no theorem covers this run"
    return [replace(claim, limit=reason) if claim.holds is None else claim for claim in claims]


def gap_within_bound(runs: Columns) -> Claim:
    """Return the claim that the gap of every run is at most its bound (Stability note, Table 2).

    The claim holds only if the upper end of the interval of every gap is at most the bound.
    """
    gap, bound, low, high = (runs[name] for name in ("gap", "bound", "gap_low", "gap_high"))
    judged = ~np.isnan(gap + bound)
    if not judged.any():
        return unknown(_GAP, _UNKNOWN.format("a gap or a bound", len(judged)))
    top = (runs["range"] if "range" in runs else np.ones(len(gap)))[judged]
    effect = Effect.of_gaps(gap, low, high, bound)
    met, sure, vacuous = gap <= bound, high <= bound, int((bound[judged] >= top).sum())
    detail = (
        f"{met[judged].sum()} of {_count(int(judged.sum()), 'run')} ({sure[judged].sum()} even at "
        f"the upper end of the gap's 95% interval); smallest bound − gap "
        f"{written((bound - gap)[judged].min(), '+.3g')}"
    )
    also = (
        f"{vacuous} of {_count(int(judged.sum()), 'bound')} ≥ B and therefore vacuous, because "
        "no gap can exceed B"
    )
    limit = "every bound is vacuous, because no gap could exceed it" * bool(vacuous == judged.sum())
    return Claim(
        _GAP, effect, Rule(high=0.0), detail + _left_out(judged, "run"), also * (vacuous > 0), limit
    )


def participation_gap_within_bound(bound: Mapping[str, Any]) -> Claim:
    """Return the claim that the measured participation gap of a run is at most its bound.

    `bound` is the content of a bound.json with a measured participation gap.
    """
    gap = "participation_gap"
    names = {"gap": gap, "gap_low": f"{gap}_low", "gap_high": f"{gap}_high",
             "bound": "participation_bound"}  # fmt: skip
    row = {name: np.array([bound[key]], dtype=float) for name, key in names.items()}  # None is nan
    row["range"] = np.array([bound.get("range", 1.0)])
    return replace(gap_within_bound(row), sentence=_PARTICIPATION)


def within_certificate(neighbours: Columns) -> Claim:
    """Return the claim that the perturbation of every neighbour is at most its certificate.

    The certificate is Delta_i Y_i(C) of the Stability note, Appendix F.
    """
    moved, promised = neighbours["perturbation"], neighbours["certificate"]
    judged = ~np.isnan(promised)
    if not judged.any():
        return unknown(_WITHIN, _UNKNOWN.format("a certificate", len(moved)))
    part = np.where(judged, share(neighbours), np.nan)
    detail = (
        f"{(moved <= promised)[judged].sum()} of {_count(int(judged.sum()), 'neighbour')}; the "
        f"largest is {number(np.nanmax(part), 3)} of its certificate"
    )
    if idle := int(((promised == 0) & (moved == 0)).sum()):
        detail += (
            f"; for {idle} neighbours, the perturbation and the certificate are 0, because their "
            "clients never took part"
        )
    effect, also, limit = Effect.exact("perturbation over certificate", part, unit="ratio"), "", ""
    if endless := int(np.isinf(promised).sum()):
        also = f"{_count(endless, 'certificate')} infinite and therefore vacuous"
        limit = "every certificate is infinite" * bool(endless == judged.sum())
    return Claim(_WITHIN, effect, AT_MOST_ONE, detail + _left_out(judged, "neighbour"), also, limit)


def share(neighbours: Columns) -> np.ndarray:
    """Return perturbation / certificate for each neighbour.

    The ratio is 0 if both numbers are 0, and infinite if only the certificate is 0.
    """
    moved, promised = neighbours["perturbation"], neighbours["certificate"]
    unbounded = np.where(moved > 0, np.inf, 0.0)
    return np.divide(moved, promised, out=unbounded, where=promised != 0)


def monotone(runs: Columns, factor: str, quantity: str) -> Claim:
    """Return the claim that a quantity rises or falls as a factor grows (Stability note, Fig. 2).

    The quantity should grow with the step size eta and with 1/sqrt(lambda), and should shrink as
    the number of samples n grows. The function computes the mean over seeds at each level of the
    factor and compares adjacent levels. All other factors are equal in each comparison.

    The growth is the difference of two means, divided by the larger mean. Two equal means do not
    count as growth. A bound is not random, so its growth is exact. A perturbation is random. Its
    growth has Student's interval of differences that are paired by seed.
    """
    sentence = _MONOTONE[factor].format(QUANTITIES[quantity])
    sign = 1.0 if factor == "lr" else -1.0
    pairs, growths, places = [], [], []
    others = np.stack([runs[name] for name in FACTORS if name != factor], axis=1)
    for setting in np.unique(others, axis=0):
        same = (others == setting).all(axis=1)
        for low, high in itertools.pairwise(np.unique(runs[factor][same])):
            before, after = (same & (runs[factor] == level) for level in (low, high))
            ends = [runs[quantity][part].mean() for part in (before, after)]
            scale = max(map(abs, ends)) or 1.0
            half = 0.0 if quantity == "bound" else by_seed(runs, quantity, after, before)[1]
            pairs.append(ends)
            growths.append((sign * (ends[1] - ends[0]) / scale, half / scale))
            places.append(f"from {factor} = {low:g} to {high:g}")
    means = np.array(pairs, dtype=float).reshape(-1, 2)
    judged = ~np.isnan(means.sum(axis=1))
    if not judged.any():
        return unknown(sentence, _UNKNOWN.format("a comparison", len(pairs)))
    smaller, larger = means[judged].T if factor == "lr" else means[judged, ::-1].T
    detail = (
        f"{(smaller < larger).sum()} of {_count(len(smaller), 'neighbouring pair')} of settings"
    )
    if ties := int((smaller == larger).sum()):
        detail += f"; {_count(ties, 'tie')} counted against the claim"
    if factor == "n" and not np.isnan(fitted := slope(runs["n"], runs[quantity])):
        detail += f"; fitted slope on log-log axes {written(fitted, '+.3g')}"
    effect = Effect.around(
        f"growth of the {QUANTITIES[quantity]}", *np.array(growths).reshape(-1, 2).T, places,
        free_of_seeds(runs), unit="ratio",
    )  # fmt: skip
    return Claim(sentence, effect, POSITIVE, detail + _left_out(judged, "pair"))


def slope(sizes: np.ndarray, values: np.ndarray) -> float:
    """Fit a line to log(value) as a function of log(n), and return the slope of the line.

    The slope is nan if fewer than two sizes have positive values.
    """
    used = (values > 0) & np.isfinite(values)
    if len(np.unique(sizes[used])) < 2:
        return float("nan")
    return float(np.polyfit(np.log(sizes[used]), np.log(values[used]), 1)[0])


def exposure_ranks(neighbours: Columns) -> Claim:
    """Return the claim that a larger Y_i(C) / n_i means a larger perturbation.

    The claim is about the Stability note, Figure 3c. The effect is Spearman's rank correlation rho
    of these two quantities. The neighbours of one run share the random numbers of the run, so they
    are not independent. The interval of rho is therefore a jackknife interval over runs, on
    Fisher's scale z = artanh(rho). Let z_g be z without run g. For G runs, the variance of z is
    (G - 1)/G sum_g (z_g - mean)^2 (Efron and Stein 1981).
    """
    x, y = neighbours["exposure"] / neighbours["size"], neighbours["perturbation"]
    rho = np.nan if np.isnan(x).any() else spearman(x, y)
    if np.isnan(rho):
        return unknown(_RANKS, "the exposures are unknown or all equal")
    active = neighbours["exposure"] > 0
    settings = np.stack([neighbours[name] for name in SETTING], axis=1)
    _, run = np.unique(settings, axis=0, return_inverse=True)
    masks = [run.ravel() == group for group in range(run.max() + 1)]
    inside = [spearman(x[mask], y[mask]) for mask in masks]
    inside = [value for value in inside if not np.isnan(value)] or [rho]
    half, groups = np.nan, len(masks)
    without = np.array([spearman(x[~mask], y[~mask]) for mask in masks])
    if groups > 1 and not np.isnan(without).any():
        spread = on_fishers_scale(without, len(x)).var()
        half = half_width(np.sqrt((groups - 1) * spread), groups - 1)
    detail = f"ρ = {rho:.3f} over {_count(len(x), 'neighbour')} (published {PUBLISHED_RHO})"
    if idle := int((~active).sum()):
        alone = spearman(x[active], y[active])
        detail += f"; {alone:.3f} without the {idle} neighbours whose clients never took part"
    detail += f"; between {min(inside):.2f} and {max(inside):.2f} in single runs"
    for which, part in zip(("another", "the same"), by_label(neighbours), strict=True):
        if not np.isnan(alone := spearman(x[part], y[part])):
            detail += f"; {alone:.3f} over the {part.sum()} neighbours with {which} label"
    z = float(on_fishers_scale(rho, len(x)))
    estimates = {"": correlation_at(z, half, groups - 1.0)}
    return Claim(_RANKS, Effect.between("Spearman's ρ", estimates), Rule(low=PUBLISHED_RHO), detail)


def by_label(neighbours: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return two masks: one for neighbours whose new sample has another label, one for the rest."""
    other = neighbours["old_label"] != neighbours["new_label"]
    return other, ~other


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rank correlation of x and y.

    Equal values get their average rank. The result is nan if all x or all y are equal.
    """
    a, b = (rankdata(values) - (len(values) + 1) / 2 for values in (x, y))
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else float("nan")


def client_by_client(neighbours: Columns, census: bool) -> Claim:
    """Return the claim that each client's certificate covers its largest perturbation."""
    sentence = _CLIENTS.format("all its samples" if census else "its samples that were tried")
    masks = [neighbours["client"] == i for i in np.unique(neighbours["client"])]
    largest = np.array([neighbours["perturbation"][mask].max() for mask in masks])
    promised = np.array([neighbours["certificate"][mask].max() for mask in masks])
    if np.isnan(promised).any():
        return unknown(sentence, _UNKNOWN.format("a certificate", len(masks)))
    moved = largest > 0
    ratio = promised[moved] / largest[moved]
    detail = f"{(largest <= promised).sum()} of {_count(len(masks), 'client')}"
    if len(ratio):
        detail += _RATIO.format(ratio.min(), np.median(ratio), ratio.max())
    if idle := int((~moved).sum()):
        detail += f"; all perturbations are 0 in {_count(idle, 'client')}"
    return counted(sentence, largest <= promised, "clients", detail)


def census_needed(neighbours: Columns) -> Claim:
    """Return the claim that ten neighbours underestimate the largest perturbation by over 10%.

    The claim is about the mean over random choices of ten neighbours (Stability note, Table 1).
    """
    moved = neighbours["perturbation"]
    largest, expected = float(moved.max()), expected_maximum(moved, DRAWS)
    near = float((moved >= 0.9 * largest).mean())
    detail = (
        f"the largest of all {len(moved)} neighbours is {number(largest)}; the largest of "
        f"{DRAWS} random neighbours is {number(expected)} on average; the chance that {DRAWS} "
        "random neighbours come within 10% of the largest is "
        f"{number(1 - (1 - near) ** DRAWS, 2)}"
    )
    times = largest / expected if expected else np.nan
    effect = Effect.exact(
        "largest of all neighbours / largest of ten random neighbours", times, unit="ratio"
    )
    return Claim(_CENSUS, effect, Rule(low=1 / 0.9, strict=True), detail)


def expected_maximum(values: np.ndarray, draws: int) -> float:
    """Return the expected maximum of k = `draws` values that are chosen at random from `values`.

    The k choices are independent and uniform. Let x_(1) <= ... <= x_(n) be the sorted values. The
    maximum is at most x_(j) with probability (j/n)^k, so its expectation is sum_j x_(j) ((j/n)^k -
    ((j-1)/n)^k).
    """
    chances = np.arange(len(values) + 1) / len(values)
    return float(np.sort(values) @ np.diff(chances**draws))


def _left_out(judged: np.ndarray, noun: str) -> str:
    missing = int((~judged).sum())
    return f"; {_count(missing, noun)} could not be judged" if missing else ""


_PARTICIPATION = "The participation gap is at most its bound."
_UNKNOWN = "{} is not available in any of {} cases"
_GAP = "Every gap is at most its bound."
_WITHIN = "Every perturbation is at most its certificate."
_MONOTONE = {
    "lr": "The {} grows with the step size η.",
    "lambda": "The {} grows with 1/√λ.",
    "n": "The {} shrinks as the number of samples n grows.",
}
_RANKS = f"Exposure per sample ranks the perturbations: Spearman's ρ ≥ {PUBLISHED_RHO}."
_CLIENTS = "Each client's certificate covers the largest perturbation of {}."
_RATIO = "; certificate / largest perturbation: minimum {:.3g}, median {:.3g}, maximum {:.3g}"
_CENSUS = f"{DRAWS} random neighbours miss the worst case: on average by more than 10%."
