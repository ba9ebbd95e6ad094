"""Registries of built-in objects, and the import of custom objects that a config names.

A config can name a source, partition, task, recipe, orthogonalizer, aggregator or schedule. The
name in the config is a built-in name, or has the form `package.module:object` or
`./file.py:object`. The name `given` means an object that was passed in Python.
"""

import ast
import builtins
import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedmuon.core.choices import GIVEN
from fedmuon.core.errors import InputError, plain

Value = TypeVar("Value")
Maker = TypeVar("Maker", bound=Callable[..., Any])
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "fedmuon"}  # never local modules
USED: dict[str, list[tuple[str, Any]]] = {}  # file -> (name in a config, object)
Stamp = tuple[tuple[str, int, int], ...]  # (file, time, size)
READ: dict[Path, tuple[Stamp, ModuleType]] = {}  # file -> (its stamp when read, its module)


class Registry(dict[str, Callable[..., Value]], Generic[Value]):
    """The built-in objects of one kind: a mapping of names to functions that create them."""

    def add(self, name: str) -> Callable[[Maker], Maker]:
        """Return a decorator that registers a function under this name.

        The function creates the built-in value, or is itself the value.
        """

        def keep(maker: Maker) -> Maker:
            self[name] = maker
            return maker

        return keep


# Objects that a config names


def import_object(name: str, key: str) -> Any:
    """Import an object that a config names.

    Args:
        name: `package.module:object` or `./file.py:object`.
        key: The key of the config that contains the name, for messages.

    Raises:
        InputError: If the object cannot be imported, for any error in the user's module.
    """
    if name == GIVEN:
        raise InputError(
            f"{key} = '{GIVEN}' stands for an object that was passed in Python, so the run can "
            "only be resumed in Python. Pass the same object again."
        )
    place, _, path = name.rpartition(":")
    try:
        if place.endswith(".py"):
            value: Any = _read_module(Path(place).expanduser().resolve())
        else:
            folder = str(Path.cwd())  # for modules that are not installed
            if folder not in sys.path:
                sys.path.append(folder)
            value = importlib.import_module(place)
        for part in path.split("."):
            value = getattr(value, part)
        file = str(source_file(absolute_name(name).rpartition(":")[0]))
        USED.setdefault(file, []).append((f"{key} = '{name}'", value))
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{place}.".startswith(f"{missing}."):
            raise InputError(
                f"{key} = '{name}' cannot be imported, because module {missing} is neither in "
                "this folder nor installed. Run the command in the project's folder, install the "
                "module, or name another package.module:object."
            ) from error
        raise InputError(
            f"{key} = '{name}' cannot be imported ({type(error).__name__}: {error}). Write the "
            "name of the object as package.module:object or ./file.py:object."
        ) from error
    return value


def absolute_name(name: str) -> str:
    """Make the path in the name of a custom object absolute.

    The name is then valid in every folder.
    """
    place, _, path = name.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{path}" if place.endswith(".py") else name


def source_file(place: str) -> Path | None:
    """Return the Python file of an imported module, or of a path to a .py file.

    Return None if the file is unknown.
    """
    if place.endswith(".py"):
        return Path(place)
    file = getattr(sys.modules.get(place), "__file__", None) or ""
    return Path(file) if file.endswith(".py") else None


def blame(error: BaseException) -> str | None:
    """Return a message if a custom object that a config names caused this error, else None.

    A custom object caused the error if its file raised the error, or if the object was called with
    arguments that it does not accept.
    """
    cause = plain(f"{type(error).__name__}: {error}")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if used := USED.get(frame.filename):
            names = dict.fromkeys(
                label
                for label, value in used
                if frame.name == _attribute(value, "__name__")
                or hasattr(type(value), frame.name)
                or (isinstance(value, type) and frame.name in vars(value))
            )
            label = " or ".join(names or dict.fromkeys(label for label, _ in used))
            return (
                f"{label} fails with {cause} ({frame.filename}, line {frame.lineno}): fix that line"
            )
    for label, value in (pair for used in USED.values() for pair in used):
        called = _attribute(value, "__qualname__")
        begins = str(error).startswith((f"{called}(", f"{called}."))
        if isinstance(error, TypeError) and called and begins:
            return (
                f"{label} cannot be called with the arguments that fedmuon passes ({cause}): "
                "change the parameters of your function"
            )
    return None


