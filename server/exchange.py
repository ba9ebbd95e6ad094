"""Messages to nodes and back, with a deadline."""

import time
from collections.abc import Iterable, Sequence

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

FIRST_PAUSE, LAST_PAUSE = 0.005, 0.1  # seconds between looks; small rounds should not wait


def exchange(grid: Grid, messages: Sequence[Message], deadline: float) -> list[Message]:
    """Send all, and collect the replies that come within `deadline` seconds, in any order."""
    waiting = {one for one in grid.push_messages(messages) if one}
    replies: list[Message] = []
    end, pause = time.monotonic() + deadline, FIRST_PAUSE
    while waiting and time.monotonic() < end:
        time.sleep(pause)
        found = list(grid.pull_messages(waiting))
        waiting -= {reply.metadata.reply_to_message_id for reply in found}
        replies += found
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
        time.sleep(LAST_PAUSE)


def _ask(grid: Grid, nodes: Iterable[int], deadline: float) -> dict[int, int]:
    questions = [Message(RecordDict(), node, MessageType.QUERY, ttl=deadline + 1) for node in nodes]
    answers = [reply for reply in exchange(grid, questions, deadline) if not reply.has_error()]
    return {partition_of(reply): reply.metadata.src_node_id for reply in answers}


def partition_of(reply: Message) -> int:
    """The partition that a reply says it comes from."""
    return int(reply.content.config_records["who"]["partition"])  # type: ignore[arg-type]
