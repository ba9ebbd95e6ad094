"""Study `bias`: its runs against loops in NumPy, its set of stalls, and claims that can fail."""

from typing import Any

import numpy as np
import pytest
import torch
from study_rows import rows_of, verdicts

from fedmuon.experiments.studies import bias
from fedmuon.optim.orthogonalizers import newton_schulz

SIDES, CURVATURES, MEMORY, STEPS, ROUNDS = (3.0, 1.0), (3.0, 1.0), 0.8, 3, 7
LRS = [0.02, 0.1]


def settings(**given: Any) -> bias.Settings:
    return bias.Settings(**{
        "iterations": [2], "coefficients": "quintic", "lrs": LRS, "rounds": ROUNDS, "steps": STEPS,
        "memory": MEMORY, "curvatures": [*CURVATURES], "sides": [*SIDES], "spread": 2.0, "seeds": 3,
        "drawn": 4, **given,
    })  # fmt: skip


def polynomial(m: np.ndarray) -> np.ndarray:
    """Two steps of 15/8 x - 10/8 x^3 + 3/8 x^5, on the singular values."""
    u, s, v = np.linalg.svd(m, full_matrices=False)
    s = s / (np.linalg.norm(s) + 1e-7)
    for _ in range(2):
        s = (15 * s - 10 * s**3 + 3 * s**5) / 8
    return (u * s) @ v


def naive(x: np.ndarray, lr: float, method: str, steps: int) -> float:
    """The distance to the optimum after all rounds."""
    centre = np.diag(SIDES)
    M, C = ([np.zeros((2, 2)) for _ in range(2)] for _ in range(2))
    shared = np.zeros((2, 2))
    for _ in range(ROUNDS):
        ends = []
        for i, (h, sign) in enumerate(zip(CURVATURES, (1, -1), strict=True)):
            y, own = x.copy(), M[i]
            if method == bias.LOCAL:
                own = np.zeros((2, 2))
            for _ in range(steps):
                own = MEMORY * own + (1 - MEMORY) * h * (y - sign * centre)
                away = 0 if method == bias.LOCAL else shared - C[i]
                y = y - lr * polynomial(own + away)
            M[i] = own
            ends.append(y)
        x, shared, C = np.mean(ends, 0), shared + np.mean(M, 0) - np.mean(C, 0), [*M]
    return float(np.linalg.norm(x - centre / 2))


@pytest.mark.parametrize("method", bias.METHODS)
def test_a_cell_is_its_methods_loop(method: str) -> None:
    rows = bias.measure(settings(), method, "q = 2", newton_schulz(2, "quintic"))["rows"]
    begin = bias.starting_points(settings()).numpy()
    steps = 1 if method == bias.EVERY_STEP else STEPS
    for row in rows:
        expected = naive(begin[row["seed"]], row["lr"], method, steps)
        assert row["distance"] == pytest.approx(expected, rel=1e-9)
        assert naive(begin[row["seed"]], 1.1 * row["lr"], method, steps) != pytest.approx(
            expected, rel=1e-4
        )
    assert len(rows) == 6 and [row["lr"] for row in rows[::3]] == LRS


@pytest.mark.parametrize("share", [-0.9, 0.0, 0.3])
def test_local_muon_stays_on_the_way_between_the_clients(share: float) -> None:
    """There both steps cancel, although the mean gradient is not 0; the optimum is D / 2."""
    task = bias.two_clients(settings())
    at = share * task.centres[0]
    slopes = task.gradient({"X": at.expand(2, -1, -1)}, [0, 1])[1]["X"]
    apply = newton_schulz(3, "quintic").apply
    assert float(apply(slopes).sum(0).abs().max()) < 1e-6
    assert float(slopes.sum(0).norm()) > 0.1
    aside = at + torch.tensor([[0.0, 0.2], [0.0, 0.0]])
    beside = task.gradient({"X": aside.expand(2, -1, -1)}, [0, 1])[1]["X"]
    assert float(apply(beside).sum(0).abs().max()) > 1e-3  # a little aside of it, it moves
    assert torch.allclose(task.optimum(), task.centres[0] / 2)


def test_rounds_until_near_are_counted() -> None:
    given = settings(rounds=60, lrs=[0.001, 0.1], steps=4)
    record = bias.measure(given, bias.CORRECTED, "q = 2", newton_schulz(2, "quintic"))
    slow, fast = ([row["near"] for row in record["rows"] if row["lr"] == lr] for lr in given.lrs)
    assert slow == [61] * 3 and all(1 < one < 40 for one in fast)
    assert [row["round"] for row in record["means"]][:4] == [0, 20, 40, 60]


def ended(local: float = 0.5, flat: float = 0.0, falls: float = 1.0, near: float = 1.0) -> Any:
    """Distances of Local Muon like lr^flat and of the corrected method like lr^falls."""

    def value(method: str, map: str, lr: float, seed: int) -> dict[str, Any]:
        size = local * (lr / 0.01) ** flat if method == bias.LOCAL else 0.01 * (lr / 0.01) ** falls
        rounds = {bias.EVERY_STEP: 400.0, bias.CORRECTED: 100.0, bias.LOCAL: 1001.0}[method]
        rounds *= near if map != bias.EXACT and method == bias.CORRECTED else 1
        scale = 1 + 0.01 * (seed - 1)
        return {"distance": 4 * size * scale, "start": 4 * scale, "near": rounds + seed}

    return rows_of(value, method=bias.METHODS, map=("q = 1", bias.EXACT), lr=(0.01, 0.02, 0.04),
                   seed=(0, 1, 2))  # fmt: skip


@pytest.mark.parametrize(("rows", "wrong"), [
    (ended(), ()), (ended(local=0.05), (0, 4)), (ended(flat=0.3), (1,)),
    (ended(falls=0.5), (3,)), (ended(near=5.0), (5, 6)), (ended(near=1.2), (6,)),
])  # fmt: skip
def test_claims_hold_and_fail(rows: Any, wrong: tuple[int, ...]) -> None:
    assert verdicts(bias.claims(rows, {})) == [k not in wrong for k in range(7)]
