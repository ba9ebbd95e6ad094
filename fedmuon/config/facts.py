"""Facts that a config shows about its settings, before anything is built (`core.demands`).

A fact about one key names the key and its value in errors. Facts about methods, compressors and
orthogonalizers follow from the `facts` of their rows, so a new row needs no change here.
"""

import math
from collections.abc import Callable
from typing import Any

from fedmuon.config.methods import ORTHOGONALIZED, PRIVATE, has
from fedmuon.config.schema import ASYNCHRONOUS, reads
from fedmuon.core.choices import is_own, with_fact
from fedmuon.core.demands import Fact, Trait, where

Config = Any  # `fedmuon.config.load.Config`, which imports this module
PLAIN = "Set aggregate = 'mean'"
ALL_TAKE_PART = "Set mode = 'synchronous', availability = 'always' and dropout = 0"
WEIGHTED = with_fact("federation.aggregate", "weighted mean")


Named = Callable[[Config], str]


def method_with(fact: str) -> Named:
    """Return the function `named` of a fact or demand about methods whose rows have this fact."""
    return where("local.recipe", lambda name: has(name, fact))


def choice_with(key: str, fact: str, also: Callable[[Config], bool] | None = None) -> Named:
    """Return the function `named` of a fact or demand about choices whose rows have this fact."""
    return where(key, with_fact(key, fact).__contains__, also)


def combines_adapters_by(*ways: str) -> Named:
    """Return the function `named` about values of [federation] adapters, if this key is read."""
    key = "federation.adapters"
    return where(key, ways.__contains__, lambda config: reads(config, key))


gives_ranks = where(  # the function `named` about [federation] adapter-ranks
    "federation.adapter-ranks", bool, lambda config: reads(config, "federation.adapter-ranks")
)
follows_gradients = where(  # the function `named` about [federation] subspace-bases
    "federation.subspace-bases",
    "gradient".__eq__,
    lambda config: reads(config, "federation.subspace-bases"),
)


# The functions `named` about [attacks] kind, [robust] ball and [robust] mixing
attacked = where("attacks.kind", "none".__ne__)
clips_changes = where("robust.ball", "none".__ne__)
mixes_replies = where("robust.mixing", bool)


def server_keeps_muon(config: Config) -> bool:
    """Return whether the server averages the states of the orthogonalizer and of `aux`."""
    name = config.local.recipe
    return has(name, "orthogonalizes") and (has(name, "centralized") or has(name, "private"))


def compresses(config: Config) -> bool:
    """Return whether messages are compressed."""
    return config.compression.uplink != "none" or config.compression.downlink != "none"


def _has_clock(config: Config) -> bool:
    return config.devices.mode != "none"


def _has_client_processes(config: Config) -> bool:
    return config.engine.name != "inline"


def _orthogonalizes(config: Config) -> bool:
    return config.local.recipe in ORTHOGONALIZED


# Facts that one key shows, in the order of the tables

