"""Formulas for the costs of a tree of aggregators, and for the time of an optimizer step.

A tree of aggregators
---------------------
These functions compute the depth of the tree, the bytes of a round at each level, and the rounding
error of the mean.

K clients participate, and every aggregator has at most F children. A client sends n_i and its
model. An aggregator sends sum_i n_i and sum_i n_i X_i of all clients below it, in float64. Only the
root divides the sums. The sum of the n_i is exact. With float32 models and n_i < 2^29, n_i X_i
needs at most 24 + 29 bits and is exact, so only additions round. The value of an entry goes through
at most h = sum_l (c_l - 1) additions, where c_l is the maximum number of children at level l. Hence

    |sum - computed sum| <= gamma_h sum_i |n_i X_i|,    gamma_h = h u / (1 - h u),    u = 2^-53

(Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Without a tree, h = K - 1. Values are
added in the order of the client numbers. So the same tree gives bit-identical results, whichever
client answers first. Another tree may give a slightly different result, unless all entries are
multiples of a large enough power of 2 (`exact_bits`).

Wall-clock time
---------------
These functions compare the cost of an exact polar factor with the cost of Newton-Schulz. The source
is Newton–Schulz convergence, Lemma 11.

For an m x n layer with m <= n (transpose it otherwise), the numbers of operations are as follows. A
multiply-add counts as 2 operations.

    SVD             14 n m^2 + 8 m^3      values and both thin bases (Golub and Reinsch)
    U V^T           2 n m^2
    Newton-Schulz   2 q (k + 1) n m^2     by Horner's rule: a Gram product, then k products with Z
                    q (4 n m^2 + 2 (k - 1) m^3)     powers of the Gram matrix first, as in
                                                    Nesterov Muon

Horner's rule is never cheaper than computing the powers first, because it needs 2 q (k - 1) m^2 (n
- m) more operations. Lemma 11 divides the counts by the speeds P_svd and P_gemm of a machine, in
operations per second:

    t_SVD / t_NS = (8 + 4 m/n) / (q (k + 1))  P_gemm / P_svd.

For q = 3 and k = 2 the first factor lies between 8/9 and 4/3. So the speedup is close to P_gemm /
P_svd, as the paper states.

*P_gemm / P_svd from a published curve.* All other parts of a step take the same time with SVD and
with Newton-Schulz. The ratio of the times of whole steps is therefore closer to 1 than t_SVD /
t_NS. Assume that SVD and Newton-Schulz reach the same loss after the same number of steps, and that
SVD needs s > 1 times as many seconds. Then s <= t_SVD / t_NS, so P_gemm / P_svd is at least s q (k
+ 1) / 12, for layers of any shape.
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
    """Sizes of the messages of a round, in bytes.

    Attributes:
        down: Bytes sent to a client.
        up: Bytes received from a client.
        partial: Bytes sent from an aggregator to the level above.
    """

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
        down: Bytes sent to the level below in a round.
        up: Bytes received from the level below in a round.
        sent: Bytes that the busiest aggregator sends to the level below.
        most: Bytes that the busiest aggregator receives from the level below.
    """

    aggregators: int
    down: int
    up: int
    sent: int
    most: int


def message(entries: int, itemsize: int = 4, sent: int = 1, returned: int = 1) -> Message:
    """Return the sizes of the messages of a round for a model.

    Args:
        entries: Number of entries of the model.
        itemsize: Bytes of an entry.
        sent: Number of arrays of the model's size that a client receives: the model and states.
        returned: Number of arrays of the model's size that a client returns.
    """
    entries, itemsize = whole("entries", entries), whole("itemsize", itemsize)
    sent, returned = whole("sent", sent), whole("returned", returned)
    size = entries * itemsize
    return Message(sent * size, returned * size + COUNT, returned * entries * DOUBLE + COUNT)


