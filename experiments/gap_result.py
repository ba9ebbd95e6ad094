"""Results of `fedmuon.gap` for notebooks: the table of gaps and bounds, and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.errors import InputError, in_python
from fedmuon.core.files import Record, Temporary
from fedmuon.experiments.results import Result, as_html, frame, lines_of
from fedmuon.experiments.studies import gap_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

SHOWN = ("setting", "gap", "gap_low", "gap_high", "predicted", "bound", "range", "form",
         "accuracy", "status")  # fmt: skip


@dataclass(frozen=True, repr=False)
class GapResult:
    """A finished comparison of gaps and bounds: its table, its picture and its runs.

    Attributes:
        path: The folder with gap.csv, gap.json, the picture and the run folders.
        summary: The content of gap.json.
        folders: The run folders, in the order of the grid.
        given: Your own objects that the runs used.
        temporary: The temporary folder, if there is one.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2}, "task": {"initial": "zero"},
        ...          "local": {"steps": 1}, "orthogonalizer": {"lambda": 0.1}}
        >>> found = fedmuon.gap(small, grid={"local.lr": [0.01, 0.1]})
        >>> [(row["setting"], row["status"]) for row in found.table]
        [('lr=0.01', 'certified'), ('lr=0.1', 'certified')]
        >>> [row["form"] for row in found.rows if row["setting"] == "lr=0.1"]
        ['explicit', 'sharp', 'variance']
    """

    path: Path
    summary: Record
    folders: Sequence[Path]
    given: UserObjects = field(default=NOTHING, compare=False)
    temporary: "Temporary | None" = field(default=None, compare=False)

    @property
    def table(self) -> list[Record]:
        """One row per setting, with means over seeds, for the form of the bound in its config.

        `gap_low` and `gap_high` are the ends of the 95% interval of the mean gap over seeds. With
        one seed, they are those of the run, from its held-out samples. `range` is the range B of
        the loss. A bound of at least B is vacuous. `predicted` is the gap that derivatives through
        the run predict, and `predicted_error` is its standard error over random probes.
        `predicted_outside` is the prediction at held-out samples, and `predicted_both_ends` is the
        mean of both predictions. With `replacements`, `replaced` is the gap by exact replacements.
        """
        return self.summary["table"]

    @cached_property
    @in_python()
    def rows(self) -> list[Record]:
        """One row per run and form of the bound. This is the content of gap.csv."""
        columns = gap_grid.rows_in(self.path)
        return [
            dict(zip(columns, (value.item() for value in row), strict=True))
            for row in zip(*columns.values(), strict=True)
        ]

    @property
    def notes(self) -> list[str]:
        """Sentences on all bounds together, and on settings that the picture leaves out."""
        return self.summary["words"]

    @property
    def runs(self) -> list[Result]:
        """Every run, in the order of the grid."""
        return [Result(folder, self.given, self.temporary) for folder in self.folders]

    @in_python()
    def to_frame(self) -> "DataFrame":
        """Return the table as a pandas DataFrame.

        Returns:
            The DataFrame. The columns are the names in the rows.

        Raises:
            InputError: If pandas is not installed.
        """
        return frame(self.table)

    @in_python()
    def plot(self) -> "Axes":
        """Draw gap and bound of each setting in a row, and return the axes.

        Both are divided by the range B of the loss. Bounds in the grey zone are vacuous.

        Returns:
            The axes. `axes.figure.savefig("gap.pdf")` writes the figure to a file.

        Raises:
            InputError: If no setting has both a bound and a measured gap.
        """
        rows = gap_grid.drawable(gap_grid.rows_in(self.path))
        if not len(rows["gap"]):
            raise InputError(
                "No setting has both a bound and a measured gap, so there is nothing to draw. "
                "The attribute `notes` says why."
            )
        return gap_grid.picture(rows).axes[0]

    def __str__(self) -> str:
        return "\n".join([*lines_of(self._shown()), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return as_html(self._shown(), " ".join(self.notes))

    def _shown(self) -> list[Record]:
        return [{name: row.get(name) for name in SHOWN} for row in self.table]
