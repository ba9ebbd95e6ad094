"""Study `certified-error`: which error rate is certified if a model is published with noise?

The certificates of a run limit how far one sample can move its final model. Noise of standard
deviation s on this model hides the rest, so the error rate of the noisy model has a proved limit
(see `fedmuon.experiments.certifying.output_noise`). A cell is one method with one number n of
training samples. For each step size, seed and size of the noise, the cell measures the error of the
noisy model and computes its limits.

Let c_a be the certificate of sample a, and k = mu sqrt(n). The noise is s = rms(c_a) / (2 mu), so
the relative entropies KL_a of all samples add up to k^2 / 2. A small k is much noise.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.tuning import Tuned, objection
from fedmuon.analysis.report.verdicts import (
    NEGATIVE,
    Claim,
    Effect,
    Rule,
    Slope,
    curve,
    mean_of,
)
from fedmuon.analysis.theory.certified_risk import clopper_pearson
from fedmuon.config.load import Config
from fedmuon.config.schema import Chance, Count, Natural, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table
from fedmuon.data.federated import split
from fedmuon.data.source import Source
from fedmuon.experiments.certifying.measured import released_noise
from fedmuon.experiments.certifying.output_noise import gradient_share, of_certificates, published
from fedmuon.experiments.stability.certificates import Certificate, CertifiedSetting, certify
from fedmuon.experiments.stability.endings import Trained, train
from fedmuon.experiments.studies.study import Study, distinct, heading, levels, tuned_in_rows
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Nested, SuiteRequest, cell, merged
from fedmuon.federated.build import resolve
from fedmuon.federated.client_data import read_source
from fedmuon.orthogonalize import Uncertified
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Batch, Params

SETTLED = {
    "data.name": "--data",
    "data.train": "samples",
    "federation.seed": "seeds",
    "local.lr": "lrs",
    "stability.delta": "delta",
    "stability.c-hp": "the study, which uses the form `variance`",
}
FORM = "variance"  # the form of the bound without noise, fixed in advance


class Method(Table):
    """A method: config tables that extend those in `base`, and its step sizes."""

    base: Nested
    lrs: Annotated[list[Positive], Field(min_length=1)]


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `guess` is the expected train error, for which the certified limit is smallest. `scaled-mus` are
    the values of k = mu sqrt(n). The first method is compared with the others.
    """

    seeds: Annotated[list[Natural], Field(min_length=1)]
    delta: Chance
    guess: Chance
    samples: Annotated[list[Count], Field(min_length=1)]
    scaled_mus: Annotated[list[Positive], Field(min_length=1)]
    methods: Annotated[dict[str, Method], Field(min_length=1)]
    base: Nested


@dataclass(frozen=True)
class Certified:
    """A cell: one method with one number of training samples."""

    name: str
    size: int
    head: Mapping[str, Any]  # method and number of samples
    config: Config  # the config with the first step size and seed of the cell
    tables: Nested
    settings: Settings

    @property
    def lrs(self) -> Sequence[float]:
        """The step sizes of the method."""
        return self.settings.methods[self.head["method"]].lrs

    def compute(self) -> Record:
        """Return a row for each step size, seed and size of the noise."""
        source = read_source(resolve(self.config))
        return {
            "rows": [
                row
                for seed in self.settings.seeds
                for lr in self.lrs
                for row in self._rows(lr, seed, source)
            ]
        }

    def _rows(self, lr: float, seed: int, source: Source) -> list[Record]:
        config = self._config(lr, seed)
        run = train(config, [config.federation.rounds], source)
        certificate = certify(run.setting(1))
        head: Record = {**self.head, "seed": seed, "lr": lr} | of_model(run, certificate)
        count = len(self.lrs) * len(self.settings.scaled_mus)
        guess, delta = self.settings.guess, self.settings.delta
        return [
            head | of_noisy_model(run, certificate, scaled_mu, delta, count, guess)
            for scaled_mu in self.settings.scaled_mus
        ]

    def _config(self, lr: float, seed: int) -> Config:
        tables: Nested = {
            "federation": {"seed": seed},
            "local": {"lr": lr},
            "stability": {"delta": self.settings.delta / len(self.lrs), "c-hp": FORM},
        }
        return cell(self.tables, tables)


