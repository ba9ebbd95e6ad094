"""`fedmuon tune`: choose the step size of every variant of a suite of kind `training`.

Every variant runs with every value of its grid and with the tuning seeds, which the suite does not
use. While a best value is at an end of its grid, the grids are extended, and all variants keep the
same number of values. Every run is a cell with its own folder, so tuning can be resumed.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.tuning import Tuned, widened
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.experiments.studies.training import (
    SETTLED,
    Suite,
    Training,
    TrainingRun,
    WorkOfRuns,
    settings,
)
from fedmuon.experiments.studies.tuned import Tuning, place
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import merged
from fedmuon.experiments.suites.suite import Compute, Rows, execute, here
from fedmuon.federated.build import resolve
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import OnRoundEnd, OnStart

Grids = Mapping[str, Sequence[float]]
EXTENSIONS = 4  # default of --extend


@dataclass(frozen=True)
class Trials(WorkOfRuns):
    """The runs of one pass over the grids, and the values of each run."""

    table: Tuning
    grids: Grids
    values: Mapping[str, tuple[str, float]]  # name of a cell -> its variant and value
    noun: ClassVar[str] = "tuning"

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """Return the rows of trials.csv: the final measures of every run."""
        rows = []
        for cell, record in zip(self.cells, records, strict=True):
            variant, value = self.values[cell.name]
            head = {"variant": variant, "x": cell.x, "value": value}
            last = {name: entry for name, entry in record["rows"][-1].items() if name != "round"}
            seed = cell.config.federation.seed
            rows.append(head | {"seed": seed, "note": record["note"]} | last)
        names = dict.fromkeys(name for row in rows for name in row)
        return {"trials": [dict.fromkeys(names, math.nan) | row for row in rows]}

    def summary(self, records: list[Record]) -> Record:
        """Return the content of tuned/SUITE.json."""
        request, all_scores = self.request, {}
        for cell, record in zip(self.cells, records, strict=True):
            variant, value = self.values[cell.name]
            score = math.nan if record["note"] else float(record["rows"][-1][self.table.measure])
            all_scores.setdefault((variant, cell.x), {}).setdefault(value, []).append(score)
        first = {(self.values[cell.name][0], cell.x): cell.config for cell in reversed(self.cells)}
        methods = []
        for (variant, x), by_value in all_scores.items():
            values = sorted(by_value)
            scores = [files.finite(float(np.mean(by_value[value]))) for value in values]
            methods.append({"method": variant, "x": x, "values": values, "scores": scores})
            tuned = Tuned.of(methods[-1], self._about)
            methods[-1] |= {
                "best": files.finite(tuned.best), "inside": tuned.inside,
                "settings": self.table.digest(first[variant, x]),
            }  # fmt: skip
        return {**self._about, "again": request.again, "runs": len(records), "methods": methods}

    @property
    def _about(self) -> Record:
        table = self.table
        return {"key": table.key, "measure": table.measure, "seeds": table.seeds, "at": table.at}


def trials(suite: Training, grids: Grids | None = None) -> Trials:
    """Return the runs of the grids of a suite.

    Args:
        suite: The suite, with the settings for which it is tuned.
        grids: The values of every variant. The default are those in the suite's table [tuning].

    Raises:
        InputError: If the suite has no grids, or `--set` sets the tuned key.
    """
    content, request = suite.suite, suite.request
    table = content.tuning
    if table is None or table.stated:
        reason = f"Its step sizes are not tuned: {table.stated}" if table else ""
        raise InputError(
            f"the suite {request.name} has no grids, so there is nothing to tune. {reason}".rstrip()
            + " Add [tuning.grids] to a copy of its file."
        )
    grids = table.grids if grids is None else grids
    contents.require_free(
        "--set", request.changes, SETTLED | dict.fromkeys((table.key, *table.shares), "[tuning]")
    )
    base = merged(content.base, merged(request.changes, {"data": {"name": request.data}}))
    cells, values = [], {}
    for variant, grid in grids.items():
        for value in grid:
            name = f"{variant}, {value:g}"
            tables = merged(content.variants[variant], table.tables(value))
            alone = _of_variant(content, table, variant, name, tables)
            for _, x, setting in settings(alone, base, request.changes):
                config = contents.cell(merged(setting, {"data": contents.sizes_that_fit(setting)}))
                cells.append(TrainingRun(name, x, resolve(config)))
                values[cells[-1].name] = variant, value
    stem = dataclasses.replace(request, name=f"{request.stem}-tuning")
    tuning_request = _Named(stem.name, stem.data, stem.scale, stem.changes, command=_command(suite))
    return Trials(tuning_request, "training", f"{suite.title}: tuning", cells, table, grids, values)


def _of_variant(
    content: Suite, table: Tuning, variant: str, name: str, tables: Mapping[str, Any]
) -> Suite:
    """Return a suite with one variant, the tuning seeds, and the values at which it is tuned."""
    sweep = content.sweep if content.sweeps(variant) else None
    if sweep and table.at != "each":
        sweep = sweep.model_copy(update={"values": [table.at]})
    update = {"variants": {name: tables}, "seeds": table.seeds, "sweep": sweep, "tuning": None}
    return content.model_copy(update=update)


@dataclass(frozen=True)
class _Named(contents.SuiteRequest):
    """A request whose command is `fedmuon tune`."""

    command: str = ""

    @property
    def again(self) -> str:
        return self.command


def _command(suite: Training) -> str:
    return suite.request.again.replace("fedmuon suite", "fedmuon tune", 1)


def tune(
    suite: Training,
    out: Path,
    resume: bool = False,
    by: Compute = here,
    extensions: int = EXTENSIONS,
    budget: float = math.inf,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Record:
    """Tune all variants of a suite, and return the content of tuned/SUITE.json.

    Args:
        suite: The suite.
        out: The folder of the runs.
        resume: Whether to continue in `out`.
        by: A function that computes cells.
        extensions: The maximum number of times that the grids are extended.
        budget: No grid is extended after this number of seconds.
        on_round_end: A function that is called after each run with the progress.
        on_start: A function that is called before each pass over the grids.
        say: A function that is called with a sentence about each extension.
    """
    begun = time.monotonic()
    work, summary = trials(suite), {}
    for extension in range(extensions + 1):
        summary = execute(work, out, resume or extension > 0, by, on_round_end, on_start)
        tunings = [Tuned.of(method, summary) for method in summary["methods"]]
        wider = widened(work.grids, tunings)
        if all(len(wider[name]) == len(grid) for name, grid in work.grids.items()):
            break
        ends = ", ".join(dict.fromkeys(
            f"{tuned.method} {number(tuned.best)} ({tuned.end})" for tuned in tunings if tuned.end
        ))  # fmt: skip
        if extension == extensions or time.monotonic() - begun > budget:
            say(f"A best value is still at an end of its grid: {ends}.")
            break
        try:
            work = trials(suite, wider)
        except InputError as error:
            say(
                f"A best value is at an end of its grid: {ends}. No wider grid is possible: {error}"
            )
            break
        say(f"A best value is at an end of its grid: {ends}. All grids are extended.")
    names = ("suite", "data", "scale", "again", "key", "measure", "seeds", "at", "seconds", "runs")
    content = {name: summary[name] for name in names} | {"suite": suite.request.stem}
    return content | {"methods": summary["methods"]}


def store(name: str, content: Record) -> Path:
    """Write tuned/SUITE.json beside the suite's file, and return its path."""
    file = place(name)
    with files.mendable(file, "write"):
        file.parent.mkdir(exist_ok=True)
        files.write_bytes(file, (json.dumps(content, indent=1) + "\n").encode())
    return file
