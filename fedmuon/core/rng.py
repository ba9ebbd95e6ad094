"""Random draws, each with its own key.

The key of a draw is (seed, what, round, client, step, block), and nothing else affects the draw.
The engine, the process, the order of clients and the number of workers do not change the draws.
Training on a data set and on a neighbouring data set therefore uses the same draws, as Assumption
4.2 of the Stability note requires.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Draw(IntEnum):
    """The purpose of a random draw.

    The codes are part of the file format: add codes, but never change one.
    """

    SYNTHETIC = 1
    SPLIT = 2
    PARTITION = 3
    INITIAL = 4
    SCHEDULE = 5
    BATCH = 6
    SMOOTHING = 7
    SKETCH = 8
    NEIGHBOUR = 9
    NOISE = 10
    LOT = 11
    PROBE = 12
    ORDER = 13
    NODE = 14
    DROPOUT = 15
    COMPRESSION = 16
    BROADCAST = 17
    DEVICE = 18
    OUTPUT = 19
    TRAIN_ERROR = 20
    FEATURES = 21
    SUBSPACE = 22
    UNSEEN = 24
    VOTE = 30
    GRAPH = 31
    HOSTILE = 32
    ATTACK = 33


def generator(
    seed: int, what: Draw, *, round: int = 0, client: int = 0, step: int = 0, block: int = 0
) -> np.random.Generator:
    """Return a random generator for one draw, independent of the generators of all other draws.

    If a model needs one draw per matrix, `block` is the number of the matrix.
    """
    key = (int(what), round, client, step, block)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


# Constants of the finalizer of splitmix64 (Steele, Lea and Flood 2014). It maps the multiples 0, 1,
# 2, ... of an odd number to numbers that pass tests of randomness. Products are modulo 2^64.
STRIDE, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample_keys(rng: np.random.Generator, rows: np.ndarray | None, size: int) -> np.ndarray:
    """Draw a key for each sample of a client. The keys determine the dropout masks of the samples.

    Args:
        rng: The random generator for this client and step.
        rows: Indices [n] of the samples. None means all samples.
        size: The client's number of samples.
    """
    first = rng.integers(2**64, dtype=np.uint64)
    number = np.arange(size) if rows is None else rows
    mixed = first + (number.astype(np.uint64) + np.uint64(1)) * np.uint64(STRIDE)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)


class Normals(Protocol):
    """A source of normal numbers, such as NumPy's generators."""

    def standard_normal(self, shape: tuple[int, ...], /) -> np.ndarray:
        """Return independent N(0, 1) entries in this shape."""
        ...


def normal(rngs: Sequence[Normals], shape: tuple[int, ...]) -> "Tensor":
    """Draw standard normal numbers in float64 for K clients with S replicas each.

    The first axis of the result has length K S.

    All S replicas of a client get the same numbers, because runs that are compared must use the
    same noise.
    """
    import torch  # late, because accountants and bounds do not need it

    samples = np.stack([rng.standard_normal(shape[1:]) for rng in rngs])
    return torch.from_numpy(samples).repeat_interleave(shape[0] // len(rngs), 0)
