"""Personal models of clients, and their results on each client's own test samples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from fedmuon.config.load import Config
from fedmuon.config.methods import has
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import user_objects
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.evaluation import risk
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import client_updates, first_model, received_message
from fedmuon.optim.chain import PERSONAL
from fedmuon.optim.personal_parameters import PersonalParameters
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import ServerState, Stage
from fedmuon.optim.user_stage import has_custom_stage, unguarded
from fedmuon.tasks.base import Params, Task
from fedmuon.tasks.matrix import MatrixTask


def tuning_steps(config: Config) -> int:
    """Return the number of local steps that each client takes before it tests the final model."""
    return config.output.fine_tune if reads(config, "output.fine-tune") else 0


def tests_personal_models(config: Config, recipe: Recipe) -> bool:
    """Return whether the run finally tests a personal model of each client."""
    return bool(config.data.client_test) and (tuning_steps(config) > 0 or recipe.personalizes)


def personal_model(experiment: Experiment, state: ServerState, client: int) -> Params:
    """Return the client's personal model.

    The model is the client's complete own model, or the server's model with the client's personal
    parameters. If the client never took part, its personal parameters are those of the initial
    model.
    """
    split = _leaving_parameters(experiment.recipe)
    start = state.params if split else first_model(experiment.task, experiment.plan.seed)
    personal = experiment.client_states.read(client, state.round).get(PERSONAL, {})
    return {
        name: personal[name].to(value) if name in personal else value
        for name, value in start.items()
    }


def fine_tuned(
    experiment: Experiment, state: ServerState, clients: Sequence[int], steps: int
) -> Iterator[Params]:
    """Fine-tune the server's model on each client's samples, and yield the clients' models.

    Personal parameters start from the client's own values. Each group of clients has at most the
    size of a round's cohort. The random draws are those of an additional round after the last
    round. The step sizes are the same as in the last round.
    """
    plan, memory = experiment.plan, experiment.client_states
    sent = received_message(experiment.recipe, replace(state, round=plan.rounds))
    # A client's rule would turn the model into a reply, and most stages would change the reply.
    stages = tuple(_leaving_parameters(experiment.recipe))
    recipe = replace(experiment.recipe, client=None, returned=(), stages=stages)
    last = plan.factor_at(max(0, state.round - 1))
    factor = None if plan.factor is None else lambda round: last
    plan = replace(plan, steps=steps, epochs=0.0, factor=factor)
    for start in range(0, len(clients), plan.per_round):
        group = clients[start : start + plan.per_round]
        states = {
            client: memory.read(client, state.round) for client in group if recipe.keeps_states
        }
        pairs = [(client, experiment.shards[client]) for client in group]
        for reply in client_updates(recipe, experiment.task, plan, pairs, sent, states):
            yield reply.params | reply.own.get(PERSONAL, {})


def personal_means(
    experiment: Experiment, state: ServerState, fine_tune: int = 0
) -> dict[str, np.ndarray]:
    """Return the mean test loss and the mean scores of each client that has test samples.

    Each client tests its personal model. With `fine_tune` > 0, each client instead tests the
    server's model after `fine_tune` local steps on its own samples.
    """
    tests = experiment.shards.client_test
    assert tests is not None
    results: dict[str, list[float]] = {}
    clients = np.flatnonzero(np.diff(tests.offsets)).tolist()
    if fine_tune:
        models = fine_tuned(experiment, state, clients, fine_tune)
    else:
        models = (personal_model(experiment, state, client) for client in clients)
    for client, model in zip(clients, models, strict=True):
        samples = tests[client].data
        measured = risk(experiment.task, model, samples.inputs, samples.labels)
        for name, values in {"loss": measured.loss, **measured.scores}.items():
            results.setdefault(name, []).append(float(values[0]))
    return {name: np.array(values) for name, values in results.items()}


def require_personal(config: Config, recipe: Recipe, task: Task) -> None:
    """Raise an error if a pattern of personal parameters matches nothing, or if all are personal.

    The patterns are those of [local] personal, or those of a stage that was passed.
    """
    built_in, name = user_objects(config).recipe is None, config.local.recipe
    stage = next(map(unguarded, _leaving_parameters(recipe)), None)
    patterns = stage.patterns if isinstance(stage, PersonalParameters) else ()
    of_key = built_in and has(name, "personal parameters")
    if of_key and not patterns:
        raise InputError(
            f"[local] recipe = '{name}' needs to know which part of the model stays with each "
            "client. Set [local] personal, for example personal = 'head.*'."
            + (
                " Also set [task] name = 'network', because the model of the task 'matrix' has "
                "only one parameter."
            )
            * isinstance(task, MatrixTask)
        )
    if stage is None and not has_custom_stage(recipe):
        return
    names = list(task.initial(generator(0, Draw.INITIAL)))
    personal = [name for name in names if recipe.is_personal(name)]
    examples = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    key = "[local] personal" if of_key else "a stage of the recipe"
    if stage is not None and not of_key:
        key = f"the stage {type(stage).__name__}"
    if len(names) == 1 and (patterns or personal):
        raise InputError(
            f"{key} splits the model, but this model has only one parameter, {examples}. Set "
            f"[task] name = 'network', or leave {'personal' if of_key else 'the stage'} out."
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"the pattern {pattern!r} in {key} matches no parameter of the model. "
                f"The parameters are {examples}. Use patterns that match some of these names."
            )
    if stage is not None and not personal:
        raise InputError(
            f"{key} stores the client state {PERSONAL!r}, which is for parameters that stay with "
            "the client, but its `is_personal` returns True for no parameter of the model "
            f"({examples}). Correct `is_personal`, or rename the state."
        )
    if len(personal) == len(names):
        whole = f"{key} = {', '.join(patterns)}" if of_key else f"`is_personal` of {key}"
        raise InputError(
            f"{whole} matches every parameter of the model ({examples}), so clients would share "
            "nothing. Leave out at least one parameter."
        )


def _leaving_parameters(recipe: Recipe) -> list[Stage]:
    """Return the stages that leave parameters with each client."""
    return [stage for stage in recipe.stages if PERSONAL in stage.stores]
