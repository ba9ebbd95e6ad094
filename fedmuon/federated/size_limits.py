"""Reject a run that does not fit into this machine's memory, before the memory is allocated.

The estimate counts the large arrays that exist at the same time, without the interpreter and its
libraries. The estimate is not exact. The check finds only runs that are much too large.
"""

import os
from pathlib import Path

import numpy as np
import torch

from fedmuon.config.load import Config
from fedmuon.core.choices import TEXTS
from fedmuon.core.errors import InputError
from fedmuon.tasks.base import Task
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
DOUBLE, LEAST = 8, 1 << 28  # bytes; runs that need less than LEAST are not checked
BATCHED = 1 << 20  # number of rows that are evaluated together, as in `evaluate`
# Measured bytes per client and per participant with two samples each (with 100,000 clients, and
# with 20,000 and 50,000 participants): samples, draws, states and replies.
CLIENT, PARTICIPANT = 200, 6500
COPIES = 8  # copies of the parameters: model, states, gradients, temporaries
MENDS = {
    "samples": "[data] train, test or dimension",
    "clients": "[federation] clients or per-round",
    "schedule": "[federation] rounds or per-round",
    "model": "the size of the model, [federation] per-round or trials",
    "weights": "the size of the model in [task] weights",
    "activations": "[local] batch or the size of the model",
}


def require_room(
    config: Config, shape: tuple[int, ...], stored: int = 0, itemsize: int = DOUBLE
) -> None:
    """Raise an error if the data, the partition or the schedule does not fit into memory.

    Args:
        config: The config of the run.
        shape: Shape of a sample.
        stored: Number of samples in the source, or 0 if the source generates samples.
        itemsize: Bytes of a stored number.
    """
    data, federation = config.data, config.federation
    row = int(np.prod(shape, dtype=object))
    samples = data.train + data.test + data.validation_samples
    n = min(samples, stored) if stored else samples
    width = 4 if data.normalize == "pixels" or data.name in TEXTS else DOUBLE
    centres = data.classes * row * DOUBLE if data.name == "synthetic" else 0
    source_bytes = row * (itemsize * (stored or n) + (width + DOUBLE) * n)
    parts = {
        "samples": source_bytes + 8 * DOUBLE * n + centres,
        "clients": CLIENT * federation.clients + PARTICIPANT * federation.per_round,
        "schedule": 2 * DOUBLE * federation.rounds * federation.per_round,
    }
    _refuse(parts)


def require_room_for_parameters(
    config: Config, entries: int, size: int, device: torch.device
) -> None:
    """Raise an error if a model with this number of parameters does not fit into memory."""
    if device.type == "cpu":
        _refuse({"model": _of_parameters(config, entries, size, 1)})


def require_room_for_weights(entries: int, size: int) -> None:
    """Raise an error if the frozen weights of a pretrained model do not fit into memory."""
    _refuse({"weights": entries * size})


def require_room_for_model(
    config: Config, task: Task, classes: int, rows: int, replicas: int = 1
) -> None:
    """Raise an error if training `replicas` models on `rows` samples needs too much memory.

    Only CPU memory is checked. Another device raises its own error if its memory is full.
    """
    if task.device.type != "cpu":
        return
    size, entries, activations = task.dtype.itemsize, 0, 0
    if isinstance(task, NetworkTask):
        entries = sum(value.numel() for value in task.module.parameters())
    elif isinstance(task, MatrixTask):
        entries = task.dimension * task.classes
    if isinstance(task, NetworkTask):  # processes a bounded number of samples at once, at least one
        activations = 3 * task.saved
    else:
        together = min(config.federation.per_round, max(1, task.stack_limit // max(1, entries)))
        batch = config.local.batch or rows // config.federation.clients
        activations = 4 * classes * max(together * min(batch, rows), min(rows, BATCHED // replicas))
    model = _of_parameters(config, entries, size, replicas)
    _refuse({"model": model, "activations": activations * replicas * size})


def _of_parameters(config: Config, entries: int, size: int, replicas: int) -> int:
    """Return the bytes of all copies of the parameters. Each client's reply needs two copies."""
    return entries * replicas * size * (COPIES + 2 * config.federation.per_round)


def _refuse(parts: dict[str, int]) -> None:
    """Raise an error if the parts of a run together need more bytes than the machine has."""
    needed = sum(parts.values())
    if needed <= LEAST or needed <= (available := machine_memory()):
        return
    largest = max(parts, key=lambda name: parts[name])
    raise InputError(
        f"this run needs about {_said(needed)} of memory ({_said(parts[largest])} for its "
        f"{largest}), but the machine has {_said(available)}. Lower {MENDS[largest]}."
    )


def _said(count: int) -> str:
    return f"{count / 2**30:,.3g} GiB" if count < 2**40 else f"{count / 2**30:,.0f} GiB"


def machine_memory() -> int:
    """Return the bytes that this process may use: the machine's memory, or a smaller cgroup limit.

    The result is always the same, because memory in use by other processes is not subtracted.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = OWN.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return limits[0]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers == "":
            limits += _limits(GROUPS, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(GROUPS / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """Return the memory limits of a control group and of all its parent groups."""
    group = root / path.strip("/")
    folders = [group, *(above for above in group.parents if above.is_relative_to(root))]
    limits = []
    for folder in folders:
        try:
            text = (folder / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        limits += [int(text)] if text.isdigit() and int(text) > 0 else []
    return limits
