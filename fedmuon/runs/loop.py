"""One run, whatever the engine: config -> run directory, resumable at any moment.

An engine is a function that yields finished rounds; the loop around it, here, looks, logs and
checkpoints. The embedded engine and the Flower server share it.
"""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.config.user_objects import guard, value
from fedmuon.core.arrays import array_bytes, npy_bytes, tensor_bytes
from fedmuon.core.choices import OF_A_ROUND
from fedmuon.core.errors import InputError, Interrupted, NonFinite
from fedmuon.core.files import AFRESH
from fedmuon.core.guard import Guard
from fedmuon.data.federated import FederatedData
from fedmuon.data.partition import weights
from fedmuon.federated import build, build_recipe
from fedmuon.federated.accountant import RunAccountant, calibrated, require_accountable
from fedmuon.federated.build_recipe import routes
from fedmuon.federated.evaluate import risk, sample_weights
from fedmuon.federated.plan import Plan
from fedmuon.federated.rounds import Engine, Experiment, Round, ServerState, begin
from fedmuon.runs import checkpoints, fingerprints
from fedmuon.runs.callbacks import CALLBACKS, Callback, Heard, as_callback
from fedmuon.runs.directory import NO_FILES, Record, RunDirectory
from fedmuon.runs.provenance import commit, machine, versions
from fedmuon.tasks.networks import NetworkTask

Watch = Callable[[Record], None]
Begin = Callable[[int, int], None]  # (rounds already done, rounds in all)


@dataclass(frozen=True)
class Run:
    """An experiment with its data and its folder."""

    config: Config
    data: FederatedData
    experiment: Experiment
    directory: RunDirectory
    callbacks: tuple[Callback, ...] = ()


def prepare(
    config: Config,
    out: Path,
    resume: bool = False,
    callbacks: Sequence[Callback | Heard] = (),
    require: Callable[[Experiment], object] = lambda experiment: None,
    beside: Mapping[str, bytes] = NO_FILES,
) -> Run:
    """Read the data, deal it, and write down everything that is fixed before the first round, and
    files `beside` it that grow later; before that, `require` may refuse the experiment."""
    source = build.source(config)
    told = fingerprints.described(config, out, source, afresh=not resume)
    there = fingerprints.require_same(out, told) if resume else {}
    data = build.federated_data(config, source)
    classes = source.classes
    del source
    if config.engine.name != "inline":
        build.forget()  # its clients read their own
    experiment = build.experiment(config, data, classes)
    schedule, factors = fingerprints.kept(experiment.plan, config, there)
    experiment = dataclasses.replace(experiment, plan=schedule)
    fresh = begin(experiment.recipe, experiment.task, config.federation.seed)
    if (found := calibrated(config, experiment, data.sizes, fresh.params)) is not config:
        config, changed = found, build_recipe.recipe(found, experiment.task)
        experiment = dataclasses.replace(experiment, recipe=changed)
    require_accountable(config, experiment, data.sizes, fresh)
    require(experiment)
    directory = RunDirectory(out)
    if resume:
        directory.require_resumable()
    directory.create(resume)
    split = {"train_index": data.train_index, "client": data.client, "test_index": data.test_index}
    fixed = {
        "config.toml": tables.dump(config).encode(),
        "partition.npz": array_bytes(**split),
        "schedule.npy": npy_bytes(_known(experiment.plan)),
        "initial.safetensors": tensor_bytes(fresh.params),
    }
    if isinstance(experiment.task, NetworkTask):
        table = routes(experiment.task.module, config.local.route)
        fixed["routes.txt"] = f"{table}\n".encode()
    if there or not (out / "summary.json").exists():  # older versions end without it
        fixed |= fingerprints.as_bytes(told | factors)
    directory.fix(fixed, beside)
    named = value(config, "callback", CALLBACKS, (Callback,))
    listeners = [*map(as_callback, _listed(callbacks))]
    if named is not None:
        listeners.append(as_callback(named, guard(config, "callback")))
    return Run(config, data, experiment, directory, tuple(listeners))


def _listed(callbacks: Sequence[Callback | Heard]) -> list[Callback | Heard]:
    with Guard("callbacks", callbacks):
        return [*callbacks]


def _known(plan: Plan) -> np.ndarray:
    """Who will take part [R, K]; nobody is known of Poisson cohorts [R, 0]."""
    return np.empty((plan.rounds, 0), np.int64) if plan.poisson else plan.schedule()


def drive(
    run: Run,
    engine: Engine,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
) -> Record:
    """Run the rounds that remain, and return the summary; a finished run is left alone."""
    directory, seed = run.directory, run.config.federation.seed
    if (finished := _finished(directory)) is not None:
        return finished
    state, record = directory.restore(begin(run.experiment.recipe, run.experiment.task, seed)), {}
    before = directory.cut_back(state.round)
    accountant = None
    if run.experiment.recipe.private:
        path, head = directory.path / "ledger.jsonl", directory.ledger_head()
        accountant = RunAccountant.open(
            path, run.config, run.experiment, run.data.sizes, state, head
        )

    def keep(state: ServerState) -> None:
        directory.checkpoint(state, accountant.ledger.head if accountant else "")

    # What is released is spent, so that losing it to a kill would waste privacy.
    every = 1 if accountant else run.config.output.checkpoint_every
    begun(state.round, run.config.federation.rounds)
    start, last = time.monotonic() - _spent(before), run.config.federation.rounds
    trained = _spent(before, "train_seconds")
    stopped = ""
    saving = _saving(lambda: keep(state), InputError, Interrupted, KeyboardInterrupt)
    with directory.failing(), saving:
        rounds = engine(run.experiment, state)
        rounds = accountant.ahead(rounds, state.round) if accountant else rounds
        for done, spent in _timed(rounds):
            trained += spent
            record = _record(run, done, trained, time.monotonic() - start)
            directory.append(record)
            state = done.state  # now that its record is there: a signal may come at any moment
            with _saving(partial(keep, state), Exception, SystemExit):  # of any callback
                watch(record)
                stopped = _heard(run, record, state)
            if stopped:
                break
            if state.round % every == 0 and state.round < last:
                keep(state)
        measured = _measured(run, state, record, stopped)
        if accountant:
            measured |= {"privacy": accountant.summary(bool(stopped))}
        return _finish(run, state, measured, time.monotonic() - start)


