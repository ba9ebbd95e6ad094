"""A client's round: E steps of the chain from the server's model (001, Algorithm 1, lines 4-11)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedmuon.errors import NonFinite
from fedmuon.federated.plan import Plan
from fedmuon.federated.shards import Shard
from fedmuon.tasks.base import Batch, Params, Task
from fedmuon.transforms.base import Context, States
from fedmuon.transforms.recipes import Recipe


@dataclass(frozen=True)
class Broadcast:
    """What the server sends: the round, the model, and the states that the recipe shares."""

    round: int
    params: Params
    states: States


@dataclass(frozen=True)
class Reply:
    """What a client sends back, with its loss [S] at its last step's start."""

    client: int
    params: Params
    states: States
    loss: Tensor


def client_round(
    recipe: Recipe, task: Task, plan: Plan, client: int, shard: Shard, broadcast: Broadcast
) -> Reply:
    """X_i, M_i <- E local steps from (X, M); links whose state is not sent start afresh."""
    params = broadcast.params
    states = recipe.chain.init(params, broadcast.states)
    for step in range(plan.steps):
        batch = shard.batch(plan.rows(broadcast.round, client, step, shard.size))
        context = Context(
            params,
            _checked(task, batch, f"client {client}, round {broadcast.round}, step {step}"),
            plan.draws(broadcast.round, client, step),
        )
        params, states = recipe.chain.step(params, states, context)
    loss = states["gradient"]["loss"]
    return Reply(client, params, {name: states[name] for name in recipe.returned}, loss)


def _checked(task: Task, batch: Batch, where: str) -> Callable[[Params], tuple[Tensor, Params]]:
    """The task's gradient, refused at the first loss that is not a number."""

    def gradient(at: Params) -> tuple[Tensor, Params]:
        loss, slope = task.gradient(at, batch)
        if not math.isfinite(float(loss.sum())):
            raise NonFinite(f"the loss is not finite ({where}): lower [local] lr or mend the data")
        return loss, slope

    return gradient
