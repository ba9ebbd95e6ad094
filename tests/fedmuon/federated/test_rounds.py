"""Orthogonalizers in rounds, replicas, draws, and the stability certificate."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from compared import problem_of
from conftest import draw_neighbours, neighbour, small
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.methods import fedmuon
from reference.rounds import run

from fedmuon import orthogonalize as maps
from fedmuon.analysis import amplification, exposure, full_batch_sensitivity
from fedmuon.config.load import Config
from fedmuon.core.errors import NonFinite
from fedmuon.federated.build import build_experiment, build_plan
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import risk
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import begin, run_rounds, simulate
from fedmuon.optim.stage import ServerState
from fedmuon.tasks.base import Batch
from fedmuon.tasks.constants import constants


def weights(config: Config, data=None, **given) -> torch.Tensor:
    """The last weights [S, d, C]."""
    return trained(config, data, **given).params["weight"]


def trained(config: Config, data=None, **given) -> ServerState:
    experiment = build_experiment(config, data, **given)
    neighbours, lr = given.get("neighbours"), given.get("lr")
    stack = len(neighbours.client) if neighbours else len(lr) if lr is not None else 1
    recipe, task = experiment.recipe, experiment.task
    return simulate(experiment, begin(recipe, task, config.federation.seed, stack))


@pytest.mark.parametrize(
    "name",
    ["smoothed-polar", "newton-schulz", "clipped-sign", "exact-sign", "gaussian-smoothed-sign"],
)
def test_each_orthogonalizer_equals_the_reference(name: str) -> None:
    config = small(orthogonalizer={"name": name})
    X = run(problem_of(config), fedmuon(config.local.lr)).server["model"]["weight"]
    np.testing.assert_allclose(weights(config)[0].numpy(), X, rtol=1e-8, atol=1e-10)
    other = small(orthogonalizer={"name": name}, local={"momentum": 0.8})
    assert not np.allclose(weights(other)[0].numpy(), X, rtol=1e-6)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), batch=st.sampled_from([0, 4]), steps=st.integers(1, 2))
def test_a_stack_of_neighbours_is_a_loop_over_data_sets(seed: int, batch: int, steps: int) -> None:
    config = small(federation={"seed": seed}, local={"batch": batch, "steps": steps})
    source = read_source(config)
    data = build_data(config, source)
    neighbours = draw_neighbours(data, source, 3, seed, config.data.normalize)
    together = weights(config, data, neighbours=neighbours)
    for s in range(len(neighbours.client)):
        alone = weights(config, neighbour(data, neighbours, s))[0]
        torch.testing.assert_close(together[s], alone, rtol=1e-11, atol=1e-14)


def test_a_grid_is_a_loop_over_configs() -> None:
    lr, lam = torch.tensor([0.01, 0.05, 0.2]), torch.tensor([0.1, 0.01, 0.001])
    config = small(local={"recipe": "fedmuon-aligned"})
    grid = weights(config, lr=lr.double(), regularization=lam.double())
    for s in range(3):
        local = {"recipe": "fedmuon-aligned", "lr": float(lr.double()[s])}
        one = small(local=local, orthogonalizer={"lambda": float(lam.double()[s])})
        torch.testing.assert_close(grid[s], weights(one)[0], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["smoothed-polar", "newton-schulz", "clipped-sign"])
@pytest.mark.parametrize("steps", [1, 3])
def test_no_neighbour_beats_its_certificate(name: str, steps: int) -> None:
    """||X^R - X'^R||_F <= Delta_i Y_i(C), pathwise, for every neighbour tried."""
    table = {"lambda": 0.05, "eps": 0.1, "clip-level": 0.2}
    config = small({"orthogonalizer": table}, orthogonalizer={"name": name}, local={"steps": steps})
    source = read_source(config)
    data = build_data(config, source)
    neighbours = draw_neighbours(data, source, 40, 1, config.data.normalize)
    weight = weights(config, data, neighbours=neighbours)
    measured = (weight - weight[0]).flatten(1).norm(dim=1).numpy()[1:]
    l_orth = maps.lipschitz(name, "sharp", **parameters(name, config))
    plan, proved = build_plan(config), constants()
    a = amplification(config.local.lr, config.local.momentum, l_orth, proved.smoothness, 8, steps)
    exposures = exposure(a, plan.schedule(), plan.clients)
    certificate = full_batch_sensitivity(proved.gradient_bound, data.sizes) * exposures
    client = neighbours.client[1:]
    assert (measured <= certificate[client]).all()
    assert measured.max() > 0
    assert (measured[exposures[client] == 0] == 0).all()
    # Negative control: a certificate that forgets the client's participation is beaten.
    assert (measured > 1e-3 * certificate[client]).any()


def parameters(name: str, config: Config) -> dict:
    table = config.orthogonalizer
    return {
        "smoothed-polar": {"lam": table.lambda_},
        "newton-schulz": {name: getattr(table, name) for name in ("steps", "coefficients", "eps")},
        "clipped-sign": {"gamma": table.clip_level},
    }[name]


def test_draws_depend_on_their_key_alone() -> None:
    plan = RandomnessPlan(seed=7, clients=50, per_round=10, rounds=6, batch=3)
    backwards = [plan.participants(r) for r in reversed(range(6))][::-1]
    assert (np.stack(backwards) == plan.schedule()).all()
    assert (plan.rows(2, 5, 1, 20) == plan.rows(2, 5, 1, 20)).all()
    assert not (plan.rows(2, 5, 1, 20) == plan.rows(2, 5, 2, 20)).all()
    assert len({tuple(row) for row in plan.schedule()}) == 6
    assert all(len(set(row)) == 10 for row in plan.schedule().tolist())


def test_participation_is_uniform() -> None:
    plan = RandomnessPlan(seed=0, clients=8, per_round=3, rounds=4000)
    counts = np.bincount(plan.schedule().ravel(), minlength=8)
    deviation = math.sqrt(4000 * (3 / 8) * (5 / 8))
    assert (abs(counts - 1500) < 5 * deviation).all()


def test_a_million_clients_cost_only_their_index() -> None:
    plan = RandomnessPlan(seed=0, clients=1_000_000, per_round=10, rounds=3)
    assert plan.schedule().shape == (3, 10)


@pytest.mark.parametrize("rows", range(49, 61))
def test_a_count_divided_by_a_count_has_no_noise(rows: int) -> None:
    """Of samples that are all classified, 1; weighted by 1 / n, sums of them often miss it."""

    class Sure:
        thread_safe = keyed = False

        def losses(self, params: dict, batch: Batch) -> tuple[torch.Tensor, dict]:
            return (ones := torch.ones(1, len(batch.labels))), {"accuracy": ones}

    inputs, labels = torch.zeros(rows, 2), torch.zeros(rows)
    plain = risk(cast(Any, Sure()), {"w": torch.zeros(1)}, inputs, labels)
    assert plain.scores["accuracy"] == plain.loss == 1.0
    weights = torch.full((rows,), 1 / rows, dtype=torch.float64)
    weighted = risk(cast(Any, Sure()), {"w": torch.zeros(1)}, inputs, labels, weights)
    assert weighted.loss == pytest.approx(1.0, rel=1e-12)


def test_a_loss_that_is_no_number_is_refused() -> None:
    experiment = build_experiment(small())
    experiment.shards.inputs[:] = math.nan
    state = begin(experiment.recipe, experiment.task, 0)
    with pytest.raises(NonFinite, match=r"clients .*, round 0"):
        next(run_rounds(experiment, state))
