"""The interface of a task: loss and gradients as pure functions of a stack of parameters.

Parameters are `dict[str, Tensor]`. The first axis of each tensor is the replica axis, so one stack
contains the parameters of S runs that are computed together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from fedmuon.core.errors import InputError

if TYPE_CHECKING:
    from fedmuon.tasks.per_example.clipping import Clipping

Params = dict[str, Tensor]
Points = Sequence[tuple[float, Params]]  # sum_k c_k (gradient at X_k), as the pairs (c_k, X_k)


@dataclass(frozen=True)
class Replaced:
    """Replacement samples, which differ between replicas.

    In replica `replica[t]`, the sample (`inputs[t]`, `labels[t]`) replaces the shared sample at row
    `position[t]` of the batch. All tensors have length T. No replica appears twice, unless
    `several` is true. A task with a sum for single replacements computes such a batch with
    `fedmuon.tasks.own_samples`.
    """

    replica: Tensor
    position: Tensor
    inputs: Tensor
    labels: Tensor
    several: bool = False


@dataclass(frozen=True)
class Batch:
    """The samples of one local step: inputs, labels, and replacements for some replicas.

    The inputs have the shape [n, d], where each row is one sample. Images are also flattened to
    rows, and a network knows their shape. `keys` [n] are the keys of the samples' dropout masks. A
    replacement sample has the key of the sample that it replaces.
    """

    inputs: Tensor
    labels: Tensor
    replaced: Replaced | None = None
    keys: Tensor | None = None


@dataclass(frozen=True)
class Released:
    """A noisy gradient, which is the only result from the data that a private optimizer may use.

    Everything that is computed only from releases is post-processing, which costs no privacy.

    Attributes:
        gradient: Mapping from a parameter name to its noisy gradient, for K clients with S replicas
            each.
        kept: With quantile clipping, one number per client: the noisy share of contributions that
            were not clipped. Otherwise, None.
    """

    gradient: Params
    kept: Tensor | None = None


# Running statistics of norms are part of the model, under torch's names. They have no gradient.
# Instead of a gradient, a task returns their next values.

STATISTICS = ("running_mean", "running_var")


def is_statistic(name: str) -> bool:
    """Return whether the tensor with this name is a running statistic of a norm layer."""
    return name.rpartition(".")[2] in STATISTICS


def split_statistics(params: Params) -> tuple[Params, Params]:
    """Split a model into parameters with gradients and running statistics of norm layers."""
    learned = {name: value for name, value in params.items() if not is_statistic(name)}
    return learned, {name: value for name, value in params.items() if is_statistic(name)}


def concatenate(found: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate a list of tensors, tuples of tensors or dictionaries of tensors along an axis.

    If the list has only one entry, this entry is returned without a copy.
    """
    return found[0] if len(found) == 1 else _combine(found, partial(torch.cat, dim=axis))


def stack_results(found: Sequence[Any]) -> Any:
    """Stack tensors, or tuples or dictionaries of tensors, along a new first axis."""
    return _combine(
        found, lambda tensors: tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
    )


def _combine(results: Sequence[Any], combine: Callable[[list[Tensor]], Tensor]) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        return combine(list(results))
    if isinstance(first, dict):
        return {name: _combine([result[name] for result in results], combine) for name in first}
    return tuple(_combine(parts, combine) for parts in zip(*results, strict=True))


def blocks(tree: Params, count: int) -> list[Params]:
    """Split a stack with the replicas of `count` clients into one stack for each client."""
    chunks = {name: value.chunk(count) for name, value in tree.items()}
    return [{name: chunks[name][k] for name in tree} for k in range(count)]


def repeated(tree: Params, times: int) -> Params:
    """Repeat tensors along the replica axis, and preserve their memory order."""
    if times == 1:
        return tree
    turned = {name: value.ndim > 2 and value.mT.is_contiguous() for name, value in tree.items()}
    return {
        name: torch.cat([value.mT] * times).mT if turned[name] else torch.cat([value] * times)
        for name, value in tree.items()
    }


