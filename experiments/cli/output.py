"""The output of commands: results as tables or JSON, notes, warnings and errors.

Commands print results and paths on stdout, and warnings and errors on stderr. With `--json`, they
print one JSON object and nothing else on stdout. With `--quiet`, they print no progress, notes or
warnings.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from fedmuon.core.errors import plain


@dataclass
class Style:
    """The values of the options --json and --quiet of the current command."""

    as_json: bool = False
    quiet: bool = False


style = Style()
console = Console()


def live() -> Console:
    """Return the console for progress; with --json or --quiet it shows nothing."""
    return Console(quiet=True) if style.as_json or style.quiet else console


def tell(record: Mapping[str, Any], *tables: object) -> None:
    """Print a result: with --json the record as one JSON object, otherwise the tables."""
    if style.as_json:
        typer.echo(json.dumps(in_json(record), indent=2, allow_nan=False))
        return
    for table in tables:
        console.print(table, soft_wrap=isinstance(table, Text))


def in_json(value: Any) -> Any:
    """Convert a record to types that JSON supports: NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {str(name): in_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return in_json(value.tolist()) if hasattr(value, "tolist") else str(value)  # array; or a path


def tell_files(files: Sequence[tuple[str, Path]]) -> None:
    """Print the paths of the files that a command wrote, each after a few words about the file."""
    tell({"files": [str(file) for _, file in files]})
    for words, file in files:
        print_path(words, file)


def print_path(words: str, path: Path) -> None:
    """Print words and a path on one line, so that the path can be copied.

    Print nothing with --json.
    """
    if not style.as_json:
        console.print(words, Text(plain(path, None), style="bold"), soft_wrap=True)


def note(sentence: str) -> None:
    """Print a note on one line, without markup. Print nothing with --json or --quiet."""
    if sentence and not (style.as_json or style.quiet):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def warn(sentence: str) -> None:
    """Print a warning on stderr unless --quiet is given."""
    if not style.quiet:
        complain(sentence)


def complain(sentence: str) -> None:
    """Print a sentence on stderr.

    Brackets such as [data] are not markup, because they name config tables.
    """
    if not sentence:
        return
    text = Text.assemble(("fedmuon: ", "bold red"), plain(sentence, None))
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
