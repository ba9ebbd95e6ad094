"""`python -m tests.soak [--quick]`: long runs; memory, files, threads and disk must not grow.

10,000 rounds in this process, 1,000 on Ray, 50 in a deployment, all of a tiny task. Each quantity
is looked at along the way; its slope after a warm-up is printed with a 95% interval.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .chaos import jobs
from .chaos.nursery import nursery
from .chaos.processes import MARK, marked, places

ROUNDS = {"inline": 10_000, "ray": 1000, "deployment": 50}
QUICK = {"inline": 600}
SAMPLES, WARM = 200, 0.3  # looks along a run, and the share of it that does not count
LONGEST = 3600.0  # seconds of one run
PAGE = os.sysconf("SC_PAGE_SIZE")
# What a whole run may add without being called growth: MB, files, threads, MB.
ALLOWED = {"memory": 8.0, "files": 2.0, "threads": 2.0, "disk": 4.0}
AGAIN = 3  # times at most
SLOWER = 1.5  # the last rounds against the first ones after the warm-up
MORE = 1.1  # their lines in rounds.jsonl


@dataclass(frozen=True)
class Look:
    """What a run's processes hold after so many rounds."""

    round: int
    memory: float  # MB
    files: int
    threads: int
    disk: float  # MB of temporary folders
    busy: float  # seconds of a processor


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    engine: str
    what: str
    said: str
    sound: bool


