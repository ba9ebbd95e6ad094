"""Correlated noise from a few buffers, and a lower bound on the noise of every correlation.

# Buffered linear Toeplitz noise (Dvijotham et al. 2024, McMahan et al. 2024: BLT)

The noise of step t is row t of W = C^-1 Z (`fedmuon.privacy.mechanisms.fixed_order`). With a band
of k coefficients, k - 1 tensors of the model's size must be stored. With d buffers, the
coefficients of C are

    c_0 = 1,   c_j = sum_b w_b theta_b^(j-1) for j >= 1,   c(x) = 1 + x sum_b w_b / (1 - theta_b x),

The noise is W_t = Z_t - sum_b w_b S_b. After each step, buffer b replaces its sum S_b by theta_b
S_b + W_t. Only d tensors of the model's size are stored, and the noise of a step cancels noise of
all earlier steps. If w_b >= 0, sum_b w_b <= 1 and 0 <= theta_b < 1, the coefficients decrease and
are not negative. The sensitivity that `fixed_order.py` derives therefore also applies to these
coefficients, for any number of steps between two uses of an example.

**Choice of C.** A momentum, or a prefix sum, is A G for the Toeplitz matrix A of a. The noise in A
G is A C^-1 Z, and A C^-1 has the Toeplitz coefficients of a / c. Over n steps, the mean square of
this noise is sum_j (n - j) / n (a / c)_j^2. The squared sensitivity is the squared norm of c times
the comb 1 + x^b + x^2b + ... `optimized` minimizes the product of these two numbers by BFGS. As c
is a rational function, products, quotients and derivatives with respect to theta_b and w_b are
recursions of O(n d). Ledgers store theta and w, so an account is exact even if the search misses
the exact minimum.

**Lower bound.** Let A = B C for any matrices (not only Toeplitz matrices). Examples in steps i, i +
b, ... may add orthonormal vectors, or the same vector. The squared sensitivity S^2 is therefore at
least sum_t ||C_t||^2 over these steps, and at least ||C phi_i||^2, where phi_i is the indicator of
these steps. (If a gradient has too few entries for orthonormal vectors, random signs reach the
first bound in the mean.) The means of both bounds over the b possible starts i are ||C||_F^2 / b
and ||C Phi||_F^2 / b. As ||B||_F ||C||_F is at least the nuclear norm ||B C||_*,

    S ||B||_F / sqrt(n) >= max(||A||_*, ||A Phi||_*) / sqrt(n b).

This is a lower bound on the noise at equal epsilon, for every correlation (`least_possible`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedmuon.core.errors import InputError

MOST_BUFFERS = 8
STARTS = (1.0, 10.0)  # times 1 / steps: the smallest 1 - theta at the start of a search
Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]  # value and gradient


@dataclass(frozen=True)
class Buffers:
    """The buffers of correlated noise.

    Attributes:
        decays: The decay factors theta_b of the buffers, at least 0 and below 1. In each step, the
            sum in buffer b is multiplied by theta_b.
        scales: The positive weights w_b of the buffers, which add up to at most 1. In each step,
            w_b times the sum in buffer b is subtracted from the noise.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.decays) != len(self.scales):
            raise InputError(
                f"decays has {len(self.decays)} values and scales has {len(self.scales)} values, "
                "but each buffer needs one decay and one scale. Pass equally many decays and "
                "scales."
            )
        if not 1 <= len(self.decays) <= MOST_BUFFERS:
            raise InputError(
                f"decays has {len(self.decays)} values, one per buffer, but the number of buffers "
                f"must be from 1 to {MOST_BUFFERS}. Change the length of decays and scales."
            )
        for decay in self.decays:
            if not 0 <= decay < 1:
                raise InputError(
                    f"decays contains {decay}, but each decay must be at least 0 and below 1. "
                    "Replace this decay, for example by 0.9."
                )
        for scale in self.scales:
            if not scale > 0:
                raise InputError(
                    f"scales contains {scale}, but each scale must be positive. Change this scale."
                )
        if not sum(self.scales) <= 1:
            raise InputError(
                f"the scales of the buffers add up to {sum(self.scales):g}, but the sum must be "
                "at most 1, because the sensitivity is unknown otherwise. Lower the scales."
            )

    def coefficients(self, count: int) -> np.ndarray:
        """Return the first `count` coefficients c_0 = 1, c_1, c_2, ... of the correlated noise."""
        decays, coefficients = np.array(self.decays), np.ones(count)
        if count > 1:
            coefficients[1:] = (decays ** np.arange(count - 1)[:, None]) @ np.array(self.scales)
        return np.minimum.accumulate(coefficients)  # ensures that rounding does not increase them


