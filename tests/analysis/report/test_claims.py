"""Each claim holds where it should, fails on one corrupted number, and equals a naive oracle."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from made_suite import Table, changed, made, phase_grid
from scipy import stats

from fedmuon.analysis.report.claims import (
    FACTORS,
    SETTING,
    Claim,
    census_needed,
    client_by_client,
    expected_maximum,
    exposure_ranks,
    gap_within_bound,
    monotone,
    run_claims,
    share,
    slope,
    spearman,
    suite_claims,
    within_certificate,
)
from fedmuon.analysis.report.verdicts import HOLDS, INCONCLUSIVE, UNTESTED

SIZES = [500, 1000, 2000, 5000]


def sentences(claims: list[Claim]) -> str:
    return " ".join(claim.sentence for claim in claims)


def test_what_varies_decides_what_is_claimed() -> None:
    both = suite_claims(*phase_grid())
    assert len(both) == 6 and all(claim.holds for claim in both)
    assert "η" in sentences(both) and "√λ" in sentences(both) and "samples" not in sentences(both)
    sizes = suite_claims(*made(n=SIZES))
    assert len(sizes) == 4 and all(claim.holds for claim in sizes)
    for cohorts in (made(per_round=[5, 10]), made(alpha=[0.1, 0.5])):
        claims = suite_claims(*cohorts)
        assert len(claims) == 3 and "Spearman" in sentences(claims)
    assert len(suite_claims(*made())) == 2


def test_a_gap_over_its_bound_is_seen() -> None:
    runs, _ = phase_grid()
    good = gap_within_bound(runs)
    assert good.holds and "18 of 18 runs (18 even" in good.detail and not good.also
    least = min(b - g for b, g in zip(runs["bound"], runs["gap"], strict=True))
    assert f"bound − gap +{least:.3g}".rstrip("0") in good.detail
    above = changed(changed(runs, "gap", 7, 9.0), "gap_high", 7, 9.1)
    bad = gap_within_bound(changed(above, "gap_low", 7, 8.9))
    assert bad.verdict == "refuted" and "17 of 18" in bad.detail and bad.worst == 7
    one = gap_within_bound(changed(above, "gap_low", 7, runs["bound"][7] + 1e-9))
    assert one.verdict == "inconclusive" and "one interval of many" in one.why  # of 18, by chance
    assert gap_within_bound(above).verdict == "inconclusive"  # its interval has values below
    high = gap_within_bound(changed(runs, "gap_high", 3, runs["bound"][3] + 1e-9))
    assert high.verdict == "inconclusive" and "(17 even" in high.detail
    vacuous = gap_within_bound(changed(runs, "bound", 3, 1.0))
    assert vacuous.holds and vacuous.in_words.count("vacuous") == 1


def test_a_perturbation_over_its_certificate_is_seen() -> None:
    _, neighbours = phase_grid()
    moved, promised = neighbours["perturbation"], neighbours["certificate"]
    good = within_certificate(neighbours)
    largest = max(a / b for a, b in zip(moved, promised, strict=True))
    assert good.holds and f"the largest is {largest:.3g} of" in good.detail
    bad = within_certificate(changed(neighbours, "perturbation", 5, promised[5] * (1 + 1e-12)))
    assert bad.holds is False and f"{len(moved) - 1} of {len(moved)}" in bad.detail


def test_a_client_that_took_no_part_and_still_moved_is_seen() -> None:
    _, neighbours = made(per_round=[2, 5])
    good, still = within_certificate(neighbours), np.flatnonzero(neighbours["certificate"] == 0)
    assert good.holds and f"for {len(still)} neighbours, the perturbation and the" in good.detail
    moving = changed(neighbours, "perturbation", still[0], 1e-300)
    assert within_certificate(moving).holds is False and share(moving)[still[0]] == math.inf


def spearmanr(x: np.ndarray, y: np.ndarray) -> float:
    """scipy's own."""
    found: Any = stats.spearmanr(x, y)
    return float(found.statistic)


def naive_pairs(runs: Table, factor: str, quantity: str) -> list[tuple[float, float]]:
    """Means over seeds in dictionaries, compared in loops."""
    names = [name for name in ("n", "lr", "lambda", "alpha", "per_round") if name != factor]
    held: dict[tuple, dict[float, list[float]]] = {}
    for k in range(len(runs["n"])):
        setting = tuple(float(runs[name][k]) for name in names)
        levels = held.setdefault(setting, {})
        levels.setdefault(float(runs[factor][k]), []).append(float(runs[quantity][k]))
    return [
        (sum(levels[a]) / len(levels[a]), sum(levels[b]) / len(levels[b]))
        for levels in held.values()
        for a, b in itertools.pairwise(sorted(levels))
    ]