@contextlib.contextmanager
def _saving(keep: Callable[[], None], *errors: type[BaseException]) -> Iterator[None]:
    """Keep the state where one of these errors ends the work."""
    try:
        yield
    except errors:
        with contextlib.suppress(InputError):  # what stopped the run is the news
            keep()
        raise


def _finished(directory: RunDirectory) -> Record | None:
    """The summary of a run that has ended, and whose files are sound."""
    if (summary := directory.summary()) is not None:
        directory.require_sound()
        checkpoints.forget(directory.path)
    return summary


def _measured(run: Run, state: ServerState, record: Record, stopped: str) -> Record:
    """What the last round's record has of the model, or a look at it; and why it was the last."""
    known = {name: value for name, value in record.items() if name not in OF_A_ROUND}
    return (known or evaluate(run, state)) | ({"stopped": stopped} if stopped else {})


def _heard(run: Run, record: Record, state: ServerState) -> str:
    """What callbacks say to the round: why to stop, if one of them returns that it should. Each
    gets copies, so that what it does with them changes neither the run nor what others see."""
    for one in run.callbacks:
        if why := one.on_round(copy.deepcopy(record), _copied(state)):
            return str(why)
    return ""


def _copied(state: ServerState) -> ServerState:
    """The same numbers in memory of their own."""
    params = {name: value.clone() for name, value in state.params.items()}
    states = {
        link: {name: value.clone() for name, value in held.items()}
        for link, held in state.states.items()
    }
    return dataclasses.replace(state, params=params, states=states)


def _timed(rounds: Iterator[Round]) -> Iterator[tuple[Round, float]]:
    """Every round with the seconds that the engine took for it: no evaluation, no writing."""
    while True:
        start = time.monotonic()
        if (done := next(rounds, None)) is None:
            return
        yield done, time.monotonic() - start


def _record(run: Run, finished: Round, trained: float, seconds: float) -> Record:
    state = finished.state
    record: Record = {
        "round": state.round,
        "participants": finished.participants.tolist(),
    }
    if np.isfinite(finished.loss[0]):  # a private client tells no loss
        record["client_loss"] = float(finished.loss[0])
    if finished.faults:
        record["faults"] = [dataclasses.asdict(fault) for fault in finished.faults]
    if dropped := sorted(set(record["participants"]) - set(finished.answered.tolist())):
        record["dropped"] = dropped
    every, last = run.config.output.evaluate_every, run.config.federation.rounds
    if state.round % every == 0 or state.round == last:
        record |= evaluate(run, state)
    return {**record, "train_seconds": round(trained, 4), "seconds": round(seconds, 4)}


def evaluate(run: Run, state: ServerState) -> Record:
    """Weighted train loss; test loss, their gap and what else the task measures on the test
    samples, where there are any. A private run goes on beside a loss that is no number, as one
    example can make it, and is silent about it: it ends by its model alone."""
    task, shards = run.experiment.task, run.experiment.shards
    sizes = run.data.sizes
    shares = sample_weights(sizes, weights(sizes, run.config.federation.risk_weights))
    train = risk(task, state.params, shards.inputs, shards.labels, shares.to(shards.labels.device))
    found = {"train_loss": float(train.loss[0])}
    if len((held := shards.held_out).labels):
        test = risk(task, state.params, held.inputs, held.labels)
        found["test_loss"] = float(test.loss[0])
        found["test_gap"] = found["test_loss"] - found["train_loss"]
        scores = {name: float(value[0]) for name, value in test.scores.items()}
    else:
        scores = {}
    numbers = {name: one for name, one in found.items() if np.isfinite(one)}
    public = run.experiment.recipe.private and all(
        bool(one.isfinite().all()) for one in state.params.values()
    )
    if len(numbers) < len(found) and not public:
        raise NonFinite("the model is not finite after the last round: lower [local] lr")
    return numbers | scores


def _finish(run: Run, state: ServerState, measured: Record, seconds: float) -> Record:
    engine = run.config.engine
    summary = {
        **measured,
        "seconds": round(seconds, 3),
        "engine": engine.name,
        "seed": run.config.federation.seed,
        "rounds": state.round,
        "recipe": run.config.local.recipe,
        "data": run.config.data.name,
        "dtype": engine.dtype,
        "device": engine.device,
        "rounds_with_drops": sum("dropped" in record for record in _all_records(run, state)),
        "machine": machine(),
        "versions": versions(),
        "git_commit": commit(),
    }
    run.directory.finish(state, summary)
    for one in run.callbacks:
        one.on_end(copy.deepcopy(summary))
    return summary


def _all_records(run: Run, state: ServerState) -> list[Record]:
    records = run.directory.records()
    if len(records) != state.round:
        raise InputError(f"a line of {run.directory.path}/rounds.jsonl was damaged: {AFRESH}")
    return records


def _spent(records: Sequence[Record], name: str = "seconds") -> float:
    """Seconds that the kept rounds took before the run was interrupted."""
    return float(records[-1].get(name, 0.0)) if records else 0.0
