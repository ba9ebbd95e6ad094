"""The task of the Stability note, section 5: a matrix classifier with known constants.

For X [d, c] and a sample (u, y), p = softmax(X^T u) and loss(X, (u, y)) = 1 - p_y. The constants
are derived in `fedmuon.tasks.constants`.

This file starts with functions for matrix products ("kernels"), then splits the products for
threads, and ends with the task. The fastest kernel depends on the processor. The kernel `torch`
(MKL) is slow on some AMD processors. On these processors, `channels-last` (oneDNN's convolution,
float32 only) or `numpy` (OpenBLAS) is faster. All kernels are exact up to rounding: the relative
error is at most k * eps for an inner length k. The kernel `fused` is the same as `torch`, except
that `fedmuon.tasks.batched_gradients` computes gradients with few matrix rows in one pass.
"""

import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedmuon.core.errors import InputError
from fedmuon.core.threads import one_thread, parts, spread
from fedmuon.tasks.base import Batch, Params, Points, Replaced, concatenate
from fedmuon.tasks.own_samples import has_own_samples, mean_with_own_samples, with_own_samples
from fedmuon.tasks.per_example.clipped_sums import sums_without_clipping
from fedmuon.tasks.per_example.clipping import Clipping, scaled_norms

Kernel = Callable[[Tensor, Tensor], Tensor]  # [m, k], [k, n] -> [m, n]; views may be transposed
FUSED = (torch.float32, torch.float64)


def _channels_last(a: Tensor, b: Tensor) -> Tensor:
    """Compute the product a @ b as a 1x1 convolution in channels-last layout, with oneDNN."""
    rows, inner = a.shape
    image = a.contiguous().view(1, rows, 1, inner).permute(0, 3, 1, 2)
    out = conv2d(image, b.T.contiguous().view(-1, inner, 1, 1))
    return out.permute(0, 2, 3, 1).reshape(rows, -1)


KERNELS: dict[str, Kernel] = {
    "torch": torch.mm,
    "channels-last": _channels_last,
    "numpy": lambda a, b: torch.from_numpy(a.numpy() @ b.numpy()),
    "fused": torch.mm,
}


