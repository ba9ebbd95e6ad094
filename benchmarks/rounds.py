"""Rounds side by side: this package, pfl-research, and a plain Flower app, on the same work.

    python -m benchmarks.rounds [--pairs 3] [--skip-flower]

The work is one trajectory of 001's suites: N = 20, K = 5, R = 50, E = 1, full batch, 784 x 10,
20,000 samples (Fashion-MNIST where it is installed, else synthetic rows of the same size). Every
contestant runs in a process of its own with start-up excluded, in turn, and must end at the
oracle's model. Ratios are medians over pairs. Flower's cost is polling and processes, so its ratio
shrinks as the clients' work grows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.ours import config
from fedmuon.errors import InputError
from fedmuon.federated import setup
from fedmuon.federated.aggregate import begin
from fedmuon.federated.simulate import rounds

PEERS = Path(__file__).parent / "peers"
OURS = (
    ("S=1 float32", 1, "float32"),
    ("S=220 float32", 220, "float32"),
    ("S=220 float64", 220, "float64"),
)
REACH = {"S=1 float32": (3, 50), "S=220 float32": (12, 250), "S=220 float64": (6, 120)}


def make_work(path: Path) -> str:
    """Write the work file; say which data it holds."""
    table = config("float32")
    try:
        source = setup.source(table)
    except InputError:
        script = [sys.executable, str(PEERS / "reference.py"), "--make", str(path)]
        subprocess.run(script, check=True)
        return "synthetic rows"
    data = setup.federated_data(table, source)
    rng = np.random.default_rng(0)
    np.savez(
        path,
        inputs=data.inputs.astype(np.float32),
        labels=data.labels,
        client=np.repeat(np.arange(20), data.sizes),
        schedule=setup.plan(table).schedule(),
        x0=(1e-4 * rng.standard_normal((784, 10))).astype(np.float32),
        lr=0.01,
        lam=0.1,
        beta=0.9,
    )
    return "Fashion-MNIST"


def run(command: list[str], work: Path, out: Path) -> dict:
    """One contestant's JSON line."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [*command, str(work), str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, **quiet},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def contestants(skip_flower: bool) -> dict[str, Callable[[Path, Path], dict]]:
    """Name -> a function that runs it."""
    python = sys.executable

    def ours(stack: int, dtype: str) -> Callable[[Path, Path], dict]:
        script = [python, "-m", "benchmarks.ours", "--stack", str(stack), "--dtype", dtype]
        return lambda work, out: run(script, work, out)

    def peer(name: str) -> Callable[[Path, Path], dict]:
        return lambda work, out: run([python, str(PEERS / f"{name}_app.py")], work, out)

    field = {name: ours(stack, dtype) for name, stack, dtype in OURS}
    field["pfl-research"] = peer("pfl")
    return field if skip_flower else {**field, "Flower": peer("flower")}


def agreement(oracle: Path, result: Path) -> float:
    """Relative Frobenius distance of a result to the oracle's model."""
    with np.load(oracle) as a, np.load(result) as b:
        return float(np.linalg.norm(a["x"] - b["x"]) / np.linalg.norm(a["x"]))


def compare(pairs: int, skip_flower: bool) -> None:
    """Run everything in turn and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        work, oracle = Path(folder) / "work.npz", Path(folder) / "oracle.npz"
        print(f"work: one trajectory on {make_work(work)}; {os.cpu_count()} cores", flush=True)
        run([sys.executable, str(PEERS / "reference.py")], work, oracle)
        results: dict[str, list[dict]] = {name: [] for name in contestants(skip_flower)}
        for turn in range(pairs):
            for name, contestant in contestants(skip_flower).items():
                out = Path(folder) / f"{name.replace(' ', '-')}.npz"
                results[name].append(contestant(work, out))
                distance = agreement(oracle, out)
                if distance > 1e-4:
                    raise SystemExit(f"{name} ends {distance:.1e} away from the oracle's model")
                print(f"  {turn + 1}/{pairs} {name}: {per_trajectory(results[name][-1]):.4f} s, "
                      f"distance to oracle {distance:.1e}", flush=True)  # fmt: skip
    print_table(results)


def per_trajectory(result: dict) -> float:
    """Seconds of one trajectory: rounds times the median round, the first (lazy start) left out."""
    return result["median_warm_seconds_per_round"] * result["rounds"] / result.get("stack", 1)


def print_table(results: dict[str, list[dict]]) -> None:
    """Medians, ratios pair by pair, what was aimed at, and the share of the GEMM limit."""
    peers = [name for name in ("pfl-research", "Flower") if name in results]
    seconds = {name: [per_trajectory(one) for one in ones] for name, ones in results.items()}
    header = [f"x {peer} (aim)" for peer in peers]
    print(f"\n{'':16}{'ms/trajectory':>15}" + "".join(f"{one:>24}" for one in header)
          + f"{'GFLOP/s (share)':>20}  kernel")  # fmt: skip
    for name, ones in results.items():
        line = f"{name:16}{1e3 * median(seconds[name]):>15.1f}"
        for column, peer in enumerate(peers):
            ratios = [p / o for p, o in zip(seconds[peer], seconds[name], strict=True)]
            aim = f" ({REACH[name][column]})" if name in REACH else ""
            line += f"{f'{median(ratios):.1f}{aim}':>24}"
        if name in REACH:
            rate, share = (median(one[key] for one in ones) for key in ("gflops", "share"))
            line += f"{f'{rate:.0f} ({share:.0%})':>20}  {ones[-1]['kernel']}"
        print(line)
    print("Flower's cost is polling and processes: its ratio shrinks as the clients' work grows.")


def many_clients() -> None:
    """A round at N = 1,000,000 against one at N = 1,000, K = 10, the same samples a client."""
    seconds = {}
    for clients in (1_000, 1_000_000):
        table = setup.resolve(_wide(clients))
        source = setup.source(table)
        what = setup.experiment(table, setup.federated_data(table, source), source.classes)
        times, state = [], begin(what.recipe, what.task, 0)
        start = time.perf_counter()
        for finished in rounds(what, state):
            times.append(time.perf_counter() - start)
            start, state = time.perf_counter(), finished.state
        seconds[clients] = median(times)
    ratio = seconds[1_000_000] / seconds[1_000]
    print(f"a round at N = 1,000,000: {1e3 * seconds[1_000_000]:.2f} ms, at N = 1,000: "
          f"{1e3 * seconds[1_000]:.2f} ms, ratio {ratio:.2f} (aim: at most 3)")  # fmt: skip


def _wide(clients: int):
    from fedmuon.config import parse

    return parse(
        {
            "data": {"name": "synthetic", "train": 2 * clients, "test": 100, "minimum": 2,
                     "dimension": 16, "alpha": 10.0},
            "federation": {"clients": clients, "per-round": 10, "rounds": 100},
            "local": {"steps": 1},
        }
    )  # fmt: skip


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--skip-flower", action="store_true")
    asked = parser.parse_args()
    compare(asked.pairs, asked.skip_flower)
    many_clients()


if __name__ == "__main__":
    main()
