"""Numerical studies: suites of other things than runs.

The module `cells` of one has `Settings`, the table of what its TOML file holds beside `kind`,
`title` and `data`, and `cells(settings, asked)`. Each cell's record holds `rows`, or other lists,
which all together become rows.csv. It may have `summary(records)`, for suite.json.

The module `findings` has `claims` (an effect with its interval beside a rule, each: `Claim` of
`fedmuon.analysis.report.verdicts`, or `counted`) and `numbers`, which are given the columns of
rows.csv, and STANDS_ON; `figure` has PICTURES, whose functions are given the same. See
`findings.assemble`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table, validate
from fedmuon.experiments.suites.contents import Asked, merged
from fedmuon.experiments.suites.suite import Rows, Work
from fedmuon.runs.directory import Record


@dataclass(frozen=True)
class Call:
    """The plainest cell: a function that has all that it needs."""

    name: str
    compute: Callable[[], Record]
    size: int = 1


@dataclass(frozen=True)
class Study(Work):
    """A study as cells, which are those of its module."""

    module: Any
    settings: Table
    note: str

    @classmethod
    def of(cls, kind: str, module: Any, content: dict[str, Any], asked: Asked) -> "Study":
        """The study with these settings; config tables to change are those below its `base`."""
        title, note = content.pop("title", kind), content.pop("note", "")
        if asked.changes:
            if "base" not in module.Settings.model_fields:
                raise InputError(f"the suite {asked.stem} has no config to change: leave --set out")
            content = merged(content, {"base": asked.changes})
        settings = validate(module.Settings, content)
        return cls(asked, kind, title, module.cells(settings, asked), module, settings, note)

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
        """The settings, and what the module adds."""
        more = getattr(self.module, "summary", lambda records: {})
        settings = self.settings.model_dump(by_alias=True)
        return {"note": self.note, "settings": settings} | more(records)
