"""How a run combines low-rank adapters: the value of [federation] adapters."""

import math
from collections.abc import Callable
from dataclasses import replace

from fedmuon.config.load import Config
from fedmuon.config.methods import has
from fedmuon.config.schema import ASYNCHRONOUS, reads
from fedmuon.config.user_objects import user_objects
from fedmuon.core.demands import setting
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.optim.adapter_means import FactorError, exact_mean
from fedmuon.optim.adapter_ranks import AdapterRanks, with_ranks
from fedmuon.optim.adapters import Pair, find_pairs, require_pairs
from fedmuon.optim.frozen_factors import with_frozen
from fedmuon.optim.gradient_bases import FollowingSubspaces, with_following_subspaces
from fedmuon.optim.recipe import Recipe, first_state
from fedmuon.optim.server_rules import replace_by_mean
from fedmuon.optim.subspaces import Subspaces, require_states_of_0, with_subspaces
from fedmuon.tasks.base import Params, Task, split_statistics

KEY, BASES = "federation.adapters", "federation.subspace-bases"
RANKS = "federation.adapter-ranks"
PRIVATE = "Choose recipe = 'dp-sgd' or 'dp-muon', or set adapters = 'freeze-a'"
FIXED_BOUND = "Set [privacy] quantile = 0, or adapters = 'freeze-a'"
SIMPLER = "Choose another recipe, such as fedavg, local-muon, fedmuon or local-adamw"


def with_adapters(config: Config, recipe: Recipe, task: Task) -> Recipe:
    """Return the recipe with the stage or the aggregator that [federation] adapters selects.

    Raise an error if the model has no adapters, or if the recipe does not fit the value.
    """
    way = config.federation.adapters if reads(config, KEY) else "factors"
    ranks = config.federation.adapter_ranks if reads(config, RANKS) else ""
    if way == "factors" and not ranks:
        if has(config.local.recipe, "adapters"):
            require_pairs(_start(task), setting(config, "local.recipe"))
        return _measured(config, recipe, task)
    start = _start(task)
    pairs = require_pairs(start, setting(config, RANKS if ranks else KEY))
    _require_linear_layers(config, start)
    pairs = _shared(config, recipe, pairs)
    _require_fitting(config, recipe, start, pairs)
    recipe = WAYS[way](config, recipe, start, pairs)
    return _with_ranks(config, recipe, start, pairs) if ranks else recipe


def _require_linear_layers(config: Config, start: Params) -> None:
    """Raise an error if an embedding has an adapter of PEFT, in which A starts at 0 and not B."""
    if odd := next((name for name in start if "lora_embedding_" in name), ""):
        raise InputError(
            f"{setting(config, _key(config))} needs adapters of linear layers, but {odd} belongs "
            "to an embedding. Leave the embedding out of target_modules, or set [federation] "
            "adapters = 'factors' without adapter-ranks."
        )


