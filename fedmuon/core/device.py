"""Checks of tensors that do not make a GPU wait, and copies to a device.

A device stops its queue whenever Python reads a number: `bool(t)`, `float(t)`, `t.tolist()`,
`nonzero`, a mask as an index. So a round on a device assumes conditions that nearly always hold (a
loss is finite, a Gram matrix is accurate). The round collects these conditions as tensors, and
checks all of them after its last step. If a condition does not hold, the round is computed again,
and each condition is checked immediately. So numbers and errors are the same as on a CPU.

A release with secret noise is never repeated or discarded, because the choice would depend on the
data. Therefore a round with secret noise checks each condition immediately, as on a CPU. Only the
conditions of clipping, which precedes the noise, are deferred.

Torch's factorizations eigh, eigvalsh and svd always synchronize, to read their error codes.
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
    """The conditions of a round.

    If `asks` is true, each condition is checked immediately. Otherwise it is stored in `noted`.
    """

    asks: bool
    noted: list[Tensor] = field(default_factory=list)
    held: bool = True  # whether all checked conditions held

    def held_all(self) -> bool:
        """Return whether all stored conditions hold; true for tensors on `meta`."""
        if not self.noted or self.noted[0].is_meta:
            return True
        return bool(torch.stack(self.noted).all())


_round: ContextVar[_Round | None] = ContextVar("round", default=None)
_assumed: ContextVar[bool] = ContextVar("assumed", default=False)


def at_hand(device: torch.device) -> bool:
    """Return whether Python may read numbers of a device.

    This is true for a CPU, and for other devices outside of `with_deferred_checks`.
    """
    return device.type in AT_HAND or _round.get() is None


@contextmanager
def without_checks() -> Iterator[None]:
    """Assume that all conditions on a GPU hold, as the optimizers of torch do: NaN stays NaN."""
    before = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(before)


def assumed(device: torch.device) -> bool:
    """Return whether conditions on a device are assumed to hold, so that they are not computed."""
    return _assumed.get() and device.type not in AT_HAND


def holds(condition: Tensor) -> bool:
    """Return whether the condition (a scalar tensor) holds.

    Within `with_deferred_checks`, the answer on a GPU is true, and the condition is checked later.
    """
    if assumed(condition.device):
        return True
    of = _round.get()
    if of is None or condition.device.type in AT_HAND:
        return bool(condition)
    if not of.asks:
        of.noted.append(condition)
        return True
    answer = bool(condition)
    of.held &= answer
    return answer


def is_finite(number: Tensor) -> bool:
    """Return whether a number (a scalar tensor) is finite, with a deferred check as in `holds`."""
    if at_hand(number.device):
        return math.isfinite(float(number))
    return holds(number.isfinite())


def with_deferred_checks(device: torch.device, work: Callable[[], Found]) -> Found:
    """Call `work`, and check its conditions together at the end.

    If a condition does not hold, `work` is called again, and each condition is checked immediately.
    Both ways give the same numbers. The next rounds then also check immediately, until all
    conditions of a round hold. A nested call only calls `work`.
    """
    if device.type in AT_HAND or _round.get() is not None:
        return work()
    if device not in _DOUBTED:
        with _collecting(_Round(asks=False)) as noted:
            try:
                found = work()
            except Exception:  # such as a factorization of values that are not finite
                if noted.held_all():
                    raise
            else:
                if noted.held_all():
                    return found
                del found  # free its memory before the second call
        _DOUBTED.add(device)
    with _collecting(_Round(asks=True)) as asked:
        found = work()
    if asked.held:
        _DOUBTED.discard(device)
    return found


@contextmanager
def _collecting(of: _Round) -> Iterator[_Round]:
    token = _round.set(of)
    try:
        yield of
    finally:
        _round.reset(token)


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor from the CPU to a device without waiting for the device.

    The tensor is pinned first, because CUDA waits for its queue before it reads other memory.
    """
    values = values if dtype is None else values.to(dtype)
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
