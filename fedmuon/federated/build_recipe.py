"""Build the optimizer of a run from its config, and check custom optimizers in a trial round.

A custom optimizer or aggregate first runs one trial round on random tensors, before any samples are
read. The trial reports many errors early, with messages that name the required arguments and
results. The trial cannot find every error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from fedmuon.config.demands import private_recipe_problems
from fedmuon.config.incompatible import missing_noise
from fedmuon.config.load import Config
from fedmuon.config.methods import BUILT_IN, METHODS, PRIVATE, average_of, function_of, has
from fedmuon.config.registered import guard_of, packages_of, unusable
from fedmuon.config.schema import NEEDS, is_default, reads, unread_by_own_recipe
from fedmuon.config.user_objects import guard, make_named, user_objects
from fedmuon.core.choices import named
from fedmuon.core.errors import InputError, OwnError, plain
from fedmuon.core.registry import required_parameters, takes
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import attribute
from fedmuon.core.trial import trial
from fedmuon.optim.aggregator import Aggregator
from fedmuon.optim.aggregators import AGGREGATORS, as_aggregator
from fedmuon.optim.chain import (
    PERSONAL,
    Chain,
    Context,
    Link,
    Number,
    State,
    States,
    forbidden_gradient,
    visible,
)
from fedmuon.optim.client_privacy import ClientPrivacy
from fedmuon.optim.compression import Compression, compressor
from fedmuon.optim.low_rank import EncodedStates
from fedmuon.optim.orthogonalizers import (
    Orthogonalizer,
    as_map,
    as_orthogonalizer,
    differ,
    same,
    value_of_table,
)
from fedmuon.optim.personal_parameters import PersonalParameters
from fedmuon.optim.recipe import Recipe, aggregate_state, first_state, initial_states, shared_part
from fedmuon.optim.recipes import make_recipe
from fedmuon.optim.routing import FUSED, RoutingTable, routing_table
from fedmuon.optim.stage import Reply, Stage
from fedmuon.optim.user_recipe import as_recipe
from fedmuon.optim.user_stage import as_stages, has_custom_stage, require_stages, with_custom_stages
from fedmuon.privacy.mechanisms.client_level import ClientLevel
from fedmuon.tasks.base import Params, Points, Released, Task, split_statistics
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask

MOST_TURNS = 10**5  # optimize buffers for at most this number of steps, which takes seconds
# Aggregates that ignore the numbers of samples
UNWEIGHTED = named("federation.aggregate", lambda choice: "weighted mean" not in choice.facts)
STORED = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16)
Initial = dict[str, Callable[[Params], State]]  # state -> a function that returns its first value
LINK = (
    "The update function of a link must take (direction, state, context) and return (direction, "
    "state). With links.stateless, it must take (direction, context) and return a direction. "
    "Directions and states are mappings of names to tensors."
)
CLIENT_RULE = (
    "The clients' rule must take (received model, model, states, steps) and return (model, "
    "states). Both must be mappings of names to tensors, as in the arguments."
)
RULE = (
    "The server's rule must take (old, mean, states) and return (model, states). The returned "
    "model must be a mapping like old, and the returned states a mapping like states."
)


def build_recipe(
    config: Config, task: Task, lr: Number | None = None, regularization: Number | None = None
) -> Recipe:
    """Build the configured optimizer, with its aggregate, compression and client-level privacy."""
    brought, privacy, federation = user_objects(config), config.privacy, config.federation
    if brought.recipe is None:
        routed, orthogonalizer = _routed(config, task), user_map(config)
        centred = is_centred(config, task)
        table, local = config.orthogonalizer, config.local
        # Correlated noise allows only one client. The account counts the lots that this client
        # draws.
        turns = federation.rounds * local.steps, max(1, math.ceil(config.data.train / privacy.lot))
        recipe = make_recipe(
            *(local, table, lr, regularization, routed, privacy, orthogonalizer, centred),
            clients=federation.clients,
            joint_block=_joint_block(config, task),
            turns=(min(turns[0], MOST_TURNS), turns[1]),
        )
        recipe = replace(recipe, thread_safe=orthogonalizer is None)
        if local.recipe not in BUILT_IN:  # its links may store hidden state, too
            fixed = _tried_registered(config, task)
            recipe = replace(recipe, initial={**recipe.initial, **fixed}, thread_safe=False)
    else:  # its links may store hidden state between calls
        recipe = replace(_user_recipe(config, task), thread_safe=False)
    if isinstance(task, NetworkTask) and (
        recipe.mechanism is not None or privacy.level == "client"
    ):
        task.require_unmixed()
    # The default of the config does not replace the aggregate of a custom recipe. A config of
    # version 1.0 contains "mean" as its default.
    defaults = ("mean", average_of(config.local.recipe))
    if brought.recipe is None or federation.aggregate not in defaults:
        average = make_named(config, "aggregate", AGGREGATORS, (Aggregator,))
        within = None if brought.aggregate is None else guard(config, "aggregate")
        recipe = replace(recipe, aggregate=as_aggregator(average, within))
    hidden = recipe.mechanism is not None and recipe.mechanism.adjacency == "add-remove"
    if hidden and task.keyed:
        raise InputError(
            "[privacy] adjacency = 'add-remove' is not valid for a model with dropout. The "
            "dropout mask of a sample depends on the sample's position in its client's data, and "
            "removing one sample changes the positions of others. Set adjacency = 'zero-out', or "
            "remove the dropout."
        )
    if hidden and not recipe.aggregate.averages and federation.aggregate not in UNWEIGHTED:
        raise InputError(
            "a mechanism with adjacency = 'add-remove' hides how many samples a client has, but "
            "the aggregate of this recipe may reveal this number. Use the plain mean, or "
            "adjacency = 'zero-out'."
        )
    recipe = _with_own_stages(config, recipe, task)
    recipe = _with_compression(config, recipe)
    _require_countable(config, recipe, hidden)
    _require_personal(config, recipe, task)
    _require_public(config, recipe)
    _require_movable(config, recipe)
    if privacy.level != "client":
        return recipe
    if recipe.keeps_states or recipe.client is not None or recipe.counted:
        source = "your recipe" if brought.recipe else f"[local] recipe = '{config.local.recipe}'"
        raise InputError(
            "[privacy] level = 'client' clips only the model update of a client and adds noise "
            f"to it, but {source} also stores or sends other data of the client. Choose another "
            "recipe, for example fedavg, fedadam, local-muon or fedmuon."
        )
    for name in recipe.returned:
        if name not in recipe.sent:  # then its change is unknown and cannot be clipped
            raise InputError(
                f"[privacy] level = 'client' clips how much a client changes the state {name!r}, "
                f"but the server does not send this state to the clients. Add {name!r} to `sent` "
                "of your recipe."
            )
    if not recipe.aggregate.averages:
        raise InputError(
            "[privacy] level = 'client' releases the plain mean of clipped updates, but your "
            "recipe has its own aggregate. Remove the aggregate of your recipe."
        )
    level = ClientLevel(
        privacy.bound,
        privacy.noise,
        federation.per_round,
        federation.clients,
        privacy.trust,
        privacy.cohorts == "poisson",
        federation.seed if privacy.insecure_reproducible_noise else None,
        privacy.state_weight,
        privacy.noise_source,
        privacy.arithmetic,
        privacy.honest,
    )
    return replace(recipe, stages=(ClientPrivacy(level, recipe.returned), *recipe.stages))


def _with_own_stages(config: Config, recipe: Recipe, task: Task) -> Recipe:
    """Add the stages of the config, and check all custom stages in a trial round."""
    custom = make_named(config, "stage", values=(Stage, tuple, list))
    if custom is not None:
        recipe = with_custom_stages(recipe, as_stages(custom, guard(config, "stage")))
    if not has_custom_stage(recipe):
        return recipe
    if recipe.private or config.privacy.level == "client":
        raise InputError(
            "[federation] stage names your own stage, but the run is private, and the ledger does "
            "not know what your stage sends. Leave stage out, or set [privacy] noise = 0 and "
            "choose a recipe that is not private."
        )
    require_stages(recipe, task.initial(generator(0, Draw.INITIAL)))
    return recipe


def _with_compression(config: Config, recipe: Recipe) -> Recipe:
    """Add the compressors of [compression] to a recipe."""
    table = config.compression
    if table.uplink == table.downlink == "none":
        return recipe
    if _has_codecs(recipe):
        raise InputError(
            "[compression] cannot be combined with your recipe, because the codecs of the recipe "
            "already compress the messages. Remove the [compression] table or the codecs."
        )
    feedback = table.feedback if reads(config, "compression.feedback") else "none"
    if feedback == "ef21" and not recipe.aggregate.averages:
        raise InputError(
            "[compression] feedback = 'ef21' needs the plain mean, but your recipe has another "
            "aggregate. Set feedback = 'error'."
        )
    uplink, downlink = (
        compressor(name, table.share, table.levels, table.rank, table.iterations)
        for name in (table.uplink, table.downlink)
    )
    seed, clients = config.federation.seed, config.federation.clients
    compression = Compression(uplink, downlink, feedback, seed, clients, recipe.direction)
    if compression.keeps and recipe.private:
        choice = f"feedback = '{feedback}'" if feedback != "none" else f"uplink = '{table.uplink}'"
        raise InputError(
            f"[compression] {choice} stores a state of each client between rounds, but the "
            "ledger of a private recipe does not account for stored states. Set feedback = "
            "'none', and use an uplink other than 'power'."
        )
    return replace(recipe, stages=(*recipe.stages, compression))


def _has_codecs(recipe: Recipe) -> bool:
    return any(isinstance(stage, EncodedStates) for stage in recipe.stages)


def _joint_block(config: Config, task: Task) -> frozenset[str] | None:
    """Return the names of the parameters that are clipped together as one block, or None."""
    if not isinstance(task, NetworkTask) or not reads(config, "privacy.blocks"):
        return None
    if config.privacy.blocks == "routed":
        return None
    counts = matrix_counts(task.module, "hidden")
    return frozenset(name for name, count in counts.items() if not count)


def is_centred(config: Config, task: Task) -> bool:
    """Return whether the rows of every momentum sum to 0.

    The gradients of a softmax and their weighted sums have rows with sum 0. Noise destroys this
    property. Aggregates that select single entries from several clients destroy it, too.
    """
    summed = config.federation.aggregate in ("mean", "by-samples")
    exact = config.compression.uplink == config.compression.downlink == "none"
    exact = exact and config.federation.stage == "none"
    return isinstance(task, MatrixTask) and config.local.recipe not in PRIVATE and summed and exact


def user_map(config: Config) -> Orthogonalizer | None:
    """Return the custom orthogonalizer, or None if the orthogonalizer is built in."""
    custom = make_named(config, "orthogonalizer", values=(Orthogonalizer,))
    return None if custom is None else as_orthogonalizer(custom, guard(config, "orthogonalizer"))


def routes(network: nn.Module, rule: str, qkv: str = "split", muon: str = "") -> RoutingTable:
    """List every parameter with its shape, its shape as a matrix [out, -1] and its optimizer.

    You can print the result. The rule `hidden` assigns vectors, embeddings, norms, and the first
    and last layer to the auxiliary optimizer. If no matrix is left for Muon, Muon updates the
    largest matrix (see `fedmuon.optim.routing`). The rule `all-matrices` assigns only parameters
    with fewer than two axes to the auxiliary optimizer. Fused projections are split into their
    matrices, unless `qkv` is `whole`. If `muon` contains name patterns, separated by commas, these
    patterns replace the rule.
    """
    learned = [parameter for parameter in network.named_parameters() if parameter[1].requires_grad]
    matrices = [name for name, param in learned if param.ndim >= 2]
    fused = FUSED if qkv == "split" else {}
    if muon:
        patterns = [pattern.strip() for pattern in muon.split(",")]
        if "" in patterns:
            raise InputError(
                f"[local] muon = '{muon}' contains an empty pattern: write name patterns, "
                "such as '*.weight', and separate them by commas"
            )
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in matrices):
                examples = ", ".join(matrices[:6]) + (", ..." if len(matrices) > 6 else "")
                raise InputError(
                    f"the pattern {pattern!r} in [local] muon matches no matrix of the model. The "
                    f"matrices are {examples or 'none'}. Use patterns that match some of these "
                    "names."
                )
        to_muon = [
            name for name in matrices if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        to_aux = [escape(name) for name, _ in learned if name not in to_muon]
        return routing_table(network, to_muon=[*map(escape, to_muon)], to_aux=to_aux, fused=fused)
    return routing_table(network, to_muon=matrices if rule == "all-matrices" else (), fused=fused)


def routing_of(config: Config) -> tuple[str, str, str]:
    """Return the keys of [local] that select the parameters of Muon."""
    muon = config.local.muon if reads(config, "local.muon") else ""
    return config.local.route, config.local.qkv, muon


def _routed(config: Config, task: Task) -> dict[str, int] | None:
    """Return the number of matrices of each parameter, or None if each one is a matrix."""
    if not isinstance(task, NetworkTask) or not reads(config, "orthogonalizer.name"):
        return None
    return matrix_counts(task.module, *routing_of(config))


def matrix_counts(
    network: nn.Module, rule: str, qkv: str = "split", muon: str = ""
) -> dict[str, int]:
    """Return the number of matrices into which each parameter is split for orthogonalization.

    The number is 0 if the auxiliary optimizer updates the parameter. The number is 1 for an
    ordinary matrix, and larger for a fused projection. Raise an error if the rule finds no matrix.
    """
    table = routes(network, rule, qkv, muon)
    counts = {row.name: row.matrices[0] if row.matrices else 0 for row in table}
    if not any(counts.values()):
        vectors = "" if rule == "all-matrices" else "route = 'all-matrices', or "
        raise InputError(
            f"[local] route = '{rule}' finds no matrix to orthogonalize, because this network "
            f"has only vectors, norms and scalars. Set {vectors}recipe = 'fedavg'."
        )
    if qkv == "whole" and counts == matrix_counts(network, rule, "split", muon):
        raise InputError(
            "[local] qkv = 'whole' has no effect, because Muon updates no parameter that contains "
            "query, key and value projections. Leave qkv out."
        )
    return counts


def _require_countable(config: Config, recipe: Recipe, hidden: bool) -> None:
    """Raise an error if the server's rule needs numbers or weights that the server cannot know.

    With `epochs`, also raise an error if all clients must take the same number of steps.
    """
    aggregate = config.federation.aggregate
    if recipe.counted and hidden:
        raise InputError(
            "the server's rule of this recipe needs the number of local steps, but [privacy] "
            "adjacency = 'add-remove' hides this number. Set adjacency = 'zero-out'."
        )
    if recipe.counted and recipe.aggregate.shares is None:
        raise InputError(
            "the server's rule of this recipe needs a weight for each reply, but [federation] "
            f"aggregate = '{aggregate}' has no weights. Set aggregate to 'mean' or 'by-samples'."
        )
    if recipe.counted and recipe.persistent and not recipe.aggregate.averages:
        raise InputError(
            f"[federation] aggregate = '{aggregate}' gives clients different weights, but the "
            "server of this recipe needs the plain mean of the client states. Set aggregate = "
            "'mean'."
        )
    custom = user_objects(config).recipe is not None  # the config checks built-in recipes
    if custom and config.local.epochs and (recipe.private or recipe.steps):
        raise InputError(
            "[local] epochs lets clients take different numbers of steps, but this recipe needs "
            "the same number for all clients. Set [local] steps instead."
        )


def _require_personal(config: Config, recipe: Recipe, task: Task) -> None:
    """Raise an error if a pattern in [local] personal matches no parameter, or if all match."""
    built_in = user_objects(config).recipe is None
    of_stages = [stage.patterns for stage in recipe.stages if isinstance(stage, PersonalParameters)]
    patterns = [pattern for stage_patterns in of_stages for pattern in stage_patterns]
    name = config.local.recipe
    if built_in and has(name, "personal parameters") and not patterns:
        raise InputError(
            f"[local] recipe = '{name}' needs to know which part of the model stays with each "
            "client. Set [local] personal, for example personal = 'head.*'."
            + (
                " Also set [task] name = 'network', because the model of the task 'matrix' has "
                "only one parameter."
            )
            * isinstance(task, MatrixTask)
        )
    if PERSONAL in recipe.persistent and getattr(task, "statistics", ()):
        raise InputError(
            f"[local] recipe = '{name}' trains a second model per client, which "
            "cannot store the running statistics of BatchNorm. Use GroupNorm, or set recipe = "
            "'fedper'."
        )
    if not patterns:
        return
    names = list(task.initial(generator(0, Draw.INITIAL)))
    examples = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    if len(names) == 1:
        raise InputError(
            "[local] personal splits the model, but this model has only one parameter, "
            f"{examples}. Set [task] name = 'network', or leave personal out."
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"the pattern {pattern!r} in [local] personal matches no parameter of the model. "
                f"The parameters are {examples}. Use patterns that match some of these names."
            )
    if all(map(recipe.is_personal, names)):
        raise InputError(
            f"[local] personal = {', '.join(patterns)} matches every parameter of the "
            f"model ({examples}), so clients would share nothing. Use patterns that leave out at "
            "least one parameter."
        )


def _require_public(config: Config, recipe: Recipe) -> None:
    """Raise an error if a private recipe would reveal more than the ledger counts."""
    tuned = config.output.fine_tune if reads(config, "output.fine-tune") else 0
    if tuned and (recipe.private or PERSONAL in recipe.persistent or recipe.direction):
        reason = (
            "is private and its ledger does not count the tuned models"
            if recipe.private
            else "has no local steps"
            if recipe.direction
            else "already trains a model per client"
        )
        raise InputError(
            f"[output] fine-tune = {tuned} tunes the final model for each client, but this "
            f"recipe {reason}. Leave fine-tune out."
        )
    if recipe.keeps_states and recipe.private:
        raise InputError(
            "a private recipe must not store a state of a client between rounds, because the "
            "ledger does not account for stored states. Remove `persistent` and `personal` from "
            "the recipe."
        )
    if _has_codecs(recipe) and (recipe.private or config.privacy.level == "client"):
        raise InputError(
            "this recipe compresses the updates of clients, and compression can undo the "
            "clipping that the privacy guarantee needs. Choose a recipe without codecs, such as "
            "fedmuon."
        )


def _require_movable(config: Config, recipe: Recipe) -> None:
    """Raise an error if FedBuff cannot use the recipe.

    FedBuff adds up weighted changes of models and states, and weighted changes can make some states
    invalid.
    """
    if config.devices.mode != "fedbuff":
        return
    if has_custom_stage(recipe):
        raise InputError(
            "[devices] mode = 'fedbuff' adds up changes of models, but it is unknown what a stage "
            "of your own does with changes. Choose another mode, or leave the stage out."
        )
    if recipe.direction:
        raise InputError(
            "[devices] mode = 'fedbuff' adds up changes of models, but the clients of this "
            "recipe return directions. Choose another mode, or a recipe such as fedmuon."
        )
    if others := {*recipe.returned} & {*recipe.sent} - {"momentum"}:
        raise InputError(
            "[devices] mode = 'fedbuff' adds weighted changes of states, which can make the "
            f"state {min(others)!r} of this recipe invalid. For example, a second moment can "
            "become negative. Set mode = 'deadline', or let clients return changes of a state "
            "that the server does not send."
        )


# Custom recipes


@lru_cache(maxsize=4)
def _user_recipe(config: Config, task: Task) -> Recipe:
    """Build the user's recipe and run a trial round. The result is cached for all clients."""
    user_recipe, local = user_objects(config).recipe, config.local
    facts: dict[str, Any] = {"task": task} | _map_for(config, user_recipe)
    if isinstance(task, NetworkTask) and "routes" in takes(user_recipe, {"routes": 0}):
        facts["routes"] = matrix_counts(task.module, *routing_of(config))
    created = make_named(config, "recipe", None, (Recipe, Chain, tuple, list), facts)
    within = guard(config, "recipe")
    recipe = as_recipe(created, within)
    private = recipe.mechanism is not None
    problems = [
        *unread_by_own_recipe(config, private),
        *(private_recipe_problems(config) if private else missing_noise(config)),
    ]
    if problems:
        raise InputError(problems[0])
    start, _ = split_statistics(task.initial(generator(0, Draw.INITIAL)))
    with within:
        tested = not private and not recipe.scaled  # the trial shows whether a link uses the factor
        if tested and not is_default("local.schedule", local.schedule):
            full, half = (_trial_steps(recipe.chain, start, (0,), factor) for factor in (1.0, 0.5))
            if all(torch.equal(full[name], half[name]) for name in start):
                raise InputError(
                    f"[local] schedule = '{local.schedule}' has no effect, because your optimizer "
                    "never uses `context.factor`. Make links.descend(lr) the last link of your "
                    "chain, or leave schedule out."
                )
        if recipe.steps and recipe.steps != local.steps:
            raise InputError(
                f"[local] steps = {local.steps}, but your recipe was created with "
                f"steps={recipe.steps}. Create the recipe with steps={local.steps}, or set steps "
                f"= {recipe.steps}."
            )
        if recipe.clients and recipe.clients != config.federation.clients:
            raise InputError(
                f"[federation] clients = {config.federation.clients}, but your recipe was "
                f"created with clients={recipe.clients}. Create the recipe with "
                f"clients={config.federation.clients}, or set clients = {recipe.clients}."
            )
        fixed = _tried_recipe(recipe, start, task.stack_limit)
    return replace(recipe, initial={**recipe.initial, **fixed}) if fixed else recipe


