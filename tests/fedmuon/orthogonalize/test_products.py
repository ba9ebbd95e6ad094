"""Newton-Schulz with products in half precision, against loops that round each product."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedmuon
from fedmuon.analysis.theory.corollaries import Uniform
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify
from fedmuon.experiments.stability.influence import require_smooth
from fedmuon.optim.orthogonalizers import map_of_table, value_of_table
from fedmuon.orthogonalize import newton_schulz, polynomial, schedule
from fedmuon.orthogonalize.coefficients import Coefficients
from fedmuon.orthogonalize.polynomial import half_segments

HALF = torch.bfloat16
# Half the distance of 1 to the next number, relative.
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
UNIT = UNITS[HALF]


def rounded(matrix: Tensor, half: torch.dtype = HALF) -> Tensor:
    """The nearest number in half precision, in float64."""
    return matrix.to(half).double()


def looped(
    matrix: Tensor,
    steps: int,
    coefficients: Coefficients,
    half: torch.dtype = HALF,
    lengths: tuple[int, ...] = (),
) -> Tensor:
    """One matrix in float64, rounded after each product, the shorter side first.

    Without `lengths` of segments, Z and its Gram matrix are new in each step.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return looped(matrix.mT, steps, coefficients, half, lengths).mT
    z = rounded(matrix.double() / max(float(matrix.double().norm()), 1e-7), half)
    table = list(schedule(coefficients, steps))
    for length in lengths or (1,) * steps:
        segment, table = table[:length], table[length:]
        g, product = rounded(z @ z.mT, half), torch.eye(len(z), dtype=torch.float64)
        for place, (a, b, c) in enumerate(segment):
            bracket = rounded(b * g + c * g @ g, half)
            if length == 1:
                z = rounded(a * z + bracket @ z, half)
                break
            factor = rounded(a * torch.eye(len(z)) + bracket, half)
            product = rounded(factor @ product, half)
            if place + 1 < length:
                g = rounded(rounded(factor @ g, half) @ factor, half)
            else:
                z = rounded(product @ z, half)
    return z


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("half", UNITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 9, 40), (3, 40, 9), (2, 24, 24), (2, 70, 200), (1, 1)])
def test_it_is_the_iteration_with_roundings(
    shape: Any, dtype: torch.dtype, half: torch.dtype
) -> None:
    torch.manual_seed(0)
    stack, unit = torch.randn(shape, dtype=dtype), UNITS[half]
    for steps, coefficients in ((1, "you"), (5, "jordan")):
        found = newton_schulz(stack, steps, coefficients, 1e-7, "max", half)
        assert found.shape == stack.shape and found.dtype == dtype
        assert torch.equal(rounded(found, half), found.double())  # each entry is in half precision
        lengths = SEGMENTS[half] if shape == (2, 70, 200) and steps == 5 else ()
        want = [
            looped(one, steps, coefficients, half, lengths)
            for one in stack.reshape(-1, *shape[-2:])
        ]
        full = newton_schulz(stack.double(), steps, coefficients, 1e-7, "max")
        loops = torch.stack(want).reshape(shape)
        # Products of the processor round sums in another order, so entries may differ by a unit.
        assert apart(found, loops) < 0.75 * apart(loops, full) + unit
        # The polynomial of 1 is a difference of larger numbers, which float16 rounds worse here.
        few = stack[0].numel() == 1 and half == torch.float16
        assert apart(found, full) < (20 if few else 5) * unit * (1 + steps)
        if stack[0].numel() > 1:
            assert apart(found, full) > unit / 8  # the control: full precision is another thing


SEGMENTS = {torch.bfloat16: (2, 2, 1), torch.float16: (3, 2)}


def with_values(values: Tensor, columns: int) -> Tensor:
    """A random matrix with these singular values."""
    rows = len(values)
    left, _ = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64))
    return ((left * values) @ right.mT).float()


