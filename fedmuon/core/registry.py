"""Values by name: built-in ones and the user's own, found by one call.

Whatever a config can name is a value: a source, partition, task, recipe, map, aggregator, schedule.
Its name is one that was added here, or `package.module:object`, or `./file.py:object`. `given` is
what a caller handed over in Python; a config only remembers that it was.
"""

import builtins
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedmuon.core import source_files
from fedmuon.core.choices import GIVEN
from fedmuon.core.errors import InputError, plain

Value = TypeVar("Value")
Maker = TypeVar("Maker", bound=Callable[..., Any])
USED: dict[str, list[tuple[str, Any]]] = {}  # file -> what a config names there, and the objects


class Registry(Generic[Value]):
    """What makes each value of one kind, by its name."""

    def __init__(self) -> None:
        self._makers: dict[str, Callable[..., Value]] = {}

    def add(self, name: str) -> Callable[[Maker], Maker]:
        """Decorate what makes, or is, the value of that name."""

        def keep(maker: Maker) -> Maker:
            self._makers[name] = maker
            return maker

        return keep

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def get(self, name: str) -> Callable[..., Value] | None:
        """What makes the value of that name, None if nothing does."""
        return self._makers.get(name)

    def __getitem__(self, name: str) -> Callable[..., Value]:
        return self._makers[name]


def imported(name: str, key: str) -> Any:
    """The object that `package.module:object` or `./file.py:object` names; `key` is where."""
    if name == GIVEN:
        raise InputError(
            f"{key} = '{GIVEN}' was handed over in Python, where this run has to be gone on with"
        )
    place, _, path = name.rpartition(":")
    try:
        found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
        for part in path.split("."):
            found = getattr(found, part)
        file = str(stands_in(settled(name).rpartition(":")[0]))
        USED.setdefault(file, []).append((f"{key} = '{name}'", found))
    except (Exception, SystemExit) as error:  # whatever the user's module does when imported
        if isinstance(error, ModuleNotFoundError) and _within(place, error.name):
            raise InputError(
                f"{key} = '{name}' cannot be imported: there is no module {error.name} here, nor "
                "installed, so give the command in the folder of its project, install that, or "
                "name another package.module:object"
            ) from error
        raise InputError(
            f"{key} = '{name}' cannot be imported ({type(error).__name__}: {error}): name an "
            "object as package.module:object or ./file.py:object"
        ) from error
    return found


def _within(place: str, module: str | None) -> bool:
    """Whether the module is that place, or a package that holds it."""
    return module is not None and f"{place}.".startswith(f"{module}.")


