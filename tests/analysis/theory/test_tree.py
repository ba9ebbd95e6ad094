"""A tree of aggregators, simulated: its mean, its bytes, its bits."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from fedmuon.analysis.theory.system_costs import (
    UNIT,
    additions,
    exact_bits,
    levels,
    message,
    rounding,
    seconds,
    sizes,
)
from fedmuon.core.errors import InputError

ENTRIES = 3


def federation(clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples [K] and models [K, p] in float32."""
    rng = np.random.default_rng(clients)
    counts = rng.integers(1, 1000, clients)
    return counts, rng.standard_normal((clients, ENTRIES)).astype(np.float32)


def through(counts: np.ndarray, models: np.ndarray, fan_out: int) -> tuple[np.ndarray, list[int]]:
    """The tree's mean, every message written and read; bytes that went up, level by level."""
    sent = [
        int(n).to_bytes(8, "little") + one.tobytes() for n, one in zip(counts, models, strict=True)
    ]
    dtype, crossed = np.dtype(np.float32), []
    while dtype == np.float32 or len(sent) > 1:
        crossed.append(sum(map(len, sent)))
        groups = [sent[start : start + fan_out] for start in range(0, len(sent), fan_out)]
        sent, dtype = [together(group, dtype) for group in groups], np.dtype(np.float64)
    return np.frombuffer(sent[0][8:]) / int.from_bytes(sent[0][:8], "little"), crossed


def together(group: list[bytes], dtype: np.dtype) -> bytes:
    """One aggregator: the count and the sum, one child after the other."""
    held = np.frombuffer(b"".join(group), np.dtype([("n", "<i8"), ("x", dtype, ENTRIES)]))
    sums = held["x"].astype(float)
    if dtype == np.float32:
        sums *= held["n"][:, None]
    return int(held["n"].sum()).to_bytes(8, "little") + np.add.accumulate(sums)[-1].tobytes()


@pytest.mark.parametrize(
    ("clients", "fan_out"),
    [(1, 2), (1000, 2), (1000, 10), (12345, 100), (100_000, 32), (10**6, 1000)],
)
def test_the_tree_has_the_flat_mean_and_the_bytes_of_the_formula(
    clients: int, fan_out: int
) -> None:
    counts, models = federation(clients)
    found, crossed = through(counts, models, fan_out)
    products = counts[:, None] * models.astype(float)  # exact: 24 + 10 bits
    exact = [math.fsum(column) for column in products.T]
    most = (rounding(additions(clients, fan_out)) + UNIT) * np.abs(products).sum(0)
    error = np.abs(found * counts.sum() - exact)
    assert (error <= most + UNIT * np.abs(exact)).all()
    of = message(ENTRIES)
    assert [one.up for one in levels(clients, fan_out, of)] == crossed
    wrong = found + 2 * most / counts.sum() + 1e-15
    assert (np.abs(wrong * counts.sum() - exact) > most).all()  # the bound tells errors of its size


@pytest.mark.parametrize("clients", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_on_a_coarse_grid_every_tree_gives_the_same_bits(clients: int) -> None:
    counts, models = federation(clients)
    bits = min(20, exact_bits(int(counts.sum()), 8.0))
    grid = (np.round(models * 2.0**bits) / 2.0**bits).astype(np.float32)
    means = [through(counts, grid, fan_out)[0] for fan_out in (2, 7, 32, clients)]
    total = [sum(Fraction(float(x)) * int(n) for x, n in zip(column, counts, strict=True))
             for column in grid.T]  # fmt: skip
    assert all((one == means[0]).all() for one in means)
    assert [float(value / int(counts.sum())) for value in total] == means[0].tolist()
    fine = (models * np.exp(models[::-1] * 6)).astype(np.float32)  # of many magnitudes
    other = [through(counts, fine, fan_out)[0] for fan_out in (2, 7, 32, clients)]
    assert not all((one == other[0]).all() for one in other)  # off the grid they differ


def test_the_bits_are_as_many_as_there_are() -> None:
    assert exact_bits(1, 1.0) == 53 and exact_bits(1024, 1.0) == 43 and exact_bits(1025, 1.0) == 42
    large = 2.0**53
    assert large + 1.0 == large  # a bit more would be lost


def test_depth_and_bytes_of_a_billion() -> None:
    assert sizes(10**9, 1000) == [10**9, 10**6, 1000, 1]
    assert sizes(1, 10) == [1, 1] and sizes(1001, 1000) == [1001, 2, 1]
    found = levels(10**9, 1000, message(7840))
    assert [one.most for one in found] == [1000 * (4 * 7840 + 8), *[1000 * (8 * 7840 + 8)] * 2]
    assert found[0].down == 10**9 * 4 * 7840 and sum(one.aggregators for one in found) == 1001001
    assert additions(10**9, 1000) == 2997 and rounding(2997) < 3.4e-13
    assert rounding(10**9 - 1) > 1e-7  # one after the other
    one = seconds(levels(1000, 1000, message(7840)), 1e9, 0.0)
    assert seconds(found, 1e9, 0.0) == pytest.approx(one + 2 * 1000 * (12 * 7840 + 8) / 1e9)


@pytest.mark.parametrize(("clients", "fan_out"), [(0, 2), (10, 1)])
def test_no_tree_is_refused(clients: int, fan_out: int) -> None:
    with pytest.raises(InputError, match="give 1 or more and 2 or more"):
        sizes(clients, fan_out)
    with pytest.raises(InputError, match="use a tree"):
        rounding(2**53)


def documented() -> list[str]:
    """The rows of the table in docs/scale.md: FedMuon's 784 x 10 matrix and its momentum, 100
    children, 1 GB/s and 1 ms; 100 samples a client and entries of at most 1."""
    of, rows = message(7840, sent=2, returned=2), []
    for exponent in range(3, 10):
        clients = 10**exponent
        found, h = levels(clients, 100, of), additions(clients, 100)
        cells = (
            f"10^{exponent}",
            str(len(found)),
            f"{sum(one.aggregators for one in found):,}",
            f"{sum(one.down for one in found) / 1e9:,.4g}",
            f"{found[0].up / 1e9:,.4g}",
            f"{sum(one.up for one in found[1:]) / 1e9:,.4g}",
            f"{max(one.most for one in found) / 1e6:.3g}",
            f"{seconds(found, 1e9, 1e-3):.3f}",
            f"{h} / {clients - 1:,}",
            f"{rounding(h):.1e} / {rounding(clients - 1):.1e}",
            str(exact_bits(100 * clients, 1.0)),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_the_documented_table_is_that_of_the_formulas() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "scale.md").read_text("utf-8")
    assert all(row in text for row in documented())
