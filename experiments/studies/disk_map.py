"""Study `disk-map`: accuracy as a function of DiSK's gain, reach and epsilon (DiSK, Figure 6).

A cell is one epsilon. As in DiSK (C.2), runs without the filter choose the step size. All pairs
(kappa, gamma) then use this step size. Runs with tuning seeds determine the step size, the shape of
the trend and the best pair. Runs with other seeds measure the size of the trend and the advantage
of the best pair. At one seed and epsilon, all pairs use the same split, initial model, lots and
noise.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number, spread
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.tuning import Tuned, objection
from fedmuon.analysis.report.verdicts import POINTS, POSITIVE, Claim, Effect, Slope, mean_of
from fedmuon.config.load import Config
from fedmuon.config.schema import Natural, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar, Table
from fedmuon.experiments.studies.study import Study, distinct, tuned_in_rows
from fedmuon.experiments.studies.training import TrainingRun
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import SuiteRequest, merged
from fedmuon.federated.build import resolve
from fedmuon.runs.directory import Record

Tables = dict[str, dict[str, Scalar | dict[str, Scalar]]]  # options of a custom object are a table
Seeds = Annotated[list[Natural], Field(min_length=1)]
SINGLE = "(1 − κ)/κ"  # with this reach, a step needs only one gradient
SETTLED = {
    "privacy.kappa": "gains", "privacy.lookahead": "reaches", "privacy.epsilon": "epsilons",
    "local.lr": "lrs", "federation.seed": "seeds", "data.name": "--data",
}  # fmt: skip
UNFILTERED = "no filter"


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `gains` are values of κ in DiSK, and `reaches` are values of γ.
    """

    seeds: Seeds
    tuning_seeds: Seeds
    epsilons: Annotated[list[Positive], Field(min_length=1)]
    gains: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2)]
    reaches: Annotated[list[Positive], Field(min_length=1)]
    single: bool  # whether to add gamma = (1 - kappa) / kappa, which needs only one gradient
    shared_reach: Positive  # one of `reaches`; kappa and epsilon are compared at this reach
    lrs: Annotated[list[Positive], Field(min_length=1)]
    base: Tables

    @property
    def pairs(self) -> list[tuple[float, float, str]]:
        """All pairs of gain and reach.

        Each element contains kappa, gamma, and the name of the row in the map.
        """
        rows = [(f"{reach:g}", reach) for reach in self.reaches] + [(SINGLE, 0.0)] * self.single
        return [
            (gain, reach or (1 - gain) / gain, name)
            for (name, reach), gain in itertools.product(rows, self.gains)
        ]


def cells(settings: Settings, request: SuiteRequest) -> Sequence["MapCell"]:
    """Return a cell for each epsilon."""
    if common := sorted({*settings.seeds} & {*settings.tuning_seeds}):
        raise InputError(
            f"seed {common[0]} is in seeds and in tuning-seeds. The tuning seeds choose the step "
            "size, so a test with the same seeds would be biased. Use another seed in one of the "
            "two lists."
        )
    if settings.shared_reach not in settings.reaches:
        raise InputError(
            f"shared-reach is {settings.shared_reach:g}, but the list reaches does not contain "
            f"this value. Add {settings.shared_reach:g} to reaches."
        )
    contents.require_free("[base]", settings.base, SETTLED)
    tables = merged({"data": {"name": request.data}}, settings.base)
    tables = merged(tables, {"data": contents.sizes_that_fit(tables)})
    recipe = str(tables.get("local", {}).get("recipe", ""))
    if not recipe.startswith("disk-"):
        raise InputError(
            f"[base.local] recipe = '{recipe}' has no filter. Set a recipe whose name begins "
            'with disk-, such as recipe = "disk-sgd".'
        )
    seeds = len(settings.seeds) + len(settings.tuning_seeds)
    runs = len(settings.lrs) * len(settings.tuning_seeds) + (len(settings.pairs) + 1) * seeds
    map_cells = [
        MapCell(f"epsilon-{epsilon:g}", runs, settings, tables, epsilon)
        for epsilon in settings.epsilons
    ]
    sample = map_cells[0].config_of(settings.lrs[0], settings.pairs[0], settings.seeds[0])
    contents.require_read("[base]", settings.base, [sample])
    if not sample.data.validation:
        raise InputError(
            "[base.data] validation = 0, but validation samples choose the step size. Set "
            "validation to a positive number."
        )
    return map_cells


