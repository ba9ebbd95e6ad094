"""How low-rank adapters are averaged, with whole products B A, written from the papers.

Each function changes a method of `methods`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedmuon.core.rng import Draw, generator
from reference.rounds import MODEL, Method, Visit, mean_trees
from reference.trees import Tree, Trees, each

SUBSPACE = Draw.SUBSPACE
Inner = Callable[[Tree, int], Tree]  # (whole model, round) -> what is trained
Whole = Callable[[Tree, Tree, int], Tree]  # (trained part, whole model, round) -> whole model


def layers(model: Tree) -> list[str]:
    return [name.removesuffix("lora_A.weight") for name in model if name.endswith("lora_A.weight")]


def a_of(layer: str) -> str:
    return layer + "lora_A.weight"


def b_of(layer: str) -> str:
    return layer + "lora_B.weight"


# FFA-LoRA


def freeze_a(method: Method, scale: float = 1.0) -> Method:
    """Clients train B alone, and A stays as it was first.

    `scale` multiplies A, as a control.
    """

    def inner(model: Tree, round: int) -> Tree:
        return {name: x for name, x in model.items() if not name.endswith("lora_A.weight")}

    def whole(part: Tree, model: Tree, round: int) -> Tree:
        return {**model, **part}

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        start = {**visit.problem.start, **received[MODEL]}
        start |= {a_of(layer): scale * start[a_of(layer)] for layer in layers(start)}
        trained = {**received, MODEL: inner(start, visit.round)}
        return method.client(restricted(visit, start, inner, whole, inner), trained, own)

    return replace(method, client=client, first=lambda model: method.first(inner(model, 0)))


def restricted(visit: Visit, start: Tree, inner: Inner, whole: Whole, slope: Inner) -> Visit:
    """The visit with a problem whose model is a part of the whole model."""
    problem = visit.problem

    def gradient(part: Tree, inputs: Any, labels: Any) -> Tree:
        model = whole(part, start, visit.round)
        return slope(problem.gradient(model, inputs, labels), visit.round)

    return replace(visit, problem=replace(problem, gradient=gradient))


# The mean of the products


def exact(method: Method, halved: bool = False) -> Method:
    """New factors by the singular values of the whole mean product. Momenta start again.

    With `halved`, as a control, the first client has half of its weight.
    """

    def combine(replies: Sequence[Trees], weights: Sequence[float]) -> Trees:
        means = mean_trees(replies, weights)
        shares = np.array(weights) / np.sum(weights)
        shares[0] *= 0.5 if halved else 1.0
        for layer in layers(means[MODEL]):
            a, b = a_of(layer), b_of(layer)
            products = [reply[MODEL][b] @ reply[MODEL][a] for reply in replies]
            mean = np.tensordot(shares, products, 1)
            means[MODEL][a], means[MODEL][b] = balanced(mean, len(means[MODEL][a]))
            for tree in means.keys() - {MODEL}:
                for name in (a, b):
                    means[tree][name] = 0 * means[tree][name]
        return means

    return replace(method, combine=combine)


def balanced(product: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A and B of this rank. The largest entry of each column of B is positive."""
    U, values, V = np.linalg.svd(product, full_matrices=False)
    B, A = U[:, :rank] * np.sqrt(values[:rank]), np.sqrt(values[:rank])[:, None] * V[:rank]
    signs = np.sign(B[np.abs(B).argmax(0), range(rank)])
    return signs[:, None] * A, B * signs


# Clients of different ranks


def of_ranks(method: Method, ranks: Sequence[int]) -> Method:
    """Client i trains adapters of its own rank, and the server fills its replies with zeros."""

    def cut(tree: Tree, rank: int) -> Tree:
        return {name: x[:rank] if "lora_A" in name else x[:, :rank] for name, x in tree.items()}

    def filled(tree: Tree, like: Tree) -> Tree:
        after = {name: np.zeros_like(like[name]) for name in tree}
        for name, x in tree.items():
            after[name][: x.shape[0], : x.shape[1]] = x
        return after

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        rank = ranks[visit.client % len(ranks)]
        small = {tree: cut(x, rank) for tree, x in received.items()}
        returned = method.client(visit, small, own)
        return {tree: filled(x, received[MODEL]) for tree, x in returned.items()}

    return replace(method, client=client)


