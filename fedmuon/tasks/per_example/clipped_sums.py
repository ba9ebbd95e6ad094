"""Sums of clipped per-example gradients of a network, for a stack of parameters.

There are two exact methods. The first method records the inputs and output gradients of all layers
(`ghost.py`). The second method uses the per-example gradients of `torch.func`. The second method is
for modules in which the first method cannot record everything. Both methods process the samples in
groups that fit into a limited memory. Each gradient norm is computed completely within one group,
so the sum of a group needs no later correction.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedmuon.core.device import at_hand, holds, to_device
from fedmuon.core.threads import Turns, spread
from fedmuon.core.threads import parts as even
from fedmuon.tasks.base import Batch, Loss, Params, Points, one_at_a_time, stack_results
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.per_example.ghost import Ghosts, record, reshape_total, rule_of
from fedmuon.tasks.per_example.gradients import (
    Explicit,
    Lookup,
    Outer,
    PerExample,
    Tied,
    of_variable,
)
from fedmuon.tasks.per_example.variables import Variable
from fedmuon.tasks.work_split import Chunks, exact_on

MEMORY = {"cpu": 1 << 26, "cuda": 1 << 33}  # maximum bytes that a thread uses at once
MOST = {"cpu": 512}  # maximum samples in a group; larger groups are hardly faster on a CPU
LANES = 64  # maximum number of parts of a lot, each with its own totals
LANE, LEAST = 384, 96  # minimum work of a part per number of the totals; LEAST is for two parts
FEWEST = 4  # minimum samples of a part, because each layer is called once for all its samples
ENOUGH = 8  # samples in a group with records; twice this number would take 4% less time
Gradient = Callable[[Params, Sequence[Batch]], tuple[Tensor, Params]]
Found = tuple[Tensor, dict[str, PerExample]]  # losses [n], gradients by parameter


def sums_without_clipping(
    gradient: Gradient, points: Points, batches: Sequence[Batch], clipping: Clipping
) -> tuple[Tensor, Params] | None:
    """Return the sums of gradients if the clipping bound C is infinite, without per-example work.

    The sums are the mean gradients times the batch sizes. Return None if C is finite or a batch is
    empty.
    """
    sizes = [len(batch.labels) for batch in batches]
    if math.isfinite(clipping.bound) or 0 in sizes:
        return None
    loss, total = torch.empty(0), Params()
    for c, params in points:
        loss, slopes = gradient(params, batches)
        total = _add(total, c, slopes)
    if clipping.variables is not None:
        total = {key: each.slope(total[key]) for key, each in clipping.variables.items()}
    counts = to_device(torch.tensor(sizes).repeat_interleave(len(loss) // len(sizes)), loss.device)
    return loss, {key: v * counts.view(-1, *[1] * (v.ndim - 1)) for key, v in total.items()}


@dataclass(frozen=True, eq=False)
class ClippedSums:
    """Computes the sums of clipped per-example gradients of one module.

    Attributes:
        module: The network.
        shape: Shape of one sample.
        loss: Function from (outputs [n, c], labels [n]) to losses [n].
        device: Device of the parameters.
        kept: Number of activations that autograd stores per sample.
        ghosts: The layers for the method of `ghost.py`. With None, `torch.func` is used.
        each: Function that returns a copy of this object with its own module for the calling
            thread. With None, one thread does all the work.
        masks: Function from the keys of samples to the context that draws their dropout masks.
        whole: Whether samples are integers, such as tokens.
        outputs: Number of outputs per sample, of which a loss stores three tensors.
    """

    module: nn.Module
    shape: tuple[int, ...]
    loss: Loss
    device: torch.device
    kept: int
    ghosts: Ghosts | None
    each: Callable[[], "ClippedSums"] | None = None
    masks: Callable[[Tensor], AbstractContextManager[Any]] = lambda keys: nullcontext()
    whole: bool = False
    outputs: int = 0

    def __call__(
        self, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> tuple[Tensor, Params]:
        """Return the results of `Task.clipped`. The replicas are computed one after the other."""
        stack = len(next(iter(points[0][1].values())))
        replicas = stack // len(batches)
        results = []
        with exact_on(self.device):
            for row in range(stack):
                row_points = [
                    (c, {key: value[row] for key, value in at.items()}) for c, at in points
                ]
                batch = batches[row // replicas]
                inputs, labels = samples_of(batch, row % replicas)
                keys = batch.labels if batch.keys is None else batch.keys
                results.append(self.one(row_points, inputs, labels, keys, clipping))
        return stack_results(results)

    def one(
        self, points: Points, inputs: Tensor, labels: Tensor, keys: Tensor, clipping: Clipping
    ) -> tuple[Tensor, Params]:
        """Return the mean loss at the last point, and the clipped sum, for one replica."""
        params, rows = points[-1][1], len(labels)
        variables = clipping.variables
        if variables is None:
            variables = dict.fromkeys(params, Variable())
        loss, totals = next(iter(params.values())).new_zeros(()), Params()
        groups, turns = self.chunks(params, len(points)), Turns()

        def lane(number: int, part: slice) -> None:
            local, sums, read = self.each() if self.each else self, Params(), torch.zeros_like(loss)
            find = local._by_example if local.ghosts is None else local._by_layer
            work = partial(find, points, inputs, labels, keys)
            with turns.of(number) as turn:
                for losses, gradients in groups.each(work, part.stop, start=part.start):
                    _add_clipped(sums, gradients, clipping)
                    read += losses.sum()
                    del gradients  # frees its memory before the next group
                turn()
                loss.add_(read)
                for key, value in sums.items():
                    totals[key] = totals[key].add_(value) if key in totals else value

        cut = enumerate(self._lanes(params, rows))
        spread([partial(lane, *numbered_part) for numbered_part in cut], self.each is not None)
        for key, variable in variables.items():
            name, _, own_key = key.rpartition(".")
            if key not in totals:  # nothing was added
                totals[key] = torch.zeros_like(variable.slope(params[key][None])[0])
            elif variable.left is not None:
                totals[key] = totals[key].reshape(variable.left.shape[1], -1)
            elif self.ghosts is not None:
                totals[key] = reshape_total(self.ghosts.layers[name], own_key, totals[key])
        return loss / max(rows, 1), {key: totals[key] for key in variables}

    def _lanes(self, params: Params, rows: int) -> list[slice]:
        """Split the samples into parts of nearly equal size, which are added up separately.

        The number of parts is a power of two and depends only on sizes. With few parts, adding
        their sums takes little time. On a GPU, there is only one part, because each part would be
        launched separately.
        """
        if self.device.type == "cuda":
            return even(rows, 1) if rows else []
        weights = sum(value.numel() for value in params.values())
        work = rows * (1 + 64 * self.kept / weights)  # products per number of the totals
        limit = max(1.0, min(LANES, rows / FEWEST))
        count = min(max(work / LANE, min(2.0, work / LEAST), 1.0), limit)
        return even(rows, 2 ** int(math.log2(count))) if rows else []

    def chunks(self, params: Params, points: int) -> Chunks:
        """Return groups of samples whose activations and gradients fit into `MEMORY`."""
        entry = next(iter(params.values())).element_size()
        weights = sum(value.numel() for value in params.values())
        kind, kept = self.device.type, max(self.kept, 3 * self.outputs)
        memory = MEMORY.get(kind, 1 << 32)
        if self.ghosts is None:
            limit = memory // (entry * (3 * kept + (points + 1) * weights))
        else:  # use a quarter if that is enough, because every thread has a group
            fitting = memory // (entry * (kept + points * self.ghosts.entries))
            limit = fitting if kind == "cuda" else min(fitting, max(ENOUGH, fitting // 4))
        return Chunks(max(1, min(limit, MOST.get(kind, limit))))

    def _rows(self, inputs: Tensor, rows: slice) -> Tensor:
        samples = inputs[rows].reshape(-1, *self.shape)
        return samples.long() if self.whole else samples

    def _by_layer(
        self, points: Points, inputs: Tensor, labels: Tensor, keys: Tensor, rows: slice
    ) -> Found:
        """Return the losses and per-example gradients of some samples, from records of layers."""
        assert self.ghosts is not None
        layers, records, losses = self.ghosts.layers, [], inputs.new_zeros(0)
        inputs, labels = self._rows(inputs, rows), labels[rows]
        loss = one_at_a_time(self.loss)
        for c, params in points:
            with self.masks(keys[rows]):
                losses, layer_uses = record(
                    self.module, layers, params, inputs, lambda outputs: loss(outputs, labels)
                )
            records.append((c, layer_uses))
        gradients: dict[str, PerExample] = {}
        for name, layer in layers.items():
            # For each use of the layer: its inputs at all points, and the slopes times c.
            weights, uses = zip(*((c, recorded.uses[name]) for c, recorded in records), strict=True)
            pairs = [
                ([at.read for at in use], [at.times(c) for c, at in zip(weights, use, strict=True)])
                for use in zip(*uses, strict=True)
            ]
            rule = rule_of(layer)
            assert rule is not None  # otherwise, `find_ghosts` would have returned None
            parts = rule(layer, pairs)
            for key, _ in layer.named_parameters(recurse=False):
                gradients[f"{name}.{key}" if name else key] = parts[key]
        for name, first in self.ghosts.tied.items():
            embedding, head = gradients[first], gradients.pop(name)
            assert isinstance(embedding, Lookup) and isinstance(head, Outer | Explicit)
            gradients[first] = Tied(embedding, head)
        trainable = points[-1][1]  # does not contain frozen parameters
        return losses, {key: gradient for key, gradient in gradients.items() if key in trainable}

    def _by_example(
        self, points: Points, inputs: Tensor, labels: Tensor, keys: Tensor, rows: slice
    ) -> Found:
        """Return the losses and per-example gradients of some samples, from torch.func."""

        def loss_of(params: Params, sample: Tensor, label: Tensor, key: Tensor) -> Tensor:
            with self.masks(key[None]):
                outputs = functional_call(self.module, params, (sample[None],))
            return self.loss(outputs, label[None])[0]

        total, losses = Params(), inputs.new_zeros(0)
        inputs, labels = self._rows(inputs, rows), labels[rows]
        slopes_of = vmap(grad_and_value(loss_of), (None, 0, 0, 0))
        for c, params in points:
            try:
                slopes, losses = slopes_of(params, inputs, labels, keys[rows])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # vmap cannot trace it, so use one example after the other
                samples = zip(inputs, labels, keys[rows], strict=True)
                slopes, losses = stack_results(
                    [_alone(loss_of, params, *sample) for sample in samples]
                )
            total = _add(total, c, slopes)
        return losses, {key: Explicit(value) for key, value in total.items()}


def _alone(
    loss_of: Callable[..., Tensor], params: Params, *sample: Tensor
) -> tuple[Params, Tensor]:
    """Return the gradient and the loss of one example, computed by autograd."""
    leaves = {key: value.detach().requires_grad_() for key, value in params.items()}
    with torch.enable_grad():
        loss = loss_of(leaves, *sample)
    slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, slopes, strict=True)), loss.detach()


def _add(total: Params, c: float, slopes: Params) -> Params:
    """Return the total plus c times the slopes, for each parameter. The total may be empty."""
    scaled = {key: slope if c == 1 else c * slope for key, slope in slopes.items()}
    return {key: total[key] + value for key, value in scaled.items()} if total else scaled


def _add_clipped(totals: Params, gradients: dict[str, PerExample], clipping: Clipping) -> None:
    """Add the clipped gradients sum_i factors_i G_i to the totals.

    Examples whose gradient norm is not finite are left out. A factor of 0 is not enough, because 0
    times such a gradient would make the whole sum NaN.
    """
    if clipping.variables is not None:
        variables = clipping.variables.items()
        gradients = {key: of_variable(gradients[key], variable) for key, variable in variables}
    squares = {key: gradient.squares() for key, gradient in gradients.items()}
    finite = torch.stack([square.isfinite() for square in squares.values()]).all(0)
    if not holds(finite.all()):
        gradients = {key: gradient.rows(finite) for key, gradient in gradients.items()}
        squares = {key: square[finite] for key, square in squares.items()}
    factors = clipping.factors(squares)
    for key, gradient in gradients.items():
        if key not in totals:
            totals[key] = factors[key].new_zeros(gradient.shape)
        gradient.add_to_(totals[key], factors[key])


def samples_of(batch: Batch, replica: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels that one replica uses, including its replacement sample."""
    replaced = batch.replaced
    if replaced is None:
        return batch.inputs, batch.labels
    mask = replaced.replica == replica
    if not at_hand(mask.device):  # avoid a synchronization: write other rows behind the last one
        place = replaced.position.where(mask, len(batch.labels))
        pairs = (batch.inputs, replaced.inputs), (batch.labels, replaced.labels)
        inputs, labels = (
            torch.cat([shared, shared[:1]]).index_copy_(0, place, replacement)[:-1]
            for shared, replacement in pairs
        )
        return inputs, labels
    indices = mask.nonzero().flatten().tolist()
    if not indices:
        return batch.inputs, batch.labels
    inputs, labels = batch.inputs.clone(), batch.labels.clone()
    inputs[replaced.position[indices]] = replaced.inputs[indices]
    labels[replaced.position[indices]] = replaced.labels[indices]
    return inputs, labels
