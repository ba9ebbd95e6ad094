"""`fedmuon suite`: compute the cells of a suite, and make tables of their results.

A cell is an independent part of a suite, such as one run. Every finished cell is stored in its own
file, so a suite can be resumed. Cells can be computed in this process, in worker processes or as
Ray tasks. The tables are computed from these files alone. The `kind` of the suite determines its
cells (see `find`).
"""

import csv
import io
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from fedmuon.config.describe import SYMBOLS
from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.core.locks import held, require_place
from fedmuon.core.tables import Scalar
from fedmuon.experiments.engines.ray_cluster import connected, shared_ray
from fedmuon.experiments.suites.contents import SuiteRequest, merged
from fedmuon.federated.client_data import one_copy
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import OnRoundEnd, OnStart
from fedmuon.runs.provenance import machine, versions

Rows = Sequence[Mapping[str, Any]]


class Cell(Protocol):
    """An independent part of a suite.

    A cell can be pickled. Its result does not depend on the process that computes it.
    """

    @property
    def name(self) -> str:
        """The unique name of the cell and of its file."""

    @property
    def size(self) -> int:
        """The weight of the cell in the progress bar."""

    def compute(self) -> Record:
        """Return the results as JSON values."""


Compute = Callable[[Sequence[Cell]], Iterable[tuple[Cell, Record]]]


@dataclass(frozen=True)
class Work(ABC):
    """The cells of a suite, for one data set and one scale."""

    request: SuiteRequest
    kind: str
    title: str
    cells: Sequence[Cell]
    place: ClassVar[str] = "cells"  # folder of the cells' files
    counted: ClassVar[str] = "cells"  # unit of the cells' sizes
    noun: ClassVar[str] = "suite"  # the summary is NOUN.json

    @property
    @abstractmethod
    def decisive(self) -> list[Any]:
        """Everything that determines the results, as JSON values."""

    @property
    def configs(self) -> Sequence[Config]:
        """The configs of the runs, if the cells are runs."""
        return [cell.config for cell in self.cells if hasattr(cell, "config")]  # pyright: ignore

    @property
    def lock(self) -> bytes:
        """The bytes of `decisive`.

        A suite's folder stores the lock, so that no other suite continues in the folder.
        """
        return (json.dumps(self.decisive, indent=1) + "\n").encode()

    def seal(self, cell: Cell) -> str:
        """Return a text that identifies both the cell and its suite.

        The cell's file contains this text.
        """
        return f"{files.digest(self.lock)} {cell.name}"

    def joined(self, lock: bytes) -> bytes | None:
        """Return the lock to write if this suite may continue in a folder, or None if it may not.

        Args:
            lock: The lock that is stored in the folder.
        """
        return lock if lock == self.lock else None

    @property
    def called(self) -> str:
        """Return the word for this suite in messages."""
        return self.noun

    @property
    def mismatch(self) -> str:
        """The end of the error message for a folder whose lock does not match."""
        return (
            f"does not match this {self.noun}. The data, scale, settings, seeds or version may "
            "differ, or the file may be damaged. Choose another folder with --out."
        )

    @abstractmethod
    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """Return the tables of the suite.

        The result maps each NAME to the rows of NAME.csv. `records` are in the order of the cells.
        """

    @abstractmethod
    def summary(self, records: list[Record]) -> Record:
        """Return the content of suite.json that is specific to this kind."""

    def within(self, out: Path) -> Sequence[Cell]:
        """Return the cells for an output folder.

        Each cell with an attribute `folder` gets its own folder in `out`.
        """
        runs = out.absolute() / "runs"
        return [
            replace(cell, folder=runs / cell.name) if hasattr(cell, "folder") else cell  # pyright: ignore
            for cell in self.cells
        ]

    def require_sound(self, cells: Sequence[Cell]) -> None:
        """Raise InputError if a finished cell has a damaged file other than its record."""
        return


