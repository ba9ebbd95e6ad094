"""Typed tables of settings and TOML files, with errors that name the wrong key and the fix."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fedmuon.core.errors import InputError, instead, shown
from fedmuon.core.files import read_text

Scalar = str | int | float | bool
Option = Scalar | tuple[Scalar, ...]  # a value in a table of options; lists become tuples
Model = TypeVar("Model", bound=BaseModel)
NESTED = "arrays or tables are nested too deeply"
RENAMED: dict[tuple[str, ...], str] = {
    ("federation", "weights"): "risk-weights",
    ("orthogonalizer", "gamma"): "clip-level",
    ("privacy", "gamma"): "lookahead",
    ("stability", "kind"): "lipschitz",
}
ELSEWHERE: dict[tuple[str, ...], str] = {  # keys that users may expect, and what to set instead
    ("engine", "threads"): (
        "set the environment variable OMP_NUM_THREADS, or cpus-per-client for Ray"
    ),
    ("engine", "workers"): (
        "Ray starts as many workers as fit on the machines; set cpus-per-client, the number of "
        "CPUs of each worker"
    ),
}
LIMITS = {
    "greater_than_equal": ("ge", "of at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "of at most"),
    "less_than": ("lt", "below"),
}
PLAIN = {"list_type": "set a list, such as [0, 1]", "too_short": "set at least one value"}
TINY = 1e-9  # a smaller positive minimum is described as "above 0"


class Table(BaseModel):
    """The base class of all tables of settings, such as `[local]`.

    Keys in files are in kebab-case. Unknown keys are rejected. Values are never converted silently.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        populate_by_name=True,
        alias_generator=lambda name: name.rstrip("_").replace("_", "-"),
    )


