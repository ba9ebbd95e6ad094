"""What a notebook gets back: the folder of a finished run, and what lies in it as plain Python."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.config.user_objects import NOTHING, Own
from fedmuon.core.errors import InputError, in_python
from fedmuon.core.files import Temporary, copied, read_text, regular, require_sound

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Record = dict[str, Any]
NOT_RELEASED = (
    "Losses and accuracies of private runs are measured on the data themselves and not released."
)


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, and what lies in it as plain Python."""

    path: Path
    given: Own = field(default=NOTHING, repr=False, compare=False)  # objects handed over in Python
    temporary: "Temporary | None" = field(default=None, repr=False, compare=False)  # if it is one

    @cached_property
    @in_python()
    def summary(self) -> Record:
        """The content of summary.json."""
        from fedmuon.runs.directory import RunDirectory

        return RunDirectory(self.path).finished()

    @cached_property
    @in_python()
    def rounds(self) -> list[Record]:
        """The records of rounds.jsonl."""
        from fedmuon.runs.directory import RunDirectory

        directory = RunDirectory(self.path)
        if directory.summary() is not None:
            require_sound(self.path, ["rounds.jsonl"])
        return directory.records()

    @cached_property
    @in_python()
    def config(self) -> Config:
        """The config with every key resolved."""
        from fedmuon.runs.directory import RunDirectory

        RunDirectory(self.path).require_config()
        return tables.load(self.path / "config.toml")

    @cached_property
    @in_python()
    def model(self) -> "dict[str, Tensor]":
        """The last model: parameter's name -> tensor."""
        from fedmuon.core.arrays import read_tensors

        return read_tensors(self._sound("model.safetensors"))[0]

    def _sound(self, name: str) -> Path:
        """A file of a finished run, rejected where it is damaged."""
        from fedmuon.runs.directory import RunDirectory

        RunDirectory(self.path).finished()
        require_sound(self.path, [name])
        return self.path / name

    def save(self, path: str | Path) -> Self:
        """Copy the run folder to `path`, where the result then lies; returns the result itself.

        A run without `out` lies in a temporary folder, which is removed with its last result, or
        when Python ends. The copy appears whole or not at all.

        Args:
            path: A folder that does not exist yet; the folders above it are made.

        Raises:
            InputError: If `path` exists, lies inside the run folder, or cannot be written.
        """
        place = Path(path).expanduser().absolute()
        copied(self.path, place)
        object.__setattr__(self, "path", place)
        object.__setattr__(self, "temporary", None)  # the last result that lets go of it removes it
        return self

    def _repr_html_(self) -> str:
        """What a notebook shows: what was measured, and where it lies."""
        private = f". {NOT_RELEASED}" if "privacy" in self.summary else ""
        return _table(self._measured(), f"{self.path}{private}")

    def _measured(self) -> list[Record]:
        known = self.summary
        of = {"recipe": known["recipe"], "data": known["data"], "rounds": known["rounds"]}
        return [of | {name: one for name, one in known.items() if isinstance(one, float)}]

    def to_pandas(self) -> Any:
        """The rounds as a DataFrame, where pandas is installed."""
        return _frame(self.rounds)

    def plot(self) -> "Figure":
        """Losses and what else was measured, by round."""
        from fedmuon.analysis.report.style import by_round

        return by_round({self.path.name: [self.rounds]})


@dataclass(frozen=True)
class StabilityResult(Result):
    """A run beside its neighbours, and the bound."""

    @cached_property
    @in_python()
    def neighbours(self) -> list[Record]:
        """The rows of neighbours.csv: perturbation, exposure and certificate of each neighbour."""
        import csv

        whole = ("trial", "client", "index", "replacement")
        with open(self._sound("neighbours.csv"), encoding="utf-8", opener=regular) as file:
            return [
                {k: int(v) if k in whole else float(v) for k, v in row.items()}
                for row in csv.DictReader(file)
            ]

    @cached_property
    @in_python()
    def bound(self) -> Record:
        """The content of bound.json."""
        return json.loads(read_text(self._sound("bound.json")))

    def _measured(self) -> list[Record]:
        most = max(one["perturbation"] for one in self.neighbours)
        found = {"bound": self.bound["value"], "status": self.bound["status"]}
        return [{"neighbours": len(self.neighbours), "largest perturbation": most, **found}]

    def to_pandas(self) -> Any:
        """The neighbours as a DataFrame, where pandas is installed."""
        return _frame(self.neighbours)

    def plot(self) -> "Figure":
        """Perturbations by client with their certificates."""
        import numpy as np

        from fedmuon.experiments.stability.figure import census

        columns = {
            name: np.array([one[name] for one in self.neighbours]) for name in self.neighbours[0]
        }
        return census(columns)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs beside each other: those that differ in the seed alone are one line of `rows`."""

    rows: list[Record]
    curves: dict[str, list[list[Record]]]
    note: str = ""  # what to know of the numbers
    folders: dict[str, list[Path]] = field(default_factory=dict)  # of a row's runs, by its name
    left_out: Sequence[str] = ()  # why runs of a folder are not among them
    # Temporary folders among them, which stay as long as this does.
    temporary: Sequence[Temporary] = field(default=(), compare=False)

    @property
    def measures(self) -> list[str]:
        """What was measured in any row, as the rows name it; `NAME ±` is its standard deviation
        over seeds."""
        names = [name for row in self.rows for name in list(row)[list(row).index("seeds") + 1 :]]
        return list(dict.fromkeys(names))

    def to_pandas(self) -> Any:
        """The rows as a DataFrame, where pandas is installed."""
        return _frame(self.rows)

    def plot(self) -> "Figure":
        """Curves by round, mean and spread over seeds."""
        from fedmuon.analysis.report.style import by_round

        return by_round(self.curves)

    def __str__(self) -> str:
        cells = _cells(self.rows)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join(word.ljust(n) for word, n in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )
        return "\n".join([*lines, *filter(None, [self.note, *self._told()])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return _table(self.rows, " ".join(filter(None, [self.note, *self._told()])))

    def _told(self) -> list[str]:
        """What is not among them, in sentences."""
        return [f"Left out: {why}" for why in self.left_out]


def _table(rows: Sequence[Record], below: str = "") -> str:
    """Rows as HTML, with a line below them."""
    from html import escape

    head, *body = ([escape(word) for word in line] for line in _cells(rows))
    lines = ["".join(f"<th>{word}</th>" for word in head)]
    lines += ["".join(f"<td>{word}</td>" for word in line) for line in body]
    found = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{found}</table>" + (f"<code>{escape(below)}</code>" if below else "")


def _cells(rows: Sequence[Record]) -> list[list[str]]:
    """A line of names, and one for each row."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    return [heads, *([_said(row.get(name, "")) for name in heads] for row in rows)]


def _frame(rows: Sequence[Record]) -> Any:
    try:
        import pandas
    except ImportError:
        raise InputError("pandas is not installed: pip install pandas") from None
    return pandas.DataFrame(rows)


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
