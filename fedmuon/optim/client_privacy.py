"""Client-level privacy of a round: clients reply with clipped or noisy updates, or with shares.

`fedmuon.privacy.mechanisms.client_level` contains the mechanism, its claim and the proof.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedmuon.core.errors import InputError, shown
from fedmuon.optim.chain import States
from fedmuon.optim.stage import Broadcast, Reply, ServerState, Stage, Trees, split_model
from fedmuon.privacy.mechanisms.client_level import ClientLevel, mapped


@dataclass(frozen=True)
class ClientPrivacy(Stage):
    """A stage that replaces the clients' replies by one release of the privacy mechanism.

    Attributes:
        level: The mechanism.
        returned: The names of the states that clients return. The server also sends them.
        inside: The stages before this one, which choose the variables that clients return. The
            updates of these variables are clipped.
    """

    level: ClientLevel
    returned: tuple[str, ...] = ()
    inside: tuple[Stage, ...] = ()

    def require(self, recipe: Any) -> None:
        """Raise an error if `level` is not a `ClientLevel`."""
        if not isinstance(self.level, ClientLevel):
            raise InputError(
                f"client_level of a Recipe is {shown(self.level)}, but it must be a ClientLevel. "
                "Leave it out, and set [privacy] level = 'client' in the config instead."
            )

    @property
    def isolates(self) -> bool:  # type: ignore[override]
        """Return True, because the account assumes that an update depends on one client alone."""
        return True

    @property
    def masked_clients(self) -> int:  # type: ignore[override]
        """The size of a cohort with distributed trust, and otherwise 0."""
        return self.level.cohort if self.level.shared else 0

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Remove the loss of a reply. If clients do not trust the server, also add noise."""
        silent = replace(reply, loss=torch.full_like(reply.loss, math.nan))
        if self.level.trust == "central":
            return silent
        before = self._before(received)
        return silent.with_trees(
            self.level.perturbed(before, reply.trees, received.round, reply.client)
        )

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Return one reply with the noisy mean of all updates, also if there is no reply."""
        before = self._before(received())
        updates = [reply.trees for reply in replies]
        params, states = split_model(self.level.released(before, updates, server.round))
        no_loss = torch.full((len(next(iter(params.values()))),), math.nan)
        return [Reply(-1, params, states, no_loss)], {}

    def _before(self, received: Broadcast) -> Trees:
        """Return the reply of a client that did not train, before clipping."""
        states = {name: received.states[name] for name in self.returned}
        reply = Reply(-1, received.params, states, next(iter(received.params.values())))
        for stage in self.inside:
            reply = stage.reply(reply, received, {})
        return reply.trees

    def returned_like(self, message: Trees) -> Trees:
        """Return integers for masked replies, and otherwise ordinary tensors."""
        if not self.level.shared:
            return message
        return mapped(lambda one: torch.empty(one.shape, dtype=torch.int64), message)


def level_of(stages: Sequence[Stage]) -> ClientLevel | None:
    """Return the mechanism that protects the clients of a recipe with these stages, or None."""
    levels = (stage.level for stage in stages if isinstance(stage, ClientPrivacy))
    return next(levels, None)