def main() -> int:
    """The exit code: 1 if anything grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only some hundred rounds inline")
    parser.add_argument("--only", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    asked = parser.parse_args()
    wanted = QUICK if asked.quick else {engine: ROUNDS[engine] for engine in asked.only}
    lines = [line for engine, rounds in wanted.items() for line in repeated(engine, rounds)]
    for line in lines:
        print(f"{line.engine:<12}{line.what:<10}{line.said}{'' if line.sound else '  GROWS'}")
    return int(not all(line.sound for line in lines))


def repeated(engine: str, rounds: int) -> list[Line]:
    """The same, again if nothing but the time of a round grows: other work on the machine may slow
    the later rounds, but hardly each time, and what grows does so each time."""
    lines = soaked(engine, rounds)
    for _ in range(AGAIN):
        if {line.what for line in lines if not line.sound} != {"seconds"}:
            break
        lines = soaked(engine, rounds)
    return lines


def soaked(engine: str, rounds: int) -> list[Line]:
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        looks = _run(engine, rounds, place)
        return [*judged(engine, looks), *_told(engine, place / "out", looks)]
    finally:
        for number in marked(str(place)):
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        shutil.rmtree(place)


def _run(engine: str, rounds: int, place: Path) -> list[Look]:
    changes = (
        f"engine.name={engine}", f"federation.rounds={rounds}", "federation.clients=3",
        "output.checkpoint-every=10", "output.evaluate-every=10",
    )  # fmt: skip
    job, out = jobs.run(*changes), place / "out"
    (place / "tmp").mkdir()
    with nursery(place, real=True) as children:
        marks = {MARK: str(place), "TMPDIR": str(place / "tmp")}
        child = children.start(job.start(out), environment=marks)
        looks = _watched(child.number, place, rounds)
        ended = child.wait(120)
    if ended.code or not looks:
        raise RuntimeError(
            f"{engine}: exit code {ended.code} after {len(looks)} looks: {ended.err}"
        )
    return looks


def _watched(number: int, place: Path, rounds: int) -> list[Look]:
    """A look about every `rounds / SAMPLES` rounds until the last one."""
    looks: list[Look] = []
    log, end = place / "out" / "rounds.jsonl", time.monotonic() + LONGEST
    while not (place / "out" / "summary.json").exists() and Path(f"/proc/{number}/fd").exists():
        done = log.read_bytes().count(b"\n") if log.exists() else 0
        if done >= (looks[-1].round if looks else 0) + max(1, rounds // SAMPLES):
            looks.append(_look(done, place))
        if time.monotonic() > end:
            raise TimeoutError(f"not done after {LONGEST:.0f} s")
        time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):  # it may have ended
            if os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
    return looks


def _look(done: int, place: Path) -> Look:
    pages = files = threads = busy = 0
    for number in marked(str(place)):
        with contextlib.suppress(OSError):
            entry = Path(f"/proc/{number}")
            pages += int((entry / "statm").read_text().split()[1])
            files += len(list((entry / "fd").iterdir()))
            tasks = list((entry / "task").iterdir())
            threads += len(tasks)
            busy += sum(int((one / "schedstat").read_text().split()[0]) for one in tasks)
    folders = {place / "tmp", *(one for one in places(str(place)) if place not in one.parents)}
    disk = sum(map(_size, folders))
    return Look(done, pages * PAGE / 1e6, files, threads, disk / 1e6, busy / 1e9)


def _size(folder: Path) -> int:
    total = 0
    for held, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(held, name).lstat().st_size
    return total


def judged(engine: str, looks: Sequence[Look]) -> list[Line]:
    """A line for each quantity: what a run adds to it, by a straight line through the looks."""
    kept = looks[int(WARM * len(looks)) :]
    at = np.array([look.round for look in kept], float)
    lines = []
    for what, allowed in ALLOWED.items():
        held = np.array([getattr(look, what) for look in kept], float)
        slope, error = _slope(at, held)
        low, high = (slope + sign * 1.96 * error for sign in (-1, 1))
        said = (
            f"{held[0]:.1f} -> {held[-1]:.1f}, {1000 * slope:+.4f} per 1000 rounds "
            f"[{1000 * low:+.4f}, {1000 * high:+.4f}]"
        )
        lines.append(Line(engine, what, said, low * looks[-1].round <= allowed))
    return lines


def _slope(at: np.ndarray, held: np.ndarray) -> tuple[float, float]:
    """The least-squares slope and its standard error, for looks whose errors are correlated: with
    lag-one correlation r they tell as much as (1 - r) / (1 + r) of them alone would."""
    centred = at - at.mean()
    slope = float(centred @ held / (centred @ centred))
    rest = held - held.mean() - slope * centred
    spread = float(rest @ rest)
    if len(at) < 4 or spread < 1e-18:
        return slope, 0.0
    r = min(max(float(rest[1:] @ rest[:-1]) / spread, 0.0), 0.99)
    return slope, float(np.sqrt(spread / (len(at) - 2) / (centred @ centred) * (1 + r) / (1 - r)))


def _told(engine: str, out: Path, looks: Sequence[Look]) -> list[Line]:
    """The length of rounds.jsonl's lines and the seconds of a round: early against late."""
    lines = (out / "rounds.jsonl").read_text().splitlines()
    early, late = _parts(len(lines))
    quick = [float(np.quantile(part, 0.25)) for part in _seconds(engine, lines, looks)]
    length = [float(np.mean([len(line) + 1 for line in lines[part]])) for part in (early, late)]
    slower, longer = quick[1] <= SLOWER * quick[0] + 1e-4, length[1] <= MORE * length[0]
    told = f"{length[0]:.1f} -> {length[1]:.1f} bytes a round, {len(lines)} rounds"
    return [
        Line(engine, "seconds", f"{quick[0]:.5f} -> {quick[1]:.5f} a round", slower),
        Line(engine, "log", told, longer),
    ]


def _parts(count: int) -> tuple[slice, slice]:
    quarter = max(1, count // 4)
    return slice(quarter, 2 * quarter), slice(count - quarter, None)


def _seconds(engine: str, lines: Sequence[str], looks: Sequence[Look]) -> list[np.ndarray]:
    """Seconds of early rounds and of late ones. One process is asked how long it was at work; of
    many, which come and go, the clock is: other work on the machine makes rounds longer, never
    shorter, so the quicker ones tell."""
    if engine == "inline":
        held = np.array([(look.round, look.busy) for look in looks])
        rounds, busy = np.diff(held, axis=0).T
        return [busy[part] / rounds[part] for part in _parts(len(rounds))]
    clock = np.diff([json.loads(line)["seconds"] for line in lines])
    return [clock[part] for part in _parts(len(lines))]


if __name__ == "__main__":
    sys.exit(main())
