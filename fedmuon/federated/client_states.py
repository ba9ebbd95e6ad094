"""Client states that are stored between the rounds in which a client takes part.

A state is identified by its client and by the round in which the client took part. In round r, a
client uses the newest state of an earlier round. Repeated rounds and resumed runs therefore use the
same states as the first attempt. Files are never changed. Before a checkpoint, all states that are
not yet in a file are written to one new file. A file is deleted when no checkpoint needs any of its
states.

Memory contains the states that are not yet in a file, and the states that were read most recently,
up to a budget in bytes. If the budget is too small, states are written early. Memory therefore does
not grow with the number of clients.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from fedmuon.core.arrays import digest_of_arrays, read_arrays, to_numpy
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, mendable, remove_drafts, require_regular, write_bytes
from fedmuon.optim.chain import States

BUDGET = 1 << 28  # bytes of states in memory
SUFFIX = ".safetensors"
Flat = dict[str, Tensor]  # `<link>.<parameter>` -> tensor
Key = tuple[int, int]  # a client, and a round in which it took part


@dataclass
class ClientStates:
    """The stored states of all clients.

    Attributes:
        folder: Folder of the files. Without a folder, all states stay in memory.
        run: Name of the run. Files of other runs are rejected.
        budget: Maximum bytes of states in memory.
    """

    folder: Path | None = None
    run: str = ""
    budget: int = BUDGET
    _rounds: dict[int, list[int]] = field(default_factory=dict, init=False)  # ascending
    checkpoints: tuple[int, ...] = field(default=(), init=False)  # rounds from which to resume
    _several: set[int] = field(default_factory=set, init=False)  # clients with several states
    _new: dict[Key, Flat] = field(default_factory=dict, init=False)  # states in no file yet
    _read: OrderedDict[Key, Flat] = field(default_factory=OrderedDict, init=False)  # by last use
    _bytes: int = field(default=0, init=False)  # bytes of `_new` and `_read`
    _place: dict[Key, tuple[int, int]] = field(default_factory=dict, init=False)  # file, row
    _count: dict[int, int] = field(default_factory=dict, init=False)  # file -> needed states

    def last_round(self, client: int, before: int) -> int | None:
        """Return the last round before `before` with a stored state of the client, or None."""
        rounds = self._rounds.get(client, ())
        return next((stored for stored in reversed(rounds) if stored < before), None)

    def read(self, client: int, before: int) -> States:
        """Return the newest states that a client stored before a round.

        The result is empty if the client stored no states.
        """
        last = self.last_round(client, before)
        if last is None:
            return {}
        key = (client, last)
        if key not in self._new and key not in self._read:
            number, row = self._place[key]
            file = self._file(number)
            with mendable(file, "read"), safe_open(require_regular(file), framework="pt") as opened:
                names = [name for name in opened.keys() if name not in ("client", "round")]  # noqa: SIM118
                self._read[key] = {name: opened.get_slice(name)[row] for name in names}
            self._bytes += _size(self._read[key])
        flat = self._new[key] if key in self._new else self._read[key]
        if key in self._read:
            self._read.move_to_end(key)
        self._shrink()
        return nested_states(flat)

    def write(self, client: int, round: int, states: States) -> None:
        """Store the client's states after this round."""
        rounds = self._rounds.setdefault(client, [])
        while rounds and rounds[-1] >= round:  # the round is being repeated
            self._forget((client, rounds.pop()))
        rounds.append(round)
        self._new[client, round] = flat_states(states)
        self._bytes += _size(self._new[client, round])
        self._prune(client)
        self._shrink()

    def flush(self) -> None:
        """Write the states that are in no file yet to one new file."""
        if self.folder is None or not self._new:
            return
        keys = sorted(self._new)
        number = max(self._count, default=-1) + 1
        names = self._new[keys[0]]
        states = {key: to_numpy(self._new[key]) for key in keys}
        arrays = {name: np.stack([states[key][name] for key in keys]) for name in names}
        arrays |= {
            part: np.array([key[place] for key in keys], np.int64)
            for place, part in enumerate(("client", "round"))
        }
        metadata = {"run": self.run}
        content = save(arrays, {**metadata, "digest": digest_of_arrays(arrays, metadata)})
        with mendable(self.folder, "create"):
            self.folder.mkdir(exist_ok=True)
        write_bytes(self._file(number), content)
        self._place |= {key: (number, row) for row, key in enumerate(keys)}
        self._count[number] = len(keys)
        self._read |= self._new
        self._new.clear()

    def commit(self, round: int) -> None:
        """Drop states that neither this round's checkpoint nor the previous checkpoint needs.

        Call this method after the checkpoint is written.
        """
        self.checkpoints = (*self.checkpoints[-1:], round)
        for client in list(self._several):
            self._prune(client)
        self._shrink()

    def restore(self, round: int, expected: Mapping[int, int], others: Sequence[int] = ()) -> None:
        """Restore the stored states of the checkpoint of a round from the folder's files.

        Args:
            round: The round of the checkpoint.
            expected: For each client that has taken part, its last round before the checkpoint.
            others: Rounds of older checkpoints that still exist.

        Raises:
            InputError: If a file is damaged, or a state is missing.
        """
        self.checkpoints = (*(checkpoint for checkpoint in others if checkpoint < round), round)
        for mapping in (self._rounds, self._new, self._read, self._place, self._count):
            mapping.clear()
        self._bytes = 0
        self._read_index()
        for client, stored in sorted(self._place):
            self._rounds.setdefault(client, []).append(stored)
        for client, last in expected.items():
            if self.last_round(client, round) != last:
                raise InputError(
                    f"{self.folder} does not contain the state of client {client} after round "
                    f"{last}: copy back the files that were removed from this folder, or {AFRESH}"
                )
        for key in [key for key in self._place if key[1] >= round]:  # written after the checkpoint
            self._rounds[key[0]].remove(key[1])
            self._forget(key)
        for number in [number for number, count in self._count.items() if not count]:
            self._unlink(number)
        self._several = {client for client, rounds in self._rounds.items() if len(rounds) > 1}

    def _read_index(self) -> None:
        """Check all files, and record which file contains each state."""
        files: list[Path] = []
        if self.folder is not None and self.folder.exists():
            remove_drafts(self.folder)
            files = sorted(self.folder.glob(f"[0-9]*{SUFFIX}"))
        for file in files:
            number = int(file.name.removesuffix(SUFFIX))
            arrays, metadata = read_arrays(file)
            if metadata.pop("digest", "") != digest_of_arrays(arrays, metadata):
                raise InputError(
                    f"the file {file} of client states is damaged: restore the file from a copy, "
                    f"or {AFRESH}"
                )
            if metadata.get("run") != self.run:
                raise InputError(
                    f"the file {file} of client states belongs to another run: restore the file "
                    f"of this run from a copy, or {AFRESH}"
                )
            self._count[number] = 0
            keys = zip(arrays["client"].tolist(), arrays["round"].tolist(), strict=True)
            for row, key in enumerate(keys):
                if key in self._place:
                    self._count[self._place[key][0]] -= 1
                self._place[key] = (number, row)
                self._count[number] += 1

    def remove(self) -> None:
        """Remove all files, because a finished run does not need them."""
        if self.folder is not None and self.folder.exists():
            with mendable(self.folder, "remove"):
                for file in self.folder.iterdir():
                    file.unlink()
                self.folder.rmdir()

    def _prune(self, client: int) -> None:
        """Drop a client's states, except its newest states and the states that checkpoints need."""
        rounds = self._rounds[client]
        needed = {self.last_round(client, saved) for saved in self.checkpoints} | {rounds[-1]}
        for stored in rounds:
            if stored not in needed:
                self._forget((client, stored))
        rounds[:] = [stored for stored in rounds if stored in needed]
        (self._several.add if len(rounds) > 1 else self._several.discard)(client)

    def _forget(self, key: Key) -> None:
        for mapping in (self._new, self._read):
            if key in mapping:
                self._bytes -= _size(mapping.pop(key))
        if key in self._place:
            number, _ = self._place.pop(key)
            self._count[number] -= 1
            if not self._count[number]:
                self._unlink(number)

    def _shrink(self) -> None:
        """Write states to a file, or drop them from memory, until memory is within the budget."""
        if self.folder is None:
            return
        if self._bytes > self.budget and sum(map(_size, self._new.values())) > self.budget:
            self.flush()
        while self._bytes > self.budget and self._read:
            self._bytes -= _size(self._read.popitem(last=False)[1])

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{number:08}{SUFFIX}"

    def _unlink(self, number: int) -> None:
        del self._count[number]
        with mendable(self._file(number), "remove"):
            self._file(number).unlink(missing_ok=True)


def flat_states(states: States) -> Flat:
    """Copy states to the CPU as a flat dictionary, so that the tensors of a round can be freed.

    The copies have the memory order of tensors read from a file, because rounding depends on the
    order.
    """
    return {
        f"{link}.{name}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for link, state in states.items()
        for name, value in state.items()
    }


def nested_states(flat: Flat) -> States:
    states: States = {}
    for name, value in flat.items():
        link, _, part = name.partition(".")
        states.setdefault(link, {})[part] = value
    return states


def _size(flat: Flat) -> int:
    return sum(value.nbytes for value in flat.values())
