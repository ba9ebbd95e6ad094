"""Measure the cost of a round of one trajectory apart from its pass over the samples.

    python -m benchmarks.round_cost [--times 8]

The work is the work of `benchmarks.rounds` at S = 1 in float32, on one thread. It runs once with
the compiled kernel and once with a kernel that does nothing. The figures are microseconds of CPU
time, because other load on the machine disturbs it least: the minimum over rounds and the median.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.ours import experiment
from benchmarks.page import say
from benchmarks.rounds import make_work
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.tasks import batched_gradients


def seconds(what: Experiment) -> Iterator[float]:
    """Yield the CPU seconds of each round except the first."""
    start = None
    for _ in run_rounds(what, begin(what.recipe, what.task, 0)):
        now = time.thread_time()
        if start is not None:
            yield now - start
        start = now


def main() -> None:
    """Measure both kernels in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=8)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder:
        make_work(Path(folder) / "work.npz")
        with np.load(Path(folder) / "work.npz") as file:
            what = experiment(dict(file), 1, "float32", "fused")
    torch.set_num_threads(1)
    kernels = {"with the pass": batched_gradients.slope_sums, "without": lambda *given: True}
    found: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(times):
        for name, kernel in kernels.items():
            batched_gradients.slope_sums = kernel
            found[name] += seconds(what)
    for name, each in found.items():
        say(f"a round {name}: {1e6 * min(each):.0f} us, median {1e6 * np.median(each):.0f}")


if __name__ == "__main__":
    main()
