"""Errors that a user can fix, the request to stop, and guards for custom objects.

Every error that a custom object raises becomes an `InputError`. The message names the kind of the
object, the object, the round, the client, and the line of the user's code. The original error is
the cause of the `InputError`. Each custom object is wrapped in a guard once, when fedmuon loads the
object.
"""

import contextlib
import difflib
import inspect
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

KEYWORDS = {
    "--resume it": "resume it with resume=True",
    "--resume": "resume=True",
    "--out": "out=",
    ", or leave --clients out": "",
    "--grid": "grid",
    "--seeds": "seeds",
    "--select": "select",
}
AGAIN = "run the command again"
NOTHING_SAVED = f"nothing new was saved, {AGAIN}"  # no command began, or its folder is empty
SAME_VERSION = (
    "The server and the nodes probably use different versions of fedmuon. Install the same version "
    "on the server and on every node."
)
NEAR = 0.75  # difflib's ratio for one wrong letter in four; names below it are not suggested
LONG = 120  # maximum characters of a value in a message


class InputError(ValueError):
    """The error for an input that cannot be used. The message says what is wrong, and what to do.

    `InputError` is a subclass of `ValueError`.

    Example:
        >>> import fedmuon
        >>> try:
        ...     fedmuon.recipes.fedavg(lr=-1)
        ... except fedmuon.InputError as error:
        ...     print("lr" in str(error))
        True
    """


class NonFinite(InputError):
    """The error for a loss, gradient or model that is NaN or infinite."""


class OwnError(InputError):
    """The error for a failure in a custom object.

    The cause of this error is the error that the object raised.
    """


class Interrupted(BaseException):
    """A request to stop the program, for example by Ctrl-C.

    The class is not derived from `KeyboardInterrupt`, because some libraries catch that exception.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = int(number)
        self.exit_code = 128 + self.number  # the convention of shells: 130 or 143


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Within this context, error messages show Python arguments instead of command-line options."""
    try:
        yield
    except InputError as error:
        error.args = (as_keywords(str(error)), *error.args[1:])
        raise


def as_keywords(said: str) -> str:
    """Replace command-line options in a message by Python arguments: --resume by resume=True."""
    for option, keyword in KEYWORDS.items():
        said = said.replace(option, keyword)
    return said


def shown(value: Any) -> str:
    """Format a value for a message as one line. A long text is shortened in the middle."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print numbers of more than 4300 digits
        return "a number with thousands of digits"
    except Exception:  # in a custom object
        return f"a {type(value).__name__}"
    if "\n" in text:  # for example a tensor's repr
        text = " ".join(text.split())
    text = plain(text, None)
    return text if len(text) <= LONG else f"{text[: LONG // 2]}...{text[-LONG // 4 :]}"


def plain(what: object, most: int | None = 200) -> str:
    """Format untrusted text as one line.

    Control characters become visible, and text longer than `most` characters is cut.
    """
    words = str(what) if most is None else str(what)[: most + 1]
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in words)
    return text if most is None or len(text) <= most else f"{text[:most]}..."


def near(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the known names that differ from `name` only by a typing error or by case.

    The nearest name comes first.

    Two swapped letters count as a typing error, even in short names: `rnu` is near `run`.
    """
    spelt, lower = {word.lower(): word for word in reversed(list(known))}, name.lower()
    swapped = [word for word in spelt if word != lower and sorted(word) == sorted(lower)]
    close = difflib.get_close_matches(lower, spelt, n=most, cutoff=NEAR)
    return [spelt[word] for word in dict.fromkeys([*close, *swapped])][:most]


def instead(name: str, known: Iterable[str], words: str = "use one of") -> str:
    """Suggest known names for an unknown name.

    If a known name is similar, return a question such as `did you mean lr?`. Otherwise, return `use
    one of` and all known names.
    """
    names = list(known)
    if close := near(name, names):
        return f"did you mean {close[0]}?"
    return f"{words} {', '.join(names)}"


