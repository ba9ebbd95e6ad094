"""The memory of the processes in which an engine runs clients."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from fedmuon.core.files import Record
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES
from fedmuon.runs.observers.observer import Observer


@runtime_checkable
class Measured(Protocol):
    """An engine that runs clients in separate processes and measures their memory."""

    def memory(self) -> list[Record]:
        """Return the maximum memory of each client process so far, in bytes."""
        ...


class WorkerMemory(Observer):
    """Adds the maximum memory of each client process to the summary."""

    def __init__(self, engine: Measured) -> None:
        self.engine = engine

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the memory of the processes, if there are any."""
        workers = self.engine.memory()
        return ({"workers": [*workers]} if workers else {}), NO_FILES
