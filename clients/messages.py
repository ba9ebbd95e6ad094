"""Reading of messages in a client, without importing torch."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.errors import InputError, plain
from fedmuon.core.tables import Scalar

MEASURED = "measured"  # name of the record with a client's measurements
FlatConfig = tuple[tuple[str, Scalar], ...]

# A function that returns the custom objects that were passed in Python, always the same objects.
Fetch = Callable[[], UserObjects]


def nothing() -> UserObjects:
    """Return no custom objects, because the config names everything that a client needs."""
    return NOTHING


def request(message: Message) -> tuple[FlatConfig, int, int, np.ndarray | None, float | None, str]:
    """Unpack a request.

    Returns:
        The config (hashable); the round; the number of replicas; the data sets of the replicas
        (`Neighbours.rows`, or None if all replicas use the same data); the factor of the step size
        (None without a schedule); a digest of the partition of the samples.
    """
    flat: dict[str, Any] = dict(message.content.config_records["config"])
    round, stack, rows = flat.pop("round"), flat.pop("stack"), flat.pop("rows", None)
    dealt = plain(flat.pop("dealt", ""), 60)
    if type(round) is not int or type(stack) is not int or round < 0 or stack < 1:
        raise InputError("the message has no valid round or no valid number of replicas")
    factor = flat.pop("factor", None)
    if factor is not None and not (isinstance(factor, float) and 0 <= factor < math.inf):
        raise InputError("the message has no valid factor for the step sizes")
    if odd := [name for name, value in flat.items() if not isinstance(value, Scalar)]:
        raise InputError(f"the entry {plain(odd[0], 60)} of the message must be a single value")
    if rows is not None and len(rows) != 3 * stack:
        raise InputError("the message must name one data set per replica")
    held = None if rows is None else np.array(rows, np.int64).reshape(stack, 3)
    return tuple(sorted(flat.items())), round, stack, held, factor, dealt


def partition(context: Context) -> int:
    """Return the partition of this node."""
    if "partition-id" not in context.node_config:
        raise InputError(
            "this SuperNode has no partition-id. Start it with --node-config 'partition-id=0', "
            "or the number of its client instead of 0."
        )
    return int(context.node_config["partition-id"])


def answer(message: Message, records: dict) -> Message:
    """Return the reply to a message, with these records."""
    return Message(RecordDict(records), reply_to=message)
