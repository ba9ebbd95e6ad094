"""Every key of a config, declared once: type, limits, default, description, and when it is read.

First: what a key is, and the conditions under which keys are read. Then the tables of keys. Last:
which keys of a config are read, and the message that rejects one that is not. A value that nothing
reads looks as if it had an effect, for example `epsilon = 8` with a recipe without privacy. So a
key that differs from its default must be read.

The checks of a config, `fedmuon config explain`, completion, the reference page and Flower's table
all follow from these tables. They hold scalars only, because Flower's run config has no lists: a
coefficient schedule has a name.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import not_
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from fedmuon.core import choices
from fedmuon.core.choices import GLUE, NAMES, PRIVATE, TABLES, TEXTS, is_own
from fedmuon.core.errors import instead, shown
from fedmuon.core.tables import Scalar, Table, attribute
from fedmuon.orthogonalize.coefficients import COEFFICIENTS, Coefficients, with_safety

Config = Any  # a `fedmuon.config.load.Config`, which asks here while it is made

# What a key is: its values, its declaration, and a condition under which it is read

# Counts that end before the first round, sizes that fit a library's own integers, and reals whose
# squares float32 can hold.
SAMPLES, ROUNDS, CLIENTS, LARGE = 10**9, 10**6, 10**7, 1e15
Samples = Annotated[int, Field(ge=1, le=SAMPLES)]
Count = Annotated[int, Field(ge=1, le=10**6)]
Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
Few = Annotated[int, Field(ge=0, le=1000)]
Positive = Annotated[float, Field(ge=1 / LARGE, le=LARGE)]
Amount = Annotated[float, Field(ge=0, le=LARGE)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
Share = Annotated[float, Field(ge=0, le=1)]
Chance = Annotated[float, Field(gt=0, lt=1)]


def _named(key: str) -> Callable[[str], str]:
    """Accept a built-in name of the key, or that of a custom object."""

    def check(value: str) -> str:
        if value in NAMES[key] or is_own(value):
            return value
        raise ValueError(f"{instead(value, NAMES[key])} (your own object is package.module:object)")

    return check


def _share_or_count(value: float) -> float:
    """Accept a share below 1, or a whole number."""
    if value > 1 and value != int(value):
        raise ValueError("give a share below 1, or a whole number of samples")
    return value


def _pairs(value: Any) -> Any:
    """A table of options as pairs in order, which can be hashed."""
    if not isinstance(value, Mapping):
        return value
    for name, one in value.items():
        if not isinstance(one, Scalar):
            raise ValueError(f"option {name} is no single value: give a number, a word or a switch")
    return tuple(sorted(value.items()))


# Options of the custom object that the same table names.
Options = Annotated[tuple[tuple[str, Scalar], ...], BeforeValidator(_pairs), PlainSerializer(dict)]


@dataclass(frozen=True)
class ReadIf:
    """A condition under which another key is read.

    Attributes:
        key: The key `table.key` that decides.
        holds: The names that it may have, or a function that tells whether its value is as it must
            be. Instead of a name, a custom object will do: what that reads is known when it is
            made.
        readers: Who then reads the other key; follows "only" in a message.
        fix: What to do; follows "so" in a message. By default: set `key` to one of the names.
        unless: A condition that serves as well.
    """

    key: str
    holds: tuple[str, ...] | Callable[[Any], bool]
    readers: str
    fix: str = ""
    unless: "ReadIf | None" = None

    def met(self, config: Config) -> bool:
        """Whether the config fulfils it."""
        value = value_of(config, self.key)
        if self.holds(value) if callable(self.holds) else value in self.holds or is_own(value):
            return True
        return self.unless is not None and self.unless.met(config)


def key(
    default: Any,
    what: str,
    *,
    read_if: ReadIf | tuple[ReadIf, ...] = (),
    values: str = "",
    symbol: str = "",
) -> Any:
    """Declare a key.

    Args:
        default: Its default.
        what: Its description.
        read_if: The condition, or all the conditions, under which something reads it. The
            conditions of a key that one of them names come before it, so that leaving one out
            changes no other.
        values: Its possible values in words, where its type does not say them.
        symbol: Its letter in the papers.
    """
    needs = (read_if,) if isinstance(read_if, ReadIf) else read_if
    extra: Any = {"read_if": needs, "values": values, "symbol": symbol}
    return Field(default, description=what, json_schema_extra=extra)


def value_of(config: Config, name: str) -> Any:
    """The value of `table.key`."""
    table, _, spelled = name.partition(".")
    held = getattr(config, table)
    return getattr(held, attribute(type(held), spelled))


# The conditions under which keys are read, in the order of the tables that decide

# [data]
IN_FOLDERS = ("fashion-mnist", "mnist", "cifar10", "idx")
FILES = (*IN_FOLDERS, "npz", "csv", "parquet", "text", *TABLES, *GLUE)
FILE_SOURCE = ReadIf("data.name", FILES, f"{', '.join(FILES)} read")
TEXT_SOURCE = ReadIf("data.name", TEXTS, f"{', '.join(TEXTS)} read")
TABLE_SOURCE = ReadIf("data.name", TABLES, f"{', '.join(TABLES)} read")
TOKENIZED = (*TABLES, *GLUE)
TOKENIZED_SOURCE = ReadIf("data.name", TOKENIZED, f"{', '.join(TOKENIZED)} read")
OWN_SOURCE = ReadIf(
    "data.name", is_own, "tables and dicts that you give read", "give data in Python"
)
SYNTHETIC_SOURCE = ReadIf("data.name", ("synthetic",), "synthetic reads")

# [federation]
PUBLIC_CENTER = ReadIf("data.center", ("public",), "samples with a public center read")
DIRICHLET_PARTITION = ReadIf(
    "federation.partition", ("dirichlet", "quantity"), "the partitions dirichlet and quantity read"
)

# [task]
NETWORK_TASK = ReadIf("task.name", ("network",), "networks read")
MATRIX_TASK = ReadIf("task.name", ("matrix",), "the matrix task reads")
OUR_NETWORKS = ReadIf(
    "task.name", "network".__eq__, "networks of this package read", "set [task] name = 'network'"
)
DECODER_TASK = OUR_NETWORKS, ReadIf("task.model", ("gpt",), "the model gpt reads")

# [local]
RECIPES = tuple(NAMES["local.recipe"])
ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
NO_LOCAL_MOMENTUM = (
    *("fedavg", "fedavgm", "fedprox", "fedper", "ditto", "fednova", "scaffold", *ADAPTIVE),
    *("adamw", "local-adamw", "diloco", "dp-adam", "disk-adam"),
)
SENDS_MODEL_ONLY = (
    *("fedavg", "fedavgm", "fedprox", "fedper", "ditto", "fednova", *ADAPTIVE),
    *("local-muon", "ef21-muon", "muloco", "local-adamw", "diloco"),
)
MUON_RECIPE = ReadIf(
    "local.recipe",
    choices.ORTHOGONALIZED,
    "Muon's recipes read",
    "choose a recipe ...muon...",
)
ALIGNED = ReadIf("local.recipe", ("fedmuon-aligned",), "fedmuon-aligned reads")
FEDPROX = ReadIf("local.recipe", ("fedprox",), "fedprox reads")
FEDPER = ReadIf("local.recipe", ("fedper",), "fedper reads")
COMPRESSED = ReadIf("local.recipe", ("fedmuon-svd",), "fedmuon-svd reads")
DITTO = ReadIf("local.recipe", ("ditto",), "ditto reads")
SERVER_STEP = ReadIf(
    "local.recipe",
    (*ADAPTIVE, "scaffold", "diloco", "muloco"),
    "recipes whose server has a step size read",
)
SERVER_MOMENTUM = ReadIf(
    "local.recipe",
    ("fedavgm", "fedadam", "fedyogi", "diloco", "muloco"),
    "recipes whose server has momentum read",
)
SERVER_SQUARES = ReadIf("local.recipe", ("fedadam", "fedyogi"), "fedadam and fedyogi read")
SERVER_FLOOR = ReadIf("local.recipe", ADAPTIVE, f"{', '.join(ADAPTIVE)} read")
ANY_STEPS = ReadIf(
    "local.recipe",
    tuple(name for name in RECIPES if name not in (*PRIVATE, "fedmuon-aligned")),
    "recipes whose clients may take different numbers of steps read",
    "choose one without dp-, disk- and -aligned",
)
SENDS_STATES = ReadIf(
    "local.recipe",
    tuple(name for name in RECIPES if name not in SENDS_MODEL_ONLY),
    "recipes that send momenta read",
)
BIAS_CORRECTED = ReadIf(
    "local.recipe",
    tuple(name for name in RECIPES if name.endswith("muonbc")),
    "recipes ...-muonbc read",
)
LOCAL_MOMENTUM = ReadIf(
    "local.recipe",
    tuple(name for name in RECIPES if name not in NO_LOCAL_MOMENTUM),
    "recipes with local momentum read",
)
OTHER_SCHEDULE = ReadIf(
    "local.schedule",
    lambda name: name != "heavy-tailed",
    "schedules but heavy-tailed read",
    "choose another [local] schedule",
)
HEAVY_TAILED = ReadIf("local.schedule", ("heavy-tailed",), "the heavy-tailed schedule reads")
PRIVATE_RECIPE = ReadIf(
    "local.recipe", PRIVATE, "private recipes read", "choose a recipe dp-... or disk-..."
)
DISK_RECIPE = (
    PRIVATE_RECIPE,
    ReadIf(
        "local.recipe",
        tuple(name for name in RECIPES if name.startswith("disk-")),
        "recipes disk-... read",
    ),
)

# [orthogonalizer]
BY_MAP = {
    name: (MUON_RECIPE, ReadIf("orthogonalizer.name", (name,), f"the map {name} reads"))
    for name in NAMES["orthogonalizer.name"]
}
POLYNOMIAL_MAPS = (
    MUON_RECIPE,
    ReadIf(
        "orthogonalizer.name",
        ("newton-schulz", "randomized-polar"),
        "newton-schulz and randomized-polar read",
    ),
)
SEVERAL = tuple(name for name, one in COEFFICIENTS.items() if len(one.steps) > 1)
SEVERAL_STEPS = ReadIf("orthogonalizer.coefficients", SEVERAL, "sets of several steps read")
SHARDED = ReadIf("orthogonalizer.shards", lambda n: n > 1, "MuonBP reads", "set shards above 1")
WITH_EPSILON = ReadIf(
    "orthogonalizer.normalization",
    ("plus", "max", "aol"),
    "the normalizations plus, max and aol read",
)

# [privacy]
CLIENT_LEVEL = ReadIf("privacy.level", ("client",), "client level reads")
PRIVATE_RUN = replace(
    PRIVATE_RECIPE,
    readers="private recipes and client level read",
    fix="choose a recipe dp-... or disk-..., or set [privacy] level = 'client'",
    unless=CLIENT_LEVEL,
)
READ_AT_CLIENT_LEVEL = (None, PRIVATE_RUN, CLIENT_LEVEL)  # as the first condition of a key
WITHOUT_PRIVACY = (
    ReadIf(
        "local.recipe",
        tuple(name for name in RECIPES if name not in PRIVATE),
        "a run without privacy reads",
        "choose one without privacy (a private run keeps every round)",
    ),
    ReadIf(
        "privacy.level",
        "client".__ne__,
        "a run without privacy reads",
        "leave level = 'example' (a private run keeps every round)",
    ),
)
FINE_TUNED = (
    ReadIf(
        "data.client-test", bool, "tests per client read", "set [data] client-test, such as 0.2"
    ),
    ReadIf(
        "local.recipe",
        tuple(name for name in RECIPES if name not in (*PRIVATE, "ditto", "ef21-muon")),
        "recipes without privacy, whose clients step the shared model and no other read",
        "choose one without dp-, disk-, ditto and ef21-muon",
    ),
    WITHOUT_PRIVACY[1],
)
MATRIX_BLOCKS = (
    NETWORK_TASK,
    MUON_RECIPE,
    ReadIf(
        "local.route",
        ("all-matrices",),
        "runs in which Muon takes every matrix read",
        "set [local] route = 'all-matrices'",
    ),
    PRIVATE_RECIPE,
    ReadIf(
        "privacy.clipping",
        ("block", "automatic"),
        "clipping by blocks reads",
        "set clipping = 'block' or 'automatic'",
    ),
)
DISTRIBUTED_TRUST = ReadIf("privacy.trust", ("distributed",), "distributed trust reads")
QUANTILE = ReadIf("privacy.quantile", bool, "clipping at a quantile reads", "set quantile above 0")
POISSON_LOTS = PRIVATE_RECIPE, ReadIf("privacy.sampling", ("poisson",), "Poisson lots read")
CYCLIC_LOTS = PRIVATE_RECIPE, ReadIf("privacy.sampling", ("cyclic",), "lots in one order read")
BAND_OF_NOISE = ReadIf(
    "privacy.noise-correlation", ("sqrt-toeplitz", "momentum"), "noise correlated in a band reads"
)
BUFFERED_NOISE = ReadIf(
    "privacy.noise-correlation", ("blt", "blt-momentum"), "noise correlated by buffers reads"
)
FILTERED = ReadIf("privacy.kappa", lambda kappa: kappa < 1, "a filter reads", "set kappa below 1")
SECRET_NOISE = ReadIf(
    "privacy.insecure-reproducible-noise",
    not_,
    "secret noise reads",
    "set insecure-reproducible-noise = false",
)

# [devices]
CLOCK = ReadIf(
    "devices.mode", "none".__ne__, "runs with a virtual clock read", "set mode = 'synchronous'"
)
FEDBUFF = CLOCK, ReadIf("devices.mode", ("fedbuff",), "the mode fedbuff reads")
DEADLINE = CLOCK, ReadIf("devices.mode", ("deadline",), "the mode deadline reads")
HARDWARE_TRACE = (
    CLOCK,
    ReadIf(
        "devices.speeds",
        ("trace",),
        "speeds or bandwidths of a trace read",
        unless=ReadIf("devices.bandwidths", ("trace",), ""),
    ),
)
DRAWN_SPEED = CLOCK, ReadIf("devices.speeds", "trace".__ne__, "speeds without a trace read")
DRAWN_BANDWIDTH = (
    CLOCK,
    ReadIf("devices.bandwidths", "trace".__ne__, "bandwidths without a trace read"),
)
SPREADS = ("log-normal", "pareto")
DAYS = CLOCK, ReadIf("devices.availability", ("day-night",), "days and nights read")

# [engine] and [stability]
RAY_ENGINE = ReadIf("engine.name", ("ray",), "the engine ray reads")
REMOTE_CLIENTS = ReadIf("engine.name", ("ray", "deployment"), "engines with client processes read")
DRAWN_NEIGHBOURS = ReadIf(
    "stability.neighbours", ("own", "any", "worst"), "neighbours drawn or ranked read"
)


# [compression]
def _compressed_by(names: tuple[str, ...]) -> ReadIf:
    """That messages in one of the directions are compressed like this."""
    words = f"{', '.join(names)} read" + "s" * (len(names) == 1)
    down = ReadIf("compression.downlink", names, words)
    return ReadIf("compression.uplink", names, words, unless=down)


OF_A_SHARE = _compressed_by(("top-k", "random-k", "rows"))
OF_LEVELS = _compressed_by(("qsgd",))
OF_A_RANK = _compressed_by(("low-rank", "power"))
OF_POWER = ReadIf("compression.uplink", ("power",), "power reads")
CONTRACTIVE_UPLINK = ReadIf(
    "compression.uplink",
    ("top-k", "rows", "sign", "low-rank", "power"),
    "top-k, rows, sign, low-rank and power read",
)


# The tables

Downlink = Literal["none", "top-k", "random-k", "rows", "qsgd", "sign", "low-rank"]
Compressor = Literal[Downlink, "power"]  # `power` needs factors of the last message


class Data(Table):
    """Which samples, and how unevenly their labels fall on the clients."""

    name: Annotated[Text, AfterValidator(_named("data.name"))] = key(
        "mnist5k", "the source of samples; `fedmuon doctor` lists those on this machine"
    )
    train: Samples = key(4000, "n, the number of samples dealt to the clients", symbol="n")
    test: Samples = key(1000, "number of samples held out for test loss and accuracy")
    validation: Annotated[float, Field(ge=0, le=SAMPLES), AfterValidator(_share_or_count)] = key(
        0.0,
        "samples held out besides, by which settings are chosen: a share of `train`, or a number; "
        "0 holds out none",
        values="a share below 1, or a whole number",
    )
    client_test: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "share of each client's samples that is held out from its training and tests the final "
        "model per client: at least one sample of every client that has two; 0 holds out none",
    )
    alpha: Annotated[float, Field(ge=1 / LARGE)] = key(
        0.5,
        "Dirichlet concentration of the labels over clients: small values are uneven, inf is even",
        read_if=DIRICHLET_PARTITION,
        symbol="α",
    )
    minimum: Samples = key(
        10,
        "minimum number of samples dealt to a client: dirichlet and quantity fill small clients up "
        "from the largest; other partitions that give fewer are rejected; lowered for small data "
        "sets of your own",
    )
    center: Literal["none", "public"] = key(
        "none",
        "what is subtracted from each sample before it is scaled: none, or the mean of public "
        "samples, which are the last ones of the test part that the source comes with and are "
        "neither trained on nor tested on",
    )
    center_samples: Samples = key(5000, "the number of these public samples", read_if=PUBLIC_CENTER)
    normalize: Literal["auto", "unit", "ball", "pixels", "tokens"] = key(
        "auto",
        "scaling of each sample by itself: unit divides by the norm, ball does so where the norm "
        "exceeds 1, pixels divides arrays of uint8 by 255, tokens changes nothing; auto is tokens "
        "for text, unit for the matrix task and pixels for networks",
    )
    folder: Text = key(
        "",
        "folder with a source's files, if not the usual one; the file of npz, csv, parquet",
        read_if=FILE_SOURCE,
        values="a path",
    )
    target: Text = key(
        "",
        "the column with the labels in a table that you give, or the entry with them in dict "
        "items; empty: dicts have one of the usual names, such as label",
        read_if=OWN_SOURCE,
        values="a name",
    )
    context: Count = key(64, "length of a text window in tokens", read_if=TEXT_SOURCE)
    tokenizer: Text = key(
        "",
        "a folder with GPT-2's tokenizer; empty: tokens are bytes",
        read_if=TOKENIZED_SOURCE,
        values="a path",
    )
    pad_token: bool = key(
        False,
        "whether windows are filled up with one more token, [PAD], whose embedding starts at the "
        "mean of the others if there are `task.weights` (000, Appendix D); else with END",
        read_if=TABLE_SOURCE,
    )
    dimension: Samples = key(20, "features of a synthetic sample", read_if=SYNTHETIC_SOURCE)
    classes: Annotated[int, Field(ge=2, le=10**6)] = key(
        4, "number of labels of synthetic samples", read_if=SYNTHETIC_SOURCE
    )
    options: Options = ()

    @property
    def validation_samples(self) -> int:
        """The number of validation samples."""
        share = 0 < self.validation < 1
        return max(1, round(self.validation * self.train)) if share else int(self.validation)


class Federation(Table):
    """N clients, K of them a round, R rounds (001, Algorithm 1)."""

    clients: Annotated[int, Field(ge=1, le=CLIENTS)] = key(
        20, "N, the number of clients", symbol="N"
    )
    per_round: Annotated[int, Field(ge=1, le=CLIENTS)] = key(
        5,
        "K, the clients of a round, drawn anew each time; with fewer than 5 clients, all take part",
        values="1 to `clients`",
        symbol="K",
    )
    rounds: Annotated[int, Field(ge=1, le=ROUNDS)] = key(50, "R, the number of rounds", symbol="R")
    risk_weights: Literal["size", "uniform"] = key(
        "size",
        "weights p_i of the clients in the reported and bounded train loss: n_i / n, or 1 / N; "
        "they do not change the server's average (see `aggregate`)",
    )
    aggregate: Annotated[Text, AfterValidator(_named("federation.aggregate"))] = key(
        "mean",
        "how the server combines a round's models and states; bounds and the correction of "
        "…-muonbc hold for mean and by-samples",
    )
    partition: Annotated[Text, AfterValidator(_named("federation.partition"))] = key(
        "dirichlet", "how samples are dealt to the clients"
    )
    seed: Natural = key(0, "random seed for everything except secret noise")
    options: Options = ()


class TaskTable(Table):
    """What is learned: the classifier with proved constants, or a network with cross-entropy."""

    name: Annotated[Text, AfterValidator(_named("task.name"))] = key(
        "matrix",
        "the controlled task of 001, whose constants are proved, or the cross-entropy of a network",
    )
    model: Annotated[Text, AfterValidator(_named("task.model"))] = key(
        "cnn", "the network", read_if=OUR_NETWORKS
    )
    width: Count = key(
        128, "length of the decoder's vectors", read_if=DECODER_TASK, values="a multiple of `heads`"
    )
    depth: Annotated[int, Field(ge=1, le=256)] = key(
        4, "number of the decoder's blocks", read_if=DECODER_TASK
    )
    heads: Count = key(4, "number of its attention heads", read_if=DECODER_TASK)
    initial: Literal["gaussian", "zero"] = key(
        "gaussian",
        "X⁰: entries of variance 1/d, or 0, for which bounds are tighter",
        read_if=MATRIX_TASK,
    )
    weights: Text = key(
        "",
        "a .safetensors file, or a folder of them, to start from",
        read_if=DECODER_TASK,
        values="a path",
    )
    head: Literal["tied", "untied"] = key(
        "tied",
        "whether the decoder's last layer is the matrix of the token embeddings, as in GPT-2, or a "
        "parameter of its own, which starts from a copy of it if `weights` have none (000, "
        "Appendix D)",
        read_if=DECODER_TASK,
    )
    positions: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "number of the decoder's positions, at least `data.context`; 0 means `data.context`; GPT-2 "
        "has 1024",
        read_if=DECODER_TASK,
        values="0, or `data.context` and more",
    )
    lora_rank: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "r, the rank of LoRA adapters of the query, key and value projections; only they are "
        "trained, and `weights` stay as they are and count as public; a resumed run needs the "
        "same weights. 0 trains all parameters. For Muon to train all adapters, set `local.route "
        '= "all-matrices"`',
        read_if=DECODER_TASK,
        values="0 to `width`",
    )
    options: Options = ()


class Local(Table):
    """A client's round: E steps of a named chain."""

    recipe: Annotated[Text, AfterValidator(_named("local.recipe"))] = key(
        "fedmuon", "the steps of a client, and how the server uses their average"
    )
    steps: Count = key(5, "E, the local steps of a round", symbol="E")
    epochs: Annotated[float, Field(ge=0, le=1e6)] = key(
        0.0,
        "passes over a client's samples in a round instead of `steps`, so that clients with more "
        "samples take more steps; 0 takes `steps`",
        read_if=ANY_STEPS,
    )
    batch: Annotated[int, Field(ge=0, le=SAMPLES)] = key(0, "samples per step; 0 is the full batch")
    lr: Positive = key(1.0, "η, the step size", symbol="η")
    momentum: Annotated[float, Field(ge=0, lt=1)] = key(
        0.9, "β, the decay of the momentum", read_if=(LOCAL_MOMENTUM, OTHER_SCHEDULE), symbol="β"
    )
    momentum_form: Literal["ema", "ema-nesterov", "polyak", "nesterov"] = key(
        "ema",
        "βM + (1 − β)G (001) or βM + G (000, 002), each with or without Nesterov's look-ahead",
        read_if=LOCAL_MOMENTUM,
    )
    weight_decay: Amount = key(0.0, "decoupled weight decay: X also moves by −lr · decay · X")
    schedule: Annotated[Text, AfterValidator(_named("local.schedule"))] = key(
        "constant", "factor of lr in each round; heavy-tailed sets lr and momentum by 002"
    )
    tail_index: Annotated[float, Field(ge=0, le=2)] = key(
        0.0,
        "α of 002, the tail index of the noise; 0 if unknown",
        read_if=HEAVY_TAILED,
        values="0, or above 1 to 2",
    )
    alignment: Share = key(
        0.5,
        "α of 001, Remark 3.2: a step is (1 − α) Orth(M) plus α times the last global direction",
        read_if=ALIGNED,
    )
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = key(
        0.9, "β, the decay of the server's momentum", read_if=SERVER_MOMENTUM
    )
    server_lr: Amount = key(
        0.0,
        "step size of the server; 0 means 0.1 for fedadam, fedyogi and fedadagrad, 1 for scaffold "
        "and 0.7 for diloco and muloco",
        read_if=SERVER_STEP,
    )
    server_memory: Annotated[float, Field(ge=0, lt=1)] = key(
        0.99, "β₂, the decay of the server's squares", read_if=SERVER_SQUARES
    )
    tau: Positive = key(
        0.001,
        "τ: the server's step is server-lr · m / (√v + τ), and v begins at τ²",
        read_if=SERVER_FLOOR,
        symbol="τ",
    )
    proximal: Amount = key(
        0.01, "μ of FedProx: a step also goes −lr · μ (x − X)", read_if=FEDPROX, symbol="μ"
    )
    personal: Text = key(
        "",
        "patterns of the names of parameters that never leave a client, such as `head.*`, with "
        "commas between them; `routes.txt` lists the names",
        read_if=FEDPER,
        values="patterns with * and ?",
    )
    rank: Count = key(
        8,
        "r, the rank of the momentum in messages; matrices whose factors would be no smaller are "
        "sent as they are",
        read_if=COMPRESSED,
        symbol="r",
    )
    personal_weight: Amount = key(
        0.1,
        "λ of Ditto: the model of a client also goes −lr · λ (v − X); 0 is local training",
        read_if=DITTO,
        symbol="λ",
    )
    route: Literal["hidden", "all-matrices"] = key(
        "hidden",
        "which parameters of a network are orthogonalized: matrices except first and last layer, "
        "embeddings and norms (or the largest matrix, if that leaves none), or all matrices; "
        "`routes.txt` lists them",
        read_if=(NETWORK_TASK, MUON_RECIPE),
    )
    qkv: Literal["split", "whole"] = key(
        "split",
        "whether query, key and value projections that share one parameter are orthogonalized as "
        "three matrices, or as one",
        read_if=(NETWORK_TASK, MUON_RECIPE),
    )
    aux: Literal["sgd", "adamw"] = key(
        "sgd",
        "the step of all other parameters: −aux-lr · M, or AdamW's, which federated recipes start "
        "anew each round",
        read_if=(NETWORK_TASK, MUON_RECIPE),
    )
    aux_lr: Amount = key(
        0.0,
        "step size of the other parameters; 0 means 0.05 for sgd and 0.001 for adamw; the "
        "resolved config has the number",
        read_if=(NETWORK_TASK, MUON_RECIPE),
    )
    adjust: Literal["none", "original", "match-rms", "scion", "polargrad"] = key(
        "none",
        "scale of an orthogonalized [m, n] step: 1; √max(1, m/n) or 0.2 √max(m, n), as in "
        "torch.optim.Muon; √(m/n) (scion); or ⟨M, Orth(M)⟩, the nuclear norm of M if Orth is exact "
        "(polargrad), for which no bound holds",
        read_if=MUON_RECIPE,
    )
    options: Options = ()


