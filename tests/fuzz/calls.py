"""One command line in this process, under a clock, and whether it ended as it may."""

import contextlib
import hashlib
import io
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.outcome import Outcome, done, other, refused

SECONDS, WALL = 10.0, 60.0  # of the processor, and of the clock, after which a case hangs
ESCAPE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # moves a terminal
ROOT = str(Path(__file__).resolve().parent.parent.parent)
USAGE = "Usage: "  # of the parser of command lines, which says more than a sentence


class TooLong(BaseException):
    """The case's time is up; no Exception, which the program might take for its own."""


class WouldStart(BaseException):
    """The case got as far as starting processes, which the ordinary mode leaves out."""


@dataclass(frozen=True)
class Ending:
    """Exit code (None: it never came to that), both streams, and what went wrong."""

    code: int | None
    out: str
    err: str
    trouble: str = ""


@contextlib.contextmanager
def clock(seconds: float) -> Iterator[None]:
    """Raise `TooLong` when this process has computed so long, or waited far longer."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = [signal.signal(one, ring) for one in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, WALL), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


def call(arguments: Sequence[str], place: Path, seconds: float = SECONDS) -> Ending:
    from fedmuon.experiments.cli import main

    code, trouble, out, err = None, "", io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(place)
    try:
        with clock(seconds), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(list(arguments))
            code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except WouldStart:
        trouble = "WouldStart"
    except TooLong:
        trouble = f"it hangs{_places(traceback.format_exc())}"
    except BaseException:
        trace = traceback.format_exc()
        trouble = f"traceback: {trace.strip().splitlines()[-1]:.200}{_places(trace)}"
    finally:
        os.chdir(before)
    return Ending(code, out.getvalue(), err.getvalue(), trouble)


def judged(
    ending: Ending, place: Path, before: Mapping[str, str], moving: Sequence[str] = ()
) -> Outcome:
    """Whether the call ended as it may, given the files there were before it; those named in
    `moving` a run in progress may change."""
    if ending.trouble == "WouldStart":
        return done("would start processes")
    if ending.trouble.startswith("it hangs") and trains(place):
        return done("still training")
    if ending.trouble:
        return other(ending.trouble)
    # The parser's own errors repeat the argument to the terminal that it was typed at.
    if not ending.err.startswith(USAGE) and ESCAPE.search(ending.out + ending.err):
        return other(f"control characters reach the terminal: {(ending.out + ending.err)!r:.300}")
    lines = ending.err.splitlines()
    odd = [line for line in lines if not line.startswith("fedmuon: ")]
    if ending.code == 0:
        return other(f"exit code 0, but on stderr: {odd[0]:.300}") if odd else done()
    if ending.code != 2:
        return other(f"exit code {ending.code}: {ending.err[-300:]}")
    if touched := changed(place, before, moving):
        return other(f"refused, but changed {touched[0]}: {ending.err:.300}")
    if ending.err.startswith(USAGE):
        return refused("usage")
    if not lines or odd:
        return other(f"exit code 2 without one sentence: {ending.err:.300}")
    if "Traceback" in ending.err:
        return other(f"a traceback: {ending.err:.300}")
    return refused(lines[-1])


def trains(place: Path) -> bool:
    """Whether a run below the folder has finished a round, so that it is slow, not stuck."""
    return any(file.stat().st_size for file in place.rglob("rounds.jsonl"))


def snapshot(place: Path) -> dict[str, str]:
    return {
        str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in place.rglob("*")
        if file.is_file()
    }


def changed(place: Path, before: Mapping[str, str], moving: Sequence[str] = ()) -> list[str]:
    after = snapshot(place)
    return [
        name
        for name, digest in before.items()
        if after.get(name) != digest and Path(name).name not in moving
    ]


def _places(trace: str) -> str:
    """The innermost lines of this house, and the very last."""
    places = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', trace)
    ours = [one for one in places if ROOT in one[0] and "tests/fuzz" not in one[0]][-2:]
    last = [one for one in places if "tests/fuzz" not in one[0]][-1:]
    named = dict.fromkeys(f"{Path(file).name}:{line}" for file, line, _ in [*ours, *last])
    return f" at {' > '.join(named)}"


def load() -> None:
    """Import what commands import, so that forked workers need not."""
    import transformers  # noqa: F401

    import fedmuon.clients.client_app
    import fedmuon.experiments.engines.deployment
    import fedmuon.experiments.engines.ray_engine
    import fedmuon.experiments.studies.training
    import fedmuon.experiments.suites.suite
    import fedmuon.server.server_app  # noqa: F401
    from fedmuon.tasks.decoder import Form, decoder

    decoder(Form(256, 4, 8, 1, 1))  # what builds it is imported at the first one


def bar() -> None:
    """In a worker: no process is started, no network asked, no kernel timed, no figure polished."""
    import logging
    import socket

    import torch

    import fedmuon.experiments.engines.deployment
    import fedmuon.experiments.engines.ray_engine
    import fedmuon.experiments.planning.pace
    import fedmuon.experiments.suites.suite
    from fedmuon.analysis.report import style
    from fedmuon.tasks import matrix

    torch.set_num_threads(1)
    for module, name in (
        (fedmuon.experiments.engines.deployment, "deploy"),
        (fedmuon.experiments.engines.ray_engine, "with_ray_grid"),
        (fedmuon.experiments.planning.pace, "probed"),
        (fedmuon.experiments.suites.suite, "Spread"),
    ):
        setattr(module, name, _would_start)
    socket.socket.connect = socket.getaddrinfo = _offline  # type: ignore[assignment]
    matrix._best = lambda work, device, repeats: 1.0
    style.image, style.DPI = partial(_sketch, style.image), 20
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def _would_start(*ignored: object, **named: object) -> None:
    raise WouldStart


def _offline(*ignored: object, **named: object) -> None:
    raise OSError(101, "Network is unreachable")


def _sketch(draw: Callable[..., bytes], figure: Any, *ignored: object) -> bytes:
    """Drawn once, coarsely: what cannot be drawn at all shows all the same."""
    if not hasattr(figure, "sketched"):
        figure.sketched = draw(figure, "png")
    return figure.sketched
