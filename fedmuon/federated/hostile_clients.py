"""The attack of a config as a stage of its recipe, and how many hostile clients are tolerated."""

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedmuon.config.hostile import hostile_clients
from fedmuon.config.load import Config
from fedmuon.config.schema import ASYNCHRONOUS, reads
from fedmuon.core.demands import setting
from fedmuon.core.errors import InputError
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.attacks import Attack
from fedmuon.optim.recipe import Recipe
from fedmuon.tasks.base import Task
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask


def with_attack(config: Config, recipe: Recipe, task: Task) -> Recipe:
    """Return the recipe with the attack of [attacks] as its first stage."""
    table = config.attacks
    if table.kind == "none":
        return recipe
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


def require_tolerated(config: Config, recipe: Recipe, plan: RandomnessPlan) -> None:
    """Raise an error if a round has more hostile clients than its defence tolerates.

    Args:
        config: The config. Attacks exclude secret cohorts, so all participants are known.
        recipe: The recipe with its aggregator.
        plan: The plan of the run. With simulated devices it contains their timetable, so only
            replies that a round uses are counted.
    """
    hostile, tolerates = hostile_clients(config), recipe.aggregate.tolerates
    if not hostile:
        return
    for round in range(config.attacks.from_round, plan.rounds):
        participants = plan.participants(round)
        count, limits = int(np.isin(participants, hostile).sum()), dict[str, int]()
        if tolerates is not None:
            limits[setting(config, "federation.aggregate")] = tolerates(len(participants))
        if config.robust.mixing:
            limits[setting(config, "robust.mixing")] = config.robust.mixing
        for named, limit in limits.items():
            if count > limit:
                late = config.devices.mode in ASYNCHRONOUS
                more = "[devices] buffer" if late else "[federation] per-round"
                raise InputError(
                    f"round {round} has {count} hostile clients among its {len(participants)} "
                    f"participants, but {named} tolerates at most {limit}. Lower [attacks] share, "
                    f"raise {more}, or choose a setting that tolerates more. The aggregate 'mean' "
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
