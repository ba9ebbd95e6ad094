"""Distributed trust: each client adds its share of the noise, and the server learns sums alone.

Of a round's K clients each has v_k, a whole update clipped to C (`client_level.py`),
of D entries. With sigma the noise multiplier, s = 2^32 and T rounding every entry towards 0,

    g = sigma (1 + 2^-40) C / (s sqrt(K)),   z_k = T(v_k / g),   Y_k ~ N_Z(0, s^2)^D,            (1)
    sent: z_k + Y_k + M_k mod 2^64,   released: g (sum of what was sent mod 2^64),               (2)

the latter within [-2^63, 2^63). The masks M_k (`fedmuon.privacy.masks`) add up to 0 over all K, so
the sum of z_k + Y_k is released, and K shares make noise of sigma C.

*Sensitivity.* The quotient rounds by 1 + 2^-53 and T shortens, so ||z_k|| <= (1 + 2^-53) C / g.
What T takes off an entry is below g, 2^-32 of the deviation of one share.

*The sum of n shares* is no discrete Gaussian. Let phi_a be the density of N(0, a^2), and h(t) = 2
sum over k >= 1 of exp(-2 pi^2 t^2 k^2), so that the sum of phi_t over the integers, however they
are shifted, lies in [1 - h(t), 1 + h(t)] (Poisson's summation). Then the sum is y with probability

    phi_(s sqrt n)(y) u_n(y),   u_n in (1 + h(s))^-n [prod (1 - h(t_k)), prod (1 + h(t_k))],     (3)

over k = 1, ..., n - 1, with t_k^2 = s^2 k / (k + 1). Proof: for n = 1 it is phi_s / (1 + h(s)). And
phi_a(x) phi_s(y - x) = phi_c(y) phi_t(x - m) with c^2 = a^2 + s^2, t = a s / c and some m. With a =
s sqrt(n) that is t_n, and summed over the integers x with u_n(x) / (1 + h(s)) it makes (3) of n +
1. QED. This is the convolution of Kairouz, Liu and Steinke (2021, Theorem 1, Proposition 14), whose
tau = 10 sum exp(-2 pi^2 s^2 k / (k + 1)) is for these products, D_a <= a Delta^2 / (2 n s^2) + tau
D; here (3) goes on to the tighter account of `fedmuon.privacy.mechanisms.lattice`.

*Account.* Of the K shares H count: those of clients who neither withhold theirs nor tell it to the
server; the others' are known, and subtracted. X ~ N(v, H s^2 - t^2) and y ~ N_Z(X, t^2), which is
post-processing of X, is y with probability phi_(s sqrt H)(y - v) / (1 + e), |e| <= h(t). So (3)
lies within exp(+-eta) of it, eta = H h(s) + 2 sum h(t_k) + 2 h(t), as -ln(1 - h) <= 2 h below 1/2.
With t = 64 that is below 10^-35000, and by (4) there, the accountant's upper end for real Gaussian
noise of multiplier

    sigma sqrt(H / K)                                                                            (4)

holds as it stands; 1 + 2^-40 is for t and for the roundings of g. The server sees sums alone as far
as masks hide, against whoever cannot break them, and follows the protocol. What holds is zero-out:
a client's updates against zeros, its share being there in both. Who takes part is known to the
server: nothing is amplified.

*The modulus.* An entry of a sum of z_k is at most K C / g, up to rounding. By E exp(l Y) = exp(l^2
s^2 / 2) times the sum of phi_s shifted by l s^2 over that of phi_s, which is the largest of all
(Canonne, Kamath, Steinke 2020), a share is subgaussian with s, and the sum of K is beyond 40 s
sqrt(K) with probability 2 exp(-800) at most. Both together,

    W = s sqrt(K) (K / sigma + 40),                                                              (5)

must be 2^60 at most: nothing wraps around. (What does would cost no delta: it is post-processing.)
A sum beyond W is refused: it lacks a mask or has one too many, and then each of its entries is
uniform and stays within W with a chance of 1/8.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.choices import Arithmetic, NoiseSource
from fedmuon.core.device import sent
from fedmuon.core.errors import InputError, rounded_up
from fedmuon.core.rng import Draw, generator, normal
from fedmuon.privacy.mechanisms import lattice
from fedmuon.privacy.mechanisms.discrete import gaussian
from fedmuon.privacy.mechanisms.lattice import BITS, DEVIATION
from fedmuon.privacy.noise import Stream, secret_stream, words_of
from fedmuon.privacy.noise_visibility import secrecy
from fedmuon.tasks.base import Params

MODULUS = "2^64"
MOST, TAIL = 2.0**60, 40

Tree = Mapping[str, Params]  # the model, and the states that come back, each by its name


def spacing(bound: float, noise: float, cohort: int) -> float:
    """g of (1)."""
    reach(noise, cohort)
    return noise * (1 + 2.0**-40) * bound / (DEVIATION * math.sqrt(cohort))


def reach(noise: float, cohort: int) -> float:
    """W of (5)."""
    found = DEVIATION * math.sqrt(cohort) * (cohort / noise + TAIL) if noise else math.inf
    if found > MOST:
        least = cohort / (MOST / DEVIATION / math.sqrt(cohort) - TAIL)
        raise InputError(
            f"[privacy] noise = {noise:g} is too little for shares of {cohort} clients, whose sums "
            f"modulo {MODULUS} would wrap around: set noise = {rounded_up(least)} or more, or "
            "lower [federation] per-round"
        )
    return found


def share(clipped: Tree, step: float, streams: Callable[[int], Stream]) -> dict[str, Params]:
    """z_k + Y_k of (2), int64 tensors [S, ...] on the CPU; a client's S replicas share Y_k."""
    found: dict[str, Params] = {tree: {} for tree in clipped}
    named = [(tree, name) for tree, held in clipped.items() for name in held]
    for block, (tree, name) in enumerate(named):
        whole = (clipped[tree][name] / step).trunc().to("cpu", torch.int64).numpy()
        noise = gaussian(words_of(streams(block)), whole[0].size, BITS)
        found[tree][name] = torch.from_numpy(whole + noise.reshape(whole.shape[1:]))
    return found


