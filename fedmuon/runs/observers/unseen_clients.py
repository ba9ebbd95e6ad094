"""The model on clients that never train, in evaluated rounds and at the end."""

from collections.abc import Mapping

from fedmuon.core.files import Record
from fedmuon.data.unseen import UNSEEN, VALIDATION
from fedmuon.federated.experiment import Round
from fedmuon.federated.rounds import begin
from fedmuon.federated.text_losses import client_losses, left_out_samples
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run

PREFIXES = {UNSEEN: "unseen", VALIDATION: "validation_clients"}


class UnseenClients(Observer):
    """Records the mean loss over unseen clients and over validation clients."""

    def __init__(self, run: Run) -> None:
        self.run = run
        task = run.experiment.task
        groups = {group: left_out_samples(run.config, task, group) for group in PREFIXES}
        self.groups = {group: part for group, part in groups.items() if part is not None}
        self.last: Record = {}

    def after(self, finished: Round, record: Record) -> Record:
        """Return the losses, if the record contains a train loss."""
        self.last = self._measured(finished.state) if "train_loss" in record else {}
        return self.last

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the losses of the final model, and the loss of the untrained model."""
        experiment, seed = self.run.experiment, self.run.config.federation.seed
        before = self._measured(begin(experiment.recipe, experiment.task, seed))
        losses = {
            f"{prefix}_loss_before": before[f"{prefix}_loss"]
            for prefix in PREFIXES.values()
            if f"{prefix}_loss" in before
        }
        return (self.last or self._measured(state)) | losses, NO_FILES

    def _measured(self, state: ServerState) -> Record:
        fields: Record = {}
        for group, part in self.groups.items():
            task = self.run.experiment.task
            losses = client_losses(task, state.params, part.samples, part.owners)
            fields |= losses.fields(PREFIXES[group])
        return fields
