"""Functions that the ClientApps of both jobs share."""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict


def work_path(message: Message) -> str:
    """Return the path of the work file from the server's config."""
    return str(message.content.config_records["config"]["work"])


def partition(context: Context) -> int:
    """Return the partition of this node."""
    return int(context.node_config["partition-id"])


def introduction(message: Message, context: Context) -> Message:
    """Return the reply that states the partition of this node."""
    content = RecordDict({"node": ConfigRecord({"partition": partition(context)})})
    return Message(content, reply_to=message)
