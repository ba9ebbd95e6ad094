"""The public keys of a round's clients, which the server hands on to all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedmuon.core.errors import InputError
from fedmuon.federated.wire import distrusted
from fedmuon.server.messaging import exchange, reason

KEY = f"{MessageType.QUERY}.key"
LENGTH = 32  # bytes
NOTHING = (
    "client {} gave no key for its mask ({}), and a sum needs all of them: mend the cause and go "
    "on with --resume"
)


def agreed(
    grid: Grid, clients: Sequence[int], nodes: Mapping[int, int], deadline: float
) -> ConfigRecord:
    """A fresh key of each client, asked at its node; without all of them no round begins."""
    for client in clients:
        if client not in nodes:
            raise InputError(NOTHING.format(client, "no node holds its partition"))
    content = RecordDict()
    questions = [Message(content, nodes[client], KEY, ttl=deadline) for client in clients]
    replies = exchange(grid, questions, deadline)
    keys = [
        _key(replies.get(number), client, nodes[client]) for number, client in enumerate(clients)
    ]
    return ConfigRecord({"clients": list(clients), "keys": keys})


def blank(clients: Sequence[int]) -> ConfigRecord:
    """What weighs as much."""
    return ConfigRecord({"clients": list(clients), "keys": [bytes(LENGTH)] * len(clients)})


def _key(reply: Message | None, client: int, node: int) -> bytes:
    if reply is None or reply.has_error():
        why = "no answer" if reply is None else reason(reply)
        raise InputError(NOTHING.format(client, why))
    with distrusted():
        who: dict[str, Any] = dict(reply.content.config_records["who"])
        found, right = who["key"], (node, client)
        if (reply.metadata.src_node_id, who["partition"]) != right or not _is_key(found):
            raise InputError(f"client {client} answers with what is no key for its mask")
        return found


def _is_key(found: object) -> bool:
    return isinstance(found, bytes) and len(found) == LENGTH
