"""Numerical studies, which are suites that compute numbers, and functions that studies share.

A study is one file. The file first defines the keys of the study's TOML file, and then the
measurements, the claims and the figures. The last line of the file creates the object `STUDY` from
these parts. The titles and captions of the figures are in `captions.toml` of the report's assets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Findings, Picture
from fedmuon.analysis.report.findings import Rows as Lines
from fedmuon.analysis.report.tables import Columns, read_table, where
from fedmuon.analysis.report.tuning import Tuned
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule, Slope, curve
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table, validate
from fedmuon.experiments.suites.contents import SuiteRequest, merged
from fedmuon.experiments.suites.suite import Cell, Rows, Work
from fedmuon.optim.chain import Chain, Context
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params, Points, Released

# (step, params) -> (loss [S], gradient). Its randomness depends only on the step.
Oracle = Callable[[int, Params], tuple[Tensor, Params]]
Draws = Callable[..., np.random.Generator]  # (what, step=..., block=...)


@dataclass(frozen=True)
class Call:
    """The simplest cell of a suite: a function that needs no arguments."""

    name: str
    compute: Callable[[], Record]
    size: int = 1


@dataclass(frozen=True)
class Study:
    """A numerical study: its settings, its cells, and the section of its report.

    Attributes:
        kind: The value of `kind` in the suite's TOML file.
        settings: The schema of the TOML file, without `kind`, `title`, `note` and `data`.
        cells: A function that makes the cells from the settings and the request. A cell's record
            maps table names to lists of rows. The file NAME.csv contains the rows of the table NAME
            from all cells.
        claims: A function that makes the claims from the columns of `tables`.
        numbers: A function that makes a table for the report from the same columns. The first row
            contains the column names.
        stands_on: The assumptions of the claims.
        figures: For each name of a figure, a function that draws it from the same columns.
        tables: The names of the tables whose columns `claims`, `numbers` and `figures` get.
        summary: A function that returns additional content of suite.json from the cells' records.
        report: A function that makes the section of the report. The default is `assemble`.
    """

    kind: str
    settings: type[Table]
    cells: Callable[[Any, SuiteRequest], Sequence[Cell]]
    claims: Callable[..., Sequence[Claim]]
    numbers: Callable[..., Lines]
    stands_on: str
    figures: Mapping[str, Callable[..., Figure]]
    tables: Sequence[str] = ("rows",)
    summary: Callable[[list[Record]], Record] = lambda records: {}
    report: "Callable[[Study, Path, Mapping[str, Any]], Findings] | None" = None

    def work(self, content: dict[str, Any], request: SuiteRequest) -> "StudyWork":
        """Return the study as a suite with the settings in `content`.

        The tables of `request.changes` override those of `base`.
        """
        title, note = content.pop("title", self.kind), content.pop("note", "")
        if request.changes:
            if "base" not in self.settings.model_fields:
                raise InputError(
                    f"the suite {request.stem} has no config tables, so --set has no effect: "
                    "leave --set out"
                )
            content = merged(content, {"base": request.changes})
        settings = validate(self.settings, content)
        cells = self.cells(settings, request)
        return StudyWork(request, self.kind, title, cells, self, settings, note)

    def findings(self, folder: Path, about: Mapping[str, Any]) -> Findings:
        """Return the report section of a finished folder. `about` is its suite.json."""
        return (self.report or assemble)(self, folder, about)


def assemble(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the report section of a finished study: verdicts, numbers and figures.

    Args:
        study: The study that computed the folder.
        folder: The folder of the suite.
        about: The content of suite.json in this folder.
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
        pictures=[Picture.known(name, draw, *columns) for name, draw in study.figures.items()],
        stands_on=study.stands_on,
        facts=("suite", "kind", "data", "scale", "seconds"),
    )


@dataclass(frozen=True)
class RunStudy:
    """A kind of suite whose cells are runs, with functions for its cells and its report."""

    kind: str
    work: Callable[[dict[str, Any], SuiteRequest], Work]
    findings: Callable[[Path, Mapping[str, Any]], Findings]


@dataclass(frozen=True)
class StudyWork(Work):
    """A suite of one study with the settings of a TOML file."""

    study: Study
    settings: Table
    note: str

    @property
    def decisive(self) -> list[Any]:
        """The values that determine the results: the request, the settings and the cells' names."""
        request, settings = self.request, self.settings.model_dump(by_alias=True)
        cells = [cell.name for cell in self.cells]
        return [request.stem, self.kind, request.data, request.scale, settings, cells]

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """Return the rows of NAME.csv for each NAME: the rows of all cells, one after the other."""
        names = [name for name, entry in records[0].items() if isinstance(entry, list)]
        return {name: [row for record in records for row in record[name]] for name in names}

    def summary(self, records: list[Record]) -> Record:
        """Return the settings, and the additional content that the study defines."""
        settings = self.settings.model_dump(by_alias=True)
        return {"note": self.note, "settings": settings} | self.study.summary(records)


