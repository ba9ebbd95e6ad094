"""Measure the cost of a round on Ray compared with a plain Flower app, and of many clients.

    python -m benchmarks.engine_overhead [--pairs 2] [--crowd 1000000]

The first part runs the same work (N = 20, K = 5, R = 50, 784 x 10, 20,000 samples) in three ways in
turn: with `fedmuon run --engine ray`, with the plain Flower app of `benchmarks/peers` on Flower's
simulation, and with the same app on `fedmuon.flower.simulate`. The second part runs K = 20 of 20
clients, and K = 1,000 of increasing numbers of clients with few samples each. The third part sends
a model of 10 million parameters through Flower's records, compared with a copy of the same bytes.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import page
from benchmarks.page import Row, say
from benchmarks.rounds import PEERS, make_work, run
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.federated.client_data import read_source

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
WIDE = {"data.dimension": 784, "data.classes": 10}  # size of the plain app's synthetic rows
WAITED = "waited.txt"
FREE = ["-m", "fedmuon"]
WAITING = ["-c", "from benchmarks.engine_overhead import waiting; waiting()"]


def ours(folder: Path, data: str) -> list[float]:
    """Return the seconds of the rounds of `fedmuon run --engine ray`, without first and last."""
    asked = {**SETTINGS, "data.name": data, **(WIDE if data == "synthetic" else {})}
    given = [f"--set={key}={value}" for key, value in asked.items()]
    script = [sys.executable, "-m", "fedmuon", "run", "--out", str(folder), *given]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return np.diff([json.loads(line)["seconds"] for line in lines][:-1]).tolist()


def bare(work: Path, folder: Path, grid: str = "") -> float:
    """Return the median seconds of a warm round of the plain Flower app.

    With `grid` the app runs on our grid instead of Flower's simulation.
    """
    with mock.patch.dict(os.environ, {"RAY_GRID": grid}):
        result = run([sys.executable, str(PEERS / "flower_app.py")], work, folder / "flower.npz")
    return result["median_warm_seconds_per_round"]


def rounds(pairs: int) -> Iterator[Row]:
    """Run all three in turn, and return ratios of their median rounds, per pair."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_work(folder / "work.npz")
        data = _data()
        for pair in range(pairs):
            mine = statistics.median(ours(folder / f"run{pair}", data))
            plain = bare(folder / "work.npz", folder)
            lent = bare(folder / "work.npz", folder, "1")
            found.append((mine, plain, lent))
            say(
                f"{pair + 1}/{pairs}: ours {1e3 * mine:.0f} ms a round, bare {1e3 * plain:.0f} ms, "
                f"bare on our grid {1e3 * lent:.0f} ms"
            )
    mine, plain, lent = (statistics.median(column) for column in zip(*found, strict=True))
    told = {"a round on Ray": (0, mine), "a bare Flower app on RayGrid": (2, lent)}
    for what, (column, seconds) in told.items():
        ratio = statistics.median(one[1] / one[column] for one in found)
        yield Row(f"{what} / on Flower's simulation", seconds, plain, ratio, 8)


@dataclass(frozen=True)
class Crowd:
    """Costs of a run of 10 rounds on Ray.

    Attributes:
        clients: Number of clients N.
        chosen: Number of participants K.
        first: Seconds of the first round.
        later: Seconds of a later round.
        whole: Seconds of the whole command.
        driver: Peak memory of the driver in bytes.
        worker: Peak memory of a worker in bytes.
    """

    clients: int
    chosen: int
    first: float
    later: float
    whole: float
    driver: int
    worker: int


