"""The key stream: known answers, another mode of AES as its oracle, and whose it is."""

import base64
import copy
import os
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from conftest import private
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from torch import nn

from fedmuon.config.load import Config, load
from fedmuon.core.errors import InputError
from fedmuon.experiments import spending
from fedmuon.experiments.run import execute
from fedmuon.optim.private import Private
from fedmuon.privacy import noise
from fedmuon.privacy.mechanisms import discrete
from fedmuon.privacy.mechanisms.discrete import (
    LAST,
    MOST_BITS,
    SCALE,
    SLOTS,
    STRIPS,
    gaussian,
    less,
)
from fedmuon.privacy.noise import KeyStream, counter_mode, poisson_rows

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
    assert poisson_rows(KeyStream(), 4, chance).tolist() == [0, 1]
    assert (least == true) == (chance >= 2.0**-11)


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


# The discrete Gaussian: every decision against mpmath, and counts against probabilities.


class Given:
    """Words that were written down, first these, then those one by one."""

    def __init__(self, first: np.ndarray, more: list[int]) -> None:
        self.first, self.more = first, more

    def __call__(self, count: int) -> np.ndarray:
        if count == len(self.first):
            return self.first
        return np.array([self.more.pop(0) for _ in range(count)], np.uint64)


def accepted(slot: int, rest: int, uniform: int, bits: int, more: list[int]) -> np.ndarray:
    first = slot << 48 | rest
    return discrete._accepted(Given(np.array([first, uniform], np.uint64), more), 1, bits)


def counts() -> np.ndarray:
    return discrete._table()[2]


def test_the_strips_cover_their_density() -> None:
    """c_k >= b rho(k w), in N slots of which one is for what lies beyond; b is the largest."""
    found = counts()
    assert found.sum() == SLOTS and found[LAST] == 1 and len(found) == LAST + 1
    with mpmath.workdps(40):
        for k in range(LAST):
            assert found[k] >= SCALE * mpmath.exp(-mpmath.mpf(k * k) / 8192)
        more = [int(mpmath.ceil((SCALE + 1) * mpmath.exp(-mpmath.mpf(k * k) / 8192)))
                for k in range(LAST)]  # fmt: skip
    assert sum(more) > SLOTS - 1
    slots = discrete._table()[0]
    assert np.array_equal(np.bincount(slots), found)


def around(chance: Any) -> list[list[int]]:
    """The first words of uniforms that are less than the chance by 2^-256 or so, and greater."""
    border = int(chance * mpmath.mpf(2) ** 256)
    return [[(border + far) >> 64 * place & 2**64 - 1 for place in (3, 2, 1, 0)] for far in (-1, 1)]


def density(size: int, bits: int) -> Any:
    return mpmath.exp(-(mpmath.mpf(size) ** 2) / (2 * mpmath.mpf(STRIPS << bits) ** 2))


@pytest.mark.parametrize("bits", [0, 26, MOST_BITS])
def test_every_acceptance_is_exact(bits: int) -> None:
    """A uniform's first word just below and just above, and those where only later ones decide."""
    rng, starts = np.random.default_rng(bits), np.cumsum([0, *counts()])
    for k in (0, 1, 2, *range(3, LAST, 23), LAST - 1):
        rest, slot = int(rng.integers(2**bits)), int(starts[k + 1]) - 1
        size = (k << bits) + rest
        with mpmath.workdps(100):
            weight = mpmath.mpf(SCALE) / int(counts()[k])
            below, above = around(weight * density(size, bits))
        for (first, *more), expected in ((below, [size]), (above, [])):
            assert accepted(slot, rest, first, bits, more).tolist() == expected
        assert accepted(slot, rest, below[0] - 1, bits, []).tolist() == [size]
        assert accepted(slot, rest, above[0] + 1, bits, []).tolist() == []


def test_signs_are_fair_and_zero_counts_once() -> None:
    sign, slot = 1 << 47, int(np.cumsum(counts())[2]) - 1
    assert accepted(slot, 5 | sign, 0, 26, []).tolist() == [-(2 << 26) - 5]
    assert accepted(0, 0, 0, 26, []).tolist() == [0] and accepted(0, sign, 0, 26, []).size == 0


