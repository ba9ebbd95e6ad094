"""Run the benchmark's work on the embedded engine in a separate process.

    python -m benchmarks.ours WORK.npz OUT.npz --stack S --dtype float32

A batch of S replicas is a part of suite A1: 20 pairs (eta, lambda), each with one run and its
neighbours. All replicas share the data, the schedule and the initial model. S = 1 is one ordinary
run.
"""

import argparse
import json
import time

import numpy as np
import torch

from fedmuon.config.load import Config, parse
from fedmuon.data.neighbours import Neighbours
from fedmuon.federated.build import DTYPES
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.federated.shards import Shards
from fedmuon.optim.recipes import make_recipe
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask, fastest, rate, supported


def config(dtype: str, seed: int = 0) -> Config:
    """Return the config of the Stability note, Table 1.

    N = 20, K = 5, R = 50, E = 1, full batches, 784 x 10, 20,000 samples.
    """
    return parse(
        {
            "data": {"name": "fashion-mnist", "train": 20000, "test": 5000},
            "federation": {"seed": seed},
            "local": {"steps": 1, "lr": 0.01, "momentum": 0.9},
            "orthogonalizer": {"name": "smoothed-polar", "lambda": 0.1},
            "engine": {"dtype": dtype, "device": "cpu", "kernel": "auto"},
        }
    )


def grid(stack: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eta and lambda of each replica: the 20 pairs of A1 in turn.

    The peers use the first pair.
    """
    etas, lambdas = (0.01, 0.005, 0.03, 0.05), (1e-1, 1e-3, 3e-3, 1e-2, 3e-2)
    pairs = [(eta, lam) for eta in etas for lam in lambdas]
    chosen = [pairs[(s // 11) % 20] for s in range(stack)]
    return torch.tensor([eta for eta, _ in chosen]), torch.tensor([lam for _, lam in chosen])


def neighbours(work: dict[str, np.ndarray], order: np.ndarray, stack: int) -> Neighbours:
    """Return the replacements of all replicas.

    Every eleventh replica is an unchanged run. The others replace one sample by a copy of another.
    """
    rng, rows = np.random.default_rng(1), len(order)
    client = work["client"][order].astype(np.int64)
    chosen, copied = rng.integers(rows, size=stack), rng.integers(rows, size=stack)
    first = np.searchsorted(client, client[chosen])
    changed = np.arange(stack) % 11 != 0
    inputs = np.where(changed[:, None], work["inputs"][order][copied], 0).astype(np.float64)
    return Neighbours(
        client=np.where(changed, client[chosen], -1),
        position=np.where(changed, chosen - first, -1),
        replacement=np.where(changed, order[copied], -1),
        inputs=inputs,
        labels=work["labels"][order][copied],
    )


def experiment(work: dict[str, np.ndarray], stack: int, dtype: str, kernel: str) -> Experiment:
    """Return the experiment of the work file for S replicas."""
    table, order = config(dtype), np.argsort(work["client"], kind="stable")
    kind, device = DTYPES[dtype], torch.device("cpu")
    labels = torch.from_numpy(work["labels"][order])
    clients = int(work["client"].max()) + 1
    offsets = np.concatenate([[0], np.cumsum(np.bincount(work["client"], minlength=clients))])
    inputs = torch.from_numpy(work["inputs"][order]).to(kind)
    shards = Shards(
        inputs,
        labels,
        offsets,
        Batch(inputs[:1], labels[:1]),
        neighbours(work, order, stack) if stack > 1 else None,
    )
    lr, lam = grid(stack) if stack > 1 else (None, None)
    recipe = make_recipe(table.local, table.orthogonalizer, lr, lam)
    task = MatrixTask(784, 10, kind, device, kernel)
    schedule = work["schedule"]
    plan = RandomnessPlan(0, clients, schedule.shape[1], len(schedule), fixed=schedule)
    return Experiment(recipe, task, plan, shards)


def main() -> None:
    """Run the work, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work")
    parser.add_argument("out")
    parser.add_argument("--stack", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    with np.load(asked.work) as file:
        work = {name: file[name] for name in file.files}
    kind, device = DTYPES[asked.dtype], torch.device("cpu")
    thin = "fused" if "fused" in supported(kind, device) else "torch"
    kernel = fastest(440, 784, 1000, kind, device) if asked.stack > 1 else thin
    names = supported(kind, device)
    rates = {name: rate(name, 4096, 4096, 4096, kind, device, 2) for name in names}
    best = max(rates.values())
    what = experiment(work, asked.stack, asked.dtype, kernel)
    state = begin(what.recipe, what.task, 0, asked.stack)
    start_model = torch.from_numpy(work["x0"]).to(kind).T.contiguous().repeat(asked.stack, 1, 1).mT
    state = type(state)(0, {"weight": start_model}, state.states)
    stamps = [time.perf_counter()]
    for finished in run_rounds(what, state):
        state = finished.state
        stamps.append(time.perf_counter())
    seconds = stamps[-1] - stamps[0]
    np.savez(asked.out, x=state.params["weight"][0].numpy(), seconds=seconds)
    samples = sum(what.shards[int(i)].size for i in work["schedule"].ravel())
    flops = 2 * 2 * 7840.0 * samples * asked.stack
    warm = float(np.median(np.diff(stamps)[1:]))
    achieved = flops / (warm * (len(stamps) - 1))
    print(
        json.dumps(
            {
                "peer": "fedmuon",
                "stack": asked.stack,
                "dtype": asked.dtype,
                "kernel": kernel,
                "seconds": seconds,
                "rounds": len(stamps) - 1,
                "median_warm_seconds_per_round": warm,
                "gflops": achieved / 1e9,
                "best_gflops": best / 1e9,
                "share": achieved / best,
                "library_share": achieved / rates[kernel],
            }
        )
    )


if __name__ == "__main__":
    main()
