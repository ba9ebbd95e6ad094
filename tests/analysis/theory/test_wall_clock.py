"""004's Lemma 11: its counts against counted products, its floor by drawn machines; the tables."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedmuon.analysis.theory.system_costs import horner_flops, least_efficiency, speedup, svd_flops
from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies import wall_clock as study
from fedmuon.experiments.studies.wall_clock import claims, slowdown
from fedmuon.optim.flops import newton_schulz_flops
from fedmuon.orthogonalize import newton_schulz, schedule


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
        assert claims(rows, times(**{wide: 5.0}))[place].verdict == "undecided"  # of noisy times
    assert claims(rows, times(to_svd=math.nan))[1].verdict == "not testable at this scale"
    assert claims({**rows, "q2": rows["q2"] * 9}, times())[3].holds is False
    assert claims({**rows, "svd": rows["q3"] * 1.001}, times())[8].holds is False
    bent = {**rows, "svd": rows["svd"] + 1e-4 * (rows["seconds"] == 1200)}
    assert claims(bent, times())[-1].holds


def test_the_slowdown_is_read_off_the_line_between_two_seconds() -> None:
    table = {"seconds": np.array([10.0, 20.0, 30.0]), "q3": np.array([4.0, 2.0, 1.0]),
             "svd": np.array([9.0, 8.0, 2.5])}  # fmt: skip
    assert slowdown(table) == (30 / 17.5, False)
    assert slowdown({**table, "svd": np.full(3, 5.0)}) == (3.0, True)
