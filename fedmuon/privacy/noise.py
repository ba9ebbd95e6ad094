"""Random draws for private releases, from a secret key or from the run's seed.

A `KeyStream` is AES-256 in counter mode (NIST SP 800-38A), under a key from the operating system's
entropy. Blocks never repeat. An adversary who cannot break AES distinguishes n blocks of 16 bytes
from uniform blocks with an advantage of at most n^2 / 2^129. Proofs that assume uniform words are
therefore valid against every such adversary. A statistical generator such as PCG64 has no such
guarantee.
"""

import dataclasses
import math
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmuon.core.choices import NoiseSource
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, normal
from fedmuon.privacy.accounting.composition import Answer
from fedmuon.privacy.mechanisms.discrete import MOST_BITS, STRIPS, Words, gaussian

if TYPE_CHECKING:
    from torch import Tensor

ZEROS = bytes(2**16)


def counter_mode(key: bytes, counter: bytes = bytes(16)) -> Any:
    """Return an AES encryptor in counter mode. To get the key stream, encrypt zeros."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # slow to load

    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()


class KeyStream:
    """A source of secret random words, with a key that only this object stores.

    A KeyStream cannot be copied or pickled, and no attribute contains the key. A forked process
    draws a new key, so two processes never return the same words.
    """

    _forks = 0  # number of forks from the first process to this one

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._cipher, self._home = counter_mode(os.urandom(32)), KeyStream._forks

    @classmethod
    def _count_fork(cls) -> None:
        cls._forks += 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a KeyStream cannot be copied, because the copy would draw the same noise. Create a "
            "new KeyStream."
        )

    def random_raw(self, count: int) -> np.ndarray:
        """Return the next `count` random 64-bit words, like NumPy's bit generators."""
        if self._home != KeyStream._forks:
            self._begin()
        words = np.empty(count, np.uint64)
        buffer = memoryview(words).cast("B") if count else memoryview(b"")
        for start in range(0, len(buffer), len(ZEROS)):
            part = buffer[start : start + len(ZEROS)]
            self._cipher.update_into(memoryview(ZEROS)[: len(part)], part)
        return words

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw standard normal entries in float64, with tails that are not cut off.

        An entry is 2^-52 times the discrete Gaussian with a standard deviation of 2^52.
        """
        draws = gaussian(self.random_raw, math.prod(shape), MOST_BITS, np.float64)
        draws *= 1 / (STRIPS << MOST_BITS)
        return draws.reshape(shape)


if hasattr(os, "register_at_fork"):  # missing on systems without fork
    os.register_at_fork(after_in_child=KeyStream._count_fork)

Stream = np.random.Generator | KeyStream
Streams = Callable[[int], Sequence[Stream]]  # function from a block to one stream per client
Draws = Callable[..., np.random.Generator]  # draw(what, block=...) of one client's local step
Normal = Callable[[tuple[int, ...], int], "Tensor"]  # (shape [K S, ...], block) -> N(0, 1) entries


def secret_stream(source: str = "secure") -> Stream:
    """Return a new secret stream, of the kind that [privacy] noise-source selects.

    The stream is a `KeyStream`, or PCG64 seeded with 256 bits of the operating system's entropy.
    PCG64 takes 25% less time, but it is not a cryptographic generator.
    """
    if source == "secure":
        return KeyStream()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(secrets.randbits(256))))


def words_of(stream: Stream) -> Words:
    """Return the function of the stream that draws uniform 64-bit words."""
    return (stream if isinstance(stream, KeyStream) else stream.bit_generator).random_raw


def secret_streams(clients: int = 1, source: str = "secure") -> Streams:
    """Return a new secret stream, which all clients and blocks share."""
    streams = [secret_stream(source)] * clients
    return lambda block: streams


def keyed_streams(draws: Sequence[Draws]) -> Streams:
    """Return streams that depend only on (seed, round, client, step, block).

    `draws[k]` contains the random draws of client k. With these streams, a run can be repeated
    exactly, so everyone who knows the seed knows the noise. Use these streams only for experiments
    on data that need no protection.
    """
    return lambda block: [draw(Draw.NOISE, block=block) for draw in draws]


def normals(streams: Streams) -> Normal:
    """Return a function that draws standard normal entries.

    The replicas of a client get equal entries.
    """
    return lambda shape, block: normal(streams(block), shape)


def poisson_rows(rng: Stream, size: int, rate: float) -> np.ndarray:
    """Draw a Poisson lot, which contains each of `size` rows independently with probability `rate`.

    The accountant's amplification is valid only for this sampling, not for shuffled lots of a fixed
    size.

    A key stream draws each row with probability floor(rate 2^64) / 2^64. For rates of at least
    2^-11, this probability equals the rate. For smaller rates, it is below the rate by less than
    2^-64. This difference costs no privacy: the release is then a mixture of a release at the
    larger rate and a release without the example. By convexity, the epsilon of the mixture is not
    larger.

    Returns:
        The sorted row numbers. The lot may be empty.
    """
    if not isinstance(rng, KeyStream):
        return np.flatnonzero(rng.random(size) < rate)
    if rate >= 1:
        return np.arange(size)
    return np.flatnonzero(rng.random_raw(size) < np.uint64(int(rate * 2.0**64)))


# Who can know the noise of a release, and the consequence for epsilon

REPEATABLE = (
    "The lots and the noise follow from the seed, because insecure-reproducible-noise is set. "
    "This run therefore has no privacy."
)
PREDICTABLE = (
    "The lots and the noise come from PCG64, because noise-source is set to it. PCG64 is not a "
    "cryptographic generator, so its output may reveal its secret state."
)
STOPPED = (
    "A callback ended this run based on values that are not part of the private release. The "
    "number of rounds can therefore reveal private information, and the ledger does not count "
    "this."
)
CAVEATS = {"secret": "", "predictable": PREDICTABLE, "repeatable": REPEATABLE}


def secrecy(repeatable: bool, source: NoiseSource) -> str:
    """Return the name of the noise's secrecy class, which is a key of `CAVEATS`."""
    if repeatable:
        return "repeatable"
    return "secret" if source == "secure" else "predictable"


def uncertified(answer: Answer, why: str = REPEATABLE) -> Answer:
    """Mark an account as not certified, and add the reason to the account's note."""
    note = f"{why} {answer.note}".strip()
    return dataclasses.replace(answer, certified=False, note=note)
