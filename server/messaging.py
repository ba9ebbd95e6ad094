"""Exchange messages with nodes: deadlines, partitions, public keys, and readable errors."""

import contextlib
import logging
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedmuon.core.errors import SAME_VERSION, InputError, OwnError, plain
from fedmuon.federated.wire import distrusted
from fedmuon.server import stopping

FIRST_PAUSE, LAST_PAUSE = 0.005, 0.1  # seconds between polls; small rounds should not wait
KEY, KEY_LENGTH = f"{MessageType.QUERY}.key", 32  # query for a public key; bytes of a key
OWN, SENTENCE = "OwnError: ", 800  # prefix of an error in a custom object; maximum characters
FRAMES, LINES, WIDTH = 3, 20, 200  # limits of a traceback: calls, lines, characters per line


@runtime_checkable
class Numbered(Protocol):
    """A grid that knows the node of each partition, and can wait for replies without polling."""

    retried: dict[str, str]  # id of a message that was sent again since the last push -> reason

    def node_of(self, partition: int) -> int:
        """Return the id of the node that has this partition."""
        ...

    def pull_within(self, message_ids: Iterable[str], seconds: float) -> list[Message]:
        """Wait for a reply, but at most `seconds`, and return all replies that have arrived."""
        ...

    def forget(self, message_ids: Iterable[str]) -> None:
        """Ignore all replies to these messages."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A grid that lets the server read and write the state of each node's context."""

    def lend_state(self, partition: int, state: RecordDict) -> None:
        """Set the state of a node's context for the next message that the node gets."""
        ...

    def collect_state(self, partition: int) -> RecordDict:
        """Return the state that a node's context had after the node's last reply.

        The state is then removed from the grid.
        """
        ...


def exchange(grid: Grid, messages: Sequence[Message], deadline: float) -> dict[int, Message]:
    """Send messages and collect the replies.

    Each reply names the message that it answers. The sender is not used to match replies, because
    the SuperLink replies in place of a late node.

    Args:
        grid: Flower's grid.
        messages: The messages.
        deadline: Seconds to wait for replies.

    Returns:
        A dictionary from the index of each message to the reply. Messages without a reply are
            missing.
    """
    waiting = {name: number for number, name in enumerate(grid.push_messages(messages)) if name}
    replies: dict[int, Message] = {}
    end, pause = time.monotonic() + deadline, FIRST_PAUSE
    while waiting and time.monotonic() < end:
        if isinstance(grid, Numbered):
            stopping.pause(0.0)
            arrived = grid.pull_within(set(waiting), min(LAST_PAUSE, end - time.monotonic()))
        else:
            stopping.pause(pause)
            arrived = list(grid.pull_messages(set(waiting)))
        for reply in arrived:
            number = waiting.pop(reply.metadata.reply_to_message_id, None)
            if number is not None:  # ignore further replies to the same message
                replies[number] = reply
        pause = FIRST_PAUSE if arrived else min(1.5 * pause, LAST_PAUSE)
    if isinstance(grid, Numbered):
        grid.forget(set(waiting))
    return replies


def meet(
    grid: Grid, known: dict[int, int], wanted: Iterable[int], patience: float
) -> dict[int, int]:
    """Ask unknown nodes for their partitions.

    A node that left the grid is removed from the result. If this node returns with another id, it
    gets the same partition again. A new node never replaces a connected node with the same
    partition.

    Returns:
        A dictionary from partition to node id. All partitions in `wanted` are included, unless
        `patience` seconds pass first.
    """
    wanted, end = set(wanted), time.monotonic() + patience
    nodes, queried = dict(known), set(known.values())
    while True:
        present = set(grid.get_node_ids())
        nodes = {partition: node for partition, node in nodes.items() if node in present}
        nodes = _partitions(grid, present - queried, max(end - time.monotonic(), 0.0)) | nodes
        queried |= present
        if wanted <= set(nodes) or time.monotonic() > end:
            return nodes
        stopping.pause(LAST_PAUSE)


def _partitions(grid: Grid, nodes: Iterable[int], deadline: float) -> dict[int, int]:
    """Ask nodes for their partitions, and return a dictionary from partition to node id.

    If two nodes report the same partition, this partition is left out.
    """
    ids = list(nodes)
    questions = [Message(RecordDict(), node, MessageType.QUERY, ttl=deadline + 1) for node in ids]
    claims: list[tuple[int, int]] = []
    for number, reply in exchange(grid, questions, deadline).items():
        with contextlib.suppress(InputError), distrusted():
            if not reply.has_error():
                partition: Any = reply.content.config_records["who"]["partition"]
                if type(partition) is int:
                    claims.append((partition, ids[number]))
    partitions = [partition for partition, _ in claims]
    return {partition: node for partition, node in claims if partitions.count(partition) == 1}


