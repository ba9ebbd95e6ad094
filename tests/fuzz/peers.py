"""A server and its clients in this process, over real messages, one of which may be disturbed."""

import contextlib
import tomllib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedmuon.clients import client_app
from fedmuon.config.load import parse
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import Fault, begin
from fedmuon.server.strategy import FedMuonStrategy

Lie = Callable[[Any], None]


def context(partition: int) -> Context:
    """What a SuperNode with that partition tells its app."""
    return Context(
        run_id=1,
        node_id=100 + partition,
        node_config={"partition-id": partition},
        state=RecordDict(),
        run_config={},
    )


def inflated(content: RecordDict) -> RecordDict:
    """The records as they come off the wire."""
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    return recorddict_from_proto(recorddict_to_proto(content))


def _stale(content: RecordDict) -> None:
    """A reply of another round, which nobody takes for one of this."""
    content["who"] = ConfigRecord({**content.config_records["who"], "round": 99})


class Line:
    """A grid whose nodes 100, 101, ... answer at once, each as partition 0, 1, ...; the replies of
    the one that lies to training messages are disturbed before they are delivered."""

    def __init__(self, clients: int, liar: int, lie: Lie) -> None:
        self.clients, self.liar, self.lie = clients, liar, lie
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        """All nodes, always."""
        return range(100, 100 + self.clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer each, and say under which id."""
        return [self._answer(number, message) for number, message in enumerate(messages)]

    def pull_messages(self, ids: Iterable[str]) -> Iterable[Message]:
        """The answers to these."""
        return [self.replies.pop(one) for one in list(ids) if one in self.replies]

    def _answer(self, number: int, message: Message) -> str:
        name = f"message-{number}"
        message.metadata.__dict__["_message_id"] = name
        node = message.metadata.dst_node_id
        reply = self._reply(message, node - 100)
        if message.metadata.message_type == MessageType.TRAIN and node - 100 == self.liar:
            self.lie(reply.content)
            with contextlib.suppress(ValueError):  # numbers that no wire carries
                reply = Message(inflated(reply.content), reply_to=message)
        self.replies[name] = reply
        return name

    def _reply(self, message: Message, partition: int) -> Message:
        act = client_app.train if message.metadata.message_type == MessageType.TRAIN else (
            client_app.query)  # fmt: skip
        try:
            return act(message, context(partition))
        except Exception as error:
            return Message(Error(1, str(error)), reply_to=message)


class Peers:
    """An experiment with its strategy; `both` and `alone` are the models after an honest round of
    both participants, and of the honest one alone."""

    def __init__(self, toml: str) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as if Flower ran us
        self.config = resolve(parse(tomllib.loads(toml)))
        samples = read_source(self.config)
        self.data = build_data(self.config, samples)
        self.experiment = build_experiment(self.config, self.data)
        self.liar = int(self.experiment.plan.participants(0)[0])
        self.both = self.round(lambda content: None)[0]
        drops = self.config.faults.policy == "drop"
        self.alone = self.round(_stale)[0] if drops else {}

    def round(self, lie: Lie) -> tuple[dict[str, np.ndarray], Sequence[Fault]]:
        """The model after the first round, and the faults that it survived."""
        grid = Line(self.config.federation.clients, self.liar, lie)
        finished = next(self._strategy().rounds(grid))  # type: ignore[arg-type]
        model = {name: value.numpy() for name, value in finished.state.params.items()}
        return model, finished.faults

    def request(self, kind: str) -> Message:
        """What the server asks of node 100."""
        strategy = self._strategy()
        strategy.nodes = {0: 100}
        if kind == "query":
            return Message(RecordDict({"config": ConfigRecord({})}), 100, MessageType.QUERY, ttl=60)
        (message,) = strategy.messages(kind, [0])
        return Message(inflated(message.content), 100, kind, ttl=60)

    def _strategy(self) -> FedMuonStrategy:
        fresh = begin(self.experiment.recipe, self.experiment.task, self.config.federation.seed)
        return FedMuonStrategy(self.config, self.experiment, fresh)
