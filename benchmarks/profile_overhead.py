"""Measure what `fedmuon run --profile` costs.

    python -m benchmarks.profile_overhead [--pairs 9]

The matrix task and a small network train with and without a profile, in turn and in one process, so
that other load on the machine disturbs both alike. Each pair gives one ratio of processor seconds
and one of wall-clock seconds. The order within a pair alternates. The medians of the ratios are
printed, with their quartiles. Processor seconds are the steadier measure.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.page import say
from fedmuon.config.load import parse
from fedmuon.experiments.run import execute

WORK: dict[str, dict[str, Any]] = {
    "matrix": {
        "data": {"name": "synthetic"},
        "federation": {"clients": 20, "per-round": 5, "rounds": 60},
    },
    "cnn": {
        "data": {"name": "digits", "train": 600, "test": 200},
        "federation": {"clients": 10, "per-round": 3, "rounds": 3},
        "task": {"name": "network", "model": "cnn"},
        "local": {"steps": 3, "batch": 16},
    },
}


def seconds(tables: dict[str, Any], profile: bool) -> tuple[float, float]:
    """Return the processor seconds and the wall-clock seconds of a run."""
    config = parse({**tables, "engine": {"device": "cpu"}, "output": {"profile": profile}})
    with tempfile.TemporaryDirectory() as folder:
        processor, wall = time.process_time(), time.perf_counter()
        execute(config, Path(folder) / "run")
        return time.process_time() - processor, time.perf_counter() - wall


def ratios(tables: dict[str, Any], pairs: int) -> np.ndarray:
    """Return the ratios [pairs, 2] of a run with a profile to a run without."""
    seconds(tables, True)  # loads libraries
    rows = []
    for number in range(pairs):
        order = (True, False) if number % 2 else (False, True)
        found = {profile: seconds(tables, profile) for profile in order}
        rows.append([a / b for a, b in zip(found[True], found[False], strict=True)])
    return np.array(rows)


def main() -> None:
    """Measure all work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=WORK, default=[*WORK])
    arguments = parser.parse_args()
    for name in arguments.only:
        table = ratios(WORK[name], arguments.pairs)
        for kind, values in zip(("processor", "wall-clock"), table.T, strict=True):
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
            say(
                f"{name}: {kind} seconds with a profile / without: median {middle:.3f}, "
                f"quartiles {low:.3f} to {high:.3f}, {len(values)} pairs"
            )


if __name__ == "__main__":
    main()
