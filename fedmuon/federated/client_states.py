"""States of clients that last while the clients do not take part.

A state is known by its client and by the round that the client took part in. Before round r a
client has the newest state of an earlier round, so a run that is repeated, or resumed from any
round, reads what was there then. Nothing is changed in place: before a checkpoint, one file takes
the states that are in none yet, and a file goes once no checkpoint needs any of its states.

In memory are the states that no file holds yet, and those read last, up to a budget; where that is
not enough, states are written early. So the memory does not grow with the number of clients.
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
Key = tuple[int, int]  # client, and the round that it took part in


@dataclass
class ClientStates:
    """The states of all clients that have any.

    Attributes:
        folder: Where files go; without one, everything stays in memory.
        run: Identifies the run, whose files alone are read.
        budget: Bytes of states in memory.
    """

    folder: Path | None = None
    run: str = ""
    budget: int = BUDGET
    _rounds: dict[int, list[int]] = field(default_factory=dict, init=False)  # ascending
    checkpoints: tuple[int, ...] = field(default=(), init=False)  # rounds that may be resumed
    _several: set[int] = field(default_factory=set, init=False)  # clients with older states
    _new: dict[Key, Flat] = field(default_factory=dict, init=False)  # in no file
    _read: OrderedDict[Key, Flat] = field(default_factory=OrderedDict, init=False)  # last used last
    _bytes: int = field(default=0, init=False)  # bytes of both
    _place: dict[Key, tuple[int, int]] = field(default_factory=dict, init=False)  # file, row
    _count: dict[int, int] = field(default_factory=dict, init=False)  # file -> states that count

    def last_round(self, client: int, before: int) -> int | None:
        """The last round before that one which left the client a state."""
        rounds = self._rounds.get(client, ())
        return next((one for one in reversed(rounds) if one < before), None)

    def read(self, client: int, before: int) -> States:
        """The client's states before a round; empty if it has none."""
        last = self.last_round(client, before)
        if last is None:
            return {}
        key = (client, last)
        if key not in self._new and key not in self._read:
            number, row = self._place[key]
            file = self._file(number)
            with mendable(file, "read"), safe_open(require_regular(file), framework="pt") as held:
                names = [name for name in held.keys() if name not in ("client", "round")]  # noqa: SIM118
                self._read[key] = {name: held.get_slice(name)[row] for name in names}
            self._bytes += _size(self._read[key])
        flat = self._new[key] if key in self._new else self._read[key]
        if key in self._read:
            self._read.move_to_end(key)
        self._shrink()
        return nested_states(flat)

    def write(self, client: int, round: int, states: States) -> None:
        """Keep what the client has after this round."""
        rounds = self._rounds.setdefault(client, [])
        while rounds and rounds[-1] >= round:  # this round is repeated
            self._forget((client, rounds.pop()))
        rounds.append(round)
        self._new[client, round] = flat_states(states)
        self._bytes += _size(self._new[client, round])
        self._prune(client)
        self._shrink()

    def flush(self) -> None:
        """Write the states that are in no file yet, as one file."""
        if self.folder is None or not self._new:
            return
        keys = sorted(self._new)
        number = max(self._count, default=-1) + 1
        names = self._new[keys[0]]
        each = {key: to_numpy(self._new[key]) for key in keys}
        arrays = {name: np.stack([each[key][name] for key in keys]) for name in names}
        arrays |= {
            part: np.array([key[place] for key in keys], np.int64)
            for place, part in enumerate(("client", "round"))
        }
        about = {"run": self.run}
        content = save(arrays, {**about, "digest": digest_of_arrays(arrays, about)})
        with mendable(self.folder, "create"):
            self.folder.mkdir(exist_ok=True)
        write_bytes(self._file(number), content)
        self._place |= {key: (number, row) for row, key in enumerate(keys)}
        self._count[number] = len(keys)
        self._read |= self._new
        self._new.clear()

    def commit(self, round: int) -> None:
        """After a checkpoint of that round, drop states that neither it nor the previous one
        needs."""
        self.checkpoints = (*self.checkpoints[-1:], round)
        for client in list(self._several):
            self._prune(client)
        self._shrink()

    def restore(self, round: int, expected: Mapping[int, int], others: Sequence[int] = ()) -> None:
        """Read the folder's files as they were at a checkpoint of that round.

        Args:
            round: The round of the checkpoint.
            expected: For each client that has taken part, its last round before.
            others: Rounds of older checkpoints that are still there.

        Raises:
            InputError: A file is damaged, or a state is missing.
        """
        self.checkpoints = (*(one for one in others if one < round), round)
        for held in (self._rounds, self._new, self._read, self._place, self._count):
            held.clear()
        self._bytes = 0
        self._read_index()
        for client, one in sorted(self._place):
            self._rounds.setdefault(client, []).append(one)
        for client, last in expected.items():
            if self.last_round(client, round) != last:
                raise InputError(
                    f"{self.folder} lacks the state of client {client} after round {last}: {AFRESH}"
                )
        for key in [key for key in self._place if key[1] >= round]:  # later than this checkpoint
            self._rounds[key[0]].remove(key[1])
            self._forget(key)
        for number in [number for number, count in self._count.items() if not count]:
            self._unlink(number)
        self._several = {client for client, rounds in self._rounds.items() if len(rounds) > 1}

    def _read_index(self) -> None:
        """Check the folder's files, and note where every state is; of two, the later counts."""
        files: list[Path] = []
        if self.folder is not None and self.folder.exists():
            remove_drafts(self.folder)
            files = sorted(self.folder.glob(f"[0-9]*{SUFFIX}"))
        for file in files:
            number = int(file.name.removesuffix(SUFFIX))
            arrays, about = read_arrays(file)
            if about.pop("digest", "") != digest_of_arrays(arrays, about):
                raise InputError(f"{file} is damaged: {AFRESH}")
            if about.get("run") != self.run:
                raise InputError(f"{file} is of another run: {AFRESH}")
            self._count[number] = 0
            found = zip(arrays["client"].tolist(), arrays["round"].tolist(), strict=True)
            for row, key in enumerate(found):
                if key in self._place:
                    self._count[self._place[key][0]] -= 1
                self._place[key] = (number, row)
                self._count[number] += 1

    def remove(self) -> None:
        """Remove all files, which a finished run needs no more."""
        if self.folder is not None and self.folder.exists():
            with mendable(self.folder, "remove"):
                for file in self.folder.iterdir():
                    file.unlink()
                self.folder.rmdir()

    def _prune(self, client: int) -> None:
        """Drop all states of a client but the newest and what the checkpoints need."""
        rounds = self._rounds[client]
        needed = {self.last_round(client, one) for one in self.checkpoints} | {rounds[-1]}
        for one in rounds:
            if one not in needed:
                self._forget((client, one))
        rounds[:] = [one for one in rounds if one in needed]
        (self._several.add if len(rounds) > 1 else self._several.discard)(client)

    def _forget(self, key: Key) -> None:
        for held in (self._new, self._read):
            if key in held:
                self._bytes -= _size(held.pop(key))
        if key in self._place:
            number, _ = self._place.pop(key)
            self._count[number] -= 1
            if not self._count[number]:
                self._unlink(number)

    def _shrink(self) -> None:
        """Keep memory within the budget."""
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
    """Copies on the CPU, so that no stack of a whole round is kept alive by one client's part.

    They have the memory order of a file, because the rounding of products depends on it.
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
