"""Custom objects, at most one of each kind: passed in Python, or named in the config.

A custom object is the value itself, or a function that returns the value. Such a function receives
arguments by the names of its parameters. Possible arguments are keys of the object's table, options
(such as `[local.options]`), and facts about the run, such as the shape of a sample.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedmuon.config.method import by_parameter, parameter
from fedmuon.config.methods import METHODS, function_of
from fedmuon.config.schema import OF_OWN_TASK, is_default
from fedmuon.core.choices import GIVEN, is_own
from fedmuon.core.errors import Guard, InputError
from fedmuon.core.registry import (
    Registry,
    Stamp,
    absolute_name,
    default_of,
    import_object,
    make,
    stamp,
    takes,
    takes_anything,
)
from fedmuon.core.tables import attribute

Config = Any  # a `fedmuon.config.load.Config`, whose module imports this one

IN_PYTHON = " in Python, with its objects"  # how to resume a run with objects passed in Python
# Kind -> the table and key that name an object of this kind.
NAMED = {
    "data": ("data", "name"),
    "partition": ("federation", "partition"),
    "aggregate": ("federation", "aggregate"),
    "stage": ("federation", "stage"),
    "task": ("task", "name"),
    "recipe": ("local", "recipe"),
    "schedule": ("local", "schedule"),
    "orthogonalizer": ("orthogonalizer", "name"),
    "callback": ("output", "callback"),
}
# Kind -> keys of the table `PLACE[kind]` that an object may take as parameters. Keys in this list
# that the object does not take must have their defaults.
OFFERED = {
    "data": ("folder", "context", "tokenizer", "dimension", "classes"),
    "partition": ("alpha",),
    "task": OF_OWN_TASK,
    "recipe": (
        "lr", "momentum", "momentum-form", "weight-decay", "alignment", "server-momentum", "route",
        "qkv", "aux", "aux-lr", "adjust",
    ),
    "orthogonalizer": (
        "lambda", "steps", "coefficients", "safety", "eps", "normalization", "sigma", "clip-level",
        "rank", "oversample", "power", "sketch",
    ),
}  # fmt: skip
PLACE = {kind: "data" if kind == "partition" else table for kind, (table, _) in NAMED.items()}
CALLED = ("orthogonalizer", "aggregate", "schedule", "callback")  # kinds whose values are functions
# Kind -> keys that an object may take, and that also have an effect without it.
SHARED = {"recipe": ("steps",), "data": ("train", "test"), "partition": ("minimum",)}


def handed_over(config: Config) -> bool:
    """Return whether a run of the config needs objects that were passed in Python."""
    return any(getattr(getattr(config, table), key) == GIVEN for table, key in NAMED.values())


@dataclass(frozen=True, eq=False)
class UserObjects:
    """The custom objects of a config. The attribute of a kind without a custom object is None."""

    data: Any = None
    test: Any = None
    partition: Any = None
    task: Any = None
    recipe: Any = None
    orthogonalizer: Any = None
    aggregate: Any = None
    stage: Any = None
    schedule: Any = None
    callback: Any = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in dataclasses.fields(self))


NOTHING = UserObjects()


def make_named(
    config: Config,
    kind: str,
    ours: Registry[Any] | None = None,
    values: tuple[type, ...] = (),
    facts: Mapping[str, Any] | None = None,
) -> Any:
    """Create the value of one kind, such as the schedule, from the name in the config.

    Args:
        config: The config.
        kind: The kind of the value, a key of `NAMED`.
        ours: Functions that create built-in values, by name.
        values: Types of custom objects that are values themselves, so that they are not called.
        facts: Further arguments by name. A custom object can have parameters for them, in addition
            to parameters for keys and options.

    Returns:
        The custom object, or the value that it returns. If there is no custom object, the built-in
        value from `ours`, or None.
    """
    value = custom = getattr(user_objects(config), kind)
    if value is None and ours is not None:
        table, key = NAMED[kind]
        value = ours.get(getattr(getattr(config, table), key))
    if value is None:
        return None
    with guard(config, kind):
        if kind in CALLED and takes_anything(value):
            return value
        result = make(value, facts_for(config, kind) | dict(facts or {}), values)
        if result is None and custom is not None:  # None means that no object was given
            raise TypeError("your function returned None, but it must return a value")
        return result


def guard(config: Config, kind: str) -> Guard:
    """Return the guard, which turns errors of the custom object of this kind into `OwnError`."""
    table, key = NAMED[kind]
    name, passed = getattr(getattr(config, table), key), getattr(config.given, kind)
    if kind == "task" and not is_own(name):
        name, key = config.task.model, "model"
    if passed is not None or not is_own(name):
        return Guard(kind, passed)
    return Guard(kind, getattr(user_objects(config), kind), f"[{table}] {key} = '{name}'")


def facts_for(config: Config, kind: str) -> dict[str, Any]:
    """Return the arguments that a custom object of this kind can take, by parameter name.

    The arguments are the keys of the object's table, the options, the seed and the number of
    rounds.
    """
    table, _ = NAMED[kind]
    section = getattr(with_defaults(config), PLACE[kind])
    keys = (*OFFERED.get(kind, ()), *SHARED.get(kind, ()))
    facts = {parameter(key): getattr(section, attribute(type(section), key)) for key in keys}
    if kind != "callback":  # trackers get all options that a callback does not know
        facts |= {"seed": config.federation.seed, "rounds": config.federation.rounds}
    return facts | object_options(config, table)


def with_defaults(config: Config) -> Config:
    """Return the config with the default values that custom objects define for their parameters.

    If a key is not set, the default value of the parameter replaces the default value of the key.
    """
    objects, changes = user_objects(config), {}
    for kind, keys in OFFERED.items():
        section = changes.get(PLACE[kind], getattr(config, PLACE[kind]))
        for key in keys:
            name = attribute(type(section), key)
            with Guard(kind, getattr(objects, kind)):
                usual = default_of(getattr(objects, kind), parameter(key))
            if usual is not None and name not in section.model_fields_set:
                with contextlib.suppress(ValidationError):  # a default that a config cannot contain
                    value = getattr(type(section).model_validate({name: usual}), name)
                    changes[PLACE[kind]] = section = section.model_copy(update={name: value})
    return config.model_copy(update=changes) if changes else config


Named = tuple[str, str, str, Stamp]  # kind, absolute name, key, the file's stamp


def user_objects(config: Config) -> UserObjects:
    """Return the objects that were passed in Python, and the objects that the config names.

    Raises:
        InputError: If a key or an option is set, but no object has a parameter for it.
    """
    references: list[Named] = []
    for kind, (table, key) in NAMED.items():
        name = getattr(getattr(config, table), key)
        if kind == "task" and not is_own(name):
            name, key = config.task.model, "model"
        if is_own(name) and getattr(config.given, kind) is None:
            absolute = absolute_name(name)
            file = Path(absolute.rpartition(":")[0])
            references.append((kind, absolute, f"[{table}] {key}", stamp(file)))
    return _checked(config, tuple(references))


@lru_cache(maxsize=8)
def _checked(config: Config, references: tuple[Named, ...]) -> UserObjects:
    """Return the objects if they have a parameter for each key and option, else raise an error."""
    objects = _with_named(config.given, references)
    for kind, (table, key) in NAMED.items():
        if (custom := getattr(objects, kind)) is None:
            continue
        with Guard(kind, custom):
            name = getattr(getattr(config, table), key)
            if getattr(config.given, kind) is not None and name != GIVEN:
                raise InputError(
                    f"[{table}] {key} = '{name}', but you also passed a {kind} in Python, and "
                    f"only one of the two can be used. Set {key} to '{GIVEN}' to use the object "
                    "that you passed."
                )
            section = getattr(config, PLACE[kind])
            for offered in OFFERED.get(kind, ()):
                value, place = getattr(section, attribute(type(section), offered)), PLACE[kind]
                default = is_default(f"{place}.{offered}", value)
                if not default and not asks(kind, custom, offered):
                    raise InputError(
                        f"[{place}] {offered} = {value!r} has no effect, because your {kind} has "
                        f"no parameter `{parameter(offered)}`. Add this parameter to your "
                        f"{kind}, or leave {offered} out."
                    )
    for table in {place for place, _ in NAMED.values()}:
        if options := object_options(config, table):
            _require_options(config, table, options, objects)
    return objects


@lru_cache(maxsize=8)
def _with_named(passed: UserObjects, references: tuple[Named, ...]) -> UserObjects:
    """Return the objects passed in Python, together with the objects that the config names.

    The result is cached, so that samples are read only once per run. Another call from Python does
    not use this result, because the objects may have changed.
    """
    imported = {kind: import_object(name, key) for kind, name, key, _ in references}
    return dataclasses.replace(passed, **imported) if imported else passed


def object_options(config: Config, table: str) -> dict[str, Any]:
    """Return the values in the options of a table, by parameter name."""
    return {parameter(key): value for key, value in getattr(config, table).options}


def asks(kind: str, found: Any, key: str) -> bool:
    """Return whether the custom object of this kind has a parameter for a config key."""
    idle = kind in CALLED and takes_anything(found)
    led_to = {"routes": 0} if key in ("route", "qkv") else {}
    names = {parameter(key): 0} | led_to
    return not idle and bool(takes(found, names))


def _require_options(
    config: Config, table: str, options: dict[str, Any], objects: UserObjects
) -> None:
    """Raise an error for an option without a matching parameter, or of the wrong type."""
    # These imports register built-in values, and load numpy. They are late because few configs have
    # options.
    from fedmuon.data.partition import PARTITIONS
    from fedmuon.data.readers import READERS
    from fedmuon.optim.aggregators import AGGREGATORS
    from fedmuon.optim.schedules import SCHEDULES
    from fedmuon.runs.callbacks import CALLBACKS

    registries = {
        "data": READERS, "partition": PARTITIONS, "aggregate": AGGREGATORS,
        "schedule": SCHEDULES, "callback": CALLBACKS,
    }  # fmt: skip
    readers = []  # custom objects, and functions that create built-in values
    for kind, (place, key) in NAMED.items():
        reader = getattr(objects, kind) if place == table else None
        if reader is None and place == table and kind in registries:
            reader = registries[kind].get(getattr(getattr(config, table), key))
        if reader is not None:
            readers.append((kind, reader))
    method = METHODS.get(config.local.recipe)
    of_method = {} if method is None or table != "local" else by_parameter(method.options)
    for name, value in options.items():
        if (table, name) == ("data", "digest") and is_own(config.data.name):
            # Whether the function has a parameter `digest`, not only `**options`.
            if takes(objects.data, {"digest": ""}) and not takes(objects.data, {"": ""}):
                raise InputError(
                    "[data.options] digest is reserved: a run stores the digest of your samples "
                    "under this name and does not pass it to your function. Rename the parameter "
                    "digest of your function."
                )
            continue
        setting = f"[{table}.options] {name} = {value!r}"
        takers = [reader for kind, reader in readers if asks(kind, reader, name)]
        if method is not None and name in of_method:
            takers.append(function_of(method))
        if not takers:
            raise InputError(
                f"{setting} has no effect, because no object of [{table}] has a parameter with "
                "this name. Leave the option out, or check its spelling."
            )
        for reader in takers:
            _require_type(setting, value, default_of(reader, name))


def _require_type(setting: str, value: Any, usual: Any) -> None:
    """Raise an error if the default is a boolean or a number, but the value has another type."""
    if isinstance(usual, bool) and not isinstance(value, bool):
        raise InputError(f"{setting} is not valid: set true or false")
    accepted = {int: int, float: int | float}.get(type(usual))
    if accepted and (isinstance(value, bool) or not isinstance(value, accepted)):
        kind = "an integer" if accepted is int else "a number"
        raise InputError(f"{setting} is not valid: set {kind}, such as {usual}")
