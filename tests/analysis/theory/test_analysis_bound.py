"""The bound: 50 digits, its moment inequalities one by one, and a learner whose gap is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from fedmuon.analysis import bound, g_alone
from fedmuon.analysis.theory.generalization import difference_moment, least, levels, moment
from fedmuon.core.errors import InputError

mp.dps = 50
DIGITS = 1e-12


def close(found: float, wanted) -> bool:
    return abs(mpf(found) - wanted) <= DIGITS * abs(wanted)


def problem(seed: int, clients: int):
    """Random eps (some above B), sizes and weights, with the loss bound."""
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=clients)
    top = float(rng.uniform(0.3, 3))
    eps = rng.exponential(0.3, clients) * top
    return eps, rng.integers(1, 900, clients), weights / weights.sum(), top


def exactly(eps, sizes, weights, top):
    """min(eps, B), n_i, p_i, B, n_eff and sum n_i eps_i^2 in 50 digits."""
    e = [min(mpf(float(value)), mpf(top)) for value in eps]
    n, p = [int(value) for value in sizes], [mpf(float(value)) for value in weights]
    n_eff = 1 / sum(b**2 / a for a, b in zip(n, p, strict=True))
    return e, n, p, mpf(top), n_eff, sum(a * b**2 for a, b in zip(n, e, strict=True))


def exact_h(eps, sizes, weights, delta, top, c_hp):
    """(10) for a number, the derived formula for `explicit`, a fine search for `sharp`."""
    e, n, p, top, n_eff, squares = exactly(eps, sizes, weights, top)
    mean, scale = sum(a * b for a, b in zip(p, e, strict=True)), mp.sqrt(squares / n_eff)
    tree = int(mp.ceil(mp.log(sum(n), 2) - mpf(10) ** -40))
    log = mp.log(1 / mpf(delta))
    if c_hp == "explicit":
        r = max(mpf(2), log)
        return 2 * mean + mp.e * (top * mp.sqrt(r / n_eff) + mp.sqrt(2) * r * tree * scale)
    if c_hp == "sharp":

        def tail(r):
            k = (2 * mp.gamma(r / 2 + 1)) ** (1 / mpf(r)) / mp.sqrt(2)
            level = 2 * mp.sqrt(r - 1) * k * tree * scale
            return mp.exp(log / r) * (k * top / mp.sqrt(n_eff) + level)

        return 2 * mean + min(tail(2 + (2 + 3 * log) * mpf(j) / 1500) for j in range(1501))
    both = mp.log(2 / mpf(delta))
    rest = scale * mp.log(2 * sum(n)) * both + top * mp.sqrt(both / n_eff)
    return 2 * mean + mpf(c_hp) * rest


def exact_g(eps, sizes, weights, delta, top):
    e, n, p, top, _, _ = exactly(eps, sizes, weights, top)
    squares = sum(n[i] * ((2 - p[i] / n[i]) * e[i] + top * p[i] / n[i]) ** 2 for i in range(len(n)))
    mean = sum(a * b for a, b in zip(p, e, strict=True))
    return mean + mp.sqrt(mp.log(1 / mpf(delta)) / 2 * squares)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(1e-8, 0.99), st.floats(0.1, 20))
def test_every_branch_to_twelve_digits(seed, clients, delta, number) -> None:
    eps, sizes, weights, top = problem(seed, clients)
    for c_hp in (number, "explicit"):
        found = bound(eps, sizes, weights, delta, top, c_hp)
        assert close(found.h, exact_h(eps, sizes, weights, delta / 2, top, c_hp))
        assert close(found.g, exact_g(eps, sizes, weights, delta / 2, top))
        assert found.value == min(found.h, found.g) and found.failure == delta
    assert close(found.n_eff, exactly(eps, sizes, weights, top)[4])
    assert close(g_alone(eps, sizes, weights, delta, top), exact_g(eps, sizes, weights, delta, top))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_sharp_is_at_most_explicit_and_at_its_minimum(seed: int) -> None:
    eps, sizes, weights, top = problem(seed, 4)
    for delta in (1e-6, 0.05, 0.9):
        sharp = bound(eps, sizes, weights, delta, top, "sharp").h
        assert sharp < bound(eps, sizes, weights, delta, top, "explicit").h
        found = float(exact_h(eps, sizes, weights, delta / 2, top, "sharp"))
        # The minimum is flat: the searches' different r differ by less than 1e-6 in the value.
        assert math.isclose(sharp, found, rel_tol=1e-6)


@given(st.floats(2, 200), st.floats(0, 3), st.floats(0, 3), st.integers(1, 10**6))
def test_moments_to_twelve_digits(r, base, scale, samples) -> None:
    k = (2 * mp.gamma(mpf(r) / 2 + 1)) ** (1 / mpf(r)) / mp.sqrt(2)
    assert close(difference_moment(r), k)
    assert k <= mp.sqrt(mpf(r) / 2) * (1 + mpf(10) ** -40)
    tree = int(mp.ceil(mp.log(samples, 2) - mpf(10) ** -40))
    assert levels(samples) == tree
    wanted = k * (mpf(base) + 2 * mp.sqrt(mpf(r) - 1) * tree * mpf(scale))
    assert abs(mpf(moment(r, base, scale, samples)) - wanted) <= DIGITS * wanted + 1e-300


@given(st.floats(-3, 3), st.floats(-5, 2.9))
def test_the_search_finds_the_minimum_beside_infinities(place: float, wall: float) -> None:
    wall = min(wall, place - 0.1)
    found = least(lambda x: abs(x - place) if x > wall else math.inf, -5, 5)
    assert abs(found - place) < 1e-5
    assert least(lambda x: x, -5, 5) < -5 + 1e-5 and least(lambda x: -x, -5, 5) > 5 - 1e-5


def test_shares_of_delta() -> None:
    eps, sizes, weights, top = problem(3, 5)
    whole = bound(eps, sizes, weights, 0.05, top, shares=(1.0, 1.0))
    assert whole.g == g_alone(eps, sizes, weights, 0.05, top)
    assert whole.value < bound(eps, sizes, weights, 0.05, top).value
    uneven = bound(eps, sizes, weights, 0.05, top, shares=(0.9, 0.1))
    assert close(uneven.h, exact_h(eps, sizes, weights, 0.9 * 0.05, top, "explicit"))
    assert close(uneven.g, exact_g(eps, sizes, weights, 0.1 * 0.05, top))


def test_what_a_bound_stands_on() -> None:
    eps, sizes, weights = np.full(20, 1e-3), np.full(20, 500), np.full(20, 0.05)
    assert bound(eps, sizes, weights, 0.05).status == "certified"
    loose = bound(eps, sizes, weights, 0.05, c_hp=1.0)
    assert loose.value == loose.h and loose.status == "estimated"
    assert any("C_hp = 1" in sentence for sentence in loose.assumptions)
    # Where G is the smaller branch, the unproved constant played no part.
    assert bound(eps * 0, sizes, weights, 0.05, c_hp=1.0).status == "certified"
    assert bound([math.inf], [9], [1.0], 0.05).value == bound([1.0], [9], [1.0], 0.05).value


@pytest.mark.parametrize("change", [
    {"eps": [-0.1, 0.1]}, {"eps": [math.nan, 0.1]}, {"eps": [0.1]}, {"sizes": [0, 5]},
    {"sizes": [2.5, 5]}, {"weights": [0.5, 0.4]}, {"weights": [1.5, -0.5]}, {"delta": 0.0},
    {"delta": 1.0}, {"loss_bound": math.inf}, {"c_hp": "optimistic"}, {"c_hp": -1.0},
    {"shares": (0.5, 1.5)}, {"shares": (0.0, 0.5)},
])  # fmt: skip
def test_bad_input_is_refused(change: dict) -> None:
    good = {"eps": [0.1, 0.1], "sizes": [5, 5], "weights": [0.5, 0.5], "delta": 0.05}
    with pytest.raises(InputError):
        bound(**{**good, **change})


def norm(sample: np.ndarray, r: float) -> float:
    return float((np.abs(sample) ** r).mean() ** (1 / r))


@pytest.mark.parametrize("r", [2.0, 3.0, 5.0, 9.0])
def test_bounded_differences_in_moments(r: float) -> None:
    """||H - EH||_r <= k(r) C, for a sum and for a maximum of sums of bounded coordinates."""
    rng, c = np.random.default_rng(1), np.linspace(0.2, 2, 12)
    draws = rng.choice([-0.5, 0.5], size=(200_000, 12)) * c
    size, factor = math.sqrt(np.square(c).sum()), difference_moment(r)
    for h in (draws.sum(axis=1), np.maximum(draws[:, :6].sum(axis=1), draws[:, 6:].sum(axis=1))):
        assert norm(h - h.mean(), r) <= factor * size
    # Negative control: a factor that forgets how moments grow with r is beaten.
    assert norm(draws.sum(axis=1), 9.0) > 0.3 * math.sqrt(2) * size


def learner(rng: np.random.Generator, trials: int, sizes, weights, pull: float):
    """A(S) = pull * sum_i p_i mean_i, loss |A - z| on z in [0, 1], client i ~ Bernoulli(mu_i).

    Replacing a sample of client i moves A, hence every loss, by at most eps_i = pull p_i / n_i.
    """
    means = np.linspace(0.3, 0.7, len(sizes))
    fitted = rng.binomial(sizes, means, size=(trials, len(sizes))) / sizes
    model = pull * (fitted @ weights)
    population = np.abs(1 - model) * (weights @ means) + np.abs(model) * (weights @ (1 - means))
    each = np.abs(1 - model)[:, None] * fitted + np.abs(model)[:, None] * (1 - fitted)
    empirical = each @ weights
    return population - empirical, pull * weights / sizes


@pytest.mark.parametrize("c_hp", ["explicit", "sharp"])
@pytest.mark.parametrize("sizes", [[5, 7, 4], [40, 300, 9]])
@pytest.mark.parametrize("pull", [0.0, 0.3, 1.0])
def test_a_stable_learner_stays_below_every_branch(c_hp, sizes, pull) -> None:
    """Not more than a share delta of 20000 samples lies above a branch at level delta."""
    counts, weights = np.array(sizes), np.array([0.5, 0.2, 0.3])
    gaps, eps = learner(np.random.default_rng(3), 20_000, counts, weights, pull)
    for delta in (0.01, 0.1, 0.5, 0.9):
        found = bound(eps, counts, weights, delta, 1.0, c_hp, shares=(1.0, 1.0))
        assert (gaps > found.h).mean() <= delta and (gaps > found.g).mean() <= delta


def test_a_smaller_deviation_fails() -> None:
    """Negative control: a model that ignores its data beats 0.4 G, and H with C_hp = 0.1."""
    counts, weights = np.array([40, 300, 9]), np.array([0.5, 0.2, 0.3])
    gaps, eps = learner(np.random.default_rng(3), 20_000, counts, weights, 0.0)
    found = bound(eps, counts, weights, 0.1, 1.0, c_hp=0.1, shares=(1.0, 1.0))
    assert (gaps > 0.4 * found.g).mean() > 0.1 and (gaps > found.h).mean() > 0.1


@pytest.mark.parametrize("r", [2.0, 4.0, 7.0])
def test_the_lemma_in_moments(r: float) -> None:
    """||sum w_a g_a||_r for the learner itself, with g_a computed exactly by swapping z_a.

    g_a = E_z'[F_i(A(S^a)) - loss(A(S^a), z_a)]: with z' in {0, 1}, two models to evaluate.
    """
    rng, counts, weights = np.random.default_rng(4), np.array([3, 4, 2]), np.array([0.5, 0.3, 0.2])
    means, owner = np.array([0.2, 0.5, 0.8]), np.repeat(np.arange(3), [3, 4, 2])
    share, mu = (weights / counts)[owner], means[owner]
    z = (rng.random((40_000, 9)) < mu).astype(float)
    rest = (z @ share)[:, None] - z * share
    total = np.zeros(40_000)
    for swapped, chance in ((0.0, 1 - mu), (1.0, mu)):
        model = rest + share * swapped
        risk = mu * abs(1 - model) + (1 - mu) * abs(model)
        total += (share * chance * (risk - abs(model - z))).sum(axis=1)
    n_eff = 1 / (np.square(weights) / counts).sum()
    eps = weights / counts
    scale = math.sqrt((counts * eps**2).sum() / n_eff)
    assert norm(total, r) <= moment(r, 1 / math.sqrt(n_eff), scale, 9)
    model = z @ share
    gap = weights @ means + (1 - 2 * weights @ means) * model - abs(model[:, None] - z) @ share
    assert (gap <= total + 2 * (weights * eps).sum() + 1e-12).all()  # the comparison, pathwise
    assert (gap > total).any()
