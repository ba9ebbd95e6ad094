"""The stages that a config adds to a recipe: your own, adapters, compression, attacks, and privacy.

Defences of the server and attacks come first, so that they change ordinary models. The server reads
attacks first. Then it clips and mixes the replies, and combines them. Your own stages and
compression follow the stages of the recipe. Privacy per client comes before all others, so that
clients clip the update and add noise to it before other stages change it.
"""

from dataclasses import replace

from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import guard, make_named
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.adapters import with_adapters
from fedmuon.federated.gossip import with_graph
from fedmuon.federated.hostile_clients import with_attack
from fedmuon.federated.personal import require_personal
from fedmuon.federated.recipe_demands import require_demands
from fedmuon.federated.recipe_facts import BuiltRecipe
from fedmuon.federated.robust_stages import with_defences
from fedmuon.optim.client_privacy import ClientPrivacy
from fedmuon.optim.compression import Compression, compressor
from fedmuon.optim.frozen_factors import FrozenFactors
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Stage
from fedmuon.optim.subspaces import SubspaceAdapters
from fedmuon.optim.trial_stage import tried_stages
from fedmuon.optim.user_stage import as_stages, has_custom_stage, unguarded
from fedmuon.privacy.mechanisms.client_level import ClientLevel
from fedmuon.tasks.base import Task

OF_VARIABLES = (FrozenFactors, SubspaceAdapters)  # stages that choose what clients train


def with_configured_stages(config: Config, recipe: Recipe, task: Task) -> Recipe:
    """Return the recipe with all stages of the config.

    Raise an error if a setting of the config forbids a fact of the recipe or of its stages, or if a
    custom stage fails in its trial round.
    """
    custom = make_named(config, "stage", values=(Stage, tuple, list))
    stages: tuple[Stage, ...] = ()
    if custom is not None:
        stages = as_stages(custom, guard(config, "stage"))
        recipe = replace(recipe, stages=(*recipe.stages, *stages))
    recipe = with_adapters(config, _without_client_privacy(config, recipe), task)
    recipe = with_graph(config, recipe)
    require_demands(BuiltRecipe(config, recipe, task, stages))
    _require_all_clients(config, recipe)
    require_personal(config, recipe, task)
    compressed = _with_compression(config, recipe)
    if has_custom_stage(recipe):
        start = task.initial(generator(0, Draw.INITIAL))
        stages = tried_stages(recipe, start, task.stack_limit)
        stages = (*stages, *compressed.stages[len(stages) :])
        compressed = replace(compressed, stages=stages)
    attacked = with_attack(config, compressed, task)
    return _with_client_privacy(config, with_defences(config, attacked, task))


def _with_compression(config: Config, recipe: Recipe) -> Recipe:
    """Return the recipe with the compressors of [compression]."""
    table = config.compression
    if table.uplink == table.downlink == "none":
        return recipe
    feedback = table.feedback if reads(config, "compression.feedback") else "none"
    uplink, downlink = (
        compressor(name, table.share, table.levels, table.rank, table.iterations)
        for name in (table.uplink, table.downlink)
    )
    seed, clients = config.federation.seed, config.federation.clients
    compression = Compression(uplink, downlink, feedback, seed, clients, recipe.direction)
    return replace(recipe, stages=(*recipe.stages, compression))


def _require_all_clients(config: Config, recipe: Recipe) -> None:
    """Raise an error if a stage with feedback "ef21" divides by another number of clients."""
    clients = config.federation.clients
    for stage in map(unguarded, recipe.stages):
        if isinstance(stage, Compression) and stage.estimates and stage.clients != clients:
            raise InputError(
                f"a stage Compression with feedback = 'ef21' was created with clients = "
                f"{stage.clients}, but [federation] clients = {clients}. Create the stage with "
                f"clients={clients}."
            )


def _without_client_privacy(config: Config, recipe: Recipe) -> Recipe:
    """Return the recipe without the stage that [privacy] level = 'client' adds last.

    Raise an error for any other stage `ClientPrivacy`. The account of a run trusts the cohorts, the
    sampling and the returned states of this stage, so that they must be those of the config.
    """
    configured = _client_privacy(config, recipe)
    passed = [stage for stage in recipe.stages if isinstance(stage, ClientPrivacy)]
    if all(stage in configured for stage in passed):
        others = (stage for stage in recipe.stages if not isinstance(stage, ClientPrivacy))
        return replace(recipe, stages=tuple(others)) if passed else recipe
    fix = "Set [privacy] level = 'client' in the config instead, and leave the stage out"
    if configured:
        fix = "Leave the stage out, because [privacy] level = 'client' already adds one"
    raise InputError(
        "the recipe has a stage ClientPrivacy (client_level in version 1.0) that was not created "
        "from the config, so the run's epsilon could be wrong: its cohorts, sampling and returned "
        f"states may differ from those of the run. {fix}."
    )


def _with_client_privacy(config: Config, recipe: Recipe) -> Recipe:
    """Return the recipe with the mechanism of [privacy] level = 'client'.

    The update of the trained variables is clipped and gets noise. So stages that choose these
    variables come first.
    """
    if not (stages := _client_privacy(config, recipe)):
        return recipe
    inside = tuple(stage for stage in recipe.stages if isinstance(stage, OF_VARIABLES))
    others = (stage for stage in recipe.stages if not isinstance(stage, OF_VARIABLES))
    stages = (replace(stage, inside=inside) for stage in stages)
    return replace(recipe, stages=(*inside, *stages, *others))


def _client_privacy(config: Config, recipe: Recipe) -> tuple[ClientPrivacy, ...]:
    """Return the stage of [privacy] level = 'client', or no stage at another level."""
    privacy, federation = config.privacy, config.federation
    if privacy.level != "client":
        return ()
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
    return (ClientPrivacy(level, recipe.returned),)
