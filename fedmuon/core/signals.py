"""Ctrl-C, SIGTERM and SIGHUP unwind the program, so that it can save what it has and say so."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from fedmuon.core.errors import Interrupted

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Hearer = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first of these signals raise `Interrupted` in the main thread.

    A second one does what the system does, in case saving hangs: files are written whole or not at
    all. Within another `interruptible` this changes nothing. Under nohup a hangup stays ignored.
    """
    nested = signal.getsignal(signal.SIGINT) is _unwind
    if nested or threading.current_thread() is not threading.main_thread():
        yield
        return
    with told(_unwind), _sent_again():
        yield


@contextlib.contextmanager
def _sent_again() -> Iterator[None]:
    """Send a signal again whose exception Python dropped, as it does in callbacks of weak
    references and in `__del__`."""
    before = sys.unraisablehook

    def hear(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, Interrupted):
            before(dropped)
            return
        for end in _ours():
            signal.signal(end, _unwind)
        # Not from here: this function's exceptions would be dropped as well.
        threading.Timer(0.01, os.kill, (os.getpid(), dropped.exc_value.number)).start()

    sys.unraisablehook = hear
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def deferred(ask: Callable[[int], None]) -> Iterator[None]:
    """Pass the first of these signals to `ask`; a second one does what the system does.

    Some code, such as Ray's, does not survive an exception that a signal raises inside it.
    """
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
    """Delay these signals until the block has ended."""
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
    """Let `hear` handle these signals. Their handlers before come back at the end, unless `unless`
    holds a signal by then."""
    found = {end: signal.getsignal(end) for end in _ours()}
    # None is a handler that was set in C.
    before = {end: handler for end, handler in found.items() if handler is not None}
    try:
        for end in before:
            signal.signal(end, hear)
        yield
    finally:
        for end, handler in before.items():
            if not unless:
                signal.signal(end, handler)


def _ours() -> list[signal.Signals]:
    """The signals that end a program. Under nohup, which ignores it, a hangup does not."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [end for end in ENDS if not (nohup and end == signal.SIGHUP)]


def _unwind(number: int, frame: FrameType | None) -> None:
    ends = _ours()
    for end in ends:
        signal.signal(end, lambda number, frame: None)  # several signals at once are one request
    signal.raise_signal(number)  # handle signals that arrive together while a handler is set
    for end in ends:
        signal.signal(end, signal.SIG_DFL)
    raise Interrupted(number)
