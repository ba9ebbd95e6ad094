"""Processes that run the `fedmuon` command, quickly: forks of one that has everything loaded.

A fork is a process like any other: it has its own memory, locks and open files, and SIGKILL ends it
between two instructions. What it leaves out is the loading of Python and its libraries, during
which no file of a run is touched. `Nursery(real=True)` starts whole processes instead.
"""

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
HUNG = 124  # the exit code that stands for one that had to be ended


@dataclass(frozen=True)
class Ended:
    """How a process ended; a negative code is the signal that ended it."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass
class Child:
    """A running command. Until `wait` has returned, its number belongs to no other process."""

    number: int
    folder: Path
    reap: Any
    born: float = field(default_factory=time.monotonic)

    def send(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, sign)

    def wait(self, seconds: float = 60.0) -> Ended:
        """Its end; it is killed, and ends with `HUNG`, if that takes too long."""
        code = self.reap(self.number, seconds)
        if code is None:
            self.send(signal.SIGKILL)
            self.reap(self.number, 10.0)
            code = HUNG
        out, err = (
            (self.folder / name).read_text(encoding="utf-8", errors="replace")
            for name in ("out", "err")
        )
        shutil.rmtree(self.folder)
        return Ended(code, out, err, time.monotonic() - self.born)


class Nursery:
    """Starts children; `nursery()` makes one and ends it."""

    def __init__(self, place: Path, real: bool = False, quick: bool = False) -> None:
        self.place = place
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._parent = None if real else self._begin(["quick"] if quick else [])

    def start(
        self,
        arguments: Sequence[str],
        tamper: Mapping[str, Any] | None = None,
        real: bool = False,
        environment: Mapping[str, str] | None = None,
        at: Path = ROOT,
    ) -> Child:
        """`fedmuon ARGUMENTS`, said in the folder `at`, in a process of its own, with what `tamper`
        does to it."""
        folder = Path(tempfile.mkdtemp(prefix="said-", dir=self.place))
        order = {"arguments": list(arguments), "folder": str(folder), "at": str(at),
                 "tamper": dict(tamper or {})}  # fmt: skip
        if self._parent is None or real or environment:
            number = self._spawn(order, {**os.environ, **QUICK, **(environment or {})})
            return Child(number, folder, self._reap_spawned)
        return Child(self._ask({"start": order}), folder, self._reap_forked)

    def run(self, arguments: Sequence[str], seconds: float = 60.0, **how: Any) -> Ended:
        return self.start(arguments, **how).wait(seconds)

    def close(self) -> None:
        if self._parent is not None:
            assert self._parent.stdin and self._parent.stdout
            self._parent.stdin.close()
            self._parent.wait(10)
            self._parent.stdout.close()

    def _begin(self, how: list[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery", str(self.place), *how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **QUICK},
        )  # fmt: skip

    def _ask(self, question: Mapping[str, Any]) -> Any:
        assert self._parent and self._parent.stdin and self._parent.stdout
        self._parent.stdin.write(json.dumps(question) + "\n")
        self._parent.stdin.flush()
        return json.loads(self._parent.stdout.readline())

    def _reap_forked(self, number: int, seconds: float) -> int | None:
        return self._ask({"wait": number, "seconds": seconds})

    def _spawn(self, order: Mapping[str, Any], environment: Mapping[str, str]) -> int:
        folder = Path(order["folder"])
        command = [sys.executable, "-m", "fedmuon", *order["arguments"]]
        if order["tamper"]:
            command = [sys.executable, "-m", "tests.chaos.tamper", json.dumps(order)]
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=order["at"],
                env=environment, start_new_session=True,
            )  # fmt: skip
        self._running[process.pid] = process
        return process.pid

    def _reap_spawned(self, number: int, seconds: float) -> int | None:
        try:
            return self._running[number].wait(seconds)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def nursery(place: Path, real: bool = False, quick: bool = False) -> Iterator[Nursery]:
    one = Nursery(place, real, quick)
    try:
        yield one
    finally:
        one.close()


def serve(place: Path, quick: bool) -> None:
    """The process that forks: an order a line on stdin, an answer a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers goes to stdout
    _warm(place, quick)
    for line in sys.stdin:
        order = json.loads(line)
        said = _fork(order["start"]) if "start" in order else _wait(order["wait"], order["seconds"])
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def _warm(place: Path, quick: bool) -> None:
    import torch

    torch.set_num_threads(1)
    from fedmuon.analysis.report import style
    from fedmuon.experiments.studies import stability

    from . import jobs
    from .tamper import command

    # A suite times the machine's best product, and draws: both take longer than all else that it
    # does here, and neither touches a file. Pictures are written as ever, but nobody looks at them.
    stability.SIDE = 32
    style.image = lambda figure, kind: kind.encode()
    folder = Path(tempfile.mkdtemp(prefix="warm-", dir=place))
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        for number, job in enumerate(jobs.every(folder, quick)):
            command(job.start(folder / str(number)))
    shutil.rmtree(folder)
    gc.collect()
    gc.freeze()  # or every child's first collection copies what all of them share


def _fork(order: Mapping[str, Any]) -> int:
    """The number of a child that has come as far as the command's first line."""
    ready, tell = os.pipe()
    number = os.fork()
    if not number:
        from .tamper import child

        os.close(ready)
        child(order, tell)
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    return number


def _wait(number: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


if __name__ == "__main__":
    serve(Path(sys.argv[1]), "quick" in sys.argv[2:])
