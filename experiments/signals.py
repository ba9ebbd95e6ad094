"""Ctrl-C, SIGTERM and SIGHUP unwind the program, so that it can save what it has and say so."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from fedmuon.errors import Interrupted

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first of these signals raises `Interrupted` in the main thread; a second one does what
    the system does, in case that saving hangs: files are written whole or not at all. Inside
    another of its kind it changes nothing."""
    nested = signal.getsignal(signal.SIGINT) is _unwind
    if nested or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.getsignal(end) for end in ENDS]
    for end in ENDS:
        signal.signal(end, _unwind)
    try:
        yield
    finally:
        for end, handler in zip(ENDS, before, strict=True):
            signal.signal(end, handler)


def _unwind(number: int, frame: FrameType | None) -> None:
    for end in ENDS:
        signal.signal(end, signal.SIG_DFL)
    raise Interrupted(number)
