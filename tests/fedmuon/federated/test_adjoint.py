"""Reverse passes through a run: against exact runs in which the weight of one sample is moved."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from torch import Tensor, nn

from fedmuon.config.load import Config
from fedmuon.federated.adjoint import backwards, pulled_back
from fedmuon.federated.build import build_experiment
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, run_rounds, simulate
from fedmuon.optim.stage import ServerState
from fedmuon.tasks.base import Batch, Params, Task
from fedmuon.tasks.networks import NetworkTask

STEP, COUNT, POOL = 1e-5, 3, 4  # of a weight, directions, candidates
MUON = [
    {},
    {"local": {"steps": 3}},
    {"local": {"batch": 4, "steps": 2}},
    {"local": {"recipe": "fedmuon-aligned", "alignment": 0.3, "steps": 2}},
    {"local": {"recipe": "local-muon", "momentum-form": "nesterov", "weight-decay": 0.1}},
    {"orthogonalizer": {"name": "newton-schulz", "eps": 0.1}},
    {"orthogonalizer": {"name": "newton-schulz", "coefficients": "jordan", "eps": 0.1}},
    {"orthogonalizer": {"name": "clipped-sign", "clip-level": 0.2}},
    {"orthogonalizer": {"name": "gaussian-smoothed-sign", "sigma": 0.3}},
]
OTHERS = [
    {"local": {"recipe": "fedavg", "steps": 2, "schedule": "cosine"}},
    {"local": {"recipe": "fedavgm"}, "federation": {"aggregate": "by-samples"}},
    {"local": {"recipe": "muon", "momentum-form": "polyak"}},
    {"local": {"recipe": "normalized-sgd"}, "federation": {"aggregate": "median"}},
]
NETWORKS = [
    (nn.Sequential(nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)), MUON[1]),
    (
        nn.Sequential(nn.Unflatten(1, (1, 7)), nn.Conv1d(1, 2, 3), nn.GELU(), nn.Flatten(),
                      nn.Linear(10, 3)),
        {"local": {"recipe": "fedavg", "batch": 4, "steps": 2}},
    ),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Nudged:
    """The task with `weight` more of a sample in the place of row z of a client's data."""

    task: Task
    own: Batch  # of one row, to know its client's batches by
    sample: Batch
    weight: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        loss, slope = self.task.gradient(params, batches)
        slope = {name: value.clone() for name, value in slope.items()}
        for k, batch in enumerate(batches):
            if (batch.inputs == self.own.inputs).all(1).any():
                one = {name: value[k : k + 1] for name, value in params.items()}
                for name, more in self.task.gradient(one, [self.sample])[1].items():
                    slope[name][k] += self.weight / len(batch.labels) * more[0]
        return loss, slope


def prepared(
    config: Config, module: nn.Module | None = None
) -> tuple[Experiment, ServerState, Params, Batch]:
    """An experiment with its start, directions and candidates, which are held-out samples."""
    experiment = build_experiment(config)
    if module is not None:
        task = NetworkTask(module.double(), (7,), torch.float64)
        experiment = dataclasses.replace(experiment, task=task)
    start = begin(experiment.recipe, experiment.task, config.federation.seed)
    towards = {
        name: torch.randn(COUNT, *value.shape, dtype=value.dtype)
        for name, value in start.params.items()
    }
    held = experiment.shards.held_out
    return experiment, start, towards, Batch(held.inputs[:POOL], held.labels[:POOL])


def swept(
    experiment: Experiment, start: ServerState, towards: Params, others: Batch
) -> tuple[Tensor, Tensor]:
    """<V, dX^R / dw> of every sample [k, n], and of candidate p in place of sample z [k, n, P]."""
    shards, total = experiment.shards, len(experiment.shards.labels)
    own = torch.zeros(COUNT, total, dtype=torch.float64)
    instead = torch.zeros(COUNT, total, POOL, dtype=torch.float64)
    for pulled in pulled_back(experiment, start, towards, lambda client: others):
        rows = np.arange(shards.size(pulled.client)) if pulled.rows is None else pulled.rows
        rows = rows + int(shards.offsets[pulled.client])
        own[:, rows] += pulled.own
        instead[:, rows] += pulled.others[:, None]
    return own, instead


def differences(
    experiment: Experiment, start: ServerState, towards: Params, row: int, sample: Batch
) -> Tensor:
    """<V, dX^R / dw> [k] of a sample in the place of that row, by runs of two other weights."""
    shards = experiment.shards
    own, ends = Batch(shards.inputs[row : row + 1], shards.labels[row : row + 1]), []
    for weight in (STEP, -STEP):
        task = Nudged(experiment.task, own, sample, weight)
        ends.append(simulate(dataclasses.replace(experiment, task=task), start).params)
    moved = {name: (ends[0][name] - ends[1][name]) / (2 * STEP) for name in towards}
    return sum((towards[name] * moved[name]).flatten(1).sum(1) for name in towards)  # type: ignore


CASES = [(None, tables) for tables in MUON + OTHERS] + NETWORKS
QUICK = *CASES[:2], CASES[len(MUON)], CASES[-1]


@pytest.mark.parametrize(
    ("module", "tables"),
    [one if one in QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in CASES],
    ids=lambda one: str(one)[:60],
)
def test_against_runs_with_another_weight(module: nn.Module | None, tables: dict) -> None:
    """Central differences err by STEP^2 and by rounding over STEP."""
    experiment, start, towards, others = prepared(small(tables), module)
    own, instead = swept(experiment, start, towards, others)
    row = int(own.abs().sum(0).argmax())
    shards = experiment.shards
    itself = Batch(shards.inputs[row : row + 1], shards.labels[row : row + 1])
    candidate = Batch(others.inputs[:1], others.labels[:1])
    for found, sample in ((own[:, row], itself), (instead[:, row, 0], candidate)):
        expected = differences(experiment, start, towards, row, sample)
        assert (found - expected).norm() <= 1e-6 * expected.norm() and expected.norm() > 0


def test_another_memory_is_seen() -> None:
    """Negative control: derivatives of a run with beta = 0.89 are not those with 0.9."""
    experiment, start, towards, others = prepared(small())
    other = prepared(small(local={"momentum": 0.89}))[0]
    found, _ = swept(other, start, towards, others)
    row = int(found.abs().sum(0).argmax())
    shards = experiment.shards
    itself = Batch(shards.inputs[row : row + 1], shards.labels[row : row + 1])
    expected = differences(experiment, start, towards, row, itself)
    assert (found[:, row] - expected).norm() > 1e-3 * expected.norm()


def test_clients_that_never_take_part_have_no_influence() -> None:
    experiment, start, towards, others = prepared(small(federation={"rounds": 1, "per-round": 2}))
    own, instead = swept(experiment, start, towards, others)
    owner = np.repeat(np.arange(6), np.diff(experiment.shards.offsets))
    active = torch.from_numpy(np.isin(owner, experiment.plan.schedule()))
    assert (own[:, ~active] == 0).all() and (instead[:, ~active] == 0).all()
    assert (own[:, active] != 0).all()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 10])
def test_states_come_backwards(count: int) -> None:
    experiment, start, _, _ = prepared(small(federation={"rounds": count}))
    ahead = [start, *(done.state for done in run_rounds(experiment, start))][:-1]
    behind = list(backwards(experiment, start))
    assert [one.round for one in behind] == list(reversed(range(count)))
    for one, other in zip(ahead, reversed(behind), strict=True):
        assert torch.equal(one.params["weight"], other.params["weight"])