# Measurements


@dataclass(frozen=True)
class MapCell:
    """All runs at one epsilon. `size` is the number of runs."""

    name: str
    size: int
    settings: Settings
    tables: Tables
    epsilon: float
    folder: Path | None = None

    def compute(self) -> Record:
        """Return two tables.

        The first table contains the tried step sizes, and the second table contains the results for
        each seed and pair.
        """
        settings, tried = self.settings, {}
        for lr in settings.lrs:
            ends = [self._run(lr, None, seed) for seed in settings.tuning_seeds]
            mean = float(np.mean([end["validation_accuracy"] for end in ends]))
            tried[lr] = mean if math.isfinite(mean) else -math.inf
        best = max(tried, key=lambda lr: tried[lr])
        rows = []
        pairs = [None, *settings.pairs]
        for pair, seed in itertools.product(pairs, [*settings.tuning_seeds, *settings.seeds]):
            gain, reach, choice = pair or (1.0, math.nan, UNFILTERED)
            end = self._run(best, pair, seed)
            rows.append({
                "epsilon": self.epsilon, "kappa": gain, "gamma": reach, "choice": choice,
                "shared": int(choice == f"{settings.shared_reach:g}"), "lr": best, "seed": seed,
                "tunes": int(seed in settings.tuning_seeds), "accuracy": end["accuracy"],
                "test_loss": end["test_loss"], "note": end["note"],
            })  # fmt: skip
        tuning = [
            {"epsilon": self.epsilon, "lr": lr, "validation_accuracy": mean, "chosen": lr == best}
            for lr, mean in tried.items()
        ]
        return {"rows": rows, "tuning": tuning}

    def config_of(self, lr: float, pair: tuple[float, float, str] | None, seed: int) -> Config:
        """Return the config of one run. If `pair` is None, the run uses no filter."""
        last: Tables = {"local": {"lr": lr}, "privacy": {"epsilon": self.epsilon},
                        "federation": {"seed": seed}}  # fmt: skip
        if pair is None:
            recipe = str(self.tables["local"]["recipe"]).removeprefix("disk-")
            last["local"]["recipe"] = f"dp-{recipe}"
        else:
            last["privacy"] |= {"kappa": pair[0], "lookahead": pair[1]}
        return resolve(contents.cell(self.tables, last))

    def _run(self, lr: float, pair: tuple[float, float, str] | None, seed: int) -> Record:
        """Train once in a separate folder, and return the final measures.

        If the run diverged, the measures are nan.
        """
        assert self.folder is not None
        name = "none" if pair is None else f"{pair[0]:g}-{pair[1]:.6g}"
        folder = self.folder / f"{name}-{lr:g}-{seed}"
        result = TrainingRun(name, None, self.config_of(lr, pair, seed), folder).compute()
        unknown = dict.fromkeys(("accuracy", "test_loss", "validation_accuracy"), math.nan)
        end = {} if result["note"] else result["rows"][-1]  # a note says that the run diverged
        return unknown | end | {"note": result["note"]}


# Claims

STANDS_ON = (
    "At every ε, the step size is the best of a grid for training without the filter, by "
    "accuracy on validation samples. The step size is the same for all (κ, γ), as in the DiSK "
    "paper (C.2). Tuning seeds choose the step size, the trend and the best pair (κ, γ). The "
    "other seeds judge these choices. Runs with the same seed and ε share the split, the initial "
    "model, the lots and the noise. All of these follow from the seed, so no run is private or "
    "certified. Intervals are Student's intervals over seeds. The trend is the mean map of the "
    "tuning seeds minus the mean of this map. For each other seed, the effect is the length of "
    "its map along the trend, per cell. The mean effect is 0 if maps of different seeds have "
    "nothing in common."
)
PAIRS, LEVELS = ("kappa", "choice"), ("kappa", "epsilon")


