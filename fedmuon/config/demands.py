"""Demands of settings in a config: what each setting forbids, and why (`core.demands`).

`problems` yields all errors about combinations of keys. `incompatible.py` has the errors in which
computed numbers matter.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from fedmuon.config import hostile, incompatible
from fedmuon.config.facts import (
    FACTS,
    attacked,
    choice_with,
    clips_changes,
    combines_adapters_by,
    compresses,
    gives_ranks,
    method_with,
    mixes_replies,
)
from fedmuon.config.methods import PRIVATE, has
from fedmuon.config.schema import (
    ASYNCHRONOUS,
    Attacks,
    OrthogonalizerTable,
    Robust,
    is_default,
    reads,
)
from fedmuon.core.choices import is_own
from fedmuon.core.demands import Demand, Trait, setting, where

Config = Any  # `fedmuon.config.load.Config`, which imports this module


def compressing_key(config: Config) -> str:
    """Return the key that compresses messages, or ""."""
    if not compresses(config):
        return ""
    way = "uplink" if config.compression.uplink != "none" else "downlink"
    return setting(config, f"compression.{way}")


def _private(config: Config) -> str:
    """Return the private recipe. The caller knows that the recipe is private."""
    own = is_own(config.local.recipe)
    return "your private recipe" if own else setting(config, "local.recipe")


# Demands of any run

CENTRED_DATA = Demand(
    where("data.center", "none".__ne__),
    {Trait.TOKENS: "only numeric samples have a mean"},
    instead="set center = 'none'",
)
FEATURES = Demand(
    where("data.features", "none".__ne__),
    {Trait.TOKENS: "only images have these features"},
    instead="set features = 'none'",
)
MATRIX_TASK = Demand(
    where("task.name", "matrix".__eq__),
    {
        Trait.UNSCALED_SAMPLES: "the constants of the matrix task are proved only for samples of "
        "norm 1 or less"
    },
    instead="set [task] name = 'network'",
)
LABELLED_TEXT = Demand(
    choice_with("data.name", "labelled text"), {Trait.UNTIED_HEAD: "it is a classification task"}
)
HEAVY_TAILED = Demand(
    where("local.schedule", "heavy-tailed".__eq__),
    {Trait.DIFFERENT_STEPS: "this schedule computes lr from the number of steps"},
)
SERVER_STEPS = Demand(
    where(
        "local.recipe",
        lambda name: has(name, "server orthogonalizes") and not has(name, "votes"),
    ),
    {Trait.DRAWS_RANDOM_NUMBERS: "the server of this recipe cannot draw random numbers"},
)
VOTES = Demand(
    method_with("votes"),
    {
        Trait.NOT_PLAIN_MEAN: "each client has one vote",
        Trait.ROW_MEMORY: "a vote is a sign, and the scale of a row does not change it",
        Trait.HOSTILE_CLIENTS: "the attacks change numbers, but a vote is one bit",
        Trait.CLIPS_CHANGES: "a vote is one bit, and has no length to clip",
        Trait.MIXES_REPLIES: "the mean of votes is no vote",
    },
)
GOSSIP = Demand(
    method_with("gossip"),
    {
        Trait.HAS_SERVER: "its nodes have no server",
        Trait.HOSTILE_CLIENTS: "the attacks change messages to a server",
        Trait.CLIPS_CHANGES: "no message passes a server",
        Trait.MIXES_REPLIES: "no message passes a server",
        Trait.NOT_PLAIN_MEAN: "its nodes average by the weights of the graph",
        Trait.PUBLISHES_TIMES: "these devices wait for a server",
        Trait.COMPRESSES_REPLIES: "its nodes send exact tensors to their neighbours",
        Trait.COMPRESSES_MODEL: "its nodes send exact tensors to their neighbours",
        Trait.CUSTOM_STAGE: "no message passes a server",
        Trait.MEASURES_CLIENTS: "there is no mean update to compare with",
        Trait.LEAVES_OUT_CLIENTS: "its nodes wait for all neighbours",
        Trait.ROW_MEMORY: "its nodes store no state of the orthogonalizer",
        Trait.SPLITS_MATRICES: "its nodes store no state of the orthogonalizer",
        Trait.SENDS_VARIABLES: "its nodes average all parameters",
        Trait.TRAINS_VARIABLES: "its nodes average all parameters",
        Trait.VARIES_RANKS: "its nodes average all parameters",
        Trait.CHANGES_BASES: "its nodes average all parameters",
    },
)
POLARGRAD = Demand(
    where("local.adjust", "polargrad".__eq__),
    {Trait.ROW_MEMORY: "it changes the scale of the rows in each step"},
    instead="set adjust to another value",
)
BIAS_CORRECTED = Demand(
    method_with("bias-corrected"),
    {
        Trait.ROUNDS_PRODUCTS: "these rounding errors hide the small bias that this recipe "
        "corrects",
        Trait.ROW_MEMORY: "its bias correction needs an orthogonalizer without state",
        Trait.SPLITS_MATRICES: "its bias correction needs an orthogonalizer without state",
        Trait.OTHER_MOMENTUM: "there is no bias correction for this form",
        Trait.CORRELATES_NOISE: "it corrects for noise that is independent between steps",
        Trait.ADAPTS_CLIPPING: "it corrects for noise of the same scale at every step",
        Trait.HOSTILE_CLIENTS: "the noise in the messages of hostile clients is unknown",
        Trait.CLIPS_CHANGES: "the noise in clipped messages is unknown",
        Trait.MIXES_REPLIES: "the noise in mixed replies is unknown",
    },
    instead="choose a recipe that ends in -muon",
)
NOISE_FLOOR = Demand(
    where(
        "orthogonalizer.noise-floor",
        bool,
        lambda config: reads(config, "orthogonalizer.noise-floor"),
    ),
    {
        Trait.ROW_MEMORY: "its λ belongs to a smoothed polar map without state",
        Trait.SPLITS_MATRICES: "its λ belongs to whole matrices",
        Trait.CORRELATES_NOISE: "it needs noise that is independent between steps",
        Trait.ADAPTS_CLIPPING: "it needs noise of the same scale at every step",
        Trait.HOSTILE_CLIENTS: "the noise in the messages of hostile clients is unknown",
        Trait.CLIPS_CHANGES: "the noise in clipped messages is unknown",
        Trait.MIXES_REPLIES: "the noise in mixed replies is unknown",
    },
    instead="set noise-floor = 0",
)
COMPRESSION = Demand(
    compressing_key,
    {
        Trait.ENCODES_STATES: "messages can be compressed only once",
        Trait.SENDS_VARIABLES: "messages can be compressed only once",
    },
    instead="leave [compression] out",
)
EF21 = Demand(
    where("compression.feedback", "ef21".__eq__, compresses),
    {Trait.NOT_PLAIN_MEAN: "ef21 adds up the plain mean of all clients' updates"},
    instead="set feedback = 'error'",
)
LATE_REPLIES = Demand(
    where("devices.mode", ASYNCHRONOUS.__contains__),
    {
        Trait.SERVER_STATE: "weighted updates could make this value negative or fractional",
        Trait.SUM_OF_ALL_CLIENTS: "late replies then could not have a smaller weight",
    },
    instead="set mode = 'deadline'",
)
WEIGHTED_CHANGES = Demand(
    where("devices.mode", ("fedbuff", "fedasync").__contains__),
    {Trait.RETURNS_DIRECTIONS: "it adds up changes of models"},
    instead="set mode = 'threshold'",
)
MEAN_OF_PRODUCTS = Demand(
    combines_adapters_by("exact", "subspace"),
    {Trait.LATE_REPLIES: "replies to different models have no common product of factors"},
    instead="set adapters = 'factors'",
)
ADAPTER_RANKS = Demand(
    gives_ranks,
    {
        Trait.LATE_REPLIES: "replies of different ranks have no common change of the model",
        Trait.ENCODES_STATES: "messages can be compressed only once",
        Trait.COMPRESSES_REPLIES: "messages can be compressed only once",
        Trait.CUSTOM_STAGE: "it is unknown whether your stage can read adapters of other ranks",
        Trait.DRAWS_RANDOM_NUMBERS: "random steps would change rows that a client does not use",
    },
    instead="leave adapter-ranks out",
)
ESTIMATES = "the server then adds up estimates, and not the replies of a round"
ATTACKS = Demand(
    attacked,
    {
        Trait.SERVER_STATE: "a hostile client could make this value negative",
        Trait.SUM_OF_ALL_CLIENTS: ESTIMATES,
    },
    instead="set kind = 'none'",
)
BALL = Demand(clips_changes, {Trait.SUM_OF_ALL_CLIENTS: ESTIMATES}, instead="set ball = 'none'")
MIXING = Demand(mixes_replies, {Trait.SUM_OF_ALL_CLIENTS: ESTIMATES}, instead="set mixing = 0")
AVERAGE = Demand(
    where("output.average", bool),
    {Trait.CHANGES_BASES: "the average of factors then belongs to no average of models"},
    instead="set average = 0",
)
OF_ANY_RUN = (
    *(CENTRED_DATA, FEATURES, MATRIX_TASK, HEAVY_TAILED, LABELLED_TEXT),
    *(COMPRESSION, EF21, SERVER_STEPS, VOTES, GOSSIP, POLARGRAD, BIAS_CORRECTED, NOISE_FLOOR),
    *(LATE_REPLIES, WEIGHTED_CHANGES),
    *(MEAN_OF_PRODUCTS, ADAPTER_RANKS, AVERAGE, ATTACKS, BALL, MIXING),
)

# Demands of privacy per example

PRIVATE_RECIPE = Demand(
    _private,
    {
        Trait.MEASURES_CLIENTS: "these measurements contain no noise",
        Trait.REPEATS_REQUESTS: "a client could then release twice in a round, but the ledger "
        "contains only one release per round",
        Trait.STORES_CLIENT_STATES: "the privacy guarantee does not cover stored states",
        Trait.RECOMPUTES: "gradients of single examples are computed from stored activations",
        Trait.SKETCHES_GRADIENTS: "the privacy guarantee does not cover this second release",
        Trait.VARIES_RANKS: "noise would fill the rows that a client does not use",
    },
)
UNIFORM_COHORTS = Demand(
    _private,
    {Trait.SELECTS_CLIENTS: "the privacy guarantee assumes that clients are sampled uniformly"},
)
MECHANISM = Demand(
    _private,
    {
        Trait.PROTECTS_CLIENTS: "its noise protects single examples within a client",
        Trait.SHUFFLED_BATCHES: "the privacy accountant does not support such batches",
    },
)
ADD_REMOVE = Demand(
    where("privacy.adjacency", "add-remove".__eq__),
    {Trait.WEIGHTS_BY_SIZE: "it must hide this number"},
    instead="set adjacency = 'zero-out'",
)
NOISE = Demand(
    where("privacy.noise", bool),
    {Trait.UNCLIPPED: "noise protects only clipped gradients"},
    instead="set noise = 0",
)
QUANTILE = Demand(
    where("privacy.quantile", bool),
    {
        Trait.CLIPS_ALL: "it sets the share of unclipped gradients",
        Trait.UNCLIPPED: "it adapts the clipping bound from a finite start",
        Trait.CORRELATES_NOISE: "correlated noise needs the same scale in all steps",
    },
    instead="set quantile = 0",
)
GRID = Demand(
    where("privacy.arithmetic", "grid".__eq__),
    {
        Trait.ADAPTS_CLIPPING: "this needs continuous noise",
        Trait.CORRELATES_NOISE: "this needs continuous noise",
    },
    instead="set arithmetic = 'auto'",
)
OF_MECHANISM = (MECHANISM, GRID, QUANTILE, NOISE, BIAS_CORRECTED, NOISE_FLOOR)

# Demands of privacy per client

CLIENT_LEVEL = Demand(
    where("privacy.level", "client".__eq__),
    {
        Trait.MEASURES_CLIENTS: "these measurements contain no noise",
        Trait.STORES_CLIENT_STATES: "the privacy guarantee does not cover stored states",
        Trait.SKETCHES_GRADIENTS: "the privacy guarantee does not cover this second release",
        Trait.VARIES_RANKS: "updates of all clients must have the same size",
        Trait.COMPRESSES_MODEL: "releases are added to the exact model and not to a compressed "
        "model",
        Trait.NOISE_PER_STEP: "it protects whole clients",
        Trait.SERVER_STATE: "noise can make an averaged second moment negative, and a counter "
        "useless",
        Trait.NOT_PLAIN_MEAN: "only the plain mean bounds the influence of each client",
        Trait.PUBLISHES_TIMES: "it must hide these numbers",
        Trait.UNCLIPPED: "it needs clipped updates",
        Trait.HOSTILE_CLIENTS: "the account assumes that every client clips its update and adds "
        "its noise",
        Trait.CLIPS_CHANGES: "it already clips the updates of clients",
        Trait.MIXES_REPLIES: "the server sees only one noisy sum",
    },
)
TRUSTED_SERVER = Demand(
    where("privacy.trust", "local".__ne__),
    {
        Trait.COMPRESSES_REPLIES: "only messages that already contain noise can be compressed, and "
        "the noise is added later"
    },
    instead="set trust = 'local'",
)
UNTRUSTED_SERVER = Demand(
    where("privacy.trust", "central".__ne__),
    {
        Trait.SECRET_COHORTS: "the server knows which clients answer",
        Trait.REPEATS_REQUESTS: "a client could then release twice in a round, but the ledger "
        "contains only one release per round",
    },
)
MASKED_REPLIES = Demand(
    where("privacy.trust", "distributed".__eq__),
    {
        Trait.FLOATING_POINT_NOISE: "it adds masks to integers",
        Trait.LEAVES_OUT_CLIENTS: "the masks of a failed client would stay in the sum",
    },
)
OF_CLIENT_LEVEL = (CLIENT_LEVEL, TRUSTED_SERVER, UNTRUSTED_SERVER, MASKED_REPLIES)


def problems(config: Config) -> Iterator[str]:
    """Yield an error for each combination of keys that makes a config invalid."""
    yield from incompatible.problems(config)
    yield from hostile.problems(config)
    yield from _forbidden(config, OF_ANY_RUN)
    if config.privacy.level == "client":
        yield from _forbidden(config, OF_CLIENT_LEVEL)
        yield from incompatible.client_level_problems(config)
    elif config.local.recipe in PRIVATE:
        yield from private_recipe_problems(config)


def private_recipe_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that no private recipe supports."""
    yield from incompatible.correlated_noise_problems(config)
    yield from fixed_smoothing_problems(config)
    yield from _forbidden(config, (UNIFORM_COHORTS, PRIVATE_RECIPE, ADD_REMOVE))
    yield from mechanism_problems(config.privacy, config.local)


def mechanism_problems(
    privacy: Any, local: Any, orthogonalizer: OrthogonalizerTable | None = None
) -> Iterator[str]:
    """Yield errors for keys of these tables that no private recipe supports."""
    table = orthogonalizer or OrthogonalizerTable()
    tables = SimpleNamespace(
        privacy=privacy, local=local, orthogonalizer=table, attacks=Attacks(), robust=Robust()
    )
    yield from _forbidden(tables, OF_MECHANISM)
    yield from incompatible.mechanism_problems(privacy, local)
    yield from fixed_smoothing_problems(tables)


def fixed_smoothing_problems(config: Config) -> Iterator[str]:
    """Yield an error if lambda is set although noise-floor replaces it."""
    table = config.orthogonalizer
    if NOISE_FLOOR.named(config) and not is_default("orthogonalizer.lambda", table.lambda_):
        yield (
            f"[orthogonalizer] lambda = {table.lambda_:g} has no effect, because noise-floor = "
            f"{table.noise_floor:g} sets λ from the noise. Leave lambda out, or set noise-floor = "
            "0."
        )


def _forbidden(config: Config, demands: tuple[Demand[Config], ...]) -> Iterator[str]:
    for demand in demands:
        yield from demand.problems(config, FACTS)
