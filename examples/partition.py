"""Partition samples by index arrays or by a function: `partition.py [inline | ray]`."""

import sys

import numpy as np

import fedmuon
from fedmuon.data import load

ENGINE = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
CONFIG = {"federation": {"clients": 2, "per-round": 2, "rounds": 3}, "engine": ENGINE}
DIGITS = load("digits")
PARITY = [np.flatnonzero(DIGITS[1][:1500] % 2 == k) for k in (0, 1)]  # others are held out


def size_of_label(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Return the client of each sample: small labels go to the first clients."""
    return labels * clients // 10


if __name__ == "__main__":
    found = [fedmuon.run(CONFIG, data=DIGITS, partition=one) for one in (PARITY, size_of_label)]
    print("accuracies", *(f"{one.summary['accuracy']:.2f}" for one in found))
