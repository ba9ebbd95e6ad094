"""What the user brings: objects handed over in Python, or named in the config, one of each kind.

An object is the value itself, or a function that makes it of what it asks for by its parameters'
names: keys of its own table, options (`[local.options]`), and facts such as the shape of a sample.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from fedmuon.config.read_if import is_default
from fedmuon.core.choices import GIVEN, is_own
from fedmuon.core.errors import InputError
from fedmuon.core.guard import Guard
from fedmuon.core.registry import (
    Registry,
    default,
    function,
    imported,
    made,
    says_nothing,
    settled,
    stamp,
    takes,
)
from fedmuon.core.source_files import Stamp
from fedmuon.core.tables import attribute

Config = Any  # a `fedmuon.config.load.Config`, which holds what was given

IN_PYTHON = " in Python, with its objects"  # how a run goes on whose config cannot name them
# Kind -> the table and key that name it.
NAMED = {
    "data": ("data", "name"),
    "partition": ("federation", "partition"),
    "aggregate": ("federation", "aggregate"),
    "task": ("task", "name"),
    "recipe": ("local", "recipe"),
    "schedule": ("local", "schedule"),
    "orthogonalizer": ("orthogonalizer", "name"),
    "callback": ("output", "callback"),
}
# Keys of a table that its object may ask for; those of them that it does not must be left alone.
OFFERED = {
    "data": ("folder", "context", "tokenizer", "dimension", "classes"),
    "partition": ("alpha",),
    "task": ("width", "depth", "heads", "weights"),
    "recipe": (
        "lr", "momentum", "momentum-form", "weight-decay", "alignment", "server-momentum", "route",
        "aux", "aux-lr", "adjust",
    ),
    "orthogonalizer": (
        "lambda", "steps", "coefficients", "eps", "normalization", "sigma", "clip-level", "rank",
        "oversample", "power", "sketch",
    ),
}  # fmt: skip
CALLED = ("orthogonalizer", "aggregate", "schedule", "callback")  # whose values are functions
SHARED = {"recipe": ("steps",), "data": ("train", "test"), "partition": ("minimum",)}  # read anyway


def handed_over(config: Config) -> bool:
    """Whether a run of the config needs objects that no config can name."""
    return any(getattr(getattr(config, table), key) == GIVEN for table, key in NAMED.values())


@dataclass(frozen=True, eq=False)
class Own:
    """The objects themselves; None where the config names one of ours."""

    data: Any = None
    test: Any = None
    partition: Any = None
    task: Any = None
    recipe: Any = None
    orthogonalizer: Any = None
    aggregate: Any = None
    schedule: Any = None
    callback: Any = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in dataclasses.fields(self))


NOTHING = Own()


def value(
    config: Config,
    kind: str,
    ours: Registry[Any] | None = None,
    values: tuple[type, ...] = (),
    facts: Mapping[str, Any] | None = None,
) -> Any:
    """What the config says of that kind: the user's object, or what it makes of what it asks for;
    else what the registry makes by that name; else None."""
    found = own = getattr(own_objects(config), kind)
    if found is None and ours is not None:
        found = ours.get(_name(config, kind))
    if found is None:
        return None
    with guard(config, kind):
        if kind in CALLED and says_nothing(found):
            return found
        result = made(found, known(config, kind) | dict(facts or {}), values)
        if result is None and own is not None:  # else it would stand for "none was given"
            raise TypeError("it returns None")
        return result


def guard(config: Config, kind: str) -> Guard:
    """What stands between a run and the user's object of that kind."""
    table, key = NAMED[kind]
    name, given = _name(config, kind), getattr(config.given, kind)
    if kind == "task" and not is_own(name):
        name, key = config.task.model, "model"
    if given is not None or not is_own(name):
        return Guard(kind, given)
    return Guard(kind, getattr(own_objects(config), kind), f"[{table}] {key} = '{name}'")


