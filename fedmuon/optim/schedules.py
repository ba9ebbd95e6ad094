"""Step sizes by round: the factor of [local] lr in round r = 0, 1, ...

A schedule is a function of the round alone, not of the data. So the recursion of the Stability note
holds with it; only its matrix A_t varies from round to round.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, SupportsFloat

from fedmuon.core.errors import InputError, plain
from fedmuon.core.registry import Registry

Schedule = Callable[[int], float]
SCHEDULES: Registry[Schedule] = Registry()


def as_factor(found: Any) -> float | str:
    """The float of a number or of an array of one number; of anything else, words for an error."""
    held = found.detach() if hasattr(found, "detach") else found
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):  # several numbers
        if isinstance(held, SupportsFloat):
            return float(held)
    return found if isinstance(found, str) else plain(found, 60)


@SCHEDULES.add("cosine")
def cosine(rounds: int, floor: float = 0.0, warm: int = 0) -> Schedule:
    """From 1 down to `floor` along half a cosine, which would end in the round after the last.

    During the first `warm` rounds the factor rises as in `warm_up`. DiSK (C.1) sets `warm` to a
    twentieth of all rounds.
    """
    if not 0 <= warm < rounds:
        raise InputError(
            f"[local.options] warm = {warm} is refused: give 0 rounds or more, and fewer than the "
            f"{rounds} of the run"
        )
    rise = warm_up(warm)

    def factor(round: int) -> float:
        if round < warm:
            return rise(round)
        turn = math.pi * (round - warm) / (rounds - warm)
        return floor + (1 - floor) * (1 + math.cos(turn)) / 2

    return factor


@SCHEDULES.add("step")
def step(every: int = 10, factor: float = 0.5) -> Schedule:
    """Multiply by `factor` after every `every` rounds."""
    if every < 1:
        raise InputError(f"[local.options] every = {every} is refused: give 1 round or more")
    return lambda round: factor ** (round // every)


@SCHEDULES.add("warm-up")
def warm_up(warm: int = 5) -> Schedule:
    """1/(warm + 1), 2/(warm + 1), ... in the first `warm` rounds, then 1."""
    if warm < 0:
        raise InputError(f"[local.options] warm = {warm} is refused: give 0 rounds or more")
    return lambda round: min(1.0, (round + 1) / (warm + 1))


def heavy_tailed(steps: int, tail_index: float | None = None) -> tuple[float, float]:
    """(eta, beta) for gradient noise with a moment of order alpha in (1, 2].

        eta = K^(-(2 alpha - 1) / (3 alpha - 2))        beta = 1 - K^(-alpha / (3 alpha - 2))

    Source: Nesterov Muon, Theorem 3.4. Without alpha, alpha = 2 gives K^(-3/4) and 1 - K^(-1/2)
    (Theorem 3.5). One step has beta = 0.

    Args:
        steps: K.
        tail_index: alpha.
    """
    alpha = 2.0 if tail_index is None else tail_index
    width = 3 * alpha - 2
    return steps ** (-(2 * alpha - 1) / width), 1 - steps ** (-alpha / width)
