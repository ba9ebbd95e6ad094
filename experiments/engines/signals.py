"""Ctrl-C, SIGTERM and SIGHUP unwind the program, so that it can save what it has and say so."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from fedmuon.errors import Interrupted

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first of these signals raises `Interrupted` in the main thread; a second one does what
    the system does, in case that saving hangs: files are written whole or not at all. Inside
    another of its kind it changes nothing, and under nohup a hangup stays ignored."""
    nested = signal.getsignal(signal.SIGINT) is _unwind
    if nested or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {end: signal.getsignal(end) for end in ENDS if not _under_nohup(end)}
    for end in before:
        signal.signal(end, _unwind)
    try:
        yield
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


@contextlib.contextmanager
def deferred(ask: Callable[[int], None]) -> Iterator[None]:
    """Within it the first of these signals is a wish that is told to `ask`: there is code, such as
    Ray's, that does not survive an exception raised in its midst. A second one is the system's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {end: signal.getsignal(end) for end in ENDS if not _under_nohup(end)}

    def hear(number: int, frame: FrameType | None) -> None:
        for end in before:
            signal.signal(end, signal.SIG_DFL)
        ask(number)

    for end in before:
        signal.signal(end, hear)
    try:
        yield
    finally:
        for end, handler in before.items():
            if signal.getsignal(end) is hear:
                signal.signal(end, handler)


def _under_nohup(end: signal.Signals) -> bool:
    return end == signal.SIGHUP and signal.getsignal(end) is signal.SIG_IGN


def _unwind(number: int, frame: FrameType | None) -> None:
    ends = [end for end in ENDS if not _under_nohup(end)]
    for end in ends:
        signal.signal(end, _heed_no_more)
    signal.raise_signal(number)  # what came at the same time is heard while somebody hears it
    for end in ends:
        signal.signal(end, signal.SIG_DFL)
    raise Interrupted(number)


def _heed_no_more(number: int, frame: FrameType | None) -> None:
    """Several signals at once are one wish."""
