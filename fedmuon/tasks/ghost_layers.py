"""From what a layer read, and the loss's slope in what it gave, to its per-example gradients.

A rule takes, for every use of the layer, what it read at each of the points and the slopes there,
already multiplied by the points' coefficients, and returns the layer's parameters by their names.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from fedmuon.tasks.base import joined
from fedmuon.tasks.per_example import Explicit, Lookup, Outer, PerExample, forms

Use = tuple[Sequence[Tensor], Sequence[Tensor]]  # (reads, slopes), one of each for every point
Parts = dict[str, PerExample]
PATCHES = 1 << 18  # numbers of them that are made at once, where gradients are: within a cache
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def known(layer: nn.Module) -> bool:
    """Whether there is a rule for the layer; a subclass may compute anything, and so may hooks and
    a `forward` of the object's own."""
    if "forward" in vars(layer) or any(getattr(layer, name) for name in HOOKS):
        return False
    if isinstance(layer, _ConvNd) and layer.padding_mode != "zeros":
        return False
    if isinstance(layer, nn.Embedding) and (layer.max_norm or layer.scale_grad_by_freq):
        return False
    return _rule(layer) is not None


def parts(layer: nn.Module, uses: Sequence[Use]) -> Parts:
    """The per-example gradients of the layer's own parameters."""
    rule = _rule(layer)
    assert rule is not None  # or `ghostly` would have refused the module
    found = rule(layer, uses)
    return {key: found[key] for key, _ in layer.named_parameters(recurse=False)}


def entries(layer: nn.Module, read: Tensor, output: Tensor) -> int:
    """Numbers that the rule holds for one use of a layer."""
    held = read.numel() + output.numel()
    if isinstance(layer, _ConvNd):
        length, groups = output[0, 0].numel(), layer.groups
        p, d = layer.out_channels // groups, layer.weight[0].numel()
        more = p * d if forms(length, p, d) else length * d + 2 * length**2
        held += len(read) * groups * more
    return held


def shaped(layer: nn.Module, key: str, total: Tensor) -> Tensor:
    """A total as the parameter is laid out: a convolution's was held with its channels last."""
    shape = getattr(layer, key).shape
    if isinstance(layer, _ConvNd) and key == "weight":
        return total.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()
    return total.view(shape)


def _rule(layer: nn.Module) -> Callable[..., Parts] | None:
    kind = type(layer)
    return RULES.get(kind) or NAMED.get(f"{kind.__module__}.{kind.__qualname__}")


def _linear(layer: nn.Module, uses: Sequence[Use]) -> Parts:
    read, slope, shift = _read_and_slope(uses)
    return {"weight": Outer(read, slope).cheaper(), "bias": shift}


def _projection(layer: nn.Module, uses: Sequence[Use]) -> Parts:
    """A linear layer whose weight is [in, out]."""
    read, slope, shift = _read_and_slope(uses)
    return {"weight": Outer(slope, read).cheaper(), "bias": shift}


def _read_and_slope(uses: Sequence[Use]) -> tuple[Tensor, Tensor, Explicit]:
    """[n, 1, T, in] and [n, 1, T, out] with T over positions and points, and a bias's gradients."""
    flat = [pair for use in uses for pair in zip(*_telescoped(*use), strict=True)]
    read, slope = (joined([_sequence(v) for v in column], 1) for column in zip(*flat, strict=True))
    shift = [_over_positions(_sequence(slope)) for _, slopes in uses for slope in slopes]
    return read[:, None], slope[:, None], Explicit(_summed(shift))


def _over_positions(slope: Tensor) -> Tensor:
    """The sum of [n, T, p] over T; of one no pass, which took 6% of a private step of an MLP."""
    return slope[:, 0] if slope.shape[1] == 1 else slope.sum(1)


