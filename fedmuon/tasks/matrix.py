"""The controlled task of the Stability note, section 5: a matrix classifier with proved constants.

For X [d, c] and a sample (u, y), p = softmax(X^T u) and loss(X, (u, y)) = 1 - p_y. The constants
and their proof are in `fedmuon.tasks.constants`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.threads import spread
from fedmuon.tasks.base import Batch, Params, Points, Replaced, joined
from fedmuon.tasks.constants import Constants, constants
from fedmuon.tasks.matrix_kernels import Member, mean_gradients, multiply, pieces
from fedmuon.tasks.per_example.clipped_sums import unclipped
from fedmuon.tasks.per_example.clipping import Clipping, scaled_norms

__all__ = ["Constants", "MatrixTask", "constants"]

CPU = torch.device("cpu")
Found = tuple[Tensor, Tensor]
Weights = Sequence[tuple[float, Tensor]]  # (c_k, X_k [S, c, d]) of the points


@dataclass(frozen=True)
class MatrixTask:
    """The classifier on stacks {"weight": [S, d, c]}, stored class-major as a transposed [S, c, d].

    So the logits of all replicas are one product [S c, d] x [d, n], the softmax runs along
    contiguous samples, and the gradients of all replicas are one product [S c, n] x [n, d].
    """

    dimension: int
    classes: int
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    kernel: str = "torch"
    start: str = "gaussian"

    @property
    def stack_limit(self) -> int:
        """Large enough to hide the cost of a call, small enough for a cache."""
        return 1 << 18

    @property
    def thread_safe(self) -> bool:
        """True on a CPU; other devices, and NumPy, parallelize a product themselves."""
        return self.device.type == "cpu" and self.kernel != "numpy"

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        """0, or Gaussian entries of variance 1/d: a unit sample has logits of order 1/sqrt(d)."""
        shape = self.dimension, self.classes
        drawn = rng.standard_normal(shape) / math.sqrt(self.dimension)
        weight = np.zeros(shape) if self.start == "zero" else drawn
        class_major = torch.from_numpy(weight.T.copy()).to(self.device, self.dtype)
        return {"weight": class_major.repeat(stack, 1, 1).mT}

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """Return the mean loss [K S] and gradient [K S, d, c], in pieces for several threads."""
        blocks = params["weight"].mT.chunk(len(batches))
        members = [Member(w, b, len(b.labels)) for w, b in zip(blocks, batches, strict=True)]
        if self.kernel == "fused" and not members[0].thick:
            loss, gradient = mean_gradients(members, _replaced_slope)
            return loss, {"weight": gradient.mT}
        rows = pieces(members) if self.thread_safe else [[members]]
        work = [partial(self._side_by_side, piece) for row in rows for piece in row]
        found = iter(spread(work, self.thread_safe))
        loss, gradient = joined([reduce(_added_, islice(found, len(row))) for row in rows])
        return loss, {"weight": gradient.mT}

    def _side_by_side(self, members: Sequence[Member]) -> Found:
        """Shares of mean losses [K S] and of gradients [K S, c, d].

        The logits of all clients are concatenated, [S, c, n_1 + ... + n_K]. So clients share every
        operation but the products with their own samples. A replaced row costs one rank-one update.
        """
        logits = [self._logits(one.weight, one.batch.inputs) for one in members]
        sizes = [len(one.batch.labels) for one in members]
        labels = joined([one.batch.labels for one in members], -1)
        right, slope = _slope_(joined(logits, -1), labels, _shares(members, logits[0]))
        found = zip(members, right.split(sizes, -1), slope.split(sizes, -1), strict=True)
        return joined([self._pull_back(*one) for one in found])

    def clipped(
        self, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> tuple[Tensor, Params]:
        """Return the mean loss [K S] at the last point and the clipped sums [K S, d, c].

        The gradient of a sample is u s^T, of norm ||u|| ||s||. Combinations over points have the
        same u, so only slopes s are stored.
        """
        if whole := unclipped(self.gradient, points, batches, clipping):
            return whole
        blocks = [(c, params["weight"].mT.chunk(len(batches))) for c, params in points]
        loss, total = joined(
            [
                self._clipped([(c, block[k]) for c, block in blocks], batch, clipping)
                for k, batch in enumerate(batches)
            ]
        )
        return loss, {"weight": total.mT}

    def _clipped(self, points: Weights, batch: Batch, clipping: Clipping) -> Found:
        """Loss [S] and clipped sum [S, c, d] of one batch."""
        first = points[0][1]
        if not len(batch.labels):
            return first.new_zeros(len(first)), torch.zeros_like(first)
        logits = [(c, self._logits(weight, batch.inputs)) for c, weight in points]
        right, slope = _contributions(logits, batch.inputs, batch.labels, clipping)

        def own(there: Replaced) -> Found:
            logits = [(c, _own_logits(weight, there)) for c, weight in points]
            return _contributions(logits, there.inputs[:, None], there.labels[:, None], clipping)

        member = Member(first, batch, len(batch.labels))
        return self._pull_back(member, right, slope, own)

    def _pull_back(
        self,
        member: Member,
        right: Tensor,
        slope: Tensor,
        own: Callable[[Replaced], Found] | None = None,
    ) -> Found:
        """Loss [S] and gradient [S, c, d] from p_y [S, n] and slope [S, c, n].

        `own` computes p_y [T, 1] and slope [T, c, 1] of the replaced samples.
        """
        batch, there = member.batch, member.batch.replaced
        loss = (len(batch.labels) - right.sum(-1)) / member.samples
        if there is None:
            return loss, self._product(slope, batch.inputs)
        slope[there.replica, :, there.position] = 0.0
        after, more = (own or partial(_replaced_slope, member))(there)
        total = self._product(slope, batch.inputs)
        total[there.replica] += more * there.inputs[:, None]
        loss[there.replica] += (right[there.replica, there.position] - after[:, 0]) / member.samples
        return loss, total

    def _product(self, slope: Tensor, inputs: Tensor) -> Tensor:
        flat = multiply(slope.flatten(0, 1), inputs, self.kernel)
        return flat.view(*slope.shape[:2], -1)

    def slopes(self, params: Params, batch: Batch) -> Tensor:
        """Return the gradient of each sample in its logits s = X^T u, [S, n, c]."""
        logits = self._logits(params["weight"].mT, batch.inputs)
        return _slope_(logits, batch.labels, 1.0)[1].mT

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return per-sample losses [S, n] and `accuracy` [S, n], whether each is right."""
        logits = self._logits(params["weight"].mT, batch.inputs)
        right = logits.argmax(1) == batch.labels
        labels = batch.labels.expand(len(logits), 1, -1)
        return 1 - logits.softmax(1).gather(1, labels)[:, 0], {"accuracy": right}

    def _logits(self, weight: Tensor, inputs: Tensor) -> Tensor:
        stack, classes, dimension = weight.shape
        flat = multiply(weight.reshape(-1, dimension), inputs.T, self.kernel)
        return flat.view(stack, classes, -1)


