"""The bound: 50 digits, its moment inequalities one by one, and a learner whose gap is known."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from conftest import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from fedmuon.analysis import bound, g_alone
from fedmuon.analysis.theory.generalization import (
    BESIDE_VARIANCE,
    DEVIATIONS,
    Deviations,
    by_variance,
    difference_moment,
    least,
    levels,
    moment,
)
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


@pytest.mark.parametrize("seed", quick(range(6), [1]))
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
    assert levels(samples) == tree and 3 ** levels(samples, 3) >= samples
    assert samples == 1 or 3 ** (levels(samples, 3) - 1) < samples
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
    {"shares": (0.5, 1.5)}, {"shares": (0.0, 0.5)}, {"c_hp": "variance", "shares": (0.5, 0.5)},
    {"c_hp": "variance", "deviations": Deviations([0.1, 0.1], 1.0), "shares": (1.0, 0.1)},
    {"c_hp": "variance", "deviations": Deviations([0.1], 1.0), "shares": (0.9, 0.1)},
    {"c_hp": "variance", "deviations": Deviations([0.1, 4.0], 1.0), "shares": (0.9, 0.1)},
    {"c_hp": "variance", "deviations": Deviations([0.1, -0.1], 1.0),
     "shares": (0.9, 0.1)},
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


# By variance.


def exact_by_variance(eps, sizes, weights, delta, top, squares, most):
    """The formula of the section "By variance", t and r by fine searches."""
    e, n, p, top, n_eff, scale = exactly(eps, sizes, weights, top)
    logs = [mp.log(1 / (mpf(part) * mpf(delta))) for part in DEVIATIONS]
    omega = [n_eff * (b / a) ** 2 for a, b in zip(n, p, strict=True)]
    every = list(zip(n, omega, e, squares, strict=True))
    seen = sum(a * o * mpf(float(q)) for a, o, _, q in every)

    def spread(t, of):
        c = mp.sqrt(sum(a * (x + o * mpf(most) ** 2 / (2 * t)) ** 2 for a, o, x, _ in every))
        return (mp.sqrt(of + t**2) + c * mp.sqrt(logs[2] / 2)) ** 2 + c**2 / 4 - t**2

    t = min((mpf(most) * mp.exp(mpf(j) / 50) for j in range(-1000, 51)), key=lambda t: spread(t, 0))

    def tail(r):
        k = (2 * mp.gamma(r / 2 + 1)) ** (1 / mpf(r)) / mp.sqrt(2)
        return mp.exp(logs[0] / r) * 2 * mp.sqrt(r - 1) * k

    def depth(m):
        return int(mp.ceil(mp.log(sum(n), m) - mpf(10) ** -40))

    tree = min(mp.sqrt(m - 1) * depth(m) for m in range(2, 65)) * mp.sqrt(scale / n_eff)
    rest = tree * min(tail(2 + (2 + 3 * logs[0]) * mpf(j) / 500) for j in range(501))
    sigma = mp.sqrt(spread(t, seen)) + mp.sqrt(sum(a * o * x**2 for a, o, x, _ in every))
    sigma = min(sigma, top / 2)
    share = max(b / a for a, b in zip(n, p, strict=True))
    mean = 2 * sum(a * b for a, b in zip(p, e, strict=True))
    return mean + rest + sigma * mp.sqrt(2 * logs[1] / n_eff) + top * logs[1] * share / 3


@pytest.mark.parametrize("seed", quick(range(3), [1]))
def test_by_variance_is_its_formula(seed: int) -> None:
    """Up to where the searches for t and r stop."""
    eps, sizes, weights, top = problem(seed, 4)
    eps = 1e-3 * eps
    squares = np.random.default_rng(seed).uniform(0, (0.04, 0.2, 1)[seed] * top**2, 4)
    for delta in (1e-6, 0.05, 0.9):
        found = bound(eps, sizes, weights, delta, top, "variance", shares=BESIDE_VARIANCE,
                      deviations=Deviations(squares, top))  # fmt: skip
        wanted = exact_by_variance(eps, sizes, weights, 0.9 * delta, top, squares, top)
        assert math.isclose(found.h, float(wanted), rel_tol=1e-3)
        assert close(found.g, exact_g(eps, sizes, weights, 0.1 * delta, top))
        assert found.value == min(found.h, found.g) and found.status == "certified"


@pytest.fixture(scope="module")
def all_samples() -> dict[str, np.ndarray]:
    """Every step of the proof for a random rule A, by all 2^7 data sets of bits from two laws.

    The loss of (S, z) is a table; sums over the table with the chances are exact means.
    """
    rng, size = np.random.default_rng(5), 7
    owner, chances = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([0.3, 0.6])[[0, 0, 0, 1, 1, 1, 1]]
    z = (np.arange(2**size)[:, None] >> np.arange(size)) & 1  # [S, n]
    likely = np.where(z, chances, 1 - chances)  # [S, n]
    pull = rng.uniform(-0.1, 0.1, (2, size))
    loss = np.clip(
        [0.3, 0.7] + 0.1 * np.tanh(z @ pull.T) + rng.uniform(0, 0.02, (2**size, 2)), 0, 1
    )
    swap = np.arange(2**size)[:, None] ^ (1 << np.arange(size))  # S with bit a turned
    return {"z": z, "law": likely.prod(1), "likely": likely, "loss": loss, "swap": swap,
            "owner": owner, "chances": chances}  # fmt: skip


def mean_given(values: np.ndarray, known: np.ndarray, z: np.ndarray, law: np.ndarray) -> np.ndarray:
    """E[values | the bits at `known`] of every data set [S]."""
    groups = z[:, known] @ (1 << np.arange(len(known))) if len(known) else np.zeros(len(z), int)
    total = np.bincount(groups, law * values)
    return (total / np.bincount(groups, law))[groups]


def test_every_step_by_variance_is_exact(all_samples: dict[str, np.ndarray]) -> None:
    z, law, loss, swap = (all_samples[name] for name in ("z", "law", "loss", "swap"))
    owner, chances, likely = (all_samples[name] for name in ("owner", "chances", "likely"))
    size, weights, counts = 7, np.array([0.5, 0.5]), np.array([3, 4])
    share = (weights / counts)[owner]
    moves = abs(loss[swap] - loss[:, None, :]).max(axis=(0, 2))  # [n], of one replaced bit
    eps = np.array([moves[owner == i].max() for i in (0, 1)])
    n_eff = 1 / (np.square(weights) / counts).sum()
    scale = math.sqrt((counts * eps**2).sum() / n_eff)

    risk = (1 - chances) * loss[:, :1] + chances * loss[:, 1:]  # F_i(A(S)) of the owner [S, n]
    own = np.take_along_axis(loss, z, axis=1)  # loss(A(S), z_a)
    other = np.take_along_axis(loss[swap], z[:, :, None], axis=2)[..., 0]  # with z_a turned in S
    swapped = np.take_along_axis(risk[swap], np.arange(size)[None, :, None], axis=2)[..., 0]
    g = likely * (risk - own) + (1 - likely) * (swapped - other)
    gap = ((risk - own) * share).sum(1)
    assert (gap <= 2 * (weights * eps).sum() + g @ share + 1e-12).all()

    single = np.stack([mean_given(g[:, a], np.array([a]), z, law) for a in range(size)], axis=1)
    rest = (g - single) @ share
    for r in (2.0, 3.0, 6.0):
        size_of_rest = float((law * abs(rest) ** r).sum() ** (1 / r))
        for m in (2, 3, 7):
            tree = 2 * math.sqrt((r - 1) * (m - 1)) * difference_moment(r) * levels(size, m) * scale
            assert size_of_rest <= tree
    assert size_of_rest > 0

    # The variance of the independent part, and N^2.
    c, omega = 0.35, n_eff * share**2
    most = abs(loss - c).max()
    variance = n_eff * (share**2 * (law[:, None] * single**2).sum(0)).sum()
    n2 = (omega * (own - c) ** 2).sum(1)
    assert math.sqrt(variance) <= math.sqrt((law * n2).sum()) + math.sqrt((omega * moves**2).sum())
    for t in (0.01, 0.1, 1.0):
        norms = np.sqrt(n2 + t * t)
        c_a = eps[owner] + omega * most**2 / (2 * t)
        assert (abs(norms[swap] - norms[:, None]).max(0) <= c_a + 1e-12).all()
        mean = float((law * norms).sum())
        assert (law * norms**2).sum() - mean**2 <= (c_a**2).sum() / 4
    # Negative control: without its second part c_a is exceeded.
    small = np.sqrt(n2 + 1e-4)
    assert (abs(small[swap] - small[:, None]).max(0) > eps[owner]).any()


SIZES, PULLS = ([5, 7, 4], [40, 300, 9], [4000, 3000, 5000]), (0.0, 0.3, 1.0)
LEARNERS = [*itertools.product(SIZES, PULLS)]


@pytest.mark.parametrize(("sizes", "pull"), quick(LEARNERS, LEARNERS[2::2][:3]))
def test_a_stable_learner_stays_below_by_variance(sizes: list[int], pull: float) -> None:
    """The negative control says that losses do not vary, of a model that ignores its data."""
    counts, weights = np.array(sizes), np.array([0.5, 0.2, 0.3])
    rng, means = np.random.default_rng(6), np.array([0.03, 0.05, 0.02])
    fitted = rng.binomial(counts, means, size=(400, 3)) / counts
    model = pull * (fitted @ weights)
    population = np.abs(1 - model) * (weights @ means) + model * (weights @ (1 - means))
    empirical = ((1 - model)[:, None] * fitted + model[:, None] * (1 - fitted)) @ weights
    squares = (1 - model)[:, None] ** 2 * fitted + model[:, None] ** 2 * (1 - fitted)  # c = 0
    eps = pull * weights / counts
    for delta in (0.05, 0.5):
        one = [
            by_variance(eps, counts, weights, delta, 1.0, Deviations(each, 1.0)) for each in squares
        ]
        assert (population - empirical > np.array(one)).mean() <= delta
        none = by_variance(eps, counts, weights, delta, 1.0, Deviations(np.zeros(3), 0.0))
        if pull == 0 and sizes[0] == 4000 and delta == 0.05:
            assert (population - empirical > none).mean() > delta
            sharp = bound(eps, counts, weights, delta, 1.0, "sharp", shares=(1.0, 1.0))
            assert max(one) < 0.65 * sharp.value  # the losses are seldom far from 0


def expected_gap(values: int, share: Fraction, second: int = 1) -> tuple[Fraction, Fraction]:
    """Return E[F - F_hat] exactly, and sum_i p_i eps_i, of a learner that stores one sample.

    Client 0 has the weight `share` and one sample, and client 1 has `second` samples. All samples
    are uniform on `values` numbers. The model is the sample of client 0. A wrong number costs 1.
    """
    total, every = Fraction(0), [*itertools.product(range(values), repeat=1 + second)]
    for first, *rest in every:
        population = Fraction(values - 1, values)  # of either client
        seen = (1 - share) * Fraction(sum(one != first for one in rest), second)
        total += population - seen  # client 0 has no training loss
    return total / len(every), share  # eps = (1, 0)


@pytest.mark.parametrize("values", [2, 5, 20])
def test_the_gap_in_expectation(values: int) -> None:
    """Lemma C.1, by enumeration; with 10% less on the right, it fails."""
    for share in (Fraction(1, 4), Fraction(3, 4)):
        gap, promised = expected_gap(values, share)
        assert gap == promised * Fraction(values - 1, values) <= promised
    assert values < 20 or gap > promised * Fraction(9, 10)


def test_moments_bound_a_tail_with_an_explicit_constant() -> None:
    """Lemma C.3 with C = 3 e, for the largest value that all moments allow; C = 1 is too small.

    X is x with probability delta, and 0 otherwise, so ||X||_r = x delta^(1/r).
    """
    orders, worst = np.geomspace(2, 1e4, 20_001), 0.0
    for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.01, 1.0)):
        for delta in (0.999, 0.9, 0.5, 0.1, 1e-3, 1e-6, 1e-12):
            largest = ((a * orders + b * np.sqrt(orders)) * delta ** (-1 / orders)).min()
            log = math.log(2 / delta)
            worst = max(worst, largest / (a * log + b * math.sqrt(log)))
            assert max(2, math.log(1 / delta)) <= 3 * log  # the proof's step
    assert 2.5 < worst <= 3 * math.e
