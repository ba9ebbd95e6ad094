"""The table of coefficient sets against dense samples, and against the page that is committed.

The samples are float64 loops over the steps, without intervals. A bound may exceed its sample by
1e-6 relative, and by 1e-5 where only rounding is left of |p_T - 1|.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from docs.making import coefficients as table
from fedmuon.analysis.theory.corollaries import Uniform
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.certificates import CertifiedSetting, map_constant
from fedmuon.orthogonalize import COEFFICIENTS, lipschitz, newton_schulz, schedule, with_safety
from fedmuon.orthogonalize.coefficients import Schedule

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "coefficients.md"
QUICK = "cubic", "jordan", "cans", "turbo", "turbo-scaled"
SETS = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COEFFICIENTS
]


def value(polynomials: Schedule, x: np.ndarray) -> np.ndarray:
    for step in polynomials:
        x = sum((c * x ** (2 * k + 1) for k, c in enumerate(step)), 0 * x)
    return x


def slope(polynomials: Schedule, x: np.ndarray) -> np.ndarray:
    found = np.ones_like(x)
    for step in polynomials:
        found = found * sum((2 * k + 1) * c * x ** (2 * k) for k, c in enumerate(step))
        x = value((step,), x)
    return found


def sampled(f: Callable[[np.ndarray], np.ndarray], low: float) -> float:
    """max |f| over [low, 1], from a grid that is fine near 0 and is refined at its peaks."""
    x = np.union1d(np.linspace(low, 1, 40_001), np.geomspace(max(low, 1e-7), 1, 20_001))
    size = np.abs(f(x))
    for place in np.argsort(size)[-20:]:
        near = np.linspace(x[max(place - 1, 0)], x[min(place + 1, len(x) - 1)], 2001)
        size = np.append(size, np.abs(f(near)).max())
    return float(size.max())


def samples(polynomials: Schedule) -> list[float]:
    """What `proved` bounds, in its order."""
    return [
        sampled(lambda x: slope(polynomials, x), 0.0),
        sampled(lambda x: value(polynomials, x), 0.0),
        *(sampled(lambda x: value(polynomials, x) - 1, floor) for floor in table.FLOORS),
    ]


@pytest.mark.parametrize("name", SETS)
def test_no_sample_exceeds_a_bound_of_the_table_and_the_largest_is_near(name: str) -> None:
    polynomials = schedule(name, table.steps_of(name))
    steepest, size, errors = table.proved(polynomials)
    for bound, seen in zip([steepest, size, *errors], samples(polynomials), strict=True):
        assert bound is not None
        assert seen <= bound * (1 + 1e-9) + 1e-12
        assert bound <= seen * (1 + 1e-6) + 1e-5
    for shown, bound in zip(table.row(name)[3:], [steepest, size, *errors], strict=True):
        assert bound is not None and bound <= float(shown) <= bound * (1 + 1.1e-5)


def test_the_samples_tell_another_set_apart() -> None:
    """Negative control: 0.1% more of a exceeds the bounds of the set."""
    polynomials = schedule("jordan", 5)
    a, b, c = polynomials[0]
    steeper = ((a * 1.001, b, c),) * 5
    steepest, size, errors = table.proved(polynomials)
    seen = samples(steeper)
    assert steepest is not None and seen[0] > steepest * (1 + 1e-6)
    assert any(
        bound is not None and one > bound * (1 + 1e-6)
        for bound, one in zip([size, *errors], seen[1:], strict=True)
    )


def test_the_constant_of_the_table_is_that_of_the_matrix_map() -> None:
    """Matrices at the steepest point attain L of CANS, which is not at 0; none exceeds it."""
    polynomials = schedule("cans", 5)
    certified = lipschitz("newton-schulz", "sharp", steps=5, coefficients="cans",
                          normalization="unit")  # fmt: skip
    bound = table.proved(polynomials)[0]
    assert bound is not None and certified == pytest.approx(bound, rel=1e-12)
    grid = np.linspace(0, 1, 1_000_001)
    at = float(grid[np.abs(slope(polynomials, grid)).argmax()])
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(50, 3, 5, dtype=torch.float64), full_matrices=False)
    one, other = (
        (u * torch.tensor([size, 0, 0], dtype=torch.float64)) @ vh for size in (at, at - 1e-8)
    )
    moved = newton_schulz(one, 5, "cans", normalization="unit")
    moved = moved - newton_schulz(other, 5, "cans", normalization="unit")
    ratio = (moved.norm(dim=(-2, -1)) / (one - other).norm(dim=(-2, -1))).max()
    assert 0.99 * certified < float(ratio) <= certified * (1 + 1e-6)


def test_turbo_changes_the_sign_of_large_singular_values() -> None:
    """The sentence on the page: p_T > 0 below 0.8836, and p_T < 0 from 0.884 on."""
    polynomials = schedule("turbo", 4)
    assert (value(polynomials, np.linspace(1e-6, 0.8836, 10_001)) > 0).all()
    assert (value(polynomials, np.linspace(0.884, 1, 10_001)) < 0).all()
    assert "0.884" in table.SIGN


def test_the_safety_factor_is_that_of_polar_express() -> None:
    """The paper prints the set with its factor of 1.01, and the last step without it."""
    safe = schedule(with_safety("polar-express-e3", 1.01), 9)
    printed = schedule("polar-express", 7)
    assert np.abs(np.array(safe[:7]) - np.array(printed)).max() < 1.1e-4
    assert safe[-1] == (1.875, -1.25, 0.375) == schedule("polar-express", 8)[-1]
    other = schedule(with_safety("polar-express-e3", 1.02), 7)  # the control
    assert np.abs(np.array(other) - np.array(printed)).max() > 0.05
    assert with_safety("cans", 1) == "cans"


@pytest.mark.parametrize("name", ["you", "polar-express-e3", "turbo"])
def test_safe_steps_take_a_smaller_argument(name: str) -> None:
    """A loop that divides x before each step but the last, and its slope, which is certified."""
    steps, factor = table.steps_of(name), 1.03
    polynomials = schedule(with_safety(name, factor), steps)
    x = np.linspace(0, 1, 20_001)
    want = x
    for place, step in enumerate(schedule(name, steps)):
        want = value((step,), want / factor if place < steps - 1 else want)
    assert np.allclose(value(polynomials, x), want, rtol=1e-9, atol=1e-11)
    assert np.abs(value(schedule(name, steps), x) - want).max() > 1e-3  # the control
    certified = lipschitz("newton-schulz", "sharp", steps=steps, normalization="unit",
                          coefficients=with_safety(name, factor))  # fmt: skip
    seen = np.abs(np.diff(want) / np.diff(x)).max()
    assert 0.9 * certified < seen <= certified * (1 + 1e-6)


def test_a_safety_factor_without_effect_or_below_one_is_rejected() -> None:
    for coefficients in ("jordan", (1.5, -0.5), ((1.5, -0.5, 0.0),)):
        with pytest.raises(InputError, match="have only one step"):
            with_safety(coefficients, 1.01)
    with pytest.raises(InputError, match="1 or more"):
        with_safety("cans", 0.99)
    said = (
        "[orthogonalizer] safety = 1.01 has no effect, because [orthogonalizer] coefficients = "
        "'cubic'. This key is used only by coefficients with several steps."
    )
    with pytest.raises(InputError) as error:
        parse({"orthogonalizer": {"name": "newton-schulz", "safety": 1.01}})
    assert said in str(error.value)


def test_the_bound_of_a_config_counts_its_safety_factor() -> None:
    found = []
    for safety in (1.0, 1.05):
        given = {"name": "newton-schulz", "coefficients": "cans", "safety": safety, "eps": 0.1}
        config = parse({"orthogonalizer": given})
        case = CertifiedSetting(config, np.full(20, 200), Uniform(5, 0.05))
        found.append(map_constant(case))
        wanted = lipschitz("newton-schulz", "sharp", steps=5, eps=0.1,
                           coefficients=with_safety("cans", safety))  # fmt: skip
        assert found[-1] == wanted
    assert found[1] < 0.9 * found[0]


def test_rounded_numbers_are_never_below() -> None:
    assert table.rounded_up(1.0000000001) == "1.00001" and table.rounded_up(7.59375) == "7.59375"
    assert table.rounded_up(None) == "unknown"


def test_the_page_has_the_rows_and_the_text_that_it_should_have() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for part in (table.HEAD, table.SIGN, table.PROOF):
        assert part in text, "run `make reference`"
    for name in ("cubic", "turbo"):
        assert f"| {' | '.join(table.row(name))} |\n" in text
    for name, one in COEFFICIENTS.items():
        assert f"| `{name}` |" in text and f"- `{name}`: {one.source}\n" in text


@pytest.mark.slow
def test_the_page_is_made_from_the_sets() -> None:
    assert PAGE.read_text(encoding="utf-8") == table.page(), "run `make reference`"
