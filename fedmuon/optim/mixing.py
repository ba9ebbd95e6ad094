"""Nearest-neighbour mixing: each reply becomes the mean of its nearest replies (`[robust] mixing`).

With K replies of which at most f are hostile, each reply is replaced by the mean of the K - f
replies that are nearest to it, itself included. An aggregator then combines the mixed replies
(Allouah et al. 2023). Mixing makes honest replies more alike, so that an aggregator tolerates
clients with different data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fedmuon.core.demands import Trait
from fedmuon.core.errors import InputError
from fedmuon.optim.chain import States
from fedmuon.optim.stage import Broadcast, Reply, ServerState, Stage
from fedmuon.tasks.base import Params


@dataclass(frozen=True)
class Mixing(Stage):
    """A stage with which the server mixes the replies of a round.

    The model and each returned state are mixed separately, with distances over all their entries.

    Attributes:
        hostile: The number f of hostile replies in a round.
    """

    hostile: int

    facts = (Trait.MIXES_REPLIES,)

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Replace each reply by the mean of its nearest replies."""
        count = len(replies) - self.hostile
        if replies and 2 * self.hostile >= len(replies):
            raise InputError(
                f"[robust] mixing = {self.hostile} needs more than {2 * self.hostile} replies in a "
                f"round, but this round has {len(replies)}. Lower mixing to "
                f"{(len(replies) - 1) // 2}, raise [federation] per-round, or, in an asynchronous "
                "run, raise [devices] buffer."
            )
        trees = [reply.trees for reply in replies]
        mixed: list[dict[str, Params]] = [{} for _ in replies]
        for name in trees[0] if trees else ():
            for tree, values in zip(mixed, _mixed([tree[name] for tree in trees], count),
                                    strict=True):  # fmt: skip
                tree[name] = values
        return [reply.with_trees(tree) for reply, tree in zip(replies, mixed, strict=True)], {}


def _mixed(trees: Sequence[Params], count: int) -> list[Params]:
    """Return for each tree the mean of the `count` nearest trees, separately for each replica."""
    if not trees[0]:
        return [*trees]
    rows = [[value.double().reshape(len(value), -1) for value in tree.values()] for tree in trees]
    flat = torch.stack([torch.cat(row, 1) for row in rows], 1)  # [S, K, entries]
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    # Stable, so that of equally distant replies the one of the first client counts.
    nearest = apart.sort(dim=2, stable=True).indices[:, :, :count]
    means = torch.stack(
        [replies[chosen].mean(1) for replies, chosen in zip(flat, nearest, strict=True)]
    )  # [S, K, entries]
    sizes = [value[0].numel() for value in trees[0].values()]
    mixed: list[Params] = []
    for number, tree in enumerate(trees):
        parts = means[:, number].split(sizes, 1)
        mixed.append(
            {
                # The memory layout of the reply, so that a resumed run rounds in the same way.
                name: torch.empty_like(value).copy_(part.reshape(value.shape))
                for (name, value), part in zip(tree.items(), parts, strict=True)
            }
        )
    return mixed