def known(config: Config, kind: str) -> dict[str, Any]:
    """By the name of a parameter: keys of the object's table, then options."""
    table, _ = NAMED[kind]
    held = getattr(with_defaults(config), _place(kind))
    keys = (*OFFERED.get(kind, ()), *SHARED.get(kind, ()))
    facts = {_spelled(key): getattr(held, attribute(type(held), key)) for key in keys}
    if kind != "callback":  # those pass on to trackers what they do not know
        facts |= {"seed": config.federation.seed, "rounds": config.federation.rounds}
    return facts | options(config, table)


def with_defaults(config: Config) -> Config:
    """The config in which keys that nobody set are what the objects that ask for them say."""
    own, changes = own_objects(config), {}
    for kind, keys in OFFERED.items():
        held = changes.get(_place(kind), getattr(config, _place(kind)))
        for key in keys:
            name = attribute(type(held), key)
            with Guard(kind, getattr(own, kind)):
                usual = default(getattr(own, kind), _spelled(key))
            if usual is not None and name not in held.model_fields_set:
                with contextlib.suppress(ValidationError):  # a default that no config can hold
                    found = getattr(type(held).model_validate({name: usual}), name)
                    changes[_place(kind)] = held = held.model_copy(update={name: found})
    return config.model_copy(update=changes) if changes else config


def _place(kind: str) -> str:
    """The table that holds the keys that the object of a kind may ask for."""
    return "data" if kind == "partition" else NAMED[kind][0]


Named = tuple[str, str, str, Stamp]  # kind, settled name, key, the file's stamp


def own_objects(config: Config) -> Own:
    """What was given beside the config, and what it names besides; refused where something is set
    that no object asks for."""
    return _own_objects(config, _named(config))


@lru_cache(maxsize=8)
def _own_objects(config: Config, named: tuple[Named, ...]) -> Own:
    own = _with_named(config.given, named)
    for kind in NAMED:
        if (found := getattr(own, kind)) is not None:
            with Guard(kind, found):
                _require_given(config, kind)
                _require_keys(config, kind, found)
    for table in {place for place, _ in NAMED.values()}:
        _require_options(config, table, own)
    return own


@lru_cache(maxsize=8)
def _with_named(given: Own, named: tuple[Named, ...]) -> Own:
    """One value for what was given and named, in which the samples of a run are read once; a caller
    who gives the same objects again gives a new one, as they may have changed."""
    found = {kind: imported(name, key) for kind, name, key, _ in named}
    return dataclasses.replace(given, **found) if found else given


def _name(config: Config, kind: str) -> str:
    table, key = NAMED[kind]
    return getattr(getattr(config, table), key)


def _named(config: Config) -> tuple[Named, ...]:
    """What there is to know of each object that the config names and that was not given."""
    found = []
    for kind, (table, key) in NAMED.items():
        name = _name(config, kind)
        if kind == "task" and not is_own(name):
            name, key = config.task.model, "model"
        if is_own(name) and getattr(config.given, kind) is None:
            place = settled(name)
            found.append((kind, place, f"[{table}] {key}", stamp(place)))
    return tuple(found)


def options(config: Config, table: str) -> dict[str, Any]:
    """The options of a table by the names of parameters."""
    return {_spelled(key): value for key, value in getattr(config, table).options}


def _spelled(key: str) -> str:
    """The parameter that a key of files is; `lambda` is a word of Python's."""
    return "lam" if key == "lambda" else key.replace("-", "_")


def _require_given(config: Config, kind: str) -> None:
    """Refuse a name beside an object that was given in its place."""
    table, key = NAMED[kind]
    if getattr(config.given, kind) is not None and (name := _name(config, kind)) != GIVEN:
        raise InputError(
            f"[{table}] {key} = '{name}' is not the {kind} that was given: set it to '{GIVEN}'"
        )


