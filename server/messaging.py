"""Messages to nodes and back, with a deadline."""

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedmuon.core.errors import InputError, plain
from fedmuon.federated.wire import distrusted
from fedmuon.server import stopping
from fedmuon.server.failures import OWN, SENTENCE

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
