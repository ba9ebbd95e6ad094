"""One run with any engine: from a config to a run folder, which can be resumed at any moment.

An engine is a function that yields finished rounds. `prepare` writes all files that do not change
after the first round begins. `train` requests rounds from the engine, evaluates and records each
round, calls the callbacks and saves checkpoints. The engine `inline` and the Flower server both use
these two functions.
"""

import contextlib
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from safetensors.numpy import save
from torch import nn

from fedmuon.config.load import Config, dump, load
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import guard, make_named, user_objects
from fedmuon.core.arrays import array_bytes, npy_bytes, tensor_bytes, to_numpy
from fedmuon.core.choices import OF_A_ROUND
from fedmuon.core.errors import Guard, InputError, Interrupted, NonFinite
from fedmuon.core.files import AFRESH, read_bytes
from fedmuon.data.federated import FederatedData
from fedmuon.data.partition import weights
from fedmuon.federated.accountant import RunAccountant, require_accountable, with_noise
from fedmuon.federated.build import ResolvedConfig, build_experiment
from fedmuon.federated.build_recipe import build_recipe, routes, routing_of
from fedmuon.federated.client_data import build_data, forget_source, read_source
from fedmuon.federated.client_states import ClientStates
from fedmuon.federated.clock import Timetable
from fedmuon.federated.evaluation import client_means, risk, sample_weights
from fedmuon.federated.experiment import Engine, Experiment, Round
from fedmuon.federated.personal import personal_means, tests_personal_models, tuning_steps
from fedmuon.federated.rounds import begin
from fedmuon.federated.wire import named, unpack
from fedmuon.optim.chain import PERSONAL
from fedmuon.optim.routing import RoutingTable
from fedmuon.optim.stage import ServerState
from fedmuon.runs import fingerprints
from fedmuon.runs.callbacks import CALLBACKS, Callback, Listener, as_callback
from fedmuon.runs.data_notes import names_of_clients
from fedmuon.runs.directory import (
    CLIENT_STATES,
    CLOCK,
    NO_FILES,
    PERSONAL_MODELS,
    UNTRAINED,
    Record,
    RunDirectory,
    answered,
)
from fedmuon.runs.provenance import commit, machine, versions
from fedmuon.tasks.base import split_statistics
from fedmuon.tasks.networks import NetworkTask

OLDER = "older."  # prefix of the names of older models in a checkpoint
LOSSES = ("train_loss", "test_loss", "test_gap", "validation_loss")
OnRoundEnd = Callable[[Record], None]
OnStart = Callable[[int, int], None]  # (rounds already done, total number of rounds)


@runtime_checkable
class Measured(Protocol):
    """An engine that runs clients in separate processes and measures their memory."""

    def memory(self) -> list[Record]:
        """Return the maximum memory of each client process so far, in bytes."""
        ...


@dataclass(frozen=True)
class Run:
    """An experiment, with its data and its run folder."""

    config: ResolvedConfig
    data: FederatedData
    experiment: Experiment
    directory: RunDirectory
    callbacks: tuple[Callback, ...] = ()


