"""Algorithm 1 of the Stability note, client by client, and the features that change messages.

A message contains trees: the model under the name "model", and states under their own names.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from fedmuon.core.rng import Draw, generator
from reference.compressors import Compressor, whole
from reference.trees import Tree, Trees, each, is_statistic, mean, zeros

MODEL = "model"


@dataclass(frozen=True)
class Problem:
    """The samples of all clients, a model, and the settings of a run.

    Attributes:
        start: The first model.
        samples: The inputs and labels of each client.
        gradient: Gradient of the mean loss of a batch, for (model, inputs, labels).
        orthogonal: Orthogonalizer of a matrix, for (M, round, client, step).
        statistics: The running statistics after a batch, for (model, inputs).
        seed: Seed of all draws.
        rounds: Number of rounds.
        per_round: Number of clients in a round.
        steps: Number of local steps.
        batch: Size of a mini-batch, or 0 for all samples.
        epochs: If not 0, each client takes as many steps as these passes need.
        factors: The step-size factor of each round.
        by_samples: Whether a client's weight in the mean is its number of samples.
        versions: If replies are late, the replies of each round as pairs (client, round in which
            the client received its model).
        weight: The weight of a reply that is so many rounds late.
        mixes: Whether a reply pulls the newest model towards the client's model.
    """

    start: Tree
    samples: Sequence[tuple[np.ndarray, np.ndarray]]
    gradient: Callable[[Tree, np.ndarray, np.ndarray], Tree]
    orthogonal: Callable[[np.ndarray, int, int, int], np.ndarray]
    seed: int
    rounds: int
    per_round: int
    steps: int
    batch: int = 0
    epochs: float = 0.0
    factors: Sequence[float] = ()
    by_samples: bool = False
    versions: Sequence[Sequence[tuple[int, int]]] = ()
    weight: Callable[[int], float] = lambda late: 1 / math.sqrt(1 + late)
    mixes: bool = False
    statistics: Callable[[Tree, np.ndarray], Tree] = lambda model, inputs: {}

    def cohort(self, round: int) -> list[tuple[int, int]]:
        """The clients of a round in ascending order, and from which round their model is."""
        if self.versions:
            return sorted(self.versions[round])
        rng = generator(self.seed, Draw.SCHEDULE, round=round)
        drawn = rng.choice(len(self.samples), self.per_round, replace=False)
        return [(client, round) for client in sorted(drawn.tolist())]


@dataclass(frozen=True)
class Visit:
    """A client's part in the round from which its model is."""

    problem: Problem
    round: int
    client: int

    @property
    def steps(self) -> int:
        problem, size = self.problem, len(self.problem.samples[self.client][1])
        if not problem.epochs:
            return problem.steps
        return max(1, math.ceil(problem.epochs * size / problem.batch))

    @property
    def factor(self) -> float:
        return self.problem.factors[self.round] if self.problem.factors else 1.0

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = self.problem.samples[self.client]
        if not 0 < self.problem.batch < len(labels):
            return inputs, labels
        key = {"round": self.round, "client": self.client, "step": step}
        rng = generator(self.problem.seed, Draw.BATCH, **key)
        rows = rng.choice(len(labels), self.problem.batch, replace=False)
        return inputs[rows], labels[rows]

    def gradient(self, model: Tree, step: int) -> Tree:
        return self.problem.gradient(model, *self.batch(step))

    def orthogonal(self, momentum: Tree, step: int) -> Tree:
        return each(lambda M: self.problem.orthogonal(M, self.round, self.client, step), momentum)

    def statistics(self, model: Tree, step: int) -> Tree:
        return self.problem.statistics(model, self.batch(step)[0])


@dataclass(frozen=True)
class Answered:
    """What the server's rule knows of a round.

    Attributes:
        weights: The weight of each reply in the mean; their sum is 1.
        steps: The number of local steps of each reply.
        factor: The step-size factor of the round.
    """

    weights: Sequence[float]
    steps: Sequence[int]
    factor: float