def maps(rows: Columns, axes: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracies as two arrays, one for the tuning seeds and one for the other seeds.

    A row of an array is a seed, and a column is a cell of the map. A cell is a pair of values of
    the two columns `axes`. A run that diverged has accuracy 0.
    """
    places = distinct(rows, *axes)
    arrays = []
    for tunes in (1, 0):
        part = where(rows, tunes=tunes)
        accuracy = dict(zip(zip(part["seed"].tolist(), *(part[name].tolist() for name in axes),
                                strict=True), part["accuracy"].tolist(), strict=True))  # fmt: skip
        seeds = distinct(part, "seed")
        arrays.append(np.array([[accuracy[seed, *at] for at in places] for seed in seeds]))
    tuning, others = (np.nan_to_num(array, nan=0.0) for array in arrays)
    return tuning, others


def shared_trend(tuning: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the size of a trend for each of the other seeds.

    The tuning seeds determine the shape of the trend.

    Let u be the unit vector along the mean map of the tuning seeds minus its mean over cells. For
    the map m_s of seed s, the result is the inner product <m_s, u> divided by sqrt(cells). The
    absolute value of the result is the root mean square, in accuracy per cell, of the part of m_s
    that follows the trend.
    """
    trend = tuning.mean(0)
    trend = trend - trend.mean()
    length = np.linalg.norm(trend)
    if not length:
        return np.zeros(len(others))
    return others @ (trend / length) / math.sqrt(len(trend))


def gains_of_best(tuning: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the advantage of the cell that the tuning seeds choose, for each of the other seeds.

    The advantage is the accuracy of this cell minus the mean accuracy over all cells.
    """
    return others[:, tuning.mean(0).argmax()] - others.mean(1)


def claims(rows: Columns, tuning: Columns) -> Sequence[Claim]:
    """Return the claims about DiSK, Figure 6.

    The claims are about the trends over (κ, γ) and (κ, ε), and about the best pair.
    """
    filtered = {name: column[rows["choice"] != UNFILTERED] for name, column in rows.items()}
    trends: dict[str, Slope] = {}
    optima: dict[str, Slope] = {}
    best = []
    for epsilon in distinct(rows, "epsilon"):
        part = where(filtered, epsilon=epsilon)
        arrays = maps(part, PAIRS)
        trends[f"ε = {epsilon:g}"] = mean_of(shared_trend(*arrays))
        optima[f"ε = {epsilon:g}"] = mean_of(gains_of_best(*arrays))
        gain, choice = distinct(part, *PAIRS)[arrays[0].mean(0).argmax()]
        best.append(f"κ = {gain:g}, γ = {choice} at ε = {epsilon:g}")
    untuned = objection([UNFILTERED], {UNFILTERED: tunings(tuning)})
    row, shared = shared_row(filtered)
    levels = {"all ε": mean_of(shared_trend(*maps(shared, LEVELS)))}
    return [
        Claim(
            "At every ε, accuracy over (κ, γ) follows the trend that other seeds show.",
            Effect.between("accuracy that follows the trend, per cell", trends, unit=POINTS),
            POSITIVE, _said(trends), untuned=untuned,
        ),
        Claim(
            f"Accuracy over (κ, ε) at γ = {row} follows the trend that other seeds show.",
            Effect.between("accuracy that follows the trend, per cell", levels, unit=POINTS),
            POSITIVE, _said(levels), untuned=untuned,
        ),
        Claim(
            "At every ε, the pair (κ, γ) that is best on other seeds is more accurate than the "
            "mean of all pairs.",
            Effect.between("accuracy, best pair (κ, γ) − mean of all pairs", optima, unit=POINTS),
            POSITIVE, f"{_said(optima)}; chosen: {', '.join(best)}", untuned=untuned,
        ),
    ]  # fmt: skip


def tunings(tuning: Columns) -> list[Tuned]:
    """Return the accuracies of the tried step sizes, one tuning for each ε."""
    return [
        tuned_in_rows(where(tuning, epsilon=epsilon), f"{UNFILTERED} (ε = {epsilon:g})", "lr",
                      "validation_accuracy", "local.lr", "accuracy")
        for epsilon in distinct(tuning, "epsilon")
    ]  # fmt: skip


def shared_row(rows: Columns) -> tuple[str, Columns]:
    """Return the reach γ at which κ and ε are compared, and the table rows with this reach."""
    part = where(rows, shared=1)
    return str(part["choice"][0]), part


def _said(slopes: dict[str, Slope]) -> str:
    return "; ".join(
        f"{place}: {100 * slope.value:+.2f} "
        f"({100 * slope.low:+.2f} to {100 * slope.high:+.2f}) points"
        for place, slope in slopes.items()
    )


def numbers(rows: Columns, tuning: Columns) -> Rows:
    """Return the rows of the report's table, one for each ε.

    A row contains the step size and three accuracies: that of a run without the filter, the mean
    over all pairs (κ, γ), and that of the best pair.
    """
    head = ("ε", "step size", UNFILTERED, "mean of all (κ, γ)", "lowest to highest mean",
            "best pair on tuning seeds", "accuracy of this pair")  # fmt: skip
    lines: Rows = [head]
    for epsilon in distinct(rows, "epsilon"):
        part = where(rows, epsilon=epsilon)
        plain = where(part, choice=UNFILTERED, tunes=0)["accuracy"]
        pairs = {name: column[part["choice"] != UNFILTERED] for name, column in part.items()}
        first, others = maps(pairs, PAIRS)
        at = first.mean(0).argmax()
        gain, choice = distinct(pairs, *PAIRS)[at]
        ends = others.mean(0)
        lines.append((f"{epsilon:g}", f"{part['lr'][0]:g}", spread(plain), spread(others.mean(1)),
                      f"{number(ends.min())} to {number(ends.max())}",
                      f"κ = {gain:g}, γ = {choice}", spread(others[:, at])))  # fmt: skip
    return lines


# Figures


SPAN = 10.0  # smallest range of the colours in accuracy points, so that noise does not look large


@style.styled
def heat_maps(rows: Columns, tuning: Columns, narrow: bool = False) -> Figure:
    """Draw heat maps of mean accuracies. All maps have the same colour scale.

    There is a map over (κ, γ) for each ε, and a map over (κ, ε).
    """
    judged = where(rows, tunes=0)
    filtered = {name: column[judged["choice"] != UNFILTERED] for name, column in judged.items()}
    epsilons = distinct(rows, "epsilon")
    shared_reach, at_shared_reach = shared_row(filtered)
    parts = [(where(filtered, epsilon=epsilon), PAIRS) for epsilon in epsilons]
    parts.append((at_shared_reach, LEVELS))
    tables = [mean_accuracies(part, columns) for part, columns in parts]
    finite = np.concatenate([table[np.isfinite(table)] for table in tables])
    spare = max(0.0, SPAN - np.ptp(finite)) / 2
    norm = Normalize(finite.min() - spare, finite.max() + spare)
    tall = len(distinct(filtered, "choice"))
    figure, panels = style.canvas(len(parts), narrow, 1.3 + 0.28 * tall, 2)
    for axes, (part, columns), table in zip(panels, parts, tables, strict=True):
        texts = np.vectorize(lambda mean: f"{mean:.1f}", otypes=[object])(table)
        image = style.heat_map(axes, table, texts, norm, highest_is_best=True)
        style.frame_best(axes, table, highest_is_best=True)
        across, up = (
            [level if isinstance(level, str) else f"{level:g}" for level in distinct(part, name)]
            for name in columns
        )
        axes.set_xticks(range(len(across)), across)
        axes.set_yticks(range(len(up)), up)
        axes.set_xlabel("κ")
    for axes, epsilon in zip(panels, epsilons, strict=False):
        plain = where(judged, epsilon=epsilon, choice=UNFILTERED)["accuracy"].mean()
        axes.set_title(f"ε = {epsilon:g}; without filter {100 * plain:.1f}%", loc="left")
        axes.set_ylabel("γ")
    panels[-1].set_title(f"γ = {shared_reach}", loc="left")
    panels[-1].set_ylabel("ε")
    figure.colorbar(image, ax=panels, fraction=0.05, label="mean accuracy in percent")
    return figure


def mean_accuracies(rows: Columns, columns: tuple[str, str]) -> np.ndarray:
    """Return mean accuracies in percent over two columns. A diverged run counts as 0."""
    across, up = (distinct(rows, name) for name in columns)
    return 100 * np.array([
        [np.nan_to_num(where(rows, **{columns[0]: x, columns[1]: y})["accuracy"]).mean()
         for x in across] for y in up
    ])  # fmt: skip


STUDY = Study(
    "disk-map", Settings, cells, claims, numbers, STANDS_ON, {"disk-map": heat_maps},
    tables=("rows", "tuning"),
)  # fmt: skip
