"""The files that every finished run has: the final model, its momentum, and the summary."""

import torch

from fedmuon.core.arrays import tensor_bytes
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, Record
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import UNTRAINED
from fedmuon.runs.prepare import Run
from fedmuon.runs.provenance import commit, machine, versions
from fedmuon.tasks.base import split_statistics

# The order of keys in summary.json. All other keys, which are measures of the model, come first.
SUMMARY = (
    UNTRAINED, "stopped", "simulated_seconds", "privacy", "seconds", "engine", "seed", "rounds",
    "recipe", "data", "dtype", "device", "rounds_with_drops", "machine", "versions", "git_commit",
    "workers", "profile_seconds",
)  # fmt: skip


def in_order(summary: Record) -> Record:
    """Return the summary with its keys in the order of summary.json."""
    measures = {name: value for name, value in summary.items() if name not in SUMMARY}
    return measures | {name: summary[name] for name in SUMMARY if name in summary}


def facts(run: Run, rounds: int, seconds: float) -> Record:
    """Return the fields of the summary about the config, the machine and the software.

    Args:
        run: The run.
        rounds: Number of rounds that the run has finished.
        seconds: Seconds that the run took.

    Raises:
        InputError: If the record of a round is damaged.
    """
    config, records = run.config, run.directory.records()
    if len(records) != rounds:
        raise InputError(
            f"a line of {run.directory.path}/rounds.jsonl is damaged: restore the file from a "
            f"copy, or {AFRESH}"
        )
    return {
        "seconds": round(seconds, 3),
        "engine": config.engine.name,
        "seed": config.federation.seed,
        "rounds": rounds,
        "recipe": config.local.recipe,
        "data": config.data.name,
        "dtype": config.engine.dtype,
        "device": config.engine.device,
        "rounds_with_drops": sum("dropped" in record for record in records),
        "machine": machine(torch.get_num_threads()),
        "versions": versions(),
        "git_commit": commit(),
    }


def end_bytes(state: ServerState) -> tuple[bytes, bytes]:
    """Return the contents of two files: the final model, and the momentum of the optimizer.

    If the optimizer has no momentum, the file of the momentum contains zeros.
    """
    learned, _ = split_statistics(state.params)
    zeros = {name: torch.zeros_like(value) for name, value in learned.items()}
    return tensor_bytes(state.params), tensor_bytes(state.states.get("momentum", zeros))