def total(sent: Sequence[Tree], noise: float, cohort: int) -> dict[str, Params]:
    """The sum of what the clients sent, modulo 2^64, as float64 tensors in units of g."""
    if len(sent) != cohort:
        raise InputError(
            f"{len(sent)} of {cohort} clients sent their masked updates, and masks cancel in the "
            "sum of all alone: mend the cause and go on with --resume"
        )
    most, found = reach(noise, cohort), dict[str, Params]()
    for tree, held in sent[0].items():
        sums = {name: reduce(np.add, (one[tree][name].numpy() for one in sent)) for name in held}
        if any((np.abs(one.astype(np.float64)) > most).any() for one in sums.values()):
            raise InputError(
                "the sum of masked updates is beyond what clipped updates and noise can be: a mask "
                "is missing, or a client sent what it should not; go on with --resume"
            )
        found[tree] = {name: torch.from_numpy(one.astype(np.float64)) for name, one in sums.items()}
    return found


def masked(vectors: Tree, mask: np.ndarray) -> dict[str, Params]:
    """The vectors with M_k [entries] added, modulo 2^64."""
    found: dict[str, Params] = {tree: {} for tree in vectors}
    start = 0
    for tree, held in vectors.items():
        for name, one in held.items():
            part = mask[start : start + one.numel()].reshape(one.shape)
            found[tree][name] = torch.from_numpy(one.numpy() + part)
            start += one.numel()
    return found


