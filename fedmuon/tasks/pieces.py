"""How the matrix task's products are cut: by size alone, into pieces for one thread each.

A thin product, of few matrix rows S c, is cut by samples, and the parts are added in their order;
a thick one by replicas, whose gradients need no adding; clients with little to do are put together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from fedmuon.core.threads import parts
from fedmuon.tasks.base import Batch, Replaced

THICK = 64  # matrix rows
FLOP = 16e6  # of a piece at least: some tenths of a millisecond
LOGITS = 1 << 19  # of a thick piece at most, so that they stay in a cache
FEW, MANY = 256, 4096  # samples of a part of a thin and of a thick product


class Member(NamedTuple):
    """A client, or a part of it: its weights [S, c, d], what it sees, and the samples it has."""

    weight: Tensor
    batch: Batch
    samples: int

    @property
    def thick(self) -> bool:
        """Whether its products are fast however they are cut by matrix rows."""
        return self.weight.shape[0] * self.weight.shape[1] >= THICK

    @property
    def flops(self) -> float:
        """Of the two products."""
        return 4.0 * self.weight.numel() * len(self.batch.labels)


def pieces(members: Sequence[Member]) -> list[list[list[Member]]]:
    """Rows of pieces: a row's results are to be added, the rows' to be joined in this order."""
    found: list[list[list[Member]]] = []
    for some in together(members):
        found += _cut(some[0]) if len(some) == 1 else [[some]]
    return found


def together(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Neighbours with little to do; others alone."""
    some: list[Member] = []
    held = 0.0
    for one in members:
        if some and held + one.flops > FLOP:
            yield some
            some, held = [], 0.0
        some.append(one)
        held += one.flops
    yield some


def _cut(member: Member) -> list[list[list[Member]]]:
    replicas, classes = member.weight.shape[:2]
    rows, samples = replicas * classes, len(member.batch.labels)
    if not member.thick:
        return [[[_part(member, slice(0, replicas), part)] for part in thin_parts(member)]]
    cut = parts(samples, samples / MANY + 0.5)
    blocks = min(rows * (samples / len(cut)) / LOGITS, rows / THICK)
    return [
        [[_part(member, block, part)] for part in cut] for block in parts(replicas, blocks + 0.5)
    ]


def thin_parts(member: Member) -> list[slice]:
    """The samples of each part of a thin product."""
    samples = len(member.batch.labels)
    return parts(samples, min(member.flops / FLOP, samples / FEW))


def _part(member: Member, replicas: slice, samples: slice) -> Member:
    batch = member.batch
    there = batch.replaced and within(batch.replaced, replicas, samples)
    own = Batch(batch.inputs[samples], batch.labels[samples], there)
    return Member(member.weight[replicas], own, member.samples)


def within(there: Replaced, replicas: slice, samples: slice) -> Replaced | None:
    """Those of the replaced samples that a part sees, by their place in it."""
    replica, position = there.replica - replicas.start, there.position - samples.start
    held = (replica >= 0) & (there.replica < replicas.stop)
    held &= (position >= 0) & (there.position < samples.stop)
    if not bool(held.any()):
        return None
    return Replaced(replica[held], position[held], there.inputs[held], there.labels[held])
