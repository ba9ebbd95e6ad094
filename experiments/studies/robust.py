"""Study `robust`: how much accuracy hostile clients cost, by attack, defence and optimizer.

For each model, each method chooses its step size on validation samples, without attacks and with
the plain mean. The grid grows if its best value is at an end. With this step size, the method runs
all pairs of an attack and a defence, with other seeds. The *damage* of an attack is the accuracy of
the same defence without attack, minus the accuracy with the attack, paired by seed.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.tuning import objection
from fedmuon.analysis.report.verdicts import (
    POSITIVE,
    Claim,
    Effect,
    Slope,
    paired,
)
from fedmuon.config.schema import Natural, Positive
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.tables import Scalar, Table
from fedmuon.experiments.studies.federated_comparison import search, tables_of
from fedmuon.experiments.studies.study import Call, Study, distinct, tuned_in_rows
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Nested, SuiteRequest, cell, merged
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import risk
from fedmuon.federated.rounds import begin, simulate
from fedmuon.runs.directory import Record

NONE, RATE = "none", "local.lr"
GRADIENTS = "FedAvg"  # the method with which the others are compared


class Optimizer(Table):
    """A method: its config tables, and the step sizes that are tried first.

    `without` names the defences that the method cannot use.
    """

    base: Nested
    without: list[str] = Field(default_factory=list)
    lr: Annotated[list[Positive], Field(min_length=3)]


class Model(Table):
    """A model: its config tables, and its methods."""

    base: Nested
    methods: Annotated[dict[str, Optimizer], Field(min_length=2)]


class Settings(Table):
    """The keys that the suite's TOML file may contain."""

    seeds: Annotated[list[Natural], Field(min_length=1)]
    tuning_seeds: Annotated[list[Natural], Field(min_length=1)]
    extend: Annotated[int, Field(ge=0, le=20)]
    hostile: Annotated[float, Field(gt=0, lt=1)]  # share of the clients
    base: Nested
    models: Annotated[dict[str, Model], Field(min_length=1)]
    attacks: Annotated[dict[str, dict[str, Scalar]], Field(min_length=1)]  # keys of [attacks]
    # config tables, which may contain [federation.options]
    defences: Annotated[dict[str, dict[str, dict[str, Any]]], Field(min_length=1)]


