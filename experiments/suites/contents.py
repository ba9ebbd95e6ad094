"""Read a suite's TOML file, with its settings for one data set and one scale."""

import contextlib
import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args

from fedmuon.config.load import Config, only_read, parse
from fedmuon.config.schema import LATER, is_default, reads, refusal
from fedmuon.core.errors import InputError, instead, shown
from fedmuon.core.files import read_text
from fedmuon.core.tables import Scalar, read_toml
from fedmuon.data.source import Source
from fedmuon.federated.client_data import read_source

FOLDER = Path(__file__).parent
STUDIES = FOLDER.parent / "studies"
DATA = "mnist5k"  # default data set
PUBLISHED_FOR = {"mnist": "mnist", "fashion-mnist": "mnist", "mnist5k": "mnist",
                 "cifar10": "cifar10"}  # fmt: skip
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")  # first characters of spreadsheet formulas
TEST = 5000  # held-out samples (Stability note, Table 1); a small source holds out a fifth
Scale = Literal["small", "full"]
Tables = Mapping[str, Mapping[str, Scalar]]
Nested = dict[str, dict[str, Scalar]]


@dataclass(frozen=True)
class SuiteRequest:
    """The arguments of `fedmuon suite`. `data` is empty if the suite has no data set.

    `changes` are config tables that override those of the suite. `seed` is a single seed that
    replaces the suite's seeds. `seeds` is the number of seeds.
    """

    name: str
    data: str
    scale: str
    changes: Tables
    seed: int | None = None
    seeds: int | None = None
    repeats: Mapping[str, Any] = field(default_factory=dict)  # content of the file, for suite.json

    @property
    def stem(self) -> str:
        """The suite's name. For a path, this is the name of the file."""
        return Path(self.name).stem

    @property
    def again(self) -> str:
        """The command that computes the same suite again."""
        words = ["fedmuon", "suite", self.name, *(["--data", self.data] if self.data else [])]
        words += ["--scale", self.scale]
        words += [] if self.seed is None else ["--seed", str(self.seed)]
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        for table, keys in self.changes.items():
            for key, entry in keys.items():
                options = entry if isinstance(entry, Mapping) else {"": entry}
                for option, value in options.items():
                    spelled = str(value).lower() if isinstance(value, bool) else value
                    name = f"{table}.{key}.{option}".rstrip(".")
                    words += ["--set", f"{name}={spelled}"]
        return shlex.join(words)


def read(name: str) -> dict[str, Any]:
    """Read a suite (a name or a path), and the suites that its key `like` refers to."""
    content: dict[str, Any] = {}
    for _, extension in _likes(name):
        content = merged(extension, content)
    return content


def told(name: str) -> str:
    """Return the comments at the top of a suite's file and of the files that it is based on."""
    comments = [preamble(read_text(file_of(like))) for like, _ in _likes(name)]
    return "\n\n".join(filter(None, comments))


