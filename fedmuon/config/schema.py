"""Every key of a config, declared once: type, limits, default, description, and when it is read.

The checks of a config, `fedmuon config explain`, completion, the reference page, Flower's table and
the rejection of options without effect all follow from these tables. They hold scalars only,
because Flower's run config has no lists: a coefficient schedule has a name.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from operator import not_
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator
from pydantic.fields import FieldInfo

from fedmuon.core import choices
from fedmuon.core.choices import PRIVATE, TABLES, TEXTS, is_own
from fedmuon.core.errors import instead
from fedmuon.core.tables import Scalar, Table, attribute

# Limits: counts that end before the first round, sizes that fit a library's own integers, and reals
# whose squares float32 can hold.
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


def _named(known: Any) -> Callable[[str], str]:
    """Accept one of our names, or an object of the user's."""
    ours = get_args(known)

    def check(value: str) -> str:
        if value in ours or is_own(value):
            return value
        raise ValueError(f"{instead(value, ours)}, or package.module:object of your own")

    return check


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


# When a key is read. A value that nothing reads looks as if it had an effect, such as `epsilon = 8`
# with a recipe without privacy, so a key that differs from its default must be read.

Config = Any  # a `fedmuon.config.load.Config`, which asks here while it is made


@dataclass(frozen=True)
class ReadIf:
    """A condition under which another key is read.

    Attributes:
        key: The key `table.key` that decides.
        holds: Whether a value of it is as it must be.
        readers: Who then reads the other key; follows "only" in a message.
        mend: What to do; follows "so" in a message.
        unless: A condition that serves as well.
    """

    key: str
    holds: Callable[[Any], bool]
    readers: str
    mend: str
    unless: "ReadIf | None" = None

    def met(self, config: Config) -> bool:
        """Whether the config fulfils it."""
        return self.holds(value_of(config, self.key)) or bool(
            self.unless and self.unless.met(config)
        )


def key(
    default: Any,
    what: str,
    *,
    read_if: tuple[ReadIf, ...] = (),
    values: str = "",
    symbol: str = "",
) -> Any:
    """Declare a key.

    Args:
        default: Its value where none is set.
        what: What it is, for people.
        read_if: Conditions that must all hold for anything to read it; those of the keys that they
            name come first, so leaving one out changes no other.
        values: What it can be, in words, where its type does not say so.
        symbol: The letter that the papers have for it.
    """
    extra: Any = {"read_if": read_if, "values": values, "symbol": symbol}
    return Field(default, description=what, json_schema_extra=extra)


def declared(field: FieldInfo, name: str) -> Any:
    """What `key` says of a field by that name: read_if, values or symbol."""
    extra: Any = field.json_schema_extra
    return extra[name] if extra else ()


def value_of(config: Config, name: str) -> Any:
    """The value of `table.key`."""
    table, _, spelled = name.partition(".")
    held = getattr(config, table)
    return getattr(held, attribute(type(held), spelled))


def _one_of(name: str, values: Collection[str], readers: str, mend: str = "") -> ReadIf:
    table, _, spelled = name.partition(".")
    known = list(values)
    said = f"= '{known[0]}'" if len(known) == 1 else f"to one of {', '.join(known)}"

    def holds(value: str) -> bool:  # what a custom object reads is known when it is made
        return value in known or is_own(value)

    return ReadIf(name, holds, readers, mend or f"set [{table}] {spelled} {said}")


def _recipes(readers: str, chosen: Callable[[str], bool], mend: str = "") -> ReadIf:
    names = [name for name in get_args(choices.Recipe) if chosen(name)]
    return _one_of("local.recipe", names, readers, mend)


def _map(*names: str) -> tuple[ReadIf, ...]:
    readers = f"the map {names[0]} reads" if len(names) == 1 else f"{' and '.join(names)} read"
    return MUON, _one_of("orthogonalizer.name", names, readers)


def _source(*names: str) -> tuple[ReadIf, ...]:
    return (_one_of("data.name", names, f"{', '.join(names)} read{'s' * (len(names) == 1)}"),)