class OrthogonalizerTable(Table):
    """The map Orth and its parameters; each map reads its own."""

    name: Annotated[Text, AfterValidator(_named("orthogonalizer.name"))] = key(
        "smoothed-polar", "the orthogonalizer", read_if=MUON_RECIPE
    )
    lambda_: Annotated[float, Field(ge=1e-300, le=LARGE)] = key(
        0.0001,
        "λ: σ becomes σ / √(σ² + λ); the Lipschitz constant is 1 / √λ",
        read_if=BY_MAP["smoothed-polar"],
        symbol="λ",
    )
    steps: Annotated[int, Field(ge=0, le=100)] = key(
        5, "q, the number of polynomial steps", read_if=POLYNOMIAL_MAPS, symbol="q"
    )
    coefficients: Text = key(
        "cubic",
        "the polynomials",
        read_if=POLYNOMIAL_MAPS,
        values="cubic, quintic, jordan, you, cans, turbo, cubic5, deepseek-v4, polar-express, "
        "polar-express-e2, polar-express-e3, taylor-1 to taylor-6",
    )
    safety: Annotated[float, Field(ge=1, le=2)] = key(
        1.0,
        "all steps of the set but its last take x / `safety` instead of x; Polar Express uses 1.01 "
        "so that rounding does no harm, and `polar-express` contains it already",
        read_if=(*POLYNOMIAL_MAPS, SEVERAL_STEPS),
    )
    eps: Positive = key(
        1e-7, "ε of the normalization", read_if=(*BY_MAP["newton-schulz"], WITH_EPSILON)
    )
    normalization: Literal["plus", "max", "unit", "aol"] = key(
        "plus",
        "what M is divided by first: ‖M‖ + ε (001), max(‖M‖, ε) (torch), max(‖M‖, 1) (000); or "
        "each row of the shorter side by the root of Σⱼ |M Mᵀ|ᵢⱼ (aol, Turbo-Muon), which has no "
        "Lipschitz constant, hence no bound",
        read_if=BY_MAP["newton-schulz"],
    )
    products: Literal["full", "bfloat16"] = key(
        "full",
        "the numbers in which Newton–Schulz multiplies: those of the run (full), or bfloat16, as "
        "torch.optim.Muon does, which is faster on GPUs and on processors with AMX, has a relative "
        "error near 0.01, and no Lipschitz constant, hence no bound",
        read_if=BY_MAP["newton-schulz"],
    )
    sigma: Positive = key(
        0.01,
        "σ, the standard deviation of the smoothing noise",
        read_if=BY_MAP["gaussian-smoothed-sign"],
    )
    clip_level: Positive = key(
        0.1, "γ, below which singular values are scaled", read_if=BY_MAP["clipped-sign"]
    )
    rank: Count = key(
        5, "r, the rank of the sketch", read_if=BY_MAP["randomized-polar"], symbol="r"
    )
    oversample: Annotated[int, Field(ge=0, le=10**6)] = key(
        2, "additional columns of the sketch", read_if=BY_MAP["randomized-polar"]
    )
    power: Few = key(1, "h, the number of power iterations", read_if=BY_MAP["randomized-polar"])
    sketch: Literal["gaussian", "kaczmarz"] = key(
        "gaussian", "how the sketch is drawn", read_if=BY_MAP["randomized-polar"]
    )
    row_memory: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "β₂ of NorMuon: each row of an orthogonalized matrix is divided by the root of a running "
        "mean of its squares, and the matrix keeps its norm; 0 does not",
        read_if=MUON_RECIPE,
        values="0 to below 1; NorMuon has 0.95",
    )
    shards: Annotated[int, Field(ge=1, le=1024)] = key(
        1,
        "MuonBP: the pieces of a matrix, cut along its longer side, that are orthogonalized alone "
        "in all steps that are not whole",
        read_if=MUON_RECIPE,
    )
    full_every: Count = key(
        5,
        "P of MuonBP: each P-th step of a round, from its first on, is a whole one",
        read_if=(MUON_RECIPE, SHARDED),
        symbol="P",
    )
    options: Options = ()

    @property
    def polynomials(self) -> Coefficients:
        """The coefficients with their safety factor, if it is read."""
        given = self.coefficients
        return with_safety(given, self.safety) if given in SEVERAL else given


