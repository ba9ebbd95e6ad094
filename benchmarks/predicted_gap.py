"""Compare the gap that derivatives predict with the measured gap, and measure the cost.

    python -m benchmarks.predicted_gap [--data mnist5k] [--train 400] [--seeds 6] [--probes 8]
                                       [--replacements 16] [--only CASE ...] [--out bench]

The cases are FedMuon and FedAvg, with the matrix model and with a CNN of 3,898 parameters. All
losses are 1 - p_y. The matrix model has the base settings of the suite `gap-bound`, and settings
with long steps. The CNN has smooth activations. In the last case, it has ReLU and a step size at
which training is unstable. For each case, the table shows

- the measured gap, as the mean over seeds with Student's 95% interval. From the gap of each run,
  the mean gap of the other seeds' models on the same samples is subtracted. Its expectation is 0,
  and it makes the interval shorter.
- the gap predicted at the training samples, the gap predicted at held-out samples, and the mean of
  both, each with the standard error over probes. The ratio to the measured gap has a 95% interval
  over seeds.
- the gap by exact replacements of random samples, with the standard error over samples.
- the number of probes for a relative standard error of 10%, from the spread of single probes.
- CPU seconds of the rounds and of all probes at both ends with one thread, as medians over seeds.

The table is printed, and written to predicted_gap.txt in the folder --out.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import page
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.verdicts import mean_of
from fedmuon.config.load import parse
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core import files
from fedmuon.experiments.stability.finished_run import FinishedRun, measured_losses
from fedmuon.experiments.stability.predicted_gap import PredictedGap, predict
from fedmuon.experiments.stability.replaced_gap import replace_samples
from fedmuon.experiments.studies.gap_bound import ratio
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import begin, simulate
from fedmuon.tasks.base import Params

HELD_OUT = 4000
RELATIVE = 0.1  # the relative standard error for which probes are counted
FILE = "predicted_gap.txt"
Tables = dict[str, dict[str, Any]]
POLAR = {"name": "smoothed-polar", "lambda": 0.01}


@dataclass(frozen=True)
class Case:
    """A config, and the activation of its CNN. Without an activation, the model is a matrix."""

    local: dict[str, Any]
    federation: dict[str, Any]
    activation: type[nn.Module] | None = None

    def tables(self, data: str, train: int, seed: int) -> Tables:
        """Return the config of a run."""
        matrix = {"task": {"name": "matrix", "initial": "zero"}, "engine": {"dtype": "float64"}}
        muon = {"orthogonalizer": POLAR} if self.local["recipe"] == "fedmuon" else {}
        return {
            "data": {"name": data, "train": train, "test": HELD_OUT},
            "federation": self.federation | {"seed": seed},
            "local": self.local,
            **({"task": {"name": "given"}} if self.activation else matrix),
            **muon,
        }


SUITE = {"clients": 10, "per-round": 4, "rounds": 20}
EVERY = {"clients": 10, "per-round": 10, "rounds": 50}
SMALL = {"clients": 5, "per-round": 5, "rounds": 30}
UNSTABLE = {"clients": 2, "per-round": 2, "rounds": 10, "partition": "iid"}
CASES = {
    "matrix-fedmuon": Case({"recipe": "fedmuon", "lr": 0.03, "steps": 1}, SUITE),
    "matrix-fedavg": Case({"recipe": "fedavg", "lr": 0.2, "steps": 1}, SUITE),
    "matrix-fedmuon-long": Case({"recipe": "fedmuon", "lr": 1.0, "steps": 5}, EVERY),
    "matrix-fedavg-long": Case({"recipe": "fedavg", "lr": 100.0, "steps": 1}, SUITE),
    "cnn-fedmuon": Case(
        {"recipe": "fedmuon", "lr": 0.3, "aux-lr": 0.3, "steps": 2}, SMALL, nn.Tanh
    ),
    "cnn-fedavg": Case({"recipe": "fedavg", "lr": 1.0, "steps": 2}, SMALL, nn.Tanh),
    "cnn-relu-fedavg": Case({"recipe": "fedavg", "lr": 1.0, "steps": 5}, UNSTABLE, nn.ReLU),
}


@dataclass(frozen=True)
class Seed:
    """A trained run with its predictions.

    Attributes:
        run: The run. Its folder does not exist, because only `model` is needed.
        model: The final model, as a stack of one.
        gap: The predicted gap at both ends.
        changes: The change of the own loss of each replaced sample [K].
        seconds: CPU seconds of the rounds, and of the probes.
    """

    run: FinishedRun
    model: Params
    gap: PredictedGap
    changes: np.ndarray
    seconds: tuple[float, float]


def cnn(activation: type[nn.Module]) -> nn.Module:
    """Return a CNN of 3,898 parameters, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 6, 5, stride=2), activation(),
            nn.Conv2d(6, 12, 5, stride=2), activation(), nn.Flatten(), nn.Linear(192, 10),
        )  # fmt: skip