def require_momentum(memory: float, ahead: bool) -> None:
    """Reject a momentum coefficient that is out of range."""
    if not 0 <= memory <= 1:
        raise InputError(
            f"memory, the momentum coefficient, is {memory}, but it must be from 0 to 1. Use "
            "memory = 0.9, for example."
        )
    if ahead and memory == 1:
        raise InputError(
            "memory, the momentum coefficient, is 1, but ahead = True requires a memory below 1. "
            "Use a smaller memory, or set ahead = False."
        )


def weights_of(steps: int, memory: float, ahead: bool = False) -> np.ndarray:
    """Return the weights of past gradients in a momentum or prefix sum.

    The entry j of the result is the weight a_j of a gradient that is j steps old.

    Args:
        steps: Number of weights to return.
        memory: The momentum coefficient beta, or 1 for prefix sums.
        ahead: Whether the momentum has Nesterov's look-ahead.
    """
    require_momentum(memory, ahead)
    if memory == 1:
        return np.ones(steps)
    a = (1 - memory) * memory ** np.arange(steps, dtype=float)
    return np.concatenate([[1 - memory**2], memory * a[1:]]) if ahead else a


@lru_cache(maxsize=32)
def optimized(
    steps: int,
    apart: int,
    count: int,
    memory: float = 1.0,
    ahead: bool = False,
    last: bool = False,
) -> Buffers:
    """Find the buffers that add the least noise to the momentum or prefix sum, at equal epsilon.

    Args:
        steps: Number of steps in the run.
        apart: Minimum number of steps between two uses of the same example.
        count: The number d of buffers.
        memory: The momentum coefficient beta, or 1 for prefix sums.
        ahead: Whether the momentum has Nesterov's look-ahead.
        last: Whether to minimize the noise of the last step, which has the most noise. Otherwise,
            the root mean square of the noise over all steps is minimized.
    """
    if not 1 <= count <= MOST_BUFFERS:
        raise InputError(
            f"buffers = {count} is not valid. Use an integer from 1 to {MOST_BUFFERS}."
        )
    _require_steps(steps, apart)
    objective = _of_buffers(*_problem(steps, apart, memory, ahead, last), count)
    starts = []
    for start in STARTS:
        gap = np.geomspace(min(start / steps, 0.3), 0.7, count)
        scales = 0.4 * np.sqrt(gap) / np.sqrt(gap).sum()
        starts.append(np.concatenate([np.log1p(-gap) - np.log(gap), np.log(scales / 0.6)]))
    decays, scales = _unpacked(_least(objective, starts))
    order = np.argsort(-decays)
    # Rounding may raise a decay to 1, or the sum of the scales above 1.
    decays, scales = np.minimum(decays, 1 - 2.0**-40), scales / max(1.0, scales.sum() * (1 + 1e-15))
    return Buffers(tuple(map(float, decays[order])), tuple(map(float, scales[order])))


def optimized_band(
    steps: int, apart: int, band: int, memory: float = 1.0, ahead: bool = False
) -> np.ndarray:
    """Find the coefficients of a band that add the least noise to the momentum or prefix sum.

    The search considers only coefficients that are not negative and do not increase, and compares
    them at equal epsilon (cf. Choquette-Choo et al. 2023, McKenna 2024). The arguments have the
    same meaning as for `optimized`.
    """
    _require_steps(steps, apart)
    comb, a, weights = _problem(steps, apart, memory, ahead, False)
    band = min(band, steps)
    if band == 1:
        return np.ones(1)

    def objective(logits: np.ndarray) -> tuple[float, np.ndarray]:
        ratios = _expit(logits)
        c = np.cumprod(np.append(1.0, ratios))
        moved, noise = np.convolve(comb, c)[:steps], _filter(a, 1.0, c)
        square, error = moved @ moved, weights @ (noise * noise)
        over = _filter(noise, 1.0, c)
        by_c = np.array([
            2 * (moved[j:] @ comb[: steps - j]) / square
            - 2 * ((weights * noise)[j:] @ over[: steps - j]) / error
            for j in range(1, band)
        ])  # fmt: skip
        later = np.cumsum((by_c * c[1:])[::-1])[::-1]  # c_j is the product of the ratios before it
        return math.log(square) + math.log(error), later * (1 - ratios)

    # Start from the root of prefix sums, and from coefficients that decrease by a constant factor.
    places = np.arange(1, band)
    starts = [np.log(2 * places - 1.0), np.full(band - 1, 2.0)]
    return np.cumprod(np.append(1.0, _expit(_least(objective, starts))))


def noise_of_buffers(
    buffers: Buffers,
    steps: int,
    apart: int,
    memory: float,
    ahead: bool = False,
    last: bool = False,
) -> float:
    """Return the relative noise in an entry of the momentum or prefix sum, with these buffers.

    The function computes the root mean square of the noise over all steps. With `last=True`, the
    function computes the noise of the last step instead. The result is this noise divided by the
    noise that a single release of all samples needs for the same epsilon.
    """
    comb, a, weights = _problem(steps, apart, memory, ahead, last)
    upper, lower = _rational(np.array(buffers.decays), np.array(buffers.scales))
    moved, noise = _filter(comb, upper, lower), _filter(a, lower, upper)
    return math.sqrt((moved @ moved) * (weights @ (noise * noise)))


