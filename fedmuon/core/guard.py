"""The boundary to custom objects: whatever one of them raises becomes one `InputError`.

Every slot wraps its object once, when the object is loaded. The error names the slot, the object,
the round and client, and the user's own line; what was raised stays chained as its cause.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from fedmuon.core.errors import InputError, plain

NOT_THEIRS = {*sys.stdlib_module_names, "torch", "numpy", "fedmuon", "functorch"}
PASSED = ("OutOfMemoryError",)  # a network is called again with fewer samples
WANTED = {
    "task": "an nn.Module, (module, loss), or fedmuon.Task(module, loss, metrics)",
    "loss": "a function (outputs, targets) that returns one number for each sample",
    "metric": "a function (outputs, targets) that returns one number for each sample",
    "data": "(inputs, labels), a torch Dataset of pairs, or a function that returns either",
    "test": "(inputs, labels) or a torch Dataset of pairs",
    "partition": "one index array per client, or a function (labels, clients, rng)",
    "recipe": "a fedmuon.Recipe, a fedmuon.Chain or a list of links",
    "init": "a function of the parameters that returns a state, a mapping of names to tensors",
    "update": "a function (direction, state, context) that returns (direction, state), or for "
    "links.stateless one (direction, context) that returns a direction: mappings of names to "
    "tensors",
    "server rule": "a function that takes (old, mean, states) and returns (model, states)",
    "orthogonalizer": "a function on stacks of matrices [..., m, n]",
    "aggregate": "a function of a round's replies that returns a mapping of names to tensors",
    "schedule": "a function of the round that returns a number of 0 or more",
    "callback": "a function (record, state) or a fedmuon.callbacks.Callback",
    "callbacks": "a list of functions (record, state) or of fedmuon.callbacks.Callback",
    "params": "parameters, or dictionaries of them as for any optimizer of torch's",
    "model": "an nn.Module with parameters that learn",
    "lr": "a number of 0 or more",
    "weight_decay": "a number of 0 or more",
    "momentum": "a number of 0 or more",
    "eps": "a number of 0 or more",
    "ns_steps": "a whole number of 0 or more",
    "ns_coefficients": "a triple of numbers, a list of triples, or a name",
    "population": "how many samples there are, a whole number",
    "seed": "a whole number of 0 or more",
}
_where: ContextVar[tuple[int, Sequence[int]] | None] = ContextVar("where", default=None)


class OwnError(InputError):
    """An error in a custom object; its cause is what the object raised."""


@contextmanager
def at(round: int, clients: Sequence[int] = ()) -> Iterator[None]:
    """Meanwhile objects are called in that round, counted from 0, for these clients."""
    token = _where.set((round, clients))
    try:
        yield
    finally:
        _where.reset(token)


@dataclass(frozen=True, eq=False)
class Guard:
    """A slot with its object; a context in which the object is used. `named` is the key of the
    config that names it, if one does."""

    kind: str
    found: Any = None
    named: str = ""

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        passed = isinstance(error, InputError) or type(error).__name__ in PASSED
        if isinstance(error, Exception | SystemExit) and not passed:
            raise refusal(self, error) from error

    def calling(
        self, function: Callable[..., Any], read: Callable[[Any], Any] | None = None
    ) -> Callable[..., Any]:
        """The function, called within the guard; `read` takes its result for what it has to be."""
        return _Guarded(self, function, read)

    def part(self, kind: str, found: Any) -> "Guard":
        """The guard of a part of the object."""
        return Guard(kind, found, self.named)


class _Guarded:
    """A function within its guard."""

    def __init__(
        self, guard: Guard, function: Callable[..., Any], read: Callable[[Any], Any] | None
    ) -> None:
        self.guard, self.function, self.read = guard, function, read

    def __call__(self, *given: Any, **named: Any) -> Any:
        with self.guard:
            found = self.function(*given, **named)
            return found if self.read is None else self.read(found)


def mapping(found: Any) -> dict[str, Any]:
    """A mapping as a plain dictionary."""
    if not isinstance(found, Mapping):
        raise TypeError(f"it returns a {type(found).__name__} and no mapping of names to tensors")
    return dict(found)


def called(found: Any) -> str:
    """The name of a function or class, or that of an object's class, whatever the object does."""
    try:
        for within in ("apply", "module"):  # of an Orthogonalizer or Aggregator, of a Task
            if within in getattr(found, "__dict__", {}) and not isinstance(found, type):
                return called(getattr(found, within))
        if isinstance(found, tuple | list) and found:
            return called(found[0])
        name = found.__name__ if isinstance(found, type) or callable(found) else ""
        return plain(name, 60) if name and isinstance(name, str) else type(found).__name__
    except Exception:  # of a property of the user's
        return type(found).__name__


def refusal(guard: Guard, error: BaseException) -> OwnError:
    """The error that says what failed where, and what to do."""
    names = f"{guard.named} ({guard.kind} {called(guard.found)})" if guard.named else ""
    label = names or f"your {guard.kind} {called(guard.found)}"
    why = ": ".join(filter(None, (type(error).__name__, _first_line(error))))
    wanted = WANTED.get(guard.kind, WANTED.get(guard.kind.partition(" ")[0], ""))
    if line := _own_line(error.__traceback__):
        said = f"{label} fails{_when()} with {why} ({line}): fix that line"
    else:
        defined = _definition(guard.found)
        inside = f"{why}; {defined}" if defined else why
        mend = f"give {wanted}" if wanted else "give another object"
        said = f"{label} cannot be used{_when()} ({inside}): {mend}"
    return _of_kind(type(error))(said)


def _when() -> str:
    if (found := _where.get()) is None:
        return ""
    round, clients = found
    if not clients:
        return f" in round {round + 1}"
    many = "client" if len(clients) == 1 else "one of the clients"
    return f" in round {round + 1}, on {many} {plain(', '.join(map(str, clients)), 60)}"


def _first_line(error: BaseException) -> str:
    """What the error says, which may be an object of the user's itself."""
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:
        return ""
    return plain(lines[0]) if lines else ""


def _own_line(trace: TracebackType | None) -> str:
    """File and line of the innermost call in the user's own code, if there is any."""
    found = ""
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__", "")
        if _is_theirs(str(module), code.co_filename):
            found = f"{code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_theirs(module: str, file: str) -> bool:
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return module.partition(".")[0] not in NOT_THEIRS and not installed and "<" not in file[:1]


def _definition(found: Any) -> str:
    """Where a function stands."""
    try:
        code = found.__code__
        theirs = _is_theirs(str(found.__module__), code.co_filename)
        return f"{code.co_filename}, line {code.co_firstlineno}" if theirs else ""
    except Exception:  # of what has none, and of a property of the user's
        return ""


@lru_cache(maxsize=64)
def _of_kind(kind: type[BaseException]) -> Callable[[str], OwnError]:
    """`OwnError`, which is an error of a class of the user's, too: a caller that waits for that,
    as to end a run from a callback, gets it."""
    if not issubclass(kind, Exception) or not _is_theirs(str(kind.__module__), ""):
        return OwnError
    try:
        own = {"__init__": _said, "__str__": lambda self: str(self.args[0]), "__repr__": _shown}
        both = type("OwnError", (OwnError, kind), {**own, "__module__": kind.__module__})
        both("tried")
    except Exception:  # of a class that cannot be mixed
        return OwnError
    return both


def _said(self: Exception, said: str) -> None:
    self.args = (said,)


def _shown(self: Exception) -> str:
    return f"OwnError({self.args[0]!r})"