def crowd(clients: int, up: bool = False) -> Crowd:
    """Run rounds with K = min(1,000, N) of N clients, and return their costs.

    If `up` is True, the time of the first round excludes the start of Ray's workers.
    """
    chosen = min(1_000, clients)
    asked = {
        "data.name": "synthetic", "data.dimension": 16, "data.classes": 3,
        "data.train": max(clients, 1_000), "data.test": 1_000, "data.minimum": 1,
        "federation.partition": "iid", "federation.clients": clients,
        "federation.per-round": chosen, "federation.rounds": 10, "local.lr": 0.01,
        "engine.name": "ray", "engine.device": "cpu", "output.evaluate-every": 10,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        given = [f"--set={key}={value}" for key, value in asked.items()]
        script = [sys.executable, *(WAITING if up else FREE), "run", "--out", f"{name}/run", *given]
        start, seen = time.perf_counter(), Memory()
        with subprocess.Popen(script, stdout=subprocess.DEVNULL) as child:
            while child.poll() is None:
                seen.look(child.pid)
                time.sleep(0.5)
        whole = time.perf_counter() - start
        if child.returncode:
            raise SystemExit(f"the run of {clients} clients ended with {child.returncode}")
        lines = (Path(name) / "run" / "rounds.jsonl").read_text().splitlines()
        ends = [json.loads(line)["seconds"] for line in lines]
        waited = float((Path(name) / WAITED).read_text()) if up else 0.0
    later = float(statistics.median(np.diff(ends)))
    return Crowd(clients, chosen, ends[0] - waited, later, whole, seen.driver, seen.worker)


def waiting() -> None:
    """Execute `fedmuon run`, but delay the first messages until all workers have started.

    The seconds of this delay are written to the file `WAITED` next to the run.
    """
    from fedmuon.experiments.cli import main as command
    from fedmuon.server.ray.grid import RayGrid

    push, waited = RayGrid.push_messages, []
    told = Path(sys.argv[sys.argv.index("--out") + 1]).parent / WAITED

    def later(grid: RayGrid, messages: Iterable[Any]) -> list[str]:
        start = time.perf_counter()
        while not waited and grid.absent:
            grid.pull_within([], 0.05)
        waited.append(time.perf_counter() - start)
        told.write_text(str(waited[0]))
        return push(grid, messages)

    with mock.patch.object(RayGrid, "push_messages", later):
        command()


def crowds(most: int) -> Iterator[Row]:
    """Run each number of clients, then compare the memory of the two largest."""
    found = [crowd(n) for n in (20, 1_000, 1_000_000) if n <= most]
    for one in found:
        name = f"N = {one.clients:,}, K = {one.chosen:,}"
        first = crowd(one.clients, up=True).first
        yield Row(f"first round with Ray's workers up, {name}", first, aim=2, at_most=True)
        yield Row(f"the same and their start, {name}", one.first)
        yield Row(f"a later one, {name}", one.later)
        if one.clients == 20:
            whole = "fedmuon run --engine ray, N = 20, 10 rounds, command to prompt"
            yield Row(whole, one.whole, aim=8, at_most=True)
    few, many = found[-2:] if len(found) > 2 else (found[-1],) * 2
    if few is not many:
        for who in ("driver", "worker"):
            a, b = (getattr(one, who) / 1e6 for one in (many, few))
            figure = f"memory of a {who}, N = {many.clients:,} / {few.clients:,}"
            yield Row(figure, a, b, a / b, 2, unit="MB", at_most=True)


class Memory:
    """Peak memory of a driver and of its largest Ray worker, in bytes (on Linux)."""

    def __init__(self) -> None:
        self.driver = self.worker = 0

    def look(self, driver: int) -> None:
        """Sample the processes once."""
        self.driver = max(self.driver, resident(Path("/proc", str(driver))))
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                named = b"ray::Worker" in (process / "cmdline").read_bytes()
                if named and descends(process, driver):
                    self.worker = max(self.worker, resident(process))


def descends(process: Path, from_whom: int) -> bool:
    """Return whether a process is the given process or one of its descendants."""
    while process.name not in ("0", "1"):
        if process.name == str(from_whom):
            return True
        parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        process = Path("/proc", parent)
    return False


def resident(process: Path) -> int:
    """Return the peak memory of a process in bytes, or 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in (process / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def _data() -> str:
    try:
        read_source(parse({"data": {"name": "fashion-mnist"}}))
    except InputError:
        return "synthetic"
    return "fashion-mnist"


def message() -> Iterator[Row]:
    """Serialize and read back 10 million float32 parameters, compared with a copy of the bytes."""
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
    trip, copy = statistics.median(there) + statistics.median(back), statistics.median(copies)
    note = f"{held - size} bytes more than the {size} of the arrays"
    figure = "10 million parameters to a message and back / a copy of them"
    yield Row(figure, trip, copy, trip / copy, note=note)


def _tensors(arrays: dict[str, np.ndarray]) -> dict:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def measured(pairs: int, most: int) -> Iterator[Row]:
    """Return all rows of this benchmark."""
    yield from rounds(pairs)
    yield from crowds(most)
    yield from message()


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--crowd", type=int, default=1_000_000, help="maximum number of clients")
    asked = parser.parse_args()
    page.tell(measured(asked.pairs, asked.crowd), asked.rows)


if __name__ == "__main__":
    main()
