"""Recipes: named chains, and what their server does with the average.

A recipe says which link states travel to the clients (`sent`), which come back and are averaged
(`returned`), and how the server moves from the old model to the next one. Everything else about
a federated round is the same for all.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from fedmuon.config import Local, OrthogonalizerTable
from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Chain, Link, Number, State, States, per_replica, zeros
from fedmuon.transforms.momentum import momentum
from fedmuon.transforms.oracle import gradient
from fedmuon.transforms.orthogonal import DRAWING, named, orthogonalize
from fedmuon.transforms.route import adamw, only
from fedmuon.transforms.step import align, descend, normalize

# (old model, mean of the clients' models, states) -> (next model, next states)
ServerRule = Callable[[Params, Params, States], tuple[Params, States]]


@dataclass(frozen=True)
class Recipe:
    """A local chain with its server: `kept` are the server's states between rounds."""

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


def remember_direction(lr: Number, steps: int, others: Mapping[str, Number]) -> ServerRule:
    """Delta_G <- (X - mean) / (eta E): the last global update direction (001 Remark 3.2); `others`
    names the parameters with a step size of their own."""

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        direction: State = {
            name: (old[name] - mean[name]) / (per_replica(others.get(name, lr), old[name]) * steps)
            for name in old
        }
        return mean, {**states, "global-direction": direction}

    return rule


def build(
    local: Local,
    orthogonalizer: OrthogonalizerTable,
    lr: Number | None = None,
    regularization: Number | None = None,
    routed: Mapping[str, int] | None = None,
) -> Recipe:
    """The recipe that the config names; lr and lambda may be given per replica [S].

    `routed` says of every parameter of a network into how many matrices a Muon recipe cuts it to
    orthogonalize them; those with 0 take the auxiliary step. Without it all are matrices.
    """
    rate = local.lr if lr is None else lr
    others = {name: aux_rate(local) for name, count in (routed or {}).items() if not count}
    descent, heavy = descend(rate, others, local.weight_decay), _momentum(local)
    muon = _muon(local, _orthogonalize(local, orthogonalizer, regularization, routed), others)
    sgd, plain = Chain((gradient(), descent)), Chain((*muon, descent))
    shared = ("momentum",)
    aligned = Chain((*muon, align(local.alignment), descent))
    recipes = {
        "sgd": _kept(gradient(), heavy, descent),
        "normalized-sgd": _kept(gradient(), heavy, normalize(), descent),
        "adamw": _kept(gradient(), adamw(decay=0.0), descent),
        "muon": _kept(*muon, descent),
        "fedavg": Recipe(sgd, replace_by_mean),
        "fedavgm": Recipe(sgd, server_momentum(local.server_momentum), kept=shared),
        "local-muon": Recipe(plain, replace_by_mean),
        "fedmuon": Recipe(plain, replace_by_mean, shared, shared, shared),
        "fedmuon-aligned": Recipe(
            aligned,
            remember_direction(rate, local.steps, others),
            sent=("momentum", "global-direction"),
            returned=shared,
            kept=("momentum", "global-direction"),
        ),
    }
    return recipes[local.recipe]


def _kept(*links: Link) -> Recipe:
    """The chain of a centralised optimizer: every state lives from round to round, and is averaged
    where there are several clients."""
    held = tuple(link.name for link in links if link.name in ("momentum", "adamw"))
    return Recipe(Chain(links), replace_by_mean, held, held, held)


def _momentum(local: Local) -> Link:
    return momentum(local.momentum, local.momentum_form)


def _orthogonalize(
    local: Local,
    table: OrthogonalizerTable,
    regularization: Number | None,
    blocks: Mapping[str, int] | None,
) -> Link:
    apply = named(table, regularization)
    return orthogonalize(apply, local.adjust, table.name not in DRAWING, blocks)


def _muon(local: Local, orthogonal: Link, others: Collection[str]) -> tuple[Link, ...]:
    """Gradient, momentum, orthogonalization; `others` keep M (sgd), or take AdamW's step. AdamW's
    moments are not sent by the federated recipes: it begins every local round afresh."""
    heavy = _momentum(local)
    if not others:
        return gradient(), heavy, orthogonal

    def hidden(name: str) -> bool:
        return name not in others

    if local.aux == "sgd":
        return gradient(), heavy, only(hidden, orthogonal)
    beside = only(others.__contains__, adamw())
    return gradient(), beside, only(hidden, heavy), only(hidden, orthogonal)


def aux_rate(local: Local) -> float:
    """The auxiliary step size; by default that of FedAvg in 001 (Table 3), or torch's for AdamW."""
    return local.aux_lr or (0.05 if local.aux == "sgd" else 1e-3)


def initial_states(recipe: Recipe, params: Params) -> States:
    """The server's states before the first round: those of its links, and 0 for its own."""
    made = {link.name: link.init for link in recipe.chain.links}
    return {name: made.get(name, zeros)(params) for name in recipe.kept}