def _tried_recipe(recipe: Recipe, start: Params, stack_limit: int) -> Initial:
    """Run trial rounds of a recipe that is not built in, and raise an error if they fail.

    Returns:
        Functions that return the first values of states whose shapes only the trial shows.
    """
    entries = sum(tensor.numel() for tensor in start.values())
    states = require_round(recipe, start)
    if recipe.mechanism is None and 2 * entries <= stack_limit:  # larger models are not batched
        _require_apart(recipe, start)
    return {
        name: partial(_zeros_like, {key: tensor[0] for key, tensor in states[name].items()})
        for name in recipe.returned
        if name not in recipe.kept
    }


@lru_cache(maxsize=4)
def _tried_registered(config: Config, task: Task) -> Initial:
    """Run trial rounds of a method that another package registers.

    The result is cached for all clients.
    """
    method, local = METHODS[config.local.recipe], config.local
    recipe = make_recipe(
        local,
        config.orthogonalizer,
        routed=_routed(config, task),
        custom_map=user_map(config),
        clients=config.federation.clients,
    )
    if recipe.mechanism is not None:
        (package,) = packages_of(method.name)
        raise unusable(package, method.name, f"{method.make} returns a recipe with a mechanism")
    start, _ = split_statistics(task.initial(generator(0, Draw.INITIAL)))
    within = guard_of(method, function_of(method))
    try:
        with within:
            return _tried_recipe(recipe, start, task.stack_limit)
    except OwnError:
        raise
    except InputError as error:
        raise InputError(f"{within.named} cannot be used: {error}") from error