# Shared functions: the loop over steps, and reading, judging, describing and drawing rows


def run_chain(
    chain: Chain, params: Params, oracle: Oracle, steps: int, draws: Draws | Sequence[Draws]
) -> Iterator[tuple[int, Params]]:
    """Run a chain of links on a custom gradient oracle.

    If `draws` is a sequence, each replica has its own random generator.

    Yields:
        (k, X_k) before step k, for k = 0 .. steps - 1, and (steps, X_steps) at the end.
    """
    states = chain.init(params, {})
    all_draws = draws if isinstance(draws, Sequence) else [draws]
    for step in range(steps):
        yield step, params
        at_step = partial(oracle, step)
        now = [partial(draw, step=step) for draw in all_draws]
        context = Context(params, at_step, now, partial(_released, at_step))
        params, states = chain.step(params, states, context)
    yield steps, params


def _released(gradient: Callable[[Params], tuple[Tensor, Params]], points: Points) -> Released:
    """Return the weighted average of the noisy gradients at the points X_k, with weights c_k.

    The weights sum to 1 and the noise of all gradients is the same, so the average has this noise.
    """
    slopes = [(share, gradient(at)[1]) for share, at in points]
    return Released(
        {
            name: torch.stack([share * slope[name] for share, slope in slopes]).sum(0)
            for name in slopes[0][1]
        }
    )


def tuned_in_rows(
    rows: Columns, method: str, value: str, measure: str, key: str = "", name: str = "test_loss"
) -> Tuned:
    """Return the tuning of a method from rows in which the column `value` has the tried values.

    Args:
        rows: The rows of this method.
        method: The name of the method.
        value: The column with the tried values.
        measure: The column with the scores. The score of a value is their mean.
        key: What was tuned. The default is `value`.
        name: The measure of the scores, which says whether higher is better.
    """
    tried = curve(rows, value, measure)
    return Tuned(method, key or value, tried.sizes.tolist(), tried.means.tolist(), name)


def seed_rows(shared: Record, name: str, values: Iterable[Any]) -> list[Record]:
    """Return a row for each seed: the entries of `shared`, the seed, and its value under `name`."""
    return [shared | {"seed": seed, name: float(value)} for seed, value in enumerate(values)]


def levels(rows: Columns, name: str) -> list[Any]:
    """Return the distinct values of a column in increasing order."""
    return np.unique(rows[name]).tolist()


def distinct(rows: Columns, *names: str) -> list[Any]:
    """Return the distinct values of a column in the order of the table.

    For several columns, the values are tuples.
    """
    columns = [rows[name].tolist() for name in names]
    return list(dict.fromkeys(zip(*columns, strict=True) if len(names) > 1 else columns[0]))


def split(rows: Columns, name: str, symbol: str) -> dict[str, Columns]:
    """Split the table by the values of a column.

    The keys of the result are texts such as `σ = 0.5`.
    """
    return {f"{symbol} = {level:g}": where(rows, **{name: level}) for level in levels(rows, name)}


def slopes_claim(
    sentence: str, slopes: Mapping[str, Slope], rule: Rule, before: str = "", after: str = ""
) -> Claim:
    """Return a claim about log-log slopes.

    The details of the claim are `before`, the list of slopes, and `after`.
    """
    effect = Effect.between("log-log slope", slopes, unit="slope")
    return Claim(sentence, effect, rule, before + in_words(slopes) + after)


def in_words(found: Mapping[str, Any]) -> str:
    """Return a dictionary as text, such as `σ = 1: 0.2; σ = 4: 0.3`."""
    return "; ".join(f"{name}: {value}" for name, value in found.items())


def heading(title: str, head: Sequence[str]) -> tuple[str, ...]:
    """Return a table row that contains only a title, and is empty in all other columns."""
    return (title, *("" for _ in head[1:]))


def draw_with_bound(
    axes: Axes, rows: Columns, look: tuple[str, str], label: str, bound_label: str = "",
    **wanted: Any,
) -> None:  # fmt: skip
    """Draw the mean nuclear norms and their bound against the number of steps.

    The norms have intervals. The bound is a dashed line.
    """
    norms, bounds = (curve(rows, "steps", column, **wanted) for column in ("mean_nuclear", "bound"))
    style.errorbars(axes, norms.sizes, norms.means, norms.reach, look, label)
    axes.plot(bounds.sizes, bounds.means, "--", color=look[0], lw=1.2, label=bound_label)