@pytest.mark.parametrize("half", UNITS)
@pytest.mark.parametrize("coefficients", ["jordan", "polar-express", "you", "cubic"])
def test_restarts_keep_the_error_of_ordinary_steps(
    coefficients: str, half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of hard spectra. The control has no restarts, and a matrix of them fails."""
    torch.manual_seed(0)
    spectra = (1 / torch.arange(1.0, 97), torch.logspace(0, -6, 96), torch.ones(96))
    stack = torch.stack([with_values(one.double(), 400) for one in spectra])
    full = newton_schulz(stack.double(), 5, coefficients, 1e-7, "max")
    errors = {}
    for limit in (0.2, 0.0, math.inf):  # as it is, ordinary steps, no restarts
        monkeypatch.setattr(polynomial, "_DRIFT", limit)
        found = newton_schulz(stack, 5, coefficients, 1e-7, "max", half)
        errors[limit] = max(map(apart, found, full))
    assert errors[0.2] < 2 * errors[0.0] + UNITS[half]
    assert errors[math.inf] > 5 * errors[0.2] or coefficients == "cubic"


def test_segments_follow_from_the_bound() -> None:
    def lengths(short: int, long: int, given: torch.dtype, half: torch.dtype, name: str) -> Any:
        found = half_segments(short, long, given, half, schedule(name, 5))
        assert [step for one in found for step in one] == list(schedule(name, 5))
        return tuple(map(len, found))

    full, each = torch.float32, (1,) * 5
    # The published restart of float16 with these coefficients: after two steps.
    assert lengths(256, 1024, full, torch.float16, "polar-express") == (2, 3)
    assert lengths(256, 1024, torch.float64, torch.float16, "jordan") == (3, 2)
    assert lengths(256, 1024, full, HALF, "jordan") == (2, 2, 1)
    assert lengths(256, 1024, full, HALF, "polar-express") == (1, 2, 2)
    assert lengths(256, 300, full, torch.float16, "jordan") == each  # more work than it saves
    assert lengths(48, 4096, full, torch.float16, "jordan") == each  # too small
    assert lengths(256, 1024, HALF, HALF, "jordan") == each  # as torch.optim.Muon
    assert lengths(256, 1024, full, torch.float32, "jordan") == each


@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e30])
def test_the_division_is_in_full_precision(scale: float) -> None:
    """Matrices whose squares leave the range of float32 are the same, up to their scale."""
    torch.manual_seed(0)
    stack = torch.randn(2, 6, 9)
    plain = newton_schulz(stack, 5, "jordan", 1e-30, "plus", HALF)
    found = newton_schulz(stack * scale, 5, "jordan", 1e-37 if scale < 1 else 1e-7, "plus", HALF)
    assert apart(found, plain) < 8 * UNIT
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 4), 5, "jordan", products=HALF),
                       torch.zeros(2, 3, 4))  # fmt: skip
    assert newton_schulz(torch.zeros(0, 3, 4), 5, products=HALF).shape == (0, 3, 4)


def test_the_table_and_the_value_use_it() -> None:
    torch.manual_seed(0)
    stack = torch.randn(2, 8, 30)
    table = {"name": "newton-schulz", "products": "bfloat16", "coefficients": "jordan"}
    config = parse({"orthogonalizer": table}).orthogonalizer
    want = newton_schulz(stack, 5, "jordan", products=HALF)
    assert torch.equal(map_of_table(config)(stack, None, 0), want)  # pyright: ignore[reportArgumentType]
    value = value_of_table(config)
    assert value.lipschitz is None and torch.equal(value.apply(stack), want)
    assert value_of_table(config.model_copy(update={"products": "full"})).lipschitz


def test_a_run_differs_and_learns_as_much() -> None:
    runs = {}
    for products in ("full", "bfloat16"):
        runs[products] = fedmuon.run(
            {
                "data": {"name": "digits", "train": 400, "test": 200},
                "federation": {"clients": 4, "per-round": 2, "rounds": 6},
                "local": {"recipe": "fedmuon", "lr": 0.3},
                "orthogonalizer": {"name": "newton-schulz", "products": products},
            }
        )
    full, half = (np.asarray(runs[one].model["weight"]) for one in ("full", "bfloat16"))
    assert 1e-4 < np.linalg.norm(half - full) / np.linalg.norm(full) < 0.05
    assert abs(runs["full"].summary["accuracy"] - runs["bfloat16"].summary["accuracy"]) < 0.05


def test_what_it_is_not_for() -> None:
    table = {"name": "newton-schulz", "products": "bfloat16"}
    case = CertifiedSetting(parse({"orthogonalizer": table}), np.full(20, 200), Uniform(5, 0.05))
    found = certify(case)
    assert found.bound is None and "products = 'bfloat16' rounds" in found.refusal
    with pytest.raises(InputError, match="rounding is larger than the effect"):
        require_smooth(case.config)
    with pytest.raises(InputError, match="rounding errors hide the small bias"):
        parse({"orthogonalizer": table, "local": {"recipe": "dp-muonbc"},
               "privacy": {"noise": 1.0}})  # fmt: skip
    with pytest.raises(InputError, match="only by the orthogonalizer `newton-schulz`"):
        parse({"orthogonalizer": {"products": "bfloat16"}})
