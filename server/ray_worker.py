"""What answers for clients in a process of Ray's."""

import contextlib
import copy
from typing import Any, Protocol, runtime_checkable

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedmuon.footprint import peak
from fedmuon.server.flower_parts import context, identify, numbered, refusal, with_content


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

    def __init__(self, app: ClientApp, nodes: int, config: dict[str, Any]) -> None:
        identify()
        self._app, self._nodes, self._config = app, nodes, config
        if isinstance(app, Together):
            app.load()

    def ready(self) -> list[tuple[Message, RecordDict | None]]:
        """Nothing, once it can answer."""
        return []

    def memory(self) -> int:
        """The most bytes that this process has held."""
        return peak()

    def answer(
        self, content: Any, messages: list[Message], states: list[RecordDict | None]
    ) -> list[tuple[Message, RecordDict | None]]:
        """Replies, each with what its client keeps; `content` is what those without one share."""
        if content is not None:
            for message in messages:
                message.content = content
        contexts = [
            context(message.metadata.dst_node_id, self._nodes, state, self._config)
            for message, state in zip(messages, states, strict=True)
        ]
        replies = [] if len(messages) == 1 else self._together(messages, contexts)
        replies = replies or list(map(self._alone, messages, contexts))
        return [(reply, held.state or None) for reply, held in zip(replies, contexts, strict=True)]

    def _together(self, messages: list[Message], contexts: list[Context]) -> list[Message]:
        """Nothing where that fails: asked one by one, the client at fault is known."""
        if isinstance(self._app, Together):
            with contextlib.suppress(Exception):
                return self._app.together(messages, contexts)
        return []

    def _alone(self, message: Message, context: Context) -> Message:
        own = message
        if not isinstance(self._app, Together):  # an app may do with its message what it likes
            own = with_content(message, copy.deepcopy(message.content))
        try:
            reply = self._app(own, context)
            numbered(reply)
            return reply
        except Exception as error:
            return refusal(message, f"{type(error).__name__}: {error}", raised=True)
