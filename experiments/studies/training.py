"""Kind `training`: runs of several variants with several seeds, and optionally a swept key.

The suite's file lists variants, a sweep, claims and published numbers. Every cell is a run with its
own folder in runs/, which you can resume and replay.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedmuon.config.load import Config
from fedmuon.config.schema import Natural
from fedmuon.core import files
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.tables import Table, validate
from fedmuon.experiments import spending
from fedmuon.experiments.run import execute
from fedmuon.experiments.studies.study import RunStudy
from fedmuon.experiments.studies.training_findings import findings
from fedmuon.experiments.studies.tuned import NOTHING, Key, Stored, Tuning, stored
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import (
    PUBLISHED_FOR,
    Nested,
    SuiteRequest,
    Tables,
    merged,
)
from fedmuon.experiments.suites.suite import Cell, Rows, Work
from fedmuon.federated.build import resolve
from fedmuon.federated.client_data import read_source
from fedmuon.runs import fingerprints
from fedmuon.runs.directory import Record, RunDirectory


class Sweep(Table):
    """The config key that is varied, and its values.

    Every variant runs at each value. Figures of curves show only one of the values.
    """

    key: Key
    values: Annotated[list[float | int], Field(min_length=1)]
    label: str
    curves: float | int | None = None  # the value whose curves are drawn; by default the last
    # the config's text for a value, if it is not a number, such as taylor-{}
    written: Annotated[str, Field(pattern=r"^$|\{\}")] = ""
    # variants that do not depend on the value and run only once
    fixed: list[str] = Field(default_factory=list)
    follow: str = ""  # the variant whose curves are drawn at all values

    def at(self, x: float) -> Nested:
        """Return the config table that sets the key to this value."""
        table, _, key = self.key.partition(".")
        return {table: {key: self.written.format(f"{x:g}") if self.written else x}}


class Claim(Table):
    """A claim that compares the variants `better` and `than`.

    The `kind` is one of the following:

    - `terminal`: The last value of `better` is at most that of `than`. For accuracy, it is at least
      that of `than`.
    - `sooner`: `better` reaches the train loss of `than` in less time.
    - `near`: The last values of both differ by at most `within` times the larger value.
    - `falling`, `rising`: The last value of `better` falls or rises along the sweep.

    If `untuned` is a reason why the variants were not tuned equally well, the claim is at best
    inconclusive.
    """

    better: str
    than: str = ""
    kind: Literal["terminal", "sooner", "near", "falling", "rising"] = "terminal"
    measure: str = "train_loss"
    sentence: str = ""
    within: Annotated[float, Field(gt=0, lt=1)] = 0.02
    untuned: str = ""


class PublishedTimes(Table):
    """Published train losses of variants, by seconds on the machine of the paper."""

    seconds: Annotated[list[float], Field(min_length=1)]
    losses: dict[str, list[float]]


class Times(Table):
    """A table of train losses at equally spaced times, until the variant `of` ends."""

    of: str
    parts: Annotated[int, Field(ge=2)] = 5
    # data set -> published table
    published: dict[str, PublishedTimes] = Field(default_factory=dict)


class Suite(Table):
    """The keys that the suite's TOML file may contain.

    `published` contains published numbers by data set and variant. `source` names their paper.
    `also` is a text that is added to every verdict.
    """

    title: str
    seeds: Annotated[list[Natural], Field(min_length=1)]
    variants: Annotated[dict[str, Nested], Field(min_length=1)]
    base: Nested = Field(default_factory=dict)
    sweep: Sweep | None = None
    tuning: Tuning | None = None
    times: Times | None = None
    claims: dict[str, Claim] = Field(default_factory=dict)
    published: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    source: str = "published"
    note: str = ""
    also: str = ""

    def sweeps(self, variant: str) -> bool:
        """Return whether the variant is trained at every value of the sweep."""
        return self.sweep is not None and variant not in self.sweep.fixed

    def at(self, variant: str) -> Sequence[float | None]:
        """Return the values of the sweep at which the variant is trained, or [None]."""
        return self.sweep.values if self.sweep and self.sweeps(variant) else [None]


def suite_of(content: dict[str, Any]) -> Suite:
    """Check the content of a suite's file. Every variant that a claim or sweep names must exist."""
    suite = validate(Suite, content)
    # pairs of a table of the file and a variant that it names
    references: list[tuple[str, str]] = []
    for key, claim in suite.claims.items():
        alone = claim.kind in ("falling", "rising")
        if alone and not suite.sweep:
            raise InputError(
                f"[claims.{key}] kind = '{claim.kind}' compares the values of a [sweep], but the "
                "suite's file has no [sweep]. Add a [sweep], or choose another kind."
            )
        references += [
            (f"claims.{key}", variant)
            for variant in (claim.better, *([] if alone else [claim.than]))
        ]
    for data, by_variant in suite.published.items():
        references += [(f"published.{data}", name) for name in by_variant]
    if sweep := suite.sweep:
        references += [
            ("sweep", name) for name in (*sweep.fixed, *[sweep.follow] * bool(sweep.follow))
        ]
    if suite.tuning:
        references += [("tuning.grids", name) for name in suite.tuning.grids]
    if suite.times:
        references.append(("times", suite.times.of))
        for data, table in suite.times.published.items():
            references += [(f"times.published.{data}", name) for name in table.losses]
    for place, name in references:
        if name not in suite.variants:
            options = ", ".join(suite.variants)
            raise InputError(
                f"[{place}] contains the name {name!r}, but the suite has no such variant. Use "
                f"one of {options}."
            )
    if suite.times and suite.sweep:
        raise InputError(
            "The suite's file has both [times] and [sweep], but [times] works only without a "
            "[sweep]. Remove one of the two tables."
        )
    return suite


