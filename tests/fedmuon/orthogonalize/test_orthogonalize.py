"""Every map against a float64 SVD: one registry of (map x shape x dtype x scale) drives the tests.

Tolerances, relative in Frobenius norm: 1e-5 in float32 and 1e-11 in float64, ten times the error
that the code allows its Gram path. Newton-Schulz may lose 1e-10 in float64 (its own rule), and
eps times the slope at 0 wherever that is more: rounding the normalized input alone costs that.
"""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmuon.optim import lora_muon
from fedmuon.orthogonalize import (
    COEFFICIENTS,
    NORMALIZATIONS,
    clipped_sign,
    exact_sign,
    gaussian_smoothed_sign,
    newton_schulz,
    schedule,
    smoothed_polar,
    spectral,
)
from fedmuon.orthogonalize.spectral import derivative, factors, inverse_root

torch.manual_seed(0)
Scalar = Callable[[np.ndarray, float], np.ndarray]  # singular values of M / unit, unit -> f


@dataclass(frozen=True)
class Map:
    """A map, the function that it should apply to singular values, and the slope of that at 0."""

    apply: Callable[[Tensor], Tensor]
    scalar: Scalar
    gain: float = 0.0  # of Newton-Schulz, relative to the normalized input
    slope: float = 0.0  # of the others, absolute


def polar(lam: float) -> Map:
    root = math.sqrt(lam)
    scalar = lambda s, u: s / np.hypot(s, root / u)  # noqa: E731
    return Map(lambda m: smoothed_polar(m, lam), scalar, 0, 1 / root)


def clipped(gamma: float) -> Map:
    scalar = lambda s, u: np.minimum(s / (gamma / u), 1)  # noqa: E731
    return Map(lambda m: clipped_sign(m, gamma), scalar, 0, 1 / gamma)


def iterated(coefficients: str, steps: int, normalization: str, eps: float = 1e-7) -> Map:
    polynomials = schedule(coefficients, steps)

    def scalar(s: np.ndarray, unit: float) -> np.ndarray:
        size = np.sqrt((s**2).sum())
        floor = (1.0 if normalization == "unit" else eps) / unit
        x = s / (size + floor if normalization == "plus" else max(size, floor))
        for step in polynomials:
            x = sum(c * x ** (2 * k + 1) for k, c in enumerate(step))
        return np.asarray(x)

    # The terms of a step cancel at 1: their rounding reaches small singular values, which later
    # steps magnify by their slopes at 0.
    later = [math.prod(one[0] for one in polynomials[i + 1 :]) for i in range(len(polynomials))]
    gain = max((sum(map(abs, s)) * g for s, g in zip(polynomials, later, strict=True)), default=1.0)
    return Map(lambda m: newton_schulz(m, steps, coefficients, eps, normalization), scalar, gain)


SIGN = Map(exact_sign, lambda s, u: (s > 0).astype(float))
MAPS = {
    "sign": SIGN,
    "smooth": polar(0.1),
    "nearly-sharp": polar(1e-6),
    "clipped": clipped(0.3),
    "hard-clipped": clipped(1e-3),
    "cubic-0": iterated("cubic", 0, "plus"),
    "cubic-5": iterated("cubic", 5, "plus"),
    "quintic-5": iterated("quintic", 5, "max"),
    "jordan-5": iterated("jordan", 5, "plus", 0.1),
    "express-9": iterated("polar-express-e2", 9, "plus"),
    "express-4": iterated("polar-express-e3", 4, "unit"),
    "taylor-4": iterated("taylor-4", 3, "unit"),
}
SHAPES = [(3, 9, 3), (3, 3, 9), (2, 6, 6), (31, 7), (2, 2, 4, 12), (1, 1), (5, 1), (1, 5)]
DTYPES = [torch.float32, torch.float64]
SCALES = {torch.float32: [1.0, 1e30, 1e-30], torch.float64: [1.0, 1e30, 1e-30, 1e200, 1e-200]}


