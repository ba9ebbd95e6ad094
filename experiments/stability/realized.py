"""Certificates after the run: of the neighbours that were asked about, from the run's own path.

The run is made once more. At every local step the norm of the mean Hessian is
found by Lanczos, and how far apart the gradients of a sample and its replacement are;
`analysis.theory.trajectories` says what these come to.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmuon.analysis.theory import trajectories as theory
from fedmuon.analysis.theory.recursion import Method
from fedmuon.config.load import Config
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.data.neighbours import Neighbours, stack
from fedmuon.experiments.stability import bound
from fedmuon.experiments.stability.covered_recipes import method_of
from fedmuon.experiments.stability.exact_sign_calls import looked_at
from fedmuon.experiments.stability.influence import gradient_distances
from fedmuon.experiments.stability.measure import Laboratory
from fedmuon.federated.rounds import Experiment
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Batch
from fedmuon.tasks.constants import constants
from fedmuon.tasks.matrix import MatrixTask

FILE = "realized.csv"
HEADER = "trial,client,perturbation,certificate,realized\n"
EXACT, RAISED = 1e-4, 1.001  # Lanczos' relative precision, and what its norms are times
FIRST = 8  # vectors: fewer have no room to turn


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
    calls = looked_at(experiment, _Look(experiment, task, there))
    seen = [list(zip(*steps, strict=True)) for steps in calls]  # [R, K, E]
    curvature = [[[one.curvature for one in steps] for steps in row] for row in seen]
    spread = [[[one.distances.max(initial=0.0) for one in steps] for steps in row] for row in seen]
    schedule, factors = experiment.plan.schedule(), experiment.plan.factors()
    path = theory.Path(
        schedule, np.array(curvature), np.array(spread), laboratory.data.sizes,
        config.local.lr * (np.ones(len(seen)) if factors is None else factors),
        config.local.momentum, verdict.l_orth, constants().smoothness,
    )  # fmt: skip
    around, found = theory.tube(path), np.zeros(len(drawn))
    for client in np.intersect1d(drawn[:, 0], schedule):
        steps = [seen[r][k] for r, k in np.argwhere(schedule == client)]
        each = np.stack([one.distances for own in steps for one in own], axis=1)
        found[drawn[:, 0] == client] = theory.certificate(path, around, client, each)
    return found


class Seen(NamedTuple):
    """At a local step: ||H|| of the client's mean loss, and ||g_z - g_z'|| of its neighbours."""

    curvature: float
    distances: np.ndarray


@dataclass(frozen=True)
class _Look:
    """What is to be known of the local steps."""

    experiment: Experiment
    task: MatrixTask
    neighbours: Neighbours

    def __call__(self, client: int, model: Tensor, momentum: Tensor) -> Seen:
        """At one."""
        data = self.experiment.shards[client].data
        own = np.flatnonzero(self.neighbours.client[1:] == client) + 1
        return Seen(hessian_norm(self.task, model, data), self._distances(model, data, own))

    def _distances(self, model: Tensor, data: Batch, own: np.ndarray) -> np.ndarray:
        """Pair by pair, as stacks of one sample each."""
        position = torch.from_numpy(self.neighbours.position[own])
        inputs = torch.from_numpy(self.neighbours.inputs[own]).to(model.dtype)
        one = Batch(data.inputs[position], data.labels[position])
        other = Batch(inputs, torch.from_numpy(self.neighbours.labels[own]))
        s, t = (self.task.slopes({"weight": model[None]}, each)[0] for each in (one, other))
        alone = [Batch(each.inputs[:, None], each.labels[:, None]) for each in (one, other)]
        return gradient_distances(s[:, None], alone[0], t[:, None], alone[1])[:, 0, 0].numpy()


@torch.enable_grad()
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
    known = bound.read_census(laboratory.out / bound.CENSUS)
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
    client, index, replacement = known[:, 1:4].astype(np.int64).T
    position = laboratory.data.rows_of(index) - laboratory.data.offsets[client]
    return np.stack([client, position, replacement], 1)


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
