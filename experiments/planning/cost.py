"""`fedmuon plan`: the cost of a run on the engine and workers at hand.

The run is set up as it would be, in a folder that goes away; a few seconds of rounds, a look at the
model and a checkpoint are timed; the rest is arithmetic. Nothing is said of what a round finds.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmuon.config.load import Config
from fedmuon.config.paths import with_files
from fedmuon.core.arrays import npy_bytes
from fedmuon.core.errors import InputError
from fedmuon.experiments.planning.folder_seconds import FolderSeconds, of_folder
from fedmuon.experiments.planning.pace import Pace, Trial, evaluation, pace
from fedmuon.federated import build
from fedmuon.federated.memory import COPIES
from fedmuon.federated.rounds import ServerState, begin, broadcast, run_rounds
from fedmuon.federated.wire import named
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import Run, prepare
from fedmuon.runs.provenance import Others, peak

RESUMED = " and go on with --resume"


@dataclass(frozen=True)
class Engine:
    """What the engine adds to its rounds: seconds to start and to stop, workers, the most bytes
    that one of them held, bytes that a round sends down and up."""

    pace: Pace
    start: float = 0.0
    stop: float = 0.0
    workers: int = 0
    memory: int = 0
    down: int = 0
    up: int = 0


def plan(config: Config, started: float = 0.0) -> Record:
    """The cost of `fedmuon run` of the config; `started` are the seconds that have gone before, to
    load what it needs."""
    begun, others = time.perf_counter(), Others()
    config = build.resolve(with_files(config) if config.engine.name == "deployment" else config)
    quiet = config.model_copy(
        update={"output": config.output.model_copy(update={"callback": "none", "options": ()})}
    )
    with tempfile.TemporaryDirectory(prefix="plan-of-fedmuon-") as folder:
        run = prepare(quiet, Path(folder) / "run")
        prepared = time.perf_counter() - begun
        state = begin(run.experiment.recipe, run.experiment.task, config.federation.seed)
        look, found = evaluation(run, state), of_folder(run, state)
        inline = config.engine.name == "inline"
        beside = 0.0 if inline else others.cores()
        engine = _engine(_scheduled(run), state)
    spent = {"start": started, "set-up": prepared, "look": look}
    record = _record(run, state, engine, spent, found)
    return {**record, "others": others.cores() if inline else beside}


def _scheduled(run: Run) -> Run:
    """The run with cohorts of the size that Poisson ones have on average."""
    plan = replace(run.experiment.plan, poisson=False)
    return replace(run, experiment=replace(run.experiment, plan=plan))


def _engine(run: Run, state: ServerState) -> Engine:
    if run.config.engine.name == "inline":
        return Engine(pace(Trial(run.experiment, state, run_rounds), run.data.sizes))
    if run.config.engine.name == "ray":
        with _nothing_to_resume():
            return _on_ray(run, state)
    from fedmuon.experiments.planning.deployed import deployed

    return Engine(*deployed(run, state))


@contextlib.contextmanager
def _nothing_to_resume() -> Iterator[None]:
    """A round that fails is refused as in a run, but there is no folder to go on with."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(RESUMED, "")) from error


def _on_ray(run: Run, state: ServerState) -> Engine:
    """Rounds on Ray's workers, which are started for it."""
    from fedmuon.experiments.engines import ray_cluster, ray_engine

    begun, config = time.perf_counter(), run.config

    def work(grid: Any) -> tuple[Engine, float]:
        from fedmuon.server.message_sizes import on_ray

        up, engine = time.perf_counter() - begun, ray_engine.engine(config, grid)
        trial = Trial(run.experiment, state, engine)
        found = pace(trial, run.data.sizes, grid.workers, False, lambda: not grid.absent)
        sent = on_ray(config, run.experiment, state, grid.workers, ray_cluster.machines())
        most, copies = max(grid.memory(), default=0), -(-found.tried // grid.workers)
        more = -(-config.federation.per_round // grid.workers) - copies
        held = most + 2 * more * _model_bytes(run, state)
        return Engine(found, up, 0.0, grid.workers, held, sent.down, sent.up), time.perf_counter()

    engine, ended = ray_engine.on_grid(config, work)
    return replace(engine, stop=time.perf_counter() - ended)


def _model_bytes(run: Run, state: ServerState) -> int:
    """Of one model and the states that a client returns with it."""
    states = {name: state.states[name] for name in run.experiment.recipe.returned}
    return sum(value.nbytes for value in named(state.params, states).values())


def _untried_bytes(run: Run, state: ServerState, pace: Pace) -> int:
    """Of the clients that were not tried: those of one stack are held together, and the replies of
    all, each beside what it is read from. A round's replies are held until the next ones are there,
    which is not seen where no round followed another."""
    entries = sum(value.numel() for value in state.params.values())
    stack = max(1, run.experiment.task.stack_limit // entries)
    per_round, reply = run.config.federation.per_round, 2 * _model_bytes(run, state)
    beside = max(0, min(stack, per_round) - pace.tried)
    each = (COPIES + 2) * sum(value.nbytes for value in state.params.values())
    untried = round(beside * max(pace.memory, float(each)))
    untried += reply * (per_round - pace.tried - beside)
    return untried + (reply * per_round if pace.rounds < 2 else 0)


def _record(
    run: Run, state: ServerState, engine: Engine, spent: dict[str, float], found: FolderSeconds
) -> Record:
    """What the measured parts come to."""
    config, most = run.config, run.config.federation.rounds
    looks = -(-most // config.output.evaluate_every)
    every = 1 if run.experiment.recipe.private else config.output.checkpoint_every
    first, later = engine.pace.extra + engine.pace.round, engine.pace.round
    parts = {
        "start": spent["start"],
        "set-up": spent["set-up"],
        "engine": engine.start + engine.stop,
        "first round": first,
        "later rounds": (most - 1) * later,
        "evaluations": looks * spent["look"],
        "records": most * found.record + ((most - 1) // every) * found.checkpoint + found.end,
    }
    sent = broadcast(run.experiment.recipe, state)
    back = {name: state.states[name] for name in run.experiment.recipe.returned}
    return {
        "engine": config.engine.name,
        "workers": engine.workers,
        "rounds": most,
        "participants": config.federation.per_round,
        "tried": engine.pace.tried,
        "seconds": {
            **parts,
            "a round": later,
            "an evaluation": spent["look"],
            "all": sum(parts.values()),
        },
        "memory": {
            "driver": peak() + _untried_bytes(run, state, engine.pace) + found.memory,
            "worker": engine.memory,
        },
        "bytes": {
            "down": engine.down,
            "up": engine.up,
            "a client down": array_bytes(named(sent.params, sent.states)),
            "a client up": array_bytes(named(state.params, back)),
        },
    }


def array_bytes(tensors: dict[str, Any]) -> int:
    """Of the arrays of a message, each as an .npy file."""
    return sum(
        len(npy_bytes(value.detach().cpu()[..., :0].numpy())) + value.nbytes
        for value in tensors.values()
    )