# FedSubMuon


def bases(
    seed: int, layer: int, period: int, shape: tuple[int, int], rank: int
) -> tuple[np.ndarray, ...]:
    """U [m, r] and V [n, r] of a layer in a period."""
    drawn = []
    for side, size in enumerate(shape):
        rng = generator(seed, SUBSPACE, round=period, client=side, block=layer)
        drawn.append(np.linalg.qr(rng.standard_normal((size, rank)))[0])
    return tuple(drawn)


@dataclass(frozen=True)
class Spaces:
    """The bases of all periods, and X between those of a round.

    `turned` adds a number to all entries of U, as a control.
    """

    rank: int
    rounds: int
    periods: int
    turned: float = 0.0

    def at(self, round: int) -> tuple[int, slice]:
        """The period of a round, and the columns of B that belong to it."""
        now = round // self.rounds if self.rounds else 0
        return now, slice(now * self.rank, (now + 1) * self.rank)

    def of(self, model: Tree, seed: int) -> dict[str, list[tuple[np.ndarray, ...]]]:
        """U and V of each layer and period."""
        return {
            layer: [
                bases(seed, number, period, (len(model[b_of(layer)]), model[a_of(layer)].shape[1]),
                      self.rank)
                for period in range(self.periods)
            ]
            for number, layer in enumerate(layers(model))
        }  # fmt: skip

    def begun(self, trees: Trees, round: int) -> Trees:
        """The trees, whose momenta start again with each period."""
        if round % self.rounds if self.rounds else round:
            return trees
        return {tree: x if tree == MODEL else each(np.zeros_like, x) for tree, x in trees.items()}

    def inner(self, model: Tree, seed: int, round: int) -> Tree:
        drawn, (now, block) = self.of(model, seed), self.at(round)
        U = {layer: drawn[layer][now][0] + self.turned for layer in drawn}
        return {b_of(layer): U[layer].T @ model[b_of(layer)][:, block] for layer in drawn}

    def whole(self, part: Tree, model: Tree, seed: int, round: int) -> Tree:
        drawn, (now, block) = self.of(model, seed), self.at(round)
        after = {name: x.copy() for name, x in model.items()}
        for layer in drawn:
            after[a_of(layer)] = np.concatenate([V.T for _, V in drawn[layer]])
            after[b_of(layer)][:, block] = (drawn[layer][now][0] + self.turned) @ part[b_of(layer)]
        return after


def subspace(method: Method, rank: int, rounds: int, periods: int, turned: float = 0.0) -> Method:
    """Clients train X between U and V. The products of earlier periods stay."""
    spaces = Spaces(rank, rounds, periods, turned)

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        seed = visit.problem.seed

        def inner(model: Tree, round: int) -> Tree:
            return spaces.inner(model, seed, round)

        def whole(part: Tree, model: Tree, round: int) -> Tree:
            return spaces.whole(part, model, seed, round)

        X = inner(received[MODEL], visit.round)
        model = whole(X, received[MODEL], visit.round)
        trained = {**spaces.begun(received, visit.round), MODEL: X}
        returned = method.client(restricted(visit, model, inner, whole, inner), trained, own)
        return {**returned, MODEL: whole(returned[MODEL], model, visit.round)}

    def first(model: Tree) -> Trees:
        square = {b_of(layer): np.zeros((rank, rank)) for layer in layers(model)}
        return method.first(square)

    def trained(trees: Trees, seed: int, round: int) -> Trees:
        return {**trees, MODEL: spaces.inner(trees[MODEL], seed, round)}

    def restored(trees: Trees, server: Trees, seed: int, round: int) -> Trees:
        return {**trees, MODEL: spaces.whole(trees[MODEL], server[MODEL], seed, round)}

    return replace(
        method, client=client, first=first, trained=trained, restored=restored, begun=spaces.begun
    )


# FedSubMuon with bases that follow the gradient