def prepare(
    config: ResolvedConfig,
    out: Path,
    resume: bool = False,
    callbacks: Sequence[Callback | Listener] = (),
    require: Callable[[Experiment], object] = lambda experiment: None,
    more_files: Mapping[str, bytes] = NO_FILES,
) -> Run:
    """Build the experiment, and write all files that no longer change once the run has begun.

    Args:
        config: The resolved config. If it sets a target epsilon and no noise, config.toml of the
            run contains the noise that reaches this epsilon.
        out: The run folder.
        resume: Whether the folder may contain a run to resume.
        callbacks: Callbacks, which are called before the callback that the config names.
        require: A function that may raise an error about the experiment before any file is written.
        more_files: Names of further files that grow during the run, with their first bytes.
    """
    source = read_source(config)
    objects = fingerprints.described(config, out, source, afresh=not resume)
    known = fingerprints.require_same(out, objects) if resume else {}
    data = build_data(config, source)
    del source
    if config.engine.name != "inline":
        forget_source()  # clients in other processes read their own source
    experiment = build_experiment(config, data)
    plan, factors = fingerprints.with_factors(experiment.plan, config, known)
    experiment = dataclasses.replace(experiment, plan=plan, measured=config.output.clients)
    fresh = begin(experiment.recipe, experiment.task, config.federation.seed)
    if experiment.recipe.private:
        found = with_noise(config, experiment, data.sizes, fresh.params)
        if found is not config:
            config, recipe = found, build_recipe(found, experiment.task)
            experiment = dataclasses.replace(experiment, recipe=recipe)
        require_accountable(config, experiment, data.sizes, fresh)
    require(experiment)
    directory = RunDirectory(out)
    if resume:
        directory.require_resumable()
    directory.create(resume)
    unknown = np.empty((plan.rounds, 0), np.int64)  # a Poisson cohort is unknown before its round
    uniform = not plan.poisson and not plan.biased
    fixed = {
        "config.toml": _config_bytes(config, out / "config.toml"),
        "partition.npz": array_bytes(**_split(config, data)),
        "schedule.npy": npy_bytes(plan.schedule() if uniform else unknown),
        "initial.safetensors": tensor_bytes(fresh.params),
    }
    fixed |= names_of_clients(data)
    if plan.timetable is not None:
        fixed[CLOCK] = array_bytes(**plan.timetable.arrays())
    if isinstance(experiment.task, NetworkTask):
        fixed["routes.txt"] = _routes_bytes(config, experiment.task, out / "routes.txt")
    if experiment.recipe.keeps_states and config.engine.name != "inline":
        fixed |= directory.identity()
    told = objects | factors
    if told and (known or not (out / "summary.json").exists()):  # older runs may lack it
        fixed[fingerprints.FILE] = (json.dumps(told, sort_keys=True) + "\n").encode()
    directory.fix(fixed, more_files)
    if experiment.recipe.keeps_states:
        memory = ClientStates(out / CLIENT_STATES, directory.run_id)
        experiment = dataclasses.replace(experiment, client_states=memory)
    named = make_named(config, "callback", CALLBACKS, (Callback,))
    with Guard("callbacks", callbacks):
        given = [*callbacks]
    listeners = [*map(as_callback, given)]
    if named is not None:
        listeners.append(as_callback(named, guard(config, "callback")))
    return Run(config, data, experiment, directory, tuple(listeners))


def train(
    run: Run,
    engine: Engine,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
) -> Record:
    """Run the remaining rounds, and return the summary. If the run has finished, change nothing.

    Args:
        run: The prepared run.
        engine: The engine, which yields finished rounds.
        on_round_end: A function that is called with the record of each round, before the callbacks.
        on_start: A function that is called once, with the number of finished rounds and the total
            number of rounds.
    """
    config, experiment, directory = run.config, run.experiment, run.directory
    if (summary := directory.summary()) is not None:
        directory.require_sound()
        directory.forget_checkpoints()
        experiment.client_states.remove()
        return summary
    fresh = begin(experiment.recipe, experiment.task, config.federation.seed)
    state = restored(directory, fresh)
    accountant = None
    if experiment.recipe.private:  # before records are cut back, because they prove releases
        ledger, head = directory.path / "ledger.jsonl", directory.ledger_head()
        seen_before = directory.rounds_begun(), directory.opened_ledger()
        known = config, experiment, run.data.sizes, state, head, *seen_before
        accountant = RunAccountant.open(ledger, *known)
    earlier, record = directory.cut_back(state.round, config.output.clients), {}
    seen = Counter(client for one in earlier for client in answered(one))  # rounds per client
    memory = experiment.client_states
    if experiment.recipe.keeps_states:
        latest = {client: one["round"] - 1 for one in earlier for client in answered(one)}
        memory.restore(state.round, latest, directory.saved_rounds())

    def save() -> None:
        head = accountant.ledger.head if accountant else ""
        memory.flush()
        directory.checkpoint(state.round, to_numpy(_tensors(state)), head)
        memory.commit(state.round)

    # Every private release is spent privacy. Save after each round, so that a kill does not waste
    # it.
    every, last = 1 if accountant else config.output.checkpoint_every, config.federation.rounds
    on_start(state.round, last)
    before = earlier[-1] if earlier else {}
    start = time.monotonic() - float(before.get("seconds", 0.0))
    trained, stopped = float(before.get("train_seconds", 0.0)), ""
    with directory.failing(), _saving(save, InputError, Interrupted, KeyboardInterrupt):
        rounds = engine(experiment, state)
        # In a private run, the ledger records a round before anything of the round is drawn.
        rounds = accountant.ahead(rounds, state.round) if accountant else rounds
        asked = time.monotonic()
        for result in rounds:
            trained += time.monotonic() - asked  # excludes evaluation and writing
            record = _record(run, result, trained, time.monotonic() - start)
            directory.append(record, _of_clients(result, seen, run.data))
            state = result.state  # after its record is written: a signal may come at any time
            with _saving(save, Exception, SystemExit):  # a callback may raise any error
                on_round_end(record)
                answers = (callback.on_round(record, state) for callback in run.callbacks)
                stopped = str(next(filter(None, answers), ""))  # the first reason to stop
            if stopped:
                break
            if state.round % every == 0 and state.round < last:
                save()
            asked = time.monotonic()
        took = time.monotonic() - start
        workers = engine.memory() if isinstance(engine, Measured) else []
        return _finish(run, state, record, accountant, stopped, took, workers)


