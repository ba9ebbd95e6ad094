"""Measure the stability laboratory: suites, the census, and the same neighbours through Flower.

    python -m benchmarks.laboratory [--device cpu] [--suites A1 A2 A3] [--census N] [--flower]
    python -m benchmarks.laboratory --before [COMMIT] [--seeds 1]
    python -m benchmarks.laboratory --scaling

The figures are the seconds per trajectory and the share of the best rate of matrix products.
`--flower` also runs one trajectory of the same size as a plain Flower app, which is the cost of one
neighbour in Flower. `--before` runs the same suites in turn with the command of an older commit,
which `git archive` extracts. `--seeds` limits both to the first seeds. `--scaling` runs a suite on
one Ray worker and then on two. `--device cuda` measures a GPU.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from unittest import mock

from benchmarks import page
from benchmarks.page import Row, say
from benchmarks.rounds import PEERS, make_work, per_trajectory, run
from fedmuon.config.load import Config, parse
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability import neighbours
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.suites import contents, suite
from fedmuon.federated.build import resolve
from fedmuon.federated.client_data import read_source
from fedmuon.runs.directory import Record

BEFORE = "45583e9"  # the last commit before the single pass over the samples and before RayGrid
ROOT = Path(__file__).resolve().parent.parent
PRINTED: dict[str, object] = {"c-hp": 1.0}  # delta is split into halves, as published
# Settings with which both commits compute the same bound: the older commit only supports the
# constants of all models.
SETTING: dict[str, dict[str, dict[str, object]]] = {
    "before": {"stability": PRINTED},
    "now": {"stability": {**PRINTED, "constants": "global"}},
}
SAME = 1e-9  # largest relative difference between the means of two commits, in float64
WIDE = {"dimension": 784, "classes": 10}  # size of synthetic samples, as in Fashion-MNIST


def suites(names: list[str], data: str, device: str, folder: Path) -> Iterator[Row]:
    """Run suites at full size, including theory and evaluation."""
    for name in names:
        work = kinds.find(name, data, "full", changes(data, device))
        start = time.perf_counter()
        found = suite.execute(work, folder / name)
        seconds, count = time.perf_counter() - start, found["trajectories"]
        note = f"{count} in {seconds:.1f} s; gap within bound "
        note += f"{found['measured']['gap_within_bound']:.0%}"
        share = found["share_of_gemm"]
        yield Row(
            f"{name} on {data}, a trajectory", found["seconds"] / count, note=note, share=share
        )


def changes(data: str, device: str = "cpu") -> dict[str, dict]:
    """Return the settings that a suite needs for this data and device."""
    made = {"data": WIDE} if data == "synthetic" else {}
    return {"engine": {"device": device}, **made}


def census_config(n: int, data: str, device: str) -> Config:
    """Return the controlled setting of the Stability note with all n samples replaced once."""
    return parse(
        {
            "data": {"name": data, "train": n, "test": min(5000, n)},
            "local": {"steps": 1, "lr": 0.01},
            "orthogonalizer": {"lambda": 0.1},
            "engine": {"dtype": "float64", "device": device},
            "stability": {"neighbours": "all"},
        }
    )


def census(n: int, data: str, device: str, folder: Path) -> Row:
    """Run a census: replace each of n samples once."""
    start = time.perf_counter()
    neighbours.execute(census_config(n, data, device), folder / "census")
    seconds = time.perf_counter() - start
    return Row(
        f"census of n = {n} on {data}", seconds, note=f"{n / seconds:.1f} neighbours a second"
    )


def flower(ours: float, folder: Path) -> Row:
    """Compare one trajectory through a plain Flower app with one trajectory of this package."""
    work = folder / "work.npz"
    what = make_work(work)
    found = run([sys.executable, str(PEERS / "flower_app.py")], work, folder / "flower.npz")
    theirs = per_trajectory(found)
    note = f"{what}; ours with evaluation and theory, Flower's without"
    return Row("a neighbour / a plain Flower app", ours, theirs, theirs / ours, note=note)


def before(
    names: list[str], data: str, commit: str, asked: argparse.Namespace, folder: Path
) -> Iterator[Row]:
    """Run the same suites with the command of an older commit and of this commit, in turn."""
    old = folder / "before"
    taken = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True)
    if taken.returncode:
        yield Row(f"suites / commit {commit}", note="that commit is not here: clone with history")
        return
    with tarfile.open(fileobj=io.BytesIO(taken.stdout)) as archive:
        archive.extractall(old, filter="data")
    found: dict[str, list[Record]] = {"before": [], "now": []}
    for name in names:
        file = folder / f"{name}.toml"
        file.write_text(reduced(name, data, asked.seeds, asked.train))
        for who, place in (("before", old), ("now", ROOT)):
            found[who].append(by_command(file, data, place, folder / f"{who}-{name}", SETTING[who]))
            say(f"{name}, {who}: {found[who][-1]['seconds']:.1f} s")
        require_same(*(found[who][-1]["measured"] for who in found))
    ours, theirs = (sum(one["seconds"] for one in found[who]) for who in ("now", "before"))
    count = sum(one["trajectories"] for one in found["now"])
    figure = f"{', '.join(names)} / the same at commit {commit}"
    yield Row(figure, ours, theirs, theirs / ours, 2, f"{count} trajectories on {data}")


def reduced(name: str, data: str, seeds: int, train: int) -> str:
    """Return a suite file with the first seeds of a shipped suite and at most `train` samples."""
    content = contents.at(contents.read(name), data, "full")
    sizes = sorted({min(one, train or one) for one in content["grid"]["train"]})
    chosen = content["seeds"][: seeds or None]
    return f'like = "{name}"\nseeds = {chosen}\n\n[grid]\ntrain = {sizes}\n'


def by_command(
    file: Path, data: str, place: Path, out: Path, more: dict[str, dict[str, object]]
) -> Record:
    """Run `fedmuon suite` from the source tree `place`, and return its suite.json."""
    given = [f"--set={table}.{key}={value}" for table, keys in (changes(data) | more).items()
             for key, value in keys.items()]  # fmt: skip
    command = [sys.executable, "-m", "fedmuon", "suite", str(file), "--data", data, "--out", out]
    done = subprocess.run(
        [*command, *given],
        capture_output=True,
        text=True,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place)},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"fedmuon suite failed at {place}:\n{done.stderr[-2000:]}")
    return json.loads((out / "suite.json").read_text())


def require_same(one: Record, other: Record) -> None:
    """Raise unless both commits measured the same values."""
    for key, value in one.items():
        if abs(value - other[key]) > SAME * abs(value):
            raise SystemExit(f"{key} is {value} at the older commit and {other[key]} now")


def scaling(turns: int, size: int, folder: Path) -> Iterator[Row]:
    """Compare a suite of equal cells on one Ray worker and on two, from start to end."""
    file = folder / "scaling.toml"
    file.write_text(
        'like = "A1"\nseeds = [0, 1, 2, 3, 4, 5, 6, 7]\n\n'
        f"[grid]\ntrain = [{size}]\nlr = [0.01, 0.03]\n"
    )
    work = kinds.find(str(file), "mnist5k", "full", {})
    found = []
    for turn in range(turns):
        found.append([spread(work, workers, folder / f"{turn}-{workers}") for workers in (1, 2)])
        one, two = (whole for whole, _ in found[-1])
        say(f"{turn + 1}/{turns}: one worker {one:.1f} s, two {two:.1f} s")
    one, alone = (median(each[0][i] for each in found) for i in (0, 1))
    two, both = (median(each[1][i] for each in found) for i in (0, 1))
    ratio = median(each[0][0] / each[1][0] for each in found)
    note = (
        f"{len(work.cells)} cells, start and end of Ray and its workers included: without, from "
        f"the first cell's end on, {alone:.1f} s and {both:.1f} s"
    )
    yield Row("a suite on two of Ray's workers / on one", two, one, ratio, 1.7, note)


def spread(work: suite.Work, workers: int, folder: Path) -> tuple[float, float]:
    """Return the seconds of a suite on `workers` Ray workers, in total and after its first cell."""
    from fedmuon.experiments.engines.ray_cluster import LOCAL, quiet_ray

    quiet_ray()  # must run before Ray is imported
    import ray

    full, ends = ray.init, []
    start = time.perf_counter()
    with mock.patch("ray.init", lambda **given: full(**given, num_cpus=workers)):
        suite.execute(
            work,
            folder,
            by=suite.Spread(LOCAL),
            on_round_end=lambda _: ends.append(time.perf_counter()),
        )
    return time.perf_counter() - start, ends[-1] - ends[0]


def measured(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Return the rows that the options request."""
    if asked.scaling:
        yield from scaling(asked.turns, asked.train or 4000, folder)
    data = asked.data or available()
    if asked.before:
        yield from before(asked.suites, data, asked.before, asked, folder)
    if asked.scaling or asked.before:
        return
    device = str(resolve(parse({"engine": {"device": asked.device}})).engine.device)
    ours = 0.0
    for row in suites(asked.suites, data, device, folder):
        ours = ours or row.ours or 0.0
        yield row
    if asked.census:
        yield census(asked.census, data, device, folder)
    if asked.flower and ours:
        yield flower(ours, folder)


def available() -> str:
    """Return "fashion-mnist" if it is installed, otherwise "synthetic"."""
    try:
        read_source(parse({"data": {"name": "fashion-mnist"}}))
    except InputError:
        return "synthetic"
    return "fashion-mnist"


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="default: Fashion-MNIST if installed, otherwise synthetic")
    parser.add_argument("--suites", nargs="*", default=["A1", "A2", "A3"])
    parser.add_argument("--census", type=int, default=0)
    parser.add_argument("--flower", action="store_true")
    parser.add_argument("--before", nargs="?", const=BEFORE, metavar="COMMIT")
    parser.add_argument(
        "--seeds", type=int, default=0, help="maximum number of seeds of a suite; 0: all"
    )
    parser.add_argument("--train", type=int, default=0, help="maximum number of samples; 0: all")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--turns", type=int, default=1, help="number of turns of --scaling")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        page.tell(measured(asked, Path(place)), asked.rows)


if __name__ == "__main__":
    main()
