"""Compare the local training of a CNN with pfl-research and a plain Flower app.

    python -m benchmarks.networks [--rounds 3] [--pairs 2] [--skip-flower]

K = 5 of N = 20 clients train the CNN of McMahan et al. with SGD for one local epoch, in batches of
64. The data are 12,000 images of Fashion-MNIST, or 4,000 images of mnist5k. Every contestant runs
in its own process, takes the same steps from the same initial model, and must end with the same
model. Most of the time is spent in convolutions, which are equal for all contestants. FedMuon adds
matrix products, in float32 or in bfloat16. The page shows the distance of these two models.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import page
from benchmarks.page import Row, say
from benchmarks.rounds import PEERS, run
from fedmuon.config.load import Config, only_read, parse
from fedmuon.core.errors import InputError
from fedmuon.federated.build import build_experiment
from fedmuon.federated.client_data import read_source
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, run_rounds

BATCH = 64
AIMS = {"torch loop": 1.3, "pfl-research": 1.3, "Flower": 1.5}
MUON, HALF = "ours, FedMuon", "ours, FedMuon with products in bfloat16"
OURS = {"ours": "fedavg", MUON: "fedmuon", HALF: "fedmuon-bfloat16"}


def config(data: str, count: int, recipe: str = "fedavg") -> Config:
    """Return the job as a config, with an even split so that all epochs have equal length."""
    train = 12_000 if data == "fashion-mnist" else 4_000
    shared: dict[str, dict[str, Any]] = {
        "data": {"name": data, "train": train, "test": 1_000, "alpha": 1e6},
        "federation": {"rounds": count},
        "task": {"name": "network", "model": "cnn"},
        "local": {"recipe": recipe, "steps": train // 20 // BATCH, "batch": BATCH, "lr": 0.05},
        "orthogonalizer": {"name": "newton-schulz"},
        "engine": {"device": "cpu"},
    }
    if recipe == OURS[HALF]:
        shared["local"]["recipe"] = "fedmuon"
        shared["orthogonalizer"]["products"] = "bfloat16"
    return parse(only_read(shared))


def experiment_of(table: Config) -> Experiment:
    """Return the experiment with its data."""
    return build_experiment(table)


def available() -> str:
    """Return "fashion-mnist" if it is installed, otherwise "mnist5k"."""
    try:
        read_source(config("fashion-mnist", 1))
        return "fashion-mnist"
    except InputError:
        return "mnist5k"


def make_job(path: Path, table: Config) -> None:
    """Write all random choices to a file (see `peers/cnn_work.py`)."""
    what = experiment_of(table)
    plan, shards = what.plan, what.shards
    schedule, sizes = plan.schedule(), np.diff(shards.offsets)
    rows = [
        [[plan.rows(r, i, e, int(sizes[i])) for e in range(plan.steps)] for i in chosen]
        for r, chosen in enumerate(schedule.tolist())
    ]
    start = begin(what.recipe, what.task, table.federation.seed).params
    arrays: dict[str, Any] = {f"start {name}": value[0].numpy() for name, value in start.items()}
    arrays |= {"inputs": shards.inputs.numpy(), "labels": shards.labels.numpy()}
    arrays |= {"offsets": shards.offsets, "schedule": schedule, "rows": np.array(rows)}
    np.savez(path, allow_pickle=False, lr=np.array(table.local.lr), **arrays)


def work(kind: str, data: str, count: int, path: str, out: str) -> None:
    """Run one contestant of this package in this process, and report its times and last model."""
    sys.path.insert(0, str(PEERS))
    from cnn_work import (  # pyright: ignore[reportMissingImports]
        cnn,
        load,
        put,
        report,
        train,
    )

    if kind != "loop":
        what = experiment_of(config(data, count, kind))
        state = begin(what.recipe, what.task, 0)
        stamps = [perf_counter()]
        for finished in run_rounds(what, state):
            stamps.append(perf_counter())
            state = finished.state
        report(out, {name: value[0] for name, value in state.params.items()}, stamps)
        return
    job, model = load(path), cnn()
    state, stamps = job.start, [perf_counter()]
    for r, chosen in enumerate(job.schedule.tolist()):
        ends = []
        for k, client in enumerate(chosen):
            put(model, state)
            train(model, *job.client(client), job.rows[r, k], job.lr)
            ends.append([value.detach().clone() for value in model.parameters()])
        state = dict(zip(state, [sum(v) / len(ends) for v in zip(*ends, strict=True)], strict=True))
        stamps.append(perf_counter())
    report(out, state, stamps)


def contestants(data: str, count: int, skip_flower: bool) -> dict[str, list[str]]:
    """Return the command of each contestant. pfl-research is included only if it is installed."""
    python = sys.executable
    ours = [python, "-m", "benchmarks.networks", "--data", data, "--rounds", str(count), "--work"]
    field = {name: [*ours, kind] for name, kind in OURS.items()}
    field["torch loop"] = [*ours, "loop"]
    if importlib.util.find_spec("pfl"):
        field["pfl-research"] = [python, str(PEERS / "cnn_pfl.py")]
    return field if skip_flower else {**field, "Flower": [python, str(PEERS / "cnn_flower.py")]}


def compare(count: int, pairs: int, skip_flower: bool) -> Iterator[Row]:
    """Run all contestants in turn. Times are medians of warm rounds; ratios are taken per pair."""
    data = available()
    field = contestants(data, count, skip_flower)
    seconds: dict[str, list[float]] = {name: [] for name in field}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.npz"
        make_job(job, config(data, count))
        for turn in range(pairs):
            for name, command in field.items():
                found = run(command, job, Path(folder) / f"{name}.npy")
                seconds[name].append(median(found["round_seconds"][1:] or found["round_seconds"]))
                away = _distance(Path(folder), name)
                said = f", {away:.1e} from {MUON if name == HALF else 'our model'}" if away else ""
                say(f"{turn + 1}/{pairs} {name}: {seconds[name][-1]:.2f} s a round{said}")
        error = _distance(Path(folder), HALF)
    yield from ratios(seconds, f"{data}, one local epoch of K = 5 clients", error)


def ratios(seconds: dict[str, list[float]], what: str, error: float) -> Iterator[Row]:
    """Compare our FedAvg with the peers, and FedMuon with our FedAvg."""
    own = seconds["ours"]
    for name in [name for name in AIMS if name in seconds]:
        theirs = seconds[name]
        ratio = median(t / o for t, o in zip(theirs, own, strict=True))
        yield Row(f"CNN, FedAvg, a round / {name}", median(own), median(theirs), ratio, AIMS[name])
    notes = {MUON: what, HALF: f"{what}; its model ends {error:.1e} from that of float32"}
    for name, note in notes.items():
        cost = median(m / o for m, o in zip(seconds[name], own, strict=True))
        figure = f"CNN, {name.removeprefix('ours, ')}, a round / FedAvg"
        yield Row(figure, median(seconds[name]), median(own), cost, 1.25, note, at_most=True)


def _distance(folder: Path, name: str) -> float:
    """Return the distance of the contestant's model from our model. Raise if it is too large."""
    if name in ("ours", MUON):
        return 0.0
    one, other = (np.load(folder / f"{x}.npy") for x in (MUON if name == HALF else "ours", name))
    away = float(np.linalg.norm(one - other) / np.linalg.norm(one))
    if away > (0.1 if name == HALF else 1e-3):
        raise SystemExit(f"{name} ends {away:.1e} away from our model")
    return away


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--skip-flower", action="store_true")
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work, asked.data, asked.rounds, *asked.files)
    else:
        page.tell(compare(asked.rounds, asked.pairs, asked.skip_flower), asked.rows)


if __name__ == "__main__":
    main()
