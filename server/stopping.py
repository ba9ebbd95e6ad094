"""The wish to stop, carried from whoever hears it to the thread that waits for clients."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.signals import told

SAVING = 20.0  # seconds within which a state is saved
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
    """Sleep, unless somebody wants to stop or the program is about to end."""
    if _event.wait(seconds):
        raise Interrupted(_asked[0])
    if not threading.main_thread().is_alive():
        raise Interrupted(signal.SIGTERM)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """The signals that end Flower's process are wishes to stop, and then the user's error: Flower
    reports errors, but knows nothing of interrupts."""
    forget()
    try:
        if threading.current_thread() is threading.main_thread():
            with told(lambda number, frame: ask(number)):  # a deployment: they are ours meanwhile
                yield
        else:
            with _waited_for():
                yield
    except Interrupted:
        raise InputError("it was asked to stop: run the same command again to go on") from None


@contextlib.contextmanager
def _waited_for() -> Iterator[None]:
    """In a simulation Flower handles signals in another thread: its exit waits for the server."""
    from flwr.supercore.exit import add_exit_handler

    ended = threading.Event()

    def leave() -> None:
        ask(signal.SIGTERM)
        ended.wait(SAVING)

    add_exit_handler(leave, run_before_force_exit=True)
    try:
        yield
    finally:
        ended.set()
