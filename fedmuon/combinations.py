"""Keys of a config that are sound alone and impossible together, each with its mend."""

import math
from typing import Any

from fedmuon.names import PRIVATE, TEXTS, is_own
from fedmuon.orthogonalize.coefficients import schedule

LEAST_DELTA = 1e-12  # of the accountant
Config = Any  # a `fedmuon.config.Config`, which asks here while it is made


def impossible(config: Config) -> list[str]:
    data, federation = config.data, config.federation
    problems = []
    if federation.per_round > federation.clients:
        problems.append(
            f"[federation] per-round = {federation.per_round} exceeds clients = "
            f"{federation.clients}: sample at most as many clients as there are"
        )
    dealt = not (is_own(federation.partition) or is_own(data.name))  # of others not known yet
    if dealt and federation.clients * data.minimum > data.train:
        problems.append(
            f"[data] train = {data.train} cannot give {federation.clients} clients minimum = "
            f"{data.minimum} samples each: raise train, or lower minimum or [federation] clients"
        )
    if config.task.name == "matrix" and data.normalize == "pixels":
        problems.append(
            "[data] normalize = 'pixels' leaves the unit ball, where the constants of the matrix "
            "task are proved: use unit or ball, or [task] name = 'network'"
        )
    if config.task.name == "matrix" and config.local.adjust != "none":
        problems.append(
            f"[local] adjust = '{config.local.adjust}' is for networks: the matrix task has one "
            "matrix, whose scale is lr, so set adjust = 'none'"
        )
    if 0 < config.local.tail_index <= 1:
        problems.append(
            f"[local] tail-index = {config.local.tail_index} leaves the noise without a mean: "
            "choose it in (1, 2], or 0 if unknown"
        )
    problems += _unreadable(config)
    if config.local.recipe in PRIVATE:
        problems += _unprivate(config)
    try:
        schedule(config.orthogonalizer.coefficients, config.orthogonalizer.steps)
    except ValueError as error:
        problems.append(f"[orthogonalizer] coefficients: {error}")
    return problems


def _unreadable(config: Config) -> list[str]:
    """Text without a decoder, a decoder without text."""
    data, task = config.data, config.task
    problems, is_text = [], data.name in TEXTS
    own = is_own(data.name) or is_own(task.name) or is_own(task.model)
    if not own and is_text != (task.name == "network" and task.model == "gpt"):
        problems.append(
            f"[task] model = '{task.model}' ({task.name}) cannot read [data] name = '{data.name}': "
            "text is for [task] name = 'network' with model = 'gpt', which reads nothing else"
        )
    if not is_own(data.name) and is_text != (data.normalize == "tokens"):
        problems.append(
            f"[data] normalize = '{data.normalize}' is not for name = '{data.name}': use auto"
        )
    if task.name == "network" and task.model == "gpt" and task.width % task.heads:
        problems.append(
            f"[task] width = {task.width} cannot be shared by heads = {task.heads}: make it a "
            "multiple"
        )
    return problems


def _unprivate(config: Config) -> list[str]:
    """What a private recipe cannot be combined with."""
    problems = unprivate(config.privacy, config.local)
    if config.engine.name != "inline" and config.faults.retries:
        problems.append(
            "[faults] retries would ask a client for a second release in the same round, which no "
            "ledger foresaw: set retries = 0; a run that stops can be resumed"
        )
    return problems


def unprivate(privacy: Any, local: Any) -> list[str]:
    """What [privacy] and [local] cannot hold in a private recipe."""
    problems = []
    if privacy.level == "client":
        problems.append(
            "[privacy] level = 'client' is not offered: releases protect single examples within a "
            "client, so set level = 'example'"
        )
    if local.batch:
        problems.append(
            f"[local] batch = {local.batch} is a shuffled batch of fixed size, which the "
            "accountant does not cover: set batch = 0, and [privacy] lot for Poisson lots"
        )
    if 0 < privacy.delta < LEAST_DELTA:
        problems.append(
            f"[privacy] delta = {privacy.delta} is below {LEAST_DELTA:g}, where an accountant sees "
            "nothing but rounding: raise it, or set 0 for 1e-5 or less"
        )
    if privacy.noise and math.isinf(privacy.bound):
        problems.append("[privacy] noise needs a finite bound: set bound, or noise = 0")
    if local.recipe.endswith("muonbc") and local.momentum_form not in ("ema", "polyak"):
        problems.append(
            f"[local] momentum-form = '{local.momentum_form}' has no bias correction: set ema or "
            "polyak"
        )
    return problems
