"""Orthogonalizers that know their Lipschitz constant, such as `smoothed_polar(lam=0.1)`.

A custom orthogonalizer is `Orthogonalizer(function, lipschitz)`. The first step of a run checks a
custom orthogonalizer on random matrices. This check can reject a wrong constant, but cannot prove a
constant.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.config.schema import OrthogonalizerTable
from fedmuon.core.errors import Guard, InputError
from fedmuon.core.registry import require_callable
from fedmuon.core.rng import Draw
from fedmuon.core.trial import trial
from fedmuon.optim.chain import Context, Number, gaussian_like, per_client
from fedmuon.orthogonalize import lipschitz
from fedmuon.orthogonalize.coefficients import AOL, Coefficients
from fedmuon.orthogonalize.lipschitz_constants import positive_schedule, require_positive

__all__ = ["Orthogonalizer", "clipped_sign", "newton_schulz", "smoothed_polar"]

Map = Callable[[Tensor, Context, int], Tensor]  # (M [S, m, n], context, block number) -> [S, m, n]

SCALES = (1e-3, 1.0, 1e3)  # scales of the random matrices: small, ordinary and large
NEAR = 1e-2  # relative size of a small perturbation
MIXED = 0.02  # a larger relative difference is not rounding, even for a map that uses bfloat16
# Values of [orthogonalizer] products.
DTYPES = {"full": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDING = 64  # allowed rounding error, in units in the last place of the images


@dataclass(frozen=True)
class Orthogonalizer:
    """Your own orthogonalizer, with an optional Lipschitz constant.

    The first step of a run checks the orthogonalizer on random matrices. The check rejects an
    orthogonalizer that draws random numbers, mixes the matrices of a stack, or violates
    `lipschitz`. The check can reject a constant, but cannot prove it.

    Attributes:
        apply: A function that maps each matrix of a stack `[..., m, n]` separately, and returns a
            stack of the same shape and dtype.
        lipschitz: A constant L with ||apply(M) - apply(M')||_F <= L ||M - M'||_F for all M and M',
            or None. A stability bound needs L.

    Raises:
        InputError: If `apply` cannot be called, or `lipschitz` is not a number >= 0.

    Example:
        >>> import fedmuon
        >>> half = fedmuon.Orthogonalizer(lambda M: 0.5 * M, lipschitz=0.5)
        >>> half.lipschitz
        0.5
    """

    apply: Callable[[Tensor], Tensor]
    lipschitz: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.apply):
            raise InputError(
                f"apply of an Orthogonalizer has type {type(self.apply).__name__}, but it must "
                "be a function on matrices [..., m, n]. Pass a function."
            )
        value: Any = self.lipschitz
        if value is None:
            return
        try:  # a real number, or one entry of an array or tensor
            scalar = value.item() if hasattr(value, "item") else value
            number = (
                float(scalar)
                if isinstance(scalar, Real) and not isinstance(scalar, bool)
                else math.nan
            )
        except (ValueError, RuntimeError, OverflowError, NotImplementedError):  # no single number
            number = math.nan
        if not 0 <= number < math.inf:
            text = " ".join(repr(value).split())[:60]
            raise InputError(f"lipschitz = {text} is not valid. Use a finite number of 0 or more.")
        object.__setattr__(self, "lipschitz", number)


def smoothed_polar(lam: float = 1e-4) -> Orthogonalizer:
    """Return the smoothed polar map, σ -> σ / sqrt(σ^2 + lam) (Stability note, Lemma D.1).

    The Lipschitz constant is L = 1/sqrt(lam).

    Args:
        lam: The smoothing λ, which must be positive.

    Returns:
        The orthogonalizer with the Lipschitz constant of the lemma.

    Raises:
        InputError: If `lam` is not positive.

    Example:
        >>> from fedmuon import orthogonalizers
        >>> orthogonalizers.smoothed_polar(lam=0.25).lipschitz
        2.0
    """
    return Orthogonalizer(
        partial(maps.smoothed_polar, lam=lam), lipschitz("smoothed-polar", "sharp", lam=lam)
    )


def newton_schulz(
    steps: int = 5,
    coefficients: Coefficients = "cubic",
    eps: float = 1e-7,
    normalization: str = "plus",
    products: torch.dtype | None = None,
) -> Orthogonalizer:
    """Return the orthogonalizer that takes Newton–Schulz steps (Stability note, Lemma D.3).

    Args:
        steps: Number of steps T, at least 0.
        coefficients: A name in `fedmuon.orthogonalize.COEFFICIENTS`, one step (a, b, c, ...), or a
            list with one such step per iteration.
        eps: Positive lower bound of the divisor.
        normalization: The divisor: "plus", "max", "unit" or "aol", as for
            `fedmuon.orthogonalize.newton_schulz`.
        products: The dtype of the matrix products, such as torch.bfloat16. None means the dtype of
            the input.

    Returns:
        The orthogonalizer with the Lipschitz constant of the lemma. With `products`, or with
            normalization "aol", no Lipschitz constant is known.

    Raises:
        InputError: If an option is out of range, a name is unknown, or the polynomial of a named
            set reverses singular values.

    Example:
        >>> from fedmuon import orthogonalizers
        >>> round(orthogonalizers.newton_schulz(steps=5, eps=0.1).lipschitz, 2)
        75.94
    """
    options: dict[str, Any] = {
        "steps": steps,
        "coefficients": coefficients,
        "eps": eps,
        "normalization": normalization,
    }
    positive_schedule(coefficients, steps)
    unknown = normalization == AOL or products is not None
    constant = None if unknown else lipschitz("newton-schulz", "sharp", **options)
    return Orthogonalizer(partial(maps.newton_schulz, **options, products=products), constant)


def clipped_sign(gamma: float = 0.1) -> Orthogonalizer:
    """Return the clipped sign, σ -> min(σ / gamma, 1) (Stability note, Lemma D.9).

    The Lipschitz constant is L = 1/gamma.

    Args:
        gamma: The clipping level γ, which must be positive.

    Returns:
        The orthogonalizer with the Lipschitz constant of the lemma.

    Raises:
        InputError: If `gamma` is not positive.

    Example:
        >>> from fedmuon import orthogonalizers
        >>> orthogonalizers.clipped_sign(gamma=0.5).lipschitz
        2.0
    """
    return Orthogonalizer(
        partial(maps.clipped_sign, gamma=gamma), lipschitz("clipped-sign", "sharp", gamma=gamma)
    )


# The maps of the table [orthogonalizer]


def map_of_table(
    table: OrthogonalizerTable, regularization: Number | None = None, centred: bool = False
) -> Map:
    """Return the orthogonalizer that the config table [orthogonalizer] selects, for a named recipe.

    Args:
        table: Name and options of the map.
        regularization: Replacement for lambda in the table: one value, or one per replica.
        centred: Whether the rows of all matrices sum to 0, up to rounding.
    """
    sign = maps.quotient_sign if centred else maps.exact_sign
    lam = table.lambda_ if regularization is None else regularization
    steps, eps, kind = table.steps, table.eps, table.normalization
    coefficients, products = table.polynomials, DTYPES[table.products]
    if table.name in ("newton-schulz", "randomized-polar"):
        require_positive(coefficients, steps)

    def sketched(m: Tensor, context: Context, block: int) -> Tensor:
        parts = zip(m.chunk(len(context.draws)), context.draws, strict=True)
        names = ("rank", "oversample", "power", "steps", "sketch")
        options = {name: getattr(table, name) for name in names}
        options["coefficients"] = coefficients
        return torch.cat([  # all replicas of a client share its sketch
            maps.randomized_polar(part, **options, generator=draw(Draw.SKETCH, block=block))
            for part, draw in parts
        ])  # fmt: skip

    table_of_maps: dict[str, Map] = {
        "smoothed-polar": lambda m, context, block: maps.smoothed_polar(m, per_client(lam, m)),
        "newton-schulz": lambda m, context, block: maps.newton_schulz(
            m, steps, coefficients, eps, kind, products
        ),
        "clipped-sign": lambda m, context, block: maps.clipped_sign(m, table.clip_level),
        "exact-sign": lambda m, context, block: sign(m),
        "gaussian-smoothed-sign": lambda m, context, block: maps.gaussian_smoothed_sign(
            m, table.sigma, gaussian_like(m, context, Draw.SMOOTHING, block)
        ),
        "randomized-polar": sketched,
    }
    return table_of_maps[table.name]


def value_of_table(table: OrthogonalizerTable) -> Orthogonalizer:
    """Return the orthogonalizer that the config table selects, for a custom recipe.

    Randomized orthogonalizers are rejected, because a custom recipe cannot pass random numbers.
    """
    makers: dict[str, Callable[[], Orthogonalizer]] = {
        "smoothed-polar": partial(smoothed_polar, table.lambda_),
        "newton-schulz": partial(
            newton_schulz,
            table.steps,
            table.polynomials,
            table.eps,
            table.normalization,
            DTYPES[table.products],
        ),
        "clipped-sign": partial(clipped_sign, table.clip_level),
        "exact-sign": partial(Orthogonalizer, maps.exact_sign),
    }
    if table.name not in makers:
        raise InputError(
            f"[orthogonalizer] name = '{table.name}' needs random numbers in each step, but a "
            f"custom recipe cannot provide them. Choose one of {', '.join(makers)}."
        )
    return makers[table.name]()


# Custom orthogonalizers


def as_orthogonalizer(found: Any, guard: Guard | None = None) -> Orthogonalizer:
    """Convert a function on stacks, or an `Orthogonalizer`, to an orthogonalizer.

    If the function fails later, the error names the object of the guard.
    """
    guard = guard or Guard("orthogonalizer", found)
    with guard:
        orthogonalizer = as_map(found, guard.named)
    apply: Any = (
        orthogonalizer.apply.func
        if isinstance(orthogonalizer.apply, partial)
        else orthogonalizer.apply
    )
    module = apply.__module__ if isinstance(apply, FunctionType) else ""
    built_in = (module or "").startswith("fedmuon.orthogonalize")
    if built_in or type(apply).__module__ == "fedmuon.core.errors":  # in its guard already
        return orthogonalizer
    return replace(orthogonalizer, apply=guard.calling(orthogonalizer.apply))


def as_map(found: Any, named: str = "") -> Orthogonalizer:
    """Convert a function on stacks to an orthogonalizer, without a guard."""
    if isinstance(found, Orthogonalizer):
        return found
    mend = "a function on matrices [..., m, n], or a fedmuon.Orthogonalizer(apply, lipschitz)"
    return Orthogonalizer(require_callable(found, "orthogonalizer", mend, named))


def map_of_value(value: Orthogonalizer) -> Map:
    """Return a map that calls an orthogonalizer, and checks the results.

    The orthogonalizer receives a copy of the matrices, and must preserve their shape and dtype. For
    each new shape of matrices, `require_sound` also checks the orthogonalizer.
    """
    checked: set[object] = set()

    def apply(m: Tensor, context: Context, block: int) -> Tensor:
        result = value.apply(m.clone())
        if not isinstance(result, Tensor) or result.shape != m.shape or result.dtype != m.dtype:
            raise InputError(
                f"the orthogonalizer returns {getattr(result, 'shape', type(result).__name__)} "
                f"{getattr(result, 'dtype', '')} for matrices of shape {tuple(m.shape)} and dtype "
                f"{m.dtype}. Return a tensor with the shape and dtype of the input."
            )
        if (kind := (m.shape[-2:], m.dtype, m.device)) not in checked:
            require_sound(value, m)
            checked.add(kind)
        return result

    return apply


@trial()
def require_sound(value: Orthogonalizer, like: Tensor) -> None:
    """Reject an orthogonalizer that draws random numbers, mixes matrices or exceeds its constant.

    Args:
        value: The orthogonalizer.
        like: A tensor [..., m, n] with the shape, dtype and device of the random matrices.
    """
    drawn = torch.Generator().manual_seed(0)
    shape = (len(SCALES), *like.shape[-2:])
    scales = torch.tensor(SCALES).view(-1, 1, 1)
    stack, other = (torch.randn(shape, generator=drawn) * scales for _ in range(2))
    stack, other = stack.to(like.device, like.dtype), other.to(like.device, like.dtype)
    image = value.apply(stack.clone())
    if not same(image, value.apply(stack.clone())):
        raise InputError(
            "the orthogonalizer returns different results for the same matrices at each call. "
            "Remove its random draws, or use the same seed in each call."
        )
    for place in range(len(stack)):
        alone = value.apply(stack[place : place + 1].clone())
        if differ(alone, image[place : place + 1]):
            raise InputError(
                "the orthogonalizer returns another result for a matrix when other matrices are "
                "in the same tensor [..., m, n]. Treat each matrix separately: take norms and "
                "means over the last two axes only."
            )
    if value.lipschitz is None:
        return
    matrices = torch.cat([stack, other, stack + NEAR * other, torch.zeros_like(stack)])
    images = value.apply(matrices.clone()).double()
    unit = ROUNDING * torch.finfo(matrices.dtype).eps
    for a, b in itertools.combinations(range(len(matrices)), 2):
        moved = float((images[a] - images[b]).norm())
        distance = float((matrices[a].double() - matrices[b].double()).norm())
        rounding = unit * float(images[a].norm() + images[b].norm())
        if moved > value.lipschitz * distance * (1 + unit) + rounding:
            size = " x ".join(map(str, matrices.shape[-2:]))
            raise InputError(
                f"lipschitz = {value.lipschitz:g} is too small, because the results for two "
                f"matrices of shape {size} differ by {moved / distance:.3g} times the distance "
                "of the matrices. Set a larger constant that holds for all matrices, or "
                "lipschitz = None."
            )


def same(one: Tensor, other: Any) -> bool:
    """Return whether `other` is a tensor with the same values."""
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether the difference of two tensors is larger than rounding errors."""
    one, other = one.nan_to_num(), other.nan_to_num()
    return bool((one - other).norm() > MIXED * other.norm())
