"""Certificates of chosen neighbours, computed after the run from its models.

The run is repeated once. At every local step, this module computes the norm of the mean Hessian
(with the Lanczos method), and the distance between the gradients of each sample and of its
replacement. The formulas in `fedmuon.analysis.theory.trajectories` turn these numbers into
certificates.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from fedmuon.analysis.theory import trajectories as theory
from fedmuon.analysis.theory.recursion import Method
from fedmuon.config.load import Config
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.data.neighbours import stack
from fedmuon.experiments.stability.certificates import Certificate, method_of
from fedmuon.experiments.stability.finished_run import (
    CENSUS,
    FinishedRun,
    observe_momenta,
    read_census,
)
from fedmuon.experiments.stability.influence import gradient_distances
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Batch
from fedmuon.tasks.constants import constants
from fedmuon.tasks.matrix import MatrixTask

FILE = "realized.csv"
HEADER = "trial,client,perturbation,certificate,realized\n"
EXACT, RAISED = 1e-4, 1.001  # relative precision of Lanczos, and safety factor for the norms
FIRST = 8  # up to this size, all eigenvalues are computed, because Lanczos needs more dimensions


def require_covered(config: Config) -> None:
    """Raise InputError if the run is not plain FedMuon, as in the Stability note."""
    plain = config.local.recipe == "fedmuon" and method_of(config) == Method(config.local.momentum)
    requirements = {
        "[local] recipe = 'fedmuon' with momentum-form = 'ema' and weight-decay = 0": plain,
        "[federation] aggregate = 'mean'": config.federation.aggregate == "mean",
        "[local] batch = 0": not config.local.batch,
        "[engine] dtype = 'float64'": config.engine.dtype == "float64",
        "an orthogonalizer with a Lipschitz constant": config.orthogonalizer.name != "exact-sign",
    }
    for requirement, met in requirements.items():
        if not met:
            raise InputError(
                f"[stability] realized needs {requirement}, which this config does not have. "
                "Change the config, or leave [stability] realized out."
            )


class LocalStep(NamedTuple):
    """Two norms at a local step of a client.

    One is the norm ||H|| of the Hessian of the client's mean loss. The other is the distance ||g_z
    - g_z'|| between the gradients of a sample and of its replacement.
    """

    curvature: float
    distances: np.ndarray


def certificates(run: FinishedRun, certificate: Certificate, drawn: np.ndarray) -> np.ndarray:
    """For each given neighbour, return a bound on the distance of its final model from this run."""
    experiment, config, task = run.experiment, run.config, run.experiment.task
    require_covered(config)
    if (
        certificate.l_orth is None
        or certificate.certificates is None
        or not isinstance(task, MatrixTask)
    ):
        raise InputError(
            "[stability] realized needs a Lipschitz constant of the orthogonalizer, which is not "
            "known: " + (certificate.refusal or "set [task] name = 'matrix'")
        )
    replacements = stack(run.source, drawn, config.data.normalize)

    def look(client: int, model: Tensor, momentum: Tensor) -> LocalStep:
        """Compute the two norms of a local step.

        Each sample forms a stack of its own, and so does its replacement.
        """
        data = experiment.shards[client].data
        rows = np.flatnonzero(replacements.client[1:] == client) + 1
        position = torch.from_numpy(replacements.position[rows])
        inputs = torch.from_numpy(replacements.inputs[rows]).to(model.dtype)
        pair = (
            Batch(data.inputs[position], data.labels[position]),
            Batch(inputs, torch.from_numpy(replacements.labels[rows])),
        )
        s, t = (task.slopes({"weight": model[None]}, batch)[0] for batch in pair)
        alone = [Batch(batch.inputs[:, None], batch.labels[:, None]) for batch in pair]
        apart = gradient_distances(s[:, None], alone[0], t[:, None], alone[1])[:, 0, 0]
        return LocalStep(hessian_norm(task, model, data), apart.numpy())

    calls = observe_momenta(experiment, look)
    per_client = [list(zip(*steps, strict=True)) for steps in calls]  # [R, K, E]
    curvature = [[[step.curvature for step in steps] for steps in row] for row in per_client]
    spread = [
        [[step.distances.max(initial=0.0) for step in steps] for steps in row] for row in per_client
    ]
    schedule, factors = experiment.plan.schedule(), experiment.plan.factors()
    path = theory.Path(
        schedule, np.array(curvature), np.array(spread), run.data.sizes,
        config.local.lr * (np.ones(len(per_client)) if factors is None else factors),
        config.local.momentum, certificate.l_orth, constants().smoothness,
    )  # fmt: skip
    bounds, limits = theory.step_bounds(path), np.zeros(len(drawn))
    for client in np.intersect1d(drawn[:, 0], schedule):
        steps = [per_client[r][k] for r, k in np.argwhere(schedule == client)]
        distances = np.stack([step.distances for row in steps for step in row], axis=1)
        limits[drawn[:, 0] == client] = theory.certificate(path, bounds, client, distances)
    return limits


@torch.enable_grad()
def hessian_norm(task: MatrixTask, model: Tensor, data: Batch) -> float:
    """Return the norm of the Hessian of the mean loss by the Lanczos method.

    The norm is the largest absolute value of an eigenvalue.
    """
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
    eigenvalues = eigsh(operator, 1, which="LM", v0=start, tol=EXACT, return_eigenvectors=False)
    return RAISED * float(np.abs(eigenvalues[0]))


def write_certificates(run: FinishedRun, certificate: Certificate) -> Record:
    """Write realized.csv, and return a summary of its contents.

    The file has one line for each line of neighbours.csv.
    """
    table = read_census(run.out / CENSUS)
    client, index, replacement = table[:, 1:4].astype(np.int64).T
    position = run.data.rows_of(index) - run.data.offsets[client]
    drawn, moved, promised = np.stack([client, position, replacement], 1), table[:, 4], table[:, 6]
    certified = certificates(run, certificate, drawn)
    rows = zip(
        drawn[:, 0].tolist(), moved.tolist(), promised.tolist(), certified.tolist(), strict=True
    )
    lines = [f"{t},{i},{a!r},{b!r},{c!r}\n" for t, (i, a, b, c) in enumerate(rows)]
    content = "".join([HEADER, *lines]).encode()
    files.announce(run.out, {FILE: content})
    files.write_bytes(run.out / FILE, content)
    return summary(moved, promised, certified)


def summary(moved: np.ndarray, promised: np.ndarray, found: np.ndarray) -> Record:
    """Compare perturbations with two kinds of certificates.

    One kind was computed before the run, and the other kind was computed after the run.
    """
    positive = found > 0
    share = (moved[positive] / found[positive]).max(initial=0.0)
    exceeded = int((moved > found).sum())
    return {
        "status": "violated" if exceeded else "realized",
        "largest": float(found.max(initial=0.0)),
        "largest_share": float(share),
        "exceeded": exceeded,
        "certified_over_realized": float((promised[positive] / found[positive]).max(initial=0.0)),
    }