def blamed(error: BaseException) -> str | None:
    """One sentence of an error in an object that a config names: where it was raised, or that it
    takes other parameters than it was called with. None of any other error."""
    why = plain(f"{type(error).__name__}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if used := USED.get(frame.filename):
            names = dict.fromkeys(said for said, one in used if _runs(one, frame.name))
            said = " or ".join(names or dict.fromkeys(said for said, _ in used))
            return f"{said} ends in {why} ({frame.filename}, line {frame.lineno}): mend it"
    for said, one in (pair for used in USED.values() for pair in used):
        called = _named(one, "__qualname__")
        begins = str(error).startswith((f"{called}(", f"{called}."))
        if isinstance(error, TypeError) and called and begins:
            return f"{said} cannot be called as it has to be ({why}): mend its parameters"
    return None


def _named(one: Any, attribute: str) -> str:
    """A name of the user's object, which may raise anything when it is asked."""
    try:
        return str(getattr(one, attribute, ""))
    except Exception:
        return ""


def _runs(one: Any, name: str) -> bool:
    """Whether a frame of that name is of the object itself."""
    return (
        name == _named(one, "__name__")
        or hasattr(type(one), name)
        or (isinstance(one, type) and name in vars(one))
    )


def settled(name: str) -> str:
    """The same object's name in every folder: a file is named by its whole path."""
    place, _, path = name.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{path}" if place.endswith(".py") else name


def stands_in(place: str) -> Path | None:
    """The source of a module, or of a file, that a name begins with."""
    if place.endswith(".py"):
        return Path(place)
    file = getattr(sys.modules.get(place), "__file__", None) or ""
    return Path(file) if file.endswith(".py") else None


def stamp(name: str) -> source_files.Stamp:
    """What changes when the file of a settled name, or a neighbour of it, does; nothing for a
    module."""
    place = name.rpartition(":")[0]
    if not place.endswith(".py") or not Path(place).is_file():
        return ()
    return source_files.stamp(Path(place))


def _module(name: str) -> ModuleType:
    """An installed module, or one that lies where the command was given."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    """A file as a module, read once until it or a neighbour changes."""
    path = path.expanduser().resolve()
    name = f"fedmuon_own_{sha256(str(path).encode()).hexdigest()[:12]}"
    now = stamp(f"{path}:")
    if name in sys.modules and getattr(sys.modules[name], "__fedmuon_stamp__", None) == now:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    own = {**vars(builtins), "__import__": source_files.importing(path)}
    module.__dict__.update(__fedmuon_stamp__=now, __builtins__=own)
    try:
        with source_files.own_neighbours(path):
            exec(compile(path.read_bytes(), path, "exec"), module.__dict__)  # no stale bytecode
    except BaseException:
        del sys.modules[name]
        raise
    return module


def takes(found: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the known facts that the object has a parameter for; a torch module, which passes
    all that it is called with to its `forward`, asks for nothing."""
    parameters = {} if _is_module(found) else _parameters(found)
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(known)
    return {
        name: value
        for name, value in known.items()
        if name in parameters and parameters[name].kind not in (inspect.Parameter.POSITIONAL_ONLY,)
    }


def default(found: Any, name: str) -> Any:
    """What a parameter is where nobody gives it; None if it has to be given."""
    parameter = _parameters(found).get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def required(found: Any) -> list[str]:
    """The parameters that have to be given."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = _parameters(found).items()
    return [name for name, one in parameters if one.kind in named and one.default is one.empty]


def made(found: Any, known: Mapping[str, Any], values: tuple[type, ...] = ()) -> Any:
    """The value that an object is, or makes of the facts that it takes.

    Objects of the types `values` are values. A function that can be called with the facts alone
    makes the value; one that needs more is the value, with the facts filled in.
    """
    if isinstance(found, values) or not callable(found) or _is_module(found):
        return found
    facts = takes(found, known)
    try:
        inspect.signature(found).bind(**facts)
    except TypeError:
        return _Filled(found, facts) if facts else found
    except ValueError:  # of a builtin
        return found
    return found(**facts)


def says_nothing(found: Any) -> bool:
    """Whether a callable, but a class, takes any arguments in any number: `*given`."""
    any_number = [one for one in _parameters(found).values() if one.kind is one.VAR_POSITIONAL]
    return not isinstance(found, type) and bool(any_number)


def _is_module(found: Any) -> bool:
    torch = sys.modules.get("torch")  # without which there is none
    return torch is not None and isinstance(found, torch.nn.Module)


def function(found: Any, kind: str, mend: str) -> Any:
    """What was given for a function, refused if it cannot be called."""
    if not callable(found):
        raise unfit(found, kind, mend)
    return found


def unfit(found: Any, kind: str, mend: str) -> InputError:
    """What refuses an object that is no value of its kind."""
    if isinstance(found, _Filled):  # it asks for more than there is to fill in
        said = getattr(found.function, "__name__", "") or type(found.function).__name__
        return InputError(f"{said} makes no {kind} of what a config has: give {mend}")
    return InputError(f"a {kind} of type {type(found).__name__} is none: give {mend}")


class _Filled:
    """A function with some of its parameters filled in."""

    def __init__(self, function: Callable[..., Any], facts: Mapping[str, Any]) -> None:
        self.function, self.facts = function, dict(facts)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **{**self.facts, **named})


def _parameters(found: Any) -> Mapping[str, inspect.Parameter]:
    if not callable(found):  # inspect would refuse it by writing out what may be a data set
        return {}
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):
        return {}
