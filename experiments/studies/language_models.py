"""Study `language-models`: federated fine-tuning of a pretrained language model.

A cell is one method on one data set. The clients are divided into training clients, validation
clients and unseen clients, in the same way with every seed. The cell first tries the step sizes of
the method's grid with the tuning seeds, and chooses the one with the smallest loss per token on
validation clients. If the best value is at an end of the grid, values are added at this end. Then
the cell trains with the chosen step size and the comparison seeds. The loss is measured on unseen
clients. No client measures the result that trained the model or chose a step size.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Findings, Rows, Titled, number
from fedmuon.analysis.report.tables import Columns, read_table, where
from fedmuon.analysis.report.verdicts import (
    HOLDS,
    REFUTED,
    Claim,
    Effect,
    Rule,
    by_seed,
    free_of_seeds,
    mean_of,
    mean_with_interval,
    unknown,
)
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.tables import Scalar, Table
from fedmuon.data.unseen import UNSEEN, VALIDATION
from fedmuon.experiments.inspect.continuations import in_one_line
from fedmuon.experiments.studies.federated_comparison import (
    Point,
    Steps,
    TunedMethods,
    in_words,
    inside_grid,
    require_methods,
    search,
    set_by,
    tables_of,
    trials_of,
)
from fedmuon.experiments.studies.study import Study, assemble, distinct, heading
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import SuiteRequest, cell, merged
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data
from fedmuon.federated.continuations import continuations
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.federated.text_losses import ClientLosses, client_losses, left_out_samples
from fedmuon.runs.directory import Record
from fedmuon.runs.observers.replies import sent_bytes
from fedmuon.tasks.base import Params

SETTLED = {"federation.seed": "seeds", "output.evaluate-every": "every"}
WithOptions = dict[str, dict[str, Scalar | dict[str, Scalar]]]  # such as `base.data.options`
LEFT_OUT = ("unseen-clients", "validation-clients")
MUON = "Muon"  # in the names of methods that take Muon steps
PRETRAINED = "pretrained"


class Texts(Table):
    """A data set: config tables that extend those in `base`."""

    base: WithOptions


class Pair(Table):
    """Two methods whose losses on unseen clients are compared."""

    better: str
    than: str


class Settings(TunedMethods):
    """The keys that the suite's TOML file may contain."""

    base: WithOptions
    texts: Annotated[dict[str, Texts], Field(min_length=1)]
    claims: list[Pair]


