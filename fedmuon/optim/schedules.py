"""Schedules: the factor that multiplies the step size [local] lr in each round r = 0, 1, ...

A schedule depends only on the round, not on the data. The recursion of the Stability note therefore
also holds with a schedule, with a different matrix A_t in each round.
"""

import math
from collections.abc import Callable

from fedmuon.core.errors import InputError
from fedmuon.core.registry import Registry

__all__ = ["cosine", "heavy_tailed", "power", "step", "warm_up"]

Schedule = Callable[[int], float]
SCHEDULES: Registry[Schedule] = Registry()


@SCHEDULES.add("cosine")
def cosine(rounds: int, floor: float = 0.0, warm: int = 0) -> Schedule:
    """Return a schedule whose factor falls from 1 to `floor` along half a cosine.

    The factor is still above `floor` in the last round. DiSK (C.1) sets `warm` to one twentieth of
    all rounds.

    Args:
        rounds: Number of rounds of the run.
        floor: The factor at the end.
        warm: Number of first rounds in which the factor rises, as in `warm_up`.

    Returns:
        Function from a round (0, 1, ...) to the factor of the step size.

    Raises:
        InputError: If `warm` is negative or not below `rounds`.

    Example:
        >>> from fedmuon import schedules
        >>> factor = schedules.cosine(rounds=4)
        >>> [round(factor(r), 3) for r in range(4)]
        [1.0, 0.854, 0.5, 0.146]
    """
    if not 0 <= warm < rounds:
        raise InputError(
            f"[local.options] warm = {warm} is not valid. Use 0 rounds or more, and fewer than "
            f"the {rounds} rounds of the run."
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
    """Return a schedule that multiplies the step size by `factor` after every `every` rounds.

    Args:
        every: Number of rounds between two changes of the step size.
        factor: The multiplier.

    Returns:
        Function from a round (0, 1, ...) to the factor of the step size.

    Raises:
        InputError: If `every` is below 1.

    Example:
        >>> from fedmuon import schedules
        >>> factor = schedules.step(every=2, factor=0.5)
        >>> [factor(r) for r in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    if every < 1:
        raise InputError(f"[local.options] every = {every} is not valid. Use 1 round or more.")
    return lambda round: factor ** (round // every)


@SCHEDULES.add("warm-up")
def warm_up(warm: int = 5) -> Schedule:
    """Return a schedule of rising factors: 1/(warm + 1), 2/(warm + 1), ..., and then 1.

    Args:
        warm: Number of rounds with a factor below 1.

    Returns:
        Function from a round (0, 1, ...) to the factor of the step size.

    Raises:
        InputError: If `warm` is negative.

    Example:
        >>> from fedmuon import schedules
        >>> factor = schedules.warm_up(3)
        >>> [factor(r) for r in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if warm < 0:
        raise InputError(f"[local.options] warm = {warm} is not valid. Use 0 rounds or more.")
    return lambda round: min(1.0, (round + 1) / (warm + 1))


@SCHEDULES.add("power")
def power(power: float = 0.5) -> Schedule:
    """Return a schedule whose factor in round r = 0, 1, ... is (r + 1)^(-power).

    Args:
        power: The power, such as 0.5 for SGD.

    Returns:
        Function from a round (0, 1, ...) to the factor of the step size.

    Raises:
        InputError: If `power` is negative.

    Example:
        >>> from fedmuon import schedules
        >>> factor = schedules.power(0.5)
        >>> [round(factor(r), 3) for r in range(4)]
        [1.0, 0.707, 0.577, 0.5]
    """
    if power < 0:
        raise InputError(f"[local.options] power = {power:g} is not valid. Use 0 or more.")
    return lambda round: (round + 1) ** -power


def heavy_tailed(steps: int, tail_index: float | None = None) -> tuple[float, float]:
    """Return the step size eta and the momentum beta for heavy-tailed gradient noise.

        eta = K^(-(2 alpha - 1) / (3 alpha - 2))        beta = 1 - K^(-alpha / (3 alpha - 2))

    Source: Nesterov Muon, Theorem 3.4. With one step, beta is 0.

    Args:
        steps: K, the number of local steps of the whole run.
        tail_index: The order alpha in (1, 2] of a finite moment of the noise, by default 2 (Theorem
            3.5).

    Returns:
        Step size eta and momentum beta.

    Example:
        >>> from fedmuon import schedules
        >>> eta, beta = schedules.heavy_tailed(10_000)
        >>> round(eta, 6), round(beta, 6)
        (0.001, 0.99)
    """
    alpha = 2.0 if tail_index is None else tail_index
    width = 3 * alpha - 2
    return steps ** (-(2 * alpha - 1) / width), 1 - steps ** (-alpha / width)
