"""A Ray actor: a separate process that calls a ClientApp to answer messages to clients."""

import copy
import os
import traceback
from logging import DEBUG
from typing import Any, Protocol, runtime_checkable

import ray
from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedmuon.core.files import Record
from fedmuon.runs.process_profile import this_process
from fedmuon.runs.provenance import memory
from fedmuon.server.messaging import raised
from fedmuon.server.ray.flower_internals import context, identify, numbered, refusal, with_content

NODE = 12  # digits of Ray's node id that are enough to distinguish nodes


@runtime_checkable
class Together(Protocol):
    """A ClientApp that can answer several messages together, and does not change them."""

    def load(self) -> None:
        """Import the modules that are needed to answer messages."""
        ...

    def together(self, messages: list[Message], contexts: list[Context]) -> list[Message]:
        """Return a reply to each message."""
        ...


class Worker:
    """A Ray actor that can answer messages to any client."""

    def __init__(self, app: ClientApp, nodes: int, config: UserConfig) -> None:
        identify()
        self._replies = 0
        self._serve(app, nodes, config)

    def _serve(self, app: ClientApp, nodes: int, config: UserConfig) -> None:
        self._app, self._nodes, self._config = app, nodes, config
        self._partitions: dict[int, int] = {}  # node -> partition, for the current call
        this_process.end()  # of an earlier run
        if isinstance(app, Together):
            app.load()

    def ready(self, *arguments: Any) -> tuple[list[Message], dict[int, RecordDict]]:
        """Return an empty answer, which shows that the worker is ready.

        To use the worker in another grid, pass the grid's app, number of nodes and config.
        """
        if arguments:
            self._serve(*arguments)
        return [], {}

    def memory(self) -> Record:
        """Return this worker's peak memory, machine, process id, and number of replies."""
        node = ray.get_runtime_context().get_node_id()[:NODE]
        return {"node": node, "pid": os.getpid(), "replies": self._replies, **memory()}

    def profile(self) -> Record:
        """Return this worker's machine, its process id, and its profile, which then ends."""
        node = ray.get_runtime_context().get_node_id()[:NODE]
        return {"node": node, "pid": os.getpid(), "rounds": this_process.end()}

    def answer(
        self,
        content: Any,
        messages: list[Message],
        states: dict[int, RecordDict],
        partitions: dict[int, int],
    ) -> tuple[list[Message], dict[int, RecordDict]]:
        """Answer messages.

        Args:
            content: The content of all messages. It is None if each message contains its own
                content.
            messages: The messages.
            states: Stored state of each node that has one, by node id.
            partitions: Partition of each node, by node id.

        Returns:
            A reply to each message, and the new states.
        """
        self._partitions = partitions
        if content is not None:
            for message in messages:
                message.content = content
        replies = self._together(messages, states) if len(messages) > 1 else []
        replies = replies or [self._alone(message, states) for message in messages]
        self._replies += len(replies)
        return replies, states

    def _together(self, messages: list[Message], states: dict[int, RecordDict]) -> list[Message]:
        """Answer all messages in one call of the app, or return an empty list if the call fails.

        After a failure, the messages are answered one by one, so that only the faulty client fails.
        """
        if not isinstance(self._app, Together):
            return []
        contexts = [self._context(message, states) for message in messages]
        try:
            replies = self._app.together(messages, contexts)
        except Exception as error:
            log(DEBUG, "A batch of %d messages failed: %r", len(messages), error)
            return []
        states |= {
            app_context.node_id: app_context.state
            for app_context in contexts
            if app_context.state or app_context.node_id in states
        }
        return replies

    def _alone(self, message: Message, states: dict[int, RecordDict]) -> Message:
        """Answer one message: return the app's reply, or an error reply and the unchanged state."""
        private_message, node = message, message.metadata.dst_node_id
        app_context = self._context(message, states)
        if not isinstance(self._app, Together):  # other apps may change their message
            private_message = with_content(message, copy.deepcopy(message.content))
            app_context.state = copy.deepcopy(app_context.state)
        try:
            reply: Any = self._app(private_message, app_context)
        except Exception as error:
            traceback.print_exc()  # appears in Ray's log
            return refusal(message, raised(message, error), raised=True)
        identifier = message.metadata.message_id
        is_message = isinstance(reply, Message)
        if not is_message or reply.metadata.reply_to_message_id != identifier:
            returned = (
                "a message that does not reply to the received message"
                if is_message
                else repr(reply)[:80]
            )
            reason = (
                f"the client app returned {returned}. Return Message(content, reply_to=message) "
                "with the message that the app received."
            )
            return refusal(message, reason, raised=True)
        numbered(reply)
        if app_context.state or node in states:
            states[node] = app_context.state
        return reply

    def _context(self, message: Message, states: dict[int, RecordDict]) -> Context:
        node = message.metadata.dst_node_id
        place = self._partitions[node], self._nodes
        return context(node, place, states.get(node), self._config)
