"""Numerical studies: suites whose cells are computations of their own, and what studies share.

A study is one file. From top to bottom it has the settings that its TOML file holds, what its cells
measure, what it claims, and how it is drawn. Its last line names these parts in `STUDY`. Titles and
captions of its figures are in `captions.toml` of the report's assets.
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
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule, Slope, curve
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table, validate
from fedmuon.experiments.suites.contents import SuiteRequest, merged
from fedmuon.experiments.suites.suite import Cell, Rows, Work
from fedmuon.optim.chain import Chain, Context
from fedmuon.privacy.mechanisms.gaussian import Released
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params, Points

# (step, params) -> (loss [S], gradient); its randomness is a function of the step
Oracle = Callable[[int, Params], tuple[Tensor, Params]]
Draws = Callable[..., np.random.Generator]  # (what, step=..., block=...)


@dataclass(frozen=True)
class Call:
    """The simplest cell: a function without arguments."""

    name: str
    compute: Callable[[], Record]
    size: int = 1


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
        figures: Name -> what draws it from the same columns.
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
    figures: Mapping[str, Callable[..., Figure]]
    tables: Sequence[str] = ("rows",)
    summary: Callable[[list[Record]], Record] = lambda records: {}
    report: "Callable[[Study, Path, Mapping[str, Any]], Findings] | None" = None

    def work(self, content: dict[str, Any], request: SuiteRequest) -> "StudyWork":
        """The study with these settings; config tables to change are those below its `base`."""
        title, note = content.pop("title", self.kind), content.pop("note", "")
        if request.changes:
            if "base" not in self.settings.model_fields:
                raise InputError(
                    f"the suite {request.stem} has no config to change: leave --set out"
                )
            content = merged(content, {"base": request.changes})
        settings = validate(self.settings, content)
        cells = self.cells(settings, request)
        return StudyWork(request, self.kind, title, cells, self, settings, note)

    def findings(self, folder: Path, about: Mapping[str, Any]) -> Findings:
        """The report's section of a finished folder, whose suite.json is `about`."""
        return (self.report or assemble)(self, folder, about)


def assemble(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Judge, describe and draw the tables of a finished study.

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
        pictures=[Picture.known(name, draw, *columns) for name, draw in study.figures.items()],
        stands_on=study.stands_on,
        facts=("suite", "kind", "data", "scale", "seconds"),
    )


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
        """The request, the settings, and which cells they make."""
        request, settings = self.request, self.settings.model_dump(by_alias=True)
        cells = [one.name for one in self.cells]
        return [request.stem, self.kind, request.data, request.scale, settings, cells]

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """NAME.csv for every list that the records hold, of all of them in turn."""
        names = [name for name, held in records[0].items() if isinstance(held, list)]
        return {name: [row for one in records for row in one[name]] for name in names}

    def summary(self, records: list[Record]) -> Record:
        """The settings, and what the study adds."""
        settings = self.settings.model_dump(by_alias=True)
        return {"note": self.note, "settings": settings} | self.study.summary(records)


# What studies share: the loop over steps, and reading, judging, describing and drawing rows.


def run_chain(
    chain: Chain, params: Params, oracle: Oracle, steps: int, draws: Draws | Sequence[Draws]
) -> Iterator[tuple[int, Params]]:
    """Run a chain of links on a custom gradient oracle.

    A sequence of draws holds one generator per replica, so replicas share no draw.

    Yields:
        (k, X_k) before step k, for k = 0 .. steps - 1, and (steps, X_steps) at the end.
    """
    states = chain.init(params, {})
    every = draws if isinstance(draws, Sequence) else [draws]
    for step in range(steps):
        yield step, params
        at_step = partial(oracle, step)
        now = [partial(draw, step=step) for draw in every]
        context = Context(params, at_step, now, partial(_released, at_step))
        params, states = chain.step(params, states, context)
    yield steps, params


def _released(gradient: Callable[[Params], tuple[Tensor, Params]], points: Points) -> Released:
    """sum_k c_k (noisy gradient at X_k); it has the step's noise once, because sum_k c_k = 1."""
    found = [(share, gradient(at)[1]) for share, at in points]
    return Released(
        {
            name: torch.stack([share * slope[name] for share, slope in found]).sum(0)
            for name in found[0][1]
        }
    )


def seed_rows(shared: Record, name: str, values: Iterable[Any]) -> list[Record]:
    """A row for each seed: what all seeds share, the seed, and its own value."""
    return [shared | {"seed": seed, name: float(value)} for seed, value in enumerate(values)]


def levels(rows: Columns, name: str) -> list[Any]:
    """The distinct entries of a column in rising order."""
    return np.unique(rows[name]).tolist()


def distinct(rows: Columns, *names: str) -> list[Any]:
    """The distinct entries of a column, or tuples of several, in the order of the table."""
    columns = [rows[name].tolist() for name in names]
    return list(dict.fromkeys(zip(*columns, strict=True) if len(names) > 1 else columns[0]))


def split(rows: Columns, name: str, symbol: str) -> dict[str, Columns]:
    """The rows at each level of a column, in rising order, by `σ = 0.5`."""
    return {f"{symbol} = {one:g}": where(rows, **{name: one}) for one in levels(rows, name)}


def slopes_claim(
    sentence: str, slopes: Mapping[str, Slope], rule: Rule, before: str = "", after: str = ""
) -> Claim:
    """A claim about log-log slopes, with all of them between these words."""
    effect = Effect.between("log-log slope", slopes, unit="slope")
    return Claim(sentence, effect, rule, before + in_words(slopes) + after)


def in_words(found: Mapping[str, Any]) -> str:
    """`σ = 1: 0.2; σ = 4: 0.3`."""
    return "; ".join(f"{name}: {one}" for name, one in found.items())


def heading(title: str, head: Sequence[str]) -> tuple[str, ...]:
    """A line below this head that has only a title."""
    return (title, *("" for _ in head[1:]))


def draw_with_bound(
    axes: Axes, rows: Columns, look: tuple[str, str], label: str, bound_label: str = "",
    **wanted: Any,
) -> None:  # fmt: skip
    """Mean nuclear norms with intervals against the steps, and their bound as a dashed line."""
    norms, bounds = (curve(rows, "steps", one, **wanted) for one in ("mean_nuclear", "bound"))
    style.errorbars(axes, norms.sizes, norms.means, norms.reach, look, label)
    axes.plot(bounds.sizes, bounds.means, "--", color=look[0], lw=1.2, label=bound_label)
