"""`fedmuon plan`: estimate the cost of a run on an engine in seconds, memory and bytes.

The run is set up in a temporary folder. A few seconds of rounds, one evaluation and one checkpoint
are timed, and the total is computed from them. A plan does not show the results of the rounds.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from fedmuon.analysis.report.numbers import in_bytes
from fedmuon.config.load import Config, absolute_paths
from fedmuon.core.errors import InputError
from fedmuon.experiments.engines.ray_cluster import quiet_ray
from fedmuon.experiments.planning.model_memory import SHARED, model_memory, model_rows
from fedmuon.experiments.planning.orthogonalization import orthogonalization, table_of
from fedmuon.experiments.planning.pace import (
    FolderSeconds,
    Pace,
    Trial,
    deployed,
    evaluation,
    folder_seconds,
    pace,
)
from fedmuon.experiments.tables import columns
from fedmuon.federated.build import resolve
from fedmuon.federated.rounds import begin, broadcast, run_rounds
from fedmuon.federated.size_limits import COPIES
from fedmuon.federated.traffic import returned_like
from fedmuon.federated.wire import named
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import Record
from fedmuon.runs.prepare import Run, prepare
from fedmuon.runs.provenance import Others, peak

RESUMED = ", then continue with --resume"
BUSY = 0.3  # the table warns if other processes used at least this many cores
ROWS = {
    "start": "to import Python libraries",
    "set-up": "to split samples and draw the schedule",
    "engine": "to start and stop the engine",
    "first round": "the first round",
    "later rounds": "all later rounds",
    "evaluations": "evaluations",
    "records": "records, checkpoints and the final files",
    "all": "total, from command to prompt",
}


@dataclass(frozen=True)
class Engine:
    """The costs of an engine.

    The costs are the seconds to start and to stop the engine, the number of workers, the maximum
    memory of one worker, and the bytes that the server sends and receives in a round.
    """

    pace: Pace
    start: float = 0.0
    stop: float = 0.0
    workers: int = 0
    memory: int = 0
    down: int = 0
    up: int = 0


def plan(config: Config, started: float = 0.0) -> Record:
    """Estimate the cost of `fedmuon run` with this config.

    Args:
        config: The experiment.
        started: Seconds that the command has already spent on importing libraries.
    """
    begun, others = time.perf_counter(), Others()
    config = resolve(absolute_paths(config) if config.engine.name == "deployment" else config)
    quiet = config.model_copy(
        update={"output": config.output.model_copy(update={"callback": "none", "options": ()})}
    )
    with tempfile.TemporaryDirectory(prefix="plan-of-fedmuon-") as folder:
        run = prepare(quiet, Path(folder) / "run")
        prepared = time.perf_counter() - begun
        state = begin(run.experiment.recipe, run.experiment.task, config.federation.seed)
        look, disk = evaluation(run, state), folder_seconds(run, state)
        maps = orthogonalization(run, state)
        inline = config.engine.name == "inline"
        beside = 0.0 if inline else others.cores()
        # Trial rounds use the mean size of Poisson cohorts, and ignore simulated devices.
        plan = replace(run.experiment.plan, poisson=False, biased=False, timetable=None)
        average = replace(run.experiment, plan=plan)
        engine = _engine(replace(run, experiment=average), state)
    spent = {"start": started, "set-up": prepared, "look": look}
    record = _record(run, state, engine, spent, disk)
    beside = others.cores() if inline else beside
    return {**record, "orthogonalization": maps, "others": beside}


def _engine(run: Run, state: ServerState) -> Engine:
    """Time trial rounds on the engine. For Ray, workers are started for the plan."""
    if run.config.engine.name == "inline":
        return Engine(pace(Trial(run.experiment, state, run_rounds), run.data.sizes))
    if run.config.engine.name == "deployment":
        return Engine(*deployed(run, state))
    begun, config = time.perf_counter(), run.config
    quiet_ray()
    # The import is here so that it counts in the seconds of the engine's start.
    from fedmuon.experiments.engines import ray_engine
    from fedmuon.server import message_sizes, strategy

    def work(grid: Any) -> tuple[Engine, float]:
        up, engine = time.perf_counter() - begun, strategy.FlowerEngine(config, grid)
        trial = Trial(run.experiment, state, engine)
        timed = pace(trial, run.data.sizes, grid.workers, False, lambda: not grid.absent)
        machines = ray_engine.machines()
        sent = message_sizes.on_ray(config, run.experiment, state, grid.workers, machines)
        largest = max((worker["memory"] for worker in grid.memory()), default=0)
        copies, share = (
            -(-clients // grid.workers) for clients in (timed.tried, config.federation.per_round)
        )
        extra = share - copies
        memory = largest + 2 * extra * _model_bytes(run, state)
        return Engine(timed, up, 0.0, grid.workers, memory, sent.down, sent.up), time.perf_counter()

    try:
        engine, ended = ray_engine.with_ray_grid(config, work)
    except InputError as error:  # a plan has no folder that could be resumed
        raise InputError(str(error).replace(RESUMED, "")) from error
    return replace(engine, stop=time.perf_counter() - ended)


def _model_bytes(run: Run, state: ServerState) -> int:
    """Return the bytes of one model and of the states that a client returns with it."""
    reply = returned_like(run.experiment.recipe, state.params, state.states)
    return sum(value.nbytes for value in named(*reply).values())


def _untried_bytes(run: Run, state: ServerState, pace: Pace) -> int:
    """Return the memory in bytes that clients outside the trial would need.

    The clients that train as one batch are in memory at the same time. All replies are in memory,
    too. While a reply is decoded, memory contains it twice. The replies of a round stay in memory
    until the replies of the next round arrive. A trial of a single round does not include these
    replies, so they are added.
    """
    entries = sum(value.numel() for value in state.params.values())
    stack = max(1, run.experiment.task.stack_limit // entries)
    per_round, reply = run.config.federation.per_round, 2 * _model_bytes(run, state)
    beside = max(0, min(stack, per_round) - pace.tried)
    client_bytes = (COPIES + 2) * sum(value.nbytes for value in state.params.values())
    untried = round(beside * max(pace.memory, float(client_bytes)))
    untried += reply * (per_round - pace.tried - beside)
    return untried + (reply * per_round if pace.rounds < 2 else 0)


def _record(
    run: Run, state: ServerState, engine: Engine, spent: dict[str, float], disk: FolderSeconds
) -> Record:
    """Combine the measurements into the record of the plan."""
    config, rounds = run.config, run.config.federation.rounds
    looks = -(-rounds // config.output.evaluate_every) + 1  # one more for the untrained model
    interval = 1 if run.experiment.recipe.private else config.output.checkpoint_every
    parts = {
        "start": spent["start"],
        "set-up": spent["set-up"],
        "engine": engine.start + engine.stop,
        "first round": engine.pace.extra + engine.pace.round,
        "later rounds": (rounds - 1) * engine.pace.round,
        "evaluations": looks * spent["look"],
        "records": rounds * disk.record + ((rounds - 1) // interval) * disk.checkpoint + disk.end,
    }
    per_unit = {"a round": engine.pace.round, "an evaluation": spent["look"]}
    sent = broadcast(run.experiment.recipe, state)
    back = returned_like(run.experiment.recipe, state.params, state.states)
    return {
        "engine": config.engine.name,
        "workers": engine.workers,
        "rounds": rounds,
        "participants": config.federation.per_round,
        "tried": engine.pace.tried,
        "seconds": {**parts, **per_unit, "all": sum(parts.values())},
        "memory": {
            "driver": peak() + _untried_bytes(run, state, engine.pace) + disk.memory,
            "worker": engine.memory,
            "model": model_memory(config, run.experiment.task, max(run.data.sizes)),
        },
        "bytes": {
            "down": engine.down,
            "up": engine.up,
            "a client down": array_bytes(named(sent.params, sent.states)),
            "a client up": array_bytes(named(*back)),
        },
    }


def array_bytes(tensors: dict[str, Any]) -> int:
    """Return the bytes of a message's arrays."""
    return sum(value.nbytes for value in tensors.values())


