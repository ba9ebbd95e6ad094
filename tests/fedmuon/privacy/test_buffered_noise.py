"""Noise that a few buffers correlate: its rows, its optimum, published values and private runs."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_off import broken_off
from test_accounting import gaussian_epsilon
from test_fixed_order_sampling import (
    error,
    momentum_of,
    patterns,
    prefix_sums,
    private,
    require_noise_of,
    toeplitz,
)

from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import spent
from fedmuon.privacy.mechanisms.buffered import (
    Buffers,
    least_possible,
    noise_of_buffers,
    optimized,
    optimized_band,
)
from fedmuon.privacy.mechanisms.fixed_order import (
    FixedOrderSampling,
    Past,
    noise_of_momentum,
    sensitivity,
    square_root,
)

PAIR = Buffers((0.95, 0.3), (0.2, 0.35))
# jax_privacy 2.0.0: buffered_toeplitz.optimize(n=400, error="mean"), each example once.
JAX = {
    2: ((0.9915362453858853, 0.8120826635691536), (0.12829819257775937, 0.3291719230579987)),
    3: ((0.9929122428491426, 0.9221959557124956, 0.5587946872422231),
        (0.10687755365258376, 0.16474061460270978, 0.22768729080274902)),
}  # fmt: skip
# jax_privacy 2.0.0, tests/matrix_factorization/buffered_toeplitz_test.py,
# test_optimize_single_participation_golden: n = 100000, error "max", 2 buffers.
GOLDEN = (0.9999528892, 0.9857068667), (0.0122853238, 0.1878393665)


def defined(buffers: Buffers, count: int) -> np.ndarray:
    """c_0, c_1, ... term by term."""
    found = [1.0]
    for j in range(1, count):
        pairs = zip(buffers.decays, buffers.scales, strict=True)
        found.append(math.fsum(scale * decay ** (j - 1) for decay, scale in pairs))
    return np.array(found)


def test_noise_of_buffers_is_the_dense_solution() -> None:
    """W = C^-1 Z row by row, for two blocks at once. A band that is cut has other rows."""
    steps, rng = 12, np.random.default_rng(0)
    np.testing.assert_allclose(PAIR.coefficients(steps), defined(PAIR, steps), rtol=1e-15)
    fresh = torch.from_numpy(rng.standard_normal((steps, 2, 3, 4)))  # step, block, entries
    found = {"buffers": np.zeros(fresh.shape), "band": np.zeros(fresh.shape)}
    for name, past in (("buffers", Past(PAIR)), ("band", Past(PAIR.coefficients(4)))):
        for step, drawn in enumerate(fresh):
            row = past.at(step, lambda shape, block, drawn=drawn: drawn[block])
            found[name][step] = [row((3, 4), block).numpy() for block in range(2)]
    flat = fresh.reshape(steps, -1).numpy()
    exact = np.linalg.solve(toeplitz(defined(PAIR, steps), steps), flat)
    np.testing.assert_allclose(found["buffers"].reshape(steps, -1), exact, rtol=1e-12, atol=1e-13)
    assert np.abs(found["band"].reshape(steps, -1) - exact).max() > 0.1  # negative control


@pytest.mark.parametrize("apart", [1, 3, 9])
def test_sensitivity_of_buffers_is_the_most_of_all_patterns(apart: int) -> None:
    matrix = toeplitz(defined(PAIR, 9), 9)
    most = max(np.linalg.norm(matrix[:, one].sum(1)) for one in patterns(9, apart))
    assert sensitivity(PAIR.coefficients(9), 9, apart) == pytest.approx(most, rel=1e-13)


@pytest.mark.parametrize(("memory", "ahead"), [(1.0, False), (0.9, False), (0.9, True)])
def test_their_noise_is_that_of_dense_matrices(memory: float, ahead: bool) -> None:
    steps, apart = 60, 20
    weights = prefix_sums(steps) if memory == 1 else momentum_of(memory, ahead, steps)
    decoder = weights @ np.linalg.inv(toeplitz(defined(PAIR, steps), steps))
    most = sensitivity(defined(PAIR, steps), steps, apart)
    given = steps, apart, memory, ahead
    mean, last = (noise_of_buffers(PAIR, *given, last=one) for one in (False, True))
    assert mean == pytest.approx(error(decoder, most), rel=1e-11)
    assert last == pytest.approx(most * np.linalg.norm(decoder, axis=1).max(), rel=1e-11)
    c = defined(PAIR, steps)
    assert noise_of_momentum(c, *given) == pytest.approx(mean, rel=1e-11)
    assert abs(noise_of_buffers(PAIR, steps, steps, memory, ahead) / mean - 1) > 0.1  # control


@pytest.mark.parametrize("count", JAX)
def test_the_optimum_is_that_of_jax_privacy(count: int) -> None:
    """It stops its search earlier: its noise is larger by less than 1e-9."""
    ours, theirs = optimized(400, 400, count), Buffers(*JAX[count])
    digits = 1e-6 if count == 2 else 1e-4
    np.testing.assert_allclose(ours.decays, theirs.decays, rtol=digits)
    np.testing.assert_allclose(ours.scales, theirs.scales, rtol=digits)
    least = noise_of_buffers(ours, 400, 400, 1.0)
    assert least <= noise_of_buffers(theirs, 400, 400, 1.0) <= least * (1 + 1e-9)
    # Of 10 epochs it finds two equal decays, 11.3268493310 (n=400, min_sep=40,
    # max_participations=10): these are one buffer, and two do better.
    equal = Buffers((0.9506606930650489, 0.9506408653803547),
                    (0.2068537169041516, 0.20599450758679477))  # fmt: skip
    assert noise_of_buffers(equal, 400, 40, 1.0) == pytest.approx(11.326849330998465, rel=1e-11)
    one = noise_of_buffers(optimized(400, 40, 1), 400, 40, 1.0)
    assert one == pytest.approx(11.326849330998465, rel=1e-8)
    assert noise_of_buffers(optimized(400, 40, 2), 400, 40, 1.0) < 0.996 * one
    largest = optimized(400, 40, 1, last=True)  # error="max"
    assert largest.decays == pytest.approx((0.9610581431811493,), rel=1e-5)
    assert noise_of_buffers(largest, 400, 40, 1.0, last=True) == pytest.approx(
        14.103809641818328, rel=1e-9
    )


@pytest.mark.slow
def test_the_published_optimum_of_a_long_run() -> None:
    """The place of a minimum depends on the processor: it is known to the root of the rounding."""
    found, steps = optimized(100_000, 100_000, 2, last=True), 100_000
    np.testing.assert_allclose(found.decays, GOLDEN[0], rtol=1e-7)
    np.testing.assert_allclose(found.scales, GOLDEN[1], rtol=1e-5)
    least = noise_of_buffers(found, steps, steps, 1.0, last=True)
    assert noise_of_buffers(Buffers(*GOLDEN), steps, steps, 1.0, last=True) < least * (1 + 1e-9)


@pytest.mark.parametrize(
    ("steps", "count", "ratio"), [(10, 1, 1.04), (100, 2, 1.03), (1000, 2, 1.04), (1000, 3, 1.03)]
)
def test_few_buffers_come_close_to_the_best_last_sum(steps: int, count: int, ratio: float) -> None:
    """The ratios of jax_privacy 2.0.0, test_optimize_single_participation_near_optimal, over the
    bound 1 + ln(n) / pi of Mathias. Of Toeplitz matrices the full root of sums is the best."""
    least = noise_of_buffers(
        optimized(steps, steps, count, last=True), steps, steps, 1.0, last=True
    )
    assert least < ratio * (1 + math.log(steps) / math.pi)
    assert np.square(square_root(steps)).sum() < least * (1 + 1e-12)
    one = noise_of_buffers(optimized(steps, steps, 1, last=True), steps, steps, 1.0, last=True)
    assert (one > 1.1 * ratio * (1 + math.log(steps) / math.pi)) == (steps == 1000)  # control


@pytest.mark.parametrize(
    ("band", "root", "best", "first"),
    [(8, 6.052907124081259, 5.512853265922301, (0.7116558525457294, 0.6354487943911973)),
     (40, 3.5127387712018847, 3.371442462179129, (0.5391831795889266, 0.42635665357995833))],
)  # fmt: skip
def test_bands_are_those_of_jax_privacy(
    band: int, root: float, best: float, first: tuple[float, float]
) -> None:
    """jax_privacy 2.0.0, toeplitz: loss of optimal_max_error_strategy_coefs(band) and of
    optimize_banded_toeplitz(400, band), and minsep_sensitivity_squared."""
    coefficients = square_root(band)
    assert noise_of_momentum(coefficients, 400, 400, 1.0) == pytest.approx(root, rel=1e-13)
    found = optimized_band(400, 400, band)
    assert noise_of_momentum(found, 400, 400, 1.0) == pytest.approx(best, rel=1e-10)
    np.testing.assert_allclose(found[1:3], first, rtol=1e-5)
    squares = {8: (17.18379259109497, 122.82750058174133, 1.718379259109497),
               40: (22.38498512625106, 434.53584459483835, 2.2384985126251062)}[band]  # fmt: skip
    for apart, square in zip((40, 7, 400), squares, strict=True):
        assert sensitivity(coefficients, 400, apart) ** 2 == pytest.approx(square, rel=1e-13)


@pytest.mark.parametrize(
    ("steps", "apart", "memory", "ahead"),
    [(120, 30, 1.0, False), (120, 120, 0.9, True), (100, 7, 0.95, False)],
)
def test_no_other_buffers_have_less_noise_and_nothing_is_below_the_bound(
    steps: int, apart: int, memory: float, ahead: bool
) -> None:
    given = steps, apart, memory, ahead
    found = optimized(steps, apart, 2, memory, ahead)
    least, rng = noise_of_buffers(found, *given), np.random.default_rng(0)
    for _ in range(20):
        decays = 1 - (1 - np.array(found.decays)) * np.exp(0.1 * rng.standard_normal(2))
        scales = np.array(found.scales) * np.exp(0.1 * rng.standard_normal(2))
        other = Buffers(tuple(decays.clip(0, 0.9999)), tuple(scales))
        assert noise_of_buffers(other, *given) > least
    one = noise_of_buffers(optimized(steps, apart, 1, memory, ahead), *given)
    more = noise_of_buffers(optimized(steps, apart, 3, memory, ahead), *given)
    assert more <= least * (1 + 1e-9) <= one * (1 + 2e-9)
    assert optimized(steps, apart, 2, memory, ahead) is found
    bound = least_possible(*given)
    banded = optimized_band(steps, apart, 8, memory, ahead)
    assert bound < min(more, noise_of_momentum(banded, *given))
    assert noise_of_momentum(banded, *given) < noise_of_momentum(square_root(8), *given)
    if memory == 0.9:
        assert more < 1.02 * bound


def test_the_bound_on_all_correlations() -> None:
    """By singular values that are known, and against matrices that are not Toeplitz."""
    steps = 30
    known = 1 / (2 * np.sin((2 * np.arange(1, steps + 1) - 1) * math.pi / (4 * steps + 2)))
    whole = known.sum() / steps
    assert least_possible(steps, steps, 1.0) == pytest.approx(whole, rel=1e-12)
    assert least_possible(steps, 10, 1.0) >= whole * math.sqrt(3) * (1 - 1e-12)
    # Sums of one step are the gradients: independent noise of 5 releases attains it.
    assert least_possible(50, 10, 0.0) == pytest.approx(math.sqrt(5), rel=1e-12)
    sums, rng = prefix_sums(6), np.random.default_rng(1)
    for apart in (2, 3, 6):
        bound = least_possible(6, apart, 1.0)
        found = []
        for _ in range(200):
            matrix = np.tril(rng.standard_normal((6, 6)) * 0.2) + np.eye(6)
            most = 0.0  # over all patterns and signs, which are some of the directions
            for one in patterns(6, apart):
                for signs in itertools.product((-1.0, 1.0), repeat=len(one)):
                    most = max(most, float(np.linalg.norm(matrix[:, one] @ np.array(signs))))
            found.append(error(sums @ np.linalg.inv(matrix), most))
        assert bound < min(found)
        assert apart == 6 or min(found) < bound * math.sqrt(apart)  # control: without the mean


def test_buffers_that_no_account_covers() -> None:
    for decays, scales, why in (
        ((1.0,), (0.2,), "must be at least 0 and below 1"),
        ((0.5,), (-0.2,), "each scale must be positive"),
        ((0.5, 0.4), (0.7, 0.4), "add up to 1.1"),
        ((0.5,), (0.2, 0.1), "each buffer needs one decay and one scale"),
        ((), (), "the number of buffers must be from 1 to 8"),
    ):
        with pytest.raises(InputError, match=why):
            Buffers(decays, scales)
    with pytest.raises(InputError, match="needs a whole epoch between"):
        FixedOrderSampling("shuffle", 0, buffers=PAIR)
    with pytest.raises(InputError, match="either by a band or by buffers"):
        FixedOrderSampling("cyclic", 3, buffers=PAIR)
    with pytest.raises(InputError, match="band is 0, but it must be an integer of 1 or more"):
        FixedOrderSampling("cyclic", 0)
    with pytest.raises(InputError, match="an integer from 1 to 8"):
        optimized(10, 5, 9)


BLT: dict[str, Any] = {"noise-correlation": "blt"}


@pytest.mark.parametrize("of_momentum", [False, True])
def test_a_run_with_buffers(tmp_path: Path, of_momentum: bool) -> None:
    """Its epsilon is that of its own coefficients, which the ledger has, and reads again."""
    local = {"recipe": "dp-muon", "momentum-form": "ema-nesterov"} if of_momentum else {}
    name = "blt-momentum" if of_momentum else "blt"
    config = private(local=local, **{"noise-correlation": name, "buffers": 2})
    found = execute(config, tmp_path)["privacy"]
    first = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    turns = FixedOrderSampling.of_ledger(first)
    form = (config.local.momentum, True) if of_momentum else (1.0, False)
    assert first["noise_correlation"] == found["noise_correlation"] == name
    assert turns == FixedOrderSampling("cyclic", 0, *form, optimized(12, 4, 2, *form))
    whole = turns.sensitivity(12, 4) * math.sqrt(found["blocks"])
    assert found["lower"] <= gaussian_epsilon(2.0 / whole, 1e-3) <= found["epsilon"]
    assert spent(tmp_path)["epsilon"] == found["epsilon"]
    alone = gaussian_epsilon(2.0 / math.sqrt(3 * found["blocks"]), 1e-3)  # control: no correlation
    assert alone < found["lower"]


def test_a_target_is_met_with_buffers(tmp_path: Path) -> None:
    found = execute(private(epsilon=2.0, noise=0.0, **BLT), tmp_path)["privacy"]
    assert 1.99 < found["epsilon"] <= 2.0 and found["certified"]
    turns = FixedOrderSampling("cyclic", 0, buffers=optimized(12, 4, 2))
    exact = gaussian_epsilon(found["noise"] / turns.sensitivity(12, 4), 1e-3)
    assert found["lower"] <= exact <= found["epsilon"]


def test_a_run_has_the_noise_of_its_buffers(tmp_path: Path) -> None:
    """With a vanishing bound and the noise that makes up for it, the model is a sum of noise."""
    config = private(
        local={"momentum": 0.0},
        **BLT | {"noise": 1e9, "bound": 1e-9, "insecure-reproducible-noise": True},
    ).model_copy(deep=True)
    config = config.model_copy(
        update={"engine": config.engine.model_copy(update={"dtype": "float64"})}
    )
    require_noise_of(defined(optimized(12, 4, 2), 12), config, tmp_path)


def test_their_noise_is_not_resumed_and_stays_spent(tmp_path: Path) -> None:
    broken_off(private(**BLT), tmp_path, at=3)
    with pytest.raises(InputError, match="Secret noise is never stored in a file"):
        execute(None, tmp_path, resume=True)
    turns = FixedOrderSampling("cyclic", 0, buffers=optimized(12, 4, 2))
    exact = gaussian_epsilon(2.0 / turns.sensitivity(9, 4), 1e-3)
    assert spent(tmp_path)["epsilon"] == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize(("changes", "why"), [
    ({"noise-correlation": "blt-momentum"}, "Set noise-correlation = 'blt'.$"),
    ({**BLT, "band": 3}, "band = 3 has no effect"),
    ({"noise-correlation": "sqrt-toeplitz", "buffers": 3}, "buffers = 3 has no effect"),
    ({**BLT, "sampling": "shuffle"}, "has no effect"),
    ({**BLT, "clients": 2}, "but not in a mean over several clients"),
    ({**BLT, "local": {"recipe": "dp-muonbc"}}, "independent between steps"),
    ({**BLT, "buffers": 9}, "buffers = 9"),
])  # fmt: skip
def test_what_cannot_be_combined_with_buffers(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        private(**changes)
