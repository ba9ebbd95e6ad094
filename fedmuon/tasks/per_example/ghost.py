"""Per-example gradients of a layer, from its input and the gradient with respect to its output.

A rule is a function that receives every use of a layer in a call of the network. A use consists of
the layer's inputs (`reads`) and output gradients (`slopes`), one of each for every point. The
slopes are already multiplied by the coefficients of the points. The rule returns the per-example
gradients of the layer's parameters, by name.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import Params, concatenate
from fedmuon.tasks.per_example.gradients import (
    Explicit,
    Lookup,
    Outer,
    PerExample,
    forming_is_cheaper,
)
from fedmuon.tasks.work_split import on_meta

Use = tuple[Sequence[Tensor], Sequence[Tensor]]  # (reads, slopes), with one of each per point
Parts = dict[str, PerExample]
# Numbers in the patches that are created at once, so that they fit a CPU's cache or fill a GPU.
PATCHES = {"cpu": 1 << 18, "cuda": 1 << 26}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_rule(layer: nn.Module) -> bool:
    """Return whether per-example gradients of this layer can be computed from its records.

    Subclasses of torch layers, layers with hooks, and layers with their own `forward` may compute
    anything, so there is no rule for them.
    """
    if "forward" in vars(layer) or any(getattr(layer, name) for name in HOOKS):
        return False
    if isinstance(layer, _ConvNd) and layer.padding_mode != "zeros":
        return False
    if isinstance(layer, nn.Embedding) and (layer.max_norm or layer.scale_grad_by_freq):
        return False
    return rule_of(layer) is not None


def entries(layer: nn.Module, read: Tensor, output: Tensor) -> int:
    """Return how many numbers are stored for one use of a layer."""
    count = read.numel() + output.numel()
    if isinstance(layer, _ConvNd):
        length, groups = output[0, 0].numel(), layer.groups
        p, d = layer.out_channels // groups, layer.weight[0].numel()
        per_group = p * d if forming_is_cheaper(length, p, d) else length * d + 2 * length**2
        count += len(read) * groups * per_group
    return count


def reshape_total(layer: nn.Module, key: str, total: Tensor) -> Tensor:
    """Return a summed gradient in the shape of the layer's parameter.

    For convolutions, sums are accumulated with the channels as last axis.
    """
    shape = getattr(layer, key).shape
    if isinstance(layer, _ConvNd) and key == "weight":
        return total.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()
    return total.view(shape)


def rule_of(layer: nn.Module) -> Callable[..., Parts] | None:
    """Return the function that computes per-example gradients of this kind of layer, or None."""
    kind = type(layer)
    return RULES.get(kind) or NAMED.get(f"{kind.__module__}.{kind.__qualname__}")


def _linear(layer: nn.Module, uses: Sequence[Use], transposed: bool = False) -> Parts:
    """Return per-example gradients of a linear layer.

    If `transposed` is true, the weight has the shape [in, out].
    """
    flat = [pair for use in uses for pair in zip(*_telescope(*use), strict=True)]
    read, slope = (  # [n, 1, T, in] and [n, 1, T, out]; T runs over positions and points
        concatenate([_sequence(v) for v in column], 1)[:, None]
        for column in zip(*flat, strict=True)
    )
    falls = [_sequence(slope) for _, slopes in uses for slope in slopes]
    # If there is only one position, no sum is needed. It took 6% of a private step of an MLP.
    shift = [fall[:, 0] if fall.shape[1] == 1 else fall.sum(1) for fall in falls]
    weight = Outer(slope, read) if transposed else Outer(read, slope)
    cheaper = forming_is_cheaper(weight.reads.shape[2], *weight.shape[1:])
    return {"weight": weight.explicit() if cheaper else weight, "bias": Explicit(_sum(shift))}


def _convolution(layer: _ConvNd, uses: Sequence[Use]) -> Parts:
    flat = [pair for use in uses for pair in zip(*_telescope(*use), strict=True)]
    slope = (
        concatenate([slope.flatten(2) for _, slope in flat], 2).unflatten(1, (layer.groups, -1)).mT
    )
    shift = [slope.flatten(2).sum(2) for _, slopes in uses for slope in slopes]

    def patches(part: slice) -> Tensor:
        return concatenate([_patches(layer, read[part]) for read, _ in flat], 2)

    n, groups, length, p = slope.shape
    d = layer.weight[0].numel()
    if forming_is_cheaper(length, p, d):
        budget = PATCHES.get(slope.device.type, PATCHES["cpu"])
        rows, weight = max(1, budget // (groups * length * d)), slope.new_empty(n, groups, p, d)
        for part in (slice(k, k + rows) for k in range(0, n, rows)):
            torch.matmul(slope[part].mT, patches(part), out=weight[part])
        return {"weight": Explicit(weight), "bias": Explicit(_sum(shift))}
    return {"weight": Outer(patches(slice(None)), slope), "bias": Explicit(_sum(shift))}


def _embedding(layer: nn.Embedding, uses: Sequence[Use]) -> Parts:
    pairs = [pair for use in uses for pair in zip(*use, strict=True)]
    read = concatenate([read.reshape(len(read), -1) for read, _ in pairs], 1)
    slope = concatenate([_sequence(slope) for _, slope in pairs], 1)
    if layer.padding_idx is not None:
        slope = slope * (read != layer.padding_idx)[..., None]
    return {"weight": Lookup(read, slope, layer.num_embeddings)}


def _norm(layer: nn.Module, uses: Sequence[Use]) -> Parts:
    """Return per-example gradients of a norm layer.

    The gradient of the scale is the output gradient times the normalized input. The gradient of the
    shift is the output gradient.
    """
    pairs = [pair for use in uses for pair in zip(*use, strict=True)]
    scale = [_sum_to_shape(layer, slope * NORMS[type(layer)](layer, read)) for read, slope in pairs]
    shift = [_sum_to_shape(layer, slope) for _, slope in pairs]
    return {"weight": Explicit(_sum(scale)), "bias": Explicit(_sum(shift))}


def _sum_to_shape(layer: nn.Module, values: Tensor) -> Tensor:
    """Sum over all axes except the samples and the axes of the layer's parameters."""
    if not isinstance(layer, nn.LayerNorm | nn.RMSNorm):  # one parameter per channel
        return values.reshape(len(values), values.shape[1], -1).sum(2)
    return values.reshape(len(values), -1, *layer.get_parameter("weight").shape).sum(1)