def _shared(config: Config, recipe: Recipe, pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Return the adapters that do not stay with the clients.

    Raise an error if a client would share only one factor of an adapter, or no adapter at all.
    """
    value = setting(config, _key(config))
    for pair in pairs:
        if recipe.is_personal(pair.a) != recipe.is_personal(pair.b):
            stays, other = (pair.a, pair.b) if recipe.is_personal(pair.a) else (pair.b, pair.a)
            raise InputError(
                f"{value} needs both factors of an adapter, but {stays} is personal, and {other} "
                "is not. Make both factors personal, or neither."
            )
    shared = tuple(pair for pair in pairs if not recipe.is_personal(pair.a))
    if not shared:
        raise InputError(
            f"{value} has no effect, because all adapters are personal. Make fewer adapters "
            "personal, or leave this key out."
        )
    return shared


def _start(task: Task) -> Params:
    return split_statistics(task.initial(generator(0, Draw.INITIAL)))[0]


def _measured(config: Config, recipe: Recipe, task: Task) -> Recipe:
    """Return the recipe with a stage that measures the error of mean factors.

    A run with privacy of clients measures nothing, because the error would be a second release. The
    replies of FedBuff start from several models. Without weights, there is no mean to compare with.
    """
    shares = recipe.aggregate.shares
    silent = config.privacy.level == "client" or config.devices.mode in ASYNCHRONOUS
    if silent or shares is None or recipe.direction or not find_pairs(_names(task)):
        return recipe
    return replace(recipe, stages=(FactorError(shares), *recipe.stages))


def _names(task: Task) -> list[str]:
    """Return the names of parameters, without computing their values if the task is a network."""
    module = getattr(task, "module", None)
    return [*_start(task)] if module is None else [name for name, _ in module.named_parameters()]


def _factors(config: Config, recipe: Recipe, start: Params, pairs: tuple[Pair, ...]) -> Recipe:
    _require_mean(config, recipe)
    if recipe.aggregate.shares is None:
        raise InputError(
            f"{setting(config, RANKS)} needs a weighted mean, because rows that few clients use "
            "have the median 0. Set [federation] aggregate = 'mean' or 'by-samples'."
        )
    return replace(recipe, stages=(FactorError(recipe.aggregate.shares), *recipe.stages))


def _with_ranks(config: Config, recipe: Recipe, start: Params, pairs: tuple[Pair, ...]) -> Recipe:
    """Return the recipe with the stage of [federation] adapter-ranks."""
    ranks = tuple(int(rank) for rank in config.federation.adapter_ranks.split(","))
    for pair in pairs:
        if max(ranks) > (rank := start[pair.a].shape[1]):
            raise InputError(
                f"{setting(config, RANKS)} contains {max(ranks)}, but the adapter of {pair.layer} "
                f"has rank {rank}. Use ranks of at most {rank}, or raise the rank of the adapters."
            )
    if len(ranks) > (clients := config.federation.clients):
        raise InputError(
            f"{setting(config, RANKS)} contains {len(ranks)} ranks, but there are only {clients} "
            f"clients, so some ranks have no effect. Use at most {clients} ranks."
        )
    return with_ranks(recipe, AdapterRanks(pairs, ranks))


def _frozen(config: Config, recipe: Recipe, start: Params, pairs: tuple[Pair, ...]) -> Recipe:
    return with_frozen(recipe, frozenset(pair.a for pair in pairs))


def _exact(config: Config, recipe: Recipe, start: Params, pairs: tuple[Pair, ...]) -> Recipe:
    _require_mean(config, recipe)
    return replace(recipe, aggregate=exact_mean(recipe.aggregate))


def _subspace(config: Config, recipe: Recipe, start: Params, pairs: tuple[Pair, ...]) -> Recipe:
    _require_mean(config, recipe)
    rounds, table = config.federation.subspace_rounds, config.federation
    periods = math.ceil(table.rounds / rounds) if rounds else 1
    forms = tuple((pair, (start[pair.b].shape[1], start[pair.a][0, 0].numel())) for pair in pairs)
    if has(config.local.recipe, "adapters"):
        raise InputError(
            f"{setting(config, 'local.recipe')} trains both factors of an adapter, but "
            f"{setting(config, KEY)} trains one matrix between them. Set recipe = 'fedmuon'."
        )
    ranks = {pair: start[pair.a].shape[1] for pair in pairs}
    smallest = min(ranks.values())
    follows = table.subspace_bases == "gradient"
    if follows and periods == 1:
        raise InputError(
            f"{setting(config, BASES)} has no effect with rounds = {table.rounds} and "
            f"subspace-rounds = {rounds}, because the bases of the first period are random. Set "
            "subspace-rounds below rounds, or subspace-bases = 'random'."
        )
    needed = periods + follows  # a further block stores the bases
    rank = smallest // needed
    if not rank:
        raise InputError(
            f"[federation] rounds = {table.rounds} with subspace-rounds = {rounds} has {periods} "
            f"periods, which need adapters of rank {needed} or more, but the adapters have rank "
            f"{smallest}. Raise subspace-rounds, or the rank of the adapters."
        )
    for pair, (m, n) in forms:
        if rank > min(m, n):
            raise InputError(
                f"the adapter of {pair.layer} has rank {ranks[pair]} in {periods} periods, but a "
                f"subspace of rank {rank} does not fit a weight of {m} x {n}. Lower the rank."
            )
        if bool(start[pair.b].any()):
            raise InputError(
                f"{setting(config, KEY)} needs adapters that start at 0, but {pair.b} has other "
                "values. Merge the adapters into the model first, or set B = 0."
            )
    spaces = Subspaces(forms, rank, rounds, periods, table.seed)
    require_states_of_0(recipe, spaces)
    if follows:
        return with_following_subspaces(recipe, FollowingSubspaces(**vars(spaces)))
    return with_subspaces(recipe, spaces)


WAYS: dict[str, Callable[[Config, Recipe, Params, tuple[Pair, ...]], Recipe]] = {
    "factors": _factors,  # with [federation] adapter-ranks
    "freeze-a": _frozen,
    "exact": _exact,
    "subspace": _subspace,
}


def _require_fitting(
    config: Config, recipe: Recipe, start: Params, pairs: tuple[Pair, ...]
) -> None:
    """Raise an error if a rule or a state of the recipe needs both factors as they are."""
    value, named = setting(config, _key(config)), _named(config)
    if recipe.client is not None or recipe.direction or recipe.persistent:
        raise InputError(
            f"{named} stores or returns more than trained models and momenta, but {value} does "
            f"not allow this, because these states need both factors of an adapter. {SIMPLER}."
        )
    names = {name for pair in pairs for name in (pair.a, pair.b)}
    for state in recipe.returned:
        odd = [name for name in first_state(recipe, state, start) if name not in start]
        if odd and names and config.federation.adapters != "freeze-a":
            raise InputError(
                f"{named} averages the state {state!r}, which contains {odd[0]!r}, but {value} can "
                f"only reset states like momenta. {_fix(recipe)}."
            )


def _fix(recipe: Recipe) -> str:
    """Return how to avoid averages of states other than momenta."""
    if recipe.mechanism is None:
        return SIMPLER
    return PRIVATE if recipe.mechanism.quantile is None else FIXED_BOUND


def _require_mean(config: Config, recipe: Recipe) -> None:
    """Raise an error if the server does more than replace the model by the mean."""
    if recipe.server is not replace_by_mean and user_objects(config).recipe is None:
        value = setting(config, _key(config))
        raise InputError(
            f"the server of {_named(config)} takes its own steps, but {value} does not allow "
            f"this, because such steps change factors one by one. {SIMPLER}."
        )


def _key(config: Config) -> str:
    """Return the key that an error about adapters names."""
    return RANKS if config.federation.adapters == "factors" else KEY


def _named(config: Config) -> str:
    custom = user_objects(config).recipe is not None
    return "your recipe" if custom else setting(config, "local.recipe")