def _attribute(value: Any, attribute: str) -> str:
    """Return an attribute of a custom object as text.

    Return an empty text if the access raises an error.
    """
    try:
        return str(getattr(value, attribute, ""))
    except Exception:
        return ""


# Import of a user's file as a module, and of the local modules in the same folder.
#
# Two folders may contain modules with the same name, and a module may be edited between two runs in
# a process. So local modules are put into `sys.modules` whenever the file imports something. They
# are read again after a change.


def local_imports(file: Path) -> dict[str, Path]:
    """Find the modules that a file imports from its own folder: a mapping of module name to file.

    The mapping also contains modules that these modules import from the folder.
    """
    modules: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        script = waiting.pop()
        package = script.parent.relative_to(file.parent).parts
        for level, name in _import_statements(
            script, script.stat().st_mtime_ns, script.stat().st_size
        ):
            inside = package[: len(package) + 1 - level] if level else ()
            absolute = ".".join([*inside, name])
            if absolute in modules or absolute.partition(".")[0] in LIBRARIES:
                continue
            place = file.parent.joinpath(*absolute.split("."))
            choices = (place / "__init__.py", place.with_name(f"{place.name}.py"))
            if source := next((choice for choice in choices if choice.is_file()), None):
                modules[absolute] = source.resolve()
                waiting.append(modules[absolute])
    return dict(sorted(modules.items()))


@lru_cache(maxsize=256)
def _import_statements(file: Path, time: int, size: int) -> tuple[tuple[int, str], ...]:
    """Return (number of leading dots, name) of each module that a file may import.

    For `a.b`, the result also contains `a`, because Python imports `a` first. `time` and `size`
    belong to the cache key, so that a changed file is parsed again.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # reported when it is imported
        return ()
    imports: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            imports += [(node.level, f"{base}.{alias.name}".strip(".")) for alias in node.names]
    modules = [
        (level, above)
        for level, name in imports
        for above in accumulate(name.split("."), "{}.{}".format)
    ]
    return tuple(dict.fromkeys(modules))


def stamp(file: Path) -> Stamp:
    """Return the modification times and sizes of a file and its local imports, to detect changes.

    The result is empty if the path is not an existing Python file.
    """
    if file.suffix != ".py" or not file.is_file():
        return ()
    files = dict.fromkeys([file, *local_imports(file).values()])
    stats = [(str(path), path.stat()) for path in files if path.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def _read_module(path: Path) -> ModuleType:
    """Import a file as a module.

    The file is imported again only if the file or a local import has changed.
    """
    name = f"fedmuon_own_{sha256(str(path).encode()).hexdigest()[:12]}"
    now = stamp(path)
    if name in sys.modules and getattr(sys.modules[name], "__fedmuon_stamp__", None) == now:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        """Import a module, or import it again if it is a local file that has changed.

        This function replaces `__import__` in the user's file, also after the file was imported.
        """
        if name not in local_imports(path):
            return builtins.__import__(name, *args, **kwargs)
        with _local_modules(path):
            return builtins.__import__(name, *args, **kwargs)

    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    module_builtins = {**vars(builtins), "__import__": load}
    module.__dict__.update(__fedmuon_stamp__=now, __builtins__=module_builtins)
    try:
        with _local_modules(path):
            exec(compile(path.read_bytes(), path, "exec"), module.__dict__)  # no outdated bytecode
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _local_modules(file: Path) -> Iterator[None]:
    """Within this context, imports find the modules in the file's own folder first."""
    local_files = local_imports(file)
    others = {}  # other modules with the same names in `sys.modules`
    for name in local_files:
        loaded = sys.modules.get(name)
        if loaded is not None and _file_of(loaded) != local_files.get(loaded.__name__):
            others[name] = loaded
    for name, path in local_files.items():
        cached, loaded = READ.get(path), sys.modules.get(name)
        if cached is not None and cached[0] == stamp(path):
            sys.modules[name] = cached[1]  # the version that was read before
        elif loaded is not None and ((cached and loaded is cached[1]) or _file_of(loaded) != path):
            del sys.modules[name]  # read it again; a module that the caller imported itself stays
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # bytecode can be outdated
    sys.path.insert(0, str(file.parent))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's module may have removed the entry
            sys.path.remove(str(file.parent))
        sys.dont_write_bytecode = written
        for name, path in local_files.items():
            loaded = sys.modules.get(name)
            if loaded is None or _file_of(loaded) != path or "__fedmuon_stamp__" in vars(loaded):
                continue
            loaded.__dict__["__fedmuon_stamp__"] = now = stamp(path)
            READ[path] = (now, loaded)
        read = [module for _, module in READ.values()]
        for name, module in others.items():
            if not any(module is own_module for own_module in read):
                sys.modules[name] = module


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


