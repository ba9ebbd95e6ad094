"""Facts about a setting, and demands that forbid some facts.

A feature states facts about itself: "stores a state of each client between rounds". Another feature
demands the absence of some facts, and says why: the ledger of a private run does not count stored
states. Each pair of a fact and a demand that forbids it gives one error, so n facts and m demands
describe n x m combinations. A new feature declares its own facts, and no demand changes.

A subject is the object that facts and demands look at, such as a config, or a recipe in its config.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from fedmuon.core.errors import InputError, shown
from fedmuon.core.tables import value_of

Subject = TypeVar("Subject")


class Trait(StrEnum):
    """What a fact says about a setting: a verb phrase that follows the setting in an error."""

    # Data and samples
    TOKENS = "turns samples into tokens"
    UNSCALED_SAMPLES = "does not scale samples to a norm of at most 1"
    HOLDS_OUT_SAMPLES = "removes test samples of clients from the training samples"
    # Local steps
    DIFFERENT_STEPS = "lets clients take different numbers of local steps"
    FIXED_STEPS = "needs the same number of local steps for all clients"
    SHUFFLED_BATCHES = "draws shuffled batches of fixed size"
    STEP_SIZE_OF_RUN = "computes the step size during the run"
    OTHER_MOMENTUM = "is a form of momentum other than ema and polyak"
    NO_DERIVATIVE = "makes steps that have no derivative at some points"
    RETURNS_DIRECTIONS = "lets clients return directions instead of models"
    PERSONAL_MODEL = "trains a second model for each client"
    RECOMPUTES = "computes the activations of blocks again in the backward pass"
    DROPOUT = "has dropout, whose masks depend on the positions of a client's samples"
    # The orthogonalized step
    DRAWS_RANDOM_NUMBERS = "draws random numbers"
    UNSMOOTH_MAP = "jumps where a singular value is 0, or uses a random sketch"
    ROUNDS_PRODUCTS = "rounds the products of matrices to 8 bits"
    ROUNDS_NEWTON_SCHULZ = "rounds the products of Newton–Schulz to 8 bits"
    ROW_MEMORY = "averages row sizes over steps"
    SPLITS_MATRICES = "orthogonalizes parts of matrices in some steps"
    SCALES_BY_MOMENTUM = "scales each step by a norm of the momentum"
    SCALES_WEIGHTS = "scales the weights after each step"
    SHRINKS_NETWORK = "shrinks the parameters of a network, which have two step sizes"
    # States
    STORES_CLIENT_STATES = "stores a state of each client between rounds"
    SERVER_STATE = "lets the server average a second moment or a counter"
    # Messages and aggregation
    COMPRESSES_REPLIES = "compresses the messages of clients"
    COMPRESSES_MODEL = "compresses the messages of the server"
    ENCODES_STATES = "sends states in an encoded form, such as low-rank factors"
    SENDS_VARIABLES = "sends other variables instead of the factors of adapters"
    VARIES_RANKS = "gives clients adapters of different ranks"
    CHANGES_BASES = "changes the bases of adapters between rounds"
    SKETCHES_GRADIENTS = "sends sketches of gradients in addition to models"
    SUM_OF_ALL_CLIENTS = "adds the last updates of all clients in every round"
    CUSTOM_STAGE = "changes messages by your own code"
    CLIENT_RULE = "changes replies by a client's rule"
    COUNTS_STEPS = "needs the weight and the number of local steps of each reply"
    NOT_PLAIN_MEAN = "does not take the plain mean of the replies"
    NO_WEIGHTED_MEAN = "does not take a weighted mean of the replies"
    NO_WEIGHTS = "gives replies no weights"
    WEIGHTS_BY_SIZE = "may weight clients by their number of samples"
    # Participation, time and faults
    SELECTS_CLIENTS = "influences which clients take part"
    PUBLISHES_TIMES = "publishes times that depend on the numbers of samples of clients"
    LATE_REPLIES = "combines replies to older models"
    SECRET_COHORTS = "keeps the participants of a round secret"
    REPEATS_REQUESTS = "lets a client repeat a request"
    LEAVES_OUT_CLIENTS = "leaves out clients that fail"
    OTHER_PROCESSES = "trains clients in other processes"
    HAS_SERVER = "runs the rounds on a server"
    MEASURES_CLIENTS = "releases measurements of the samples of clients"
    # Robustness
    HOSTILE_CLIENTS = "lets hostile clients send other messages or train on other labels"
    CLIPS_CHANGES = "clips the changes of clients on the server"
    MIXES_REPLIES = "mixes the replies of clients before they are combined"
    # Privacy
    PRIVATE = "is private"
    NOISE_PER_STEP = "adds noise to each step to protect single examples"
    PROTECTS_CLIENTS = "clips and adds noise to the whole update of each client"
    UNCLIPPED = "clips nothing"
    CLIPS_ALL = "scales every gradient, so that no gradient stays unclipped"
    ADAPTS_CLIPPING = "changes the clipping bound, and so the scale of the noise, during the run"
    CORRELATES_NOISE = "correlates the noise of several steps"
    FLOATING_POINT_NOISE = "computes with floating-point numbers"
    TRAINS_VARIABLES = "trains only a part of the parameters, or other variables"
    FIXED_ORDER = "cuts lots from an order of the samples"
    # Models
    UNTIED_HEAD = "needs a decoder that predicts tokens"


@dataclass(frozen=True)
class Fact(Generic[Subject]):
    """A trait of a setting.

    Attributes:
        trait: What the setting does.
        named: Function that returns the setting with its value, such as `[local] epochs = 2`. It
            returns "" if the subject does not have the trait.
        fix: How to remove the trait, such as "Leave epochs out".
    """

    trait: Trait
    named: Callable[[Subject], str]
    fix: str


@dataclass(frozen=True)
class Demand(Generic[Subject]):
    """A setting that forbids some traits of other settings.

    Attributes:
        named: Function that returns the setting with its value, such as `[privacy] level =
            'client'`. It returns "" if the subject does not have this setting.
        forbids: Mapping from each forbidden trait to the reason, the words that follow "because".
            All other traits are allowed.
        instead: Another fix, such as "set [privacy] level = 'example'".
    """

    named: Callable[[Subject], str]
    forbids: Mapping[Trait, str]
    instead: str = ""

    def problems(self, subject: Subject, facts: Iterable[Fact[Subject]]) -> Iterator[str]:
        """Yield an error for each of these facts that the subject has and the demand forbids."""
        if not (demanding := self.named(subject)):
            return
        for fact in facts:
            if fact.trait in self.forbids and (named := fact.named(subject)):
                yield self.sentence(fact, named, demanding)

    def sentence(self, fact: Fact[Subject], named: str, demanding: str) -> str:
        """Return the error for a forbidden fact.

        Args:
            fact: The fact.
            named: The setting with this trait.
            demanding: The setting that forbids the trait.
        """
        fix = f"{fact.fix}, or {self.instead}" if self.instead else fact.fix
        return (
            f"{named} {fact.trait}, but {demanding} does not allow this, because "
            f"{self.forbids[fact.trait]}. {fix}."
        )


def require_allowed(
    subject: Subject, demands: Iterable[Demand[Subject]], facts: Iterable[Fact[Subject]]
) -> None:
    """Raise an error for the first fact of the subject that one of the demands forbids."""
    facts = [*facts]
    for demand in demands:
        for problem in demand.problems(subject, facts):
            raise InputError(problem)


def setting(tables: Any, key: str) -> str:
    """Return a key of a config with its value, as in `[local] epochs = 2`.

    Args:
        tables: An object whose attributes are tables, such as a config.
        key: The key, as `table.key`.
    """
    table, _, name = key.partition(".")
    return f"[{table}] {name} = {_toml(value_of(tables, key))}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else shown(value)


def where(
    key: str, holds: Callable[[Any], bool], also: Callable[[Any], bool] | None = None
) -> Callable[[Any], str]:
    """Return the attribute `named` of a fact or demand about one key of a config.

    Args:
        key: The key, as `table.key`.
        holds: Function of the key's value: whether the fact is true.
        also: Function of the config: another condition.
    """

    def named(tables: Any) -> str:
        true = holds(value_of(tables, key)) and (also is None or also(tables))
        return setting(tables, key) if true else ""

    return named
