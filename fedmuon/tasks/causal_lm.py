"""Low-rank adapters of a pretrained language model as a task (LoRA: Hu et al. 2022).

The model is any `AutoModelForCausalLM` of the library transformers. Its weights are frozen. They
are buffers, which are neither sent nor saved, and exist once per machine (see `frozen_base`). A
layer x ↦ W x becomes x ↦ W x + (α/r) B A x. Only A [r, n] and B [m, r] are trained. As in the
package peft, A starts with random entries and B with zeros, so the first outputs are those of the
pretrained model. The weights W may be bfloat16. Products with W are then computed in bfloat16, and
the adapters, their products and the loss in the dtype of the run.

A sample is a window of T + 1 tokens. The number -1 - t means that the model reads the token t but
does not predict it (see `fedmuon.data.corpora`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmuon.core.errors import InputError
from fedmuon.data.words import listed
from fedmuon.tasks.base import IGNORED, Params, Task, token_cross_entropy
from fedmuon.tasks.checkpointing import checkpoint_blocks
from fedmuon.tasks.frozen_base import frozen_model
from fedmuon.tasks.models import torch_law
from fedmuon.tasks.networks import NetworkTask

DOWN, UP = "lora_A", "lora_B"  # the names in the package peft
SHOWN = 8  # number of layer names in an error


class Adapted(nn.Module):
    """A linear layer with frozen weights, and its trainable low-rank adapter."""

    def __init__(self, base: nn.Module, rank: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        inner, outer = sizes_of(base)
        self.base, self.scale, self.dtype = base, scale, dtype
        with torch.device("meta"):
            self.lora_A = nn.Linear(inner, rank, bias=False, dtype=dtype)
            self.lora_B = nn.Linear(rank, outer, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the frozen layer and of the adapter, added together."""
        outputs = self.base(x)
        # The factor multiplies the short vectors A x, which takes less time than B A x.
        change = self.lora_B(self.scale * self.lora_A(x.to(self.dtype)))
        return outputs + change.to(outputs.dtype)


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer.

    The layer is torch's nn.Linear, with weights [outputs, inputs], or the Conv1D of transformers,
    with weights [inputs, outputs].
    """
    rows, columns = layer.get_buffer("weight").shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)


def is_linear(layer: nn.Module) -> bool:
    """Return whether an adapter can be added to a layer."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


class CausalLM(nn.Module):
    """A language model that maps windows [n, T + 1] to the logits [n, T, V] of the next tokens.

    Parameters have the same names as in the model of transformers.
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        base_dtype: torch.dtype,
        call: Callable[..., Any] | None = None,
    ) -> None:
        """Take over the layers of a model. `call` is its forward function, or that of a part."""
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        # Not registered: its children are registered, and names would begin with `model.` twice.
        object.__setattr__(self, "call", model.forward if call is None else call)
        self.dtype, self.base_dtype = dtype, base_dtype
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.eval()

    def forward(self, windows: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        tokens = windows[:, :-1].long()
        tokens = tokens.where(tokens >= 0, -1 - tokens)
        samples, length = tokens.shape
        # The mask is passed, because transformers reads the values of its own mask.
        zeros = torch.zeros((length, length), dtype=self.base_dtype, device=windows.device)
        later = (zeros - math.inf).triu(1)
        place = torch.arange(length, device=windows.device).expand_as(tokens)
        outputs = self.call(
            input_ids=tokens, attention_mask=later.expand(samples, 1, length, length),
            position_ids=place, use_cache=False,
        )  # fmt: skip
        return outputs.logits.to(self.dtype)


def is_language_model(task: Task) -> bool:
    """Return whether a task trains adapters of a pretrained language model."""
    return isinstance(task, NetworkTask) and isinstance(task.module, CausalLM)


def longest(config: Any) -> int | None:
    """Return the maximum number of tokens that a model accepts, or None if there is no limit."""
    text = config.get_text_config()
    # Attention to a window of tokens is attention to all tokens while the sequence is not longer.
    limits = [getattr(text, key, None) for key in ("max_position_embeddings", "sliding_window")]
    return min((limit for limit in limits if limit), default=None)


def width_of(model: Any) -> int:
    """Return the length of the hidden vectors of a model of the library transformers."""
    return model.config.get_text_config().hidden_size


def predicted_tokens(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the targets of windows: for each token except the last, the token that follows.

    Tokens of prompts are IGNORED. The labels are the clients, which no one predicts.
    """
    following = inputs[:, 1:].long()
    return following.where(following >= 0, IGNORED)


