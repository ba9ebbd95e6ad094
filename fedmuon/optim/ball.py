"""A ball for the change of each client: the server clips what is outside (`[robust] ball`).

One local step of an optimizer that orthogonalizes moves an m x n matrix by at most eta c sqrt(q) in
the Frobenius norm, where q = min(m, n), and c bounds the singular values of an orthogonalized step.
So E local steps of an honest client move it by at most eta E c sqrt(q), whatever its samples are,
and the server can clip each client's change to this ball without changing an honest client.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmuon.core.demands import Trait
from fedmuon.optim.attacks import changes_of, with_changes
from fedmuon.optim.chain import States
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage, Trees
from fedmuon.tasks.base import Params


@dataclass(frozen=True)
class Ball(Stage):
    """A stage with which the server clips the changes of clients.

    Attributes:
        radii: Pairs of a parameter and the radius of its ball. The radius of any other parameter is
            `other`.
        joint: The radius of one ball for all parameters in `radii` together, or 0 for a ball for
            each parameter.
        other: The radius for each other parameter, or 0 for the median of the norms of this
            parameter's changes in the round.
        states: The largest norm of each returned state, or 0 to clip the change of a state to the
            median of the norms of its changes in the round.
        factor: Function from a round to the factor of the step size, which also scales `radii` and
            `joint`. None means 1.
        direction: Whether clients return directions instead of models.
    """

    radii: tuple[tuple[str, float], ...]
    joint: float = 0.0
    other: float = 0.0
    states: float = 0.0
    factor: Callable[[int], float] | None = None
    direction: bool = False

    facts = (Trait.CLIPS_CHANGES,)

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Clip the change of each client."""
        if not replies:
            return replies, {}
        message = received()
        changes = [changes_of(reply, message, self.direction) for reply in replies]
        scale = 1.0 if self.factor is None else self.factor(server.round)
        models = self._models([change[MODEL] for change in changes], scale)
        clipped = [{**change, MODEL: model} for change, model in zip(changes, models, strict=True)]
        for state in (tree for tree in changes[0] if tree != MODEL):
            # With a given norm, the state itself is clipped, and not its change.
            trees = [
                reply.states[state] if self.states else change[state]
                for reply, change in zip(replies, changes, strict=True)
            ]
            limits = _norms(trees).quantile(0.5, dim=0)
            limits = torch.full_like(limits, self.states) if self.states else limits
            for change, tree in zip(clipped, _clipped(trees, limits), strict=True):
                change[state] = tree
        return [
            self._with_states(with_changes(reply, message, change, self.direction), change)
            for reply, change in zip(replies, clipped, strict=True)
        ], {}

    def _models(self, changes: Sequence[Params], scale: float) -> list[Params]:
        """Return the clipped changes of the models."""
        radii = dict(self.radii)
        groups = [[name] for name in changes[0] if self.joint == 0 or name not in radii]
        if self.joint:
            groups.append([name for name in changes[0] if name in radii])
        clipped: list[Params] = [{} for _ in changes]
        for group in filter(None, groups):
            parts = [{name: change[name] for name in group} for change in changes]
            limits = _norms(parts).quantile(0.5, dim=0)
            if group[0] in radii:
                limits = torch.full_like(limits, scale * (self.joint or radii[group[0]]))
            elif self.other:
                limits = torch.full_like(limits, self.other)
            for model, part in zip(clipped, _clipped(parts, limits), strict=True):
                model |= part
        return [
            {name: model[name] for name in change}
            for model, change in zip(clipped, changes, strict=True)
        ]

    def _with_states(self, reply: Reply, change: Trees) -> Reply:
        """Return the reply whose states are clipped as a whole, if their norm is given."""
        if not self.states:
            return reply
        states = {name: {**tree, **change[name]} for name, tree in reply.states.items()}
        return reply.with_trees({MODEL: reply.params, **states})


def _norms(trees: Sequence[Params]) -> Tensor:
    """Return the Frobenius norm of all tensors of a tree together [K, S], in float64."""
    return torch.stack(
        [
            sum(
                (value.double().reshape(len(value), -1).square().sum(1) for value in tree.values()),
                start=torch.zeros((), dtype=torch.float64),
            ).sqrt()
            for tree in trees
        ]
    )


def _clipped(trees: Sequence[Params], limits: Tensor) -> list[Params]:
    """Scale each tree to a norm of at most `limits` [S]. A smaller tree stays bit-identical."""
    clipped: list[Params] = []
    for tree, norms in zip(trees, _norms(trees), strict=True):
        factors = (limits / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)
        clipped.append(
            {
                name: value * factors.view(-1, *[1] * (value.ndim - 1)).to(value)
                for name, value in tree.items()
            }
        )
    return clipped
