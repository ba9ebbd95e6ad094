"""Messages between server and clients, and the stages that change them.

All tensors have a leading axis [S, ...] for S replicas. A message contains *trees*: the model under
the name `MODEL`, and each state under its own name.

A recipe has a list of stages. The server passes a message through `send` of all stages in order. A
client passes the message through `open` in reversed order, trains, and passes its reply through
`reply` in order. The server then passes all replies through `read` in reversed order, so that the
server's rule receives ordinary models. Each feature that changes messages, such as compression or
parameters that stay on the client, is one stage. The rounds know no stage by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedmuon.core.device import is_finite
from fedmuon.core.errors import NonFinite
from fedmuon.optim.chain import States
from fedmuon.tasks.base import Batch, Params

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


def replaced_rounds(stages: Sequence["Stage"], rounds: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that yields the rounds: that of a stage, or else `rounds`."""
    own = (stage.rounds_without_server for stage in stages)
    return next((function for function in own if function is not None), rounds)


def split_model(trees: Mapping[str, Params]) -> tuple[Params, States]:
    """Split the trees of a message into the model and the states."""
    return trees[MODEL], {name: tree for name, tree in trees.items() if name != MODEL}


class Stage:
    """A step that messages pass on their way. The base class changes nothing.

    Messages are trees: mappings from "model", or the name of a state, to named tensors `[replicas,
    ...]`. A stage returns new mappings and tensors, and changes no argument in place. Norms and
    means must be separate for each replica. A stage must not store anything in its attributes: the
    server stores the states that `initial` returns, and a client stores the states in `stores`.

    Attributes:
        facts: What other settings must know about this stage, as values of
            `fedmuon.core.demands.Trait`. A setting whose demands forbid a fact rejects the stage.
        stores: Names of the states that a client stores for this stage between its rounds, without
            a dot. Every client stores them in every round, with the same shapes and dtypes.
        exact: Whether clients receive exactly the tensors that the server has.
        isolates: Whether a client's reply must not depend on other clients. Each client then trains
            alone, and a loss that is not finite does not stop the run.
        masked_clients: The number of clients whose replies are masked so that the server reads only
            their sum, or 0 if replies are not masked.
        rounds_without_server: A function `(experiment, state)` that yields finished rounds in place
            of the rounds of a server, or None.
        changes_samples: Whether `samples` changes the samples on which clients train.

    Example:
        >>> import fedmuon
        >>> class Rounded(fedmuon.Stage):
        ...     def reply(self, reply, received, memory):
        ...         trees = {
        ...             tree: {name: value.half().to(value) for name, value in tensors.items()}
        ...             for tree, tensors in reply.trees.items()
        ...         }
        ...         return reply.with_trees(trees)
        >>> Rounded().stores
        ()
    """

    facts: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    exact: bool = True
    isolates: bool = False
    masked_clients: int = 0
    rounds_without_server: Callable[..., Any] | None = None
    changes_samples: bool = False

    def require(self, recipe: Any) -> None:
        """Raise an error if this stage does not fit a recipe, which has just been created.

        Args:
            recipe: The recipe.
        """

    def is_personal(self, name: str) -> bool:
        """Return whether this stage leaves a parameter with each client.

        Args:
            name: Name of the parameter.
        """
        return False

    def send(self, message: Trees, server: ServerState) -> Trees:
        """Change the server's message before it is sent to the clients of a round.

        `send` and `open` may be called several times in a round. Equal arguments must therefore
        give equal results.

        Args:
            message: The model and the states that the recipe sends.
            server: The server's state.

        Returns:
            The trees that are sent.
        """
        return message

    def open(self, message: Trees, model: Callable[[], Params]) -> Trees:
        """Undo `send` on the clients.

        Args:
            message: The trees as they were sent.
            model: Function that returns a model of the run, for names and shapes.

        Returns:
            The trees that clients use.
        """
        return message

    def adopt(
        self, models: Params, first: Callable[[], Params], memories: Sequence[States]
    ) -> Params:
        """Change the models from which clients start.

        Args:
            models: The received model `[clients * replicas, ...]`, repeated for each client.
            first: Function that returns the run's initial model, repeated in the same way.
            memories: The stored states of each client, empty before a client's first round.

        Returns:
            The models from which the clients start.
        """
        return models

    def assign(self, trees: Trees, clients: Sequence[int]) -> Trees:
        """Change the models and states from which clients start, after `adopt`.

        Args:
            trees: The models `[clients * replicas, ...]` and the received states, repeated for each
                client.
            clients: The numbers of the clients.

        Returns:
            The models and states from which the clients start.
        """
        return trees

    def samples(self, batch: Batch, client: int, round: int) -> Batch:
        """Change the samples of a local step. Only called if `changes_samples` is true.

        Args:
            batch: The samples, with `inputs` [n, d] and `labels` [n].
            client: The number of the client.
            round: The number of the round in which the client received its model.

        Returns:
            The samples on which the client computes its gradient.
        """
        return batch

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Change the reply of a client before it is sent.

        This method is called exactly once per client and round.

        Args:
            reply: The reply, with the trees `reply.trees`.
            received: The message as the client used it.
            memory: The states that the client stored in its last round. The mapping is empty in a
                client's first round.

        Returns:
            The reply that is sent, such as `reply.with_trees(trees)`. `reply.storing(name, state)`
                lets the client store a state, whose name must be in `stores`.
        """
        return reply

    def check(self, reply: Reply, server: ServerState) -> None:
        """Raise an error if a reply that came over a network cannot be read.

        Args:
            reply: The reply as it was sent. Names, shapes and dtypes are already checked.
            server: The server's state.
        """

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Undo `reply` on the server.

        Args:
            replies: The replies of the round, in the order of the clients.
            received: Function that returns the message as the clients used it.
            server: The server's state before the round, from which the clients started.

        Returns:
            The replies for the aggregator, and the next values of the states in `initial`.
        """
        return replies, {}

    def sent_like(self, message: Trees) -> Trees:
        """Return tensors with the names, shapes and dtypes that `send` makes of a message.

        Args:
            message: The model and the states before `send`.
        """
        return message

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors with the names, shapes and dtypes that `reply` makes of a reply.

        Args:
            message: The model and the returned states before `reply`.
        """
        return message

    def returned_by(self, message: Trees, client: int) -> Trees:
        """Return tensors like those of the reply of one client.

        By default, the replies of all clients are like those of `returned_like`.

        Args:
            message: The model and the returned states before `reply`.
            client: The number of the client.
        """
        return self.returned_like(message)

    def initial(self, model: Params, returned: Sequence[str]) -> States:
        """Return the states that the server stores for this stage, before the first round.

        Args:
            model: The learned parameters of the model.
            returned: The names of the states that clients return.
        """
        return {}


def require_finite(tensors: Iterable[Tensor], what: str, client: int, round: int) -> None:
    """Raise `NonFinite` if a tensor of a client contains NaN or infinity.

    A stage calls this function before a step that could hide such values.

    Args:
        tensors: The tensors.
        what: What the client sends, for the message.
        client: The number of the client.
        round: The number of the round.
    """
    if not all(is_finite(tensor.sum()) for tensor in tensors):
        raise NonFinite(
            f"the {what} of client {client} is not finite (round {round}). Lower [local] lr."
        )
