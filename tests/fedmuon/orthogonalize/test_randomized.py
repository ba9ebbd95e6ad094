"""The randomized polar map against Algorithms 1 and 2 of 002 as they are printed, in float64."""

import itertools
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmuon.orthogonalize import randomized_polar, schedule
from fedmuon.orthogonalize.polynomial import scaled_newton_schulz
from fedmuon.orthogonalize.randomized import orthonormal

WIDTH, STEPS = 9, 5
SHAPES = [(20, 30), (30, 20), (24, 24)]


def matrix(shape: tuple[int, int], least: float, seed: int = 0) -> Tensor:
    """Singular values from 1 down to `least`, evenly in their logarithms."""
    raw = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(raw, full_matrices=False)
    return (u * torch.logspace(0, np.log10(least), len(s), dtype=torch.float64)) @ vh


def omega(m: np.ndarray, sketch: str, rng: np.random.Generator) -> np.ndarray:
    """Omega [n, l] column by column, as the algorithms define it."""
    n = m.shape[1]
    if sketch == "gaussian":
        return rng.standard_normal((n, WIDTH))
    chances = (m**2).sum(0) / (m**2).sum()
    out = np.zeros((n, WIDTH))
    for k, uniform in enumerate(rng.random(WIDTH)):
        j = int(np.searchsorted(np.cumsum(chances), uniform, side="right"))
        out[j, k] = 1 / np.sqrt(WIDTH * chances[j])
    return out


def printed(
    m: Tensor, power: int, coefficients: str, sketch: str, seed: int,
    delta: float | None = None, steps: int = STEPS,
) -> np.ndarray:  # fmt: skip
    """Algorithm 1 or 2, line by line, powers and iterates formed as matrices."""
    a = m.double().numpy()
    y = a @ omega(a, sketch, np.random.default_rng(seed))
    for _ in range(power):
        y = a @ (a.T @ y)
    u, s, _ = np.linalg.svd(y, full_matrices=False)
    q = u[:, s > 1e-13 * s[0]]
    b = q.T @ a
    own = np.linalg.norm(a) if sketch == "gaussian" else np.linalg.norm(b, 2)
    z = b / (own if delta is None else delta)
    for step in schedule(coefficients, steps):
        powers = [z]
        for _ in step[1:]:
            powers.append(z @ (z.T @ powers[-1]))
        z = np.tensordot(step, powers, 1)
    return q @ z


def tolerance(dtype: torch.dtype, coefficients: str) -> float:
    """Rounding of B, times the slope of the steps at 0; a hundred for what the sums add."""
    gain = prod(max(1.0, step[0]) for step in schedule(coefficients, STEPS))
    return torch.finfo(dtype).eps * (100 + gain)


