"""How Newton–Schulz puts a matrix into the unit ball, and how steep that is."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedmuon.errors import InputError

if TYPE_CHECKING:  # certificates ask for a floor, and need no torch for that
    from torch import Tensor


def _plus(size: "Tensor", floor: "Tensor | float") -> "Tensor":
    return size + floor


def _larger(size: "Tensor", floor: "Tensor | float") -> "Tensor":
    return size.clamp_min(floor)


# What ||M||_F and a floor become as the divisor of M; the floor is eps, for `unit` it is 1.
NORMALIZATIONS: "dict[str, Callable[[Tensor, Tensor | float], Tensor]]" = {
    "plus": _plus,  # ||M||_F + eps (001 Lemma D.3)
    "max": _larger,  # max(||M||_F, eps), as in torch.optim.Muon
    "unit": _larger,  # max(||M||_F, 1) (000)
}


def divisor_floor(eps: float, normalization: str) -> float:
    """The floor of the normalization: eps, or 1 for `unit`. Its divisor is 1/floor-Lipschitz."""
    if normalization not in NORMALIZATIONS:
        names = ", ".join(NORMALIZATIONS)
        raise InputError(f"No normalization is called {normalization!r}: use one of {names}.")
    if not 0 < eps < float("inf"):
        raise InputError(f"eps is {eps}: choose eps > 0, or no Lipschitz constant exists.")
    return 1.0 if normalization == "unit" else float(eps)
