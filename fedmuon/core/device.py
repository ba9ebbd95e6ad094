"""Where Python may ask a tensor for a number, and what a round does instead.

A CPU has its numbers at hand. Another device stops its queue for every question: `bool(t)`,
`float(t)`, `t.tolist()`, `nonzero`, a mask as an index. So a round there takes for granted what
holds nearly always (a loss is finite, a Gram matrix is accurate), notes it as a tensor, and asks
once, when its last step is queued, whether all of it held. Where it did not, the round is made
again with every question asked: the same numbers, and the same refusals, as on a CPU.

A release with secret noise is never made again, nor thrown away: that its noise was one of those
that hold would tell of the data. So a round of such releases asks as a CPU does, but for its
clipping, which ends before the noise.

Torch's own factorizations stop for their error codes all the same: eigh, eigvalsh and svd.
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
_DOUBTED: set[torch.device] = set()  # those whose last round held something that is not so


@dataclass
class _Round:
    """A round's questions: `noted` until its end, or each answered at once if it `asks`."""

    asks: bool
    noted: list[Tensor] = field(default_factory=list)
    held: bool = True

    def holds(self, condition: Tensor) -> bool:
        """The answer, or that it is taken for granted."""
        if not self.asks:
            self.noted.append(condition)
            return True
        answer = bool(condition)
        self.held &= answer
        return answer

    def held_all(self) -> bool:
        """Whether all that was noted is so: the one question; `meta` has no numbers to tell."""
        if not self.noted or self.noted[0].is_meta:
            return True
        return bool(torch.stack(self.noted).all())


_round: ContextVar[_Round | None] = ContextVar("round", default=None)


def at_hand(device: torch.device) -> bool:
    """Whether Python may ask tensors there: on a CPU, and outside of `unasked` anywhere."""
    return device.type in AT_HAND or _round.get() is None


def holds(condition: Tensor) -> bool:
    """Whether the condition [] is so; where Python may not ask, that it is, and see `unasked`."""
    held = _round.get()
    if held is None or condition.device.type in AT_HAND:
        return bool(condition)
    return held.holds(condition)


def finite(number: Tensor) -> bool:
    """As `holds`, that a number [] is finite."""
    if at_hand(number.device):
        return math.isfinite(float(number))
    return holds(number.isfinite())


def unasked(device: torch.device, work: Callable[[], Found]) -> Found:
    """What `work` returns, which may be done twice: at first without a question until its end, and
    again, with questions, if something did not hold.

    Which of both does not change a number. Where a round did not hold, the next ones ask at once,
    up to the first that needed not. Within another `unasked` this is no more than the call.
    """
    if device.type in AT_HAND or _round.get() is not None:
        return work()
    if device not in _DOUBTED:
        with _questions(_Round(asks=False)) as noted:
            try:
                found = work()
            except Exception:  # such as of a factorization that saw what is not finite
                if noted.held_all():
                    raise
            else:
                if noted.held_all():
                    return found
                del found  # before the next is made
        _DOUBTED.add(device)
    with _questions(_Round(asks=True)) as asked:
        found = work()
    if asked.held:
        _DOUBTED.discard(device)
    return found


@contextmanager
def _questions(of: _Round) -> Iterator[_Round]:
    token = _round.set(of)
    try:
        yield of
    finally:
        _round.reset(token)


def sent(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The host's numbers on a device, which need not be idle for them: from pinned memory, as CUDA
    waits for its queue before it reads any other."""
    values = values if dtype is None else values.to(dtype)
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
