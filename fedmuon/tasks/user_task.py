"""Your own module as a task, with its initial weights, its loss and its metrics.

Parameters may be anywhere in the module, and layers may share them. Frozen parameters
(requires_grad = False) and buffers keep their values. Frozen parameters and buffers are neither
sent nor saved.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmuon.core.choices import OF_A_ROUND, OF_A_RUN, SPREAD
from fedmuon.core.errors import Guard, InputError
from fedmuon.core.registry import unfit
from fedmuon.data.user_data import storage_problem
from fedmuon.tasks.base import Batch, Loss, Params, Points, cross_entropy, is_statistic
from fedmuon.tasks.dropout import Masks
from fedmuon.tasks.models import reject_layers, statistics_of
from fedmuon.tasks.networks import NetworkTask, evaluating
from fedmuon.tasks.peft_model import advice_for_peft
from fedmuon.tasks.per_example.clipping import Clipping

Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one value per sample


@dataclass(frozen=True, eq=False)
class Task:
    """Your own module, with a loss and metrics per sample.

    Attributes:
        module: The network. Its current weights are the initial weights.
        loss: Function from `(outputs, targets)` to one value per sample `[samples]`. The default is
            cross-entropy for class labels, and the squared error for real numbers.
        metrics: Mapping of a metric's name to a function from `(outputs, targets)` to one value per
            sample `[samples]`. For class labels, the default is `accuracy`.
        inputs: Mapping of argument name to the shape of this argument for one sample. Set `inputs`
            for a module with several tensor arguments, such as `input_ids` and `attention_mask` of
            Hugging Face. A sample then contains the numbers of all arguments, in the order of the
            mapping.

    Example:
        >>> import fedmuon
        >>> import torch
        >>> def confident(outputs, targets):
        ...     return (outputs.softmax(1).amax(1) > 0.9).float()
        >>> task = fedmuon.Task(torch.nn.Linear(4, 2), metrics={"confident": confident})
        >>> sorted(task.metrics)
        ['confident']
    """

    module: nn.Module
    loss: Loss | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def as_task(found: Any, named: str = "") -> Task:
    """Convert the argument `task` (a module, (module, loss), or a Task) to a Task.

    `named` is the key and the value of the config that name the task, or empty.
    """
    if isinstance(found, Task):
        return found
    parts = found if isinstance(found, tuple) else (found,)
    if parts and isinstance(parts[0], nn.Module):
        return Task(*parts)
    advice = "an nn.Module, (module, loss), or fedmuon.Task(module, loss, metrics)"
    raise unfit(found, "task", advice, named)


def user_network(
    task: Task, shape: tuple[int, ...], classes: int, whole: bool, dtype: torch.dtype,
    device: torch.device, guard: Guard | None = None,
) -> NetworkTask:  # fmt: skip
    """Build the task of a user's module for samples of a given shape.

    Args:
        task: The user's module, loss and metrics.
        shape: Shape of one sample.
        classes: Number of classes. Use 0 for real-valued targets.
        whole: Whether inputs are integers, such as tokens.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
        guard: Guard that names the user's object in errors.

    Raises:
        InputError: If the module, the loss or a metric is not suitable for a run.
    """
    module = _checked_copy(task.module).to(device, dtype).train()
    loss = task.loss or (cross_entropy if classes else squared_error)
    task_guard = guard or Guard("task", task.module)
    measures: dict[str, Metric] | None = {}
    parts = product(("validation", "client_test", "client_test_personal"), task.metrics)
    reserved = {*OF_A_ROUND, *OF_A_RUN, *("_".join(pair) for pair in parts)}
    for name, metric in task.metrics.items():
        if name in reserved or name.endswith(SPREAD):
            raise InputError(
                f"a metric cannot have the name {name}, because every run already records a "
                "value with this name. Rename the metric, for example to "
                f"my_{name.removesuffix(SPREAD)}."
            )
        measures[name] = check_each(metric, f"metric {name}", task_guard.part("metric", metric))
    if not measures and classes and not task.loss:
        measures = None  # use the accuracy
    if loss is not cross_entropy:
        loss = check_each(loss, "loss", task_guard.part("loss", loss))
    sample = torch.zeros(1, *shape, dtype=torch.long if whole else dtype, device=device)
    reject_layers(module)
    try:
        outputs = _with_plain_calls(module, task.inputs, sample)
        network = UserNetwork(
            module, shape, dtype, device,
            loss=loss, metrics=measures, whole=whole,
            guard=task_guard.part("task", task.module),
        )  # fmt: skip
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # layers raise these
        fit = _how_to_fit(module, sample)
        advice = f"Integers are treated as tokens. Convert features to floats, or {fit}"
        advice = advice if whole else f"{fit[0].upper()}{fit[1:]}"
        advice = advice_for_peft(module) or advice
        raise InputError(
            f"the module does not accept samples of shape {shape} ({_line(error)}). {advice}"
        ) from error
    if task.loss is None and outputs < classes:
        raise InputError(
            f"the module has {outputs} outputs, but the labels go from 0 to {classes - 1}, so the "
            f"cross-entropy needs {classes} outputs. Set the size of the last layer to {classes}, "
            "number the labels from 0, or pass your own loss."
        )
    return network


@dataclass(frozen=True, eq=False)
class UserNetwork(NetworkTask):
    """The task of a user's module. Errors in calls of the module name the module."""

    guard: Guard = field(default_factory=lambda: Guard("task"))

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        """Return the module's current weights and running statistics.

        Frozen weights are left out.
        """
        with self.guard:
            params = self.module.named_parameters()
            weights = {name: param.detach() for name, param in params if param.requires_grad}
            weights |= statistics_of(self.module)
            return {name: value.repeat(stack, *[1] * value.ndim) for name, value in weights.items()}

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """Return the loss and its gradient.

        Raise an error if the loss has another dtype or device.
        """
        with self.guard:
            loss, slope = super().gradient(params, batches)
            if loss.dtype != self.dtype or loss.device != self.device:
                raise InputError(
                    f"the loss is {loss.dtype} on {loss.device}, but the parameters are "
                    f"{self.dtype} on {self.device}. Let the module and the loss return the "
                    "dtype and device of the parameters."
                )
            return loss, slope

    def clipped(
        self, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> tuple[Tensor, Params]:
        with self.guard:
            return super().clipped(points, batches, clipping)

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        with self.guard:
            return super().losses(params, batch)


def require_numbers(module: nn.Module) -> None:
    """Raise an error for parameters or buffers that a run cannot use.

    A tensor must be initialized and contain ordinary real numbers.
    """
    params = dict(module.named_parameters())
    for name, value in (*params.items(), *module.named_buffers()):
        if nn.parameter.is_lazy(value):
            problem = (
                "not initialized. Set the sizes of its layer, or call the module once before the "
                "run."
            )
        elif value.is_complex():
            problem = (
                f"complex ({value.dtype}), but a run computes with real numbers. Store the real "
                "and the imaginary part separately."
            )
        else:
            problem = storage_problem(value)
        if problem:
            kind = "parameter" if name in params else "buffer"
            raise InputError(f"the {kind} {name} of the module is {problem}")


def _checked_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module. Raise an error if the module has nothing to train."""
    require_numbers(module)
    params = dict(module.named_parameters())
    if not params:
        raise InputError(
            "the module has no parameters, so nothing can be trained. Add layers with parameters."
        )
    for name, param in params.items():
        if is_statistic(name):
            raise InputError(
                f"the parameter {name} of the module has the same name as a running statistic of "
                "a norm layer, and training does not change running statistics. Rename the "
                "parameter."
            )
        if not bool(param.detach().isfinite().all()):
            raise InputError(
                f"the parameter {name} of the module contains NaN or infinity. Initialize this "
                "parameter with finite values."
            )
    if not any(param.requires_grad for param in params.values()):
        raise InputError(
            "all parameters of the module are frozen (requires_grad = False), so nothing can be "
            "trained. Call requires_grad_(True) on the layers to train."
        )
    try:
        return copy.deepcopy(module)
    except Exception as error:  # any object in the module may raise any error
        raise InputError(
            f"the module cannot be copied ({_line(error)}), but a run trains a copy. Pass a "
            "function that creates the module instead."
        ) from error


def check_each(measure: Metric, what: str, guard: Guard) -> Metric:
    """Return the loss or metric with a check that it returns one value per sample."""

    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        with guard:
            values = measure(outputs, targets)
            if getattr(values, "shape", None) != outputs.shape[:1]:
                raise InputError(
                    f"the {what} has shape {tuple(getattr(values, 'shape', ()))} for "
                    f"{len(outputs)} samples, but it needs one value per sample. Return one "
                    "value per sample, without a mean over samples."
                )
            return values if isinstance(values, Tensor) else torch.as_tensor(values)

    return checked


def _how_to_fit(module: nn.Module, sample: Tensor) -> str:
    """Return advice to put a layer in front of the module that reshapes the samples.

    If no known layer helps, advise to change the first layer.
    """
    shape = sample.shape[1:]
    side = math.isqrt(shape[0]) if len(shape) == 1 else 0
    layers: dict[str, nn.Module] = {"nn.Flatten()": nn.Flatten()}
    if len(shape) == 2:
        layers[f"nn.Unflatten(1, (1, {shape[0]}))"] = nn.Unflatten(1, (1, shape[0]))
    if side > 1 and side * side == shape[0]:
        layers[f"nn.Unflatten(1, (1, {side}, {side}))"] = nn.Unflatten(1, (1, side, side))
    for name, layer in layers.items():
        with suppress(Exception), torch.no_grad(), evaluating(module), Masks(None):
            module(layer(sample))
            read = ", ".join(map(str, layer(sample).shape[1:]))
            return f"put {name} in front of the module, which accepts samples of shape ({read})."
    return "change its first layer to fit the data."


def _with_plain_calls(
    module: nn.Module, inputs: Mapping[str, tuple[int, ...]], sample: Tensor
) -> int:
    """Change a module, if necessary, so that it accepts one tensor and returns one tensor.

    Return the number of outputs of the module for one sample.
    """
    if inputs:
        sizes = [math.prod(shape) for shape in inputs.values()]
        if sum(sizes) != sample.numel():
            raise InputError(
                f"a sample has {sample.numel()} numbers, but the shapes in `inputs` of the Task "
                f"({', '.join(inputs)}) have {sum(sizes)} numbers in total. Change the shapes in "
                f"`inputs`, so that they have {sample.numel()} numbers in total."
            )
        module.forward = partial(_by_name, module.forward, dict(inputs), sizes)
    with torch.no_grad(), evaluating(module), Masks(None):
        outputs = module(sample)
        if not isinstance(outputs, Tensor):
            module.forward = partial(_logits, module.forward)
            outputs = module(sample)
    if outputs.ndim < 1 or len(outputs) != 1:
        raise InputError(
            f"for one sample, the module returns a tensor of shape {tuple(outputs.shape)}. "
            "Return a tensor with one row per sample."
        )
    return outputs.shape[-1]


def _by_name(
    forward: Callable[..., Any],
    inputs: Mapping[str, tuple[int, ...]],
    sizes: list[int],
    samples: Tensor,
) -> Any:
    """Split each sample into the named arguments of `forward`, and call `forward`."""
    parts = samples.flatten(1).split(sizes, 1)
    pairs = zip(inputs.items(), parts, strict=True)
    return forward(**{name: part.reshape(-1, *shape) for (name, shape), part in pairs})


def _logits(forward: Callable[..., Any], *args: Any) -> Tensor:
    """Return the tensor that `forward` returns, or the tensor `logits` in the returned object."""
    output = forward(*args)
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    )
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the module returns a {type(output).__name__}, which is not a tensor and has no "
            "`logits`. Return a tensor with one row per sample, or an object that has this "
            "tensor as `logits`."
        )
    return logits


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of each sample."""
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise InputError(
            f"the module returns an output of shape {tuple(outputs.shape[1:])} for one sample, "
            f"but the label has shape {tuple(targets.shape[1:])}. The labels are real numbers, "
            "so return one output for each number of a label, or use integers as labels of "
            "classes."
        )
    errors = functional.mse_loss(outputs, targets, reduction="none")
    return errors.flatten(1).mean(1) if errors.ndim > 1 else errors
