"""Where the randomness of a release comes from, and the lots that are drawn of it."""

import secrets
from collections.abc import Callable, Sequence

import numpy as np

from fedmuon.privacy.discrete import Words
from fedmuon.privacy.keystream import KeyStream

Stream = np.random.Generator | KeyStream
Streams = Callable[[int], Sequence[Stream]]  # block -> one a client


def secret_generator() -> np.random.Generator:
    """PCG64 seeded with 256 bits of the operating system's entropy: a quarter cheaper than a
    `KeyStream`, and no cryptographic generator."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(secrets.randbits(256))))


def secret_stream(source: str = "secure") -> Stream:
    """A fresh stream that nobody can repeat: a key stream, or what `noise-source` names."""
    return KeyStream() if source == "secure" else secret_generator()


def words_of(stream: Stream) -> Words:
    """Its source of uniform words."""
    return (stream if isinstance(stream, KeyStream) else stream.bit_generator).random_raw


def poisson_rows(rng: Stream, size: int, rate: float) -> np.ndarray:
    """The rows of a Poisson lot: each of `size` rows with probability `rate`, independently.

    Sorted, and maybe none. This is the sampling that the accountant's amplification assumes; a
    shuffled lot of fixed size is another mechanism.
    """
    if isinstance(rng, KeyStream):
        return np.flatnonzero(rng.happens(size, rate))
    return np.flatnonzero(rng.random(size) < rate)