@dataclass(frozen=True)
class Tuned:
    """A cell: one method on one data set."""

    name: str
    size: int
    head: Mapping[str, Any]  # the data set and the method
    tables: WithOptions
    settings: Settings

    @property
    def config(self) -> Config:
        """The resolved config with the first step size and seed of the cell. It reads the data."""
        grid = self.settings.methods[self.head["method"]].grid
        first = tables_of({key: values[0] for key, values in grid.items()})
        seed: WithOptions = {"federation": {"seed": self.settings.seeds[0]}}
        return resolve(cell(self.tables, first, seed))

    def compute(self) -> Record:
        """Choose the step size, and train with the comparison seeds. Return five tables."""
        method = self.settings.methods[self.head["method"]]
        losses, edge = search(method.grid, self._validation_loss, self.settings.extend)
        best = min(losses, key=lambda point: losses[point])
        tuning = [
            {**self.head, "step_sizes": in_words(dict(point)), "validation_loss": loss,
             "chosen": point == best}
            for point, loss in losses.items()
        ]  # fmt: skip
        tables: dict[str, list[Record]] = {"rows": [], "curves": [], "texts": [], "samples": []}
        for seed in self.settings.seeds:
            head = {**self.head, "seed": seed}
            steps = {"step_sizes": in_words(dict(best)), "edge": edge}
            run = self._compared(dict(best), seed)
            tables["rows"].append(head | steps | run.end)
            tables["curves"] += [head | record for record in run.curve]
            tables["texts"] += [head | record for record in run.texts]
            tables["samples"] += run.samples
        return tables | {"tuning": tuning}

    def _built(self, steps: Steps, seed: int) -> tuple[Config, Experiment]:
        tables = merged(self.tables, tables_of(steps))
        config = resolve(cell(tables, {"federation": {"seed": seed}}))
        return config, build_experiment(config, build_data(config))

    def _validation_loss(self, point: Point) -> float:
        """Return the mean loss on validation clients, or infinity if a run diverged."""
        losses = []
        for seed in self.settings.tuning_seeds:
            config, experiment = self._built(dict(point), seed)
            part = left_out_samples(config, experiment.task, VALIDATION)
            assert part is not None  # checked by `cells`
            try:
                *_, last = run_rounds(experiment, begin(experiment.recipe, experiment.task, seed))
            except NonFinite:
                return math.inf
            losses.append(
                client_losses(experiment.task, last.state.params, part.samples, part.owners).loss
            )
        mean = float(np.mean(losses))
        return mean if math.isfinite(mean) else math.inf

    def _compared(self, steps: Steps, seed: int) -> "ComparedRun":
        """Train with the chosen step size, and measure the loss on unseen clients."""
        config, experiment = self._built(steps, seed)
        task, clock = experiment.task, experiment.plan.timetable
        part = left_out_samples(config, task, UNSEEN)
        assert part is not None  # checked by `cells`
        state, spent = begin(experiment.recipe, task, seed), {"bytes_up": 0, "bytes_down": 0}
        first = state.params

        def measured(at: int, losses: ClientLosses) -> Record:
            seconds = math.nan if clock is None else float([0.0, *clock.seconds][at])
            return {
                "round": at, **spent, "simulated_seconds": seconds, **losses.fields("unseen"),
            }  # fmt: skip

        def unseen_losses(params: Params) -> ClientLosses:
            return client_losses(task, params, part.samples, part.owners)

        note, params, unseen = "", first, unseen_losses(first)
        curve = [measured(0, unseen)]
        try:
            for outcome in run_rounds(experiment, state):
                at, params = outcome.state.round, outcome.state.params
                for name, count in sent_bytes(clock, outcome).items():
                    spent[name] += count
                if at == config.federation.rounds or at % self.settings.every == 0:
                    unseen = unseen_losses(params)
                    curve.append(measured(at, unseen))
                    if not math.isfinite(curve[-1]["unseen_loss"]):
                        note = f"the loss is not finite after round {at}"
                        break
        except NonFinite as error:
            note = str(error)
        held_out = experiment.shards.held_out
        # The label of a window of text is its client.
        training = client_losses(task, params, held_out, held_out.labels.cpu().numpy())
        end = {**curve[-1], **training.fields("own")}
        texts = [
            {"client": part.names[client], "tokens": int(tokens), "loss": float(loss)}
            for client, tokens, loss in zip(
                unseen.clients, unseen.tokens, unseen.losses, strict=True
            )
        ]
        samples: list[Record] = []
        if seed == self.settings.seeds[0] and not note:
            models = {self.head["method"]: params}
            if self.head["method"] == next(iter(self.settings.methods)):  # once per data set
                models = {PRETRAINED: first} | models
            samples = [
                {
                    "texts": self.head["texts"],
                    "method": name,
                    "prompt": prompt,
                    "text": in_one_line(text),
                }
                for name, model in models.items()
                for prompt, text in continuations(config, task, model).items()
            ]
        end = dict.fromkeys(end, math.nan) if note else end
        del end["round"]
        fall = curve[0]["unseen_loss"] - end["unseen_loss"]
        return ComparedRun({**end, "fall": fall, "note": note}, curve, texts, samples)


