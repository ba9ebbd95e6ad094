"""Kind `training`: variants of a run over seeds, perhaps along a swept key, as real runs.

Every cell is a run directory below runs/, which resumes and replays like any other.
"""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.experiments import spending
from fedmuon.experiments.studies.training.trained import MEASURES, Trained
from fedmuon.experiments.studies.training.variants import Suite, Sweep, suite_of
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import PUBLISHED_FOR, Asked, Tables, merged
from fedmuon.experiments.suites.suite import Cell, Rows, Work
from fedmuon.federated import build
from fedmuon.runs.directory import Record, RunDirectory

SETTLED = {"federation.seed": "seeds", "data.name": "--data"}


def work(content: dict[str, Any], asked: Asked) -> "Training":
    """The suite as runs."""
    suite = suite_of(content)
    if len(set(suite.seeds)) < len(suite.seeds):
        raise InputError(f"seeds = {suite.seeds} names one twice: name each once")
    cells = _cells(suite, asked)
    if len({one.name for one in cells}) < len(cells):
        raise InputError("two [variants] or [sweep] values share a name: make their names differ")
    return Training(asked, "training", suite.title, cells, suite)


def _cells(suite: Suite, asked: Asked) -> list[Trained]:
    """Every variant at every value with every seed; sizes are cut to what the source holds."""
    contents.require_free("--set", asked.changes, SETTLED)
    contents.require_free("[base]", suite.base, {**SETTLED, "data.name": ""})
    for name, own in suite.variants.items():
        swept = {suite.sweep.key: "[sweep]"} if suite.sweep and suite.sweeps(name) else {}
        contents.require_free(f"[variants.{name!r}]", own, SETTLED | swept)
    base = merged(suite.base, merged(asked.changes, {"data": {"name": asked.data}}))
    cells = [
        Trained(name, x, contents.cell(merged(setting, {"data": _sizes(setting)})))
        for name, x, setting in settings(suite, base, asked.changes)
    ]
    _require_read(suite, asked, cells)
    return [dataclasses.replace(one, config=build.resolve(one.config)) for one in cells]


def _require_read(suite: Suite, asked: Asked, cells: Sequence[Trained]) -> None:
    """Refuse what a variant, the sweep or the command line asks for in vain."""
    for name, own in suite.variants.items():
        contents.require_plain(name, "the variant")
        configs = [one.config for one in cells if one.variant == name]
        contents.require_read(f"[variants.{name!r}]", own, configs)
    every = [one.config for one in cells]
    contents.require_read("--set", asked.changes, every)
    contents.require_read("[base]", suite.base, every)
    if suite.sweep:
        contents.require_read("[sweep]", suite.sweep.at(suite.sweep.values[0]), every)


def settings(
    suite: Suite, base: Tables, changes: Tables
) -> Iterator[tuple[str, float | None, dict[str, Any]]]:
    """Variant, value of the sweep and config tables of every run, over those of `base`."""
    for name, own in suite.variants.items():
        values = suite.sweep.values if suite.sweep and suite.sweeps(name) else [None]
        for x, seed in itertools.product(values, suite.seeds):
            swept = suite.sweep.at(x) if suite.sweep and x is not None else {}
            setting = merged(merged(merged(base, own), swept), changes)
            yield name, x, merged(setting, {"federation": {"seed": seed}})


def _settings(cell: Trained) -> list[Any]:
    return [cell.name, cell.variant, cell.config.model_dump(by_alias=True)]


def _sizes(setting: Tables) -> dict[str, int]:
    """What a run trains on and holds out of its own data: a text has fewer windows if they are
    longer."""
    data = setting["data"]
    if data["name"] == "synthetic":
        return {}
    # text is read by a decoder alone
    read = contents.cell({"data": data, "task": setting.get("task", {})})
    held, most = contents.room(build.source(read), data.get("test", contents.TEST))
    return {"train": min(int(data.get("train", most)), most), "test": held}


