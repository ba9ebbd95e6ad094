"""What to say of a name that there is not: the one that is near, else all that there are."""

import difflib
from collections.abc import Iterable

NEAR = 0.75  # of difflib's ratio: one letter of four wrong; below it suggestions are guesses


def near(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Those of the known names that a slip of the keyboard makes of this, the nearest first."""
    return difflib.get_close_matches(name, list(dict.fromkeys(known)), n=most, cutoff=NEAR)


def instead(name: str, known: Iterable[str], words: str = "use one of") -> str:
    """`did you mean lr?`, or `use one of` all."""
    names = list(known)
    if close := near(name, names):
        return f"did you mean {close[0]}?"
    return f"{words} {', '.join(names)}"