@pytest.mark.parametrize("factor", ["lr", "lambda", "n"])
@pytest.mark.parametrize("quantity", ["bound", "mean_perturbation"])
def test_pairs_against_a_loop(factor: str, quantity: str) -> None:
    runs, _ = phase_grid(n=SIZES)
    order = np.random.default_rng(0).permutation(len(runs["n"]))
    runs = {name: column[order] for name, column in runs.items()}
    runs[quantity] = np.random.default_rng(1).uniform(1, 2, len(order))  # no trend at all
    pairs = naive_pairs(runs, factor, quantity)
    rising = sum(a < b for a, b in pairs)
    held = rising if factor == "lr" else len(pairs) - rising
    found = monotone(runs, factor, quantity)
    growth = [(b - a if factor == "lr" else a - b) / max(a, b) for a, b in pairs]
    np.testing.assert_allclose(sorted(found.effect.value), sorted(growth))
    assert not found.holds and f"{held} of {len(pairs)} neighbouring" in found.detail
    assert quantity != "bound" or found.verdict == "refuted"


@pytest.mark.parametrize("factor", ["lr", "lambda", "n"])
@pytest.mark.parametrize("quantity", ["bound", "mean_perturbation"])
def test_one_pair_out_of_order_is_seen(factor: str, quantity: str) -> None:
    runs, _ = phase_grid(n=SIZES)
    assert monotone(runs, factor, quantity).holds
    top = runs[factor] == (runs[factor].max() if factor == "lr" else runs[factor].min())
    bad = changed(runs, quantity, int(np.flatnonzero(top)[0]), -99.0)
    one = monotone(bad, factor, quantity).verdict
    assert one == ("refuted" if quantity == "bound" else INCONCLUSIVE)
    last = np.flatnonzero(top & np.all([runs[k] == runs[k][top][0] for k in FACTORS], 0))
    for place in last:  # at both seeds
        bad = changed(bad, quantity, int(place), -99.0)
    assert monotone(bad, factor, quantity).verdict == "refuted"
    flat = monotone({**runs, quantity: np.ones(len(top))}, factor, quantity)
    assert flat.holds is False and "ties counted against the claim" in flat.detail


def test_seeds_are_averaged_and_not_compared() -> None:
    """Seed 1 alone goes down, the mean goes up."""
    runs, _ = made(lr=[0.01, 0.02])
    runs["bound"] = np.array([1.0, 2.0, 5.0, 1.5])  # (lr, seed): (1, 0), (1, 1), (2, 0), (2, 1)
    assert monotone(runs, "lr", "bound").holds
    runs["bound"] = np.array([1.0, 2.0, 1.3, 1.5])
    assert monotone(runs, "lr", "bound").holds is False


def test_the_slope() -> None:
    sizes = np.repeat(SIZES, 3).astype(float)
    assert slope(sizes, 7 * sizes**-0.75) == pytest.approx(-0.75)
    noisy = np.exp(np.random.default_rng(0).normal(size=12)) / sizes
    assert slope(sizes, noisy) == pytest.approx(np.polyfit(np.log(sizes), np.log(noisy), 1)[0])
    assert math.isnan(slope(sizes[:3], noisy[:3]))
    runs, _ = made(n=SIZES)
    assert "slope on log-log axes −1" in monotone(runs, "n", "mean_perturbation").detail


def test_spearman_with_ties_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 60).astype(float), rng.integers(0, 9, 60).astype(float)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y), rel=1e-12)
    assert math.isnan(spearman(np.ones(4), np.arange(4.0)))


def test_exposure_ranks_the_perturbations() -> None:
    _, neighbours = made(per_round=[2, 5, 10], trials=20)
    x, y = neighbours["exposure"] / neighbours["size"], neighbours["perturbation"]
    rho, active = spearmanr(x, y), x > 0
    found = exposure_ranks(neighbours)
    assert f"ρ = {rho:.3f}" in found.detail and found.effect.value == pytest.approx([rho])
    runs = np.unique(np.stack([neighbours[k] for k in SETTING], 1), axis=0)
    of = [np.all([neighbours[k] == v for k, v in zip(SETTING, one, strict=True)], 0)
          for one in runs]  # fmt: skip
    left = np.array([spearmanr(x[~one], y[~one]) for one in of])
    left = 0.5 * np.log((1 + left) / (1 - left))  # on Fisher's scale
    half = stats.t.ppf(0.975, 5) * np.sqrt(5 / 6 * ((left - left.mean()) ** 2).sum())
    low, high = (np.tanh(np.arctanh(rho) + one) for one in (-half, half))
    assert len(runs) == 6 and found.effect.high == pytest.approx([high]) and high < 1
    assert found.effect.low == pytest.approx([low])
    assert found.verdict == ("holds" if low >= 0.87 else INCONCLUSIVE) and high >= 0.87
    alone = spearmanr(x[active], y[active])
    assert f"{alone:.3f} without the {(~active).sum()} neighbours" in found.detail
    other = neighbours["old_label"] != neighbours["new_label"]
    for said, part in (("another", other), ("the same", ~other)):
        alone = spearmanr(x[part], y[part])
        assert f"{alone:.3f} over the {part.sum()} neighbours with {said} label" in found.detail
    ranked = exposure_ranks({**neighbours, "perturbation": x})
    assert ranked.holds and "ρ = 1.000" in ranked.detail
    mixed = {**neighbours, "perturbation": np.random.default_rng(0).permutation(y)}
    assert exposure_ranks(mixed).holds is False


