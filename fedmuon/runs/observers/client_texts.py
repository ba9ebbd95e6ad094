"""The final language model on the held-out text of each client, and on that of unseen clients."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedmuon.core.files import Record
from fedmuon.data.unseen import UNSEEN
from fedmuon.federated.text_losses import ClientLosses, client_losses, left_out_samples
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import CLIENT_TEXTS, NO_FILES
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run

HEAD = ("client", "trains", "tokens", "loss", "perplexity", "accuracy")


class ClientTexts(Observer):
    """Writes a table with the loss per token on the held-out text of each client.

    A private run writes no table, because it would contain numbers of single clients without noise.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return means over the training clients, and the table of all clients."""
        experiment, data = self.run.experiment, self.run.data
        if experiment.recipe.private or not len(experiment.shards.held_out.labels):
            return {}, NO_FILES
        task, tests = experiment.task, experiment.shards.held_out
        owners = data.test_labels  # the label of a window of text is its client
        names = data.client_names or tuple(map(str, range(int(owners.max()) + 1)))
        losses = client_losses(task, state.params, tests, owners)
        rows = lines(losses, names, trains=True)
        if (part := left_out_samples(self.run.config, task, UNSEEN)) is not None:
            unseen = client_losses(task, state.params, part.samples, part.owners)
            rows += lines(unseen, part.names, trains=False)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([HEAD, *rows])
        return losses.fields("client_text"), {CLIENT_TEXTS: text.getvalue().encode()}


def lines(losses: ClientLosses, names: Sequence[str], trains: bool) -> list[tuple[Any, ...]]:
    """Return a line of the table for each client, without its head."""
    columns = zip(
        losses.clients.tolist(), losses.tokens.tolist(), losses.losses.tolist(),
        losses.scores["accuracy"].tolist(), strict=True,
    )  # fmt: skip
    return [
        (names[client], int(trains), int(tokens), loss, math.exp(loss), accuracy)
        for client, tokens, loss, accuracy in columns
    ]
