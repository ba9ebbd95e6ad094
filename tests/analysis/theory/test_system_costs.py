"""A tree of aggregators, simulated: its mean, its bytes, its bits."""

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick
from torch.utils.flop_counter import FlopCounterMode

from fedmuon.analysis.theory.system_costs import (
    UNIT,
    additions,
    exact_bits,
    horner_flops,
    least_efficiency,
    levels,
    message,
    rounding,
    seconds,
    sizes,
    speedup,
    svd_flops,
)
from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies import wall_clock as study
from fedmuon.experiments.studies.wall_clock import claims, slowdown
from fedmuon.optim.flops import newton_schulz_flops
from fedmuon.orthogonalize import newton_schulz, schedule

ENTRIES = 3


def federation(clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples [K] and models [K, p] in float32."""
    rng = np.random.default_rng(clients)
    counts = rng.integers(1, 1000, clients)
    return counts, rng.standard_normal((clients, ENTRIES)).astype(np.float32)


def through(counts: np.ndarray, models: np.ndarray, fan_out: int) -> tuple[np.ndarray, list[int]]:
    """The tree's mean, every message written and read; bytes that went up, level by level."""
    sent = [int(n).to_bytes(8, "little") + one.tobytes()
            for n, one in zip(counts, models, strict=True)]  # fmt: skip
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


TREES = [(1, 2), (1000, 2), (1000, 10), (12345, 100), (100_000, 32), (10**6, 1000)]


@pytest.mark.parametrize(("clients", "fan_out"), quick(TREES, TREES[:4]))
def test_the_tree_has_the_flat_mean_and_the_formula_s_bytes(clients: int, fan_out: int) -> None:
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


def test_no_tree_is_refused() -> None:
    for clients, fan_out in ((0, 2), (10, 1)):
        with pytest.raises(InputError, match=r"(clients|fan_out) is .*, but it must be at least"):
            sizes(clients, fan_out)
    with pytest.raises(InputError, match="Use a tree"):
        rounding(2**53)


def documented() -> list[str]:
    """The rows of the table in docs/scale.md: FedMuon's 784 x 10 matrix and its momentum, 100
    children, 1 GB/s and 1 ms; 100 samples a client and entries of at most 1."""
    of, rows = message(7840, sent=2, returned=2), []
    for exponent in range(3, 10):
        clients = 10**exponent
        found, h = levels(clients, 100, of), additions(clients, 100)
        cells = (
            f"10^{exponent}", str(len(found)), f"{sum(one.aggregators for one in found):,}",
            f"{sum(one.down for one in found) / 1e9:,.4g}", f"{found[0].up / 1e9:,.4g}",
            f"{sum(one.up for one in found[1:]) / 1e9:,.4g}",
            f"{max(one.most for one in found) / 1e6:.3g}", f"{seconds(found, 1e9, 1e-3):.3f}",
            f"{h} / {clients - 1:,}", f"{rounding(h):.1e} / {rounding(clients - 1):.1e}",
            str(exact_bits(100 * clients, 1.0)),
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_the_documented_table_is_that_of_the_formulas() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "scale.md").read_text("utf-8")
    assert all(row in text for row in documented())
    assert [exact_bits(samples, 1.0) for samples in (1, 1024, 1025)] == [53, 43, 42]


# 004's Lemma 11: its counts against counted products, its floor by drawn machines; the tables.


def horner(z: torch.Tensor, steps: int, degree: int) -> torch.Tensor:
    """Newton-Schulz by Horner's rule on Z itself: one Gram product and `degree` products a step."""
    for step in schedule(f"taylor-{degree}", steps):
        gram, out = z @ z.mT, step[degree] * z
        for k in range(degree - 1, -1, -1):
            out = gram @ out + step[k] * z
        z = out
    return z


@pytest.mark.parametrize(("m", "n"), [(4, 4), (3, 10)])
@pytest.mark.parametrize(("steps", "degree"), [(1, 1), (3, 2), (2, 4)])
def test_horners_count_is_that_of_its_products(m: int, n: int, steps: int, degree: int) -> None:
    matrix = torch.randn(m, n, dtype=torch.float64) / (m * n)
    with FlopCounterMode(display=False) as counter:
        found = horner(matrix, steps, degree)
    assert counter.get_total_flops() == horner_flops(m, n, steps, degree)
    assert horner_flops(n, m, steps, degree) == horner_flops(m, n, steps, degree)
    unit = newton_schulz(matrix, steps, f"taylor-{degree}", normalization="unit")
    torch.testing.assert_close(found, unit, rtol=1e-9, atol=1e-12)
    powers = newton_schulz_flops(m, n, schedule(f"taylor-{degree}", steps))  # 002's, never more
    assert horner_flops(m, n, steps, degree) - powers == 2 * steps * (degree - 1) * m * m * (n - m)


def test_the_ratio_is_the_lemmas() -> None:
    for m, n in ((64, 64), (64, 640)):
        wanted = (8 + 4 * m / n) / (3 * 3) * 5.0
        assert speedup(m, n, 3, 2, 5.0) == pytest.approx(wanted)
        assert speedup(n, m, 3, 2, 5.0) == pytest.approx(wanted)
        with FlopCounterMode(display=False) as counter:  # U V^T, the one product of the SVD's part
            _ = torch.zeros(m, m) @ torch.zeros(m, n)
        assert svd_flops(m, n) == 14 * n * m**2 + 8 * m**3 + counter.get_total_flops()


def test_the_floor_holds_for_any_machine_and_rest_of_a_step() -> None:
    rng, met = np.random.default_rng(0), 0.0
    for _ in range(2000):
        m, steps, degree = (int(rng.integers(1, top)) for top in (50, 9, 5))
        n, efficiency = m + int(rng.integers(0, 3) * rng.integers(50)), rng.uniform(0.5, 100)
        own = horner_flops(m, n, steps, degree)
        svd, rest = svd_flops(m, n) * efficiency, own * rng.integers(3) * rng.random()
        slow = (svd + rest) / (own + rest)
        if slow > 1:
            share = least_efficiency(slow, steps, degree) / efficiency
            assert share <= 1 + 1e-12
            met = max(met, share)
    assert met == pytest.approx(1)  # square layers and nothing else in a step
    assert least_efficiency(2.0, 3, 3) > 1.3 * least_efficiency(2.0, 3, 2)  # a degree too many
    with pytest.raises(InputError, match="degree"):
        horner_flops(2, 2, 1, 0)


def test_times_are_taken_in_turn_and_leave_the_first_round_out() -> None:
    calls: list[int] = []
    found = study.in_turn([lambda: calls.append(1), lambda: calls.append(2)], 3)
    assert calls == [1, 2] * 4 and found.shape == (3, 2) and (found >= 0).all()


def test_quotients_of_times_have_the_interval_of_their_rounds(monkeypatch: Any) -> None:
    """Against the formula: a machine that is slow in one round is so for all calls of it."""
    rounds = np.array([[6.0, 1.0, 2.0], [60.0, 10.0, 21.0], [6.0, 1.0, 1.9]])
    monkeypatch.setattr(study, "in_turn", lambda calls, repeats: rounds)
    settings = study.Settings.model_construct(shapes=[], iterations=[2], repeats=3, tables={})
    (row,) = study.measure(settings, (8, 16))["times"]
    logs = np.log(rounds[:, 0] / rounds[:, 2])
    half = 4.302652729911275 * logs.std(ddof=1) / math.sqrt(3)  # t of 2 degrees of freedom
    assert row["svd_seconds"] / row["seconds"] == pytest.approx(math.exp(logs.mean()))
    assert row["to_svd"] == pytest.approx(math.exp(half)) and row["to_svd"] < 1.3


def test_what_a_printed_table_is_refused_for() -> None:
    good: dict[str, Any] = {name: [2.0, 1.0] for name in ("seconds", *study.METHODS)}
    study.Printed(**good)
    with pytest.raises(ValueError, match="one loss of each method"):
        study.Printed(**{**good, "q2": [1.0]})


def published() -> Any:
    """The rows of all printed tables."""
    found = kinds.find("wall-clock", None, "full", {})
    calls = itertools.islice(found.cells, 6)
    rows = [row for one in calls for row in one.compute()["rows"]]  # type: ignore[attr-defined]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def times(**change: float) -> Any:
    """Of made-up machines on which the lemma is exact."""
    held: dict[str, Any] = {"m": 8, "n": 8, "svd_seconds": 6.0, "efficiency": 4.0, "lemma": 3.0,
                            "made": 3.0, "seconds": 2.0, "to_svd": 1.01,
                            "to_product": 1.01} | change  # fmt: skip
    return {name: np.full(3, float(value)) for name, value in held.items()} | {
        "steps": np.array([1.0, 3.0, 5.0])
    }


def test_claims_of_the_printed_tables_and_of_made_up_times() -> None:
    rows = published()
    assert len(rows["table"]) == 33
    # G.1 at 100 s, and SVD of G.6, which falls by 0.147 each time, are what 004 prints.
    held = [True, True, False, True, True, True, True, True, True, False]
    found = claims(rows, times())
    assert [one.holds for one in found] == held
    assert "not at 100 s" in found[2].detail and "G.6 svd" in found[-1].detail
    assert claims(rows, times(made=13.0))[0].holds is False
    assert claims(rows, times(seconds=7.0))[1].holds is False
    for wide, place in (("to_product", 0), ("to_svd", 1)):
        assert claims(rows, times(**{wide: 5.0}))[place].verdict == "inconclusive"  # of noisy times
    assert claims(rows, times(to_svd=math.nan))[1].verdict == "not tested here"
    assert claims({**rows, "q2": rows["q2"] * 9}, times())[3].holds is False
    assert claims({**rows, "svd": rows["q3"] * 1.001}, times())[8].holds is False
    bent = {**rows, "svd": rows["svd"] + 1e-4 * (rows["seconds"] == 1200)}
    assert claims(bent, times())[-1].holds


def test_the_slowdown_uses_published_times_only() -> None:
    """Between 10 and 20 s a straight line would say 17.5 s, which the paper does not publish."""
    table = {"seconds": np.array([10.0, 20.0, 30.0]), "q3": np.array([4.0, 2.0, 1.0]),
             "svd": np.array([9.0, 8.0, 2.5])}  # fmt: skip
    assert slowdown(table) == 30 / 20
    assert slowdown({**table, "svd": np.full(3, 5.0)}) == 3.0
    assert slowdown({**table, "svd": np.full(3, 0.5)}) == 0.0  # q = 3 never gets there


def test_svd_takes_two_and_a_half_times_as_long_in_the_published_tables() -> None:
    """By hand from Tables G.1 to G.6: the first time at which q = 3 has the last loss of SVD."""
    rows = published()
    by_hand = {"G.1": 250 / 50, "G.2": 60 / 20, "G.3": 500 / 200, "G.4": 2000 / 800,
               "G.5": 600 / 100, "G.6": 3600 / 600}  # fmt: skip
    found = {}
    for name in dict.fromkeys(rows["table"]):
        found[name.split()[0]] = slowdown(
            {key: column[rows["table"] == name] for key, column in rows.items()}
        )
    assert found == by_hand and min(found.values()) == 2.5
