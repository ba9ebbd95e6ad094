"""The discrete Gaussian, exactly: integers y with a probability that goes as exp(-y^2 / 2 sigma^2).

Canonne, Kamath and Steinke (2020, Algorithms 1 to 3) draw it one at a time with rational numbers.
Here sigma = 64 w, w = 2^bits, and many are drawn at once, by rejection from strips of w integers.

A proposal is (k, r, sign): strip k with probability c_k / N, N = 2^16, r uniform on 0, ..., w - 1,
and a fair sign; it stands for y = +-a, a = k w + r. With rho(a) = exp(-a^2 / 2 sigma^2) it is
accepted with probability

    A = b rho(a) / c_k,    where c_k >= b rho(k w) makes A <= 1,                                 (1)

and -0 never is. So y comes out with probability (1/2) (c_k / N) (1 / w) A = rho(y) b / (2 N w): a
constant times rho(y), whatever the integers c_k and b. As rho(k w) = exp(-k^2 / 8192) knows nothing
of w, one table serves all. Beyond 8 sigma, one of the N slots stands for a = (512 + 64 G) w + r,
P(G = j) = 2^-(j + 1), r uniform on 0, ..., 64 w - 1, accepted with

    A = 64 b 2^(G + 1) rho(a) <= 128 b 2^G exp(-(8 + G)^2 / 2) < 2^-28,                          (2)

the same constant times rho(y).

Whether U < A for a uniform real U is decided exactly. A lower bound of (1) over the strip, a
multiple of 2^-64 from enclosures, is compared with the first 64 bits of U, which settles 98%. A
float64 settles the others where those bits are further than 2^-40 A + 2^-64 from it: its exponent
is at most 32 and within 2e-14, so that holds if `numpy.exp` errs by less than 2^-41, 2,000 units in
its last place. What is left, and all beyond 8 sigma, is settled by enclosures in decimals (whose
exponential is correctly rounded) and further bits of U, as many as it takes. So from uniform
independent words comes this distribution, not nearly this one. How long that takes depends on what
was rejected, never on a sum.
"""

from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache

import numpy as np

Words = Callable[[int], np.ndarray]  # count -> independent uniform words of 64 bits

STRIPS, LAST = 64, 512  # to a standard deviation, and in all
SLOTS = 2**16
SCALE = 807  # b: the largest with which the c_k leave a slot
MOST_BITS = 46  # a word has 16 bits for the slot, one for the sign, the rest for r
DOUBT = 2.0**-40
PART = 2**13  # proposals at once, which a cache holds


def gaussian(words: Words, count: int, bits: int, dtype: type = np.int64) -> np.ndarray:
    """Draw independent integers [count] of the discrete Gaussian with sigma = 2^(6 + bits).

    A dtype that does not hold an integer gets the nearest that it holds.
    """
    found, have = np.empty(count, dtype), 0
    while have < count:
        part = _accepted(words, min(PART, (count - have) * 21 // 20 + 8), bits)[: count - have]
        found[have : have + len(part)] = part
        have += len(part)
    return found


def _accepted(words: Words, proposals: int, bits: int) -> np.ndarray:
    """The accepted ones of so many proposals, in their order."""
    slots, sure, _ = _table()
    drawn = words(2 * proposals)
    first, uniform = drawn[:proposals], drawn[proposals:]
    strip = slots[first >> np.uint64(48)]
    size = (first & np.uint64(2**bits - 1)).view(np.int64) | strip << bits
    sign = -(first >> np.uint64(47) & np.uint64(1)).view(np.int64)
    kept = uniform < sure[strip]
    rest = np.flatnonzero(~kept)
    kept[rest] = _looked_at(words, strip[rest], size, rest, uniform[rest], bits)
    kept &= (size != 0) | (sign == 0)
    return ((size ^ sign) - sign)[kept]


def _looked_at(
    words: Words,
    strip: np.ndarray,
    size: np.ndarray,
    rest: np.ndarray,
    uniform: np.ndarray,
    bits: int,
) -> np.ndarray:
    """Which of the proposals `rest` are accepted. Those beyond 8 sigma get a new `size`."""
    ratio = size[rest] * 2.0**-bits
    goal = 2.0**64 * SCALE / _table()[2][strip] * np.exp(ratio * ratio / -(2 * STRIPS**2))
    beyond = strip == LAST
    answer = (uniform < goal) & ~beyond
    twice = 2 * (STRIPS << bits) ** 2  # -ln rho(a) is a^2 / (2 sigma^2)
    for k in np.flatnonzero(~beyond & (np.abs(uniform - goal) <= DOUBT * goal + 1)):
        weight = Fraction(SCALE, int(_table()[2][strip[k]]))
        exponent = Fraction(int(size[rest[k]]) ** 2, twice)
        answer[k] = less(int(uniform[k]), weight, exponent, words)
    for k in np.flatnonzero(beyond & (uniform < 2**36)):
        steps = 0  # a size beyond 8 sigma, and the factor of rho in its probability (2)
        while not (word := int(words(1)[0])) & 1:
            steps += 1
        far = (LAST + STRIPS * steps << bits) + (word >> 1) % (STRIPS << bits)
        weight = Fraction(SCALE * STRIPS << steps + 1)
        answer[k] = less(int(uniform[k]), weight, Fraction(far * far, twice), words)
        size[rest[k]] = far if answer[k] else 0
    return answer


def less(first: int, weight: Fraction, exponent: Fraction, words: Words) -> bool:
    """Whether U < weight exp(-exponent) for a uniform U.

    `first` has the first 64 bits of U. The others are drawn as they are needed.
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
    """Rationals around weight exp(-exponent).

    In this precision p, the exponent is rounded twice and its exponential once, each by at most
    10^(1 - p) / 2 of its value.
    """
    with localcontext(prec=digits):
        power = (Decimal(-exponent.numerator) / Decimal(exponent.denominator)).exp()
    middle = weight * Fraction(power)
    off = middle * 2 * (exponent + 1) / 10 ** (digits - 1)
    return middle - off, middle + off


@cache
def _table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The strip of each slot; the 64-bit bound below which U is surely accepted, by strip; c_k."""
    around = [
        enclosed(Fraction(SCALE), Fraction(k * k, 2 * STRIPS**2), 40) for k in range(LAST + 1)
    ]
    slots = [-(-high.numerator // high.denominator) for _, high in around[:-1]]
    slots[0] += SLOTS - 1 - sum(slots)
    below = [2**64 * low / c for (low, _), c in zip(around[1:], slots, strict=True)]
    sure = [*(one.numerator // one.denominator for one in below), 0]
    counts = np.array([*slots, 1])
    return np.repeat(np.arange(LAST + 1), counts), np.array(sure, np.uint64), counts
