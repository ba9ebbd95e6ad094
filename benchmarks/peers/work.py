"""The one job every peer runs, and the one way its result is written down.

A work file fixes everything random: the data, who holds which row, who takes part in which
round and the start. What is left is FedMuon on the matrix classifier `1 - softmax(Xᵀu)_y` with
one full-batch step per client (E = 1), so two honest implementations differ by rounding only.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Work:
    """inputs [n, d], labels [n], client [n], schedule [R, K], x0 [d, c] and three scalars."""

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    client: NDArray[np.int64]
    schedule: NDArray[np.int64]
    x0: NDArray[np.float32]
    lr: float
    lam: float
    beta: float

    @property
    def clients(self) -> int:
        """N, the number of clients that hold data or take part."""
        return int(max(self.client.max(), self.schedule.max())) + 1

    def rows(self, client: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Inputs [n_i, d] and labels [n_i] of one client, in file order."""
        mine = self.client == client
        return self.inputs[mine], self.labels[mine]


def load_work(path: str | Path) -> Work:
    """Read a work file; refuse a schedule that names a client without rows."""
    with np.load(path) as file:
        work = Work(
            inputs=file["inputs"],
            labels=file["labels"],
            client=file["client"],
            schedule=file["schedule"],
            x0=file["x0"],
            lr=float(file["lr"]),
            lam=float(file["lam"]),
            beta=float(file["beta"]),
        )
    if idle := set(np.unique(work.schedule)) - set(np.unique(work.client)):
        raise ValueError(f"scheduled clients without data: {sorted(int(i) for i in idle)}")
    return work


def paths(usage: str) -> tuple[str, str]:
    """The two positional arguments WORK.npz OUT.npz, as absolute paths."""
    if len(sys.argv) != 3:
        raise SystemExit(usage)
    work, out = (str(Path(argument).resolve()) for argument in sys.argv[1:])
    return work, out


def report(peer: str, out: str | Path, x: NDArray[np.floating], stamps: list[float]) -> None:
    """Write final X [d, c] and times; print the summary as one JSON line.

    `stamps` are R + 1 clock readings in seconds: the start of the first round, then the end of
    each round. The first round is reported apart: it still pays for lazy start-up.
    """
    rounds = np.diff(stamps)
    seconds = float(stamps[-1] - stamps[0])
    np.savez(out, x=x, seconds=seconds, round_seconds=rounds)
    warm = rounds[1:] if len(rounds) > 1 else rounds
    summary = {
        "peer": peer,
        "seconds": seconds,
        "rounds": len(rounds),
        "seconds_per_round": seconds / len(rounds),
        "first_round_seconds": float(rounds[0]),
        "warm_seconds_per_round": float(warm.mean()),
        "median_warm_seconds_per_round": float(np.median(warm)),
    }
    print(json.dumps(summary), flush=True)
