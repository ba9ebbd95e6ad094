"""Compare every optimizer and orthogonalizer on a GPU with the CPU, and measure round times.

    python -m benchmarks.gpu [--device cuda] [--rounds 5] [--ray]

All optimizers and orthogonalizers run the same rounds in float64 on both devices, with the same
random draws. `distance` is the largest relative difference of a tensor of the model. With `--ray`,
two clients at a time share the device, half of it each. Then networks run in float32, with FedMuon
compared with FedAvg. Their first round is not counted. To measure single parts on a GPU, run
`python -m benchmarks.optimizer`, `privacy`, `randomized` or `laboratory` with `--device cuda`.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks import page
from benchmarks.page import Row, say
from fedmuon.config.load import Config, only_read, parse
from fedmuon.config.methods import PRIVATE, has
from fedmuon.config.names import NAMES
from fedmuon.experiments.run import execute

FAR = 1e-9  # largest relative distance in float64, where only the order of sums differs
FAR_SINGLE = 1e-3  # largest relative distance in float32
SMALL: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "train": 240, "test": 60},
    "federation": {"clients": 6, "per-round": 3, "rounds": 4, "seed": 1},
    "task": {"name": "network", "model": "mlp"},
    "local": {"steps": 2, "batch": 8, "lr": 0.01},
    "orthogonalizer": {"name": "newton-schulz"},
    "engine": {"dtype": "float64"},
}
PRIVATE_RUN: dict[str, dict[str, Any]] = {
    "local": {"batch": 0},
    "privacy": {"noise": 0.5, "lot": 8.0, "insecure-reproducible-noise": True},
}
OF_RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "fedmuon-svd": {"local": {"rank": 2}},
    "fedper": {"local": {"personal": "head.*"}},
}
OF_MAPS: dict[str, dict[str, Any]] = {"randomized-polar": {"rank": 4, "oversample": 2}}
# Rounds of the size of a study: 5 clients, 20 local steps.
NETWORKS: dict[str, dict[str, Any]] = {
    "cnn": {"data": {"name": "mnist5k", "train": 4_000, "test": 500}},
    "cifarnet": {"data": {"name": "mnist5k", "train": 4_000, "test": 500}},
    "wrn-16-4": {"data": {"name": "mnist5k", "train": 4_000, "test": 500}},
    "vit-small": {"data": {"name": "mnist5k", "train": 4_000, "test": 500}},
    "gpt": {"data": {"name": "pydoc", "context": 128}, "task": {"width": 256, "depth": 4}},
}


def config(*tables: dict[str, Any]) -> Config:
    """Return the small run with these changes. Keys that the run does not read are dropped."""
    merged: dict[str, dict[str, Any]] = {}
    for one in (SMALL, *tables):
        for table, keys in one.items():
            merged.setdefault(table, {}).update(keys)
    return parse(only_read(merged))


def distance(one: Path, other: Path) -> float:
    """Return the largest relative difference of a tensor between the models of two runs."""
    ours, theirs = (load_file(run / "model.safetensors") for run in (one, other))
    return max(
        float((ours[name] - theirs[name]).norm() / ours[name].norm().clamp_min(1e-300))
        for name in ours
    )


def agreement(device: str, folder: Path) -> Iterator[Row]:
    """Run every optimizer, then every orthogonalizer, on the CPU and on the device."""
    cases = {}
    for name in NAMES["local.recipe"]:
        if has(name, "adapters"):  # the small network has none
            continue
        private = PRIVATE_RUN if name in PRIVATE else {}
        cases[name] = ({"local": {"recipe": name}}, OF_RECIPES.get(name, {}), private)
    for name in NAMES["orthogonalizer.name"]:
        cases[f"map {name}"] = ({"orthogonalizer": {"name": name, **OF_MAPS.get(name, {})}},)
    for name, changes in cases.items():
        try:
            runs = [folder / f"{name}-{where}" for where in ("cpu", "there")]
            for run, where in zip(runs, ("cpu", device), strict=True):
                execute(config(*changes, {"engine": {"device": where}}), run)
            away = distance(*runs)
            yield Row(f"{name}: distance", away, aim=FAR, unit="", at_most=True)
        except Exception as error:  # continue with the other cases
            yield Row(f"{name}: distance", note=f"{type(error).__name__}: {error}", failed=True)


def shared(device: str, folder: Path) -> Row:
    """Compare two Ray workers, on half the device each, with one process on the CPU."""
    half = {"name": "ray", "device": device, "cpus-per-client": 1.0}
    half |= {"gpus-per-client": 0.5} if device.startswith("cuda") else {}
    single = {"engine": {"dtype": "float32"}}
    execute(config(single, {"engine": {"device": "cpu"}}), folder / "ray-cpu")
    execute(config(single, {"engine": half}), folder / "ray-there")
    away = distance(folder / "ray-cpu", folder / "ray-there")
    return Row("two Ray workers: distance", away, aim=FAR_SINGLE, unit="", at_most=True)


def rounds(device: str, count: int, folder: Path) -> Iterator[Row]:
    """Measure the seconds per round of each network, with FedMuon and with FedAvg."""
    for model, changes in NETWORKS.items():
        try:
            took = {
                recipe: seconds(device, count, folder / f"{model}-{recipe}", changes,
                                {"task": {"model": model}, "local": {"recipe": recipe}})
                for recipe in ("fedmuon", "fedavg")
            }  # fmt: skip
        except Exception as error:
            yield Row(f"{model}: a round", note=f"{type(error).__name__}: {error}", failed=True)
            continue
        ratio = took["fedmuon"] / took["fedavg"]
        say(f"{model}: {took['fedmuon']:.3f} s a round of FedMuon")
        yield Row(f"{model}, FedMuon, a round / FedAvg", took["fedmuon"], took["fedavg"], ratio)


def seconds(device: str, count: int, out: Path, *changes: dict[str, Any]) -> float:
    """Return the median seconds per round of a run, without the first round."""
    what = {
        "federation": {"clients": 20, "per-round": 5, "rounds": count + 1},
        "local": {"steps": 20, "batch": 64, "lr": 1e-3},
        "engine": {"dtype": "float32", "device": device},
        "output": {"evaluate-every": count + 1},
    }
    execute(config(*changes, what), out)
    lines = (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    return float(median(np.diff([json.loads(one)["train_seconds"] for one in lines])))


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="also run two Ray workers on the device")
    asked = parser.parse_args()

    def rows(folder: Path) -> Iterator[Row]:
        yield from agreement(asked.device, folder)
        if asked.ray:
            yield shared(asked.device, folder)
        yield from rounds(asked.device, asked.rounds, folder)

    if asked.device.startswith("cuda"):
        say(torch.cuda.get_device_name(asked.device))
    with tempfile.TemporaryDirectory() as folder:
        page.tell(rows(Path(folder)), asked.rows)


if __name__ == "__main__":
    main()
