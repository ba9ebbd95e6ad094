"""Predict the next token after each window of a text: `tokens.py [inline | ray]`."""

import sys

import numpy as np
from torch import nn

from fedmuon import run

LOCAL = {"lr": 0.05, "batch": 16, "aux-lr": 1.0}
ENGINE = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
CONFIG = {"federation": {"clients": 6, "rounds": 5}, "local": LOCAL, "engine": ENGINE}
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 20, np.uint8) % 32
WINDOWS = np.lib.stride_tricks.sliding_window_view(TEXT.astype(int), 7)


def network():
    first, last = (nn.Embedding(32, 8), nn.Flatten()), (nn.Tanh(), nn.Linear(32, 32))
    return nn.Sequential(*first, nn.Linear(48, 32), *last)


if __name__ == "__main__":
    found = run(CONFIG, data=(WINDOWS[:, :6], WINDOWS[:, 6]), task=network)
    print(f"accuracy {found.summary['accuracy']:.2f}")
