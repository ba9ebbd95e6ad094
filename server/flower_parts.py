"""The parts of Flower that it keeps to itself and that a Grid of another kind cannot do without."""

import copy
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import NUM_PARTITIONS_KEY, PARTITION_ID_KEY, ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN = 1
SERVER = 1  # the node that a server's messages come from


def identify() -> None:
    """Tell Flower who makes messages in this process, without which it makes none."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = RUN, RUN, SERVER


def numbered(message: Message) -> str:
    """Give the message an id, as a SuperLink would."""
    name = str(uuid4())
    message.metadata.__dict__["_message_id"] = name
    return name


def with_content(message: Message, content: RecordDict | None) -> Message:
    """The same message with other content, or none, and with an id of its own to come."""
    found = copy.copy(message)
    found.__dict__["_content"] = content
    found.__dict__["_metadata"] = copy.copy(message.metadata)
    return found


def refusal(message: Message, why: str, raised: bool = False) -> Message:
    """The reply of a node that has none."""
    code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION if raised else ErrorCode.UNKNOWN
    reply = Message(Error(code, why), reply_to=message)
    numbered(reply)
    return reply


def context(node: int, nodes: int, state: RecordDict | None, config: dict[str, Any]) -> Context:
    """What a ClientApp knows of where it runs: node i of a simulation holds partition i."""
    place = {PARTITION_ID_KEY: node, NUM_PARTITIONS_KEY: nodes}
    return Context(RUN, node, place, RecordDict() if state is None else state, dict(config))


def server_context(config: dict[str, Any]) -> Context:
    """The same for a ServerApp."""
    return Context(RUN, SERVER, {}, RecordDict(), dict(config))


def weight(message: Message) -> int:
    """Bytes of the objects that a message is taken apart into on its way through a SuperLink."""
    return sum(len(one.deflate()) for one in get_all_nested_objects(message).values())


def empty_run() -> Run:
    """A run of which there is nothing to tell."""
    return Run.create_empty(RUN)