def _zeros_like(shapes: State, params: Params) -> State:
    """Return zeros with these shapes behind the replica axis of the parameters."""
    param = next(iter(params.values()))
    return {name: shape.new_zeros((len(param), *shape.shape), device=param.device)
            for name, shape in shapes.items()}  # fmt: skip


def _map_for(config: Config, user_recipe: Any) -> dict[str, Orthogonalizer]:
    """Return the argument `orthogonalizer` for a custom recipe that has this parameter.

    The argument is the custom orthogonalizer, or the built-in orthogonalizer that the config names.
    If no key of [orthogonalizer] is set, a default in the recipe's signature is used. Raise an
    error if [orthogonalizer] is set but the recipe has no such parameter.
    """
    table, keys = config.orthogonalizer, []
    for name in NEEDS["orthogonalizer"]:
        value = getattr(table, attribute(type(table), name))
        if not is_default(f"orthogonalizer.{name}", value):
            keys.append(name)
    if not takes(user_recipe, {"orthogonalizer": 0}):
        for name in keys:
            raise InputError(
                f"[orthogonalizer] {name} has no effect, because your recipe has no parameter "
                f"`orthogonalizer`. Add that parameter, or leave {name} out."
            )
        return {}
    if (brought := make_named(config, "orthogonalizer", values=(Orthogonalizer,))) is not None:
        with guard(config, "orthogonalizer"):
            return {"orthogonalizer": as_map(brought)}
    needed = keys or "orthogonalizer" in required_parameters(user_recipe)
    return {"orthogonalizer": value_of_table(table)} if needed else {}


