"""Checks of tensors that do not make a GPU wait, and copies to a device.

A device stops its queue whenever Python reads a number: `bool(t)`, `float(t)`, `t.tolist()`,
`nonzero`, a mask as an index. So a round on a device assumes what nearly always holds (a loss is
finite, a Gram matrix is accurate). It collects these conditions as tensors and checks them all at
once after its last step. If one does not hold, the round is computed again, and each condition is
checked at once: the numbers and errors are the same as on a CPU.

A release with secret noise is never repeated or discarded, because the choice would depend on the
data. So a round with such releases checks at once, as on a CPU, except for its clipping, which ends
before the noise.

Torch's factorizations eigh, eigvalsh and svd synchronize in any case, to read their error codes.
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

AT_HAND = {"cpu"}  # kinds of devices whose numbers cost nothing to see
_DOUBTED: set[torch.device] = set()  # devices where a condition failed in the last round


@dataclass
class _Round:
    """A round's conditions: each checked at once if it `asks`, else collected in `noted`."""

    asks: bool
    noted: list[Tensor] = field(default_factory=list)
    held: bool = True  # all that were checked

    def held_all(self) -> bool:
        """Whether all collected conditions hold; tensors on `meta` have no numbers."""
        if not self.noted or self.noted[0].is_meta:
            return True
        return bool(torch.stack(self.noted).all())


_round: ContextVar[_Round | None] = ContextVar("round", default=None)
_assumed: ContextVar[bool] = ContextVar("assumed", default=False)


def at_hand(device: torch.device) -> bool:
    """Whether Python may read numbers there: on a CPU always, elsewhere outside of
    `with_deferred_checks`."""
    return device.type in AT_HAND or _round.get() is None


@contextmanager
def without_checks() -> Iterator[None]:
    """Assume that all conditions on a GPU hold, as an optimizer of torch does: NaN stays NaN."""
    before = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(before)


def assumed(device: torch.device) -> bool:
    """Whether conditions there are assumed to hold, so that they need not be computed."""
    return _assumed.get() and device.type not in AT_HAND


def holds(condition: Tensor) -> bool:
    """Whether the condition [] holds; assumed, and checked later, in `with_deferred_checks`."""
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
    """Whether a number [] is finite, checked as by `holds`."""
    if at_hand(number.device):
        return math.isfinite(float(number))
    return holds(number.isfinite())


def with_deferred_checks(device: torch.device, work: Callable[[], Found]) -> Found:
    """Call `work`, and check its conditions once at the end.

    If one does not hold, `work` is called again and each condition is checked at once. Both ways
    give the same numbers. The rounds after such a round check at once, until one of them did not
    need it. Within another call this only calls `work`.
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
                del found  # before the next is made
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
    """Copy the host's numbers to a device without waiting for it. Before CUDA reads memory that is
    not pinned, it waits for its queue."""
    values = values if dtype is None else values.to(dtype)
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