def _convolution(layer: _ConvNd, uses: Sequence[Use]) -> Parts:
    flat = [pair for use in uses for pair in zip(*_telescoped(*use), strict=True)]
    slope = joined([slope.flatten(2) for _, slope in flat], 2).unflatten(1, (layer.groups, -1)).mT
    shift = [slope.flatten(2).sum(2) for _, slopes in uses for slope in slopes]

    def patches(part: slice) -> Tensor:
        return joined([_patches(layer, read[part]) for read, _ in flat], 2)

    n, groups, length, p = slope.shape
    d = layer.weight[0].numel()
    if forms(length, p, d):
        some, found = max(1, PATCHES // (groups * length * d)), slope.new_empty(n, groups, p, d)
        for part in (slice(k, k + some) for k in range(0, n, some)):
            torch.matmul(slope[part].mT, patches(part), out=found[part])
        return {"weight": Explicit(found), "bias": Explicit(_summed(shift))}
    return {"weight": Outer(patches(slice(None)), slope), "bias": Explicit(_summed(shift))}


def _embedding(layer: nn.Embedding, uses: Sequence[Use]) -> Parts:
    pairs = [pair for use in uses for pair in zip(*use, strict=True)]
    read = joined([read.reshape(len(read), -1) for read, _ in pairs], 1)
    slope = joined([_sequence(slope) for _, slope in pairs], 1)
    if layer.padding_idx is not None:
        slope = slope * (read != layer.padding_idx)[..., None]
    return {"weight": Lookup(read, slope, layer.num_embeddings)}


def _norm(layer: nn.Module, uses: Sequence[Use]) -> Parts:
    """A norm's scale sees slope * normalized input, its shift the slope alone."""
    pairs = [pair for use in uses for pair in zip(*use, strict=True)]
    scale = [_kept(layer, slope * NORMS[type(layer)](layer, read)) for read, slope in pairs]
    shift = [_kept(layer, slope) for _, slope in pairs]
    return {"weight": Explicit(_summed(scale)), "bias": Explicit(_summed(shift))}


def _kept(layer: nn.Module, values: Tensor) -> Tensor:
    """Summed over all but the samples and the axes that have parameters of their own."""
    if not isinstance(layer, nn.LayerNorm | nn.RMSNorm):  # one for each channel
        return values.reshape(len(values), values.shape[1], -1).sum(2)
    return values.reshape(len(values), -1, *layer.get_parameter("weight").shape).sum(1)


def _telescoped(
    reads: Sequence[Tensor], slopes: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """b_1 a_1^T + b_2 a_2^T = b_1 (a_1 - a_2)^T + (b_1 + b_2) a_2^T, and so on.

    Points lie close together while their coefficients are large and opposite (003 has 18 and -17
    for kappa = 0.1, gamma = 0.5): so written, a norm does not lose its digits to cancellation.
    """
    if len(reads) == 1:
        return reads, slopes
    steps = [a - b for a, b in pairwise(reads)]
    return [*steps, reads[-1]], list(torch.stack(list(slopes)).cumsum(0))


def _sequence(values: Tensor) -> Tensor:
    """[n, ..., d] -> [n, T, d]."""
    return values.reshape(len(values), -1, values.shape[-1])


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(0)


def _patches(layer: _ConvNd, read: Tensor) -> Tensor:
    """What each output position sees: [n, C, H, W] -> [n, g, H' W', kh kw C / g].

    Channels last, so that a row of a patch is one run of memory: measured at an eighth of the time
    of patches with channels first.
    """
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if read.ndim == 3:  # one-dimensional: an image of height 1
        kernel, stride, dilation = ((1, *sizes) for sizes in (kernel, stride, dilation))
        read = read[:, :, None]
    padded = functional.pad(read, layer._reversed_padding_repeated_twice)
    n, channels, height, width = padded.shape
    last = padded.permute(0, 2, 3, 1).contiguous()
    down, across = width * channels, channels  # memory between rows, between columns
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
# By name, as transformers need not be installed.
NAMED: dict[str, Callable[..., Parts]] = {"transformers.pytorch_utils.Conv1D": _projection}
