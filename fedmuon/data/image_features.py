"""Fixed transforms of images into feature vectors, in which nothing is learnt from the samples.

Each transform maps every image alone, so it is public, and costs no privacy. Images are arrays
[n, channels, height, width] with values from 0 to 1. Features are float32 arrays [n, d].

- `hog`: histograms of oriented gradients (Dalal and Triggs 2005).
- `scattering`: a wavelet scattering transform of order 2 (Bruna and Mallat 2013).
- `random-conv`: convolutions with fixed random filters (Rahimi and Recht 2007; Coates and Ng 2012).
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmuon.core.rng import Draw, generator

# Histograms of oriented gradients

CELLS = (4, 7)  # sides of a cell, in pixels
ORIENTATIONS = 8  # bins of the angle
BLOCK = 2  # side of a block of cells, which are normalized together
HYS = 0.2  # largest entry of a normalized block (Lowe 2004)
SMALLEST_NORM = 0.03  # is added to the norm of a block, so that noise in flat regions stays small


def hog(images: Tensor) -> Tensor:
    """Compute histograms of oriented gradients in cells of 4 x 4 and of 7 x 7 pixels.

    The gradient of a pixel is added to the two nearest of eight directions. Four neighbouring
    cells form a block. Each block is divided by its norm, cut off at 0.2, and divided by its norm
    again.

    Args:
        images: Images [n, channels, height, width] with values from 0 to 1.

    Returns:
        Features [n, d]. A channel of 28 x 28 pixels has 6 x 6 blocks of small and 3 x 3 blocks of
        large cells, with 32 features each, so d = 1440.
    """
    padded = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    across = padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]
    down = padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]
    size = torch.hypot(across, down)
    angle = torch.atan2(down, across) * (ORIENTATIONS / (2 * math.pi))  # bin b is at the angle b
    lower = angle.floor()
    upper_part = size * (angle - lower)
    lower_part, lower = size - upper_part, lower.remainder(ORIENTATIONS)
    upper = torch.where(lower == ORIENTATIONS - 1, 0, lower + 1)
    directed = torch.stack(
        [
            torch.where(lower == b, lower_part, 0) + torch.where(upper == b, upper_part, 0)
            for b in range(ORIENTATIONS)
        ],
        2,
    ).flatten(1, 2)  # [n, channels * orientations, height, width]
    fitting = [cell for cell in CELLS if min(images.shape[-2:]) >= BLOCK * cell]
    return torch.cat([blocks_of(directed, images.shape[1], cell) for cell in fitting], 1)


def blocks_of(directed: Tensor, channels: int, cell: int) -> Tensor:
    """Average gradients over cells, and return the normalized blocks of cells as rows [n, d]."""
    cells = functional.avg_pool2d(directed, cell).unflatten(1, (channels, ORIENTATIONS))
    blocks = cells.unfold(3, BLOCK, 1).unfold(4, BLOCK, 1)
    blocks = blocks.permute(0, 1, 3, 4, 2, 5, 6).flatten(4)  # [n, channels, rows, columns, 32]
    for limit in (HYS, math.inf):
        norm = (blocks.square().sum(-1, keepdim=True) + SMALLEST_NORM**2).sqrt()
        blocks = (blocks / norm).clamp(max=limit)
    return blocks.flatten(1)


# Wavelet scattering

SCALES = 2  # J: features are averages over about 2^J x 2^J pixels
ANGLES = 8  # L: number of directions of the wavelets
STRIDE = 2**SCALES  # distance of two averages, in pixels


def scattering(images: Tensor) -> Tensor:
    """Compute the scattering transform of order 2 with 2 scales and 8 angles.

    A wavelet transform and a modulus are applied up to two times. Each result is averaged with a
    Gaussian window. A channel of 28 x 28 pixels has 1 + 16 + 64 = 81 results with 7 x 7 averages.

    Args:
        images: Images [n, channels, height, width].

    Returns:
        Features [n, channels * 81 * (height // 4) * (width // 4)].
    """
    height, width = images.shape[-2:]
    rows, columns = (STRIDE * (1 + math.ceil(side / STRIDE)) + STRIDE for side in (height, width))
    pad = (STRIDE, columns - width - STRIDE, STRIDE, rows - height - STRIDE)
    padded = functional.pad(images, pad, mode="reflect")
    return scattered(padded, height // STRIDE, width // STRIDE).flatten(1)


def scattered(padded: Tensor, down: int, across: int) -> Tensor:
    """Compute the scattering transform of periodic images, with `down` x `across` averages.

    The transform is non-expansive: the norm of the difference of two results is at most the norm
    of the difference of the images.

    Args:
        padded: Images [n, channels, rows, columns] with even numbers of rows and columns.
        down: Number of averages along a column, from row 4 on.
        across: Number of averages along a row, from column 4 on.

    Returns:
        Averages [n, channels, 81, down, across].
    """
    filters, scale = wavelets(*padded.shape[-2:])

    def averaged(images: Tensor, step: int) -> Tensor:
        rows = window(images.shape[-2], down, step) * scale
        return rows @ images @ window(images.shape[-1], across, step).T

    spectrum = torch.fft.fft2(padded)[:, :, None]
    first = torch.fft.ifft2(spectrum * filters[0]).abs()
    coarse = torch.fft.ifft2(halved(spectrum * filters[1])).abs()
    results = [averaged(padded[:, :, None], 1), averaged(first, 1), averaged(coarse, 2)]
    spectrum = torch.fft.fft2(first)
    for angle in range(ANGLES):  # all at once would not fit into a cache
        fields = spectrum[:, :, angle : angle + 1] * filters[1]
        results.append(averaged(torch.fft.ifft2(halved(fields)).abs(), 2))
    return torch.cat(results, 2)


def halved(spectrum: Tensor) -> Tensor:
    """Return the spectra of images of which only every second row and column remains."""
    rows, columns = (side // 2 for side in spectrum.shape[-2:])
    folded = spectrum[..., :rows, :] + spectrum[..., rows:, :]
    return (folded[..., :columns] + folded[..., columns:]) / 4


@lru_cache(maxsize=8)
def window(side: int, averages: int, step: int) -> Tensor:
    """Return the weights [averages, side] of Gaussian averages along one axis.

    Args:
        side: Number of rows of the image, of which only every `step`-th row remains.
        averages: Number of averages. The first has its centre between the rows 5 and 6.
        step: Distance of two rows of the image, in pixels.
    """
    centres = STRIDE + (STRIDE - 1) / 2 + STRIDE * np.arange(averages)
    distance = np.abs(step * np.arange(side) - centres[:, None])
    distance = np.minimum(distance, step * side - distance)
    weights = np.exp(-0.5 * (distance / (0.8 * 2 ** (SCALES - 1))) ** 2)
    return torch.from_numpy((weights / weights.sum(1, keepdims=True)).astype(np.float32))


@lru_cache(maxsize=8)
def wavelets(rows: int, columns: int) -> tuple[Tensor, float]:
    """Return the Fourier transforms of all Morlet wavelets, and a factor of the Gaussian window.

    The squares of all filters add up to at most 1 at every frequency.

    Returns:
        The transforms [scales, angles, rows, columns], which are real, and the factor.
    """
    bank = np.array([
        [morlet(rows, columns, j, math.pi * angle / ANGLES) for angle in range(ANGLES)]
        for j in range(SCALES)
    ])  # fmt: skip
    low = gabor(rows, columns, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0)
    low = np.abs(np.fft.fft2(low / low.sum()))
    mirrored = np.roll(bank[..., ::-1, ::-1], (1, 1), (-2, -1))  # at the negative frequencies
    power = low**2 + (bank**2 + mirrored**2).sum((0, 1)) / 2
    scale = float(power.max() ** -0.5)
    return torch.from_numpy((scale * bank).astype(np.float32)), scale


def morlet(rows: int, columns: int, scale: int, angle: float) -> np.ndarray:
    """Return the Fourier transform [rows, columns] of a Morlet wavelet, which is real."""
    shape = rows, columns, 0.8 * 2**scale
    wave = gabor(*shape, 0.75 * math.pi / 2**scale, angle, 4 / ANGLES)
    envelope = gabor(*shape, 0.0, angle, 4 / ANGLES)
    return np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real


def gabor(
    rows: int, columns: int, width: float, frequency: float, angle: float, slant: float
) -> np.ndarray:
    """Return a periodic wave [rows, columns] in a Gaussian envelope around pixel (0, 0)."""
    value = np.zeros((rows, columns), np.complex128)
    for r in range(-2, 3):
        for c in range(-2, 3):
            y, x = np.mgrid[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
            along = x * math.cos(angle) + y * math.sin(angle)
            aside = y * math.cos(angle) - x * math.sin(angle)
            exponent = -(along**2 + (slant * aside) ** 2) / (2 * width**2)
            value += np.exp(exponent + 1j * frequency * along)
    return value * slant / (2 * math.pi * width**2)


# Random convolutions

PATCH = 6  # side of a patch, in pixels
STEP = 2  # distance of two patches, in pixels
FILTERS = 256
POOLS = 3  # regions along each axis
SMALLEST_CONTRAST = 0.1  # is added to the contrast of a patch, as SMALLEST_NORM
THRESHOLD = 1.0  # smaller responses become 0


def random_conv(images: Tensor, seed: int) -> Tensor:
    """Compute responses of patches of 6 x 6 pixels to random filters, and average over regions.

    Each filter is Gaussian with mean 0 and norm 1. A response is divided by the contrast of its
    patch, the standard deviation of its pixels. The part of a response above 1, and of its
    negative, are averaged over 3 x 3 regions.

    Args:
        images: Images [n, channels, height, width].
        seed: Seed of the filters.

    Returns:
        Features [n, 9 * 512].
    """
    patches = images.unfold(2, PATCH, STEP).unfold(3, PATCH, STEP)
    down, across = patches.shape[2:4]
    patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
    patches = patches - patches.mean(2, keepdim=True)
    patches /= patches.square().mean(2, keepdim=True).sqrt() + SMALLEST_CONTRAST
    responses = patches @ random_filters(images.shape[1], seed)
    pools = region_means(down, across)
    parts = [pools @ (sign * responses - THRESHOLD).relu() for sign in (1, -1)]
    return torch.cat(parts, 2).flatten(1)


@lru_cache(maxsize=4)
def random_filters(channels: int, seed: int) -> Tensor:
    """Draw filters [channels * 36, 256] with mean 0 and norm 1."""
    filters = generator(seed, Draw.FEATURES).standard_normal((channels * PATCH**2, FILTERS))
    filters -= filters.mean(0)
    return torch.from_numpy((filters / np.linalg.norm(filters, axis=0)).astype(np.float32))


@lru_cache(maxsize=8)
def region_means(down: int, across: int) -> Tensor:
    """Return weights [regions, down * across], with which means over regions are computed."""
    axes = []
    for count in (down, across):
        region = np.arange(count) * min(POOLS, count) // count
        weights = (region == np.arange(min(POOLS, count))[:, None]).astype(np.float32)
        axes.append(weights / weights.sum(1, keepdims=True))
    return torch.from_numpy(np.kron(*axes))


# Name in a config -> function of images and a seed, which only random convolutions use
TRANSFORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "hog": lambda images, seed: hog(images),
    "scattering": lambda images, seed: scattering(images),
    "random-conv": random_conv,
}
