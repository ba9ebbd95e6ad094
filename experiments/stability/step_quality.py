"""Measure how far the orthogonalized steps of a finished run are from polar factors.

The theorems on inexact Muon use numbers of the orthogonalizer T: gamma and nu (Nesterov Muon,
Assumption 2.1), and the initial residual delta_0 and the polar error (Newton–Schulz convergence,
Definition 3). This module repeats a run, and takes the largest value of each number over all calls.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmuon.config.load import Config
from fedmuon.config.methods import certified
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.finished_run import FinishedRun, observe_orthogonalizations
from fedmuon.federated.build_recipe import is_centred
from fedmuon.federated.model_routes import matrix_counts
from fedmuon.optim.chain import Context
from fedmuon.optim.links import ADJUSTMENTS, POLARGRAD, cut
from fedmuon.tasks.base import Params
from fedmuon.tasks.networks import NetworkTask


@dataclass(frozen=True)
class Quality:
    """The largest errors of the orthogonalizer T over all calls of a run.

    Attributes:
        gamma: The maximum of 1 - <M, T(M)> / |M|_*.
        nu: The maximum of |T(M)|_op - 1, or 0.
        delta0: The maximum of 1 - (s_r / |M|_F)^2, where s_r is the smallest positive singular
            value of M.
        polar_error: The maximum of |U V^T - T(M)|_op, where U V^T is the polar factor of M.
        calls: The number of matrices. Matrices that are 0 are left out.
    """

    gamma: float = -math.inf
    nu: float = 0.0
    delta0: float = 0.0
    polar_error: float = 0.0
    calls: int = 0

    def with_matrix(self, momentum: Tensor, image: Tensor, most: int | None = None) -> "Quality":
        """Return the largest errors if T also maps this momentum [m, n] to this image.

        `most` is the largest rank that the momentum can have, if it is known.
        """
        m, z = momentum.detach().double(), image.detach().double()
        left, s, right = torch.linalg.svd(m, full_matrices=False)
        rounding = max(m.shape) * torch.finfo(momentum.dtype).eps
        rank = min(int((s > rounding * s[0]).sum()), len(s) if most is None else most)
        if not rank:
            return self
        polar = left[:, :rank] @ right[:rank]
        aligned = float((m * z).sum() / s.sum())
        errors = {
            "gamma": max(self.gamma, 1 - aligned),
            "nu": max(self.nu, float(torch.linalg.matrix_norm(z, 2)) - 1),
            "delta0": max(self.delta0, 1 - float(s[rank - 1] / s.norm()) ** 2),
            "polar_error": max(self.polar_error, float(torch.linalg.matrix_norm(polar - z, 2))),
        }
        return Quality(**errors, calls=self.calls + 1)


@dataclass(frozen=True)
class StepFacts:
    """The facts about a finished run that the theorems on inexact Muon use.

    `differences` lists the differences between the run and the algorithm of the theorems. If the
    list is not empty, no theorem covers the run.
    """

    quality: Quality
    lr: float
    beta: float
    steps: int
    batch: int
    shape: tuple[int, int]
    lookahead: bool  # whether the momentum is Nesterov's
    differences: tuple[str, ...]


def of_run(folder: Path, given: UserObjects = NOTHING) -> StepFacts:
    """Repeat the run in the folder, and return the facts about its steps.

    Args:
        folder: The run folder.
        given: Python objects (such as a custom task) that the caller passed.

    Raises:
        InputError: If no step of the run orthogonalizes a matrix.
    """
    run = FinishedRun.open(folder, given)
    config, task = run.config, run.experiment.task
    if config.local.adjust == POLARGRAD:
        raise InputError(
            f"the run in {folder} multiplies each orthogonalized matrix by a number that depends "
            "on the momentum ([local] adjust = 'polargrad'), so its orthogonalizer cannot be "
            "measured. Choose another run."
        )
    counts = None
    if isinstance(task, NetworkTask):
        counts = matrix_counts(task.module, config.local.route, config.local.qkv)
    centred = is_centred(config, task)
    quality, shapes = Quality(), set()

    def look(context: Context, momenta: Params, images: Params) -> None:
        nonlocal quality
        for momentum, image in _pairs(momenta, images, counts, config.local.adjust):
            shapes.add(tuple(momentum.shape))
            rank = min(momentum.shape[0], momentum.shape[1] - 1) if centred else None
            quality = quality.with_matrix(momentum, image, rank)

    observe_orthogonalizations(run.experiment, look)
    if not quality.calls:
        raise InputError(
            f"no step of the run in {folder} orthogonalizes a momentum ([local] recipe = "
            f"'{config.local.recipe}'), so there is nothing to measure. Choose a run of muon or "
            "fedmuon."
        )
    plan = run.experiment.plan
    return StepFacts(
        replace(quality, gamma=max(0.0, quality.gamma)),
        config.local.lr,
        config.local.momentum,
        plan.rounds * plan.steps,
        config.local.batch or int(run.data.sizes[0]),
        max(shapes, key=min),
        config.local.momentum_form.endswith("nesterov"),
        differences(config, run, len(shapes)),
    )


def differences(config: Config, run: FinishedRun, shapes: int) -> tuple[str, ...]:
    """Return sentences about what a run does other than the algorithm of the theorems."""
    local, plan = config.local, run.experiment.plan
    checks = {
        f"{plan.clients} clients train, but the theorems are about one": plan.clients > 1,
        "the model is a network, but the theorems are about one matrix": config.task.name
        != "matrix" or shapes > 1,
        f"the optimizer is {local.recipe}, but the theorems are about muon, which is fedmuon with "
        "one client": local.recipe not in certified("averaged"),
        "the step size changes during the run": plan.factors() is not None,
        "the run has weight decay": local.weight_decay > 0,
        "weights are scaled after each step": local.renormalize
        and reads(config, "local.renormalize"),
        f"each step is multiplied by a number ([local] adjust = '{local.adjust}')": local.adjust
        != "none",
        "matrices are cut or their rows are scaled": config.orthogonalizer.shards > 1
        or config.orthogonalizer.row_memory > 0,
    }  # fmt: skip
    return tuple(sentence for sentence, differs in checks.items() if differs)


def _pairs(
    momenta: Params, images: Params, counts: Mapping[str, int] | None, adjust: str
) -> list[tuple[Any, Any]]:
    """Return the pairs (M, T(M)) of matrices [m, n] of one call, for all clients."""
    pairs = []
    for name, value in momenta.items():
        count = 1 if counts is None else counts.get(name, 0)
        for m, z in zip(cut(value, count), cut(images[name], count), strict=True) if count else ():
            scale = ADJUSTMENTS[adjust](*m.shape[-2:])
            pairs += zip(m, z / scale, strict=True)
    return pairs
