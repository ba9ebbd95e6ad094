"""Requests to stop, which a signal handler passes to the thread that waits for clients."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from flwr.supercore.exit import add_exit_handler

from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.signals import told

SAVING = 20.0  # maximum seconds to wait until the state is saved
_asked: list[int] = []
_event = threading.Event()


def ask(number: int) -> None:
    """Request to stop: the next `pause` raises Interrupted with this signal number."""
    _asked.append(number)
    _event.set()


def forget() -> None:
    """Remove all requests, at the start of a new run."""
    _event.clear()
    _asked.clear()


def pause(seconds: float) -> None:
    """Sleep, and raise Interrupted if there is a request to stop or the program is ending."""
    if _event.wait(seconds):
        raise Interrupted(_asked[0])
    if not threading.main_thread().is_alive():
        raise Interrupted(signal.SIGTERM)


@contextlib.contextmanager
def on_signals() -> Iterator[None]:
    """Convert the signals that end Flower's process to requests to stop.

    At the end, a request becomes an InputError, because Flower reports errors but not interrupts.
    """
    forget()
    ended = threading.Event()

    def leave() -> None:
        ask(signal.SIGTERM)
        ended.wait(SAVING)

    try:
        if threading.current_thread() is threading.main_thread():
            with told(lambda number, frame: ask(number)):  # in a deployment, handle signals here
                yield
        else:  # in a simulation, Flower handles signals; its exit waits until the state is saved
            add_exit_handler(leave, run_before_force_exit=True)
            yield
    except Interrupted:
        raise InputError(
            "the run was stopped on request. To resume, run the same command again."
        ) from None
    finally:
        ended.set()
