"""Attack the certificates of clients by hill climbing in 30 settings.

Run `python -m benchmarks.attack_clients`. In each setting, an adversary chooses any samples of norm
at most 1 and any labels for one client, trains the exact run, and changes the samples that moved
the final model most. The script prints the largest share of a certificate that was reached, and the
number of certificates that were exceeded.

A mean gradient is largest if all samples of the client are equal. So an attack has one sample u and
one label for all, or two halves with a sample each.
"""

import itertools
import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmuon.analysis import Realized
from fedmuon.config.load import parse
from fedmuon.data.client_neighbours import NOTHING, SAME, ClientNeighbours
from fedmuon.data.federated import FederatedData
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify, start_of
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.neighbour_runs import distances, run_neighbours
from fedmuon.federated.rounds import begin

RECIPES = ("fedmuon", "local-muon", "fedavg", "fedavgm", "fedmuon-nesterov")
STEPS = ((1, 0.1), (3, 1.0), (2, 0.01))  # E and λ; the step size of FedAvg is larger
SHARES = ((6, 0), (2, 4))  # K of 6 clients, and the size of mini-batches
CHAINS, GENERATIONS, BEST = (
    48,
    12,
    6,
)  # attacks per generation, generations, attacks that are varied


@dataclass(frozen=True)
class Setting:
    """One setting: its name, and the changes of the config."""

    name: str
    tables: dict[str, dict[str, Any]]


def settings() -> list[Setting]:
    """Return the 30 settings."""
    found = []
    for recipe, (steps, lam), (per_round, batch) in itertools.product(RECIPES, STEPS, SHARES):
        local: dict[str, Any] = {"recipe": recipe.removesuffix("-nesterov"), "steps": steps}
        local |= {"lr": 0.5 if "avg" in recipe else 0.02, "batch": batch}
        if "nesterov" in recipe:
            local["momentum-form"] = "ema-nesterov"
        tables = {"local": local, "federation": {"per-round": per_round}}
        if "avg" not in recipe:
            tables["orthogonalizer"] = {"lambda": lam}
        name = f"{recipe}, E = {steps}, λ = {lam:g}, K = {per_round}, batch {batch}"
        found.append(Setting(name, tables))
    return found


def attacked(setting: Setting, seed: int = 0) -> tuple[float, int, int]:
    """Attack the client with the largest certificate.

    Returns:
        The largest share of the certificate, the number of attacks above it, and their number.
    """
    base: dict[str, dict[str, Any]] = {
        "data": {"name": "synthetic", "train": 90, "test": 30, "dimension": 7, "classes": 3,
                 "minimum": 5},
        "federation": {"clients": 6, "rounds": 6, "seed": seed, "aggregate": "mean"},
        "engine": {"dtype": "float64", "device": "cpu"},
        "task": {"initial": "zero"}, "stability": {"unit": "clients"},
    }  # fmt: skip
    for name, table in setting.tables.items():
        base[name] = base.get(name, {}) | table
    config = resolve(parse(base))
    source = read_source(config)
    data = build_data(config, source)
    experiment = build_experiment(config, data)
    first = begin(experiment.recipe, experiment.task, seed).params["weight"][0].numpy()
    case = CertifiedSetting(
        config, data.sizes, Realized(experiment.plan.schedule()), first.shape,
        factors=experiment.plan.factors(), start=start_of(first, source),
    )  # fmt: skip
    verdict = certify(case)
    assert verdict.certificates is not None, verdict.refusal
    client = int(verdict.certificates.argmax())
    return climb(experiment, data, client, float(verdict.certificates[client]), seed)


def climb(
    experiment: Experiment, data: FederatedData, client: int, promised: float, seed: int
) -> tuple[float, int, int]:
    """Return the same as `attacked` for this client and its certificate."""
    rng, size = np.random.default_rng(seed), int(data.sizes[client])
    d, classes = data.inputs.shape[1], int(data.classes)
    mean = data.samples(client)[0].mean(0)
    pairs = rng.standard_normal((CHAINS, 2, d))
    pairs[: 2 * classes] = mean * np.repeat([1, -1], classes)[:, None, None]
    pairs[::2, 1] = pairs[::2, 0]  # one sample for all
    labels = rng.integers(classes, size=(CHAINS, 2))
    labels[: 2 * classes] = np.tile(np.arange(classes), 2)[:, None]
    labels[::2, 1] = labels[::2, 0]
    pairs = unit(pairs)
    best, above, count = 0.0, 0, 0
    kept: list[tuple[float, np.ndarray, np.ndarray]] = []
    for generation in range(GENERATIONS):
        ends = run_neighbours(experiment, of_pairs(client, size, pairs, labels), seed)
        moved = distances(ends)[0]
        best, above, count = (
            max(best, moved.max()),
            above + (moved > promised).sum(),
            count + CHAINS,
        )
        kept += zip(moved.tolist(), pairs, labels, strict=True)
        kept = sorted(kept, key=lambda entry: -entry[0])[:BEST]
        width = 0.8 / 1.5**generation
        parents = [kept[t % len(kept)] for t in range(CHAINS)]
        pairs = np.stack([parent for _, parent, _ in parents])
        labels = np.stack([label for _, _, label in parents])
        noise = rng.standard_normal(pairs.shape)
        noise[::2, 1] = noise[::2, 0]
        pairs = unit(pairs + width * noise)
        drawn, changed = rng.integers(classes, size=labels.shape), rng.random(CHAINS) < 0.15
        labels = np.where(changed[:, None], drawn, labels)
    return best / promised, int(above), count


def unit(rows: np.ndarray) -> np.ndarray:
    """Scale vectors to norm 1, because longer samples have larger gradients."""
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def of_pairs(client: int, size: int, pairs: np.ndarray, labels: np.ndarray) -> ClientNeighbours:
    """Return the data sets in which the client's samples are those of a pair [T, 2, d]."""
    count, turn = len(pairs), np.arange(size) % 2
    column = np.full(count * size, client)
    return ClientNeighbours(
        np.repeat(np.arange(1, count + 1), size),
        column,
        np.tile(np.arange(size), count),
        np.full_like(column, NOTHING),
        np.full_like(column, SAME),
        pairs[:, turn].reshape(count * size, -1),
        labels[:, turn].ravel(),
        count + 1,
    )


def main() -> None:
    """Attack all settings, and print a line for each and a line of JSON at the end."""
    shares, above, count = {}, 0, 0
    for setting in settings():
        shares[setting.name], exceeded, tried = attacked(setting)
        above, count = above + exceeded, count + tried
        print(f"{shares[setting.name]:.4f} of the certificate: {setting.name}", flush=True)
    largest = max(shares, key=lambda name: shares[name])
    record = {"settings": len(shares), "attacks": count, "above": above,
              "largest_share": shares[largest], "setting": largest}  # fmt: skip
    print(json.dumps(record, ensure_ascii=False))
    sys.exit(above > 0)


if __name__ == "__main__":
    main()
