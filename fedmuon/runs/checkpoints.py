"""Checkpoints: the server's state and the clients' states, from which a killed run is resumed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from fedmuon.core.arrays import to_numpy
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, Record
from fedmuon.federated.wire import named, unpack
from fedmuon.optim.adapter_means import ADAPTERS
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import RunDirectory, answered
from fedmuon.runs.prepare import Run
from fedmuon.tasks.base import Params

OLDER = "older."  # prefix of the names of older models in a checkpoint
OBSERVED = "observed."  # prefix of the names of tensors of observers


def restored(directory: RunDirectory, fresh: ServerState) -> ServerState:
    """Return the state in the last valid checkpoint, with the shapes and devices of `fresh`.

    If there is no checkpoint, return `fresh`.
    """
    if (checkpoint := directory.newest_checkpoint()) is None:
        return fresh
    arrays, about = checkpoint
    try:
        tensors = {
            name: torch.from_numpy(value)
            for name, value in arrays.items()
            if not name.startswith(OBSERVED)
        }
        # Earlier versions did not measure the error of adapters.
        measured = {ADAPTERS: fresh.states[ADAPTERS]} if ADAPTERS in fresh.states else {}
        tensors = named({}, measured) | tensors
        older: dict[int, dict[str, torch.Tensor]] = {}
        for name in [name for name in tensors if name.startswith(OLDER)]:
            number, _, plain_name = name.removeprefix(OLDER).partition("/")
            older.setdefault(int(number), {})[plain_name] = tensors.pop(name)
        states = tuple(
            ServerState(number, *unpack(older[number], fresh.params, fresh.states))
            for number in sorted(older)
        )
        params_and_states = unpack(tensors, fresh.params, fresh.states)
        return ServerState(int(about["round"]), *params_and_states, states)
    except (InputError, KeyError, ValueError) as error:
        raise InputError(
            f"the checkpoint in {directory.path} does not match this config ({error}): use the "
            f"config with which the run started, or {AFRESH}"
        ) from None


def restore_client_states(run: Run, round: int, earlier: Sequence[Record]) -> None:
    """Restore the states that clients stored until the checkpoint after `round` rounds.

    Args:
        run: The run.
        round: Number of rounds before the checkpoint.
        earlier: The records of these rounds.
    """
    if run.experiment.recipe.keeps_states:
        latest = {client: record["round"] - 1 for record in earlier for client in answered(record)}
        run.experiment.client_states.restore(round, latest, run.directory.saved_rounds())


def stored_by_observers(directory: RunDirectory, prefix: str) -> Params:
    """Return the tensors of an observer in the last valid checkpoint, without their prefix.

    If there is no checkpoint, or the observer stored nothing, the result is empty.
    """
    arrays, _ = directory.newest_checkpoint() or ({}, {})
    start = OBSERVED + prefix
    return {
        name.removeprefix(start): torch.from_numpy(value)
        for name, value in arrays.items()
        if name.startswith(start)
    }


def save_checkpoint(
    run: Run, state: ServerState, ledger: str, of_observers: Sequence[Params] = ()
) -> None:
    """Write the states of the clients that are in no file yet, and then the checkpoint.

    Args:
        run: The run.
        state: The server's state.
        ledger: The hash of the last entry in the ledger of a private run.
        of_observers: Further tensors, see `Observer.tensors`.
    """
    memory = run.experiment.client_states
    memory.flush()
    tensors = _tensors(state)
    for observed in of_observers:
        tensors |= {OBSERVED + name: value for name, value in observed.items()}
    run.directory.checkpoint(state.round, to_numpy(tensors), ledger)
    memory.commit(state.round)


def _tensors(state: ServerState) -> dict[str, torch.Tensor]:
    """Return the tensors of the model and of its states, by name.

    Older models are included if clients are still training from them.
    """
    tensors = named(state.params, state.states)
    for older in state.older:
        values = named(older.params, older.states)
        tensors |= {f"{OLDER}{older.round}/{name}": value for name, value in values.items()}
    return tensors


@contextlib.contextmanager
def saving(save: Callable[[], None], *errors: type[BaseException]) -> Iterator[None]:
    """Call `save` if the work within this context raises one of the errors `errors`."""
    try:
        yield
    except errors:
        with contextlib.suppress(InputError):  # keep the error that stopped the run
            save()
        raise
