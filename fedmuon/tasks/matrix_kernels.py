"""One matrix product behind one function, and a short measurement that chooses its kernel.

Which library multiplies fastest depends on the processor: MKL (`torch`) holds back on some AMD
parts, where oneDNN's convolution (`channels-last`, float32 only) or OpenBLAS (`numpy`) is ahead.
All kernels are exact up to rounding: relative error at most k * eps for an inner length k.
`fused` is torch's, but for thin gradients, which `fedmuon.tasks.batched_gradients` has in one pass.
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
    """A 1x1 convolution over a channels-last image is a matrix product; oneDNN runs it."""
    rows, inner = a.shape
    image = a.contiguous().view(1, rows, 1, inner).permute(0, 3, 1, 2)
    out = conv2d(image, b.T.contiguous().view(-1, inner, 1, 1))
    return out.permute(0, 2, 3, 1).reshape(rows, -1)


def _numpy(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(a.numpy() @ b.numpy())


KERNELS: dict[str, Kernel] = {
    "torch": torch.mm,
    "channels-last": _channels_last,
    "numpy": _numpy,
    "fused": torch.mm,
}


def supported(dtype: torch.dtype, device: torch.device) -> list[str]:
    """The kernels that can run here, the plainest first."""
    if device.type != "cpu":
        return ["torch"]
    found = ["torch", "channels-last", "numpy"] if dtype == torch.float32 else ["torch", "numpy"]
    return [*found, "fused"] if dtype in FUSED and find_spec("numba") else found


@lru_cache
def compiles() -> bool:
    """Whether numba is there, fits to the NumPy that is, and has a place to keep what it made."""
    try:
        importlib.import_module("fedmuon.tasks.batched_gradients")
    except Exception:  # whatever a library raises that does not fit
        return False
    return True


def multiply(a: Tensor, b: Tensor, kernel: str = "torch") -> Tensor:
    """a [m, k] times b [k, n], by the named kernel; either may be a transposed view."""
    return KERNELS[kernel](a, b)


def rate(
    kernel: str, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, repeats: int = 3
) -> float:
    """Flop per second of the best of a few products [m, k] x [k, n]."""
    a, b = _ones(m, k, dtype, device), _ones(n, k, dtype, device)
    return 2.0 * m * k * n / _best(lambda: multiply(a, b.T, kernel), device, repeats)


def fastest(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel for gradients: products [m, k] x [k, n] and [m, n] x [n, k], torch in between.

    As a piece of a step does them, in one thread; NumPy's library, which has threads of its own, is
    none of these. A kernel must win by 5% to displace a plainer one.
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
    """Seconds of the fastest of `repeats` calls after one to warm up."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finished()
    return min(timeit.repeat(finished, number=1, repeat=repeats))


# How the matrix task's products are cut: by size alone, into pieces for one thread each.
#
# A thin product, of few matrix rows S c, is cut by samples, and the parts are added in their
# order; a thick one by replicas, whose gradients need no adding; clients with little to do are
# put together.

THICK = 64  # matrix rows
FLOP = 16e6  # of a piece at least: some tenths of a millisecond
LOGITS = 1 << 19  # of a thick piece at most, so that they stay in a cache
FEW, MANY = 256, 4096  # samples of a part of a thin and of a thick product


class Member(NamedTuple):
    """A client, or a part of it: its weights [S, c, d], what it sees, and the samples it has."""

    weight: Tensor
    batch: Batch
    samples: int

    @property
    def thick(self) -> bool:
        """Whether its products are fast however they are cut by matrix rows."""
        return self.weight.shape[0] * self.weight.shape[1] >= THICK

    @property
    def flops(self) -> float:
        """Of the two products."""
        return 4.0 * self.weight.numel() * len(self.batch.labels)


def pieces(members: Sequence[Member]) -> list[list[list[Member]]]:
    """Rows of pieces: a row's results are to be added, the rows' to be joined in this order."""
    found: list[list[list[Member]]] = []
    for some in together(members):
        found += _cut(some[0]) if len(some) == 1 else [[some]]
    return found


def together(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Neighbours with little to do; others alone."""
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
    """Those of the replaced samples that a part sees, by their place in it."""
    replica, position = there.replica - replicas.start, there.position - samples.start
    held = (replica >= 0) & (there.replica < replicas.stop)
    held &= (position >= 0) & (there.position < samples.stop)
    if not bool(held.any()):
        return None
    return Replaced(replica[held], position[held], there.inputs[held], there.labels[held])


# Mean gradients of the matrix task's thin members, each in one pass over its samples, compiled.
#
# A round of few replicas is so short that every call of Python shows: what the parts of a member
# share is looked up once, and their first sum lies where the gradient is to be.

INDICES = torch.int64, torch.int32
Own = Callable[[Member, Replaced], tuple[Tensor, Tensor]]  # p_y [T, 1] and slopes [T, c, 1]


class _Part(NamedTuple):
    """Some rows of a member: samples, labels and weights, and the sums over the rows, of gradients
    [S, c, d] and of p_y [S]."""

    member: Member
    rows: slice
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    total: np.ndarray
    right: np.ndarray

    @property
    def loss(self) -> np.ndarray:
        """Its share of the mean loss [S]."""
        return (self.rows.stop - self.rows.start - self.right) / self.member.samples


def mean_gradients(members: Sequence[Member], own: Own) -> tuple[Tensor, Tensor]:
    """Mean losses [K S] and gradients [K S, c, d], in pieces that several threads take; `own` tells
    of the samples that stand for others."""
    weight = members[0].weight
    gradients = np.zeros((len(members), *weight.shape), weight.numpy().dtype)
    sums = iter(gradients)
    groups = [
        [_parts(one, next(sums), len(some) == 1) for one in some] for some in together(members)
    ]
    # One member's parts are a piece each, and several members, of one part each, are a piece.
    spread([partial(_add, piece, own) for group in groups for piece in zip(*group, strict=True)])
    losses = [_loss(parts) for group in groups for parts in group]
    return torch.from_numpy(np.concatenate(losses)), torch.from_numpy(gradients).flatten(0, 1)


def _parts(member: Member, first: np.ndarray, cut: bool) -> list[_Part]:
    """The member in parts, of which the first has its sum there; or as one."""
    batch, weight = member.batch, member.weight
    _require_types(batch, weight)
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
    """The kernel's sums, and in the replicas that replace a sample those of their own."""
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
    """The mean loss [S]; the first part gets the sums of the others, in their order."""
    for part in parts[1:]:
        parts[0].total[:] += part.total
    return sum((part.loss for part in parts[1:]), start=parts[0].loss)


def _require_types(batch: Batch, weight: Tensor) -> None:
    """Refuse what torch's products and gathers refuse too."""
    if batch.inputs.dtype != weight.dtype or batch.labels.dtype not in INDICES:
        raise InputError(
            f"the samples are {batch.inputs.dtype}, their labels {batch.labels.dtype} and the "
            f"parameters {weight.dtype}: let samples be as parameters are, and labels whole"
        )