@pytest.mark.parametrize("bits", [0, 26, MOST_BITS])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_beyond_eight_deviations(bits: int, steps: int) -> None:
    """One slot for all of it: proposed with 2^-(G + 1) / 64 w, accepted with (2), exactly."""
    rest = 12345 % (STRIPS << bits)
    coins, size = [0] * steps + [rest << 1 | 1], (LAST + STRIPS * steps << bits) + rest
    with mpmath.workdps(100):
        chance = 64 * SCALE * mpmath.mpf(2) ** (steps + 1) * density(size, bits)
        assert chance < mpmath.mpf(2) ** -28
        below, above = around(chance)
    for (first, *more), expected in ((below, [size]), (above, [])):
        assert accepted(SLOTS - 1, 0, first, bits, coins + more).tolist() == expected
    assert accepted(SLOTS - 1, 0, 2**36, bits, []).size == 0  # and no coin is thrown


def test_enclosures_hold_and_narrow() -> None:
    for exponent in (Fraction(0), Fraction(1, 3), Fraction(123456789, 2**20), Fraction(40)):
        low, high = discrete.enclosed(Fraction(7, 3), exponent, 40)
        with mpmath.workdps(80):
            true = (
                mpmath.mpf(7)
                / 3
                * mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator)
            )
            assert mpmath.mpf(low.numerator) / low.denominator < true
            assert true < mpmath.mpf(high.numerator) / high.denominator
        assert high - low <= high * Fraction(1, 10**36)
    # Half of the uniforms are less than a half, and it may take any number of bits to see.
    for first, more, answer in ((2**63 - 1, [2**64 - 1, 5], True), (2**63, [0, 5], False)):
        assert less(first, Fraction(1, 2), Fraction(0), Given(np.empty(9), more)) is answer


def test_floats_and_enclosures_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a float64 is trusted with little, decimals decide: the same integers."""
    words = lambda: np.random.default_rng(5).bit_generator.random_raw  # noqa: E731
    quick = gaussian(words(), 20_000, 3)
    assert np.array_equal(gaussian(words(), 20_000, 3, np.float64), quick)  # of another dtype
    assert gaussian(words(), 0, 3).shape == (0,)
    monkeypatch.setattr(discrete, "DOUBT", 0.3)
    slow = gaussian(words(), 20_000, 3)
    assert np.array_equal(quick, slow)
    monkeypatch.setattr(discrete, "SCALE", SCALE - 100)  # control: another acceptance
    assert not np.array_equal(quick, gaussian(words(), 20_000, 3))


def chi_square(drawn: np.ndarray, sigma: float) -> float:
    """The p-value of integers against their probabilities, tails pooled where fewer than 25 are
    expected."""
    at = np.arange(-int(9 * sigma), int(9 * sigma) + 1)
    mass = np.exp(-(at**2) / (2 * sigma**2))
    mass *= len(drawn) / mass.sum()
    within = np.flatnonzero(mass >= 25)
    low, high = at[within[0]], at[within[-1]]
    seen = np.bincount(np.clip(drawn, low - 1, high + 1) - low + 1, minlength=high - low + 3)
    tails = mass[at < low].sum(), mass[at > high].sum()
    expected = np.array([tails[0], *mass[within], tails[1]])
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def test_counts_fit_the_probabilities() -> None:
    """100,000 draws, each integer a cell; the control is 3% too wide."""
    drawn = gaussian(np.random.default_rng(11).bit_generator.random_raw, 100_000, 0)
    assert len(drawn) == 100_000 and drawn.dtype == np.int64
    assert chi_square(drawn, 64.0) > 1e-3 > chi_square(drawn, 62.0)
    for far in (2, 3, 4):
        expected = 2 * stats.norm.sf((far * 64 + 0.5) / 64) * len(drawn)
        assert abs((np.abs(drawn) > far * 64).sum() - expected) < 4 * np.sqrt(expected)


@pytest.mark.parametrize("bits", [26, MOST_BITS])
def test_fine_lattices_are_as_the_normal(bits: int) -> None:
    rng = np.random.default_rng(bits)
    drawn = gaussian(rng.bit_generator.random_raw, 50_000, bits) / (STRIPS << bits)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert np.unique(drawn).size == len(drawn)
    low = gaussian(rng.bit_generator.random_raw, 20_000, bits) % 16  # the last bits are uniform
    assert stats.chisquare(np.bincount(low, minlength=16)).pvalue > 1e-3


# Where a private run's noise comes from: what its folder tells, and what is called private.


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_nothing_on_disk_rebuilds_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No key of the run is in its files or in what it says, in any spelling; the config that it
    left makes another model; with the same keys (the control) the same."""
    keys: list[bytes] = []

    def taken(count: int) -> bytes:
        keys.append(np.random.default_rng(len(keys)).bytes(count))
        return keys[-1]

    def run(name: str, config: Config | None = None) -> bytes:
        execute(config or load(tmp_path / "first" / "config.toml"), tmp_path / name)
        return model(tmp_path / name)

    with monkeypatch.context() as patched:
        patched.setattr(noise.os, "urandom", taken)
        first, used, said = (
            run("first", private(noise=1.0, arithmetic="grid")),
            [*keys],
            capfd.readouterr(),
        )
        keys.clear()
        assert run("same keys") == first
    assert run("other keys") != first
    files = [one.read_bytes() for one in (tmp_path / "first").rglob("*") if one.is_file()]
    everything = b"".join([*files, said.out.encode(), said.err.encode()])
    assert len(used) > 10 and {len(key) for key in used} == {32} and len(files) > 7
    for key in used:
        numbers = [int.from_bytes(key, order) for order in ("big", "little")]
        texts = [key.hex(), key.hex().upper(), base64.b64encode(key).decode(), *map(str, numbers)]
        assert not any(text.encode() in everything for text in texts)
        assert not any(key[at : at + 8] in everything for at in range(25))