def public_keys(
    grid: Grid, clients: Sequence[int], nodes: Mapping[int, int], deadline: float
) -> ConfigRecord:
    """Request a new public key from each client, which is needed for the client's mask.

    The server later sends all public keys to each client.

    Raises:
        InputError: If a client sends no key. A sum of masked replies needs the keys of all clients.
    """
    refusal = (
        "client {} sent no key for its mask ({}), but the sum needs the masks of all clients. "
        "Fix the cause, then continue with --resume."
    )
    for client in clients:
        if client not in nodes:
            raise InputError(refusal.format(client, "no connected SuperNode has its partition-id"))
    content = RecordDict()
    questions = [Message(content, nodes[client], KEY, ttl=deadline) for client in clients]
    replies, keys = exchange(grid, questions, deadline), []
    for number, client in enumerate(clients):
        reply = replies.get(number)
        if reply is None or reply.has_error():
            cause = "the client did not answer" if reply is None else reason(reply)
            raise InputError(refusal.format(client, cause))
        with distrusted():
            sender: dict[str, Any] = dict(reply.content.config_records["who"])
            key, right = sender["key"], (nodes[client], client)
            is_key = isinstance(key, bytes) and len(key) == KEY_LENGTH
            if not is_key or (reply.metadata.src_node_id, sender["partition"]) != right:
                raise InputError(
                    f"client {client} sent an invalid public key for its mask. {SAME_VERSION} "
                    "Then continue with --resume."
                )
        keys.append(key)
    return ConfigRecord({"clients": list(clients), "keys": keys})


def reason(reply: Message) -> str:
    """Return the cause in an error reply, without the text that Flower and Ray add."""
    text = (reply.error.reason or "").strip() or "the client failed without a reason"
    inner = (text.rsplit("Message: ", 1)[-1].strip() or text).splitlines()[0]
    length = SENTENCE if OWN in inner else 200
    return plain(inner.removeprefix("<class 'ray.exceptions.").rstrip("'>"), length)


def raised(message: Message, error: BaseException) -> str:
    """Describe an error for a reply: one line with the error, then the end of the traceback.

    The text includes the round if the message contains the round.
    """
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in last)
    sentence = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    head = plain(": ".join(filter(None, (type(error).__name__, sentence))), WIDTH)
    if isinstance(error, OwnError):  # its message already contains the place
        head, place = f"{OWN}{plain(sentence, SENTENCE)}", ""
    records = message.content.config_records.values() if message.has_content() else ()
    rounds = [record["server-round"] for record in records if "server-round" in record]
    number = rounds[0] if rounds else message.metadata.group_id
    task = f"{message.metadata.message_type}{f' of round {number}' if number else ''}"
    trace = "".join(traceback.format_exception(error, limit=-FRAMES)).splitlines()[-LINES:]
    return "\n".join([f"{head}{place}", *(plain(line, WIDTH) for line in [task, *trace])])


class Failures:
    """Logs the errors in the replies to a grid.

    The first error is logged with its traceback. Later errors are only counted. Each error reply is
    shortened to the line with the error.
    """

    def __init__(self, shown: bool) -> None:
        self._shown, self._count = shown, 0

    def take(self, reply: Message, partition: int | None) -> None:
        """Shorten the reason of an error reply to one line, and log the first error completely."""
        if not reply.has_error():
            return
        line, *below = (reply.error.reason or "").split("\n")
        reply.error = Error(reply.error.code, line)
        if not (below and self._shown):
            return
        self._count += 1
        if self._count == 1:
            logging.getLogger("fedmuon").warning(
                "the client app of node %d (partition %s) failed at %s. Later errors are "
                "counted, but not shown. The traceback of this error:\n%s",
                reply.metadata.src_node_id, partition, below[0], "\n".join(below[1:])
            )  # fmt: skip

    def close(self) -> None:
        """Log the number of later errors."""
        if self._count > 1:
            logging.getLogger("fedmuon").warning(
                "%d later replies of clients were also errors", self._count - 1
            )
        self._count = 0