@dataclass(frozen=True)
class Training(Work):
    """Runs of variants; `suite` is the file's content."""

    cells: Sequence[Trained]
    suite: Suite
    counted: ClassVar[str] = "rounds"

    @property
    def decisive(self) -> list[Any]:
        """Kind, suite, scale, and every run's config."""
        return [*self._named, [_settings(one) for one in self.cells]]

    @property
    def _named(self) -> list[str]:
        return [self.kind, self.asked.stem, self.asked.scale, "a seal a cell"]

    def seal(self, cell: Cell) -> str:
        """Of the cell alone: with more seeds it is the same."""
        assert isinstance(cell, Trained)
        return files.digest(json.dumps([*self._named, _settings(cell)]).encode())

    def joined(self, lock: bytes) -> bytes | None:
        """Also that of more or fewer runs, as of other seeds: the one that names more."""
        with contextlib.suppress(ValueError, TypeError):  # damaged
            *named, cells = json.loads(lock)
            mine, theirs = ({json.dumps(one) for one in every}
                            for every in (map(_settings, self.cells), cells))  # fmt: skip
            if named == self._named and mine >= theirs:
                return self.lock
            if named == self._named and mine <= theirs:
                return lock
        return None

    def require_sound(self, cells: Sequence[Cell]) -> None:
        """Their run directories, where they were kept."""
        for one in cells:
            if isinstance(one, Trained) and one.folder and one.folder.exists():
                try:
                    RunDirectory(one.folder).require_sound(ended=True)
                except InputError as error:
                    what, _, _ = str(error).partition(": ")
                    raise InputError(
                        f"{what}: remove {one.folder}, whose rows are kept, and go on with --resume"
                    ) from None

    @property
    def published(self) -> dict[str, dict[str, float]]:
        """Numbers to put beside these, by variant."""
        held = self.suite.published
        return held.get(self.asked.data) or held.get(PUBLISHED_FOR.get(self.asked.data, ""), {})

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """curves.csv, runs.csv and summary.csv."""
        records = list(_everywhere(records, self.suite.sweep))
        names = _measures([*records, {"rows": list(self.published.values())}])
        unknown = dict.fromkeys(("round", "train_seconds", *names), math.nan)
        curves = [one["head"] | unknown | row for one in records for row in one["rows"]]
        ends = [
            one["head"] | {"run": one["run"]} | unknown | one["rows"][-1] | {"note": one["note"]}
            for one in records
        ]
        found = {"curves": curves, "runs": ends, "summary": self._beside(ends, names)}
        return spending.with_privacy_columns(found, [one["head"] for one in records], records)

    def _beside(self, ends: list[Record], names: list[str]) -> list[Record]:
        """Means over seeds with their standard deviations, and the published numbers."""
        rows = []
        # as text: a nan is not equal to itself
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
            if head["variant"] in self.published and math.isnan(head["x"]):
                empty = dict.fromkeys(mean, "")
                rows.append(
                    head | empty | {"source": self.suite.source} | self.published[head["variant"]]
                )
        return rows

    def summary(self, records: list[Record]) -> Record:
        """What the report needs to judge and draw; `times` with what is published of these data."""
        source, suite, config = self.asked.data, self.suite, self.cells[0].config
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
            "claims": [{**one.model_dump(), "also": suite.also} for one in suite.claims.values()],
            "published": self.published,
            "source": f"{suite.source} ({source})",
            "machine": {"device": config.engine.device},
            **contents.guess(build.source(config), config),
        }


def _everywhere(records: list[Record], sweep: Sweep | None) -> Iterator[Record]:
    """The records; variants that are not swept stand at every value, or at nan without a sweep."""
    for x in sweep.values if sweep else [math.nan]:
        for one in records:
            if one["head"]["x"] in (x, None):
                yield one | {"head": one["head"] | {"x": x}}


def _measures(records: list[Record]) -> list[str]:
    """All measured names, in order; a run may lack one that others have."""
    rows = (row for record in records for row in record["rows"])
    names = dict.fromkeys(itertools.chain(MEASURES, *rows))
    return [name for name in names if name not in ("round", "train_seconds")]
