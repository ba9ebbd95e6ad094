"""Study `certified-networks`: which error does the privacy account of a trained model certify?

A private run depends only a little on each sample, so its train error limits its error on new
samples, for every network and optimizer (`fedmuon.analysis.theory.certified_risk`). A cell is one
method with one model. For each noise, it chooses the step size with samples that are not certified.
For each noise and seed, it then trains the model and averages the models of the last rounds, which
is post-processing. It measures the errors of this average and computes their limits. The distance
of limit and train error depends on the noise, and not on the method. So methods are compared at
equal noise.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import Claim, curve
from fedmuon.analysis.theory.certified_risk import clopper_pearson
from fedmuon.config.load import Config
from fedmuon.config.schema import Chance, Count, Natural, Positive
from fedmuon.core.tables import Table
from fedmuon.data.source import Source
from fedmuon.experiments.certifying.measured import released_noise
from fedmuon.experiments.certifying.planned import PlannedRun
from fedmuon.experiments.studies.certified_error import chosen, compared, covered
from fedmuon.experiments.studies.study import Study, distinct, heading, levels
from fedmuon.experiments.studies.tuned_apart import (
    Tuning,
    require_smaller,
    set_apart,
    smaller,
    tunings,
)
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Nested, SuiteRequest, cell, merged
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import risk
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import Record
from fedmuon.runs.observers.average_model import averaged_rounds
from fedmuon.tasks.base import Params

SETTLED = {
    "data.name": "--data",
    "federation.seed": "seeds",
    "local.lr": "lrs",
    "privacy.noise": "noises",
    "privacy.epsilon": "noises",
}


class Method(Table):
    """A method: config tables that extend those of the model, and its step sizes."""

    base: Nested
    lrs: Annotated[list[Positive], Field(min_length=1)]


class Model(Table):
    """A model: config tables that extend those in `base`, its methods and its noise multipliers.

    `guess` is the expected train error, for which the certified limit is smallest.
    """

    base: Nested
    guess: Chance
    noises: Annotated[list[Positive], Field(min_length=1)]
    methods: Annotated[dict[str, Method], Field(min_length=1)]


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    Each certified limit has the failure probability `delta` / `paid`. The first method of a model
    is compared with the others.
    """

    seeds: Annotated[list[Natural], Field(min_length=1)]
    tuning: Tuning
    delta: Chance
    paid: Count
    models: Annotated[dict[str, Model], Field(min_length=1)]
    base: Nested


@dataclass(frozen=True)
class Certified:
    """A cell: one method with one model."""

    name: str
    size: int
    head: Mapping[str, Any]  # model and method
    config: Config  # the config with the first noise, step size and seed
    tables: Nested
    settings: Settings

    @property
    def model(self) -> Model:
        """The settings of the model."""
        return self.settings.models[self.head["model"]]

    def compute(self) -> Record:
        """Choose a step size for each noise, and return a row for each noise and seed.

        The table `tuning` has the mean error of each step size over the seeds of tuning.
        """
        tuning, lrs = self.settings.tuning, self.model.methods[self.head["method"]].lrs
        tuned = tuning.train + tuning.test
        test = self.config.data.test + tuned  # synthetic data has as many samples as a config asks
        first = settings_of(self.model.noises[0], lrs[0], self.settings.seeds[0])
        all_samples = cell(self.tables, first, {"data": {"test": test}})
        certified, apart = set_apart(read_source(resolve(all_samples)), tuned)
        rows: list[Record] = []
        tried: list[Record] = []
        for noise in self.model.noises:
            head: Record = {**self.head, "noise": noise}
            of_lrs = [
                {**head, "lr": lr, "tuning_error": self._tuning_error(noise, lr, apart)}
                for lr in lrs
            ]
            tried += of_lrs
            lr = min(of_lrs, key=lambda row: row["tuning_error"])["lr"]
            for seed in self.settings.seeds:
                config = cell(self.tables, settings_of(noise, lr, seed))
                rows.append({**head, "lr": lr, "seed": seed, **self._row(config, certified)})
        return {"rows": rows, "tuning": tried}

    def _tuning_error(self, noise: float, lr: float, source: Source) -> float:
        """Return the mean error of models that are trained and tested with the tuning samples."""
        tuning, errors = self.settings.tuning, []
        for seed in tuning.seeds:
            setting = settings_of(noise, lr, seed)
            config = cell(self.tables, setting, smaller(cell(self.tables, setting), tuning))
            resolved = resolve(config)
            experiment = build_experiment(resolved, build_data(resolved, source))
            start = begin(experiment.recipe, experiment.task, seed)
            params = trained_average(experiment, start, config.output.average)
            held_out = experiment.shards.held_out
            errors.append(_error(experiment, params, held_out.inputs, held_out.labels))
        return float(np.mean(errors))

    def _row(self, config: Config, source: Source) -> Record:
        resolved = resolve(config)
        data = build_data(resolved, source)
        experiment = build_experiment(resolved, data)
        start = begin(experiment.recipe, experiment.task, config.federation.seed)
        planned = PlannedRun.of_experiment(resolved, experiment, data.sizes, start.params)
        account = planned.account
        params = trained_average(experiment, start, config.output.average)
        shards = experiment.shards
        train_error = _error(experiment, params, shards.inputs, shards.labels)
        held_out = shards.held_out
        test_error = _error(experiment, params, held_out.inputs, held_out.labels)
        count = len(held_out.labels)
        wrong = round(test_error * count)
        limit = account.released_limit(self.settings.delta / self.settings.paid, self.model.guess)
        drawn = released_noise(config.federation.seed, "error")
        return {
            "variation": account.total_variation,
            "divergence": account.mean,
            "train_error": train_error,
            "estimated": account.expected_risk(train_error),
            "certified": limit.risk(train_error + limit.noise * drawn),
            "test_error": test_error,
            "test_low": 1 - clopper_pearson(count - wrong, count, 0.025),
            "test_high": clopper_pearson(wrong, count, 0.025),
            "held_out_limit": clopper_pearson(wrong, count, self.settings.delta),
        }


