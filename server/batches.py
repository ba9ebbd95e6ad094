"""What a worker of Ray's is asked at once."""

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from flwr.app import Message, RecordDict

from fedmuon.server.flower_parts import with_content

DIRECT = "RAY_max_direct_call_object_size"  # bytes that Ray sends with a call, if it was told
WORTH = 0.05  # seconds of work that a call is worth


@dataclass
class Batch:
    """Messages that a worker is asked at once, when that was, and when it has to have answered."""

    messages: list[Message]
    start: float = 0.0
    end: float = math.inf
    tries: int = 0  # of a worker that is waited for
    ended: bool = False  # its worker was, as it took too long

    @property
    def ttl(self) -> float:
        """Seconds for which all of them live."""
        return min(message.metadata.ttl for message in self.messages)

    @property
    def late(self) -> bool:
        """Whether its time is up."""
        return self.ended or self.end < time.monotonic()

    @cached_property
    def nodes(self) -> frozenset[int]:
        """Whom it is for: a node has one message at a time."""
        return frozenset(message.metadata.dst_node_id for message in self.messages)


def batches(messages: Sequence[Message], size: int) -> Iterator[Batch]:
    """In their order, so many at once and more only where they are for one node, which remembers
    from message to message."""
    by_node: dict[int, list[Message]] = {}
    for message in messages:
        by_node.setdefault(message.metadata.dst_node_id, []).append(message)
    some: list[Message] = []
    for own in by_node.values():
        some += own
        if len(some) >= size:
            yield Batch(some)
            some = []
    if some:
        yield Batch(some)


def calls(share: float, each: float, most: int) -> int:
    """In how many calls a worker gets its share of the messages, each of so many seconds: several
    make the load even, but each costs some milliseconds."""
    return max(1, math.ceil(min(most, share * each / WORTH)))


def apart(messages: Sequence[Message]) -> tuple[RecordDict | None, list[Message]]:
    """The content that all messages share, and these without it; if they do not, they keep it."""
    content = messages[0].content
    if any(one.content is not content for one in messages[1:]):
        return None, list(messages)
    return content, [with_content(one, None) for one in messages]


def large(content: RecordDict) -> bool:
    """Whether Ray would copy it into its store for each call: once is enough."""
    direct = int(os.environ.get(DIRECT, 102_400))  # Ray's own, of which nothing else tells
    records = content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values()) > direct


def singles(messages: Iterable[Message]) -> list[Message]:
    """Each a message of its own, also where one stands there twice."""
    seen: dict[int, Message] = {}
    return [with_content(one, one.content) if id(one) in seen else seen.setdefault(id(one), one)
            for one in messages]  # fmt: skip
