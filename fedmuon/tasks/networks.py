"""Any torch module as a task: losses and gradients as pure functions of a stack of parameters.

Parameters have the names of the module's parameters. Their first axis is the replica: a weight
[out, in] is stored as [S, out, in]. The values inside the module itself are never used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedmuon.core.errors import InputError
from fedmuon.core.threads import PerThread, spread
from fedmuon.tasks.base import (
    Batch,
    Loss,
    Params,
    Points,
    Targets,
    blocks,
    concatenate,
    cross_entropy,
    labels_as_targets,
    mean_of,
    split_statistics,
    stack_results,
)
from fedmuon.tasks.dropout import Masks
from fedmuon.tasks.models import reject_layers, statistics_of, torch_law
from fedmuon.tasks.own_samples import has_own_samples, mean_with_own_samples
from fedmuon.tasks.per_example.clipped_sums import (
    ClippedSums,
    samples_of,
    sums_without_clipping,
)
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.per_example.ghost import find_ghosts, reject_mixing
from fedmuon.tasks.thread_copies import TORCH, copyable, of_known_layers, stateless
from fedmuon.tasks.work_split import (
    Chunks,
    Samples,
    exact_on,
    size_of,
    split_samples,
    try_module,
)

CPU = torch.device("cpu")
NO_STATISTICS: Params = {}
MEMORY = {"cpu": 1 << 28, "cuda": 1 << 32}  # bytes of activations that a thread stores at once
LOSS_COPIES = 3  # tensors of the outputs' size: outputs, log-probabilities, and a gradient
STACKED_PARAMETERS = {"cpu": 1 << 19, "cuda": 1 << 27}  # maximum parameters in a batch of clients
SMALL = 1 << 21  # up to this number of activations per replica, convolutions share a call
Start = Callable[[nn.Module, np.random.Generator], dict[str, np.ndarray]]
Found = tuple[Tensor, Params]


@dataclass(frozen=True, eq=False)
class NetworkTask:
    """The task of a torch module: samples of a given shape, and a loss for each sample.

    Attributes:
        module: The network. Its parameters may be on the device `meta`.
        shape: Shape of one sample.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
        loss: Function from (outputs, targets) to losses [n].
        targets: Function from (inputs, labels) to the targets that the loss receives.
        start: Function that draws the initial parameters.
        vectorized: Whether all replicas share one call (torch.vmap). With false, replicas run one
            after the other. With None, the faster way is chosen (see `_vectorizes`).
        metrics: Metrics of each sample in evaluations, by name. None means the accuracy.
        whole: Whether inputs are integers, such as tokens.
        activations: Number of activations that autograd stores per sample. With None, a trial call
            counts them.
    """

    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    loss: Loss = cross_entropy
    targets: Targets = labels_as_targets
    start: Start = torch_law
    vectorized: bool | None = None
    metrics: Mapping[str, Loss] | None = None
    whole: bool = False
    activations: int | None = None
    # The following are computed when the task is created.
    saved: int = field(init=False)  # number of activations that autograd stores per sample
    outputs: int = field(init=False)  # number of outputs per sample
    products: int = field(init=False)  # approximate number of products per sample
    convolves: bool = field(init=False)
    channels_last: bool = field(init=False)  # memory order of convolution weights during a call
    statistics: tuple[str, ...] = field(init=False)  # names of running statistics
    shares_parameters: bool = field(init=False)  # whether a parameter has several names
    axes: tuple[int, ...] = field(init=False)  # axis of the samples in the input of each dropout
    stack_limit: int = field(init=False)  # number of parameters up to which a batch is faster
    chunks: Chunks = field(init=False)
    evaluation_chunks: Chunks = field(init=False)  # without gradients, only outputs are stored
    thread_safe: bool = field(init=False)  # whether threads may call it, each with its own copy
    own_module: Callable[[], nn.Module] = field(init=False)  # returns the calling thread's copy
    clipped_sums: Callable[[], ClippedSums] = field(init=False)  # the same for clipped sums
    unmixed: bool = field(init=False, default=False)  # whether mixing of samples was excluded

    def __post_init__(self) -> None:
        """Raise an error for modules with layers that `reject_layers` does not allow."""
        reject_layers(self.module)
        device = self.device.type
        entry = torch.empty((), dtype=self.dtype).element_size()
        trial = try_module(self.module, self.shape, self.whole)
        saved = max(1, trial.saved if self.activations is None else self.activations)
        outputs = max(1, trial.outputs)
        # The factor 3 leaves space for temporary tensors. The loss stores three tensors of the size
        # of the outputs, which are larger than all activations if the vocabulary is large.
        limit = MEMORY.get(device, 1 << 32) // (LOSS_COPIES * entry * max(saved, outputs))
        evaluated = MEMORY.get(device, 1 << 32) // (LOSS_COPIES * entry * outputs)
        # Each product reads all frozen weights, so products with few samples are slow. The
        # activations may therefore take twice the space of frozen weights.
        frozen = {value.data_ptr(): value.nbytes for value in self.module.buffers()}
        limit = max(limit, 2 * sum(frozen.values()) // (entry * (saved + LOSS_COPIES * outputs)))
        called = [self.loss, self.targets, *(self.metrics or {}).values()]
        thread_safe = device == "cpu" and copyable(self.module) and all(map(stateless, called))
        modules = PerThread(partial(deepcopy, self.module)) if thread_safe else lambda: self.module
        derived = {
            "saved": saved,
            "outputs": outputs,
            "axes": trial.axes,
            "statistics": tuple(statistics_of(self.module)),
            # The search for shared parameters takes time in each call of a model with many layers.
            "shares_parameters": _shares_parameters(self.module),
            "products": sum(param.numel() for param in self.module.parameters()) + 64 * saved,
            "convolves": any(isinstance(layer, _ConvNd) for layer in self.module.modules()),
            # With channels as the last axis in memory, oneDNN convolves and torch pools faster. A
            # module of the user may not support this order, because `view` fails on it.
            "channels_last": thread_safe
            and of_known_layers(self.module)
            and self.dtype == torch.float32,
            "stack_limit": STACKED_PARAMETERS.get(device, 1 << 27),
            "chunks": Chunks(max(1, limit)),
            "evaluation_chunks": Chunks(max(1, min(limit, evaluated))),
            "thread_safe": thread_safe,
            "own_module": modules,
            "clipped_sums": PerThread(self._sums),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def keyed(self) -> bool:
        """Whether the network has dropout. The masks then depend on the keys of the samples."""
        return bool(self.axes)

    def _vectorizes(self, rows: int) -> bool:
        """Return whether replicas with `rows` samples share one call of the network.

        On a CPU, torch.vmap converts convolutions to grouped convolutions. Below `SMALL`
        activations, one shared call took 0.6 to 0.95 times the time of separate calls in
        measurements. Above `SMALL` activations, one shared call took 1.1 to 1.2 times the time.
        Networks without convolutions are always faster in one call.
        """
        if self.vectorized is not None:
            return self.vectorized
        return self.device.type != "cpu" or not self.convolves or rows * self.saved <= SMALL

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        """Draw the initial parameters with the function `start`, the same for all replicas."""
        drawn = self.start(self.module, rng)
        fresh = {name: 1.0 * name.endswith("var") for name in self.statistics}
        for name, value in fresh.items():
            drawn[name] = np.full(self.module.get_buffer(name).shape, value)
        first = {name: torch.from_numpy(v).to(self.device, self.dtype) for name, v in drawn.items()}
        return {name: value.repeat(stack, *[1] * value.ndim) for name, value in first.items()}

    def gradient(self, params: Params, batches: Sequence[Batch]) -> Found:
        """Return the mean loss and its gradient, for K blocks of S replicas.

        For running statistics, the result contains their next values instead of a gradient. Norm
        layers with running statistics need complete batches, so replicas then run one after the
        other.
        """
        if self.statistics:
            turns = [
                partial(self._in_one_batch, {name: v[r] for name, v in block.items()}, batch, r)
                for block, batch in zip(blocks(params, len(batches)), batches, strict=True)
                for r in range(size_of(block))
            ]
            with exact_on(self.device):
                return stack_results(spread(turns, self.thread_safe))
        if has_own_samples(batches):
            return mean_with_own_samples(self.gradient, params, batches)
        with exact_on(self.device):
            sizes = {len(batch.labels) for batch in batches}
            single = size_of(params) == len(batches) > 1  # one model per client
            unreplaced = not any(batch.replaced for batch in batches)
            if single and unreplaced and len(sizes) == 1 and self._vectorizes(*sizes):
                inputs = torch.stack([batch.inputs for batch in batches])
                labels = torch.stack([batch.labels for batch in batches])
                weights = inputs.new_full((1, *sizes), 1 / labels.shape[1])
                keys = torch.stack([self._keys(batch) for batch in batches])
                return self._weighted_gradient(params, Samples(inputs, labels, weights, keys))
            pairs = zip(blocks(params, len(batches)), batches, strict=True)
            return concatenate(
                spread([partial(self._mean_gradient, *pair) for pair in pairs], self.thread_safe)
            )

    def clipped(self, points: Points, batches: Sequence[Batch], clipping: Clipping) -> Found:
        """Return the mean loss at the last point, and the sums of the clipped gradients."""
        self.require_unmixed()
        if unclipped := sums_without_clipping(self.gradient, points, batches, clipping):
            return unclipped
        split_points = [(c, blocks(params, len(batches))) for c, params in points]

        def client_sums(k: int) -> Found:
            batch, replaced = batches[k], batches[k].replaced
            if replaced is not None:
                replaced = replace(replaced, labels=self.targets(replaced.inputs, replaced.labels))
            aimed = Batch(
                batch.inputs, self.targets(batch.inputs, batch.labels), replaced, self._keys(batch)
            )
            return self.clipped_sums()(
                [(c, block[k]) for c, block in split_points], [aimed], clipping
            )

        return concatenate(
            spread([partial(client_sums, k) for k in range(len(batches))], self.thread_safe)
        )

    def _sums(self) -> ClippedSums:
        module = self.own_module()
        ghosts = find_ghosts(module, self.shape, self.whole)
        if ghosts is not None and not self.unmixed:  # without ghosts, samples are called separately
            reject_mixing(module, ghosts.layers, self.shape, self.masks, self.whole)
            object.__setattr__(self, "unmixed", True)  # also valid for copies in other threads
        per_thread = self.clipped_sums if self.thread_safe else None
        return ClippedSums(
            module, self.shape, self.loss, self.device, self.saved, ghosts, per_thread, self.masks,
            self.whole, self.outputs,
        )  # fmt: skip

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return the loss of each sample, and a dictionary with the metrics of each sample."""
        samples = Samples(batch.inputs[None], *[batch.labels[None]] * 3)
        rows, replicas = len(batch.labels), size_of(params)
        shared = replicas > 1 and self._vectorizes(rows)
        with torch.no_grad(), exact_on(self.device):
            results = self.evaluation_chunks.each(
                lambda part: self._map_replicas(self._losses, params, samples.rows(part), shared),
                rows, replicas if shared else 1,
            )  # fmt: skip
            return concatenate(list(results), 1)

    def require_unmixed(self) -> None:
        """Raise an error if norm layers mix the samples of a batch, as BatchNorm does.

        Clipping could then not protect single examples.
        """
        if self.statistics:
            name = self.statistics[0].rpartition(".")[0]
            kind = type(self.module.get_submodule(name)).__name__
            raise InputError(
                f"{name or 'the network'} is a {kind}, which mixes the samples of a batch, so "
                "clipping cannot bound the influence of one example. Use GroupNorm or LayerNorm "
                "in private runs."
            )

    def _in_one_batch(self, params: Params, batch: Batch, replica: int) -> tuple[Tensor, Params]:
        """Return the loss and the gradient of one replica, and its next running statistics."""
        inputs, labels = samples_of(batch, replica)
        shares = inputs.new_full((len(labels),), 1 / len(labels))
        learned, now = split_statistics(params)
        after = {name: value.clone() for name, value in now.items()}  # the call writes into these
        try:
            slope, loss = self._slope(
                self._laid_out(learned), inputs, labels, shares, self._keys(batch), after
            )
        except ValueError as error:
            if len(labels) > 1 or "more than 1 value per channel" not in str(error):
                raise
            name = self.statistics[0].rpartition(".")[0]
            raise InputError(
                f"{name or 'the network'} normalizes over a batch, but a batch of a client has "
                "only one sample. Set [local] batch and [data] minimum to 2 or more, or use "
                "GroupNorm."
            ) from None
        return loss, {**slope, **after}

    def _mean_gradient(self, params: Params, batch: Batch) -> Found:
        """Return the mean loss of one batch and its gradient, for all replicas.

        If a replica has a replacement sample, the replaced sample has weight 0, and the result of
        the replacement is added.
        """
        rows, replaced = len(batch.labels), batch.replaced
        shares = batch.inputs.new_full((1, rows), 1 / rows)
        keys = self._keys(batch)
        shared = Samples(batch.inputs[None], batch.labels[None], shares, keys[None])
        if replaced is None:
            return self._weighted_gradient(params, shared)
        weights = shares.repeat(size_of(params), 1)
        weights[replaced.replica, replaced.position] = 0.0
        loss, slope = self._weighted_gradient(params, shared._replace(weights=weights))
        replacements = Samples(
            replaced.inputs[:, None], replaced.labels[:, None], shares[:, :1],
            keys[replaced.position][:, None],
        )  # fmt: skip
        changed = {name: value[replaced.replica] for name, value in params.items()}
        more_loss, steeper = self._weighted_gradient(changed, replacements)
        loss[replaced.replica] += more_loss
        for name, value in steeper.items():
            slope[name][replaced.replica] += value
        return loss, slope

    def _weighted_gradient(self, params: Params, samples: Samples) -> Found:
        """Return the sum of the samples' losses times their weights, and the gradient of the sum.

        Several threads share the work.
        """
        if not self.thread_safe:
            return self._in_chunks(params, samples)
        cut = split_samples(params, samples, self.products)
        work = [partial(self._in_chunks, *piece) for row in cut for piece in row]
        results = iter(spread(work))
        return concatenate([reduce(_add_, islice(results, len(row))) for row in cut])

    def _in_chunks(self, params: Params, samples: Samples) -> Found:
        """Return the weighted sum of losses and its gradient, computed in one thread.

        As many samples as fit into memory are computed at once.
        """
        rows, replicas = samples.labels.shape[1], size_of(params)
        shared = replicas > 1 and self._vectorizes(rows)
        work = grad_and_value(self.total) if shared else self._slope
        results = self.chunks.each(
            lambda part: self._map_replicas(work, params, samples.rows(part), shared),
            rows, replicas if shared else 1,
        )  # fmt: skip
        return reduce(_add_, map(itemgetter(1, 0), results))  # (slope, loss) -> (loss, slope)

    def _map_replicas(
        self, function: Callable[..., Any], params: Params, samples: Samples, shared: bool
    ) -> Any:
        """Call function(parameters, inputs, labels, weights, keys) for each replica.

        Stack the results. If `shared` is true, all replicas share one call. Otherwise, they run one
        after the other.
        """
        alone = [len(values) == 1 for values in samples]
        if shared:
            arguments = [v[0] if single else v for v, single in zip(samples, alone, strict=True)]
            mapped = vmap(function, (0, *(None if single else 0 for single in alone)))
            try:
                return mapped(params, *arguments)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # vmap cannot trace the module, for example an `if` on a value
                object.__setattr__(self, "vectorized", False)  # from now on, one call per replica
                function = function if function == self._losses else self._slope

        def turn(r: int) -> Any:
            arguments = (v[0 if single else r] for v, single in zip(samples, alone, strict=True))
            return function(self._laid_out({name: v[r] for name, v in params.items()}), *arguments)

        return stack_results([turn(r) for r in range(size_of(params))])

    def _laid_out(self, params: Params) -> Params:
        """Return one replica's parameters in the memory layout that is faster for convolutions."""
        if not self.channels_last:
            return params
        order = torch.channels_last  # `contiguous` would keep the strides of a single channel
        return {
            name: value.to(memory_format=order) if value.ndim == 4 else value
            for name, value in params.items()
        }

    def _keys(self, batch: Batch) -> Tensor:
        """Return the dropout keys of a batch, or row numbers if the batch has no keys.

        A batch has no keys, for example, in an estimate of constants. Without dropout, the values
        of the keys have no effect.
        """
        if not self.keyed:
            return batch.labels
        if batch.keys is None:
            return torch.arange(len(batch.labels), device=self.device)
        return batch.keys.to(self.device)

    def masks(self, keys: Tensor | None) -> AbstractContextManager[Any]:
        """Return the context that draws the dropout masks of one call of the network.

        Without keys, nothing is dropped.
        """
        return Masks(keys, self.axes) if self.keyed else nullcontext()

    def _outputs(
        self, params: Params, inputs: Tensor, keys: Tensor | None, laid_out: bool = False
    ) -> Tensor:
        rows = inputs.reshape(-1, *self.shape)
        rows = rows.long() if self.whole else rows
        if laid_out and rows.ndim == 4:  # otherwise, each direction of autograd would convert them
            rows = rows.contiguous(memory_format=torch.channels_last)
        with self.masks(keys):
            return functional_call(
                self.own_module(), params, (rows,), tie_weights=self.shares_parameters
            )

    def total(
        self,
        params: Params,
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor,
        keys: Tensor,
        laid_out: bool = False,
    ) -> Tensor:
        """Multiply the loss of each sample by its weight, and return the sum for one replica.

        `laid_out` is whether the module receives the samples with channels as the last axis.
        """
        outputs = self._outputs(params, inputs, keys, laid_out)
        return self.loss(outputs, self.targets(inputs, labels)) @ weights

    def _slope(
        self,
        params: Params,
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor,
        keys: Tensor,
        statistics: Params = NO_STATISTICS,
    ) -> tuple[Params, Tensor]:
        """Return the gradient and the value of `total`, without the overhead of torch.func."""
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        tensors = {**leaves, **statistics}
        loss = self.total(tensors, inputs, labels, weights, keys, self.channels_last)
        slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        gradients = (slope.contiguous() for slope in slopes)
        return dict(zip(leaves, gradients, strict=True)), loss.detach()

    def _losses(
        self, params: Params, inputs: Tensor, labels: Tensor, *unused: Tensor
    ) -> tuple[Tensor, Params]:
        with evaluating(self.own_module()):
            outputs = self._outputs(params, inputs, None)
        targets = self.targets(inputs, labels)
        loss = self.loss(outputs, targets)
        if self.metrics is not None:
            return loss, {name: metric(outputs, targets) for name, metric in self.metrics.items()}
        # The accuracy is 0 or 1, or the share of correct predictions if a sample has several
        # targets.
        right = outputs.argmax(-1) == targets
        if right.ndim > 1:
            right = mean_of(right.to(self.dtype), targets)
        return loss, {"accuracy": right}


def _shares_parameters(module: nn.Module) -> bool:
    names, different = (
        sum(1 for _ in module.named_parameters(remove_duplicate=again)) for again in (False, True)
    )
    return names > different


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch a module to evaluation mode within this context.

    Only norm layers with running statistics, and layers from outside torch, change their mode.
    Other torch layers compute the same in both modes, except dropouts, whose masks are already off.
    These other layers keep their mode, because some of them use a different implementation in
    evaluation mode.
    """
    changed = [
        layer
        for layer in module.modules()
        if layer.training
        and (not type(layer).__module__.startswith(TORCH) or isinstance(layer, _NormBase))
    ]
    try:
        for layer in changed:
            layer.training = False
        yield
    finally:
        for layer in changed:
            layer.training = True


def _add_(total: Found, part: Found) -> Found:
    """Add the losses and gradients of `part` to `total` in place."""
    for name, value in part[1].items():
        total[1][name].add_(value)
    return total[0].add_(part[0]), total[1]
