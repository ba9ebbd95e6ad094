"""The orthogonalization map of a parameter group, from its options."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.core.errors import InputError, shown
from fedmuon.core.guard import Guard
from fedmuon.core.rng import Draw, generator

Orthogonalizer = Callable[[Tensor], Tensor]  # [B, m, n] -> [B, m, n]

# Maps by name, with the regularization that `fedmuon run` takes where none is given.
NAMED: dict[str, Orthogonalizer] = {
    "smoothed-polar": partial(maps.smoothed_polar, lam=1e-4),
    "clipped-sign": partial(maps.clipped_sign, gamma=0.1),
    "exact-sign": maps.exact_sign,
}
RANDOMIZED = "randomized-polar"
_NAMES = ("newton-schulz", RANDOMIZED, *NAMED)


def orthogonalizer(group: Mapping[str, Any]) -> Orthogonalizer:
    """The group's map: a function given, a name, or Newton-Schulz."""
    given = group["orthogonalizer"]
    if isinstance(given, str) and given == RANDOMIZED:
        return partial(_randomized, group=group)
    if isinstance(given, str) and given != "newton-schulz":
        return NAMED[given]
    if given is None or isinstance(given, str):
        return partial(_full, group=group)
    return partial(_own, given, Guard("orthogonalizer", given))


def _own(given: Orthogonalizer, guard: Guard, stack: Tensor) -> Tensor:
    """What the user's map makes of a stack, refused unless it is like it."""
    with guard:
        found = given(stack)
        if not isinstance(found, Tensor) or found.shape != stack.shape or found.is_meta:
            raise InputError(
                f"the orthogonalizer returns {shown(getattr(found, 'shape', found))} for a stack "
                f"of shape {tuple(stack.shape)}: return a stack of that shape"
            )
        return found


def check_orthogonalizer(group: Mapping[str, Any]) -> None:
    """Refuse names that there are not, and sketches that cannot be."""
    given = group["orthogonalizer"]
    if isinstance(given, str) and given not in _NAMES:
        names = ", ".join(_NAMES)
        raise InputError(f"No orthogonalizer is called {given!r}: use a function or {names}.")
    if given is not None and not isinstance(given, str) and not callable(given):
        raise InputError(
            f"orthogonalizer is {shown(given)}: give a function on stacks [B, m, n], or a name."
        )
    if not isinstance(given, str) or given != RANDOMIZED:
        return
    if group["ns_dtype"].itemsize < 4:
        raise InputError(
            f"ns_dtype is {group['ns_dtype']}, in which no QR factorization exists: use "
            "torch.float32 with randomized-polar."
        )
    if group["sketch"] not in ("gaussian", "kaczmarz"):
        raise InputError(f"sketch is {group['sketch']!r}: use gaussian or kaczmarz.")
    for name, least in (("rank", 1), ("oversample", 0), ("power", 0), ("seed", 0)):
        if not isinstance(group[name], int) or group[name] < least:
            raise InputError(f"{name} is {group[name]!r}: choose a whole number >= {least}.")


def _full(stack: Tensor, group: Mapping[str, Any]) -> Tensor:
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    return maps.newton_schulz(stack, steps, coefficients, group["eps"], normalization="max")


def _randomized(stack: Tensor, group: Mapping[str, Any]) -> Tensor:
    """002, Algorithms 1 and 2, with the shorter side sampled, so that the iteration is smaller.

    Where l is no less than that side Q spans everything, and the full map is the same. The sketch
    is a function of the seed, the step and the shape: neither of how matrices are stacked, nor of
    what ran before, so a resumed run repeats.
    """
    short, long = sorted(stack.shape[-2:])
    if group["rank"] + group["oversample"] >= short:
        return _full(stack, group)
    draw = generator(group["seed"], Draw.SKETCH, step=group["draws"], block=long * 2**20 + short)
    return maps.randomized_polar(
        stack,
        **{name: group[name] for name in ("rank", "oversample", "power", "sketch")},
        steps=group["ns_steps"],
        coefficients=group["ns_coefficients"],
        generator=draw,
        axis="rows" if stack.shape[-2] < stack.shape[-1] else "columns",
    )
