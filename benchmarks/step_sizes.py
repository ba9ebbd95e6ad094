"""Step sizes of the private suites: as many trials for one method as for another.

    python -m benchmarks.step_sizes dp-classification --out FOLDER [--seed 100] [--again 101 102]

Every variant is run with each step size of its family's grid, which was fixed before any was run,
at one epsilon and with a seed that the suite does not use; the two that ended best are run again
with more such seeds, and the better mean of all is marked. What Muon leaves has AdamW's step size,
which keeps its share of Muon's. One at an end of its grid says that more may be gained beyond it. A
folder that exists is gone on with.
"""

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.page import say
from fedmuon.experiments.studies import training
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import SuiteRequest, merged
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
TRIED, FINAL = 5, 2
SHARES = {"dp-classification": 0.25, "dp-classification-cnn": 1.0, "dp-federated": 0.2}


def trials(name: str, seeds: list[int]) -> dict[str, Any]:
    """The suite's content with a variant for each method and step size, at one epsilon: that of the
    curves along a sweep."""
    suite = contents.read(name)
    at = suite["sweep"]["curves"] if "sweep" in suite else suite["base"]["privacy"]["epsilon"]
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


Ends = dict[str, dict[float, list[float]]]  # accuracies by method and step size


def ends(*files: Path) -> Ends:
    """The accuracies in tables of runs."""
    found: Ends = {}
    for row in (row for file in files for row in csv.DictReader(file.read_text().splitlines())):
        method, _, lr = row["variant"].rpartition(", ")
        found.setdefault(method, {}).setdefault(float(lr), []).append(float(row["accuracy"]))
    return found


def best(by_lr: Mapping[float, list[float]], count: int) -> list[float]:
    """The step sizes that ended best, the first of equals before the others."""
    return sorted(by_lr, key=lambda lr: -mean(by_lr[lr]))[:count]


def chosen(first: Ends, every: Ends) -> dict[str, float]:
    """The better mean of the two that were run again."""
    return {
        method: best({lr: every[method][lr] for lr in best(by_lr, FINAL)}, 1)[0]
        for method, by_lr in first.items()
    }


def tell(first: Ends, every: Ends) -> None:
    """A line a method: mean accuracies by step size, the chosen one marked."""
    for method, lr in chosen(first, every).items():
        means = {one: mean(accuracies) for one, accuracies in every[method].items()}
        line = "  ".join(f"{one:g} {end:.3f}{'*' * (one == lr)}" for one, end in means.items())
        say(f"{method:24}{line}{'  at an end of its grid' * (lr in (min(means), max(means)))}")


def run(name: str, content: Mapping[str, Any], out: Path) -> Path:
    """All runs of such a content; their table."""
    asked = SuiteRequest(f"{name}-step-sizes", contents.read(name)["data"], "full", {})
    summary = execute(training.work(dict(content), asked), out, resume=out.exists())
    say(f"{summary['runs']} runs with seeds {content['seeds']}: {summary['seconds']:.0f} s")
    return out / "runs.csv"


def finalists(content: Mapping[str, Any], first: Ends) -> dict[str, Any]:
    """The variants that are run again."""
    names = {f"{method}, {lr:g}" for method, by_lr in first.items() for lr in best(by_lr, FINAL)}
    return {name: own for name, own in content["variants"].items() if name in names}


def main() -> None:
    """All trials of a suite."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=GRIDS)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--again", type=int, nargs="+", default=[101, 102])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    content = trials(given.suite, [given.seed])
    first = run(given.suite, content, given.out / "first")
    more = {"seeds": given.again, "variants": finalists(content, ends(first))}
    again = run(given.suite, content | more, given.out / "again")
    tell(ends(first), ends(first, again))


if __name__ == "__main__":
    main()
