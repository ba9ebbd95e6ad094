"""Compare simulators on set-ups for which other simulators publish figures, and on a transformer.

    python -m benchmarks.published [--only pfl-cnn ...] [--pairs 1] [--rounds 2] [--small]

The method is FedAvg on random images of the shape of CIFAR-10. The set-ups are:

- the CIFAR-10 benchmark of pfl-research: its network, users with 50 samples, cohorts of 50, batches
  of 10 and one epoch;
- the benchmark of BlazeFL, with its CNN and with ResNet-18: clients with 500 samples and batches of
  50, but one local epoch of 5 (CNN) or 2 (ResNet-18) clients instead of five epochs of 100 clients;
- a small transformer.

There are fewer users than in the published set-ups, because users outside a cohort cost nothing.
The contestants run in turn, each in its own process. All start from the same model, train on the
same rows, and must end with the same model. The note of a row contains the CPU seconds per round
and the peak memory of the process.
"""

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import page
from benchmarks.page import Row, say
from benchmarks.rounds import PEERS, run
from fedmuon.config.load import Config, parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.federated.build import build_experiment
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, run_rounds


class SetUp(NamedTuple):
    """A network of `setup_work` with its training parameters."""

    network: str
    clients: int
    samples: int  # number of samples of each client
    cohort: int
    batch: int
    lr: float = 0.01


SETUPS = {
    "pfl-cnn": SetUp("pfl-research's CNN", 100, 50, 50, 10),
    "blazefl-cnn": SetUp("BlazeFL's CNN", 5, 500, 5, 50),
    # With lr = 0.01, the same plain loop in float32 and in float64 differs by 6e-2 after 12 steps:
    # BatchNorm amplifies rounding, so contestants could not be compared. With 1e-4 the difference
    # remains near 1e-5.
    "blazefl-resnet18": SetUp("ResNet-18", 4, 500, 2, 50, lr=1e-4),
    "transformer": SetUp("a transformer", 8, 320, 4, 32),
}
TEST = 100  # held-out samples, which the config requires but this benchmark does not use
AIMS = {"torch loop": 0.87, "pfl-research": 1.0, "BlazeFL": 1.0}
APPS = {"pfl-research": ("pfl", "setup_pfl.py"), "BlazeFL": ("blazefl", "setup_blazefl.py")}


def chosen(name: str, small: bool) -> SetUp:
    """Return a set-up. If `small`, two clients train the same network for two steps."""
    setup = SETUPS[name]
    few = setup._replace(clients=2, samples=2 * setup.batch, cohort=2)
    return few if small else setup


def experiment_of(setup: SetUp, recipe: str, count: int) -> Experiment:
    """Return the experiment with its data, split evenly so that all epochs have equal length."""
    sys.path.insert(0, str(PEERS))
    from setup_work import (  # pyright: ignore[reportMissingImports] - beside the peers' own code
        NETWORKS,
        SHAPE,
    )

    rng = np.random.default_rng(0)
    size = setup.clients * setup.samples
    images = rng.standard_normal((size + TEST, *SHAPE), dtype=np.float32)
    labels = rng.integers(10, size=size + TEST)
    table: Config = parse(
        {
            "data": {"name": "given", "train": size, "test": TEST, "alpha": 1e6,
                     "minimum": setup.batch},
            "federation": {"clients": setup.clients, "per-round": setup.cohort, "rounds": count},
            "task": {"name": "given"},
            "local": {"recipe": recipe, "steps": setup.samples // setup.batch,
                      "batch": setup.batch, "lr": setup.lr},
            "engine": {"device": "cpu"},
        } | ({"orthogonalizer": {"name": "newton-schulz"}} if recipe == "fedmuon" else {})
    )  # fmt: skip
    torch.manual_seed(0)  # a custom module starts from its own initial parameters
    given = UserObjects(data=(images, labels), task=NETWORKS[setup.network]())
    return build_experiment(table.with_objects(given))


def make_job(path: Path, setup: SetUp, count: int) -> None:
    """Write all random choices to a file (see `peers/setup_work.py`)."""
    what = experiment_of(setup, "fedavg", count)
    plan, shards = what.plan, what.shards
    schedule, sizes = plan.schedule(), np.diff(shards.offsets)
    rows = [
        [[plan.rows(r, i, e, int(sizes[i])) for e in range(plan.steps)] for i in chosen]
        for r, chosen in enumerate(schedule.tolist())
    ]
    start = begin(what.recipe, what.task, plan.seed).params
    arrays: dict[str, Any] = {f"start {name}": value[0].numpy() for name, value in start.items()}
    arrays |= {"inputs": shards.inputs.numpy(), "labels": shards.labels.numpy()}
    arrays |= {"offsets": shards.offsets, "schedule": schedule, "rows": np.array(rows)}
    np.savez(path, network=setup.network, lr=np.array(setup.lr), allow_pickle=False, **arrays)


