"""Training without a server: nodes exchange messages with the neighbours in a graph (DeMuon).

Each of N nodes has a model X_i, a momentum M_i and a tracker V_i. In a round, node i computes

    M_i <- momentum M_i + (1 - momentum) G_i,       with the gradient at X_i,
    V_i <- sum_j w_ij (V_j + M_j - M_j_before),
    X_i <- sum_j w_ij (X_j - lr Orth(V_j)),

where W is doubly stochastic. The mean of the trackers is always the mean of the momenta, so a
tracker estimates the mean momentum of all nodes. A node sends two tensors per parameter to each
neighbour: first V_j + M_j - M_j_before, and then its next model before averaging.

A recipe for gossip is a recipe whose clients return directions: `direction = True`. Its chain
computes M_i, and its server's rule takes a step, which here each node takes for itself with V_i in
place of the mean direction. With all weights 1/N, every node has the server's model of this recipe.

All nodes of a process are computed in one batch along the leading axis. `gossip_rounds` runs all
nodes in this process. Other engines divide the nodes and carry the same two messages.

Source: DeMuon (arXiv:2510.01377).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedmuon.config.load import Config
from fedmuon.config.methods import has
from fedmuon.config.schema import reads
from fedmuon.federated.experiment import Client, Experiment, Round, mean_loss
from fedmuon.federated.rounds import client_updates
from fedmuon.federated.traffic import payload_bytes
from fedmuon.optim.chain import State, States, zeros
from fedmuon.optim.gossip import MODEL_OF_NODE, TRACKER, Gossip, joined
from fedmuon.optim.graphs import Graph
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Broadcast, Reply, ServerState
from fedmuon.tasks.base import Params, blocks, split_statistics

MOMENTUM = "momentum"
Messages = Mapping[int, Params]  # node -> the tensors that it sends


def with_graph(config: Config, recipe: Recipe) -> Recipe:
    """Return the recipe with the graph of the config, if its optimizer has no server."""
    if not has(config.local.recipe, "gossip"):
        return recipe
    table = config.federation
    graph = Graph(
        table.graph,
        table.clients,
        table.edge_share if reads(config, "federation.edge-share") else 1.0,
        table.graph_file if reads(config, "federation.graph-file") else "",
        table.varying_graph and reads(config, "federation.varying-graph"),
        table.seed,
    )
    return replace(recipe, stages=(*recipe.stages, Gossip(graph, gossip_rounds)))


def gossip_of(recipe: Recipe) -> Gossip:
    """Return the stage with the graph of a recipe."""
    return next(stage for stage in recipe.stages if isinstance(stage, Gossip))


# The parts of a round, for some of the nodes


def tracked(
    experiment: Experiment,
    nodes: Sequence[Client],
    memories: Mapping[int, States],
    begin: Params,
    round: int,
) -> tuple[dict[int, Params], list[Reply]]:
    """Compute the momenta, and return the first messages and the replies with the momenta.

    Args:
        experiment: The recipe, the task and the plan.
        nodes: The nodes of this process, with their samples.
        memories: The states that each node stored in its last round.
        begin: The model from which nodes without stored states start.
        round: The number of the round.
    """
    recipe, received = experiment.recipe, Broadcast(round, begin, {})
    replies = client_updates(*(recipe, experiment.task, experiment.plan, nodes, received, memories))
    messages: dict[int, Params] = {}
    for reply in replies:
        direction, statistics = split_statistics(reply.params)
        memory = memories.get(reply.client, {})
        before = memory.get(MOMENTUM, zeros(direction))
        tracker = memory.get(TRACKER, zeros(direction))
        sent = {
            name: tracker[name].to(value) + value - before[name].to(value)
            for name, value in direction.items()
        }
        messages[reply.client] = {**sent, **statistics}
    return messages, replies


def mixed(weights: np.ndarray, node: int, messages: Messages) -> Params:
    """Return sum_j w_ij T_j for node i, in the order of the nodes."""
    total: Params = {}
    for other in np.flatnonzero(weights[node]).tolist():
        weight = float(weights[node, other])
        for name, value in messages[other].items():
            total[name] = total[name].add(value, alpha=weight) if name in total else weight * value
    return total


def moved(
    experiment: Experiment, nodes: Sequence[int], models: Mapping[int, Params],
    trackers: Mapping[int, Params], round: int,
) -> dict[int, Params]:  # fmt: skip
    """Return the models of these nodes after their own steps, before averaging."""
    recipe, like = experiment.recipe, models[nodes[0]]
    old = joined([models[node] for node in nodes], like)
    mean = joined([trackers[node] for node in nodes], like)
    factor = experiment.plan.factor_at(round)
    after, _ = recipe.apply_server(old, mean, {}, factor, lambda: [])
    return dict(zip(nodes, blocks(after, len(nodes)), strict=True))


def stored(reply: Reply, model: Params, tracker: Params) -> States:
    """Return all states that a node stores after a round."""
    return {MOMENTUM: reply.own[MOMENTUM], MODEL_OF_NODE: model, TRACKER: tracker}


# All nodes in this process


def gossip_rounds(experiment: Experiment, state: ServerState) -> Iterator[Round]:
    """Run the remaining rounds with all nodes in this process, starting from `state`.

    The model of the yielded states is the mean of the nodes' models. No node uses it.
    """
    plan, memory = experiment.plan, experiment.client_states
    graph, numbers = gossip_of(experiment.recipe).graph, range(experiment.plan.clients)
    nodes = [experiment.client(number) for number in numbers]
    for round in range(state.round, plan.rounds):
        weights = graph.weights(round)
        memories = {number: memory.read(number, round) for number in numbers}
        messages, replies = tracked(experiment, nodes, memories, state.params, round)
        mixes = {number: split_statistics(mixed(weights, number, messages)) for number in numbers}
        trackers = {number: tracker for number, (tracker, _) in mixes.items()}
        models = models_of(state, memories, numbers)
        steps = moved(experiment, [*numbers], models, trackers, round)
        after: dict[int, Params] = {}
        for number, reply in zip(numbers, replies, strict=True):
            model, (_, statistics) = mixed(weights, number, steps), mixes[number]
            after[number] = {**model, **statistics}
            memory.write(number, round, stored(reply, after[number], trackers[number]))
        state, finished = end_of_round(state, after, weights, replies)
        yield finished


def models_of(
    state: ServerState, memories: Mapping[int, States], nodes: Sequence[int]
) -> dict[int, Params]:
    """Return the learned parameters of each node before the round."""
    return {
        node: split_statistics(memories[node].get(MODEL_OF_NODE, state.params))[0] for node in nodes
    }


def end_of_round(
    state: ServerState, models: Mapping[int, Params], weights: np.ndarray, replies: Sequence[Reply]
) -> tuple[ServerState, Round]:
    """Return the state with the mean of the nodes' models, and the finished round.

    Every byte is counted once, where it is sent: two messages from each node to each neighbour.
    """
    numbers = np.array(sorted(models))
    after = ServerState(state.round + 1, mean_model([models[node] for node in numbers]), {})
    edges = int(((weights > 0) & ~np.eye(len(weights), dtype=bool)).sum())
    finished = Round(
        state=after, participants=numbers, answered=numbers, loss=mean_loss(replies),
        bytes_up=2 * edges * payload_bytes(after.params, {}),
    )  # fmt: skip
    return after, finished


def mean_model(models: Sequence[Params]) -> Params:
    """Return the mean of the nodes' models."""
    return {name: sum_of([model[name] for model in models]) / len(models) for name in models[0]}


def sum_of(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, in their order."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def consensus_error(models: Sequence[State]) -> float:
    """Return the root of the mean squared distance of the nodes' models to their mean."""
    mean, total = mean_model(models), 0.0
    for model in models:
        total += sum(float((model[n] - mean[n]).double().square().sum()) for n in mean)
    return (total / len(models)) ** 0.5