def tables(record: Record) -> list[Table | str]:
    """Return the cost as a table of seconds and a table of memory and bytes, with notes."""
    spent, memory, sent = record["seconds"], record["memory"], record["bytes"]
    unit = {"later rounds": "a round", "evaluations": "an evaluation"}
    rows = [
        (words, in_seconds(spent[unit[name]]) if name in unit else "", in_seconds(spent[name]))
        for name, words in ROWS.items()
    ]
    title = f"{record['rounds']} rounds of {record['participants']} clients, {record['engine']}"
    if record["workers"]:
        title += f", {record['workers']} workers"
    if (others := record["others"]) > BUSY:
        title += (
            f"\nother programs used {others:.1f} cores during the trial; without them, the run "
            "is faster"
        )
    size_rows = [("peak memory of this process", "", "", in_bytes(memory["driver"]))]
    if memory["worker"]:
        size_rows.append(("peak memory of a worker", "", "", in_bytes(memory["worker"])))
    size_rows += model_rows(memory["model"])
    for words, way in (
        ("sent to clients per round", "down"),
        ("sent to the server per round", "up"),
    ):
        size = sent[f"a client {way}"]
        all_ = in_bytes(record["participants"] * size)
        size_rows.append(
            (words, in_bytes(size), all_, in_bytes(sent[way]) if memory["worker"] else "–")
        )
    notes = (
        []
        if memory["worker"]
        else ["With the inline engine, clients run in this process, so no messages are measured."]
    )
    if record["tried"] < record["participants"]:
        notes.append(
            f"The trial round trained {record['tried']} of the {record['participants']} clients "
            "of a round."
        )
    if record["engine"] == "ray":
        notes.append(
            "Data that several clients of a round share are sent once per worker, or once per "
            "machine if the data are large."
        )
    if memory["model"]:
        notes.append(SHARED)
    return [
        columns(title, ("seconds of this run", "each", "in all"), rows),
        columns(
            "memory, and size of messages",
            ("", "a client's arrays", f"of {record['participants']} clients", "measured"),
            size_rows,
        ),
        *([" ".join(notes)] if notes else []),
        *([table_of(maps)] if (maps := record.get("orthogonalization")) else []),
    ]


def in_seconds(value: float) -> str:
    """Return a time in seconds as text with three digits, or as an integer if it is large."""
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
