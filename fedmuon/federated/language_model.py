"""What a config says about the weights of a pretrained language model."""

import torch

from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import user_objects
from fedmuon.core.choices import DOCUMENTS
from fedmuon.core.errors import InputError
from fedmuon.data.pretrained import model_tokens
from fedmuon.federated.size_limits import require_room_for_weights
from fedmuon.tasks.frozen_base import stored_entries
from fedmuon.tasks.peft_model import BroughtAdapters


def base_dtype_of(config: Config) -> torch.dtype:
    """Return the dtype of the frozen weights of the task causal-lm."""
    chosen = config.task.base_dtype
    return getattr(torch, config.engine.dtype if chosen == "auto" else chosen)


def require_room_for_base(config: Config) -> None:
    """Raise an error if the frozen weights of the task causal-lm do not fit into memory.

    Only the headers of files are read.
    """
    device = config.engine.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    if config.task.name == "causal-lm" and on_cpu:
        entries, size = stored_entries(config.task.weights), base_dtype_of(config).itemsize
        require_room_for_weights(entries, size)


def tokenizer_of(config: Config) -> str:
    """Return the pretrained model whose tokenizer divides texts, or "" if there is none."""
    passed = user_objects(config).task
    if isinstance(passed, BroughtAdapters):
        if not passed.base and config.data.name in DOCUMENTS:
            raise InputError(
                f"[data] name = '{config.data.name}' needs a tokenizer, but the PeftModel that you "
                "passed was not loaded from a folder or a name, so its tokenizer is unknown. Set "
                "base_model_name_or_path in its config to the folder of the tokenizer."
            )
        if config.data.name in DOCUMENTS:
            _require_tokenizer(passed.base)
        return passed.base
    return config.task.weights if config.task.name == "causal-lm" else ""


def _require_tokenizer(base: str) -> None:
    try:
        model_tokens(base)
    except InputError as error:
        raise InputError(
            f"the PeftModel that you passed has base_model_name_or_path = '{base}' in its config, "
            "but no tokenizer can be read there. Set it to the folder of the tokenizer."
        ) from error


def is_pretrained(config: Config) -> bool:
    """Return whether a run starts from weights that were trained on other data."""
    named = reads(config, "task.weights") and bool(config.task.weights)
    return named or isinstance(user_objects(config).task, BroughtAdapters)
