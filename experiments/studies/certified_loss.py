"""Study `certified-loss`: is the certified population loss below the loss of the initial model?

A certificate bounds F - F_hat, the population loss minus the train loss. Therefore, F is certified
to be at most the train loss plus the bound. This is useful only if training lowers the train loss
by more than the bound. A cell is one federation with one number of samples. The runs with tuning
seeds try a grid of step sizes, lambdas and numbers of rounds. For each form of the bound, runs with
other seeds evaluate the best setting.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule, counted
from fedmuon.analysis.theory.held_out import change_limit
from fedmuon.config.load import Config
from fedmuon.config.schema import C_HP, Chance, Count, Natural, Positive
from fedmuon.core.tables import Table
from fedmuon.data.federated import split
from fedmuon.data.source import Source
from fedmuon.experiments.stability.endings import Ending, endings
from fedmuon.experiments.studies.study import Study, distinct, heading
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Nested, SuiteRequest, cell, merged
from fedmuon.federated.build import resolve
from fedmuon.federated.client_data import read_source
from fedmuon.runs.directory import Record

Setting = tuple[float, float]  # (eta, lambda)
SETTLED = {
    "data.name": "--data",
    "data.train": "samples",
    "federation.seed": "seeds",
    "federation.rounds": "horizons",
    "local.lr": "lrs",
    "local.schedule": "the study, because a shorter run must be the beginning of every longer run",
    "orthogonalizer.lambda": "lambdas",
    "stability.delta": "delta",
    "stability.c-hp": "the study, which uses every value of this key",
}
HELD_OUT = "held_out_decrease"  # column: the least decrease that held-out samples certify
SETTING = ("lr", "lambda", "rounds", "form")
GOALS = {
    "ratio": "best ratio",
    "difference": "largest certified decrease",
}  # decrease / bound, or minus


class Settings(Table):
    """The keys that the suite's TOML file may contain. `horizons` are numbers of rounds."""

    seeds: Annotated[list[Natural], Field(min_length=1)]
    tuning_seeds: Annotated[list[Natural], Field(min_length=1)]
    delta: Chance
    samples: Annotated[list[Count], Field(min_length=1)]
    lrs: Annotated[list[Positive], Field(min_length=1)]
    lambdas: Annotated[list[Positive], Field(min_length=1)]
    horizons: Annotated[list[Count], Field(min_length=1)]
    federations: Annotated[dict[str, Nested], Field(min_length=1)]
    base: Nested

    @property
    def tried(self) -> int:
        """The number of settings in the grid."""
        return len(self.lrs) * len(self.lambdas) * len(self.horizons)


@dataclass(frozen=True)
class Searched:
    """A cell of the suite.

    The cell searches the settings of one federation with one number of samples.
    """

    name: str
    size: int
    head: Mapping[str, Any]  # federation and number of samples
    config: Config  # the config with the first setting and seed of the cell
    tables: Nested
    settings: Settings

    def compute(self) -> Record:
        """Search the settings and evaluate the best ones.

        The table `tuning` contains all tried settings. The table `rows` contains the chosen
        settings for each seed.
        """
        settings = self.settings
        horizons, source = sorted({*settings.horizons}), read_source(resolve(self.config))
        tuning: list[Record] = []
        for setting in itertools.product(settings.lrs, settings.lambdas):
            runs = [self._run(setting, horizons, seed, source) for seed in settings.tuning_seeds]
            for of_seeds in zip(*runs, strict=True):  # the rows of one horizon and form by seed
                ratio, diff = (float(np.mean([row[name] for row in of_seeds])) for name in GOALS)
                shared = {name: of_seeds[0][name] for name in SETTING}
                tuning.append(self.head | shared | {"ratio": ratio, "difference": diff})
        choices = list(itertools.product(C_HP, GOALS))
        best = {
            (form, goal): max(
                (row for row in tuning if row["form"] == form), key=lambda row: row[goal]
            )
            for form, goal in choices
        }
        ends: dict[Setting, set[int]] = {}  # one run covers all choices with its eta and lambda
        for row in best.values():
            ends.setdefault((row["lr"], row["lambda"]), set()).add(row["rounds"])
        judged = [
            {"seed": seed} | row
            for (setting, rounds), seed in itertools.product(ends.items(), settings.seeds)
            for row in self._run(setting, sorted(rounds), seed, source)
        ]
        rows = [
            self.head | {"goal": goal} | row
            for form, goal in choices
            for row in judged
            if all(row[name] == best[form, goal][name] for name in SETTING)
        ]
        return {"rows": rows, "tuning": tuning}

    def _run(
        self, setting: Setting, horizons: Sequence[int], seed: int, source: Source
    ) -> list[Record]:
        """Train once, and return a row for each number of rounds and each form of the bound."""
        config = self._config(setting, max(horizons), seed)
        first, *ends = endings(config, horizons, {form: {"c_hp": form} for form in C_HP}, source)
        return [
            {"lr": setting[0], "lambda": setting[1], "rounds": end.round, "form": form}
            | certified(first, end, form, config.stability.delta)
            for end in ends
            for form in C_HP
        ]

    def _config(self, setting: Setting, rounds: int, seed: int) -> Config:
        lr, lam = setting
        tables: Nested = {
            "federation": {"rounds": rounds, "seed": seed},
            "local": {"lr": lr},
            "orthogonalizer": {"lambda": lam},
            "stability": {"delta": self.settings.delta / self.settings.tried},
        }
        return cell(self.tables, tables)


