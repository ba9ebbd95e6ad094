"""Where a function of one number is smallest; scipy's search would cost half a second to import."""

import math
from collections.abc import Callable

_RATIO = (math.sqrt(5) - 1) / 2


def least(value: Callable[[float], float], low: float, high: float, width: float = 1e-6) -> float:
    """The minimum of a function that falls, then rises, on [low, high], by golden section.

    On equal values it goes right, so that a function may be infinite on the left.
    """
    left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
    at_left, at_right = value(left), value(right)
    while high - low > width:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _RATIO * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _RATIO * (high - low)
            at_right = value(right)
    return left if at_left < at_right else right