def least_possible(steps: int, apart: int, memory: float, ahead: bool = False) -> float:
    """Return a lower bound on the noise of the momentum or prefix sum.

    This bound applies to every correlation of the noise between steps. The bound has the same unit
    as the result of `noise_of_buffers`. The function needs O(steps^3) operations.
    """
    from scipy.linalg import svdvals, toeplitz  # takes longer to load than everything else here

    _require_steps(steps, apart)
    matrix = toeplitz(weights_of(steps, memory, ahead), np.zeros(steps))
    places = np.zeros((steps, min(apart, steps)))
    places[np.arange(steps), np.arange(steps) % apart] = 1
    largest_norm = max(np.sum(svdvals(matrix)), np.sum(svdvals(matrix @ places)))
    return float(largest_norm) / math.sqrt(steps * min(apart, steps))


def _require_steps(steps: int, apart: int) -> None:
    if steps < 1:
        raise InputError(f"steps is {steps}, but it must be an integer of 1 or more.")
    if apart < 1:
        raise InputError(
            f"apart, the number of steps between two uses of an example, is {apart}, but it must "
            "be an integer of 1 or more."
        )


def _problem(
    steps: int, apart: int, memory: float, ahead: bool, last: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays of length `steps` that define the noise to minimize.

    The first array is 1 for the steps that use the example, and 0 for all other steps. The second
    array contains the weights a_j of the gradients. The third array contains the weights of (a /
    c)_j^2.
    """
    comb = np.zeros(steps)
    comb[::apart] = 1
    counts = np.ones(steps) if last else 1 - np.arange(steps) / steps
    return comb, weights_of(steps, memory, ahead), counts


def _rational(decays: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numerator and the denominator of c as polynomials.

    Each polynomial is an array with the coefficients of 1, x, x^2, ...
    """
    lower = np.poly(decays)  # coefficients of the product of all 1 - theta_b x
    upper = lower.copy()
    for place, scale in enumerate(scales):
        upper[1:] += scale * np.poly(np.delete(decays, place))
    return upper, lower


def _filter(signal: np.ndarray, upper: np.ndarray | float, lower: np.ndarray) -> np.ndarray:
    """Return the first coefficients of the power series signal * upper / lower."""
    from scipy.signal import lfilter  # see above

    return np.asarray(lfilter(np.atleast_1d(upper), lower, signal))


def _expit(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(values, -40, 40)))


def _unpacked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert unconstrained numbers to valid decays and scales of the buffers."""
    logits, logs = np.split(values, 2)
    parts = np.exp(np.clip(logs, -40, 40))
    return _expit(logits), parts / (1 + parts.sum())


def _of_buffers(comb: np.ndarray, a: np.ndarray, weights: np.ndarray, count: int) -> Objective:
    """Return the objective ln(sensitivity^2 * noise^2) with its gradient, for the minimization."""

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        decays, scales = _unpacked(values)
        upper, lower = _rational(decays, scales)
        moved, noise = _filter(comb, upper, lower), _filter(a, lower, upper)
        over = _filter(noise, lower, upper)
        square, error = moved @ moved, weights @ (noise * noise)
        by_decay, by_scale = np.zeros(count), np.zeros(count)
        for b in range(count):
            # The derivative of c by w_b is x / (1 - theta_b x); by theta_b, w_b times its square.
            pole, lag = np.array([1.0, -decays[b]]), np.array([0.0, 1.0])
            for gradient, factor, times in ((by_scale, 1.0, 1), (by_decay, scales[b], 2)):
                first, second = comb, over
                for _ in range(times):
                    first, second = _filter(first, lag, pole), _filter(second, lag, pole)
                gradient[b] = factor * 2 * (moved @ first) / square
                gradient[b] -= factor * 2 * ((weights * noise) @ second) / error
        by_logits = by_decay * decays * (1 - decays)
        by_logs = scales * (by_scale - by_scale @ scales)
        return math.log(square) + math.log(error), np.concatenate([by_logits, by_logs])

    return objective


def _least(objective: Objective, starts: list[np.ndarray]) -> np.ndarray:
    """Minimize the objective from several starting points, and return the best result."""
    from scipy.optimize import minimize  # see above

    method, options = ("L-BFGS-B", {"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-8})
    if len(starts[0]) <= 2 * MOST_BUFFERS:
        method, options = "BFGS", {"maxiter": 1000, "gtol": 1e-8}
    with np.errstate(all="ignore"):  # a line search may try extreme points
        results = [
            minimize(objective, start, jac=True, method=method, options=options) for start in starts
        ]
    return min(results, key=lambda result: result.fun).x