@pytest.mark.parametrize("sketch", ["gaussian", "kaczmarz"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_printed_algorithm(shape, dtype, sketch):
    names = ("cubic", "quintic", "jordan", "polar-express-e2", "taylor-4")
    for power, name in itertools.product((0, 1, 2), names):
        m, rng = matrix(shape, 0.1, seed=power).to(dtype), np.random.default_rng(3)
        found = randomized_polar(m, 7, 2, power, STEPS, name, sketch, rng)
        wanted = printed(m, power, name, sketch, 3)
        assert np.abs(found.double().numpy() - wanted).max() < tolerance(dtype, name)


def test_another_sketch_or_divisor_is_another_map():
    m = matrix((20, 30), 0.1)

    def found(**given):
        return randomized_polar(m, 7, steps=1, generator=np.random.default_rng(3), **given).numpy()

    def wanted(seed: int, delta: float | None = None) -> np.ndarray:
        return printed(m, 1, "quintic", "gaussian", seed, delta, steps=1)

    assert np.abs(found() - wanted(3)).max() < 1e-13
    assert np.abs(found() - wanted(4)).max() > 0.01
    assert np.abs(found() - wanted(3, 1.0)).max() > 0.01
    assert np.abs(found(delta=1.0) - wanted(3, 1.0)).max() < 1e-13
    assert np.abs(found(delta=torch.tensor(2.5)) - wanted(3, 2.5)).max() < 1e-13
    assert np.linalg.norm(found(delta="operator"), 2) == pytest.approx(1, abs=1e-12)
    assert np.linalg.norm(found(), 2) < 0.8


def test_rows_are_columns_of_the_transpose():
    m = matrix((20, 30), 0.1)
    rows = randomized_polar(m, 7, axis="rows", generator=np.random.default_rng(1))
    wanted = printed(m.mT, 1, "quintic", "gaussian", 1).T
    assert np.abs(rows.numpy() - wanted).max() < 1e-12
    columns = randomized_polar(m, 7, generator=np.random.default_rng(1))
    assert (rows - columns).abs().max() > 0.01


@pytest.mark.parametrize("sketch", ["gaussian", "kaczmarz"])
def test_a_stack_shares_one_sketch_or_has_its_own(sketch):
    stack = torch.stack([matrix((12, 16), 0.1, seed) for seed in range(6)]).view(2, 3, 12, 16)
    one = randomized_polar(stack, 4, sketch=sketch, generator=np.random.default_rng(5))
    for index in np.ndindex(2, 3):
        alone = randomized_polar(stack[index], 4, sketch=sketch, generator=np.random.default_rng(5))
        assert torch.allclose(one[index], alone, atol=1e-13)
    many = [np.random.default_rng(seed) for seed in (5, 6)]
    runs = randomized_polar(stack, 4, sketch=sketch, generator=many)
    assert torch.allclose(runs[0], one[0], atol=1e-13) and (runs[1] - one[1]).abs().max() > 0.01
    own = randomized_polar(stack[1], 4, sketch=sketch, generator=np.random.default_rng(6))
    assert torch.allclose(runs[1], own, atol=1e-13)
    with pytest.raises(ValueError, match="groups of equal size"):
        randomized_polar(stack, 4, generator=[np.random.default_rng(0)] * 4)


def test_powers_lose_no_digits():
    """Against Householder QR between the products; the control has no new basis between them."""

    def projected(m: Tensor, y: Tensor) -> Tensor:
        q = torch.linalg.qr(y).Q
        return scaled_newton_schulz(q @ (q.mT @ m), torch.linalg.matrix_norm(m), STEPS, "quintic")

    m = matrix((40, 30), 1e-6)
    single, rng = m.float(), np.random.default_rng(0)
    sample = torch.from_numpy(omega(m.numpy(), "gaussian", rng))
    y, careless = m @ sample, single @ sample.float()
    for _ in range(3):
        y = m @ torch.linalg.qr(m.mT @ torch.linalg.qr(y).Q).Q
        careless = single @ (single.mT @ careless)
    wanted, allowed = projected(m, y), tolerance(torch.float32, "quintic")
    found = randomized_polar(single, 7, 2, 3, STEPS, generator=np.random.default_rng(0))
    assert (found.double() - wanted).abs().max() < allowed
    assert (projected(single, careless).double() - wanted).abs().max() > 100 * allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_columns_leave_no_invented_directions(dtype):
    """Two columns hold all the mass, so nine draws span a plane, and the output has rank 2."""
    m = 1e-9 * matrix((20, 30), 0.1)
    m[:, 3] += matrix((20, 20), 0.5)[:, 0]
    m[:, 17] += matrix((20, 20), 0.5)[:, 1]
    generator = np.random.default_rng(0)
    found = randomized_polar(m.to(dtype), 7, power=0, sketch="kaczmarz", generator=generator)
    assert int(torch.linalg.matrix_rank(found.double(), rtol=1e-4)) == 2
    parallel = torch.cat([m[:, 3:4] * k for k in range(1, 31)], 1) + 0 * m
    found = randomized_polar(parallel.to(dtype), 7, sketch="kaczmarz", generator=generator)
    assert int(torch.linalg.matrix_rank(found.double(), rtol=1e-4)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bases_are_orthonormal_however_bad_the_samples(dtype):
    eps = torch.finfo(dtype).eps
    bad = [matrix((50, 8), least) for least in (0.5, 1e-3, 1e-6, 1e-12)]
    bad += [torch.cat([bad[0][:, :4], bad[0][:, :4]], 1), torch.zeros(50, 8, dtype=torch.float64)]
    ranks = (8, 8, 8, 8, 4, 0)
    found = orthonormal(torch.stack(bad).to(dtype))
    for samples, q, rank in zip(bad, found.double(), ranks, strict=True):
        gram = q.mT @ q
        assert (gram @ gram - gram).abs().max() < 100 * eps
        assert q.square().sum().item() == pytest.approx(rank, abs=1e-4)
        left = samples.to(dtype).double()
        assert (left - q @ (q.mT @ left)).abs().max() < 100 * eps * left.abs().max() + 1e-300
    alone = orthonormal(torch.stack(bad[:1]).to(dtype))
    assert torch.allclose(alone[0], found[0], atol=100 * eps)


def test_size_dtype_and_zero_do_not_matter():
    m = matrix((12, 16), 0.1)
    wanted = randomized_polar(m, 4, generator=np.random.default_rng(2))
    for scale, dtype in itertools.product((1e-30, 1e-12, 1e30), (torch.float64, torch.float32)):
        found = randomized_polar((m * scale).to(dtype), 4, generator=np.random.default_rng(2))
        assert found.dtype == dtype and (found.double() - wanted).abs().max() < 1e-5
    half = randomized_polar(m.bfloat16(), 4, generator=np.random.default_rng(2))
    assert half.dtype == torch.bfloat16 and (half.double() - wanted).abs().max() < 0.05
    stack = torch.stack([m, torch.zeros_like(m)])
    for sketch in ("gaussian", "kaczmarz"):
        generator = np.random.default_rng(2)
        assert randomized_polar(stack, 4, sketch=sketch, generator=generator)[1].eq(0).all()
    assert randomized_polar(torch.ones(0, 4, 3), 1).shape == (0, 4, 3)
    assert randomized_polar(m, 4).shape == m.shape


def test_impossible_sketches_are_refused_with_the_mend():
    m = matrix((4, 6), 0.1)
    for given, word in [
        ({"rank": 3}, "rank \\+ oversample is .*, but it must be at most 4"),
        ({"rank": 0}, "rank is 0, but it must be an integer of 1 or more"),
        ({"rank": 1, "power": -1}, "0 or more"),
        ({"rank": 1, "sketch": "sparse"}, "gaussian, kaczmarz"),
        ({"rank": 1, "axis": "both"}, "'columns' or 'rows'"),
        ({"rank": 1, "delta": "spectral"}, "'frobenius', 'operator'"),
        ({"rank": 1, "delta": 0.0}, "delta must be positive"),
    ]:
        with pytest.raises(ValueError, match=word):
            randomized_polar(m, **given)
    for bad in (float("nan"), float("inf")):
        m[1, 1] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            randomized_polar(m, 1)


def test_torch_generators_are_asked() -> None:
    m = torch.randn(12, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def drawn(seed: int) -> torch.Tensor:
        return randomized_polar(m, 3, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(drawn(4), drawn(4)) and not torch.equal(drawn(4), drawn(5))
    going = torch.Generator().manual_seed(4)
    first, second = (randomized_polar(m, 3, generator=going) for _ in range(2))
    assert torch.equal(first, drawn(4)) and not torch.equal(first, second)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        one = randomized_polar(m, 3)
        torch.manual_seed(7)
        assert torch.equal(one, randomized_polar(m, 3))
