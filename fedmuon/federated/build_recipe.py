"""Build the optimizer of a run from its config."""

import math
from dataclasses import replace

from fedmuon.config.load import Config
from fedmuon.config.methods import BUILT_IN, PRIVATE
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import guard, make_named, user_objects
from fedmuon.federated.configured_stages import with_configured_stages
from fedmuon.federated.custom_recipe import custom_recipe, tried_registered, user_map
from fedmuon.federated.model_routes import matrix_counts, routed
from fedmuon.federated.recipe_facts import takes_own_aggregate
from fedmuon.optim.aggregator import Aggregator
from fedmuon.optim.aggregators import AGGREGATORS, as_aggregator
from fedmuon.optim.chain import Number
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipes import make_recipe
from fedmuon.tasks.base import Task
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask

MOST_TURNS = 10**5  # optimize buffers for at most this number of steps, which takes seconds


def build_recipe(
    config: Config, task: Task, lr: Number | None = None, regularization: Number | None = None
) -> Recipe:
    """Build the configured optimizer, with its aggregate, compression and client-level privacy."""
    brought, privacy, federation = user_objects(config), config.privacy, config.federation
    if brought.recipe is None:
        matrices, orthogonalizer = routed(config, task), user_map(config)
        centred = is_centred(config, task)
        table, local = config.orthogonalizer, config.local
        # Correlated noise allows only one client. The account counts the lots that this client
        # draws.
        turns = federation.rounds * local.steps, max(1, math.ceil(config.data.train / privacy.lot))
        recipe = make_recipe(
            *(local, table, lr, regularization, matrices, privacy, orthogonalizer, centred),
            clients=federation.clients,
            seed=federation.seed,
            joint_block=_joint_block(config, task),
            turns=(min(turns[0], MOST_TURNS), turns[1]),
        )
        recipe = replace(recipe, thread_safe=orthogonalizer is None)
        if local.recipe not in BUILT_IN:  # its links may store hidden state, too
            fixed = tried_registered(config, task)
            recipe = replace(recipe, initial={**recipe.initial, **fixed}, thread_safe=False)
    else:  # its links may store hidden state between calls
        recipe = replace(custom_recipe(config, task), thread_safe=False)
    if isinstance(task, NetworkTask) and (
        recipe.mechanism is not None or privacy.level == "client"
    ):
        task.require_unmixed()
    if not takes_own_aggregate(config):
        average = make_named(config, "aggregate", AGGREGATORS, (Aggregator,))
        within = None if brought.aggregate is None else guard(config, "aggregate")
        recipe = replace(recipe, aggregate=as_aggregator(average, within))
    return with_configured_stages(config, recipe, task)


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
    exact = exact and config.federation.stage == "none" and config.attacks.kind == "none"
    return isinstance(task, MatrixTask) and config.local.recipe not in PRIVATE and summed and exact
