"""`fedmuon suite`: a published grid of runs, each beside its neighbours and its bound.

Every finished stack is one file below `stacks/`, so a suite can be resumed, and its stacks can be
computed anywhere; the tables are made from those files alone.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import grid
from experiments.grid import PUBLISHED_FOR, Published, Stack, Suite
from experiments.stack import compute
from fedmuon import config as tables
from fedmuon.errors import InputError
from fedmuon.federated import setup
from fedmuon.gemm import rate, supported
from fedmuon.run import Begin, Watch, versions
from fedmuon.storage import Record, mendable, write_bytes

Compute = Callable[[Sequence[Stack]], Iterable[tuple[Stack, Record]]]
COMPARED = (
    "Published values are of {}, these of {} ({} scale): compare signs, orders and trends, not "
    "digits. The paper prints neither its C_hp nor its start."
)


@dataclass(frozen=True)
class Work:
    """A suite on a data set at a scale, as stacks."""

    name: str
    data: str
    scale: str
    suite: Suite
    stacks: list[Stack]

    @classmethod
    def of(cls, name: str, data: str, scale: str, changes: Mapping[str, Any]) -> "Work":
        """What the command line asks for; `changes` are config tables."""
        suite = grid.load(name, data, scale)
        changes = grid.merged(changes, {"data": {"name": data}})
        source = None if data == "synthetic" else setup.source(tables.parse(changes))
        return cls(Path(name).stem, data, scale, suite, grid.stacks(suite, source, changes))

    @property
    def lock(self) -> bytes:
        """Everything that decides the results."""
        settings = [
            [one.name, one.pairs, one.trials, one.config.model_dump(by_alias=True)]
            for one in self.stacks
        ]
        return (json.dumps([self.name, self.scale, settings], indent=1) + "\n").encode()

    @property
    def published(self) -> Published | None:
        """The line of 001, Table 2 to put beside this."""
        return self.suite.published.get(PUBLISHED_FOR.get(self.data, ""))


def here(stacks: Sequence[Stack]) -> Iterator[tuple[Stack, Record]]:
    """Compute stacks one after the other in this process."""
    for one in stacks:
        yield one, compute(one)


def execute(
    work: Work,
    out: Path,
    resume: bool = False,
    by: Compute = here,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
) -> Record:
    """Compute the stacks that `out` lacks, and write the tables; returns suite.json's content."""
    files = _open(work, out, resume)
    done = {one: _read(file) for one, file in files.items() if file.exists()}
    count = sum(one.trajectories for one in done)
    begun(count, sum(one.trajectories for one in work.stacks))
    for one, record in by([one for one in work.stacks if one not in done]):
        write_bytes(files[one], json.dumps(record).encode())
        done[one], count = record, count + one.trajectories
        watch({"done": count, "stack": one.name})
    return _write_tables(work, out, [done[one] for one in work.stacks])


def _open(work: Work, out: Path, resume: bool) -> dict[Stack, Path]:
    """The file of every stack, in a folder that is new, or that holds this very suite."""
    lock = out / "suite.lock"
    with mendable(out, "create"):
        out.mkdir(parents=True, exist_ok=True)
        held = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith("."))
        if held and not (resume and lock.exists()):
            raise InputError(f"{out} is not empty: choose another folder with --out, or --resume")
        if held and lock.read_bytes() != work.lock:
            raise InputError(f"{out} holds another suite, data or scale: choose another --out")
        (out / "stacks").mkdir(exist_ok=True)
    write_bytes(lock, work.lock)
    return {one: out / "stacks" / f"{one.name}.json" for one in work.stacks}


def _read(file: Path) -> Record:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{file} is damaged: remove it and go on with --resume") from None


def _write_tables(work: Work, out: Path, records: list[Record]) -> Record:
    """runs.csv, neighbours.csv, summary.csv and suite.json from the stacks' records."""
    head = {"suite": work.name, "data": work.data}
    runs = [head | run for record in records for run in record["runs"]]
    measured, published = _aggregate(runs), work.published
    beside = [head | {"source": "measured"} | measured]
    if published:
        beside.append(head | {"source": "001, Table 2"} | published.model_dump())
    lines = [head | line for record in records for line in record["neighbours"]]
    for name, rows in (("runs", runs), ("neighbours", lines), ("summary", beside)):
        write_bytes(out / f"{name}.csv", csv_bytes(rows))
    summary = head | _summary(work, records, measured)
    write_bytes(out / "suite.json", (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def _summary(work: Work, records: list[Record], measured: Record) -> Record:
    """What was done, how fast, and what it stands on."""
    config, source = setup.resolve(work.stacks[0].config), PUBLISHED_FOR.get(work.data, "")
    published = work.published and {"data": source} | work.published.model_dump()
    seconds = sum(record["seconds"] for record in records)
    count = sum(one.trajectories for one in work.stacks)
    return {
        "title": work.suite.title,
        "scale": work.scale,
        "trajectories": count,
        "seconds": seconds,
        "trajectories_per_second": count / seconds,
        "share_of_gemm": sum(record["flop"] for record in records) / seconds / best_rate(config),
        "measured": measured,
        "published": published,
        "compared_with": COMPARED.format(source, work.data, work.scale) if published else "",
        "kind": config.stability.kind,
        "delta": config.stability.delta,
        "status": _agreed(status for record in records for status in record["status"]),
        "assumptions": list(dict.fromkeys(one for record in records for one in record["assumes"])),
        "machine": {"cores": os.cpu_count(), "device": config.engine.device},
        "versions": versions(),
    }


def _agreed(values: Iterable[str]) -> str:
    """The value that all share, or `mixed`."""
    found = set(values)
    return found.pop() if len(found) == 1 else "mixed"


def _aggregate(runs: list[Record]) -> Record:
    """The columns of 001, Table 2 over all runs; its gap is test minus weighted train loss."""
    means = {
        name: float(np.mean([run[column] for run in runs]))
        for name, column in (
            ("gap_within_bound", "within"),
            ("mean_gap", "table_gap"),
            ("mean_bound", "bound"),
            ("mean_perturbation", "mean_perturbation"),
        )
    }
    return {"runs": len(runs), **means}


def csv_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows of equal keys as CSV; floats are written so that they read back exactly."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue().encode()


def best_rate(config: tables.Config) -> float:
    """Flop per second of this machine's best large product, in the precision of the runs."""
    dtype, device = setup.DTYPES[config.engine.dtype], torch.device(config.engine.device)
    return max(rate(name, 2048, 2048, 2048, dtype, device) for name in supported(dtype, device))
