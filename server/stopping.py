"""A request to stop, passed from a signal handler to the thread that waits for clients."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from flwr.supercore.exit import add_exit_handler

from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.signals import told

SAVING = 20.0  # seconds within which a state is saved
_asked: list[int] = []
_event = threading.Event()


def ask(number: int) -> None:
    """Interrupt the next wait, as this signal would."""
    _asked.append(number)
    _event.set()


def forget() -> None:
    """Drop all requests: a new run begins."""
    _event.clear()
    _asked.clear()


def pause(seconds: float) -> None:
    """Sleep; raise Interrupted if somebody asked to stop or the program is about to end."""
    if _event.wait(seconds):
        raise Interrupted(_asked[0])
    if not threading.main_thread().is_alive():
        raise Interrupted(signal.SIGTERM)


@contextlib.contextmanager
def on_signals() -> Iterator[None]:
    """Turn the signals that end Flower's process into requests to stop, and these into an
    InputError: Flower reports errors, but does not know interrupts."""
    forget()
    ended = threading.Event()

    def leave() -> None:
        ask(signal.SIGTERM)
        ended.wait(SAVING)

    try:
        if threading.current_thread() is threading.main_thread():
            with told(lambda number, frame: ask(number)):  # a deployment: handle them ourselves
                yield
        else:  # a simulation, where Flower handles signals: its exit waits until the state is saved
            add_exit_handler(leave, run_before_force_exit=True)
            yield
    except Interrupted:
        raise InputError(
            "the run was stopped on request: run the same command again to resume"
        ) from None
    finally:
        ended.set()