def supported(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return the names of the kernels for this dtype and device.

    The simplest kernel comes first.
    """
    if device.type != "cpu":
        return ["torch"]
    kernels = ["torch", "channels-last", "numpy"] if dtype == torch.float32 else ["torch", "numpy"]
    return [*kernels, "fused"] if dtype in FUSED and find_spec("numba") else kernels


@lru_cache
def compiles() -> bool:
    """Return whether numba is installed, fits the installed NumPy, and can store compiled code."""
    try:
        importlib.import_module("fedmuon.tasks.batched_gradients")
    except Exception:  # an unsuitable library may raise anything
        return False
    return True


def rate(
    kernel: str, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, repeats: int = 3
) -> float:
    """Measure how many floating-point operations a kernel computes per second.

    The kernel multiplies matrices of the shapes [m, k] and [k, n].

    The result is the speed of the fastest of several calls.
    """
    a = torch.ones(m, k, dtype=dtype, device=device)
    b = torch.ones(n, k, dtype=dtype, device=device)
    return 2.0 * m * k * n / _best(lambda: KERNELS[kernel](a, b.T), device, repeats)


def fastest(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    """Choose the fastest kernel for gradients.

    A gradient consists of two products, of the shapes [m, k] x [k, n] and [m, n] x [n, k].

    The kernels are measured in one thread. Between the products, torch's elementwise operations run
    as in real training. The kernel `numpy` is left out, because its library uses its own threads. A
    kernel is chosen instead of a simpler kernel only if it is at least 5% faster.
    """
    a = torch.ones(m, k, dtype=dtype, device=device)
    b = torch.ones(n, k, dtype=dtype, device=device)

    def gradient(multiply: Kernel) -> Tensor:
        return multiply(multiply(a, b.T).mul_(1e-3).exp_(), b)

    best, best_seconds = "torch", math.inf
    with one_thread():
        for kernel in supported(dtype, device):
            if kernel in ("numpy", "fused"):
                continue
            seconds = _best(partial(gradient, KERNELS[kernel]), device, 5)
            if 1.05 * seconds < best_seconds:
                best, best_seconds = kernel, seconds
    return best


def _best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the time in seconds of the fastest of `repeats` calls, after one call to warm up."""
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


# Pieces of the products, one for each thread. The pieces depend only on sizes.
#
# A thin product, with few matrix rows S c, is split by samples, and the parts are added in order. A
# thick product is split by replicas, whose gradients need no addition. Small clients are grouped.

THICK = 64  # a product with at least this number of matrix rows is thick
FLOP = 16e6  # minimum flop of a piece, some tenths of a millisecond
LOGITS = 1 << 22  # maximum bytes of a thick piece's logits, so that they fit into a cache
FEW, MANY = 256, 4096  # samples in a part of a thin product, and of a thick product


class Member(NamedTuple):
    """The samples and the model weights of a client, or of some of its samples and replicas.

    The weights have the shape [S, c, d]. `samples` is the number of samples of the whole client.
    """

    weight: Tensor
    batch: Batch
    samples: int

    @property
    def thick(self) -> bool:
        """Whether the member has so many matrix rows that products split by rows stay fast."""
        return self.weight.shape[0] * self.weight.shape[1] >= THICK

    @property
    def flops(self) -> float:
        """The number of floating-point operations of the two matrix products in a gradient."""
        return 4.0 * self.weight.numel() * len(self.batch.labels)


def split_members(members: Sequence[Member]) -> list[list[list[Member]]]:
    """Split the work of members into pieces for threads, as a list of lists of pieces.

    To combine the results, first add the results of the pieces in each inner list, in order, and
    then concatenate these sums.
    """
    pieces: list[list[list[Member]]] = []
    for group in group_small(members):
        if len(group) > 1:
            pieces.append([group])
            continue
        weight, batch, samples = member = group[0]
        (replicas, classes), rows = weight.shape[:2], len(batch.labels)
        if member.thick:
            cut = parts(rows, rows / MANY + 0.5)
            logits_bytes = replicas * classes * (rows / len(cut)) * weight.element_size()
            blocks = min(logits_bytes / LOGITS, replicas * classes / THICK)
            stacks = parts(replicas, blocks + 0.5)
        else:
            cut, stacks = thin_parts(member), [slice(0, replicas)]
        for stack in stacks:
            row = []
            for part in cut:
                replaced = batch.replaced and replaced_within(batch.replaced, stack, part)
                sub_batch = Batch(batch.inputs[part], batch.labels[part], replaced)
                row.append([Member(weight[stack], sub_batch, samples)])
            pieces.append(row)
    return pieces


def group_small(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Yield small members in groups, in order. Yield each large member as its own group."""
    group: list[Member] = []
    flops = 0.0
    for member in members:
        if group and flops + member.flops > FLOP:
            yield group
            group, flops = [], 0.0
        group.append(member)
        flops += member.flops
    yield group


def thin_parts(member: Member) -> list[slice]:
    """Split the samples of a member with few matrix rows into slices."""
    samples = len(member.batch.labels)
    return parts(samples, min(member.flops / FLOP, samples / FEW))


def replaced_within(there: Replaced, replicas: slice, samples: slice) -> Replaced | None:
    """Return the replacements that belong to some replicas and samples, renumbered for this part.

    Return None if no replacement belongs to them.
    """
    replica, position = there.replica - replicas.start, there.position - samples.start
    inside = (replica >= 0) & (there.replica < replicas.stop)
    inside &= (position >= 0) & (there.position < samples.stop)
    if not bool(inside.any()):
        return None
    return Replaced(replica[inside], position[inside], there.inputs[inside], there.labels[inside])


# Mean gradients of thin members, each in one compiled pass over its samples.
#
# A round with few replicas is so short that every Python call matters. Values that the parts of a
# member share are therefore looked up once, and the first part adds directly to the result.

INDICES = torch.int64, torch.int32
Own = Callable[[Member, Replaced], tuple[Tensor, Tensor]]  # returns p_y [T, 1], slopes [T, c, 1]


class _Part(NamedTuple):
    """Some samples of a member, and the sums over these samples.

    `total` [S, c, d] is the sum of gradients, and `right` [S] is the sum of the probabilities p_y
    that the model predicts for the true labels.
    """

    member: Member
    rows: slice
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    total: np.ndarray
    right: np.ndarray


def mean_gradients(members: Sequence[Member], own: Own) -> tuple[Tensor, Tensor]:
    """Return the mean losses and the gradients of members with few matrix rows.

    The losses have the shape [K S], and the gradients [K S, c, d].

    Several threads share the work. The function `own` returns p_y and the slopes of the replacement
    samples.
    """
    weight = members[0].weight
    gradients = np.zeros((len(members), *weight.shape), weight.numpy().dtype)
    sums = iter(gradients)
    groups = [
        [_parts(member, next(sums), len(group) == 1) for member in group]
        for group in group_small(members)
    ]
    # A piece is one part of a large member, or a group of small members, each with one part.
    spread([partial(_add, piece, own) for group in groups for piece in zip(*group, strict=True)])
    losses = []
    for first, *others in (member_parts for group in groups for member_parts in group):
        samples = first.member.samples
        loss = (first.rows.stop - first.rows.start - first.right) / samples
        for part in others:
            first.total[:] += part.total
            loss = loss + (part.rows.stop - part.rows.start - part.right) / samples
        losses.append(loss)
    return torch.from_numpy(np.concatenate(losses)), torch.from_numpy(gradients).flatten(0, 1)


def _parts(member: Member, first: np.ndarray, cut: bool) -> list[_Part]:
    """Split a member into parts, or into one part if `cut` is false.

    The first part adds its sums directly to `first`.
    """
    batch, weight = member.batch, member.weight
    # Torch's products and gathers reject these dtypes, too.
    if batch.inputs.dtype != weight.dtype:
        raise InputError(
            f"the samples have dtype {batch.inputs.dtype}, but the parameters have dtype "
            f"{weight.dtype}. Convert the samples to {weight.dtype}."
        )
    if batch.labels.dtype not in INDICES:
        raise InputError(
            f"the labels have dtype {batch.labels.dtype}, but they must be integers. Convert the "
            "labels to torch.long."
        )
    arrays = (tensor.contiguous().numpy() for tensor in (batch.inputs, batch.labels.long(), weight))
    inputs, labels, weights = arrays
    slices = thin_parts(member) if cut else [slice(0, len(labels))]
    totals = [first, *np.zeros((len(slices) - 1, *first.shape), first.dtype)]
    rights = np.zeros((len(slices), len(weights)), first.dtype)
    return [
        _Part(member, rows, (inputs[rows], labels[rows], weights), total, right)
        for rows, total, right in zip(slices, totals, rights, strict=True)
    ]


def _add(piece: Sequence[_Part], replaced_slope: Own) -> None:
    """Compute the sums of some parts, including the replacement samples of their replicas."""
    # Imported here: numba is optional, takes up to a second to load, and only one kernel needs it.
    from fedmuon.tasks.batched_gradients import slope_sums

    for member, rows, arrays, total, right in piece:
        replicas, classes = total.shape[:2]
        replaced = member.batch.replaced
        replaced = replaced and replaced_within(replaced, slice(0, replicas), rows)
        skip = np.full(replicas, -1)
        if replaced is not None:
            skip[replaced.replica.numpy()] = replaced.position.numpy()
        if not slope_sums(*arrays, skip, total.dtype.type(1 / member.samples), total, right):
            raise InputError(
                f"a label is not an integer from 0 to {classes - 1}. Number the classes from 0."
            )
        if replaced is not None:
            after, slope = replaced_slope(member, replaced)
            replica = replaced.replica.numpy()
            total[replica] += (slope * replaced.inputs[:, None]).numpy()
            right[replica] += after[:, 0].numpy()


# The task

CPU = torch.device("cpu")
Found = tuple[Tensor, Tensor]
Weights = Sequence[tuple[float, Tensor]]  # (c_k, X_k [S, c, d]) for each point


@dataclass(frozen=True)
class MatrixTask:
    """The matrix classifier for stacks of parameters {"weight": [S, d, c]}.

    In memory, each weight is stored by class, as a transposed [S, c, d]. The logits of all replicas
    are then one product [S c, d] x [d, n], and the gradients are one product [S c, n] x [n, d]. The
    softmax runs over the classes, and the samples are contiguous in memory.
    """

    dimension: int
    classes: int
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    kernel: str = "torch"
    start: str = "gaussian"
    keyed = False
    stack_limit = 1 << 18  # large enough to hide the cost of a call, small enough for a cache

    @property
    def thread_safe(self) -> bool:
        """Whether several threads make the task faster.

        On a GPU and with NumPy, each product already runs in parallel.
        """
        return self.device.type == "cpu" and self.kernel != "numpy"

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        """Return zeros, or Gaussian entries of variance 1/d.

        With the Gaussian entries, the logits of samples of norm 1 have a size of about 1/sqrt(d).
        """
        shape = self.dimension, self.classes
        drawn = rng.standard_normal(shape) / math.sqrt(self.dimension)
        weight = np.zeros(shape) if self.start == "zero" else drawn
        class_major = torch.from_numpy(weight.T.copy()).to(self.device, self.dtype)
        return {"weight": class_major.repeat(stack, 1, 1).mT}

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """Return the mean loss and its gradient, computed by several threads.

        The losses have the shape [K S], and the gradients [K S, d, c].
        """
        if has_own_samples(batches):
            return mean_with_own_samples(self.gradient, params, batches)
        blocks = params["weight"].mT.chunk(len(batches))
        members = [Member(w, b, len(b.labels)) for w, b in zip(blocks, batches, strict=True)]
        if self.kernel == "fused" and not members[0].thick:
            loss, gradient = mean_gradients(members, _replaced_slope)
            return loss, {"weight": gradient.mT}
        rows = split_members(members) if self.thread_safe else [[members]]
        work = [partial(self._side_by_side, piece) for row in rows for piece in row]
        results, totals = iter(spread(work, self.thread_safe)), []
        for row in rows:
            loss, gradient = next(results)
            for _ in row[1:]:
                more_loss, more_gradient = next(results)
                loss.add_(more_loss)
                gradient.add_(more_gradient)
            totals.append((loss, gradient))
        loss, gradient = concatenate(totals)
        return loss, {"weight": gradient.mT}

    def _side_by_side(self, members: Sequence[Member]) -> Found:
        """Return the contributions of these members to the mean losses and to the gradients.

        The logits of all clients are concatenated, [S, c, n_1 + ... + n_K]. The clients therefore
        share every operation, except the products with their own samples. A replacement sample
        costs one rank-one update.
        """
        logits = [self._logits(member.weight, member.batch.inputs) for member in members]
        sizes = [len(member.batch.labels) for member in members]
        labels = concatenate([member.batch.labels for member in members], -1)
        if len(members) == 1:
            shares: Tensor | float = 1 / members[0].samples
        else:
            pairs = zip(sizes, members, strict=True)
            shares = torch.cat(
                [logits[0].new_full((n,), 1 / member.samples) for n, member in pairs]
            )
        right, slope = _slope_(concatenate(logits, -1), labels, shares)
        contributions = zip(members, right.split(sizes, -1), slope.split(sizes, -1), strict=True)
        return concatenate([self._pull_back(*contribution) for contribution in contributions])

    def clipped(
        self, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> tuple[Tensor, Params]:
        """Return the mean loss at the last point, and the sums of the clipped gradients.

        The losses have the shape [K S], and the sums [K S, d, c].

        The gradient of a sample u is u s^T, with norm ||u|| ||s||. Here, s is the gradient with
        respect to the logits (slope). The samples are the same at all points, so only the slopes s
        are stored.
        """
        if unclipped := sums_without_clipping(self.gradient, points, batches, clipping):
            return unclipped
        if has_own_samples(batches):
            return with_own_samples(partial(self.clipped, clipping=clipping), points, batches)
        blocks = [(c, params["weight"].mT.chunk(len(batches))) for c, params in points]
        loss, total = concatenate(
            [
                self._clipped([(c, block[k]) for c, block in blocks], batch, clipping)
                for k, batch in enumerate(batches)
            ]
        )
        return loss, {"weight": total.mT}

    def _clipped(self, points: Weights, batch: Batch, clipping: Clipping) -> Found:
        """Return the losses and the sums of clipped gradients of one batch, for all replicas."""
        first = points[0][1]
        if not len(batch.labels):
            return first.new_zeros(len(first)), torch.zeros_like(first)
        logits = [(c, self._logits(weight, batch.inputs)) for c, weight in points]
        right, slope = _contributions(logits, batch.inputs, batch.labels, clipping)

        def replaced_slope(member: Member, replaced: Replaced) -> Found:
            logits = [(c, _own_logits(weight, replaced)) for c, weight in points]
            return _contributions(
                logits, replaced.inputs[:, None], replaced.labels[:, None], clipping
            )

        return self._pull_back(
            Member(first, batch, len(batch.labels)), right, slope, replaced_slope
        )

    def _pull_back(
        self, member: Member, right: Tensor, slope: Tensor, replaced_slope: Own | None = None
    ) -> Found:
        """Return the loss and the gradient of each replica, from the slopes of its samples.

        `right` [S, n] contains the probabilities p_y of the labels. `slope` [S, c, n] contains the
        gradients with respect to the logits.

        The function `replaced_slope` returns the probabilities [T, 1] and the slopes [T, c, 1] of
        the T replacement samples.
        """
        batch, replaced = member.batch, member.batch.replaced
        loss = (len(batch.labels) - right.sum(-1)) / member.samples
        if replaced is not None:
            slope[replaced.replica, :, replaced.position] = 0.0
        flat = KERNELS[self.kernel](slope.flatten(0, 1), batch.inputs)
        total = flat.view(*slope.shape[:2], -1)
        if replaced is not None:
            after, replacement = (replaced_slope or _replaced_slope)(member, replaced)
            total[replaced.replica] += replacement * replaced.inputs[:, None]
            before = right[replaced.replica, replaced.position]
            loss[replaced.replica] += (before - after[:, 0]) / member.samples
        return loss, total

    def slopes(self, params: Params, batch: Batch) -> Tensor:
        """Return the gradient of each sample's loss with respect to its logits X^T u, [S, n, c]."""
        logits = self._logits(params["weight"].mT, batch.inputs)
        return _slope_(logits, batch.labels, 1.0)[1].mT

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return the loss and the `accuracy` of each sample.

        The accuracy is true if the prediction is correct. Both results have the shape [S, n].
        """
        logits = self._logits(params["weight"].mT, batch.inputs)
        right = logits.argmax(1) == batch.labels
        labels = batch.labels.expand(len(logits), 1, -1)
        return 1 - logits.softmax(1).gather(1, labels)[:, 0], {"accuracy": right}

    def _logits(self, weight: Tensor, inputs: Tensor) -> Tensor:
        stack, classes, dimension = weight.shape
        flat = KERNELS[self.kernel](weight.reshape(-1, dimension), inputs.T)
        return flat.view(stack, classes, -1)


def _slope_(logits: Tensor, labels: Tensor, shares: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the probabilities p_y of the labels, and the slopes multiplied by `shares`.

    A slope is the gradient of a sample's loss with respect to its logits, p_y p - p_y e_y. The
    logits are overwritten. `labels` is [n], or [S, n] if replicas differ. The code subtracts e_y
    with a dense mask, which takes a quarter of the time of a scatter operation.
    """
    classes, rows = logits.shape[-2:]
    index = labels.unsqueeze(-2).expand(len(logits), 1, rows)
    mask = labels.unsqueeze(-2) == torch.arange(classes, device=labels.device)[:, None]
    logits.sub_(logits.amax(1, keepdim=True)).exp_()
    total = logits.sum(1, keepdim=True)
    right = logits.gather(1, index).div_(total)
    scaled = right * shares
    slope = logits.mul_(scaled / total).addcmul_(mask.to(logits.dtype), scaled, value=-1)
    return right[:, 0], slope


def _contributions(
    logits: Weights, inputs: Tensor, labels: Tensor, clipping: Clipping
) -> tuple[Tensor, Tensor]:
    """Return the probabilities p_y of the labels at the last point, and the clipped slopes.

    The slopes s_k of all points are added as sum_k c_k s_k, and then clipped. `inputs` is [n, d],
    or [S, n, d] if replicas differ.
    """
    per_point = [(c, *_slope_(values, labels, 1.0)) for c, values in logits]
    slope = torch.stack([c * point_slope for c, _, point_slope in per_point]).sum(0)
    squares = (scaled_norms(slope.mT) * scaled_norms(inputs)).square_()
    factors = clipping.factors({"weight": squares})["weight"]
    slope = slope.mul_(factors[:, None]).masked_fill_(~squares.isfinite()[:, None], 0.0)
    return per_point[-1][1], slope


def _replaced_slope(member: Member, replaced: Replaced) -> Found:
    """Return the probabilities p_y of the replacement samples, and their parts of the slope."""
    logits = _own_logits(member.weight, replaced)
    return _slope_(logits, replaced.labels[:, None], 1 / member.samples)


def _own_logits(weight: Tensor, replaced: Replaced) -> Tensor:
    """Return the logits of each replacement sample, computed by its own replica."""
    return torch.einsum("tcd,td->tc", weight[replaced.replica], replaced.inputs)[:, :, None]
