"""Step sizes of the private suites: as many trials for one method as for another.

    python -m benchmarks.step_sizes dp-classification [--seeds 100 101] [--out FOLDER]

Every variant is run with each step size of its family's grid, which was fixed before any was run,
at one epsilon and with seeds that the suite does not use. What Muon leaves has AdamW's step size,
which keeps its share of Muon's. The best mean accuracy is marked; one at an end of its grid says
that more may be gained beyond it. A folder that exists is gone on with.
"""

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.page import say
from fedmuon.experiments.studies.training import cells
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Asked, merged
from fedmuon.experiments.suites.suite import execute

GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "dp-classification": {
        "sgd": (0.5, 1, 2, 4, 8),
        "adam": (0.0025, 0.005, 0.01, 0.02, 0.04),
        "muon": (0.005, 0.01, 0.02, 0.04, 0.08),
    },
    "dp-classification-cnn": {
        "sgd": (1, 2, 4, 8, 16),
        "adam": (0.0025, 0.005, 0.01, 0.02, 0.04),
        "muon": (0.0025, 0.005, 0.01, 0.02, 0.04),
    },
    "dp-federated": {
        "sgd": (0.25, 0.5, 1, 2, 4),
        "adam": (0.0025, 0.005, 0.01, 0.02, 0.04),
        "muon": (0.0125, 0.025, 0.05, 0.1, 0.2),
    },
}
TRIED = 5
SHARES = {"dp-classification": 0.25, "dp-classification-cnn": 1.0, "dp-federated": 0.2}


def trials(name: str, seeds: list[int], at: float) -> dict[str, Any]:
    """The suite's content with a variant for each method and step size, at one epsilon."""
    suite = contents.read(name)
    below = merged(suite["base"], {"privacy": {"epsilon": at}})
    return {
        "title": f"{suite['title']}: step sizes",
        "seeds": seeds,
        "base": below,
        "variants": {
            f"{method}, {lr:g}": merged(own, {"local": rates(name, own["local"]["recipe"], lr)})
            for method, own in suite["variants"].items()
            for lr in GRIDS[name][family(own["local"]["recipe"])]
        },
    }


def family(recipe: str) -> str:
    """SGD, Adam or Muon, whatever filters or corrects it."""
    return recipe.partition("-")[2].removesuffix("bc")


def rates(name: str, recipe: str, lr: float) -> Mapping[str, float]:
    """The step size of a recipe, and that of what Muon leaves."""
    others = {"aux-lr": round(SHARES[name] * lr, 12)} if family(recipe) == "muon" else {}
    return {"lr": lr, **others}


def tell(file: Path) -> None:
    """A line a method: accuracies by step size, the best one marked."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in csv.DictReader(file.read_text().splitlines()):
        method, _, lr = row["variant"].rpartition(", ")
        found.setdefault(method, {}).setdefault(float(lr), []).append(float(row["accuracy"]))
    for method, by_lr in found.items():
        means = {lr: mean(ends) for lr, ends in by_lr.items()}
        best = max(means, key=lambda lr: means[lr])
        line = "  ".join(f"{lr:g} {end:.3f}{'*' * (lr == best)}" for lr, end in means.items())
        edge = "  at an end of its grid" * (best in (min(means), max(means)))
        say(f"{method:24}{line}{edge}")


def main() -> None:
    """All trials of a suite."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=GRIDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    suite = contents.read(given.suite)
    own = suite["sweep"]["curves"] if "sweep" in suite else suite["base"]["privacy"]["epsilon"]
    at = given.epsilon or own
    asked = Asked(f"{given.suite}-step-sizes", suite["data"], "full", {})
    work = cells.work(trials(given.suite, given.seeds, at), asked)
    summary = execute(work, given.out, resume=given.out.exists())
    say(f"{given.suite} at ε = {at:g}, seeds {given.seeds}: {summary['seconds']:.0f} s")
    tell(given.out / "runs.csv")


if __name__ == "__main__":
    main()
