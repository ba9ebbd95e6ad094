"""What can be named in a config."""

from typing import Literal, get_args

SourceName = Literal[
    "synthetic", "digits", "mnist5k", "fashion-mnist", "mnist", "cifar10", "idx",
    "pydoc", "text", "e2e", "dart",
]  # fmt: skip
TABLES = ("e2e", "dart")  # of which the source is not to be predicted
TEXTS = ("pydoc", "text", *TABLES)
Model = Literal["mlp", "cnn", "tanh-cnn", "cifarnet", "wrn-16-2", "gpt"]
Recipe = Literal[
    "fedavg", "fedavgm", "local-muon", "fedmuon", "fedmuon-aligned",
    "sgd", "normalized-sgd", "adamw", "muon",  # of one client, mostly: all their states are kept
    "dp-sgd", "dp-adam", "dp-muon", "dp-muonbc",  # the same on what a Gaussian mechanism releases
    "disk-sgd", "disk-adam", "disk-muon", "disk-muonbc",  # and through a Kalman filter
]  # fmt: skip
PRIVATE = tuple(name for name in get_args(Recipe) if name.startswith(("dp-", "disk-")))
Orthogonalizer = Literal[
    "smoothed-polar",
    "newton-schulz",
    "gaussian-smoothed-sign",
    "exact-sign",
    "clipped-sign",
    "randomized-polar",
]
