"""How much weight of each train sample would change each test sample's loss, by several methods.

Every method returns scores [T, n]: an estimate of the derivative of test loss t in the weight of
train sample z, up to a factor that is the same for all z. The others than `trajectory` look at one
model, or at those before each round, and know nothing of the optimizer or of who took part; what
they say of a sample is times its share of the updates: how often its client took part, over n_i.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.rng import Draw, generator
from fedmuon.federated.adjoint import pulled_back
from fedmuon.federated.rounds import Experiment, ServerState, begin, run_rounds
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.matrix import MatrixTask

STEPS = 30  # of conjugate gradients


@dataclass(frozen=True)
class Trained:
    """A run of the matrix task with its T test samples; X is [d, c]."""

    experiment: Experiment
    seed: int
    test: Batch

    @property
    def train(self) -> Batch:
        """All clients' samples."""
        return Batch(self.experiment.shards.inputs, self.experiment.shards.labels)

    @cached_property
    def start(self) -> ServerState:
        """The state before the first round."""
        return begin(self.experiment.recipe, self.experiment.task, self.seed)

    @cached_property
    def models(self) -> list[Params]:
        """The model before each round, and the last."""
        ends = [done.state.params for done in run_rounds(self.experiment, self.start)]
        return [self.start.params, *ends]

    @cached_property
    def shares(self) -> Tensor:
        """Of the updates, by sample [n]."""
        sizes = np.diff(self.experiment.shards.offsets)
        schedule = self.experiment.plan.schedule()
        part = np.bincount(schedule.ravel(), minlength=len(sizes)) / sizes
        return torch.from_numpy(np.repeat(part, sizes))

    def slopes(self, model: Params, samples: Batch) -> Tensor:
        """s [m, c] of grad loss = u s^T."""
        assert isinstance(self.experiment.task, MatrixTask)
        return self.experiment.task.slopes(model, samples)[0]

    def chances(self, samples: Batch) -> Tensor:
        """The last model's softmax [m, c]."""
        return (samples.inputs @ self.models[-1]["weight"][0]).softmax(1)


def trajectory(run: Trained) -> Tensor:
    """Ours: <grad f_t, dX^R / dw_z>, by a reverse pass through the run."""
    slopes = run.slopes(run.models[-1], run.test)
    towards = run.test.inputs[:, None, :, None] * slopes[:, None, None, :]
    none = Batch(run.test.inputs[:0], run.test.labels[:0])
    found = torch.zeros(len(slopes), len(run.train.labels), dtype=slopes.dtype)
    offsets = run.experiment.shards.offsets
    sweep = pulled_back(run.experiment, run.start, {"weight": towards}, lambda client: none)
    for pulled in sweep:
        rows = np.arange(pulled.own.shape[1]) if pulled.rows is None else pulled.rows
        found[:, int(offsets[pulled.client]) + rows] += pulled.own
    return found


def products(run: Trained, models: Sequence[Params]) -> Tensor:
    """-sum <grad f_t, grad loss_z> over models (TracIn, where they are several): of matrices
    of rank one it is (u . v)(s . s')."""
    inner = run.test.inputs @ run.train.inputs.T
    each = (run.slopes(model, run.test) @ run.slopes(model, run.train).T for model in models)
    return -inner * sum(each) * run.shares


def last_product(run: Trained) -> Tensor:
    """At the last model."""
    return products(run, run.models[-1:])


def tracin(run: Trained) -> Tensor:
    """At the model before each round (Pruthi et al. 2020)."""
    return products(run, run.models[:-1])


def influence(run: Trained, damping: float) -> Tensor:
    """-grad f_t^T (F + damping tr F / dim I)^-1 grad loss_z at the last model (Koh and Liang 2017),
    F the Gauss-Newton matrix of the softmax, by conjugate gradients for all t at once."""
    chance, inputs = run.chances(run.train), run.train.inputs
    size = inputs.square().sum(1) * (1 - chance.square().sum(1))
    level = damping * float(size.mean()) / run.models[-1]["weight"][0].numel()

    def applied(v: Tensor) -> Tensor:
        turned = torch.tensordot(inputs, v, 1)  # [n, T, c]
        bent = chance[:, None] * turned
        bent -= chance[:, None] * bent.sum(-1, keepdim=True)
        return torch.tensordot(inputs.T, bent, 1) / len(inputs) + level * v

    slopes = run.slopes(run.models[-1], run.test)
    solved = conjugate_gradients(applied, run.test.inputs.T[:, :, None] * slopes)
    own = run.slopes(run.models[-1], run.train)
    along = (torch.tensordot(inputs, solved, 1) * own[:, None]).sum(-1)
    return -along.T * run.shares


def conjugate_gradients(applied: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
    """A^-1 b of several b [d, T, c], A positive definite."""

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((0, 2), keepdim=True)

    found, rest = torch.zeros_like(right), right
    towards, size = right, inner(right, right)
    for _ in range(STEPS):
        image = applied(towards)
        step = (size / inner(towards, image)).nan_to_num_()  # 0 where it is solved
        found, rest = found + step * towards, rest - step * image
        after = inner(rest, rest)
        towards, size = rest + (after / size).nan_to_num_() * towards, after
    return found


def trak(run: Trained, projections: int) -> Tensor:
    """-phi_t^T (Phi^T Phi)^-1 phi_z (1 - p_z) of gradients of log p_y / (1 - p_y) at the last
    model, projected at random (Park et al. 2023)."""
    d, c = run.models[-1]["weight"].shape[1:]
    shape = (d, projections, c)
    drawn = torch.from_numpy(generator(run.seed, Draw.PROBE).standard_normal(shape))

    def projected(samples: Batch) -> tuple[Tensor, Tensor]:
        chance = run.chances(samples)
        own = chance.gather(1, samples.labels[:, None])
        margin = (torch.eye(chance.shape[1])[samples.labels].to(chance) - chance) / (1 - own)
        parts = (torch.tensordot(samples.inputs, block, 1) for block in drawn.split(16, 1))
        found = torch.cat([(part * margin[:, None]).sum(-1) for part in parts], 1)
        return found, 1 - own[:, 0]

    (there, _), (own, wrong) = projected(run.test), projected(run.train)
    inverse = torch.linalg.pinv(own.T @ own, hermitian=True)
    return -(there @ inverse @ own.T) * wrong * run.shares


def methods(dampings: Sequence[float], projections: int) -> dict[str, Callable[[Trained], Tensor]]:
    """By name; influence once for each damping."""
    some = {f"influence, {one:g}": partial(influence, damping=one) for one in dampings}
    ours = {"trajectory": trajectory, "tracin": tracin, "last product": last_product}
    return {**ours, **some, "trak": partial(trak, projections=projections)}
