"""Internal functions of Flower that the Grid on Ray needs."""

import copy
import secrets
from typing import Any
from uuid import uuid4

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.common.config import flatten_dict
from flwr.common.constant import (
    NODE_ID_NUM_BYTES,
    NUM_PARTITIONS_KEY,
    PARTITION_ID_KEY,
    SUPERLINK_NODE_ID,
    ErrorCode,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator

RUN = 1
SERVER = SUPERLINK_NODE_ID  # the sender of a server's messages


def identify() -> None:
    """Set the sender of this process's messages. Flower requires this before the first message."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = RUN, RUN, SERVER


def numbered(message: Message) -> str:
    """Set the id of a message as a SuperLink would set it, and return the id."""
    name = str(uuid4())
    message.metadata.__dict__["_message_id"] = name
    return name


def with_content(message: Message, content: RecordDict | None) -> Message:
    """Copy a message with other content, or without content.

    The copy can get another id.
    """
    copied = copy.copy(message)
    copied.__dict__["_content"] = content
    copied.__dict__["_metadata"] = copy.copy(message.metadata)
    return copied


def refusal(message: Message, why: str, raised: bool = False) -> Message:
    """Create an error reply in place of a node's reply."""
    code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION if raised else ErrorCode.UNKNOWN
    reply = Message(Error(code, why), reply_to=message)
    numbered(reply)
    return reply


def expired(message: Message) -> Message:
    """Create the error reply of a SuperLink to a message whose time to live has ended."""
    # This module loads the SuperLink's database, which only a late reply needs.
    from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_ins_message

    metadata = message.metadata
    return create_message_error_unavailable_ins_message(metadata.message_id, metadata.run_id)


def node_ids(count: int, seed: int | None) -> list[int]:
    """Draw distinct node ids, one per partition. With a seed, the ids are reproducible.

    A SuperLink draws ids in the same way: 8 random bytes, but neither 0 nor its own id.
    """
    if seed is None:
        seed = secrets.randbits(64)
    elif not (isinstance(seed, int) and seed >= 0):
        raise InputError(
            f"the seed of the node ids is {seed!r:.40}, but it must be an integer of at least 0. "
            "Pass an integer of 0 or more, or None."
        )
    draw, ids = generator(seed, Draw.NODE), dict[int, None]()
    while len(ids) < count:
        missing = count - len(ids)
        drawn = draw.integers(2 ** (8 * NODE_ID_NUM_BYTES), size=missing, dtype=np.uint64)
        ids |= dict.fromkeys(drawn.tolist())
        for reserved in (0, SUPERLINK_NODE_ID):
            ids.pop(reserved, None)
    return list(ids)


def flat(run_config: dict[str, Any] | None) -> UserConfig:
    """Flatten a run config as Flower does for apps: nested tables become keys with dots."""
    try:
        return flatten_dict(run_config)
    except ValueError as error:
        raise InputError(
            f"run_config = {run_config!r:.200} is not valid: {error} Store other values in a "
            "file, and pass the path of the file."
        ) from None


def context(
    node: int, place: tuple[()] | tuple[int, int], state: RecordDict | None, config: UserConfig
) -> Context:
    """Create the context of an app.

    For a ClientApp, `place` contains its partition and the number of partitions.
    """
    node_config: UserConfig = dict(zip((PARTITION_ID_KEY, NUM_PARTITIONS_KEY), place, strict=False))
    return Context(RUN, node, node_config, RecordDict() if state is None else state, dict(config))


def weight(message: Message) -> int:
    """Return the bytes of a message when it is sent through a SuperLink."""
    return sum(len(value.deflate()) for value in get_all_nested_objects(message).values())
