"""The generalization gap that derivatives through the run predict.

The expected gap is the mean change of a sample's own loss when the sample is replaced,

    E[R(A) - R_hat(A)] = sum_a w_a E[loss(A(S with z' for z_a), z_a) - loss(A(S), z_a)],

with w_a = p_i / n_i, because z_a is a fresh sample for the run that does not contain it. To first
order, with s_ab = <grad loss(A, z_a), dA / dw_b> and the weight w_b of sample b in the gradients
(`fedmuon.federated.adjoint`), the mean over replacements by samples of the same client and label is

    T = sum_a w_a (mean of s_ab over the m_g - 1 other samples b of the group of a, minus s_aa)
      = -tr(D S C),

where C subtracts the mean of each group g, and D is diagonal with the entries w_a m_g / (m_g - 1).
C is a projection, and D is constant within a group, so -tr(D S C) = -tr(C D S C). Hutchinson's
estimator needs one reverse pass for a random vector e of signs, with f = C e:

    T = -E sum_b f_b <V, dA / dw_b>,      V = sum_a f_a D_aa grad loss(A, z_a).

A sample that is the only one of its label in its client counts as not replaceable. The replacement
has the same label, because the measured gap keeps the label shares of each client (`gap.py`). The
estimate is a prediction, not a certificate: it is accurate to first order only.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.func import vjp

from fedmuon.analysis.theory.checks import whole
from fedmuon.core.errors import InputError, plain
from fedmuon.core.rng import Draw, generator
from fedmuon.data.neighbours import classes_of
from fedmuon.data.partition import weights
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.influence import smooth
from fedmuon.federated.adjoint import pulled_back
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask

PROBES = 8


@dataclass(frozen=True)
class PredictedGap:
    """A predicted gap, with the estimate of each probe.

    Attributes:
        probes: The estimate of each random probe [k].
        alone: Number of samples without another sample of their label in their client.
    """

    probes: np.ndarray
    alone: int

    @property
    def value(self) -> float:
        """The mean over probes."""
        return float(self.probes.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, or NaN for a single probe."""
        count = len(self.probes)
        return float(self.probes.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan


def predict(run: FinishedRun, probes: int = PROBES) -> PredictedGap:
    """Return the predicted gap of a finished run, for the loss of its task.

    Args:
        run: The finished run.
        probes: The number of random probes, which are computed in one reverse pass.

    Raises:
        InputError: If the final model has no derivative with respect to the sample weights.
    """
    experiment = smooth(run)
    seed, sizes = run.config.federation.seed, run.data.sizes
    signs, factors, alone = _probes(run, whole("probes", probes))
    start = begin(experiment.recipe, experiment.task, seed)
    towards = _slopes(experiment, run.model(), signs * factors)
    shards, offsets = experiment.shards, np.concatenate([[0], np.cumsum(sizes)])
    no_candidates = Batch(shards.inputs[:0], shards.labels[:0])
    values = np.zeros(len(signs))
    try:
        for pulled in pulled_back(experiment, start, towards, lambda client: no_candidates):
            samples = np.arange(offsets[pulled.client], offsets[pulled.client + 1])
            chosen = samples if pulled.rows is None else samples[pulled.rows]
            values -= (signs[:, chosen] * pulled.own.double().cpu().numpy()).sum(1)
    except RuntimeError as error:  # autograd may fail in the user's own objects
        raise InputError(
            f"torch cannot differentiate this run ({plain(str(error), 200)}), so no gap can be "
            "predicted."
        ) from error
    return PredictedGap(values, alone)


def _probes(run: FinishedRun, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the centred signs f [k, n], the diagonal of D [n], and the number of lone samples."""
    sizes = run.data.sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    labels = classes_of(run.data.labels)
    _, group = np.unique(np.stack([owner, labels]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    members = np.bincount(group)
    rng = generator(run.config.federation.seed, Draw.PROBE, block=1)
    signs = rng.choice([-1.0, 1.0], size=(count, len(owner)))
    means = np.stack([np.bincount(group, row) for row in signs]) / members
    chances = weights(sizes, run.config.federation.risk_weights)
    of_sample = np.repeat(chances / np.maximum(sizes, 1), sizes)
    size = members[group]
    factors = of_sample * size / np.maximum(size - 1, 1)
    return signs - means[:, group], factors, int((size == 1).sum())


def _slopes(experiment: Experiment, model: Params, coefficients: np.ndarray) -> Params:
    """Return sum_a c_ka grad loss(A, z_a) for each row of coefficients c [k, n], as a stack."""
    task, shards = experiment.task, experiment.shards
    point = {name: value.to(task.dtype) for name, value in model.items()}
    factors = torch.from_numpy(coefficients).to(task.device, task.dtype)
    if isinstance(task, MatrixTask):
        slopes = task.slopes(point, Batch(shards.inputs, shards.labels))[0]
        products = [shards.inputs.T @ (row[:, None] * slopes) for row in factors]
        return {"weight": torch.stack(products)[:, None]}
    assert isinstance(task, NetworkTask)
    alone = {name: value[0] for name, value in point.items()}
    rows = []
    for row in factors:
        arguments = {"inputs": shards.inputs, "labels": shards.labels, "weights": row,
                     "keys": shards.labels}  # fmt: skip
        total, back = vjp(lambda at, arguments=arguments: task.total(at, **arguments), alone)
        rows.append(back(torch.ones_like(total))[0])
    return {name: torch.stack([row[name] for row in rows])[:, None] for name in alone}