# Trial of a custom chain: two clients take two steps that reduce the squared distance to random
# centres.


@trial()
def _require_apart(recipe: Recipe, start: Params) -> None:
    """Raise an error if a client's result changes when another client is in the same batch.

    Some engines train several clients in one batch, and other engines train clients one by one.
    `start` contains parameters with the shapes [1, ...].
    """
    chain = recipe.chain
    together = _trial_steps(chain, start, (0, 1))
    _require_stacked(recipe, _trial_states(recipe, start, (0, 1)), 2)
    for client in (0, 1):
        alone = _trial_steps(chain, start, (client,))
        if any(differ(alone[name], together[name][client : client + 1]) for name in start):
            raise InputError(
                "the result of your recipe for a client changes when other clients are in the "
                "same batch, so the results would depend on the engine. Take norms and means "
                "over the last axes, separately for each replica, and draw random numbers only "
                "from context.draws."
            )


def _trial_states(recipe: Recipe, start: Params, clients: Sequence[int]) -> States:
    """Return the states of these clients after two trial steps and the clients' rule."""
    first = params = {name: torch.cat([value] * len(clients)) for name, value in start.items()}
    states = recipe.chain.init(params, {})
    for step in range(2):
        params, states = recipe.chain.step(params, states, _context(params, clients, step))
    return recipe.apply_client(first, params, states, 2, 1.0, _trial_samples(params))[1]


