"""The federated loop against a naive one, replica by replica; and the stability certificate."""

import itertools
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import draw_neighbours, neighbour, small
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmuon import orthogonalize as maps
from fedmuon.analysis import amplification, exposure, full_batch_sensitivity
from fedmuon.config.load import Config
from fedmuon.core.errors import NonFinite
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.build import build_experiment, build_plan
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import risk
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import begin, run_rounds, server_update, simulate
from fedmuon.optim.stage import Reply, ServerState
from fedmuon.tasks.base import Batch
from fedmuon.tasks.constants import constants

RECIPES = ["fedavg", "fedavgm", "local-muon", "fedmuon", "fedmuon-aligned"]


def weights(config: Config, data=None, **given) -> torch.Tensor:
    """The last weights [S, d, C]."""
    return trained(config, data, **given).params["weight"]


def trained(config: Config, data=None, **given) -> ServerState:
    experiment = build_experiment(config, data, **given)
    neighbours, lr = given.get("neighbours"), given.get("lr")
    stack = len(neighbours.client) if neighbours else len(lr) if lr is not None else 1
    recipe, task = experiment.recipe, experiment.task
    return simulate(experiment, begin(recipe, task, config.federation.seed, stack))


def gradient(X: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The mean gradient of 1 - p_y, one sample at a time."""
    total = np.zeros_like(X)
    for u, y in zip(inputs, labels, strict=True):
        p = np.exp(X.T @ u - np.max(X.T @ u))
        p /= p.sum()
        total += np.outer(u, p[y] * (p - np.eye(len(p))[y]))
    return total / len(labels)


def orth(M: np.ndarray, config: Config, round: int, client: int, step: int) -> np.ndarray:
    """The configured map by a dense SVD in numpy."""
    table, (d, c) = config.orthogonalizer, M.shape
    if table.name == "gaussian-smoothed-sign":
        seed, at = config.federation.seed, {"round": round, "client": client, "step": step}
        rng = generator(seed, Draw.SMOOTHING, **at)
        M = M + table.sigma * rng.standard_normal((d, c))
    if table.name == "newton-schulz":
        Z = M / (np.linalg.norm(M) + table.eps)
        for _ in range(table.steps):
            Z = 1.5 * Z - 0.5 * Z @ Z.T @ Z
        return Z
    U, s, V = np.linalg.svd(M, full_matrices=False)
    maps_of_s = {
        "smoothed-polar": s / np.sqrt(s**2 + table.lambda_),
        "clipped-sign": np.minimum(s / table.clip_level, 1),
        # The softmax's gradient has columns that sum to 0: its last singular value is noise.
        "exact-sign": (s > 1e-12 * s[0]).astype(float),
        "gaussian-smoothed-sign": np.ones_like(s),
    }
    return (U * maps_of_s[table.name]) @ V


def algorithm_one(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """001, Algorithm 1 and its variants, line by line."""
    data, local, plan = build_data(config), config.local, build_plan(config)
    rng, d = generator(config.federation.seed, Draw.INITIAL), data.inputs.shape[1]
    X = rng.standard_normal((d, data.classes)) / math.sqrt(d)
    M, V, D = (np.zeros_like(X) for _ in range(3))
    for r in range(plan.rounds):
        Xs, Ms = [], []
        for i in plan.participants(r):
            inputs, labels = data.samples(int(i))
            Xi, Mi = X.copy(), M.copy() if "fedmuon" in local.recipe else np.zeros_like(M)
            for k in range(local.steps):
                rows = plan.rows(r, int(i), k, len(labels))
                rows = slice(None) if rows is None else rows
                G = gradient(Xi, inputs[rows], labels[rows])
                if "muon" in local.recipe:
                    Mi = local.momentum * Mi + (1 - local.momentum) * G
                    G = orth(Mi, config, r, int(i), k)
                if local.recipe == "fedmuon-aligned":
                    G = (1 - local.alignment) * G + local.alignment * D
                Xi = Xi - local.lr * G
            Xs.append(Xi)
            Ms.append(Mi)
        mean = np.mean(Xs, axis=0)
        D, M = (X - mean) / (local.lr * local.steps), np.mean(Ms, axis=0)
        if local.recipe == "fedavgm":
            V = local.server_momentum * V + (mean - X)
            mean = X + V
        X = mean
    return X, V if local.recipe == "fedavgm" else M


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("batch", [0, 4])
def test_every_recipe_is_the_naive_loop(recipe: str, batch: int) -> None:
    config = small(
        local={"recipe": recipe, "steps": 3, "batch": batch}, federation={"aggregate": "mean"}
    )
    state, (X, M) = trained(config), algorithm_one(config)
    np.testing.assert_allclose(state.params["weight"][0].numpy(), X, rtol=1e-10, atol=1e-13)
    if "momentum" in state.states:
        momentum = state.states["momentum"]["weight"][0].numpy()
        np.testing.assert_allclose(momentum, M, rtol=1e-9, atol=1e-14)
    else:
        assert recipe in ("fedavg", "local-muon")


@pytest.mark.parametrize(
    "name",
    ["smoothed-polar", "newton-schulz", "clipped-sign", "exact-sign", "gaussian-smoothed-sign"],
)
def test_every_map_is_the_naive_loop(name: str) -> None:
    config = small(orthogonalizer={"name": name})
    X, _ = algorithm_one(config)
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


def test_float32_follows_float64() -> None:
    double, single = weights(small()), weights(small(engine={"dtype": "float32"}))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


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


def test_the_order_of_replies_changes_no_bit():
    experiment = build_experiment(small())
    recipe, state = experiment.recipe, begin(experiment.recipe, experiment.task, 3)
    draw = torch.Generator().manual_seed(0)
    replies = [
        Reply(
            client,
            {"weight": torch.randn(1, 7, 3, generator=draw, dtype=torch.float64)},
            {"momentum": {"weight": torch.randn(1, 7, 3, generator=draw, dtype=torch.float64)}},
            torch.zeros(1),
        )
        for client in range(3)
    ]
    first, *others = (
        server_update(recipe, state, order) for order in itertools.permutations(replies)
    )
    for other in others:
        assert torch.equal(other.params["weight"], first.params["weight"])
        assert torch.equal(other.states["momentum"]["weight"], first.states["momentum"]["weight"])
