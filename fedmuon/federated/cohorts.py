"""From which state the clients of a round start: the newest, or if replies are late, older ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.chain import States
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState
from fedmuon.tasks.base import Params, split_statistics

# (server state, replies of clients that started from it) -> replies, and next states of stages
Read = Callable[[ServerState, Sequence[Reply]], tuple[list[Reply], States]]
Received = Callable[[ServerState], Broadcast]  # server state -> the message as clients use it


class Synchronous:
    """All clients of a round start from the newest state of the server."""

    def starts(
        self, state: ServerState, clients: Sequence[int]
    ) -> list[tuple[ServerState, list[int]]]:
        """Group the clients of the next round by the server state from which each client starts."""
        return [(state, [*clients])]

    def read(
        self, state: ServerState, replies: Sequence[Reply], read: Read, received: Received
    ) -> tuple[list[Reply], States]:
        """Convert the replies of a round to replies that started from the newest state.

        The result has the order of the clients.
        """
        return read(state, replies)

    def remembering(self, before: ServerState, after: ServerState) -> ServerState:
        """Return the state after a round, with the older states that later rounds need."""
        return after


@dataclass(frozen=True)
class Buffered(Synchronous):
    """Clients reply late, and a round uses replies that started from older states.

    A reply is converted to a change of the newest model: the weight in the timetable, times the
    difference between the client's reply and the model that the client received. If the timetable
    `mixes`, the difference is that between the client's reply and the newest model (FedAsync). Some
    returned states are already changes, such as the change of SCAFFOLD's control variate. These
    states are not weighted, because the server's state must match the clients' states. Directions,
    which some recipes return instead of a model, have the weight 1 and stay as they are.
    """

    plan: RandomnessPlan
    exact: bool  # whether clients receive exactly the server's tensors
    directions: bool = False  # whether clients return directions instead of models

    def starts(
        self, state: ServerState, clients: Sequence[int]
    ) -> list[tuple[ServerState, list[int]]]:
        """Group the clients of the next round by the server state from which each client starts."""
        timetable, participants = self.plan.timetable, self.plan.participants(state.round)
        assert timetable is not None
        versions = timetable.versions[state.round]
        began = dict(zip(participants.tolist(), versions.tolist(), strict=True))
        known = (*state.older, state)
        groups = [(start, [i for i in clients if began[i] == start.round]) for start in known]
        return [(start, numbers) for start, numbers in groups if numbers]

    def read(
        self, state: ServerState, replies: Sequence[Reply], read: Read, received: Received
    ) -> tuple[list[Reply], States]:
        """Convert the replies of a round to replies that started from the newest state."""
        timetable, moved = self.plan.timetable, list[Reply]()
        assert timetable is not None
        answered, weights = timetable.answered[state.round], timetable.weights[state.round]
        weight_of = dict(zip(answered.tolist(), weights.tolist(), strict=True))
        for start, clients in self.starts(state, [reply.client for reply in replies]):
            numbers = {*clients}
            of_start, _ = read(start, [reply for reply in replies if reply.client in numbers])
            newest = start.round == state.round and self.exact
            if self.directions or (newest and all(weight_of[i] == 1 for i in clients)):
                moved += of_start  # directions, or models that started from the newest model
            else:
                message = received(start)
                base = _newest_like(message, state) if timetable.mixes else message
                moved += [
                    _moved_to(state, base, weight_of[reply.client], reply) for reply in of_start
                ]
        return sorted(moved, key=lambda reply: reply.client), {}

    def remembering(self, before: ServerState, after: ServerState) -> ServerState:
        """Return the state after a round, with the older states that later rounds need."""
        assert self.plan.timetable is not None
        oldest = self.plan.timetable.oldest(after.round)
        known = (*before.older, replace(before, older=()))
        return replace(after, older=tuple(state for state in known if state.round >= oldest))


def cohorts_of(plan: RandomnessPlan, recipe: Recipe) -> Synchronous:
    """Return the rule by which the clients of a plan start.

    Args:
        plan: The plan of the run.
        recipe: The optimizer.
    """
    if plan.timetable is None or not plan.timetable.versions:
        return Synchronous()
    return Buffered(plan, all(stage.exact for stage in recipe.stages), recipe.direction)


def _newest_like(message: Broadcast, state: ServerState) -> Broadcast:
    """Return the server's newest model, and its newest values of the states in a message."""
    states = {name: state.states[name] for name in message.states}
    return Broadcast(state.round, state.params, states)


def _moved_to(state: ServerState, base: Broadcast, weight: float, reply: Reply) -> Reply:
    """Add the weighted difference between a reply and `base` to the newest model and states."""

    def moved(now: Params, then: Params, tree: Params) -> Params:
        return {name: now[name] + weight * (value - then[name]) for name, value in tree.items()}

    learned, statistics = split_statistics(reply.params)
    params = {**moved(state.params, base.params, learned), **statistics}
    states = {
        name: moved(state.states[name], base.states[name], tree) if name in base.states else tree
        for name, tree in reply.states.items()
    }
    return reply.with_trees({MODEL: params, **states})
