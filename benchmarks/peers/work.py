"""The job that every peer runs, and the format of its result.

A work file fixes all random choices: the data, the client of each row, the participants of each
round and the initial model. The job is FedMuon on the matrix classifier `1 - softmax(Xᵀu)_y` with
one full-batch step per client (E = 1). So two correct implementations differ only by rounding.
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
    """A job with all random choices.

    Attributes:
        inputs: Samples [n, d].
        labels: Labels [n].
        client: Client of each sample [n].
        schedule: Participants of each round [R, K].
        x0: Initial model [d, c].
        lr: Step size η.
        lam: Smoothing λ.
        beta: Momentum β.
    """

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
        """N: the largest client number in the data or in the schedule, plus 1."""
        return int(max(self.client.max(), self.schedule.max())) + 1

    def rows(self, client: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the inputs [n_i, d] and labels [n_i] of one client, in file order."""
        mine = self.client == client
        return self.inputs[mine], self.labels[mine]


def load_work(path: str | Path) -> Work:
    """Read a work file, and raise ValueError if the schedule contains a client without rows."""
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
    """Return the two positional arguments WORK.npz and OUT.npz as absolute paths."""
    if len(sys.argv) != 3:
        raise SystemExit(usage)
    work, out = (str(Path(argument).resolve()) for argument in sys.argv[1:])
    return work, out


def report(peer: str, out: str | Path, x: NDArray[np.floating], stamps: list[float]) -> None:
    """Write the final X [d, c] and the times, and print the summary as one JSON line.

    `stamps` are R + 1 clock readings in seconds: the start of the first round, then the end of each
    round. The first round is reported separately, because it includes start-up work.
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
