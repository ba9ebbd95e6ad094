"""A language model of the package peft that the user brings, as a task.

The trainable parameters of the `PeftModel`, such as LoRA factors, are the parameters of the task.
Their current values are the initial values, and their names are those of the `PeftModel`, so
`model.load_state_dict(result.model, strict=False)` puts trained adapters back. All other weights
are frozen. They are arrays of the user's process, which a Ray cluster stores once per machine.
"""

import hashlib
import sys
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import token_cross_entropy
from fedmuon.tasks.causal_lm import (
    CausalLM,
    callable_model,
    predicted_tokens,
    require_fitting_windows,
)
from fedmuon.tasks.frozen_base import different_tensors, use_plain_attention, with_buffers
from fedmuon.tasks.networks import NetworkTask

HEADS = ("ForCausalLM", "LMHeadModel")  # how the classes of language models end in transformers
DROPOUT = "lora_dropout"
NAMED = "that you passed"  # how errors name the model
HALF = (torch.bfloat16, torch.float16)  # dtypes of frozen weights that a run keeps


@dataclass(frozen=True, eq=False)
class BroughtAdapters:
    """A `PeftModel` without values, its frozen weights, and its adapters.

    Attributes:
        structure: The model. Its tensors are on the device `meta`.
        base: Name or folder of the pretrained model, which has the tokenizer.
        frozen: The different frozen tensors by name, as arrays, so that Ray shares their memory.
        dtypes: The dtype of each frozen tensor. NumPy has no bfloat16, so arrays contain its bits.
        same: Other names of the same tensors.
        adapters: The trainable parameters by name.
        digest: Hash of all values.
    """

    structure: Any
    base: str
    frozen: Mapping[str, np.ndarray]
    dtypes: Mapping[str, torch.dtype]
    same: Mapping[str, str]
    adapters: Mapping[str, Tensor]
    digest: str


def is_language_peft(value: Any) -> bool:
    """Return whether an object is a language model of peft, without importing peft."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(value, peft.PeftModel):
        return False
    return type(value.get_base_model()).__name__.endswith(HEADS)


def require_adapters(module: nn.Module, windows: bool) -> None:
    """Raise an error if a module is a language model that has to be passed in another way.

    Args:
        module: The user's module, which is no language model of peft. It has no loss of its own.
        windows: Whether the samples are windows of tokens.
    """
    if windows and (advice := advice_for_peft(module)):
        raise InputError(
            f"the PeftModel {NAMED} is no causal language model, but the samples are windows of "
            f"tokens. {advice}"
        )
    library, kind = sys.modules.get("transformers"), type(module).__name__
    if library is None or not isinstance(module, library.PreTrainedModel):
        return
    if kind.endswith(HEADS):
        raise InputError(
            f"the task {kind} is a whole language model, but fedmuon trains adapters of language "
            "models. Pass a PeftModel: peft.get_peft_model(model, peft.LoraConfig(...)), or set "
            "[task] name = 'causal-lm' with weights."
        )


def advice_for_peft(module: nn.Module) -> str:
    """Return what to do if a `PeftModel` does not fit its samples. For others, return nothing."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel) or is_language_peft(module):
        return ""
    kind = module.peft_config[module.active_adapter].task_type
    if not kind:
        return ""
    return (
        f"Its task_type is {getattr(kind, 'value', kind)}. To train on text, task_type must be "
        "CAUSAL_LM, with a base model such as AutoModelForCausalLM.from_pretrained(...)."
    )


