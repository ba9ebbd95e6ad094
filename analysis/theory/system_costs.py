"""What a federation costs on paper: a tree of aggregators, and the time of a step.

A tree of aggregators
---------------------
A tree of aggregators: its depth, the bytes of a round at each level, and how its mean rounds.

K clients take part; every aggregator has at most F children. A client sends n_i and its model; an
aggregator sends sum_i n_i and sum_i n_i X_i of all clients below it, in float64; the root divides
once. Counts add up exactly. With float32 models and n_i < 2^29, n_i X_i has at most 24 + 29 bits
and is exact, so that only additions round. An entry's value goes through at most
h = sum_l (c_l - 1) of them, c_l the most children of level l, hence

    |sum - computed sum| <= gamma_h sum_i |n_i X_i|,    gamma_h = h u / (1 - h u),    u = 2^-53

(Higham, Accuracy and Stability of Numerical Algorithms, 4.2); one after the other, h = K - 1. The
order is that of the clients' numbers, so the same tree gives the same bits whoever answers first.
Other trees give other bits, unless entries lie on a grid that is coarse enough: see `exact_bits`.

Wall-clock time
---------------
The cost of an exact polar factor compared with Newton-Schulz: 004, Lemma 11, as a number.

Of an m x n layer, m <= n (else transpose), by counts of 2 for each multiply-add:

    SVD             14 n m^2 + 8 m^3      values and both thin bases (Golub and Reinsch)
    U V^T           2 n m^2
    Newton-Schulz   2 q (k + 1) n m^2     by Horner's rule: a Gram product, then k products with Z
                    q (4 n m^2 + 2 (k - 1) m^3)     powers of the Gram matrix first, as 002 counts

Horner's way is never the cheaper: it has 2 q (k - 1) m^2 (n - m) more. Lemma 11 divides both by
what a machine does in a second, P_svd and P_gemm:

    t_SVD / t_NS = (8 + 4 m/n) / (q (k + 1))  P_gemm / P_svd.

For q = 3 and k = 2 the first factor lies between 8/9 and 4/3: as 004 says, the speedup is that of
products over factorizations and of nothing else.

*From a printed curve to P_gemm / P_svd.* What else a step does takes the same time with either, and
moves the quotient of whole steps towards 1. So if by the same number of steps both reach the same
loss, and SVD needs s > 1 times the seconds, then s <= t_SVD / t_NS, and P_gemm / P_svd is at least
s q (k + 1) / 12, for layers of any shape.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from fedmuon.analysis.theory.checks import in_doubles, positive, whole
from fedmuon.core.errors import InputError

UNIT = 2.0**-53
COUNT = DOUBLE = 8  # bytes


@dataclass(frozen=True)
class Message:
    """Bytes to a client, from a client, and from an aggregator to the level above."""

    down: int
    up: int
    partial: int

    def __post_init__(self) -> None:
        for name in ("down", "up", "partial"):
            whole(name, getattr(self, name), 0)


@dataclass(frozen=True)
class Level:
    """One level of the tree.

    Attributes:
        aggregators: Number of aggregators.
        down: Bytes sent down to the level below in a round.
        up: Bytes received from it.
        sent: Bytes that the busiest aggregator sends down.
        most: Bytes that it receives.
    """

    aggregators: int
    down: int
    up: int
    sent: int
    most: int


def message(entries: int, itemsize: int = 4, sent: int = 1, returned: int = 1) -> Message:
    """Return the bytes of messages with a model.

    Args:
        entries: Number of entries of the model.
        itemsize: Bytes of an entry.
        sent: Arrays of that size that are sent down: the model and its states.
        returned: Arrays that come back, with the number of samples.
    """
    entries, itemsize = whole("entries", entries), whole("itemsize", itemsize)
    sent, returned = whole("sent", sent), whole("returned", returned)
    size = entries * itemsize
    return Message(sent * size, returned * size + COUNT, returned * entries * DOUBLE + COUNT)


def sizes(clients: int, fan_out: int) -> list[int]:
    """Number of nodes of each level, from the clients to the root."""
    if not (math.inf > clients >= 1 and math.inf > fan_out >= 2):
        raise InputError(
            f"no tree has {clients} clients and fan-out {fan_out}: give 1 or more and 2 or more"
        )
    found = [clients, -(-clients // fan_out)]
    while found[-1] > 1:
        found.append(-(-found[-1] // fan_out))
    return found


def levels(clients: int, fan_out: int, of: Message) -> list[Level]:
    """The levels of aggregators, from the one above the clients to the root."""
    nodes, found = sizes(clients, fan_out), []
    for number, (below, here) in enumerate(pairwise(nodes)):
        up, children = of.partial if number else of.up, min(below, fan_out)
        crossing = below * of.down, below * up, children * of.down, children * up
        found.append(Level(here, *crossing))
    return found


def additions(clients: int, fan_out: int) -> int:
    """h: the maximum number of additions that a client's value goes through."""
    return sum(min(below, fan_out) - 1 for below in sizes(clients, fan_out)[:-1])


def rounding(additions: int) -> float:
    """gamma_h: the rounding error relative to sum_i |n_i X_i|."""
    if whole("additions", additions, 0) * UNIT >= 1:
        raise InputError(f"after {additions} additions nothing is known: use a tree")
    return additions * UNIT / (1 - additions * UNIT)


def seconds(found: list[Level], rate: float, delay: float) -> float:
    """Seconds that a round's messages take, without the clients' own work.

    Every aggregator sends and receives `rate` bytes a second, one child after the other, and a
    message takes `delay` seconds each way.
    """
    return sum((one.sent + one.most) / rate + 2 * delay for one in found)


@in_doubles
def exact_bits(samples: int, largest: float) -> int:
    """Largest s such that sums of n_i X_i are exact in float64 for every tree, if X_i has s bits
    after the point.

    With |X_i| <= `largest` and sum n_i = `samples`, all partial sums are multiples of 2^-s, and
    none exceeds 2^53 of them.
    """
    return 53 - math.ceil(math.log2(whole("samples", samples) * positive("largest", largest)))


def svd_flops(rows: int, columns: int) -> float:
    """Operations of U V^T by a thin SVD, for m x n or n x m."""
    short, long = sorted((whole("rows", rows), whole("columns", columns)))
    return float(16 * long * short**2 + 8 * short**3)


def horner_flops(rows: int, columns: int, steps: int, degree: int) -> float:
    """Operations of q Newton-Schulz steps of degree k, as 004 counts them."""
    short, long = sorted((whole("rows", rows), whole("columns", columns)))
    return float(2 * whole("steps", steps) * (whole("degree", degree) + 1) * long * short**2)


def speedup(rows: int, columns: int, steps: int, degree: int, efficiency: float) -> float:
    """t_SVD / t_NS of Lemma 11, where `efficiency` is P_gemm / P_svd."""
    ratio = svd_flops(rows, columns) / horner_flops(rows, columns, steps, degree)
    return ratio * positive("efficiency", efficiency)


def least_efficiency(slowdown: float, steps: int, degree: int) -> float:
    """Lower bound of P_gemm / P_svd from a measured slowdown.

    `slowdown` is SVD's seconds over Newton-Schulz's, to the same loss. It must exceed 1: otherwise
    what both spend on gradients raises the ratio instead of lowering it.
    """
    if not slowdown > 1:
        raise InputError(
            f"slowdown = {slowdown:g} is not valid: the floor is of a slower SVD, above 1"
        )
    return (
        positive("slowdown", slowdown) * whole("steps", steps) * (whole("degree", degree) + 1) / 12
    )