class Privacy(Table):
    """What dp-* and disk-* release, and what others do at client level.

    Recipes dp-* and disk-* have example-level privacy within each client; at level `client` `bound`
    is that of a client's whole update, `noise` times it is the deviation of a round's sum.

    Each example's gradient is clipped to `bound` in every matrix block (the auxiliary parameters
    are one block), in one norm (flat), or scaled to it (automatic); a lot's sum over `lot` has
    noise of standard deviation `noise` times `bound` over `lot` in every entry. A client's rate is
    `lot` over its samples, or over a public `population`, or a public `rate`.
    """

    clipping: Literal["block", "flat", "automatic", "automatic-flat"] = key(
        "block",
        "how each example's gradient is bounded: each matrix block is clipped (block), all "
        "parameters as one vector (flat, as in Opacus), or scaled to the bound (automatic). With m "
        "blocks, block needs √m times the noise of flat for the same ε",
        read_if=PRIVATE_RECIPE,
    )
    blocks: Literal["routed", "hidden"] = key(
        "routed",
        "which matrices are blocks of their own, with all other parameters as one block: those "
        "that Muon orthogonalizes, or only hidden ones, as in 000, Appendix D, where Muon also "
        "takes embeddings and the head",
        read_if=MATRIX_BLOCKS,
    )
    bound: Annotated[float, Field(ge=1 / LARGE)] = key(
        1.0,
        "C, the clipping bound; inf clips nothing; at client level it bounds a client's whole "
        "update",
        read_if=PRIVATE_RUN,
        symbol="C",
    )
    quantile: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "share of gradients that should not be clipped: C starts at `bound` and follows this "
        "quantile by noisy counts, which `noise` accounts for; 0 keeps C fixed",
        read_if=PRIVATE_RECIPE,
    )
    quantile_rate: Annotated[float, Field(ge=1 / LARGE, le=10)] = key(
        0.2,
        "change of ln C for a share that is off by 1; C stays between 10⁻¹⁵ and 10¹⁵",
        read_if=(PRIVATE_RECIPE, QUANTILE),
    )
    count_noise: Amount = key(
        0.0,
        "noise of a lot's count of unclipped gradients; 0 means the larger of lot / 20 and `noise`",
        read_if=(PRIVATE_RECIPE, QUANTILE),
    )
    noise: Amount = key(
        0.0,
        "σ, the noise multiplier: each entry of a lot's mean has noise of σC / lot; at client "
        "level a round's sum has noise of σC",
        read_if=PRIVATE_RUN,
        symbol="σ",
    )
    lot: Annotated[float, Field(ge=1e-3, le=SAMPLES)] = key(
        64.0,
        "expected samples of a Poisson lot, or samples of a lot in a fixed order",
        read_if=PRIVATE_RECIPE,
    )
    epsilon: Annotated[float, Field(ge=0, le=1e6)] = key(
        0.0,
        "target ε: determines `noise` if that is 0; the resolved config has the number",
        read_if=PRIVATE_RUN,
    )
    delta: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "δ of the account; 0 means n^−1.1 and at most 10⁻⁵, where n is the samples of the largest "
        "client or the public `population`, and at client level the number of clients",
        read_if=PRIVATE_RUN,
    )
    level: Literal["example", "client"] = key(
        "example",
        "what is protected: single examples within a client, or whole clients, for recipes that "
        "average their models (and momenta)",
    )
    trust: Literal["central", "local", "distributed"] = key(
        "central",
        "who adds the noise: the server; each client all of it; or each client a share of it. "
        "With shares, masks that cancel let the server learn only the sum of updates and noise "
        "(needs cohorts = fixed; outside `inline` also [faults] policy = strict and retries = 0)",
        read_if=CLIENT_LEVEL,
    )
    honest: Annotated[float, Field(gt=0, le=1)] = key(
        0.5,
        "share of a cohort that adds its noise and hides it from the server: H = ⌊`honest` · K⌋ "
        "of the K shares of noise count, at least one's own, and ε is that of σ √(H / K)",
        read_if=(CLIENT_LEVEL, DISTRIBUTED_TRUST),
    )
    state_weight: Positive = key(
        1.0,
        "w of a client's update (X_k − X, w (M_k − M)): how much of the bound momenta use; their "
        "noise is σC / w",
        read_if=(CLIENT_LEVEL, SENDS_STATES),
    )
    cohorts: Literal["poisson", "fixed"] = key(
        "poisson",
        "who takes part: each client with probability per-round / clients, which amplifies "
        "privacy and must stay secret, or exactly per-round of them, which may be known",
        read_if=CLIENT_LEVEL,
    )
    adjacency: Literal["zero-out", "add-remove", "replace-one"] = key(
        "zero-out",
        "neighbouring data sets: a sample is replaced by 0, is left out, or is replaced by "
        "another; add-remove needs a public `population` or `rate`, and is the default with one",
        read_if=PRIVATE_RECIPE,
    )
    sampling: choices.Sampling = key(
        "poisson",
        "how samples enter lots: each by chance, or in lots cut from an order that is drawn for "
        "each epoch (shuffle) or once (cyclic); lots from an order are accounted for without "
        "amplification",
        read_if=PRIVATE_RECIPE,
    )
    max_lot: Annotated[int, Field(ge=0, le=SAMPLES)] = key(
        0,
        "maximum samples of a Poisson lot: of a larger one so many are kept, drawn by chance, and "
        "δ counts how often this may happen; at least `lot`, 0 for no maximum",
        read_if=POISSON_LOTS,
    )
    noise_correlation: choices.NoiseCorrelation = key(
        "none",
        "DP-FTRL: the noise of a step cancels part of the noise of earlier steps, so that sums of "
        "gradients have less (sqrt-toeplitz and blt), or so that the momentum that dp-muon "
        "orthogonalizes has less (momentum and blt-momentum); blt keeps a few buffers, which are "
        "optimized for the steps of the run; for one client and one process, without resuming, "
        "because past noise stays in memory",
        read_if=CYCLIC_LOTS,
    )
    band: Count = key(
        8,
        "number of correlated steps, the current one included; needs memory for one model fewer; "
        "best near the number of lots in an epoch",
        read_if=(*CYCLIC_LOTS, BAND_OF_NOISE),
    )
    buffers: Annotated[int, Field(ge=1, le=8)] = key(
        2,
        "number of buffers of correlated noise, each the size of the model; more than 3 hardly "
        "help",
        read_if=(*CYCLIC_LOTS, BUFFERED_NOISE),
    )
    population: Annotated[int, Field(ge=0, le=SAMPLES)] = key(
        0,
        "a public number of samples of a client, for rates lot / population; 0 uses each client's "
        "own number",
        read_if=PRIVATE_RECIPE,
    )
    rate: Annotated[float, Field(ge=0, le=1)] = key(
        0.0,
        "a public sampling rate of every sample; sums are divided by `lot` all the same; 0 means "
        "lot / population",
        read_if=PRIVATE_RECIPE,
    )
    kappa: Annotated[float, Field(gt=0, le=1)] = key(
        0.7, "κ, the gain of the filter (003)", read_if=DISK_RECIPE
    )
    lookahead: Annotated[float, Field(ge=1 / LARGE)] = key(
        0.5,
        "γ of 003, how far the filter looks ahead; inf takes gradients at the model alone, which "
        "is a low-pass filter of first order (DOPPLER)",
        read_if=(*DISK_RECIPE, FILTERED),
    )
    probes: Annotated[int, Field(ge=1, le=1024)] = key(
        1,
        "number of antithetic pairs of the bias correction (000)",
        read_if=(PRIVATE_RECIPE, BIAS_CORRECTED),
    )
    noise_source: choices.NoiseSource = key(
        "secure",
        "source of lots and noise: a key stream (AES-256 in counter mode, with a key from the "
        "system's entropy for every step), or NumPy's PCG64 with a seed from the system, which "
        "certifies nothing",
        read_if=(PRIVATE_RUN, SECRET_NOISE),
    )
    arithmetic: choices.Arithmetic = key(
        "auto",
        "noise in floating point, or exact discrete Gaussian noise on a lattice, whose low bits "
        "reveal nothing; auto is grid for secret noise, and continuous for repeatable noise, "
        "correlated noise and bounds that follow a quantile; distributed trust always uses "
        "integers",
        read_if=PRIVATE_RUN,
    )
    insecure_reproducible_noise: bool = key(
        False,
        "draw noise and lots from the run's seed, for tests: this protects nobody",
        read_if=PRIVATE_RUN,
    )

    @model_validator(mode="before")
    @classmethod
    def _with_adjacency(cls, keys: Any) -> Any:
        """With a public population or rate, the adjacency is add-remove unless it is set."""
        public = isinstance(keys, Mapping) and (keys.get("population") or keys.get("rate"))
        return {"adjacency": "add-remove", **keys} if public else keys

    @property
    def public_rate(self) -> float:
        """The chance of every sample, whoever has how many; 0 if it is lot / n_i."""
        return self.rate or (min(1.0, self.lot / self.population) if self.population else 0.0)

    @property
    def public_population(self) -> float:
        """The samples of a client as far as all may know; 0 if it is its own number."""
        return self.lot / self.public_rate if self.public_rate else 0.0