def spread(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random singular vectors, singular values from scale down to scale / 100."""
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    spectrum = torch.logspace(0, -2, min(shape[-2:]), dtype=torch.float64)
    return ((u * spectrum) @ vh * scale).to(dtype)


def deficient(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Products of small integers of rank 1 or 2: the rank is exact up to the rounding of scale."""
    rank = max(1, min(2, min(shape[-2:]) - 1))
    a = torch.randint(1, 4, (*shape[:-1], rank)).double()
    b = torch.randint(-3, 3, (*shape[:-2], rank, shape[-1])).double()
    return (a @ b * scale).to(dtype)


def expected(case: Map, stack: Tensor) -> Tensor:
    """The map by a float64 SVD of each matrix, scaled to a largest entry of 1."""
    found, eps = [], torch.finfo(stack.dtype).eps
    for matrix in stack.double().reshape(-1, *stack.shape[-2:]):
        unit = float(matrix.abs().max()) or 1.0
        u, s, vh = torch.linalg.svd(matrix / unit, full_matrices=False)
        if case is SIGN:  # what counts as zero is part of the definition
            s = torch.where(s > max(matrix.shape) * eps * s[0], s, 0)
        found.append((u * torch.from_numpy(case.scalar(s.numpy(), unit))) @ vh)
    return torch.stack(found).reshape(stack.shape)


def error(case: Map, stack: Tensor, found: Tensor) -> float:
    """The largest relative error over the stack, in units of the tolerance."""
    base = {torch.float32: 1e-5, torch.float64: 1e-10 if case.gain else 1e-11}[stack.dtype]
    tolerance = max(base, 4 * torch.finfo(stack.dtype).eps * case.gain)
    want = expected(case, stack)
    # Map and oracle each take a matrix within a few float64 eps of M: steep maps magnify that.
    given = 16 * torch.finfo(torch.float64).eps * length(stack.double())
    allowed = tolerance * length(want) + case.slope * given
    # Results below the normal range of the dtype have no relative accuracy to lose.
    allowed = allowed.clamp_min(torch.finfo(stack.dtype).tiny)
    return float((length(found.double() - want) / allowed).max())


def length(stack: Tensor) -> Tensor:
    """Frobenius norms without overflow or underflow."""
    peak = stack.abs().amax((-2, -1)).clamp_min(torch.finfo(torch.float64).tiny)
    return torch.linalg.vector_norm(stack / peak[..., None, None], dim=(-2, -1)) * peak


APPLIED = [*itertools.product(MAPS, SHAPES, DTYPES)]


@pytest.mark.parametrize(("name", "shape", "dtype"), quick(APPLIED, APPLIED[::3]))
def test_every_map_applies_its_function_to_the_singular_values(name, shape, dtype):
    for scale, make in itertools.product(SCALES[dtype], (spread, deficient)):
        stack = make(shape, dtype, scale)
        before = stack.clone()
        found = MAPS[name].apply(stack)
        assert found.shape == stack.shape and found.dtype == dtype and torch.equal(stack, before)
        assert error(MAPS[name], stack, found) <= 1, (scale, make.__name__)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relative", [1e-14, 1e-8, 1e-4, 1e-2, 1.0, 1e4])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e15])
def test_parameters_that_follow_the_scale(scale, relative, dtype):
    """Each dtype of the Gram path and the SVD; no map here is worse conditioned than 100."""
    stack = spread((4, 30, 5), dtype, scale)
    for case in (polar(relative * scale**2), clipped(math.sqrt(relative) * scale)):
        assert error(case, stack, case.apply(stack)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_stays_zero_and_does_not_disturb_its_neighbours(dtype):
    stack = spread((3, 8, 4), dtype)
    stack[1] = 0
    for case in MAPS.values():
        found = case.apply(stack)
        assert torch.equal(found[1], torch.zeros_like(found[1]))
        assert error(case, stack, found) <= 1


def test_a_wrong_map_fails_the_same_comparison():
    """Negative controls: the tolerances tell neighbouring maps apart."""
    for dtype in DTYPES:
        stack = spread((2, 9, 3), dtype)
        wrong = {
            "smooth": smoothed_polar(stack, 0.2),
            "clipped": clipped_sign(stack, 0.301),
            "cubic-5": newton_schulz(stack, 4, "cubic"),
            "quintic-5": newton_schulz(stack, 5, "quintic", 1e-2, "plus"),
            "express-9": newton_schulz(stack, 4, "polar-express-e2"),
            "sign": smoothed_polar(stack, 1e-7),
        }
        for name, found in wrong.items():
            assert error(MAPS[name], stack, found) > 2, name


def known(ratio: float, side: int = 80) -> tuple[Tensor, Tensor]:
    """G with tr G = `ratio` and known eigenvectors, and (G + I)^(-1/2), without an eigensolver."""
    vectors = torch.linalg.qr(torch.randn(side, side, dtype=torch.float64))[0]
    values = torch.logspace(-12, 0, side, dtype=torch.float64)
    values *= ratio / values.sum()
    values[:3] = 0.0
    return (vectors * values) @ vectors.mT, (vectors * (values + 1).rsqrt()) @ vectors.mT


@pytest.mark.parametrize("ratio", [1e-3, 1e2, 1e6, 4.5e9])
def test_inverse_roots_by_products(ratio: float) -> None:
    """As accurate as an eigensolver: a few eps times the ratio. Beyond the range they are not."""
    product, exact = known(ratio)
    one = torch.ones((), dtype=torch.float64)
    found = inverse_root(product, one)
    assert (found - exact).norm() / exact.norm() < 1e-13 + 20 * 2.2e-16 * ratio
    far, exact = known(1e14)
    assert (inverse_root(far, one) - exact).norm() / exact.norm() > 1e-2


def test_the_quintics_move_their_range_to_one() -> None:
    x = np.geomspace(spectral.REACH, 1, 100_001)
    below = spectral.REACH / 30
    for a, b, c in spectral.QUINTICS:
        x, below = (a * y + b * y**3 + c * y**5 for y in (x, below))
    assert np.abs(x - 1).max() < 1e-14
    assert below < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64, 90), (3, 100, 70), (2, 2, 65, 65)])
