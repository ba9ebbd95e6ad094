"""Numerical studies: suites of other things than runs.

The module `cells` of one has `Settings`, the table of what its TOML file holds beside `kind`,
`title` and `data`, and `cells(settings, asked)`. Each cell's record holds `rows`, which all
together become rows.csv. Of its own accord it may have `tables(records)`, which names others, and
`summary(records)`, for suite.json. `findings` judges and draws.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedmuon.errors import InputError
from fedmuon.experiments.suites.contents import Asked, merged
from fedmuon.experiments.suites.suite import Cell, Rows, Work
from fedmuon.storage import Record
from fedmuon.tables import Table, validate


class Module(Protocol):
    """A study."""

    Settings: type[Table]

    def cells(self, settings: Any, asked: Asked) -> Sequence[Cell]:
        """The work, from the settings as they are for this data and scale."""
        ...


@dataclass(frozen=True)
class Call:
    """The plainest cell: a module's function and what it is given, which decides the result."""

    name: str
    function: Callable[..., Record]
    given: Mapping[str, Any]
    size: int = 1

    def compute(self) -> Record:
        """Call it."""
        return self.function(**self.given)


@dataclass(frozen=True)
class Study(Work):
    """A study as cells."""

    module: Module
    settings: Table
    note: str

    @classmethod
    def of(cls, kind: str, module: Module, content: dict[str, Any], asked: Asked) -> "Study":
        """The study with these settings; config tables to change are those below its `base`."""
        title, note = content.pop("title", kind), content.pop("note", "")
        if asked.changes:
            if "base" not in module.Settings.model_fields:
                raise InputError(f"the suite {asked.stem} has no config to change: leave --set out")
            content = merged(content, {"base": asked.changes})
        settings = validate(module.Settings, content)
        return cls(asked, kind, title, module.cells(settings, asked), module, settings, note)

    def within(self, out: Path) -> Sequence[Cell]:
        """The cells; those that are dataclasses with a `folder` get one of their own in `out`."""
        return [
            replace(one, folder=out.absolute() / "runs" / one.name)  # pyright: ignore
            if hasattr(one, "folder")
            else one
            for one in self.cells
        ]

    @property
    def lock(self) -> bytes:
        """The settings, and the cells that they come to."""
        asked, settings = self.asked, self.settings.model_dump(by_alias=True)
        cells = [one.name for one in self.cells]
        held = [asked.stem, self.kind, asked.data, asked.scale, settings, cells]
        return (json.dumps(held, indent=1) + "\n").encode()

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """What the module makes of the records, or all their rows."""
        made = getattr(self.module, "tables", None)
        return made(records) if made else {"rows": [row for one in records for row in one["rows"]]}

    def summary(self, records: list[Record]) -> Record:
        """The settings, and what the module adds."""
        more = getattr(self.module, "summary", lambda records: {})
        settings = self.settings.model_dump(by_alias=True)
        return {"note": self.note, "settings": settings} | more(records)
