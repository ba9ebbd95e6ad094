"""Checks of the arguments of formulas. Each check raises InputError with a short explanation."""

import functools
import math
import numbers
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.core.errors import InputError

MOST = 2**53  # doubles represent all integers up to this number exactly
LARGEST = 10**18
P = ParamSpec("P")
R = TypeVar("R")


def in_doubles(formula: Callable[P, R]) -> Callable[P, R]:
    """Decorate a formula so that an overflow or a division by zero raises InputError."""

    @functools.wraps(formula)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return formula(*args, **kwargs)
        except (OverflowError, ZeroDivisionError):
            raise InputError(
                f"a step of the formula {formula.__name__} exceeds the range of double precision "
                "(1e-308 to 1e308). Use numbers that are nearer to 1."
            ) from None

    return refusing


def real(name: str, value: float) -> float:
    """Return the value if it is a real number and no truth value. Otherwise raise InputError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{name} is {value!r}, but it must be a number. Pass a number.")
    return value


def probability(name: str, value: float) -> float:
    """Return the value if it is in (0, 1). Otherwise raise InputError."""
    if not 0 < real(name, value) < 1:
        raise InputError(
            f"{name} is {value}, but a failure probability must be above 0 and below 1."
        )
    return float(value)


def share(name: str, value: float) -> float:
    """Return the value if it is in [0, 1]. Otherwise raise InputError."""
    if not 0 <= real(name, value) <= 1:
        raise InputError(f"{name} is {value}, but it must be from 0 to 1.")
    return float(value)


def at_least(name: str, value: float, floor: float = 0.0) -> float:
    """Return the value if it is finite and at least `floor`. Otherwise raise InputError."""
    if not (math.isfinite(real(name, value)) and value >= floor):
        raise InputError(
            f"{name} is {value}, but it must be a finite number that is at least {floor:g}."
        )
    return float(value)


def positive(name: str, value: float) -> float:
    """Return the value if it is finite and positive. Otherwise raise InputError."""
    if not (math.isfinite(real(name, value)) and value > 0):
        raise InputError(f"{name} is {value}, but it must be a finite number above 0.")
    return float(value)


def whole(name: str, value: int, floor: int = 1) -> int:
    """Return the value if it is an integer >= `floor`. Otherwise raise InputError."""
    if not floor <= real(name, value) <= LARGEST or int(value) != value:
        raise InputError(
            f"{name} is {value}, but it must be an integer that is at least {floor} and at most "
            "10^18."
        )
    return int(value)


def entries(name: str, value: int) -> int:
    """Return the number of entries if it is at most 2^30. Otherwise raise InputError."""
    if value > 2**30:
        raise InputError(
            f"{name} is {value:.6g}, but it must be at most 2^30, the maximum size of an array. "
            "Use a smaller value."
        )
    return value


def memory(beta: float) -> float:
    """Return the momentum if it is in [0, 1]. Otherwise raise InputError.

    The recursion of the Stability note is valid only in this range, because it uses beta and 1 -
    beta without absolute values.
    """
    if not 0 <= beta <= 1:
        raise InputError(f"beta is {beta}, but the momentum must be from 0 to 1.")
    return float(beta)


def values(name: str, given: ArrayLike, size: int | None = None) -> np.ndarray:
    """Return a vector of doubles. Raise InputError if an entry is NaN or negative.

    Infinite entries are allowed.
    """
    array = np.asarray(given, dtype=float)
    if array.ndim != 1 or not array.size or (size is not None and array.size != size):
        raise InputError(
            f"{name} has shape {array.shape}, but it must be a "
            f"vector{'' if size is None else f' of {size} numbers'}."
        )
    if not (array >= 0).all():
        raise InputError(f"{name} contains a negative number or NaN, but every entry must be >= 0.")
    return array


def sample_sizes(given: ArrayLike) -> np.ndarray:
    """Return the array of sample sizes n_i. Each size must be an integer that is at least 1."""
    sizes = values("sizes", given)
    if (wrong := np.flatnonzero(~((sizes >= 1) & (sizes == np.floor(sizes))))).size:
        raise InputError(
            f"sizes[{wrong[0]}] is {sizes[wrong[0]]:g}, but it must be an integer that is at "
            "least 1. Remove clients without samples."
        )
    if not (sizes <= MOST / len(sizes)).all():
        raise InputError("sizes sum to more than 2^53, which is not supported. Use smaller sizes.")
    return sizes


def client_weights(given: ArrayLike, clients: int) -> np.ndarray:
    """Return the array of client weights p_i. The weights must sum to 1."""
    weights = values("weights", given, clients)
    if not abs(weights.sum() - 1) <= 1e-9:
        raise InputError(
            f"weights sum to {weights.sum():.12g}, but they must sum to 1. Divide them by their "
            "sum."
        )
    return weights


def rounds_of(schedule: ArrayLike, clients: int) -> np.ndarray:
    """Return the schedule C as an array of shape [R, K].

    Each round must contain K different clients from 0 to N - 1.
    """
    array, clients = np.asarray(schedule), whole("clients", clients)
    if array.ndim != 2 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise InputError(
            f"schedule has shape {array.shape} and dtype {array.dtype}, but it must be an integer "
            "array of shape [rounds, participants per round]."
        )
    if (wrong := array[(array < 0) | (array >= clients)]).size:
        raise InputError(
            f"schedule contains the client {wrong[0]}, but the clients are numbered from 0 to "
            f"{clients - 1}."
        )
    ordered = np.sort(array, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise InputError(
            "schedule contains a client twice in one round, but the participants of a round must "
            "be different."
        )
    return array
