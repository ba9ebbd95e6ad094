"""Pass requests to stop from a signal handler to the thread that waits for clients."""

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
    """Request to stop: the next call of `pause` raises Interrupted with this signal number."""
    _asked.append(number)
    _event.set()


def forget() -> None:
    """Remove all requests, at the start of a new run."""
    _event.clear()
    _asked.clear()


def pause(seconds: float) -> None:
    """Sleep. Raise Interrupted if someone requested to stop, or if the program is ending."""
    if _event.wait(seconds):
        raise Interrupted(_asked[0])
    if not threading.main_thread().is_alive():
        raise Interrupted(signal.SIGTERM)


@contextlib.contextmanager
def on_signals() -> Iterator[None]:
    """Within this block, treat a signal that would end the process as a request to stop.

    If the block is interrupted by a request, raise an InputError, because Flower reports only
    errors to the user.
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
