"""`fedmuon sweep` and `fedmuon run --seeds`: train a config at all points of a grid.

A point of the grid contains one value for each key of the grid. Each point is trained with one or
several seeds. Each run is a cell of a suite. A run can therefore be resumed, and does not depend on
other runs. Points are compared by one metric at the end of training: the mean over seeds, with
Student's 95% interval.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedmuon.analysis.report import style
from fedmuon.analysis.report.verdicts import mean_of
from fedmuon.config.load import Config, nested, only_read, read
from fedmuon.config.methods import PRIVATE
from fedmuon.config.schema import FIELDS, reads
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.choices import is_own
from fedmuon.core.errors import InputError, instead, shown
from fedmuon.core.files import digest, finite
from fedmuon.core.tables import Scalar, override, put
from fedmuon.experiments import spending
from fedmuon.experiments.studies import sweep_figure
from fedmuon.experiments.studies.training import TrainingRun, WorkOfRuns
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import SuiteRequest, Tables
from fedmuon.experiments.suites.suite import Cell, Compute, Rows, execute, here
from fedmuon.experiments.tables import record_name, short, spelled
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data
from fedmuon.federated.rounds import begin
from fedmuon.optim.recipes import aux_rate
from fedmuon.runs.directory import Record, RunDirectory, from_start
from fedmuon.runs.loop import OnRoundEnd, OnStart
from fedmuon.runs.observers.client_tests import over_clients
from fedmuon.runs.observers.evaluation import evaluate
from fedmuon.runs.prepare import Run

Grid = Mapping[str, Sequence[Scalar]]
RANGE = re.compile(r"([^:,]+):([^:,]+):([a-z]*)(\d*)")
MOST_POINTS, MOST_RUNS = 1000, 10_000  # maximum number of values of a range, and runs of a sweep
LONG = 100  # maximum length of a run folder's name; file systems allow 255 characters
RECIPE = "local.recipe"
MEASURED = ("data.test", "data.validation", "data.client-test")  # sizes of the evaluation samples
TEST_WORDS = "selected on test data"
PRIVATE_NOTE = (
    "Each epsilon is the epsilon of one run. Choosing the best of several private runs spends "
    "more: see `fedmuon privacy tuned`. Epsilon does not cover a choice by losses or accuracies "
    "on the private samples."
)


# Grid


def parse_grid(texts: Sequence[str]) -> dict[str, list[Scalar]]:
    """Parse `table.key=VALUES` in each text: `a,b,c`, `lo:hi:log7` or `lo:hi:lin5`.

    Raises:
        InputError: If a text does not have this form, or if two texts have the same key.
    """
    grid: dict[str, list[Scalar]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not (equals and re.fullmatch(r"[^.\s]+\.[^\s]+", key)):
            raise InputError(
                f"--grid {text!r} does not have the form table.key=VALUES. Write, for example, "
                "--grid local.lr=0.01:10:log7."
            )
        if key in grid:
            raise InputError(
                f"--grid contains the key {key} twice: list all values of {key} in one --grid"
            )
        grid[key] = parse_values(key, values)
    return grid


def parse_values(key: str, text: str) -> list[Scalar]:
    """Return the values of one key: a comma-separated list, or a range `lo:hi:logN` or `:linN`."""
    if match := RANGE.fullmatch(text.replace(" ", "")):
        ends = [_number(end) for end in match.groups()[:2]]
        if None not in ends:
            return _spaced(f"--grid {key}={text}", match[1], match[2], match[3], match[4])
    words = [part.strip() for part in text.split(",")]
    if not all(words):
        raise InputError(f"--grid {key}={text} has an empty value. Write values as a,b,c.")
    values = []
    for word in words:
        value: Any = override({}, [f"{key}={word}"])
        while isinstance(value, dict):
            (value,) = value.values()
        values.append(value)
    return values


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _spaced(place: str, low: str, high: str, kind: str, count: str) -> list[Scalar]:
    """Return evenly spaced numbers on a linear or logarithmic scale.

    The numbers are of type int if all of them are integers.
    """
    first, last = float(low), float(high)
    if kind not in ("log", "lin") or not count:
        raise InputError(
            f"{place} is not a valid range. Write a range as LOW:HIGH:log7 or LOW:HIGH:lin5, "
            "where 7 and 5 are numbers of values."
        )
    if not 2 <= (size := int(count)) <= MOST_POINTS:
        raise InputError(
            f"{place} has {size} values, but a range must have 2 to {MOST_POINTS} values. Change "
            f"the end of the range from {kind}{count} to {kind}7, for example."
        )
    if first == last:
        raise InputError(f"{place} begins and ends with the same number. Use two numbers.")
    if kind == "log" and min(first, last) <= 0:
        raise InputError(
            f"{place} has a log scale, which needs numbers above 0. Use lin{size} instead of "
            f"log{size}, or two numbers above 0."
        )
    spaced = (np.geomspace if kind == "log" else np.linspace)(first, last, size)
    values = [float(f"{value:.12g}") for value in spaced]
    integral = all(re.fullmatch(r"[+-]?\d+", end) for end in (low, high))
    return (
        [int(value) for value in values]
        if integral and all(value % 1 == 0 for value in values)
        else values
    )


def checked_grid(grid: Mapping[str, Any], settled: Tables) -> dict[str, list[Scalar]]:
    """Return the grid as lists of values. Every key must have at least two different values.

    Args:
        grid: For each key, a list of values, or a text that `parse_values` accepts.
        settled: The config tables that `--set` changes. The grid must not contain their keys.
    """
    if not isinstance(grid, Mapping):
        raise InputError(
            f"grid is {shown(grid)}, but it must be a dict, such as {{'local.lr': [0.1, 1.0]}}"
        )
    checked: dict[str, list[Scalar]] = {}
    for key, values in grid.items():
        if not isinstance(values, str | Iterable) or not len([*values]):
            raise InputError(
                f"grid has {key!r} = {shown(values)}, but each key needs a list of two or more "
                "values"
            )
        if key == "federation.seed":
            raise InputError(
                "--grid federation.seed is not valid. To run several seeds, set --seeds to their "
                "number."
            )
        if key in MEASURED or (key.startswith("output.") and key != "output.fine-tune"):
            raise InputError(
                f"--grid {key} is not valid, because {key} decides what is measured or written, "
                f"so points of the grid could not be compared. Use --set {key}=VALUE instead."
            )
        table, _, name = key.partition(".")
        if name in settled.get(table, {}):
            raise InputError(
                f"--grid and --set both contain the key {key}: remove the key from one of them"
            )
        checked[key] = (
            parse_values(key, values)
            if isinstance(values, str)
            else [value.item() if isinstance(value, np.generic) else value for value in values]
        )
        odd = [value for value in checked[key] if not isinstance(value, str | int | float)]
        if odd:
            raise InputError(
                f"--grid {key} contains {shown(odd[0])}, but values must be numbers, texts, true "
                "or false"
            )
        if len(checked[key]) == 1:
            value_text = _written(checked[key][0])
            raise InputError(
                f"--grid {key} has one value, {value_text}, so there is nothing to compare. List "
                "several values as a,b,c, write a range as 0.01:10:log7 or 0:1:lin5, or use "
                f"--set {key}={value_text}."
            )
        twice = [value for place, value in enumerate(checked[key]) if value in checked[key][:place]]
        if twice:
            raise InputError(
                f"--grid {key} contains the value {_written(twice[0])} twice: list each value once"
            )
    return checked


def _written(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# The metric that compares points


@dataclass(frozen=True)
class Metric:
    """A measure of the final model, by which the points of a sweep are compared."""

    name: str
    rising: bool  # whether larger values are better
    on_test: bool

    @classmethod
    def named(cls, text: str, known: Sequence[str]) -> "Metric":
        """Return the metric with the name `text`. The runs must record this metric.

        If the name does not determine whether large or small values are better, use `max:NAME` or
        `min:NAME`.
        """
        if not isinstance(text, str):
            raise InputError(
                f"select is {shown(text)}, but it must be the name of a metric, such as "
                "'validation-loss'"
            )
        way, _, bare = text.rpartition(":")
        name = record_name(bare)
        names = [spelled(metric) for metric in known]
        if way not in ("", "max", "min"):
            raise InputError(
                f"--select {text} has the direction {way!r}, but the direction must be max or min: "
                f"write max:{bare} or min:{bare}"
            )
        held_out = any(metric.startswith("validation") for metric in known)
        if name.startswith("validation") and not held_out:
            raise InputError(
                f"--select {text} needs validation samples. Set data.validation=0.2 (if the "
                "training and test samples use up the data, also set a smaller data.train), or use "
                f"--select {next((label for label in names if label == 'train-loss'), names[0])}."
            )
        if name not in known:
            mend = instead(bare, names, "choose one of")
            hint = "" if way else " (for your own metric, write max:NAME or min:NAME)"
            raise InputError(f"--select {text} is not a metric of these runs: {mend}{hint}")
        if not (way or name.endswith(("loss", "accuracy", "gap"))):
            raise InputError(
                f"--select {text} does not say whether larger or smaller values are better: write "
                f"max:{bare} or min:{bare}"
            )
        rising = way == "max" or (not way and name.endswith("accuracy"))
        return cls(name, rising, not name.startswith(("train", "validation")))

    @property
    def words(self) -> str:
        """The metric's name as text for figures."""
        return spelled(self.name).replace("-", " ")

    def better(self, one: float, other: float) -> bool:
        """Return whether the mean `one` of this metric is better than the mean `other`.

        A mean that is nan is worse than every number.
        """
        if math.isnan(one) or math.isnan(other):
            return not math.isnan(one)
        return one > other if self.rising else one < other


