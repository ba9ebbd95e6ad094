"""What our Flower app costs beside a bare one, and what a large message costs beside its bytes.

    python -m benchmarks.engine_overhead [--pairs 2]

The same work (N = 20, K = 5, R = 50, 784 x 10, 20,000 samples) through `fedmuon run --engine ray`
and through the plain Flower app of `benchmarks/peers`, in turn. Then a model of 10 million
parameters goes through Flower's records and back, beside a copy of the same bytes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.rounds import PEERS, make_work, run
from fedmuon.config import parse
from fedmuon.errors import InputError
from fedmuon.federated import setup

SETTINGS = {
    "engine.name": "ray",
    "engine.device": "cpu",
    "data.train": 20000,
    "data.test": 5000,
    "local.steps": 1,
    "local.lr": 0.01,
    "orthogonalizer.lambda": 0.1,
    "output.evaluate-every": 50,
}


def ours(folder: Path, data: str) -> list[float]:
    """Seconds of every round of `fedmuon run --engine ray`."""
    given = [f"--set={key}={value}" for key, value in {**SETTINGS, "data.name": data}.items()]
    script = [sys.executable, "-m", "fedmuon", "run", "--out", str(folder), *given]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return np.diff([json.loads(line)["seconds"] for line in lines][:-1]).tolist()


def bare(work: Path, folder: Path) -> float:
    """Seconds of the median warm round of the plain Flower app."""
    result = run([sys.executable, str(PEERS / "flower_app.py")], work, folder / "flower.npz")
    return result["median_warm_seconds_per_round"]


def rounds(pairs: int) -> None:
    """Both apps in turn; the ratio of their median rounds, pair by pair."""
    with tempfile.TemporaryDirectory() as name:
        folder, ratios = Path(name), []
        make_work(folder / "work.npz")
        data = _data()
        for pair in range(pairs):
            mine = statistics.median(ours(folder / f"run{pair}", data))
            plain = bare(folder / "work.npz", folder)
            ratios.append(mine / plain)
            print(f"  pair {pair + 1}: ours {1e3 * mine:.0f} ms a round, bare {1e3 * plain:.0f} ms")
        print(f"ours / bare Flower app: {statistics.median(ratios):.2f} (aim: at most 1.15)")


def _data() -> str:
    try:
        setup.source(parse({"data": {"name": "fashion-mnist"}}))
    except InputError:
        return "synthetic"
    return "fashion-mnist"


def message() -> None:
    """Serialize and read back 10 million float32 parameters, beside a copy of the bytes."""
    from flwr.app import ArrayRecord

    arrays = {f"layer{i}": np.ones((1000, 1000), np.float32) for i in range(10)}
    size = sum(array.nbytes for array in arrays.values())
    there, back, copies, held = [], [], [], 0
    for _ in range(7):
        start = time.perf_counter()
        record = ArrayRecord.from_torch_state_dict(_tensors(arrays))
        there.append(time.perf_counter() - start)
        start = time.perf_counter()
        _ = [array.numpy() for array in record.values()]
        back.append(time.perf_counter() - start)
        held = sum(len(array.data) for array in record.values())
        start = time.perf_counter()
        _ = [array.copy() for array in arrays.values()]
        copies.append(time.perf_counter() - start)
    trip = statistics.median(there) + statistics.median(back)
    print(
        f"10 million parameters: {1e3 * trip:.0f} ms there and back, a copy of the bytes takes "
        f"{1e3 * statistics.median(copies):.0f} ms; {held - size} bytes more than the "
        f"{size} of the arrays ({(held - size) / size:.4%})"
    )


def _tensors(arrays: dict[str, np.ndarray]) -> dict:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2)
    asked = parser.parse_args()
    rounds(asked.pairs)
    message()


if __name__ == "__main__":
    main()
