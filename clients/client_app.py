"""The ClientApp. Who only asks which partition a node holds does not wait for torch to load."""

import importlib
from functools import partial
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedmuon.clients.messages import Fetch, answer, nothing, partition
from fedmuon.core.errors import InputError


def _training() -> Any:
    return importlib.import_module("fedmuon.clients.training")


def query(message: Message, context: Context) -> Message:
    """Which partition this node holds: node ids are random, partition ids are not."""
    return answer(message, {"who": ConfigRecord({"partition": partition(context)})})


def key(message: Message, context: Context) -> Message:
    """A public key for the mask of this node's next reply."""
    return importlib.import_module("fedmuon.clients.training").key(message, context)


def train(message: Message, context: Context, fetch: Fetch = nothing) -> Message:
    """One client's round of local steps."""
    return _training().train_together([message], [context], fetch)[0]


def evaluate(message: Message, context: Context, fetch: Fetch = nothing) -> Message:
    """The model's loss on one client's own samples."""
    return _training().evaluate(message, context, fetch)


class Clients(ClientApp):
    """A ClientApp that can answer for many clients at once, of one process."""

    def __init__(self, fetch: Fetch) -> None:
        super().__init__()
        self._fetch = fetch

    def load(self) -> None:
        """What training needs, before anybody waits for it."""
        _training()

    def together(self, messages: list[Message], contexts: list[Context]) -> list[Message]:
        """Replies to one round's messages, which share their content."""
        first = messages[0]
        if any(one.content is not first.content for one in messages[1:]):
            raise InputError("these messages do not ask for the same")
        if first.metadata.message_type != MessageType.TRAIN:
            return [self(*pair) for pair in zip(messages, contexts, strict=True)]
        return _training().train_together(messages, contexts, self._fetch)


def client_app(fetch: Fetch = nothing) -> Clients:
    """The ClientApp of clients that are handed those objects."""
    made = Clients(fetch)
    made.query()(query)
    made.query("key")(key)
    made.train()(partial(train, fetch=fetch))
    made.evaluate()(partial(evaluate, fetch=fetch))
    return made


app = client_app()