FILES = ("fashion-mnist", "mnist", "cifar10", "idx", "npz", "csv", "parquet", "text", *TABLES)
WITHOUT = ("fedavg", "fedavgm", "adamw", "dp-adam", "disk-adam")  # without local momentum
STATELESS = ("fedavg", "fedavgm", "local-muon")  # whose clients send their models alone
MUON = _recipes("Muon's recipes read", lambda name: "muon" in name, "choose a recipe ...muon...")
ALIGNED = _recipes("fedmuon-aligned reads", "fedmuon-aligned".__eq__)
FEDAVGM = _recipes("fedavgm reads", "fedavgm".__eq__)
STATEFUL = _recipes("recipes that send momenta read", lambda name: name not in STATELESS)
CORRECTED = _recipes("recipes ...-muonbc read", lambda name: name.endswith("muonbc"))
PRIVATELY = _recipes(
    "private recipes read", PRIVATE.__contains__, "choose a recipe dp-... or disk-..."
)
CLIENT = _one_of("privacy.level", ["client"], "client level reads")
EITHER = replace(
    PRIVATELY,
    readers="private recipes and client level read",
    mend="choose a recipe dp-... or disk-..., or set [privacy] level = 'client'",
    unless=CLIENT,
)
OF_CLIENTS = (None, EITHER, CLIENT)  # first conditions of keys that client level reads
NETWORK = _one_of("task.name", ["network"], "networks read")
MATRIX = (_one_of("task.name", ["matrix"], "the matrix task reads"),)
OURS = ReadIf(
    "task.name", "network".__eq__, "networks of this package read", "set [task] name = 'network'"
)
DECODER = OURS, _one_of("task.model", ["gpt"], "the model gpt reads")
UNEVEN = (
    _one_of(
        "federation.partition",
        ["dirichlet", "quantity"],
        "the partitions dirichlet and quantity read",
    ),
)
HEAVY = (
    _recipes("recipes with local momentum read", lambda name: name not in WITHOUT),
    ReadIf(
        "local.schedule",
        lambda name: name != "heavy-tailed",
        "schedules but heavy-tailed read",
        "choose another [local] schedule",
    ),
)
TAILED = _one_of("local.schedule", ["heavy-tailed"], "the heavy-tailed schedule reads")
SCHULZ, STEPPED = _map("newton-schulz"), _map("newton-schulz", "randomized-polar")
RANDOMIZED, SMOOTHED = _map("randomized-polar"), _map("gaussian-smoothed-sign")
FLOORED = _one_of(
    "orthogonalizer.normalization", ["plus", "max"], "the normalizations plus and max read"
)
DISTRIBUTED = _one_of("privacy.trust", ["distributed"], "distributed trust reads")
QUANTILE = ReadIf("privacy.quantile", bool, "clipping at a quantile reads", "set quantile above 0")
CYCLIC = PRIVATELY, _one_of("privacy.sampling", ["cyclic"], "lots in one order read")
CORRELATED = _one_of("privacy.noise-correlation", ["sqrt-toeplitz"], "correlated noise reads")
SECRET = ReadIf(
    "privacy.insecure-reproducible-noise",
    not_,
    "secret noise reads",
    "set insecure-reproducible-noise = false",
)
DISK = PRIVATELY, _recipes("recipes disk-... read", lambda name: name.startswith("disk-"))
FILTERED = ReadIf("privacy.kappa", lambda kappa: kappa < 1, "a filter reads", "set kappa below 1")
RAY = _one_of("engine.name", ["ray"], "the engine ray reads")
REMOTE = _one_of("engine.name", ["ray", "deployment"], "engines with client processes read")
DRAWN = _one_of("stability.neighbours", ["own", "any", "worst"], "neighbours drawn or ranked read")
UNPRIVATE = (
    _recipes(
        "a run without privacy reads",
        lambda name: name not in PRIVATE,
        "choose one without privacy (a private run keeps every round)",
    ),
    ReadIf(
        "privacy.level",
        "client".__ne__,
        "a run without privacy reads",
        "leave level = 'example' (a private run keeps every round)",
    ),
)


# The tables


