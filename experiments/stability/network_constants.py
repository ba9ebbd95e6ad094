"""Constants of a network as far as a run shows them: lower estimates, which prove nothing.

No supremum over all models and samples is known, so largest values are taken over the first and the
last model of a run and some of its samples. A bound that stands on them is `estimated`.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmuon.core.arrays import read_tensors
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.certified_setting import Case
from fedmuon.experiments.stability.certify import AUTHOR, map_constant
from fedmuon.experiments.stability.covered_recipes import has_map
from fedmuon.experiments.stability.measure import Laboratory
from fedmuon.federated.build import resolve
from fedmuon.federated.build_recipe import routes
from fedmuon.optim.links import ADJUSTMENTS
from fedmuon.optim.recipe_tables import aux_rate
from fedmuon.tasks.base import Batch, Params, Task
from fedmuon.tasks.constants import Constants
from fedmuon.tasks.networks import NetworkTask

SAMPLES, POWERS, REACH = 128, 12, 1e-3
OBSERVED = (
    "B, L_loss, G_max and Lg are the largest loss, gradient norm and curvature seen at the first "
    "and the last model on {} samples: they may be larger elsewhere."
)
ROUTED = "Orth and the auxiliary step together have the larger of their two constants."


def with_estimates(case: Case, folder: Path) -> Case:
    """The case of a network's run with constants seen in its folder."""
    run = Laboratory.of(resolve(case.config), folder)
    task, shards, rows = run.experiment.task, run.experiment.shards, len(run.data.labels)
    count = min(SAMPLES, rows)
    models = [_model(folder / f"{name}.safetensors", task) for name in ("initial", "model")]
    chosen = torch.from_numpy(np.linspace(0, rows - 1, count).astype(np.int64))
    some = Batch(shards.inputs[chosen], shards.labels[chosen])
    of_map = () if case.l_map is None else (AUTHOR.format(case.l_map),)
    return dataclasses.replace(
        case,
        constants=observed_constants(task, models, some),
        caveats=(OBSERVED.format(count), *((ROUTED,) * has_map(case.config)), *of_map),
        **_steepest(case, task),
    )


def _model(file: Path, task: Task) -> Params:
    held = read_tensors(file)[0]
    return {name: value[None].to(task.device, task.dtype) for name, value in held.items()}


def observed_constants(task: Task, models: Sequence[Params], batch: Batch) -> Constants:
    """The largest loss, gradient norm and Hessian eigenvalue at these models on these samples."""
    losses = max(float(task.losses(one, batch)[0].max()) for one in models)
    slopes = max(_steepest_sample(task, one, batch) for one in models)
    return Constants(losses, slopes, slopes, max(curvature(task, one, batch) for one in models))


def _steepest_sample(task: Task, params: Params, batch: Batch) -> float:
    norms = []
    for row in range(len(batch.labels)):
        alone = Batch(batch.inputs[row : row + 1], batch.labels[row : row + 1])
        norms.append(_norm(task.gradient(params, [alone])[1]))
    return max(norms)


def curvature(task: Task, params: Params, batch: Batch) -> float:
    """The norm of the mean loss's Hessian, by power iteration on differences of gradients."""
    rng = np.random.default_rng(0)
    draws = {name: rng.standard_normal(tuple(value.shape)) for name, value in params.items()}
    v, size = {name: torch.from_numpy(d).to(params[name]) for name, d in draws.items()}, 0.0
    step = REACH * max(1.0, _norm(params))
    for _ in range(POWERS):
        length = _norm(v)
        if not length:
            return 0.0
        ahead, behind = (
            task.gradient(
                {name: value + sign * step / length * v[name] for name, value in params.items()},
                [batch],
            )[1]
            for sign in (1, -1)
        )
        v = {name: (ahead[name] - behind[name]) / (2 * step) for name in v}
        size = _norm(v)
    return size


def _norm(tree: Params) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in tree.values()))


def _steepest(case: Case, task: Task) -> dict[str, Any]:
    """L_orth of the routed step over lr, as a field of the case, or the sentence that refuses it:
    that of s Orth on hidden matrices, or of the auxiliary parameters' step where it is steeper."""
    if not has_map(case.config):
        return {"l_orth": 1.0}
    assert isinstance(task, NetworkTask)
    local, table = case.config.local, routes(task.module, case.config.local.route)
    scales = [ADJUSTMENTS[local.adjust](*one.matrices[1:]) for one in table if one.matrices]
    if local.aux == "adamw" and len(scales) < len(table):
        return {"refusal": "AdamW's step has no Lipschitz constant: set [local] aux = 'sgd'."}
    beside = aux_rate(local) / local.lr if len(scales) < len(table) else 0.0
    try:
        bare = map_constant(case) if case.l_orth is None else case.l_orth
    except InputError as error:
        return {"refusal": str(error)}
    return {"l_orth": max([beside, *(scale * bare for scale in scales)])}