FACTS: tuple[Fact[Config], ...] = (
    Fact(
        Trait.TOKENS,
        where("data.normalize", "tokens".__eq__),
        "Set [data] name to data other than text",
    ),
    Fact(
        Trait.UNSCALED_SAMPLES,
        where(
            "data.normalize",
            ("pixels", "tokens").__contains__,
            lambda config: config.data.normalize == "pixels" or is_own(config.data.name),
        ),
        "Set normalize to unit or ball",
    ),
    Fact(Trait.HOLDS_OUT_SAMPLES, where("data.client-test", bool), "Set client-test = 0"),
    Fact(Trait.NOT_PLAIN_MEAN, where("federation.aggregate", "mean".__ne__), PLAIN),
    Fact(
        Trait.NOT_PLAIN_MEAN,
        combines_adapters_by("exact"),
        "Set adapters = 'factors'",
    ),
    Fact(
        Trait.NO_WEIGHTED_MEAN,
        combines_adapters_by("exact"),
        "Set adapters = 'factors'",
    ),
    Fact(
        Trait.SENDS_VARIABLES,
        combines_adapters_by("subspace"),
        "Set adapters = 'factors'",
    ),
    Fact(
        Trait.TRAINS_VARIABLES,
        combines_adapters_by("freeze-a"),
        "Set adapters = 'factors'",
    ),
    Fact(
        Trait.VARIES_RANKS,
        gives_ranks,
        "Leave adapter-ranks out",
    ),
    Fact(
        Trait.SKETCHES_GRADIENTS,
        follows_gradients,
        "Set subspace-bases = 'random'",
    ),
    Fact(
        Trait.CHANGES_BASES,
        follows_gradients,
        "Set subspace-bases = 'random'",
    ),
    Fact(
        Trait.CHANGES_BASES,
        combines_adapters_by("exact"),
        "Set adapters = 'factors'",
    ),
    Fact(
        Trait.NO_WEIGHTED_MEAN,
        where("federation.aggregate", lambda name: name not in WEIGHTED),
        "Set aggregate = 'mean' or 'by-samples'",
    ),
    Fact(
        Trait.WEIGHTS_BY_SIZE,
        where("federation.aggregate", lambda name: name == "by-samples" or is_own(name)),
        PLAIN,
    ),
    Fact(Trait.CUSTOM_STAGE, where("federation.stage", "none".__ne__), "Set stage = 'none'"),
    Fact(Trait.RECOMPUTES, where("task.checkpointing", bool), "Set checkpointing = false"),
    Fact(Trait.UNTIED_HEAD, where("task.head", "untied".__eq__), "Set head = 'tied'"),
    Fact(
        Trait.RETURNS_DIRECTIONS,
        method_with("server orthogonalizes"),
        "Choose another recipe, such as fedmuon",
    ),
    Fact(Trait.ENCODES_STATES, method_with("low-rank messages"), "Set recipe = 'fedmuon'"),
    Fact(
        Trait.SERVER_STATE,
        # A Kalman filter counts steps.
        where(
            "local.recipe",
            lambda name: has(name, "averages second moments") or has(name, "filtered"),
        ),
        "Choose a recipe without second moments and counters, such as fedmuon, local-adamw or "
        "dp-muon",
    ),
    Fact(
        Trait.SERVER_STATE,
        where(
            "local.aux",
            "adamw".__eq__,
            lambda config: config.task.name != "matrix" and server_keeps_muon(config),
        ),
        "Choose recipe = 'fedmuon', which resets its states every round, or another aux",
    ),
    Fact(
        Trait.NOISE_PER_STEP,
        where("local.recipe", PRIVATE.__contains__),
        "Choose a recipe whose name does not begin with dp- or disk-",
    ),
    Fact(
        Trait.DIFFERENT_STEPS,
        where("local.epochs", bool, lambda config: reads(config, "local.epochs")),
        "Set steps instead of epochs",
    ),
    Fact(Trait.SHUFFLED_BATCHES, where("local.batch", bool), "Set batch = 0, and [privacy] lot"),
    Fact(
        Trait.STEP_SIZE_OF_RUN,
        where("local.schedule", "heavy-tailed".__eq__),
        "Run the experiment and pass its run folder, or set schedule to another value",
    ),
    Fact(
        Trait.OTHER_MOMENTUM,
        where("local.momentum-form", lambda form: form not in ("ema", "polyak")),
        "Set momentum-form to ema or polyak",
    ),
    Fact(
        Trait.SCALES_BY_MOMENTUM,
        where("local.adjust", "polargrad".__eq__, _orthogonalizes),
        "Set adjust to another scale",
    ),
    Fact(
        Trait.SCALES_WEIGHTS,
        where("local.renormalize", bool, lambda config: reads(config, "local.renormalize")),
        "Set renormalize = false",
    ),
    Fact(
        Trait.SHRINKS_NETWORK,
        where(
            "local.weight-decay",
            bool,
            lambda config: config.task.name != "matrix" and _orthogonalizes(config),
        ),
        "Set weight-decay = 0",
    ),
    Fact(
        Trait.DRAWS_RANDOM_NUMBERS,
        choice_with("orthogonalizer.name", "draws random numbers"),
        "Choose another orthogonalizer, such as newton-schulz",
    ),
    Fact(
        Trait.UNSMOOTH_MAP,
        choice_with(
            "orthogonalizer.name",
            "no derivative",
            lambda config: reads(config, "orthogonalizer.name"),
        ),
        "Choose another orthogonalizer, such as newton-schulz",
    ),
    Fact(
        Trait.ROUNDS_PRODUCTS,
        where(
            "orthogonalizer.products",
            "full".__ne__,
            lambda config: reads(config, "orthogonalizer.products"),
        ),
        "Set products = 'full'",
    ),
    Fact(
        Trait.ROUNDS_NEWTON_SCHULZ,
        where(
            "orthogonalizer.products",
            "full".__ne__,
            lambda config: (
                config.orthogonalizer.name == "newton-schulz" and _orthogonalizes(config)
            ),
        ),
        "Set products = 'full'",
    ),
    Fact(
        Trait.ROW_MEMORY,
        where("orthogonalizer.row-memory", bool, _orthogonalizes),
        "Set row-memory = 0",
    ),
    Fact(
        Trait.SERVER_STATE,
        where("orthogonalizer.row-memory", bool, server_keeps_muon),
        "Set row-memory = 0, or choose recipe = 'fedmuon', which resets its states every round",
    ),
    Fact(
        Trait.SPLITS_MATRICES,
        where("orthogonalizer.shards", (1).__ne__, _orthogonalizes),
        "Set shards = 1",
    ),
    Fact(
        Trait.SERVER_STATE,
        where("orthogonalizer.shards", (1).__ne__, server_keeps_muon),
        "Set shards = 1, or choose recipe = 'fedmuon', which resets its states every round",
    ),
    Fact(Trait.PROTECTS_CLIENTS, where("privacy.level", "client".__eq__), "Set level = 'example'"),
    Fact(Trait.UNCLIPPED, where("privacy.bound", math.isinf), "Set bound to a finite number"),
    Fact(
        Trait.CLIPS_ALL,
        where("privacy.clipping", lambda name: name.startswith("automatic")),
        "Set clipping to flat or block",
    ),
    Fact(Trait.ADAPTS_CLIPPING, where("privacy.quantile", bool), "Set quantile = 0"),
    Fact(
        Trait.CORRELATES_NOISE,
        where("privacy.noise-correlation", "none".__ne__),
        "Set noise-correlation = 'none'",
    ),
    Fact(
        Trait.FLOATING_POINT_NOISE,
        where("privacy.arithmetic", "continuous".__eq__),
        "Set arithmetic to auto or grid",
    ),
    Fact(Trait.SECRET_COHORTS, where("privacy.cohorts", "poisson".__eq__), "Set cohorts = 'fixed'"),
    Fact(
        Trait.OTHER_PROCESSES, where("engine.name", "inline".__ne__), "Set [engine] name = 'inline'"
    ),
    Fact(
        Trait.HAS_SERVER,
        where("engine.name", "deployment".__eq__),
        "Set [engine] name = 'inline' or 'ray'",
    ),
    Fact(
        Trait.REPEATS_REQUESTS,
        where("faults.retries", bool, _has_client_processes),
        "Set retries = 0. If the run stops, you can resume it",
    ),
    Fact(
        Trait.LEAVES_OUT_CLIENTS,
        where("faults.policy", "strict".__ne__, _has_client_processes),
        "Set policy = 'strict'. If the run stops, you can resume it",
    ),
    Fact(
        Trait.SELECTS_CLIENTS,
        where("devices.availability", "always".__ne__, _has_clock),
        ALL_TAKE_PART,
    ),
    Fact(
        Trait.SELECTS_CLIENTS,
        where("devices.dropout", lambda share: share > 0, _has_clock),
        ALL_TAKE_PART,
    ),
    Fact(
        Trait.SELECTS_CLIENTS,
        where("devices.mode", ("deadline", *ASYNCHRONOUS).__contains__),
        ALL_TAKE_PART,
    ),
    Fact(Trait.PUBLISHES_TIMES, where("devices.mode", "none".__ne__), "Set mode = 'none'"),
    Fact(Trait.LATE_REPLIES, where("devices.mode", ASYNCHRONOUS.__contains__), "Set mode = 'none'"),
    Fact(
        Trait.COMPRESSES_REPLIES, where("compression.uplink", "none".__ne__), "Set uplink = 'none'"
    ),
    Fact(
        Trait.COMPRESSES_MODEL,
        where("compression.downlink", "none".__ne__),
        "Set downlink = 'none'",
    ),
    Fact(
        Trait.STORES_CLIENT_STATES,
        where("compression.feedback", "none".__ne__, compresses),
        "Set feedback = 'none'",
    ),
    Fact(
        Trait.STORES_CLIENT_STATES,
        choice_with("compression.uplink", "client states"),
        "Set uplink = 'low-rank'",
    ),
    Fact(
        Trait.SUM_OF_ALL_CLIENTS,
        where(
            "compression.feedback",
            "ef21".__eq__,
            lambda config: config.compression.uplink != "none",
        ),
        "Set feedback = 'error'",
    ),
    Fact(Trait.HOSTILE_CLIENTS, attacked, "Set kind = 'none'"),
    Fact(Trait.CLIPS_CHANGES, clips_changes, "Set ball = 'none'"),
    Fact(Trait.MIXES_REPLIES, mixes_replies, "Set mixing = 0"),
    Fact(
        Trait.MEASURES_CLIENTS,
        where("output.clients", bool),
        "Set clients = false, or leave --clients out",
    ),
)

# Facts of the rows of methods. A recipe shows them as well, after it is built.
METHOD_FACTS: tuple[Fact[Config], ...] = (
    Fact(
        Trait.STORES_CLIENT_STATES,
        method_with("client states"),
        "Choose a recipe that stores no client states",
    ),
    Fact(
        Trait.NO_DERIVATIVE,
        where("local.recipe", lambda name: has(name, "no derivative") or "adamw" in name),
        "Choose another recipe, such as fedavg",
    ),
)
