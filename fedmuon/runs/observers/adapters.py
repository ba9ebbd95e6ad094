"""How far the average of low-rank adapters is from the mean of their products."""

from collections.abc import Mapping

from fedmuon.core.files import Record
from fedmuon.federated.experiment import Round
from fedmuon.optim.adapter_means import ADAPTERS, DISCARDED, ERROR
from fedmuon.optim.chain import States
from fedmuon.optim.recipe import aggregate_state
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run

# State of the server -> its tensor -> field of a record
FIELDS = {
    ADAPTERS: (ERROR, "adapter_error"),
    aggregate_state(): (DISCARDED, "adapter_discarded"),
}


def measures(states: States) -> Record:
    """Return the fields of a record for the measurements in the server's states."""
    return {
        field: float(states[state][tensor][0])
        for state, (tensor, field) in FIELDS.items()
        if tensor in states.get(state, {})
    }


class AdapterMeans(Observer):
    """Records the error or the discarded part of the last round's average of adapters."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def after(self, finished: Round, record: Record) -> Record:
        """Return the measurement, if the round is evaluated."""
        round, config = finished.state.round, self.run.config
        due = round % config.output.evaluate_every == 0 or round == config.federation.rounds
        return measures(finished.state.states) if due else {}

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the measurement of the last round for the summary."""
        return measures(state.states), NO_FILES
