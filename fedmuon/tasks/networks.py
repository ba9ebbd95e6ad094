"""Any torch module as a task: losses and gradients as pure functions of a stack of parameters.

Parameters have the module's names, with the replica as first axis: a weight [out, in] is stored as
[S, out, in]. The values inside the module itself are never read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from operator import itemgetter
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import _has_any_global_hook

from fedmuon.core.errors import Guard, InputError
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
from fedmuon.tasks.per_example.clipped_sums import (
    ClippedSums,
    samples_of,
    sums_without_clipping,
)
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.per_example.ghost import find_ghosts, reject_mixing
from fedmuon.tasks.work_split import (
    Chunks,
    Samples,
    exact_on,
    size_of,
    split_samples,
    try_module,
)

CPU = torch.device("cpu")
TORCH = "torch.nn.modules."
NO_STATISTICS: Params = {}
MEMORY = {"cpu": 1 << 28, "cuda": 1 << 32}  # bytes of activations that a thread holds at once
STACKED_PARAMETERS = {"cpu": 1 << 19, "cuda": 1 << 27}  # parameters of clients stepped together
SMALL = 1 << 21  # activations of a replica up to which convolutions are faster in a shared call
Start = Callable[[nn.Module, np.random.Generator], dict[str, np.ndarray]]
Found = tuple[Tensor, Params]


@dataclass(frozen=True, eq=False)
class NetworkTask:
    """A module for samples of a given shape, with a loss for each sample.

    Attributes:
        module: The network. Its parameters may be on `meta`.
        shape: Shape of one sample.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
        loss: (outputs, targets) -> losses [n].
        targets: (inputs, labels) -> what the outputs are compared with.
        start: Draws the initial parameters.
        vectorized: Whether replicas share one call (torch.vmap) or take turns. None chooses what
            was measured to be faster (see `_vectorizes`).
        metrics: Per-sample metrics of evaluations by name; None is the accuracy.
        whole: Whether inputs are whole numbers, such as tokens.
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
    # Computed when the task is made:
    saved: int = field(init=False)  # activations that autograd keeps for one sample
    products: int = field(init=False)  # approximately, of one sample: for parameters, activations
    convolves: bool = field(init=False)
    channels_last: bool = field(init=False)  # how weights of convolutions lie in memory in a call
    statistics: tuple[str, ...] = field(init=False)  # names of running statistics
    axes: tuple[int, ...] = field(init=False)  # of the samples, in the inputs of dropouts
    stack_limit: int = field(init=False)  # parameters up to which clients train faster as one stack
    chunks: Chunks = field(init=False)
    thread_safe: bool = field(init=False)  # if several threads may call it, each with its own copy
    own_module: Callable[[], nn.Module] = field(init=False)  # the copy of the calling thread
    clipped_sums: Callable[[], ClippedSums] = field(init=False)  # likewise
    unmixed: bool = field(init=False, default=False)  # whether mixing of samples was ruled out

    def __post_init__(self) -> None:
        """Reject modules with layers that no run could repeat (see `reject_layers`)."""
        reject_layers(self.module)
        device = self.device.type
        entry = torch.empty((), dtype=self.dtype).element_size()
        trial = try_module(self.module, self.shape, self.whole)
        saved = max(1, trial.saved)
        # A factor of 3 leaves room for temporaries.
        most = MEMORY.get(device, 1 << 32) // (3 * entry * saved)
        called = [self.loss, self.targets, *(self.metrics or {}).values()]
        thread_safe = device == "cpu" and copyable(self.module) and all(map(stateless, called))
        own = PerThread(partial(deepcopy, self.module)) if thread_safe else lambda: self.module
        found = {
            "saved": saved,
            "axes": trial.axes,
            "statistics": tuple(statistics_of(self.module)),
            "products": sum(one.numel() for one in self.module.parameters()) + 64 * saved,
            "convolves": any(isinstance(layer, _ConvNd) for layer in self.module.modules()),
            # oneDNN convolves and torch pools faster with channels as the last axis in memory. A
            # module of a user may not expect this order: `view` fails on it.
            "channels_last": thread_safe and self.dtype == torch.float32,
            "stack_limit": STACKED_PARAMETERS.get(device, 1 << 27),
            "chunks": Chunks(max(1, most)),
            "thread_safe": thread_safe,
            "own_module": own,
            "clipped_sums": PerThread(self._sums),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def keyed(self) -> bool:
        """Whether the network has a dropout, whose masks follow from the keys of the samples."""
        return bool(self.axes)

    def _vectorizes(self, rows: int) -> bool:
        """Whether replicas with so many samples share one call.

        On a CPU, vmap turns convolutions into grouped ones. They were measured at 0.6 to 0.95 times
        the time of separate calls below `SMALL` activations, and at 1.1 to 1.2 times above. Other
        networks are always faster in one call.
        """
        if self.vectorized is not None:
            return self.vectorized
        return self.device.type != "cpu" or not self.convolves or rows * self.saved <= SMALL

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        """Draw parameters with `start`: by default with torch's laws, in the module's order."""
        drawn = self.start(self.module, rng)
        fresh = {name: 1.0 * name.endswith("var") for name in self.statistics}
        for name, value in fresh.items():
            drawn[name] = np.full(self.module.get_buffer(name).shape, value)
        first = {name: torch.from_numpy(v).to(self.device, self.dtype) for name, v in drawn.items()}
        return {name: value.repeat(stack, *[1] * value.ndim) for name, value in first.items()}

    def gradient(self, params: Params, batches: Sequence[Batch]) -> Found:
        """Mean loss [K S] and gradient of the K blocks of S replicas.

        Running statistics have their next values in the place of a gradient. Their norms need
        whole batches, so replicas take turns.
        """
        if self.statistics:
            turns = [
                partial(self._in_one_batch, {name: one[r] for name, one in block.items()}, batch, r)
                for block, batch in zip(blocks(params, len(batches)), batches, strict=True)
                for r in range(size_of(block))
            ]
            with exact_on(self.device):
                return stack_results(spread(turns, self.thread_safe))
        with exact_on(self.device):
            sizes = {len(batch.labels) for batch in batches}
            single = size_of(params) == len(batches) > 1  # one model for each client
            whole = not any(batch.replaced for batch in batches)
            if single and whole and len(sizes) == 1 and self._vectorizes(*sizes):
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
        """Mean loss [K S] at the last point and the sums of clipped per-example gradients."""
        self.require_unmixed()
        if whole := sums_without_clipping(self.gradient, points, batches, clipping):
            return whole
        each = [(c, blocks(params, len(batches))) for c, params in points]

        def own(k: int) -> Found:
            batch, there = batches[k], batches[k].replaced
            if there is not None:
                there = replace(there, labels=self.targets(there.inputs, there.labels))
            aimed = Batch(
                batch.inputs, self.targets(batch.inputs, batch.labels), there, self._keys(batch)
            )
            return self.clipped_sums()([(c, block[k]) for c, block in each], [aimed], clipping)

        return concatenate(spread([partial(own, k) for k in range(len(batches))], self.thread_safe))

    def _sums(self) -> ClippedSums:
        module = self.own_module()
        found = find_ghosts(module, self.shape, self.whole)
        if found is not None and not self.unmixed:  # without ghosts, samples are called one by one
            reject_mixing(module, found.layers, self.shape, self.masks, self.whole)
            object.__setattr__(self, "unmixed", True)  # holds for copies in other threads, too
        each = self.clipped_sums if self.thread_safe else None
        return ClippedSums(
            module, self.shape, self.loss, self.device, self.saved, found, each, self.masks,
            self.whole,
        )  # fmt: skip

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return per-sample losses [S, n] and per-sample metrics by name."""
        samples = Samples(batch.inputs[None], *[batch.labels[None]] * 3)
        rows, replicas = len(batch.labels), size_of(params)
        shared = replicas > 1 and self._vectorizes(rows)
        with torch.no_grad(), exact_on(self.device):
            found = self.chunks.each(
                lambda part: self._map_replicas(self._losses, params, samples.rows(part), shared),
                rows, replicas if shared else 1,
            )  # fmt: skip
            return concatenate(list(found), 1)

    def require_unmixed(self) -> None:
        """Reject a network whose norms mix the samples of a batch, for privacy of examples."""
        if self.statistics:
            name = self.statistics[0].rpartition(".")[0]
            kind = type(self.module.get_submodule(name)).__name__
            raise InputError(
                f"{name or 'the network'} is a {kind}, which mixes the samples of a batch, so "
                "clipping cannot bound the influence of one example: use GroupNorm or LayerNorm in "
                "private runs"
            )

    def _in_one_batch(self, params: Params, batch: Batch, replica: int) -> tuple[Tensor, Params]:
        """Loss [] and gradient of one replica, and its next running statistics."""
        inputs, labels = samples_of(batch, replica)
        shares = inputs.new_full((len(labels),), 1 / len(labels))
        learned, now = split_statistics(params)
        after = {name: value.clone() for name, value in now.items()}  # which the call writes into
        try:
            slope, loss = self._slope(
                self._laid_out(learned), inputs, labels, shares, self._keys(batch), after
            )
        except ValueError as error:
            if len(labels) > 1 or "more than 1 value per channel" not in str(error):
                raise
            name = self.statistics[0].rpartition(".")[0]
            raise InputError(
                f"{name or 'the network'} normalizes a batch, and a client's batch has a single "
                "sample: set [local] batch to 2 or more, and [data] minimum too, or use GroupNorm"
            ) from None
        return loss, {**slope, **after}

    def _mean_gradient(self, params: Params, batch: Batch) -> Found:
        """Loss [S] and gradient of one batch.

        In a replica with a replaced sample, the shared one has weight 0, and its own is added.
        """
        rows, there = len(batch.labels), batch.replaced
        shares = batch.inputs.new_full((1, rows), 1 / rows)
        keys = self._keys(batch)
        shared = Samples(batch.inputs[None], batch.labels[None], shares, keys[None])
        if there is None:
            return self._weighted_gradient(params, shared)
        weights = shares.repeat(size_of(params), 1)
        weights[there.replica, there.position] = 0.0
        loss, slope = self._weighted_gradient(params, shared._replace(weights=weights))
        own = Samples(
            there.inputs[:, None], there.labels[:, None], shares[:, :1],
            keys[there.position][:, None],
        )  # fmt: skip
        changed = {name: value[there.replica] for name, value in params.items()}
        more, steeper = self._weighted_gradient(changed, own)
        loss[there.replica] += more
        for name, value in steeper.items():
            slope[name][there.replica] += value
        return loss, slope

    def _weighted_gradient(self, params: Params, samples: Samples) -> Found:
        """sum_j w_j loss_j [B] and its gradient, in pieces for several threads."""
        if not self.thread_safe:
            return self._in_chunks(params, samples)
        cut = split_samples(params, samples, self.products)
        work = [partial(self._in_chunks, *piece) for row in cut for piece in row]
        found = iter(spread(work))
        return concatenate([reduce(_add_, islice(found, len(row))) for row in cut])

    def _in_chunks(self, params: Params, samples: Samples) -> Found:
        """The same in one thread, with as many samples at once as fit into memory."""
        rows, replicas = samples.labels.shape[1], size_of(params)
        shared = replicas > 1 and self._vectorizes(rows)
        work = grad_and_value(self.total) if shared else self._slope
        found = self.chunks.each(
            lambda part: self._map_replicas(work, params, samples.rows(part), shared),
            rows, replicas if shared else 1,
        )  # fmt: skip
        return reduce(_add_, map(itemgetter(1, 0), found))  # (slope, loss) -> (loss, slope)

    def _map_replicas(
        self, function: Callable[..., Any], params: Params, samples: Samples, shared: bool
    ) -> Any:
        """Stack function(parameters, inputs, labels, weights, keys) of all replicas.

        They share one call, or take turns.
        """
        alone = [len(values) == 1 for values in samples]
        if shared:
            given = [v[0] if one else v for v, one in zip(samples, alone, strict=True)]
            each = vmap(function, (0, *(None if one else 0 for one in alone)))
            try:
                return each(params, *given)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # vmap cannot trace it, for example an `if` on a value
                object.__setattr__(self, "vectorized", False)  # from now on they take turns
                function = function if function == self._losses else self._slope

        def turn(r: int) -> Any:
            given = (v[0 if one else r] for v, one in zip(samples, alone, strict=True))
            return function(self._laid_out({name: v[r] for name, v in params.items()}), *given)

        return stack_results([turn(r) for r in range(size_of(params))])

    def _laid_out(self, params: Params) -> Params:
        """One replica's parameters, whose convolutions decide how images lie in memory."""
        if not self.channels_last:
            return params
        order = torch.channels_last  # `contiguous` would keep the strides of a single channel
        return {
            name: value.to(memory_format=order) if value.ndim == 4 else value
            for name, value in params.items()
        }

    def _keys(self, batch: Batch) -> Tensor:
        """The keys of a batch; without dropout, anything of the same length. A batch without keys,
        as of an estimate of constants, has its rows' numbers."""
        if not self.keyed:
            return batch.labels
        if batch.keys is None:
            return torch.arange(len(batch.labels), device=self.device)
        return batch.keys.to(self.device)

    def masks(self, keys: Tensor | None) -> AbstractContextManager[Any]:
        """What draws the masks in a call of the module; without keys, nothing is dropped."""
        return Masks(keys, self.axes) if self.keyed else nullcontext()

    def _outputs(self, params: Params, inputs: Tensor, keys: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, *self.shape)
        rows = rows.long() if self.whole else rows
        with self.masks(keys):
            return functional_call(self.own_module(), params, (rows,))

    def total(
        self, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor, keys: Tensor
    ) -> Tensor:
        """sum_j w_j loss_j [] of one replica's parameters."""
        outputs = self._outputs(params, inputs, keys)
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
        """Like grad_and_value(self.total), without the overhead of functorch."""
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = self.total({**leaves, **statistics}, inputs, labels, weights, keys)
        slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        found = (slope.contiguous() for slope in slopes)
        return dict(zip(leaves, found, strict=True)), loss.detach()

    def _losses(
        self, params: Params, inputs: Tensor, labels: Tensor, *unused: Tensor
    ) -> tuple[Tensor, Params]:
        with evaluating(self.own_module()):
            outputs = self._outputs(params, inputs, None)
        targets = self.targets(inputs, labels)
        loss = self.loss(outputs, targets)
        if self.metrics is not None:
            return loss, {name: one(outputs, targets) for name, one in self.metrics.items()}
        # Whether each prediction is right, or which share of the targets of a sample is.
        right = outputs.argmax(-1) == targets
        if right.ndim > 1:
            right = mean_of(right.to(self.dtype), targets)
        return loss, {"accuracy": right}


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Let a module compute as in an evaluation, and as before afterwards.

    Layers of torch compute the same in both modes, but for dropouts, whose masks are off, and norms
    with running statistics. Their mode stays, because some have a second implementation.
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


def _add_(total: Found, more: Found) -> Found:
    """Add in place."""
    for name, value in more[1].items():
        total[1][name].add_(value)
    return total[0].add_(more[0]), total[1]


# Which modules several threads may call at once, each with its own copy. A copy is needed because a
# call with other parameters writes them into the module until it returns.
#
# A copy of a user's class may share layers with the original, or keep state between calls. Such a
# module is not copied, and only one thread calls it. Layers of torch and of fedmuon do neither.

LAYERS = (TORCH, "fedmuon.")
FUNCTIONS = ("torch.", "fedmuon.")
VALUES = (bool, int, float, str, torch.dtype, torch.device, torch.Size, Tensor, type(None))
EMPTY = vars(nn.Module())
HOOKS = tuple(name for name in EMPTY if "hook" in name)


def copyable(module: nn.Module) -> bool:
    """Whether a copy surely computes the same with its own parameters, without side effects.

    This holds for layers of torch and of fedmuon without hooks or functions of a user.
    """
    return not _has_any_global_hook() and all(
        f"{type(layer).__module__}.".startswith(LAYERS)
        and not any(vars(layer).get(name) for name in HOOKS)
        and all(_known(value) for name, value in vars(layer).items() if name not in EMPTY)
        for layer in module.modules()
    )


def stateless(function: Any) -> bool:
    """Whether a loss or metric keeps nothing between calls.

    This holds for those of torch and of fedmuon that do not call a function of a user.
    """
    kind = type(function)  # isinstance asks the object as well, which may raise anything
    if issubclass(kind, nn.Module):
        return copyable(function)
    if issubclass(kind, partial):
        held = [function.func, *function.args, *function.keywords.values()]
    elif kind is FunctionType and f"{function.__globals__.get('__name__', '')}.".startswith(
        FUNCTIONS
    ):
        held = [cell.cell_contents for cell in function.__closure__ or ()]
    else:
        return False
    return all(_known(one) or stateless(one) for one in held)


def _known(value: Any) -> bool:
    """Whether it is a plain value or a stateless function, or a list or tuple of these."""
    if isinstance(value, list | tuple):
        return all(map(_known, value))
    if isinstance(value, Guard):  # it holds the object that it guards, to name it in errors
        return stateless(value.found)
    return isinstance(value, VALUES) or (isinstance(value, FunctionType) and stateless(value))