def of_model(run: Trained, certificate: Certificate) -> Record:
    """Return the measures of the final model without noise, and the bound for its loss 1 - p_y."""
    final = {name: value[1:] for name, value in run.models.items()}
    train_samples, held_out = batches(run)
    loss = float(run.experiment.task.losses(final, train_samples)[0].double().mean())
    bound = certificate.bound.value if certificate.bound else math.inf
    return {
        "chance": 1 - 1 / run.source.classes,
        "plain_error": errors_of(run, final, held_out) / len(held_out.labels),
        "train_loss": loss,
        "certified_loss": loss + bound,
    }


def of_noisy_model(
    run: Trained,
    certificate: Certificate,
    scaled_mu: float,
    delta: float,
    settings: int,
    guess: float,
) -> Record:
    """Return the measures of the final model with noise, and the limits of its error.

    Args:
        run: The run.
        certificate: Its certificates.
        scaled_mu: The value k = mu sqrt(n), which sets the noise.
        delta: The failure probability of each limit.
        settings: The number of settings that share the failure probability of the certified limit.
        guess: The expected train error, for which the certified limit is smallest.
    """
    count = int(run.data.sizes.sum())
    case = run.setting(1)
    noise = noise_of(case, certificate, scaled_mu / math.sqrt(count))
    try:
        account = of_certificates(case, certificate, noise)
    except Uncertified as reason:
        raise InputError(f"{run.config.local.recipe}: {reason}") from None
    final = {name: value[1:] for name, value in run.models.items()}
    noisy = published(final, noise, run.config.federation.seed)
    train_samples, held_out = batches(run)
    train_error = errors_of(run, noisy, train_samples) / count
    limit = account.released_limit(delta / settings, guess)
    drawn = released_noise(run.config.federation.seed, "error of the published model")
    wrong, tested = errors_of(run, noisy, held_out), len(held_out.labels)
    return {
        "scaled_mu": scaled_mu,
        "settings": settings,
        "noise": noise,
        "divergences": account.total,
        "train_error": train_error,
        "estimated": account.expected_risk(train_error),
        "certified": limit.risk(train_error + limit.noise * drawn),
        "test_error": wrong / tested,
        "test_low": 1 - clopper_pearson(tested - wrong, tested, 0.025),
        "test_high": clopper_pearson(wrong, tested, 0.025),
        "held_out_limit": clopper_pearson(wrong, tested, delta),
    }


def noise_of(case: CertifiedSetting, certificate: Certificate, mu: float) -> float:
    """Return the standard deviation s for which the mean relative entropy is mu^2 / 2.

    It is the root mean square of the distances by which a sample can move the model, over mu.
    """
    if certificate.certificates is None:
        raise InputError(f"a run of the suite has no certificates: {certificate.refusal}")
    with np.errstate(over="ignore"):
        mean_square = float(np.average(certificate.certificates**2, weights=case.sizes))
    if not math.isfinite(mean_square):
        raise InputError("a certificate overflows. Leave out the largest step sizes in lrs.")
    return math.sqrt(mean_square) * gradient_share(case) / mu


def batches(run: Trained) -> tuple[Batch, Batch]:
    """Return the training samples and the held-out samples."""
    shards = run.experiment.shards
    return Batch(shards.inputs, shards.labels), shards.held_out


