"""The personal parameters of all clients, in the folder of a finished run."""

from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save

from fedmuon.core.files import Record
from fedmuon.optim.chain import PERSONAL
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES, PERSONAL_MODELS
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run


class PersonalModels(Observer):
    """Saves the personal parameters of the clients that took part, with client numbers."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the file. There is none if the nodes of the clients store these parameters."""
        memory, clients = self.run.experiment.client_states, self.run.config.federation.clients
        states = {client: memory.read(client, state.round) for client in range(clients)}
        models = {client: links[PERSONAL] for client, links in states.items() if PERSONAL in links}
        if not models:
            return {}, NO_FILES
        stacked = {
            name: np.stack([model[name][0].cpu().numpy() for model in models.values()])
            for name in next(iter(models.values()))
        }
        numbers = np.array(list(models), np.int64)
        return {}, {PERSONAL_MODELS: save({**stacked, "client": numbers})}
