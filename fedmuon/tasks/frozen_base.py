"""The frozen weights of a pretrained language model, which all processes of a machine share.

The first process that needs a model writes its weights to the cache folder, in the precision of the
run. All processes then map this file into their memory. The operating system stores the pages of
the file once, so a further process needs almost no memory for the weights.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedmuon.core.errors import InputError
from fedmuon.core.files import cache_folder, read_text
from fedmuon.data.gguf_header import gguf_entries
from fedmuon.data.pretrained import StoredModel, readable, stored_weights, transformers

VERSION = 1  # of the stored files; increase it when their content changes
WEIGHTS, DIGEST = "model.safetensors", "digest"
DRAFT = "unfinished-language-model-"
ATTENTION = "fedmuon"  # the name of `plain_attention` in transformers

UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "block_indices", "indices")


def frozen_model(weights: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a language model of the library transformers whose weights are buffers.

    The model has no parameters. It is in evaluation mode, so it has no dropout.

    Args:
        weights: The value of `[task] weights`.
        dtype: Dtype of the weights.
        device: Device of the weights. On a CPU, all processes of the machine share the weights.

    Raises:
        InputError: If the model cannot be read.
    """
    place = stored_weights(weights)
    try:
        folder = _prepared(weights, place, dtype)
    except OSError:  # the cache folder is not writable, or the disk is full
        return _frozen(_read(weights, place, dtype), device)
    with _quiet() as library, readable(weights, "model"):
        config = library.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with torch.device("meta"):
            model = library.AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=dtype
            )
        with safe_open(folder / WEIGHTS, "pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            same = json.loads(file.metadata()["same"])
        tensors |= {name: tensors[first] for name, first in same.items()}
        return with_buffers(model, tensors)


def base_digest(weights: str, dtype: torch.dtype) -> str:
    """Return a hash of the frozen weights, in the precision of the run."""
    place = stored_weights(weights)
    try:
        return read_text(_prepared(weights, place, dtype) / DIGEST).strip()
    except OSError:
        return _digest(different_tensors(_read(weights, place, dtype))[0])


def stored_version(weights: str) -> str:
    """Return a text that changes when the files of a stored model change."""
    return _version(stored_weights(weights))


def stored_entries(weights: str) -> int:
    """Return the number of entries of a stored model, from the headers of its files."""
    place, entries = stored_weights(weights), 0
    if place.gguf:
        with readable(weights, "model"):
            return gguf_entries(place.folder / place.gguf)
    for path in place.files:
        if path.suffix == ".safetensors":
            with readable(weights, "model"), safe_open(path, "pt") as file:
                entries += sum(
                    math.prod(file.get_slice(name).get_shape())
                    for name in file.keys()  # noqa: SIM118
                )
    return entries


def _version(place: StoredModel) -> str:
    stamps = []
    for file in place.files:
        state = file.stat()
        stamps.append((str(file.resolve()), state.st_size, state.st_mtime_ns))
    return hashlib.sha256(repr((VERSION, stamps)).encode()).hexdigest()[:16]


def _prepared(weights: str, place: StoredModel, dtype: torch.dtype) -> Path:
    """Return the folder in the cache with the weights of a model. Write it if it does not exist."""
    precision = str(dtype).removeprefix("torch.")
    folder = cache_folder() / f"language-model-{_version(place)}-{precision}"
    if _is_complete(folder):
        return folder
    model = _read(weights, place, dtype)
    tensors, same = different_tensors(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_drafts(folder.parent)
    aside = Path(tempfile.mkdtemp(prefix=DRAFT, dir=folder.parent))
    handle = os.open(aside, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # until this process closes the file or ends
        draft = aside / "draft"
        draft.mkdir()
        save_file(tensors, draft / WEIGHTS, {"same": json.dumps(same)})
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the stored weights are dequantized
        model.config.save_pretrained(draft)
        (draft / DIGEST).write_text(_digest(tensors), encoding="ascii")
        if not _is_complete(folder) and os.path.lexists(folder):
            folder.rename(aside / "damaged")
        with contextlib.suppress(OSError):  # another process may have written the folder first
            draft.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(handle)
    return folder


def _remove_drafts(place: Path) -> None:
    """Remove the unfinished folders of processes that were killed. Their locks are free."""
    for draft in place.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError):  # a running process has the lock, or removed the folder
            handle = os.open(draft, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(draft, ignore_errors=True)
            finally:
                os.close(handle)


def _is_complete(folder: Path) -> bool:
    """Return whether a folder of the cache has all of its files, and the weights to their end.

    A power failure or a tool that deletes old files can leave an incomplete folder.
    """
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:  # compares the header with the file's size
            described = "same" in (file.metadata() or {})
        described &= isinstance(json.loads(read_text(folder / "config.json")), dict)
        return described and bool(read_text(folder / DIGEST).strip())
    except (OSError, ValueError, SafetensorError):
        return False


def _read(weights: str, place: StoredModel, dtype: torch.dtype) -> Any:
    """Read a model with transformers. Only safetensors and GGUF files are read, never pickles.

    Raises:
        InputError: If the model cannot be read, a package that reads it is missing, or its files
            do not contain all of its weights.
    """
    if place.gguf and find_spec("accelerate") is None:
        raise InputError(
            f"[task] weights = '{weights}' is a GGUF file. To read a GGUF file, transformers needs "
            "accelerate: pip install accelerate."
        )
    # The progress bar of GGUF files cannot be switched off, so the text is dropped.
    dropped = contextlib.redirect_stderr(io.StringIO())
    with _quiet() as library, readable(weights, "model"), dropped:
        model, report = library.AutoModelForCausalLM.from_pretrained(
            **place.arguments, dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    _require_all_weights(weights, report)
    return model


def _require_all_weights(weights: str, report: Mapping[str, Any]) -> None:
    """Raise an error if transformers drew weights at random, because the files lack them."""
    odd = [
        f"{name} has the shape {tuple(stored)} instead of {tuple(expected)}"
        for name, stored, expected in sorted(report["mismatched_keys"])
    ]
    odd += [f"{name} is missing" for name in sorted(report["missing_keys"])]
    if odd:
        others = f", and {len(odd) - 1} other weights do not fit" if len(odd) > 1 else ""
        raise InputError(
            f"the files of [task] weights = '{weights}' do not contain all weights of a causal "
            f"language model with this config ({odd[0]}{others}). Use the complete files of a "
            "causal language model, such as a Llama or GPT-2 model."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Return the library transformers, without its progress bars and notes in this context."""
    library = transformers()
    logging = library.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    library.AttentionInterface.register(ATTENTION, plain_attention)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield library
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention in the precision of its inputs, with operations that torch.vmap supports.

    The function `eager` of transformers computes in float32, and torch.vmap cannot map the kernels
    of `sdpa`.

    Args:
        module: The layer that calls the function.
        query: Queries [n, heads, T, d].
        key: Keys [n, groups, T, d]. Each group is shared by heads / groups heads.
        value: Values [n, groups, T, d].
        attention_mask: Numbers [n, 1, T, T] that are added to the scores.
        scaling: Factor of the scores.
        options: Other options, such as biases, which are rejected.

    Returns:
        The outputs [n, T, heads, d], and None in place of the weights.
    """
    used = [name for name in UNSUPPORTED if options.get(name) is not None]
    if used:
        raise InputError(
            f"the layers {type(module).__name__} of the model use {used[0]}, which fedmuon does "
            "not compute. Choose another model in [task] weights, such as a Llama or GPT-2 model."
        )
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (scaling * query) @ key.mT + attention_mask
    precision = torch.promote_types(scores.dtype, torch.float32)  # more than bfloat16
    weights = scores.softmax(-1, dtype=precision).to(value.dtype)
    return (weights @ value).transpose(1, 2), None


def different_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the different tensors of a model by name, and other names of the same tensors.

    Buffers that a model does not save, such as the frequencies of rotary embeddings, are included,
    because a model on the device `meta` cannot compute them.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, value in named(remove_duplicate=False):
            if id(value) in first:
                same[name] = first[id(value)]
                continue
            first[id(value)] = name
            tensors[name] = value.detach().contiguous()
    return tensors, same


def _frozen(model: nn.Module, device: torch.device) -> nn.Module:
    tensors, same = different_tensors(model)
    tensors = {name: value.to(device) for name, value in tensors.items()}
    return with_buffers(model, tensors | {name: tensors[first] for name, first in same.items()})


def with_buffers(
    model: nn.Module, tensors: Mapping[str, Tensor], trained: Container[str] = ()
) -> nn.Module:
    """Replace parameters and buffers of a model by buffers with the stored tensors.

    Parameters whose names are in `trained` stay parameters.
    """
    for prefix, layer in model.named_modules():
        for key in (*layer._parameters, *layer._buffers):
            name = f"{prefix}.{key}" if prefix else key
            if name in trained:
                continue
            if name not in tensors:
                if layer._parameters.get(key) is None and layer._buffers.get(key) is None:
                    continue
                raise InputError(
                    f"the tensor {name} is missing from the stored weights. Delete the folder "
                    f"language-model-* in {cache_folder()}, and run again."
                )
            delattr(layer, key)
            layer.register_buffer(key, tensors[name], persistent=False)
    return model.eval()


def use_plain_attention(model: Any) -> None:
    """Let a model of the library transformers compute attention with `plain_attention`."""
    with _quiet():  # which registers the name of the function
        model.set_attn_implementation(ATTENTION)


def _digest(tensors: dict[str, Tensor]) -> str:
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:16]
