"""Distributed trust: each client adds a share of the noise, and the server learns only sums.

Each of the K clients in a round has an update v_k with D entries, clipped to C
(`fedmuon.privacy.mechanisms.client_level`). Let sigma be the noise multiplier, and s = 2^32. Let T
round every entry towards 0. Then

    g = sigma (1 + 2^-40) C / (s sqrt(K)),   z_k = T(v_k / g),   Y_k ~ N_Z(0, s^2)^D,            (1)
    sent: z_k + Y_k + M_k mod 2^64,   released: g (sum of all messages mod 2^64),                (2)

where the sum is taken in [-2^63, 2^63). The masks M_k of all K clients add up to 0. The server
therefore releases the sum of z_k + Y_k over the clients. The K shares of the noise together have
the standard deviation sigma C.

*Sensitivity.* The quotient rounds by a factor of at most 1 + 2^-53 and T shortens, so
||z_k|| <= (1 + 2^-53) C / g. T reduces an entry by less than g, which is 2^-32 of the standard
deviation of one share.

*The sum of n shares* is not a discrete Gaussian. Let phi_a be the density of N(0, a^2), and let
h(t) = 2 sum over k >= 1 of exp(-2 pi^2 t^2 k^2). By Poisson's summation, the sum of phi_t over the
integers, with any shift, lies in [1 - h(t), 1 + h(t)]. The sum of n shares is then y with
probability

    phi_(s sqrt n)(y) u_n(y),   u_n in (1 + h(s))^-n [prod (1 - h(t_k)), prod (1 + h(t_k))],     (3)

over k = 1, ..., n - 1, with t_k^2 = s^2 k / (k + 1). Proof: for n = 1, it is phi_s / (1 + h(s)).
Furthermore, phi_a(x) phi_s(y - x) = phi_c(y) phi_t(x - m) with c^2 = a^2 + s^2, t = a s / c and
some m. With a = s sqrt(n), t equals t_n. The sum over the integers x, with u_n(x) / (1 + h(s)), is
(3) for n + 1. QED. This is the convolution of Kairouz, Liu and Steinke (2021, Theorem 1,
Proposition 14). Their tau = 10 sum exp(-2 pi^2 s^2 k / (k + 1)) has the role of these products, in
D_a <= a Delta^2 / (2 n s^2) + tau D. In this module, (3) leads to the tighter account of
`fedmuon.privacy.mechanisms.lattice`.

*Account.* The account relies on H of the K shares: the shares of clients that add their share and
do not reveal it to the server. The server may know the other shares and subtract them. Let X ~ N(v,
H s^2 - t^2), and y ~ N_Z(X, t^2), which is post-processing of X. Then y has probability phi_(s sqrt
H)(y - v) / (1 + e), |e| <= h(t). The ratio of (3) to this probability therefore lies within
exp(+-eta), eta = H h(s) + 2 sum h(t_k) + 2 h(t), because -ln(1 - h) <= 2 h for h below 1/2. With t
= 64, eta is below 10^-35000. By (4) in `lattice.py`, the accountant's upper bound of epsilon for
real Gaussian noise of multiplier

    sigma sqrt(H / K)                                                                            (4)

is valid without change. The factor 1 + 2^-40 covers t and the roundings of g. The server follows
the protocol. It sees only sums, unless it can break the masks. The adjacency is zero-out: a client
sends either its updates or zeros, and adds its share of the noise in both cases. The server knows
which clients take part, so there is no amplification.

*The modulus.* An entry of a sum of z_k is at most K C / g, up to rounding. A share is subgaussian
with s: E exp(l Y) is exp(l^2 s^2 / 2) times the sum of phi_s shifted by l s^2, divided by the sum
of phi_s, which is the largest of all shifts (Canonne, Kamath, Steinke 2020). The sum of K shares is
therefore beyond 40 s sqrt(K) with probability at most 2 exp(-800). To prevent overflow, the bound

    W = s sqrt(K) (K / sigma + 40)                                                               (5)

must be at most 2^60. (Overflow would not cost any delta, because it is post-processing.) A sum with
an entry beyond W is rejected, because a mask is missing or was added twice. In such a sum, each
entry is uniform and stays within W with probability 1/8.

*The masks.* Each client draws a key pair of X25519 (RFC 7748) for each round, and the server
forwards the public keys. Clients i < j agree on a secret. HKDF-SHA256 (RFC 5869) converts it to an
AES-256 key, whose key stream in counter mode is m_ij, with 8 bytes per entry. The mask of client k
is

    M_k = sum over j > k of m_kj - sum over i < k of m_ik   mod 2^64,   and these add up to 0. (6)

Claim (Bonawitz et al. 2017, Lemma 6.1): consider an adversary that knows everything except the
private keys of a set A of clients. From the x_k + M_k of A, the adversary learns the sum of x_k
over A and nothing else. Proof: replace the m_ij within A by uniform vectors. Uniform vectors can be
distinguished from key streams only by computing the Diffie-Hellman function on Curve25519 (with
HKDF as a random oracle) or by distinguishing AES from random permutations. The map (6) from the
m_ij within A to vectors that add up to 0 is linear. The map is onto, even if only the m_aj of a
single client a in A can vary. The masks are therefore uniform among these vectors. The adversary
knows all other m_ij. QED.

The claim is valid for a server that forwards the true keys and requests one masked vector per key.
A server that replaces a client's key by its own can unmask every client that masks with this key,
because keys are not signed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmuon.core.errors import InputError, rounded_up
from fedmuon.privacy.mechanisms.discrete import gaussian
from fedmuon.privacy.mechanisms.lattice import BITS, DEVIATION
from fedmuon.privacy.noise import Stream, counter_mode, words_of
from fedmuon.tasks.base import Params

MODULUS = "2^64"
MOST, TAIL = 2.0**60, 40
INFO = b"fedmuon masks"

Tree = Mapping[str, Params]  # the model and the returned states, by name


def spacing(bound: float, noise: float, cohort: int) -> float:
    """Return the lattice spacing g of eq. (1)."""
    reach(noise, cohort)
    return noise * (1 + 2.0**-40) * bound / (DEVIATION * math.sqrt(cohort))


def reach(noise: float, cohort: int) -> float:
    """Return the largest valid entry W of a sum of messages, eq. (5)."""
    largest = DEVIATION * math.sqrt(cohort) * (cohort / noise + TAIL) if noise else math.inf
    if largest > MOST:
        min_noise = cohort / (MOST / DEVIATION / math.sqrt(cohort) - TAIL)
        raise InputError(
            f"[privacy] noise = {noise:g} is too small for distributed trust with {cohort} "
            f"clients per round, because the sum of their messages modulo {MODULUS} could wrap "
            f"around. Set noise = {rounded_up(min_noise)} or more, or lower [federation] per-round."
        )
    return largest


def share(clipped: Tree, step: float, streams: Callable[[int], Stream]) -> dict[str, Params]:
    """Return a client's update plus the client's share of the noise, as int64 tensors."""
    message: dict[str, Params] = {tree: {} for tree in clipped}
    keys = [(tree, name) for tree, params in clipped.items() for name in params]
    for block, (tree, name) in enumerate(keys):
        integers = (clipped[tree][name] / step).trunc().to("cpu", torch.int64).numpy()
        noise = gaussian(words_of(streams(block)), integers[0].size, BITS)
        message[tree][name] = torch.from_numpy(integers + noise.reshape(integers.shape[1:]))
    return message


def total(sent: Sequence[Tree], noise: float, cohort: int) -> dict[str, Params]:
    """Return the sum of the clients' messages modulo 2^64 as float64 tensors, in multiples of g."""
    if len(sent) != cohort:
        raise InputError(
            f"only {len(sent)} of {cohort} clients sent a masked update, but the masks cancel "
            "only in the sum of all updates. Find out why the other clients did not reply, then "
            "continue with --resume."
        )
    limit, totals = reach(noise, cohort), dict[str, Params]()
    for tree, params in sent[0].items():
        sums = {
            name: reduce(np.add, (message[tree][name].numpy() for message in sent))
            for name in params
        }
        if any((np.abs(value.astype(np.float64)) > limit).any() for value in sums.values()):
            raise InputError(
                "the sum of the masked updates is larger than any sum of clipped updates and "
                "noise. A mask is missing, or a client sent a wrong message. Repeat the round "
                "with --resume."
            )
        totals[tree] = {
            name: torch.from_numpy(value.astype(np.float64)) for name, value in sums.items()
        }
    return totals


