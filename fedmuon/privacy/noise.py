"""Random words that nobody can tell from uniform ones, and the draws that are made of them.

AES-256 in counter mode (NIST SP 800-38A), from a key of the operating system's entropy. What comes
out is pseudorandom: whoever tells n blocks of 16 bytes from truly uniform ones breaks AES, but for
an advantage of n^2 / 2^129, as blocks never repeat. So what is proved of uniform words holds
against all who cannot; a statistical generator such as PCG64 promises nothing of the kind.
"""

import math
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.privacy.mechanisms.discrete import MOST_BITS, STRIPS, Words, gaussian

ZEROS = bytes(2**16)


def counter_mode(key: bytes, counter: bytes = bytes(16)) -> Any:
    """The encryptor, which makes of zeros its key stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # slow to load

    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()


class KeyStream:
    """Words and draws under a key that only this object's cipher ever holds.

    It cannot be copied or pickled, and has no attribute with the key or the seed of one. A process
    that was forked begins anew, under a key of its own: no two ever put out the same words.
    """

    _forks = 0  # between the first process and this one

    def __init__(self) -> None:
        """A fresh key."""
        self._began()

    def _began(self) -> None:
        self._cipher, self._home = counter_mode(os.urandom(32)), KeyStream._forks

    @classmethod
    def _forked(cls) -> None:
        cls._forks += 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a key stream stays where it is, since a copy would repeat its noise: make another"
        )

    def random_raw(self, count: int) -> np.ndarray:
        """The next words [count] of 64 bits, as NumPy's bit generators name it."""
        if self._home != KeyStream._forks:
            self._began()
        words = np.empty(count, np.uint64)
        whole = memoryview(words).cast("B") if count else memoryview(b"")
        for start in range(0, len(whole), len(ZEROS)):
            part = whole[start : start + len(ZEROS)]
            self._cipher.update_into(memoryview(ZEROS)[: len(part)], part)
        return words

    def happens(self, count: int, chance: float) -> np.ndarray:
        """Independent events [count] of probability floor(chance 2^64) / 2^64, and all at 1.

        From 2^-11 on that is the chance itself, below it less by under 2^-64. A lot at a smaller
        rate makes of a release a mixture of what the greater rate makes of it and of the release
        without the example, so by convexity no epsilon is larger.
        """
        if chance >= 1:
            return np.ones(count, bool)
        return self.random_raw(count) < np.uint64(int(chance * 2.0**64))

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """Float64 entries: the discrete Gaussian with 2^52 steps to a standard deviation, whose
        tails end nowhere, times 2^-52."""
        found = gaussian(self.random_raw, math.prod(shape), MOST_BITS, np.float64)
        found *= 1 / (STRIPS << MOST_BITS)
        return found.reshape(shape)


if hasattr(os, "register_at_fork"):  # elsewhere nothing forks
    os.register_at_fork(after_in_child=KeyStream._forked)


# Where the randomness of a release comes from, and the lots that are drawn of it.

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