def work(kind: str, setup: SetUp, count: int, path: str, out: str) -> None:
    """Run one contestant of this package, or the plain loop, in this process."""
    sys.path.insert(0, str(PEERS))
    from setup_work import (  # pyright: ignore[reportMissingImports] - beside the peers' own code
        NETWORKS,
        local_epoch,
        mean,
        read_job,
        started,
        tell,
    )

    if kind != "loop":
        what = experiment_of(setup, kind, count)
        state = begin(what.recipe, what.task, what.plan.seed)
        busy, stamps = started(), [time.perf_counter()]
        for finished in run_rounds(what, state):
            stamps.append(time.perf_counter())
            state = finished.state
        tell(out, {key: value[0] for key, value in state.params.items()}, stamps, busy)
        return
    network, job = read_job(path)
    model, state = NETWORKS[network](), job.start
    busy, stamps = started(), [time.perf_counter()]
    for turn, chosen in enumerate(job.schedule.tolist()):
        state = mean([local_epoch(model, job, state, turn, client) for client in chosen])
        stamps.append(time.perf_counter())
    tell(out, state, stamps, busy)


def contestants(name: str, count: int, small: bool) -> dict[str, list[str]]:
    """Return the command of each contestant. Peers are included only if they are installed."""
    ours = [sys.executable, "-m", "benchmarks.published", "--rounds", str(count)]
    ours += [*["--small"] * small, "--work"]
    kinds = {"ours": "fedavg", "ours, FedMuon": "fedmuon", "torch loop": "loop"}
    field = {one: [*ours, kind, name] for one, kind in kinds.items()}
    for peer, (package, app) in APPS.items():
        if importlib.util.find_spec(package):
            field[peer] = [sys.executable, str(PEERS / app)]
    return field


def compare(name: str, count: int, pairs: int, small: bool) -> Iterator[Row]:
    """Run all contestants in turn. Times are medians of warm rounds; ratios are taken per pair."""
    field = contestants(name, count, small)
    found: dict[str, list[dict[str, Any]]] = {one: [] for one in field}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.npz"
        make_job(job, chosen(name, small), count)
        for turn in range(pairs):
            for one, command in field.items():
                out = Path(folder) / f"{one}.npy"
                found[one].append(run(command, job, out))
                away = distance(Path(folder) / "ours.npy", out)
                if one != "ours, FedMuon" and not away <= 3e-3:
                    raise SystemExit(f"{name}: {one} ends {away:.1e} away from our model")
                say(f"{turn + 1}/{pairs} {name}, {one}: {seconds(found[one][-1]):.2f} s a round, "
                    f"{away:.1e} from our model")  # fmt: skip
    own = found["ours"]
    for one, theirs in found.items():
        if one == "ours":
            continue
        pair = [seconds(t) / seconds(o) for t, o in zip(theirs, own, strict=True)]
        cost = f"{used(own)} beside {used(theirs)}"
        muon = one == "ours, FedMuon"
        if one in APPS:
            cost += f"; {APPS[one][0]} {importlib.metadata.version(APPS[one][0])}"
        yield Row(
            f"{name}, FedMuon / FedAvg" if muon else f"{name}, a round / {one}",
            median(map(seconds, theirs if muon else own)),
            median(map(seconds, own if muon else theirs)),
            median(pair), AIMS.get(one), f"FedAvg: {cost}",
        )  # fmt: skip


def seconds(told: dict[str, Any]) -> float:
    """Return the median seconds per round. The first round, with start-up work, is left out."""
    return median(told["round_seconds"][1:] or told["round_seconds"])


def used(runs: list[dict[str, Any]]) -> str:
    """Return the CPU seconds per round and the peak memory as text."""
    cpu, peak = (median(one[key] for one in runs) for key in ("cpu", "peak"))
    return f"{cpu:.2f} CPU-s and {peak:.0f} MB"


def distance(one: Path, other: Path) -> float:
    """Return the distance of two models, relative to the norm of the first model."""
    a, b = np.load(one), np.load(other)
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="only two clients and two steps")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        kind, name = asked.work
        work(kind, chosen(name, asked.small), asked.rounds, *asked.files)
        return
    given = asked.rounds, asked.pairs, asked.small
    rows = (row for name in asked.only for row in compare(name, *given))
    page.tell(rows, asked.rows)


if __name__ == "__main__":
    main()
