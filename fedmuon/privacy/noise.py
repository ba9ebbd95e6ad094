"""Where the noise and the lots of private runs come from.

By default from a generator that the operating system's entropy seeds anew: nobody can subtract the
noise. The keyed generator repeats a run exactly, and thereby gives its noise away to all who know
the seed; it is for experiments on data that need no protection, and must be asked for.
"""

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from fedmuon.coupling import normal
from fedmuon.randomness import Draw

Shape = tuple[int, ...]
Normal = Callable[[Shape, int], Tensor]  # (shape of a stack [K S, ...], block) -> N(0, 1) entries


def secret_generator() -> np.random.Generator:
    """A generator seeded with 256 bits of the operating system's entropy."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(secrets.randbits(256))))


def secret(clients: int = 1) -> Normal:
    """Fresh noise for each client, shared by its replicas; no two calls agree."""
    rng = secret_generator()
    return lambda shape, block: normal([rng] * clients, shape)


def keyed(draws: Sequence[Callable[..., np.random.Generator]]) -> Normal:
    """Noise that is a function of (seed, round, client, step, block); draws[k] is client k's."""
    return lambda shape, block: normal([draw(Draw.NOISE, block=block) for draw in draws], shape)


def poisson_rows(rng: np.random.Generator, size: int, rate: float) -> np.ndarray:
    """The rows of a Poisson lot: each of `size` rows with probability `rate`, independently.

    Sorted, and maybe none. This is the sampling that the accountant's amplification assumes; a
    shuffled lot of fixed size is another mechanism.
    """
    return np.flatnonzero(rng.random(size) < rate)