def _config_bytes(config: Config, held: Path) -> bytes:
    """Return the content of config.toml for a config.

    If the existing file `held` describes the same config, return its content. A file of an older
    version may contain fewer keys and still describe the same config.
    """
    text = dump(config).encode()
    if not held.exists():
        return text
    with contextlib.suppress(InputError):
        if dump(load(held)).encode() == text:
            return read_bytes(held)
    return text


def _of_clients(result: Round, seen: Counter[int], data: FederatedData) -> list[Record]:
    """Return the records of a round's clients for clients.jsonl.

    `seen` counts each client's rounds.
    """
    found: list[Record] = []
    for one in result.clients:
        seen[one["client"]] += 1
        about = {"round": result.state.round, "client": one["client"]}
        about |= {**data.named(one["client"]), "samples": one["samples"]}
        found.append({**about, "participations": seen[one["client"]], **one})
    return found


def _tensors(state: ServerState) -> dict[str, torch.Tensor]:
    """Return the tensors of the model and of its states, by name.

    Older models are included if clients are still training from them.
    """
    found = named(state.params, state.states)
    for one in state.older:
        at = named(one.params, one.states)
        found |= {f"{OLDER}{one.round}/{name}": value for name, value in at.items()}
    return found


def restored(directory: RunDirectory, fresh: ServerState) -> ServerState:
    """Return the state in the last valid checkpoint, with the shapes and devices of `fresh`.

    If there is no checkpoint, return `fresh`.
    """
    if (held := directory.newest_checkpoint()) is None:
        return fresh
    arrays, about = held
    try:
        tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
        older: dict[int, dict[str, torch.Tensor]] = {}
        for name in [name for name in tensors if name.startswith(OLDER)]:
            number, _, plain_name = name.removeprefix(OLDER).partition("/")
            older.setdefault(int(number), {})[plain_name] = tensors.pop(name)
        known = tuple(
            ServerState(number, *unpack(older[number], fresh.params, fresh.states))
            for number in sorted(older)
        )
        found = unpack(tensors, fresh.params, fresh.states)
        return ServerState(int(about["round"]), *found, known)
    except (InputError, KeyError, ValueError) as error:
        raise InputError(
            f"the checkpoint in {directory.path} does not match this config ({error}): use the "
            f"config with which the run started, or {AFRESH}"
        ) from None


def end_bytes(state: ServerState) -> tuple[bytes, bytes]:
    """Return the contents of two files: the final model, and the momentum of the optimizer.

    If the optimizer has no momentum, the file of the momentum contains zeros.
    """
    learned, _ = split_statistics(state.params)
    zeros = {name: torch.zeros_like(value) for name, value in learned.items()}
    return tensor_bytes(state.params), tensor_bytes(state.states.get("momentum", zeros))


@contextlib.contextmanager
def _saving(save: Callable[[], None], *errors: type[BaseException]) -> Iterator[None]:
    """Call `save` if the work within this context raises one of the errors `errors`."""
    try:
        yield
    except errors:
        with contextlib.suppress(InputError):  # keep the error that stopped the run
            save()
        raise


def _record(run: Run, result: Round, trained: float, seconds: float) -> Record:
    """Return the record of a round for rounds.jsonl.

    If the round is evaluated, the record also contains the results.
    """
    state = result.state
    record: Record = {"round": state.round, "participants": result.participants.tolist()}
    if (clock := run.experiment.plan.timetable) is not None:
        record["participants"] = clock.selected[state.round - 1].tolist()
        record["simulated_seconds"] = float(clock.seconds[state.round - 1])
        if clock.versions:
            record["staleness"] = (state.round - 1 - clock.versions[state.round - 1]).tolist()
    if np.isfinite(result.loss[0]):  # a private client reports no loss
        record["client_loss"] = float(result.loss[0])
    if result.faults:
        record["faults"] = [dataclasses.asdict(fault) for fault in result.faults]
    if dropped := sorted(set(record["participants"]) - set(result.answered.tolist())):
        record["dropped"] = dropped
    record |= sent_bytes(clock, result)
    if state.round % run.config.output.evaluate_every == 0 or (
        state.round == run.config.federation.rounds
    ):
        record |= evaluate(run, state)
    return {**record, "train_seconds": round(trained, 4), "seconds": round(seconds, 4)}


