"""A module's tensors for a trial call that shows shapes alone."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from fedmuon.core.errors import InputError
from fedmuon.core.threads import parts
from fedmuon.tasks.base import Batch, Params

SMALL = 1 << 22  # parameters


def stand_ins(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, its own or zeros; of a large module on `meta`, where nothing is
    computed. To work there loads torch's compiler, which takes a process a second or two."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    large = sum(value.numel() for value in own.values()) > SMALL
    return {name: _stand_in(value.detach(), large) for name, value in own.items()}


def inputs_like(held: dict[str, Tensor], shape: tuple[int, ...], whole: bool = False) -> Tensor:
    """Samples to call it with, `whole` numbers or like the parameters."""
    first = next(iter(held.values()))
    return torch.zeros(shape, dtype=torch.long if whole else first.dtype, device=first.device)


def _stand_in(value: Tensor, large: bool) -> Tensor:
    if large:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype)
    return value.cpu().clone()


def on_meta(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters, which ask for gradients, and buffers, without numbers."""
    params = {
        name: torch.empty_like(value, device="meta").requires_grad_()
        for name, value in module.named_parameters()
    }
    return params | {name: value.to("meta") for name, value in module.named_buffers()}


# How many samples a network sees at once: bounded by memory, halved where that runs out.

Found = TypeVar("Found")


@dataclass
class Chunks:
    """Samples in groups of `most`, counted once for every replica that sees them together.

    `most` falls where a device runs out of memory and stays there: it changes rounding only.
    """

    most: int

    def each(
        self, work: Callable[[slice], Found], rows: int, replicas: int = 1, start: int = 0
    ) -> Iterator[Found]:
        """work(rows a to b) for the groups of `start` to `rows`, in order."""
        while start < rows:
            part = slice(start, min(rows, start + max(1, self.most // replicas)))
            try:
                found = work(part)
            except torch.OutOfMemoryError:
                self._halve(part, replicas)
                continue
            yield found
            del found  # before the next group is made
            start = part.stop

    def _halve(self, part: slice, replicas: int) -> None:
        size = part.stop - part.start
        if size == 1:
            raise InputError(
                f"a single sample of {replicas} replicas does not fit into the device's memory: "
                "use fewer trials, a smaller [task] model, or [engine] device = 'cpu'"
            )
        self.most = size // 2 * replicas
        gc.collect()  # what the failed attempt held
        torch.cuda.empty_cache()


def saved_entries(module: nn.Module, shape: tuple[int, ...], whole: bool = False) -> int:
    """Numbers that autograd keeps for one sample: what two samples keep more than one. Refuses a
    module that writes into its samples, which others see too."""
    held = stand_ins(module)
    for name, _ in module.named_parameters():
        held[name].requires_grad_()

    def kept(rows: int) -> int:
        counts: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            counts.append(tensor.numel())
            return tensor

        samples = inputs_like(held, (rows, *shape), whole)
        before = samples._version
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(module, held, (samples,))
        if samples._version > before:
            raise InputError(
                "the module writes into its samples, as a first layer with inplace = True does: "
                "let it write into a copy"
            )
        return sum(counts)

    return kept(2) - kept(1)


def exact_on(device: torch.device) -> AbstractContextManager[None]:
    """float32 as it says, and the same sums every time: cuDNN otherwise rounds convolutions to
    TF32 and may choose algorithms that add in no fixed order."""
    if device.type != "cuda":
        return nullcontext()
    flags = torch.backends.cudnn.flags
    return flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


# What the replicas of a network see, and how their work is cut: by size alone, into pieces for one
# thread each; replicas first, whose gradients need no adding, then samples, in their order.

WORK = 1 << 24  # products of a piece, at least: a millisecond or two
FEW = 32  # samples of a piece, at least: fewer lose more in convolutions than a thread gains


class Samples(NamedTuple):
    """What B replicas see: inputs [B, n, ...], labels [B, n] and, where the loss is summed, the
    samples' weights [B, n]; an axis of length 1 in place of B is shared by all."""

    inputs: Tensor
    labels: Tensor
    weights: Tensor

    def rows(self, part: slice) -> "Samples":
        """Some of the samples."""
        return Samples(*(values[:, part] for values in self))

    def some(self, replicas: slice) -> "Samples":
        """What some of the replicas see."""
        return Samples(*(values if len(values) == 1 else values[replicas] for values in self))


def pieces(params: Params, samples: Samples, products: int) -> list[list[tuple[Params, Samples]]]:
    """Rows of pieces: a row's results are to be added, the rows' to be joined; a sample costs so
    many products."""
    rows, replicas = samples.labels.shape[1], size_of(params)
    each = rows * products / WORK
    cut = parts(rows, min(each, rows / FEW))
    return [
        [(_some(params, block), samples.some(block).rows(part)) for part in cut]
        for block in parts(replicas, replicas * min(1.0, each))
    ]


def size_of(params: Params) -> int:
    return len(next(iter(params.values())))


def _some(params: Params, replicas: slice) -> Params:
    return {name: value[replicas] for name, value in params.items()}


def side_by_side(batches: Sequence[Batch]) -> Samples:
    """Batches of one size as the samples of as many replicas."""
    inputs = torch.stack([batch.inputs for batch in batches])
    labels = torch.stack([batch.labels for batch in batches])
    return Samples(inputs, labels, inputs.new_full((1, labels.shape[1]), 1 / labels.shape[1]))