def test_smoothed_polar_by_products(shape, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes, here: within the same tolerance, and by products indeed."""
    case, stack = polar(1.0 if dtype == torch.float64 else 1e-4), spread(shape, dtype)
    monkeypatch.setattr(spectral, "BY_PRODUCTS", {"cpu"})
    monkeypatch.setattr(torch.linalg, "eigh", None)
    assert error(case, stack, case.apply(stack)) <= 1


@pytest.mark.parametrize("name", MAPS)
def test_any_storage_gives_the_same_result(name):
    stack = spread((6, 12, 3), torch.float64)
    permuted = stack.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    transposed = stack.mT.contiguous().mT
    strided = torch.stack([stack, stack], -1)[..., 0]
    expanded = stack[:1].expand(6, 12, 3)
    for view in (permuted, transposed, strided, expanded):
        assert error(MAPS[name], view, MAPS[name].apply(view)) <= 1
    assert MAPS[name].apply(transposed).stride() == transposed.stride()


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(MAPS)),
    lead=st.lists(st.integers(1, 3), max_size=2),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    double=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_stack_is_a_loop_over_its_slices(name, lead, rows, columns, double, seed):
    torch.manual_seed(seed)
    stack = spread((*lead, rows, columns), DTYPES[double])
    whole = MAPS[name].apply(stack).reshape(-1, rows, columns)
    for one, found in zip(stack.reshape(-1, rows, columns), whole, strict=True):
        assert error(MAPS[name], one, found) <= 1
        assert error(MAPS[name], one, MAPS[name].apply(one)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maker", [polar, clipped])
def test_each_replica_has_its_own_parameter(maker, dtype):
    values = [1e-9, 1e-3, 0.1, 10.0]
    stack = spread((4, 20, 6), dtype)
    apply = smoothed_polar if maker is polar else clipped_sign
    found = apply(stack, torch.tensor(values, dtype=torch.float64))
    for value, one, out in zip(values, stack, found, strict=True):
        assert error(maker(value), one, out) <= 1


def test_gaussian_smoothing_shares_one_draw_and_scales_per_replica():
    stack, noise = spread((3, 7, 4), torch.float64).mT, torch.randn(4, 7)
    sigma = torch.tensor([0.0, 0.1, 2.0], dtype=torch.float64)
    found = gaussian_smoothed_sign(stack, sigma, noise)
    for one, level, out in zip(stack, sigma, found, strict=True):
        shifted = one + level * noise.double()
        assert error(SIGN, shifted, out) <= 1
    assert found.stride() == stack.stride()
    assert torch.equal(gaussian_smoothed_sign(stack[0], 0.0, noise), exact_sign(stack[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_sign_is_a_partial_isometry_of_the_right_rank(dtype):
    for rank in (1, 2, 3, 6):
        a, b = torch.randn(5, 20, rank), torch.randn(5, rank, 6)
        out = exact_sign((a @ b).to(torch.float32).to(dtype)).double()
        if dtype == torch.float32 or rank == 6:  # float64 sees the float32 rounding as full rank
            gram = out.mT @ out
            assert torch.allclose(gram @ gram, gram, atol=1e-5)
            assert torch.allclose(out.square().sum((-2, -1)), torch.tensor(rank).double())


def test_coefficients_are_what_their_names_say():
    assert schedule("taylor-1", 1) == schedule("cubic", 1)
    assert schedule("taylor-2", 1) == schedule("quintic", 1)
    for degree in range(1, 7):  # 1 - f(x) vanishes at 1 to order degree + 1
        step = schedule(f"taylor-{degree}", 1)[0]
        assert sum(step) == 1
        assert sum((2 * k + 1) * c for k, c in enumerate(step)) == 0
    for table in COEFFICIENTS.values():
        assert table.source and all(len(step) >= 3 for step in table.steps)
    assert schedule([(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)], 3)[1:] == ((4.0, 5.0, 6.0),) * 2
    assert schedule((1.5, -0.5, 0.0), 2) == schedule("cubic", 2)
    assert schedule("polar-express-e2", 2) == COEFFICIENTS["polar-express-e2"].steps[:2]


def test_impossible_parameters_are_refused_with_the_mend():
    m = spread((2, 4, 3), torch.float64)
    for call, word in [
        (lambda: smoothed_polar(m, 0.0), "lam must be positive"),
        (lambda: smoothed_polar(m, torch.tensor([0.1, -1.0])), "lam must be positive"),
        (lambda: smoothed_polar(m, torch.ones(3)), "one number per matrix"),
        (lambda: clipped_sign(m, -1.0), "gamma must be positive"),
        (lambda: gaussian_smoothed_sign(m, -1.0, m), "sigma must be finite and 0 or more"),
        (lambda: newton_schulz(m, -1), "0 or more"),
        (lambda: newton_schulz(m, 5, eps=0.0), "it must be positive"),
        (lambda: newton_schulz(m, 5, "cubical"), "did you mean cubic[?]"),
        (lambda: newton_schulz(m, 5, "septic"), "cubic, quintic"),
        (lambda: newton_schulz(m, 5, normalization="l2"), ", ".join(NORMALIZATIONS)),
        (lambda: newton_schulz(m, 5, []), "at least one"),
    ]:
        with pytest.raises(ValueError, match=word):
            call()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", MAPS)
def test_nan_and_infinity_do_not_pass_silently(name, bad):
    for dtype, shape in itertools.product(DTYPES, ((2, 6, 3), (2, 3, 3))):
        stack = spread(shape, dtype)
        stack[1, 0, 0] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            MAPS[name].apply(stack)


PUBLIC = """
import importlib, os, sys
import torch
code = 1
for module in sys.argv[1:]:
    assert not any(name.startswith("fedmuon") for name in sys.modules)
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, module
        continue
    try:
        importlib.import_module(f"fedmuon.orthogonalize.{module}")
        from fedmuon import orthogonalize as maps
        from fedmuon.orthogonalize import newton_schulz, lipschitz
        modules = [name for name in maps.__all__ if type(getattr(maps, name)) is type(maps)]
        assert not modules and callable(newton_schulz), modules
        assert maps.newton_schulz is newton_schulz and not hasattr(maps, "newton")
        code = 0
    finally:
        os._exit(code)
"""


@pytest.mark.slow
def test_public_names_are_the_maps_whatever_was_imported_before():
    """Importing a module puts it into its package: it must not take the place of a map."""
    modules = ["polynomial", "randomized", "polar"]
    command = [sys.executable, "-c", PUBLIC, *modules]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[3])


def test_empty_stacks_pass_through():
    for case in MAPS.values():
        assert case.apply(torch.ones(0, 4, 3)).shape == (0, 4, 3)


# --- Derivatives against central differences of the values ----------------------------------------

Apply = Callable[[Tensor], Tensor]
DERIVED: dict[str, Apply] = {
    "smoothed": lambda m: smoothed_polar(m, 0.1),
    "sharp": lambda m: smoothed_polar(m, 1e-8),  # by way of an SVD
    "clipped": lambda m: clipped_sign(m, 0.7),
    "exact": exact_sign,
    "cubic": lambda m: newton_schulz(m, 3, eps=0.1),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=made)


def pulled(apply: Apply, matrix: Tensor, cotangents: Tensor) -> Tensor:
    """The adjoint derivative at one stack [B, m, n], of many cotangents [k, B, m, n] at once."""
    leaf = matrix.clone().requires_grad_()
    return torch.autograd.grad(apply(leaf), leaf, cotangents, is_grads_batched=True)[0]


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (4, 4)])
@pytest.mark.parametrize("name", DERIVED)
def test_against_central_differences(name: str, shape: tuple[int, int]) -> None:
    """<H, DF(M)[D]> for every entry D, by values of the map alone, which err by 1e-16 / step."""
    apply, matrix, step = DERIVED[name], drawn(2, *shape), 1e-5
    cotangents, count = drawn(3, 2, *shape, seed=1), shape[0] * shape[1]
    found, expected = pulled(apply, matrix, cotangents), torch.zeros(3, 2, count).double()
    for place, entry in enumerate(torch.eye(count).double().view(count, *shape)):
        moved = (apply(matrix + step * entry) - apply(matrix - step * entry)) / (2 * step)
        expected[..., place] = (cotangents * moved).sum((-2, -1))
    assert (found.flatten(2) - expected).abs().max() < 1e-8 * max(1.0, float(found.abs().max()))
    elsewhere = pulled(apply, matrix + 0.01 * drawn(2, *shape, seed=6), cotangents).flatten(2)
    assert (elsewhere - expected).abs().max() > 1e-4


def test_the_value_is_that_without_a_derivative() -> None:
    matrix = drawn(3, 7, 3)
    for apply in DERIVED.values():
        assert torch.equal(apply(matrix.clone().requires_grad_()), apply(matrix))


EQUAL = [(0.8, 0.8, 0.0), (0.5, 0.5, 0.5), (0.0, 0.0, 0.0), (0.9, 0.9 + 1e-13, 0.3)]


@pytest.mark.parametrize("values", EQUAL)
def test_equal_and_zero_singular_values(values: tuple[float, ...]) -> None:
    """Where torch's eigh divides by a gap of 0: against matrices that are nearly the same."""
    u, v = (torch.linalg.qr(drawn(*shape, seed=2))[0] for shape in ((6, 3), (3, 3)))
    matrix = (u * torch.tensor(values, dtype=torch.float64)) @ v
    towards, root = drawn(6, 3, seed=3), torch.tensor(0.1, dtype=torch.float64).sqrt()
    found = derivative(factors(matrix, root, torch.hypot), towards)
    step = 1e-5
    ahead, behind = (smoothed_polar(matrix + t * step * towards, 0.1) for t in (1, -1))
    assert (found - (ahead - behind) / (2 * step)).abs().max() < 1e-6


def test_it_is_its_own_adjoint_and_not_steeper_than_the_certificate() -> None:
    for divisor, root in ((torch.hypot, 0.1), (torch.maximum, 0.7)):
        held = factors(drawn(5, 7, 3), torch.tensor(root).double(), divisor)
        one, other = drawn(5, 7, 3, seed=4), drawn(5, 7, 3, seed=5)
        there, back = derivative(held, one), derivative(held, other)
        torch.testing.assert_close((other * there).sum(), (one * back).sum(), rtol=1e-12, atol=0)
        assert (there.norm(dim=(1, 2)) <= one.norm(dim=(1, 2)) / root).all()


@pytest.mark.parametrize("failure", ["nan", "error"])
def test_float64_repeats_an_eigensolver_that_fails_in_float32(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LAPACK's ssyevd returned NaN for a finite stack [10, 32, 512] of momenta of rank 9 or less.

    Other processors fail for other matrices, so the failure is simulated.
    """
    stack = torch.randn(3, 4, 2) @ torch.randn(3, 2, 9)
    expected = smoothed_polar(stack.double(), 0.1)
    solve = torch.linalg.eigh

    def failing(product: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = solve(product)
        if product.dtype == torch.float64:
            return values, vectors
        if failure == "error":
            raise torch.linalg.LinAlgError("eigh failed")  # pyright: ignore[reportPrivateImportUsage]
        return values.index_fill(-1, torch.tensor([1]), math.nan), vectors

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    torch.testing.assert_close(smoothed_polar(stack, 0.1).double(), expected, atol=1e-5, rtol=0)
    root = lora_muon.inverse_root(stack @ stack.mT, floor=1e-3)
    assert root.dtype == torch.float32 and root.isfinite().all()
    if failure == "nan":  # what the caller would get without the second attempt
        assert not failing(stack @ stack.mT)[0].isfinite().all()
