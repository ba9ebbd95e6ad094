"""Ctrl-C, SIGTERM and SIGHUP unwind the program, so that it can save what it has and say so."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from fedmuon.core.errors import Interrupted

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Hearer = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first of these signals raises `Interrupted` in the main thread; a second one does what
    the system does, in case that saving hangs: files are written whole or not at all. Inside
    another of its kind it changes nothing, and under nohup a hangup stays ignored."""
    nested = signal.getsignal(signal.SIGINT) is _unwind
    if nested or threading.current_thread() is not threading.main_thread():
        yield
        return
    with told(_unwind):
        yield


@contextlib.contextmanager
def deferred(ask: Callable[[int], None]) -> Iterator[None]:
    """Within it the first of these signals is a wish that is told to `ask`: there is code, such as
    Ray's, that does not survive an exception raised in its midst. A second one is the system's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = []

    def hear(number: int, frame: FrameType | None) -> None:
        for end in _ours():
            signal.signal(end, signal.SIG_DFL)
        heard.append(number)
        ask(number)

    with told(hear, unless=heard):
        yield


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """What is within is not broken off: such a signal comes to whoever hears it when this ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    try:
        with told(lambda number, frame: heard.append(number)):
            yield
    finally:
        for number in dict.fromkeys(heard):
            signal.raise_signal(number)


@contextlib.contextmanager
def told(hear: Hearer, unless: Sequence[int] = ()) -> Iterator[None]:
    """These signals go to `hear`, and afterwards, unless it has heard one that is still to be
    heeded, to those who had them."""
    found = {end: signal.getsignal(end) for end in _ours()}
    before = {end: handler for end, handler in found.items() if handler is not None}  # not C's
    try:
        for end in before:
            signal.signal(end, hear)
        yield
    finally:
        for end, handler in before.items():
            if not unless:
                signal.signal(end, handler)


def _ours() -> list[signal.Signals]:
    """Those that end a program; under nohup a hangup is none."""
    return [end for end in ENDS if not _under_nohup(end)]


def _under_nohup(end: signal.Signals) -> bool:
    return end == signal.SIGHUP and signal.getsignal(end) is signal.SIG_IGN


def _unwind(number: int, frame: FrameType | None) -> None:
    ends = _ours()
    for end in ends:
        signal.signal(end, _heed_no_more)
    signal.raise_signal(number)  # what came at the same time is heard while somebody hears it
    for end in ends:
        signal.signal(end, signal.SIG_DFL)
    raise Interrupted(number)


def _heed_no_more(number: int, frame: FrameType | None) -> None:
    """Several signals at once are one wish."""
