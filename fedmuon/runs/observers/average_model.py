"""The average of the models after the last rounds, which is often better than the last model.

In a private run, all these models are released, so their average costs no further privacy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedmuon.core.arrays import tensor_bytes
from fedmuon.core.files import Record
from fedmuon.federated.experiment import Round
from fedmuon.optim.stage import ServerState
from fedmuon.runs.checkpoints import stored_by_observers
from fedmuon.runs.directory import AVERAGE_MODEL, NO_FILES
from fedmuon.runs.observers.evaluation import evaluate
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run
from fedmuon.tasks.base import Params

PREFIX = "average."  # of the names of tensors in a checkpoint


class AverageModel(Observer):
    """Averages the models after the last rounds, saves the average, and evaluates it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        rounds = run.config.federation.rounds
        self.first = rounds - averaged_rounds(run.config.output.average, rounds) + 1
        # The sums in float64 after the last two rounds. If the run is interrupted before the record
        # of a round is written, the checkpoint is that of the round before.
        self.sums: dict[int, Params] = {}

    def begin(self, state: ServerState, earlier: Sequence[Record]) -> None:
        """Restore the sum of the models from the checkpoint."""
        self.sums = {state.round: stored_by_observers(self.run.directory, PREFIX)}

    def after(self, finished: Round, record: Record) -> Record:
        """Add the model of a round. The record of the round has no more fields."""
        number, before = finished.state.round, self.sums[finished.state.round - 1]
        summed: Params = {}
        if number >= self.first:
            params = finished.state.params
            summed = {name: value.cpu().double() + before.get(name, 0.0)
                      for name, value in params.items()}  # fmt: skip
        self.sums = {number - 1: before, number: summed}
        return {}

    def tensors(self, state: ServerState) -> Params:
        """Return the sum of the models up to a state."""
        return {PREFIX + name: value for name, value in self.sums[state.round].items()}

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the results of the average, and its file.

        If a callback ended the run before the first averaged round, return nothing.
        """
        count = state.round - self.first + 1
        if count < 1:
            return {}, NO_FILES
        average = {
            name: (total / count).to(state.params[name])
            for name, total in self.sums[state.round].items()
        }
        scores = evaluate(self.run, replace(state, params=average))
        fields: Record = {f"average_{name}": value for name, value in scores.items()}
        return fields, {AVERAGE_MODEL: tensor_bytes(average)}


def averaged_rounds(share: float, rounds: int) -> int:
    """Return the number of rounds whose models are averaged: a share of all rounds, at least 1."""
    return max(1, round(share * rounds))