def _likes(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and content of the suite, and of all suites that its key `like` leads to."""
    suites: list[tuple[str, dict[str, Any]]] = []
    after: Any = name
    while after is not None:
        if not isinstance(after, str):
            raise InputError(
                f"{name}: like = {after!r} is not a name. Set like to the name of a suite in "
                "quotes."
            )
        if file_of(after) in [file_of(suite) for suite, _ in suites]:
            raise InputError(
                f"{name}: like = {after!r} leads back to a suite that is already loaded. Set "
                "like to a suite that does not extend this one."
            )
        content = read_toml(file_of(after))
        suites.append((after, content))
        after = content.pop("like", None)
    return suites


def preamble(text: str) -> str:
    """Return the comment at the beginning of a TOML file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return "\n".join(line[1:].removeprefix(" ") for line in lines)


def require_plain(word: str, what: str) -> None:
    """Raise InputError if a name begins with a character that starts a formula in a spreadsheet."""
    if word.startswith(FORMULAS):
        raise InputError(
            f"{what} {word!r} begins with a character that starts a formula in a spreadsheet. "
            "Begin the name with a letter or a digit."
        )


def shipped() -> dict[str, Path]:
    """Return the files of the built-in suites.

    The dictionary maps the name of a suite to its file.
    """
    studies = {file.stem.replace("_", "-"): file for file in STUDIES.glob("*.toml")}
    return {file.stem: file for file in FOLDER.glob("*.toml")} | studies


def file_of(name: str) -> Path:
    """Return the TOML file of a suite. `name` is the name of a built-in suite, or a path."""
    require_plain(Path(name).stem, "the suite's name")
    file = shipped().get(name) or Path(name)
    with contextlib.suppress(OSError, ValueError):  # the name cannot be the name of a file
        if file.exists() and not file.is_dir():  # other errors are reported when it is read
            return file
    mend = instead(name, sorted(shipped()), "name one of")
    raise InputError(f"suite {name} does not exist, and there is no TOML file of that name: {mend}")


def at(content: Mapping[str, Any], data: str, scale: str) -> dict[str, Any]:
    """Return the content of a suite with its tables [for.DATA] and [small] applied."""
    if scale not in get_args(Scale):
        raise InputError(f"--scale {scale} is unknown: use {' or '.join(get_args(Scale))}")
    content = dict(content)
    small, variants = _table(content, "small"), _table(content, "for")
    content = merged(content, _table(variants, data, "for."))
    return merged(content, small) if scale == "small" else content


def _table(content: dict[str, Any], name: str, above: str = "") -> dict[str, Any]:
    """Remove the table with this name from the content, and return the table."""
    table, name = content.pop(name, {}), above + name
    if not isinstance(table, Mapping):
        raise InputError(
            f"{name} = {shown(table)} is not a table: write a line [{name}], and its keys below it"
        )
    return dict(table)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables. If both tables contain a key, the value in `above` is used."""
    result = {**below, **above}
    for key in set(below) & set(above):
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            result[key] = merged(below[key], above[key])
    return result


def locked(config: Config) -> dict[str, Any]:
    """Return the config's tables without new keys that have their default values.

    New keys are those that earlier versions did not have.
    """
    tables = config.model_dump(by_alias=True)
    for table, key in LATER:
        if is_default(f"{table}.{key}", tables[table][key]):
            del tables[table][key]
    return {table: keys for table, keys in tables.items() if keys}


def cell(*layers: Tables) -> Config:
    """Merge the given tables into the config of a cell. Later tables override earlier tables.

    Keys that have no effect on this cell are removed. Cells with different recipes can therefore
    use the same table `base`.
    """
    return parse(only_read(reduce(merged, layers, {})))


def require_read(place: str, tables: Tables, cells: Sequence[Config]) -> None:
    """Raise InputError for a key that a suite sets in `place` although it affects no cell."""
    for table, keys in tables.items():
        for key, value in keys.items():
            name = f"{table}.{key.replace('_', '-')}"
            useless = not any(reads(config, name) for config in cells)
            if useless and not is_default(name, value):
                raise InputError(f"{place}: {refusal(cells[0], name, value)}")


def require_matrix(variant: str, config: Config, why: str) -> None:
    """Raise InputError if a variant trains another task than 'matrix'.

    `why` begins the reason, such as "certificates need".
    """
    if (task := config.task.name) != "matrix":
        raise InputError(
            f"The variant {variant!r} has task.name = {task!r}, but {why} task.name = 'matrix'. "
            "Remove task.name from the suite's file or from --set."
        )


def require_free(place: str, changes: Tables, settled: Mapping[str, str]) -> None:
    """Raise InputError if `changes` contains a key that the suite already sets.

    `settled` maps each `table.key` of the suite to the place where the suite sets the key.
    """
    for table, keys in changes.items():
        for key in keys:
            if where := settled.get(f"{table}.{key}"):
                raise InputError(
                    f"{place} {table}.{key} has no effect, because {key} is set by {where}: leave "
                    f"{key} out, or change {key} in a copy of the suite's file"
                )


def require_other_seeds(seeds: Sequence[int], tuning_seeds: Sequence[int], chosen: str) -> None:
    """Raise InputError if a seed is used to choose a setting and also to evaluate the setting."""
    if shared := sorted({*seeds} & {*tuning_seeds}):
        raise InputError(
            f"seed {shared[0]} is in seeds and in tuning-seeds. The tuning seeds choose {chosen}, "
            "so a test with the same seeds would be biased. Use another seed in one of the two "
            "lists."
        )


def room(source: Source | None, test: Scalar = TEST) -> tuple[int, int]:
    """Return the maximum numbers of held-out and training samples.

    If `source` is None, the number of training samples is unlimited.
    """
    if not isinstance(test, int) or isinstance(test, bool):
        raise InputError(f"[data] test = {test!r} is not valid: set an integer, such as 1000")
    if source is None:
        return test, sys.maxsize
    n, parted = len(source.labels), source.official_test
    held_out = min(test, n - parted if parted else n // 5)
    return held_out, parted or n - held_out


def sizes_that_fit(tables: Tables) -> dict[str, Scalar]:
    """Return `train` and `test` of [data], limited by the number of samples in the data set.

    Validation samples are not used for training.
    """
    data = tables["data"]
    if data["name"] == "synthetic":
        return {}
    # Only a decoder reads text, and with longer windows there are fewer samples. The sizes may not
    # fit the default number of clients.
    lone = {"task": tables.get("task", {}), "federation": {"clients": 1, "per-round": 1}}
    held_out, max_train = room(read_source(cell({"data": data} | lone)), data.get("test", TEST))
    validation = float(data.get("validation", 0))
    max_train = int(max_train / (1 + validation)) if validation < 1 else max_train - int(validation)
    return {"train": max(1, min(int(data.get("train", max_train)), max_train)), "test": held_out}


def slug(name: str) -> str:
    """Return a name in the form of a file name: `FedAvg, E = 1` becomes `fedavg-e-1`."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def guess(source: Source, config: Config) -> dict[str, tuple[int, int]]:
    """Return the numbers of classes and held-out samples, to compute the accuracy of guessing.

    The result is empty for text, because its labels are not classes to predict.
    """
    return {} if source.vocabulary else {"guess": (max(1, source.classes), config.data.test)}