class Engine(Table):
    """Where the arithmetic happens. `kernel = auto` measures the GEMM kernels of this machine."""

    name: Literal["inline", "ray", "deployment"] = key(
        "inline", "this process, Ray's workers, or a SuperLink and SuperNodes"
    )
    dtype: Literal["float32", "float64"] = key(
        "float32",
        "precision of all computation; `fedmuon stability` uses float64 if this is not set",
    )
    device: Text = key(
        "auto", "auto is cuda where it is available", values="auto, cpu, cuda, cuda:1, …"
    )
    kernel: Literal["torch", "channels-last", "numpy", "fused", "auto"] = key(
        "torch",
        "library of matrix products; fused compiles thin ones with numba; auto uses that for long "
        "runs, and otherwise measures which library is fastest on this machine",
        read_if=MATRIX_TASK,
    )
    cpus_per_client: Positive = key(
        1.0,
        "CPUs of a worker, and its threads (at least 1); as many workers run as fit",
        read_if=RAY_ENGINE,
    )
    gpus_per_client: Amount = key(
        0.0, "GPUs of a worker; a fraction shares one", read_if=RAY_ENGINE
    )
    ray_address: Text = key(
        "",
        "address of a running cluster; empty starts a local Ray",
        read_if=RAY_ENGINE,
        values="an address",
    )


