"""Pairwise masks: integers modulo 2^64 that hide each client's vector and cancel in the sum.

Each client of a round draws a key pair of X25519 (RFC 7748) for this round alone, and the server
passes on the public keys. Clients i < j agree on a secret. HKDF-SHA256 (RFC 5869) turns it into an
AES-256 key, whose key stream in counter mode is m_ij, with 8 bytes per entry. The mask of client k
is

    M_k = sum over j > k of m_kj - sum over i < k of m_ik   mod 2^64,   and these add up to 0. (1)

Claim (Bonawitz et al. 2017, Lemma 6.1): whoever has all but the private keys of a set A of clients
learns, of the x_k + M_k of A, the sum of x_k over A and nothing else. Proof: replace the m_ij
within A by uniform vectors, which nobody can tell from key streams who cannot compute Diffie and
Hellman's function on Curve25519 (HKDF taken for a random oracle) nor tell AES from random
permutations. The map (1) from the m_ij within A to vectors that add up to 0 is linear and onto, by
the m_aj of one a in A alone, so these are uniform among them. All other m are known. QED.

This holds against a server that passes on the true keys and asks for one masked vector per key. A
server that replaces a client's key by its own unmasks everyone who masks with it: keys are not
signed.
"""

from collections.abc import Mapping

import numpy as np

from fedmuon.privacy.noise import counter_mode

INFO = b"fedmuon masks"


def fresh() -> tuple[bytes, bytes]:
    """A private key from the system's entropy, and its public one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import (
        X25519PrivateKey,
    )  # slow to load, also below

    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def mask(private: bytes, client: int, keys: Mapping[int, bytes], count: int) -> np.ndarray:
    """M_k of (1), int64 [count], for the client among those with these public keys."""
    found = np.zeros(count, np.uint64)
    for other, public in keys.items():
        if other != client:
            low, high = sorted((client, other))
            part = _stream(_agreed(private, public, keys[low] + keys[high]), count)
            found = found + part if client == low else found - part
    return found.view(np.int64)


def _agreed(private: bytes, public: bytes, both: bytes) -> bytes:
    """The key of a pair's stream; ValueError of a public key that agrees on nothing."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    other = X25519PublicKey.from_public_bytes(public)
    secret = X25519PrivateKey.from_private_bytes(private).exchange(other)
    return HKDF(SHA256(), 32, None, INFO + both).derive(secret)


def _stream(key: bytes, count: int) -> np.ndarray:
    return np.frombuffer(counter_mode(key).update(bytes(8 * count)), "<u8")


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
