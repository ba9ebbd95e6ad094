"""Processes that a trial has started, however far down, and the temporary folders they speak of."""

import contextlib
import os
import re
from pathlib import Path

MARK = "FEDMUON_CHAOS"  # in the environment of all that a trial starts; its value names the trial
FOLDERS = re.compile(rb"/tmp/(?:[^\s\0:]*/)?(?:fm-ray-|fedmuon-)[A-Za-z0-9_]+")


def marked(mark: str) -> list[int]:
    """Numbers of those alive whose environment has this mark, and of their descendants."""
    wanted, found, parents = f"{MARK}={mark}\0".encode(), set(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if line[0] in b"ZX" or int(entry.name) == os.getpid():
                continue
            parents[int(entry.name)] = int(line[1])
            if wanted in (entry / "environ").read_bytes() + b"\0":
                found.add(int(entry.name))
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def command(number: int) -> bytes:
    """A process's command line, its words with zeros between them; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/cmdline").read_bytes()
    return b""


def places(mark: str) -> set[Path]:
    """Folders of runs, of Rays and of deployments, that marked processes name."""
    found: set[Path] = set()
    for number in marked(mark):
        with contextlib.suppress(OSError):
            told = Path(f"/proc/{number}/environ").read_bytes() + b"\0" + command(number)
            found |= {Path(os.fsdecode(one)) for one in FOLDERS.findall(told)}
    return found