class Compression(Table):
    """How updates and models are compressed in messages. What a client sends is its update: what
    it returns minus what it received. `rounds.jsonl` counts the bytes."""

    uplink: Compressor = key(
        "none",
        "how clients compress their updates: top-k, random-k and rows send a `share` of the "
        "entries or rows, the largest or random ones; qsgd rounds at random to `levels`; sign "
        "sends one bit per entry; low-rank and power send factors of `rank`, by a singular value "
        "decomposition or by power iteration from the last message. random-k and qsgd are unbiased",
    )
    downlink: Downlink = key(
        "none",
        "how the server compresses the model and the states that it sends; the server's own model "
        "stays exact until clients return theirs",
    )
    share: Annotated[float, Field(gt=0, le=1)] = key(
        0.1, "k / d, the share of entries or rows that are sent", read_if=OF_A_SHARE
    )
    levels: Annotated[int, Field(ge=1, le=(1 << 15) - 1)] = key(
        7, "s, the levels of QSGD; an entry has ⌈log2(2 s + 1)⌉ bits", read_if=OF_LEVELS, symbol="s"
    )
    rank: Count = key(
        4,
        "r; matrices whose factors would be no smaller are sent as they are",
        read_if=OF_A_RANK,
        symbol="r",
    )
    iterations: Annotated[int, Field(ge=1, le=100)] = key(
        1, "power iterations for each message", read_if=OF_POWER
    )
    feedback: Literal["none", "error", "ef21"] = key(
        "none",
        "what clients do with what compression lost: nothing; add it to the next update (EF14); or "
        "send differences to an estimate that the server keeps, too (EF21)",
        read_if=CONTRACTIVE_UPLINK,
    )