def masked(vectors: Tree, mask: np.ndarray) -> dict[str, Params]:
    """Return the integers of a message plus the mask M_k, modulo 2^64."""
    message: dict[str, Params] = {tree: {} for tree in vectors}
    start = 0
    for tree, params in vectors.items():
        for name, value in params.items():
            part = mask[start : start + value.numel()].reshape(value.shape)
            message[tree][name] = torch.from_numpy(value.numpy() + part)
            start += value.numel()
    return message


def key_pair() -> tuple[bytes, bytes]:
    """Draw a private key from the operating system's entropy, and return it with its public key."""
    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def public_of(private: bytes) -> bytes:
    """Return the public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def mask(private: bytes, client: int, keys: Mapping[int, bytes], count: int) -> np.ndarray:
    """Return a client's mask M_k of eq. (6), as an array of `count` integers (int64).

    Raises:
        ValueError: If a public key is not valid for a key agreement.
    """
    private_key, combined = X25519PrivateKey.from_private_bytes(private), np.zeros(count, np.uint64)
    for other, public in keys.items():
        if other != client:
            low, high = sorted((client, other))
            secret = private_key.exchange(X25519PublicKey.from_public_bytes(public))
            key = HKDF(SHA256(), 32, None, INFO + keys[low] + keys[high]).derive(secret)
            part = np.frombuffer(counter_mode(key).update(bytes(8 * count)), "<u8")
            combined = combined + part if client == low else combined - part
    return combined.view(np.int64)
