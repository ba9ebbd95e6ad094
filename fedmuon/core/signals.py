"""Handling of Ctrl-C, SIGTERM and SIGHUP, so that the program can save its state before it ends."""

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
    """Within this context, the first Ctrl-C, SIGTERM or SIGHUP raises `Interrupted`.

    `Interrupted` is raised in the main thread. A second signal ends the program at once, in case
    saving hangs. Even then, no file is damaged, because files are written completely or not at all.
    An `interruptible` inside another has no effect. Under nohup, SIGHUP stays ignored.
    """
    nested = signal.getsignal(signal.SIGINT) is _unwind
    if nested or threading.current_thread() is not threading.main_thread():
        yield
        return
    with told(_unwind), _sent_again():
        yield


@contextlib.contextmanager
def _sent_again() -> Iterator[None]:
    """Within this context, send a signal again if Python dropped the signal's exception.

    Python drops exceptions that occur in callbacks of weak references and in `__del__`.
    """
    before = sys.unraisablehook

    def hear(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, Interrupted):
            before(dropped)
            return
        for end in _ours():
            signal.signal(end, _unwind)
        _later(dropped.exc_value.number)  # exceptions in this function are dropped, too

    sys.unraisablehook = hear
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def deferred(ask: Callable[[int], None]) -> Iterator[None]:
    """Within this context, call `ask` for the first signal instead of raising an exception.

    A second signal ends the program. Some code, such as Ray, fails if a signal raises an exception
    inside it.
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
    """Delay signals until this context ends, so that its code is never interrupted."""
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
    """Within this context, call the function `hear` for each signal that would end the program.

    At the end, the previous handlers of the signals are restored. However, if `unless` then
    contains a signal, the handlers are not restored.
    """
    handlers = {end: signal.getsignal(end) for end in _ours()}
    # None stands for a handler that was set in C.
    before = {end: handler for end, handler in handlers.items() if handler is not None}
    try:
        for end in before:
            signal.signal(end, hear)
        yield
    finally:
        for end, handler in before.items():
            if not unless:
                signal.signal(end, handler)


def _ours() -> list[signal.Signals]:
    """Return the signals that end a program.

    SIGHUP is left out if the program ignores SIGHUP, as under nohup.
    """
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [end for end in ENDS if not (nohup and end == signal.SIGHUP)]


def _unwind(number: int, frame: FrameType | None) -> None:
    if _importing(frame):
        # An exception here would leave a module half imported, and torch hides exceptions of numpy.
        _later(number)
        return
    ends = _ours()
    for end in ends:
        signal.signal(end, lambda number, frame: None)  # signals that arrive together count once
    signal.raise_signal(number)  # let Python handle all pending signals with this handler
    for end in ends:
        signal.signal(end, signal.SIG_DFL)
    raise Interrupted(number)


def _importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported in this frame or in one of its callers."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _later(number: int) -> None:
    """Send a signal to this process again in a moment, from another thread."""
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