def replace_by_mean(server: Trees, means: Trees, answered: Answered) -> Trees:
    return means


def mean_trees(replies: Sequence[Trees], weights: Sequence[float]) -> Trees:
    return {tree: mean([reply[tree] for reply in replies], weights) for tree in replies[0]}


@dataclass(frozen=True)
class Method:
    """A federated method.

    Attributes:
        client: Function (visit, received trees, the client's own trees) that returns trees. It
            changes the client's own trees.
        server: Function (server's trees, means of the returned trees, answered).
        first: Function of the first model that returns the server's states.
        sent: Names of the states that clients receive.
        directional: Whether clients return a direction in place of a model.
        personal: Name patterns of parameters that stay on the client.
        codecs: How a state is written in messages: the name of the state -> C(x).
        combine: Function (trees of all replies, weights) that returns their mean.
        trained: Function (trees, seed, round) that returns what privacy of clients clips.
        restored: Function (clipped trees, server's trees, seed, round) that returns whole trees.
        begun: Function (server's trees, round) that returns the trees from which clients start.
    """

    client: Callable[[Visit, Trees, Trees], Trees]
    server: Callable[[Trees, Trees, Answered], Trees] = replace_by_mean
    first: Callable[[Tree], Trees] = lambda model: {}
    sent: tuple[str, ...] = ()
    directional: bool = False
    personal: str = ""
    codecs: Mapping[str, Compressor] = field(default_factory=dict)
    combine: Callable[[Sequence[Trees], Sequence[float]], Trees] = mean_trees
    trained: Callable[[Trees, int, int], Trees] = lambda trees, seed, round: trees
    restored: Callable[[Trees, Trees, int, int], Trees] = lambda trees, server, seed, round: trees
    begun: Callable[[Trees, int], Trees] = lambda trees, round: trees


@dataclass(frozen=True)
class Channel:
    """How messages are compressed: by clients (with feedback), and by the server."""

    up: Compressor = whole
    feedback: str = "none"
    down: Compressor = whole
    seed: int = 0


@dataclass(frozen=True)
class Clipping:
    """Client-level privacy: each update is clipped to `bound`, and the mean is noisy.

    With "central" trust, the server adds noise to the sum. With "local" trust, each client adds
    noise to its own update.
    """

    bound: float
    noise: float = 0.0
    trust: str = "central"


@dataclass
class Result:
    """The server's trees after all rounds, and the trees that each client stores."""

    server: Trees
    memories: list[Trees]


def run(
    problem: Problem,
    method: Method,
    channel: Channel | None = None,
    clipping: Clipping | None = None,
) -> Result:
    """Run all rounds, client by client."""
    channel = channel or Channel(seed=problem.seed)
    server: Trees = {MODEL: problem.start, **method.first(problem.start)}
    clients, history = len(problem.samples), list[Trees]()
    memories: list[Trees] = [{} for _ in range(clients)]
    estimates: Trees = {}  # EF21: the mean of all clients' memories
    for number in range(problem.rounds):
        history.append(server)
        cohort, replies = problem.cohort(number), list[Trees]()
        steps, sizes = [], []
        estimates_before = {tree: dict(entries) for tree, entries in estimates.items()}
        for client, version in cohort:
            visit = Visit(problem, version, client)
            then, memory = history[version], memories[client]
            received = received_trees(method, channel, then, version)
            adopted = with_personal(method, received, memory, problem.start)
            returned = method.client(visit, adopted, memory)
            returned = encoded(method, without_personal(method, returned, memory))
            if clipping:
                returned = method.trained(returned, problem.seed, version)
                received = method.trained(method.begun(received, version), problem.seed, version)
            if clipping and clipping.trust == "local":
                returned = private_reply(problem, clipping, returned, received, version, client)
            base = {} if method.directional else received
            reply = compressed(channel, returned, base, received, memory, version, client)
            if channel.feedback == "ef21":
                share = len(cohort) / clients
                reply = estimated(reply, base, estimates_before, estimates, share, clients)
            if problem.versions and not method.directional:
                weight = problem.weight(number - version)
                newest = {tree: server[tree] for tree in received}
                reply = late(reply, server, newest if problem.mixes else received, weight)
            replies.append(reply)
            steps.append(visit.steps)
            sizes.append(len(problem.samples[client][1]) if problem.by_samples else 1)
        if clipping:
            before = method.trained(method.begun(server, number), problem.seed, number)
            means = clipped_mean(problem, clipping, before, replies, number)
            means = method.restored(means, server, problem.seed, number)
        else:
            means = method.combine(replies, sizes)
        factor = problem.factors[number] if problem.factors else 1.0
        weights = [size / sum(sizes) for size in sizes]
        server = {**server, **method.server(server, means, Answered(weights, steps, factor))}
        server[MODEL] = {**history[-1][MODEL], **server[MODEL]}  # personal parameters stay
    return Result(server, memories)


