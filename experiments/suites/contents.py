"""A suite's TOML file, as it is for a data set at a scale; what it says is its kind's to read."""

import contextlib
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args

from fedmuon.config.load import Config, only_read, parse
from fedmuon.config.read_if import is_default, reads, refusal
from fedmuon.core.errors import InputError, instead
from fedmuon.core.files import read_text
from fedmuon.core.tables import Scalar, read_toml, shown
from fedmuon.data.source import Source

FOLDER = Path(__file__).parent
STUDIES = FOLDER.parent / "studies"
DATA = "mnist5k"  # of a suite whose file names none
PUBLISHED_FOR = {"mnist": "mnist", "fashion-mnist": "mnist", "mnist5k": "mnist",
                 "cifar10": "cifar10"}  # fmt: skip
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")  # what a spreadsheet's begin with
TEST = 5000  # held-out samples (001, Table 1), or a fifth of a small source
Scale = Literal["small", "full"]
Tables = Mapping[str, Mapping[str, Scalar]]


@dataclass(frozen=True)
class SuiteRequest:
    """What the command line asks for; `data` is empty where the suite has none by itself.

    `changes` are config tables that override the suite's own; a `seed` is the only one, `seeds` is
    how many there are.
    """

    name: str
    data: str
    scale: str
    changes: Tables
    seed: int | None = None
    seeds: int | None = None
    told: Mapping[str, Any] = field(default_factory=dict)  # what suite.json repeats of the file

    @property
    def stem(self) -> str:
        """The suite's name, also where a file was named."""
        return Path(self.name).stem

    @property
    def again(self) -> str:
        """The command that asks for the same."""
        words = ["fedmuon", "suite", self.name, *(["--data", self.data] if self.data else [])]
        words += ["--scale", self.scale]
        words += [] if self.seed is None else ["--seed", str(self.seed)]
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        for table, keys in self.changes.items():
            for key, value in keys.items():
                spelled = str(value).lower() if isinstance(value, bool) else value
                words += ["--set", f"{table}.{key}={spelled}"]
        return shlex.join(words)


def read(name: str) -> dict[str, Any]:
    """The file of that name, or the TOML file at that path, on top of the suite it is `like`."""
    content = read_toml(_file(name))
    like = content.pop("like", None)
    if like is None:
        return content
    below = read_toml(_file(like)) if isinstance(like, str) else {"like": like}
    if "like" in below:
        raise InputError(f"{name}: like = {like!r} must name a suite that is like no other")
    return merged(below, content)


def told(name: str) -> str:
    """What the file's first lines say of it, and those of the one that it is `like`."""
    like = read_toml(_file(name)).get("like")
    said = [preamble(read_text(_file(one))) for one in (name, like) if one]
    return "\n\n".join(filter(None, said))


def preamble(text: str) -> str:
    """The comment at the beginning of a TOML file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return "\n".join(line[1:].removeprefix(" ") for line in lines)


def require_plain(word: str, what: str) -> None:
    """Refuse names that tables would hold as formulas: spreadsheets compute what they are given."""
    if word.startswith(FORMULAS):
        raise InputError(f"{what} {word!r} begins like a spreadsheet's formula: rename it")


def shipped() -> dict[str, Path]:
    """The suites that come with the package: those of runs lie here, each study has its own."""
    own = {file.stem.replace("_", "-"): file for file in STUDIES.glob("*.toml")}
    return {file.stem: file for file in FOLDER.glob("*.toml")} | own


def _file(name: str) -> Path:
    require_plain(Path(name).stem, "the suite's name")
    file = shipped().get(name) or Path(name)
    with contextlib.suppress(OSError, ValueError):  # no file can be called so
        if file.exists() and not file.is_dir():  # what no file is, is said when it is read
            return file
    mend = instead(name, sorted(shipped()), "name one of")
    raise InputError(f"there is no suite {name}, nor a TOML file of that name: {mend}")


def at(content: Mapping[str, Any], data: str, scale: str) -> dict[str, Any]:
    """The content for a data set ([for.DATA]) at a scale ([small])."""
    if scale not in get_args(Scale):
        raise InputError(f"--scale {scale} is unknown: choose {' or '.join(get_args(Scale))}")
    content = dict(content)
    small, variants = _table(content, "small"), _table(content, "for")
    content = merged(content, _table(variants, data, "for."))
    return merged(content, small) if scale == "small" else content


def _table(content: dict[str, Any], name: str, above: str = "") -> dict[str, Any]:
    """Take the table of that name out of the content."""
    held, name = content.pop(name, {}), above + name
    if not isinstance(held, Mapping):
        raise InputError(f"{name} = {shown(held)} must be a table: write [{name}] above it")
    return dict(held)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables, those of `above` on top."""
    both = {**below, **above}
    for key in set(below) & set(above):
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = merged(below[key], above[key])
    return both


def cell(*layers: Tables) -> Config:
    """A cell's config: tables, each on top of the one before, without what this cell does not read:
    what all cells share means "where it is read"."""
    return parse(only_read(reduce(merged, layers, {})))


def require_read(place: str, asked: Tables, cells: Sequence[Config]) -> None:
    """Refuse a key that the place of a suite asks for and none of these cells reads."""
    for table, keys in asked.items():
        for key, value in keys.items():
            name = f"{table}.{key.replace('_', '-')}"
            useless = not any(reads(config, name) for config in cells)
            if useless and not is_default(cells[0], name, value):
                raise InputError(f"{place}: {refusal(cells[0], name, value)}")


def require_free(place: str, changes: Tables, settled: Mapping[str, str]) -> None:
    """Refuse keys that the suite settles elsewhere: `table.key` -> where."""
    for table, keys in changes.items():
        for key in keys:
            if where := settled.get(f"{table}.{key}"):
                raise InputError(
                    f"{place} {table}.{key} has no effect: {where} settles it, so leave it out, or "
                    "change that in a copy of the suite's file"
                )


def room(source: Source | None, test: Scalar = TEST) -> tuple[int, int]:
    """Held-out samples, and the most that can be trained on; None is a source without an end."""
    if not isinstance(test, int) or isinstance(test, bool):
        raise InputError(f"[data] test = {test!r} is refused: give a whole number")
    if source is None:
        return test, sys.maxsize
    n, parted = len(source.labels), source.official_test
    held = min(test, n - parted if parted else n // 5)
    return held, parted or n - held


def guess(source: Source, config: Config) -> dict[str, tuple[int, int]]:
    """Among how many classes a guess is, and on how many held-out samples it is judged; nothing of
    text, whose labels say where it is from, while accuracy is that of the next token."""
    return {} if source.vocabulary else {"guess": (max(1, source.classes), config.data.test)}