class Data(Table):
    """Which samples, and how unevenly their labels fall on the clients."""

    name: Annotated[Text, AfterValidator(_named(choices.SourceName))] = key(
        "mnist5k",
        "the source of samples; `fedmuon doctor` says which are here",
    )
    train: Samples = key(4000, "n, the samples that are dealt to the clients", symbol="n")
    test: Samples = key(1000, "samples held out, for test loss and accuracy")
    alpha: Annotated[float, Field(ge=1 / LARGE)] = key(
        0.5,
        "Dirichlet concentration of the labels over clients: small is uneven, inf even",
        read_if=UNEVEN,
        symbol="α",
    )
    minimum: Samples = key(
        10,
        "samples that every client has at least: dirichlet and quantity fill small clients up"
        " from the largest, other partitions that give fewer are refused; lowered for few "
        "samples of yours",
    )
    normalize: Literal["auto", "unit", "ball", "pixels", "tokens"] = key(
        "auto",
        "how each sample is scaled, by itself: unit divides it by its norm, ball where that "
        "exceeds 1; pixels divides arrays of uint8 by 255; tokens leaves all alone; auto is "
        "tokens for text, else unit for the matrix task and pixels for networks",
    )
    folder: Text = key(
        "",
        "where a source's files are, if not in its usual place; the file of npz, csv, parquet",
        read_if=_source(*FILES),
        values="a path",
    )
    context: Count = key(64, "tokens that a window of text sees", read_if=_source(*TEXTS))
    tokenizer: Text = key(
        "",
        "a folder with GPT-2's tokenizer; empty reads bytes",
        read_if=_source(*TABLES),
        values="a path",
    )
    dimension: Samples = key(20, "features of a made up sample", read_if=_source("synthetic"))
    classes: Annotated[int, Field(ge=2, le=10**6)] = key(
        4,
        "labels of the samples that are made up",
        read_if=_source("synthetic"),
    )
    options: Options = ()


class Federation(Table):
    """N clients, K of them a round, R rounds (001, Algorithm 1)."""

    clients: Annotated[int, Field(ge=1, le=CLIENTS)] = key(20, "N, how many there are", symbol="N")
    per_round: Annotated[int, Field(ge=1, le=CLIENTS)] = key(
        5,
        "K, drawn afresh each round; fewer clients than 5 take part all",
        values="1 to `clients`",
        symbol="K",
    )
    rounds: Annotated[int, Field(ge=1, le=ROUNDS)] = key(50, "R, how many there are", symbol="R")
    risk_weights: Literal["size", "uniform"] = key(
        "size",
        "weights p_i of the clients in the train loss that is reported and bounded: n_i / n, "
        "or 1 / N; the server's average is `aggregate`'s",
    )
    aggregate: Annotated[Text, AfterValidator(_named(choices.Aggregate))] = key(
        "mean",
        "what the server makes of a round's models and states; bounds are of mean and "
        "by-samples, as is the correction of …-muonbc",
    )
    partition: Annotated[Text, AfterValidator(_named(choices.Partition))] = key(
        "dirichlet",
        "who holds which sample",
    )
    seed: Natural = key(0, "the seed of every draw but secret noise")
    options: Options = ()


class TaskTable(Table):
    """What is learned: the classifier with proved constants, or a network with cross-entropy."""

    name: Annotated[Text, AfterValidator(_named(Literal["matrix", "network"]))] = key(
        "matrix",
        "the controlled task of 001, whose constants are proved, or the cross-entropy of a network",
    )
    model: Annotated[Text, AfterValidator(_named(choices.Model))] = key(
        "cnn",
        "the module",
        read_if=(OURS,),
    )
    width: Count = key(
        128,
        "entries of the decoder's vectors",
        read_if=DECODER,
        values="a multiple of `heads`",
    )
    depth: Annotated[int, Field(ge=1, le=256)] = key(4, "blocks of the decoder", read_if=DECODER)
    heads: Count = key(4, "heads of its attention", read_if=DECODER)
    initial: Literal["gaussian", "zero"] = key(
        "gaussian",
        "X⁰: entries of variance 1/d, or 0, from where bounds are tighter",
        read_if=MATRIX,
    )
    weights: Text = key(
        "",
        "a .safetensors file, or a folder of them, to start from",
        read_if=DECODER,
        values="a path",
    )
    lora_rank: Annotated[int, Field(ge=0, le=10**6)] = key(
        0,
        "r of adapters (LoRA) of the projections to queries, keys and values, which alone are"
        " learned, beside `weights`, which stay and are taken for public; a run that goes on "
        "wants the same. 0 learns all. For Muon to take all adapters, set `local.route = "
        '"all-matrices"`',
        read_if=DECODER,
        values="0 to `width`",
    )
    options: Options = ()


