"""The callbacks of the user, which may end a run."""

from fedmuon.core.files import Record
from fedmuon.optim.stage import ServerState
from fedmuon.runs.callbacks import Callback
from fedmuon.runs.observers.observer import Observer


class UserCallback(Observer):
    """Calls one callback after each round and at the end."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback

    def react(self, record: Record, state: ServerState) -> str:
        """Call the callback, and return its reason to end the run, if it has one."""
        return str(self.callback.on_round(record, state) or "")

    def close(self, summary: Record) -> None:
        """Pass the summary to the callback."""
        self.callback.on_end(summary)
