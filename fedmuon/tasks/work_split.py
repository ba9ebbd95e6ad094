"""How the work of a network is split: trial calls, groups that fit into memory, and thread pieces.

Only sizes determine the pieces, so results do not depend on the number of threads.
"""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from fedmuon.core.errors import InputError
from fedmuon.core.threads import parts
from fedmuon.tasks.base import STATISTICS, Params
from fedmuon.tasks.dropout import Masks, Shapes, sample_axes

SMALL = 1 << 22  # number of parameters of a large module
OF_NORMS = (*STATISTICS, "num_batches_tracked")  # buffers into which torch layers write


def on_meta(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module as tensors without values.

    The parameters require gradients.
    """
    params = {
        name: torch.empty_like(value, device="meta").requires_grad_()
        for name, value in module.named_parameters()
    }
    return params | {name: value.to("meta") for name, value in module.named_buffers()}


# Groups of samples, bounded by memory; they are halved if memory runs out

Found = TypeVar("Found")


@dataclass
class Chunks:
    """Splits samples into groups of at most `most` samples, so that each group fits into memory.

    If a group is computed for several replicas at once, each sample counts once per replica. If the
    device runs out of memory, `most` is halved for this call and all later calls. This changes
    results only by rounding.
    """

    most: int

    def each(
        self, work: Callable[[slice], Found], rows: int, replicas: int = 1, start: int = 0
    ) -> Iterator[Found]:
        """Call `work` for each group of the samples from `start` to `rows`. Yield the results."""
        while start < rows:
            part = slice(start, min(rows, start + max(1, self.most // replicas)))
            try:
                result = work(part)
            except torch.OutOfMemoryError:
                size = part.stop - part.start
                if size == 1:
                    raise InputError(
                        f"the memory of the device is too small for one sample of {replicas} "
                        "replicas. Use fewer trials, a smaller [task] model, or [engine] device "
                        "= 'cpu'."
                    ) from None
                self.most = size // 2 * replicas
                gc.collect()  # frees the memory of the failed attempt
                torch.cuda.empty_cache()
                continue
            yield result
            del result  # before the next group is created
            start = part.stop


class Trial(NamedTuple):
    """Properties of a module that trial calls with one and two samples show.

    `saved` is how many numbers autograd stores per sample. `axes` contains, for each dropout in a
    call, the axis of its input that runs over the samples. `outputs` is how many numbers the module
    returns per sample.
    """

    saved: int
    axes: tuple[int, ...]
    outputs: int


def _global_draws() -> dict[str, Any]:
    """Return the states of the global random generators of Python and NumPy."""
    state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - to see whether it is used
    return {"random": random.getstate(), "numpy.random": (state["pos"], state["key"].tobytes())}


def try_module(module: nn.Module, shape: tuple[int, ...], whole: bool = False) -> Trial:
    """Call a module with batches of two sizes, and return its properties.

    The batches have two samples and one sample, or three and two samples if the module normalizes
    over a batch. The calls use copies of parameters and buffers, or zeros for tensors on the device
    `meta`. For a large module, the copies are on `meta`, where nothing is computed. Small modules
    are called on the CPU, because a call on `meta` first loads torch's compiler, which takes a
    second or two.

    Raises:
        InputError: If the module changes its input samples or its buffers, or uses the global
            random generator of torch.
    """
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    large = sum(value.numel() for value in tensors.values()) > SMALL
    copies = {}
    for name, value in tensors.items():
        if large:
            copies[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        elif value.is_meta:
            copies[name] = torch.zeros(value.shape, dtype=value.dtype)
        else:
            copies[name] = value.detach().cpu().clone()
        copies[name].requires_grad_(name in params)

    first = next(iter(copies.values()))
    kind = torch.long if whole else first.dtype
    counts: list[int] = []
    returned: list[int] = []
    shapes: list[Shapes] = []

    def keep(tensor: Tensor) -> Tensor:
        counts[-1] += tensor.numel()
        return tensor

    few = 2 if any(isinstance(layer, _NormBase) for layer in module.modules()) else 1
    for rows in (few + 1, few):
        counts.append(0)
        shapes.append(Shapes())
        samples = torch.zeros((rows, *shape), dtype=kind, device=first.device)
        before = samples._version
        versions = {name: copies[name]._version for name, _ in module.named_buffers()}
        drawn = _global_draws()
        with saved_tensors_hooks(keep, lambda tensor: tensor), Masks(None, seen=shapes[-1]):
            result = functional_call(module, copies, (samples,))
        returned.append(result.numel() if isinstance(result, Tensor) else 0)
        after = _global_draws()
        shapes[-1].others += [name for name, state in drawn.items() if after[name] != state]
        if samples._version > before:
            raise InputError(
                "the module changes its input samples in place, for example because its first "
                "layer has inplace = True. Set inplace = False, or change a copy "
                "(samples.clone())."
            )
        own_buffers = {name for name in versions if name.rpartition(".")[2] not in OF_NORMS}
        if changed := [name for name in own_buffers if copies[name]._version > versions[name]]:
            raise InputError(
                f"the module changes its buffer {min(changed)}, but servers do not average "
                "buffers, so engines and resumed runs would differ. Compute this value from the "
                "batch, store it as a parameter instead of a buffer, or use BatchNorm."
            )
    axes = sample_axes(shapes[1], shapes[0])
    return Trial(counts[0] - counts[1], axes, returned[0] - returned[1])


def exact_on(device: torch.device) -> AbstractContextManager[None]:
    """Within this context, compute in full float32 precision and in a fixed order of addition.

    Without this context, cuDNN rounds convolutions to TF32 and may add numbers in a varying order.
    """
    if device.type != "cuda":
        return nullcontext()
    flags = torch.backends.cudnn.flags
    return flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


# Pieces, one for each thread: first replicas, whose gradients need no addition, then samples, whose
# gradients are added in order.

WORK = 1 << 24  # minimum number of products in a piece, which take one or two milliseconds
FEW = 32  # minimum number of samples in a piece; with fewer, convolutions become too slow
# With so many pieces, two threads would not end together, so the last piece is halved. With more
# pieces, the time between their ends is short.
UNEVEN = (3, 5, 7)


class Samples(NamedTuple):
    """The samples of B replicas: their inputs, labels, weights and keys.

    The inputs have the shape [B, n, ...], and the other tensors [B, n]. The weights multiply the
    losses, and the keys belong to the dropout masks. If the first axis of a tensor has length 1,
    all replicas share its values.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor
    keys: Tensor

    def rows(self, part: slice) -> "Samples":
        """Return some of the samples, for the same replicas."""
        return Samples(*(values[:, part] for values in self))


def split_samples(
    params: Params, samples: Samples, products: int
) -> list[list[tuple[Params, Samples]]]:
    """Split samples into pieces for threads, as a list of lists of pieces.

    `products` is the number of products that each sample needs. To combine the results, first add
    the results of the pieces in each inner list, and then concatenate these sums.
    """
    rows, replicas = samples.labels.shape[1], size_of(params)
    per_replica = rows * products / WORK
    stacks = parts(replicas, replicas * min(1.0, per_replica))
    cuts = [parts(rows, min(per_replica, rows // FEW))] * len(stacks)
    if len(stacks) == replicas in UNEVEN and rows >= FEW and len(cuts[-1]) == 1:
        cuts[-1] = parts(rows, 2)
    if len(stacks) == len(cuts[0]) == 1:
        return [[(params, samples)]]
    pieces = []
    for stack, cut in zip(stacks, cuts, strict=True):
        of_stack = {name: value[stack] for name, value in params.items()}
        chosen = Samples(*(values if len(values) == 1 else values[stack] for values in samples))
        pieces.append([
            (of_stack, chosen if len(cut) == 1 else chosen.rows(part)) for part in cut
        ])  # fmt: skip
    return pieces


def size_of(params: Params) -> int:
    """Return the number of replicas in a stack of parameters."""
    return len(next(iter(params.values())))
