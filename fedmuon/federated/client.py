"""A client's round: E steps of the chain from the server's model (001, Algorithm 1, lines 4-11)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import finite, unasked
from fedmuon.core.errors import NonFinite
from fedmuon.core.guard import at
from fedmuon.core.threads import spread
from fedmuon.federated.plan import Plan
from fedmuon.federated.shards import Shard
from fedmuon.optim.chain import Context, States, forbidden_gradient
from fedmuon.optim.recipe_chains import Recipe
from fedmuon.privacy.client_level import ClientLevel, mapped
from fedmuon.privacy.mechanism import Mechanism
from fedmuon.tasks.base import Batch, Params, Task, blocks

Client = TypeVar("Client")
LARGE = 1e15  # float32 holds the squares, and sums of them


@dataclass(frozen=True)
class Broadcast:
    """What the server sends: the round, the model, and the states that the recipe shares."""

    round: int
    params: Params
    states: States


@dataclass(frozen=True)
class Reply:
    """What a client sends back, with its loss [S] at its last step's start; `samples` is n_i."""

    client: int
    params: Params
    states: States
    loss: Tensor
    samples: int = 1


def cohorts(
    task: Task, params: Params, clients: Sequence[Client], alone: bool = False
) -> Iterator[list[Client]]:
    """Clients in groups that are stepped together while their stack stays small; or each `alone`,
    so that not even rounding tells who else takes part."""
    entries = sum(value.numel() for value in params.values())
    size = 1 if alone else max(1, task.stack_limit // entries)
    for start in range(0, len(clients), size):
        yield list(clients[start : start + size])


def replies(
    recipe: Recipe,
    task: Task,
    plan: Plan,
    clients: Sequence[tuple[int, Shard]],
    broadcast: Broadcast,
) -> list[Reply]:
    """A round of all these clients, several cohorts at once; a device may have to do it over."""
    work = [
        partial(cohort_round, recipe, task, plan, cohort, broadcast)
        for cohort in cohorts(task, broadcast.params, clients, recipe.client_level is not None)
    ]

    def done() -> list[Reply]:
        return [reply for some in spread(work, task.apart and recipe.apart) for reply in some]

    if recipe.mechanism is not None and not recipe.mechanism.again:
        return done()  # once and for all
    found = unasked(task.device, done)
    if recipe.client_level is None:
        return found
    return [veiled(recipe, recipe.client_level, broadcast, reply) for reply in found]


def veiled(recipe: Recipe, level: ClientLevel, sent: Broadcast, reply: Reply) -> Reply:
    """A reply under client level: it tells no loss, and where the client trusts nobody, it is a
    release."""
    reply = replace(reply, loss=torch.full_like(reply.loss, math.nan))
    if level.trust == "central":
        return reply
    held, found = (joint(recipe, one.params, one.states) for one in (sent, reply))
    states = level.perturbed(held, found, sent.round, reply.client)
    return replace(reply, params=states.pop("model"), states=states)


def joint(recipe: Recipe, params: Params, states: States) -> dict[str, Params]:
    """Model and states that come back: all that a client's update has a part in."""
    return {"model": params, **{name: states[name] for name in recipe.returned}}


def returned_like(recipe: Recipe, params: Params, states: States) -> tuple[Params, States]:
    """Tensors like those of a reply, to fit received arrays to."""
    found = joint(recipe, params, states)
    if recipe.masked:
        found = mapped(lambda one: torch.empty(one.shape, dtype=torch.int64), found)
    return found.pop("model"), found


def cohort_round(
    recipe: Recipe,
    task: Task,
    plan: Plan,
    cohort: Sequence[tuple[int, Shard]],
    broadcast: Broadcast,
) -> list[Reply]:
    """X_i, M_i <- E local steps from (X, M) for the K clients of a cohort, held as one stack.

    Clients are replicas that see other samples: the stack has K blocks of S. Links whose state is
    not sent start afresh.
    """
    clients = [client for client, _ in cohort]
    params = _repeated(broadcast.params, len(cohort))
    sent = {name: _repeated(state, len(cohort)) for name, state in broadcast.states.items()}
    with at(broadcast.round, clients):
        states = recipe.chain.init(params, sent)
        for step in range(plan.steps):
            context = _context(recipe, task, plan, cohort, params, (broadcast.round, step))
            params, states = recipe.chain.step(params, states, context)
    sizes = [shard.size for _, shard in cohort]
    return _replies(recipe, clients, sizes, params, states)


def _context(
    recipe: Recipe,
    task: Task,
    plan: Plan,
    cohort: Sequence[tuple[int, Shard]],
    params: Params,
    now: tuple[int, int],
) -> Context:
    """What the links of a step may see: gradients of a mini-batch, or what a mechanism releases."""
    round, step = now
    factor = plan.factor_at(round)
    draws = [plan.draws(round, client, step) for client, _ in cohort]
    if recipe.mechanism is None:
        rows = [plan.rows(round, client, step, shard.size) for client, shard in cohort]
    else:
        rows = [_lot(recipe.mechanism, plan, one, now) for one in cohort]
    batches = [shard.batch(held) for held, (_, shard) in zip(rows, cohort, strict=True)]
    if recipe.mechanism is not None:
        turn = 0 if recipe.mechanism.turns is None else plan.turn(round, cohort[0][0], step)
        release = recipe.mechanism.releases(task, batches, draws, turn)
        return Context(params, forbidden_gradient, draws, release, factor)
    if recipe.client_level is not None:
        return Context(params, _unstopped(task, batches), draws, factor=factor)
    clients = [client for client, _ in cohort]
    where = f"clients {clients}, round {round}, step {step}"
    return Context(params, _checked(task, batches, where), draws, factor=factor)


def _lot(
    mechanism: Mechanism, plan: Plan, held: tuple[int, Shard], now: tuple[int, int]
) -> np.ndarray:
    """The rows of a private step's lot: drawn, or those whose turn it is."""
    (client, shard), (round, step) = held, now
    if mechanism.turns is None:
        return mechanism.rows(plan.draws(round, client, step), shard.size)
    turn = plan.turn(round, client, step)
    return mechanism.turns.rows(plan.seed, client, turn, shard.size, mechanism.lot)


def _replies(
    recipe: Recipe, clients: Sequence[int], sizes: Sequence[int], params: Params, states: States
) -> list[Reply]:
    """One reply a client: its block of the stack."""
    models = blocks(params, len(clients))
    kept = {name: blocks(states[name], len(clients)) for name in recipe.returned}
    entries = next(iter(params.values()))
    unknown = entries.new_full((len(entries),), math.nan)  # a private chain tells no loss
    losses = states.get("gradient", {}).get("loss", unknown).chunk(len(clients))
    return [
        Reply(client, models[k], {name: kept[name][k] for name in kept}, losses[k], sizes[k])
        for k, client in enumerate(clients)
    ]


def _repeated(tree: Params, times: int) -> Params:
    """K copies one after the other along the replica axis; class-major matrices stay so."""
    if times == 1:
        return tree
    turned = {name: value.ndim > 2 and value.mT.is_contiguous() for name, value in tree.items()}
    return {
        name: torch.cat([value.mT] * times).mT if turned[name] else torch.cat([value] * times)
        for name, value in tree.items()
    }


def _checked(
    task: Task, batches: Sequence[Batch], where: str
) -> Callable[[Params], tuple[Tensor, Params]]:
    """The task's gradient, refused at the first loss that is not a number."""

    def gradient(at: Params) -> tuple[Tensor, Params]:
        loss, slope = task.gradient(at, batches)
        if not finite(loss.sum()):
            raise NonFinite(f"the loss is not finite ({where}): lower [local] lr or mend the data")
        return loss, slope

    return gradient


def _unstopped(task: Task, batches: Sequence[Batch]) -> Callable[[Params], tuple[Tensor, Params]]:
    """The task's gradient with 0 for entries that are no numbers, and none beyond `LARGE`, so that
    no map fails: a run that stops at one client's numbers would tell of that client."""

    def gradient(at: Params) -> tuple[Tensor, Params]:
        loss, slope = task.gradient(at, batches)
        return loss, {
            name: value.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGE, LARGE)
            for name, value in slope.items()
        }

    return gradient