class Faults(Table):
    """What happens when a participant gives no sound reply (engines `ray` and `deployment`).

    `strict` asks again and then stops, resumable; `drop` averages over those who answered, which
    the run says and the bound no longer covers.
    """

    policy: Literal["strict", "drop"] = key(
        "strict",
        "ask again and then stop, resumable; or average over those who answered, without a bound",
        read_if=REMOTE_CLIENTS,
    )
    retries: Few = key(2, "how often a participant is asked again", read_if=REMOTE_CLIENTS)
    deadline: Seconds = key(600.0, "seconds for one attempt", read_if=REMOTE_CLIENTS)
    patience: Seconds = key(
        120.0, "seconds to wait for all nodes at the start", read_if=REMOTE_CLIENTS
    )


Distribution = Literal["constant", "log-normal", "pareto", "trace"]


class Devices(Table):
    """A virtual clock: simulated devices, and how long each takes for a round.

    A client takes latency + bytes / bandwidth-down + steps · batch · cost / speed + bytes /
    bandwidth-up seconds. The times are simulated, so they are the same on every machine and engine.
    """

    mode: Literal["none", "synchronous", "deadline", "fedbuff"] = key(
        "none",
        "none has no clock; synchronous waits for all clients of a round; deadline uses the first "
        "`per-round` replies of `select` clients, or those that arrive within `deadline`; fedbuff "
        "keeps `per-round` clients at work and updates the model with every `buffer` replies, also "
        "with those that began with an older model (Nguyen et al. 2022)",
    )
    select: Annotated[int, Field(ge=0, le=CLIENTS)] = key(
        0,
        "K′, the clients that are asked in a round, of which the first `per-round` count; 0 asks "
        "`per-round`",
        values="0, or `per-round` to `clients`",
        read_if=DEADLINE,
    )
    deadline: Amount = key(
        0.0,
        "simulated seconds after which a round ends; 0 has no deadline",
        read_if=DEADLINE,
    )
    buffer: Annotated[int, Field(ge=0, le=CLIENTS)] = key(
        0,
        "B, the replies of an update of the model; 0 is `per-round`",
        values="0 to `per-round`",
        read_if=FEDBUFF,
    )
    latency: Amount = key(
        0.1, "simulated seconds of each client and round, whatever it does", read_if=CLOCK
    )
    cost: Positive = key(1.0, "operations for one sample in one local step", read_if=CLOCK)
    speeds: Distribution = key(
        "constant",
        "how speed differs from client to client; pareto has a few very slow clients; trace reads "
        "a file",
        read_if=CLOCK,
    )
    speed: Positive = key(
        100.0,
        "operations per second: of all (constant), the median (log-normal) or the fastest (pareto)",
        read_if=DRAWN_SPEED,
    )
    speed_spread: Amount = key(
        0.5,
        "standard deviation of the logarithm (log-normal), or 1 / shape (pareto)",
        read_if=(CLOCK, ReadIf("devices.speeds", SPREADS, "speeds that are drawn read")),
    )
    bandwidths: Distribution = key(
        "constant", "the same choices for bandwidths; down and up are drawn apart", read_if=CLOCK
    )
    bandwidth_down: Positive = key(
        1e6,
        "bytes per second from the server, as `speed`",
        read_if=DRAWN_BANDWIDTH,
    )
    bandwidth_up: Positive = key(
        1e6,
        "bytes per second to the server, as `speed`",
        read_if=DRAWN_BANDWIDTH,
    )
    bandwidth_spread: Amount = key(
        0.5,
        "the same as `speed-spread`, for bandwidths",
        read_if=(CLOCK, ReadIf("devices.bandwidths", SPREADS, "bandwidths that are drawn read")),
    )
    trace: Text = key(
        "",
        "a CSV file with the columns client, speed, bandwidth-down, bandwidth-up",
        read_if=HARDWARE_TRACE,
        values="a path",
    )
    availability: Literal["always", "bernoulli", "day-night", "trace"] = key(
        "always",
        "which clients can be asked in a round: all; each by chance; those whose local time is "
        "within the first part of a day; those in an interval of a file, which repeats",
        read_if=CLOCK,
    )
    available: Annotated[float, Field(gt=0, le=1)] = key(
        0.5,
        "the chance (bernoulli) or the share of a day (day-night) for which a client is there",
        read_if=(
            CLOCK,
            ReadIf(
                "devices.availability", ("bernoulli", "day-night"), "bernoulli and day-night read"
            ),
        ),
    )
    day: Positive = key(
        86400.0,
        "simulated seconds of a day; the clients' time zones are uniform over it",
        read_if=DAYS,
    )
    availability_trace: Text = key(
        "",
        "a CSV file with the columns client, start, end in simulated seconds; it repeats after its "
        "last end",
        read_if=(
            CLOCK,
            ReadIf("devices.availability", ("trace",), "availability by a trace reads"),
        ),
        values="a path",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, "the chance that a client is lost during a round and never replies", read_if=CLOCK
    )

    @property
    def reads_trace(self) -> bool:
        """Whether speeds or bandwidths come from `trace`."""
        return "trace" in (self.speeds, self.bandwidths)


