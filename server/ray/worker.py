"""What answers for clients in a process of Ray's."""

import contextlib
import copy
import traceback
from typing import Any, Protocol, runtime_checkable

from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp

from fedmuon.runs.provenance import peak
from fedmuon.server.messaging import raised
from fedmuon.server.ray.flower_internals import context, identify, numbered, refusal, with_content


@runtime_checkable
class Together(Protocol):
    """A ClientApp that answers several messages at once, which it may not change."""

    def load(self) -> None:
        """What answering needs."""
        ...

    def together(self, messages: list[Message], contexts: list[Context]) -> list[Message]:
        """A reply to each."""
        ...


class Worker:
    """An actor that answers for any client."""

    def __init__(self, app: ClientApp, nodes: int, config: UserConfig) -> None:
        identify()
        self._app, self._nodes, self._config = app, nodes, config
        self._partitions: dict[int, int] = {}  # of the nodes whose messages are answered now
        if isinstance(app, Together):
            app.load()

    def ready(self) -> tuple[list[Message], dict[int, RecordDict]]:
        """Nothing, once it can answer."""
        return [], {}

    def memory(self) -> int:
        """The most bytes that this process has held."""
        return peak()

    def answer(
        self,
        content: Any,
        messages: list[Message],
        states: dict[int, RecordDict],
        partitions: dict[int, int],
    ) -> tuple[list[Message], dict[int, RecordDict]]:
        """A reply to each, and what the nodes keep now; `content` is what messages without one
        share, `states` what the nodes have kept, `partitions` those that they hold."""
        self._partitions = partitions
        if content is not None:
            for message in messages:
                message.content = content
        replies = self._together(messages, states) if len(messages) > 1 else []
        return replies or [self._alone(message, states) for message in messages], states

    def _together(self, messages: list[Message], states: dict[int, RecordDict]) -> list[Message]:
        """Nothing where that fails: asked one by one, the client at fault is known."""
        if not isinstance(self._app, Together):
            return []
        found = [self._context(message, states) for message in messages]
        with contextlib.suppress(Exception):
            replies = self._app.together(messages, found)
            states |= {
                one.node_id: one.state for one in found if one.state or one.node_id in states
            }
            return replies
        return []

    def _alone(self, message: Message, states: dict[int, RecordDict]) -> Message:
        """The app's reply; what it keeps of its state counts if there is one."""
        own, node = message, message.metadata.dst_node_id
        found = self._context(message, states)
        if not isinstance(self._app, Together):  # an app may do with its message what it likes
            own = with_content(message, copy.deepcopy(message.content))
            found.state = copy.deepcopy(found.state)
        try:
            reply = self._app(own, found)
        except Exception as error:
            traceback.print_exc()  # shown where Ray's log is
            return refusal(message, raised(message, error), raised=True)
        if not _answers(reply, message):
            return refusal(message, _no_reply(reply), raised=True)
        numbered(reply)
        if found.state or node in states:
            states[node] = found.state
        return reply

    def _context(self, message: Message, states: dict[int, RecordDict]) -> Context:
        node = message.metadata.dst_node_id
        place = self._partitions[node], self._nodes
        return context(node, place, states.get(node), self._config)


def _answers(reply: Any, message: Message) -> bool:
    """Whether it was made as a reply to that message."""
    asked = message.metadata.message_id
    return isinstance(reply, Message) and reply.metadata.reply_to_message_id == asked


def _no_reply(found: Any) -> str:
    what = "a message that replies to no other" if isinstance(found, Message) else repr(found)[:80]
    return (
        f"the client app returned {what}: let it return Message(content, reply_to=message) for the "
        "message that it was given"
    )
