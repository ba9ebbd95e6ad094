"""Study `federated-comparison`: compare federated methods, each with its best step sizes.

A cell is one method on one model at one label skew alpha. The cell first tries all step sizes of
the method's grid with the tuning seeds, and chooses those with the smallest loss on validation
samples. If the best value is at an end of the grid, values are added at this end. Then the cell
runs the chosen step sizes with the comparison seeds. The accuracy is measured on test samples. The
choice did not use these samples if the data set has a test part (see `STANDS_ON`).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Findings, Rows, number, spread
from fedmuon.analysis.report.tables import Columns, read_table, where
from fedmuon.analysis.report.verdicts import (
    POINTS,
    Claim,
    Effect,
    Rule,
    Slope,
    by_seed,
    counted,
    free_of_seeds,
    mean_of,
    unknown,
)
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural, Positive, Share
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Study, assemble, distinct, heading
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Nested, SuiteRequest, cell, merged
from fedmuon.experiments.suites.suite import NAMES, shown
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import risk
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.runs.directory import Record
from fedmuon.runs.observers.replies import sent_bytes

Steps = dict[str, float]  # config key -> step size
Point = tuple[tuple[str, float], ...]  # a grid point: pairs of a config key and a step size
SETTLED = {"data.name": "--data", "data.alpha": "alphas", "federation.seed": "seeds"}


Values = Annotated[list[Positive], Field(min_length=2)]


class Model(Table):
    """A model: config tables that extend those in `base`, and the target accuracy."""

    target: Share
    base: Nested
    alphas: list[Positive] = Field(default_factory=list)  # if empty, use the suite's alphas


class Method(Table):
    """A method: config tables that extend those of the model, and grids of step sizes.

    `grid` and `then` map `table.key` to a list of values. All combinations of the values in `grid`
    are tried. Then the keys of `then` are searched one by one, with the best values of the earlier
    keys. The search of `then` needs fewer runs than a grid, and is meant for less important keys.
    """

    base: Nested
    grid: Annotated[dict[str, Values], Field(min_length=1)]
    then: dict[str, Values] = Field(default_factory=dict)


class Ordered(Table):
    """A claim: `better` is at least as accurate as `than`, on each model at every alpha."""

    better: str
    than: str


class TunedMethods(Table):
    """The keys of a suite that compares methods, each at its own best step size.

    Runs with `tuning-seeds` choose the step sizes, and runs with `seeds` compare the methods. The
    two lists must have no seed in common. `extend` is the maximum number of values that may be
    added to a grid.
    """

    seeds: Annotated[list[Natural], Field(min_length=1)]
    tuning_seeds: Annotated[list[Natural], Field(min_length=1)]
    extend: Annotated[int, Field(ge=0, le=20)]
    every: Count  # number of rounds between two evaluations
    methods: Annotated[dict[str, Method], Field(min_length=2)]


class Settings(TunedMethods):
    """The keys that the suite's TOML file may contain."""

    alphas: Annotated[list[Positive], Field(min_length=1)]
    base: Nested
    models: Annotated[dict[str, Model], Field(min_length=1)]
    claims: list[Ordered]