@dataclass(frozen=True)
class ComparedRun:
    """The results of one run: its end, its curve, the loss of each unseen client, and samples."""

    end: Record
    curve: list[Record]
    texts: list[Record]
    samples: list[Record]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Tuned]:
    """Return a cell for each data set and method."""
    contents.require_other_seeds(settings.seeds, settings.tuning_seeds, "the step sizes")
    require_methods([(claim.better, claim.than) for claim in settings.claims], settings.methods)
    contents.require_free("[base]", settings.base, SETTLED)
    for name, texts in settings.texts.items():
        keys = [
            f"{table}.{key}"
            for table, entries in texts.base.items()
            for key in entries
            if key != "options"  # options of both places are merged
        ]
        contents.require_free("--set", request.changes, dict.fromkeys(keys, f"[texts.{name}]"))
    for label, method in settings.methods.items():
        place = f"[methods.{label!r}]"
        contents.require_free("--set", request.changes, set_by(place, method))
        contents.require_free(place, method.base, SETTLED | dict.fromkeys(method.grid, "its grid"))
        if method.then:
            raise InputError(f"{place} then has no effect, because this suite reads only `grid`.")
    cells_of_suite = []
    for (name, texts), (label, method) in itertools.product(
        settings.texts.items(), settings.methods.items()
    ):
        tables = merged(merged(settings.base, texts.base), method.base)
        first, last = (
            tables_of({key: values[at] for key, values in method.grid.items()}) for at in (0, -1)
        )
        # Not resolved: this would read the data, which not every machine has.
        config = cell(tables, first, {"federation": {"seed": settings.seeds[0]}})
        for values in (first, last):  # one of them may be a default, which is never rejected
            contents.require_read(f"[methods.{label!r}]", merged(method.base, values), [config])
        clients = {key: value for key, value in tables["data"].items() if key in LEFT_OUT}
        contents.require_read("[base]", {"data": clients}, [config])
        if not config.data.unseen_clients or not config.data.validation_clients:
            raise InputError(
                "[base.data] unseen-clients or validation-clients is 0, but unseen clients measure "
                "the loss, and validation clients choose the step sizes. Set both to 1 or more."
            )
        size = trials_of(method) * len(settings.tuning_seeds) + len(settings.seeds)
        head = {"texts": name, "method": label}
        slug = contents.slug(f"{name}-{label}")
        cells_of_suite.append(Tuned(slug, size, head, tables, settings))
    return cells_of_suite


# Claims

STANDS_ON = "\n".join((
    "The clients are divided once, without the seed of a run, into training clients, validation "
    "clients and unseen clients. Losses are means over unseen clients, and within a client over "
    "its tokens. All seeds have the same unseen clients, so intervals say how results vary between "
    "seeds, and not how they vary between clients.",
    "The step size of every method was chosen by the loss on validation clients, with seeds that "
    "are not used in the comparison. Other settings have one value each and were not tuned.",
    "Intervals are Student's 95% intervals over seeds, for differences paired by seed. With the "
    "same seed, two methods share the initial adapters and the sampled clients.",
    "Each comparison has its own 95% interval. The intervals are not corrected for the number of "
    "comparisons, so one of twenty is expected to miss the true difference.",
    "Methods are compared after equally many rounds. LoRA-Muon also sends momenta, so it sends "
    "twice as many bytes as AdamW and Muon.",
    "Bytes are the sizes of the arrays in messages, of all clients and in both directions. "
    "Simulated seconds follow from the sizes of messages, local steps, speeds and bandwidths. No "
    "real device was timed.",
    "The pretrained model may have read the text of any client before. So unseen means unseen "
    "in fine-tuning.",
))  # fmt: skip


