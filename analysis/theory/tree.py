"""A tree of aggregators: its depth, the bytes of a round at each level, and how its mean rounds.

K clients take part; every aggregator has at most F children. A client sends n_i and its model; an
aggregator sends sum_i n_i and sum_i n_i X_i of all clients below it, in float64; the root divides
once. Counts add up exactly. With float32 models and n_i < 2^29, n_i X_i has at most 24 + 29 bits
and is exact, so that only additions round. An entry's value goes through at most
h = sum_l (c_l - 1) of them, c_l the most children of level l, hence

    |sum - computed sum| <= gamma_h sum_i |n_i X_i|,    gamma_h = h u / (1 - h u),    u = 2^-53

(Higham, Accuracy and Stability of Numerical Algorithms, 4.2); one after the other, h = K - 1. The
order is that of the clients' numbers, so the same tree gives the same bits whoever answers first.
Other trees give other bits, unless entries lie on a grid that is coarse enough: see `exact_bits`.
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
    """Bytes that a client is sent, that it returns, and that an aggregator sends up."""

    down: int
    up: int
    partial: int

    def __post_init__(self) -> None:
        for name in ("down", "up", "partial"):
            whole(name, getattr(self, name), 0)


@dataclass(frozen=True)
class Level:
    """Aggregators of one level and the bytes that cross below them in a round; the busiest of them
    has `sent` so many down, and takes in `most`."""

    aggregators: int
    down: int
    up: int
    sent: int
    most: int


def message(entries: int, itemsize: int = 4, sent: int = 1, returned: int = 1) -> Message:
    """Of a model of so many entries, which is `sent` with its states as so many arrays of its size,
    and `returned` as so many; the count comes to what goes up."""
    entries, itemsize = whole("entries", entries), whole("itemsize", itemsize)
    sent, returned = whole("sent", sent), whole("returned", returned)
    size = entries * itemsize
    return Message(sent * size, returned * size + COUNT, returned * entries * DOUBLE + COUNT)


def sizes(clients: int, fan_out: int) -> list[int]:
    """How many there are of each level, from the clients to the root."""
    if not (math.inf > clients >= 1 and math.inf > fan_out >= 2):
        raise InputError(
            f"no tree has {clients} clients and fan-out {fan_out}: give 1 or more and 2 or more"
        )
    found = [clients, -(-clients // fan_out)]
    while found[-1] > 1:
        found.append(-(-found[-1] // fan_out))
    return found


def levels(clients: int, fan_out: int, of: Message) -> list[Level]:
    """From the level above the clients to the root."""
    nodes, found = sizes(clients, fan_out), []
    for number, (below, here) in enumerate(pairwise(nodes)):
        up, children = of.partial if number else of.up, min(below, fan_out)
        crossing = below * of.down, below * up, children * of.down, children * up
        found.append(Level(here, *crossing))
    return found


def additions(clients: int, fan_out: int) -> int:
    """h: those that a client's value goes through at most."""
    return sum(min(below, fan_out) - 1 for below in sizes(clients, fan_out)[:-1])


def rounding(additions: int) -> float:
    """gamma_h, relative to sum_i |n_i X_i|."""
    if whole("additions", additions, 0) * UNIT >= 1:
        raise InputError(f"after {additions} additions nothing is known: use a tree")
    return additions * UNIT / (1 - additions * UNIT)


def seconds(found: list[Level], rate: float, delay: float) -> float:
    """Of a round's messages: every aggregator sends and takes in `rate` bytes a second, one child
    after the other, and a message takes `delay` each way. The clients' own seconds come to it."""
    return sum((one.sent + one.most) / rate + 2 * delay for one in found)


@in_doubles
def exact_bits(samples: int, largest: float) -> int:
    """The most bits s after the point with which sums of n_i X_i are exact in float64, whatever
    the tree: of multiples of 2^-s with |X_i| <= `largest` and sum n_i = `samples`, all partial sums
    are multiples of 2^-s, and none exceeds 2^53 of them."""
    return 53 - math.ceil(math.log2(whole("samples", samples) * positive("largest", largest)))
