"""Compressors: each returns C(x), the array that a receiver decodes.

`rng` has the draws for this array, and `kept` is what the sender has stored from its last message.
"""

from collections.abc import Callable

import numpy as np

Kept = dict[str, np.ndarray]
Compressor = Callable[[np.ndarray, np.random.Generator, Kept], np.ndarray]


def whole(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
    return x


def largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """Whether each size is one of the `count` largest. Among equal sizes, the first are chosen."""
    order = sorted(range(len(sizes)), key=lambda j: (-sizes[j], j))
    return np.array([j in order[:count] for j in range(len(sizes))])


def top_k(share: float) -> Compressor:
    def compress(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
        sent = largest(np.abs(x).ravel(), round(share * x.size))
        return np.where(sent.reshape(x.shape), x, 0)

    return compress


def random_k(share: float) -> Compressor:
    def compress(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
        k, sent = round(share * x.size), np.zeros(x.size)
        for j in rng.choice(x.size, k, replace=False):
            sent[j] = x.ravel()[j] * x.size / k
        return sent.reshape(x.shape)

    return compress


def rows(share: float) -> Compressor:
    def compress(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
        sent = largest((x**2).sum(1), round(share * len(x)))
        return x * sent[:, None]

    return compress


def qsgd(levels: int) -> Compressor:
    def compress(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
        norm, drawn = np.sqrt((x**2).sum()), rng.random(x.size).reshape(x.shape)
        if norm == 0:
            return x
        return norm * np.sign(x) * np.floor(np.abs(x) / norm * levels + drawn) / levels

    return compress


def sign(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
    return np.asarray(np.where(x >= 0, 1.0, -1.0) * np.abs(x).mean())


def low_rank(rank: int) -> Compressor:
    """The nearest matrix of this rank."""

    def compress(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
        U, s, V = np.linalg.svd(x, full_matrices=False)
        return np.asarray((U[:, :rank] * s[:rank]) @ V[:rank])

    return compress


def power(rank: int) -> Compressor:
    """PowerSGD: the columns of P are orthonormalized one after the other (Gram and Schmidt)."""

    def compress(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
        drawn = rng.standard_normal((rank, x.shape[1])).T
        P = x @ kept.get("right", drawn)
        for j in range(rank):
            for i in range(j):
                P[:, j] -= (P[:, i] @ P[:, j]) * P[:, i]
            P[:, j] /= np.linalg.norm(P[:, j])
        kept["right"] = x.T @ P
        return P @ kept["right"].T

    return compress


def larger_half(x: np.ndarray, rng: np.random.Generator, kept: Kept) -> np.ndarray:
    """The stage of `examples/stage.py`: entries that are larger than the (lower) median."""
    middle = np.sort(np.abs(x).ravel())[(x.size - 1) // 2]
    return np.where(np.abs(x) > middle, x, 0)
