"""Other people's words on a terminal: characters that would move it are written out."""

import unicodedata
from pathlib import Path

from rich.text import Text

BREAKS = "\u2028\u2029"


def visible(text: str) -> str:
    """The text on one line, with control and direction characters as their escapes."""
    return "".join(repr(c)[1:-1] if _moves(c) else c for c in text)


def named(path: Path) -> Text:
    """A path in bold, whatever its name."""
    return Text(visible(str(path)), style="bold")


def _moves(character: str) -> bool:
    return unicodedata.category(character).startswith("C") or character in BREAKS
