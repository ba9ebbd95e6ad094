"""Messages to nodes and back: with a deadline, with public keys, and with readable errors."""

import contextlib
import logging
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedmuon.core.errors import InputError, OwnError, plain
from fedmuon.federated.wire import distrusted
from fedmuon.server import stopping

FIRST_PAUSE, LAST_PAUSE = 0.005, 0.1  # seconds between polls; small rounds should not wait
KEY, KEY_LENGTH = f"{MessageType.QUERY}.key", 32  # the question for a public key; its bytes
OWN, SENTENCE = "OwnError: ", 800  # how a reason begins if a custom object is at fault
FRAMES, LINES, WIDTH = 3, 20, 200  # limits of a traceback: calls, lines, characters per line


@runtime_checkable
class Numbered(Protocol):
    """A grid that knows which node holds a partition, and does not need polling."""

    retried: dict[str, str]  # messages since the last push that were sent again -> why

    def node_of(self, partition: int) -> int:
        """The node that holds a partition."""
        ...

    def pull_within(self, message_ids: Iterable[str], seconds: float) -> list[Message]:
        """The replies that have arrived, after waiting at most so long for one."""
        ...

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop the replies to these messages."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A grid whose owner keeps the contexts' states; elsewhere nodes keep their own."""

    def lend_state(self, partition: int, state: RecordDict) -> None:
        """Set what the context of a node holds, for the next message to it."""
        ...

    def collect_state(self, partition: int) -> RecordDict:
        """Take what the context of a node holds after its last answer out of the grid."""
        ...


def exchange(grid: Grid, messages: Sequence[Message], deadline: float) -> dict[int, Message]:
    """Send messages and collect the replies.

    A reply is matched by the message that it answers, because the SuperLink answers in place of a
    node that is late.

    Args:
        grid: Flower's grid.
        messages: The messages.
        deadline: Seconds to wait for replies.

    Returns:
        Index of a message -> its reply, if there is one.
    """
    waiting = {one: number for number, one in enumerate(grid.push_messages(messages)) if one}
    replies: dict[int, Message] = {}
    end, pause = time.monotonic() + deadline, FIRST_PAUSE
    while waiting and time.monotonic() < end:
        if isinstance(grid, Numbered):
            stopping.pause(0.0)
            found = grid.pull_within(set(waiting), min(LAST_PAUSE, end - time.monotonic()))
        else:
            stopping.pause(pause)
            found = list(grid.pull_messages(set(waiting)))
        for reply in found:
            number = waiting.pop(reply.metadata.reply_to_message_id, None)
            if number is not None:  # no message is answered twice
                replies[number] = reply
        pause = FIRST_PAUSE if found else min(1.5 * pause, LAST_PAUSE)
    if isinstance(grid, Numbered):
        grid.forget(set(waiting))
    return replies


def meet(
    grid: Grid, known: dict[int, int], wanted: Iterable[int], patience: float
) -> dict[int, int]:
    """Ask the nodes that are not yet known which partition they hold.

    A node that left is forgotten. If it returns under another id, it takes its partition over. No
    node takes a partition that another one holds.

    Returns:
        Partition -> node id, complete for `wanted` unless patience ends first.
    """
    wanted, end = set(wanted), time.monotonic() + patience
    nodes, asked = dict(known), set(known.values())
    while True:
        present = set(grid.get_node_ids())
        nodes = {partition: node for partition, node in nodes.items() if node in present}
        nodes = _partitions(grid, present - asked, max(end - time.monotonic(), 0.0)) | nodes
        asked |= present
        if wanted <= set(nodes) or time.monotonic() > end:
            return nodes
        stopping.pause(LAST_PAUSE)


def _partitions(grid: Grid, nodes: Iterable[int], deadline: float) -> dict[int, int]:
    """Partition -> node id for the nodes that answer; no partition that two of them claim."""
    asked = list(nodes)
    questions = [Message(RecordDict(), node, MessageType.QUERY, ttl=deadline + 1) for node in asked]
    claims: list[tuple[int, int]] = []
    for number, reply in exchange(grid, questions, deadline).items():
        with contextlib.suppress(InputError), distrusted():
            if not reply.has_error():
                partition: Any = reply.content.config_records["who"]["partition"]
                if type(partition) is int:
                    claims.append((partition, asked[number]))
    held = [partition for partition, _ in claims]
    return {partition: node for partition, node in claims if held.count(partition) == 1}


