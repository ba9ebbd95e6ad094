"""The built-in networks, the layers that networks may have, and their initial parameters.

No built-in network has BatchNorm. Every parameter of a built-in network belongs to a layer for
which `per_example.ghost` can compute gradient norms of single examples.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedmuon.core.errors import InputError, instead
from fedmuon.tasks.base import STATISTICS

SLOWEST = 10_000.0  # ratio of the longest to the shortest wavelength in the encoding of positions


class VisionTransformer(nn.Module):
    """A vision transformer. Its inputs are images [n, C, H, W], and its outputs are [n, c].

    The network follows Dosovitskiy et al. 2021 with the changes of Beyer, Zhai and Kolesnikov 2022
    ("Better plain ViT baselines"). Positions are encoded by fixed sines and cosines in two
    dimensions, and the classifier uses the mean over all patches. Positions and classes have no
    tokens with parameters, so every parameter belongs to a layer. Images are padded with zeros at
    the border, so that all patches are complete.
    """

    def __init__(
        self, channels: int, classes: int, patch: int, width: int, depth: int, heads: int
    ) -> None:
        """Build the layers. `width` must be a multiple of 4 and of `heads`."""
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs for a batch of images."""
        height, width = images.shape[-2:]
        padded = functional.pad(images, (0, -width % self.patch, 0, -height % self.patch))
        read = self.patches(padded)
        tokens = read.flatten(2).mT + positions(read)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class _Block(nn.Module):
    """A pre-norm transformer block. The number of hidden units is four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.second(functional.gelu(self.first(self.norm2(x))))


class _Attention(nn.Module):
    """Self-attention between the patches of an image. One layer computes query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).transpose(1, 3)  # [n, h, 3, T, e]
        queries, keys, values = parts.unbind(2)
        weights = (queries @ keys.mT / math.sqrt(queries.shape[-1])).softmax(-1)
        return self.out((weights @ values).transpose(1, 2).flatten(2))