def rounded_up(least: float) -> str:
    """Format a minimum with three digits.

    The minimum is rounded up, so the printed number is allowed.
    """
    digits = Context(prec=3, rounding=ROUND_CEILING)
    return f"{float(digits.create_decimal(repr(least))):g}"


# Guards for custom objects

NOT_THEIRS = {*sys.stdlib_module_names, "torch", "numpy", "fedmuon", "functorch"}
PASSED = ("OutOfMemoryError",)  # not wrapped: the caller tries again with fewer samples
WANTED = {
    "task": "an nn.Module, (module, loss), or fedmuon.Task(module, loss, metrics)",
    "loss": "a function (outputs, targets) that returns one number for each sample",
    "metric": "a function (outputs, targets) that returns one number for each sample",
    "data": "(inputs, labels), a table, a sequence of pairs or dicts, or a function that returns "
    "one of these",
    "test": "(inputs, labels), a table, or a sequence of pairs or dicts",
    "partition": "one index array per client, or a function (labels, clients, rng)",
    "recipe": "a fedmuon.Recipe, a fedmuon.Chain or a list of links",
    "init": "a function of the parameters that returns a state, a mapping of names to tensors",
    "update": (
        "a function (direction, state, context) that returns (direction, state), or for "
        "links.stateless a function (direction, context) that returns a direction; directions "
        "and states are mappings of names to tensors"
    ),
    "server rule": "a function that takes (old, mean, states) and returns (model, states)",
    "orthogonalizer": "a function on stacks of matrices [..., m, n]",
    "aggregate": "a function of a round's replies that returns a mapping of names to tensors",
    "stage": "a fedmuon.Stage, or a list of them",
    "schedule": "a function of the round that returns a number of 0 or more",
    "callback": "a function (record, state) or a fedmuon.callbacks.Callback",
    "callbacks": "a list of functions (record, state) or of fedmuon.callbacks.Callback",
    "params": "parameters, or dictionaries of parameters as for any torch optimizer",
    "model": "an nn.Module with trainable parameters",
    "lr": "a number of 0 or more",
    "weight_decay": "a number of 0 or more",
    "momentum": "a number of 0 or more",
    "eps": "a number of 0 or more",
    "ns_steps": "an integer of 0 or more",
    "ns_coefficients": "a triple of numbers, a list of triples, or a name",
    "population": "the number of samples, an integer",
    "seed": "an integer of 0 or more",
}
_where: ContextVar[tuple[int, Sequence[int]] | None] = ContextVar("where", default=None)


@contextlib.contextmanager
def in_round(round: int, clients: Sequence[int] = ()) -> Iterator[None]:
    """Within this context, errors name this round (counted from 0) and these clients."""
    token = _where.set((round, clients))
    try:
        yield
    finally:
        _where.reset(token)


def round_and_clients() -> str:
    """Return the words that name the round and the clients of `in_round`, or an empty text."""
    if (place := _where.get()) is None:
        return ""
    round, clients = place
    text = f" in round {round + 1}"
    if clients:
        subject = "client" if len(clients) == 1 else "one of the clients"
        text += f", on {subject} {plain(', '.join(map(str, clients)), 60)}"
    return text


@dataclass(frozen=True, eq=False)
class Guard:
    """A context that converts errors of a custom object to `OwnError`.

    Attributes:
        kind: The kind of the object, a key of `WANTED`.
        found: The object.
        named: The key of the config that names the object, or empty.
    """

    kind: str
    found: Any = None
    named: str = ""

    @property
    def label(self) -> str:
        """The words that name the object in a message."""
        label = f"{self.kind} {object_name(self.found)}"
        return f"{self.named} ({label})" if self.named else f"your {label}"

    def __enter__(self) -> None:
        """Do nothing. The guard acts only when an error occurs."""

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        passed = isinstance(error, InputError) or type(error).__name__ in PASSED
        if isinstance(error, Exception | SystemExit) and not passed:
            raise _refusal(self, error) from error

    def calling(
        self, function: Callable[..., Any], read: Callable[[Any], Any] | None = None
    ) -> Callable[..., Any]:
        """Return a function that runs within this guard.

        The function `read`, if set, converts the results.
        """
        return _Guarded(self, function, read)

    def part(self, kind: str, found: Any) -> "Guard":
        """Return a guard for one part of the custom object, such as a metric of a task."""
        return Guard(kind, found, self.named)


