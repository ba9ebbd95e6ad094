"""The simulated devices of `[devices]`: which clients were selected, and when each round ended."""

from collections.abc import Mapping

from fedmuon.core.files import Record
from fedmuon.federated.clock import Timetable
from fedmuon.federated.experiment import Round
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES
from fedmuon.runs.observers.observer import Observer


class SimulatedTime(Observer):
    """Records the selected clients, the simulated seconds, and the staleness of late replies."""

    def __init__(self, clock: Timetable) -> None:
        self.clock = clock

    def after(self, finished: Round, record: Record) -> Record:
        """Return the fields about the devices. The participants are the selected clients."""
        clock, number = self.clock, finished.state.round - 1
        fields = {
            "participants": clock.selected[number].tolist(),
            "simulated_seconds": float(clock.seconds[number]),
        }
        if clock.versions:
            fields["staleness"] = (number - clock.versions[number]).tolist()
        return fields

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the simulated time at which the last round ended."""
        return {"simulated_seconds": float(self.clock.seconds[state.round - 1])}, NO_FILES
