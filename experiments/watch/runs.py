"""What a page is told of runs: read anew at each look, and nothing of it is kept or written.

A page says how far it has read a rounds.jsonl, and is given what was appended since, up to the last
whole line. A file that `--resume` cut back is another file (writers replace files, they do not
change them), and is read from its start.
"""

import contextlib
import math
import os
import re
import socket
from functools import lru_cache
from pathlib import Path

from fedmuon.errors import InputError
from fedmuon.files import SUMS, Record, unsealed
from fedmuon.locks import DRIVER, LOCK

ROUNDS, LEDGER = "rounds.jsonl", "ledger.jsonl"
SPENT = ("released", "epsilon", "delta", "certified")
PART = 1 << 20  # bytes of a file that are read at a time


def runs_of(folder: Path) -> dict[str, Path]:
    """The run directories that the folder is or holds, by their names below it; newest first."""
    found: dict[Path, float] = {}
    for place, below, files in os.walk(folder):
        if {"config.toml", SUMS} <= {*files}:
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                found[Path(place)] = (Path(place) / "config.toml").stat().st_mtime
            below.clear()
        below[:] = [name for name in below if not name.startswith(".")]
    newest = sorted(found, key=lambda one: found[one], reverse=True)
    alone = folder.resolve().name
    return {alone if one == folder else str(one.relative_to(folder)): one for one in newest}


def about(name: str, folder: Path) -> Record:
    """What a page shows of a run beside its rounds; of one that is damaged, what is."""
    from fedmuon.results import NOT_RELEASED
    from fedmuon.storage import RunDirectory

    file = folder / "config.toml"
    try:
        card = _card(file, file.stat().st_mtime_ns)
        summary = RunDirectory(folder).summary() or {}
    except InputError as error:
        return {"name": name, "state": "damaged", "trouble": f"{file}: {error}"}
    state = "done" if summary else "running" if _is_written(folder) else "stopped"
    private = NOT_RELEASED if (folder / LEDGER).exists() else ""
    found = {"name": name, "state": state, "stopped": summary.get("stopped", ""), **card}
    with contextlib.suppress(FileNotFoundError):  # before its first round
        found["size"] = _place((folder / ROUNDS).stat())
    spent = summary.get("privacy")
    return found | {
        "private": private,
        "spent": spent and {name: spent.get(name) for name in SPENT},
    }


@lru_cache(256)
def _card(file: Path, changed: int) -> Record:
    """How many rounds the config.toml, last changed then, asks for; and the experiment's card."""
    from fedmuon import config
    from fedmuon.experiments.laboratory.card import card

    loaded = config.load(file)
    facts = [[f"{name}: {words}".rstrip(": "), value] for name, words, value in card([loaded])]
    return {"total": loaded.federation.rounds, "card": facts}


def _is_written(folder: Path) -> bool:
    """Whether a process that lives holds the folder, as its lock says; the lock itself is not
    tried, which would turn away a writer that begins."""
    for name in (LOCK, DRIVER):
        with contextlib.suppress(OSError):
            holder = (folder / name).read_text(encoding="utf-8", errors="replace")
            if said := re.match(r"process (\d+) on (\S+)", holder):
                return said[2] != socket.gethostname() or _lives(int(said[1]))
    return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def _place(of: os.stat_result, at: int | None = None) -> str:
    """A place in a file, its end unless given, with what tells the file from what replaces it."""
    return f"{of.st_ino}-{of.st_size if at is None else at}"


def rounds_since(folder: Path, since: str) -> Record:
    """What was appended to rounds.jsonl after the place that an earlier answer named `at`; from its
    start where that is no place of this file. A line that is not whole is left for the next look.
    """
    from fedmuon.storage import RunDirectory

    try:
        file = (folder / ROUNDS).open("rb")
    except FileNotFoundError:
        return {"at": "", "afresh": True, "rounds": [], "damaged": 0, "more": False}
    with file:
        now = os.fstat(file.fileno())
        asked = int(since.partition("-")[2]) if re.fullmatch(r"[0-9]+-[0-9]{1,18}", since) else 0
        start = asked if since == _place(now, asked) and asked <= now.st_size else 0
        file.seek(start)
        content = file.read(PART) + file.readline()
    whole, mark = content[: content.rfind(b"\n") + 1], RunDirectory(folder).mark
    lines = whole.decode("utf-8", errors="replace").split("\n")[:-1]
    records = [unsealed(f"{line}\n", mark) for line in lines]
    return {
        "at": _place(now, start + len(whole)),
        "afresh": start == 0,
        "rounds": [_seen(one) for one in records if one],
        "damaged": records.count(None),
        "more": start + len(content) < now.st_size,
    }


def _seen(record: Record) -> Record:
    """The numbers of a round, and what went wrong in it."""
    kept = {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    if faults := record.get("faults"):
        kept["faults"] = [f"client {one['client']}: {one['why']}" for one in faults]
    return kept | ({"dropped": record["dropped"]} if "dropped" in record else {})