def _trial_samples(params: Params) -> Tensor:
    param = next(iter(params.values()))
    return torch.full_like(param.flatten(1)[:, 0], 10.0) if param.ndim > 1 else param.new_full(
        (len(param),), 10.0
    )  # fmt: skip


def _require_stacked(recipe: Recipe, states: States, replicas: int) -> None:
    """Raise an error if a state that leaves the link has tensors that no engine could send.

    Each tensor needs the replica axis first. Messages and files store only numpy's dtypes.
    """
    for name in (*recipe.returned, *recipe.persistent):
        for key, tensor in states[name].items():
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                raise InputError(
                    f"the state {name!r} contains a {type(tensor).__name__} under "
                    f"{plain(key, 60)}, but it must map strings to tensors. Store a number as a "
                    "tensor [replicas, 1]."
                )
            if tensor.dtype not in STORED or not tensor.ndim or len(tensor) != replicas:
                raise InputError(
                    f"the tensor {key!r} of the state {name!r} has shape {tuple(tensor.shape)} and "
                    f"dtype {tensor.dtype} for {replicas} replica{'s' * (replicas > 1)}. The first "
                    "axis must be the replicas, as in the model, and the dtype a real number of "
                    "16, 32 or 64 bits. Use a shape such as [replicas, 1], and the dtype of the "
                    "model."
                )


