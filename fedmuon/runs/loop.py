"""One run with any engine, from its folder to its summary. It can be resumed at any moment.

An engine is a function that yields finished rounds. `train` requests rounds from the engine, lets
the observers measure each round, appends the record of the round, and saves checkpoints. The engine
`inline` and the Flower server both use this function, after `prepare` has written the folder.
"""

import time
from collections.abc import Callable, Sequence

from fedmuon.core.errors import InputError, Interrupted
from fedmuon.federated.accountant import RunAccountant
from fedmuon.federated.experiment import Engine
from fedmuon.federated.rounds import begin
from fedmuon.optim.stage import ServerState
from fedmuon.runs.checkpoints import restore_client_states, restored, save_checkpoint, saving
from fedmuon.runs.directory import Record
from fedmuon.runs.ending import end_bytes, facts, in_order
from fedmuon.runs.observers.choice import observers_of
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run

OnRoundEnd = Callable[[Record], None]
OnStart = Callable[[int, int], None]  # (rounds already done, total number of rounds)


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
    accountant = _opened(run, state)  # before records are cut back, because they prove releases
    observers = observers_of(run, engine)
    earlier = directory.first_records(state.round)
    for observer in observers:
        observer.begin(state, earlier)
    directory.cut_back(state.round)
    restore_client_states(run, state.round, earlier)

    def save() -> None:
        tensors = [observer.tensors(state) for observer in observers]
        save_checkpoint(run, state, accountant.ledger.head if accountant else "", tensors)

    # Every private release is spent privacy. Save after each round, so that a kill does not waste
    # it.
    every, last = 1 if accountant else config.output.checkpoint_every, config.federation.rounds
    on_start(state.round, last)
    before = earlier[-1] if earlier else {}
    start = time.monotonic() - float(before.get("seconds", 0.0))
    trained, stopped = float(before.get("train_seconds", 0.0)), ""
    with directory.failing(), saving(save, InputError, Interrupted, KeyboardInterrupt):
        rounds = engine(experiment, state)
        # In a private run, the ledger records a round before its lots and noise are drawn.
        rounds = accountant.ahead(rounds, state.round) if accountant else rounds
        asked = time.monotonic()
        for finished in rounds:
            now = time.monotonic()
            trained += now - asked  # excludes evaluation and writing
            number, participants = finished.state.round, finished.participants.tolist()
            record: Record = {"round": number, "participants": participants}
            for observer in observers:
                record |= observer.after(finished, record)
            record |= {"train_seconds": round(trained, 4), "seconds": round(now - start, 4)}
            directory.append(record)
            state = finished.state  # after its record is written: a signal may come at any time
            with saving(save, Exception, SystemExit):  # a callback may raise any error
                on_round_end(record)
                reasons = (observer.react(record, state) for observer in observers)
                stopped = next(filter(None, reasons), "")  # the first reason to stop
            if stopped:
                break
            if state.round % every == 0 and state.round < last:
                save()
            asked = time.monotonic()
        return _finish(run, state, observers, accountant, stopped, start)


def _opened(run: Run, state: ServerState) -> RunAccountant | None:
    """Open the ledger of a private run, which continues from `state`."""
    if not run.experiment.recipe.private:
        return None
    ledger, head = run.directory.path / "ledger.jsonl", run.directory.ledger_head()
    seen_before = run.directory.rounds_begun(), run.directory.opened_ledger()
    experiment, sizes = run.experiment, run.data.sizes
    return RunAccountant.open(ledger, run.config, experiment, sizes, state, head, *seen_before)


def _finish(
    run: Run,
    state: ServerState,
    observers: Sequence[Observer],
    accountant: RunAccountant | None,
    stopped: str,
    start: float,
) -> Record:
    """Measure the final model, write it and the summary, and tell the observers.

    The seconds of the summary count from `start`, so they include the final measurements.
    """
    summary: Record = {}
    files: dict[str, bytes] = {}
    for observer in observers:
        fields, contents = observer.end(state)
        summary |= fields
        files |= contents
    if stopped:
        summary["stopped"] = stopped
    if accountant:
        summary["privacy"] = accountant.summary(bool(stopped))
    summary = in_order(summary | facts(run, state.round, time.monotonic() - start))
    run.directory.finish(*end_bytes(state), summary, files)
    run.experiment.client_states.remove()
    for observer in observers:
        observer.close(summary)
    return summary
