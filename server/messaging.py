"""Messages to nodes and back, with a deadline."""

import contextlib
import logging
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedmuon.core.errors import InputError, plain
from fedmuon.core.guard import OwnError
from fedmuon.federated.wire import distrusted
from fedmuon.server import stopping

FIRST_PAUSE, LAST_PAUSE = 0.005, 0.1  # seconds between looks; small rounds should not wait


@runtime_checkable
class Numbered(Protocol):
    """A grid that knows who holds what, and wakes whoever waits for a reply."""

    mended: dict[str, str]  # messages since the last push that were asked again, and why

    def node_of(self, partition: int) -> int:
        """The node that holds a partition."""
        ...

    def pull_within(self, message_ids: Iterable[str], seconds: float) -> list[Message]:
        """The replies to these that have come; it waits for one for so long at most."""
        ...

    def forget(self, message_ids: Iterable[str]) -> None:
        """Nobody waits for the replies to these any more."""
        ...


def exchange(grid: Grid, messages: Sequence[Message], deadline: float) -> dict[int, Message]:
    """Send all, and collect what is answered within `deadline` seconds: message number -> reply.

    Replies are told apart by the message that they answer, since the SuperLink answers in place of
    a node whose time is up.
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
            if number is not None:  # nobody was asked twice
                replies[number] = reply
        pause = FIRST_PAUSE if found else min(1.5 * pause, LAST_PAUSE)
    if isinstance(grid, Numbered):
        grid.forget(set(waiting))
    return replies


def meet(
    grid: Grid, known: dict[int, int], wanted: Iterable[int], patience: float
) -> dict[int, int]:
    """Partition -> node id, complete for `wanted` unless patience ends first.

    Only nodes that are not yet known are asked. Nodes that left are forgotten, so that one that
    came back under another id takes its partition over; but none takes what another one holds.
    """
    wanted, end = set(wanted), time.monotonic() + patience
    nodes, asked = dict(known), set(known.values())
    while True:
        present = set(grid.get_node_ids())
        nodes = {partition: node for partition, node in nodes.items() if node in present}
        nodes = _ask(grid, present - asked, max(end - time.monotonic(), 0.0)) | nodes
        asked |= present
        if wanted <= set(nodes) or time.monotonic() > end:
            return nodes
        stopping.pause(LAST_PAUSE)


def _ask(grid: Grid, nodes: Iterable[int], deadline: float) -> dict[int, int]:
    """Partition -> node id of those nodes that answer."""
    asked = list(nodes)
    questions = [Message(RecordDict(), node, MessageType.QUERY, ttl=deadline + 1) for node in asked]
    answers = exchange(grid, questions, deadline)
    claims = [(_partition(reply), asked[number]) for number, reply in answers.items()]
    held = [partition for partition, _ in claims]
    return {
        partition: node
        for partition, node in claims
        if partition is not None and held.count(partition) == 1
    }


def _partition(reply: Message) -> int | None:
    """The partition that a node says it holds; None if it says nothing of the kind."""
    with contextlib.suppress(InputError), distrusted():
        if not reply.has_error():
            found = reply.content.config_records["who"]["partition"]
            return found if type(found) is int else None
    return None


def reason(reply: Message) -> str:
    """Why a reply is an error, without the wrapping that Flower and Ray put around it."""
    text = (reply.error.reason or "").strip() or "it failed"
    inner = (text.rsplit("Message: ", 1)[-1].strip() or text).splitlines()[0]
    most = SENTENCE if OWN in inner else 200
    return plain(inner.removeprefix("<class 'ray.exceptions.").rstrip("'>"), most)


def arrays_of(content: RecordDict) -> dict[str, bytes]:
    """The arrays of a message, each as the bytes of an .npy file."""
    record = content.array_records["arrays"]
    return {name: array.data for name, array in record.items()}


# Errors that clients raise, shown where the server runs: the first whole, the others counted.

OWN, SENTENCE = "OwnError: ", 800  # what the reason begins with where a custom object is at fault
FRAMES, LINES, WIDTH = 3, 20, 200  # of a traceback: calls, lines, and characters of a line


def raised(message: Message, error: BaseException) -> str:
    """The reason of a reply: a line with the error, and below it the end of its traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({one.filename}:{one.lineno} in {one.name})" for one in last)
    what = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    head = plain(": ".join(filter(None, (type(error).__name__, what))), WIDTH)
    if isinstance(error, OwnError):  # which says itself where it was
        head, place = f"{OWN}{plain(what, SENTENCE)}", ""
    whole = "".join(traceback.format_exception(error, limit=-FRAMES)).splitlines()[-LINES:]
    told = [f"{message.metadata.message_type}{_round(message)}", *whole]
    return "\n".join([f"{head}{place}", *(plain(one, WIDTH) for one in told)])


def _round(message: Message) -> str:
    """Which one, if the message says so as Flower's strategies do."""
    records = message.content.config_records.values() if message.has_content() else ()
    found = [one["server-round"] for one in records if "server-round" in one]
    number = found[0] if found else message.metadata.group_id
    return f" of round {number}" if number else ""


class Failures:
    """What a grid does with them: of every reply only the line with the error goes on."""

    def __init__(self, shown: bool) -> None:
        self._shown, self._count = shown, 0

    def take(self, reply: Message, partition: int | None) -> None:
        """Show the first reply whose client, with that partition, raised an error."""
        if not reply.has_error():
            return
        line, *below = (reply.error.reason or "").split("\n")
        reply.error = Error(reply.error.code, line)
        if below and self._shown:
            self._count += 1
            if self._count == 1:
                self._show(reply.metadata.src_node_id, partition, below)

    def close(self) -> None:
        """Say how many more there were."""
        if self._count > 1:
            logging.getLogger("fedmuon").warning("%d more replies were errors", self._count - 1)
        self._count = 0

    def _show(self, node: int, partition: int | None, below: list[str]) -> None:
        what, *lines = below
        logging.getLogger("fedmuon").warning(
            "the client app of node %d (partition %s) failed at %s; of later errors there will be "
            "the number alone:\n%s", node, partition, what, "\n".join(lines)
        )  # fmt: skip


# The public keys of a round's clients, which the server hands on to all of them.

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
