"""Proved maxima of a composition p_T of odd polynomials and of its slope, by interval arithmetic.

`steepest` returns a number that is never below max |p_T'(x)| over x in [0, 1]. It exceeds the
maximum by at most a relative 1e-9, or by the effect of rounding. `furthest` does the same for
|p_T(x) - 1|. Intervals are pairs of arrays. Every operation rounds outward by one unit in the last
place, which is more than the error of round-to-nearest.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedmuon.orthogonalize.coefficients import Schedule, Step

Array = NDArray[np.float64]
Interval = tuple[Array, Array]  # (lower ends, upper ends)
Enclose = Callable[[Array, Array, Array], Interval]  # of the boxes (low, middle, high)

_GAP = 1e-9
_NARROW = 32  # units in the last place
# Slopes below this keep their own bounds. Near underflow the outward steps are no longer small
# compared with a number, and the following steps multiply them.
_NOTHING = 1e-200
_START, _SPLIT, _MOST = 512, 8, 1 << 20  # boxes at first, pieces of a box, boxes at most
BOXES = 1 << 12  # of `heights`


@lru_cache(maxsize=256)
def steepest(polynomials: Schedule) -> float | None:
    """Return max |p_T'| over [0, 1], rounded up by a relative 1e-9; None if out of reach.

    If p_T' peaks at 0 and the slopes of its steps fall from there, the enclosure of a small box
    [0, h] is already exact. Then prod a_t comes out to the last digits. A step that is 0 makes the
    map constant: odd polynomials keep 0, so p_T = 0.
    """
    if not all(any(step) for step in polynomials):
        return 0.0
    return _largest(lambda *box: _enclosed(polynomials, *box)[1], 0.0, 1.0, _NOTHING)


@lru_cache(maxsize=256)
def furthest(polynomials: Schedule, low: float, high: float, centre: float = 1.0) -> float | None:
    """Return max |p_T - centre| over [low, high], within [0, 1], rounded up in the same way.

    Where p_T is 1, only rounding is left. So boxes whose bound is within four times the widest
    enclosure of a point are not split.
    """

    def distance(*box: Array) -> Interval:
        at = _enclosed(polynomials, *box)[0]
        return _outward(at[0] - centre, at[1] - centre)

    points = np.linspace(low, high, _START + 1)
    with np.errstate(all="ignore"):
        below, above = distance(points, points, points)
    return _largest(distance, low, high, 4 * float((above - below).max()))


def _largest(enclose: Enclose, first: float, last: float, least: float) -> float | None:
    """Return max |f| over [first, last], from enclosures of f on boxes (low, middle, high).

    Branch and bound: a box is dropped once its enclosure shows that it cannot exceed the best value
    seen at a point by the gap, or by `least`. Rounding can widen an enclosure by more than the gap
    (6e-9 was seen). A box that is too narrow to split then keeps its own bound, which is looser but
    proved as well.
    """
    edges = np.linspace(first, last, _START + 1)
    low, high = edges[:-1], edges[1:]
    best = _at_least(enclose, np.array([first, last]))
    settled = 0.0
    with np.errstate(all="ignore"):
        while len(low):
            middle = low + (high - low) / 2
            best = max(best, _at_least(enclose, middle))
            lower, upper = enclose(low, middle, high)
            bound = np.maximum(np.abs(lower), np.abs(upper))
            bound = np.where(np.isnan(bound), np.inf, bound)  # where the arithmetic overflows
            open_ = ~(bound <= best * (1 + _GAP / 2) + least)
            open_ &= high - low >= _NARROW * np.spacing(high)
            settled = max(settled, float(bound[~open_].max(initial=0.0)))
            # Pieces of a box share their edges, so that nothing falls between them.
            low, high = low[open_], high[open_]
            cuts = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _SPLIT + 1)
            cuts[:, -1] = high
            low, high = cuts[:, :-1].ravel(), cuts[:, 1:].ravel()
            if len(low) > _MOST or settled == np.inf:
                return None
    return settled


@lru_cache(maxsize=256)
def heights(polynomials: Schedule) -> Array:
    """Return upper bounds of max |p_T| on [0, k / BOXES], k = 1 .. BOXES; infinite if unknown.

    The enclosures of long schedules are wide. So |p_T| is also bounded by the maximum of the last
    step over the range of the steps before it. The coefficients are scaled by that range.
    """
    top = np.float64(1.0)
    for step in polynomials:
        with np.errstate(all="ignore"):
            scaled = tuple(float(c * top ** (2 * k + 1)) for k, c in enumerate(step))
        top = _heights((scaled,)).max() * (1 + 1e-12)
    return np.minimum(_heights(polynomials), top)


@lru_cache(maxsize=256)
def _heights(polynomials: Schedule) -> Array:
    """The same from the enclosures of p_T alone."""
    edges = np.linspace(0.0, 1.0, BOXES + 1)
    low, high = edges[:-1], edges[1:]
    with np.errstate(all="ignore"):
        value, _ = _enclosed(polynomials, low, low + (high - low) / 2, high)
    size = np.maximum(np.abs(value[0]), np.abs(value[1]))
    return np.maximum.accumulate(np.where(np.isnan(size), np.inf, size))


def _at_least(enclose: Enclose, points: Array) -> float:
    """A number that |f| reaches at one of the points."""
    with np.errstate(all="ignore"):
        low, high = enclose(points, points, points)
    reached = np.maximum(np.maximum(low, -high), 0.0)
    return float(reached[np.isfinite(reached)].max(initial=0.0))


def _enclosed(
    polynomials: Schedule, low: Array, middle: Array, high: Array
) -> tuple[Interval, Interval]:
    """Enclose p_T and p_T' on boxes [low, high], through p_t, p_t' and p_t'' step by step.

    The chain rule on ranges errs by the width of a box, in every step again. So each range is
    intersected with the mean value form around the middle, of the composed p_t and p_t' rather than
    of single steps: p_t(box) is in p_t(middle) + p_t'(box) (box - middle). This errs by the width
    squared, so the flat parts near 1 and the peaks inside (0, 1) need few boxes.
    """
    one = np.ones_like(low)
    around = _outward(low - middle, high - middle)
    at, at_slope = (middle, middle), (one, one)
    x, slope, bend = (low, high), (one, one), (0 * one, 0 * one)
    for step in polynomials:
        value, first, second = _step(step)
        u, at_u = _square(x), _square(at)
        bend = _add(
            _times(_times(x, _horner(second, u)), _square(slope)), _times(_horner(first, u), bend)
        )
        at_slope = _times(_horner(first, at_u), at_slope)
        slope = _times(_horner(first, u), slope)
        slope = _both(slope, _add(at_slope, _times(bend, around)))
        at = _times(at, _horner(value, at_u))
        x = _both(_times(x, _horner(value, u)), _add(at, _times(slope, around)))
    return x, slope


def _step(step: Step) -> tuple[list[float], list[float], list[float]]:
    """Return f(x)/x, f'(x) and f''(x)/x of f = a x + b x^3 + ..., as polynomials in x^2."""
    powers = [2 * k + 1 for k in range(len(step))]
    first = [n * c for n, c in zip(powers, step, strict=True)]
    second = [(n - 1) * c for n, c in zip(powers, first, strict=True)]
    return list(step), first, second[1:]


