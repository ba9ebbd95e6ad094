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
nodes in this process. The engine `ray` divides the nodes and carries the same two messages.

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
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import client_updates
from fedmuon.federated.traffic import payload_bytes
from fedmuon.optim.chain import State, States, zeros
from fedmuon.optim.gossip import MODEL_OF_NODE, TRACKER, Gossip, joined
from fedmuon.optim.graphs import Graph
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Broadcast, Reply, ServerState
from fedmuon.tasks.base import Params, Task, blocks, split_statistics

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


# The parts of a round, for the nodes of one process


def mixed(weights: np.ndarray, node: int, messages: Messages) -> Params:
    """Return sum_j w_ij T_j for node i, in the order of the nodes."""
    total: Params = {}
    for other in np.flatnonzero(weights[node]).tolist():
        weight = float(weights[node, other])
        for name, value in messages[other].items():
            total[name] = total[name].add(value, alpha=weight) if name in total else weight * value
    return total


class NodeGroup:
    """The nodes of one process, which are computed in one batch.

    In each round, `track` returns the first message of each node, `step` receives the messages of
    all neighbours and returns the second ones, and `average` receives those.

    Attributes:
        states: All states of each node after the last round: model, momentum and tracker.
        replies: The replies of the nodes in the current round, with their losses.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        plan: RandomnessPlan,
        nodes: Sequence[Client],
        begin: Params,
        states: Mapping[int, States],
    ) -> None:
        self.recipe, self.task, self.plan, self.nodes = recipe, task, plan, nodes
        self.begin = begin  # the model of nodes without states
        self.states: dict[int, States] = dict(states)
        self.replies: list[Reply] = []
        self._trackers: dict[int, Params] = {}
        self._statistics: dict[int, Params] = {}

    def track(self, round: int) -> dict[int, Params]:
        """Compute the momenta M_i, and return V_i + M_i - M_i_before of each node."""
        received = Broadcast(round, self.begin, {})
        self.replies = client_updates(
            self.recipe, self.task, self.plan, self.nodes, received, self.states
        )
        messages: dict[int, Params] = {}
        for reply in self.replies:
            direction, statistics = split_statistics(reply.params)
            stored = self.states[reply.client]
            before = stored.get(MOMENTUM, zeros(direction))
            tracker = stored.get(TRACKER, zeros(direction))
            sent = {
                name: tracker[name].to(value) + value - before[name].to(value)
                for name, value in direction.items()
            }
            messages[reply.client] = {**sent, **statistics}
        return messages

    def step(self, round: int, weights: np.ndarray, messages: Messages) -> dict[int, Params]:
        """Compute the trackers V_i, and return X_i - lr Orth(V_i) of each node."""
        numbers = [node for node, _ in self.nodes]
        for node in numbers:
            mixes = split_statistics(mixed(weights, node, messages))
            self._trackers[node], self._statistics[node] = mixes
        like, _ = split_statistics(self.begin)
        models = [self.states[node].get(MODEL_OF_NODE, self.begin) for node in numbers]
        trackers = joined([self._trackers[node] for node in numbers], like)
        factor = self.plan.factor_at(round)
        after, _ = self.recipe.apply_server(joined(models, like), trackers, {}, factor, list)
        return dict(zip(numbers, blocks(after, len(numbers)), strict=True))

    def average(self, weights: np.ndarray, messages: Messages) -> None:
        """Compute the models X_i after the round."""
        for reply in self.replies:
            node = reply.client
            model = {**mixed(weights, node, messages), **self._statistics[node]}
            self.states[node] = {
                MOMENTUM: reply.own[MOMENTUM],
                MODEL_OF_NODE: model,
                TRACKER: self._trackers[node],
            }


def gossip_rounds(experiment: Experiment, state: ServerState) -> Iterator[Round]:
    """Run the remaining rounds with all nodes in this process, starting from `state`.

    The model of the yielded states is the mean of the nodes' models. No node uses it.
    """
    recipe, plan, memory = experiment.recipe, experiment.plan, experiment.client_states
    graph, numbers = gossip_of(recipe).graph, range(plan.clients)
    nodes = [experiment.client(number) for number in numbers]
    states = {number: memory.read(number, state.round) for number in numbers}
    group = NodeGroup(recipe, experiment.task, plan, nodes, state.params, states)
    for round in range(state.round, plan.rounds):
        weights = graph.weights(round)
        group.average(weights, group.step(round, weights, group.track(round)))
        for number in numbers:
            memory.write(number, round, group.states[number])
        state, finished = end_of_round(state, group.states, weights, group.replies)
        yield finished


def end_of_round(
    state: ServerState, states: Mapping[int, States], weights: np.ndarray, replies: Sequence[Reply]
) -> tuple[ServerState, Round]:
    """Return the state with the mean of the nodes' models, and the finished round.

    Every byte is counted once, where it is sent: two messages from each node to each neighbour.
    """
    numbers = np.array(sorted(states))
    mean = mean_model([states[node][MODEL_OF_NODE] for node in sorted(states)])
    after = ServerState(state.round + 1, mean, {})
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
