"""The states of a server, and what server and clients send to each other in a round.

All tensors have a leading axis [S, ...] for S replicas. A message contains *trees*: the model under
the name `MODEL`, and each state under its own name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedmuon.optim.chain import States
from fedmuon.tasks.base import Params

MODEL = "model"  # name of the model among the trees of a message
Trees = dict[str, Params]  # MODEL, or the name of a state -> its tensors


@dataclass(frozen=True)
class ServerState:
    """The server's model and states after `round` rounds.

    `older` contains earlier server states, from which some clients are still training.
    """

    round: int
    params: Params
    states: States
    older: "tuple[ServerState, ...]" = ()


@dataclass(frozen=True)
class Broadcast:
    """A message of the server: the round, the model, and the states that the server sends."""

    round: int
    params: Params
    states: States

    @property
    def trees(self) -> Trees:
        """The model and the states by name."""
        return {MODEL: self.params, **self.states}

    def with_trees(self, trees: Trees) -> "Broadcast":
        """Return this message with another model and other states."""
        return Broadcast(self.round, *split_model(trees))


@dataclass(frozen=True)
class Reply:
    """The reply of a client.

    `loss` [S] is the client's loss at the start of the last local step. `samples` is the number n_i
    of the client's samples, and `steps` is the number of local steps. `own` contains the client's
    persistent states, which are not sent. `metrics` contains the client's measurements, if they
    were requested. `part` says what `params` contains when an aggregator receives the reply:
    "model", or the name of a returned state.
    """

    client: int
    params: Params
    states: States
    loss: Tensor
    samples: int = 1
    steps: int = 1
    own: States = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    part: str = MODEL

    @property
    def trees(self) -> Trees:
        """The model and the returned states by name."""
        return {MODEL: self.params, **self.states}

    def with_trees(self, trees: Trees) -> "Reply":
        """Return this reply with another model and other states."""
        params, states = split_model(trees)
        return replace(self, params=params, states=states)

    def storing(self, name: str, state: Params) -> "Reply":
        """Return this reply with a further state that the client stores and does not send."""
        return replace(self, own={**self.own, name: state})


def split_model(trees: Mapping[str, Params]) -> tuple[Params, States]:
    """Split the trees of a message into the model and the states."""
    return trees[MODEL], {name: tree for name, tree in trees.items() if name != MODEL}