def errors_of(run: Trained, params: Params, batch: Batch) -> int:
    """Return the number of samples that a single model classifies wrongly."""
    right = run.experiment.task.losses(params, batch)[1]["accuracy"]
    return len(batch.labels) - int(right.sum())


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Certified]:
    """Return a cell for each method and number of samples."""
    contents.require_free("[base]", settings.base, SETTLED)
    cells_of_suite, configs = [], []
    for name, method in settings.methods.items():
        contents.require_free(f"[methods.{name!r}.base]", method.base, SETTLED)
        for samples in settings.samples:
            data: Nested = {"data": {"name": request.data, "train": samples}}
            tables = merged(merged(settings.base, method.base), data)
            head = {"method": name, "samples": samples}
            slug, runs = contents.slug(f"{name}-{samples}"), len(method.lrs) * len(settings.seeds)
            draft = Certified(slug, 1, head, cell(tables), tables, settings)
            config = draft._config(method.lrs[0], settings.seeds[0])
            source = read_source(resolve(config))  # raises an error for sizes that do not fit
            split(source.labels, source.official_test, samples, config.data.test, settings.seeds[0])
            size = runs * config.federation.rounds * samples
            cells_of_suite.append(Certified(slug, size, head, config, tables, settings))
            configs.append(config)
    contents.require_read("[base]", settings.base, configs)
    return cells_of_suite


# Claims

COVERED = "In every setting, the test error of the noisy model is at most its certified error."
STANDS_ON = (
    "The certified error is a limit of the error rate of the noisy model. It follows from the "
    "certificates of the run and holds for one draw of samples and noise. For each seed, method "
    "and n, the certified errors of all step sizes and sizes of the noise hold together with "
    "probability 1 − δ (union bound). Therefore the setting may be chosen by its certified error, "
    "on the same training samples. The claims and the figure use this setting. The failure "
    "probability of a setting is δ divided by `settings`, the number of settings of the method. "
    "The lists of settings were fixed on MNIST. A single run on Fashion-MNIST, with FedMuon's "
    "second step size, was seen before and is not counted. The estimated limit holds in "
    "expectation for a setting that was fixed in advance. Here, the train error of one run stands "
    "for the expectation, and the choice is not paid for, so the estimated limit is not certified. "
    "With small steps, model and noise shrink in proportion, so the certified error tends to a "
    "limit, and the smallest step size may be best in every grid. "
    "The hold-out limit is Clopper and Pearson's limit for one model. The held-out samples chose "
    "nothing, so it pays for no other setting. The stability bound is the train loss plus the "
    "bound of the Stability note (form `variance`) for the model without noise, with the best step "
    "size. It limits the loss 1 − p_y and not the error. For X⁰ = 0, this loss is the same number "
    "as the error of a guess. If clients are drawn without labels (iid), the noise depends on no "
    "sample. If they are drawn by labels (Dirichlet), all limits hold given the labels, for new "
    "samples with the label shares of the training samples. The samples must be independent draws "
    "from the distribution of future samples. "
    "The held-out samples of Fashion-MNIST are from its official test part, which may have another "
    "distribution. "
    "Seeds draw partly the same samples. If n is the number of all training samples of the data "
    "set, all seeds share this one data set and differ in their partitions and their noise. The "
    "intervals over seeds do not account for this. The certified limits are smallest for the train "
    "error `guess`, which is the same for all n."
)
# Line style, mark, size of the mark and colour of each line of the figure.
Look = tuple[str, str, float, str]
SHOWN: dict[str, tuple[str, Look]] = {
    "certified": ("certified error (95%)", ("-", "o", 5, style.BLACK)),
    "held_out_limit": ("hold-out limit (95%)", ("-", "^", 5, style.GREEN)),
    "test_error": ("test error", ("-", "D", 3.5, style.RED)),
    "estimated": ("estimated limit (in expectation)", ("none", "s", 5.5, style.ORANGE)),
    "train_error": ("train error", (":", "", 0, style.BLUE)),
    "plain_error": ("test error without noise", ("--", "", 0, style.PINK)),
}


def chosen(rows: Columns, *groups: str) -> Columns:
    """Return the row with the smallest certified error of each group.

    The groups are the distinct values of `groups`. By default, a group is one seed of a method and
    a number of samples.
    """
    keys = groups or ("method", "samples", "seed")
    best: dict[tuple[Any, ...], int] = {}
    for place, group in enumerate(zip(*(rows[name].tolist() for name in keys), strict=True)):
        at = best.setdefault(group, place)
        if rows["certified"][place] < rows["certified"][at]:
            best[group] = place
    return {name: column[list(best.values())] for name, column in rows.items()}


