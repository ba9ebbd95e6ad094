"""Messages to nodes and back, with a deadline."""

import time
from collections.abc import Iterable, Sequence

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from server import stopping

FIRST_PAUSE, LAST_PAUSE = 0.005, 0.1  # seconds between looks; small rounds should not wait


def exchange(grid: Grid, messages: Sequence[Message], deadline: float) -> dict[int, Message]:
    """Send all, and collect what is answered within `deadline` seconds: message number -> reply.

    Replies are told apart by the message that they answer, since the SuperLink answers in place of
    a node whose time is up.
    """
    waiting = {one: number for number, one in enumerate(grid.push_messages(messages)) if one}
    replies: dict[int, Message] = {}
    end, pause = time.monotonic() + deadline, FIRST_PAUSE
    while waiting and time.monotonic() < end:
        stopping.pause(pause)
        found = list(grid.pull_messages(set(waiting)))
        for reply in found:
            replies[waiting.pop(reply.metadata.reply_to_message_id)] = reply
        pause = FIRST_PAUSE if found else min(1.5 * pause, LAST_PAUSE)
    return replies


def meet(
    grid: Grid, known: dict[int, int], wanted: Iterable[int], patience: float
) -> dict[int, int]:
    """Partition -> node id, complete for `wanted` unless patience ends first.

    Only nodes that are not yet known are asked. A node that came back under another id takes its
    partition over; nodes that left are forgotten.
    """
    wanted, end = set(wanted), time.monotonic() + patience
    nodes, asked = dict(known), set(known.values())
    while True:
        present = set(grid.get_node_ids())
        nodes = {partition: node for partition, node in nodes.items() if node in present}
        nodes |= _ask(grid, present - asked, max(end - time.monotonic(), 0.0))
        asked |= present
        if wanted <= set(nodes) or time.monotonic() > end:
            return nodes
        stopping.pause(LAST_PAUSE)


def _ask(grid: Grid, nodes: Iterable[int], deadline: float) -> dict[int, int]:
    """Partition -> node id of those nodes that answer."""
    asked = list(nodes)
    questions = [Message(RecordDict(), node, MessageType.QUERY, ttl=deadline + 1) for node in asked]
    answers = exchange(grid, questions, deadline)
    return {
        _partition(reply): asked[number]
        for number, reply in answers.items()
        if not reply.has_error()
    }


def _partition(reply: Message) -> int:
    return int(reply.content.config_records["who"]["partition"])  # type: ignore[arg-type]


def reason(reply: Message) -> str:
    """Why a reply is an error, without the wrapping that Flower and Ray put around it."""
    text = (reply.error.reason or "it failed").strip()
    inner = text.rsplit("Message: ", 1)[-1].splitlines()[0]
    return inner.removeprefix("<class 'ray.exceptions.").rstrip("'>")
