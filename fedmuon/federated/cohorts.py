"""From which state the clients of a round start: the newest, or with FedBuff older ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.chain import States
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
    """FedBuff: clients reply late, and a round uses replies that started from older states.

    A reply is converted to a change of the newest model. This change is 1 / sqrt(1 + staleness)
    times the difference between the client's reply and the model that the client received. Some
    returned states are already changes, such as the change of SCAFFOLD's control variate. These
    states are not weighted, because the server's state must match the clients' states.
    """

    plan: RandomnessPlan
    exact: bool  # whether clients receive exactly the server's tensors

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
        moved: list[Reply] = []
        for start, clients in self.starts(state, [reply.client for reply in replies]):
            numbers = {*clients}
            of_start, _ = read(start, [reply for reply in replies if reply.client in numbers])
            if start.round == state.round and self.exact:
                moved += of_start  # these clients received the newest model unchanged
            else:
                weight = (1 + state.round - start.round) ** -0.5
                message = received(start)
                moved += [_moved_to(state, message, weight, reply) for reply in of_start]
        return sorted(moved, key=lambda reply: reply.client), {}

    def remembering(self, before: ServerState, after: ServerState) -> ServerState:
        """Return the state after a round, with the older states that later rounds need."""
        assert self.plan.timetable is not None
        oldest = self.plan.timetable.oldest(after.round)
        known = (*before.older, replace(before, older=()))
        return replace(after, older=tuple(state for state in known if state.round >= oldest))


def cohorts_of(plan: RandomnessPlan, exact: bool) -> Synchronous:
    """Return the rule by which the clients of a plan start.

    Args:
        plan: The plan of the run.
        exact: Whether clients receive exactly the server's tensors.
    """
    late = plan.timetable is not None and bool(plan.timetable.versions)
    return Buffered(plan, exact) if late else Synchronous()


def _moved_to(state: ServerState, received: Broadcast, weight: float, reply: Reply) -> Reply:
    """Add the weighted change of a reply to the newest model and states."""

    def moved(now: Params, then: Params, tree: Params) -> Params:
        return {name: now[name] + weight * (value - then[name]) for name, value in tree.items()}

    learned, statistics = split_statistics(reply.params)
    params = {**moved(state.params, received.params, learned), **statistics}
    states = {
        name: moved(state.states[name], received.states[name], tree)
        if name in received.states
        else tree
        for name, tree in reply.states.items()
    }
    return reply.with_trees({MODEL: params, **states})
