"""What lies beside a file of the user's: the modules that it imports from its own folder.

Two folders may have modules of one name, and a module may be edited between two runs of a process.
So a file's neighbours are put in their places whenever the file imports anything, and read anew
once one of them changed.
"""

import ast
import builtins
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "fedmuon"}  # known by their names
Stamp = tuple[tuple[str, int, int], ...]  # file, its time and size
HELD: dict[Path, tuple[Stamp, ModuleType]] = {}  # neighbours that were read, as they were then


def neighbours(file: Path) -> dict[str, Path]:
    """By the names of modules, the files of the folder that a file imports, and that those do."""
    found: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        one = waiting.pop()
        for level, named in _imports(one, *_stat(one)):
            name = _absolute(file.parent, one, level, named)
            there = _beside(file.parent, name)
            if there is not None and name not in found:
                found[name] = there
                waiting.append(there)
    return dict(sorted(found.items()))


def stamp(file: Path) -> Stamp:
    """What changes when a file or one of its neighbours does."""
    files = dict.fromkeys([file, *neighbours(file).values()])
    return tuple((str(one), *_stat(one)) for one in files if one.is_file())


@contextlib.contextmanager
def own_neighbours(file: Path) -> Iterator[None]:
    """While the file imports, the modules of its folder are what their names mean."""
    ours = neighbours(file)
    others = {name: sys.modules.get(name) for name in ours if not _is(sys.modules.get(name), ours)}
    for name, path in ours.items():
        _put(name, path)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # which can be stale
    sys.path.insert(0, str(file.parent))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # where the user's module took it away
            sys.path.remove(str(file.parent))
        sys.dont_write_bytecode = written
        for name, path in ours.items():
            _keep(name, path)
        kept = [module for _, module in HELD.values()]
        for name, module in others.items():
            if module is not None and not any(module is one for one in kept):
                sys.modules[name] = module  # of those who imported it without us


def importing(file: Path) -> Callable[..., Any]:
    """`__import__` for a file, also for what its functions import when they are called."""

    def load(name: str, *given: Any, **named: Any) -> Any:
        if name not in neighbours(file):
            return builtins.__import__(name, *given, **named)
        with own_neighbours(file):
            return builtins.__import__(name, *given, **named)

    return load


def _is(module: ModuleType | None, ours: dict[str, Path]) -> bool:
    return module is not None and _file_of(module) == ours.get(module.__name__)


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _put(name: str, path: Path) -> None:
    """The module as it was read, if it still is so; else none, unless the caller imported it."""
    held, now = HELD.get(path), stamp(path)
    there = sys.modules.get(name)
    if held is not None and held[0] == now:
        sys.modules[name] = held[1]
    elif there is not None and ((held and there is held[1]) or _file_of(there) != path):
        del sys.modules[name]


def _keep(name: str, path: Path) -> None:
    """Remember a module that was read here."""
    module = sys.modules.get(name)
    if module is not None and _file_of(module) == path and "__fedmuon_stamp__" not in vars(module):
        module.__dict__["__fedmuon_stamp__"] = now = stamp(path)
        HELD[path] = (now, module)


def _beside(folder: Path, name: str) -> Path | None:
    """The file of a module of that name, if it lies in the folder."""
    if name.partition(".")[0] in LIBRARIES:
        return None
    place = folder.joinpath(*name.split("."))
    choices = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((one.resolve() for one in choices if one.is_file()), None)


def _stat(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size


def _absolute(folder: Path, file: Path, level: int, name: str) -> str:
    """The module that `name`, after so many dots, means in a file below the folder."""
    package = file.parent.relative_to(folder).parts
    inside = package[: len(package) + 1 - level] if level else ()
    return ".".join([*inside, *([name] if name else [])])


@lru_cache(maxsize=256)
def _imports(file: Path, time: int, size: int) -> tuple[tuple[int, str], ...]:
    """The modules that a file may mean by its import statements, as it was at that time: how many
    dots, and the name behind them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # said when it is imported
        return ()
    found: dict[tuple[int, str], None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(0, one): None for alias in node.names for one in _upwards(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [f"{base}.{alias.name}".strip(".") for alias in node.names]
            found |= {(node.level, one): None for name in names for one in _upwards(name)}
    return tuple(found)


def _upwards(name: str) -> list[str]:
    """a.b.c with a and a.b, which are imported first."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