def validate(
    model: type[Model], tables: Mapping[str, Any], context: Mapping[str, bool] | None = None
) -> Model:
    """Check nested tables, and create an object of a table class from them.

    Args:
        model: The table class, such as the class of a whole config.
        tables: The nested tables with keys as in a TOML file.
        context: Further information that the checks of the class use.

    Raises:
        InputError: If a key or a value is not valid.
    """
    try:
        return model.model_validate(dict(tables), context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # Unknown keys come first.
        unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
        raise InputError(_sentence(model, (unknown or details)[0])) from None


def validate_values(model: type[Table], table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check single values of a table, without the other keys and tables of a config.

    Args:
        model: The class of the table.
        table: The name of the table in files, such as `local`.
        values: The values by the names of their attributes.

    Returns:
        The values as a config would contain them.

    Raises:
        InputError: If a value has the wrong type, or is out of range.
    """
    valid: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name not in values:
            continue
        try:
            valid[name] = _adapter(model, name).validate_python(values[name])
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            problem["loc"] = (table, field.alias or name, *problem["loc"])
            raise InputError(_sentence(model, problem)) from None
    return valid


@cache
def _adapter(model: type[Table], name: str) -> TypeAdapter[Any]:
    """Return the check of one key of a table."""
    field = model.model_fields[name]
    kind: Any = (
        Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    )
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def override(tables: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set keys from texts like `table.key=value` in nested tables, and return the tables."""
    for text in overrides:
        name, equals, value = text.partition("=")
        table, dot, key = name.strip().partition(".")
        if not (equals and dot and table and key):
            raise InputError(
                f"--set {text!r} does not have the form table.key=value. Write, for example, "
                "--set local.lr=0.02."
            )
        name, value = f"{table}.{key}", value.strip()
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:  # a bare word
            parsed = value
        except (RecursionError, ValueError) as error:
            nested = isinstance(error, RecursionError)
            problem = NESTED if nested else "the number has too many digits"
            raise InputError(
                f"the value of --set {name} is not valid ({problem}): set a number, a string, true "
                "or false"
            ) from None
        put(tables, name, parsed)
    return tables


def put(tables: dict[str, Any], name: str, value: Any) -> None:
    """Set one key, named `table.key` or `table.options.key`, in nested tables."""
    *places, key = name.split(".", 2)
    if len(places) == 2 and places[1] != "options":
        places, key = places[:1], f"{places[1]}.{key}"
    section = tables
    for place in places:
        section = section.setdefault(place, {})
        if not isinstance(section, dict):
            raise InputError(
                f"{place} must be a table with keys, not a single value: write [{place}] above "
                "its keys"
            )
    section[key] = value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested tables."""
    try:
        return tomllib.loads(read_text(path))
    except InputError:  # it is not a regular file
        raise
    except OSError as error:
        problem = f"cannot read the config {path} ({error.strerror}): check the path"
        raise InputError(problem) from None
    except RecursionError:
        raise InputError(f"{path} is not valid TOML ({NESTED}): use fewer levels") from None
    except ValueError as error:  # invalid TOML, or a number with too many digits for Python
        raise InputError(f"{path} is not valid TOML ({error}): fix that line") from None


def _sentence(model: type[BaseModel], error: ErrorDetails) -> str:
    """Return an error message with the wrong key, its value, and a suggestion."""
    place, value, kind = [str(part) for part in error["loc"]], error.get("input"), error["type"]
    name = f"[{place[0]}] {' '.join(place[1:])}".strip() if place else "config"
    if kind == "extra_forbidden" and (new := RENAMED.get(tuple(place))):
        return f"{name} was renamed to {new}: use the new name"
    if kind == "extra_forbidden":
        inner = f"[{'.'.join(place[:-1])}] {place[-1]}" if len(place) > 1 else name
        return f"unknown key {inner}: {_suggestion(model, place)}"
    if kind == "missing":
        return f"{name} is required, but it is missing: add {name}"
    advice = f"{error['msg'][0].lower()}{error['msg'][1:]}"
    if kind == "value_error":
        advice = str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        if advice.startswith("[") or not place:
            return advice
    elif kind in PLAIN:
        advice = PLAIN[kind]
    elif kind == "literal_error" and isinstance(value, str):
        names = re.findall(r"'([^']*)'", error.get("ctx", {}).get("expected", ""))
        advice = instead(value, names)
    elif kind in LIMITS and value != value:
        advice = "nan is not a number: set a number"
    elif kind in LIMITS:
        bound, words = LIMITS[kind]
        limit = error.get("ctx", {})[bound]
        advice = f"set a number {words} {limit if isinstance(limit, int) else format(limit, 'g')}"
        if 0 < limit < TINY:
            advice = f"set a number above 0 ({limit:g} or more)"
    return f"{name} = {shown(value)} is not valid: {advice}"


@cache
def attribute(model: type[BaseModel], key: str) -> str:
    """Return the Python attribute of a key, such as `aux_lr` for `aux-lr`.

    The result is cached, because every config needs hundreds of attributes.
    """
    return next(name for name, field in model.model_fields.items() if key in (field.alias, name))


def value_of(tables: Any, key: str) -> Any:
    """Return the value of the key with the full name `table.key`.

    `tables` is an object whose attributes are tables, such as a config.
    """
    table, _, name = key.partition(".")
    section = getattr(tables, table)
    return getattr(section, attribute(type(section), name))


def _suggestion(model: type[BaseModel], place: list[str]) -> str:
    if where := ELSEWHERE.get(tuple(place)):
        return where
    kind: Any = model
    for part in place[:-1]:
        kind = _table(kind)
        kind = get_args(kind)[-1] if get_origin(kind) in (dict, list) else _keys(kind)[part]
    return instead(place[-1], _keys(_table(kind)), "the valid names are")


def _table(kind: Any) -> Any:
    """Return the table, dictionary or list type inside an annotation.

    For a union, use the first type.
    """
    if get_origin(kind) is Annotated:
        return _table(get_args(kind)[0])
    if get_origin(kind) not in (Union, UnionType):
        return kind
    members = [_table(member) for member in get_args(kind)]
    return next(
        member
        for member in members
        if get_origin(member) in (dict, list) or hasattr(member, "model_fields")
    )


def _keys(model: type[BaseModel]) -> dict[str, Any]:
    """Return the type of each key of a table class.

    The result has the keys as they are written in files, such as `aux-lr`.
    """
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}
