"""The files of a run folder that no longer change once the run has begun."""

import contextlib
from pathlib import Path

import numpy as np
from torch import nn

from fedmuon.config.load import Config, dump, load
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import user_objects
from fedmuon.core.arrays import array_bytes, npy_bytes, tensor_bytes
from fedmuon.core.errors import InputError
from fedmuon.core.files import read_bytes
from fedmuon.data.federated import FederatedData
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.model_routes import routes, routing_of
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.gossip import Gossip
from fedmuon.optim.routing import RoutingTable
from fedmuon.optim.stage import ServerState
from fedmuon.runs.data_notes import names_of_clients
from fedmuon.runs.directory import CLOCK, RunDirectory
from fedmuon.tasks.networks import NetworkTask


def fixed_files(
    config: Config,
    data: FederatedData,
    experiment: Experiment,
    fresh: ServerState,
    directory: RunDirectory,
) -> dict[str, bytes]:
    """Return the files that depend only on the config and the data, by name.

    Args:
        config: The resolved config.
        data: The samples of all clients.
        experiment: The experiment, built from the config and the data.
        fresh: The server's state before the first round.
        directory: The run folder. Files of an older version that mean the same keep their content.
    """
    contents = {
        "config.toml": _config_bytes(config, directory.path / "config.toml"),
        "partition.npz": array_bytes(**_split(config, data)),
        "schedule.npy": npy_bytes(_schedule(experiment.plan)),
        "initial.safetensors": tensor_bytes(fresh.params),
    }
    contents |= names_of_clients(data)
    for stage in experiment.recipe.stages:
        if isinstance(stage, Gossip):
            contents["graph.npy"] = npy_bytes(np.stack(stage.graph.period))
    if experiment.plan.timetable is not None:
        contents[CLOCK] = array_bytes(**experiment.plan.timetable.arrays())
    if isinstance(experiment.task, NetworkTask):
        file = directory.path / "routes.txt"
        contents["routes.txt"] = _routes_bytes(config, experiment.task.module, file)
    if experiment.recipe.keeps_states and config.engine.name != "inline":
        contents |= directory.identity()
    return contents


def routing(config: Config, network: nn.Module) -> RoutingTable:
    """Return the optimizer of each parameter of a network, for the optimizer of the config."""
    table = routes(network, *routing_of(config))
    if user_objects(config).recipe is not None or reads(config, "local.route"):
        return table
    optimizer = config.local.recipe
    return RoutingTable(
        route._replace(matrices=None, optimizer=optimizer, reason="") for route in table
    )


def _config_bytes(config: Config, file: Path) -> bytes:
    """Return the content of config.toml for a config.

    If the existing file describes the same config, return its content. A file of an older version
    may contain fewer keys and still describe the same config.
    """
    text = dump(config).encode()
    if not file.exists():
        return text
    with contextlib.suppress(InputError):
        if dump(load(file)).encode() == text:
            return read_bytes(file)
    return text


def _split(config: Config, data: FederatedData) -> dict[str, np.ndarray]:
    """Return the indices of the train samples with their clients, and of all held-out samples."""
    split = {"train_index": data.train_index, "client": data.client, "test_index": data.test_index}
    if config.data.validation:
        split["validation_index"] = data.validation_index
    if data.public:  # these samples follow all others in the source
        split["public_index"] = data.source_size + np.arange(data.public)
    if config.data.client_test:
        tested = np.repeat(np.arange(config.federation.clients), np.diff(data.client_test_offsets))
        split |= {"client_test_index": data.client_test_index, "client_test_client": tested}
    return split


def _schedule(plan: RandomnessPlan) -> np.ndarray:
    """Return the clients of each round, or no clients if they are unknown before their round."""
    if plan.poisson or plan.biased:
        return np.empty((plan.rounds, 0), np.int64)
    return plan.schedule()


def _routes_bytes(config: Config, network: nn.Module, file: Path) -> bytes:
    """Return the content of routes.txt, which names the optimizer of each parameter.

    In run folders of older versions, routes.txt names Muon for every optimizer. This function keeps
    the content of such a file.
    """
    older = f"{routes(network, *routing_of(config))}\n".encode()
    if file.exists() and read_bytes(file) == older:
        return older
    return f"{routing(config, network)}\n".encode()