# Cells: each is one run in its own folder

NOT_MEASURED = ("round", "seconds", "train_seconds", "client_loss", "bytes_down", "bytes_up")
MEASURES = ("train_loss", "test_loss", "test_gap", "accuracy")


@dataclass(frozen=True)
class TrainingRun:
    """One run of the suite. A run has a variant, a value of the sweep, and a seed."""

    variant: str
    x: float | None
    config: Config
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The name of the run folder, such as fedavg-e-1-seed0 for `FedAvg, E = 1` and seed 0."""
        at = "" if self.x is None else f"-{self.x:g}"
        return f"{contents.slug(self.variant)}{at}-seed{self.config.federation.seed}"

    @property
    def size(self) -> int:
        """The number of rounds."""
        return self.config.federation.rounds

    def compute(self) -> Record:
        """Train or resume the run. Return its evaluated rounds, and the reason if the run diverged.

        A run that diverged has no summary, and the measures in its last row are nan.
        """
        assert self.folder is not None
        if reason := RunDirectory(self.folder).lost():
            raise InputError(
                f"{self.folder} {reason}. Remove this folder and continue with --resume. The "
                "privacy account of the new run will not include the releases of the removed run."
            )
        note = ""
        last: Record = dict.fromkeys(MEASURES, math.nan)
        try:
            last = execute(self.config, self.folder, resume=True)
        except NonFinite as error:
            note = str(error)
        records = RunDirectory(self.folder).records()
        rows = [_measured(record) for record in records if MEASURES[0] in record]
        if note or not rows or rows[-1]["round"] < self.size:
            final = records[-1] if records else {"round": 0, "train_seconds": 0.0}
            rows.append(_measured(final) | {name: last[name] for name in MEASURES})
        head = {"variant": self.variant, "x": self.x, "seed": self.config.federation.seed}
        result: Record = {"head": head, "run": self.name, "rows": rows, "note": note}
        result |= spending.privacy_record(self.config, last)
        return result | ({"seconds": records[-1]["seconds"]} if records else {})


def _measured(record: Record) -> Record:
    """Return the round, the training seconds, and all recorded measures of that round."""
    head = {name: record[name] for name in ("round", "train_seconds")}
    return head | {
        name: value
        for name, value in record.items()
        if name not in NOT_MEASURED and isinstance(value, int | float)
    }


# Suite

SETTLED = {"federation.seed": "seeds", "data.name": "--data"}


def work(content: dict[str, Any], request: SuiteRequest) -> "Training":
    """Return the suite with a run for every variant, every value of the sweep, and every seed.

    The numbers of training and test samples are limited by the data set.

    Raises:
        InputError: If two runs have the same name, or a key has no effect.
    """
    suite = suite_of(content)
    if len(set(suite.seeds)) < len(suite.seeds):
        raise InputError(f"seeds = {suite.seeds} contains a seed twice: list each seed once")
    contents.require_free("--set", request.changes, SETTLED)
    contents.require_free("[base]", suite.base, {**SETTLED, "data.name": ""})
    for name, tables in suite.variants.items():
        swept = {suite.sweep.key: "[sweep]"} if suite.sweep and suite.sweeps(name) else {}
        contents.require_free(f"[variants.{name!r}]", tables, SETTLED | swept)
    if suite.tuning:
        contents.require_other_seeds(suite.seeds, suite.tuning.seeds, "the step sizes")
    base = merged(suite.base, merged(request.changes, {"data": {"name": request.data}}))
    configs: dict[str, list[Config]] = {name: [] for name in suite.variants}
    cells, values = [], stored(request.name) if suite.tuning else NOTHING
    for name, x, setting in settings(suite, base, request.changes, values):
        config = contents.cell(merged(setting, {"data": contents.sizes_that_fit(setting)}))
        configs[name].append(config)
        cells.append(TrainingRun(name, x, config))
    for name, tables in suite.variants.items():
        contents.require_plain(name, "the variant")
        contents.require_read(f"[variants.{name!r}]", tables, configs[name])
    all_configs = [cell.config for cell in cells]
    contents.require_read("--set", request.changes, all_configs)
    contents.require_read("[base]", suite.base, all_configs)
    if suite.sweep:
        contents.require_read("[sweep]", suite.sweep.at(suite.sweep.values[0]), all_configs)
    if suite.tuning:
        suite.tuning.require_samples(all_configs)
    cells = [dataclasses.replace(cell, config=resolve(cell.config)) for cell in cells]
    if len({cell.name for cell in cells}) < len(cells):
        raise InputError(
            "Two runs share the name of a folder, because the names of their [variants] or the "
            "values of their [sweep] are too similar. Make the names or values more different."
        )
    return Training(request, "training", suite.title, cells, suite, values)


def settings(
    suite: Suite, base: Tables, changes: Tables, values: Stored = NOTHING
) -> Iterator[tuple[str, float | None, dict[str, Any]]]:
    """Yield, for every run, its variant, its value of the sweep, and its config tables.

    A variant's best value in `values` overrides the value in the suite's file.
    """
    for name, tables in suite.variants.items():
        for x, seed in itertools.product(suite.at(name), suite.seeds):
            swept = suite.sweep.at(x) if suite.sweep and x is not None else {}
            record = values.of(name, x) if suite.tuning else None
            best = (
                suite.tuning.tables(record["best"])
                if suite.tuning and record and record["best"]
                else {}
            )
            setting = merged(merged(merged(merged(base, tables), swept), best), changes)
            yield name, x, merged(setting, {"federation": {"seed": seed}})


def _settings(cell: TrainingRun) -> list[Any]:
    return [cell.name, cell.variant, contents.locked(cell.config)]


@dataclass(frozen=True)
class WorkOfRuns(Work):
    """A suite whose cells are runs, each in its own run folder."""

    cells: Sequence[TrainingRun]
    counted: ClassVar[str] = "rounds"

    @property
    def decisive(self) -> list[Any]:
        """The values that determine the results: kind, suite, scale, and every run's config."""
        return self._marked([_settings(cell) for cell in self.cells])

    def seal(self, cell: Cell) -> str:
        """Return a text that identifies the run.

        The text does not depend on the number of seeds.
        """
        assert isinstance(cell, TrainingRun)
        return files.digest(json.dumps(self._marked(_settings(cell))).encode())

    def _marked(self, settings: list[Any]) -> list[Any]:
        return [self.kind, self.request.stem, self.request.scale, "a seal a cell", settings]

    def joined(self, lock: bytes) -> bytes | None:
        """Return the lock of the larger suite if one suite contains all runs of the other."""
        *head, cells = self.decisive
        with contextlib.suppress(ValueError, TypeError):  # the lock is damaged
            *other_head, other_cells = json.loads(lock)
            texts, other_texts = (
                {json.dumps(cell) for cell in group} for group in (cells, other_cells)
            )
            if other_head == head and texts >= other_texts:
                return self.lock
            if other_head == head and texts <= other_texts:
                return lock
        return None

    def require_sound(self, cells: Sequence[Cell]) -> None:
        """Raise InputError if the run folder of a finished cell is damaged."""
        for cell in cells:
            if isinstance(cell, TrainingRun) and cell.folder and cell.folder.exists():
                try:
                    RunDirectory(cell.folder).require_sound(ended=True)
                except InputError as error:
                    message = re.split("[.:] ", str(error))[0]
                    raise InputError(
                        f"{message}: remove {cell.folder} and continue with --resume. The results "
                        "of this run stay in the suite's tables."
                    ) from None
                # A seal covers the config, but not user objects and sample files.
                source = read_source(cell.config)
                fingerprint = fingerprints.described(cell.config, cell.folder, source)
                fingerprints.require_same(cell.folder, fingerprint)