def public_keys(
    grid: Grid, clients: Sequence[int], nodes: Mapping[int, int], deadline: float
) -> ConfigRecord:
    """Ask each client at its node for a fresh public key for its mask.

    The server sends all of them to each client. A sum of masked replies needs every client, so an
    InputError ends the round if one gives no key.
    """
    refusal = (
        "client {} sent no key for its mask ({}), but the sum needs the masks of all clients. "
        "Fix the cause, then continue with --resume."
    )
    for client in clients:
        if client not in nodes:
            raise InputError(refusal.format(client, "no node has its partition"))
    content = RecordDict()
    questions = [Message(content, nodes[client], KEY, ttl=deadline) for client in clients]
    replies, keys = exchange(grid, questions, deadline), []
    for number, client in enumerate(clients):
        reply = replies.get(number)
        if reply is None or reply.has_error():
            why = "no answer" if reply is None else reason(reply)
            raise InputError(refusal.format(client, why))
        with distrusted():
            who: dict[str, Any] = dict(reply.content.config_records["who"])
            key, right = who["key"], (nodes[client], client)
            is_key = isinstance(key, bytes) and len(key) == KEY_LENGTH
            if not is_key or (reply.metadata.src_node_id, who["partition"]) != right:
                raise InputError(f"client {client} sent an invalid key for its mask")
        keys.append(key)
    return ConfigRecord({"clients": list(clients), "keys": keys})


def reason(reply: Message) -> str:
    """Why a reply is an error, without what Flower and Ray wrap around it."""
    text = (reply.error.reason or "").strip() or "it failed"
    inner = (text.rsplit("Message: ", 1)[-1].strip() or text).splitlines()[0]
    most = SENTENCE if OWN in inner else 200
    return plain(inner.removeprefix("<class 'ray.exceptions.").rstrip("'>"), most)


def raised(message: Message, error: BaseException) -> str:
    """The reason that a worker replies with: a line with the error, then the end of its traceback.

    The traceback names the round if the message does, as messages of Flower's strategies do.
    """
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({one.filename}:{one.lineno} in {one.name})" for one in last)
    what = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    head = plain(": ".join(filter(None, (type(error).__name__, what))), WIDTH)
    if isinstance(error, OwnError):  # its text says where it was raised
        head, place = f"{OWN}{plain(what, SENTENCE)}", ""
    records = message.content.config_records.values() if message.has_content() else ()
    found = [one["server-round"] for one in records if "server-round" in one]
    number = found[0] if found else message.metadata.group_id
    task = f"{message.metadata.message_type}{f' of round {number}' if number else ''}"
    whole = "".join(traceback.format_exception(error, limit=-FRAMES)).splitlines()[-LINES:]
    return "\n".join([f"{head}{place}", *(plain(one, WIDTH) for one in [task, *whole])])


class Failures:
    """The errors in replies to a grid: the first is shown with its traceback, others are counted.

    Every reply keeps only the line with the error.
    """

    def __init__(self, shown: bool) -> None:
        self._shown, self._count = shown, 0

    def take(self, reply: Message, partition: int | None) -> None:
        """Cut the reason of a reply to one line, and show the rest if it is the first error."""
        if not reply.has_error():
            return
        line, *below = (reply.error.reason or "").split("\n")
        reply.error = Error(reply.error.code, line)
        if not (below and self._shown):
            return
        self._count += 1
        if self._count == 1:
            logging.getLogger("fedmuon").warning(
                "the client app of node %d (partition %s) failed at %s. Later errors are only "
                "counted:\n%s",
                reply.metadata.src_node_id, partition, below[0], "\n".join(below[1:])
            )  # fmt: skip

    def close(self) -> None:
        """Log how many more there were."""
        if self._count > 1:
            logging.getLogger("fedmuon").warning("%d more replies were errors", self._count - 1)
        self._count = 0
