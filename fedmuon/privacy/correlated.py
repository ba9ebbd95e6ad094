"""Noise that cancels: the matrix mechanism of DP-FTRL (Kairouz et al. 2021, Denisov et al. 2022).

Step t releases g_t + (C^-1 Z)_t, with Z of independent N(0, s^2) entries, a row a step, and C lower
triangular. A model adds up prefix sums A G of what is released, A = B C, and their noise is B Z,
far less than that of sums of independent noise. All releases are C^-1 (C G + Z), a function of the
Gaussian mechanism C G + Z, which alone is accounted for.

**C** is Toeplitz with c_0 = 1, c_j = c_{j-1} (2j - 1) / (2j) = binom(2j, j) / 4^j, the square root
of A (Fichtenberger, Henzinger, Upadhyay 2023), cut after `band` of them (Kalinin, Lampert 2024): as
(1 - x)^(-1/2) = sum_j c_j x^j, the whole C has C C = A. band = 1 is independent noise. Rows of
W = C^-1 Z follow from W_t = Z_t - sum_{0 < j < band} c_j W_{t-j}: `band` - 1 of them are kept.

**Sensitivity.** An example takes part in steps at least b apart, and adds vectors g_i of norm <= 1
there. As C >= 0, ||C (G - G')||^2 = sum_{i, j} <C_i, C_j> <g_i, g_j> <= sum_{i, j} <C_i, C_j> over
the columns i, j in which it does. For n steps and i <= j, <C_i, C_j> = sum_{s < n-j} c_s c_{s+j-i}
falls with j, and with j - i, since c is non-negative and falls. The l-th step of a pattern is l b
or later (l = 0, 1, ...), and the l-th and the m-th are |m - l| b or more apart, so no pattern
exceeds that of the steps 0, b, 2b, ... (Kalinin, Lampert 2024, Theorem 2).

**Adaptivity.** Let gradients depend on what was released. Given that, the means of row t of
C G + Z on two neighbours differ by v_t, and sum_t ||v_t||^2 <= S^2 whatever was released, as the
bound above is one of paths. A further row, of norm^2 S^2 - sum_t ||v_t||^2, can only tell more;
with it the log-likelihood ratio is sum_t <v_t, z_t> / s^2 +- S^2 / 2 s^2, z_t the row's noise.
Given the past, E exp(i x <v_t, z_t> + x^2 s^2 ||v_t||^2 / 2) = 1, so the product over t has mean 1,
too, and sum_t ||v_t||^2 = S^2 is a constant: sum_t <v_t, z_t> is exactly N(0, s^2 S^2), and the
loss that of one Gaussian release of sensitivity S (cf. Denisov et al. 2022, Theorem 2.1).
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.privacy.release import Normal


def square_root(count: int) -> np.ndarray:
    """The first coefficients c_0, c_1, ... of the square root of the prefix sums."""
    steps = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])


def sensitivity(coefficients: np.ndarray, steps: int, apart: int) -> float:
    """The norm of what an example adds to C G in so many steps, if it takes part in each `apart`-th
    and adds a vector of norm 1: the most of any pattern with steps at least so far apart.

    Coefficients must not be negative, and must not grow.
    """
    _require_falling(coefficients)
    column = np.zeros(steps)
    for start in range(0, steps, apart):
        held = coefficients[: steps - start]
        column[start : start + len(held)] += held
    return float(np.linalg.norm(column))


def _require_falling(coefficients: np.ndarray) -> None:
    if not (coefficients[-1] >= 0 and (np.diff(coefficients) <= 0).all()):
        raise InputError(
            "the sensitivity of noise that is correlated by these coefficients is not known: give "
            "ones that do not grow and are not negative"
        )


@dataclass
class Past:
    """The rows W_{t-1}, W_{t-2}, ... of the noise, block by block, in the memory of one process.

    Who knows them and what was released knows the sums: no file and no message may have them.
    """

    coefficients: np.ndarray
    _rows: dict[int, deque[Tensor]] = field(default_factory=dict, repr=False)
    _next: int = 0

    def __reduce__(self) -> str:
        raise InputError("the past of correlated noise is secret, and stays where it was drawn")

    def at(self, step: int, fresh: Normal) -> Normal:
        """The noise of that step, from `fresh`, independent one; steps come one after the other,
        0 begins anew."""
        if step == 0:
            self._rows.clear()
        elif step != self._next:
            raise InputError(
                f"the noise of step {step} is to cancel that of the steps before it, which is kept "
                "by no file and is not in this process: begin the run afresh"
            )
        self._next = step + 1
        return lambda shape, block: self._row(fresh(shape, block), block)

    def _row(self, fresh: Tensor, block: int) -> Tensor:
        rows = self._rows.setdefault(block, deque(maxlen=len(self.coefficients) - 1))
        for weight, row in zip(self.coefficients[1:], rows, strict=False):
            fresh = fresh - float(weight) * row
        rows.appendleft(fresh)
        return fresh
