"""The checkpoint of a run that lasts: model, server states and round in one file, replaced whole.

It names its run and has a digest in it; the one before it is kept, should it be damaged.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedmuon.core.arrays import read_tensors
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, mendable, require_regular, write_bytes
from fedmuon.federated.rounds import ServerState
from fedmuon.federated.wire import pack, unpack

NAMES = ("checkpoint.safetensors", "checkpoint-previous.safetensors")
Held = tuple[dict[str, Tensor], dict[str, str]]  # tensors, and what is said of them
logger = logging.getLogger(__name__)


def write(folder: Path, state: ServerState, run: str, ledger: str) -> None:
    """Replace the checkpoint by this state of a run; `ledger` is the head of a private one's."""
    tensors = {name: value.contiguous() for name, value in pack(state.params, state.states).items()}
    about = {"round": str(state.round), "ledger": ledger, "run": run}
    content = save(tensors, {**about, "digest": _digest(tensors, about)})
    last, previous = (folder / name for name in NAMES)
    with mendable(last, "write"):
        if last.exists():
            last.replace(previous)
    write_bytes(last, content)


def newest(folder: Path, run: str) -> Held | None:
    """The newest sound one of a run, or none; where all there are are damaged, a refusal."""
    held = [folder / name for name in NAMES if (folder / name).exists()]
    for number, file in enumerate(held):
        with contextlib.suppress(InputError):
            found = _sound(file, run)
            if number:
                said = "fedmuon: %s is damaged, so the checkpoint before it is used"
                logger.warning(said, held[0])
            return found
    if held:
        raise InputError(f"every checkpoint in {folder} is damaged or of another run: {AFRESH}")
    return None


def state_of(held: Held, fresh: ServerState, folder: Path) -> ServerState:
    """The state that it holds, shaped and placed like the fresh one; refused if it does not fit."""
    tensors, about = held
    try:
        params, states = unpack(tensors, fresh.params, fresh.states)
        return ServerState(int(about["round"]), params, states)
    except (InputError, KeyError, ValueError) as error:
        raise InputError(
            f"the checkpoint in {folder} does not fit this config ({error}): {AFRESH}"
        ) from None


def round_of(folder: Path) -> int | None:
    """The round that the last one says it is of; None where there is none."""
    with (
        contextlib.suppress(SafetensorError, OSError, InputError),
        safe_open(require_regular(folder / NAMES[0]), framework="pt") as file,
    ):
        return int((file.metadata() or {}).get("round", 0))
    return None


def forget(folder: Path) -> None:
    """Remove what a finished run needs no more."""
    with mendable(folder, "write to"):
        for name in NAMES:
            (folder / name).unlink(missing_ok=True)


def _sound(file: Path, run: str) -> Held:
    """The tensors and metadata of a checkpoint, refused unless its digest and its run are right."""
    tensors, about = read_tensors(file)
    if about.pop("digest", "") != _digest(tensors, about):
        raise InputError(f"{file} is damaged")
    if about.get("run") != run:
        raise InputError(f"{file} is of another run")
    return tensors, about


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """SHA-256 of names, types, shapes, bytes and metadata."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
