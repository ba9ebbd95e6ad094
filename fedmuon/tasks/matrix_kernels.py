"""Products of the matrix task: their kernels, how they are cut for threads, and fused gradients.

The fastest library depends on the processor. MKL (`torch`) is slow on some AMD processors, where
oneDNN's convolution (`channels-last`, float32 only) or OpenBLAS (`numpy`) is faster. All kernels
are exact up to rounding: the relative error is at most k * eps for an inner length k. `fused` is
`torch`, except that `fedmuon.tasks.batched_gradients` computes thin gradients in one pass.
"""

import importlib
import math
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedmuon.core.errors import InputError
from fedmuon.core.threads import parts, spread
from fedmuon.tasks.base import Batch, Replaced

Kernel = Callable[[Tensor, Tensor], Tensor]
FUSED = (torch.float32, torch.float64)


def _channels_last(a: Tensor, b: Tensor) -> Tensor:
    """The product as a 1x1 convolution over a channels-last image, which oneDNN computes."""
    rows, inner = a.shape
    image = a.contiguous().view(1, rows, 1, inner).permute(0, 3, 1, 2)
    out = conv2d(image, b.T.contiguous().view(-1, inner, 1, 1))
    return out.permute(0, 2, 3, 1).reshape(rows, -1)


KERNELS: dict[str, Kernel] = {
    "torch": torch.mm,
    "channels-last": _channels_last,
    "numpy": lambda a, b: torch.from_numpy(a.numpy() @ b.numpy()),
    "fused": torch.mm,
}


def supported(dtype: torch.dtype, device: torch.device) -> list[str]:
    """The kernels that run with this dtype on this device, the plainest first."""
    if device.type != "cpu":
        return ["torch"]
    found = ["torch", "channels-last", "numpy"] if dtype == torch.float32 else ["torch", "numpy"]
    return [*found, "fused"] if dtype in FUSED and find_spec("numba") else found


@lru_cache
def compiles() -> bool:
    """Whether numba is installed, fits the installed NumPy, and can cache compiled kernels."""
    try:
        importlib.import_module("fedmuon.tasks.batched_gradients")
    except Exception:  # an unsuitable library may raise anything
        return False
    return True


def multiply(a: Tensor, b: Tensor, kernel: str = "torch") -> Tensor:
    """Multiply a [m, k] by b [k, n] with a named kernel; both may be transposed views."""
    return KERNELS[kernel](a, b)


def rate(
    kernel: str, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, repeats: int = 3
) -> float:
    """Measure the flop per second of the fastest of a few products [m, k] x [k, n]."""
    a, b = _ones(m, k, dtype, device), _ones(n, k, dtype, device)
    return 2.0 * m * k * n / _best(lambda: multiply(a, b.T, kernel), device, repeats)


