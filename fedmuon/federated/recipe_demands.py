"""Demands on a built recipe: what privacy, FedBuff and other settings forbid (`core.demands`)."""

from fedmuon.config.demands import CLIENT_LEVEL as LEVEL_KEY
from fedmuon.config.demands import EF21 as EF21_KEY
from fedmuon.config.demands import LATE_REPLIES as LATE_REPLIES_KEY
from fedmuon.config.demands import TRUSTED_SERVER as TRUSTED_KEY
from fedmuon.config.demands import WEIGHTED_CHANGES as WEIGHTED_CHANGES_KEY
from fedmuon.config.demands import compressing_key
from fedmuon.config.schema import ASYNCHRONOUS, reads
from fedmuon.config.user_objects import user_objects
from fedmuon.core.demands import Demand, Trait, require_allowed, setting, where
from fedmuon.core.errors import InputError
from fedmuon.federated.recipe_facts import FACTS, BuiltRecipe, if_recipe, of_config

UNKNOWN_TO_LEDGER = "the ledger does not know what your stage sends"
UNDOES_CLIPPING = "decoding can undo the clipping that the privacy guarantee needs"
SECOND_RELEASE = "the privacy guarantee does not cover this second release"
SAME_SIZE = "the noisy tensors of all clients must have the same size"
UNCOUNTED = "the privacy guarantee does not count stored states"
ONLY_ONCE = "messages can be compressed only once"
MORE_THAN_UPDATE = "only the model update of a client is clipped and made noisy"


def _add_remove(built: BuiltRecipe) -> str:
    mechanism = built.recipe.mechanism
    hidden = mechanism is not None and mechanism.adjacency == "add-remove"
    return "a mechanism with [privacy] adjacency = 'add-remove'" if hidden else ""


def _different_steps(built: BuiltRecipe) -> str:
    """Return the key `epochs` of a run with a custom recipe. The config checks other recipes."""
    custom = user_objects(built.config).recipe is not None
    return setting(built.config, "local.epochs") if custom and built.config.local.epochs else ""


def _batch_norm(built: BuiltRecipe) -> str:
    return "a model with BatchNorm" if getattr(built.task, "statistics", ()) else ""


def _ef21(built: BuiltRecipe) -> str:
    config = built.config
    if any(Trait.SUM_OF_ALL_CLIENTS in stage.facts for stage in built.recipe.stages):
        return f"a stage that {Trait.SUM_OF_ALL_CLIENTS}"
    return EF21_KEY.named(config) if reads(config, "compression.feedback") else ""


def _trusted_server(built: BuiltRecipe) -> str:
    privacy = built.config.privacy
    hidden = privacy.level == "client" and privacy.trust != "local"
    return TRUSTED_KEY.named(built.config) if hidden else ""


