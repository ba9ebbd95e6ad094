"""The stability laboratory's speed: suites, the census, and the same neighbours through Flower.

    python -m benchmarks.laboratory [--device cpu] [--suites A1 A2 A3] [--census N] [--flower]

Prints trajectories a second and the share of the best GEMM rate. `--flower` also runs one
trajectory of the same size as a plain Flower app, which is what one neighbour would cost there.
`--device cuda` is the check for a GPU.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rounds import PEERS, make_work, per_trajectory, run
from fedmuon import config as tables
from fedmuon.config import Config
from fedmuon.experiments.laboratory import stability
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.suites import suite
from fedmuon.federated import setup


def suites(names: list[str], data: str, device: str, folder: Path) -> float:
    """Run suites at full size; seconds of a trajectory of A1, theory and evaluation included."""
    total = count = cost = 0.0
    for name in names:
        work = kinds.find(name, data, "full", {"engine": {"device": device}})
        start = time.perf_counter()
        found = suite.execute(work, folder / name)
        seconds = time.perf_counter() - start
        total, count = total + seconds, count + found["trajectories"]
        cost = cost or found["seconds"] / found["trajectories"]
        print(f"{name} on {data}: {found['trajectories']} trajectories in {seconds:.1f} s, "
              f"{found['trajectories_per_second']:.2f} a second, {found['share_of_gemm']:.0%} of "
              f"the best GEMM; gap within bound {found['measured']['gap_within_bound']:.0%}",
              flush=True)  # fmt: skip
    print(f"{' '.join(names)}: {count:.0f} trajectories in {total:.1f} s")
    return cost


def census_config(n: int, data: str, device: str) -> Config:
    """001's controlled setting with every one of n samples replaced once."""
    return tables.parse(
        {
            "data": {"name": data, "train": n, "test": min(5000, n)},
            "local": {"steps": 1, "lr": 0.01},
            "orthogonalizer": {"lambda": 0.1},
            "engine": {"dtype": "float64", "device": device},
            "stability": {"neighbours": "all"},
        }
    )


def census(n: int, data: str, device: str, folder: Path) -> None:
    """Run every neighbour of n samples."""
    start = time.perf_counter()
    stability.execute(census_config(n, data, device), folder / "census")
    seconds = time.perf_counter() - start
    print(f"census of n = {n} on {data}: {seconds:.1f} s, {n / seconds:.1f} neighbours a second")


def flower(ours: float, folder: Path) -> None:
    """One trajectory through a plain Flower app, against ours."""
    work = folder / "work.npz"
    what = make_work(work)
    found = run([sys.executable, str(PEERS / "flower_app.py")], work, folder / "flower.npz")
    theirs = per_trajectory(found)
    print(f"a neighbour on {what}: ours {1e3 * ours:.0f} ms with evaluation and theory, a plain "
          f"Flower app {1e3 * theirs:.0f} ms without: ratio {theirs / ours:.0f}")  # fmt: skip


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--suites", nargs="*", default=["A1", "A2", "A3"])
    parser.add_argument("--census", type=int, default=0)
    parser.add_argument("--flower", action="store_true")
    asked = parser.parse_args()
    device = str(setup.resolve(tables.parse({"engine": {"device": asked.device}})).engine.device)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        ours = suites(asked.suites, asked.data, device, folder) if asked.suites else 0.0
        if asked.census:
            census(asked.census, asked.data, device, folder)
        if asked.flower and ours:
            flower(ours, folder)


if __name__ == "__main__":
    main()
