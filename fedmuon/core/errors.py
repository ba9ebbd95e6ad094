"""The errors that a user causes and can mend, the wish to stop, and words for their sentences."""

import contextlib
import difflib
import signal
from collections.abc import Iterable, Iterator
from decimal import ROUND_CEILING, Context

KEYWORDS = {
    "--resume it": "go on with it by resume=True",
    "--resume": "resume=True",
    "--out": "out=",
}
AGAIN = "give the command again"
NOTHING_SAVED = f"nothing new was saved, {AGAIN}"  # where no command began, or its folder is empty


class InputError(ValueError):
    """Bad input: the message is one sentence that names what is wrong and what to do."""


class NonFinite(InputError):
    """A loss, gradient or model that is NaN or infinite."""


class Interrupted(BaseException):
    """Somebody asks the program to stop; no `KeyboardInterrupt`, which other libraries catch."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = int(number)

    @property
    def exit_code(self) -> int:
        """As shells count: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """A refusal names keywords where the command line has options."""
    try:
        yield
    except InputError as error:
        error.args = (as_keywords(str(error)), *error.args[1:])
        raise


def as_keywords(said: str) -> str:
    """A sentence with keywords in place of the command line's options."""
    for option, keyword in KEYWORDS.items():
        said = said.replace(option, keyword)
    return said


def shown(what: object) -> str:
    """An argument as code, in part of a line; the type alone of what cannot say what it is."""
    try:
        return plain(" ".join(repr(what).split()), 60)
    except Exception:  # of an object of the user's
        return f"a {type(what).__name__}"


def plain(what: object, most: int | None = 200) -> str:
    """Anybody's words as part of a line: control characters become visible, `most` are kept."""
    words = str(what) if most is None else str(what)[: most + 1]
    text = "".join(one if one.isprintable() else repr(one)[1:-1] for one in words)
    return text if most is None or len(text) <= most else f"{text[:most]}..."


# What to say of a name that there is not: the one that is near, else all that there are.

NEAR = 0.75  # of difflib's ratio: one letter of four wrong; below it suggestions are guesses


def near(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Those of the known names that a slip of the keyboard makes of this, the nearest first; a
    letter in another case is a slip."""
    spelt = {one.lower(): one for one in reversed(list(known))}
    close = difflib.get_close_matches(name.lower(), spelt, n=most, cutoff=NEAR)
    return [spelt[one] for one in close]


def instead(name: str, known: Iterable[str], words: str = "use one of") -> str:
    """`did you mean lr?`, or `use one of` all."""
    names = list(known)
    if close := near(name, names):
        return f"did you mean {close[0]}?"
    return f"{words} {', '.join(names)}"


# Numbers that a sentence asks for, in few digits.


def rounded_up(least: float) -> str:
    """A positive number in three digits that is no less, so that what is set is enough."""
    digits = Context(prec=3, rounding=ROUND_CEILING)
    return f"{float(digits.create_decimal(repr(least))):g}"