# Client level: a round's sum of whole clients' updates, each clipped to C, and noise once.
#
# DP-FedAvg with a fixed denominator (McMahan, Ramage, Talwar, Zhang 2018, Algorithm 1), for
# every recipe whose server averages. The server holds X and the states S of the links that come
# back (FedMuon's momentum; none of FedAvg or Local Muon). A client of the cohort returns X_k and
# S_k, and contributes, with T rounding every entry towards 0 to a multiple of the lattice's
# spacing g,
#
#     u_k = (X_k - X, w (S_k - S)),    v_k = T(min(1, C' / ||u_k||) u_k)                         (1)
#     (X, wS) <- rule( (X, wS) + (sum of v_k over the cohort + sigma C xi) / K ),  xi ~ N(0, I)
# (2)
#
# where K is the *expected* size of a cohort. Momentum leaves its client as the model does, so
# (1) is one norm over both: clipping each to C would make the whole up to C sqrt(2) long. The
# public weight w says how much of C is the states'; noise in S is sigma C / (w K).
#
# Claim: ||v_k|| <= C, and the sums of two cohorts that differ in client k differ in v_k exactly.
# So (2) is one Gaussian release of multiplier sigma whatever the links, the server's rule and
# the number of tensors: X and S are known from earlier releases, what the rule makes of the sum
# (FedAvgM's velocity, an aligned direction, rounding to the run's precision) is post-processing,
# and rounds compose adaptively. Under Poisson sampling at the public rate q = K / N it is
# amplified, and what holds is add-remove of a client; with a schedule that all may know it is
# not, and what holds is zero-out: a client's updates against zeros.
#
# Proof. Let n be the number of u's entries, U = 2^-53, and C' = (1 - (n + 8) U) C. The computed
# sum of n squares is at least (1 - n U) times the true one, in whatever order it is made, so its
# root is at least (1 - (n + 2) U) times the norm; the quotient and the products of (1) round up
# by a factor of at most 1 + U each. So before T a norm is at most C' (1 + (n + 7) U) <= C, and T
# shortens every entry. (Squares that underflow are below 1e-300, and C is 1e-15 or more.) An
# update whose square is infinite or no number contributes 0. And |v_k| <= C entry by entry with
# N C / g <= 2^53, so that all partial sums are multiples of g that float64 holds: no addition
# rounds, in any order.
#
# It is assumed that v_k depends on client k alone, given X and S. Clients are stepped in stacks,
# and a processor may round the products of a larger stack otherwise; that is counted nowhere.
#
# Trust. `central`: the server sees the updates, and adds the noise. `local`: each client adds
# all of it, so that even the server learns no more of it than ε allows; the noise of K sums is
# sqrt(K) times as large, and nothing is amplified, since the server knows who answers.
# `distributed`: each adds a share, and the server learns the sum alone
# (`fedmuon.privacy.mechanisms.client_level`).

ROUNDING = 2.0**-53  # of float64
EVERYONE = -1  # in a ledger: any one client, since all are drawn alike
EACH = "each"  # the same, where people read it
REPLAY = "Noise was drawn in secret, so that no seed repeats this run."
COHORTS = "Who took part (rounds.jsonl) is as secret as the noise: else nothing is amplified."
Flat = dict[tuple[str, str], Tensor]  # by tree and name
Clipped = Mapping[str, Params]  # the same in float64, on the lattice


