"""What each client has spent: an append-only file that is always ahead of what was released.

A line is on the disk before the lots that it announces are drawn. So what a killed run released is
in the ledger, and what is in the ledger counts as spent, whether or not a model came of it. A run
that resumes from an older model begins its rounds again as new attempts, and all of them count;
secret lots and noise are drawn anew, so that no lot is released twice. Each line carries a hash of
all before it; a model remembers the last one and is refused beside another ledger. Lines after the
last model cannot be missed: the run that wrote them left nothing else.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, append, mendable, read_bytes
from fedmuon.core.locks import require_place
from fedmuon.privacy.accounting.composition import Answer, account, event
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling

FORMAT = 3  # 2 said add-remove of every rate, and not where rates are from


@dataclass(frozen=True)
class Entry:
    """One attempt at a round: client participants[k] draws lots at rates[k], `steps` times.

    The multiplier is that of each of the m blocks, which share the lot.
    """

    round: int
    attempt: int
    participants: tuple[int, ...]
    rates: tuple[float, ...]
    noise_multiplier: float
    blocks: int
    steps: int

    def spent(self, client: int) -> list[Event]:
        """What this attempt took from a client: one joint release a step, or nothing."""
        return [
            event(self.noise_multiplier, rate, self.steps, self.blocks)
            for held, rate in zip(self.participants, self.rates, strict=True)
            if held == client
        ]


@dataclass
class Ledger:
    """The lines of one run's ledger; `open` reads them, `begin` adds one."""

    path: Path
    head: str = ""  # the hash of everything so far
    about: dict[str, Any] = field(default_factory=dict)  # the first line
    entries: list[Entry] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)  # after each line, the first one included

    @classmethod
    def open(
        cls,
        path: Path,
        fingerprint: str,
        noise: str = "secret",
        done: int = 0,
        head: str | None = None,
        adjacency: str = "zero-out",
        rate_from: str = "samples",
        about: Mapping[str, str | int] | None = None,
    ) -> "Ledger":
        """The ledger of the run with this fingerprint (a hash of its config); begun if not there.
        `noise` says who can know it; `done` and `head` are what a model has behind it.
        Rates are from the clients' own `samples`, or `public` (`dominating_pairs.py`);
        `about` says more where what is accounted for is no example of a client, or
        lots take turns: rates are then their shares of an epoch.

        A last line that a kill cut off was not yet durable, so nothing of it was released: it is
        cut away; one that lacks its end alone gets it. Any other damage, and another run's ledger,
        are refused and left as they are.
        """
        first = {
            "ledger": FORMAT,
            "fingerprint": fingerprint,
            "adjacency": adjacency,
            "rate_from": rate_from,
            "sampling": "poisson",
            "noise": noise,
            **(about or {}),
        }
        with mendable(path, "read"):
            content = read_bytes(path) if path.exists() else b""
        whole = _whole(content)
        ledger = cls(path)._replayed(whole, first)
        ledger.require(done, head)
        if len(whole) > len(content):
            append(path, ["\n"], durable=True)
        elif len(whole) < len(content):
            with mendable(path, "write"):
                os.truncate(path, len(whole))
        return ledger if whole else ledger._started(first)

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """The ledger as it stands, of whatever run; the file is left as it is."""
        with mendable(path, "read"):
            content = read_bytes(path)
        return cls(path)._replayed(_whole(content))

    def _started(self, first: dict[str, Any]) -> "Ledger":
        self._append(first)
        self.about = first
        return self

    def _replayed(self, whole: bytes, first: dict[str, Any] | None = None) -> "Ledger":
        """With what the lines say; `first` is the first one of the run's own ledger."""
        for number, line in enumerate(whole.splitlines()):
            record = self._checked(line, number)
            if number:
                self.entries.append(self._entry(record, number))
            elif first is not None and record != first:
                raise InputError(f"{self.path} is the ledger of another run: {AFRESH}")
            elif "noise" not in record:
                raise InputError(f"{self.path} is not of this version: {AFRESH}")
            else:
                self.about = _true(record)
        return self

    def _checked(self, line: bytes, number: int) -> dict[str, Any]:
        """The record of a line, if its hash is that of all that stands before it."""
        try:
            record = json.loads(line)
            head = str(record.pop("head"))
        except (ValueError, KeyError, AttributeError, TypeError):
            head, record = "", {}
        if head != _chained(self.head, record):
            raise InputError(
                f"line {number + 1} of {self.path} is damaged or changed, so what was spent is "
                f"unknown: {AFRESH}"
            )
        self.head = head
        self.heads.append(head)
        return record

    def _entry(self, record: dict[str, Any], number: int) -> Entry:
        try:
            clients, rates = record.pop("participants"), record.pop("rates")
            return Entry(participants=tuple(clients), rates=tuple(rates), **record)
        except (KeyError, TypeError):
            raise InputError(
                f"line {number + 1} of {self.path} is not of this version: {AFRESH}"
            ) from None

    def begin(
        self,
        round: int,
        participants: Iterable[int],
        rates: Iterable[float],
        noise_multiplier: float,
        blocks: int,
        steps: int,
    ) -> int:
        """Write down, durably, that these clients are about to release; returns the attempt.

        Draw neither lots nor noise before this returns.
        """
        attempt = sum(entry.round == round for entry in self.entries)
        clients, shares = tuple(map(int, participants)), tuple(map(float, rates))
        if len(clients) != len(shares) or len(set(clients)) != len(clients):
            raise InputError(f"round {round}: give each participant once, with one rate")
        for rate in shares:  # refuses what no accountant covers before anything is released
            event(noise_multiplier, rate, steps, blocks)
        entry = Entry(round, attempt, clients, shares, float(noise_multiplier), blocks, steps)
        self._append(entry.__dict__)
        self.entries.append(entry)
        return attempt

    def _append(self, record: dict[str, Any]) -> None:
        head = _chained(self.head, record)
        fresh = not self.path.exists()
        require_place(self.path.parent)
        append(self.path, [json.dumps({**record, "head": head}) + "\n"], durable=True)
        if fresh:
            _sync_folder(self.path.parent)
        self.head = head
        self.heads.append(head)

    def require(self, done: int, head: str | None = None) -> None:
        """Refuse a ledger that lacks what a model has behind it: `done` rounds, 0, 1, ...

        `head` is the ledger's own when the model was saved. Lines beyond it are kept: they were
        written before lots were released, so they are spent.
        """
        missing = set(range(done)) - {entry.round for entry in self.entries}
        if missing:
            raise InputError(
                f"{self.path} says nothing of round {min(missing)}, which the model has behind "
                f"it, so what was spent is unknown: {AFRESH}"
            )
        if head is not None and head not in self.heads:
            raise InputError(
                f"{self.path} is not the ledger that the model was saved with: {AFRESH}"
            )

    def clients(self) -> list[int]:
        """All who ever took part, in order."""
        return sorted({client for entry in self.entries for client in entry.participants})

    def events(self, client: int) -> list[Event]:
        """All that was released about this client's examples, every attempt included."""
        if "band" in self.about:
            return [
                self._in_turn([one for one in self.entries if client in one.participants], client)
            ]
        return [spent for entry in self.entries for spent in entry.spent(client)]

    def _in_turn(self, own: list[Entry], client: int) -> Event:
        """What lots that take turns released, at the least noise and in the shortest epochs."""
        turns = FixedOrderSampling(self.about["sampling"], self.about["band"])
        share = max(one.rates[one.participants.index(client)] for one in own)
        return turns.spent(
            min(one.noise_multiplier for one in own),
            max(one.blocks for one in own),
            round(1 / share),
            [one.round for one in own],
            max(one.steps for one in own),
        )

    @property
    def lost(self) -> str:
        """Why no run can go on from these lines; nothing where one can."""
        if self.about.get("band", 1) == 1 or not self.entries:
            return ""
        return (
            "has rounds whose noise that of the next ones is to cancel, and no file keeps it, as "
            "it is secret"
        )

    def epsilons(self, delta: float, accountant: str = "pld") -> dict[int, Answer]:
        """Each client's own epsilon at delta; clients that spent the same are accounted once."""
        named, sampling = self.about["adjacency"], self.about["sampling"]

        @cache
        def answer(spent: tuple[Event, ...]) -> Answer:
            found = account(spent, delta, "joint", accountant, named)
            return replace(found, sampling=sampling) if "band" in self.about else found

        return {client: answer(tuple(sorted(self.events(client)))) for client in self.clients()}


def _true(first: dict[str, Any]) -> dict[str, Any]:
    """A first line as far as it holds: of rates lot / n_i, add-remove is not true, zero-out is."""
    held = {"rate_from": "samples", **first}
    if held["rate_from"] == "samples" and held["adjacency"] == "add-remove":
        held["adjacency"] = "zero-out"
    return held


def _whole(content: bytes) -> bytes:
    """The lines that were written whole, the last one with its end, which alone may be missing."""
    lines = content[: content.rfind(b"\n") + 1]
    try:
        json.JSONDecoder().raw_decode(content[len(lines) :].decode())
    except ValueError:  # a part of a line
        return lines
    return content + b"\n"


def _chained(head: str, record: dict[str, Any]) -> str:
    return hashlib.sha256(f"{head} {json.dumps(record, sort_keys=True)}".encode()).hexdigest()[:32]


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, too."""
    with mendable(folder, "write to"):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
