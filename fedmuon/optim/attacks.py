"""Attacks: what hostile clients send instead of the results of their local training.

A client's *change* is the difference between its reply and the message that it received, for the
model and for each state that it returns. An attack replaces the change of each hostile client.

- `sign-flip`, `scaled` and `gaussian` need only the client's own change, and act on the client.
- `label-flip` changes the labels on which a hostile client trains. The client follows the protocol.
- `alie`, `inner-product` and `mimic` depend on the replies of the honest clients in the same round.
  Hostile clients that see these replies are simulated on the server, before the aggregator.

Running statistics of norm layers and the client's own persistent states stay as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.demands import Trait
from fedmuon.core.rng import Draw, generator, normal
from fedmuon.optim.chain import States
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage, Trees, require_finite
from fedmuon.tasks.base import Batch, is_statistic

STRENGTHS = {"sign-flip": 1.0, "scaled": 10.0, "gaussian": 1.0, "inner-product": 1.0}
SEEING = ("alie", "inner-product", "mimic")  # attacks that see the honest replies
TIES = 1e-9  # two directions whose sizes differ by less count as equal


@dataclass(frozen=True)
class Attack(Stage):
    """A stage that replaces the replies of hostile clients.

    Attributes:
        kind: The name of the attack.
        hostile: The numbers of the hostile clients.
        strength: The factor of the attack, or 0 for its default.
        from_round: The first round of the attack.
        seed: The seed of the random numbers.
        direction: Whether clients return directions instead of models.
        classes: The number of classes, for `label-flip`.
    """

    kind: str
    hostile: tuple[int, ...]
    strength: float = 0.0
    from_round: int = 0
    seed: int = 0
    direction: bool = False
    classes: int = 0

    facts = (Trait.HOSTILE_CLIENTS,)

    @property
    def changes_samples(self) -> bool:  # type: ignore[override]
        """Whether hostile clients train on other labels."""
        return self.kind == "label-flip"

    @property
    def factor(self) -> float:
        """The strength, or the default of the attack."""
        return self.strength or STRENGTHS.get(self.kind, 0.0)

    def samples(self, batch: Batch, client: int, round: int) -> Batch:
        """Replace each label y of a hostile client by C - 1 - y, where C is the number of classes.

        Args:
            batch: The samples of one local step.
            client: The number of the client.
            round: The number of the round.
        """
        if not self.changes_samples or not self._attacks(client, round):
            return batch
        last = self.classes - 1
        swaps = batch.replaced
        flipped = None if swaps is None else replace(swaps, labels=last - swaps.labels)
        return replace(batch, labels=last - batch.labels, replaced=flipped)

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Replace the change of a hostile client, if the attack needs no other reply."""
        if self.kind not in OWN or not self._attacks(reply.client, received.round):
            return reply
        attack, key = OWN[self.kind], {"round": received.round, "client": reply.client}
        changes = changes_of(reply, received, self.direction)
        blocks = [(tree, name) for tree, tensors in changes.items() for name in tensors]
        attacked: Trees = {tree: {} for tree in changes}
        for block, (tree, name) in enumerate(blocks):
            change = changes[tree][name]
            noise = Noise(self.seed, key, block)
            attacked[tree][name] = attack(change, self.factor, noise)
        return with_changes(reply, received, attacked, self.direction)

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Replace the changes of hostile clients, if the attack depends on the honest replies.

        Raises:
            NonFinite: If an honest reply contains NaN or infinity, which an aggregator could hide.
        """
        hostile = [reply for reply in replies if self._attacks(reply.client, server.round)]
        honest = [reply for reply in replies if reply.client not in self.hostile]
        if self.kind not in SEEING or not hostile or not honest:
            return replies, {}
        message = received()
        seen = [changes_of(reply, message, self.direction) for reply in honest]
        for reply, changes in zip(honest, seen, strict=True):
            tensors = (value for tree in changes.values() for value in tree.values())
            require_finite(tensors, "update", reply.client, server.round)
        if self.kind == "mimic":
            sent = mimicked(seen)
        else:
            factor = self.factor
            if self.kind == "alie":
                factor = factor or hidden_deviations(len(replies), len(hostile))
            stacked = _stacked(seen)
            sent = {
                tree: {name: SEEN[self.kind](values, factor) for name, values in tensors.items()}
                for tree, tensors in stacked.items()
            }
        numbers = {reply.client for reply in hostile}
        return [
            with_changes(reply, message, sent, self.direction) if reply.client in numbers else reply
            for reply in replies
        ], {}

    def _attacks(self, client: int, round: int) -> bool:
        return client in self.hostile and round >= self.from_round


# The change of a client


def changes_of(reply: Reply, received: Broadcast, direction: bool = False) -> Trees:
    """Return a client's change of the model and of each returned state.

    A state that the client did not receive is its own change. Running statistics, personal
    parameters and tensors of integers have no change.

    Args:
        reply: The reply.
        received: The message as the client used it.
        direction: Whether the client returns a direction instead of a model.
    """
    changes: Trees = {}
    for tree, tensors in reply.trees.items():
        before = _before(tree, received, direction)
        personal = tree == MODEL and not direction
        changes[tree] = {
            name: value - before[name] if name in before else value
            for name, value in tensors.items()
            if value.is_floating_point()
            and not is_statistic(name)
            and not (personal and name not in before)
        }
    return changes


def with_changes(
    reply: Reply, received: Broadcast, changes: Trees, direction: bool = False
) -> Reply:
    """Return a reply with other changes. `changes_of` defines a change and the arguments."""
    trees: Trees = {}
    for tree, tensors in reply.trees.items():
        before, moved = _before(tree, received, direction), changes.get(tree, {})
        trees[tree] = {**tensors}
        for name, change in moved.items():
            start = before.get(name)
            value = change if start is None else start + change
            trees[tree][name] = value.to(tensors[name])
    return reply.with_trees(trees)


def _before(tree: str, received: Broadcast, direction: bool) -> Any:
    """Return the tensors from which a change is counted."""
    if tree == MODEL:
        return {} if direction else received.params
    return received.states.get(tree, {})


# Attacks that need only the client's own change


@dataclass(frozen=True)
class Noise:
    """Standard normal numbers with a key, for one tensor of a client in a round."""

    seed: int
    key: dict[str, int]
    block: int

    def like(self, value: Tensor) -> Tensor:
        """Return one draw for all replicas, with the shape and dtype of a tensor [S, ...]."""
        rng = generator(self.seed, Draw.ATTACK, block=self.block, **self.key)
        return normal([rng], tuple(value.shape)).to(value)


def _flipped(change: Tensor, factor: float, noise: Noise) -> Tensor:
    return -factor * change


def _scaled(change: Tensor, factor: float, noise: Noise) -> Tensor:
    return factor * change


def _gaussian(change: Tensor, factor: float, noise: Noise) -> Tensor:
    """Return noise whose entries have `factor` times the root mean square of the change."""
    size = change.reshape(len(change), -1).square().mean(1).sqrt()
    return factor * size.view(-1, *[1] * (change.ndim - 1)) * noise.like(change)


OWN: dict[str, Callable[[Tensor, float, Noise], Tensor]] = {
    "sign-flip": _flipped,
    "scaled": _scaled,
    "gaussian": _gaussian,
}


# Attacks that see the honest changes, stacked as [H, S, ...]


def hidden_deviations(participants: int, hostile: int) -> float:
    """Return z of ALIE, the number of standard deviations that hides among honest replies.

    Hostile clients need s = floor(K/2 + 1) - f honest clients on their side for a majority, and
    choose z with Phi(z) = (K - f - s) / (K - f) (Baruch et al. 2019, Algorithm 3). If this share is
    below 1/2 or not below 1, z is the value for the nearest share in between.

    Args:
        participants: The number K of replies.
        hostile: The number f of hostile replies.
    """
    honest = participants - hostile
    supporters = max(1, participants // 2 + 1 - hostile)
    share = (honest - supporters) / honest
    return NormalDist().inv_cdf(min(max(share, 0.5), 1 - 1e-9))


def _little_is_enough(honest: Tensor, factor: float) -> Tensor:
    """Return mean - z std of every entry over the honest changes (Baruch et al. 2019)."""
    return honest.mean(0) - factor * honest.std(0, correction=0)


def _against_the_mean(honest: Tensor, factor: float) -> Tensor:
    """Return -factor times the mean of the honest changes (Xie et al. 2019)."""
    return -factor * honest.mean(0)


SEEN: dict[str, Callable[[Tensor, float], Tensor]] = {
    "alie": _little_is_enough,
    "inner-product": _against_the_mean,
}


def mimicked(honest: Sequence[Trees]) -> Trees:
    """Return the change of the honest client that all hostile clients copy.

    This client has the largest projection on the direction in which the honest changes vary most
    (Karimireddy et al. 2022). The direction comes from the changes of this round, because the
    participants differ between rounds. Each replica has its own client.

    Args:
        honest: The changes of each honest client.
    """
    stacked = _stacked(honest)
    values = [value.double() for tensors in stacked.values() for value in tensors.values()]
    flat = torch.cat([value.reshape(*value.shape[:2], -1) for value in values], 2)
    flat = flat.transpose(0, 1)  # [S, H, entries]
    centred = flat - flat.mean(1, keepdim=True)
    sizes = torch.linalg.eigh(centred @ centred.mT).eigenvectors[..., -1].abs()  # [S, H]
    # The first of all clients with equal projections, so that rounding does not choose.
    chosen = (sizes >= sizes.amax(1, keepdim=True) - TIES).int().argmax(1)
    replicas = torch.arange(len(chosen), device=chosen.device)
    return {
        tree: {name: value[chosen, replicas] for name, value in tensors.items()}
        for tree, tensors in stacked.items()
    }


def _stacked(changes: Sequence[Trees]) -> Trees:
    """Stack the changes of several clients: [S, ...] becomes [H, S, ...]."""
    return {
        tree: {name: torch.stack([change[tree][name] for change in changes]) for name in tensors}
        for tree, tensors in changes[0].items()
    }
