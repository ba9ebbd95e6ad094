"""The key stream: known answers, another mode of AES as its oracle, and whose it is."""

import copy
import os
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from fedmuon.core.errors import InputError
from fedmuon.privacy import noise
from fedmuon.privacy.noise import KeyStream, counter_mode

KEY = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
# NIST SP 800-38A, F.5.5: CTR-AES256, four blocks.
COUNTER = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
PLAIN = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
SECRET = bytes.fromhex(
    "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The key of all streams that a test makes."""
    monkeypatch.setattr(noise.os, "urandom", lambda count: KEY[:count])
    return KEY


def test_the_cipher_gives_the_published_answers() -> None:
    assert counter_mode(KEY, COUNTER).update(PLAIN) == SECRET
    assert counter_mode(KEY).update(PLAIN) != SECRET  # another counter


def test_words_are_the_enciphered_counters(known: bytes) -> None:
    """In order, whatever the pieces, past the buffer's end; ECB of 0, 1, 2, ... is the oracle."""
    stream, sizes = KeyStream(), (3, 0, 8192, 20_001, 1)
    words = np.concatenate([stream.random_raw(size) for size in sizes])
    blocks = b"".join(k.to_bytes(16, "big") for k in range(sum(sizes) // 2 + 1))
    alone = Cipher(algorithms.AES(known), modes.ECB()).encryptor().update(blocks)
    assert np.array_equal(words, np.frombuffer(alone, "<u8")[: len(words)])


def test_a_key_stays_in_its_stream(known: bytes) -> None:
    stream = KeyStream()
    for taken in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(InputError, match="cannot be copied"):
            taken(stream)
    assert set(vars(stream)) == {"_cipher", "_home"}
    for one in (stream, stream._cipher):
        assert known not in repr(one).encode() and known.hex() not in repr(one)
        assert not any(value == known for value in map(str.encode, dir(one)))


FORKED = """
import os, sys
from fedmuon.privacy.noise import KeyStream
stream = KeyStream()
stream.random_raw(5)
out, back = os.pipe()
if not os.fork():
    if sys.argv[1] == "unaware":
        KeyStream._forks = 0
    os.write(back, stream.random_raw(4).tobytes())
    os._exit(0)
mine = stream.random_raw(4).tobytes()
os.wait()
print(os.read(out, 32) == mine)
"""


@pytest.mark.parametrize(("how", "same"), [("aware", "False"), ("unaware", "True")])
def test_a_fork_begins_anew(how: str, same: str) -> None:
    """The control: a child that does not notice puts out its parent's words."""
    found = subprocess.run(
        [sys.executable, "-c", FORKED, how], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == same


def test_every_stream_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system's entropy, which other tests have a repeatable one for."""
    monkeypatch.setattr(noise, "os", os)
    firsts = {bytes(KeyStream().random_raw(4)) for _ in range(50)}
    assert len(firsts) == 50


@pytest.mark.parametrize("chance", [0.1, 1 / 3, 0.5, 1e-15, 3e-7, 1 - 2.0**-53])
def test_chances_are_exact_or_smaller_by_less_than_a_unit(
    chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = Fraction(chance) * 2**64
    least = true.numerator // true.denominator
    words = np.array([0, least - 1, least, 2**64 - 1], np.uint64)
    monkeypatch.setattr(KeyStream, "random_raw", lambda self, count: words[:count])
    assert KeyStream().happens(4, chance).tolist() == [True, True, False, False]
    assert (least == true) == (chance >= 2.0**-11)


def test_events_happen_as_often_as_they_should(known: bytes) -> None:
    """Binomial: within 4 standard deviations, and another rate is not."""
    seen = KeyStream().happens(100_000, 0.03)
    assert abs(seen.mean() - 0.03) < 4 * np.sqrt(0.03 * 0.97 / 1e5) < abs(seen.mean() - 0.033)
    assert KeyStream().happens(9, 1.0).all() and not KeyStream().happens(0, 0.5).size


def test_normals_are_normal(known: bytes) -> None:
    """By Kolmogorov and Smirnov, with their tails; the control is 4% too wide."""
    drawn = KeyStream().standard_normal((1000, 100))
    assert drawn.shape == (1000, 100) and drawn.dtype == np.float64
    flat = drawn.ravel()
    assert stats.kstest(flat, "norm").pvalue > 1e-3 > stats.kstest(1.04 * flat, "norm").pvalue
    for far in (2, 3, 4):
        expected = 2 * stats.norm.sf(far) * len(flat)
        assert abs((np.abs(flat) > far).sum() - expected) < 4 * np.sqrt(expected)
    assert abs(np.corrcoef(flat[1:], flat[:-1])[0, 1]) < 4 / np.sqrt(len(flat))
    assert KeyStream().standard_normal((0, 3)).shape == (0, 3)
    assert KeyStream().standard_normal(()).shape == ()