def certified(first: Ending, end: Ending, form: str, failure: float) -> Record:
    """Return a row with the certified population loss of a run and the initial model's loss.

    `failure` is the probability that the limit from held-out samples fails.
    """
    before, after = first.loss.gap.empirical, end.loss.gap.empirical
    bound = end.certificates[form].bound
    value = bound.value if bound else math.inf
    return {
        "start_loss": before,
        "train_loss": after,
        "bound": value,
        "certified_loss": after + value,
        "decrease": before - after,
        "ratio": (before - after) / value if value > 0 else math.nan,
        "difference": before - after - value,
        HELD_OUT: -change_limit(end.changes, failure, end.change_range),
        "accuracy": end.accuracy,
        "gap": end.loss.gap.gap,
        "gap_low": end.loss.gap.low,
        "gap_high": end.loss.gap.high,
        "range": end.certificates[form].loss_bound,
        "status": bound.status if bound else "refused",
    }


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Searched]:
    """Return a cell for each federation and number of samples."""
    contents.require_other_seeds(settings.seeds, settings.tuning_seeds, "the setting")
    contents.require_free("[base]", settings.base, SETTLED)
    searches = []
    for (label, tables), samples in itertools.product(
        settings.federations.items(), settings.samples
    ):
        contents.require_free(f"[federations.{label!r}]", tables, SETTLED)
        data: Nested = {"data": {"name": request.data, "train": samples}}
        config_tables = merged(merged(settings.base, tables), data)
        head = {"federation": label, "samples": samples}
        slug, points = contents.slug(f"{label}-{samples}"), settings.tried
        longest = max(settings.horizons)
        runs = points // len(settings.horizons) * len(settings.tuning_seeds)
        size = longest * (runs + len(C_HP) * len(GOALS) * len(settings.seeds))
        search = Searched(slug, size, head, cell(config_tables), config_tables, settings)
        config = search._config((settings.lrs[0], settings.lambdas[0]), longest, settings.seeds[0])
        contents.require_read("[base]", settings.base, [config])
        source = read_source(resolve(config))  # raises an error for sizes that do not fit
        split(source.labels, source.official_test, samples, config.data.test, settings.seeds[0])
        searches.append(Searched(slug, size, head, config, config_tables, settings))
    return searches


# Claims

WORTH = 1.0  # decrease / bound: above it, the certified loss is below that of X0
JUDGED = "variance"  # the form that the claims use, fixed in advance
STANDS_ON = (
    "Every bound is the bound of the Stability note with explicit constants, over the ball that "
    "the iterates cannot leave. Branch H of the bound has three proved forms: explicit, sharp "
    "and variance. The variance form uses the training losses of the finished run instead of the "
    "range B. `ratio` is the decrease of the training loss divided by the bound. If the ratio is "
    "above 1, the population loss is certified to be below the training loss of X⁰. From X⁰ = 0, "
    "this training loss is the same for every sample. Runs with other seeds choose a setting (η, "
    "λ, rounds), and their samples are partly the same. Therefore every bound uses the suite's δ "
    "divided by the number of settings that were tried. For each seed, federation, number of "
    "samples and form, all of these bounds hold together with probability 1 − δ. If the data "
    "have no test part, the seed also draws the held-out samples. Then the runs that chose the "
    "setting have trained on some held-out samples, and the intervals of gaps are less reliable. "
    "`decrease − bound` is the decrease that the bound certifies. `hold-out limit` is the least "
    "decrease of the population loss that the held-out samples certify, with the same failure "
    "probability and the same proved range (empirical Bernstein bound for paired losses). It costs "
    "the held-out samples. The bound costs no samples, its distance to the train loss is known "
    "before training, and it holds for the worst neighbouring data set. "
    "Accuracy is measured on held-out samples and is not certified. It may be the same for steps "
    "that are far smaller. δ is divided by the number of settings in the grid, which was fixed "
    "before these runs. This does not count the settings that somebody tried on the same data "
    "before. If n is the number of all training samples of the data set, all seeds share this one "
    "data set. They differ in their partitions and schedules only, so they are not independent "
    "data."
)


