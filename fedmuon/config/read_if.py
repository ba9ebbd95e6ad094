"""Which keys of a config something reads, and the sentence that refuses one that nothing reads.

A value that nothing reads looks as if it held: `epsilon = 8` beside a recipe without privacy. So
`NEEDS` says of every key on which others it hangs; one that differs from its default must be read.
The needs of a key begin with those of the keys that they name, so leaving one out changes no other.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from operator import not_
from typing import Any, get_args

from fedmuon.core.choices import PRIVATE, TABLES, TEXTS, Recipe, is_own
from fedmuon.core.tables import attribute, shown

Config = Any  # a `fedmuon.config.load.Config`, which asks here while it is made


@dataclass(frozen=True)
class Need:
    """What the key `key` must be, for the `readers` of another one to look at that."""

    key: str
    holds: Callable[[Any], bool]
    readers: str  # follows "only"
    mend: str  # follows "so"
    unless: "Need | None" = None  # what serves as well

    def met(self, config: Config) -> bool:
        """Whether it is what it must be, or what serves as well is."""
        return self.holds(_value(config, self.key)) or bool(self.unless and self.unless.met(config))


def _one_of(key: str, values: Collection[str], readers: str, mend: str = "") -> Need:
    table, _, name = key.partition(".")
    known = list(values)
    said = f"= '{known[0]}'" if len(known) == 1 else f"to one of {', '.join(known)}"

    def holds(value: str) -> bool:  # what an object of the user's reads, is seen when it is made
        return value in known or is_own(value)

    return Need(key, holds, readers, mend or f"set [{table}] {name} {said}")


def _recipes(readers: str, chosen: Callable[[str], bool], mend: str = "") -> Need:
    names = [name for name in get_args(Recipe) if chosen(name)]
    return _one_of("local.recipe", names, readers, mend)


def _map(*names: str) -> tuple[Need, ...]:
    readers = f"the map {names[0]} reads" if len(names) == 1 else f"{' and '.join(names)} read"
    return MUON, _one_of("orthogonalizer.name", names, readers)


WITHOUT = ("fedavg", "fedavgm", "adamw", "dp-adam", "disk-adam")  # local momentum of their own
STATELESS = ("fedavg", "fedavgm", "local-muon")  # whose clients send their models alone
MUON = _recipes("Muon's recipes read", lambda name: "muon" in name, "choose a recipe ...muon...")
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
NETWORK = _one_of("task.name", ["network"], "networks read")
MATRIX = (_one_of("task.name", ["matrix"], "the matrix task reads"),)
OURS = Need(
    "task.name", "network".__eq__, "networks of this package read", "set [task] name = 'network'"
)
DECODER = OURS, _one_of("task.model", ["gpt"], "the model gpt reads")
HEAVY = (
    _recipes("recipes with local momentum read", lambda name: name not in WITHOUT),
    Need(
        "local.schedule",
        lambda name: name != "heavy-tailed",
        "schedules but heavy-tailed read",
        "choose another [local] schedule",
    ),
)
TAILED = _one_of("local.schedule", ["heavy-tailed"], "the heavy-tailed schedule reads")
RAY = _one_of("engine.name", ["ray"], "the engine ray reads")
REMOTE = _one_of("engine.name", ["ray", "deployment"], "engines with client processes read")
DISK = PRIVATELY, _recipes("recipes disk-... read", lambda name: name.startswith("disk-"))
SCHULZ = _map("newton-schulz")
CYCLIC = PRIVATELY, _one_of("privacy.sampling", ["cyclic"], "lots in one order read")
FILES = ("fashion-mnist", "mnist", "cifar10", "idx", "npz", "csv", "parquet", "text", *TABLES)
ALWAYS: tuple[Need, ...] = ()


def _data(*names: str) -> tuple[Need, ...]:
    return (_one_of("data.name", names, f"{', '.join(names)} read{'s' * (len(names) == 1)}"),)


NEEDS: dict[str, dict[str, tuple[Need, ...]]] = {
    "data": {
        **dict.fromkeys(("name", "train", "test", "minimum", "normalize", "options"), ALWAYS),
        "alpha": (
            _one_of(
                "federation.partition", ["dirichlet", "quantity"],
                "the partitions dirichlet and quantity read",
            ),
        ),
        "folder": _data(*FILES),
        "context": _data(*TEXTS),
        "tokenizer": _data(*TABLES),
        **dict.fromkeys(("dimension", "classes"), _data("synthetic")),
    },
    "federation": dict.fromkeys(
        ("clients", "per-round", "rounds", "risk-weights", "aggregate", "partition", "seed",
         "options"),
        ALWAYS,
    ),
    "task": {
        **dict.fromkeys(("name", "options"), ALWAYS),
        "model": (OURS,),
        "initial": MATRIX,
        **dict.fromkeys(("width", "depth", "heads", "weights", "lora-rank"), DECODER),
    },
    "local": {
        **dict.fromkeys(
            ("recipe", "steps", "batch", "lr", "weight-decay", "schedule", "options"), ALWAYS
        ),
        "momentum": HEAVY,
        "momentum-form": HEAVY[:1],
        "tail-index": (TAILED,),
        "alignment": (_recipes("fedmuon-aligned reads", "fedmuon-aligned".__eq__),),
        "server-momentum": (_recipes("fedavgm reads", "fedavgm".__eq__),),
        **dict.fromkeys(("route", "aux", "aux-lr"), (NETWORK, MUON)),
        "adjust": (MUON,),  # and refused where there is but one matrix
    },
    "orthogonalizer": {
        "name": (MUON,),
        "options": ALWAYS,
        "lambda": _map("smoothed-polar"),
        **dict.fromkeys(("steps", "coefficients"), _map("newton-schulz", "randomized-polar")),
        "normalization": SCHULZ,
        "eps": (
            *SCHULZ,
            _one_of("orthogonalizer.normalization", ["plus", "max"],
                    "the normalizations plus and max read"),
        ),
        "sigma": _map("gaussian-smoothed-sign"),
        "clip-level": _map("clipped-sign"),
        **dict.fromkeys(("rank", "oversample", "power", "sketch"), _map("randomized-polar")),
    },
    "privacy": {
        **dict.fromkeys(
            ("bound", "noise", "epsilon", "delta", "arithmetic", "insecure-reproducible-noise"),
            (EITHER,)
        ),
        **dict.fromkeys(
            # population and rate first, as they set adjacency: what was set is what is named
            ("clipping", "lot", "population", "rate", "adjacency", "sampling"), (PRIVATELY,)
        ),
        "level": ALWAYS,
        **dict.fromkeys(("trust", "cohorts"), (CLIENT,)),
        "honest": (CLIENT, _one_of("privacy.trust", ["distributed"], "distributed trust reads")),
        "state-weight": (
            CLIENT,
            _recipes("recipes that send momenta read", lambda name: name not in STATELESS),
        ),
        "quantile": (PRIVATELY,),
        **dict.fromkeys(("quantile-rate", "count-noise"), (
            PRIVATELY,
            Need("privacy.quantile", bool, "clipping at a quantile reads", "set quantile above 0"),
        )),
        "noise-correlation": CYCLIC,
        "band": (
            *CYCLIC,
            _one_of("privacy.noise-correlation", ["sqrt-toeplitz"], "correlated noise reads"),
        ),
        "noise-source": (
            EITHER,
            Need("privacy.insecure-reproducible-noise", not_, "secret noise reads",
                 "set insecure-reproducible-noise = false"),
        ),
        "kappa": DISK,
        "lookahead": (
            *DISK,
            Need("privacy.kappa", lambda kappa: kappa < 1, "a filter reads", "set kappa below 1"),
        ),
        "probes": (
            PRIVATELY,
            _recipes("recipes ...-muonbc read", lambda name: name.endswith("muonbc")),
        ),
    },
    "engine": {
        **dict.fromkeys(("name", "dtype", "device"), ALWAYS),
        "kernel": MATRIX,
        **dict.fromkeys(("cpus-per-client", "gpus-per-client", "ray-address"), (RAY,)),
    },
    "faults": dict.fromkeys(("policy", "retries", "deadline", "patience"), (REMOTE,)),
    "stability": {
        **dict.fromkeys(("neighbours", "delta", "lipschitz", "c-hp"), ALWAYS),
        **dict.fromkeys(("constants", "realized"), MATRIX),
        "trials": (
            _one_of("stability.neighbours", ["own", "any", "worst"], "neighbours drawn or ranked"
                    " read"),
        ),
        "alpha-smoothing": _map("gaussian-smoothed-sign"),
    },
    "output": {
        **dict.fromkeys(("evaluate-every", "callback", "options"), ALWAYS),
        "checkpoint-every": (
            _recipes(
                "a run without privacy reads",
                lambda name: name not in PRIVATE,
                "choose one without privacy (a private run keeps every round)",
            ),
            Need(
                "privacy.level",
                "client".__ne__,
                "a run without privacy reads",
                "leave level = 'example' (a private run keeps every round)",
            ),
        ),
    },
}  # fmt: skip


OF_CLIENTS = (ALWAYS, EITHER, CLIENT)  # what keys need at first that client level reads


def reads(config: Config, name: str) -> bool:
    """Whether anything reads the key `table.key` under the rest of the config."""
    return _missing(config, name) is None


def unread(config: Config) -> list[str]:
    """The keys `table.key` that differ from their defaults though nothing reads them."""
    names = [f"{table}.{key}" for table, keys in NEEDS.items() for key in keys]
    idle = [name for name in names if not reads(config, name)]
    return [name for name in idle if not is_default(config, name, _value(config, name))]


def unread_by_own_recipe(config: Config, private: bool) -> Iterator[str]:
    """Sentences on keys of private recipes of ours that are set beside a recipe of the user's: its
    mechanism, if it is `private`, has them in itself; delta is the account's."""
    why, but = "has no mechanism to read it", ()
    if private:
        why, but = "carries clipping, noise and lots in its mechanism", ("privacy.delta",)
    names = [
        f"privacy.{key}"
        for key, needs in NEEDS["privacy"].items()
        if private
        or not (config.privacy.level == "client" and (needs or (ALWAYS,))[0] in OF_CLIENTS)
    ]
    names += ["output.checkpoint-every"] if private else []  # a private run keeps every round
    for name in names:
        if name not in but and not is_default(config, name, value := _value(config, name)):
            yield (
                f"{_spelled(name)} = {shown(value)} has no effect: your recipe {why}, so leave "
                f"{name.partition('.')[2]} out"
            )