def test_the_lattice_spends_what_real_noise_does(tmp_path: Path) -> None:
    summaries = {how: execute(private(noise=1.0, arithmetic=how), tmp_path / how)["privacy"]
                 for how in ("auto", "grid", "continuous")}  # fmt: skip
    for how, found in summaries.items():
        assert found["certified"] and found["arithmetic"] == ("grid" if how == "auto" else how)
    for end in ("lower", "upper"):
        assert summaries["grid"][end] == summaries["continuous"][end] > 0


def test_a_lattice_may_be_repeatable_too(tmp_path: Path) -> None:
    changes = {"noise": 1.0, "insecure-reproducible-noise": True, "arithmetic": "grid"}
    for name in "ab":
        summary = execute(private(**changes), tmp_path / name)
        assert not summary["privacy"]["certified"]
    for name, how in (("c", "continuous"), ("d", "auto")):
        execute(private(**changes | {"arithmetic": how}), tmp_path / name)
    assert model(tmp_path / "a") == model(tmp_path / "b") != model(tmp_path / "c")
    assert model(tmp_path / "c") == model(tmp_path / "d")  # of old, to the same bytes
    for how in ("grid", "continuous"):  # without noise a lattice changes nothing
        execute(private(**changes | {"noise": 0.0, "arithmetic": how}), tmp_path / f"0-{how}")
    assert model(tmp_path / "0-grid") == model(tmp_path / "0-continuous")


def test_a_statistical_generator_is_not_certified(tmp_path: Path) -> None:
    summary = execute(private(noise=1.0, **{"noise-source": "pcg64"}), tmp_path)
    told = spending.spent(tmp_path)
    for found in (summary["privacy"], told):
        assert not found["certified"] and "not a cryptographic generator" in found["note"]
    assert told["epsilon"] == summary["privacy"]["epsilon"] > 0


@pytest.mark.parametrize("source, certified", [("secure", True), ("pcg64", False)])
@pytest.mark.parametrize("clipping", ["block", "automatic-flat"])
def test_a_loop_of_ones_own_on_a_lattice(source: str, certified: bool, clipping: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    inputs, labels = torch.randn(50, 6), torch.randint(0, 3, (50,))
    privacy = {"noise": 1.0, "lot": 20.0, "noise-source": source, "arithmetic": "grid",
               "clipping": clipping}  # fmt: skip
    loop = Private(network, recipe="dp-muonbc", population=50, privacy=privacy)
    for lot in loop.lots(steps=3):
        loop.step(lot, inputs[lot.rows], labels[lot.rows])
    assert all(bool(one.isfinite().all()) for one in network.parameters())
    assert loop.epsilon(1e-5).certified == certified
