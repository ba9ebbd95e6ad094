"""Choose the step sizes of the private suites with the same number of trials for every method.

    python -m benchmarks.step_sizes dp-classification --out FOLDER [--seed 100] [--again 101 102]

Every variant runs with each step size in the grid of its family. The grids were fixed before any
run. All runs use one epsilon and a seed that the suite does not use. The two best step sizes run
again with more such seeds, and the step size with the better mean over all seeds is marked.
Parameters that Muon does not update use the step size of AdamW, which is a fixed share of Muon's
step size. A marked step size at an end of its grid means that a larger grid may give better
results. If the folder exists, the runs are resumed.
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
    """Return the suite's content with a variant for each method and step size, at one epsilon.

    For a suite with a sweep, it is the epsilon of the curves.
    """
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
    """Return the family of an optimizer: sgd, adam or muon, without filter and correction."""
    return recipe.partition("-")[2].removesuffix("bc")


def rates(name: str, recipe: str, lr: float) -> Mapping[str, float]:
    """Return the step size of an optimizer and, for Muon, of the parameters outside Muon."""
    others = {"aux-lr": round(SHARES[name] * lr, 12)} if family(recipe) == "muon" else {}
    return {"lr": lr, **others}


Ends = dict[str, dict[float, list[float]]]  # method -> step size -> final accuracies


def ends(*files: Path) -> Ends:
    """Read the final accuracies from tables of runs."""
    found: Ends = {}
    for row in (row for file in files for row in csv.DictReader(file.read_text().splitlines())):
        method, _, lr = row["variant"].rpartition(", ")
        found.setdefault(method, {}).setdefault(float(lr), []).append(float(row["accuracy"]))
    return found


def best(by_lr: Mapping[float, list[float]], count: int) -> list[float]:
    """Return the step sizes with the best mean accuracies. Ties keep the order of the grid."""
    return sorted(by_lr, key=lambda lr: -mean(by_lr[lr]))[:count]


def chosen(first: Ends, every: Ends) -> dict[str, float]:
    """Return for each method the step size with the better mean, among those that ran again."""
    return {
        method: best({lr: every[method][lr] for lr in best(by_lr, FINAL)}, 1)[0]
        for method, by_lr in first.items()
    }


def tell(first: Ends, every: Ends) -> None:
    """Print one line per method with the mean accuracy of each step size; mark the chosen one."""
    for method, lr in chosen(first, every).items():
        means = {one: mean(accuracies) for one, accuracies in every[method].items()}
        line = "  ".join(f"{one:g} {end:.3f}{'*' * (one == lr)}" for one, end in means.items())
        say(f"{method:24}{line}{'  at an end of its grid' * (lr in (min(means), max(means)))}")


def run(name: str, content: Mapping[str, Any], out: Path) -> Path:
    """Run all runs of a suite's content, and return the path of their table."""
    asked = SuiteRequest(f"{name}-step-sizes", contents.read(name)["data"], "full", {})
    summary = execute(training.work(dict(content), asked), out, resume=out.exists())
    say(f"{summary['runs']} runs with seeds {content['seeds']}: {summary['seconds']:.0f} s")
    return out / "runs.csv"


def finalists(content: Mapping[str, Any], first: Ends) -> dict[str, Any]:
    """Return the variants that run again."""
    names = {f"{method}, {lr:g}" for method, by_lr in first.items() for lr in best(by_lr, FINAL)}
    return {name: own for name, own in content["variants"].items() if name in names}


def main() -> None:
    """Run all trials of a suite."""
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