def report(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the section of the report, with the claims of the suite's file and samples of text."""
    pairs = [(claim["better"], claim["than"]) for claim in about["settings"]["claims"]]
    section = assemble(replace(study, claims=partial(claims, pairs)), folder, about)
    rows = read_table(folder / "rows.csv")
    sentence = sentence_about_muon(rows, pairs)
    tables = [differences(rows, pairs), written(read_table(folder / "samples.csv"))]
    stands_on = f"{section.stands_on}\n{tokens_per_client(read_table(folder / 'texts.csv'))}"
    return replace(section, caution=sentence, stands_on=stands_on, more=[*section.more, *tables])


def tokens_per_client(texts: Columns) -> str:
    """Return a sentence about the number of tokens that measure an unseen client."""
    least, most = (int(end(texts["tokens"])) for end in (np.min, np.max))
    tokens = f"{least} to {most}" if least < most else f"{least}"
    return f"The loss of each unseen client is measured on {tokens} tokens."


def claims(
    pairs: Sequence[tuple[str, str]], rows: Columns, tuning: Columns, curves: Columns
) -> Sequence[Claim]:
    """Return a claim for each pair and data set, and the claim that grids were wide enough."""
    compared = [lower(rows, texts, *pair) for texts in distinct(rows, "texts") for pair in pairs]
    learnt = [improves(rows, texts) for texts in distinct(rows, "texts")]
    return [*compared, *learnt, inside_grid(rows)]


def lower(rows: Columns, texts: str, better: str, than: str) -> Claim:
    """Return the claim that a method ends with a lower loss on unseen clients than another one."""
    sentence = (
        f"{texts}: {better} ends with a lower loss on unseen clients than {than}, each at its own "
        "best step size."
    )
    part = where(rows, texts=texts)
    first, second = (part["method"] == name for name in (better, than))
    if not first.any() or not second.any():
        return unknown(sentence, "one of the two methods was not run")
    value, half = by_seed(part, "unseen_loss", first, second)
    diverged = [bool(np.isnan(part["unseen_loss"][mask]).any()) for mask in (first, second)]
    if any(diverged):
        value = np.inf if diverged[0] else -np.inf
    effect = Effect.around(
        f"loss per token, {better} − {than}", [value], [half], [texts], free_of_seeds(part),
        unit="loss",
    )  # fmt: skip
    detail = f"difference {value:+.4f} ± {half:.4f}"
    edges = [name for name in (better, than) if (where(part, method=name)["edge"] != "").any()]
    untuned = f"{edges[0]}'s best step size is at an end of its grid" if edges else ""
    return Claim(sentence, effect, Rule(high=0.0, strict=True), detail, untuned=untuned)


def improves(rows: Columns, texts: str) -> Claim:
    """Return the claim that every method lowers the loss of the pretrained model."""
    part = where(rows, texts=texts)
    names = distinct(part, "method")
    falls = [where(part, method=name)["fall"] for name in names]
    means, low, high = np.array([mean_with_interval(fall) for fall in falls]).T
    effect = Effect(
        "fall of the loss per token", means, low, high, names, free=free_of_seeds(part), unit="loss"
    )
    return Claim(
        f"{texts}: fine-tuning with every method lowers the loss on unseen clients.", effect,
        Rule(low=0.0, strict=True),
    )  # fmt: skip


def sentence_about_muon(rows: Columns, pairs: Sequence[tuple[str, str]]) -> str:
    """Return a sentence per data set that says how methods with Muon steps compare with others.

    The verdicts are those of the claims.
    """
    sentences = []
    for texts in distinct(rows, "texts"):
        words = []
        for better, than in pairs:
            if MUON not in better or MUON in than:
                continue
            verdict = lower(rows, texts, better, than).verdict
            reversed_verdict = lower(rows, texts, than, better).verdict
            if verdict == HOLDS:
                word = "wins against"
            elif verdict == REFUTED and reversed_verdict == HOLDS:
                word = "loses against"
            else:
                word = "compared with"
            end = "" if word != "compared with" else " is inconclusive"
            words.append(f"'{better}' {word} '{than}'{end}")
        if words:
            sentences.append(f"On {texts}, after equally many rounds: {'; '.join(words)}.")
    return " ".join(sentences)


def numbers(rows: Columns, tuning: Columns, curves: Columns) -> Rows:
    """Return the rows of the report's table, one for each data set and method.

    The method with the lowest loss comes first.
    """
    head = ("method", "step size", "loss, unseen clients", "worst decile", "perplexity",
            "loss, own held-out text", "MB sent", "simulated s")  # fmt: skip
    lines: Rows = [head]
    for texts in distinct(rows, "texts"):
        part = where(rows, texts=texts)
        start = where(curves, texts=texts, round=0)["unseen_loss"].mean()
        lines.append(heading(f"{texts}: pretrained model {number(float(start), 4)}", head))
        means = {
            name: where(part, method=name)["unseen_loss"].mean()
            for name in distinct(part, "method")
        }
        for name in sorted(means, key=lambda name: np.nan_to_num(means[name], nan=np.inf)):
            runs = where(part, method=name)
            diverged = int(np.isnan(runs["unseen_loss"]).sum())
            ends = [f"{diverged} of {len(runs['seed'])} diverged", "–", "–", "–"]
            if not diverged:
                measures = ("unseen_loss", "unseen_loss_worst_decile", "unseen_perplexity",
                            "own_loss")  # fmt: skip
                ends = [with_interval(runs[measure]) for measure in measures]
            sent = (runs["bytes_up"] + runs["bytes_down"]).mean() / 1e6
            steps = f"{runs['step_sizes'][0]}{' (end of grid)' * bool(runs['edge'][0])}"
            seconds = number(float(runs["simulated_seconds"].mean()), 3)
            lines.append((f"  {name}", steps, *ends, number(float(sent), 3), seconds))
    return lines


def with_interval(values: np.ndarray) -> str:
    """Return the mean with half the length of its 95% interval, such as `3.505 ± 0.055`."""
    mean = mean_of(values)
    half = f" ± {number(mean.high - mean.value, 2)}" if len(values) > 1 else ""
    return f"{number(mean.value, 4)}{half}"


def differences(rows: Columns, pairs: Sequence[tuple[str, str]]) -> Titled:
    """Return the table of paired differences of losses on unseen clients."""
    lines: Rows = []
    for texts in distinct(rows, "texts"):
        part = where(rows, texts=texts)
        for better, than in pairs:
            first, second = (part["method"] == name for name in (better, than))
            if first.any() and second.any():
                value, half = by_seed(part, "unseen_loss", first, second)
                lines.append((texts, f"{better} − {than}", f"{value:+.4f} ± {half:.4f}"))
    return "Differences of losses, paired by seed", ("data", "methods", "difference"), lines


def written(samples: Columns) -> Titled:
    """Return the table of texts that the models write before and after training."""
    lines: Rows = []
    for texts in distinct(samples, "texts"):
        part = where(samples, texts=texts)
        for prompt in distinct(part, "prompt"):
            of_prompt = where(part, prompt=prompt)
            lines += [
                (texts, prompt, str(method), str(text))
                for method, text in zip(of_prompt["method"], of_prompt["text"], strict=True)
            ]
    title = "Continuations with the most likely tokens, first seed"
    return title, ("data", "prompt", "model", "continuation"), lines


# Figure

COSTS = {
    "round": ("rounds", 1.0),
    "sent": ("MB sent", 1e6),
    "simulated_seconds": ("simulated seconds", 1.0),
}


@style.styled
def by_cost(rows: Columns, tuning: Columns, curves: Columns, narrow: bool = False) -> Figure:
    """Draw the loss on unseen clients against rounds, bytes and simulated seconds."""
    curves = {**curves, "sent": curves["bytes_up"] + curves["bytes_down"]}
    texts, methods = distinct(curves, "texts"), distinct(curves, "method")
    places = list(itertools.product(texts, COSTS))
    figure, panels = style.canvas(len(places), narrow, 1.8, len(COSTS))
    looks = (*style.SERIES, (style.BLACK, "X"), (style.GREY, "*"))
    for axes, (name, cost) in zip(panels, places, strict=True):
        label, unit = COSTS[cost]
        for method, (colour, marker) in zip(methods, looks, strict=False):
            part = where(curves, texts=name, method=method)
            # A logarithmic axis has no place for the start, before any bytes were sent.
            at = [k for k in distinct(part, "round") if k or cost != "sent"]
            rounds = [where(part, round=k) for k in at]
            x = [float(point[cost].mean()) / unit for point in rounds]
            y = [float(point["unseen_loss"].mean()) for point in rounds]
            axes.plot(x, y, color=colour, marker=marker, ms=4, mfc="none", lw=1.1, label=method)
        if cost == "sent":
            style.log_x(axes)
        axes.set_xlabel(f"{label}{style.scale_of(axes.xaxis)}")
        if cost == "round":
            axes.set_title(name, loc="left")
            axes.set_ylabel("loss, unseen clients")
    style.legend_below(figure, panels[0], 2 if narrow else 4)
    return figure


STUDY = Study(
    "language-models", Settings, cells, partial(claims, []), numbers, STANDS_ON,
    {"language-models": by_cost}, tables=("rows", "tuning", "curves"), report=report,
)  # fmt: skip
