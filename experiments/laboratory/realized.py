"""Certificates after the run: of the neighbours that were asked about, from the run's own path.

The run is walked once more, client by client. At every local step the norm of the mean Hessian is
found by Lanczos, and how far apart the gradients of a sample and its replacement are;
`analysis.theory.realized` says what these come to.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmuon import files
from fedmuon.analysis.theory import realized as theory
from fedmuon.analysis.theory.methods import Method
from fedmuon.config import Config
from fedmuon.data.neighbours import Neighbours, stack
from fedmuon.errors import InputError
from fedmuon.experiments.laboratory import bound
from fedmuon.experiments.laboratory.measure import Laboratory
from fedmuon.experiments.laboratory.methods import method_of
from fedmuon.federated.aggregate import aggregate, begin, broadcast
from fedmuon.federated.local import replies
from fedmuon.storage import Record
from fedmuon.tasks.base import Batch, Params, Task
from fedmuon.tasks.constants import constants
from fedmuon.tasks.matrix import MatrixTask

FILE = "realized.csv"
HEADER = "trial,client,perturbation,certificate,realized\n"
EXACT, RAISED = 1e-4, 1.001  # Lanczos' relative precision, and what its norms are times
FIRST = 8  # vectors: fewer have no room to turn


@dataclass(frozen=True)
class Recording:
    """A task that remembers where its gradient was asked for."""

    task: Task
    seen: list[Tensor] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """All else is the task's."""
        return getattr(self.task, name)

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """The task's."""
        self.seen.append(params["weight"][0])
        return self.task.gradient(params, batches)


class Stop(NamedTuple):
    """A participant's local steps: the models [E] that it took gradients at."""

    client: int
    models: list[Tensor]


def require_covered(config: Config) -> None:
    """Refuse all but what the recursion is about: FedMuon as 001 has it."""
    plain = config.local.recipe == "fedmuon" and method_of(config) == Method(config.local.momentum)
    wanted = {
        "[local] recipe = 'fedmuon' with momentum-form = 'ema' and weight-decay = 0": plain,
        "[federation] aggregate = 'mean'": config.federation.aggregate == "mean",
        "[local] batch = 0": not config.local.batch,
        "[engine] dtype = 'float64'": config.engine.dtype == "float64",
        "a map that has a constant": config.orthogonalizer.name != "exact-sign",
    }
    for one, there in wanted.items():
        if not there:
            raise InputError(
                f"[stability] realized follows FedMuon alone, with full batches: set {one}, or "
                "leave realized out"
            )


def certificates(laboratory: Laboratory, verdict: bound.Verdict, drawn: np.ndarray) -> np.ndarray:
    """How far the neighbours drawn [T, 3] can be from this run, [T]."""
    experiment, config, task = laboratory.experiment, laboratory.config, laboratory.experiment.task
    require_covered(config)
    if verdict.l_orth is None or verdict.certificates is None or not isinstance(task, MatrixTask):
        raise InputError(
            "certificates after the run stand on the map's constant: "
            + (verdict.refusal or "set [task] name = 'matrix'")
        )
    there = stack(laboratory.source, drawn, config.data.normalize)
    seen = [list(map(_Look(laboratory, task, there).at, stops)) for stops in walk(laboratory)]
    curvature = np.array([[one.curvature for one in row] for row in seen])
    spread = np.array([[one.distances.max(0, initial=0.0) for one in row] for row in seen])
    factors = experiment.plan.factors()
    path = theory.Path(
        experiment.plan.schedule(), curvature, spread, laboratory.data.sizes,
        config.local.lr * (np.ones(len(seen)) if factors is None else factors),
        config.local.momentum, verdict.l_orth, constants().smoothness,
    )  # fmt: skip
    around, found = theory.tube(path), np.zeros(len(drawn))
    for client in np.unique(drawn[:, 0]):
        own = [one.distances for row in seen for one in row if one.client == client]
        if own:
            each = np.concatenate(own, axis=1)
            found[drawn[:, 0] == client] = theory.certificate(path, around, client, each)
    return found


def walk(laboratory: Laboratory) -> Iterator[list[Stop]]:
    """Where the participants of each round took their gradients, in the schedule's order."""
    experiment, seed = laboratory.experiment, laboratory.config.federation.seed
    recipe, plan = experiment.recipe, experiment.plan
    state = begin(recipe, experiment.task, seed)
    for number in range(plan.rounds):
        sent, stops, found = broadcast(recipe, state), [], []
        for client in map(int, plan.participants(number)):
            task = Recording(experiment.task)
            found += replies(recipe, task, plan, [(client, experiment.shards[client])], sent)
            stops.append(Stop(client, task.seen))
        state = aggregate(recipe, state, found, plan.factor_at(number))
        yield stops