def settings_of(noise: float, lr: float, seed: int) -> Nested:
    """Return the tables of one run's noise, step size and seed."""
    return {"federation": {"seed": seed}, "local": {"lr": lr}, "privacy": {"noise": noise}}


def trained_average(experiment: Experiment, start: ServerState, share: float) -> Params:
    """Train, and return the average of the models after the last `share` of the rounds."""
    count = averaged_rounds(share, experiment.plan.rounds)
    states = (result.state for result in run_rounds(experiment, start))
    last = deque(states, maxlen=count)
    return {
        name: torch.stack([state.params[name].double() for state in last]).mean(0).to(value)
        for name, value in last[0].params.items()
    }


def _error(experiment: Experiment, params: Params, inputs: Tensor, labels: Tensor) -> float:
    return 1 - float(risk(experiment.task, params, inputs, labels).scores["accuracy"][0])


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Certified]:
    """Return a cell for each model and method."""
    contents.require_free("[base]", settings.base, SETTLED)
    cells_of_suite = []
    for name, model in settings.models.items():
        contents.require_free(f"[models.{name!r}.base]", model.base, SETTLED)
        for method, details in model.methods.items():
            place = f"[models.{name!r}.methods.{method!r}.base]"
            contents.require_free(place, details.base, SETTLED)
            data: Nested = {"data": {"name": request.data}}
            tables = merged(merged(merged(settings.base, model.base), details.base), data)
            first = settings_of(model.noises[0], details.lrs[0], settings.seeds[0])
            config = cell(tables, first)
            require_smaller(tables, first, config, settings.tuning)
            tuning = len(details.lrs) * len(settings.tuning.seeds) * settings.tuning.train
            samples = len(settings.seeds) * config.data.train + tuning
            size = len(model.noises) * config.federation.rounds * samples
            head = {"model": name, "method": method}
            slug = contents.slug(f"{name}-{method}")
            cells_of_suite.append(Certified(slug, size, head, config, tables, settings))
    contents.require_read("[base]", settings.base, [each.config for each in cells_of_suite])
    return cells_of_suite


# Claims