PRIVATE = Demand(
    if_recipe(lambda recipe: recipe.private),
    {
        Trait.STORES_CLIENT_STATES: UNCOUNTED,
        Trait.ENCODES_STATES: UNDOES_CLIPPING,
        Trait.SKETCHES_GRADIENTS: SECOND_RELEASE,
        Trait.VARIES_RANKS: SAME_SIZE,
        Trait.CUSTOM_STAGE: UNKNOWN_TO_LEDGER,
    },
)
CLIENT_LEVEL = Demand(
    of_config(where("privacy.level", "client".__eq__)),
    {
        Trait.STORES_CLIENT_STATES: UNCOUNTED,
        Trait.ENCODES_STATES: UNDOES_CLIPPING,
        Trait.SKETCHES_GRADIENTS: SECOND_RELEASE,
        Trait.VARIES_RANKS: SAME_SIZE,
        Trait.COMPRESSES_MODEL: LEVEL_KEY.forbids[Trait.COMPRESSES_MODEL],
        Trait.CUSTOM_STAGE: UNKNOWN_TO_LEDGER,
        Trait.CLIENT_RULE: MORE_THAN_UPDATE,
        Trait.COUNTS_STEPS: MORE_THAN_UPDATE,
        Trait.NOT_PLAIN_MEAN: "only the plain mean bounds the influence of each client",
    },
)
TRUSTED_SERVER = Demand(_trusted_server, TRUSTED_KEY.forbids, instead=TRUSTED_KEY.instead)
ADD_REMOVE = Demand(
    _add_remove,
    {
        Trait.DROPOUT: "removing a sample changes the positions of others",
        Trait.WEIGHTS_BY_SIZE: "it hides how many samples a client has",
        Trait.COUNTS_STEPS: "it hides how many samples a client has, and so how many steps it "
        "takes",
    },
    instead="set adjacency = 'zero-out'",
)
COUNTED = Demand(
    if_recipe(lambda recipe: recipe.counted),
    {Trait.NO_WEIGHTS: "its server needs the weight of each reply"},
)
COUNTED_STATES = Demand(
    if_recipe(lambda recipe: recipe.counted and bool(recipe.persistent)),
    {Trait.NOT_PLAIN_MEAN: "its server needs the plain mean of the client states"},
)
DIFFERENT_STEPS = Demand(
    _different_steps,
    {
        Trait.PRIVATE: "clients then take different numbers of steps",
        Trait.FIXED_STEPS: "clients then take different numbers of steps",
    },
    instead="set [local] steps instead of epochs",
)
COMPRESSION = Demand(
    of_config(compressing_key),
    {
        Trait.ENCODES_STATES: ONLY_ONCE,
        Trait.SENDS_VARIABLES: ONLY_ONCE,
        Trait.VARIES_RANKS: ONLY_ONCE,
        Trait.COMPRESSES_REPLIES: ONLY_ONCE,
        Trait.COMPRESSES_MODEL: ONLY_ONCE,
    },
    instead="leave [compression] out",
)
EF21 = Demand(
    _ef21, {Trait.NOT_PLAIN_MEAN: EF21_KEY.forbids[Trait.NOT_PLAIN_MEAN]}, instead=EF21_KEY.instead
)
LATE_REPLIES = Demand(
    of_config(where("devices.mode", ASYNCHRONOUS.__contains__)),
    {
        Trait.CUSTOM_STAGE: "it is unknown what your stage does with changes of models",
        Trait.SUM_OF_ALL_CLIENTS: LATE_REPLIES_KEY.forbids[Trait.SUM_OF_ALL_CLIENTS],
    },
    instead="set [devices] mode = 'deadline'",
)
WEIGHTED_CHANGES = Demand(
    of_config(where("devices.mode", ("fedbuff", "fedasync").__contains__)),
    WEIGHTED_CHANGES_KEY.forbids,
    instead="set [devices] mode = 'threshold'",
)
FINE_TUNING = Demand(
    of_config(where("output.fine-tune", bool, lambda config: reads(config, "output.fine-tune"))),
    {
        Trait.PRIVATE: "the ledger does not count the tuned models",
        Trait.PERSONAL_MODEL: "this recipe already trains a model per client",
        Trait.RETURNS_DIRECTIONS: "this recipe has no local steps",
    },
    instead="leave fine-tune out",
)
BATCH_NORM = Demand(
    _batch_norm,
    {Trait.PERSONAL_MODEL: "a second model per client cannot store its running statistics"},
    instead="use GroupNorm",
)
DEMANDS = (
    *(PRIVATE, CLIENT_LEVEL, TRUSTED_SERVER, ADD_REMOVE, COUNTED, COUNTED_STATES, DIFFERENT_STEPS),
    *(COMPRESSION, EF21, LATE_REPLIES, WEIGHTED_CHANGES, FINE_TUNING, BATCH_NORM),
)


def require_demands(built: BuiltRecipe) -> None:
    """Raise an error if a setting forbids a fact of a recipe, or the recipe's states."""
    require_allowed(built, DEMANDS, FACTS)
    recipe, config = built.recipe, built.config
    moved = {*recipe.returned} & {*recipe.sent} - {"momentum"}
    if moved and config.devices.mode in ASYNCHRONOUS:
        raise InputError(
            f"[devices] mode = {config.devices.mode!r} adds weighted changes of states, which can "
            f"make the state {min(moved)!r} of this recipe invalid. For example, a second moment "
            "can become negative. Set mode = 'deadline', or let clients return changes of a state "
            "that the server does not send."
        )
    if config.privacy.level == "client":
        for name in recipe.returned:
            if name not in recipe.sent:  # then its change is unknown and cannot be clipped
                raise InputError(
                    "[privacy] level = 'client' clips how much a client changes the state "
                    f"{name!r}, but the server does not send this state to the clients. Add "
                    f"{name!r} to `sent` of your recipe."
                )