@dataclass(eq=False)
class _Guarded:
    """A function that runs within a guard. A deep copy of this object also copies the function."""

    guard: Guard
    function: Callable[..., Any]
    read: Callable[[Any], Any] | None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.guard:
            result = self.function(*args, **kwargs)
            return result if self.read is None else self.read(result)


def mapping(found: Any) -> dict[str, Any]:
    """Convert a mapping to a dictionary. Raise TypeError for a value that is not a mapping."""
    if not isinstance(found, Mapping):
        raise TypeError(
            f"your function returned a {type(found).__name__}, but it must return a mapping of "
            "names to tensors"
        )
    return dict(found)


def object_name(found: Any) -> str:
    """Return a readable name of a custom object: its own name, or the name of its class.

    No error is raised, even if the object's attributes raise errors.
    """
    try:
        for within in ("apply", "module"):  # inside an Orthogonalizer, Aggregator or Task
            if within in getattr(found, "__dict__", {}) and not isinstance(found, type):
                return object_name(getattr(found, within))
        if isinstance(found, tuple | list) and found:
            return object_name(found[0])
        name = found.__name__ if isinstance(found, type) or callable(found) else ""
        return plain(name, 60) if name and isinstance(name, str) else type(found).__name__
    except Exception:  # a property of the custom object failed
        return type(found).__name__


def _refusal(guard: Guard, error: BaseException) -> OwnError:
    """Return the error that names the custom object, the place of the failure, and what to do."""
    label, context = guard.label, round_and_clients()
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # the error itself may be a custom object
        lines = []
    cause = ": ".join([type(error).__name__, *map(plain, lines[:1])])
    line, trace = "", error.__traceback__  # the innermost call in the user's code
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__", "")
        if _is_theirs(str(module), code.co_filename):
            line = f"{code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    if line:
        return _of_kind(type(error))(f"{label} fails{context} with {cause} ({line}): fix that line")
    inside = cause
    with contextlib.suppress(Exception):  # not a function, or reading it raises an error
        code = guard.found.__code__
        if _is_theirs(str(guard.found.__module__), code.co_filename):
            inside = f"{cause}; {code.co_filename}, line {code.co_firstlineno}"
    accepted = WANTED.get(guard.kind, WANTED.get(guard.kind.partition(" ")[0], "another object"))
    return _of_kind(type(error))(f"{label} cannot be used{context} ({inside}): pass {accepted}")


def _is_theirs(module: str, file: str) -> bool:
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return module.partition(".")[0] not in NOT_THEIRS and not installed and "<" not in file[:1]


@lru_cache(maxsize=64)
def _of_kind(kind: type[BaseException]) -> Callable[[str], OwnError]:
    """Return an error class that is both `OwnError` and the error class of the user's code.

    Therefore, a callback can end a run with the user's own exception, and the user's code can catch
    this exception.
    """
    if not issubclass(kind, Exception) or not _is_theirs(str(kind.__module__), ""):
        return OwnError
    namespace = {
        "__init__": BaseException.__init__,
        "__str__": lambda self: str(self.args[0]),
        "__repr__": lambda self: f"OwnError({self.args[0]!r})",
        "__module__": kind.__module__,
    }
    try:
        combined = type("OwnError", (OwnError, kind), namespace)
        combined("tried")
    except Exception:  # the class does not support multiple inheritance
        return OwnError
    return combined


def require_at_most(most: float, **given: float | None) -> None:
    """Raise an error if one of the named numbers exceeds the maximum."""
    for name, value in given.items():
        if value is not None and abs(value) > most:
            text = f"{value:.6g}" if abs(value) < 1e300 else shown(value)  # maximum of a float
            raise InputError(f"{name} = {text} is too large. Set {name} to at most {most:g}.")