@dataclass(frozen=True)
class Compared:
    """A method on a model: the tables of its config without step size, attack and defence."""

    model: str
    method: str
    tables: Nested
    settings: Settings

    @property
    def defences(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The defences that the method can use."""
        without = self.settings.models[self.model].methods[self.method].without
        return {
            name: tables for name, tables in self.settings.defences.items() if name not in without
        }

    def final(self, part: str, *changes: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
        """Return loss and accuracy of the final model on `validation` or `test` samples.

        A run that diverges has an infinite loss, and the accuracy of guessing one of C classes.
        """
        config = resolve(cell(self.tables, *changes))
        data = build_data(config, read_source(config))
        experiment, guess = build_experiment(config, data), (math.inf, 1 / data.classes)
        samples = {
            "validation": experiment.shards.validation, "test": experiment.shards.held_out
        }[part]  # fmt: skip
        assert samples is not None  # checked by `cells`
        try:
            start = begin(experiment.recipe, experiment.task, config.federation.seed)
            params = simulate(experiment, start).params
            result = risk(experiment.task, params, samples.inputs, samples.labels)
        except NonFinite:
            return guess
        loss = float(result.loss[0])
        return (loss, float(result.scores["accuracy"][0])) if math.isfinite(loss) else guess

    def tuning_loss(self, point: tuple[tuple[str, float], ...]) -> float:
        """Return the mean loss of a step size on validation samples, without attacks."""
        steps = tables_of(dict(point))
        losses = [
            self.final("validation", steps, {"federation": {"seed": seed}})[0]
            for seed in self.settings.tuning_seeds
        ]
        return sum(losses) / len(losses)

    def measure(self) -> Record:
        """Return the rows of the tuning, and of all attacks, defences and seeds."""
        settings = self.settings
        grid = settings.models[self.model].methods[self.method].lr
        losses, _ = search({RATE: grid}, self.tuning_loss, settings.extend)
        (_, best), *_ = min(losses, key=lambda point: losses[point])
        head: Record = {"model": self.model, "method": self.method}
        tuning = [head | {"lr": dict(point)[RATE], "loss": loss} for point, loss in losses.items()]
        rows: list[Record] = []
        attacks: dict[str, Nested] = {NONE: {}} | {
            name: {"attacks": {**keys, "share": settings.hostile}}
            for name, keys in settings.attacks.items()
        }
        for (defence, defended), (attack, attacked), seed in itertools.product(
            self.defences.items(), attacks.items(), settings.seeds
        ):
            changes = tables_of({RATE: best}), defended, attacked, {"federation": {"seed": seed}}
            loss, accuracy = self.final("test", *changes)
            place = {"defence": defence, "attack": attack, "seed": seed, "lr": best}
            rows.append(head | place | {"test_loss": loss, "accuracy": accuracy})
        return {"rows": rows, "tuning": tuning}


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each model and method, after a check of all configs."""
    contents.require_other_seeds(settings.seeds, settings.tuning_seeds, "the step sizes")
    if NONE in settings.attacks:
        raise InputError(
            f"[attacks.{NONE}] is not allowed, because this name stands for runs without attack. "
            "Choose another name."
        )
    calls = []
    for name, model in settings.models.items():
        if GRADIENTS not in model.methods:
            raise InputError(
                f"[models.{name}] has no method {GRADIENTS!r}, with which the other methods are "
                "compared. Add this method."
            )
        for method, optimizer in model.methods.items():
            data = {"data": {"name": request.data}}
            tables = merged(merged(merged(data, settings.base), model.base), optimizer.base)
            tables = merged(tables, {"data": contents.sizes_that_fit(tables)})
            if not cell(tables).data.validation:
                raise InputError(
                    "[base.data] validation = 0, but validation samples choose the step sizes. "
                    "Set validation to a positive number."
                )
            compared = Compared(name, method, tables, settings)
            for keys, defended in itertools.product(
                settings.attacks.values(), compared.defences.values()
            ):
                cell(tables, defended, {"attacks": {**keys, "share": settings.hostile}})
            runs = (1 + len(settings.attacks)) * len(compared.defences) * len(settings.seeds)
            calls.append(Call(contents.slug(f"{name}-{method}"), compared.measure, runs))
    return calls


# Claims

STANDS_ON = "\n".join((
    "Step sizes were chosen without attacks and with the plain mean, and are the same for all "
    "attacks and defences. Another step size can be better under an attack.",
    "Damage is the accuracy of the same defence without attack, minus the accuracy with the "
    "attack, on test samples after the last round. A method that learns less without attack has "
    "less to lose.",
    "Only the attacks, strengths and defences in the suite's file were run. An attack that is "
    "designed against an optimizer or a defence can be stronger.",
    "A run that diverged counts as guessing.",
))  # fmt: skip


def damages(rows: Columns, model: str, method: str, defence: str) -> dict[int, float]:
    """Return the mean damage over all attacks for each seed, in percentage points."""
    of_method = where(rows, model=model, method=method, defence=defence)
    attacks = [attack for attack in distinct(of_method, "attack") if attack != NONE]
    clean = _by_seed(where(of_method, attack=NONE))
    lost = [_by_seed(where(of_method, attack=attack)) for attack in attacks]
    return {
        seed: 100 * sum(value - accuracy[seed] for accuracy in lost) / len(lost)
        for seed, value in clean.items()
    }


def _by_seed(rows: Columns) -> dict[int, float]:
    return {
        int(seed): float(value) for seed, value in zip(rows["seed"], rows["accuracy"], strict=True)
    }


def saved(rows: Columns, model: str, method: str, defence: str) -> Slope:
    """Return the damage of FedAvg minus that of a method, paired by seed."""
    of_method, of_fedavg = (damages(rows, model, name, defence) for name in (method, GRADIENTS))
    pairs = [(of_fedavg[seed], of_method[seed]) for seed in of_method]
    mean, half = paired(pairs)
    return Slope(mean, mean - half, mean + half, free=max(1.0, len(pairs) - 1.0))


def claims(rows: Columns, tuning: Columns) -> Sequence[Claim]:
    """Return a claim for each model and each orthogonalizing method."""
    made = []
    for model in distinct(rows, "model"):
        methods = distinct(where(rows, model=model), "method")
        tuned = {
            method: [
                tuned_in_rows(where(tuning, model=model, method=method), method, "lr", "loss", RATE)
            ]
            for method in methods
        }
        for method in methods:
            if method == GRADIENTS:
                continue
            both = [
                defence
                for defence in distinct(where(rows, model=model, method=GRADIENTS), "defence")
                if defence in where(rows, model=model, method=method)["defence"]
            ]
            effects = {defence: saved(rows, model, method, defence) for defence in both}
            made.append(
                Claim(
                    f"{model}: hostile clients cost {method} less accuracy than {GRADIENTS}, on "
                    "average over the attacks, with each defence.",
                    Effect.between("damage, FedAvg − method", effects, unit="points"),
                    POSITIVE,
                    "; ".join(f"{name}: {effect}" for name, effect in effects.items()),
                    untuned=objection((method, GRADIENTS), tuned),
                )
            )
    return made


def numbers(rows: Columns, tuning: Columns) -> Rows:
    """Return the mean accuracy of each model, method and defence, by attack, in per cent."""
    attacks = distinct(rows, "attack")
    table: list[tuple[Any, ...]] = [("model", "method", "lr", "defence", *attacks)]
    for model, method, defence in distinct(rows, "model", "method", "defence"):
        of_place = where(rows, model=model, method=method, defence=defence)
        means = [
            f"{100 * float(where(of_place, attack=attack)['accuracy'].mean()):.1f}"
            for attack in attacks
        ]
        table.append((model, method, f"{of_place['lr'][0]:g}", defence, *means))
    return table


# Figure


@style.styled
def figure(rows: Columns, tuning: Columns, narrow: bool = False) -> Figure:
    """Draw the accuracy of each defence under each attack, with a panel per model and method."""
    places = distinct(rows, "model", "method")
    across = len(distinct(where(rows, model=places[0][0]), "method"))
    defences, attacks = distinct(rows, "defence")[::-1], distinct(rows, "attack")
    height = 0.9 + 0.24 * len(defences)
    drawing, panels = style.canvas(len(places), narrow, height, across)
    for number, (axes, (model, method)) in enumerate(zip(panels, places, strict=True)):
        of_place = where(rows, model=model, method=method)
        table = np.array(
            [[_mean_accuracy(of_place, defence, attack) for attack in attacks]
             for defence in defences]
        )  # fmt: skip
        texts = np.array(
            [[f"{value:.0f}" if math.isfinite(value) else "–" for value in line] for line in table]
        )
        style.heat_map(axes, table, texts, Normalize(0, 100), highest_is_best=True)
        axes.set_title(f"{model}, {method}")
        axes.set_xticks(range(len(attacks)), attacks, rotation=60, ha="right")
        first = narrow or number % across == 0
        axes.set_yticks(range(len(defences)), defences if first else [""] * len(defences))
        axes.tick_params(length=0)
    return drawing


def _mean_accuracy(rows: Columns, defence: str, attack: str) -> float:
    """Return the mean accuracy in per cent, or nan without runs."""
    accuracies = where(rows, defence=defence, attack=attack)["accuracy"]
    return 100 * float(accuracies.mean()) if len(accuracies) else math.nan


STUDY = Study(
    "robust", Settings, cells, claims, numbers, STANDS_ON, {"robust": figure}, ("rows", "tuning")
)
