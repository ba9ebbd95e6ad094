"""Tuned step sizes of a suite of kind `training`: its table `[tuning]` and the stored result.

`fedmuon tune SUITE` writes the result to `tuned/SUITE.json` beside the suite's file. The suite then
uses each variant's best value. The file contains a digest of the settings of every tuned variant.
If a setting differs, the suite's comparisons are inconclusive.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedmuon.analysis.report.tuning import Tuned
from fedmuon.config.load import Config
from fedmuon.config.schema import Natural, Positive
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Nested

Key = Annotated[str, Field(pattern=r"^[a-z-]+\.[a-z-]+$")]
FEWEST = 3  # values of a grid: with fewer, no value can be inside
SHORTEST_REASON = 3  # words


class Tuning(Table):
    """How the step sizes of the variants are tuned.

    Either `stated` is a reason why they are not tuned, which is added to every verdict, or `grids`
    has the first values of every variant. All grids have the same number of values.
    """

    stated: str = ""
    key: Key = "local.lr"
    # keys that are set to a multiple of the tuned value, such as {"local.aux-lr" = 0.25}
    shares: dict[Key, Positive] = Field(default_factory=dict)
    seeds: list[Natural] = Field(default_factory=lambda: [100])
    # with a measure on validation samples, the samples that test the variants do not choose values
    measure: Literal[
        "test_loss", "train_loss", "accuracy", "validation_loss", "validation_accuracy"
    ] = "test_loss"
    at: Literal["each"] | float | int = "each"  # the value of the sweep at which variants are tuned
    grids: dict[str, list[Positive]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "Tuning":
        if bool(self.stated) == bool(self.grids):
            raise ValueError("set either grids or stated")
        if self.stated and len(self.stated.split()) < SHORTEST_REASON:
            raise ValueError("stated must be a sentence with the reason why nothing is tuned")
        sizes = {len(set(values)) for values in self.grids.values()}
        if len(sizes) > 1 or min(sizes, default=FEWEST) < FEWEST:
            raise ValueError(
                f"every grid needs the same number of different values, and at least {FEWEST}"
            )
        if not self.seeds:
            raise ValueError("seeds is empty: set at least one seed")
        return self

    def tables(self, value: float) -> Nested:
        """Return the config tables that set the tuned key, and the keys that follow it."""
        tables: dict[str, dict[str, Any]] = {}
        shares = {self.key: 1.0, **self.shares}
        for name, share in shares.items():
            table, _, key = name.partition(".")
            tables.setdefault(table, {})[key] = float(f"{share * value:.12g}")
        return tables  # pyright: ignore[reportReturnType]

    def require_samples(self, configs: Iterable[Config]) -> None:
        """Raise InputError if `measure` needs validation samples that a config does not have."""
        if self.measure.startswith("validation_") and not all(c.data.validation for c in configs):
            raise InputError(
                f"[tuning] measure = '{self.measure}' needs validation samples, but "
                "data.validation is 0. Set validation in [base.data], for example to 1000."
            )

    def digest(self, config: Config) -> str:
        """Return a text that identifies all settings that matter, except tuned values and seeds."""
        tables = contents.locked(config)
        for name in ("output", "engine"):
            tables.pop(name, None)
        for name in ("federation.seed", self.key, *self.shares):
            table, _, key = name.partition(".")
            tables.get(table, {}).pop(key, None)
        return files.digest(json.dumps(tables, sort_keys=True).encode())[:16]


@dataclass(frozen=True)
class Stored:
    """The content of tuned/SUITE.json: a record for every variant and value of the sweep."""

    methods: Sequence[Mapping[str, Any]] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, variant: str, x: float | None) -> Mapping[str, Any] | None:
        """Return the record of a variant at a value of the sweep.

        A variant that was tuned at a single value has the same record at all values.
        """
        records = [record for record in self.methods if record["method"] == variant]
        exact = [record for record in records if record["x"] == x]
        alone = records if len(records) == 1 else []
        return next(iter(exact or alone), None)


NOTHING = Stored()  # the values of a suite that was not tuned


def place(name: str) -> Path:
    """Return the path of the tuned values of a suite. `name` is a suite's name or a path."""
    file = contents.file_of(name)
    stem = file.stem.replace("_", "-") if name in contents.shipped() else file.stem
    return file.parent / "tuned" / f"{stem}.json"


def stored(name: str) -> Stored:
    """Return the tuned values of a suite. They are empty if the suite was not tuned.

    Raises:
        InputError: If the file is damaged.
    """
    if not (file := place(name)).exists():
        return NOTHING
    try:
        content = json.loads(files.read_text(file))
        methods = content.pop("methods")
        for method in methods:
            Tuned.of(method, content)
            float(method["best"] or math.nan), method["x"], str(method["settings"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} is damaged ({error}). Remove the file, and run fedmuon tune {name}."
        ) from None
    return Stored(methods, content)
