"""Client level: a round's sum of whole clients' updates, each clipped to C, and noise once.

DP-FedAvg with a fixed denominator (McMahan, Ramage, Talwar, Zhang 2018, Algorithm 1), for every
optimizer whose server averages. The server holds X and the states S of the links that come back
(FedMuon's momentum; FedAvg and Local Muon have none). A client of the cohort returns X_k and S_k.
Let T round every entry towards 0 to a multiple of the lattice's spacing g. The client contributes

    u_k = (X_k - X, w (S_k - S)),    v_k = T(min(1, C' / ||u_k||) u_k)                         (1)
    (X, wS) <- rule( (X, wS) + (sum of v_k over the cohort + sigma C xi) / K ),  xi ~ N(0, I)   (2)

where K is the *expected* size of a cohort. Momentum leaves its client as the model does, so (1) has
one norm over both; clipping each to C would make the whole up to C sqrt(2) long. The public weight
w says how much of C the states get; the noise in S is sigma C / (w K).

*Claim.* ||v_k|| <= C, and the sums of two cohorts that differ in client k differ by v_k exactly. So
(2) is one Gaussian release of multiplier sigma, whatever the links, the server's rule and the
number of tensors. X and S are known from earlier releases. What the rule makes of the sum
(FedAvgM's velocity, an aligned direction, rounding to the run's precision) is post-processing, and
rounds compose adaptively. Poisson sampling at the public rate q = K / N amplifies it, and the
adjacency is add-remove of a client. A public schedule does not amplify it, and the adjacency is
zero-out: a client's updates against zeros.

*Proof.* Let n be the number of u's entries, U = 2^-53, and C' = (1 - (n + 8) U) C. The computed sum
of n squares is at least (1 - n U) times the true one, in every order, so its root is at least (1 -
(n + 2) U) times the norm; the quotient and the products of (1) round up by a factor of at most 1 +
U each. So before T a norm is at most C' (1 + (n + 7) U) <= C, and T shortens every entry. (Squares
that underflow are below 1e-300, and C is 1e-15 or more.) An update whose square is infinite or no
number contributes 0. And |v_k| <= C entry by entry with N C / g <= 2^53, so all partial sums are
multiples of g that float64 holds: no addition rounds, in any order.

*Assumption.* v_k depends on client k alone, given X and S. Clients train in batches, and a
processor may round the products of a larger batch differently; no account covers this.

*Trust.* `central`: the server sees the updates and adds the noise. `local`: each client adds all of
the noise, so that even the server learns no more about it than epsilon allows. The noise of a sum
of K is sqrt(K) times as large, and nothing is amplified, because the server knows who answers.
`distributed`: each client adds a share of the noise, and the server learns the sum alone
(`fedmuon.privacy.mechanisms.distributed`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmuon.core.choices import Arithmetic, NoiseSource
from fedmuon.core.device import to_device
from fedmuon.core.rng import Draw, generator, normal
from fedmuon.privacy.mechanisms import distributed, lattice
from fedmuon.privacy.mechanisms.distributed import Tree
from fedmuon.privacy.noise import Stream, secrecy, secret_stream, words_of
from fedmuon.tasks.base import Params

ROUNDING = 2.0**-53  # unit roundoff of float64
EVERYONE = -1  # in a ledger: any client, because all are drawn alike
EACH = "each"  # the same, as people read it
REPLAY = "Noise was drawn in secret, so no seed repeats this run."
COHORTS = (
    "Amplification holds only if the list of participants (rounds.jsonl) stays as secret as the "
    "noise."
)
Clipped = Mapping[str, Params]  # trees in float64, on the lattice


@dataclass(frozen=True)
class ClientLevel:
    """How a round is released at client level.

    Attributes:
        bound: C.
        noise: The multiplier sigma: noise over C.
        cohort: K, the expected size of a cohort.
        clients: N.
        trust: `central`, `local` or `distributed`.
        poisson: Whether cohorts are Poisson samples.
        seed: Seed of repeatable noise; None draws secret noise.
        weight: w, the weight of the states in the norm.
        source: The generator of secret noise.
        arithmetic: `continuous`, `grid`, or `auto`, which takes the grid for secret noise.
        honest: Under distributed trust, the share of a cohort that is assumed honest.
    """

    bound: float
    noise: float
    cohort: int
    clients: int
    trust: str = "central"
    poisson: bool = True
    seed: int | None = None
    weight: float = 1.0
    source: NoiseSource = "secure"
    arithmetic: Arithmetic = "auto"
    honest: float = 1.0

    def __post_init__(self) -> None:
        if self.shared and self.noise:
            distributed.reach(self.noise, self.cohort)

    @property
    def shared(self) -> bool:
        """Whether clients add shares of the noise, and the server learns their sum alone."""
        return self.trust == "distributed"

    @property
    def shares(self) -> int:
        """H, how many shares of the noise count: at least a client's own."""
        return max(1, math.floor(self.honest * self.cohort))

    @property
    def counted(self) -> float:
        """The noise in the account over `noise`."""
        return math.sqrt(self.shares / self.cohort) if self.shared else 1.0

    @property
    def on_grid(self) -> bool:
        """Whether noise is exact, on a lattice whose C' is C here (`lattice.py`)."""
        chosen = self.arithmetic == "grid" or (self.arithmetic == "auto" and self.seed is None)
        return chosen or self.shared

    @property
    def secrecy(self) -> str:
        """The class of the noise source (`fedmuon.privacy.noise`)."""
        return secrecy(self.seed is not None, self.source)

    @property
    def rate(self) -> float:
        """q, a client's sampling probability in the account."""
        return self.cohort / self.clients if self.poisson else 1.0

    @property
    def adjacency(self) -> str:
        """The difference of two neighbouring federations: a client is present or absent, or its
        updates are 0."""
        return "add-remove" if self.poisson else "zero-out"

    @property
    def spacing(self) -> float:
        """g: the least power of two with 2^53 g >= N C."""
        return math.ldexp(1.0, math.frexp(self.clients * self.bound)[1] - 53)

    def clipped(self, held: Tree, returned: Tree) -> Clipped:
        """v_k of (1), per replica; trees of tensors [S, ...]."""
        moved = self._weighted(_apart(returned, held), self.weight)
        squares = torch.stack(
            [one.square().reshape(len(one), -1).sum(1) for one in leaves(moved)]
        ).sum(0)
        room = self.bound * (1 - (sum(one[0].numel() for one in leaves(moved)) + 8) * ROUNDING)
        factor = torch.where(squares.isfinite(), (room / squares.sqrt()).clamp(max=1.0), 0.0)

        def short(one: Tensor) -> Tensor:
            shrunk = one.nan_to_num(0.0, 0.0, 0.0) * factor.view(-1, *[1] * (one.ndim - 1))
            return (shrunk / self.spacing).trunc() * self.spacing

        return mapped(short, moved)

    def perturbed(self, held: Tree, returned: Tree, round: int, client: int) -> dict[str, Params]:
        """The message of a client that does not trust the server, in place of what it `returned`.

        Under distributed trust it has integers, with the client's share of the noise, before its
        mask.
        """
        own = self.clipped(held, returned)
        if self.shared:
            step = distributed.spacing(self.bound, self.noise, self.cohort)
            return distributed.share(own, step, self._streams(round, client))
        noisy = self._with_noise(own, round, client)
        return _moved(held, self._weighted(noisy, 1 / self.weight), 1.0)

    def released(self, held: Tree, returned: Sequence[Tree], round: int) -> dict[str, Params]:
        """(2) without the rule, in the run's precision. An empty cohort releases noise.

        Under local trust, updates are clipped and noisy already, and this is post-processing.
        """
        if self.shared:
            step = distributed.spacing(self.bound, self.noise, self.cohort)
            integers = distributed.total(returned, self.noise, self.cohort)
            sums = mapped(lambda like, one: one.to(like.device) * step, held, integers)
            return _moved(held, self._weighted(sums, 1 / self.weight), 1 / self.cohort)
        total = mapped(lambda one: torch.zeros_like(one, dtype=torch.float64), held)
        local = self.trust == "local"
        for one in returned:
            total = mapped(
                torch.add, total, _apart(one, held) if local else self.clipped(held, one)
            )
        if not local:
            total = self._weighted(self._with_noise(total, round), 1 / self.weight)
        return _moved(held, total, 1 / self.cohort)

    def _weighted(self, trees: Tree, weight: float) -> dict[str, Params]:
        """Trees whose states are multiplied by the weight."""
        return {
            tree: {name: one if tree == "model" else one * weight for name, one in held.items()}
            for tree, held in trees.items()
        }

    def _with_noise(self, sums: Tree, round: int, client: int = 0) -> Tree:
        """sums + sigma C xi, one xi for all replicas."""
        if not self.noise:
            return sums
        stream = self._streams(round, client)
        flat = {(tree, name): one for tree, held in sums.items() for name, one in held.items()}
        if self.on_grid:
            named = {str(block): one for block, one in enumerate(flat.values())}
            step, found = lattice.noisy(
                named, self.bound, self.noise, lambda block: [words_of(stream(block))]
            )
            noisy = dict(zip(flat, (one * step for one in found.values()), strict=True))
        else:
            noisy = {}
            for block, (key, one) in enumerate(flat.items()):
                drawn = normal([stream(block)], tuple(one.shape))
                noisy[key] = one + self.noise * self.bound * to_device(drawn, one.device, one.dtype)
        return {tree: {name: noisy[tree, name] for name in held} for tree, held in sums.items()}

    def _streams(self, round: int, client: int) -> Callable[[int], Stream]:
        """Block -> the stream of its noise."""
        if (seed := self.seed) is None:
            secret = secret_stream(self.source)
            return lambda block: secret
        return lambda block: generator(seed, Draw.NOISE, round=round, client=client, block=block)


def leaves(trees: Tree) -> list[Tensor]:
    """All tensors of the trees."""
    return [one for tree in trees.values() for one in tree.values()]


def mapped(function: Callable[..., Tensor], *trees: Tree) -> dict[str, Params]:
    """Apply a function to the trees' tensors, name by name."""
    return {
        tree: {name: function(*(one[tree][name] for one in trees)) for name in held}
        for tree, held in trees[0].items()
    }


def _apart(one: Tree, other: Tree) -> dict[str, Params]:
    """one - other in float64, with the names of `other`."""
    return mapped(lambda b, a: a.double() - b.double(), other, one)


def _moved(held: Tree, by: Tree, share: float) -> dict[str, Params]:
    """held + share * by, rounded once to the type of `held`."""
    return mapped(lambda one, more: (one.double() + share * more).to(one.dtype), held, by)
