"""Whether run folders of an earlier commit can be shown and resumed with this tree's code.

    python -m tests.architecture.old_folders
    python -m tests.architecture.old_folders --base main

The earlier commit writes finished runs, and runs and suites that it is told to stop (SIGINT) after
their first lines. This tree then shows each folder and resumes it. A resumed folder must have the
digests of one that the earlier commit wrote without a stop. The noise of a private run is never the
same, so there each client's epsilon is compared: the round that the stop cut off counts twice. The
exit code is 0 if all is right.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .evidence import BASE, LIMIT, ROOT, environment, fedmuon, read, worktree

SMALL = [
    *("data.name=synthetic", "data.train=90", "data.test=60", "local.lr=0.05", "local.steps=2"),
    *("federation.clients=6", "federation.per-round=3"),
]
PRIVATE = ["privacy.noise=1.0", "privacy.lot=8", "local.recipe=dp-muon"]


def settings(*more: str) -> list[str]:
    return [word for one in (*SMALL, *more) for word in ("--set", one)]


@dataclass(frozen=True)
class Folder:
    """A command, the files whose lines show its progress, and the lines after which to stop it."""

    words: list[str]
    progress: str = "rounds.jsonl"
    stop: int = 0
    ledger: bool = False


FOLDERS = {
    "plain": Folder(["run", *settings("federation.rounds=4")]),
    "interrupted": Folder(
        ["run", *settings("federation.rounds=3000", "output.checkpoint-every=7")], stop=20
    ),
    "private": Folder(["run", *settings("federation.rounds=4", *PRIVATE)], ledger=True),
    "private-stopped": Folder(
        ["run", *settings("federation.rounds=900", *PRIVATE)], stop=9, ledger=True
    ),
    "stability": Folder(["stability", *settings("federation.rounds=4", "stability.trials=3")]),
    "suite": Folder(["suite", "A4", "--scale", "small"], "cells/*.json", stop=2),
    "suite-stability": Folder(["suite", "A2", "--scale", "small"]),
    "suite-training": Folder(["suite", "rank", "--scale", "small"], "cells/*.json", stop=2),
}


def main() -> int:
    """The exit code; prints a line for each folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.old_folders")
    parser.add_argument("--base", default=BASE, help=f"the commit that writes: {BASE}")
    parser.add_argument("--only", nargs="+", choices=FOLDERS, default=list(FOLDERS))
    asked = parser.parse_args()
    failed = 0
    with worktree(asked.base) as base, tempfile.TemporaryDirectory(prefix="folders-") as place:
        for name in asked.only:
            problem = tried(base, Path(place), name, FOLDERS[name])
            failed += bool(problem)
            print(f"{name:<16} {problem or 'shown, resumed, the same'}", flush=True)
    return int(failed > 0)


def tried(base: Path, place: Path, name: str, folder: Folder) -> str:
    """What is wrong, or nothing."""
    whole = place / f"{name}-whole"
    made = fedmuon(base, place, *folder.words, "--out", whole.name)
    if made.returncode:
        return f"the earlier commit fails:\n{made.stdout[-2000:]}"
    if folder.stop:
        lines = stopped(base, place, name, folder)
        if not folder.stop <= lines < count(whole, folder.progress):
            return f"could not be stopped in time: {lines} lines"
    else:
        (place / name).symlink_to(whole)
    suite = folder.words[0] == "suite"
    for words in (
        ["ls", "."] if suite else ["show", name],
        [*folder.words, "--out", name, "--resume"],
        ["report" if suite else "show", name],
    ):
        said = fedmuon(ROOT, place, *words)
        if said.returncode:
            return f"`fedmuon {words[0]}` fails:\n{said.stdout[-2000:]}"
    if folder.ledger:
        summaries = [(place / one / "summary.json").read_text() for one in (name, whole.name)]
        spent, least = (json.loads(one)["privacy"]["clients"] for one in summaries)
        sound = all(least[client] <= spent[client] < 1.05 * least[client] for client in least)
        return "" if sound and spent.keys() == least.keys() else f"{spent} spent, {least} due"
    found, expected = (read(place / one, [place / one]) for one in (name, whole.name))
    parts = [part for part in expected if found[part] != expected[part]]
    return f"differs in: {', '.join(parts)}" if parts else ""


def stopped(tree: Path, place: Path, name: str, folder: Folder) -> int:
    """Interrupt the command after its first lines; how many lines it has written."""
    work = subprocess.Popen(
        [sys.executable, "-m", "fedmuon", *folder.words, "--out", name],
        cwd=place,
        env=environment(tree),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + LIMIT
    while work.poll() is None and time.monotonic() < until:
        if count(place / name, folder.progress) >= folder.stop:
            work.send_signal(signal.SIGINT)
            break
        time.sleep(0.02)
    work.wait(LIMIT)
    return count(place / name, folder.progress)


def count(folder: Path, progress: str) -> int:
    """The lines that are in these files so far."""
    return sum(len(file.read_text().splitlines()) for file in folder.glob(progress))


if __name__ == "__main__":
    raise SystemExit(main())