def _trial_steps(
    chain: Chain, start: Params, clients: Sequence[int], factor: float = 1.0
) -> Params:
    """Take two trial steps, and return the change of these clients' models."""
    first = params = {name: torch.cat([value] * len(clients)) for name, value in start.items()}
    states = chain.init(params, {})
    for step in range(2):
        params, states = chain.step(params, states, _context(params, clients, step, factor))
    return {name: value - first[name] for name, value in params.items()}


def _context(
    params: Params, clients: Sequence[int], step: int, factor: float = 1.0, private: bool = False
) -> Context:
    """Return the context of a trial step.

    The loss of the trial is half the squared distance between the parameters and random centres.
    """
    drawn = torch.Generator().manual_seed(0)
    centres = {}
    for name, value in params.items():  # always drawn for two clients, also if one takes part
        pair = torch.randn((2, *value.shape[1:]), generator=drawn)
        centres[name] = pair.to(value)[list(clients)]

    def gradient(at: Params) -> tuple[Tensor, Params]:
        slope = {name: value - centres[name] for name, value in at.items()}
        return sum(value.flatten(1).square().sum(1) / 2 for value in slope.values()), slope  # type: ignore

    def released(points: Points, bounds: Tensor | None = None) -> Released:
        shares = None if bounds is None else torch.full_like(bounds, 0.5)
        return Released(gradient(points[-1][1])[1], shares)

    draws = [partial(generator, 0, client=client, step=step) for client in clients]
    if private:
        return Context(
            params, forbidden_gradient, draws, released, factor, tuple(clients), received=params
        )
    return Context(
        *(params, gradient, draws), factor=factor, clients=tuple(clients), received=params,
        samples=_trial_samples(params),
    )  # fmt: skip