# What a client receives


def received_trees(method: Method, channel: Channel, server: Trees, round: int) -> Trees:
    """The model and the sent states as the client reads them."""
    sent = {tree: server[tree] for tree in (MODEL, *method.sent)}
    sent = through(channel.down, sent, channel.seed, Draw.BROADCAST, round, 0, {})
    sent = without_personal(method, sent, {})
    return encoded(method, sent)


def encoded(method: Method, trees: Trees) -> Trees:
    """The trees, of which the states with a codec are written and read."""
    rng = np.random.default_rng(0)  # codecs draw nothing
    return {
        tree: {name: method.codecs[tree](value, rng, {}) for name, value in arrays.items()}
        if tree in method.codecs
        else arrays
        for tree, arrays in trees.items()
    }


def is_personal(method: Method, name: str) -> bool:
    patterns = [pattern.strip() for pattern in method.personal.split(",")]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def with_personal(method: Method, received: Trees, memory: Trees, first: Tree) -> Trees:
    """The received trees, with the client's own parameters in the model."""
    own = {name: value for name, value in first.items() if is_personal(method, name)}
    own |= memory.get("personal", {}) if own else {}
    return {**received, MODEL: {**received[MODEL], **own}}


def without_personal(method: Method, trees: Trees, memory: Trees) -> Trees:
    """The trees without personal parameters, which the client stores."""
    own = {name: value for name, value in trees[MODEL].items() if is_personal(method, name)}
    if own:
        memory["personal"] = own
    shared = {name: value for name, value in trees[MODEL].items() if name not in own}
    return {**trees, MODEL: shared}


# What a client returns


def through(
    compressor: Compressor,
    trees: Trees,
    seed: int,
    purpose: Draw,
    round: int,
    client: int,
    kept: dict[str, Any],
) -> Trees:
    """C(x) for each array except running statistics. Each array has its own draws."""
    after: Trees = {}
    for number, tree in enumerate(sorted(trees)):
        after[tree] = {}
        for block, (name, value) in enumerate(sorted(trees[tree].items())):
            key = {"round": round, "client": client, "step": number, "block": block}
            rng, own = generator(seed, purpose, **key), kept.setdefault(f"{tree}.{name}", {})
            after[tree][name] = value if is_statistic(name) else compressor(value, rng, own)
    return after


def compressed(
    channel: Channel,
    returned: Trees,
    base: Trees,
    received: Trees,
    memory: Trees,
    round: int,
    client: int,
) -> Trees:
    """What the server reads: the base plus C(update), where the client may correct by feedback."""
    sign = {"none": 0, "error": 1, "ef21": -1}[channel.feedback]
    feedback = memory.setdefault("compression", {})
    kept: dict[str, Any] = memory.setdefault("kept", {})
    targets: Trees = {}
    for tree, arrays in returned.items():
        update = {name: x - base[tree][name] if tree in base and not is_statistic(name) else x
                  for name, x in arrays.items()}  # fmt: skip
        targets[tree] = {
            name: u + sign * feedback.get(f"{tree}.{name}", np.zeros_like(u))
            for name, u in update.items()
        }
    purpose = Draw.COMPRESSION
    sent = through(channel.up, targets, channel.seed, purpose, round, client, kept)
    for tree, arrays in sent.items():
        for name, c in arrays.items():
            key, target = f"{tree}.{name}", targets[tree][name]
            if channel.feedback == "error":
                feedback[key] = target - c
            if channel.feedback == "ef21":
                feedback[key] = feedback.get(key, np.zeros_like(c)) + c
    return {
        tree: {name: c + base[tree][name] if tree in base and not is_statistic(name) else c
               for name, c in arrays.items()}
        for tree, arrays in sent.items()
    }  # fmt: skip


