"""Influence: predictions against exact runs of the pairs, choices against all of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick, small
from torch import nn

import fedmuon
from fedmuon.analysis.report.claims import spearman
from fedmuon.core.errors import InputError
from fedmuon.data.neighbours import draw, held_out
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import influence, neighbours
from fedmuon.experiments.stability.finished_run import FinishedRun, read_census
from fedmuon.experiments.stability.influence import RANKING, gradient_distances
from fedmuon.experiments.stability.neighbours import execute, perturbations
from fedmuon.federated.rounds import run_rounds
from fedmuon.optim.chain import Chain
from fedmuon.optim.links import map_matrices
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


def opened(folder: Path, **tables: dict) -> FinishedRun:
    run(small(stability={"trials": 4}, **DOUBLE, **tables), folder)
    return FinishedRun.open(folder)


@pytest.fixture
def laboratory(tmp_path: Path) -> FinishedRun:
    return opened(tmp_path / "a")


def moved_by(there: FinishedRun) -> dict[tuple[int, int, int], float]:
    """What is predicted of every pair (client, position, replacement)."""
    return {
        (client, z, int(index[p])): float(moved[z, p])
        for client, index, moved in influence.predictions(there)
        for z, p in np.ndindex(*moved.shape)
    }


CASES = [{}, {"local": {"batch": 4, "steps": 2}}, {"orthogonalizer": {"lambda": 1e-3}}]


@pytest.mark.parametrize("tables", quick(CASES, CASES[1:2]), ids=str)
def test_every_pair_is_ranked_as_exact_runs_rank_it(tables: dict, tmp_path: Path) -> None:
    there = opened(tmp_path / "a", **tables)
    predicted = moved_by(there)
    every = sum(
        there.data.sizes[i] * len(held_out(there.data, there.source, i))
        for i in np.unique(there.experiment.plan.schedule())
    )
    assert len(predicted) == every
    some = list(predicted)[:: len(predicted) // 200]
    exact = perturbations(there, np.array(some), run_rounds)
    found = np.array([predicted[pair] for pair in some])
    used = exact > 1e-12  # more than rounding
    assert spearman(found, exact) >= 0.99 and used.any() and (found[~used] == 0).all()
    assert np.abs(found[used] / exact[used] - 1).max() < 0.1
    assert spearman(found[::-1], exact) < 0.9  # negative control: of other pairs


def test_the_highest_predictions_are_run_and_as_many_drawn_ones(laboratory: FinishedRun) -> None:
    predicted, found = moved_by(laboratory), influence.rank_replacements(laboratory)
    assert (found.pairs, found.top, len(found.rows)) == (len(predicted), 4, 8)
    for row, number in zip(found.rows.tolist(), found.predicted, strict=True):
        assert predicted[row[0], row[1], row[2]] == number
    best = {}
    for (client, position, _), number in predicted.items():
        best[client, position] = max(number, best.get((client, position), 0.0))
    assert found.predicted[:4].tolist() == sorted(best.values(), reverse=True)[:4]


def test_norms_are_those_of_the_whole_derivative(
    laboratory: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all unit vectors V the numbers <V, D> are D itself."""

    def units(run: FinishedRun, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = params["weight"]
        return {"weight": torch.eye(weight.numel()).to(weight).view(-1, *weight.shape)}

    regressed = moved_by(laboratory)
    monkeypatch.setattr(influence, "_regressor", lambda *given: None)
    plain = moved_by(laboratory)
    monkeypatch.setattr(influence, "_directions", units)
    whole = {pair: number * 21**0.5 for pair, number in moved_by(laboratory).items()}
    errors = [
        max(abs(some[pair] / whole[pair] - 1) for pair in whole) for some in (regressed, plain)
    ]
    assert errors[0] < 0.01 and 0.05 < errors[1] < 0.5


@pytest.mark.parametrize("limit", [{"MEMORY": 1 << 23}, {"POOL": 7}])
def test_memory_is_bounded(
    limit: dict, laboratory: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of directions give the same numbers; fewer candidates are some of all."""
    whole = moved_by(laboratory)
    for name, value in limit.items():
        monkeypatch.setattr(influence, name, value)
    some = moved_by(laboratory)
    assert set(some) <= set(whole) and (len(some) < len(whole)) == ("POOL" in limit)
    for pair, number in some.items():
        assert number == pytest.approx(whole[pair], rel=1e-9)


def test_what_is_kept_of_candidates_is_bounded(
    laboratory: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two participants a pass have the same numbers, in the same order; and no pass keeps more."""
    whole, kept_by, slopes = list(moved_by(laboratory).items()), [], influence._slopes

    def counted(*given: Any) -> dict[int, influence.Slopes]:
        found = slopes(*given)
        kept_by.append(sum(8 * kept.numel() for one in found.values() for _, kept in one.others))
        return found

    monkeypatch.setattr(influence, "_slopes", counted)
    assert list(moved_by(laboratory).items()) == whole
    candidates = influence.Candidates.of(laboratory, laboratory.experiment)
    limit = 2 * 8 * influence.DIRECTIONS * len(candidates.index)
    assert kept_by.pop() > limit  # negative control: of all at once
    monkeypatch.setattr(influence, "KEPT", limit)
    some = list(moved_by(laboratory).items())
    assert len(kept_by) == -(-len(candidates.admitted) // 2) and max(kept_by) <= limit
    assert [pair for pair, _ in some] == [pair for pair, _ in whole]
    np.testing.assert_allclose([n for _, n in some], [n for _, n in whole], rtol=1e-12)


SKETCHED = {"name": "randomized-polar", "rank": 1, "oversample": 1}


@pytest.mark.parametrize(("said", "tables"), [
    ("exact-sign' jumps", {"orthogonalizer": {"name": "exact-sign"}}),
    ("randomized-polar' jumps", {"orthogonalizer": SKETCHED}),
    ("makes steps that have no derivative", {"local": {"recipe": "adamw"}}),
])  # fmt: skip
def test_what_has_no_derivative_is_refused(said: str, tables: dict, tmp_path: Path) -> None:
    there = opened(tmp_path / "a", **tables)
    with pytest.raises(InputError, match=f"{said}.*neighbours to 'own', 'any' or 'all'"):
        influence.rank_replacements(there)


def test_a_map_that_torch_cannot_follow_is_refused(tmp_path: Path) -> None:
    class Stuck(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
            return matrix.clone()

    there = opened(tmp_path / "a")
    map_of = map_matrices(lambda matrix, context, block: Stuck.apply(matrix))  # type: ignore
    recipe = there.experiment.recipe
    links = [map_of if link.name == "orthogonalize" else link for link in recipe.chain.links]
    recipe = replace(recipe, chain=Chain(tuple(links)))
    there = replace(there, experiment=replace(there.experiment, recipe=recipe))
    with pytest.raises(InputError, match="torch cannot differentiate this run"):
        influence.rank_replacements(there)


def test_held_out_is_all_that_a_draw_can_give(laboratory: FinishedRun) -> None:
    drawn = draw(laboratory.data, laboratory.source, 400, 9)
    for client in range(len(laboratory.data.sizes)):
        pool = held_out(laboratory.data, laboratory.source, client)
        assert np.isin(drawn[drawn[:, 0] == client, 2], pool).all()
        assert not np.isin(pool, laboratory.data.train_index).any()


def test_a_network_is_ranked_too_and_never_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(influence, "DIRECTIONS", 100)
    layers = nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.Tanh()
    config = small(task={"name": "network"}, local={"lr": 0.02}, federation={"rounds": 4}, **DOUBLE)
    net = nn.Sequential(*layers, nn.Linear(5, 3))
    found = fedmuon.stability(config, neighbours="worst", trials=6, task=net)
    told = found.bound["influence"]
    assert found.bound["status"] == "estimated" and told["compared"] == 12
    assert told["spearman"] > 0.9 and told["largest_error"] < 0.3
    assert told["largest"] >= told["largest_drawn"]


def test_predictions_stand_beside_exact_runs(tmp_path: Path) -> None:
    out = tmp_path / "a"
    record = execute(small(stability={"trials": 8, "neighbours": "worst"}, **DOUBLE), out)
    rows = np.loadtxt(out / "predicted.csv", delimiter=",", skiprows=1)
    moved = np.loadtxt(out / "neighbours.csv", delimiter=",", skiprows=1, usecols=4)
    found = record["influence"]
    assert np.array_equal(rows[:8, 4], moved) and len(rows) == found["compared"] == 16
    assert found["largest"] == moved.max() >= found["largest_drawn"] == rows[8:, 4].max()
    error = np.abs(rows[:, 3] / rows[:, 4] - 1).max()
    assert found["largest_error"] == pytest.approx(error, rel=1e-9) and error < 0.05
    assert found["spearman"] >= 0.95
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert execute(None, out, resume=True) == record
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    (out / "predicted.csv").write_text("damaged\n")
    with pytest.raises(InputError, match=r"predicted\.csv does not match"):
        execute(None, out, resume=True)


def test_the_worst_hurt_more_than_random_ones(tmp_path: Path) -> None:
    found = {}
    for drawn_by in ("own", "worst"):
        config = small(stability={"trials": 8, "neighbours": drawn_by}, **DOUBLE)
        execute(config, tmp_path / drawn_by)
        found[drawn_by] = read_census(tmp_path / drawn_by / "neighbours.csv", (4, 6)).T
    (random, _), (worst, promised) = found["own"], found["worst"]
    assert worst.min() > np.median(random) and worst.max() > random.max()
    assert (worst <= promised).all()


def test_a_ranking_is_shown_and_outlives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(stability={"trials": 4, "neighbours": "worst"}, **DOUBLE)
    whole = execute(config, tmp_path / "whole")
    seen: list[dict] = []
    totals: list[tuple[int, int]] = []

    def stopped(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(neighbours, "perturbations", stopped)
        execute(config, tmp_path / "a", False, seen.append, lambda *both: totals.append(both))
    passes = small().federation.rounds
    assert [one["done"] for one in seen] == list(range(1, passes + 1))
    assert totals == [(0, passes), (0, 4)] and seen[0]["ranking"]
    left = tmp_path / "a" / RANKING
    content = left.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(influence, "rank_replacements", stopped)
        for damage in (content[:-9] + "\n", content.replace("1", "2", 1)):  # negative control
            left.write_text(damage)
            with pytest.raises(KeyboardInterrupt):
                execute(None, tmp_path / "a", resume=True)
        left.write_text(content)
        assert execute(None, tmp_path / "a", resume=True) == whole
    assert not left.exists()
    for name in ("neighbours.csv", "predicted.csv", "bound.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