class Seen(NamedTuple):
    """At a participant's steps: ||H|| [E], and ||g_z - g_z'|| of its neighbours [T_i, E]."""

    client: int
    curvature: list[float]
    distances: np.ndarray


@dataclass(frozen=True)
class _Look:
    """What is to be known of a participant's steps."""

    laboratory: Laboratory
    task: MatrixTask
    neighbours: Neighbours

    def at(self, stop: Stop) -> Seen:
        """All of it."""
        data = self.laboratory.experiment.shards[stop.client].data
        own = np.flatnonzero(self.neighbours.client[1:] == stop.client) + 1
        found = [self._distances(model, data, own) for model in stop.models]
        norms = [hessian_norm(self.task, model, data) for model in stop.models]
        return Seen(stop.client, norms, np.stack(found, axis=1))

    def _distances(self, model: Tensor, data: Batch, own: np.ndarray) -> np.ndarray:
        position = torch.from_numpy(self.neighbours.position[own])
        inputs = torch.from_numpy(self.neighbours.inputs[own]).to(model.dtype)
        one = Batch(data.inputs[position], data.labels[position])
        other = Batch(inputs, torch.from_numpy(self.neighbours.labels[own]))
        s, t = (self.task.slopes({"weight": model[None]}, each)[0] for each in (one, other))
        squares = one.inputs.square().sum(1) * s.square().sum(1)
        squares += other.inputs.square().sum(1) * t.square().sum(1)
        cross = (one.inputs * other.inputs).sum(1) * (s * t).sum(1)
        return (squares - 2 * cross).clamp_min(0).sqrt().numpy()


def hessian_norm(task: MatrixTask, model: Tensor, data: Batch) -> float:
    """The largest |eigenvalue| of the mean loss's Hessian, by Lanczos."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    plain, at = dataclasses.replace(task, kernel="torch"), model.clone().requires_grad_()
    loss = plain.losses({"weight": at[None]}, data)[0].mean()
    (slope,) = torch.autograd.grad(loss, at, create_graph=True)

    def product(vector: np.ndarray) -> np.ndarray:
        towards = torch.from_numpy(vector.reshape(model.shape)).to(model.dtype)
        return torch.autograd.grad(slope, at, towards, retain_graph=True)[0].numpy().ravel()

    size = model.numel()
    if size <= FIRST:
        return float(np.abs(np.linalg.eigvalsh(np.stack([*map(product, np.eye(size))]))).max())
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    found = eigsh(operator, 1, which="LM", v0=start, tol=EXACT, return_eigenvectors=False)
    return RAISED * float(np.abs(found[0]))


def measured(laboratory: Laboratory, verdict: bound.Verdict) -> Record:
    """realized.csv beside neighbours.csv, and what it says in short."""
    known = np.loadtxt(laboratory.out / bound.CENSUS, delimiter=",", skiprows=1, ndmin=2)
    drawn, moved, promised = _drawn(laboratory, known), known[:, 4], known[:, 6]
    found = certificates(laboratory, verdict, drawn)
    rows = zip(drawn[:, 0].tolist(), moved.tolist(), promised.tolist(), found.tolist(), strict=True)
    lines = [f"{t},{i},{a!r},{b!r},{c!r}\n" for t, (i, a, b, c) in enumerate(rows)]
    content = "".join([HEADER, *lines]).encode()
    files.announce(laboratory.out, {FILE: content})
    files.write_bytes(laboratory.out / FILE, content)
    return summary(moved, promised, found)


def _drawn(laboratory: Laboratory, known: np.ndarray) -> np.ndarray:
    """(client, position, replacement) of the lines of neighbours.csv, [T, 3]."""
    data, (client, index, replacement) = laboratory.data, known[:, 1:4].astype(np.int64).T
    rows = data.train_index[data.order]
    sorted_by = np.argsort(rows)
    place = sorted_by[np.searchsorted(rows, index, sorter=sorted_by)]
    return np.stack([client, place - data.offsets[client], replacement], 1)


def summary(moved: np.ndarray, promised: np.ndarray, found: np.ndarray) -> Record:
    """What they say beside the perturbations [T] and the certificates before the run."""
    asked = found > 0
    share = (moved[asked] / found[asked]).max(initial=0.0)
    exceeded = int((moved > found).sum())
    return {
        "status": "violated" if exceeded else "realized",
        "largest": float(found.max(initial=0.0)),
        "largest_share": float(share),
        "exceeded": exceeded,
        "certified_over_realized": float((promised[asked] / found[asked]).max(initial=0.0)),
    }