class Task(Protocol):
    """The interface of a task: loss and gradients.

    A stack contains the parameters of several replicas. Each method computes its result for all
    replicas of the stack.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""

    @property
    def stack_limit(self) -> int:
        """The maximum number of parameters of all clients that are trained in one batch.

        Up to this number, a batch is faster than training the clients one by one.
        """

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may call the task at the same time."""

    @property
    def keyed(self) -> bool:
        """Whether gradients need batches with keys, because the task has dropout masks."""

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        """Return the initial parameters, which are the same for all S = `stack` replicas."""

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """Return the mean loss and its gradient for each replica of each client.

        The stack consists of K blocks of S replicas, one block for each of the K batches. The
        losses therefore have the shape [K S]. For running statistics, the result contains their
        values after the step instead of a gradient.
        """

    def clipped(
        self, points: Points, batches: Sequence[Batch], clipping: "Clipping"
    ) -> tuple[Tensor, Params]:
        """Return the mean loss at the last point, and the *sum* of the clipped gradients.

        The losses have the shape [K S], for K batches and S replicas each.

        For each example, the gradients at all points X_k are first added with weights c_k, and then
        clipped once. The result is the sum over the examples. For an empty batch, the sum is 0.
        Both values are private: see `fedmuon.privacy.mechanisms.gaussian`.
        """

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return the loss of each sample, and a dictionary with the metrics of each sample.

        All results have the shape [S, n], for S replicas and n samples.

        The metric `accuracy` is the share of correct predictions. For a sample with a single
        prediction, the accuracy is 0 or 1.
        """


# Targets, and the loss of each sample

IGNORED = -100  # a target that the loss skips, as in torch
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [n, ..., c], targets [n, ...]) -> losses [n]
Targets = Callable[[Tensor, Tensor], Tensor]  # (inputs [n, d], labels [n]) -> targets [n, ...]


def cross_entropy(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy -log p_y of each sample, where p_y is the probability of its label.

    If a sample has several targets, return the mean over the targets that are not IGNORED. With
    label smoothing s, the loss of one target is -(1 - s) log p_y - s times the mean of log p_k over
    all classes k.
    """
    losses = functional.cross_entropy(
        outputs.movedim(-1, 1),
        targets,
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )
    return mean_of(losses, targets) if losses.ndim > 1 else losses


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of each sample's targets that are not IGNORED.

    The function computes the same as `cross_entropy` for outputs [n, T, V] and targets [n, T]. It
    takes half the time if V is large, because it does not move the axis of the classes.
    """
    losses = functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return mean_of(losses.view(targets.shape), targets)


def one_at_a_time(loss: Loss) -> Loss:
    """Return a loss function that calls the given loss with one sample at a time.

    A clipped gradient must depend only on its own example, so the loss of an example must not
    depend on other samples.
    """
    if loss in (cross_entropy, token_cross_entropy):  # they already treat each row separately
        return loss

    def sample_loss(output: Tensor, target: Tensor) -> Tensor:
        value = loss(output[None], target[None])
        if value.shape != (1,):
            raise InputError(
                f"the loss of one sample has shape {tuple(value.shape)}, but it must have shape "
                "(1,). Return one value per sample, without a mean over samples."
            )
        return value[0]

    def sample_losses(outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            return vmap(sample_loss)(outputs, targets)
        except RuntimeError:  # vmap cannot trace it, for example an `if` on a value
            return torch.stack([sample_loss(*pair) for pair in zip(outputs, targets, strict=True)])

    return sample_losses


def mean_of(values: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of each sample's values over the targets that are not IGNORED.

    The values of IGNORED targets must be 0.
    """
    return values.flatten(1).sum(1) / (targets != IGNORED).flatten(1).sum(1).clamp(min=1)


def labels_as_targets(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the labels as the targets of the loss."""
    return labels