def positions(read: Tensor) -> Tensor:
    """Return sines and cosines that encode the row and the column of each patch of an image.

    For patches [n, d, H, W], the result has the shape [H W, d].
    """
    width, rows, columns = read.shape[1:]
    count = torch.arange(max(width // 4, rows, columns), dtype=read.dtype, device=read.device)
    waves = SLOWEST ** (-count[: width // 4] / max(1, width // 4 - 1))
    down = (count[:rows, None] * waves)[:, None].expand(-1, columns, -1)
    across = (count[:columns, None] * waves).expand(rows, -1, -1)
    return torch.cat([down.sin(), down.cos(), across.sin(), across.cos()], -1).flatten(0, 1)


# Networks by name. A builder gets the shape of one sample, (d,) or (C, H, W), and the number of
# classes. Modules are built on torch's `meta` device, with shapes but no values.

Shape = tuple[int, ...]
GROUPS = 16  # number of groups in every GroupNorm


def network(name: str, shape: Shape, classes: int) -> nn.Module:
    """Build the network with this name for samples with the given shape.

    Args:
        name: A key of `MODELS`.
        shape: Shape of a stored sample. Images of shape (H, W) get a channel axis.
        classes: Number of outputs.

    Raises:
        InputError: If the name is unknown, or the network does not accept samples of this shape.
    """
    if name not in MODELS:
        raise InputError(f"[task] model = '{name}' is unknown: {instead(name, MODELS)}")
    shape, min_size = with_channels(shape), LEAST.get(name)
    if min_size and (len(shape) != 3 or min(shape[1:]) < min_size):
        change = (
            "Set model = 'linear' or 'mlp', or leave out [data] features if it is set"
            if len(shape) == 1
            else "Set model = 'mlp'"
        )
        raise InputError(
            f"[task] model = '{name}' needs images of at least {min_size} x {min_size} pixels, but "
            f"the samples have shape {shape}. {change}, or choose other [data]."
        )
    with torch.device("meta"):
        return MODELS[name](shape, classes)


def with_channels(shape: Shape) -> Shape:
    """Return the shape in which a network receives a sample.

    The shape is (d,) for a vector, and (C, H, W) for an image.
    """
    return (1, *shape) if len(shape) == 2 else shape


def linear(shape: Shape, classes: int) -> nn.Module:
    """Build softmax regression: one matrix without bias."""
    return _sequence(flat=nn.Flatten(), head=nn.Linear(math.prod(shape), classes, bias=False))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Build a network with two hidden layers of 512 and 256 units and ReLU.

    This network is from the paper Newton–Schulz convergence. For MNIST, it has 0.5M parameters.
    """
    return _sequence(
        flat=nn.Flatten(),
        first=nn.Linear(math.prod(shape), 512),
        first_relu=nn.ReLU(),
        hidden=nn.Linear(512, 256),
        hidden_relu=nn.ReLU(),
        head=nn.Linear(256, classes),
    )


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Build a network with two 5 x 5 convolutions of 32 and 64 channels, and 512 hidden units.

    Each convolution is followed by 2 x 2 pooling. This is the network of McMahan et al. 2017
    (FedAvg), with 1,663,370 parameters for MNIST. The Stability note does not state the
    architecture of its CNN.
    """
    channels, height, width = shape
    return _sequence(
        conv1=nn.Conv2d(channels, 32, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        hidden=nn.Linear(64 * (height // 4) * (width // 4), 512),
        relu3=nn.ReLU(),
        head=nn.Linear(512, classes),
    )


def tanh_cnn(shape: Shape, classes: int) -> nn.Module:
    """Build a small convolutional network with the activation function tanh.

    The network has two convolutions, with 16 channels and 8 x 8 kernels, and with 32 channels and 4
    x 4 kernels. The convolutions are followed by 32 hidden units. This network is common in private
    learning on MNIST: see Papernot et al. 2021 and the example of Opacus. The network has only
    26,010 parameters. A small number is useful, because the noise of private learning grows with
    the number of parameters. The function tanh keeps gradients small.
    """
    channels, *sides = shape
    for kernel, padding in ((8, 3), (4, 0)):  # stride 2, then pooling with stride 1
        sides = [(side + 2 * padding - kernel) // 2 for side in sides]
    return _sequence(
        conv1=nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        tanh1=nn.Tanh(),
        pool1=nn.MaxPool2d(2, 1),
        conv2=nn.Conv2d(16, 32, 4, stride=2),
        tanh2=nn.Tanh(),
        pool2=nn.MaxPool2d(2, 1),
        flat=nn.Flatten(),
        hidden=nn.Linear(32 * math.prod(sides), 32),
        tanh3=nn.Tanh(),
        head=nn.Linear(32, classes),
    )


def cifarnet(shape: Shape, classes: int, width: int = 64) -> nn.Module:
    """Build a network with a 2 x 2 convolution and three pairs of 3 x 3 convolutions.

    The pairs have 64, 256 and 256 channels, and the network has 2M parameters. `width` is the
    number of channels of the first pair, a multiple of 16.

    This is the CifarNet of the paper Newton–Schulz convergence and of Jordan's speed runs, with two
    changes for federated averaging. The first convolution is trained, and not computed from the
    data by whitening. The norm layers are GroupNorms.
    """
    pairs = [_pair(24, width), _pair(width, 256), _pair(256, 256)]
    return _sequence(
        conv=nn.Conv2d(shape[0], 24, 2),
        gelu=nn.GELU(),
        pairs=nn.Sequential(*pairs),
        top=_Largest(),
        head=nn.Linear(256, classes, bias=False),
    )


def wide_resnet(depth: int, widen: int, shape: Shape, classes: int) -> nn.Module:
    """Build a wide residual network WRN-depth-widen with GroupNorm instead of BatchNorm.

    See Zagoruyko and Komodakis 2016.
    """
    count, widths = (depth - 4) // 6, [16 * widen * 2**stage for stage in range(3)]
    blocks, inner = [], 16
    for stage, width in enumerate(widths):
        for number in range(count):
            blocks.append(_Residual(inner, width, 2 if stage and not number else 1))
            inner = width
    return _sequence(
        conv=nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        blocks=nn.Sequential(*blocks),
        norm=nn.GroupNorm(GROUPS, inner),
        relu=nn.ReLU(),
        mean=_Mean(),
        head=nn.Linear(inner, classes),
    )


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "tanh-cnn": tanh_cnn,
    "cifarnet": cifarnet,
    "wrn-16-2": partial(wide_resnet, 16, 2),
    "wrn-16-4": partial(wide_resnet, 16, 4),
    # ViT-small (Steiner et al. 2022), with patches for images of 32 x 32 pixels (DiSK).
    "vit-small": lambda shape, classes: VisionTransformer(shape[0], classes, 4, 384, 12, 6),
}
LEAST = {  # minimum number of pixels along the shorter side
    "cnn": 4, "tanh-cnn": 14, "cifarnet": 9, "wrn-16-2": 4, "wrn-16-4": 4, "vit-small": 4,
}  # fmt: skip


class _Residual(nn.Module):
    """A pre-activation residual block.

    If the input and the output have the same width, the shortcut is the identity.
    """

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inner)
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.shortcut = None if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = torch.relu(self.norm1(x))
        passed = x if self.shortcut is None else self.shortcut(ready)
        return passed + self.conv2(torch.relu(self.norm2(self.conv1(ready))))


class _Mean(nn.Module):
    """A layer that averages each channel of an image over all pixels: [n, C, H, W] -> [n, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


class _Largest(nn.Module):
    """A layer that computes the maximum of each channel of an image: [n, C, H, W] -> [n, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax((-2, -1))


def _pair(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.GroupNorm(GROUPS, outer),
        nn.GELU(),
        nn.Conv2d(outer, outer, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, outer),
        nn.GELU(),
    )


def _sequence(**layers: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))


# Layers that are rejected, and the distributions of initial parameters

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _InstanceNorm)


def reject_layers(network: nn.Module) -> None:
    """Raise an error for layers with which a run could not be repeated or evaluated correctly.

    These layers mix samples in an evaluation, draw random numbers without a key, or change their
    weights.
    """
    for name, layer in network.named_modules():
        problem = ""
        draws = (isinstance(layer, nn.RReLU) and layer.lower < layer.upper) or isinstance(
            layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d
        )
        if isinstance(layer, nn.SyncBatchNorm):
            problem = (
                "which synchronizes its statistics with other processes. Use BatchNorm of the "
                "same size."
            )
        elif isinstance(layer, _BatchNorm) and not layer.track_running_stats:
            problem = (
                "whose result for one test sample would depend on the other test samples. Set "
                "track_running_stats=True, or use GroupNorm."
            )
        elif isinstance(layer, _NormBase) and layer.track_running_stats and layer.momentum is None:
            problem = (
                "whose statistics would depend on the number of batches of each client, because "
                "its momentum is None. Set momentum to a number, such as 0.1."
            )
        elif isinstance(layer, nn.RNNBase) and layer.dropout > 0 and layer.num_layers > 1:
            problem = (
                "whose dropout between its layers cannot follow the seed of the run. Set its "
                "dropout to 0, or put nn.Dropout between recurrent layers with num_layers=1."
            )
        elif draws:  # in training mode
            problem = (
                "which draws from the global generator of torch, so two runs with the same seed "
                "would differ. Use nn.ReLU and nn.MaxPool2d, or nn.Dropout, whose masks follow "
                "the seed of the run."
            )
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            problem = (
                "which rescales its weights in the forward pass because max_norm is set. Remove "
                "max_norm."
            )
        if problem:
            raise InputError(f"{name or 'The network'} is a {type(layer).__name__}, {problem}")


def statistics_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of the norm layers in a network, by name."""
    return {
        f"{prefix}.{key}" if prefix else key: layer.get_buffer(key)
        for prefix, layer in network.named_modules()
        if isinstance(layer, _NormBase) and layer.track_running_stats
        for key in STATISTICS
    }


def torch_law(network: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw initial parameters from torch's default distributions.

    The parameters are drawn in the order of `named_parameters`.

    Weights and biases of linear layers and convolutions are uniform between -1/sqrt(fan-in) and
    1/sqrt(fan-in). Embeddings are standard normal. In norm layers, the scale starts at 1 and the
    shift at 0.
    """
    params: dict[str, np.ndarray] = {}
    drawn: set[int] = set()
    for name, owner, key, param in owned_parameters(network):
        if id(param) in drawn:  # tied to a parameter with another name
            continue
        drawn.add(id(param))
        shape = tuple(param.shape)
        if isinstance(owner, nn.Linear | _ConvNd):
            bound = 1 / math.sqrt(owner.weight[0].numel())
            params[name] = rng.uniform(-bound, bound, shape)
        elif isinstance(owner, nn.Embedding):
            params[name] = rng.standard_normal(shape)
        elif isinstance(owner, _NORMS):
            params[name] = np.full(shape, 1.0 if key == "weight" else 0.0)
        else:
            raise InputError(
                f"the parameter {name} belongs to a {type(owner).__name__}, which has no known "
                "initial distribution. Build the network from linear layers, convolutions, "
                "embeddings and norms."
            )
    return params


def owned_parameters(network: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (name, layer, name in the layer, parameter) of each parameter of a network.

    A parameter that several layers share occurs under each of its names.
    """
    for prefix, owner in network.named_modules(remove_duplicate=False):
        for key, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{key}" if prefix else key, owner, key, param
