"""What the ClientApps of both jobs share."""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict


def work_path(message: Message) -> str:
    """The file that the server's config names."""
    return str(message.content.config_records["config"]["work"])


def partition(context: Context) -> int:
    """Which partition this node holds."""
    return int(context.node_config["partition-id"])


def introduction(message: Message, context: Context) -> Message:
    """The answer to the server's question which partition this node holds."""
    content = RecordDict({"node": ConfigRecord({"partition": partition(context)})})
    return Message(content, reply_to=message)
