"""Results for notebooks: finished runs as Python objects, and tables that compare runs."""

import csv
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from fedmuon.analysis.report.latex import latex
from fedmuon.config.load import Config, flatten, load
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import NAMED, NOTHING, UserObjects
from fedmuon.core.arrays import read_tensors
from fedmuon.core.choices import GIVEN, SPREAD
from fedmuon.core.errors import InputError, in_python, instead
from fedmuon.core.files import Record, Temporary, copied, read_text, regular, require_sound
from fedmuon.experiments.tables import (
    HALF_NOTE,
    NOT_RELEASED,
    ZERO_MEANS,
    adjacency_of,
    record_name,
    spent_words,
)
from fedmuon.runs.directory import (
    PERSONAL_MODELS,
    RunDirectory,
    client_records,
    from_start,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame
    from torch import Tensor

    from fedmuon.analysis.report.style import Panels


class Summary(dict[str, Any]):
    """The content of summary.json. A missing measure of held-out samples is explained."""

    def __missing__(self, name: str) -> Any:
        if name in ("accuracy", "test_loss", "test_gap") and "test_loss" not in self:
            raise KeyError(
                f"{name} was not measured, because the run held out no test samples: pass test=, "
                "or leave samples out of the partition"
            )
        raise KeyError(name)


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, and the content of its files as Python objects.

    Attributes:
        path: The run folder.
        given: Your own objects that the run used.
        temporary: The temporary folder, if the run is stored in one. The folder is removed with the
            last result that uses it.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> result = fedmuon.run(small)
        >>> tuple(result.model["weight"].shape), len(result.rounds)
        ((5, 4), 2)
    """

    path: Path
    given: UserObjects = field(
        default=NOTHING, repr=False, compare=False
    )  # objects that were passed in Python
    temporary: "Temporary | None" = field(default=None, repr=False, compare=False)  # if any

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))  # the path may be a string

    @cached_property
    @in_python()
    def summary(self) -> Record:
        """The final measures of the run. This is the content of summary.json."""
        return Summary(RunDirectory(self.path).finished())

    @cached_property
    @in_python()
    def rounds(self) -> list[Record]:
        """One record per round. This is the content of rounds.jsonl."""
        directory = RunDirectory(self.path)
        if directory.summary() is not None:
            require_sound(self.path, ["rounds.jsonl"])
        return directory.records()

    @in_python()
    def clients(self) -> list[Record]:
        """Return one record for each client and round: the content of clients.jsonl.

        Raises:
            InputError: If the run has no such file, or the file is damaged. To get the file, set
                `[output] clients = true` before the run.
        """
        return client_records(self.path)

    @cached_property
    @in_python()
    def routes(self) -> str:
        """The optimizer of each parameter and the reason, as a table: the content of routes.txt.

        The text is empty for the matrix task, whose model is one matrix.
        """
        file = self.path / "routes.txt"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @cached_property
    @in_python()
    def config(self) -> Config:
        """The resolved config of the run.

        It contains every key, including those with default values.
        """
        RunDirectory(self.path).require_config()
        return load(self.path / "config.toml")

    @cached_property
    @in_python()
    def model(self) -> "dict[str, Tensor]":
        """The final model, as a dictionary of parameter names and tensors."""
        return read_tensors(self._sound("model.safetensors"))[0]

    @in_python()
    def personal_model(self, client: int) -> "dict[str, Tensor]":
        """Return a client's own model, from a run with personal models (such as Ditto or FedPer).

        Args:
            client: The client's number, from 0 to N - 1.

        Returns:
            A dictionary that maps the name of a parameter to its tensor. If the client never took
            part, its personal parameters have their initial values.

        Raises:
            InputError: If the number is out of range, or the run has no personal models. In a
                deployment, the SuperNodes store the personal models.
        """
        if not 0 <= client < self.config.federation.clients:
            raise InputError(
                f"client is {client}, but the run has only clients 0 to "
                f"{self.config.federation.clients - 1}"
            )
        if not (self.path / PERSONAL_MODELS).exists():
            reason = (
                "with [engine] name = 'deployment', the SuperNodes store the personal models. Use "
                "another engine, such as 'inline', to save them in the run folder."
                if self.config.engine.name == "deployment"
                else f"the recipe '{self.config.local.recipe}' trains no personal models. Run the "
                "experiment with a recipe or a config that trains personal models."
            )
            raise InputError(f"{self.path} contains no personal models, because {reason}")
        tensors = read_tensors(self._sound(PERSONAL_MODELS))[0]
        places = {int(owner): place for place, owner in enumerate(tensors.pop("client"))}
        if client in places:
            personal = {name: value[places[client]] for name, value in tensors.items()}
        else:
            first = read_tensors(self._sound("initial.safetensors"))[0]
            personal = {name: first[name] for name in tensors}
        return self.model | personal

    def _sound(self, name: str) -> Path:
        """Return the path of a file in the folder of a finished run.

        If the file is damaged, an error is raised.
        """
        RunDirectory(self.path).finished()
        require_sound(self.path, [name])
        return self.path / name

    def save(self, path: str | Path) -> Self:
        """Copy the run folder to `path` and use the copy from now on.

        After an error, `path` contains no partial copy.

        Args:
            path: A folder that does not exist yet. Missing parent folders are created.

        Returns:
            The result itself.

        Raises:
            InputError: If `path` exists, lies inside the run folder, or cannot be written.
        """
        place = Path(path).expanduser().absolute()
        copied(self.path, place)
        object.__setattr__(self, "path", place)
        object.__setattr__(self, "temporary", None)  # the last result removes the folder
        return self

    def _repr_html_(self) -> str:
        """Show the measures and the folder in a notebook."""
        private = f". {NOT_RELEASED}" if "privacy" in self.summary else ""
        return as_html(self._measured(), f"{self.path}{private}")

    def _measured(self) -> list[Record]:
        summary = self.summary
        setting = {
            "recipe": summary["recipe"],
            "data": summary["data"],
            "rounds": summary["rounds"],
        }
        return [
            setting | {name: value for name, value in summary.items() if isinstance(value, float)}
        ]

    def _records(self) -> list[Record]:
        return self.rounds

    def _curve(self) -> list[Record]:
        """Return the records to draw.

        For a finished run, the records begin with the untrained model.
        """
        return from_start(self.rounds, RunDirectory(self.path).summary())

    def to_frame(self) -> "DataFrame":
        """Return the table as a pandas DataFrame: one row per round, or per neighbour.

        Returns:
            The DataFrame. The columns are the names in the records.

        Raises:
            InputError: If pandas is not installed.
        """
        return frame(self._records())

    to_pandas = to_frame

    def to_latex(
        self, caption: str = "", label: str = "", columns: Sequence[str] | None = None
    ) -> str:
        """Return the table in LaTeX, for the package booktabs.

        Args:
            caption: Caption of the table, in LaTeX.
            label: Label for `\\ref`, such as "tab:run".
            columns: Names of the columns, in the order of the table. The default is all columns
                except columns that contain lists.

        Returns:
            A `table` environment, or only a `tabular` if there is neither caption nor label.

        Raises:
            InputError: If the table has no column of a given name.
        """
        return latex(self._records(), caption, label, columns)

    @overload
    def plot(
        self, metric: None = None, x: str = "rounds", *, ax: None = None, width: str | None = None
    ) -> "Panels": ...

    @overload
    def plot(
        self, metric: str, x: str = "rounds", *, ax: "Axes | None" = None, width: str | None = None
    ) -> "Axes": ...

    @overload
    def plot(
        self, metric: str | None = None, x: str = "rounds", *, ax: "Axes", width: None = None
    ) -> "Axes": ...

    @overload
    def plot(
        self,
        metric: str,
        x: list[str] | tuple[str, ...],
        *,
        ax: None = None,
        width: str | None = None,
    ) -> "Panels": ...

    @in_python()
    def plot(
        self,
        metric: str | None = None,
        x: str | Sequence[str] = "rounds",
        *,
        ax: "Axes | None" = None,
        width: str | None = None,
    ) -> "Axes | Panels":
        """Draw the curves of the run, and return the axes.

        Args:
            metric: The metric to draw, such as "test_loss" or "accuracy". "loss" draws all losses.
                Without a metric, one panel shows all losses, and further panels show up to two
                other measures.
            x: The horizontal axis. "rounds" is the default. "seconds" is the time that `[devices]`
                simulates. "bytes" counts the megabytes that were sent so far in both directions.
                "bytes-up" counts only the megabytes that clients sent. A list such as x=["rounds",
                "bytes"] draws one panel for each axis.
            ax: Axes to draw in. Without it, a new figure is made.
            width: The width of a figure for a paper, in a Times-like font. "column" is 3.3 inches
                wide, and "text" is 6.8 inches wide. `axes.figure.savefig("curves.pdf")` embeds the
                font.

        Returns:
            The axes. If there are several panels, or if you pass neither `metric` nor `ax`, the
            result is a tuple with the axes of all panels.

        Raises:
            InputError: If the run does not record the metric, or has no such horizontal axis.
        """
        return _curves({self.path.name: [self._curve()]}, x, metric, ax, width)


@dataclass(frozen=True)
class StabilityResult(Result):
    """A run with its neighbours and the generalization bound.

    This class has all attributes and methods of `Result`.

    Attributes:
        path: The run folder.
        given: Your own objects that the run used.
        temporary: The temporary folder of the run, if there is one.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2},
        ...          "local": {"lr": 0.01, "steps": 1}, "orthogonalizer": {"lambda": 0.1}}
        >>> result = fedmuon.stability(small, trials=2)
        >>> sorted(result.neighbours[0])
        ['certificate', 'client', 'exposure', 'index', 'perturbation', 'replacement', 'trial']
    """

    @cached_property
    @in_python()
    def neighbours(self) -> list[Record]:
        """One row per neighbour.

        A row contains the replaced sample, the perturbation, the exposure and the certificate.
        """
        integers = ("trial", "client", "index", "replacement")
        with open(self._sound("neighbours.csv"), encoding="utf-8", opener=regular) as file:
            return [
                {k: int(v) if k in integers else float(v) for k, v in row.items()}
                for row in csv.DictReader(file)
            ]

    @cached_property
    @in_python()
    def bound(self) -> Record:
        """The bound with its constants and assumptions. This is the content of bound.json."""
        return json.loads(read_text(self._sound("bound.json")))

    def _measured(self) -> list[Record]:
        largest = max(neighbour["perturbation"] for neighbour in self.neighbours)
        bound = {"bound": self.bound["value"], "status": self.bound["status"]}
        return [{"neighbours": len(self.neighbours), "largest perturbation": largest, **bound}]

    def _records(self) -> list[Record]:
        return self.neighbours

    @in_python()
    def plot(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        metric: str | None = None,
        x: str | Sequence[str] = "rounds",
        *,
        ax: "Axes | None" = None,
        width: str | None = None,
    ) -> Any:
        """Draw the perturbations by client with their certificates, and return the axes.

        Args:
            metric: "perturbation" draws one panel with the perturbations by client. Any other
                metric draws the curve of the run, as `Result.plot` does. Without a metric, there
                are two panels: the perturbations by client, and the distribution of the
                perturbations.
            x: The horizontal axis of a curve. "rounds" is the default. "seconds" is the time that
                `[devices]` simulates. "bytes" counts the megabytes that were sent so far in both
                directions. "bytes-up" counts only the megabytes that clients sent.
            ax: Axes to draw in. Without it, a new figure is made.
            width: The width of a figure for a paper, in a Times-like font. "column" is 3.3 inches
                wide, and "text" is 6.8 inches wide. `axes.figure.savefig("curves.pdf")` embeds the
                font.

        Returns:
            The axes. If you pass neither `metric` nor `ax`, the result is a tuple with the axes of
            all panels.

        Raises:
            InputError: If the run does not record the metric, or `x` has no effect.
        """
        if metric is not None and metric != "perturbation":
            return _curves({self.path.name: [self._curve()]}, x, metric, ax, width)
        if x != "rounds":
            raise InputError(
                f"x is {x!r}, but it has no effect on the plot of neighbours. Leave x out, or "
                "pass a metric of the run, such as metric='loss'."
            )
        import numpy as np  # imported here because listing and comparing runs need no numpy

        # These modules import matplotlib.
        from fedmuon.analysis.report.curves import WIDTHS, drawing, require_width
        from fedmuon.analysis.report.style import Panels, canvas, legend
        from fedmuon.experiments.stability.figure import census_panels, draw_strips, shifts_of

        require_width(width, ax)
        columns = {
            name: np.array([neighbour[name] for neighbour in self.neighbours])
            for name in self.neighbours[0]
        }
        if ax is not None:
            draw_strips(ax, columns)
            ax.legend()
            return ax
        narrow, inches = width == "column", WIDTHS[width] if width else 0.0
        with drawing(width):
            if metric is None:
                shifts = shifts_of(self.path)
                figure = census_panels(columns, narrow, inches, bound=self.bound, shifts=shifts)
                return Panels(figure.axes)
            _, (panel,) = canvas(1, narrow, 3.3, width=inches)
            draw_strips(panel, columns)
            legend(panel, 1 if narrow else 2)
            return panel


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A finished sweep: its table, its best points and its runs.

    Attributes:
        path: The folder of the sweep.
        summary: The content of sweep.json.
        folders: The run folders, in the order of the grid.
        given: Your own objects that the runs used.
        temporary: The temporary folder of the sweep, if there is one.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> found = fedmuon.sweep(small, grid={"local.lr": [0.1, 1.0]}, select="train-loss")
        >>> [row["local.lr"] for row in found.table]
        [0.1, 1.0]
    """

    path: Path
    summary: Record
    folders: Sequence[Path]
    given: UserObjects = field(default=NOTHING, compare=False)
    temporary: "Temporary | None" = field(default=None, compare=False)

    @property
    def best(self) -> dict[str, Record]:
        """The best points of the sweep.

        The dictionary maps each recipe to the row of its best point, and is empty if the sweep has
        no grid.
        """
        return self.summary.get("best", {})

    @property
    def table(self) -> list[Record]:
        """One row per point of the grid.

        A row contains the keys of the point and the mean of each metric over seeds. `NAME_low` and
        `NAME_high` are the ends of the metric's interval.
        """
        return self.summary["table"]

    @property
    def runs(self) -> list[Result]:
        """Every run, in the order of the grid."""
        return [Result(folder, self.given, self.temporary) for folder in self.folders]

    @property
    def warnings(self) -> list[str]:
        """Warnings about the best values.

        For example, the best point may be on the edge of the grid.
        """
        return self.summary.get("warnings", [])

    def to_frame(self) -> "DataFrame":
        """Return the table as a pandas DataFrame.

        Returns:
            The DataFrame. The columns are the names in the rows.

        Raises:
            InputError: If pandas is not installed.
        """
        return frame(self.table)

    to_pandas = to_frame

    def to_latex(
        self, caption: str = "", label: str = "", columns: Sequence[str] | None = None
    ) -> str:
        """Return the table in LaTeX, for the package booktabs.

        Args:
            caption: Caption of the table, in LaTeX.
            label: Label for `\\ref`, such as "tab:sweep".
            columns: Names of the columns, in the order of the table. The default is all columns
                except columns that contain lists.

        Returns:
            A `table` environment, or only a `tabular` if there is neither caption nor label. A mean
            and its interval share a column.

        Raises:
            InputError: If the table has no column of a given name.
        """
        return latex(self.table, caption, label, columns)

    @overload
    def plot(
        self,
        metric: str = "loss",
        x: str = "rounds",
        *,
        ax: "Axes | None" = None,
        width: str | None = None,
    ) -> "Axes": ...

    @overload
    def plot(
        self,
        metric: str,
        x: list[str] | tuple[str, ...],
        *,
        ax: None = None,
        width: str | None = None,
    ) -> "Panels": ...

    @in_python()
    def plot(
        self,
        metric: str = "loss",
        x: str | Sequence[str] = "rounds",
        *,
        ax: "Axes | None" = None,
        width: str | None = None,
    ) -> "Axes | Panels":
        """Draw the curves of all points, and return the axes.

        Each line is the mean over seeds. The band around the line is the 95% interval of the
        mean (Student's t). The client loss has no band.

        Args:
            metric: The metric to draw, such as "test_loss" or "accuracy". "loss" draws all losses.
            x: The horizontal axis. "rounds" is the default. "seconds" is the time that `[devices]`
                simulates. "bytes" counts the megabytes that were sent so far in both directions.
                "bytes-up" counts only the megabytes that clients sent. A list such as x=["rounds",
                "bytes"] draws one panel for each axis.
            ax: Axes to draw in. Without it, a new figure is made.
            width: The width of a figure for a paper, in a Times-like font. "column" is 3.3 inches
                wide, and "text" is 6.8 inches wide. `axes.figure.savefig("curves.pdf")` embeds the
                font.

        Returns:
            The axes, or a tuple of the axes of all panels if `x` is a list.

        Raises:
            InputError: If the runs do not record the metric, or have no such horizontal axis.
        """
        curves: dict[str, list[list[Record]]] = {}
        for run in self.runs:
            name = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in self._at(run))
            curves.setdefault(name or "run", []).append(run.rounds)
        return _curves(curves, x, metric, ax, width)

    def _at(self, run: Result) -> list[tuple[str, Any]]:
        """Return the keys of the grid with the values that this run has."""
        flat = flatten(run.config)
        keys = [name for name in self.table[0] if "." in name]
        return [(name, flat[name]) for name in keys if name in flat and reads(run.config, name)]

    def __str__(self) -> str:
        return "\n".join([*lines_of(self.table), *self._said()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return as_html(self.table, " ".join(self._said()))

    def _said(self) -> list[str]:
        """Return the sentences below the table."""
        return [*spent_words(self.summary), *(f"Warning: {warning}." for warning in self.warnings)]


@dataclass(frozen=True, repr=False)
class Comparison:
    """A comparison of finished runs. Runs that differ only in the seed form one row.

    Attributes:
        rows: One row per group of runs. A row contains the name of the group, the config keys that
            differ between groups, and the measures. `NAME ±` is half of Student's 95% interval of
            the mean of NAME over seeds.
        curves: A dictionary that maps the name of a row to the round records of its runs.
        note: A note on how to read the numbers. It may be empty.
        folders: A dictionary that maps the name of a row to the folders of its runs.
        left_out: Reasons why some runs are not included.
        temporary: Temporary folders that exist as long as this object does.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> found = fedmuon.compare([fedmuon.run(small), fedmuon.run(small, recipe="fedavg")])
        >>> len(found.rows), "test_loss" in found.measures
        (2, True)
    """

    rows: list[Record]
    curves: Mapping[str, list[list[Record]]]
    note: str = ""  # a note on the numbers
    folders: dict[str, list[Path]] = field(default_factory=dict)  # row name -> folders of its runs
    left_out: Sequence[str] = ()  # why some runs are not included
    # The temporary folders of the runs, which exist as long as this object does.
    temporary: Sequence[Temporary] = field(default=(), compare=False)

    @property
    def measures(self) -> list[str]:
        """The names of all measures in the rows.

        `NAME ±` is half of Student's 95% interval of the mean of NAME over seeds.
        """
        names = [name for row in self.rows for name in list(row)[list(row).index("seeds") + 1 :]]
        return list(dict.fromkeys(names))

    @in_python()
    def differences(self, metric: str = "accuracy") -> list[Record]:
        """Subtract the final measures of two rows seed by seed, for every pair of rows.

        Runs with the same seed share clients and initial weights. The comparison by seed removes
        the variation that both rows share. Seeds that only one row has are ignored.

        Args:
            metric: A measure that every run has at its end, such as "accuracy" or "test_loss".

        Returns:
            One record per pair: `first` and `second` are the names of the rows. `seeds` is the
            number of seeds that both rows have. `mean` is the mean of `first` minus `second`.
            `low` and `high` are the ends of Student's 95% interval of the mean. `first higher` is
            the number of seeds for which the value of `first` is higher.

        Raises:
            InputError: If there are fewer than two rows, if two rows share fewer than two seeds, or
                if a run does not record the metric.
        """
        from fedmuon.analysis.report.verdicts import paired  # imports scipy

        if len(self.folders) < 2:
            raise InputError(
                "The comparison has only one row, but a difference needs two rows. Compare runs "
                "that differ in a setting, or label the runs: compare({'a': runs, 'b': others})."
            )
        summaries = {name: [RunDirectory(folder).finished() for folder in folders]
                for name, folders in self.folders.items()}  # fmt: skip
        records, measure = [*itertools.chain(*summaries.values())], record_name(metric)
        measures = [
            name
            for name in records[0]
            if all(isinstance(record.get(name), float) for record in records)
        ]
        if measure not in measures:
            raise InputError(
                f"metric = {metric!r} is not in every run: {instead(metric, measures)}"
            )
        values = {
            name: {run["seed"]: run[measure] for run in runs} for name, runs in summaries.items()
        }
        rows: list[Record] = []
        for (first, left), (second, right) in itertools.combinations(values.items(), 2):
            pairs = [(left[seed], right[seed]) for seed in left if seed in right]
            if len(pairs) < 2:
                raise InputError(
                    f"Of the seeds {sorted({*left, *right})}, the rows {first!r} and {second!r} "
                    f"have {len(pairs)} in common, but an interval needs at least 2. Use the same "
                    "seeds (federation.seed) for both rows."
                )
            mean, half = paired(pairs)
            rows.append({
                "first": first, "second": second, "seeds": len(pairs), "mean": mean,
                "low": mean - half, "high": mean + half,
                "first higher": sum(value > other for value, other in pairs),
            })  # fmt: skip
        return rows

    def to_frame(self) -> "DataFrame":
        """Return the rows as a pandas DataFrame.

        Returns:
            The DataFrame. The columns are the names in the rows.

        Raises:
            InputError: If pandas is not installed.
        """
        return frame(self.rows)

    to_pandas = to_frame

    def to_latex(
        self, caption: str = "", label: str = "", columns: Sequence[str] | None = None
    ) -> str:
        """Return the rows in LaTeX, for the package booktabs.

        Args:
            caption: Caption of the table, in LaTeX.
            label: Label for `\\ref`, such as "tab:methods".
            columns: Names of the columns, in the order of the table. The default is all columns
                except columns that contain lists.

        Returns:
            A `table` environment, or only a `tabular` if there is neither caption nor label. A mean
            and half of its 95% interval share a column.

        Raises:
            InputError: If the table has no column of a given name.
        """
        return latex(self.rows, caption, label, columns)

    @overload
    def plot(
        self, metric: None = None, x: str = "rounds", *, ax: None = None, width: str | None = None
    ) -> "Panels": ...

    @overload
    def plot(
        self, metric: str, x: str = "rounds", *, ax: "Axes | None" = None, width: str | None = None
    ) -> "Axes": ...

    @overload
    def plot(
        self, metric: str | None = None, x: str = "rounds", *, ax: "Axes", width: None = None
    ) -> "Axes": ...

    @overload
    def plot(
        self,
        metric: str,
        x: list[str] | tuple[str, ...],
        *,
        ax: None = None,
        width: str | None = None,
    ) -> "Panels": ...

    @in_python()
    def plot(
        self,
        metric: str | None = None,
        x: str | Sequence[str] = "rounds",
        *,
        ax: "Axes | None" = None,
        width: str | None = None,
    ) -> "Axes | Panels":
        """Draw the curves of all rows, and return the axes.

        Each line is the mean over seeds. The band around the line is the 95% interval of the
        mean (Student's t). The client loss has no band.

        Args:
            metric: The metric to draw, such as "test_loss" or "accuracy". "loss" draws all losses.
                Without a metric, one panel shows all losses, and further panels show up to two
                other measures.
            x: The horizontal axis. "rounds" is the default. "seconds" is the time that `[devices]`
                simulates. "bytes" counts the megabytes that were sent so far in both directions.
                "bytes-up" counts only the megabytes that clients sent. A list such as x=["rounds",
                "bytes"] draws one panel for each axis.
            ax: Axes to draw in. Without it, a new figure is made.
            width: The width of a figure for a paper, in a Times-like font. "column" is 3.3 inches
                wide, and "text" is 6.8 inches wide. `axes.figure.savefig("curves.pdf")` embeds the
                font.

        Returns:
            The axes. If there are several panels, or if you pass neither `metric` nor `ax`, the
            result is a tuple with the axes of all panels.

        Raises:
            InputError: If the runs do not record the metric, or have no such horizontal axis.
        """
        return _curves(self.curves, x, metric, ax, width)

    def __str__(self) -> str:
        return "\n".join([*lines_of(self.rows), *self._told()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the rows and notes in a notebook."""
        return as_html(self.rows, " ".join(self._told()))

    def _told(self) -> list[str]:
        """Return the notes below the rows.

        The notes explain ± and the numbers, and list the runs that were left out.
        """
        notes = [HALF_NOTE] if any(name.endswith(SPREAD) for name in self.measures) else []
        notes += [self.note] if self.note else []
        return [*notes, *(f"Left out: {reason}" for reason in self.left_out)]


def _curves(
    curves: Mapping[str, Sequence[Sequence[Record]]],
    x: str | Sequence[str],
    metric: str | None,
    ax: "Axes | None",
    width: str | None,
) -> Any:
    from fedmuon.analysis.report.curves import plotted  # imports matplotlib

    return plotted(curves, x, metric, ax, width)


def as_html(rows: Sequence[Record], below: str = "") -> str:
    """Return rows as an HTML table, with a line of text below the table."""
    head, *body = ([escape(word) for word in line] for line in _cells(rows))
    lines = ["".join(f"<th>{word}</th>" for word in head)]
    lines += ["".join(f"<td>{word}</td>" for word in line) for line in body]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{table}</table>" + (f"<code>{escape(below)}</code>" if below else "")


def lines_of(rows: Sequence[Record]) -> list[str]:
    """Return rows as lines of text with aligned columns."""
    cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(word.ljust(n) for word, n in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _cells(rows: Sequence[Record]) -> list[list[str]]:
    """Return the column names and the text of each cell. Floats have four significant digits."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    lines = [heads]
    for row in rows:
        values = [row.get(name, "") for name in heads]
        lines.append(
            [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        )
    return lines


def frame(rows: Sequence[Record]) -> "DataFrame":
    try:
        import pandas  # an optional package
    except ImportError:
        raise InputError(
            "to_frame() needs pandas, which is not installed: run `pip install pandas`"
        ) from None
    return pandas.DataFrame(rows)


# Runs are compared in groups. The runs of a group differ only in the seed.

SEED, NOISE = "federation.seed", "privacy.noise"
SPENT = 0.01  # relative error that is allowed when noise is chosen for a target epsilon
DIGEST = "data.options.digest"  # digest of samples that the user passed; never shown


ReadRun = Any  # a `RunStatus`, whose package imports this module


@dataclass(frozen=True)
class Finished:
    """The data of a finished run that a comparison uses."""

    run: ReadRun
    summary: Record
    objects: dict[str, str]  # kind -> name and digest of the user's own object
    neighbours: bool  # whether the run has neighbours

    @classmethod
    def read(cls, run: ReadRun) -> "Finished":
        """Read a run, or raise an error if it is unfinished or one of its files was changed."""
        summary = RunDirectory(run.path).finished() if run.summary is None else run.summary
        _ = run.totals, run.config  # may be damaged
        file = run.path / "objects.json"
        stored = json.loads(read_text(file)) if file.exists() else {}
        objects = {kind: str(name) for kind, name in stored.items()}
        return cls(run, summary, objects, (run.path / "neighbours.csv").exists())

    @property
    def folder(self) -> Path:
        return self.run.path

    @property
    def config(self) -> Config:
        return self.run.config

    def keys(self) -> dict[str, Any]:
        """Return the config as `table.key` -> value.

        If the run has no neighbours, keys that affect only neighbours take their defaults. If the
        noise was computed from a target epsilon, the value of `privacy.noise` is "by epsilon",
        because the computed noise depends on the seed.
        """
        config = self.config
        if not self.neighbours:
            config = config.model_copy(update={"stability": type(config.stability)()})
        flat = flatten(config)
        target, spent = config.privacy.epsilon, self.summary.get("privacy", {}).get("epsilon")
        if target and spent and math.isclose(spent, target, rel_tol=SPENT):
            flat[NOISE] = "by epsilon"
        return flat

    def reads(self, name: str) -> bool:
        """Return whether the key has an effect on the run."""
        idle = name.startswith("stability.") and not self.neighbours
        return ".options." in name or (reads(self.config, name) and not idle)


def compared(
    labelled: Sequence[tuple[str, ReadRun]], optional: Mapping[Path, bool] = {}
) -> Comparison:
    """Compare finished runs with their labels.

    A damaged run is an error, or is left out if the mapping `optional` says so for its folder.
    """
    runs: list[tuple[str, Finished]] = []
    left: list[str] = []
    for label, run in labelled:
        try:
            runs.append((label, Finished.read(run)))
        except InputError as error:
            if not optional.get(run.path):
                raise
            left.append(str(error))
    if not runs:
        raise InputError(
            left[0]
            if left
            else (
                "no finished run was found, so there is nothing to compare. Pass the folder or the "
                "result of a finished run."
            )
        )
    note = NOT_RELEASED if any("privacy" in run.summary for _, run in runs) else ""
    return _grouped(runs, note, left)


def _grouped(runs: Sequence[tuple[str, Finished]], note: str, left: Sequence[str]) -> Comparison:
    """Group the runs and return their comparison.

    For each group, the comparison contains a row with means and half intervals, the curves, and
    the folders.
    """
    flats = [run.keys() for _, run in runs]
    _name_objects(flats, [run.objects for _, run in runs])
    names = dict.fromkeys(name for flat in flats for name in flat)
    differing = [name for name in names
                 if name != SEED and len({flat.get(name) for flat in flats}) > 1]  # fmt: skip
    groups: dict[tuple[Any, ...], list[Finished]] = {}
    changed: dict[tuple[Any, ...], Record] = {}
    copies: Counter[tuple[Any, ...]] = Counter()  # settings and seed -> number of runs so far
    for (label, run), flat in zip(runs, flats, strict=True):
        key = (label, *(flat.get(name) for name in differing), *run.objects.items())
        copy = (*key, flat[SEED])
        key = (*key, copies[copy])  # two runs with the same seed cannot be in one group
        copies[copy] += 1
        groups.setdefault(key, []).append(run)
        title_keys = [name for name in differing if name != DIGEST and run.reads(name)]
        changed.setdefault(key, {name: flat.get(name) for name in title_keys})
    # Row titles show the keys that differ. A key that several tables define includes its table.
    short = Counter(name.partition(".")[2] for name in names)
    titles = []
    for changes in changed.values():
        words = {key: key.partition(".")[2] for key in changes}
        labels = {key: word if short[word] == 1 else key for key, word in words.items()}
        means = {key: ZERO_MEANS.get(key, 0) if value == 0 else value
                 for key, value in changes.items()}  # fmt: skip
        titles.append(", ".join(f"{labels[key]}={value}" for key, value in means.items()))
    title_counts = Counter(titles)
    rows, sent, curves, folders = [], [], {}, {}
    for (key, members), title in zip(groups.items(), titles, strict=True):
        label, folder = key[0], members[0].folder
        name = title or folder.name
        if title and title_counts[title] > 1:
            name = f"{title} ({folder.name})"
        if label:
            name = label if [group[0] for group in groups].count(label) == 1 else f"{label}: {name}"
        name = f"{name} ({folder})" if name in curves else name
        row = {"run": name, **changed[key], **_spent(members)}
        rows.append({**row, "seeds": len(members), **_measures(members)})
        sent.append(_traffic(members))
        curves[name] = members
        folders[name] = [member.folder for member in members]
    if any(traffic != sent[0] for traffic in sent):  # show the traffic only if it differs
        rows = [row | traffic for row, traffic in zip(rows, sent, strict=True)]
    return Comparison(rows, Curves(curves), note, folders, left)


class Curves(Mapping[str, list[list[Record]]]):
    """The round records of the runs of each row. They are read when they are needed."""

    def __init__(self, members: Mapping[str, Sequence[Finished]]) -> None:
        self._members = members

    def __getitem__(self, name: str) -> list[list[Record]]:
        return [member.run.from_start for member in self._members[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


def _name_objects(flats: Sequence[dict[str, Any]], objects: Sequence[Mapping[str, str]]) -> None:
    """Replace the objects that were passed in Python by their names in the flat configs.

    If different objects have the same name, their names also contain digests.
    """
    for kind, (table, key) in NAMED.items():
        place = f"{table}.{key}"
        versions = {
            entry[kind].partition(":")[::2] for entry in objects if ":" in entry.get(kind, "")
        }
        name_counts = Counter(name for name, _ in versions)
        for flat, run_objects in zip(flats, objects, strict=True):
            name, _, digest = run_objects.get(kind, "").partition(":")
            if flat.get(place) == GIVEN and digest:
                flat[place] = name if name_counts[name] == 1 else f"{name} of digest {digest[:6]}"


def _spent(members: Sequence[Finished]) -> Record:
    """Return the largest epsilon that private runs spent.

    The result also contains the delta and the assumptions of this epsilon.
    """
    accounts = [member.summary["privacy"] for member in members if "privacy" in member.summary]
    if not accounts:
        return {}
    epsilons = [
        math.inf if account["epsilon"] is None else account["epsilon"] for account in accounts
    ]
    worst = accounts[epsilons.index(max(epsilons))]
    return {
        "spent epsilon": max(epsilons),
        "at delta": max(account["delta"] for account in accounts),
        "adjacency": adjacency_of(worst),
        "level": "client" if worst.get("unit") == "client" else "example",
        "certified": all(account["certified"] for account in accounts),
    }


def _traffic(members: Sequence[Finished]) -> Record:
    """Return the mean megabytes of messages over runs, for each direction.

    If the traffic is unknown, the result is {}.
    """
    traffic = [member.run.totals["traffic"] for member in members]
    totals = [sizes for sizes in traffic if sizes is not None]
    if len(totals) < len(traffic):
        return {}
    means = (statistics.fmean(sizes) / 1e6 for sizes in zip(*totals, strict=True))
    return dict(zip(("MB down", "MB up"), means, strict=True))


def _measures(members: Sequence[Finished]) -> Record:
    """Return the mean of each measure in the summaries.

    With several seeds, the result also contains half of the 95% interval of each mean.
    """
    measures: Record = {}
    for name in (name for name in members[0].summary if name not in ("seed", "rounds")):
        entries = [member.summary.get(name) for member in members]
        values = [value for value in entries if isinstance(value, float)]
        if values and len(values) == len(entries):
            measures[name] = statistics.fmean(values)
            if len(values) > 1:
                from fedmuon.analysis.report.verdicts import half_width  # imports scipy

                error = statistics.stdev(values) / math.sqrt(len(values))
                measures[f"{name}{SPREAD}"] = float(half_width(error, len(values) - 1))
    return measures
