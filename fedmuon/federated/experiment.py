"""The objects of a run that all rounds share, and the results of a round."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Reply, ServerState
from fedmuon.tasks.base import Task

if TYPE_CHECKING:
    from fedmuon.federated.client_states import ClientStates
    from fedmuon.federated.shards import Shard, Shards

Client = tuple[int, "Shard"]  # number and samples


def _in_memory() -> "ClientStates":
    from fedmuon.federated.client_states import ClientStates  # also knows files

    return ClientStates()


@dataclass(frozen=True)
class Experiment:
    """The objects of a run that all rounds share, and the stored states of the clients."""

    recipe: Recipe
    task: Task
    plan: RandomnessPlan
    shards: "Shards"
    client_states: "ClientStates" = field(default_factory=_in_memory)
    measured: bool = False  # whether rounds record measurements of each client, which needs S = 1

    def client(self, number: int) -> Client:
        """Return a client and its samples."""
        shard = self.shards.with_test if self.measured else self.shards.__getitem__
        return number, shard(number)


@dataclass(frozen=True)
class Fault:
    """A failed attempt to get a client's reply, and the reason."""

    client: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Round:
    """A finished round.

    Attributes:
        state: The server's state after the round.
        participants: The clients that were selected.
        answered: The clients whose replies were used. The stability bound requires a reply of every
            selected client.
        loss: Mean loss of the clients that answered, per replica [S].
        faults: The failures during the round.
        clients: The measurements of each client that answered, if they were requested.
        bytes_down: Total bytes of the arrays that all participants received.
        bytes_up: Total bytes of the arrays in the replies that were used.
    """

    state: ServerState
    participants: np.ndarray
    answered: np.ndarray
    loss: np.ndarray
    faults: tuple[Fault, ...] = ()
    clients: tuple[dict[str, Any], ...] = ()
    bytes_down: int = 0
    bytes_up: int = 0


Engine = Callable[[Experiment, ServerState], Iterator[Round]]


def mean_loss(replies: Sequence[Reply]) -> np.ndarray:
    """Return the mean loss of the replies for each replica, or NaN if there are no replies."""
    if not replies:
        return np.array([math.nan])
    total: Tensor = sum((reply.loss for reply in replies[1:]), start=replies[0].loss)
    return (total / len(replies)).double().cpu().numpy()
