"""The ClientApp of fedmuon, which answers the server's messages on a node.

The app imports torch only for training, so that it answers partition queries quickly.
"""

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
    """Reply with this node's partition number, which the random node id does not contain."""
    return answer(message, {"who": ConfigRecord({"partition": partition(context)})})


def key(message: Message, context: Context) -> Message:
    """Reply with a new public key, which is needed to mask this node's next reply."""
    return importlib.import_module("fedmuon.clients.masks").key(message, context)


def train(message: Message, context: Context, fetch: Fetch = nothing) -> Message:
    """Train one client, and reply with the client's model and states."""
    return _training().train_together([message], [context], fetch)[0]


def evaluate(message: Message, context: Context, fetch: Fetch = nothing) -> Message:
    """Reply with the model's loss on one client's samples."""
    return _training().evaluate(message, context, fetch)


class Clients(ClientApp):
    """A ClientApp that can answer messages to many clients in one batch.

    Args:
        fetch: A function that returns the custom objects that were passed in Python.
    """

    def __init__(self, fetch: Fetch = nothing) -> None:
        super().__init__()
        self._fetch = fetch
        self.query()(query)
        self.query("key")(key)
        self.train()(partial(train, fetch=fetch))
        self.evaluate()(partial(evaluate, fetch=fetch))

    def load(self) -> None:
        """Import the modules for training in advance, because the import takes seconds."""
        _training()

    def together(self, messages: list[Message], contexts: list[Context]) -> list[Message]:
        """Return replies to messages of one round, which must all have the same content.

        Raises:
            InputError: If the messages differ in their content.
        """
        first = messages[0]
        if any(message.content is not first.content for message in messages[1:]):
            raise InputError(
                "the messages of this round have different contents. Send the same content to "
                "every client."
            )
        if first.metadata.message_type != MessageType.TRAIN:
            return [self(*pair) for pair in zip(messages, contexts, strict=True)]
        return _training().train_together(messages, contexts, self._fetch)


app = Clients()
