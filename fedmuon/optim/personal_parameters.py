"""Parameters that never leave a client, such as the head of a network (FedPer)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from fedmuon.core.errors import InputError, shown
from fedmuon.optim.chain import PERSONAL, States
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage, Trees
from fedmuon.tasks.base import Params, blocks


@dataclass(frozen=True)
class PersonalParameters(Stage):
    """A stage that leaves some parameters with each client, which stores them between its rounds.

    A client that has not stored its parameters starts with those of the run's initial model.

    Attributes:
        patterns: Name patterns of the parameters, such as `head.*`.
    """

    patterns: tuple[str, ...]

    def require(self, recipe: Any) -> None:
        """Raise an error if the patterns are not strings, or the recipe sends or returns states."""
        if not isinstance(self.patterns, tuple | list) or not all(
            isinstance(pattern, str) for pattern in self.patterns
        ):
            raise InputError(
                f"personal of a Recipe is {shown(self.patterns)}, but it must be a tuple of "
                "patterns."
            )
        if recipe.sent or recipe.returned or PERSONAL in recipe.persistent:
            messages = {"sent": recipe.sent, "returned": recipe.returned}
            clash = [f"{key} = {names!r}" for key, names in messages.items() if names]
            raise InputError(
                f"the recipe has personal = {', '.join(self.patterns)}, but the recipe also "
                f"has {[*clash, 'a link `personal`'][0]}. Personal parameters must stay on the "
                "client, so this combination is not allowed. Remove `personal`, or remove `sent`, "
                "`returned` and the link `personal`."
            )

    @property
    def stores(self) -> tuple[str, ...]:  # type: ignore[override]
        """The name of the state with a client's personal parameters."""
        return (PERSONAL,)

    def is_personal(self, name: str) -> bool:
        """Return whether the parameter with this name never leaves the client."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Split a model into its shared and its personal parameters."""
        shared = {name: one for name, one in params.items() if not self.is_personal(name)}
        return shared, {name: one for name, one in params.items() if name not in shared}

    def send(self, message: Trees, server: ServerState) -> Trees:
        """Send only the shared parameters."""
        return self._shared(message)

    def adopt(
        self, models: Params, first: Callable[[], Params], memories: Sequence[States]
    ) -> Params:
        """Return the received models, completed by each client's personal parameters."""
        initial = first()
        parts = blocks(self.split(initial)[1], len(memories))
        for number, memory in enumerate(memories):
            if memory:
                stored = memory[PERSONAL]
                parts[number] = {name: stored[name].to(one) for name, one in parts[number].items()}
        personal = {
            name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]
        }
        return {name: personal[name] if name in personal else models[name] for name in initial}

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Return only the shared parameters, and let the client store the others."""
        shared, personal = self.split(reply.params)
        return reply.with_trees({**reply.trees, MODEL: shared}).storing(PERSONAL, personal)

    def sent_like(self, message: Trees) -> Trees:
        """Return tensors like those of a message, without personal parameters."""
        return self._shared(message)

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a reply, without personal parameters."""
        return self._shared(message)

    def _shared(self, trees: Trees) -> Trees:
        return {**trees, MODEL: self.split(trees[MODEL])[0]}