def is_default(config: Config, name: str, value: Any) -> bool:
    """Whether that is the value of the key where none is set."""
    table, key = _field(config, name)
    return value == type(table).model_fields[key].default


def refusal(config: Config, name: str, value: Any = None) -> str:
    """What is set, why nothing reads it, and the mend; the value is the config's if not given."""
    need = _missing(config, name)
    assert need is not None
    key, mend = need.key, need.mend
    if need is PRIVATELY and config.privacy.level == "client":  # neither goes with the other
        key, mend = CLIENT.key, f"set level = 'example' and {mend}"
    elif need is CLIENT and config.local.recipe in PRIVATE:
        mend += " and choose a recipe without dp- and disk-"
    value = _value(config, name) if value is None else value
    return (
        f"{_spelled(name)} = {shown(value)} has no effect: only {need.readers} it, and here "
        f"{_spelled(key)} = {shown(_value(config, key))}, so {mend}, or leave "
        f"{name.partition('.')[2]} out"
    )


def _missing(config: Config, name: str) -> Need | None:
    table, _, key = name.partition(".")
    if table == "task" and key != "model" and is_own(config.task.name):
        return None  # which may ask for any
    return next((need for need in NEEDS[table][key] if not need.met(config)), None)


def _field(config: Config, name: str) -> tuple[Any, str]:
    """The table of a key, and the attribute of it that the key spells."""
    table, _, key = name.partition(".")
    held = getattr(config, table)
    return held, attribute(type(held), key)


def _value(config: Config, name: str) -> Any:
    return getattr(*_field(config, name))


def _spelled(name: str) -> str:
    table, _, key = name.partition(".")
    return f"[{table}] {key}"
