"""The wish to stop, carried from whoever hears it to the thread that waits for clients."""

import threading

from fedmuon.errors import Interrupted

_asked: list[int] = []
_event = threading.Event()


def ask(number: int) -> None:
    """Let whoever waits next be interrupted, as by this signal."""
    _asked.append(number)
    _event.set()


def forget() -> None:
    """Nobody wants to stop any more: a new run begins."""
    _event.clear()
    _asked.clear()


def pause(seconds: float) -> None:
    """Sleep, unless somebody wants to stop."""
    if _event.wait(seconds):
        raise Interrupted(_asked[0])