@dataclass(frozen=True)
class Compared:
    """A cell: one method on one model at one alpha."""

    name: str
    size: int
    head: Mapping[str, Any]  # model, alpha and method
    config: Config  # the config with the first step sizes and seed of the cell
    tables: Nested
    settings: Settings
    costs: bool = False  # whether curves also show bytes and simulated seconds so far

    def compute(self) -> Record:
        """Choose the step sizes, and compare the methods with other seeds. Return three tables."""
        method = self.settings.methods[self.head["method"]]
        best: Steps = {}
        tried: list[tuple[Steps, float]] = []
        edges = []
        for grid in (method.grid, *({name: values} for name, values in method.then.items())):
            losses, edge = search(grid, partial(self._validation_loss, best), self.settings.extend)
            tried += [(best | dict(point), loss) for point, loss in losses.items()]
            best = best | dict(min(losses, key=lambda point: losses[point]))
            edges += [edge] if edge else []
        tuning = [
            {**self.head, "step_sizes": in_words(steps), "validation_loss": loss,
             "chosen": steps == best}
            for steps, loss in tried
        ]  # fmt: skip
        rows, curves = [], []
        for seed in self.settings.seeds:
            curve, note = self._run(best, seed, self.settings.every)
            steps = {"step_sizes": in_words(best), "edge": " ".join(edges)}
            head = {**self.head, "seed": seed}
            last = curve[-1] if not note else dict.fromkeys(curve[-1], math.nan)
            accuracy = [record["accuracy"] for record in curve]
            goal = self.settings.models[self.head["model"]].target
            reached = [record["round"] for record in curve if record["accuracy"] >= goal]
            ends = {key: last[key] for key in ("accuracy", "test_loss", "validation_loss")}
            rows.append(
                head | steps | ends | {
                    "best_accuracy": max(accuracy), "target": goal,
                    "rounds_to_target": reached[0] if reached else math.inf, "note": note,
                }
            )  # fmt: skip
            curves += [head | record for record in curve]
        return {"rows": rows, "tuning": tuning, "curves": curves}

    def _validation_loss(self, before: Steps, point: Point) -> float:
        """Return the mean loss over the tuning seeds, or infinity if a run diverged."""
        ends = [self._run(before | dict(point), seed) for seed in self.settings.tuning_seeds]
        losses = [math.inf if note else curve[-1]["validation_loss"] for curve, note in ends]
        mean = float(np.mean(losses))
        return mean if math.isfinite(mean) else math.inf

    def _run(self, steps: Steps, seed: int, every: int = 0) -> tuple[list[Record], str]:
        """Train once, and return the evaluated rounds, and the reason if the run diverged.

        Args:
            steps: The step sizes.
            seed: The seed of the run.
            every: Number of rounds between two evaluations on test samples. If 0, only the final
                model is evaluated, and only on validation samples.
        """
        config = resolve(cell(self.tables, tables_of(steps), {"federation": {"seed": seed}}))
        experiment = build_experiment(config, build_data(config, read_source(config)))
        shards, rounds = experiment.shards, config.federation.rounds
        assert shards.validation is not None  # checked by `cells`
        parts = {"validation": shards.validation} | ({"test": shards.held_out} if every else {})
        state, clock = begin(experiment.recipe, experiment.task, seed), experiment.plan.timetable
        sent = {"bytes_up": 0, "bytes_down": 0}

        def measured(at: int, params: Any) -> Record:
            record: Record = {"round": at}
            if self.costs:
                seconds = math.nan if clock is None else float([0.0, *clock.seconds][at])
                record |= {**sent, "simulated_seconds": seconds}
            for name, part in parts.items():
                result = risk(experiment.task, params, part.inputs, part.labels)
                record[f"{name}_loss"] = float(result.loss[0])
                if name == "test":
                    record["accuracy"] = float(result.scores["accuracy"][0])
            return record

        curve = [measured(0, state.params)] if every else []
        try:
            for outcome in run_rounds(experiment, state):
                at = outcome.state.round
                for name, count in sent_bytes(clock, outcome).items():
                    sent[name] += count
                if at == rounds or (every and at % every == 0):
                    curve.append(measured(at, outcome.state.params))
                    if not math.isfinite(curve[-1]["validation_loss"]):
                        return curve, f"the loss is not finite after round {at}"
        except NonFinite as error:
            return curve, str(error)
        return curve, ""


def tables_of(steps: Steps) -> Nested:
    """Return the config tables that set the step sizes."""
    tables: Nested = {}
    for name, value in steps.items():
        table, _, key = name.partition(".")
        tables = merged(tables, {table: {key: value}})
    return tables


def search(
    grid: Mapping[str, Sequence[float]], loss: Callable[[Point], float], extend: int
) -> tuple[dict[Point, float], str]:
    """Evaluate a grid of step sizes, and extend the grid while its best point is at an end.

    Args:
        grid: The values of each key, in geometric steps.
        loss: A function that returns the loss at a point.
        extend: The maximum number of values that may be added to the grid, over all keys.

    Returns:
        The loss of every evaluated point, and a text with the keys whose best value is still at an
        end of the grid.
    """
    axes = {name: sorted(values) for name, values in grid.items()}
    losses: dict[Point, float] = {}
    while True:
        for values in itertools.product(*axes.values()):
            if (point := tuple(zip(axes, values, strict=True))) not in losses:
                losses[point] = loss(point)
        best, edges = min(losses, key=lambda point: losses[point]), []
        for name, value in best:
            if value in ((values := axes[name])[0], values[-1]):
                edges.append((name, values, value))
        if not edges or extend < len(edges) or math.isinf(losses[best]):
            return losses, " ".join(name for name, _, _ in edges)
        extend -= len(edges)
        for _, values, value in edges:
            ratio = values[1] / values[0]
            if value == values[0]:
                values.insert(0, float(f"{value / ratio:.3g}"))
            else:
                values.append(float(f"{value * ratio:.3g}"))


