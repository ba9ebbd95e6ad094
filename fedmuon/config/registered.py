"""Methods that other packages register with entry points of the group `fedmuon.methods`.

The name of an entry point is the name of the method, and its value is a `Method` or a function that
returns one. The names are known without importing the packages. A row is loaded when it is needed.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedmuon.config.method import FACTS, Method, mismatches
from fedmuon.core.errors import Guard, InputError, plain

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

GROUP = "fedmuon.methods"
BYTE_ORDER_MARK = "\ufeff"  # which some editors of Windows write first
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
REQUIRED = ("lr", "weight-decay")  # keys that have an effect with every method
TEXTS = ("name", "summary", "make", "by_samples", "uncertified")  # fields of a row
TUPLES = ("keys", "cites", "facts")
# Facts of methods that the privacy accountant must know
RESERVED = ("private", "filtered", "inner momentum", "bias-corrected")


class Registration(NamedTuple):
    """An entry point, and the name of the package that has it."""

    entry: "EntryPoint"
    package: str


class Registrations(NamedTuple):
    """The entry points of all packages.

    Attributes:
        by_name: The entry points, by the name of the method.
        unreadable: Folder -> reason, for each package that has entry points of our group in a file
            that cannot be read.
    """

    by_name: Mapping[str, tuple[Registration, ...]]
    unreadable: Mapping[str, str]


def registered() -> Mapping[str, tuple[Registration, ...]]:
    """Return the entry points of all installed packages, by the name of the method."""
    return _registered_in(tuple(sys.path)).by_name


def require_readable(name: str = "") -> None:
    """Raise an error if a package may register methods, but its metadata cannot be read.

    Args:
        name: The method that is sought, or "" for all methods.
    """
    for folder, why in _registered_in(tuple(sys.path)).unreadable.items():
        sought = f", so it is unknown whether it registers the method {name}" if name else ""
        raise InputError(
            f"the package in {folder} has entry points of the group {GROUP}, but its metadata "
            f"cannot be read ({plain(why)}){sought}. Reinstall or uninstall this package."
        )


@lru_cache(maxsize=8)
def _registered_in(places: tuple[str, ...]) -> Registrations:
    """Return the entry points of the packages in these places, sorted by name."""
    if not any(map(_may_register, places)):
        return Registrations({}, {})
    from importlib.metadata import distributions  # takes longer than a look at the files

    of_package: dict[str, list[Registration]] = {}
    unreadable: dict[str, str] = {}
    for package in distributions():
        try:
            text = _entry_points_of(package)
            if entries := [*_entries_in(text)]:
                name = _name_of(package)
                items = [Registration(entry, name) for entry in entries]
                # Python imports a package from the first of its folders.
                of_package.setdefault(re.sub(r"[-_.]+", "-", name).lower(), items)
        except ValueError as error:
            unreadable[_folder(package)] = str(error)
    by_name: dict[str, tuple[Registration, ...]] = {}
    registrations = [item for items in of_package.values() for item in items]
    for registration in sorted(registrations, key=lambda item: (item.entry.name, item.entry.value)):
        name = registration.entry.name
        by_name[name] = (*by_name.get(name, ()), registration)
    return Registrations(by_name, unreadable)


def _entry_points_of(package: "Distribution") -> str:
    """Return the text of a package's entry points, or "" if the package has nothing to do with us.

    Raise ValueError if the text names our group, but cannot be decoded.
    """
    try:
        return package.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as error:
        if GROUP.encode() in error.object:  # the content of the file
            raise
        return ""
    except Exception:  # metadata of other packages may contain anything
        return ""


def _name_of(package: "Distribution") -> str:
    """Return the name of a package. Raise ValueError if its metadata has no name."""
    name = None
    with contextlib.suppress(Exception):  # metadata may contain anything
        name = package.metadata["Name"]
    if not name:
        raise ValueError("METADATA has no name")
    return name


def _entries_in(text: str) -> Iterator["EntryPoint"]:
    """Yield the entry points of our group. Errors in other groups do not matter."""
    from importlib.metadata import EntryPoint

    group = ""
    for line in text.removeprefix(BYTE_ORDER_MARK).splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line.strip("[]")
        elif group == GROUP and line and not line.startswith("#"):
            name, _, value = (part.strip() for part in line.partition("="))
            if not (name and value):
                raise ValueError(f"the line {line!r} is not of the form name = value")
            yield EntryPoint(name, value, group)


def _folder(package: "Distribution") -> str:
    """Return the folder with the metadata of a package."""
    return str(getattr(package, "_path", package.locate_file("")))


def _may_register(place: str) -> bool:
    """Return whether a package in this folder, or in this archive, may have entry points."""
    try:
        with os.scandir(place or ".") as folders:
            files = [
                Path(folder.path, "entry_points.txt")
                for folder in folders
                if folder.name.endswith((".dist-info", ".egg-info"))
            ]
    except NotADirectoryError:
        return True
    except OSError:
        return False
    for file in files:
        with contextlib.suppress(OSError):
            if GROUP in file.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def packages_of(name: str) -> list[str]:
    """Return the packages that register a method with this name."""
    return [package for _, package in registered().get(name, ())]


def require_one(name: str, built_in: bool) -> None:
    """Raise an error if several packages, or fedmuon and a package, have a method of this name."""
    packages = packages_of(name)
    if built_in and packages:
        raise InputError(
            f"the package {packages[0]} registers the method {name}, but fedmuon itself has a "
            f"method with this name. Uninstall {packages[0]}, or install a version of it that "
            "registers another name."
        )
    if len(packages) > 1:
        raise InputError(
            f"the packages {' and '.join(packages)} register the same method {name}, so it is "
            "unclear which one you mean. Uninstall all but one of them."
        )


def load(name: str, keys: Collection[str]) -> Method:
    """Return the method of another package.

    Args:
        name: The name of the method.
        keys: The keys of [local] that methods can take.

    Raises:
        KeyError: If no package registers a method with this name.
        InputError: If the entry point cannot be loaded, or gives no valid `Method`.
    """
    ((entry, package),) = registered()[name]
    return _loaded(entry, package, frozenset(keys))


def load_function(method: Method) -> Callable[..., Any]:
    """Import the function of another package that returns the method as a recipe."""
    module, _, path = method.make.partition(":")
    (package,) = packages_of(method.name)
    try:
        function: Any = import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:  # the package may raise anything
        raise unusable(package, method.name, f"{method.make} {_cannot(error)}") from error
    if not callable(function):
        kind = type(function).__name__
        raise unusable(package, method.name, f"{method.make} is a {kind} and not a function")
    for problem in mismatches(method, function):
        raise unusable(package, method.name, f"{method.make} {problem}")
    return function


def guard_of(method: Method, function: Callable[..., Any]) -> Guard:
    """Return the guard that names the method and its package in errors of its function."""
    (package,) = packages_of(method.name)
    return Guard("recipe", function, f"[local] recipe = '{method.name}' of the package {package}")


def unusable(package: str, name: str, why: str) -> InputError:
    """Return the error that the method of another package cannot be used."""
    return InputError(
        f"the package {package} registers the method {name}, but {why}. Update or uninstall "
        f"{package}."
    )


@lru_cache(maxsize=256)
def _loaded(entry: "EntryPoint", package: str, keys: frozenset[str]) -> Method:
    try:
        row: Any = entry.load()
        if callable(row):
            row = row()
    except (Exception, SystemExit) as error:  # the package may raise anything
        raise unusable(package, entry.name, f"{entry.value} {_cannot(error)}") from error
    if not isinstance(row, Method):
        why = f"{entry.value} gives a {type(row).__name__} instead of a fedmuon.Method"
        raise unusable(package, entry.name, why)
    for problem in _type_problems(row) or _problems(row, entry.name, keys):
        raise unusable(package, entry.name, f"{entry.value} {problem}")
    return row


def _cannot(error: BaseException) -> str:
    return f"cannot be loaded ({plain(f'{type(error).__name__}: {error}')})"


def _type_problems(row: Method) -> list[str]:
    """Return which fields of a row have the wrong type."""
    fields, options = vars(row), row.options
    sound = {
        **{name: isinstance(fields[name], str) for name in TEXTS},
        **{name: isinstance(fields[name], tuple) and _are_texts(fields[name]) for name in TUPLES},
        "options": isinstance(options, Mapping)
        and _are_texts(options)
        and all(isinstance(pair, tuple) and len(pair) == 2 and _are_texts(pair)
                for pair in options.values()),
    }  # fmt: skip
    kinds = dict.fromkeys(TEXTS, "a text") | dict.fromkeys(TUPLES, "a tuple of texts")
    kinds["options"] = "a mapping of names to (default, description)"
    return [f"has a field {name} that is not {kinds[name]}" for name in sound if not sound[name]]


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _problems(row: Method, name: str, keys: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the values of a row, as the rest of a sentence."""
    if not NAME.fullmatch(name):
        yield "has a name with characters other than lower-case letters, digits and hyphens"
    if row.name != name:
        yield f"has the other name {row.name}"
    if not (row.summary and row.make):
        yield f"has no {'summary' if row.make else 'function `make`'}"
    if lacking := [key for key in REQUIRED if key not in row.keys]:
        yield f"has no key {lacking[0]}, which has an effect with every method"
    if unknown := sorted({*row.keys} - {*keys}):
        yield f"has the key {unknown[0]}, but the possible keys are {', '.join(sorted(keys))}"
    if shared := sorted({*row.options} & {*keys}):
        yield f"has the option {shared[0]}, which is a key of [local]"
    if unknown := sorted({*row.facts} - FACTS.keys()):
        yield f"has the fact {unknown[0]!r}, but the possible facts are {', '.join(FACTS)}"
    if reserved := [fact for fact in RESERVED if fact in row.facts]:
        yield f"has the fact {reserved[0]!r}, which only methods of fedmuon can have"
    if row.certificate is not None:
        yield "has a certificate, which only methods of fedmuon can have"