def _require_keys(config: Config, kind: str, found: Any) -> None:
    """Refuse a key that is set and that the object, which alone could read it, does not ask for."""
    table = _place(kind)
    held = getattr(config, table)
    for key in OFFERED.get(kind, ()):
        value = getattr(held, attribute(type(held), key))
        if not is_default(config, f"{table}.{key}", value) and not asks(kind, found, key):
            raise InputError(
                f"[{table}] {key} = {value!r} has no effect: your {kind} does not ask for it by a "
                f"parameter `{_spelled(key)}`, so add that to it, or leave {key} out"
            )


def asks(kind: str, found: Any, key: str) -> bool:
    """Whether an object of that kind has a parameter for a key."""
    idle = kind in CALLED and says_nothing(found)
    names = {_spelled(key): 0} | ({"routes": 0} if key == "route" else {})  # what it leads to
    return not idle and bool(takes(found, names))


def _require_options(config: Config, table: str, own: Own) -> None:
    """Refuse an option that nothing named in its table takes."""
    given = options(config, table)
    if not given:
        return
    readers = _readers(config, table, own)
    for name, value in given.items():
        if (table, name) == ("data", "digest") and is_own(config.data.name):
            _require_ours(own.data)
            continue
        takers = [one for kind, one in readers if asks(kind, one, name)]
        if not takers:
            raise InputError(
                f"[{table}.options] {name} = {value!r} has no effect: nothing that [{table}] names "
                "takes it, so leave it out"
            )
        for one in takers:
            _require_number(f"[{table}.options] {name} = {value!r}", value, default(one, name))


def _require_ours(data: Any) -> None:
    """Refuse a function that asks for the digest, which tells its own samples from others."""
    if takes(data, {"digest": ""}) and not takes(data, {"": ""}):  # by that name
        raise InputError(
            "[data.options] digest is what a run writes of its samples, and is handed to no "
            "function: give the parameter digest of yours another name"
        )


def _require_number(said: str, value: Any, usual: Any) -> None:
    """Refuse a word, a switch or a fraction where a number, or a whole one, is usual, and what is
    no switch where one is."""
    if isinstance(usual, bool) and not isinstance(value, bool):
        raise InputError(f"{said} is refused: give true or false")
    wanted = {int: int, float: int | float}.get(type(usual))
    if wanted and (isinstance(value, bool) or not isinstance(value, wanted)):
        kind = "whole number" if wanted is int else "number"
        raise InputError(f"{said} is refused: give a {kind}, such as {usual}")


def _readers(config: Config, table: str, own: Own) -> list[tuple[str, Callable[..., Any]]]:
    """What takes options of a table, by kind: the user's objects, and the makers of ours."""
    from fedmuon.data.partition import PARTITIONS
    from fedmuon.data.sources import READERS
    from fedmuon.optim.aggregators import AGGREGATORS
    from fedmuon.optim.schedules import SCHEDULES
    from fedmuon.runs.callbacks import CALLBACKS

    ours = {
        "data": READERS, "partition": PARTITIONS, "aggregate": AGGREGATORS,
        "schedule": SCHEDULES, "callback": CALLBACKS,
    }  # fmt: skip
    found = []
    for kind, (place, _) in NAMED.items():
        if place == table:
            mine = getattr(own, kind)
            own_or_ours = mine is not None or kind not in ours
            found.append((kind, mine if own_or_ours else ours[kind].get(_name(config, kind))))
    return [(kind, one) for kind, one in found if one is not None]


def schedule_of(config: Config) -> Callable[[int], float] | None:
    """What the step size is times by round; None if it stays."""
    from fedmuon.optim.schedules import SCHEDULES, as_factor

    if (found := value(config, "schedule", SCHEDULES)) is None:
        return None
    of = guard(config, "schedule")
    with of:
        called = function(found, "schedule", "a function of the round")
    return called if own_objects(config).schedule is None else of.calling(called, as_factor)
