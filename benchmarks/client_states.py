"""Measure the cost of client states: SCAFFOLD and FedAvg with 10 of 1,000,000 clients per round.

    python -m benchmarks.client_states [--clients N] [--per-round K] [--rounds R] [--times 3]

The methods run in turn, each time in a separate process with one thread, float32, one sample per
client, and checkpoints of the states on disk every ten rounds. The main figure is CPU milliseconds
per round, because other load on the machine disturbs it least. Wall time is reported, too. Data and
set-up are excluded from both times. The peak memory of the process includes data and set-up. All
figures are medians over the processes.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks import page
from fedmuon.config.load import parse
from fedmuon.federated.build import build_experiment
from fedmuon.federated.client_states import ClientStates
from fedmuon.federated.rounds import begin, run_rounds

METHODS = ("fedavg", "scaffold")
EVERY = 10  # number of rounds between checkpoints


def once(recipe: str, clients: int, per_round: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds per round in this process, and its peak memory in MB."""
    torch.set_num_threads(1)
    table = parse({
        "data": {"name": "synthetic", "train": clients, "test": 100, "dimension": 8, "minimum": 1},
        "federation": {"clients": clients, "per-round": per_round, "rounds": rounds,
                       "partition": "iid"},
        "local": {"recipe": recipe, "lr": 0.1, "steps": 5},
        "engine": {"dtype": "float32", "device": "cpu"},
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        states = ClientStates(Path(folder) / "clients")
        made = replace(build_experiment(table), client_states=states)
        each: list[tuple[float, float]] = []
        start = time.process_time(), time.perf_counter()
        for finished in run_rounds(made, begin(made.recipe, made.task, 0)):
            if finished.state.round % EVERY == 0:
                states.flush()
                states.commit(finished.state.round)
            now = time.process_time(), time.perf_counter()
            each.append((now[0] - start[0], now[1] - start[1]))
            start = now
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    work, wall = (1e3 * median(column) for column in zip(*each[1:], strict=True))
    return {"ms": work, "wall": wall, "MB": peak}


def main() -> None:
    """Run both methods in turn, and print their medians and the ratios of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("clients", 10**6), ("per-round", 10), ("rounds", 100), ("times", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--only", choices=METHODS, help="run only this method, in this process, and print JSON"
    )
    asked = parser.parse_args()
    sizes = asked.clients, asked.per_round, asked.rounds
    if asked.only:
        print(json.dumps(once(asked.only, *sizes)))
        return
    before, begun = page.load(), time.perf_counter()
    given = [f"--{name}={size}" for name, size in
             zip(("clients", "per-round", "rounds"), sizes, strict=True)]  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for _ in range(asked.times):
        for name in METHODS:
            script = [sys.executable, "-m", "benchmarks.client_states", "--only", name, *given]
            said = subprocess.run(script, check=True, capture_output=True, text=True).stdout
            found[name].append(json.loads(said))
    middle = {
        name: {part: median(one[part] for one in each) for part in each[0]}
        for name, each in found.items()
    }
    for name, one in middle.items():
        page.say(
            f"{name}: {one['ms']:.2f} ms per round, {one['wall']:.2f} ms by the clock, "
            f"{one['MB']:.0f} MB at the peak"
        )
    ratios = {part: middle["scaffold"][part] / middle["fedavg"][part] for part in ("ms", "MB")}
    page.say(
        f"scaffold over fedavg: {ratios['ms']:.2f} x the time, {ratios['MB']:.3f} x the memory"
    )
    for line in page.place((before, page.load()), time.perf_counter() - begun):
        page.say(line)


if __name__ == "__main__":
    main()