def estimated(
    reply: Trees, base: Trees, before: Trees, estimates: Trees, share: float, clients: int
) -> Trees:
    """EF21: the server reads g plus its share of the change, and moves g by the change / N."""
    read: Trees = {}
    for tree, arrays in reply.items():
        g = estimates.setdefault(tree, zeros(arrays))
        old = before.get(tree, zeros(arrays))
        received = base.get(tree, zeros(arrays))
        change = each(np.subtract, arrays, received)
        read[tree] = each(lambda b, g, c: b + g + share * c, received, old, change)
        estimates[tree] = each(lambda g, c: g + c / clients, g, change)
    return read


def late(reply: Trees, server: Trees, received: Trees, weight: float) -> Trees:
    """The weighted difference between the reply and `received`, added to the newest trees.

    States that clients did not receive are changes already. They are not weighted.
    """
    return {
        tree: {
            name: value
            if tree not in received or is_statistic(name)
            else server[tree][name] + weight * (value - received[tree][name])
            for name, value in arrays.items()
        }
        for tree, arrays in reply.items()
    }


# What the server does


def shortened(update: Trees, bound: float) -> Trees:
    """The update, or the multiple of it whose norm is the bound."""
    norm = math.sqrt(sum((u**2).sum() for arrays in update.values() for u in arrays.values()))
    factor = min(1.0, bound / norm)
    return {tree: each(lambda u: factor * u, arrays) for tree, arrays in update.items()}


def noisy(trees: Trees, spread: float, seed: int, round: int, client: int) -> Trees:
    """The trees plus normal noise, where each array has its own draws."""
    after, block = {tree: dict(arrays) for tree, arrays in trees.items()}, 0
    for arrays in after.values():
        for name, value in arrays.items():
            rng = generator(seed, Draw.NOISE, round=round, client=client, block=block)
            arrays[name] = value + spread * rng.standard_normal(value.shape)
            block += 1
    return after


def total(updates: Sequence[Trees]) -> Trees:
    """The sum of the updates."""
    return {
        tree: each(
            lambda *parts: np.asarray(np.sum(parts, axis=0)), *(update[tree] for update in updates)
        )
        for tree in updates[0]
    }


def private_reply(
    problem: Problem,
    clipping: Clipping,
    returned: Trees,
    received: Trees,
    round: int,
    client: int,
) -> Trees:
    """The reply of a client that does not trust the server: a clipped update with noise."""
    update = {tree: each(np.subtract, returned[tree], received[tree]) for tree in returned}
    update = shortened(update, clipping.bound)
    update = noisy(update, clipping.noise * clipping.bound, problem.seed, round, client)
    return {tree: each(np.add, update[tree], received[tree]) for tree in update}


def clipped_mean(
    problem: Problem, clipping: Clipping, server: Trees, replies: Sequence[Trees], round: int
) -> Trees:
    """The server's trees plus (the sum of clipped updates and noise) / K."""
    updates = [
        {tree: each(np.subtract, reply[tree], server[tree]) for tree in reply} for reply in replies
    ]
    if clipping.trust == "central":
        summed = total([shortened(update, clipping.bound) for update in updates])
        summed = noisy(summed, clipping.noise * clipping.bound, problem.seed, round, 0)
    else:
        summed = total(updates)
    count = problem.per_round
    return {tree: each(lambda t, x: x + t / count, summed[tree], server[tree]) for tree in summed}