class Local(Table):
    """A client's round: E steps of a named chain."""

    recipe: Annotated[Text, AfterValidator(_named(choices.Recipe))] = key(
        "fedmuon",
        "the steps of a client, and what the server does with their average",
    )
    steps: Count = key(5, "E, local steps a round", symbol="E")
    batch: Annotated[int, Field(ge=0, le=SAMPLES)] = key(
        0,
        "samples of a step; 0 is the full batch",
    )
    lr: Positive = key(1.0, "η, the step size", symbol="η")
    momentum: Annotated[float, Field(ge=0, lt=1)] = key(
        0.9,
        "β, the memory of the momentum",
        read_if=HEAVY,
        symbol="β",
    )
    momentum_form: Literal["ema", "ema-nesterov", "polyak", "nesterov"] = key(
        "ema",
        "βM + (1 − β)G (001) or βM + G (000, 002), with a look ahead or without",
        read_if=HEAVY[:1],
    )
    weight_decay: Amount = key(0.0, "decoupled: X is also stepped by −lr · decay · X")
    schedule: Annotated[Text, AfterValidator(_named(choices.Schedule))] = key(
        "constant",
        "what lr is times in each round; heavy-tailed sets lr and momentum by 002",
    )
    tail_index: Annotated[float, Field(ge=0, le=2)] = key(
        0.0,
        "α of 002, the tail of the noise; 0 if unknown",
        read_if=(TAILED,),
        values="0, or above 1 to 2",
    )
    alignment: Share = key(
        0.5,
        "α of 001, Remark 3.2: a step is (1 − α) Orth(M) + α times the last global direction",
        read_if=(ALIGNED,),
    )
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = key(
        0.9,
        "β of the server",
        read_if=(FEDAVGM,),
    )
    route: Literal["hidden", "all-matrices"] = key(
        "hidden",
        "a network's parameters to orthogonalize: its matrices without first and last layer, "
        "embeddings and norms, or all matrices; `routes.txt` says which",
        read_if=(NETWORK, MUON),
    )
    aux: Literal["sgd", "adamw"] = key(
        "sgd",
        "the step of all other parameters: −aux-lr · M, or AdamW's, begun afresh each round "
        "by federated recipes",
        read_if=(NETWORK, MUON),
    )
    aux_lr: Amount = key(
        0.0,
        "its step size; 0 is 0.05 for sgd and 0.001 for adamw, which the resolved config says",
        read_if=(NETWORK, MUON),
    )
    adjust: Literal["none", "original", "match-rms"] = key(
        "none",
        "scale of an orthogonalized [m, n] step: 1, √max(1, m/n) or 0.2 √max(m, n), as in "
        "torch.optim.Muon",
        read_if=(MUON,),
    )
    options: Options = ()


