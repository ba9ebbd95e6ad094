"""A vision transformer whose layers all have per-example gradients by ghost norms.

As Dosovitskiy et al. 2021 have it, changed as Beyer, Zhai and Kolesnikov 2022 do ("Better plain ViT
baselines"): places are sines and cosines in two dimensions, which are not learned, and the
mean over the patches is classified, so that no parameter stands outside of a layer.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmuon.core.errors import InputError, instead

SLOWEST = 10_000.0  # wave length of the last of a place's sines over that of the first


class VisionTransformer(nn.Module):
    """Images [n, C, H, W] -> outputs [n, c]; images are filled up to whole patches with zeros."""

    def __init__(
        self, channels: int, classes: int, patch: int, width: int, depth: int, heads: int
    ) -> None:
        """`width` is a multiple of 4 and of `heads`."""
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Patches with their places, blocks, the mean."""
        height, width = images.shape[-2:]
        whole = functional.pad(images, (0, -width % self.patch, 0, -height % self.patch))
        read = self.patches(whole)
        tokens = read.flatten(2).mT + places(read)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class _Block(nn.Module):
    """A pre-norm block, hidden units four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.second(functional.gelu(self.first(self.norm2(x))))


class _Attention(nn.Module):
    """Of every patch to all of its image; queries, keys and values are one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).transpose(1, 3)  # [n, h, 3, T, e]
        queries, keys, values = parts.unbind(2)
        weights = (queries @ keys.mT / math.sqrt(queries.shape[-1])).softmax(-1)
        return self.out((weights @ values).transpose(1, 2).flatten(2))


def places(read: Tensor) -> Tensor:
    """[H W, d] for patches [n, d, H, W]: sines and cosines of row and column, a quarter each."""
    width, rows, columns = read.shape[1:]
    count = torch.arange(max(width // 4, rows, columns), dtype=read.dtype, device=read.device)
    waves = SLOWEST ** (-count[: width // 4] / max(1, width // 4 - 1))
    down = (count[:rows, None] * waves)[:, None].expand(-1, columns, -1)
    across = (count[:columns, None] * waves).expand(rows, -1, -1)
    return torch.cat([down.sin(), down.cos(), across.sin(), across.cos()], -1).flatten(0, 1)


# Networks by name, for samples of any shape that they can read; none has a BatchNorm.
#
# A builder takes the shape of one sample, (d,) or (C, H, W), and the number of classes. Modules are
# made on torch's `meta` device: they hold shapes and no numbers, and draw nothing.

Shape = tuple[int, ...]
GROUPS = 16  # of every GroupNorm


def network(name: str, shape: Shape, classes: int) -> nn.Module:
    """The named network; images without a channel axis, (H, W), get one."""
    if name not in MODELS:
        raise InputError(f"[task] model = '{name}' is unknown: {instead(name, MODELS)}")
    shape, least = with_channels(shape), LEAST.get(name)
    if least and (len(shape) != 3 or min(shape[1:]) < least):
        raise InputError(
            f"[task] model = '{name}' reads images of {least} x {least} pixels or more, not "
            f"samples of shape {shape}: use mlp, or other [data]"
        )
    with torch.device("meta"):
        return MODELS[name](shape, classes)


def with_channels(shape: Shape) -> Shape:
    """The shape in which a network sees a stored sample: (d,) or (C, H, W)."""
    return (1, *shape) if len(shape) == 2 else shape


def mlp(shape: Shape, classes: int) -> nn.Module:
    """d-512-256-c with ReLU; 0.5M parameters for 28 x 28 pixels and ten classes (004)."""
    return _sequence(
        flat=nn.Flatten(),
        first=nn.Linear(math.prod(shape), 512),
        first_relu=nn.ReLU(),
        hidden=nn.Linear(512, 256),
        hidden_relu=nn.ReLU(),
        head=nn.Linear(256, classes),
    )


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Two 5 x 5 convolutions of 32 and 64 channels, each with 2 x 2 pooling, and 512 hidden units.

    The network of McMahan et al. 2017 (FedAvg); 1,663,370 parameters on MNIST. 001 does not print
    the architecture of its CNN.
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
    """Convolutions of 16 (8 x 8) and 32 (4 x 4) channels, 32 hidden units, and tanh.

    The usual network of private learning on MNIST (Papernot et al. 2021; Opacus's example): noise
    grows with the number of parameters, which is 26,010 there, and tanh keeps gradients short.
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


def cifarnet(shape: Shape, classes: int) -> nn.Module:
    """A 2 x 2 convolution and three pairs of 3 x 3 ones, of 64, 256, 256 channels; 2M parameters.

    The CifarNet of 004 and of Jordan's speed runs, with two changes that federated averaging needs:
    the first convolution is learned, not whitened from the data, and the norms are GroupNorms.
    """
    pairs = [_pair(24, 64), _pair(64, 256), _pair(256, 256)]
    return _sequence(
        conv=nn.Conv2d(shape[0], 24, 2),
        gelu=nn.GELU(),
        pairs=nn.Sequential(*pairs),
        top=_Largest(),
        head=nn.Linear(256, classes, bias=False),
    )


def wide_resnet(depth: int, widen: int) -> Callable[[Shape, int], nn.Module]:
    """WRN-depth-widen (Zagoruyko and Komodakis 2016) with GroupNorm in place of BatchNorm."""

    def build(shape: Shape, classes: int) -> nn.Module:
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

    return build


def vision_transformer(
    patch: int, width: int, depth: int, heads: int
) -> Callable[[Shape, int], nn.Module]:
    """A ViT; of width 384 with 12 blocks of 6 heads it is ViT-small (Steiner et al. 2022), with
    21.3M parameters, here with patches for images of 32 x 32 pixels (003)."""

    def build(shape: Shape, classes: int) -> nn.Module:
        return VisionTransformer(shape[0], classes, patch, width, depth, heads)

    return build


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "tanh-cnn": tanh_cnn,
    "cifarnet": cifarnet,
    "wrn-16-2": wide_resnet(16, 2),
    "wrn-16-4": wide_resnet(16, 4),
    "vit-small": vision_transformer(4, 384, 12, 6),
}
LEAST = {  # pixels along the shorter side
    "cnn": 4, "tanh-cnn": 14, "cifarnet": 9, "wrn-16-2": 4, "wrn-16-4": 4, "vit-small": 4,
}  # fmt: skip


class _Residual(nn.Module):
    """A pre-activation block; its shortcut is the identity where widths agree."""

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
    """[n, C, H, W] -> [n, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


class _Largest(nn.Module):
    """[n, C, H, W] -> [n, C]."""

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
