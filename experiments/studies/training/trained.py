"""A cell of kind `training`: one run in a directory of its own."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.experiments import spending
from fedmuon.experiments.run import execute
from fedmuon.runs.directory import Record, RunDirectory

NOT_MEASURED = ("round", "seconds", "train_seconds", "client_loss")
MEASURES = ("train_loss", "test_loss", "test_gap", "accuracy")


@dataclass(frozen=True)
class Trained:
    """One run: a variant at a value of the sweep, with a seed."""

    variant: str
    x: float | None
    config: Config
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The run directory's name."""
        at = "" if self.x is None else f"-{self.x:g}"
        return f"{slug(self.variant)}{at}-seed{self.config.federation.seed}"

    @property
    def size(self) -> int:
        """Rounds."""
        return self.config.federation.rounds

    def compute(self) -> Record:
        """The run, made or gone on with; its evaluated rounds, and what stopped it if it diverged.

        A run that diverged has no summary, and ends with a row of nan.
        """
        assert self.folder is not None
        if why := RunDirectory(self.folder).lost():
            raise InputError(
                f"{self.folder} {why}: remove it, which leaves what it released out of every "
                "account, and go on with --resume"
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
        found: Record = {"head": head, "run": self.name, "rows": rows, "note": note}
        found |= spending.privacy_record(self.config, last)
        return found | ({"seconds": records[-1]["seconds"]} if records else {})


def slug(name: str) -> str:
    """A variant as part of a file's name: FedAvg, E = 1 is fedavg-e-1."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _measured(record: Record) -> Record:
    """Round, seconds of training, and every number that the run tells of that round."""
    head = {name: record[name] for name in ("round", "train_seconds")}
    return head | {
        name: value
        for name, value in record.items()
        if name not in NOT_MEASURED and isinstance(value, int | float)
    }