C_HP = ("explicit", "sharp", "variance")


def _constant(value: float | str) -> float | str:
    """C_hp: a number that the user answers for, or the name of a proved form."""
    known = value in C_HP if isinstance(value, str) else 0 < value < math.inf
    if not known:
        raise ValueError(
            f"[stability] c-hp = {value!r} is refused: give a positive number, or one of "
            f"{', '.join(C_HP)}"
        )
    return value


class Stability(Table):
    """Which neighbours `fedmuon stability` runs, and what its bound stands on."""

    trials: Count = key(10, "number of neighbours", read_if=DRAWN_NEIGHBOURS)
    neighbours: Literal["own", "any", "worst", "all"] = key(
        "own",
        "replaced samples: own draws a replacement like the client's own samples, any like those "
        "of any client; worst ranks all samples times up to 2,048 held-out replacements by "
        "derivatives, and runs the `trials` worst exactly, with as many drawn ones "
        "(`predicted.csv`); all replaces each sample once, the census",
    )
    delta: Chance = key(0.05, "δ, the probability with which the bound may fail")
    lipschitz: Literal["paper", "sharp"] = key(
        "sharp",
        "which constant of the orthogonalizer: the one printed in 001 (paper), or the one proved "
        "here, which is never larger (sharp)",
    )
    constants: Literal["ball", "global"] = key(
        "ball",
        "constants of the task: ball takes the suprema over the ball around X⁰ that the iterates "
        "cannot leave, step by step; global takes those over all models, as in 001. Always "
        "global: bounds without a run unless X⁰ = 0, and those with alignment, weight decay, your "
        "own orthogonalizer or your own Lg",
        read_if=MATRIX_TASK,
    )
    realized: bool = key(
        False,
        "write `realized.csv`: how far each neighbour can be from this very run, by the run's own "
        "gradients and curvature",
        read_if=MATRIX_TASK,
    )
    c_hp: Annotated[float | str, AfterValidator(_constant)] = key(
        "explicit",
        "C_hp of Theorem 4.1: one of three proved forms, or your own number (then H and G have δ/2 "
        "each, as printed). By variance, H reads the training losses of the finished run in place "
        "of the range B, and has 0.9 δ beside G's 0.1 δ",
        values="explicit, sharp, variance, or a number above 0",
    )
    alpha_smoothing: Chance = key(
        0.05,
        "the probability with which smoothing may clip (001, Corollary D.11)",
        read_if=BY_MAP["gaussian-smoothed-sign"],
    )


