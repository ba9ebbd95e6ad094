"""Compare rounds of this package with pfl-research, BlazeFL and a plain Flower app on equal work.

    python -m benchmarks.rounds [--pairs 3] [--skip-flower]

The work is one trajectory of the suites of the Stability note: N = 20, K = 5, R = 50, E = 1, full
batches, 784 x 10 and 20,000 samples. The data are Fashion-MNIST if it is installed, and otherwise
synthetic rows of the same size. The contestants run in turn, each in its own process. Start-up time
is excluded, and each must end with the model of the oracle. Ratios are medians over pairs. The cost
of Flower is polling and processes, so its ratio shrinks as the work of the clients grows.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import page
from benchmarks.ours import config
from benchmarks.page import Row, say
from fedmuon.config.load import Config, parse
from fedmuon.core.errors import InputError
from fedmuon.federated.build import build_experiment, build_plan, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import begin, run_rounds

PEERS = Path(__file__).parent / "peers"
OURS = (
    ("S=1 float32", 1, "float32"),
    ("S=220 float32", 220, "float32"),
    ("S=220 float64", 220, "float64"),
)
PFL, BLAZE, FLOWER = "pfl-research", "BlazeFL", "Flower"
APPS = {PFL: ("pfl", "pfl_app.py"), BLAZE: ("blazefl", "blazefl_app.py"),
        FLOWER: ("flwr", "flower_app.py")}  # fmt: skip
AIMS = {  # aims for the ratios, and for the share of the best product
    "S=1 float32": ({PFL: 4, FLOWER: 50}, None),
    "S=220 float32": ({PFL: 8, FLOWER: 250}, 0.85),
    "S=220 float64": ({PFL: 4, FLOWER: 120}, 0.75),
}


def make_work(path: Path) -> str:
    """Write the work file, and return the name of its data."""
    table = config("float32")
    try:
        source = read_source(table)
    except InputError:
        script = [sys.executable, str(PEERS / "reference.py"), "--make", str(path)]
        subprocess.run(script, check=True)
        return "synthetic rows"
    data = build_data(table, source)
    rng = np.random.default_rng(0)
    np.savez(
        path,
        inputs=data.inputs.astype(np.float32),
        labels=data.labels,
        client=np.repeat(np.arange(20), data.sizes),
        schedule=build_plan(table).schedule(),
        x0=(1e-4 * rng.standard_normal((784, 10))).astype(np.float32),
        lr=0.01,
        lam=0.1,
        beta=0.9,
    )
    return "Fashion-MNIST"


def run(command: list[str], work: Path, out: Path) -> dict:
    """Run one contestant, and return its JSON line."""
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


def contestants(skip_flower: bool) -> dict[str, list[str]]:
    """Return the command of each contestant. Peers are included only if they are installed."""
    ours = [sys.executable, "-m", "benchmarks.ours"]
    field = {name: [*ours, f"--stack={stack}", f"--dtype={dtype}"] for name, stack, dtype in OURS}
    for name, (package, app) in APPS.items():
        if importlib.util.find_spec(package) and not (name == FLOWER and skip_flower):
            field[name] = [sys.executable, str(PEERS / app)]
    return field


def agreement(oracle: Path, result: Path) -> float:
    """Return the relative Frobenius distance of a result from the model of the oracle."""
    with np.load(oracle) as a, np.load(result) as b:
        return float(np.linalg.norm(a["x"] - b["x"]) / np.linalg.norm(a["x"]))


def compare(pairs: int, skip_flower: bool) -> Iterator[Row]:
    """Run all contestants in turn, and check their models against the oracle."""
    field = contestants(skip_flower)
    with tempfile.TemporaryDirectory() as folder:
        work, oracle = Path(folder) / "work.npz", Path(folder) / "oracle.npz"
        what = make_work(work)
        run([sys.executable, str(PEERS / "reference.py")], work, oracle)
        results: dict[str, list[dict]] = {name: [] for name in field}
        for turn in range(pairs):
            for name, command in field.items():
                out = Path(folder) / f"{name.replace(' ', '-')}.npz"
                results[name].append(run(command, work, out))
                distance = agreement(oracle, out)
                if distance > 1e-4:
                    raise SystemExit(f"{name} ends {distance:.1e} away from the oracle's model")
                say(f"{turn + 1}/{pairs} {name}: {per_trajectory(results[name][-1]):.4f} s, "
                    f"distance to oracle {distance:.1e}")  # fmt: skip
    yield from ratios(results, what)
    for name, (package, app) in APPS.items():
        if not importlib.util.find_spec(package):
            yield Row(f"a trajectory / {name}", note=f"{package} is not installed, as {app} wants")


def per_trajectory(result: dict) -> float:
    """Return the seconds of one trajectory.

    They are the number of rounds times the median warm round, divided by the number of replicas.
    """
    return result["median_warm_seconds_per_round"] * result["rounds"] / result.get("stack", 1)


def ratios(results: dict[str, list[dict]], what: str) -> Iterator[Row]:
    """Compare every batch size of this package with every peer, by medians over pairs.

    The share of the best product of all libraries appears once per batch size. Its note contains
    the share of the product of the library that was used. On some AMD processors, OpenBLAS
    multiplies float32 matrices 1.3 times as fast as MKL, which torch uses.
    """
    seconds = {name: [per_trajectory(one) for one in ones] for name, ones in results.items()}
    for name, (aims, share) in AIMS.items():
        ones, own = results[name], seconds[name]
        keys = "share", "gflops", "library_share"
        part, speed, of_library = (median(one[key] for one in ones) for key in keys)
        kernel = f"{what}; {speed:.0f} GFLOP/s, kernel {ones[-1]['kernel']}"
        kernel += f", {of_library:.0%} of the largest product of its library"
        for peer in [peer for peer in APPS if peer in results]:
            yield Row(
                f"a trajectory, {name} / {peer}",
                median(own),
                median(seconds[peer]),
                median(p / o for p, o in zip(seconds[peer], own, strict=True)),
                aims.get(peer),
                kernel,
                share=part,
                share_aim=share,
            )
            part = share = None
            kernel = ""


def many_clients() -> Iterator[Row]:
    """Compare a round at N = 1,000,000 with a round at N = 1,000.

    K = 10, and every client has the same number of samples on average.
    """
    seconds = {}
    for clients in (1_000, 1_000_000):
        table = resolve(_wide(clients))
        what = build_experiment(table)
        times, state = [], begin(what.recipe, what.task, 0)
        start = time.perf_counter()
        for finished in run_rounds(what, state):
            times.append(time.perf_counter() - start)
            start, state = time.perf_counter(), finished.state
        seconds[clients] = median(times)
    many, few = seconds[1_000_000], seconds[1_000]
    figure = "a round at N = 1,000,000 / at N = 1,000"
    yield Row(figure, many, few, many / few, 3, at_most=True)


def _wide(clients: int) -> Config:
    return parse(
        {
            "data": {"name": "synthetic", "train": 2 * clients, "test": 100, "minimum": 2,
                     "dimension": 16, "alpha": 10.0},
            "federation": {"clients": clients, "per-round": 10, "rounds": 100},
            "local": {"steps": 1},
        }
    )  # fmt: skip


def measured(pairs: int, skip_flower: bool) -> Iterator[Row]:
    """Return all rows of this benchmark."""
    yield from compare(pairs, skip_flower)
    yield from many_clients()


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--skip-flower", action="store_true")
    asked = parser.parse_args()
    page.tell(measured(asked.pairs, asked.skip_flower), asked.rows)


if __name__ == "__main__":
    main()
