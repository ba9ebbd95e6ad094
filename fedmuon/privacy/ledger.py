"""The ledger of a run: an append-only file of each client's releases, written before each release.

Each line after the first announces the lots of one round, and is on the disk before these lots are
drawn. The ledger therefore contains all releases of an interrupted run. Every entry in the ledger
counts as spent, even if its run produced no model. If a run resumes from an older model, the run
repeats rounds as new attempts, and all attempts count. Secret lots and noise are drawn again, so no
lot is released twice. Each line contains a hash of all lines before it. A saved model contains the
ledger's last hash at that time, and a ledger without this hash is rejected.

A second file, `ledger.heads`, contains the hashes alone. It gets the hash of a line after the line
is on the disk and before the lots are drawn. So a kill leaves at most one line whose hash is not in
this file. A ledger that lacks a line of a hash in this file has lost a release, and is rejected. A
run writes its file `rounds.jsonl` only after the first line and its hash are on the disk. So if
`rounds.jsonl` exists, a ledger without them is rejected, too. If both files lose the same last
lines, and no saved model and no record of a round is later, the loss cannot be noticed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, append, mendable, read_bytes
from fedmuon.core.locks import require_place
from fedmuon.privacy.accounting.composition import event
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.accounting.truncated import cut_probability
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling

SECOND_FILE = "heads"  # key of the first line, and ending of the file with the hashes
HASH = re.compile(r"[0-9a-f]{32}")
FORMAT = 3  # format 2 named add-remove for every rate, and did not contain the source of rates


@dataclass(frozen=True)
class Entry:
    """One attempt at a round. Client `participants[k]` draws `steps` lots at the rate `rates[k]`.

    `noise_multiplier` applies to each of the `blocks` blocks of parameters, which share each lot.
    """

    round: int
    attempt: int
    participants: tuple[int, ...]
    rates: tuple[float, ...]
    noise_multiplier: float
    blocks: int
    steps: int


@dataclass
class Ledger:
    """The ledger of one run. `open` reads its lines, and `begin` adds a line."""

    path: Path
    head: str = ""  # the hash of all lines so far
    about: dict[str, Any] = field(default_factory=dict)  # the first line
    entries: list[Entry] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)  # the hash after each line, including the first
    has_second_file: bool = False  # false for ledgers of version 1.0, until they are continued

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
        about: Mapping[str, Any] | None = None,
        opened: bool = False,
    ) -> "Ledger":
        """Open the ledger of a run, or create it.

        If the last line is incomplete because of an interruption, the releases that this line
        announces were not made. The incomplete line is removed. If only the last newline of the
        file is missing, this newline is added.

        Args:
            path: The file.
            fingerprint: A hash of the run's config.
            noise: Name of the noise's secrecy class, from `fedmuon.privacy.noise.secrecy`.
            done: Number of rounds that certainly began.
            head: The ledger's hash when the model was saved.
            adjacency: The difference between two neighbouring data sets (`dominating_pairs.py`).
            rate_from: The source of the rates: the clients' own `samples`, or `public`.
            about: Further settings that apply to all lines, for client-level privacy or lots in a
                fixed order. The rate of a lot in a fixed order is 1 / (lots per epoch).
            opened: Whether another file shows that the ledger was opened before.

        Raises:
            InputError: If the file belongs to another run, has damage other than an incomplete
                last line, lacks a line of its second file, or was opened before and is missing. No
                file is then changed.
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
        written_heads = _heads_of(path)
        with mendable(path, "read"):
            content = read_bytes(path) if path.exists() else b""
        complete = _whole(content)
        ledger = cls(path)._replayed(complete, first)
        ledger.require(done, head)
        ledger._require_complete(written_heads, opened)
        if len(complete) > len(content):
            append(path, ["\n"], durable=True)
        elif len(complete) < len(content):
            with mendable(path, "write"):
                os.truncate(path, len(complete))
        if not complete:
            ledger._append({**first, SECOND_FILE: True})
            ledger.about = first
        else:
            _mend_heads(path, written_heads)
            ledger._append_heads(ledger.heads[len(written_heads) :])
        return ledger

    @classmethod
    def read(cls, path: Path, opened: bool = False) -> "Ledger":
        """Read the ledger of any run, which may still be running. No file is changed.

        `opened` says whether another file shows that the ledger was opened before.
        """
        written_heads = _heads_of(path)  # before the ledger, which gets each line first
        with mendable(path, "read"):
            content = read_bytes(path)
        ledger = cls(path)._replayed(_whole(content))
        ledger._require_complete(written_heads, opened, _heads_of(path))  # now with later hashes
        return ledger

    def _replayed(self, content: bytes, first: dict[str, Any] | None = None) -> "Ledger":
        """Read all lines of the ledger.

        `first` is the expected first line. With None, any first line is accepted.
        """
        for number, line in enumerate(content.splitlines()):
            try:
                record = json.loads(line)
                head = str(record.pop("head"))
            except (ValueError, KeyError, AttributeError, TypeError):
                head, record = "", {}
            if head != _chained(self.head, record):  # the hash of this line and all before it
                raise InputError(
                    f"line {number + 1} of the privacy ledger {self.path} is damaged or "
                    f"changed, so the spent epsilon is unknown: {AFRESH}"
                )
            self.head = head
            self.heads.append(head)
            if not number:
                self.has_second_file = bool(record.pop(SECOND_FILE, False))
            if number:
                try:
                    clients, rates = record.pop("participants"), record.pop("rates")
                    entry = Entry(participants=tuple(clients), rates=tuple(rates), **record)
                except (KeyError, TypeError):
                    raise InputError(
                        f"line {number + 1} of {self.path} was written by another version of "
                        f"fedmuon: {AFRESH}"
                    ) from None
                self.entries.append(entry)
            elif first is not None and record != first:
                raise InputError(f"{self.path} is the privacy ledger of another run: {AFRESH}")
            elif "noise" not in record:
                raise InputError(f"{self.path} was written by another version of fedmuon: {AFRESH}")
            else:
                self.about = {"rate_from": "samples", **record}
                if self.about["rate_from"] == "samples" and record["adjacency"] == "add-remove":
                    self.about["adjacency"] = "zero-out"  # the adjacency of rates lot / n_i
        return self

    def begin(
        self,
        round: int,
        participants: Iterable[int],
        rates: Iterable[float],
        noise_multiplier: float,
        blocks: int,
        steps: int,
    ) -> int:
        """Write to disk that these clients are about to make releases.

        Draw lots and noise only after this function returns.

        Returns:
            The number of the attempt at this round, counted from 0.
        """
        attempt = sum(entry.round == round for entry in self.entries)
        clients, shares = tuple(map(int, participants)), tuple(map(float, rates))
        if len(clients) != len(shares):
            raise InputError(
                f"participants of round {round} has {len(clients)} clients, but rates has "
                f"{len(shares)} sampling rates. Pass one sampling rate per client."
            )
        if len(set(clients)) != len(clients):
            twice = next(client for client in clients if clients.count(client) > 1)
            raise InputError(
                f"participants of round {round} contains client {twice} more than once. Pass each "
                "client only once."
            )
        for rate in shares:  # reject unsupported rates before anything is released
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
        if fresh:  # make the name of the new file durable
            with mendable(self.path.parent, "write to"):
                handle = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        self.head = head
        self.heads.append(head)
        self._append_heads([head])

    def _append_heads(self, heads: Iterable[str]) -> None:
        """Write hashes to the second file, and wait until they are on the disk."""
        if lines := [f"{head}\n" for head in heads]:
            append(self.path.with_suffix(f".{SECOND_FILE}"), lines, durable=True)

    def _require_complete(
        self, written_heads: list[str], opened: bool, later_heads: list[str] | None = None
    ) -> None:
        """Raise an error if the two files show that a line of the ledger is missing.

        The ledger of a running run grows while it is read. Then `written_heads` are the hashes that
        were in the second file before the ledger was read, and `later_heads` those afterwards.
        """
        file = self.path.with_suffix(f".{SECOND_FILE}")
        if opened and not self.heads:
            raise InputError(
                f"The privacy ledger {self.path} is missing or empty, although the run has begun, "
                f"so the spent epsilon is unknown: {AFRESH}"
            )
        if self.heads[: len(written_heads)] != written_heads:
            raise InputError(
                f"The privacy ledger {self.path} lacks a line that {file} names, so the spent "
                f"epsilon is unknown: {AFRESH}"
            )
        # A kill can only leave the last line without its hash. The first line had its hash before
        # the run could begin.
        certain = len(self.heads) - 1 if self.entries else int(opened)
        recorded = len(written_heads if later_heads is None else later_heads)
        if self.has_second_file and recorded < certain:
            raise InputError(
                f"{file} names {recorded} of the {len(self.heads)} lines of the privacy "
                f"ledger, so lines may be missing there too and the spent epsilon is unknown: "
                f"{AFRESH}"
            )

    def require(self, done: int, head: str | None = None) -> None:
        """Raise an error if the ledger has no entry for one of the first `done` rounds.

        `head` is the ledger's hash when the model was saved. Lines after this hash stay in the
        ledger, because their lots may already have been released.
        """
        missing = set(range(done)) - {entry.round for entry in self.entries}
        if missing:
            raise InputError(
                f"The privacy ledger {self.path} has no entry for round {min(missing)}, although "
                f"the run began that round. The spent epsilon is therefore unknown: {AFRESH}"
            )
        if head is not None and head not in self.heads:
            raise InputError(
                f"{self.path} is not the privacy ledger that was saved with the model: {AFRESH}"
            )

    def clients(self) -> list[int]:
        """Return the numbers of all clients that have taken part, in ascending order."""
        return sorted({client for entry in self.entries for client in entry.participants})

    def events(self, client: int) -> list[Event]:
        """Return all releases of this client's examples, as events for the accountant."""
        if "band" not in self.about:
            return [
                event(entry.noise_multiplier, rate, entry.steps, entry.blocks)
                for entry in self.entries
                for participant, rate in zip(entry.participants, entry.rates, strict=True)
                if participant == client
            ]
        # Lots in a fixed order are one release, with the smallest noise and the shortest epochs.
        own_entries = [entry for entry in self.entries if client in entry.participants]
        share = max(entry.rates[entry.participants.index(client)] for entry in own_entries)
        spent = FixedOrderSampling.of_ledger(self.about).spent(
            min(entry.noise_multiplier for entry in own_entries),
            max(entry.blocks for entry in own_entries),
            round(1 / share),
            [entry.round for entry in own_entries],
            max(entry.steps for entry in own_entries),
        )
        return [spent]

    def cut(self, client: int) -> float:
        """Return an upper bound on the probability that at least one lot of this client was cut.

        A lot is cut if its size exceeds max-lot.
        """
        max_lot, total = self.about.get("max_lot", 0), 0.0
        for entry in self.entries if max_lot else ():
            for participant, rate in zip(entry.participants, entry.rates, strict=True):
                if participant == client and rate < 1:  # the rate is lot over the client's samples
                    size = round(self.about["lot"] / rate)
                    total += entry.steps * cut_probability(size, rate, max_lot)
        return total

    @property
    def lost(self) -> str:
        """The reason why no run can continue with this ledger, or "" if a run can continue."""
        if self.about.get("band", 1) == 1 or not self.entries:  # the noise is not correlated
            return ""
        return (
            "has rounds with correlated noise that later rounds must cancel. Secret noise is "
            "never stored in a file, so this run cannot be resumed"
        )