def here(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
    """Compute cells one after the other in this process."""
    for cell in cells:
        yield cell, timed(cell)


def timed(cell: Cell) -> Record:
    """Compute the cell's record, and add the seconds unless the record contains them."""
    start = time.perf_counter()
    record = cell.compute()
    return {"seconds": time.perf_counter() - start} | record


def execute(
    work: Work,
    out: Path,
    resume: bool = False,
    by: Compute = here,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
) -> Record:
    """Compute the cells that are missing in `out`, and write the tables.

    Args:
        work: The suite.
        out: The folder. The folder must be new or, with `resume`, contain cells of the same suite.
        resume: Whether to continue the suite in `out`.
        by: A function that computes cells, in this process or elsewhere.
        on_round_end: A function that is called after each cell with the progress.
        on_start: A function that is called first, with the sizes of the finished and of all cells.

    Returns:
        The content of suite.json, or of sweep.json for a sweep.

    Raises:
        InputError: If `out` contains something other than this suite, or is damaged.
    """
    # If cells of this process use Ray, it is started only once.
    with opened(work, out, resume) as suite, shared_ray():
        cells = suite.cells
        count = sum(cell.size for cell in cells if cell.name in suite.done)
        on_start(count, sum(cell.size for cell in cells))
        for finished, record in by(suite.pending):
            suite.save(finished, record)
            count += finished.size
            on_round_end({"done": count, "cell": finished.name})
        return _write(work, out, [suite.done[cell.name] for cell in cells])


@dataclass(frozen=True)
class Opened:
    """The locked folder of a suite, with its finished cells and the file of every cell."""

    work: Work
    out: Path
    cells: Sequence[Cell]  # cells with their folders
    places: Mapping[str, Path]
    done: dict[str, Record]

    @property
    def pending(self) -> list[Cell]:
        """The cells that are not finished yet."""
        return [cell for cell in self.cells if cell.name not in self.done]

    def save(self, cell: Cell, record: Record) -> None:
        require_place(self.out)
        line = files.sealed(record, self.work.seal(cell))
        files.write_bytes(self.places[cell.name], line.encode())
        self.done[cell.name] = record


@contextmanager
def opened(work: Work, out: Path, resume: bool = False) -> Iterator[Opened]:
    """Open and lock the folder of a suite.

    The folder must be new. If `resume` is set, the folder may also contain cells of this suite.
    """
    if resume:
        _require_begun(work, out)
    with held(out):
        cells, places, records = work.within(out), _open(work, out, resume), {}
        for cell in work.cells:
            if (file := places[cell.name]).exists():
                lines = files.whole_lines(file)
                record = files.unsealed(lines[0], work.seal(cell)) if len(lines) == 1 else None
                if record is None:
                    raise InputError(
                        f"{file} does not contain a valid result of {cell.name}. Remove this file "
                        "and continue with --resume."
                    )
                records[cell.name] = record
        work.require_sound([finished for finished in cells if finished.name in records])
        lock = out / files.SUITE_LOCK  # updated only after the finished cells were checked
        with files.mendable(lock, "read"):
            before = files.read_bytes(lock)
        if (joined := work.joined(before)) is not None and joined != before:
            files.write_bytes(lock, joined)
        yield Opened(work, out, cells, places, records)


def _require_begun(work: Work, out: Path) -> None:
    """Raise InputError if the folder contains nothing to resume. The folder is not created."""
    if not (out / files.SUITE_LOCK).exists():
        problem = "has no suite.lock" if out.exists() else "does not exist"
        raise InputError(
            f"{out} {problem}, so there is no {work.called} to resume. Check the path of --out, or "
            f"leave --resume out to begin a new {work.called}."
        )


def _open(work: Work, out: Path, resume: bool) -> dict[str, Path]:
    """Check that the folder is new or belongs to this suite, and return the file of each cell."""
    lock = out / files.SUITE_LOCK
    with files.mendable(out, "create"):
        out.mkdir(parents=True, exist_ok=True)
        full = any(not entry.name.startswith(".") for entry in out.iterdir())
        fits = full and lock.exists() and work.joined(files.read_bytes(lock)) is not None
        if full and not resume:
            raise InputError(
                f"{out} is not empty: choose another folder with --out"
                + (", or resume with --resume" if fits else "")
            )
        if full and not fits:
            raise InputError(f"{lock} {work.mismatch}")
        for folder in (out, out / work.place):
            files.remove_drafts(folder)
        if not full:  # the lock comes first, because a folder without a lock cannot be resumed
            files.write_bytes(lock, work.lock)
        (out / work.place).mkdir(exist_ok=True)
    return {cell.name: out / work.place / f"{cell.name}.json" for cell in work.cells}


def _write(work: Work, out: Path, records: list[Record]) -> Record:
    """Write a CSV file for each table, and suite.json."""
    contents = {}
    for name, rows in work.tables(records).items():  # floats are written without loss
        text = io.StringIO()
        if rows:
            writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        contents[f"{name}.csv"] = text.getvalue().encode()
    request = work.request
    shared = {
        "kind": work.kind,
        "title": work.title,
        "suite": request.stem,
        "data": request.data,
        "scale": request.scale,
        "again": request.again,
        "seconds": sum(record["seconds"] for record in records),
        "machine": machine(torch.get_num_threads()),
        "versions": versions(),
        **request.repeats,
        **({"card": settings_card(configs)} if (configs := work.configs) else {}),
    }
    summary = merged(shared, work.summary(records))
    contents[f"{work.noun}.json"] = (json.dumps(summary, indent=2) + "\n").encode()
    files.announce(out, contents)
    for name, content in contents.items():
        files.write_bytes(out / name, content)
    return summary


# Cells as Ray tasks, on the cores of this machine or on a running cluster

PAUSE = 0.2  # seconds


@dataclass(frozen=True)
class Spread:
    """A function that computes cells as Ray tasks, each with `cpus` cores and `gpus` GPUs."""

    address: str
    cpus: float = 1.0
    gpus: float = 0.0

    def __call__(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
        """Yield every cell with its record, in the order in which the cells finish.

        The longest cells start first, so that all processes finish at about the same time.
        """
        if not cells:
            return
        with connected(self.address) as ray:
            task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus)(compute_apart)
            longest = sorted(cells, key=cost, reverse=True)
            waiting = {task.remote(job, self.cpus): job for job in longest}
            while waiting:  # wait only briefly each time, so that signals are handled
                for ref in ray.wait(list(waiting), num_returns=1, timeout=PAUSE)[0]:
                    cell = waiting.pop(ref)
                    try:
                        record = ray.get(ref)
                    except (InputError, OSError) as error:  # Ray's error may show a traceback
                        raise getattr(error, "cause", error) from error
                    except ray.exceptions.RayTaskError:
                        raise
                    except ray.exceptions.RayError as error:
                        from fedmuon.server.ray.worker_pool import why  # imports Ray and Flower

                        raise InputError(
                            f"The computation of {cell.name} stopped on Ray ({why(error)}). Fix "
                            "the cause and continue with --resume."
                        ) from error
                    yield cell, record


def cost(cell: Cell) -> float:
    """Return the relative cost of a cell: its attribute `cost` if it exists, else its `size`."""
    return getattr(cell, "cost", cell.size)


def compute_apart(cell: Cell, cpus: float) -> Record:
    """Compute one cell in a worker with `cpus` threads. Workers share the samples in memory."""
    torch.set_num_threads(max(1, int(cpus)))
    with one_copy():
        return timed(cell)


# Settings of a suite's runs as a card: the values of each key in the runs that it affects

LISTED = 4  # of more values, only the smallest and the largest are shown
KEYS = {
    "data.name": "",
    "task.model": "",
    "data.train": "training samples",
    "data.alpha": "label skew",
    "federation.clients": "clients",
    "federation.per-round": "clients per round",
    "federation.rounds": "rounds",
    "local.steps": "local steps",
    "local.batch": "0 means all samples of a client",
    "local.recipe": "",
    "local.lr": "step size",
    "orthogonalizer.name": "",
    "orthogonalizer.lambda": "regularization of the orthogonalizer",
}
NAMES = SYMBOLS | {"data.name": "data", "task.model": "model", "local.batch": "batch",
                   "local.recipe": "recipe", "orthogonalizer.name": "map"}  # fmt: skip


def settings_card(configs: Sequence[Config]) -> list[tuple[str, str, str]]:
    """Return the symbol, the meaning and the values of each key that affects at least one config.

    If a task has no choice of models, its name is listed as the model.
    """
    rows = []
    for key, words in KEYS.items():
        table, _, name = key.partition(".")
        values: dict[Scalar, None] = {}
        for config in configs:
            if key == "task.model" and config.task.name != "network":
                values[config.task.name] = None
            elif key == "task.model" or reads(config, key):
                values[config.model_dump(by_alias=True)[table][name]] = None
        if values:
            rows.append((NAMES[key], words, shown(list(values))))
    return rows


def shown(values: Sequence[Scalar]) -> str:
    """Return the values as text.

    If there are many values, the text contains only the smallest and the largest.
    """
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    if len(values) <= LISTED or isinstance(values[0], str):
        return ", ".join(texts)
    order = sorted(range(len(values)), key=lambda place: float(values[place]))
    return f"{texts[order[0]]} to {texts[order[-1]]} ({len(values)} values)"