# The first round of a custom recipe


def _require_held(recipe: Recipe) -> None:
    """Raise an error if the recipe names a state that does not exist."""
    links = [link.name for link in recipe.chain.links]
    for name in recipe.returned:
        if name not in links and recipe.client is None:
            raise InputError(
                f"the recipe returns the state {name!r}, but no gradient transformation (link) of "
                f"its chain has this name. Remove {name!r} from `returned`, or use names from "
                f"{', '.join(links)}."
            )
    for name in recipe.persistent:
        if name not in links or name in recipe.sent:
            raise InputError(
                f"{name!r} cannot be a persistent state of the recipe, because "
                + (
                    "the server sends this state in every round. Remove it from `persistent`."
                    if name in recipe.sent
                    else "no gradient transformation (link) of its chain has this name. Use names "
                    f"from {', '.join(links)}."
                )
            )
    for name in recipe.sent:
        if name not in recipe.kept:
            raise InputError(
                f"the recipe sends the state {name!r}, but its server does not store this state. "
                f"Add {name!r} to `kept`."
            )


def _require_resumable(recipe: Recipe, start: Params, states: States) -> None:
    """Raise an error if a stored state has other tensors after a round than at its start."""
    for name in recipe.returned:
        if name not in recipe.kept:
            continue
        fresh, after = (
            {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}
            for state in (first_state(recipe, name, start), states[name])
        )
        if fresh != after:
            raise InputError(
                f"the tensors of the state {name!r} change their names, shapes or dtypes during a "
                "round, so the server could not store the state. Create all tensors with their "
                "final names, shapes and dtypes in `init` of the link, or in `initial` of the "
                "recipe."
            )
    for link in recipe.chain.links:
        if link.name in recipe.persistent:
            fresh, after = (
                {name: tensor.shape for name, tensor in state.items()}
                for state in (link.init(start), states[link.name])
            )
            if fresh != after:
                raise InputError(
                    f"the tensors of the persistent state {link.name!r} change their names or "
                    "shapes during a round, so a run could not be resumed. In the function "
                    "`init` of this link, create all tensors with their final names and shapes."
                )


@trial()
def require_round(recipe: Recipe, start: Params) -> States:
    """Run a trial round from the parameters `start` [1, ...]. Raise an error if the recipe fails.

    Also raise an error if the recipe names states that do not exist.

    Returns:
        The client's states after the trial round.
    """
    _require_held(recipe)
    states = {
        link.name: _tried(f"init of the link {link.name}", LINK, link.init, start)
        for link in recipe.chain.links
    }
    params = start
    for step in range(2):  # two local steps of one client
        context, direction = _context(params, (0,), step, private=recipe.mechanism is not None), {}
        for link in recipe.chain.links:
            direction, states[link.name] = _updated(link, direction, states[link.name], context)
        if missing := [name for name in params if name not in direction]:
            raise InputError(
                f"your chain of links returns no direction for the parameter {missing[0]}. Make "
                "links.gradient() the first link of the chain."
            )
        params = {name: value + direction[name] for name, value in params.items()}
    if recipe.client is not None:
        rule = partial(recipe.apply_client, factor=1.0, samples=_trial_samples(params))
        client_result = _tried("the clients' rule", CLIENT_RULE, rule, start, params, states, 2)
        if not _are_mappings(client_result):
            raise InputError(
                f"the clients' rule returns an object of type {type(client_result).__name__}, not "
                f"a pair of mappings. {CLIENT_RULE}"
            )
        params, states = client_result
        _require_alike("the clients' rule", CLIENT_RULE, start, params)
        if missing := [
            name for name in (*recipe.returned, *recipe.persistent) if name not in states
        ]:
            raise InputError(
                f"the clients' rule does not return the state {missing[0]}. {CLIENT_RULE}"
            )
    _require_stacked(recipe, states, 1)
    _require_resumable(recipe, start, states)
    server_states = initial_states(recipe, start) | {name: states[name] for name in recipe.returned}
    rule = partial(recipe.apply_server, factor=1.0, answered=lambda: [(1.0, 2)])
    start, params = shared_part(recipe, start), shared_part(recipe, params)
    server_result = _tried("the server's rule", RULE, rule, start, params, server_states)
    if not _are_mappings(server_result):
        raise InputError(
            f"the server's rule returns an object of type {type(server_result).__name__}, not a "
            f"pair of mappings. {RULE}"
        )
    model, after = server_result
    _require_alike("the server's rule", RULE, start, model)
    if missing := [name for name in recipe.kept if name not in after]:
        raise InputError(
            f"the server's rule does not return the state {missing[0]}, which the server must "
            f"store. {RULE}"
        )
    return states


