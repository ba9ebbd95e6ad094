"""Update docs/config.md.

Headings and tables come from the descriptions of keys, and other text is unchanged.

python -m docs.making.config_page docs/config.md
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fedmuon.config.describe import KEYS, keys, title
from fedmuon.config.names import NAMES, OPTIONS

Rows = Sequence[Sequence[str]]


def written(text: str) -> str:
    """Return the page with current headings and tables. The list of sections does not change."""
    first, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return first + "".join(_section(one) for one in sections)


def _section(text: str) -> str:
    """Return a section of the page.

    If the section describes keys, names or options, its heading and its table are updated.
    """
    if found := re.match(r"## `\[([a-z]+)\]`.*", text):
        text = text.replace(found[0], f"## `[{found[1]}]`: {title(found[1])}", 1)
        return _with_table(text, _of_keys(found[1]))
    if text.startswith("## Names"):
        return _with_table(text, _of_names())
    if text.startswith("## Options"):
        return _with_table(text, _of_options())
    return text


def _with_table(text: str, lines: str) -> str:
    """Replace the first table of a text by these lines."""
    return re.sub(r"(^\|.*\n)+", lambda _: lines, text, count=1, flags=re.MULTILINE)


def _of_keys(table: str) -> str:
    rows = [
        (f"`{one.name}`", f"`{one.default}`", one.values, one.what, one.readers)
        for one in keys(table)
    ]
    return _table(("key", "default", "values", "what it is", "used by"), rows)


def _of_names() -> str:
    rows = [
        (f"`{key}`", f"`{name}`", what)
        for table in KEYS
        for key in NAMES
        if key.startswith(f"{table}.")
        for name, what in NAMES[key].items()
    ]
    return _table(("key", "name", "what it is"), rows)


def _of_options() -> str:
    rows = [
        (f"`[{key.partition('.')[0]}.options]`", f"`{name}`", *_of_name(options))
        for key, names in OPTIONS.items()
        for name, options in names.items()
    ]
    return _table(("table", "name", "option", "default", "what it is"), rows)


def _of_name(options: dict[str, tuple[str, str]]) -> tuple[str, str, str]:
    """Return three cells: the options of a name, their defaults, and their descriptions."""
    defaults = ", ".join(f"`{default}`" if default else "none" for default, _ in options.values())
    what = "; ".join(one for _, one in options.values())
    return ", ".join(f"`{option}`" for option in options), defaults, what


def _table(head: Sequence[str], rows: Rows) -> str:
    """Return a table as Markdown."""
    top, *lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return "".join([top, "|---" * len(head) + "|\n", *lines])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