class OrthogonalizerTable(Table):
    """The map Orth and its parameters; each map reads its own."""

    name: Annotated[Text, AfterValidator(_named(choices.Orthogonalizer))] = key(
        "smoothed-polar",
        "the map",
        read_if=(MUON,),
    )
    lambda_: Annotated[float, Field(ge=1e-300, le=LARGE)] = key(
        0.0001,
        "λ: σ becomes σ / √(σ² + λ); the Lipschitz constant is 1 / √λ",
        read_if=_map("smoothed-polar"),
        symbol="λ",
    )
    steps: Annotated[int, Field(ge=0, le=100)] = key(
        5,
        "q, polynomial steps",
        read_if=STEPPED,
        symbol="q",
    )
    coefficients: Text = key(
        "cubic",
        "the polynomials",
        read_if=STEPPED,
        values="cubic, quintic, jordan, polar-express-e2, polar-express-e3, taylor-1 to taylor-6",
    )
    eps: Positive = key(1e-7, "ε of the normalization", read_if=(*SCHULZ, FLOORED))
    normalization: Literal["plus", "max", "unit"] = key(
        "plus",
        "what M is divided by first: ‖M‖ + ε (001), max(‖M‖, ε) (torch), max(‖M‖, 1) (000)",
        read_if=SCHULZ,
    )
    sigma: Positive = key(0.01, "σ, the smoothing noise", read_if=SMOOTHED)
    clip_level: Positive = key(
        0.1,
        "γ, below which singular values are scaled",
        read_if=_map("clipped-sign"),
    )
    rank: Count = key(5, "r of the sketch", read_if=RANDOMIZED, symbol="r")
    oversample: Annotated[int, Field(ge=0, le=10**6)] = key(
        2,
        "columns of the sketch beside the rank",
        read_if=RANDOMIZED,
    )
    power: Few = key(1, "h, power iterations", read_if=RANDOMIZED)
    sketch: Literal["gaussian", "kaczmarz"] = key(
        "gaussian",
        "how the sketch is drawn",
        read_if=RANDOMIZED,
    )
    options: Options = ()


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
        "each example's gradient is clipped in every matrix block, in one norm, or scaled to "
        "the bound",
        read_if=(PRIVATELY,),
    )
    bound: Annotated[float, Field(ge=1 / LARGE)] = key(
        1.0,
        "C, that bound; inf clips nothing; at client level that of a client's whole update",
        read_if=(EITHER,),
        symbol="C",
    )
    quantile: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "the share of gradients that shall not be clipped: C follows it, from `bound`, by "
        "noisy counts that `noise` accounts for; 0 keeps C",
        read_if=(PRIVATELY,),
    )
    quantile_rate: Annotated[float, Field(ge=1 / LARGE, le=10)] = key(
        0.2,
        "how much ln C moves, for a share that is off by 1; C stays between 10⁻¹⁵ and 10¹⁵",
        read_if=(PRIVATELY, QUANTILE),
    )
    count_noise: Amount = key(
        0.0,
        "noise of a lot's count of gradients not clipped; 0 is the larger of lot / 20 and `noise`",
        read_if=(PRIVATELY, QUANTILE),
    )
    noise: Amount = key(
        0.0,
        "σ, the noise multiplier: each entry of a lot's mean has noise of σC / lot; at client"
        " level a round's sum has noise of σC",
        read_if=(EITHER,),
        symbol="σ",
    )
    lot: Annotated[float, Field(ge=1e-3, le=SAMPLES)] = key(
        64.0,
        "samples of a Poisson lot, on average, or of one that takes its turn",
        read_if=(PRIVATELY,),
    )
    epsilon: Annotated[float, Field(ge=0, le=1e6)] = key(
        0.0,
        "ε to spend: finds `noise` if that is 0, and the resolved config says it",
        read_if=(EITHER,),
    )
    delta: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "δ of the account; 0 is n^−1.1 and 10⁻⁵ at most, n the samples of the largest client "
        "or the public `population`, at client level the number of clients",
        read_if=(EITHER,),
    )
    level: Literal["example", "client"] = key(
        "example",
        "who is protected: single examples within a client, or clients whole, of recipes that"
        " average their models (and momenta)",
    )
    trust: Literal["central", "local", "distributed"] = key(
        "central",
        "who adds a client's noise: the server; each client all of it; or each a share of it,"
        " of which, and of the updates, the server learns the sum alone, by masks that cancel"
        " (needs cohorts fixed; off `inline`, [faults] policy strict and retries 0)",
        read_if=(CLIENT,),
    )
    honest: Annotated[float, Field(gt=0, le=1)] = key(
        0.5,
        "the part of a cohort that neither withholds its shares of the noise nor tells them "
        "to the server: H = ⌊`honest` · K⌋ shares of K count, one's own at least, and ε is "
        "that of σ √(H / K)",
        read_if=(CLIENT, DISTRIBUTED),
    )
    state_weight: Positive = key(
        1.0,
        "w of (X_k − X, w (M_k − M)), a client's update: how much of the bound momenta take; "
        "noise in them is σC / w",
        read_if=(CLIENT, STATEFUL),
    )
    cohorts: Literal["poisson", "fixed"] = key(
        "poisson",
        "who takes part: each client with per-round / clients, which amplifies and is secret,"
        " or per-round of them, which may be known",
        read_if=(CLIENT,),
    )
    adjacency: Literal["zero-out", "add-remove", "replace-one"] = key(
        "zero-out",
        "what ε compares: a sample adds 0 instead, is there or not, or is another; add-remove"
        " holds with a public `population` or `rate`, and is the default there",
        read_if=(PRIVATELY,),
    )
    sampling: choices.Sampling = key(
        "poisson",
        "a sample is in each lot by chance, or the lots of an epoch, cut from an order that "
        "is drawn anew for each (shuffle) or once (cyclic), take turns; these are accounted "
        "for without amplification",
        read_if=(PRIVATELY,),
    )
    noise_correlation: Literal["none", "sqrt-toeplitz"] = key(
        "none",
        "DP-FTRL: a step's noise takes back part of that of the steps before, so that sums "
        "have less; one client, one process, no resuming, as past noise is kept in memory "
        "alone",
        read_if=CYCLIC,
    )
    band: Count = key(
        8,
        "how many steps that is, itself one of them: so many models, less one, are kept; best"
        " about the lots of an epoch",
        read_if=(*CYCLIC, CORRELATED),
    )
    population: Annotated[int, Field(ge=0, le=SAMPLES)] = key(
        0,
        "a public number of samples of a client, for rates lot / population; 0 takes each "
        "client's own",
        read_if=(PRIVATELY,),
    )
    rate: Annotated[float, Field(ge=0, le=1)] = key(
        0.0,
        "a public chance of every sample; sums are over `lot` all the same; 0 is lot / population",
        read_if=(PRIVATELY,),
    )
    kappa: Annotated[float, Field(gt=0, le=1)] = key(
        0.7,
        "κ, gain of the filter (003)",
        read_if=DISK,
    )
    lookahead: Positive = key(
        0.5,
        "γ of 003, how far ahead the filter looks",
        read_if=(*DISK, FILTERED),
    )
    probes: Annotated[int, Field(ge=1, le=1024)] = key(
        1,
        "antithetic pairs of the bias correction (000)",
        read_if=(PRIVATELY, CORRECTED),
    )
    noise_source: choices.NoiseSource = key(
        "secure",
        "lots and noise from a key stream (AES-256 in counter mode, a key of the system's "
        "entropy for every step), or from NumPy's PCG64 seeded by the system, which certifies"
        " nothing",
        read_if=(EITHER, SECRET),
    )
    arithmetic: choices.Arithmetic = key(
        "auto",
        "noise in floating point, or exact discrete Gaussian noise on sums of a lattice, "
        "whose low bits tell nothing; auto is grid for secret noise, continuous for "
        "repeatable noise, correlated noise and bounds that follow a quantile; distributed "
        "trust has integers always",
        read_if=(EITHER,),
    )
    insecure_reproducible_noise: bool = key(
        False,
        "noise and lots from the run's seed, for tests: protects nobody",
        read_if=(EITHER,),
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, keys: Any) -> Any:
        """With a public rate it is add-remove, unless told otherwise."""
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
        "inline",
        "this process, Ray's workers, or a SuperLink and SuperNodes",
    )
    dtype: Literal["float32", "float64"] = key(
        "float32",
        "precision of everything; `fedmuon stability` takes float64 if none is named",
    )
    device: Text = key(
        "auto",
        "auto is cuda where there is one",
        values="auto, cpu, cuda, cuda:1, …",
    )
    kernel: Literal["torch", "channels-last", "numpy", "fused", "auto"] = key(
        "torch",
        "matrix products; fused has thin ones compiled (numba); auto takes that for long "
        "runs, else measures which library is fastest here",
        read_if=MATRIX,
    )
    cpus_per_client: Positive = key(
        1.0,
        "CPUs of a worker, and threads that it computes with (1 at least); there are as many "
        "workers as fit",
        read_if=(RAY,),
    )
    gpus_per_client: Amount = key(0.0, "GPUs of a worker; a fraction shares one", read_if=(RAY,))
    ray_address: Text = key(
        "",
        "a running cluster; empty starts a local Ray",
        read_if=(RAY,),
        values="an address",
    )


