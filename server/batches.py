"""What a worker of Ray's is asked at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict

from fedmuon.server.flower_parts import with_content

SHARED = 100_000  # bytes; what Ray would copy into its store for each call goes there once
WORTH = 0.05  # seconds of work that a call is worth
MEMORY = 0.7e9  # bytes of a worker that has loaded torch and Flower


@dataclass
class Batch:
    """Messages that a worker is asked at once, when that was, and when it has to have answered."""

    messages: list[Message]
    start: float = 0.0
    end: float = math.inf
    tries: int = 0  # of a worker that is waited for

    @property
    def ttl(self) -> float:
        """Seconds for which all of them live."""
        return min(message.metadata.ttl for message in self.messages)


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
    """Whether it is better kept in Ray's store than sent with each call."""
    records = content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values()) > SHARED


def fitting(resources: dict[str, float], held: dict[str, float]) -> int:
    """How many actors of these resources the machines have room for, memory included."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    resources = {"memory": MEMORY, **resources}
    rooms = [
        held.get(names.get(name, name), 0.0) // need for name, need in resources.items() if need
    ]
    return max(1, int(min(rooms, default=1)))
