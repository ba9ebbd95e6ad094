"""A config file to begin with: every key at its default, behind a comment, with what it is."""

import textwrap

from fedmuon.reference.describe import Key, keys, title
from fedmuon.reference.keys import KEYS

WIDTH = 96
HEAD = """\
# A config of fedmuon. Every key has the default that stands here: take the # before one away to
# change it. Keys that nothing reads are refused if they are changed.
"""


def commented() -> str:
    """The file as text."""
    return HEAD + "".join(_table(name) for name in KEYS)


def _table(name: str) -> str:
    lines = "".join(_lines(one) for one in keys(name))
    return f"\n# {title(name)}\n[{name}]\n{lines}"


def _lines(key: Key) -> str:
    """What it is, what it can be, who reads it; and the key."""
    readers = "" if key.readers == "always" else f"; read by {key.readers}"
    said = textwrap.wrap(f"{key.what} ({key.values}{readers})", WIDTH, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in said) + f"#{key.name} = {key.default}\n"