@dataclass(frozen=True)
class ClientLevel:
    """How a round is released: sigma = `noise` times the bound C, for an expected cohort K of N
    `clients`. Repeatable noise follows from the `seed`; without one it is secret."""

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
    honest: float = 1.0  # of a cohort whose members each add a share of the noise

    def __post_init__(self) -> None:
        if self.shared and self.noise:
            reach(self.noise, self.cohort)

    @property
    def shared(self) -> bool:
        """Whether clients add shares of the noise, and the server learns their sum alone."""
        return self.trust == "distributed"

    @property
    def shares(self) -> int:
        """H, how many shares of the noise count: a client's own does, whoever the others are."""
        return max(1, math.floor(self.honest * self.cohort))

    @property
    def counted(self) -> float:
        """What `noise` is times in the account."""
        return math.sqrt(self.shares / self.cohort) if self.shared else 1.0

    @property
    def on_grid(self) -> bool:
        """Whether noise is exact, on a lattice (`lattice.py`), whose C' is C here."""
        chosen = self.arithmetic == "grid" or (self.arithmetic == "auto" and self.seed is None)
        return chosen or self.shared

    @property
    def secrecy(self) -> str:
        """Who can know the noise: see `fedmuon.privacy.noise_visibility`."""
        return secrecy(self.seed is not None, self.source)

    @property
    def rate(self) -> float:
        """q, the chance of a client to be in a cohort, as the account has it."""
        return self.cohort / self.clients if self.poisson else 1.0

    @property
    def adjacency(self) -> str:
        """What two federations differ in: a client that is there or not, or its updates or 0."""
        return "add-remove" if self.poisson else "zero-out"

    @property
    def spacing(self) -> float:
        """g: the least power of two of which 2^53 are N C or more."""
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
        """What a client that trusts nobody sends in place of what it `returned`; under distributed
        trust integers, with its share of the noise and before its mask."""
        own = self.clipped(held, returned)
        if self.shared:
            step = spacing(self.bound, self.noise, self.cohort)
            return share(own, step, self._streams(round, client))
        noisy = self._with_noise(own, round, client)
        return _moved(held, self._weighted(noisy, 1 / self.weight), 1.0)

    def released(self, held: Tree, returned: Sequence[Tree], round: int) -> dict[str, Params]:
        """(2) without the rule, in the run's precision; an empty cohort releases noise. Under local
        trust all is clipped and noisy already, and this is post-processing."""
        if self.shared:
            total = self._weighted(self._summed(held, returned), 1 / self.weight)
            return _moved(held, total, 1 / self.cohort)
        total = mapped(lambda one: torch.zeros_like(one, dtype=torch.float64), held)
        local = self.trust == "local"
        for one in returned:
            total = mapped(
                torch.add, total, _apart(one, held) if local else self.clipped(held, one)
            )
        if not local:
            total = self._weighted(self._with_noise(total, round), 1 / self.weight)
        return _moved(held, total, 1 / self.cohort)

    def _summed(self, held: Tree, vectors: Sequence[Tree]) -> dict[str, Params]:
        """The sum of the clients' masked updates with its noise."""
        step = spacing(self.bound, self.noise, self.cohort)
        sums = total(vectors, self.noise, self.cohort)
        return mapped(lambda like, one: one.to(like.device) * step, held, sums)

    def _weighted(self, trees: Tree, weight: float) -> dict[str, Params]:
        """The states' parts times that."""
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
        noisy = self._on_grid(flat, stream) if self.on_grid else self._continuous(flat, stream)
        return {tree: {name: noisy[tree, name] for name in held} for tree, held in sums.items()}

    def _streams(self, round: int, client: int) -> Callable[[int], Stream]:
        """block -> what its noise is drawn of."""
        secret = secret_stream(self.source) if self.seed is None else None

        def stream(block: int) -> Stream:
            return secret or generator(
                self.seed or 0, Draw.NOISE, round=round, client=client, block=block
            )

        return stream

    def _continuous(self, sums: Flat, stream: Callable[[int], Stream]) -> Flat:
        found: Flat = {}
        for block, (name, one) in enumerate(sums.items()):
            entries = sent(normal([stream(block)], tuple(one.shape)), one.device, one.dtype)
            found[name] = one + self.noise * self.bound * entries
        return found

    def _on_grid(self, sums: Flat, stream: Callable[[int], Stream]) -> Flat:
        named = {str(block): one for block, one in enumerate(sums.values())}
        step, found = lattice.noisy(
            named, self.bound, self.noise, lambda block: [words_of(stream(block))]
        )
        return dict(zip(sums, (one * step for one in found.values()), strict=True))


def leaves(trees: Tree) -> list[Tensor]:
    """All tensors."""
    return [one for tree in trees.values() for one in tree.values()]


def mapped(function: Callable[..., Tensor], *trees: Tree) -> dict[str, Params]:
    """The function of the trees' tensors, name by name."""
    return {
        tree: {name: function(*(one[tree][name] for one in trees)) for name in held}
        for tree, held in trees[0].items()
    }


def _apart(one: Tree, other: Tree) -> dict[str, Params]:
    """one - other, in float64; names are those of `other`."""
    return mapped(lambda b, a: a.double() - b.double(), other, one)


def _moved(held: Tree, by: Tree, share: float) -> dict[str, Params]:
    """held + share by, rounded to the type of `held` once."""
    return mapped(lambda one, more: (one.double() + share * more).to(one.dtype), held, by)
