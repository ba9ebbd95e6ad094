"""The exact discrete Gaussian: integers y with probability proportional to exp(-y^2 / 2 sigma^2).

Canonne, Kamath and Steinke (2020, Algorithms 1 to 3) draw one integer at a time with rational
numbers. This module uses sigma = 64 w with w = 2^bits, and draws many integers at once, by
rejection from strips of w integers.

A proposal is (k, r, sign). The strip k has the probability c_k / N with N = 2^16, r is uniform on
0, ..., w - 1, and the sign is a fair coin. The proposal represents y = +-a with a = k w + r. Let
rho(a) = exp(-a^2 / 2 sigma^2). The proposal is accepted with probability

    A = b rho(a) / c_k,    where c_k >= b rho(k w) makes A <= 1,                                 (1)

and -0 is never accepted. The result is then y with probability (1/2) (c_k / N) (1 / w) A = rho(y) b
/ (2 N w). This is a constant times rho(y), for any integers c_k and b. As rho(k w) = exp(-k^2 /
8192) does not depend on w, one table is valid for all w. One of the N slots represents all a beyond
8 sigma: a = (512 + 64 G) w + r, with P(G = j) = 2^-(j + 1) and r uniform on 0, ..., 64 w - 1. A
proposal of this slot is accepted with probability

    A = 64 b 2^(G + 1) rho(a) <= 128 b 2^G exp(-(8 + G)^2 / 2) < 2^-28,                          (2)

which gives the same constant times rho(y).

Whether U < A, for a uniform real U, is decided exactly, in three steps. First, the first 64 bits of
U are compared with a lower bound of (1) over the strip. This bound is a multiple of 2^-64, computed
from enclosures. The comparison decides 98% of the cases. Next, a float64 value of A decides the
cases in which these bits differ from this value by more than 2^-40 A + 2^-64. The exponent is at
most 32, with an error of at most 2e-14. The decision is therefore correct if `numpy.exp` has an
error below 2^-41, which is 2,000 units in the last place. Finally, all other cases, and all cases
beyond 8 sigma, are decided by decimal enclosures (whose exponential is correctly rounded) and by as
many further bits of U as needed. If the words are uniform and independent, the result has exactly
the discrete Gaussian distribution. The running time depends on the number of rejected proposals,
but not on the sum to which the noise is added.
"""

from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache

import numpy as np

Words = Callable[[int], np.ndarray]  # function from a count to independent uniform 64-bit words

STRIPS, LAST = 64, 512  # strips per standard deviation, and in total
SLOTS = 2**16
SCALE = 807  # b: the largest value for which the c_k leave one slot free
MOST_BITS = 46  # a word has 16 bits for the slot, one for the sign, and the rest for r
DOUBT = 2.0**-40
PART = 2**13  # number of proposals at once, which fit into a cache


def gaussian(words: Words, count: int, bits: int, dtype: type = np.int64) -> np.ndarray:
    """Draw `count` independent integers from the discrete Gaussian with sigma = 2^(6 + bits).

    If the dtype cannot represent an integer, the nearest representable number is returned.
    """
    integers, filled = np.empty(count, dtype), 0
    while filled < count:
        part = _accepted(words, min(PART, (count - filled) * 21 // 20 + 8), bits)[: count - filled]
        integers[filled : filled + len(part)] = part
        filled += len(part)
    return integers


def _accepted(words: Words, proposals: int, bits: int) -> np.ndarray:
    """Draw proposals for rejection sampling, and return the accepted integers in order."""
    slots, sure, _ = _table()
    drawn = words(2 * proposals)
    first, uniform = drawn[:proposals], drawn[proposals:]
    strip = slots[first >> np.uint64(48)]
    size = (first & np.uint64(2**bits - 1)).view(np.int64) | strip << bits
    sign = -(first >> np.uint64(47) & np.uint64(1)).view(np.int64)
    accepted = uniform < sure[strip]
    undecided = np.flatnonzero(~accepted)
    accepted[undecided] = _looked_at(
        words, strip[undecided], size, undecided, uniform[undecided], bits
    )
    accepted &= (size != 0) | (sign == 0)
    return ((size ^ sign) - sign)[accepted]


def _looked_at(
    words: Words,
    strip: np.ndarray,
    size: np.ndarray,
    undecided: np.ndarray,
    uniform: np.ndarray,
    bits: int,
) -> np.ndarray:
    """Decide the proposals that 64 random bits could not decide.

    The result says which of these proposals are accepted.
    """
    ratio = size[undecided] * 2.0**-bits
    goal = 2.0**64 * SCALE / _table()[2][strip] * np.exp(ratio * ratio / -(2 * STRIPS**2))
    beyond = strip == LAST
    answer = (uniform < goal) & ~beyond
    twice = 2 * (STRIPS << bits) ** 2  # -ln rho(a) is a^2 / (2 sigma^2)
    for k in np.flatnonzero(~beyond & (np.abs(uniform - goal) <= DOUBT * goal + 1)):
        weight = Fraction(SCALE, int(_table()[2][strip[k]]))
        exponent = Fraction(int(size[undecided[k]]) ** 2, twice)
        answer[k] = less(int(uniform[k]), weight, exponent, words)
    for k in np.flatnonzero(beyond & (uniform < 2**36)):
        steps = 0  # draw a size beyond 8 sigma, and compute the factor of rho in (2)
        while not (word := int(words(1)[0])) & 1:
            steps += 1
        far = (LAST + STRIPS * steps << bits) + (word >> 1) % (STRIPS << bits)
        weight = Fraction(SCALE * STRIPS << steps + 1)
        answer[k] = less(int(uniform[k]), weight, Fraction(far * far, twice), words)
        size[undecided[k]] = far if answer[k] else 0
    return answer


def less(first: int, weight: Fraction, exponent: Fraction, words: Words) -> bool:
    """Return whether a uniform random number U is below weight * exp(-exponent).

    `first` contains the first 64 bits of U. Further bits are drawn when they are needed.
    """
    bits, digits = 64, 40
    while True:
        low, high = enclosed(weight, exponent, digits)
        if first + 1 <= low * 2**bits:
            return True
        if first >= high * 2**bits:
            return False
        first, bits, digits = first << 64 | int(words(1)[0]), bits + 64, digits + 20


def enclosed(weight: Fraction, exponent: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Return two rational numbers, one below and one above weight * exp(-exponent).

    With p digits, two roundings affect the exponent and one affects the exponential. The relative
    error of each rounding is at most 10^(1 - p) / 2.
    """
    with localcontext(prec=digits):
        power = (Decimal(-exponent.numerator) / Decimal(exponent.denominator)).exp()
    middle = weight * Fraction(power)
    off = middle * 2 * (exponent + 1) / 10 ** (digits - 1)
    return middle - off, middle + off


@cache
def _table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays: the strip of each slot, the bound of each slot, and the counts c_k.

    If U is below the bound of its slot, U < A is certain.
    """
    around = [
        enclosed(Fraction(SCALE), Fraction(k * k, 2 * STRIPS**2), 40) for k in range(LAST + 1)
    ]
    slots = [-(-high.numerator // high.denominator) for _, high in around[:-1]]
    slots[0] += SLOTS - 1 - sum(slots)
    below = [2**64 * low / c for (low, _), c in zip(around[1:], slots, strict=True)]
    sure = [*(fraction.numerator // fraction.denominator for fraction in below), 0]
    counts = np.array([*slots, 1])
    return np.repeat(np.arange(LAST + 1), counts), np.array(sure, np.uint64), counts