def brought_adapters(model: Any) -> BroughtAdapters:
    """Take a `PeftModel` apart into structure, frozen weights and adapters.

    Frozen weights in the memory of the CPU are not copied.

    Raises:
        InputError: If nothing can be trained, or the adapters are not parts of layers.
    """
    active = model.peft_config[model.active_adapter]
    if active.is_prompt_learning:
        raise InputError(
            f"the PeftModel {NAMED} learns a prompt ({active.peft_type.value}), but fedmuon trains "
            "adapters of layers. Use an adapter such as peft.LoraConfig."
        )
    if any(getattr(layer, "merged", False) for layer in model.modules()):
        raise InputError(
            f"the adapters of the PeftModel {NAMED} are merged into its weights, so they cannot be "
            "trained. Call model.unmerge_adapter() first."
        )
    adapters = {k: v.detach() for k, v in model.named_parameters() if v.requires_grad}
    if not adapters:
        raise InputError(
            f"all parameters of the PeftModel {NAMED} are frozen, so nothing can be trained. Load "
            "it with is_trainable=True, or call requires_grad_(True) on its adapters."
        )
    tensors, same = different_tensors(model)
    frozen = {name: value for name, value in tensors.items() if name not in adapters}
    missing = next((name for name, value in (frozen | adapters).items() if value.is_meta), None)
    if missing:
        raise InputError(
            f"the parameter {missing} of the PeftModel {NAMED} has no values, because it is on the "
            "device meta. Load the model without device_map, or on the device cpu."
        )
    settings = {name: sorted(value) if isinstance(value, set) else value
                for name, value in active.to_dict().items()}  # fmt: skip
    texts = repr(settings), model.get_base_model().config.to_json_string()
    hasher = hashlib.sha256("".join(texts).encode())
    for name, value in sorted((frozen | adapters).items()):
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        hasher.update(bits(value).reshape(-1).view(np.uint8).data)
    values = [*model.parameters(), *model.buffers()]
    without_values = {id(value): _without_values(value) for value in values}
    return BroughtAdapters(
        deepcopy(model, without_values),
        str(active.base_model_name_or_path or ""),
        {name: bits(value) for name, value in frozen.items()},
        {name: value.dtype for name, value in frozen.items()},
        same,
        {name: value.cpu() for name, value in adapters.items()},
        hasher.hexdigest()[:16],
    )


def bits(tensor: Tensor) -> np.ndarray:
    """Return the values of a tensor as an array. Half-precision values are returned as integers."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype in HALF else tensor).numpy()


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


def _frozen_tensors(
    brought: BroughtAdapters, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return the frozen tensors by all their names.

    Tensors of half precision keep their dtype, and other numbers get the dtype of the run. If no
    tensor has to be converted or moved, nothing is copied.
    """
    tensors: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing writes into read-only arrays of Ray
        for name, array in brought.frozen.items():
            value = torch.from_numpy(array)
            value = value.view(brought.dtypes[name])
            numbers = value.is_floating_point() and value.dtype not in HALF
            tensors[name] = value.to(device, dtype if numbers else value.dtype)
    return tensors | {name: tensors[first] for name, first in brought.same.items()}


def peft_task(
    brought: BroughtAdapters,
    shape: tuple[int, ...],
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    stored: np.dtype | None = None,
) -> NetworkTask:
    """Build the task of training the adapters of a `PeftModel`.

    The model is in evaluation mode, except the dropout of LoRA layers.

    Args:
        brought: The model.
        shape: Shape of one sample, (T + 1,).
        vocabulary: Number of tokens in the data, or 0 if it is unknown.
        dtype: Dtype of the adapters and of the loss.
        device: Device of the weights and adapters.
        stored: Dtype of the samples, or None if it is unknown.

    Raises:
        InputError: If the model does not fit the data, or cannot be called.
    """
    _require_windows(shape, stored)
    tensors = _frozen_tensors(brought, dtype, device)
    model = deepcopy(brought.structure).to(dtype=dtype)  # without values, so only adapters change
    with_buffers(model, tensors, brought.adapters)
    base = model.get_base_model()
    require_fitting_windows(base.config, shape, vocabulary, NAMED)
    use_plain_attention(base)
    base_dtype = next((half for half in brought.dtypes.values() if half in HALF), dtype)
    network = CausalLM(model, dtype, base_dtype, base.forward)
    for name, layer in network.named_modules():
        if f".{DROPOUT}." in f".{name}.":
            layer.train()
    start = {name: value.to(dtype).cpu().numpy() for name, value in brought.adapters.items()}
    with callable_model(NAMED):
        return NetworkTask(
            network, shape, dtype, device,
            loss=token_cross_entropy, targets=predicted_tokens, start=partial(_current, start),
        )  # fmt: skip


def _require_windows(shape: tuple[int, ...], stored: np.dtype | None) -> None:
    """Raise an error if samples are not windows of tokens."""
    fix = "Pass data=fedmuon.text_data(...), or set [data] name = 'text'."
    if len(shape) != 1:
        raise InputError(
            "a PeftModel needs windows of tokens [n, T + 1], but a sample of the data has shape "
            f"{shape}. {fix}"
        )
    if stored is not None and stored.kind not in "iu":
        raise InputError(
            "a PeftModel needs windows of tokens, and tokens must be integers, but the data has "
            f"dtype {stored}. {fix}"
        )


def _current(
    start: dict[str, np.ndarray], network: nn.Module, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the adapters as they were when the model was passed."""
    return {name: start[name].copy() for name, _ in network.named_parameters()}