def _horner(coefficients: list[float], u: Interval) -> Interval:
    """Enclose sum_k c_k u^k for intervals u >= 0.

    Nesting c_0 + u (c_1 + ...) keeps c_0 as an exact upper end while the bracket is negative. The
    integer factors in the coefficients round once, so their intervals extend a unit either way.
    """
    ends = [
        (np.nextafter(c, -np.inf), np.nextafter(c, np.inf)) if c else (c, c) for c in coefficients
    ]
    exact = np.zeros_like(u[0])
    out: Interval = (exact, exact)
    for lower, upper in reversed(ends):
        out = _add(_times(u, out), (exact + lower, exact + upper))
    return out


def _outward(low: Array, high: Array) -> Interval:
    return np.nextafter(low, -np.inf), np.nextafter(high, np.inf)


def _add(a: Interval, b: Interval) -> Interval:
    return _outward(a[0] + b[0], a[1] + b[1])


def _times(a: Interval, b: Interval) -> Interval:
    products = np.stack([a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1]])
    return _outward(products.min(0), products.max(0))


def _square(a: Interval) -> Interval:
    size = np.maximum(np.abs(a[0]), np.abs(a[1]))
    least = np.maximum(np.maximum(a[0], -a[1]), 0.0)
    low, high = _outward(least * least, size * size)
    return np.maximum(low, 0.0), high


def _both(a: Interval, b: Interval) -> Interval:
    """The intersection of two enclosures; a NaN (an overflow) in one leaves the other."""
    return np.fmax(a[0], b[0]), np.fmin(a[1], b[1])