def measured_names(config: Config) -> list[str]:
    """Return the names of the measures that a run of this config records for its final model."""
    data = build_data(config)
    experiment = build_experiment(config, data)
    fresh = begin(experiment.recipe, experiment.task, config.federation.seed)
    run = Run(config, data, experiment, RunDirectory(Path()))
    return [*(evaluate(run, fresh) | over_clients(run, fresh)[0])]


# Runs


@dataclass(frozen=True)
class SweptRun(TrainingRun):
    """One run at a point of the grid.

    `point` contains the keys of the grid that affect this run, with their values.
    """

    point: tuple[tuple[str, Scalar], ...] = ()

    @property
    def name(self) -> str:
        """The name of the run folder: `lr=0.1,recipe=fedavg,seed=0`."""
        label = f"{self.variant},seed={self.config.federation.seed}".removeprefix(",")
        slug = re.sub(r"[^A-Za-z0-9.,=+-]+", "-", label).lstrip(".-")
        return slug if len(slug) <= LONG else f"{slug[:LONG]}-{digest(label.encode())[:8]}"

    def compute(self) -> Record:
        """Train the run, and return its final measures, or nan if the run diverged."""
        try:
            record = super().compute()
        except InputError as error:
            raise InputError(f"the run {self.name}: {error}") from error
        assert self.folder is not None
        summary = RunDirectory(self.folder).summary() or {}
        ends = {name: value for name, value in summary.items() if isinstance(value, float)}
        ends.pop("seconds", None)
        private = summary.get("privacy")
        if private is None and (self.folder / spending.LEDGER).exists():  # the run diverged
            with contextlib.suppress(InputError):
                private = spending.spent(self.folder)
        record |= {"spent": spending.account_of(private)} if private else {}
        return record | {"ends": ends, "trained": record["rows"][-1]["train_seconds"]}