def without_noise(rows: Columns) -> Columns:
    """Return the row with the smallest certified loss of each seed, method and n."""
    return chosen(rows | {"certified": rows["certified_loss"]})


def sizes_of(rows: Columns) -> list[float]:
    """Return the numbers of training samples in increasing order."""
    return sorted(distinct(rows, "samples"))


def differences(rows: Columns, others: Columns) -> Slope:
    """Return the mean difference of the certified errors of two tables, paired by seed."""
    first, second = (dict(zip(table["seed"].tolist(), table["certified"].tolist(), strict=True))
                     for table in (rows, others))  # fmt: skip
    return mean_of(np.array([first[seed] - second[seed] for seed in first]))


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims about the certified error of the chosen settings."""
    best, sizes, methods = chosen(rows), sizes_of(rows), distinct(rows, "method")
    all_claims = [covered(rows, COVERED)]
    for method in methods:
        parts = {size: where(best, method=method, samples=size) for size in sizes}
        means = "; ".join(f"n = {size:g}: {number(part['certified'].mean(), 3)}"
                          for size, part in parts.items())  # fmt: skip
        worst = [(part["certified"] - part["chance"]).max() for part in parts.values()]
        places = [f"n = {size:g}" for size in sizes]
        all_claims.append(
            Claim(
                f"{method}: for every n and seed, the certified error is below the error of a "
                "guess.",
                Effect.exact("certified error − error of a guess, largest of all seeds", worst,
                             places, unit="ratio"),
                NEGATIVE,
                means,
            )
        )  # fmt: skip
        steps = {f"n = {large:g} against {small:g}": differences(parts[large], parts[small])
                 for small, large in itertools.pairwise(sizes)}  # fmt: skip
        if steps:
            all_claims.append(
                Claim(
                    f"{method}: the certified error falls with n.",
                    Effect.between("difference of certified errors", steps, unit="ratio"),
                    NEGATIVE,
                    means,
                )
            )
    first, *others = methods
    return [
        *all_claims,
        *(
            compared(rows, (first, other), "samples", "n = {}",
                     f"For every n, the certified error of {first} is below that of {other}.")
            for other in others
        ),
    ]  # fmt: skip


def covered(rows: Columns, sentence: str) -> Claim:
    """Return the claim that no certified error is below the test error."""
    ends = (rows[name] - rows["certified"] for name in ("test_error", "test_low", "test_high"))
    below = int((rows["test_error"] <= rows["certified"]).sum())
    surely = int((rows["test_high"] <= rows["certified"]).sum())
    count = len(rows["certified"])
    return Claim(
        sentence,
        Effect("test error − certified error", *ends, seeded=False, unit="ratio"),
        Rule(high=0.0),
        f"{below} of {count} models, and {surely} for the upper end of the test error's "
        "Clopper–Pearson interval",
    )


def compared(
    rows: Columns,
    methods: tuple[str, str],
    by: str,
    place: str,
    sentence: str,
    tunings: Mapping[str, Sequence[Tuned]] | None = None,
) -> Claim:
    """Return the claim that the certified error of the first of two methods is always smaller.

    Args:
        rows: The rows of both methods.
        methods: Their names.
        by: The column at whose values the methods are compared.
        place: The name of such a value in the report, with the placeholder {}.
        sentence: The sentence of the claim.
        tunings: The tunings of each method. By default, `rows` are the tuning: the step size with
            the smallest certified error is compared.
    """
    best = chosen(rows, "method", by, "seed")
    first, other = methods
    steps = {
        place.format(f"{level:g}"): differences(
            where(best, method=first, **{by: level}), where(best, method=other, **{by: level})
        )
        for level in levels(rows, by)
    }
    words = (f"{name}: {number(step.value, 3)} ({number(step.low, 3)} to {number(step.high, 3)})"
             for name, step in steps.items())  # fmt: skip
    tuned = _tuned(rows, methods, by) if tunings is None else tunings
    return Claim(
        sentence,
        Effect.between("difference of certified errors", steps, unit="ratio"),
        NEGATIVE,
        "; ".join(words),
        untuned=objection([*methods], tuned),
    )


def _tuned(rows: Columns, methods: Sequence[str], by: str) -> dict[str, list[Tuned]]:
    of_lrs = chosen(rows, "method", by, "seed", "lr")
    return {
        name: [
            tuned_in_rows(where(of_lrs, method=name, **{by: level}), name, "lr", "certified",
                          "local.lr", "certified")
            for level in levels(rows, by)
        ]
        for name in methods
    }  # fmt: skip


def numbers(rows: Columns) -> Rows:
    """Return the table of the report: means over seeds for each method and number of samples."""
    head = ("n", "certified", "estimated", "train error", "test error", "hold-out limit",
            "test error without noise", "stability bound (loss)", "η", "μ√n")  # fmt: skip
    lines: Rows = [head]
    best, plain = chosen(rows), without_noise(rows)
    names = ("certified", "estimated", "train_error", "test_error", "held_out_limit", "plain_error")
    for method in distinct(rows, "method"):
        part = where(rows, method=method)
        paid, chance = part["settings"][0], part["chance"][0]
        title = f"{method}, {paid:g} settings paid for, error of a guess {number(chance, 3)}"
        lines.append(heading(title, head))
        for size in sizes_of(part):
            mine = where(best, method=method, samples=size)
            limit = where(plain, method=method, samples=size)["certified_loss"].mean()
            means = (number(mine[name].mean(), 3) for name in names)
            values = (", ".join(f"{value:g}" for value in sorted({*mine[name].tolist()}))
                      for name in ("lr", "scaled_mu"))  # fmt: skip
            lines.append((f"  {size:g}", *means, number(limit, 3), *values))
    return lines


# Figure


@style.styled
def by_samples(rows: Columns, narrow: bool = False) -> Figure:
    """Draw limits and errors of each method, by number of samples and by size of the noise."""
    methods, sizes = distinct(rows, "method"), sizes_of(rows)
    figure, panels = style.canvas(2 * len(methods), narrow, 2.4, len(methods))
    above, below = panels[: len(methods)], panels[len(methods) :]
    best, plain = chosen(rows), without_noise(rows)
    by_noise = chosen(where(rows, samples=sizes[-1]), "method", "seed", "scaled_mu")
    for axes, under, method in zip(above, below, methods, strict=True):
        _draw(axes, where(best, method=method), "samples")
        limit = curve(plain, "samples", "certified_loss", method=method)
        axes.plot(limit.sizes, limit.means, "-.", color=style.SKY, lw=1.4,
                  label="stability bound without noise (loss $1-p_y$)")  # fmt: skip
        axes.axhline(rows["chance"][0], color=style.GREY, lw=1, ls=":", label="error of a guess")
        _draw(under, where(by_noise, method=method), "scaled_mu")
        axes.set_title(method, loc="left")
        largest = f"n = {sizes[-1]:,.0f}"
        under.set_title(f"{method}, {largest}" if narrow else largest, loc="left")
        axes.set_xlabel("training samples n")
        under.set_xlabel("μ√n (less noise →)")
        style.levels_on_x(axes, np.array(sizes))
        style.levels_on_x(under, np.array(sorted(distinct(rows, "scaled_mu"))))
    for group in (above, below):
        style.alike(group)
        for axes in group[: len(methods) if narrow else 1]:
            axes.set_ylabel("error rate")
    style.legend_below(figure, above[0], 1 if narrow else 2)
    return figure


def _draw(axes: Axes, rows: Columns, x: str) -> None:
    """Draw the means over seeds, and the interval of the mean certified error."""
    for name, (label, (line, mark, size, colour)) in SHOWN.items():
        means = curve(rows, x, name)
        axes.plot(means.sizes, means.means, ls=line, marker=mark, ms=size, color=colour,
                  mfc="none", lw=1.4, label=label)  # fmt: skip
        if name == "certified":
            low, high = means.means - means.reach, means.means + means.reach
            axes.fill_between(means.sizes, low, high, color=colour, alpha=0.15, lw=0)


STUDY = Study(
    "certified-error", Settings, cells, claims, numbers, STANDS_ON, {"certified-error": by_samples}
)