def in_words(steps: Steps) -> str:
    """Return step sizes as text, such as `lr = 0.1, server-lr = 0.03`."""
    return ", ".join(f"{name.partition('.')[2]} = {value:g}" for name, value in steps.items())


def set_by(place: str, one: Model | Method) -> dict[str, str]:
    """Return a dictionary from every `table.key` of a model or method to the text `place`."""
    keys = {f"{table}.{key}": place for table, entries in one.base.items() for key in entries}
    return keys | (dict.fromkeys(one.grid | one.then, place) if isinstance(one, Method) else {})


def require_methods(pairs: Sequence[tuple[str, str]], methods: Mapping[str, Method]) -> None:
    """Raise an error if a claim names a method that the suite does not have."""
    for name in itertools.chain(*pairs):
        if name not in methods:
            raise InputError(
                f"[[claims]] contains the name {name!r}, but this suite has no such method. Use "
                f"one of {', '.join(methods)}."
            )


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Compared]:
    """Return a cell for each model, alpha and method."""
    contents.require_other_seeds(settings.seeds, settings.tuning_seeds, "the step sizes")
    require_methods([(claim.better, claim.than) for claim in settings.claims], settings.methods)
    contents.require_free("[base]", settings.base, SETTLED)
    for label, method in settings.methods.items():
        contents.require_free("--set", request.changes, set_by(f"[methods.{label!r}]", method))
    comparisons = []
    for (name, model), (label, method) in itertools.product(
        settings.models.items(), settings.methods.items()
    ):
        settled = SETTLED | dict.fromkeys(
            method.grid | method.then, f"[methods.{label!r}] grid and then"
        )
        contents.require_free(f"[methods.{label!r}]", method.base, settled)
        for alpha in model.alphas or settings.alphas:
            data = {"data": {"name": request.data}}
            tables = merged(merged(merged(data, settings.base), model.base), method.base)
            tables = merged(tables, {"data": {"alpha": alpha}})
            tables = merged(tables, {"data": contents.sizes_that_fit(tables)})
            grids = method.grid | method.then
            first, last = (
                tables_of({name: values[at] for name, values in grids.items()}) for at in (0, -1)
            )
            config = resolve(cell(tables, first, {"federation": {"seed": settings.seeds[0]}}))
            for values in (first, last):  # one of them may be a default, which is never rejected
                contents.require_read(f"[methods.{label!r}]", merged(method.base, values), [config])
            if not config.data.validation:
                raise InputError(
                    "[base.data] validation = 0, but validation samples choose the step sizes. "
                    "Set validation to a positive number."
                )
            head = {"model": name, "alpha": alpha, "method": label}
            slug = contents.slug(f"{name}-{alpha:g}-{label}")
            runs = trials_of(method) * len(settings.tuning_seeds) + len(settings.seeds)
            size = runs * config.federation.rounds
            comparisons.append(Compared(slug, size, head, config, tables, settings))
    return comparisons


# Claims

STANDS_ON = "\n".join((
    "The step sizes of every method were chosen by the loss on validation samples, with seeds "
    "that are not used in the comparison.",
    "Accuracies are measured after the last round, on test samples. If the data set has a test "
    "part, such as Fashion-MNIST and MNIST, these samples were used neither for training nor for "
    "choosing step sizes. For mnist5k and digits, each seed draws its own test samples, so the "
    "runs that chose step sizes have trained or validated on some of them.",
    "Intervals are Student's intervals over seeds, for differences paired by seed. With the same "
    "seed, two methods share the data split, the initial model and the sampled clients.",
    "A method with several step sizes had more points to choose from. Local and server step "
    "sizes were tried in all combinations. The auxiliary step size of Muon, if it was searched, "
    "was chosen after the other step sizes. It is for the parameters that Muon does not update.",
    "Other settings, such as momentum, local steps, batch and rounds, have one value each and "
    "were not tuned.",
))  # fmt: skip