@dataclass(frozen=True)
class SweepRequest(SuiteRequest):
    """The arguments of `fedmuon sweep`, and the command that repeats the sweep."""

    command: str = ""

    @property
    def again(self) -> str:
        """The command that repeats the sweep."""
        return self.command


@dataclass(frozen=True)
class GridSearch(WorkOfRuns):
    """Runs at every point of a grid, or runs with several seeds if there is no grid."""

    cells: Sequence[SweptRun]
    grid: Grid = field(default_factory=dict)
    metric: Metric | None = None
    noun: ClassVar[str] = "sweep"  # also for runs without a grid

    def joined(self, lock: bytes) -> bytes | None:
        """Return this sweep's lock if all runs in the folder belong to this sweep, otherwise None.

        A user can add values and seeds to a finished sweep.
        """
        return self.lock if super().joined(lock) == self.lock else None

    @property
    def called(self) -> str:
        """Return the word for these runs in messages."""
        return "sweep" if self.grid else "run with several seeds"

    @property
    def mismatch(self) -> str:
        """The end of the error message for a folder whose lock does not match."""
        advice = "add values to --grid, or raise --seeds" if self.grid else "raise --seeds"
        return (
            "does not match the config and options that you passed. Pass the config and options "
            f"with which the {'sweep' if self.grid else 'runs'} started. You can {advice}. If "
            "nothing differs, another version of fedmuon wrote the file, or the file is damaged: "
            "choose another folder with --out."
        )

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """Return the rows of cells.csv and points.csv.

        The first file has a row for each run, and the second file has a row for each point of the
        grid.
        """
        cells = self.rows(records)
        return {"cells": cells, "points" if self.grid else "metrics": self.over_seeds(cells)}

    def rows(self, records: list[Record]) -> list[Record]:
        """Return one row for each run.

        A row contains the point of the grid, the seed and the measures.
        """
        names = dict.fromkeys(name for record in records for name in record["ends"])
        return [
            {**self.values_at(cell), "seed": record["head"]["seed"], "run": cell.name}
            | dict.fromkeys(names, math.nan) | record["ends"] | {"note": record["note"]}
            for cell, record in zip(self.cells, records, strict=True)
        ]  # fmt: skip

    def values_at(self, cell: SweptRun) -> dict[str, Scalar]:
        """Return the value of every key of the grid, or "" if the key has no effect on the run."""
        return dict.fromkeys(self.grid, "") | dict(cell.point)

    def over_seeds(self, cells: Sequence[Record]) -> list[Record]:
        """Return one row for each point of the grid, with means over seeds and their intervals.

        If only seeds vary, return one row for each metric.
        """
        names = list(cells[0])[len(self.grid) + 2 : -1] if cells else []
        if not self.grid:
            return [{"metric": name} | seed_statistics([row[name] for row in cells])
                    for name in names]  # fmt: skip
        points: dict[tuple[str, ...], list[Record]] = {}
        for row in cells:  # compare as text, because 1 and True are equal
            points.setdefault(tuple(repr(row[key]) for key in self.grid), []).append(row)
        averaged = []
        for rows in points.values():
            point = {key: rows[0][key] for key in self.grid} | {"runs": len(rows)}
            point["diverged"] = sum(bool(row["note"]) for row in rows)
            for name in names:
                statistics = seed_statistics([row[name] for row in rows])
                point |= {
                    name: statistics["mean"],
                    f"{name}_low": statistics["low"],
                    f"{name}_high": statistics["high"],
                }
            averaged.append(point)
        return averaged

    def best(self, points: Sequence[Record]) -> dict[str, Record]:
        """Return the best point of each recipe.

        The mean of a point is nan if at least one of its runs diverged. A recipe is left out if the
        metric is nan at all of its points.
        """
        best: dict[str, Record] = {}
        assert self.metric is not None
        for row in points:
            recipe = str(row.get(RECIPE) or self.cells[0].config.local.recipe)
            value, best_value = (
                row[self.metric.name],
                best.get(recipe, {}).get(self.metric.name, math.nan),
            )
            if self.metric.better(value, best_value):
                best[recipe] = row
        return best

    def warnings(self, points: Sequence[Record], best: Mapping[str, Record]) -> list[str]:
        """Return warnings about the best values, such as a value at the end of its range."""
        messages = []
        for recipe, row in best.items():
            recipe_points = [point for point in points if point.get(RECIPE) == row.get(RECIPE)]
            for key in self.grid:
                values = {
                    point[key] for point in recipe_points if not isinstance(point[key], str | bool)
                }
                at_end = len(values) > 1 and row[key] in (min(values), max(values))
                if at_end and not _is_limit(key, row[key]):
                    end = "largest" if row[key] == max(values) else "smallest"
                    messages.append(
                        f"the best {key} of {recipe} is {_written(row[key])}, the {end} value of "
                        "the grid. A better value may lie outside the grid, so extend the grid"
                    )
                messages += [
                    f"the best point of {recipe} lies next to {key} = {_written(point[key])}, "
                    f"where {point['diverged']} of {point['runs']} runs diverged. The best point "
                    f"may diverge with new seeds. Choose {key} farther from "
                    f"{_written(point[key])}, or tune with more seeds"
                    for point in self.beside(row, key, recipe_points)
                    if point["diverged"]
                ]
        assert self.metric is not None
        recipes: dict[str, list[Record]] = {}
        for point in points:
            recipes.setdefault(str(point.get(RECIPE) or ""), []).append(point)
        for name, recipe_points in recipes.items():
            if best.keys().isdisjoint([name] if name else best):
                all_diverged = all(point["diverged"] for point in recipe_points)
                problem = "diverged" if all_diverged else f"lacks {self.metric.words}"
                mend = "lower the step sizes" if all_diverged else "choose another --select"
                messages.append(
                    f"no best point exists, because every point of {name or 'the grid'} {problem}: "
                    f"{mend}"
                )
        messages += self.fixed_auxiliary()
        if self.private:
            messages.append(PRIVATE_NOTE[0].lower() + PRIVATE_NOTE[1:].rstrip("."))
        return messages

    @property
    def private(self) -> bool:
        """Whether a run of the sweep is private."""
        return any(
            cell.config.local.recipe in PRIVATE or cell.config.privacy.level == "client"
            for cell in self.cells
        )

    def beside(self, row: Record, key: str, points: Sequence[Record]) -> list[Record]:
        """Return the points of the grid that differ from `row` only by one step of a numeric key.

        A step leads to the next lower or the next higher value.
        """
        others = {name: row[name] for name in self.grid if name != key}
        line = [point for point in points if not isinstance(point[key], str | bool)
                and {name: point[name] for name in others} == others]  # fmt: skip
        line.sort(key=lambda point: point[key])
        if row not in line:
            return []
        place = line.index(row)
        return line[max(place - 1, 0) : place] + line[place + 1 : place + 2]

    def fixed_auxiliary(self) -> list[str]:
        """Return a warning if the grid varies lr but not the auxiliary step size."""
        if "local.lr" not in self.grid or "local.aux-lr" in self.grid:
            return []
        fixed = {
            cell.config.local.aux_lr or aux_rate(cell.config.local)
            for cell in self.cells
            if reads(cell.config, "local.aux-lr") and not is_own(cell.config.local.recipe)
        }
        return [
            f"local.aux-lr is {_written(rate)} at every point, because it does not change with "
            "local.lr. To tune both step sizes, add local.aux-lr to the grid"
            for rate in sorted(fixed)
        ]

    def summary(self, records: list[Record]) -> Record:
        """Return the content of sweep.json.

        The file contains the grid, the metric, the means, the best points and the warnings.
        """
        rows = self.over_seeds(self.rows(records))
        content: Record = {
            "runs": len(records),
            "diverged": sum(bool(record["note"]) for record in records),
            "grid": {key: [*values] for key, values in self.grid.items()},
            "table": [*map(_finite, rows)],
        }
        if accounts := [record["spent"] for record in records if "spent" in record]:
            content["privacy"] = spending.together(accounts)
        if self.metric is None:
            return content
        best = self.best(rows)
        return content | {
            "select": spelled(self.metric.name),
            "better": "higher" if self.metric.rising else "lower",
            "selected_on_test_data": self.metric.on_test,
            "best": {recipe: _finite(row) for recipe, row in best.items()},
            "warnings": self.warnings(rows, best),
        }


