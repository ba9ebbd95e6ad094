"""Reject a run that this machine cannot hold, before its memory is allocated.

The estimate counts the large arrays that live at once, without the interpreter and its libraries.
It is meant to find sizes that no machine has, not to be exact.
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
DOUBLE, LEAST = 8, 1 << 28  # bytes; smaller runs are not checked
BATCHED = 1 << 20  # rows that are evaluated together, as in `evaluate`
CLIENT, PARTICIPANT = 200, 6500  # bytes that were measured of those with two samples: 100,000 of
# one kind, 20,000 and 50,000 of the other; what they see, their draws, states and replies
COPIES = 8  # copies of the parameters: model, states, gradients, temporaries
MENDS = {
    "samples": "[data] train, test or dimension",
    "clients": "[federation] clients or per-round",
    "schedule": "[federation] rounds or per-round",
    "model": "the size of the model, [federation] per-round or trials",
    "activations": "[local] batch or the size of the model",
}


def require_room(
    config: Config, shape: tuple[int, ...], stored: int = 0, itemsize: int = DOUBLE
) -> None:
    """Reject data, a partition and a schedule that this machine cannot hold.

    Args:
        config: The run.
        shape: That of a sample.
        stored: How many samples the source holds; 0 if it makes as many as are asked for.
        itemsize: Bytes of a stored number.
    """
    data, federation = config.data, config.federation
    row = int(np.prod(shape, dtype=object))
    asked = data.train + data.test + data.validation_samples
    n = min(asked, stored) if stored else asked
    width = 4 if data.normalize == "pixels" or data.name in TEXTS else DOUBLE
    centres = data.classes * row * DOUBLE if data.name == "synthetic" else 0
    held = row * (itemsize * (stored or n) + (width + DOUBLE) * n)
    parts = {
        "samples": held + 8 * DOUBLE * n + centres,
        "clients": CLIENT * federation.clients + PARTICIPANT * federation.per_round,
        "schedule": 2 * DOUBLE * federation.rounds * federation.per_round,
    }
    _refuse(parts)


def require_room_for_parameters(
    config: Config, entries: int, size: int, device: torch.device
) -> None:
    """The same for a model of so many parameters of `size` bytes, not made yet."""
    if device.type == "cpu":
        _refuse({"model": _of_parameters(config, entries, size, 1)})


def require_room_for_model(
    config: Config, task: Task, classes: int, rows: int, replicas: int = 1
) -> None:
    """The same for `replicas` models of the task, learnt from so many rows.

    The memory of another device is its own; the device raises an error when it runs out.
    """
    if task.device.type != "cpu":
        return
    size, entries, seen = task.dtype.itemsize, 0, 0
    if isinstance(task, NetworkTask):
        entries = sum(value.numel() for value in task.module.parameters())
    elif isinstance(task, MatrixTask):
        entries = task.dimension * task.classes
    if isinstance(task, NetworkTask):  # sees a bounded number of samples at once, at least one
        seen = 3 * task.saved
    else:
        together = min(config.federation.per_round, max(1, task.stack_limit // max(1, entries)))
        batch = config.local.batch or rows // config.federation.clients
        seen = 4 * classes * max(together * min(batch, rows), min(rows, BATCHED // replicas))
    model = _of_parameters(config, entries, size, replicas)
    _refuse({"model": model, "activations": seen * replicas * size})


def _of_parameters(config: Config, entries: int, size: int, replicas: int) -> int:
    """A run holds some copies of its parameters, and two with every reply."""
    return entries * replicas * size * (COPIES + 2 * config.federation.per_round)


def _refuse(parts: dict[str, int]) -> None:
    """Reject a run whose parts need more bytes than the machine has."""
    needed = sum(parts.values())
    if needed <= LEAST or needed <= (most := machine_memory()):
        return
    largest = max(parts, key=lambda name: parts[name])
    raise InputError(
        f"this run needs about {_said(needed)} of memory, {_said(parts[largest])} of it for its "
        f"{largest}, but the machine has {_said(most)}: lower {MENDS[largest]}"
    )


def _said(count: int) -> str:
    return f"{count / 2**30:,.3g} GiB" if count < 2**40 else f"{count / 2**30:,.0f} GiB"


def machine_memory() -> int:
    """Bytes that this process may hold: the machine's, or its control groups' where that is less.

    What other processes hold just now is left out, so that the answer is the same every time.
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = OWN.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return found[0]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers == "":
            found += _limits(GROUPS, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(GROUPS / "memory", path, "memory.limit_in_bytes")
    return min(found)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """The limits of a group's folder and those above it; a container may see its own as root."""
    group = root / path.strip("/")
    folders = [group, *(above for above in group.parents if above.is_relative_to(root))]
    found = []
    for folder in folders:
        try:
            text = (folder / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        found += [int(text)] if text.isdigit() and int(text) > 0 else []
    return found
