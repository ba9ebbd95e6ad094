"""How many samples a network sees at once: bounded by memory, halved where that runs out."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from fedmuon.core.errors import InputError
from fedmuon.tasks.shapes import inputs_like, stand_ins

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
