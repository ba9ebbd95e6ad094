"""The models of single clients, and how they do on their clients' own test samples."""

import numpy as np

from fedmuon.config.load import Config
from fedmuon.federated.rounds import Experiment, ServerState, first_model, risk
from fedmuon.optim.chain import PERSONAL
from fedmuon.optim.recipe import Recipe
from fedmuon.tasks.base import Params


def tests_personal_models(config: Config, recipe: Recipe) -> bool:
    """Whether the end of the run tests a model of each client beside the server's."""
    return bool(config.data.client_test) and recipe.personalizes


def needs_client_states(config: Config, recipe: Recipe) -> bool:
    """Whether the server then needs what belongs to the clients."""
    return tests_personal_models(config, recipe) and recipe.keeps_states


def personal_model(experiment: Experiment, state: ServerState, client: int) -> Params:
    """A client's own model, or the server's with the client's own part: as in the first model if
    the client never took part."""
    whole = experiment.recipe.personal  # else the state is a whole model
    start = state.params if whole else first_model(experiment.task, experiment.plan.seed)
    own = experiment.client_states.read(client, state.round).get(PERSONAL, {})
    return {name: own[name].to(one) if name in own else one for name, one in start.items()}


def personal_means(experiment: Experiment, state: ServerState) -> dict[str, np.ndarray]:
    """The mean loss and scores [C] of each client that has test samples, for its own model."""
    tests = experiment.shards.client_test
    assert tests is not None
    found: dict[str, list[float]] = {}
    for client in np.flatnonzero(np.diff(tests.offsets)).tolist():
        own = tests[client].data
        model = personal_model(experiment, state, client)
        measured = risk(experiment.task, model, own.inputs, own.labels)
        for name, values in {"loss": measured.loss, **measured.scores}.items():
            found.setdefault(name, []).append(float(values[0]))
    return {name: np.array(values) for name, values in found.items()}