class Faults(Table):
    """What happens when a participant gives no sound reply (engines `ray` and `deployment`).

    `strict` asks again and then stops, resumable; `drop` averages over those who answered, which
    the run says and the bound no longer covers.
    """

    policy: Literal["strict", "drop"] = key(
        "strict",
        "ask again and then stop, resumable; or average over those who answered, without a bound",
        read_if=(REMOTE,),
    )
    retries: Few = key(2, "how often a participant is asked again", read_if=(REMOTE,))
    deadline: Seconds = key(600.0, "seconds for one attempt", read_if=(REMOTE,))
    patience: Seconds = key(120.0, "seconds for all nodes to appear at first", read_if=(REMOTE,))


def _constant(value: float | str) -> float | str:
    """C_hp: a number that the user answers for, or the name of a proved form."""
    known = value in ("explicit", "sharp") if isinstance(value, str) else 0 < value < math.inf
    if not known:
        raise ValueError(
            f"[stability] c-hp = {value!r} is refused: give a positive number, explicit or sharp"
        )
    return value


class Stability(Table):
    """Which neighbours `fedmuon stability` runs, and what its bound stands on."""

    trials: Count = key(10, "how many neighbours", read_if=(DRAWN,))
    neighbours: Literal["own", "any", "worst", "all"] = key(
        "own",
        "the replacement is drawn like the client's own samples or like anybody's; the "
        "`trials` worst of all samples times up to 2,048 held-out replacements, ranked by "
        "derivatives and run exactly beside as many drawn ones (`predicted.csv`); or each "
        "sample once, the census",
    )
    delta: Chance = key(0.05, "δ, with which probability the bound may fail")
    lipschitz: Literal["paper", "sharp"] = key(
        "sharp",
        "which constant of the map: the proved one, or the printed one",
    )
    constants: Literal["ball", "global"] = key(
        "ball",
        "of the task: the suprema on the ball around X⁰ that the iterates cannot leave, by "
        "step; or those over all models, as 001 has them. Bounds without a run but from X⁰ = "
        "0, of alignment, of weight decay, of a map of yours, with an Lg of yours are global",
        read_if=MATRIX,
    )
    realized: bool = key(
        False,
        "`realized.csv`: how far each neighbour can be from this very run, by the run's own "
        "gradients and curvature",
        read_if=MATRIX,
    )
    c_hp: Annotated[float | str, AfterValidator(_constant)] = key(
        "explicit",
        "C_hp of Theorem 4.1: two proved forms, or a number that you answer for (then H and G"
        " have δ/2 each, as printed; else all of δ)",
        values="explicit, sharp, or a number above 0",
    )
    alpha_smoothing: Chance = key(
        0.05,
        "with which probability smoothing may clip (001, Corollary D.11)",
        read_if=SMOOTHED,
    )


class Output(Table):
    """How often a run looks at itself, in rounds (the last one always counts), and who hears."""

    evaluate_every: Samples = key(
        10,
        "rounds between two looks at train and test loss; the last round is always looked at,"
        " and `client_loss` is of every round",
    )
    checkpoint_every: Samples = key(10, "rounds between two checkpoints", read_if=UNPRIVATE)
    callback: Annotated[Text, AfterValidator(_named(choices.CallbackName))] = key(
        "none",
        "who is told of every round",
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
    "faults": Faults,
    "stability": Stability,
    "output": Output,
}
FIELDS: dict[str, dict[str, FieldInfo]] = {  # by table and key as files spell it
    table: {field.alias or name: field for name, field in model.model_fields.items()}
    for table, model in TABLES_OF_A_CONFIG.items()
}
