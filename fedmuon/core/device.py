"""Checks of tensors that do not make a GPU wait, and copies to a device.

A GPU must finish all its queued work before Python can read a number from it, for example with
`bool(t)`, `float(t)`, `t.tolist()`, `nonzero` or a mask as an index. To avoid this wait, a round on
a GPU first assumes the usual conditions: losses are finite, and Gram matrices are accurate. The
round collects these conditions as tensors, and checks all of them after its last step. If a
condition does not hold, the round is computed again, and each condition is checked immediately.
The results and errors are therefore those of a round with immediate checks.

A release with secret noise is never repeated or discarded, because the choice would depend on the
data. A round with secret noise therefore checks each condition immediately, as on a CPU. Only the
conditions of clipping are checked later, because clipping comes before the noise.

Torch's factorizations eigh, eigvalsh and svd always synchronize, because they read error codes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")

AT_HAND = {"cpu"}  # device types on which Python reads a number without synchronization
_DOUBTED: set[torch.device] = set()  # devices where a condition failed in the last round


@dataclass
class _Round:
    """The conditions that one training round checks.

    If `asks` is true, the conditions are checked immediately. Otherwise, the conditions are stored
    in `noted` and checked after the round.
    """

    asks: bool
    noted: list[Tensor] = field(default_factory=list)
    held: bool = True  # whether all checked conditions held

    def held_all(self) -> bool:
        """Return whether all stored conditions hold.

        Conditions on the device `meta` count as true.
        """
        if not self.noted or self.noted[0].is_meta:
            return True
        return bool(torch.stack(self.noted).all())


_round: ContextVar[_Round | None] = ContextVar("round", default=None)
_assumed: ContextVar[bool] = ContextVar("assumed", default=False)


def at_hand(device: torch.device) -> bool:
    """Return whether Python may read numbers from a device immediately.

    The answer is true for a CPU. For a GPU, the answer is true only outside of
    `with_deferred_checks`.
    """
    return device.type in AT_HAND or _round.get() is None


@contextmanager
def without_checks() -> Iterator[None]:
    """Within this context, skip all checks of conditions on a GPU, as torch's optimizers do.

    A NaN then stays a NaN and raises no error.
    """
    before = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(before)


def assumed(device: torch.device) -> bool:
    """Return whether `without_checks` is active and the device is a GPU.

    In this case, conditions on the device are not computed.
    """
    return _assumed.get() and device.type not in AT_HAND


def holds(condition: Tensor) -> bool:
    """Return whether a condition (a scalar tensor) is true.

    Within `with_deferred_checks`, a condition on a GPU counts as true at first, and is checked
    later.
    """
    if assumed(condition.device):
        return True
    checks = _round.get()
    if checks is None or condition.device.type in AT_HAND:
        return bool(condition)
    if not checks.asks:
        checks.noted.append(condition)
        return True
    answer = bool(condition)
    checks.held &= answer
    return answer


def is_finite(number: Tensor) -> bool:
    """Return whether a number (a scalar tensor) is finite.

    On a GPU, the check may come later, as in `holds`.
    """
    if at_hand(number.device):
        return math.isfinite(float(number))
    return holds(number.isfinite())


def with_deferred_checks(device: torch.device, work: Callable[[], Found]) -> Found:
    """Call the function `work`, and check all conditions of this call together at its end.

    If a condition does not hold, `work` is called again, and each condition is checked immediately.
    Both calls compute the same numbers. After this, rounds also check immediately, until all
    conditions of one round hold. Within another `with_deferred_checks`, the function only calls
    `work`.
    """
    if device.type in AT_HAND or _round.get() is not None:
        return work()
    if device not in _DOUBTED:
        with _collecting(_Round(asks=False)) as deferred:
            try:
                result = work()
            except Exception:  # such as a factorization of values that are not finite
                if deferred.held_all():
                    raise
            else:
                if deferred.held_all():
                    return result
                del result  # free its memory before the second call
        _DOUBTED.add(device)
    with _collecting(_Round(asks=True)) as immediate:
        result = work()
    if immediate.held:
        _DOUBTED.discard(device)
    return result


@contextmanager
def _collecting(checks: _Round) -> Iterator[_Round]:
    token = _round.set(checks)
    try:
        yield checks
    finally:
        _round.reset(token)


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor from the CPU to a device without waiting for the device.

    The tensor is first pinned in memory. A copy from unpinned memory would wait for all queued work
    of the GPU.
    """
    values = values if dtype is None else values.to(dtype)
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
