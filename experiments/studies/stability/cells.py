"""Kind `stability`: a published grid of runs, each beside its neighbours and its bound."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch

from fedmuon.config.load import Config
from fedmuon.core.tables import validate
from fedmuon.experiments.studies.stability import grid
from fedmuon.experiments.studies.stability.grid import Published
from fedmuon.experiments.studies.stability.stack import Stack
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import PUBLISHED_FOR, Asked, cell, merged
from fedmuon.experiments.suites.suite import Rows, Work
from fedmuon.federated import build
from fedmuon.runs.directory import Record
from fedmuon.tasks.matrix_kernels import rate, supported

SIDE = 2048  # of the matrices whose product is timed
COMPARED = (
    "Published values are of {}, these of {} ({} scale): compare signs, orders and trends, not "
    "digits. The paper prints neither its C_hp nor its start."
)


def work(content: dict[str, Any], asked: Asked) -> "Stability":
    """The suite as stacks of runs that share samples and schedule."""
    suite = validate(grid.Suite, content)
    named = {"data": {"name": asked.data}}
    read = merged(merged(suite.base, asked.changes), named)
    source = build.source(cell({"data": read["data"]})) if asked.data != "synthetic" else None
    suite = suite.model_copy(update={"base": merged(suite.base, named)})
    stacks = grid.stacks(suite, source, asked.changes)
    return Stability(asked, "stability", suite.title, stacks, suite.published)


@dataclass(frozen=True)
class Stability(Work):
    """A grid as stacks; `lines` are those of 001, Table 2, by data set."""

    cells: Sequence[Stack]
    lines: Mapping[str, Published]
    place: ClassVar[str] = "stacks"
    counted: ClassVar[str] = "trajectories"

    @property
    def decisive(self) -> list[Any]:
        """Suite, scale, and what every stack is computed from."""
        settings = [
            [one.name, one.pairs, one.trials, one.config.model_dump(by_alias=True)]
            for one in self.cells
        ]
        return [self.asked.stem, self.asked.scale, settings]

    @property
    def configs(self) -> Sequence[Config]:
        """One a run: a stack has one for each pair (eta, lambda)."""
        return [one.at(pair) for one in self.cells for pair in one.pairs]

    @property
    def published(self) -> Published | None:
        """The line of 001, Table 2 to put beside this."""
        return self.lines.get(PUBLISHED_FOR.get(self.asked.data, ""))

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """runs.csv, neighbours.csv and summary.csv."""
        head = {"suite": self.asked.stem, "data": self.asked.data}
        lines = [head | {"source": "measured"} | _aggregate(records)]
        if self.published:
            lines.append(head | {"source": "001, Table 2"} | self.published.model_dump())
        return {
            "runs": [head | run for record in records for run in record["runs"]],
            "neighbours": [head | line for record in records for line in record["neighbours"]],
            "summary": lines,
        }

    def summary(self, records: list[Record]) -> Record:
        """What was done, how fast, and what it stands on."""
        data, scale = self.asked.data, self.asked.scale
        config, source = build.resolve(self.cells[0].config), PUBLISHED_FOR.get(data, "")
        seconds = sum(record["seconds"] for record in records)
        count = sum(one.size for one in self.cells)
        flop = sum(record["flop"] for record in records)
        status = set(chain(*(record["status"] for record in records)))
        return {
            "trajectories": count,
            "trajectories_per_second": count / seconds,
            "share_of_gemm": flop / seconds / best_rate(config),
            "measured": _aggregate(records),
            "published": self.published and {"data": source} | self.published.model_dump(),
            "note": COMPARED.format(source, data, scale) if self.published else "",
            "constant": config.stability.lipschitz,
            "delta": config.stability.delta,
            "machine": {"device": config.engine.device},
            **contents.guess(build.source(config), config),
            "status": status.pop() if len(status) == 1 else "mixed",
            "assumptions": _once(record["assumes"] for record in records),
            "gap_notes": _once(record.get("gap_notes", []) for record in records),
            "gap_changes": _once(record.get("gap_changes", []) for record in records),
            "gap_then": _once(record.get("gap_then", []) for record in records),
        }


def _once(lists: Iterable[list[str]]) -> list[str]:
    """All of them in their order, each once."""
    return list(dict.fromkeys(chain(*lists)))


def _aggregate(records: list[Record]) -> Record:
    """The columns of 001, Table 2 over all runs; its gap is test minus weighted train loss."""
    runs = [run for record in records for run in record["runs"]]
    columns = {"gap_within_bound": "within", "mean_gap": "table_gap", "mean_bound": "bound",
               "mean_perturbation": "mean_perturbation"}  # fmt: skip
    means = {name: float(np.mean([run[of] for run in runs])) for name, of in columns.items()}
    return {"runs": len(runs), **means}


def best_rate(config: Config) -> float:
    """Flop per second of this machine's best large product, in the precision of the runs."""
    dtype, device = build.DTYPES[config.engine.dtype], torch.device(config.engine.device)
    return max(rate(name, SIDE, SIDE, SIDE, dtype, device) for name in supported(dtype, device))