STANDS_ON = (
    "The certified error limits the error of the average of the last models. It follows from the "
    "privacy account and from the train error, which is released with noise, and holds for one "
    "draw of samples and noise. The failure probability of each limit is δ divided by `paid`. So "
    "the limits pay for `paid` settings, from which settings may be chosen in any way by results "
    "on the same samples. Step sizes are chosen with other samples: those that [tuning] names, "
    "which neither train nor test the certified models. The suite has fewer settings than it "
    "pays for. The others cover transforms, numbers of components, rounds and momenta that were "
    "tried before on the same samples, and the noise with the smallest certified error, which "
    "is the single number of each model. The transforms of images learn nothing from the samples. "
    "Principal "
    "components are those of another data set. The estimated limit holds in expectation for a "
    "setting that was fixed in advance, and one run's train error stands for its expectation. So "
    "it is not certified. The hold-out limit is Clopper and Pearson's limit for one model. Each "
    "certificate holds if the samples are independent draws from the distribution of future "
    "samples. The held-out samples of Fashion-MNIST are from its official test part, which may "
    "have another distribution. If n is the number of all training samples of the data set, all "
    "seeds share this one data set and differ in their initial models and their noise."
)


def smallest(rows: Columns) -> Columns:
    """Return the noise with the smallest certified error of each seed, method and model."""
    return chosen(rows, "model", "method", "seed")


def claims(rows: Columns, tuning: Columns) -> Sequence[Claim]:
    """Return the claims about certified errors, and the comparisons of methods."""
    all_claims = [covered(rows, "In every run, the test error is at most the certified error.")]
    for model in distinct(rows, "model"):
        of_model = where(rows, model=model)
        first, *others = distinct(of_model, "method")
        tuned = tunings(where(tuning, model=model), "noise")
        all_claims += [
            compared(of_model, (first, other), "noise", "noise {}",
                     f"{model}: for every noise, the certified error of {first} is below that of "
                     f"{other}.", tuned)
            for other in others
        ]  # fmt: skip
    return all_claims


def numbers(rows: Columns, tuning: Columns) -> Rows:
    """Return the table of the report: means over seeds for each model, method and noise."""
    head = ("noise", "total variation", "train error", "certified", "estimated", "test error",
            "hold-out limit", "step size")  # fmt: skip
    lines: Rows = [head]
    names = ("variation", "train_error", "certified", "estimated", "test_error", "held_out_limit")
    for model, method in distinct(rows, "model", "method"):
        part = where(rows, model=model, method=method)
        least = smallest(part)["certified"]
        ends = " to ".join(number(end, 3) for end in (least.min(), least.max()))
        title = f"{model}, {method}: certified {number(least.mean(), 3)} ({ends} over seeds)"
        lines.append(heading(title, head))
        for noise in levels(part, "noise"):
            of_noise = where(part, noise=noise)
            means = (number(of_noise[name].mean(), 3) for name in names)
            lines.append((f"  {noise:g}", *means, f"{of_noise['lr'][0]:g}"))
    return lines


# Figure


@style.styled
def by_noise(rows: Columns, tuning: Columns, narrow: bool = False) -> Figure:
    """Draw certified errors, test errors and a hold-out limit of each model against the noise."""
    models = distinct(rows, "model")
    figure, panels = style.canvas(len(models), narrow, 2.1, min(len(models), 2))
    looks = dict(zip(distinct(rows, "method"), style.SERIES, strict=False))
    for axes, model in zip(panels, models, strict=True):
        part = where(rows, model=model)
        for method, look in looks.items():
            of_method = where(part, method=method)
            certified = curve(of_method, "variation", "certified")
            style.errorbars(axes, certified.sizes, certified.means, certified.reach, look,
                            f"{method}: certified (95%)")  # fmt: skip
            tested = curve(of_method, "variation", "test_error")
            axes.plot(tested.sizes, tested.means, ":", marker=".", color=look[0], lw=1.3,
                      label=f"{method}: test error")  # fmt: skip
        first = where(part, method=distinct(part, "method")[0])
        limit = curve(first, "variation", "held_out_limit")
        axes.plot(limit.sizes, limit.means, "--", marker="x", ms=4, color=style.GREY, lw=1.2,
                  label="hold-out limit of the first method (95%)")  # fmt: skip
        axes.set_title(model, loc="left")
        axes.set_xlabel("total variation (← more noise)")
        style.levels_on_x(axes, curve(part, "variation", "certified").sizes)
    for axes in panels[:: 1 if narrow else 2]:
        axes.set_ylabel("error rate")
    style.legend_below(figure, panels[0], 1 if narrow else 2)
    return figure


STUDY = Study(
    "certified-networks",
    Settings,
    cells,
    claims,
    numbers,
    STANDS_ON,
    {"certified-networks": by_noise},
    ("rows", "tuning"),
)