# The facts that an object takes as parameters, matched by name


class Filled(partial):
    """A custom function with some arguments already set, namely facts such as `seed`."""


def make(found: Any, known: Mapping[str, Any], values: tuple[type, ...] = ()) -> Any:
    """Return the object itself if it is a value, or the value that it returns when it is called.

    `known` contains the facts, such as the seed, by parameter name. An object of one of the types
    `values` is a value. A function that needs further arguments is a value, too. Its parameters
    that are facts are set. Any other function is called with only the facts, and returns the value.
    """
    if isinstance(found, values) or not callable(found) or _is_module(found):
        return found
    facts = takes(found, known)
    try:
        inspect.signature(found).bind(**facts)
    except TypeError:
        return Filled(found, **facts) if facts else found
    except ValueError:  # a builtin function
        return found
    return found(**facts)


def takes(found: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `known` for which the object has a parameter of the same name.

    `known` contains facts, such as the seed of the run. A torch module takes no facts, because it
    passes all arguments to its `forward`.
    """
    parameters = {} if _is_module(found) else _parameters(found)
    if any(param.kind is param.VAR_KEYWORD for param in parameters.values()):
        return dict(known)
    by_name = {
        name for name, param in parameters.items() if param.kind is not param.POSITIONAL_ONLY
    }
    return {name: value for name, value in known.items() if name in by_name}


def default_of(found: Any, name: str) -> Any:
    """Return the default of a parameter.

    Return None if the parameter is required or does not exist.
    """
    parameter = _parameters(found).get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def required_parameters(found: Any) -> list[str]:
    """Return the names of the parameters without a default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = _parameters(found).items()
    return [
        name for name, param in parameters if param.kind in kinds and param.default is param.empty
    ]


def takes_anything(found: Any) -> bool:
    """Return whether a callable, other than a class, takes any number of arguments (`*args`)."""
    any_number = [
        param for param in _parameters(found).values() if param.kind is param.VAR_POSITIONAL
    ]
    return not isinstance(found, type) and bool(any_number)


def _parameters(value: Any) -> Mapping[str, inspect.Parameter]:
    if not callable(value):  # the error of inspect would contain the whole object
        return {}
    try:
        return inspect.signature(value).parameters
    except (TypeError, ValueError):
        return {}


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")  # before torch is imported, nothing is a module
    return torch is not None and isinstance(value, torch.nn.Module)


def require_callable(found: Any, kind: str, wanted: str, named: str = "") -> Any:
    """Return the object if it can be called.

    Otherwise, raise an error that names the objects in `wanted` as possible objects, and the key
    `named` of the config, if it is set.
    """
    if not callable(found):
        raise unfit(found, kind, wanted, named)
    return found


def unfit(found: Any, kind: str, wanted: str, named: str = "") -> InputError:
    """Return the error that an object cannot be used as the given kind, such as `schedule`.

    The error advises to pass `wanted` instead. `named` is the key and the value of the config that
    name the object, or empty.
    """
    a_kind = f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
    if named:
        problem = (
            f"requires arguments that a config does not provide, so it cannot create {a_kind}"
            if isinstance(found, Filled)
            else f"gives an object of type {type(found).__name__}, which cannot be used as {a_kind}"
        )
        return InputError(f"{named} {problem}: use {wanted}")
    if isinstance(found, Filled):  # the function needs more arguments than the facts
        name = getattr(found.func, "__name__", "") or type(found.func).__name__
        return InputError(
            f"{name} requires arguments that a config does not provide, so it cannot create "
            f"{a_kind}: pass {wanted}"
        )
    return InputError(
        f"an object of type {type(found).__name__} cannot be used as {a_kind}: pass {wanted}"
    )
