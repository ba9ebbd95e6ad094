"""What a network's outputs are held against, and the loss of each sample."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from fedmuon.core.errors import InputError

IGNORED = -100  # a target that no loss counts, as torch has it
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [n, ..., c], targets [n, ...]) -> losses [n]
Targets = Callable[[Tensor, Tensor], Tensor]  # (inputs [n, d], labels [n]) -> targets [n, ...]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """-log p_y of each sample; of a sample with many targets, the mean over those that count."""
    each = functional.cross_entropy(
        outputs.movedim(-1, 1), targets, reduction="none", ignore_index=IGNORED
    )
    return mean_of(each, targets) if each.ndim > 1 else each


def apart(loss: Loss) -> Loss:
    """The same loss, given one sample at a time, so that none can depend on another: a clipped
    gradient must be a function of its example alone."""
    if loss is cross_entropy:  # each row by itself
        return loss

    def one(output: Tensor, target: Tensor) -> Tensor:
        value = loss(output[None], target[None])
        if value.shape != (1,):
            raise InputError(
                f"the loss of one sample has the shape {tuple(value.shape)}: return one value for "
                "each sample, without a mean over them"
            )
        return value[0]

    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            return vmap(one)(outputs, targets)
        except RuntimeError:  # what vmap cannot follow, such as an `if` on a value
            return torch.stack([one(*pair) for pair in zip(outputs, targets, strict=True)])

    return each


def mean_of(values: Tensor, targets: Tensor) -> Tensor:
    """The mean [n] of values [n, ...] that are 0 where the target is IGNORED."""
    return values.flatten(1).sum(1) / (targets != IGNORED).flatten(1).sum(1).clamp(min=1)


def given_labels(inputs: Tensor, labels: Tensor) -> Tensor:
    """The labels are what is to be predicted."""
    return labels