def _is_limit(key: str, value: Any) -> bool:
    """Return whether the value is an end of the range that the key allows.

    The value 0 always counts as an end, because 0 stands for a default in some keys.
    """
    table, _, name = key.partition(".")
    field = FIELDS.get(table, {}).get(name)
    ends = {
        getattr(constraint, end, None)
        for constraint in getattr(field, "metadata", ())
        for end in ("ge", "le")
    }
    return value == 0 or value in ends


def _finite(row: Record) -> Record:
    return {key: finite(value) if isinstance(value, float) else value for key, value in row.items()}


def seed_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over seeds, the ends of Student's 95% interval, and the number of seeds."""
    mean = mean_of(np.array(values, dtype=float))
    return {"mean": mean.value, "low": mean.low, "high": mean.high, "seeds": len(values)}


# From the request to the runs


def search_of_command(
    config: Path | None,
    changes: Sequence[str],
    grid: Sequence[str],
    seeds: int,
    select: str | None,
    command: str,
) -> GridSearch:
    """Return the sweep of a command line, from its config file and its --set and --grid options."""
    settled = override({}, changes)
    tables = override(read(config) if config else {}, changes)
    return grid_search(tables, parse_grid(grid), seeds, select, settled, command)


def grid_search(
    base: Mapping[str, Any],
    grid: Mapping[str, Any],
    seeds: int = 1,
    select: str | None = None,
    settled: Tables | None = None,
    command: str = "",
    given: UserObjects = NOTHING,
) -> GridSearch:
    """Return a sweep whose runs have all been checked before any run starts.

    Args:
        base: The config's tables, with the changes of --set.
        grid: A list of values for each `table.key`. Empty if only seeds vary.
        seeds: The number of seeds, starting with the config's seed.
        select: The metric that chooses the best point. The default is the validation loss.
        settled: The config tables that --set changed.
        command: The command that repeats this request.
        given: Objects that the caller passed in Python.

    Raises:
        InputError: If the grid has only one point, if a key does not exist or has no effect, or if
            the runs do not record the metric.
    """
    checked, config_tables = checked_grid(grid, settled or {}), only_read(base)
    first = config_tables.get("federation", {}).get("seed", 0)
    size = math.prod(map(len, checked.values())) * seeds
    if size > MOST_RUNS:
        raise InputError(
            f"The sweep has {size} runs, but the maximum is {MOST_RUNS}. Use fewer values or "
            "fewer seeds."
        )
    cells = [*_cells(base, checked, [*range(first, first + seeds)], given)]
    configs = [cell.config for cell in cells]
    contents.require_read("the config", base, configs)
    for key, values in checked.items():
        tables: dict[str, Any] = {}
        put(tables, key, values[-1])
        if ".options." not in key:
            contents.require_read("--grid", tables, configs)
    if any(config.engine.name == "deployment" for config in configs):
        raise InputError(
            "engine.name is 'deployment', which would start new processes for every run of the "
            "sweep. Set engine.name=inline. To compute runs in parallel, use --jobs or --ray."
        )
    if len({cell.name for cell in cells}) < len(cells):
        raise InputError(
            "Two points of the grid have the same name, because their values are too similar. "
            "List values that differ more."
        )
    metric = None
    if checked:
        recipes = {
            config.local.recipe: config for config in reversed(configs)
        }  # recipes may record others
        names = dict.fromkeys(
            name for config in recipes.values() for name in measured_names(config)
        )
        metric = Metric.named(select or "validation-loss", [*names])
    words = f"{len(configs)} runs of {configs[0].local.recipe} on {configs[0].data.name}"
    repeats = {"seeds": [*range(first, first + seeds)]}
    request = SweepRequest("sweep", configs[0].data.name, "full", {}, None, seeds, repeats, command)
    return GridSearch(request, "sweep" if checked else "seeds", words, cells, checked, metric)