def test_what_was_refused_cannot_be_judged() -> None:
    runs, neighbours = phase_grid(per_round=[5, 10])
    unknown = np.full(len(runs["n"]), np.nan)
    assert gap_within_bound({**runs, "bound": unknown}).holds is None
    assert gap_within_bound({**runs, "gap": unknown}).holds is None
    assert monotone({**runs, "bound": unknown}, "lr", "bound").holds is None
    part = gap_within_bound(changed(runs, "bound", 0, math.nan))
    assert part.holds is None and "1 run could not be judged" in part.detail
    lost = np.full(len(neighbours["n"]), np.nan)
    nothing = {**neighbours, "certificate": lost, "exposure": lost}
    assert within_certificate(nothing).holds is None and exposure_ranks(nothing).holds is None
    assert client_by_client(nothing, True).holds is None
    wrong = changed(changed(runs, "bound", 0, math.nan), "gap", 1, 9.0)
    wrong = changed(changed(wrong, "gap_low", 1, 8.9), "gap_high", 1, 9.1)
    assert gap_within_bound(wrong).holds is False  # one counterexample is enough


def test_the_expected_maximum_of_ten_by_simulation_and_by_hand() -> None:
    values = np.array([3.0, 1.0, 2.0])
    all_pairs = [max(pair) for pair in itertools.product(values, repeat=2)]
    assert expected_maximum(values, 2) == pytest.approx(np.mean(all_pairs))
    rng = np.random.default_rng(0)
    many = rng.lognormal(size=300)
    drawn = rng.choice(many, (20000, 10)).max(axis=1)
    error = drawn.std() / math.sqrt(len(drawn))
    assert abs(expected_maximum(many, 10) - drawn.mean()) < 4 * error
    assert abs(expected_maximum(many, 9) - drawn.mean()) > 4 * error  # the test sees a wrong k


def test_ten_random_neighbours_miss_a_rare_worst_case() -> None:
    rare = {"perturbation": np.append(np.ones(999), 5.0)}
    found = census_needed(rare)
    assert found.holds and "largest of all 1000 neighbours is 5" in found.detail
    assert census_needed({"perturbation": np.linspace(0.95, 1, 500)}).holds is False


def test_client_by_client() -> None:
    _, neighbours = made(per_round=[2], trials=20)
    found, ratios = client_by_client(neighbours, True), []
    for i in range(1, 5):
        mine = neighbours["client"] == i
        ratios.append(neighbours["certificate"][mine][0] / neighbours["perturbation"][mine].max())
    assert found.holds and "all perturbations are 0 in 1 client" in found.detail
    for value in (min(ratios), float(np.median(ratios)), max(ratios)):
        assert f"{value:.3g}" in found.detail
    k = int(np.flatnonzero(neighbours["client"] == 3)[0])
    bad = changed(neighbours, "perturbation", k, 2 * neighbours["certificate"][k])
    assert client_by_client(bad, True).holds is False


def test_the_claims_of_a_run() -> None:
    _, neighbours = made(trials=20)
    record = {"gap": 0.01, "gap_low": 0.0, "gap_high": 0.02, "value": 0.3}
    assert [claim.holds for claim in run_claims(neighbours, record, False)] == [True] * 3
    assert len(run_claims(neighbours, record, True)) == 4
    refused = run_claims(neighbours, {**record, "value": None}, False)
    assert refused[0].verdict == INCONCLUSIVE
    above = {**record, "gap": 0.4, "gap_low": 0.31, "gap_high": 0.5}
    assert run_claims(neighbours, above, False)[0].verdict == "refuted"
    assert run_claims(neighbours, {**above, "gap_low": 0.29}, False)[0].verdict == INCONCLUSIVE


def test_what_nothing_could_exceed_is_not_held() -> None:
    """Infinite certificates and vacuous bounds; one that is neither is judged as before."""
    ends = {"gap": 0.1, "gap_low": 0.0, "gap_high": 0.2}
    for certificate, value, verdict in ((np.inf, 2.0, UNTESTED), (1.0, 0.5, HOLDS)):
        tried = {"client": np.zeros(2), "perturbation": np.array([0.1, 0.2])}
        tried["certificate"] = np.full(2, certificate)
        gap, within, *_ = run_claims(tried, {**ends, "value": value, "status": "certified"}, False)
        assert (gap.verdict, within.verdict) == (verdict, verdict)