def _slope_(logits: Tensor, labels: Tensor, shares: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return p_y [S, n] and the slope (p_y p - p_y e_y) times `shares` [n], in place of the logits.

    `labels` is [n], or [S, n] if they differ. Subtracting e_y as a dense mask takes a quarter of
    the time of a scatter.
    """
    classes, rows = logits.shape[-2:]
    chosen = labels.unsqueeze(-2).expand(len(logits), 1, rows)
    mask = labels.unsqueeze(-2) == torch.arange(classes, device=labels.device)[:, None]
    logits.sub_(logits.amax(1, keepdim=True)).exp_()
    total = logits.sum(1, keepdim=True)
    right = logits.gather(1, chosen).div_(total)
    scaled = right * shares
    slope = logits.mul_(scaled / total).addcmul_(mask.to(logits.dtype), scaled, value=-1)
    return right[:, 0], slope


def _contributions(
    logits: Weights, inputs: Tensor, labels: Tensor, clipping: Clipping
) -> tuple[Tensor, Tensor]:
    """p_y [S, n] at the last point, and the slopes sum_k c_k s_k [S, c, n], clipped per sample.

    `inputs` is [n, d], or [S, n, d] if they differ.
    """
    found = [(c, *_slope_(values, labels, 1.0)) for c, values in logits]
    slope = torch.stack([c * one for c, _, one in found]).sum(0)
    squares = (scaled_norms(slope.mT) * scaled_norms(inputs)).square_()
    factors = clipping.factors({"weight": squares})["weight"]
    slope = slope.mul_(factors[:, None]).masked_fill_(~squares.isfinite()[:, None], 0.0)
    return found[-1][1], slope


def _shares(members: Sequence[Member], template: Tensor) -> Tensor | float:
    """1 / n_k for every sample of every member; a single number if there is one member."""
    if len(members) == 1:
        return 1 / members[0].samples
    each = [template.new_full((len(one.batch.labels),), 1 / one.samples) for one in members]
    return torch.cat(each)


def _replaced_slope(member: Member, there: Replaced) -> Found:
    """p_y [T, 1] of the replaced samples, and their shares of the mean slope [T, c, 1]."""
    logits = _own_logits(member.weight, there)
    return _slope_(logits, there.labels[:, None], 1 / member.samples)


def _added_(total: Found, more: Found) -> Found:
    return total[0].add_(more[0]), total[1].add_(more[1])


def _own_logits(weight: Tensor, there: Replaced) -> Tensor:
    """The logits [T, c, 1] of the replaced samples, each in its replica."""
    return torch.einsum("tcd,td->tc", weight[there.replica], there.inputs)[:, :, None]