def claims(rows: Columns, tuning: Columns) -> Sequence[Claim]:
    """Return the claims about bounds and certificates.

    The claims say that all gaps are within their bounds, that all runs are certified, and that the
    certificate is useful for every seed at the largest number of samples.
    """
    high = rows["gap_high"]
    within = Claim(
        "Every gap is at most its bound.",
        Effect.of_gaps(rows["gap"], rows["gap_low"], high, rows["bound"]),
        Rule(high=0.0),
        f"{(rows['gap'] <= rows['bound']).sum()} of {len(high)} bounds, and "
        f"{(high <= rows['bound']).sum()} for the upper end of the gap's interval",
    )
    largest = rows["samples"].max()
    proved = [status == "certified" for status in rows["status"]]
    all_claims = [
        within,
        counted(
            "Every bound has the status `certified`, and no bound has the status "
            "`real-arithmetic`.", proved, "bounds",
            f"{sum(proved)} of {len(proved)} bounds",
        ),
    ]  # fmt: skip
    for federation in distinct(rows, "federation"):
        part = where(rows, federation=federation, samples=largest, goal="ratio")
        ratios = where(part, form=JUDGED)["ratio"]
        means = (f"{form} {number(where(part, form=form)['ratio'].mean(), 3)}" for form in C_HP)
        all_claims.append(
            Claim(
                f"{federation}: with n = {largest:g} training samples, the certified loss is below "
                "the loss of the initial model X⁰.",
                Effect.exact("decrease / bound, per seed", ratios, unit="ratio"),
                Rule(low=WORTH),
                f"{number(ratios.min(), 3)} to {number(ratios.max(), 3)} over {len(ratios)} "
                f"seeds; means by form of the bound: {'; '.join(means)}",
            )
        )
    return all_claims


def numbers(rows: Columns, tuning: Columns) -> Rows:
    """Return table rows with the chosen settings, by federation, samples, form and goal."""
    head = ("form: η, λ, rounds", "decrease", "bound", "decrease − bound", "hold-out limit",
            "ratio", "accuracy (measured)")  # fmt: skip
    lines: Rows = [head]
    for federation, samples, goal in distinct(rows, "federation", "samples", "goal"):
        lines.append(heading(f"{federation}, n = {samples:g}, {GOALS[goal]}", head))
        for form in C_HP:
            part = where(rows, federation=federation, samples=samples, goal=goal, form=form)
            setting = ", ".join(f"{part[name][0]:g}" for name in ("lr", "lambda", "rounds"))
            names = ("decrease", "bound", "difference", HELD_OUT)  # old results lack the last one
            means = [number(part[name].mean(), 3) if name in part else "–" for name in names]
            ends = f"{number(part['ratio'].min(), 3)}–{number(part['ratio'].max(), 3)}"
            lines.append(
                (f"  {form}: {setting}", *means, ends, f"{part['accuracy'].mean():.3f}")
            )  # fmt: skip
    return lines


# Figures


def _lines(forms: Iterable[str]) -> Iterable[tuple[str, tuple[str, str]]]:
    return zip(forms, style.SERIES, strict=False)


@style.styled
def by_samples(rows: Columns, tuning: Columns, narrow: bool = False) -> Figure:
    """Draw the decrease of the train loss divided by the bound.

    There is a column for each federation.

    The upper row shows the chosen settings against n. The lower row shows the best tried settings
    against the number of rounds at the largest n.
    """
    federations, largest = distinct(rows, "federation"), rows["samples"].max()
    figure, panels = style.canvas(2 * len(federations), narrow, 2.2, len(federations))
    above, below = panels[: len(federations)], panels[len(federations) :]
    for axes, under, federation in zip(above, below, federations, strict=True):
        part = where(rows, federation=federation, goal="ratio")
        tried = where(tuning, federation=federation, samples=largest)
        for form, (colour, marker) in _lines(C_HP):
            form_rows = where(part, form=form)
            sizes = sorted({*form_rows["samples"].tolist()})
            ratios = [where(form_rows, samples=size)["ratio"] for size in sizes]
            low, mean, high = (
                np.array([statistic(values) for values in ratios])
                for statistic in (np.min, np.mean, np.max)
            )
            reach = [mean - low, high - mean]
            axes.errorbar(sizes, mean, reach, color=colour, marker=marker, ms=4, lw=1.2, label=form)
            searched = where(tried, form=form)
            horizons = sorted({*searched["rounds"].tolist()})
            best = [float(where(searched, rounds=rounds)["ratio"].max()) for rounds in horizons]
            under.plot(horizons, best, color=colour, marker=marker, ms=4, lw=1.2)
        axes.set_title(federation, loc="left")
        under.set_title(f"largest ratio, n = {largest:g}", loc="left")
        axes.set_xlabel("training samples n")
        under.set_xlabel("rounds")
    for axes in panels:
        axes.axhline(WORTH, color=style.GREY, lw=1, ls=":")
        style.log_x(axes)
    above[0].plot([], [], ":", color=style.GREY, lw=1, label="no better than X⁰")
    for group in (above, below):
        style.alike(group, log=True)
        for axes in group[: len(federations) if narrow else 1]:
            axes.set_ylabel("decrease / bound")
    style.legend_below(figure, above[0], 2 if narrow else 4)
    return figure


STUDY = Study(
    "certified-loss", Settings, cells, claims, numbers, STANDS_ON,
    {"certified-loss": by_samples}, tables=("rows", "tuning"),
)  # fmt: skip