def _cells(
    base: Mapping[str, Any], grid: Grid, seeds: Sequence[int], objects: UserObjects
) -> Iterator[SweptRun]:
    """Yield a run for every point and every seed.

    Two points count as one if they differ only in keys that have no effect on their runs. For
    example, a momentum has no effect on an optimizer without momentum.
    """
    names = dict(zip(grid, short([*grid]), strict=True))
    marks = set()
    for values in itertools.product(*grid.values()):
        tables: dict[str, Any] = {}
        for key, value in zip(grid, values, strict=True):
            put(tables, key, value)
        for seed in seeds:
            config = contents.cell(base, tables, {"federation": {"seed": seed}})
            config = config.with_objects(objects)
            if (mark := json.dumps(nested(config))) in marks:
                continue
            marks.add(mark)
            point = tuple(
                (key, value)
                for key, value in zip(grid, values, strict=True)
                if ".options." in key or reads(config, key)
            )
            label = ",".join(f"{names[key]}={_written(value)}" for key, value in point)
            yield SweptRun(label, None, resolve(config), None, point)


def run_grid(
    work: GridSearch,
    out: Path,
    resume: bool,
    by: Compute,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
) -> tuple[Record, float]:
    """Compute the runs that are missing in `out`, and write tables, summary and figures.

    Returns:
        The content of sweep.json, and the training seconds of the runs that this call computed.
    """
    if by is not here and any(cell.config.engine.name == "ray" for cell in work.cells):
        raise InputError(
            "engine.name is 'ray', which already uses all workers for the clients of one run, so "
            "--jobs and --ray have no effect. Leave both options out, or set engine.name=inline "
            "to compute several runs in parallel."
        )
    trained: list[float] = []

    def counting(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
        for cell, record in by(cells):
            trained.append(record["trained"])
            yield cell, record

    summary = execute(work, out, resume, counting, on_round_end, on_start)
    draw(work, out, summary)
    return summary, sum(trained)


def draw(work: GridSearch, out: Path, summary: Record) -> None:
    """Write the figures of the sweep.

    The figures show the curves of the best points by round, and the metric over the grid.
    """
    metric = work.metric
    if metric is None:
        curves = {work.title: [_rounds(out, cell) for cell in work.cells]}
    else:
        curves = {}
        for recipe, row in summary["best"].items():
            best_cells = [
                cell
                for cell in work.cells
                if work.values_at(cell) == {k: row[k] for k in work.grid}
            ]
            words = ", ".join(f"{key.partition('.')[2]} = {_written(row[key])}"
                              for key in work.grid if key != RECIPE and row[key] != "")  # fmt: skip
            curves[f"{recipe}, {words}" if words else recipe] = [
                _rounds(out, cell) for cell in best_cells
            ]
        axes = [key for key, values in work.grid.items()
                if not any(isinstance(value, str | bool) for value in values)]  # fmt: skip
        if axes:
            figure = sweep_figure.over_grid(summary, axes, metric.words, metric.rising)
            style.saved_as(figure, out / ("heatmap.png" if len(axes) > 1 else "sweep.png"))
    if any(map(any, curves.values())):
        style.saved_as(style.by_round(curves), out / "curves.png")


def _rounds(out: Path, cell: SweptRun) -> list[Record]:
    directory = RunDirectory(out / "runs" / cell.name)
    return from_start(directory.records(), directory.summary())