def sent_bytes(clock: Timetable | None, result: Round) -> Record:
    """Return `bytes_down` and `bytes_up` of a round.

    Clients that were lost also received the model.
    """
    each = result.bytes_down // max(1, len(result.participants))
    asked = result.participants if clock is None else clock.selected[result.state.round - 1]
    lost = clock.lost[result.state.round - 1] if clock is not None and clock.lost else 0
    return {"bytes_down": each * (len(asked) + lost), "bytes_up": result.bytes_up}


def evaluate(run: Run, state: ServerState) -> Record:
    """Measure the losses and scores of a model.

    The record contains the weighted train loss. If there are test samples, it also contains the
    test loss, its difference from the train loss, and the task's other scores. Validation samples
    are measured in the same way.

    In a private run, a single example can make the loss infinite. The run then continues, and the
    record contains no loss. A private run ends only if its model, which is public, is not finite.
    """
    task, shards = run.experiment.task, run.experiment.shards
    sizes = run.data.sizes
    shares = sample_weights(sizes, weights(sizes, run.config.federation.risk_weights))
    train = risk(task, state.params, shards.inputs, shards.labels, shares.to(shards.labels.device))
    found = {"train_loss": float(train.loss[0])}
    if len((held := shards.held_out).labels):
        test = risk(task, state.params, held.inputs, held.labels)
        found["test_loss"] = float(test.loss[0])
        found["test_gap"] = found["test_loss"] - found["train_loss"]
        found |= {name: float(score[0]) for name, score in test.scores.items()}
    if (kept := shards.validation) is not None and len(kept.labels):
        measured = risk(task, state.params, kept.inputs, kept.labels)
        found["validation_loss"] = float(measured.loss[0])
        found |= {f"validation_{name}": float(one[0]) for name, one in measured.scores.items()}
    lost = [name for name in LOSSES if not np.isfinite(found.get(name, 0.0))]
    public = run.experiment.recipe.private and all(
        bool(one.isfinite().all()) for one in state.params.values()
    )
    if lost and not public:
        raise NonFinite("the model is not finite after the last round. Lower [local] lr.")
    return {name: one for name, one in found.items() if name not in lost}


def _untrained(run: Run) -> Record:
    """Return the results of the untrained model, so that curves start before the first round.

    If the results are not finite, return an empty record.
    """
    fresh = begin(run.experiment.recipe, run.experiment.task, run.config.federation.seed)
    try:
        return evaluate(run, fresh)
    except NonFinite:
        return {}


def _split(config: Config, data: FederatedData) -> dict[str, np.ndarray]:
    """Return the indices of the train samples with their clients, and of all held-out samples."""
    split = {"train_index": data.train_index, "client": data.client, "test_index": data.test_index}
    if config.data.validation:
        split["validation_index"] = data.validation_index
    if data.public:  # these samples follow all others in the source
        split["public_index"] = data.source_size + np.arange(data.public)
    if config.data.client_test:
        tested = np.repeat(np.arange(config.federation.clients), np.diff(data.client_test_offsets))
        split |= {"client_test_index": data.client_test_index, "client_test_client": tested}
    return split


def routing(config: Config, network: nn.Module) -> RoutingTable:
    """Return the optimizer of each parameter of a network, for the optimizer of the config."""
    table = routes(network, *routing_of(config))
    if user_objects(config).recipe is not None or reads(config, "local.route"):
        return table
    named = (one._replace(matrices=None, optimizer=config.local.recipe, reason="") for one in table)
    return RoutingTable(named)


def _routes_bytes(config: Config, task: NetworkTask, file: Path) -> bytes:
    """Return the content of routes.txt, which names the optimizer of each parameter.

    In run folders of older versions, routes.txt names Muon for every optimizer. This function keeps
    the content of such a file.
    """
    older = f"{routes(task.module, *routing_of(config))}\n".encode()
    known = file.exists() and read_bytes(file) == older
    return older if known else f"{routing(config, task.module)}\n".encode()


