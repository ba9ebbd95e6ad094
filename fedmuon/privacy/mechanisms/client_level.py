"""Client-level privacy: each client's update is clipped to C, and noise is added to the sum.

This is DP-FedAvg with a fixed denominator (McMahan, Ramage, Talwar, Zhang 2018, Algorithm 1), for
every optimizer whose server averages. The server stores the model X and the states S that clients
return. With FedMuon, S is the momentum. With FedAvg and Local Muon, there are no states. A client
of the cohort returns X_k and S_k. Let T round every entry towards 0 to a multiple of the lattice's
spacing g. The client contributes

    u_k = (X_k - X, w (S_k - S)),    v_k = T(min(1, C' / ||u_k||) u_k)                         (1)
    (X, wS) <- rule( (X, wS) + (sum of v_k over the cohort + sigma C xi) / K ),  xi ~ N(0, I)   (2)

where K is the *expected* size of a cohort. A client sends its momentum as well as its model, so (1)
uses one norm over both. If the model and the momentum were each clipped to C, both together could
have norm C sqrt(2). The public weight w determines how much of C is left for the states. The noise
in S has the standard deviation sigma C / (w K).

*Claim.* ||v_k|| <= C, and the sums of two cohorts that differ in client k differ by v_k exactly.
Therefore, (2) is one Gaussian release of multiplier sigma, for every optimizer, every rule of the
server and any number of tensors. X and S are known from earlier releases. Everything that the rule
computes from the sum is post-processing, such as FedAvgM's velocity, or rounding to the run's
precision. Rounds compose adaptively. Poisson sampling at the public rate q = K / N amplifies
privacy. Neighbouring federations then differ in one client, which is present or absent. A public
schedule does not amplify privacy. In neighbouring federations, the updates of one client are then
replaced by zeros.

*Proof.* Let n be the number of u's entries, U = 2^-53, and C' = (1 - (n + 8) U) C. In every order
of addition, the computed sum of n squares is at least (1 - n U) times the true sum. The computed
norm is therefore at least (1 - (n + 2) U) times the true norm. The quotient and the products of (1)
each round up by a factor of at most 1 + U. Before T, a norm is therefore at most C' (1 + (n + 7) U)
<= C, and T shortens every entry. (Squares that underflow are below 1e-300, and C is 1e-15 or more.)
An update whose square is infinite or not a number contributes 0. Entry by entry, |v_k| <= C, and N
C / g <= 2^53. All partial sums are therefore multiples of g that float64 represents, so no addition
rounds, in any order.

*Assumption.* Given X and S, v_k depends on client k alone. A processor may round the products of a
larger batch differently, so each client must train alone. The account does not cover a dependence
on other clients that is caused by rounding.

*Trust.* With `central`, the server sees the updates and adds the noise. With `local`, each client
adds all of the noise to its own update, so that even the server learns no more about the client
than epsilon allows. The noise in a sum of K updates is then sqrt(K) times as large. There is no
amplification, because the server knows which clients answer. With `distributed`, each client adds a
share of the noise, and the server learns only the sum
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
EVERYONE = -1  # in a ledger: any client, because all clients have the same probability
EACH = "each"  # EVERYONE, as shown in messages
REPLAY = "The noise was drawn from a secret source, so no seed can repeat this run."
COHORTS = (
    "This epsilon holds only if the list of participants (rounds.jsonl) stays as secret as the "
    "noise."
)
Clipped = Mapping[str, Params]  # trees in float64, on the lattice


@dataclass(frozen=True)
class ClientLevel:
    """Settings for client-level privacy.

    Attributes:
        bound: The clipping bound C.
        noise: The noise multiplier sigma. The standard deviation of the noise is sigma C.
        cohort: The expected size K of a cohort.
        clients: The number N of clients.
        trust: `central`, `local` or `distributed`.
        poisson: Whether cohorts are Poisson samples.
        seed: Seed of repeatable noise. With None, the noise is secret.
        weight: The weight w of the states in the norm.
        source: The generator of secret noise.
        arithmetic: `continuous` draws floating-point noise, and `grid` draws exact noise on a
            lattice. `auto` uses the grid for secret noise.
        honest: With distributed trust, the share of a cohort that is assumed to be honest.
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
        """Whether each client adds only a share of the noise.

        The server then learns only a noisy sum.
        """
        return self.trust == "distributed"

    @property
    def shares(self) -> int:
        """The number H of noise shares that the account relies on. H is at least 1."""
        return max(1, math.floor(self.honest * self.cohort))

    @property
    def counted(self) -> float:
        """The factor by which the account multiplies `noise`."""
        return math.sqrt(self.shares / self.cohort) if self.shared else 1.0

    @property
    def on_grid(self) -> bool:
        """Whether the noise is exact noise on a lattice (`lattice.py`)."""
        requested = self.arithmetic == "grid" or (self.arithmetic == "auto" and self.seed is None)
        return requested or self.shared

    @property
    def secrecy(self) -> str:
        """The secrecy class of the noise (`fedmuon.privacy.noise`)."""
        return secrecy(self.seed is not None, self.source)

    @property
    def rate(self) -> float:
        """The probability q that a client is sampled, as the account assumes."""
        return self.cohort / self.clients if self.poisson else 1.0

    @property
    def adjacency(self) -> str:
        """The difference between two neighbouring federations.

        A client is present or absent, or its updates are replaced by 0.
        """
        return "add-remove" if self.poisson else "zero-out"

    @property
    def spacing(self) -> float:
        """The spacing g of the lattice: the smallest power of two with 2^53 g >= N C."""
        return math.ldexp(1.0, math.frexp(self.clients * self.bound)[1] - 53)

    def noise_ratio(self, entries: int) -> float:
        """Return the norm of the noise in a round's mean update, divided by the bound.

        The norm is the root mean square sigma C sqrt(d) / K, in the weighted norm of (1). The mean
        of K clipped updates has at most norm C. With local trust, the noise contains one draw per
        client, so it is sqrt(K) times as large.

        Args:
            entries: The number d of entries that are released, in the model and the states.
        """
        draws = self.cohort if self.trust == "local" else 1
        return self.noise * math.sqrt(draws * entries) / self.cohort

    def cohort_for_ratio_1(self, entries: int) -> int:
        """Return the smallest expected size of a cohort for which `noise_ratio` is at most 1."""
        alone = self.noise * math.sqrt(entries)
        return math.ceil(alone**2 if self.trust == "local" else alone)

    def swamped(self, entries: int) -> str:
        """Return a note if the noise is longer than the mean update can be, else ""."""
        if (ratio := self.noise_ratio(entries)) <= 1:
            return ""
        formula = "noise · √(d / K)" if self.trust == "local" else "noise · √d / K"
        return (
            f"In each round, the noise is {ratio:.3g} times as long as the clients' mean update "
            f"can be ({formula}, with noise = {self.noise:.4g}, d = {entries:,} released entries "
            f"and K = {self.cohort:,} clients per round). The ratio is at most 1 with "
            f"{self.cohort_for_ratio_1(entries):,} or more clients per round. Raise "
            "federation.per-round and federation.clients, lower privacy.noise, or train fewer "
            "parameters."
        )

    def clipped(self, held: Tree, returned: Tree) -> Clipped:
        """Return a client's clipped update v_k of eq. (1), separately for each replica."""
        moved = self._weighted(_apart(returned, held), self.weight)
        squares = torch.stack(
            [value.square().reshape(len(value), -1).sum(1) for value in leaves(moved)]
        ).sum(0)
        room = self.bound * (1 - (sum(value[0].numel() for value in leaves(moved)) + 8) * ROUNDING)
        factor = torch.where(squares.isfinite(), (room / squares.sqrt()).clamp(max=1.0), 0.0)

        def short(value: Tensor) -> Tensor:
            shrunk = value.nan_to_num(0.0, 0.0, 0.0) * factor.view(-1, *[1] * (value.ndim - 1))
            return (shrunk / self.spacing).trunc() * self.spacing

        return mapped(short, moved)

    def perturbed(self, held: Tree, returned: Tree, round: int, client: int) -> dict[str, Params]:
        """Clip the reply `returned`, add noise to it, and return the message that is sent.

        With distributed trust, the message consists of integers that contain the client's share of
        the noise. This method does not add the client's mask.
        """
        update = self.clipped(held, returned)
        if self.shared:
            step = distributed.spacing(self.bound, self.noise, self.cohort)
            return distributed.share(update, step, self._streams(round, client))
        noisy = self._with_noise(update, round, client)
        return _moved(held, self._weighted(noisy, 1 / self.weight), 1.0)

    def released(self, held: Tree, returned: Sequence[Tree], round: int) -> dict[str, Params]:
        """Return the model and states `held` plus the noisy mean of all updates.

        If the cohort is empty, only noise is added. With local trust, the updates already contain
        noise, so this function adds none.
        """
        if self.shared:
            step = distributed.spacing(self.bound, self.noise, self.cohort)
            integers = distributed.total(returned, self.noise, self.cohort)
            sums = mapped(lambda like, value: value.to(like.device) * step, held, integers)
            return _moved(held, self._weighted(sums, 1 / self.weight), 1 / self.cohort)
        total = mapped(lambda value: torch.zeros_like(value, dtype=torch.float64), held)
        local = self.trust == "local"
        for reply in returned:
            total = mapped(
                torch.add, total, _apart(reply, held) if local else self.clipped(held, reply)
            )
        if not local:
            total = self._weighted(self._with_noise(total, round), 1 / self.weight)
        return _moved(held, total, 1 / self.cohort)

    def _weighted(self, trees: Tree, weight: float) -> dict[str, Params]:
        return {
            tree: {
                name: value if tree == "model" else value * weight for name, value in params.items()
            }
            for tree, params in trees.items()
        }

    def _with_noise(self, sums: Tree, round: int, client: int = 0) -> Tree:
        if not self.noise:
            return sums
        stream = self._streams(round, client)
        flat = {
            (tree, name): value for tree, params in sums.items() for name, value in params.items()
        }
        if self.on_grid:
            by_block = {str(block): value for block, value in enumerate(flat.values())}
            step, integers = lattice.noisy(
                by_block, self.bound, self.noise, lambda block: [words_of(stream(block))]
            )
            noisy = dict(zip(flat, (value * step for value in integers.values()), strict=True))
        else:
            noisy = {}
            for block, (key, value) in enumerate(flat.items()):
                drawn = normal([stream(block)], tuple(value.shape))
                noisy[key] = value + self.noise * self.bound * to_device(
                    drawn, value.device, value.dtype
                )
        return {tree: {name: noisy[tree, name] for name in params} for tree, params in sums.items()}

    def _streams(self, round: int, client: int) -> Callable[[int], Stream]:
        """Return a function that maps a block's number to the random stream of its noise."""
        if (seed := self.seed) is None:
            secret = secret_stream(self.source)
            return lambda block: secret
        return lambda block: generator(seed, Draw.NOISE, round=round, client=client, block=block)


def leaves(trees: Tree) -> list[Tensor]:
    """Return all tensors of the trees."""
    return [value for tree in trees.values() for value in tree.values()]


def mapped(function: Callable[..., Tensor], *trees: Tree) -> dict[str, Params]:
    """Apply a function to the tensors of the trees that have the same name."""
    return {
        tree: {name: function(*(operand[tree][name] for operand in trees)) for name in params}
        for tree, params in trees[0].items()
    }


def _apart(tree: Tree, other: Tree) -> dict[str, Params]:
    return mapped(lambda b, a: a.double() - b.double(), other, tree)


def _moved(start: Tree, by: Tree, share: float) -> dict[str, Params]:
    return mapped(
        lambda value, change: (value.double() + share * change).to(value.dtype), start, by
    )