def report(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the section of the report, with the verdicts on the claims in the suite's file."""
    settings = about["settings"]
    pairs = [(claim["better"], claim["than"]) for claim in settings["claims"]]
    points = {
        name: points_of(Method.model_validate(method), settings["base"])
        for name, method in settings["methods"].items()
    }
    return described(replace(study, claims=partial(claims, pairs, points)), folder, about)


def trials_of(method: Method) -> int:
    """Return the number of trials of a method with each tuning seed, before a grid grows."""
    return math.prod(map(len, method.grid.values())) + sum(map(len, method.then.values()))


def points_of(method: Method, base: Nested) -> int:
    """Return the number of different step sizes, or combinations, that a method tries at first.

    A grid may grow afterwards. All grids may grow by the same number of values. A key of `then` is
    tried with the best values of the grid. If its usual value, from the suite's `base` or from the
    method, is among its values, then this combination was tried before.
    """
    usual = merged(base, method.base)
    repeated = 0
    for name, values in method.then.items():
        table, _, key = name.partition(".")
        repeated += usual.get(table, {}).get(key) in values
    return trials_of(method) - repeated


def described(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the report section of a finished folder, with the chosen step sizes.

    The settings in suite.json contain the step sizes of the original grid. If a chosen step size is
    at an end of its grid, the section contains a warning.
    """
    rows = read_table(folder / "rows.csv")
    lrs = {float(text.partition(",")[0].partition("=")[2]) for text in rows["step_sizes"].tolist()}
    card = [
        (name, "step size, as chosen", shown(sorted(lrs))) if name == NAMES["local.lr"] else
        (name, words, value) for name, words, value in about.get("card", [])
    ]  # fmt: skip
    findings = assemble(study, folder, {**about, "card": card} if card else about)
    inside = distinct(where(rows, edge=""), "model", "alpha", "method")
    cases = distinct(rows, "model", "alpha", "method")
    if not (at_end := len(cases) - len(inside)):
        return findings
    caution = (
        f"For {at_end} of {len(cases)} methods, the best step size lies at an end of its grid, so "
        "a better step size may lie outside the grid."
    )
    return replace(findings, caution=caution)


def claims(
    given: Sequence[tuple[str, str]],
    points: Mapping[str, int],
    rows: Columns,
    tuning: Columns,
    curves: Columns,
) -> Sequence[Claim]:
    """Return the claims of the suite's file, and the claim that grids were wide enough."""
    pairs = [with_counts(ordered(rows, *pair), points, *pair) for pair in given]
    return [*pairs, inside_grid(rows)]


def with_counts(claim: Claim, points: Mapping[str, int], better: str, than: str) -> Claim:
    """Return the claim, which is undecided if the methods tried different numbers of values."""
    tried = points.get(better), points.get(than)
    if tried[0] == tried[1] or claim.untuned:
        return claim
    reason = f"the numbers of tuned values differ: {better} {tried[0]}, {than} {tried[1]}"
    return replace(claim, untuned=reason)


def inside_grid(rows: Columns) -> Claim:
    """Return the claim that no chosen step size is at an end of its grid."""
    inside = [row == "" for row in rows["edge"]]
    return counted(
        "Every chosen step size lies inside its grid.", inside, "runs",
        f"{len(inside) - sum(inside)} of {len(inside)} runs have a step size at an end of its "
        "grid",
    )  # fmt: skip


def ordered(rows: Columns, better: str, than: str) -> Claim:
    """Return the claim that the method `better` is at least as accurate as the method `than`.

    The claim is about every model and every alpha.
    """
    sentence = f"{better} ends at least as accurate as {than}, each at its own best step sizes."
    values, reach, places = [], [], []
    for model, alpha in distinct(rows, "model", "alpha"):
        mask = (rows["model"] == model) & (rows["alpha"] == alpha)
        first, second = (mask & (rows["method"] == name) for name in (better, than))
        if not first.any() or not second.any():
            continue
        difference = rows["accuracy"][first].mean() - rows["accuracy"][second].mean()
        diverged = np.isnan(rows["accuracy"][first]).any(), np.isnan(rows["accuracy"][second]).any()
        values.append((-np.inf if diverged[0] else np.inf) if any(diverged) else difference)
        reach.append(by_seed(rows, "accuracy", first, second)[1])
        places.append(f"{model}, α = {alpha:g}")
    if not places:
        return unknown(sentence, "one of the two methods was not run")
    effect = Effect.around(
        f"accuracy, {better} − {than}", values, reach, places, free_of_seeds(rows), unit=POINTS
    )
    detail = "; ".join(
        f"{place}: {100 * value:+.1f} ± {100 * half:.1f}"
        for place, value, half in zip(places, values, reach, strict=True)
    )
    return Claim(sentence, effect, Rule(low=0.0), detail, untuned=at_an_end(rows, better, than))


def at_an_end(rows: Columns, *methods: str) -> str:
    """Return which method has a best step size at an end of its grid, and how often, or ""."""
    for name in methods:
        part = where(rows, method=name)
        total, ends = (
            len(distinct(table, "model", "alpha"))
            for table in (part, {key: values[part["edge"] != ""] for key, values in part.items()})
        )
        if ends:
            return f"{name}'s best step size is at an end of its grid in {ends} of {total} settings"
    return ""


def numbers(rows: Columns, tuning: Columns, curves: Columns) -> Rows:
    """Return the rows of the report's table, one for each model, alpha and method.

    The most accurate method comes first.
    """
    head = ("method", "step sizes", "accuracy", "test loss", "rounds to target")
    lines: Rows = [head]
    for model, alpha in distinct(rows, "model", "alpha"):
        part = where(rows, model=model, alpha=alpha)
        target = part["target"][0]
        lines.append(heading(f"{model}, α = {alpha:g}; target {target:g}", head))
        names = distinct(part, "method")
        means = {name: part["accuracy"][part["method"] == name].mean() for name in names}
        for name in sorted(names, key=lambda name: -np.nan_to_num(means[name], nan=-1.0)):
            runs = where(part, method=name)
            steps = f"{runs['step_sizes'][0]}{' (end of grid)' * bool(runs['edge'][0])}"
            diverged = int(np.isnan(runs["accuracy"]).sum())
            ends = [f"{diverged} of {len(runs['seed'])} diverged"] * 2
            if not diverged:
                ends = [spread(runs["accuracy"]), spread(runs["test_loss"])]
            lines.append((f"  {name}", steps, *ends, mean_to_target(runs["rounds_to_target"])))
    return lines


def mean_to_target(reached: np.ndarray) -> str:
    """Return the mean over the seeds that reached the target, as text.

    The text also says how many seeds did not reach the target.
    """
    finite = reached[np.isfinite(reached)]
    if not len(finite):
        return "not reached"
    missed = len(reached) - len(finite)
    mean = mean_of(finite)
    half = f" ± {number(mean.high - mean.value, 2)}" if len(finite) > 1 else ""
    return f"{number(mean.value, 3)}{half}" + f" ({missed} of {len(reached)} not)" * bool(missed)


# Figures


@style.styled
def by_method(rows: Columns, tuning: Columns, curves: Columns, narrow: bool = False) -> Figure:
    """Draw the accuracy of every method.

    There is a panel for each model and a colour for each alpha.
    """
    models, methods = distinct(rows, "model"), distinct(rows, "method")
    figure, panels = style.canvas(len(models), narrow, 0.9 + 0.27 * len(methods))
    alphas = sorted(distinct(rows, "alpha"), reverse=True)
    places = np.arange(len(methods))[::-1]
    for axes, model in zip(panels, models, strict=True):
        model_alphas = {*where(rows, model=model)["alpha"].tolist()}
        for at, (alpha, (colour, marker)) in enumerate(zip(alphas, style.SERIES, strict=False)):
            if alpha not in model_alphas:
                continue
            estimates: list[Slope] = [
                mean_of(where(rows, model=model, alpha=alpha, method=name)["accuracy"])
                for name in methods
            ]
            mean = np.array([estimate.value for estimate in estimates])
            ends = np.clip(
                [(estimate.low, estimate.high) for estimate in estimates], 0, 1
            )  # accuracy is in [0, 1]
            reach = np.nan_to_num(np.abs(ends - mean[:, None])).T
            if np.isnan(mean).all():
                continue
            shift = 0.18 * ((len(alphas) - 1) / 2 - at)
            axes.errorbar(mean, places + shift, xerr=reach, color=colour, marker=marker, ms=4,
                          mfc="none", lw=0, elinewidth=0.9, label=f"α = {alpha:g}")  # fmt: skip
        axes.set_title(model, loc="left")
        axes.set_xlabel("test accuracy")
        axes.set_yticks(places, methods if narrow or axes is panels[0] else [""] * len(methods))
        axes.grid(axis="y", lw=0.4)
    style.legend_below(figure, panels[0], len(alphas))
    return figure


STUDY = Study(
    "federated-comparison", Settings, cells, partial(claims, [], {}), numbers, STANDS_ON,
    {"federated-comparison": by_method}, tables=("rows", "tuning", "curves"), report=report,
)  # fmt: skip
