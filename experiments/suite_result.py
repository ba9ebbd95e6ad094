"""Results of suites for notebooks: the tables, and the claims with their verdicts."""

import contextlib
import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Findings, Picture
from fedmuon.analysis.report.latex import latex
from fedmuon.core.errors import InputError, in_python, instead
from fedmuon.core.files import Record, Temporary, regular
from fedmuon.experiments.report import gather
from fedmuon.experiments.results import as_html, frame, lines_of

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class SuiteResult:
    """A finished suite: its tables and its claims.

    Attributes:
        path: The folder of the suite.
        summary: The content of suite.json.
        temporary: The temporary folder, if the suite is stored in one.

    Example:
        >>> import fedmuon
        >>> found = fedmuon.suite("dp-muon-printed", scale="small")  # slow: ten seconds
        >>> sorted(found.tables), {one["verdict"] for one in found.claims}
        (['rows'], {'holds'})
    """

    path: Path
    summary: Record
    temporary: "Temporary | None" = field(default=None, compare=False)

    @cached_property
    @in_python()
    def tables(self) -> dict[str, list[Record]]:
        """The tables of the suite.

        The dictionary maps the name of each CSV file to the rows of the file.
        """
        return {file.stem: _read_rows(file) for file in sorted(self.path.glob("*.csv"))}

    @cached_property
    @in_python()
    def claims(self) -> list[Record]:
        """One row per claim. A row contains the sentence, the verdict, and the measured effect.

        If the effect is a single number, the row contains this number as `value`, and the ends of
        its interval as `value_low` and `value_high`.
        """
        rows = []
        for claim in (entry for findings in self._parts for entry in findings.claims):
            effect, ends = claim.effect, {}
            if len(effect.value) == 1:
                ends = {
                    "value": float(effect.value[0]),
                    "value_low": float(effect.low[0]),
                    "value_high": float(effect.high[0]),
                }
            row = {"claim": claim.sentence, "verdict": claim.verdict, "measured": effect.name}
            rows.append({**row, **ends})
        return rows

    def to_frame(self, table: str | None = None) -> "DataFrame":
        """Return a table as a pandas DataFrame.

        Args:
            table: A name in `tables`. The default is the table of claims.

        Returns:
            A DataFrame with the columns of the table.

        Raises:
            InputError: If there is no such table, or pandas is not installed.
        """
        return frame(self._rows_of(table))

    def to_latex(
        self,
        table: str | None = None,
        caption: str = "",
        label: str = "",
        columns: Sequence[str] | None = None,
    ) -> str:
        """Return a table in LaTeX, for the package booktabs.

        Args:
            table: A name in `tables`. The default is the table of claims.
            caption: Caption of the table, in LaTeX.
            label: Label for `\\ref`, such as "tab:suite".
            columns: Names of the columns, in the order in which they are shown. The default is all
                columns except columns that contain lists.

        Returns:
            A `table` environment, or only a `tabular` if there is neither caption nor label.

        Raises:
            InputError: If there is no such table, or the table has no column of a given name.
        """
        return latex(self._rows_of(table), caption, label, columns)

    @cached_property
    @in_python()
    def figures(self) -> list[str]:
        """Names of the figures that `plot` can draw."""
        return [*self._pictures]

    @in_python()
    def plot(self, figure: str | None = None) -> style.Panels:
        """Draw a figure of the suite's report, and return its axes.

        Args:
            figure: A name in `figures`. The default is the first figure.

        Returns:
            A tuple of the axes. `savefig("figure.pdf")` saves the figure.

        Raises:
            InputError: If the suite has no such figure.
        """
        pictures = self._pictures
        if not pictures:
            raise InputError("This suite has no figures. Its numbers are in `tables`.")
        figure = next(iter(pictures)) if figure is None else figure
        if figure not in pictures:
            raise InputError(f"figure = {figure!r} is unknown: {instead(figure, list(pictures))}")
        return style.Panels(pictures[figure].draw(False).axes)

    @cached_property
    def _parts(self) -> list[Findings]:
        return gather(self.path)

    @cached_property
    def _pictures(self) -> dict[str, Picture]:
        return {picture.name: picture for part in self._parts for picture in part.pictures}

    def _rows_of(self, table: str | None) -> list[Record]:
        if table is None:
            return self.claims
        if table not in self.tables:
            raise InputError(f"table = {table!r} is unknown: {instead(table, list(self.tables))}")
        return self.tables[table]

    def __str__(self) -> str:
        return "\n".join(lines_of(self.claims)) if self.claims else str(self.path)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show the claims in a notebook."""
        return as_html(self.claims, str(self.path))


def _read_rows(file: Path) -> list[Record]:
    """Return the rows of a CSV file, with numbers converted to int or float."""
    with open(file, encoding="utf-8", newline="", opener=regular) as text:
        return [
            {name: _value(value) for name, value in row.items()} for row in csv.DictReader(text)
        ]


def _value(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
