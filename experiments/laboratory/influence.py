"""The neighbours that should hurt most, by the influence of a replacement on its client's gradient.

Replacing sample z of client i by z' moves the client's gradient by (g_z - g_z') / n_i; what that
comes to in the end scales with the client's exposure Y_i. So a pair is scored Y_i / n_i times
||g_z - g_z'||_F, meant over the first and the last model of the run. This is a first-order guess
at where to look: what a neighbour in truth does is measured as for any other.
"""

import numpy as np
import torch
from torch import Tensor

from fedmuon.data.neighbours import held_out
from fedmuon.data.source import flat_rows
from fedmuon.errors import InputError
from fedmuon.experiments.laboratory.measure import Laboratory
from fedmuon.randomness import Draw, generator
from fedmuon.storage import read_tensors
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask

POOL = 2048  # held-out samples tried for each client


def worst(run: Laboratory, exposures: np.ndarray | None) -> np.ndarray:
    """(client, position, replacement) of the `trials` samples with the highest scores, [T, 3].

    Each sample comes with the replacement that scores highest for it; the highest score is first.
    """
    sizes, best = run.data.sizes, []
    if exposures is None:  # no certificate, hence no Y_i: how often a client took part stands in
        exposures = np.bincount(run.experiment.plan.schedule().ravel(), minlength=len(sizes))
    for client in np.flatnonzero(exposures):
        pool, far = farthest(run, int(client))
        score = exposures[client] / sizes[client] * far.amax(1).cpu().numpy()
        choice = pool[far.argmax(1).cpu().numpy()]
        own = np.full(len(score), client)
        best.append(np.stack([score, own, np.arange(len(score)), choice], 1))
    every = np.concatenate(best)
    first = np.argsort(-every[:, 0], kind="stable")[: run.config.stability.trials]
    return every[first, 1:].astype(np.int64)


def farthest(run: Laboratory, client: int) -> tuple[np.ndarray, Tensor]:
    """A client's candidates [P], and the mean ||g_z - g_z'||_F of its samples to them [n_i, P]."""
    source, pool = run.source, held_out(run.data, run.source, client)
    if len(pool) > POOL:
        rng = generator(run.config.federation.seed, Draw.NEIGHBOUR, client=client, block=2)
        pool = np.sort(rng.choice(pool, POOL, replace=False))
    own, task = run.experiment.shards[client].data, run.experiment.task
    if not isinstance(task, MatrixTask):
        raise InputError(
            "the worst neighbours are ranked by gradients in closed form, which a network has not: "
            "set [stability] neighbours to own, any or all"
        )
    inputs = torch.from_numpy(flat_rows(source.inputs, run.config.data.normalize, pool))
    labels = torch.from_numpy(source.labels[pool]).to(own.labels.device)
    others = Batch(inputs.to(own.inputs.device, own.inputs.dtype), labels)
    models = [read_tensors(run.out / f"{name}.safetensors")[0] for name in ("initial", "model")]
    stack = {"weight": torch.stack([held["weight"] for held in models]).to(own.inputs.device)}
    apart = gradient_distances(task.slopes(stack, own), own, task.slopes(stack, others), others)
    return pool, apart.mean(0)


def gradient_distances(slopes: Tensor, own: Batch, slopes_there: Tensor, there: Batch) -> Tensor:
    """||u s^T - v t^T||_F for u [n, d] with s [S, n, c] against v [P, d] with t [S, P, c],
    [S, n, P]: |u|^2 |s|^2 + |v|^2 |t|^2 - 2 (u . v)(s . t), as both matrices have rank one."""
    mine = own.inputs.square().sum(1) * slopes.square().sum(-1)
    theirs = there.inputs.square().sum(1) * slopes_there.square().sum(-1)
    cross = (own.inputs @ there.inputs.T) * (slopes @ slopes_there.mT)
    return (mine[:, :, None] + theirs[:, None, :] - 2 * cross).clamp_min_(0).sqrt_()
