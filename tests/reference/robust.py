"""Hostile clients and defences of the server, reply by reply, as changes of a method."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import norm

from fedmuon.core.rng import Draw, generator
from reference.rounds import MODEL, Method, Visit
from reference.trees import Tree, Trees


@dataclass
class Seen:
    """The clients of a round, with the round and the trees that each received."""

    clients: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    received: list[Trees] = field(default_factory=list)


def reading(method: Method, change: Callable[[Seen, list[Trees]], list[Trees]]) -> Method:
    """The method, whose server changes all replies of a round before it combines them."""
    seen = Seen()

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        seen.clients.append(visit.client)
        seen.rounds.append(visit.round)
        seen.received.append(received)
        return method.client(visit, received, own)

    def combine(replies: Sequence[Trees], weights: Sequence[float]) -> Trees:
        changed = change(seen, list(replies))
        seen.clients, seen.rounds, seen.received = [], [], []
        return method.combine(changed, weights)

    return replace(method, client=client, combine=combine)


def difference(method: Method, reply: Trees, received: Trees) -> Trees:
    """The change of a client: reply minus what it received, or the reply itself."""
    changes: Trees = {}
    for tree, arrays in reply.items():
        changes[tree] = {}
        for name, value in arrays.items():
            known = tree in received and not (tree == MODEL and method.directional)
            changes[tree][name] = value - received[tree][name] if known else value
    return changes


def moved(method: Method, change: Trees, received: Trees) -> Trees:
    reply: Trees = {}
    for tree, arrays in change.items():
        reply[tree] = {}
        for name, value in arrays.items():
            known = tree in received and not (tree == MODEL and method.directional)
            reply[tree][name] = value + received[tree][name] if known else value
    return reply


def attacked(
    method: Method, kind: str, hostile: Sequence[int], factor: float, seed: int, first: int = 0
) -> Method:
    """The method with hostile clients."""
    if kind in ("alie", "inner-product", "mimic"):

        def change(seen: Seen, replies: list[Trees]) -> list[Trees]:
            if seen.rounds[0] < first:
                return replies
            of_round = list(zip(seen.clients, replies, seen.received, strict=True))
            honest = [
                difference(method, reply, received)
                for client, reply, received in of_round
                if client not in hostile
            ]
            if not honest:
                return replies
            sent = {"alie": little, "inner-product": opposite, "mimic": copied}[kind](
                honest, len(replies), factor
            )
            return [
                moved(method, sent, received) if client in hostile else reply
                for client, reply, received in of_round
            ]

        return reading(method, change)

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        lies = visit.client in hostile and visit.round >= first
        if lies and kind == "label-flip":
            inputs, labels = visit.problem.samples[visit.client]
            samples = [*visit.problem.samples]
            samples[visit.client] = inputs, np.array([int(factor) - 1 - y for y in labels])
            visit = replace(visit, problem=replace(visit.problem, samples=samples))
        reply = method.client(visit, received, own)
        if not lies or kind == "label-flip":
            return reply
        change, block = difference(method, reply, received), 0
        for arrays in change.values():
            for name, value in arrays.items():
                if kind == "gaussian":
                    key = {"round": visit.round, "client": visit.client, "block": block}
                    noise = generator(seed, Draw.ATTACK, **key).standard_normal(value.shape)
                    total = 0.0
                    for entry in value.ravel():
                        total += float(entry) ** 2
                    arrays[name] = factor * math.sqrt(total / value.size) * noise
                else:
                    arrays[name] = (-factor if kind == "sign-flip" else factor) * value
                block += 1
        return moved(method, change, received)

    return replace(method, client=client)


def little(honest: list[Trees], participants: int, factor: float) -> Trees:
    """ALIE: the mean minus z standard deviations of each entry."""
    hostile = participants - len(honest)
    if not factor:
        supporters = max(1, math.floor(participants / 2 + 1) - hostile)
        share = (participants - hostile - supporters) / (participants - hostile)
        factor = float(norm.ppf(max(share, 0.5)))

    def entry(values: list[float]) -> float:
        average = sum(values) / len(values)
        spread = math.sqrt(sum((value - average) ** 2 for value in values) / len(values))
        return average - factor * spread

    return by_entry(honest, entry)


def opposite(honest: list[Trees], participants: int, factor: float) -> Trees:
    """Inner-product manipulation: the opposite of the mean."""
    return by_entry(honest, lambda values: -factor * sum(values) / len(values))


def copied(honest: list[Trees], participants: int, factor: float) -> Trees:
    """Mimic: the change with the largest projection on the first principal direction."""
    rows = np.stack([flat(change) for change in honest])
    centred = rows - rows.mean(0)
    direction = np.linalg.svd(centred)[2][0]
    projections = [abs(float(row @ direction)) for row in centred]
    return honest[int(np.argmax(np.round(projections, 12)))]


def by_entry(honest: list[Trees], combine: Callable[[list[float]], float]) -> Trees:
    result: Trees = {}
    for tree, arrays in honest[0].items():
        result[tree] = {}
        for name, value in arrays.items():
            entries = [combine([float(change[tree][name].flat[place]) for change in honest])
                       for place in range(value.size)]  # fmt: skip
            result[tree][name] = np.array(entries).reshape(value.shape)
    return result


def flat(trees: Trees) -> np.ndarray:
    return np.concatenate([value.ravel() for arrays in trees.values() for value in arrays.values()])


# Defences of the server


def in_ball(method: Method, radius: float, state: float = 0.0) -> Method:
    """Clip the change of the model to a radius, and the norm of each state."""

    def change(seen: Seen, replies: list[Trees]) -> list[Trees]:
        clipped = []
        for reply, received in zip(replies, seen.received, strict=True):
            moves = difference(method, reply, received)
            moves[MODEL] = shortened(moves[MODEL], radius)
            after = moved(method, moves, received)
            for tree in after:
                if tree != MODEL:
                    after[tree] = shortened(reply[tree], state)
            clipped.append(after)
        return clipped

    return reading(method, change)


def shortened(tree: Tree, limit: float) -> Tree:
    total = 0.0
    for value in tree.values():
        for entry in value.ravel():
            total += float(entry) ** 2
    factor = min(1.0, limit / math.sqrt(total)) if total else 1.0
    return {name: factor * value for name, value in tree.items()}


def mixed(method: Method, hostile: int) -> Method:
    """Replace each reply by the mean of its nearest replies, the model and states separately."""

    def change(seen: Seen, replies: list[Trees]) -> list[Trees]:
        after: list[Trees] = [{} for _ in replies]
        for tree in replies[0]:
            for number, reply in enumerate(replies):
                distances = [
                    (math.sqrt(sum(float(((reply[tree][name] - other[tree][name]) ** 2).sum())
                                   for name in reply[tree])), place)
                    for place, other in enumerate(replies)
                ]  # fmt: skip
                nearest = [place for _, place in sorted(distances)[: len(replies) - hostile]]
                after[number][tree] = {
                    name: np.mean([replies[place][tree][name] for place in nearest], 0)
                    for name in reply[tree]
                }
        return after

    return reading(method, change)