@dataclass(frozen=True)
class Following:
    """U and V of the next period from G V' and G^T U' with the whole gradients G of the weights.

    B [m, R] contains U X in the columns of the period, and U in the next ones.
    """

    rank: int
    rounds: int
    periods: int

    def at(self, period: int) -> slice:
        return slice(period * self.rank, (period + 1) * self.rank)

    def is_last(self, round: int) -> bool:
        """Whether another period follows the round."""
        return (round + 1) % self.rounds == 0 and (round + 1) // self.rounds < self.periods

    def drawn(self, model: Tree, seed: int, layer: str, period: int) -> tuple[np.ndarray, ...]:
        shape = len(model[b_of(layer)]), model[a_of(layer)].shape[1]
        return bases(seed, layers(model).index(layer), period, shape, self.rank)

    def begun(self, model: Tree, sketch: Tree, seed: int, round: int) -> Tree:
        """The model from which clients start a round."""
        now, after = round // self.rounds, {name: x.copy() for name, x in model.items()}
        for layer in layers(model) if round % self.rounds == 0 else ():
            A, B = after[a_of(layer)], after[b_of(layer)]
            U, V = self.drawn(model, seed, layer, 0)
            if round:
                U, V = (np.linalg.qr(sketch[name(layer)])[0] for name in (b_of, a_of))
            A[now * self.rank :] = 0
            A[self.at(now)], B[:, self.at(now)], B[:, self.at(now + 1)] = V.T, 0, U
        return after

    def sketch(self, visit: Visit, model: Tree) -> Tree:
        """With A = (A, I) and B = (B, 0), the gradient of B contains that of the weight."""
        wide, sketch = dict(model), {}
        for layer in layers(model):
            A, B = model[a_of(layer)], model[b_of(layer)]
            wide[a_of(layer)] = np.vstack([A, np.eye(A.shape[1])])
            wide[b_of(layer)] = np.hstack([B, np.zeros((len(B), A.shape[1]))])
        G, ahead = visit.gradient(wide, 0), visit.round // self.rounds + 1
        for layer in layers(model):
            of_weight = G[b_of(layer)][:, len(model[a_of(layer)]) :]
            U, V = self.drawn(model, visit.problem.seed, layer, ahead)
            sketch[b_of(layer)], sketch[a_of(layer)] = of_weight @ V, of_weight.T @ U
        return sketch

    def nothing(self, model: Tree) -> Tree:
        return {
            name: np.zeros((x.shape[1] if name.endswith("lora_A.weight") else len(x), self.rank))
            for name, x in model.items()
        }


def following(
    method: Method, rank: int, rounds: int, periods: int, of_trained: bool = False
) -> Method:
    """Bases that follow the gradient at the first model of the last round of a period.

    With `of_trained`, as a control, the sketches are taken after the local steps.
    """
    spaces = Following(rank, rounds, periods)

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        period = visit.round // rounds
        model = spaces.begun(received[MODEL], received["sketch"], visit.problem.seed, visit.round)
        U = {layer: model[b_of(layer)][:, spaces.at(period + 1)] for layer in layers(model)}

        def inner(model: Tree, round: int) -> Tree:
            return {b_of(at): U[at].T @ model[b_of(at)][:, spaces.at(period)] for at in U}

        def whole(part: Tree, model: Tree, round: int) -> Tree:
            after = {name: x.copy() for name, x in model.items()}
            for layer in U:
                after[b_of(layer)][:, spaces.at(period)] = U[layer] @ part[b_of(layer)]
            return after

        states = {tree: x for tree, x in received.items() if tree not in (MODEL, "sketch")}
        if visit.round % rounds == 0:
            states = {tree: each(np.zeros_like, x) for tree, x in states.items()}
        trained = {**states, MODEL: inner(model, visit.round)}
        returned = method.client(restricted(visit, model, inner, whole, inner), trained, own)
        after, sketch = whole(returned[MODEL], model, visit.round), spaces.nothing(model)
        if spaces.is_last(visit.round):
            sketch = spaces.sketch(visit, after if of_trained else model)
        due = np.asarray(float(spaces.is_last(visit.round + 1)))
        return {**returned, MODEL: after, "sketch": {**sketch, "due": due}}

    def first(model: Tree) -> Trees:
        square = {b_of(layer): np.zeros((rank, rank)) for layer in layers(model)}
        sketch = {**spaces.nothing(model), "due": np.asarray(float(spaces.is_last(0)))}
        return {**method.first(square), "sketch": sketch}

    return replace(method, client=client, first=first, sent=(*method.sent, "sketch"))