def over_clients(run: Run, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
    """Measure the shared model and personal models on each client's own test samples.

    The measure is the score of the task, or the loss if the task has no score. The record contains
    the mean, the standard deviation and the worst tenth over the clients. If there are personal
    models, also return a table with the results of each client.
    """
    tests = run.experiment.shards.client_test
    if tests is None or not len(tests.labels):
        return {}, NO_FILES
    shared = client_means(run.experiment.task, state.params, tests)
    measured = {name: values[0] for name, values in shared.items()}
    names = [name for name in measured if name != "loss"] or ["loss"]
    columns, files = {name: measured[name] for name in names}, NO_FILES
    if tests_personal_models(run.config, run.experiment.recipe):
        own = personal_means(run.experiment, state, tuning_steps(run.config))
        columns |= {f"personal_{name}": own[name] for name in names}
        clients = np.flatnonzero(np.diff(tests.offsets))
        head = [
            "client",
            "samples",
            *(f"{of}_{name}" for name in names for of in ("global", "personal")),
        ]
        cells = [clients.tolist(), np.diff(tests.offsets)[clients].tolist()]
        cells += [columns[of + name].tolist() for name in names for of in ("", "personal_")]
        lines = [",".join(map(str, row)) for row in (head, *zip(*cells, strict=True))]
        files = {"personal.csv": ("\n".join(lines) + "\n").encode()}
    return {
        f"client_test_{name}{part}": value
        for name, values in columns.items()
        for part, value in distribution(values, name.removeprefix("personal_")).items()
        if np.isfinite(value)
    }, files


def _personal_models(run: Run, state: ServerState) -> Mapping[str, bytes]:
    """Return the personal parameters of all clients that took part, with client numbers.

    The result is empty if the nodes of the clients store these parameters.
    """
    memory, every = run.experiment.client_states, range(run.config.federation.clients)
    if not run.experiment.recipe.personalizes:
        return NO_FILES
    states = {i: memory.read(i, state.round) for i in every}
    models = {i: own[PERSONAL] for i, own in states.items() if PERSONAL in own}
    if not models:
        return NO_FILES
    names = next(iter(models.values()))
    stacked = {
        name: np.stack([own[name][0].cpu().numpy() for own in models.values()]) for name in names
    }
    return {PERSONAL_MODELS: save({**stacked, "client": np.array(list(models), np.int64)})}


WORST = {"accuracy": "lowest", "loss": "highest"}


def distribution(values: np.ndarray, name: str) -> dict[str, float]:
    """Return the mean, the standard deviation, and the mean of the worst tenth of the values.

    For a custom metric, it is unknown whether larger values are better. The result then contains
    the means of both the lowest and the highest tenth.
    """
    ordered, tenth = np.sort(values), -(-len(values) // 10)
    ends = {"lowest": ordered[:tenth].mean(), "highest": ordered[-tenth:].mean()}
    if name in WORST:
        ends = {"worst": ends[WORST[name]]}
    ends = {f"_{which}_decile": float(one) for which, one in ends.items()}
    return {"": float(values.mean()), "_std": float(values.std()), **ends}


def _finish(
    run: Run,
    state: ServerState,
    record: Record,
    accountant: RunAccountant | None,
    stopped: str,
    seconds: float,
    workers: Sequence[Record],
) -> Record:
    """Write the model and the summary, and call the callbacks.

    The summary contains the results of the last round if the last round was evaluated. Otherwise,
    the model is evaluated first.
    """
    config = run.config
    summary = {name: found for name, found in record.items() if name not in OF_A_ROUND}
    of_clients, tables = over_clients(run, state)
    summary = (summary or evaluate(run, state)) | of_clients
    summary[UNTRAINED] = _untrained(run)
    if stopped:
        summary["stopped"] = stopped
    if (clock := run.experiment.plan.timetable) is not None:
        summary["simulated_seconds"] = float(clock.seconds[state.round - 1])
    if accountant:
        summary["privacy"] = accountant.summary(bool(stopped))
    records = run.directory.records()
    if len(records) != state.round:
        raise InputError(
            f"a line of {run.directory.path}/rounds.jsonl is damaged: restore the file from a "
            f"copy, or {AFRESH}"
        )
    summary |= {
        "seconds": round(seconds, 3),
        "engine": config.engine.name,
        "seed": config.federation.seed,
        "rounds": state.round,
        "recipe": config.local.recipe,
        "data": config.data.name,
        "dtype": config.engine.dtype,
        "device": config.engine.device,
        "rounds_with_drops": sum("dropped" in one for one in records),
        "machine": machine(torch.get_num_threads()),
        "versions": versions(),
        "git_commit": commit(),
    }
    if workers:
        summary["workers"] = [*workers]
    run.directory.finish(*end_bytes(state), summary, {**tables, **_personal_models(run, state)})
    run.experiment.client_states.remove()
    for callback in run.callbacks:
        callback.on_end(summary)
    return summary
