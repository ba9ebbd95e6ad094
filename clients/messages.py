"""Read messages in a client, without importing torch."""

import io
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.errors import SAME_VERSION, InputError, plain
from fedmuon.core.tables import Scalar
from fedmuon.data.client_neighbours import CLIENT_ROWS, COLUMNS
from fedmuon.data.neighbours import ROWS

NUMPY = "numpy.ndarray"  # Flower's name of the format of numpy.save
MEASURED = "measured"  # name of the record with a client's measurements
Kind = TypeVar("Kind", ArrayRecord, ConfigRecord, MetricRecord)
FlatConfig = tuple[tuple[str, Scalar], ...]

# A function that returns the custom objects that were passed in Python, always the same objects.
Fetch = Callable[[], UserObjects]


def nothing() -> UserObjects:
    """Return no custom objects, because the config names everything that a client needs."""
    return NOTHING


Request = tuple[FlatConfig, int, int, np.ndarray | None, float | None, str]


def record_of(content: RecordDict, name: str, kind: type[Kind]) -> Kind:
    """Return a record of a message.

    Properties such as `content.config_records` create a new dictionary of all records each time.

    Raises:
        KeyError: If the message has no record of this name and kind.
    """
    record = content[name]
    if not isinstance(record, kind):
        raise KeyError(name)
    return record


def array_record(tensors: Mapping[str, Any]) -> ArrayRecord:
    """Return the record of tensors on the CPU, with the bytes that Flower would write.

    Flower's constructor gives the same result, but takes twice as long for large tensors.
    """
    arrays = {name: _array(tensor.detach().numpy()) for name, tensor in tensors.items()}
    return ArrayRecord(arrays, keep_input=False)


def _array(values: np.ndarray) -> Array:
    """Return an array in the format of numpy.save."""
    columns = values.flags.f_contiguous and not values.flags.c_contiguous
    stored = values.T if columns else np.ascontiguousarray(values)
    header = _header(values.shape, values.dtype.str, columns)
    data = b"".join((header, stored.reshape(-1).view(np.uint8).data))
    return Array(str(values.dtype), values.shape, NUMPY, data)


@lru_cache(maxsize=64)
def _header(shape: tuple[int, ...], descr: str, columns: bool) -> bytes:
    file = io.BytesIO()
    content = {"descr": descr, "fortran_order": columns, "shape": shape}
    np.lib.format.write_array_header_1_0(file, content)
    return file.getvalue()


def request(message: Message) -> Request:
    """Read the settings in a message of the server.

    Returns:
        The config (hashable), the round, the number of replicas, the data sets of the replicas, the
        step-size factor, and a hash of the partition of the samples. The data sets are
        `Neighbours.rows` or `ClientNeighbours.rows`, or None if all replicas use the same data. The
        factor is None without a schedule.
    """
    flat: dict[str, Any] = dict(record_of(message.content, "config", ConfigRecord))
    round, stack = flat.pop("round"), flat.pop("stack")
    rows, client_rows = flat.pop(ROWS, None), flat.pop(CLIENT_ROWS, None)
    dealt = plain(flat.pop("dealt", ""), 60)
    if type(round) is not int or type(stack) is not int or round < 0 or stack < 1:
        raise InputError(
            "the server's message has no valid round or no valid number of replicas. "
            f"{SAME_VERSION}"
        )
    factor = flat.pop("factor", None)
    if factor is not None and not (isinstance(factor, float) and 0 <= factor < math.inf):
        raise InputError(f"the server's message has no valid step-size factor. {SAME_VERSION}")
    if odd := [name for name, value in flat.items() if not isinstance(value, Scalar)]:
        raise InputError(
            f"the entry {plain(odd[0], 60)} of the server's message must be a string, a number "
            f"or a boolean. {SAME_VERSION}"
        )
    if (rows is not None and len(rows) != 3 * stack) or len(client_rows or []) % COLUMNS:
        raise InputError(
            f"the server's message does not name one data set per replica. {SAME_VERSION}"
        )
    neighbours = None if rows is None else np.array(rows, np.int64).reshape(stack, 3)
    if client_rows is not None:
        neighbours = np.array(client_rows, np.int64).reshape(-1, COLUMNS)
    return tuple(sorted(flat.items())), round, stack, neighbours, factor, dealt


def partition(context: Context) -> int:
    """Return the number of this node's client, which Flower calls the partition of the node."""
    if "partition-id" not in context.node_config:
        raise InputError(
            "this SuperNode has no partition-id, which is the number of its client. Start the "
            "SuperNode with --node-config 'partition-id=0', but replace 0 by the number of the "
            "client."
        )
    return int(context.node_config["partition-id"])


def answer(message: Message, records: dict) -> Message:
    """Create a reply to a message, with these records."""
    return Message(RecordDict(records), reply_to=message)
