"""Influence: scores against gradients by automatic differentiation, choices against all pairs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small

from fedmuon.data.neighbours import held_out
from fedmuon.experiments.laboratory.influence import farthest, gradient_distances, worst
from fedmuon.experiments.laboratory.measure import Laboratory
from fedmuon.experiments.laboratory.stability import execute
from fedmuon.experiments.run import execute as run
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask

DOUBLE = {"engine": {"dtype": "float64"}}


def gradient(weight: torch.Tensor, sample: torch.Tensor, label: int) -> torch.Tensor:
    """The gradient of 1 - p_y by automatic differentiation."""
    at = weight.clone().requires_grad_()
    (1 - torch.softmax(at.T @ sample, 0)[label]).backward()
    assert at.grad is not None
    return at.grad


def test_gradient_distances() -> None:
    rng = torch.Generator().manual_seed(0)
    task = MatrixTask(6, 3, torch.float64)
    weight = torch.randn(2, 6, 3, generator=rng, dtype=torch.float64)
    own, there = (
        Batch(torch.randn(n, 6, generator=rng, dtype=torch.float64), torch.arange(n) % 3)
        for n in (4, 5)
    )
    params = {"weight": weight}
    found = gradient_distances(task.slopes(params, own), own, task.slopes(params, there), there)
    for s, z, other in np.ndindex(2, 4, 5):
        one = gradient(weight[s], own.inputs[z], int(own.labels[z]))
        two = gradient(weight[s], there.inputs[other], int(there.labels[other]))
        assert float(found[s, z, other]) == pytest.approx(float((one - two).norm()), rel=1e-9)


@pytest.fixture
def laboratory(tmp_path: Path) -> Laboratory:
    run(small(stability={"trials": 4}, **DOUBLE), tmp_path / "a")
    return Laboratory.open(tmp_path / "a")


def test_the_highest_scores_are_chosen(laboratory: Laboratory) -> None:
    there, exposures = laboratory, np.array([1.0, 0.0, 3.0, 2.0])
    exposures = np.resize(exposures, len(there.data.sizes))
    scores = {}
    for client in np.flatnonzero(exposures):
        pool, far = farthest(there, int(client))
        assert set(pool) <= set(held_out(there.data, there.source, int(client)))
        weight = exposures[client] / there.data.sizes[client]
        for position in range(len(far)):
            score, choice = max(
                (float(f) * weight, int(p)) for f, p in zip(far[position], pool, strict=True)
            )
            scores[int(client), position, choice] = score
    best = sorted(scores, key=lambda key: -scores[key])[:4]
    chosen = worst(there, exposures)
    assert [tuple(row) for row in chosen.tolist()] == best
    assert not (exposures[chosen[:, 0]] == 0).any()


def test_held_out_is_all_that_a_draw_can_give(laboratory: Laboratory) -> None:
    from fedmuon.data.neighbours import draw

    drawn = draw(laboratory.data, laboratory.source, 400, 9)
    for client in range(len(laboratory.data.sizes)):
        pool = set(held_out(laboratory.data, laboratory.source, client).tolist())
        given = set(drawn[drawn[:, 0] == client, 2].tolist())
        assert given <= pool
        assert not pool & set(laboratory.data.train_index.tolist())


def test_the_worst_hurt_more_than_random_ones(tmp_path: Path) -> None:
    moved = {}
    for neighbours in ("own", "worst"):
        execute(small(stability={"trials": 8, "neighbours": neighbours}, **DOUBLE),
                tmp_path / neighbours)  # fmt: skip
        moved[neighbours] = np.loadtxt(
            tmp_path / neighbours / "neighbours.csv", delimiter=",", skiprows=1, usecols=(4, 6)
        )
    assert moved["worst"][:, 0].min() > np.median(moved["own"][:, 0])
    assert moved["worst"][:, 0].max() > moved["own"][:, 0].max()
    assert (moved["worst"][:, 0] <= moved["worst"][:, 1]).all()
