"""Every random draw, keyed by what it is for.

A draw is a function of (seed, what, round, client, step, block) and of nothing else: not of the
engine, the process, the order of clients or the number of workers. So a run and all its neighbours
share one realization, as Assumption 4.2 of the stability note demands.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Draw(IntEnum):
    """The purpose of a draw. Codes are part of the file format: append, never renumber."""

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


def generator(
    seed: int, what: Draw, *, round: int = 0, client: int = 0, step: int = 0, block: int = 0
) -> np.random.Generator:
    """An independent generator for one draw; `block` numbers the matrices of one model."""
    key = (int(what), round, client, step, block)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


# The finalizer of splitmix64 (Steele, Lea and Flood 2014): it maps 0, 1, 2, ... times an odd number
# to numbers that pass tests of randomness. Products wrap around in 64 bits.
STRIDE, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample_keys(rng: np.random.Generator, rows: np.ndarray | None, size: int) -> np.ndarray:
    """The keys [n] of the dropout masks (`fedmuon.tasks.dropout`) of a client's samples in these
    rows, as int64; None is all of its `size` samples."""
    first = rng.integers(2**64, dtype=np.uint64)
    number = np.arange(size) if rows is None else rows
    mixed = first + (number.astype(np.uint64) + np.uint64(1)) * np.uint64(STRIDE)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)


class Normals(Protocol):
    """A source of normal numbers, such as NumPy's generators."""

    def standard_normal(self, shape: tuple[int, ...], /) -> np.ndarray:
        """N(0, 1) entries."""
        ...


def normal(rngs: Sequence[Normals], shape: tuple[int, ...]) -> "Tensor":
    """Standard normal entries [K S, ...] in float64: one draw per client, shared by its S
    replicas, because runs that are compared must see one realization."""
    import torch  # accountants and bounds work without torch, which takes two seconds to import

    each = np.stack([rng.standard_normal(shape[1:]) for rng in rngs])
    return torch.from_numpy(each).repeat_interleave(shape[0] // len(rngs), 0)
