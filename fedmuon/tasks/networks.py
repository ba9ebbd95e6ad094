"""Any torch module as a task: losses and gradients as pure functions of a stack of parameters.

Parameters are the module's own, by name, with the replica first: a weight [out, in] is held as
[S, out, in]. The numbers that the module itself holds are never read.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd

from fedmuon.core.threads import PerThread, spread
from fedmuon.tasks.base import Batch, Params, Points, blocks, joined, stacked
from fedmuon.tasks.chunks import (
    Chunks,
    Samples,
    exact_on,
    pieces,
    saved_entries,
    side_by_side,
    size_of,
)
from fedmuon.tasks.layers import fresh, refuse
from fedmuon.tasks.losses import Loss, Targets, cross_entropy, given_labels, mean_of
from fedmuon.tasks.per_example.clipped_sums import ClippedSums, unclipped
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.per_example.ghost import ghostly, refuse_mixing
from fedmuon.tasks.thread_copies import copyable, stateless

CPU = torch.device("cpu")
MEMORY = {"cpu": 1 << 28, "cuda": 1 << 32}  # bytes of activations that a thread holds at once
STACKED_PARAMETERS = {"cpu": 1 << 19, "cuda": 1 << 27}  # parameters of clients stepped together
SMALL = 1 << 21  # activations of a replica, up to which convolutions gain by sharing a call
Start = Callable[[nn.Module, np.random.Generator], dict[str, np.ndarray]]
Found = tuple[Tensor, Params]


@dataclass(frozen=True, eq=False)
class NetworkTask:
    """A module for samples of the given shape, with a loss of each sample.

    `targets` says what the outputs are compared with, `start` by which law parameters begin,
    `metrics` what evaluations tell beside the loss. `vectorized` says whether replicas share one
    call (torch.vmap) or take turns; None takes what was measured to be faster (see `_vectorizes`).
    The module's parameters may be on `meta`.
    """

    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    loss: Loss = cross_entropy
    targets: Targets = given_labels
    start: Start = fresh
    vectorized: bool | None = None
    metrics: Mapping[str, Loss] | None = None  # of each sample; None is the accuracy
    whole: bool = False  # inputs are whole numbers, which the module reads as such
    saved: int = field(init=False)  # activations kept for one sample
    chunks: Chunks = field(init=False)
    apart: bool = field(init=False)  # whether several threads may call it, each a copy
    own_module: Callable[[], nn.Module] = field(init=False)
    clipped_sums: Callable[[], ClippedSums] = field(init=False)
    unmixed: bool = field(init=False, default=False)  # whether it was tried for mixing samples

    def __post_init__(self) -> None:
        """Refuse modules whose samples are not independent, or whose draws are not keyed."""
        refuse(self.module)
        entry = torch.empty((), dtype=self.dtype).element_size()
        saved = max(1, saved_entries(self.module, self.shape, self.whole))
        most = MEMORY.get(self.device.type, 1 << 32) // (3 * entry * saved)  # and temporaries
        object.__setattr__(self, "saved", saved)
        object.__setattr__(self, "chunks", Chunks(max(1, most)))
        called = [self.loss, self.targets, *(self.metrics or {}).values()]
        sure = copyable(self.module) and all(map(stateless, called))
        apart = self.device.type == "cpu" and sure
        each = PerThread(partial(deepcopy, self.module)) if apart else self._module
        object.__setattr__(self, "apart", apart)
        object.__setattr__(self, "own_module", each)
        object.__setattr__(self, "clipped_sums", PerThread(self._sums))

    def _module(self) -> nn.Module:
        return self.module

    @property
    def stack_limit(self) -> int:
        """How many parameters of clients are stepped together on the device."""
        return STACKED_PARAMETERS.get(self.device.type, 1 << 27)

    def _vectorizes(self, rows: int) -> bool:
        """Whether replicas with so many samples share one call.

        On a CPU vmap makes grouped convolutions of theirs: measured at 0.6 to 0.95 of the time of
        turns below `SMALL`, at 1.1 to 1.2 above. Linear layers alone always gain.
        """
        if self.vectorized is not None:
            return self.vectorized
        return self.device.type != "cpu" or not self._convolves or rows * self.saved <= SMALL

    @cached_property
    def _convolves(self) -> bool:
        return any(isinstance(layer, _ConvNd) for layer in self.module.modules())

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        """Drawn in the order of the module's parameters; by torch's default laws (see `fresh`),
        unless `start` is another's."""
        drawn = self.start(self.module, rng)
        first = {name: torch.from_numpy(v).to(self.device, self.dtype) for name, v in drawn.items()}
        return {name: value.repeat(stack, *[1] * value.ndim) for name, value in first.items()}

    def gradient(self, params: Params, batches: Sequence[Batch]) -> Found:
        """Mean loss [K S] and gradient of the K blocks of S replicas."""
        with exact_on(self.device):
            if self._is_one_call(params, batches):
                return self._summed(params, side_by_side(batches))
            pairs = zip(blocks(params, len(batches)), batches, strict=True)
            return joined(spread([partial(self._mean, *pair) for pair in pairs], self.apart))

    def clipped(self, points: Points, batches: Sequence[Batch], clipping: Clipping) -> Found:
        """Mean loss [K S] at the last point and the sums of clipped per-example gradients."""
        if whole := unclipped(self.gradient, points, batches, clipping):
            return whole
        each = [(c, blocks(params, len(batches))) for c, params in points]

        def own(k: int) -> Found:
            mine = [(c, block[k]) for c, block in each]
            return self.clipped_sums()(mine, [self._aimed(batches[k])], clipping)

        return joined(spread([partial(own, k) for k in range(len(batches))], self.apart))

    def _aimed(self, batch: Batch) -> Batch:
        """The batch with targets for labels."""
        there = batch.replaced
        if there is not None:
            there = replace(there, labels=self.targets(there.inputs, there.labels))
        return Batch(batch.inputs, self.targets(batch.inputs, batch.labels), there)

    def _sums(self) -> ClippedSums:
        module = self.own_module()
        found = ghostly(module, self.shape)
        if found is not None and not self.unmixed:  # else a sample goes through it alone
            refuse_mixing(module, found.layers, self.shape)
            object.__setattr__(self, "unmixed", True)  # the copies of other threads, too
        each = self.clipped_sums if self.apart else None
        return ClippedSums(module, self.shape, self.loss, self.device, self.saved, found, each)

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Per-sample losses [S, n], and by name what else is measured of each sample."""
        samples = Samples(batch.inputs[None], batch.labels[None], batch.labels[None])
        rows, replicas = len(batch.labels), size_of(params)
        shared = replicas > 1 and self._vectorizes(rows)

        def work(part: slice) -> tuple[Tensor, Tensor]:
            return self._mapped(self._looked_at, params, samples.rows(part), shared)

        with torch.no_grad(), exact_on(self.device):
            return joined(list(self.chunks.each(work, rows, replicas if shared else 1)), 1)

    def _is_one_call(self, params: Params, batches: Sequence[Batch]) -> bool:
        """Whether the clients are replicas of one call: one model each, and alike in size."""
        alike = len({len(batch.labels) for batch in batches}) == 1
        single = size_of(params) == len(batches) > 1
        whole = not any(batch.replaced for batch in batches)
        return alike and single and whole and self._vectorizes(len(batches[0].labels))

    def _mean(self, params: Params, batch: Batch) -> Found:
        """Loss [S] and gradient of one batch. In a replica with another sample the shared one has
        weight 0, and its own is added."""
        rows, there = len(batch.labels), batch.replaced
        shares = batch.inputs.new_full((1, rows), 1 / rows)
        shared = Samples(batch.inputs[None], batch.labels[None], shares)
        if there is None:
            return self._summed(params, shared)
        weights = shares.repeat(size_of(params), 1)
        weights[there.replica, there.position] = 0.0
        loss, slope = self._summed(params, shared._replace(weights=weights))
        own = Samples(there.inputs[:, None], there.labels[:, None], shares[:, :1])
        changed = {name: value[there.replica] for name, value in params.items()}
        more, steeper = self._summed(changed, own)
        loss[there.replica] += more
        for name, value in steeper.items():
            slope[name][there.replica] += value
        return loss, slope

    def _summed(self, params: Params, samples: Samples) -> Found:
        """sum_j w_j loss_j [B] and its gradient, in pieces that several threads take."""
        if not self.apart:
            return self._in_turn(params, samples)
        cut = pieces(params, samples, self._products)
        work = [partial(self._in_turn, *piece) for row in cut for piece in row]
        found = iter(spread(work))
        return joined([reduce(_added_, islice(found, len(row))) for row in cut])

    @cached_property
    def _products(self) -> int:
        """About how many a sample costs: one a parameter, and some each number that is kept."""
        return sum(value.numel() for value in self.module.parameters()) + 64 * self.saved

    def _in_turn(self, params: Params, samples: Samples) -> Found:
        """The same, as many samples at once as fit into memory."""
        rows, replicas = samples.labels.shape[1], size_of(params)
        shared = replicas > 1 and self._vectorizes(rows)
        work = grad_and_value(self.total) if shared else self._slope

        def part_of(part: slice) -> Found:
            slope, loss = self._mapped(work, params, samples.rows(part), shared)
            return loss, slope

        return reduce(_added_, self.chunks.each(part_of, rows, replicas if shared else 1))

    def _mapped(
        self, function: Callable[..., Any], params: Params, samples: Samples, shared: bool
    ) -> Any:
        """function(parameters, inputs, labels, weights) of every replica, stacked: one call that
        they share, or turns."""
        alone = [len(values) == 1 for values in samples]
        if shared:
            given = [v[0] if one else v for v, one in zip(samples, alone, strict=True)]
            return vmap(function, (0, *(None if one else 0 for one in alone)))(params, *given)

        def turn(r: int) -> Any:
            given = (v[0 if one else r] for v, one in zip(samples, alone, strict=True))
            return function({name: value[r] for name, value in params.items()}, *given)

        return stacked([turn(r) for r in range(size_of(params))])

    def _outputs(self, params: Params, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, *self.shape)
        return functional_call(self.own_module(), params, (rows.long() if self.whole else rows,))

    def total(self, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """sum_j w_j loss_j [] of one replica's parameters."""
        return self.loss(self._outputs(params, inputs), self.targets(inputs, labels)) @ weights

    def _slope(
        self, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Params, Tensor]:
        """As grad_and_value(self.total), without functorch's overhead."""
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = self.total(leaves, inputs, labels, weights)
        slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, slopes, strict=True)), loss.detach()

    def _looked_at(
        self, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Params]:
        outputs, targets = self._outputs(params, inputs), self.targets(inputs, labels)
        wanted = {"accuracy": self._right} if self.metrics is None else self.metrics
        return self.loss(outputs, targets), {
            name: measure(outputs, targets) for name, measure in wanted.items()
        }

    def _right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Whether each prediction is right, or which share of the sample's is."""
        right = outputs.argmax(-1) == targets
        return mean_of(right.to(self.dtype), targets) if right.ndim > 1 else right


def _added_(total: Found, more: Found) -> Found:
    """Sums, in place where they are."""
    for name, value in more[1].items():
        total[1][name].add_(value)
    return total[0].add_(more[0]), total[1]
