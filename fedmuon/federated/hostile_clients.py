"""The attack of a config as a stage of its recipe, and how many hostile clients are tolerated."""

import copy
from dataclasses import replace

import torch
from torch import nn

from fedmuon.config.hostile import hostile_count, numbers
from fedmuon.config.load import Config
from fedmuon.config.schema import ASYNCHRONOUS, biased_participation, reads
from fedmuon.core.demands import setting
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.late_replies import late_rule
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.attacks import Attack
from fedmuon.optim.recipe import Recipe
from fedmuon.tasks.base import Task
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask


def hostile_clients(config: Config) -> tuple[int, ...]:
    """Return the sorted numbers of the hostile clients, or no numbers without an attack."""
    table, federation = config.attacks, config.federation
    if table.kind == "none":
        return ()
    if table.clients:
        return numbers(table.clients)
    order = generator(federation.seed, Draw.HOSTILE).permutation(federation.clients)
    return tuple(sorted(order[: hostile_count(table.share, federation.clients)].tolist()))


def with_attack(config: Config, recipe: Recipe, task: Task) -> Recipe:
    """Return the recipe with the attack of [attacks] as its first stage.

    Raise an error if a round has more hostile clients than the aggregator tolerates.
    """
    table = config.attacks
    if table.kind == "none":
        return recipe
    _require_tolerated(config, recipe)
    attack = Attack(
        table.kind,
        hostile_clients(config),
        table.strength if reads(config, "attacks.strength") else 0.0,
        table.from_round,
        config.federation.seed,
        recipe.direction,
        _classes(task) if table.kind == "label-flip" else 0,
    )
    return replace(recipe, stages=(attack, *recipe.stages))


def most_hostile(config: Config) -> tuple[int, int, int | None]:
    """Return the largest number of hostile clients in a round, with the participants.

    Returns:
        The number of hostile participants, the number of all participants, and the round. The round
            is None if simulated devices or secret draws decide who takes part. Then the number is
            that of the worst case.
    """
    federation, hostile = config.federation, hostile_clients(config)
    drawn = federation.clients, federation.per_round
    if biased_participation(config):
        late = config.devices.mode in ASYNCHRONOUS
        replies = late_rule(config).replies if late else federation.per_round
        return min(len(hostile), replies), replies, None
    plan = RandomnessPlan(federation.seed, *drawn, federation.rounds)
    rounds = range(min(config.attacks.from_round, federation.rounds), federation.rounds)
    counts = [len({*hostile}.intersection(plan.participants(r).tolist())) for r in rounds]
    most = max(counts, default=0)
    return most, federation.per_round, rounds[counts.index(most)] if counts else None


def _require_tolerated(config: Config, recipe: Recipe) -> None:
    """Raise an error if a round has more hostile clients than the aggregator tolerates."""
    hostile, participants, number = most_hostile(config)
    limits = dict[str, int]()
    if recipe.aggregate.tolerates is not None:
        limits[setting(config, "federation.aggregate")] = recipe.aggregate.tolerates(participants)
    if config.robust.mixing:
        limits[setting(config, "robust.mixing")] = config.robust.mixing
    late = config.devices.mode in ASYNCHRONOUS
    more = "[devices] buffer" if late else "[federation] per-round"
    where = "a round can have" if number is None else f"round {number} has"
    for named, limit in limits.items():
        if hostile > limit:
            raise InputError(
                f"{where} {hostile} hostile clients among its {participants} participants, but "
                f"{named} tolerates at most {limit}. Lower [attacks] share, raise {more}, or "
                "choose a setting that tolerates more. The aggregate 'mean' "
                "tolerates no hostile client, but runs with any number."
            )


def _classes(task: Task) -> int:
    """Return the number of classes, which the labels of an attack need."""
    if isinstance(task, MatrixTask):
        return task.classes
    shape: tuple[int, ...] = ()
    if isinstance(task, NetworkTask) and not task.whole:
        shape = _outputs(task)
    if len(shape) != 2 or shape[1] < 2:
        raise InputError(
            "[attacks] kind = 'label-flip' needs a model with one score for each class, but this "
            "task has other outputs. Choose another kind, such as 'sign-flip'."
        )
    return shape[1]


def _outputs(task: NetworkTask) -> tuple[int, ...]:
    """Return the shape of the outputs for two samples, without computing them."""
    module: nn.Module = copy.deepcopy(task.module).to("meta").eval()
    samples = torch.empty(2, *task.shape, device="meta", dtype=next(module.parameters()).dtype)
    with torch.no_grad():
        outputs = module(samples)
    return tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else ()
