"""Recipes: named chains, and what their server does with the average.

A recipe says which link states travel to the clients (`sent`), which come back and are averaged
(`returned`), and how the server moves from the old model to the next one. Everything else about
a federated round is the same for all.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fedmuon.config import Local, OrthogonalizerTable
from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Chain, Number, State, States, per_replica, zeros
from fedmuon.transforms.momentum import ema
from fedmuon.transforms.oracle import gradient
from fedmuon.transforms.orthogonal import named, orthogonalize
from fedmuon.transforms.step import align, descend

# (old model, mean of the clients' models, states) -> (next model, next states)
ServerRule = Callable[[Params, Params, States], tuple[Params, States]]


@dataclass(frozen=True)
class Recipe:
    """A local chain with its server: `kept` are the server's states, zero at the start."""

    chain: Chain
    server: ServerRule
    sent: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def replace_by_mean(old: Params, mean: Params, states: States) -> tuple[Params, States]:
    """X <- mean of the clients' X (001 (4))."""
    return mean, states


def server_momentum(memory: float) -> ServerRule:
    """FedAvgM: v <- beta v + (mean - X), X <- X + v."""

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        velocity = states["momentum"]
        after = {name: memory * velocity[name] + (mean[name] - old[name]) for name in old}
        return {name: old[name] + after[name] for name in old}, {**states, "momentum": after}

    return rule


def remember_direction(lr: Number, steps: int) -> ServerRule:
    """Delta_G <- (X - mean) / (eta E): the last global update direction (001 Remark 3.2)."""

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        direction: State = {
            name: (old[name] - mean[name]) / (per_replica(lr, old[name]) * steps) for name in old
        }
        return mean, {**states, "global-direction": direction}

    return rule


def build(
    local: Local,
    orthogonalizer: OrthogonalizerTable,
    lr: Number | None = None,
    regularization: Number | None = None,
) -> Recipe:
    """The recipe that the config names; lr and lambda may be given per replica [S]."""
    rate = local.lr if lr is None else lr
    descent = descend(rate)
    muon = (gradient(), ema(local.momentum), orthogonalize(named(orthogonalizer, regularization)))
    sgd, plain = Chain((gradient(), descent)), Chain((*muon, descent))
    shared = ("momentum",)
    aligned = Chain((*muon, align(local.alignment), descent))
    recipes = {
        "fedavg": Recipe(sgd, replace_by_mean),
        "fedavgm": Recipe(sgd, server_momentum(local.server_momentum), kept=shared),
        "local-muon": Recipe(plain, replace_by_mean),
        "fedmuon": Recipe(plain, replace_by_mean, shared, shared, shared),
        "fedmuon-aligned": Recipe(
            aligned,
            remember_direction(rate, local.steps),
            sent=("momentum", "global-direction"),
            returned=shared,
            kept=("momentum", "global-direction"),
        ),
    }
    return recipes[local.recipe]


def initial_states(recipe: Recipe, params: Params) -> States:
    """The server's states before the first round."""
    return {name: zeros(params) for name in recipe.kept}
