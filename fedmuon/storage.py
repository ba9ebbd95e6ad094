"""A run directory: every file is written whole or not at all, and a killed run can go on.

While a run lasts, `checkpoint.safetensors` is its only truth: model, server states and round in
one atomically replaced file. `rounds.jsonl` may be ahead of it and is cut back on resume.
"""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedmuon.errors import InputError
from fedmuon.federated.aggregate import ServerState
from fedmuon.federated.wire import pack, unpack

Record = dict[str, Any]
CHECKPOINT = "checkpoint.safetensors"


@contextlib.contextmanager
def mendable(path: Path, doing: str) -> Iterator[None]:
    """Turn the operating system's refusals into one sentence."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot {doing} {path} ({error.strerror}): choose a folder that is writable and has "
            "room with --out"
        ) from None


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file atomically: a reader sees the old bytes or the new ones, never a part."""
    with mendable(path, "write"):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def array_bytes(**arrays: np.ndarray) -> bytes:
    """Arrays as the bytes of an .npz; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def npy_bytes(array: np.ndarray) -> bytes:
    """An array as the bytes of an .npy."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Tensors as safetensors; an ordinary run's replica axis (S = 1) is dropped."""
    plain = {
        name: (value[0] if len(value) == 1 else value).contiguous().cpu()
        for name, value in tensors.items()
    }
    return save(plain, metadata)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is not a readable safetensors file ({error}): start afresh in another folder"
        ) from None


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    def create(self, resume: bool) -> None:
        """Make the folder; refuse one that holds anything unless it is a run to resume."""
        with mendable(self.path, "create"):
            self.path.mkdir(parents=True, exist_ok=True)
            held = sorted(entry.name for entry in self.path.iterdir())
        if held and not resume:
            raise InputError(
                f"{self.path} is not empty: choose another folder with --out, or --resume it"
            )
        if resume and any(not name.startswith(".") for name in held):
            self._require_run(held)

    def _require_run(self, held: list[str]) -> None:
        if "config.toml" not in held:
            raise InputError(
                f"{self.path} holds no config.toml and is no run directory: check --out"
            )

    def fix(self, name: str, content: bytes) -> None:
        """Write a file that the config determines, or check that it is as the config says."""
        file = self.path / name
        if not file.exists():
            write_bytes(file, content)
        elif file.read_bytes() != content:
            raise InputError(
                f"{file} is not what this config gives (damaged, another config or other data): "
                "start afresh in another folder with --out"
            )

    def checkpoint(self, state: ServerState, ledger: str = "") -> None:
        """Replace the checkpoint by this state; `ledger` is the head of a private run's."""
        tensors = {
            name: value.contiguous() for name, value in pack(state.params, state.states).items()
        }
        write_bytes(
            self.path / CHECKPOINT, save(tensors, {"round": str(state.round), "ledger": ledger})
        )

    def restore(self, fresh: ServerState) -> ServerState:
        """The checkpoint's state, shaped and placed like the fresh one; fresh if there is none."""
        file = self.path / CHECKPOINT
        if not file.exists():
            return fresh
        tensors, metadata = read_tensors(file)
        try:
            params, states = unpack(tensors, fresh.params, fresh.states)
            return ServerState(int(metadata["round"]), params, states)
        except (InputError, KeyError, ValueError) as error:
            raise InputError(
                f"{file} does not fit this config ({error}): start afresh with another --out"
            ) from None

    def ledger_head(self) -> str | None:
        """The ledger's head when the checkpoint was written; None without a checkpoint."""
        file = self.path / CHECKPOINT
        return (read_tensors(file)[1].get("ledger") or None) if file.exists() else None

    def append(self, record: Record) -> None:
        """Add one line to rounds.jsonl."""
        file = self.path / "rounds.jsonl"
        with mendable(file, "write"), file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")

    def records(self) -> list[Record]:
        """The whole lines of rounds.jsonl; a line cut off by a kill is left out."""
        file = self.path / "rounds.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        records = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records

    def cut_back(self, round: int) -> None:
        """Keep the records of the first `round` rounds."""
        kept = [record for record in self.records() if record["round"] <= round]
        write_bytes(
            self.path / "rounds.jsonl",
            "".join(json.dumps(record) + "\n" for record in kept).encode(),
        )

    def finish(self, state: ServerState, summary: Record) -> None:
        """Write the model, the momentum and the summary; the checkpoint has served."""
        momentum = state.states.get(
            "momentum", {name: torch.zeros_like(value) for name, value in state.params.items()}
        )
        write_bytes(self.path / "model.safetensors", tensor_bytes(state.params))
        write_bytes(self.path / "momentum.safetensors", tensor_bytes(momentum))
        write_bytes(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    def summary(self) -> Record | None:
        """The summary of a finished run, None while it is unfinished."""
        file = self.path / "summary.json"
        try:
            return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        except (ValueError, OSError):
            raise InputError(f"{file} is damaged: start afresh in another folder") from None
