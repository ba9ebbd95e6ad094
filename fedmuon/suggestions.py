"""What to say of a name that there is not: the one that is near, else all that there are."""

import difflib
from collections.abc import Iterable

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