def _heads_of(path: Path) -> list[str]:
    """Return the hashes in the second file of a ledger. A hash that a kill cut off is left out."""
    if not (file := path.with_suffix(f".{SECOND_FILE}")).exists():
        return []
    with mendable(file, "read"):
        *lines, last = read_bytes(file).decode("utf-8", errors="replace").split("\n")
    return [*lines, last] if HASH.fullmatch(last) else lines


def _mend_heads(path: Path, heads: list[str]) -> None:
    """Remove a part of a hash that a kill left at the end of the second file.

    If only the last newline is missing, add it.
    """
    file, size = path.with_suffix(f".{SECOND_FILE}"), sum(len(head) + 1 for head in heads)
    if not file.exists():
        return
    if file.stat().st_size < size:
        append(file, ["\n"], durable=True)
    else:
        with mendable(file, "write"):
            os.truncate(file, size)


def _whole(content: bytes) -> bytes:
    """Return the complete lines of a ledger. Add a newline if only the last newline is missing."""
    lines = content[: content.rfind(b"\n") + 1]
    try:
        json.JSONDecoder().raw_decode(content[len(lines) :].decode())
    except ValueError:  # the last line is incomplete
        return lines
    return content + b"\n"


def _chained(head: str, record: dict[str, Any]) -> str:
    return hashlib.sha256(f"{head} {json.dumps(record, sort_keys=True)}".encode()).hexdigest()[:32]