def sizes(clients: int, fan_out: int) -> list[int]:
    """Return the number of nodes of each level, from the clients to the root."""
    for name, value, minimum in (("clients", clients, 1), ("fan_out", fan_out, 2)):
        if not math.inf > value >= minimum:
            raise InputError(f"{name} is {value}, but it must be at least {minimum} and finite.")
    nodes = [clients, -(-clients // fan_out)]
    while nodes[-1] > 1:
        nodes.append(-(-nodes[-1] // fan_out))
    return nodes


def levels(clients: int, fan_out: int, of: Message) -> list[Level]:
    """Return the levels of aggregators, from the level above the clients to the root."""
    nodes, aggregators = sizes(clients, fan_out), []
    for number, (below, above) in enumerate(pairwise(nodes)):
        up, children = of.partial if number else of.up, min(below, fan_out)
        crossing = below * of.down, below * up, children * of.down, children * up
        aggregators.append(Level(above, *crossing))
    return aggregators


def additions(clients: int, fan_out: int) -> int:
    """Return h, the maximum number of additions between a client and the sum at the root."""
    return sum(min(below, fan_out) - 1 for below in sizes(clients, fan_out)[:-1])


def rounding(additions: int) -> float:
    """Return gamma_h, a bound on the rounding error of a sum of models.

    The error is relative to sum_i |n_i X_i|.
    """
    if whole("additions", additions, 0) * UNIT >= 1:
        raise InputError(
            f"additions is {additions}, but the rounding error of so many additions has no bound. "
            "Use a tree of aggregators."
        )
    return additions * UNIT / (1 - additions * UNIT)


def seconds(found: list[Level], rate: float, delay: float) -> float:
    """Return the seconds that the messages of a round take, without the work of the clients.

    Every aggregator sends and receives `rate` bytes per second and serves one child after the
    other. A message takes `delay` seconds in each direction.
    """
    return sum((level.sent + level.most) / rate + 2 * delay for level in found)


@in_doubles
def exact_bits(samples: int, largest: float) -> int:
    """Return the largest s for which sums of n_i X_i are exact in float64 for every tree.

    Every X_i must be a multiple of 2^-s with |X_i| <= `largest`, and sum n_i = `samples`. Then all
    partial sums are multiples of 2^-s and at most 2^53 2^-s.
    """
    return 53 - math.ceil(math.log2(whole("samples", samples) * positive("largest", largest)))


def svd_flops(rows: int, columns: int) -> float:
    """Return the number of operations of U V^T by a thin SVD, for a layer of either orientation."""
    short, long = sorted((whole("rows", rows), whole("columns", columns)))
    return float(16 * long * short**2 + 8 * short**3)


def horner_flops(rows: int, columns: int, steps: int, degree: int) -> float:
    """Return the number of operations of q Newton-Schulz steps of degree k, by Horner's rule."""
    short, long = sorted((whole("rows", rows), whole("columns", columns)))
    return float(2 * whole("steps", steps) * (whole("degree", degree) + 1) * long * short**2)


def speedup(rows: int, columns: int, steps: int, degree: int, efficiency: float) -> float:
    """Return the ratio t_SVD / t_NS of Lemma 11. `efficiency` is P_gemm / P_svd."""
    ratio = svd_flops(rows, columns) / horner_flops(rows, columns, steps, degree)
    return ratio * positive("efficiency", efficiency)


def least_efficiency(slowdown: float, steps: int, degree: int) -> float:
    """Return a lower bound of P_gemm / P_svd from a measured slowdown.

    `slowdown` is the time that SVD needs to reach a loss, divided by the time that Newton-Schulz
    needs. `slowdown` must exceed 1. Otherwise, the gradient time, which is the same in both cases,
    would raise the ratio instead of lowering it.
    """
    if not slowdown > 1:
        raise InputError(
            f"slowdown is {slowdown:g}, but it must be above 1, because the lower bound assumes "
            "that SVD is slower than Newton-Schulz"
        )
    return (
        positive("slowdown", slowdown) * whole("steps", steps) * (whole("degree", degree) + 1) / 12
    )