@dataclass(frozen=True)
class Training(WorkOfRuns):
    """A suite of kind `training`.

    `suite` is the checked content of its file. `values` are its tuned step sizes.
    """

    suite: Suite
    values: Stored

    @property
    def published(self) -> dict[str, dict[str, float]]:
        """The published numbers for this data set, by variant."""
        published = self.suite.published
        return published.get(self.request.data) or published.get(
            PUBLISHED_FOR.get(self.request.data, ""), {}
        )

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """Return the rows of curves.csv, runs.csv and summary.csv.

        A variant that does not depend on the sweep gets the same rows for every value of the sweep.
        In a suite without a sweep, the tables contain nan as the value of the sweep.
        """
        placed = [
            record | {"head": record["head"] | {"x": x}}
            for x in (self.suite.sweep.values if self.suite.sweep else [math.nan])
            for record in records
            if record["head"]["x"] in (x, None)
        ]
        # all measured names, in order; some runs may lack a name
        rows = [*(row for record in placed for row in record["rows"]), *self.published.values()]
        names = [name for name in dict.fromkeys(itertools.chain(MEASURES, *rows))
                 if name not in ("round", "train_seconds")]  # fmt: skip
        unknown = dict.fromkeys(("round", "train_seconds", *names), math.nan)
        curves = [record["head"] | unknown | row for record in placed for row in record["rows"]]
        ends = [
            record["head"]
            | {"run": record["run"]}
            | unknown
            | record["rows"][-1]
            | {"note": record["note"]}
            for record in placed
        ]
        tables = {"curves": curves, "runs": ends, "summary": self._means(ends, names)}
        return spending.with_privacy_columns(tables, [record["head"] for record in placed], placed)

    def _means(self, ends: list[Record], names: list[str]) -> list[Record]:
        """Return rows with means over seeds, standard deviations, and the published numbers."""
        rows = []
        # compare as text, because nan is not equal to itself
        for _, group in itertools.groupby(ends, lambda row: (row["variant"], str(row["x"]))):
            runs = list(group)
            head = {name: runs[0][name] for name in ("variant", "x")}
            mean = {"source": "measured", "runs": len(runs),
                    "diverged": sum(bool(row["note"]) for row in runs)}  # fmt: skip
            for name in ("train_seconds", *names):
                values = np.array([row[name] for row in runs])
                deviation = values.std(ddof=1) if len(values) > 1 else math.nan
                mean |= {name: float(values.mean()), f"{name}_sd": float(deviation)}
            rows.append(head | mean)
            published = self.published.get(head["variant"])
            if published is not None and math.isnan(head["x"]):
                rows.append(
                    head | dict.fromkeys(mean, "") | {"source": self.suite.source} | published
                )
        return rows

    def summary(self, records: list[Record]) -> Record:
        """Return the entries of suite.json that the report needs for verdicts and figures.

        `times` includes the published values for this data set.
        """
        source, suite, config = self.request.data, self.suite, self.cells[0].config
        if source not in suite.published:
            source = PUBLISHED_FOR.get(source, source)
        times = suite.times and suite.times.model_dump()
        if times:
            times |= {"published": times["published"].get(source)}
        return {
            "note": suite.note,
            "runs": len(records),
            "variants": list(suite.variants),
            "sweep": suite.sweep and suite.sweep.model_dump(),
            "times": times,
            "claims": [
                {**claim.model_dump(), "also": suite.also} for claim in suite.claims.values()
            ],
            "published": self.published,
            "source": f"{suite.source} ({source})",
            "tuning": self.tuning(),
            "machine": {"device": config.engine.device},
            **contents.guess(read_source(config), config),
        }

    def tuning(self) -> Record | None:
        """Return the tuning of each variant for suite.json, and whether it fits these settings."""
        if (table := self.suite.tuning) is None:
            return None
        first = self.suite.seeds[0]
        cells = [cell for cell in self.cells if cell.config.federation.seed == first]
        methods = [
            {**record, "x": cell.x, "fits": self._fits(table, cell, record, cells)}
            for cell in cells
            if (record := self.values.of(cell.variant, cell.x))
        ]
        shared = {
            name: self.values.about.get(name) for name in ("key", "measure", "seeds", "again")
        }
        return {"stated": table.stated, "at": table.at, "methods": methods, **shared}

    @staticmethod
    def _fits(
        table: Tuning, cell: TrainingRun, record: Record, cells: Sequence[TrainingRun]
    ) -> bool:
        """Return whether a cell uses the best value of a tuning for the same settings."""
        name, _, key = table.key.partition(".")
        value = cell.config.model_dump(by_alias=True)[name][key]
        tuned = [
            other for other in cells if (other.variant, other.x) == (cell.variant, record["x"])
        ]
        same = any(table.digest(other.config) == record["settings"] for other in tuned)
        return same and value == record["best"]


STUDY = RunStudy("training", work, findings)
