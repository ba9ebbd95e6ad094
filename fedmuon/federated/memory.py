"""About how much memory a run will take, before it is taken, beside what this machine has.

The estimate counts the large arrays that live at once; an interpreter with its libraries comes to
it. What it says is meant to be wrong by less than the sizes that no machine has.
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
DOUBLE, LEAST = 8, 1 << 28  # bytes; a run of less is not worth a look at the machine
BATCHED = 1 << 20  # rows that are evaluated together, as in `evaluate`
CLIENT, PARTICIPANT = 200, 6500  # bytes that were measured of those with two samples: 100,000 of
# one kind, 20,000 and 50,000 of the other; what they see, their draws, states and replies
COPIES = 8  # of the parameters: model, states, gradients and temporaries
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
    """Refuse data, partition and schedule that this machine cannot hold; samples have that shape,
    and the source holds `stored` of them, 0 if it makes as many as are asked for."""
    _refuse(_of_data(config, shape, stored, itemsize))


def require_room_for_parameters(
    config: Config, entries: int, size: int, device: torch.device
) -> None:
    """The same for a model of so many parameters of `size` bytes, not made yet."""
    if device.type == "cpu":
        _refuse({"model": _of_parameters(config, entries, size, 1)})


def require_room_for_model(
    config: Config, task: Task, classes: int, rows: int, replicas: int = 1
) -> None:
    """The same for `replicas` models of the task, learnt from so many rows; another device's memory
    is its own, and says itself when it runs out."""
    if task.device.type == "cpu":
        _refuse(_of_model(config, task, classes, rows, replicas))


def _of_data(config: Config, shape: tuple[int, ...], stored: int, itemsize: int) -> dict[str, int]:
    data, federation = config.data, config.federation
    row, asked = int(np.prod(shape, dtype=object)), data.train + data.test
    n = min(asked, stored) if stored else asked
    width = 4 if data.normalize == "pixels" or data.name in TEXTS else DOUBLE
    centres = data.classes * row * DOUBLE if data.name == "synthetic" else 0
    held = row * (itemsize * (stored or n) + (width + DOUBLE) * n)
    return {
        "samples": held + 8 * DOUBLE * n + centres,
        "clients": CLIENT * federation.clients + PARTICIPANT * federation.per_round,
        "schedule": 2 * DOUBLE * federation.rounds * federation.per_round,
    }


def _of_model(config: Config, task: Task, classes: int, rows: int, replicas: int) -> dict[str, int]:
    size, entries = task.dtype.itemsize, _entries(task)
    together = min(config.federation.per_round, max(1, task.stack_limit // max(1, entries)))
    batch = config.local.batch or rows // config.federation.clients
    if isinstance(task, NetworkTask):  # sees a bounded number of samples at once, at least one
        seen = 3 * task.saved
    else:
        seen = 4 * classes * max(together * min(batch, rows), min(rows, BATCHED // replicas))
    return {
        "model": _of_parameters(config, entries, size, replicas),
        "activations": seen * replicas * size,
    }


def _of_parameters(config: Config, entries: int, size: int, replicas: int) -> int:
    """A run holds some copies of its parameters, and two with every reply."""
    return entries * replicas * size * (COPIES + 2 * config.federation.per_round)


def _entries(task: Task) -> int:
    """Parameters of one model."""
    if isinstance(task, NetworkTask):
        return sum(value.numel() for value in task.module.parameters())
    return task.dimension * task.classes if isinstance(task, MatrixTask) else 0


def _refuse(parts: dict[str, int]) -> None:
    needed = sum(parts.values())
    if needed <= LEAST or needed <= (most := machine_memory()):
        return
    largest = max(parts, key=lambda name: parts[name])
    raise InputError(
        f"this run needs about {_said(needed)} of memory, {_said(parts[largest])} of it for its "
        f"{largest}, and the machine has {_said(most)}: lower {MENDS[largest]}"
    )


def _said(count: int) -> str:
    return f"{count / 2**30:,.3g} GiB" if count < 2**40 else f"{count / 2**30:,.0f} GiB"


def machine_memory() -> int:
    """Bytes that this process may hold: the machine's, or its control groups' where that is less.

    What other processes hold just now is left out, so that the answer is the same every time.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits()])


def _limits() -> list[int]:
    """Limits of this process's control groups and all that they are in, of either version."""
    try:
        lines = OWN.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers == "":
            found += _upwards(GROUPS, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _upwards(GROUPS / "memory", path, "memory.limit_in_bytes")
    return found


def _upwards(root: Path, path: str, name: str) -> list[int]:
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