class Output(Table):
    """How often a run looks at itself, in rounds (the last one always counts), and who hears."""

    evaluate_every: Samples = key(
        10,
        "rounds between two evaluations of train and test loss; the last round is always "
        "evaluated, and `client_loss` is of every round",
    )
    fine_tune: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "local steps that each client takes from the final model before it tests its own samples; "
        "0 tests no tuned models",
        read_if=FINE_TUNED,
    )
    checkpoint_every: Samples = key(10, "rounds between two checkpoints", read_if=WITHOUT_PRIVACY)
    callback: Annotated[Text, AfterValidator(_named("output.callback"))] = key(
        "none", "what is called after every round"
    )
    clients: bool = key(
        False,
        "write `clients.jsonl`: for each client and round that it took part in, its losses, drift, "
        "momentum and cosine to the mean update; not in private runs",
    )
    options: Options = ()


TABLES_OF_A_CONFIG: dict[str, type[Table]] = {
    "data": Data,
    "federation": Federation,
    "task": TaskTable,
    "local": Local,
    "orthogonalizer": OrthogonalizerTable,
    "privacy": Privacy,
    "engine": Engine,
    "compression": Compression,
    "faults": Faults,
    "devices": Devices,
    "stability": Stability,
    "output": Output,
}
FIELDS: dict[str, dict[str, Any]] = {  # a pydantic FieldInfo by table and key as files spell it
    table: {field.alias or name: field for name, field in model.model_fields.items()}
    for table, model in TABLES_OF_A_CONFIG.items()
}

# Keys that are newer than the locks of suites, in which they are left out at their defaults.
LATER = tuple(
    (table, key)
    for table, keys in {
        "local": ("epochs", "proximal", "server-lr", "server-memory", "tau", "personal",
                  "personal-weight", "rank", "qkv"),
        "task": ("head", "positions"),
        "privacy": ("blocks", "buffers", "max-lot"),
        "output": ("fine-tune", "clients"),
        "compression": ("uplink", "downlink", "share", "levels", "rank", "iterations",
                        "feedback"),
        "orthogonalizer": ("safety", "products", "row-memory", "shards", "full-every"),
        "data": ("validation", "client-test", "target", "center", "center-samples",
                 "pad-token"),
        "devices": tuple(FIELDS["devices"]),
    }.items()
    for key in keys
)  # fmt: skip

# Key -> when it is read. Options have no declaration: the object that they are for asks for them.
NEEDS: dict[str, dict[str, tuple[ReadIf, ...]]] = {
    table: {
        name: field.json_schema_extra["read_if"] if field.json_schema_extra else ()
        for name, field in fields.items()
    }
    for table, fields in FIELDS.items()
}


# Which keys of a config are read, and the message that rejects one that nothing reads


def reads(config: Config, name: str) -> bool:
    """Whether anything reads the key `table.key` under the rest of the config."""
    return _unmet(config, name) is None


def _unmet(config: Config, name: str) -> ReadIf | None:
    """The first condition that keeps a key from being read."""
    table, _, key = name.partition(".")
    if table == "task" and key != "model" and is_own(config.task.name):
        return None  # which may ask for any
    return next((need for need in NEEDS[table][key] if not need.met(config)), None)


def biased_participation(config: Config) -> bool:
    """Whether availability, lost clients or a deadline select who takes part in a round, so that
    it is not sampled uniformly."""
    table = config.devices
    selects = table.mode != "none" and (table.availability != "always" or table.dropout > 0)
    late = table.mode == "deadline" and (
        table.deadline > 0 or table.select not in (0, config.federation.per_round)
    )
    return selects or late or table.mode == "fedbuff"


def is_default(name: str, value: Any) -> bool:
    """Whether that is the default of the key `table.key`."""
    table, _, key = name.partition(".")
    return value == FIELDS[table][key].default


def unread(config: Config) -> list[str]:
    """The keys `table.key` that differ from their defaults though nothing reads them."""
    names = [f"{table}.{key}" for table, keys in NEEDS.items() for key in keys]
    idle = [name for name in names if not reads(config, name)]
    changed = [name for name in idle if not is_default(name, value_of(config, name))]
    # A public population or rate sets the adjacency: name first what was set.
    return sorted(changed, key="privacy.adjacency".__eq__)


def refusal(config: Config, name: str, value: Any = None) -> str:
    """The message that rejects a key that nothing reads: what is set, why, and what to do. Without
    a value, it is the config's."""
    need = _unmet(config, name)
    assert need is not None
    key, fix = need.key, need.fix
    if not fix and not callable(need.holds):
        names = need.holds
        said = f"= '{names[0]}'" if len(names) == 1 else f"to one of {', '.join(names)}"
        fix = f"set {_in_file(key)} {said}"
    if need is PRIVATE_RECIPE and config.privacy.level == "client":  # neither goes with the other
        key, fix = CLIENT_LEVEL.key, f"set level = 'example' and {fix}"
    elif need is CLIENT_LEVEL and config.local.recipe in PRIVATE:
        fix += " and choose a recipe without dp- and disk-"
    value = value_of(config, name) if value is None else value
    return (
        f"{_in_file(name)} = {shown(value)} has no effect: only {need.readers} it, and here "
        f"{_in_file(key)} = {shown(value_of(config, key))}, so {fix}, or leave "
        f"{name.partition('.')[2]} out"
    )


def unread_by_own_recipe(config: Config, private: bool) -> Iterator[str]:
    """Messages on keys of built-in private recipes that are set beside a custom recipe.

    With `private`, the custom recipe has a mechanism, which then has these settings in itself. Only
    delta belongs to the account.
    """
    if private:
        why = "carries clipping, noise and lots in its mechanism"
        names = [f"privacy.{key}" for key in NEEDS["privacy"] if key != "delta"]
        names.append("output.checkpoint-every")  # a private run keeps every round
    else:
        why = "has no mechanism to read it"
        at_client_level = config.privacy.level == "client"
        names = [
            f"privacy.{key}"
            for key, needs in NEEDS["privacy"].items()
            if not (at_client_level and (needs or (None,))[0] in READ_AT_CLIENT_LEVEL)
        ]
    for name in names:
        if not is_default(name, value := value_of(config, name)):
            yield (
                f"{_in_file(name)} = {shown(value)} has no effect: your recipe {why}, so leave "
                f"{name.partition('.')[2]} out"
            )


def _in_file(name: str) -> str:
    """`[table] key`, as messages and files spell `table.key`."""
    table, _, key = name.partition(".")
    return f"[{table}] {key}"