def _telescope(
    reads: Sequence[Tensor], slopes: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Rewrite b_1 a_1^T + b_2 a_2^T as b_1 (a_1 - a_2)^T + (b_1 + b_2) a_2^T, and so on.

    The points are close together, but their coefficients are large and have opposite signs. For
    example, DiSK uses the coefficients 18 and -17 for kappa = 0.1 and gamma = 0.5. In the new form,
    a norm loses no digits to cancellation.
    """
    if len(reads) == 1:
        return reads, slopes
    steps = [a - b for a, b in pairwise(reads)]
    return [*steps, reads[-1]], list(torch.stack(list(slopes)).cumsum(0))


def _sequence(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1, values.shape[-1])


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(0)


def _patches(layer: _ConvNd, read: Tensor) -> Tensor:
    """Return the inputs that each output position uses: [n, C, H, W] -> [n, g, H' W', kh kw C / g].

    Channels are the last axis, so the numbers in a row of a patch are contiguous in memory. In
    measurements, this took an eighth of the time of patches with channels first.
    """
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if read.ndim == 3:  # one-dimensional input: treat it as an image of height 1
        kernel, stride, dilation = ((1, *sizes) for sizes in (kernel, stride, dilation))
        read = read[:, :, None]
    padded = functional.pad(read, layer._reversed_padding_repeated_twice)
    n, channels, height, width = padded.shape
    last = padded.permute(0, 2, 3, 1).contiguous()
    down, across = width * channels, channels  # strides between rows and between columns
    rows = (height - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    columns = (width - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    inner = channels // layer.groups
    view = last.as_strided(
        (n, layer.groups, rows, columns, *kernel, inner),
        (height * down, inner, stride[0] * down, stride[1] * across, dilation[0] * down,
         dilation[1] * across, 1),
    )  # fmt: skip
    return view.reshape(n, layer.groups, rows * columns, -1)


# The normalized input of each norm.
NORMS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.GroupNorm: lambda n, read: functional.group_norm(read, n.num_groups, eps=n.eps),
    nn.LayerNorm: lambda n, read: functional.layer_norm(read, n.normalized_shape, eps=n.eps),
    nn.RMSNorm: lambda n, read: functional.rms_norm(read, n.normalized_shape, eps=n.eps),
    nn.InstanceNorm1d: lambda n, read: functional.instance_norm(read, eps=n.eps),
    nn.InstanceNorm2d: lambda n, read: functional.instance_norm(read, eps=n.eps),
}
RULES: dict[type[nn.Module], Callable[..., Parts]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    **dict.fromkeys(NORMS, _norm),
}
# Listed by name, because transformers is optional.
NAMED: dict[str, Callable[..., Parts]] = {
    "transformers.pytorch_utils.Conv1D": partial(_linear, transposed=True)
}


# Records: the input of every layer, and the gradient with respect to its output, for each example.
#
# Both together determine all per-example gradients, their norms and their weighted sums
# ("book-keeping", Bu et al. 2023). They need one forward pass, and one backward pass without weight
# gradients.

ROWS = 3  # number of samples in the trial that detects mixing of samples
SIZES = (1, 2, 9)  # other batch sizes, for which the results must be the same
ROUNDING = 1024  # maximum change of kept rows, in eps of the largest number
KEPT = ((0,), (1, 2))  # rows that stay while the other rows are replaced
Hook = Callable[[str, nn.Module, tuple[Any, ...], Tensor], Tensor]


@dataclass
class LayerUse:
    """One use of a layer: its input, and the gradient with respect to its output."""

    read: Tensor
    slope: Tensor | None = None

    def keep(self, slope: Tensor) -> None:
        """Store the output gradient. This method is a hook that autograd calls."""
        self.slope = slope

    def times(self, c: float) -> Tensor:
        """Return the output gradient multiplied by c."""
        assert self.slope is not None  # otherwise, `find_ghosts` would have returned None
        return self.slope if c == 1 else c * self.slope


@dataclass
class Record:
    """All uses of each layer in one call of a module, in the order of use, by layer name."""

    layers: dict[str, nn.Module]
    uses: dict[str, list[LayerUse]] = field(default_factory=dict)
    root: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))

    def note(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Record one use of a layer. Torch calls this method as a hook after the layer.

        The autograd graph starts at the outputs of the first layers.
        """
        use = LayerUse(args[0].detach())
        if output._is_view():
            output = output.clone()  # a view loses its hook if the view is overwritten
        if not output.requires_grad:
            output = _Rooted.apply(output, self.root)
        output.register_hook(use.keep)
        self.uses.setdefault(name, []).append(use)
        return output


class _Rooted(torch.autograd.Function):
    """An autograd function that returns the tensor `output` unchanged.

    Autograd treats the result as a function of `root`, with zero gradient, so that the graph of
    autograd starts at this tensor. The result is not a view, so an activation may overwrite it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, None]:
        return None, None


def record(
    module: nn.Module,
    layers: dict[str, nn.Module],
    params: Params,
    inputs: Tensor,
    loss_of: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Record]:
    """Return the loss of each example, and the records of all layers.

    The tensors in `params` need not require gradients.
    """
    records = Record(layers)
    with torch.enable_grad(), _hooks(layers, records.note):
        losses = loss_of(functional_call(module, params, (inputs,)))
    torch.autograd.grad(losses.sum(), records.root, allow_unused=True)
    return losses.detach(), records


@dataclass(frozen=True)
class Ghosts:
    """The layers with parameters, by name, and the number of stored numbers per sample.

    `tied` maps the weight of a linear layer to the embedding weight that the layer shares.
    """

    layers: dict[str, nn.Module]
    entries: int
    tied: dict[str, str] = field(default_factory=dict)


def find_ghosts(module: nn.Module, shape: tuple[int, ...], whole: bool = False) -> Ghosts | None:
    """Return the layers with parameters, or None if records give no exact per-example gradients.

    Records give exact per-example gradients under these conditions: Every layer with parameters has
    a rule, and the first axis of its inputs runs over the samples. A parameter is used only by its
    own layer. No input of a layer is overwritten, and every output has a gradient. The test uses
    two batch sizes on torch's device `meta`, where nothing is computed. If `whole` is true, samples
    are integers, such as tokens. Otherwise, samples have the dtype of the parameters.
    """
    owners = {
        name: layer
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
    }
    tied = _ties(owners)
    if not all(map(has_rule, owners.values())) or tied is None:
        return None
    two, three = (_count_entries(module, owners, (rows, *shape), whole) for rows in (2, 3))
    if two is None or three is None:
        return None
    meta = {name: value.detach() for name, value in on_meta(module).items()}
    dtype = torch.long if whole else next(iter(meta.values())).dtype
    samples = torch.empty((2, *shape), dtype=dtype, device="meta")
    _, records = record(module, owners, meta, samples, lambda out: out.flatten(1))
    if any(use.slope is None for uses in records.uses.values() for use in uses):
        return None
    return Ghosts(owners, three - two, tied)


def _ties(owners: dict[str, nn.Module]) -> dict[str, str] | None:
    """Map the weights of linear layers to the embedding weights that they share.

    Return None if parameters are shared in any other way.
    """
    first: dict[int, tuple[str, nn.Module]] = {}
    tied: dict[str, str] = {}
    for name, owner in owners.items():
        for key, param in owner.named_parameters(recurse=False):
            full_name = f"{name}.{key}" if name else key
            other, at = first.setdefault(id(param), (full_name, owner))
            if other == full_name:
                continue
            pair = isinstance(at, nn.Embedding) and isinstance(owner, nn.Linear)
            if not pair or other in tied.values():
                return None
            tied[full_name] = other
    return tied


def _count_entries(
    module: nn.Module, owners: dict[str, nn.Module], shape: tuple[int, ...], whole: bool
) -> int | None:
    """Return how many numbers the records of all layers contain after a call with shape[0] samples.

    Return None if the records of the layers are incomplete.
    """
    called: set[str] = set()
    reads: list[tuple[Tensor, int]] = []
    sizes: list[int | None] = []

    def look(name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        called.add(name)
        reads.extend((read, read._version) for read in args)
        plain = len(args) == 1 and len(args[0]) == len(output) == shape[0]
        plain = plain and not args[0].requires_grad  # otherwise, a parameter is used elsewhere
        sizes.append(entries(layer, args[0], output) if plain else None)
        return output.detach()  # if a later tensor needs a gradient, a parameter is used elsewhere

    meta = on_meta(module)
    dtype = torch.long if whole else next(iter(meta.values())).dtype
    samples = torch.empty(shape, dtype=dtype, device="meta")
    with _hooks(owners, look):
        outputs = functional_call(module, meta, (samples,))
    untouched = all(read._version == version for read, version in reads)
    whole = called == set(owners) and untouched and not outputs.requires_grad
    counts = [count for count in sizes if count is not None]
    return sum(counts) if whole and len(counts) == len(sizes) else None


@contextlib.contextmanager
def _hooks(layers: dict[str, nn.Module], hook: Hook) -> Iterator[None]:
    """Within this context, call the hook after each layer, with the layer's name first."""
    with contextlib.ExitStack() as handles:
        for name, layer in layers.items():
            handles.enter_context(layer.register_forward_hook(partial(hook, name)))
        yield


def reject_mixing(
    module: nn.Module,
    layers: dict[str, nn.Module],
    shape: tuple[int, ...],
    masks: Callable[[Tensor], AbstractContextManager[Any]] = lambda keys: nullcontext(),
    tokens: bool = False,
) -> None:
    """Raise an error if a network mixes samples, because clipping could not protect examples.

    The network is called with random parameters. Some samples of a batch are replaced while the
    others stay. The values of the layers for the samples that stay must not change. The samples are
    zeros and ones (which are also valid tokens) and real numbers in [0, 1), in several batch sizes.
    This trial cannot detect mixing that happens only with other samples or in larger batches.

    Raises:
        InputError: If values change for a sample that was not replaced.
    """
    params, dtype = _trial_values(module), next(module.parameters()).dtype
    rng = torch.Generator().manual_seed(0)
    binary = torch.randint(0, 2, (ROWS, *shape), generator=rng).to(dtype)
    real, other = torch.rand((2, ROWS, *shape), generator=rng).to(dtype)
    kinds = [(binary, 1 - binary), (real, other)]
    if tokens:
        kinds = [(binary.long(), (1 - binary).long())]
    for inputs, changed in kinds:
        batches = []  # pairs of the rows that stay, and the batch
        for rows in map(list, KEPT):
            batch = changed.clone()
            batch[rows] = inputs[rows]
            batches.append((rows, batch))
        for size in SIZES:
            resized = torch.cat([inputs, *[changed] * (size // ROWS)])[:size]
            batches.append((list(range(min(size, ROWS))), resized))
        with masks(torch.arange(len(inputs))):
            before = _traces(module, layers, params, inputs)
        for rows, batch in batches:
            with masks(torch.arange(len(batch))):
                after = _traces(module, layers, params, batch)
            alike = len(before) == len(after)
            if not alike or any(_differ(a, b, rows) for a, b in zip(before, after, strict=True)):
                raise InputError(
                    f"the network ({type(module).__name__}) mixes samples. Its values for one "
                    "sample change with the other samples of the batch, with their number, or "
                    "from call to call. Clipping therefore cannot bound the influence of one "
                    "example. Normalize each sample separately, for example with GroupNorm or "
                    "LayerNorm."
                )


def _traces(
    module: nn.Module, layers: dict[str, nn.Module], params: dict[str, Tensor], inputs: Tensor
) -> list[Tensor]:
    """Return the network's outputs, and the inputs and output gradients of all layers."""
    outputs: list[Tensor] = []

    def loss_of(output: Tensor) -> Tensor:
        outputs.append(output.detach())
        return output.flatten(1).sin().sum(1)

    _, records = record(module, layers, params, inputs, loss_of)
    uses = [use for layer_uses in records.uses.values() for use in layer_uses]
    slopes = [use.slope for use in uses if use.slope is not None]
    return [*outputs, *(use.read for use in uses), *slopes]


def _differ(first: Tensor, second: Tensor, rows: list[int]) -> bool:
    """Return whether these rows of two arrays differ by more than rounding errors."""
    if first.shape[1:] != second.shape[1:]:
        return True
    a, b = first[rows], second[rows]
    if not a.is_floating_point():
        return not torch.equal(a, b)
    peak = float(a.nan_to_num(0.0).abs().max()) if a.numel() else 0.0
    return not torch.allclose(
        a, b, rtol=0.0, atol=ROUNDING * torch.finfo(a.dtype).eps * peak, equal_nan=True
    )


def _trial_values(module: nn.Module) -> dict[str, Tensor]:
    """Return random parameters and the module's buffers for a trial call.

    If a buffer is on the device `meta`, it has no values, and ones are returned instead.

    Entry (i, j, ...) of a parameter is number i + j + ... of one short list of random numbers. A
    large network therefore needs no extra memory.
    """
    rng, values = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for name, value in module.named_parameters():
        shape = tuple(value.shape)
        draws = torch.rand(1 + sum(size - 1 for size in shape), generator=rng).to(value.dtype)
        scale = (3 / value[0].numel()) ** 0.5 if len(shape) > 1 else 0.0  # unit variance of outputs
        draws = scale * (2 * draws - 1) if scale else 0.5 + draws  # biases and norm scales near 1
        values[name] = draws.as_strided(shape, [1] * len(shape))
    for name, value in module.named_buffers():
        values[name] = torch.ones_like(value, device="cpu") if value.is_meta else value.cpu()
    return values