def fastest(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    """Choose the kernel for gradients: products [m, k] x [k, n] and [m, n] x [n, k].

    They are measured in one thread, with torch's elementwise operations in between, as in a piece
    of a step. NumPy is left out, because its library uses threads of its own. A kernel must be
    faster by 5% to replace a plainer one.
    """
    return spread([partial(_fastest, m, k, n, dtype, device)])[0]


def _fastest(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    a, b = _ones(m, k, dtype, device), _ones(n, k, dtype, device)

    def gradient(kernel: str) -> None:
        multiply(multiply(a, b.T, kernel).mul_(1e-3).exp_(), b, kernel)

    best, least = "torch", math.inf
    for kernel in [one for one in supported(dtype, device) if one not in ("numpy", "fused")]:
        seconds = _best(lambda kernel=kernel: gradient(kernel), device, 5)
        if 1.05 * seconds < least:
            best, least = kernel, seconds
    return best


def _ones(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(rows, columns, dtype=dtype, device=device)


def _best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after a first call to warm up."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finished()
    return min(timeit.repeat(finished, number=1, repeat=repeats))


# Pieces of the products, one for each thread. How they are cut depends on sizes alone.
#
# A thin product, with few matrix rows S c, is cut by samples, and the parts are added in order. A
# thick product is cut by replicas, whose gradients need no addition. Small clients are grouped.

THICK = 64  # matrix rows from which a product is thick
FLOP = 16e6  # the least flop of a piece: some tenths of a millisecond
LOGITS = 1 << 19  # the most logits of a thick piece, so that they stay in a cache
FEW, MANY = 256, 4096  # samples of a part of a thin and of a thick product


class Member(NamedTuple):
    """A client or a part of it: its weights [S, c, d], its rows, and its number of samples.

    `samples` is that of the whole client.
    """

    weight: Tensor
    batch: Batch
    samples: int

    @property
    def thick(self) -> bool:
        """Whether its products stay fast if they are cut by matrix rows."""
        return self.weight.shape[0] * self.weight.shape[1] >= THICK

    @property
    def flops(self) -> float:
        """The flop of both products."""
        return 4.0 * self.weight.numel() * len(self.batch.labels)


def pieces(members: Sequence[Member]) -> list[list[list[Member]]]:
    """Return rows of pieces. The results within a row are to be added in order.

    Those of different rows are to be concatenated.
    """
    found: list[list[list[Member]]] = []
    for some in together(members):
        found += _cut(some[0]) if len(some) == 1 else [[some]]
    return found


def together(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Group consecutive small members; yield large ones alone."""
    some: list[Member] = []
    held = 0.0
    for one in members:
        if some and held + one.flops > FLOP:
            yield some
            some, held = [], 0.0
        some.append(one)
        held += one.flops
    yield some


def _cut(member: Member) -> list[list[list[Member]]]:
    replicas, classes = member.weight.shape[:2]
    rows, samples = replicas * classes, len(member.batch.labels)
    if not member.thick:
        return [[[_part(member, slice(0, replicas), part)] for part in thin_parts(member)]]
    cut = parts(samples, samples / MANY + 0.5)
    blocks = min(rows * (samples / len(cut)) / LOGITS, rows / THICK)
    return [
        [[_part(member, block, part)] for part in cut] for block in parts(replicas, blocks + 0.5)
    ]


def thin_parts(member: Member) -> list[slice]:
    """The samples of each part of a thin product."""
    samples = len(member.batch.labels)
    return parts(samples, min(member.flops / FLOP, samples / FEW))


def _part(member: Member, replicas: slice, samples: slice) -> Member:
    batch = member.batch
    there = batch.replaced and within(batch.replaced, replicas, samples)
    own = Batch(batch.inputs[samples], batch.labels[samples], there)
    return Member(member.weight[replicas], own, member.samples)


def within(there: Replaced, replicas: slice, samples: slice) -> Replaced | None:
    """The replaced samples within a part, by their position in it."""
    replica, position = there.replica - replicas.start, there.position - samples.start
    held = (replica >= 0) & (there.replica < replicas.stop)
    held &= (position >= 0) & (there.position < samples.stop)
    if not bool(held.any()):
        return None
    return Replaced(replica[held], position[held], there.inputs[held], there.labels[held])


# Mean gradients of thin members, each in one compiled pass over its samples.
#
# A round of few replicas is so short that every Python call matters. So values that the parts of a
# member share are looked up once, and the first part sums into the result directly.

INDICES = torch.int64, torch.int32
Own = Callable[[Member, Replaced], tuple[Tensor, Tensor]]  # p_y [T, 1] and slopes [T, c, 1]


class _Part(NamedTuple):
    """Some rows of a member: (samples, labels, weights), and the sums over these rows.

    `total` [S, c, d] sums gradients, and `right` [S] sums p_y.
    """

    member: Member
    rows: slice
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    total: np.ndarray
    right: np.ndarray

    @property
    def loss(self) -> np.ndarray:
        """The share in the mean loss [S]."""
        return (self.rows.stop - self.rows.start - self.right) / self.member.samples


def mean_gradients(members: Sequence[Member], own: Own) -> tuple[Tensor, Tensor]:
    """Mean losses [K S] and gradients [K S, c, d] of thin members, in pieces for several threads.

    `own` computes p_y and slopes of replaced samples.
    """
    weight = members[0].weight
    gradients = np.zeros((len(members), *weight.shape), weight.numpy().dtype)
    sums = iter(gradients)
    groups = [
        [_parts(one, next(sums), len(some) == 1) for one in some] for some in together(members)
    ]
    # A piece is one part of a large member, or a group of small members with one part each.
    spread([partial(_add, piece, own) for group in groups for piece in zip(*group, strict=True)])
    losses = [_loss(parts) for group in groups for parts in group]
    return torch.from_numpy(np.concatenate(losses)), torch.from_numpy(gradients).flatten(0, 1)


def _parts(member: Member, first: np.ndarray, cut: bool) -> list[_Part]:
    """Split a member into parts, or one part unless `cut`; the first part sums into `first`."""
    batch, weight = member.batch, member.weight
    # The types that torch's products and gathers reject, too.
    if batch.inputs.dtype != weight.dtype or batch.labels.dtype not in INDICES:
        raise InputError(
            f"the samples are {batch.inputs.dtype}, their labels {batch.labels.dtype} and the "
            f"parameters {weight.dtype}: let samples be as parameters are, and labels whole"
        )
    each = (one.contiguous().numpy() for one in (batch.inputs, batch.labels.long(), weight))
    inputs, labels, weights = each
    slices = thin_parts(member) if cut else [slice(0, len(labels))]
    totals = [first, *np.zeros((len(slices) - 1, *first.shape), first.dtype)]
    rights = np.zeros((len(slices), len(weights)), first.dtype)
    return [
        _Part(member, rows, (inputs[rows], labels[rows], weights), total, right)
        for rows, total, right in zip(slices, totals, rights, strict=True)
    ]


def _add(piece: Sequence[_Part], own: Own) -> None:
    """Add the sums of the kernel, and those of replaced samples in their replicas."""
    # Imported here: numba is optional, takes up to a second to load, and serves one kernel.
    from fedmuon.tasks.batched_gradients import slope_sums

    for member, rows, arrays, total, right in piece:
        replicas, classes = total.shape[:2]
        there = member.batch.replaced
        there = there and within(there, slice(0, replicas), rows)
        skip = np.full(replicas, -1)
        if there is not None:
            skip[there.replica.numpy()] = there.position.numpy()
        if not slope_sums(*arrays, skip, total.dtype.type(1 / member.samples), total, right):
            raise InputError(f"a label is none of 0 to {classes - 1}: number the classes from 0")
        if there is not None:
            after, more = own(member, there)
            replica = there.replica.numpy()
            total[replica] += (more * there.inputs[:, None]).numpy()
            right[replica] += after[:, 0].numpy()


def _loss(parts: Sequence[_Part]) -> np.ndarray:
    """The mean loss [S]; also adds the sums of the other parts to the first, in order."""
    for part in parts[1:]:
        parts[0].total[:] += part.total
    return sum((part.loss for part in parts[1:]), start=parts[0].loss)