def bounded(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss 1 - p_y of each sample."""
    return 1 - outputs.softmax(-1).gather(-1, labels[:, None])[:, 0]


def seed_of(
    tables: Tables, activation: type[nn.Module] | None, probes: int, replacements: int
) -> Seed:
    """Train a run, predict its gap at both ends, and replace random samples."""
    objects = UserObjects(task=(cnn(activation), bounded)) if activation else NOTHING
    config = resolve(parse(tables).with_objects(objects))
    source = read_source(config)
    data = build_data(config, source)
    run = FinishedRun(config, source, data, build_experiment(config, data), Path())
    start = begin(run.experiment.recipe, run.experiment.task, config.federation.seed)
    before_run = time.process_time()
    model = simulate(run.experiment, start).params
    after_run = time.process_time()
    gap = predict(run, probes, ends=True, model=model)
    seconds = after_run - before_run, time.process_time() - after_run
    changes = replace_samples(run, replacements).changes if replacements else np.zeros(0)
    return Seed(run, model, gap, changes, seconds)


def measured(seeds: Sequence[Seed]) -> tuple[np.ndarray, float, float]:
    """Return the gap of each run minus its control variate, and the mean train loss and accuracy.

    The control variate is the mean gap of the models of the other seeds, on the samples of the run.
    Other seeds train on some of these samples. To first order, the control variate contains this
    share of the gap, so the difference is divided by 1 - share.
    """
    models = {name: torch.cat([seed.model[name] for seed in seeds]) for name in seeds[0].model}
    gaps, ends = [], []
    for place, seed in enumerate(seeds):
        run = seed.run
        losses = measured_losses(run.config, run.data, run.source.classes, run.experiment, models)
        ends.append((losses[place].gap.empirical, losses[place].accuracy))
        others = [index for index in range(len(seeds)) if index != place]
        if not others:
            gaps.append(losses[place].gap.gap)
            continue
        shares = [
            np.isin(run.data.train_index, seeds[index].run.data.train_index).mean()
            - np.isin(run.data.test_index, seeds[index].run.data.train_index).mean()
            for index in others
        ]
        control = np.mean([losses[index].gap.gap for index in others])
        gaps.append((losses[place].gap.gap - control) / (1 - np.mean(shares)))
    train_loss, accuracy = np.mean(ends, axis=0).tolist()
    return np.array(gaps), train_loss, accuracy


def standard_error(samples: Sequence[np.ndarray]) -> float:
    """Return the standard error, over probes alone, of the mean of the means of all runs."""
    if min(map(len, samples)) < 2:
        return math.nan
    return math.sqrt(sum(values.var(ddof=1) / len(values) for values in samples)) / len(samples)


def probes_needed(samples: Sequence[np.ndarray]) -> float:
    """Return the number of probes whose mean has a relative standard error of 10% in one run."""
    if min(map(len, samples)) < 2:
        return math.nan
    variance = np.mean([values.var(ddof=1) for values in samples])
    return float(variance) / (RELATIVE * float(np.mean([v.mean() for v in samples]))) ** 2


def lines_of(case: str, seeds: Sequence[Seed]) -> Iterator[str]:
    """Yield the lines of the table for one case."""
    gaps, train_loss, accuracy = measured(seeds)
    gap, parameters = mean_of(gaps), sum(value.numel() for value in seeds[0].model.values())
    score = "" if math.isnan(accuracy) else f", accuracy {accuracy:.3f}"
    yield f"{case}: {parameters} parameters, train loss {train_loss:.4f}{score}"
    yield _line("measured", gap.value, f"{number((gap.high - gap.low) / 2, 2)} (95%)")
    inside = [seed.gap.probes for seed in seeds]
    estimates = {
        "predicted": inside,
        "predicted at held-out samples": [seed.gap.outside for seed in seeds],
        "mean of both": [seed.gap.both_ends for seed in seeds],
        f"{sum(len(seed.changes) for seed in seeds)} replacements": [
            seed.changes for seed in seeds
        ],
    }  # fmt: skip
    for name, values in estimates.items():
        samples = [array for array in values if array is not None and len(array)]
        if len(samples) == len(seeds):
            means = np.array([array.mean() for array in samples])
            share = ratio(means, gaps)
            interval = (
                f"{number(share.value, 3)} ({number(share.low, 2)} to {number(share.high, 2)})"
            )
            error = f"{number(standard_error(samples), 2)} (SE)"
            yield _line(name, float(means.mean()), error, interval)
    yield f"  {f'probes for {RELATIVE:.0%}':29} {probes_needed(inside):9.3g}"
    for name, column in zip(("the rounds", f"{len(inside[0])} probes at both ends"),
                            zip(*(seed.seconds for seed in seeds), strict=True),
                            strict=True):  # fmt: skip
        yield f"  {f'CPU seconds of {name}':38} {median(column):.3g}"


def _line(name: str, value: float, error: str, share: str = "") -> str:
    return f"  {name:29} {number(value, 3):>9} ± {error:14} {share}".rstrip()


def main() -> None:
    """Run the cases, and print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("mnist5k", "fashion-mnist", "mnist"), default="mnist5k")
    sizes = {"train": 400, "seeds": 6, "probes": 8, "replacements": 16}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", default=list(CASES),
                        help=f"some of {', '.join(CASES)}; all by default")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("bench"))
    asked = parser.parse_args()
    if asked.seeds < 2:
        parser.error(f"--seeds is {asked.seeds}, but intervals over seeds need at least 2")
    torch.set_num_threads(1)
    load, start = page.load(), time.perf_counter()
    head = f"{asked.data}, {asked.train} samples, {asked.seeds} seeds, {asked.probes} probes a seed"
    lines = [head, f"  {'gap':29} {'value':>9}   {'error':14} / measured (95%)"]
    print("\n".join(lines), flush=True)
    for case in asked.only:
        seeds = []
        for seed in range(asked.seeds):
            tables = CASES[case].tables(asked.data, asked.train, seed)
            activation = CASES[case].activation
            seeds.append(seed_of(tables, activation, asked.probes, asked.replacements))
            page.say(f"{case}, seed {seed}: predicted {seeds[-1].gap.value:.3g}")
        lines += (of_case := list(lines_of(case, seeds)))
        print("\n".join(of_case), flush=True)
    where = page.place((load, page.load()), time.perf_counter() - start)
    print("\n".join(where))
    asked.out.mkdir(parents=True, exist_ok=True)
    files.write_bytes(asked.out / FILE, "\n".join([*where, *lines, ""]).encode())


if __name__ == "__main__":
    main()
