"""Numerical studies: suites whose cells are computations of their own instead of runs.

A study is one file. From top to bottom it has the settings that its TOML file holds, the cells,
the claims, the numbers and the figure. Its last lines name these parts in `STUDY = Study(...)`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmuon.analysis.report.findings import Findings, Picture
from fedmuon.analysis.report.findings import Rows as Lines
from fedmuon.analysis.report.tables import read_table
from fedmuon.analysis.report.verdicts import Claim
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table, validate
from fedmuon.experiments.suites.contents import SuiteRequest, merged
from fedmuon.experiments.suites.suite import Cell, Rows, Work
from fedmuon.runs.directory import Record


@dataclass(frozen=True)
class Call:
    """The simplest cell: a function without arguments."""

    name: str
    compute: Callable[[], Record]
    size: int = 1


def assemble(study: "Study", folder: Path, about: Mapping[str, Any]) -> Findings:
    """Judge, tell and draw the tables of a finished study.

    Args:
        study: The study that computed the folder.
        folder: The suite's folder.
        about: The content of its suite.json.
    """
    columns = [read_table(folder / f"{name}.csv") for name in study.tables]
    head, *rows = study.numbers(*columns)
    return Findings.of_suite(
        folder,
        about,
        claims=study.claims(*columns),
        numbers_title="Numbers",
        head=head,
        numbers=rows,
        pictures=[one.of(*columns) for one in study.pictures],
        stands_on=study.stands_on,
        facts=("suite", "kind", "data", "scale", "seconds"),
    )


@dataclass(frozen=True)
class Study:
    """A numerical study: how its cells are made, and what a report says of their tables.

    Attributes:
        kind: The name that `kind` has in the suite's TOML file.
        settings: The schema of that file, without `kind`, `title`, `note` and `data`.
        cells: Makes the cells from the settings and the request. A cell's record holds lists of
            rows; the lists of one name, of all cells in turn, become NAME.csv.
        claims: Each an effect with its interval and a rule (`Claim`), from the columns of `tables`.
        numbers: The lines of the table of numbers, from the same columns; the first is the head.
        stands_on: What the claims assume.
        pictures: The figures; their functions are given the same columns.
        tables: The names of the tables that claims, numbers and pictures read.
        summary: What suite.json holds in addition, from the cells' records.
        report: Makes the report's section; for studies that `assemble` does not fit.
    """

    kind: str
    settings: type[Table]
    cells: Callable[[Any, SuiteRequest], Sequence[Cell]]
    claims: Callable[..., Sequence[Claim]]
    numbers: Callable[..., Lines]
    stands_on: str
    pictures: Sequence[Picture]
    tables: Sequence[str] = ("rows",)
    summary: Callable[[list[Record]], Record] = lambda records: {}
    report: Callable[["Study", Path, Mapping[str, Any]], Findings] = assemble

    def work(self, content: dict[str, Any], asked: SuiteRequest) -> "StudyWork":
        """The study with these settings; config tables to change are those below its `base`."""
        title, note = content.pop("title", self.kind), content.pop("note", "")
        if asked.changes:
            if "base" not in self.settings.model_fields:
                raise InputError(f"the suite {asked.stem} has no config to change: leave --set out")
            content = merged(content, {"base": asked.changes})
        settings = validate(self.settings, content)
        cells = self.cells(settings, asked)
        return StudyWork(asked, self.kind, title, cells, self, settings, note)

    def findings(self, folder: Path, about: Mapping[str, Any]) -> Findings:
        """The report's section of a finished folder, whose suite.json is `about`."""
        return self.report(self, folder, about)


@dataclass(frozen=True)
class RunStudy:
    """A kind of suite whose cells are runs: it makes its own work and reads its own tables."""

    kind: str
    work: Callable[[dict[str, Any], SuiteRequest], Work]
    findings: Callable[[Path, Mapping[str, Any]], Findings]


@dataclass(frozen=True)
class StudyWork(Work):
    """A study with settings, as cells."""

    study: Study
    settings: Table
    note: str

    @property
    def decisive(self) -> list[Any]:
        """What was asked for, the settings, and which cells they make."""
        asked, settings = self.asked, self.settings.model_dump(by_alias=True)
        cells = [one.name for one in self.cells]
        return [asked.stem, self.kind, asked.data, asked.scale, settings, cells]

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """NAME.csv for every list that the records hold, of all of them in turn."""
        names = [name for name, held in records[0].items() if isinstance(held, list)]
        return {name: [row for one in records for row in one[name]] for name in names}

    def summary(self, records: list[Record]) -> Record:
        """The settings, and what the study adds."""
        settings = self.settings.model_dump(by_alias=True)
        return {"note": self.note, "settings": settings} | self.study.summary(records)
