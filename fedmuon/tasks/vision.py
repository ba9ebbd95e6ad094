"""A vision transformer whose layers all have per-example gradients by ghost norms.

As Dosovitskiy et al. 2021 have it, changed as Beyer, Zhai and Kolesnikov 2022 do ("Better plain ViT
baselines"): places are sines and cosines in two dimensions, which are not learned, and the
mean over the patches is classified, so that no parameter stands outside of a layer.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

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