def _require_alike(subject: str, rule: str, start: Params, model: Mapping[str, Any]) -> None:
    """Raise an error if a tensor of the model is missing, or has another shape or precision."""
    for name, like in start.items():
        value = model.get(name)
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (like.shape, like.dtype):
            raise InputError(
                f"{subject} returns no tensor with the shape and dtype of the parameter {name}. "
                f"{rule}"
            )


def _updated(link: Link, direction: Params, state: State, context: Context) -> tuple[Params, State]:
    """Return the result of a custom gradient transformation (link).

    Raise an error if the link changes its input in place.
    """
    inputs = (direction, state, context.params)
    context = visible(link, context)
    before = [_copied(tensors) for tensors in inputs]
    subject = f"update of the link {link.name}"
    result = _tried(subject, LINK, link.update, direction, state, context)
    if not _are_mappings(result):
        raise InputError(
            f"the link {link.name} returns an object of type {type(result).__name__}, not a pair "
            f"of mappings. {LINK}"
        )
    if missing := [name for name in before[0] if name not in result[0]]:
        raise InputError(
            f"the link {link.name} returns no direction for the parameter {missing[0]}. Return one "
            "direction for each parameter."
        )
    for copies, tensors in zip(before, inputs, strict=True):
        if any(not same(tensor, tensors.get(name)) for name, tensor in copies.items()):
            raise InputError(
                f"the link {link.name} changes its input tensors in place, but other links use "
                "these tensors too. Return new tensors."
            )
    return result


def _tried(subject: str, mend: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except InputError:
        raise
    except Exception as error:  # the user's function may raise any error
        reason = plain(f"{type(error).__name__}: {error}")
        raise InputError(f"{subject} failed with {reason}. {mend}") from error


@trial()
def require_memoryless(config: Config, recipe: Recipe, task: Task) -> None:
    """Raise an error if a custom aggregate's result depends on earlier calls."""
    brought, count = user_objects(config), config.federation.per_round
    if brought.aggregate is None and brought.recipe is None:
        return
    start = task.initial(generator(0, Draw.INITIAL))
    state = initial_states(recipe, start).get(aggregate_state())

    def combined(seed: int) -> Params:
        replies = []
        for k in range(count):
            drawn = torch.Generator().manual_seed(count * seed + k)
            params = {
                name: torch.randn(value.shape, generator=drawn).to(value)
                for name, value in start.items()
            }
            states = {
                link.name: link.init(split_statistics(params)[0])
                for link in recipe.chain.links
                if link.name in recipe.returned
            }
            first = next(iter(params.values()))
            loss = first.new_ones(len(first))
            replies.append(Reply(k, params, states, loss, samples=k + 1))
        if state is None:
            return recipe.aggregate.combine(replies)[0]
        aggregated, after = recipe.aggregate.combine(replies, _copied(state))
        return aggregated | {f"its state {name}": value for name, value in after.items()}

    first, _, repeated = combined(0), combined(1), combined(0)
    if any(not same(value, repeated[name]) for name, value in first.items()):
        raise InputError(
            "your aggregate returns a different model when it is called again with the same "
            "replies, so a resumed run would differ. Draw no random numbers in the aggregate. If "
            "the aggregate needs a state, use fedmuon.Aggregator(apply, init=init) with "
            "init(params) -> state and apply(replies, state) -> (params, state). Or let the "
            "server's rule of the recipe update the state."
        )


def _copied(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _are_mappings(result: Any) -> bool:
    pair = isinstance(result, tuple | list) and len(result) == 2
    return pair and all(isinstance(part, Mapping) for part in result)