def adapter_law(network: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw the initial adapters: A as torch initializes linear layers, and B = 0."""
    drawn = torch_law(network, rng)
    return {name: 0 * v if name.endswith(f"{UP}.weight") else v for name, v in drawn.items()}


def causal_lm(
    weights: str,
    shape: tuple[int, ...],
    vocabulary: int,
    rank: int,
    alpha: float = 0.0,
    layers: str = "",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    base_dtype: torch.dtype | None = None,
    checkpointing: bool = False,
) -> NetworkTask:
    """Build the task of training low-rank adapters of a pretrained language model.

    Args:
        weights: The value of `[task] weights`: a folder, a GGUF file, a name on the Hugging Face
            hub, or `smollm2`.
        shape: Shape of one sample, (T + 1,).
        vocabulary: Number of tokens in the data.
        rank: r, the rank of the adapters.
        alpha: α. The adapters are multiplied by α / r. With 0, the factor is 1.
        layers: Name patterns of the layers with adapters, separated by commas. If empty, all linear
            layers except the last layer of the model.
        dtype: Dtype of the adapters and of the loss.
        device: Device of the weights and adapters.
        base_dtype: Dtype of the weights of the model. With None, it is `dtype`.
        checkpointing: Whether the backward pass computes the activations of each block again.

    Raises:
        InputError: If the model cannot be read, or does not fit the data or the other settings.
    """
    device = torch.device("cpu") if device is None else device
    base_dtype = dtype if base_dtype is None else base_dtype
    model, named = frozen_model(weights, base_dtype, device), f"[task] weights = '{weights}'"
    require_fitting_windows(model.config, shape, vocabulary, named)
    add_adapters(model, rank, alpha / rank if alpha else 1.0, layers, dtype)
    network = CausalLM(model, dtype, base_dtype)
    with callable_model(named):
        task = NetworkTask(
            network, shape, dtype, device,
            loss=token_cross_entropy, targets=predicted_tokens, start=adapter_law,
        )  # fmt: skip
        return with_checkpointing(task, width_of(model)) if checkpointing else task


def require_fitting_windows(
    config: Any, shape: tuple[int, ...], vocabulary: int, named: str
) -> None:
    """Raise an error if a model cannot read windows of this shape with this number of tokens.

    Args:
        config: The config of the model in the library transformers.
        shape: Shape of one sample, (T + 1,).
        vocabulary: Number of tokens in the data, or 0 if it is unknown.
        named: How errors name the model.
    """
    limit, tokens = longest(config), config.get_text_config().vocab_size
    if limit is not None and shape[0] - 1 > limit:
        raise InputError(
            f"[data] context = {shape[0] - 1} is longer than the model {named} allows, which is "
            f"{limit} tokens. Set context, or the argument context of fedmuon.text_data, to "
            f"{limit} or less."
        )
    if vocabulary > tokens:
        raise InputError(
            f"the data has {vocabulary} different tokens, but the model {named} knows {tokens}. "
            "Use the tokenizer that belongs to the model."
        )


def require_known_tokens(task: Task, windows: np.ndarray) -> None:
    """Raise an error if windows contain a token that a language model does not know.

    Args:
        task: The task of a `CausalLM`.
        windows: Windows of tokens [n, T + 1], or no windows.
    """
    assert isinstance(task, NetworkTask) and isinstance(task.module, CausalLM)
    largest = max(int(windows.max(initial=0)), -1 - int(windows.min(initial=0)))
    if largest >= task.module.vocabulary:
        raise InputError(
            f"the data contains the token {largest}, but the model knows the tokens 0 to "
            f"{task.module.vocabulary - 1}. Use the tokenizer that belongs to the model."
        )


@contextmanager
def callable_model(named: str) -> Iterator[None]:
    """Convert the errors of a model that is called within this context to one clear sentence."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"the model {named} cannot be called with tokens, positions and a mask ({reason}). "
            "Choose another model, such as a Llama or GPT-2 model."
        ) from error


def with_checkpointing(task: NetworkTask, width: int) -> NetworkTask:
    """Return the task of the same model, whose blocks are computed again in the backward pass.

    Replicas run one after the other, because functions of torch.func reject checkpointing.

    Args:
        task: The task of a `CausalLM`.
        width: Length of the hidden vectors.
    """
    blocks = checkpoint_blocks(task.module)
    inputs = (task.shape[0] - 1) * width
    # The inputs of each block are stored, and the activations of one block at a time.
    saved = task.saved // blocks + (blocks + 1) * inputs
    return replace(task, activations=min(saved, task.saved), vectorized=False)


def add_adapters(model: Any, rank: int, scale: float, layers: str, dtype: torch.dtype) -> None:
    """Add adapters to the linear layers of a frozen model whose names match the patterns.

    A pattern matches the whole name of a layer or its last part, such as `q_proj`.

    Raises:
        InputError: If a pattern matches no layer, or the rank exceeds the size of a layer.
    """
    head = model.get_output_embeddings()
    linear = {
        name: layer
        for name, layer in model.named_modules()
        if is_linear(layer) and layer is not head
    }
    patterns = [pattern.strip() for pattern in layers.split(",") if pattern.strip()]
    chosen = dict(linear) if not patterns else {}
    for pattern in patterns:
        matching = {
            name: layer
            for name, layer in linear.items()
            if fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)
        }
        if not matching:
            kinds = sorted({name.rpartition(".")[2] for name in linear})
            raise InputError(
                f"[task] lora-layers: the pattern '{pattern}' matches no linear layer of the "
                f"model. Its linear layers are named {listed(kinds)}, for example "
                f"{listed(linear, SHOWN)}."
            )
        chosen |= matching
    narrow = min(chosen, key=lambda name: min(sizes_of(chosen[name])), default="")
    if narrow and rank > (smallest := min(sizes_of(chosen[narrow]))):
        shape = tuple(chosen[narrow].get_buffer("weight").shape)
        raise InputError(
            f"[task] lora-rank = {rank} exceeds the size of the layer {narrow}, whose matrix has "
            f"the shape {shape}. Set lora-rank = {smallest} or less."
        )
    for name, layer in chosen.items():
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, Adapted(layer, rank, scale, dtype))


def merged(task: NetworkTask, params: Mapping[str, Tensor]) -> Params:
    """Return the weights W + (α/r) B A of the adapted layers, by the names of the model's weights.

    Args:
        task: The task.
        params: The adapters of one replica.
    """
    weights = {}
    for name, layer in task.module.named_modules():
        if isinstance(layer, Adapted):
            change = layer.scale * params[f"{name}.{UP}.weight"] @ params[f"{name}.{DOWN}.weight"]
            change = change if isinstance(layer.base, nn.Linear) else change.mT
            weights[f"{name}.weight"] = layer.base.get_buffer("weight") + change
    return weights
