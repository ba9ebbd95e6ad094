"""The profile of a run as text: seconds of each kind of work, and which kind to shorten first."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from fedmuon.analysis.report.numbers import count, digits
from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, read_text, require_sound
from fedmuon.core.tables import value_of
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.experiments.tables import columns
from fedmuon.runs import work_categories as kinds
from fedmuon.runs.directory import WORKER_PROFILES
from fedmuon.runs.profile_records import PROFILE, added

Shares = Mapping[str, float]
FEW = 0.1  # share of the time below which a kind of work is no reason for a slow run
WAITS = 0.5  # share of idle time from which workers wait for the server most of the time


@dataclass(frozen=True)
class Advice:
    """Advice on how to shorten a kind of work.

    Attributes:
        what: What the kind of work does, as the end of a sentence.
        keys: For each config key that shortens it, the value that does so most, and what to do. A
            key is left out if it has no effect in the run, or already has this value.
        instead: What to do if no key is left.
    """

    what: str
    keys: tuple[tuple[str, Any, str], ...] = ()
    instead: str = ""


MORE_CORES = "use more cores"
ADVICE = {
    kinds.GRADIENTS: Advice(
        "This is the training itself",
        (
            ("local.steps", 1, "lower [local] steps"),
            ("engine.dtype", "float32", "set [engine] dtype = 'float32'"),
            ("engine.name", "ray", "use more cores with [engine] name = 'ray'"),
        ),
        MORE_CORES,
    ),
    kinds.ORTHOGONALIZATION: Advice(
        "Each local step of each client orthogonalizes all matrices",
        (
            ("orthogonalizer.name", "newton-schulz", "set [orthogonalizer] name = 'newton-schulz'"),
            ("orthogonalizer.steps", 1, "lower [orthogonalizer] steps"),
            ("orthogonalizer.products", "bfloat16", "set products = 'bfloat16'"),
            ("orthogonalizer.full-every", 0, "orthogonalize blocks with shards and full-every"),
        ),
        "lower [local] steps",
    ),
    kinds.OPTIMIZER: Advice(
        "These are the updates of momentum and models",
        (("compression.uplink", "none", "set [compression] uplink = 'none'"),),
        MORE_CORES,
    ),
    kinds.COPIES: Advice(
        "Models are copied for each client and round",
        (),
        "raise [local] steps, so that each copy is used for more steps",
    ),
    kinds.CHECKS: Advice(
        "Each local step checks its loss", (), "use larger batches and fewer [local] steps"
    ),
    kinds.PRIVACY: Advice(
        "Each release draws noise", (), "use larger lots and fewer [local] steps"
    ),
    kinds.DATA: Advice("Each local step draws and reads its samples", (), "use larger batches"),
    kinds.MESSAGES: Advice(
        "Each client receives and sends a model in each round",
        (("local.steps", 0, "raise [local] steps, so that a run needs fewer rounds"),),
        "train more samples per round",
    ),
    kinds.EVALUATION: Advice(
        "The model is evaluated on all samples",
        (("output.evaluate-every", 0, "raise [output] evaluate-every"),),
    ),
    kinds.RECORDS: Advice(
        "Records and checkpoints are written to the disk",
        (
            ("output.checkpoint-every", 0, "raise [output] checkpoint-every"),
            ("output.clients", False, "set [output] clients = false"),
        ),
        "choose a faster disk",
    ),
    kinds.IDLE: Advice(
        "The process waits for other processes",
        (("engine.cpus-per-client", 0, "start more workers: lower [engine] cpus-per-client"),),
        "stop other programs on this machine",
    ),
    kinds.OTHER: Advice("Callbacks belong to this kind", (), "look at your callbacks"),
}


def processes_of(run: RunStatus) -> list[Record]:
    """Return the profile of each process of a run: of the run itself first, then of its workers.

    An unfinished run has only the profile of its finished rounds. The result is empty if the run
    was not profiled.
    """
    if run.summary is not None:
        return run.summary.get(PROFILE, [])
    seconds = added(record.get(PROFILE, {}) for record in run.rounds)
    return [{"process": "run", "seconds": seconds}] if seconds else []


def rounds_of_workers(folder: Path) -> dict[str, list[Record]]:
    """Return the groups of rounds of each worker, by its name. There may be no workers."""
    file = folder / WORKER_PROFILES
    if not file.exists():
        return {}
    require_sound(folder, [file.name])
    return json.loads(read_text(file))


def require_profile(run: RunStatus) -> None:
    """Raise an error if the run was not profiled."""
    if not processes_of(run):
        raise InputError(
            f"the run in {run.path} has no profile. Run it again in another folder with [output] "
            "profile = true, or with --profile."
        )


def shares(seconds: Shares) -> Shares:
    """Return the share of each category in the total time."""
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}


def columns_of(processes: Sequence[Record]) -> dict[str, Shares]:
    """Return the seconds of the process of the run, and of all workers together."""
    of_run, *workers = processes
    if not workers:
        return {of_run["process"]: of_run["seconds"]}
    name = count(len(workers), "worker")
    return {"server": of_run["seconds"], name: added(worker["seconds"] for worker in workers)}


def profile_table(processes: Sequence[Record]) -> Table:
    """Return a table with the seconds and shares of each category, for the run and its workers."""
    by_column = columns_of(processes)
    rows, heads = [], ["work"]
    for name in by_column:
        heads += ["seconds", "share"] if len(by_column) == 1 else [f"{name} s", "share"]
    for category in kinds.CATEGORIES:
        if any(seconds.get(category) for seconds in by_column.values()):
            cells = [category]
            for seconds in by_column.values():
                cells += _cells(seconds.get(category, 0.0), seconds)
            rows.append(cells)
    totals = ["total"]
    for seconds in by_column.values():
        totals += _cells(sum(seconds.values()), seconds)
    return columns("where the time went", heads, [*rows, totals])


def _cells(value: float, seconds: Shares) -> list[str]:
    share = value / (sum(seconds.values()) or 1.0)
    return [digits(value, 3) if value else "–", f"{share:.1%}" if value else "–"]


def first_to_shorten(processes: Sequence[Record]) -> tuple[str, str, float]:
    """Return the category to look at first, the process that it belongs to, and its share there.

    This is the largest category. With workers, it is that of the workers, unless they wait most of
    the time: then it is that of the server, without the time in which the server waits.
    """
    by_column = columns_of(processes)
    name, seconds = [*by_column.items()][-1]
    if len(by_column) > 1 and shares(seconds).get(kinds.IDLE, 0.0) > WAITS:
        name, seconds = "server", by_column["server"]
        working = {key: value for key, value in seconds.items() if key != kinds.IDLE} or seconds
    else:
        working = seconds
    category = max(working, key=lambda key: working[key])
    return category, name, shares(seconds)[category]


def advice(config: Config, processes: Sequence[Record]) -> str:
    """Return sentences that say which kind of work to shorten first, and how."""
    category, name, share = first_to_shorten(processes)
    if share < FEW:
        return (
            "Most of the time, all processes waited: for the start of the workers, or for each "
            "other. A run with more rounds shows which work to shorten."
        )
    about = ADVICE[category]
    ways = [
        words
        for key, best, words in about.keys
        if reads(config, key) and value_of(config, key) != best
    ] or [about.instead or "look at its settings"]
    place = "" if name == "run" else f" of the {name.lstrip('0123456789 ')}"
    or_how = ", or ".join(ways)
    return (
        f"Look at {category} first: {share:.0%} of the time{place}. {about.what}. To shorten it, "
        f"{or_how}."
    )
