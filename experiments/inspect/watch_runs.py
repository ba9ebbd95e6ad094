"""What a page is told of runs: read anew at each look, and nothing of it is kept or written.

A page says how far it has read a rounds.jsonl, and is given what was appended since, up to the last
whole line. A file that `--resume` cut back is another file (writers replace files, they do not
change them), and is read from its start.
"""

import contextlib
import math
import os
import re
from functools import lru_cache
from pathlib import Path

from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, regular, unsealed
from fedmuon.experiments.inspect.card import settings
from fedmuon.experiments.inspect.status import Seen, below
from fedmuon.runs.directory import RunDirectory

ROUNDS = "rounds.jsonl"
SPENT = ("released", "epsilon", "delta", "certified")
PART = 1 << 20  # bytes of a file that are read at a time


def runs_of(folder: Path) -> dict[str, Path]:
    """The run directories that the folder is or holds, by their names below it; newest first."""
    begun: dict[Path, float] = {}
    for run in below(folder) if folder.is_dir() else ():  # a run that begins has no folder yet
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            last = run.path / "schedule.npy"  # unless it is damaged, or begins
            file = last if last.exists() else run.path / "config.toml"
            begun[run.path] = file.stat().st_mtime
    newest = sorted(begun, key=lambda one: begun[one], reverse=True)
    alone = folder.resolve().name
    return {alone if one == folder else str(one.relative_to(folder)): one for one in newest}


def about(name: str, folder: Path) -> Record:
    """What a page shows of a run beside its rounds; of one that is damaged, what is."""
    run = Seen(folder, brief=True)
    try:
        RunDirectory(folder).require_fixed()
        run.require_unchanged()
        told = _settings(folder, (folder / "config.toml").stat().st_mtime_ns)
        state, _, why = run.state.partition(": ")
        summary = run.summary or {}
    except InputError as error:
        return {"name": name, "state": "damaged", "why": str(error)}
    again = run.again if state == "unfinished" else ""
    found = {"name": name, "state": state, "why": why, "again": again, **told}
    with contextlib.suppress(FileNotFoundError):  # before its first round
        found["size"] = _place((folder / ROUNDS).stat())
    spent = {one: summary["privacy"].get(one) for one in SPENT} if "privacy" in summary else None
    return found | {"stopped": summary.get("stopped", ""), "note": run.note, "spent": spent}


@lru_cache(256)
def _settings(folder: Path, changed: int) -> Record:
    """How many rounds the config, which was last changed then, asks for; and all that it sets."""
    config = Seen(folder).config
    return {"total": config.federation.rounds, "card": [*settings(config).items()]}


def _place(of: os.stat_result, at: int | None = None) -> str:
    """A place in a file, its end unless given, with what tells the file from what replaces it."""
    return f"{of.st_ino}-{of.st_size if at is None else at}"


def rounds_since(folder: Path, since: str) -> Record:
    """What was appended to rounds.jsonl after the place that an earlier answer named `at`; from its
    start where that is no place of this file. A line that is not whole is left for the next look.
    """
    try:
        file = os.fdopen(regular(folder / ROUNDS), "rb")
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
