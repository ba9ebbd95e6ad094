"""What can be named in a config, beside objects of the user's own (see `fedmuon.core.registry`)."""

from typing import Literal, get_args

SourceName = Literal[
    "synthetic", "digits", "mnist5k", "fashion-mnist", "mnist", "cifar10", "idx",
    "pydoc", "text", "e2e", "dart", "npz", "csv", "parquet",
]  # fmt: skip
TABLES = ("e2e", "dart")  # of which the source is not to be predicted
TEXTS = ("pydoc", "text", *TABLES)
Model = Literal[
    "mlp", "cnn", "tanh-cnn", "cifarnet", "wrn-16-2", "wrn-16-4", "vit-small", "gpt",
]  # fmt: skip
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
Partition = Literal["dirichlet", "iid", "shards", "quantity", "column"]
Aggregate = Literal["mean", "by-samples", "median", "trimmed-mean", "krum"]
Schedule = Literal["constant", "heavy-tailed", "cosine", "step", "warm-up"]
NoiseSource = Literal["secure", "pcg64"]
Arithmetic = Literal["auto", "continuous", "grid"]
CallbackName = Literal["none", "early-stopping", "tensorboard", "mlflow", "wandb"]
# What a round's record holds beside what was measured of the model, and what else a run tells.
OF_A_ROUND = (
    "round", "participants", "client_loss", "faults", "dropped", "train_seconds", "seconds",
)  # fmt: skip
OF_A_RUN = (
    "loss", "train_loss", "test_loss", "test_gap", "stopped", "privacy", "engine", "seed", "rounds",
    "recipe", "data", "dtype", "device", "rounds_with_drops", "machine", "versions", "git_commit",
    "run", "seeds",  # columns of runs compared
)  # fmt: skip
Sampling = Literal["poisson", "shuffle", "cyclic"]
SPREAD = " ±"  # ends the column of a measure's standard deviation
GIVEN = "given"  # what a caller handed over in Python


def is_own(name: str) -> bool:
    """Whether the name is none of ours: an object of the user's, `package.module:object`,
    `./file.py:object` or `given`."""
    return name == GIVEN or ":" in name
