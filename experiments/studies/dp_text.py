"""Study `dp-text`: private fine-tuning of a decoder on tables and sentences.

DP-Muon (000), section 5. A cell is a seed. One decoder is trained on public text, and every method
continues from it under the same joint epsilon. Each training is a run directory, which resumes and
replays like any other. The corpus lies in [base.data] folder. If that is empty, both texts are
synthetic (`make-text`), and the public text has other names and wordings than the private one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report.findings import Findings, Rows, number, spread
from fedmuon.analysis.report.style import SERIES, canvas, legend_below, styled
from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.verdicts import (
    AT_MOST_ONE,
    NEGATIVE,
    POSITIVE,
    Claim,
    Effect,
    counted,
    paired,
    unknown,
)
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural
from fedmuon.core.errors import NonFinite
from fedmuon.core.tables import Scalar, Table
from fedmuon.data.text import corpus, make_text, prompts, tokens_of
from fedmuon.experiments.studies.study import Study, assemble, distinct
from fedmuon.experiments.suites.contents import SuiteRequest, cell, merged, require_read
from fedmuon.experiments.text_scores import bleu, rouge_l
from fedmuon.federated.build import decoder_form, resolve
from fedmuon.federated.client_data import read_source
from fedmuon.federated.rounds import run_rounds
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import Run, prepare, train
from fedmuon.tasks.base import IGNORED, Params
from fedmuon.tasks.decoder import LEAST, fold_adapters, generate, read_weights
from fedmuon.tasks.networks import NetworkTask

Nested = dict[str, dict[str, Scalar]]
SHOWN = 10  # generated sentences that are stored for a reader


class Settings(Table):
    """What the suite's file holds; `public` is on top of `base` for the decoder to begin from."""

    seeds: Annotated[list[Natural], Field(min_length=1)]
    base: Nested
    public: Nested
    variants: Annotated[dict[str, Nested], Field(min_length=1)]
    made_tables: Count
    public_tables: Count
    prompts: Count  # held-out tables to write about
    beams: Count
    published: dict[str, dict[str, dict[str, float]]]  # by format and method


def cells(settings: Settings, request: SuiteRequest) -> Sequence["TextCell"]:
    """A cell for each seed."""
    data = {"data": {"name": request.data}}
    configs = [
        cell(settings.base, own, data) for own in (settings.public, *settings.variants.values())
    ]
    require_read("--set", request.changes, configs)
    for (name, own), config in zip(settings.variants.items(), configs[1:], strict=True):
        require_read(f"[variants.{name!r}]", own, [config])
    trainings = 1 + len(settings.variants)
    return [
        TextCell(f"{request.data}-seed{seed}", trainings, settings, request.data, seed)
        for seed in settings.seeds
    ]


# What it measures.


@dataclass(frozen=True)
class TextCell:
    """All methods with one seed, from one public decoder; `size` counts trainings."""

    name: str  # of its folder
    size: int
    settings: Settings
    form: str
    seed: int
    folder: Path | None = None

    def compute(self) -> Record:
        """Rows `ends`, `curves` and `written` of every method."""
        base, folder = self.settings.base, self.folder
        assert folder is not None
        weights = str(base.get("task", {}).get("weights", ""))
        if not weights:  # a decoder trained on public text, without privacy
            text = self._make_text(folder, "lodgings", self.settings.public_tables)
            config = self._config(self.settings.public, text, "")
            train(prepare(config, folder / "public", True), run_rounds)
            weights = str(folder / "public" / "model.safetensors")
        given = str(base.get("data", {}).get("folder", ""))
        text = Path(given or self._make_text(folder, "restaurants", self.settings.made_tables))
        record: Record = {"ends": [], "curves": [], "written": []}
        for place, (method, own) in enumerate(self.settings.variants.items()):
            config = self._config(own, text, weights)
            tables = fine_tune(config, folder / f"method-{place}", self.settings)
            head = {"method": method, "seed": self.seed}
            for name, rows in tables.items():
                record[name] += [head | row for row in rows]
        return record | {"made_up": not given}

    def _make_text(self, folder: Path, domain: str, count: int) -> Path:
        """Synthetic text of that domain, made once."""
        make_text(folder / domain, self.form, count, domain, self.seed)
        return folder / domain

    def _config(self, own: Nested, text: Path, weights: str) -> Config:
        """The settings of one training, on all pairs that its text has."""
        setting = merged(self.settings.base, own)
        data = {"name": self.form, "folder": str(text)}
        last = {"data": data, "task": {"weights": weights}, "federation": {"seed": self.seed}}
        source = read_source(cell(setting, last))
        held = source.official_test or len(source.labels) * 4 // 5
        sizes = setting.get("data", {})
        limited = {
            "train": min(int(sizes.get("train", held)), held),
            "test": min(int(sizes.get("test", len(source.labels))), len(source.labels) - held),
        }
        return resolve(cell(setting, last, {"data": limited}))


def fine_tune(config: Config, out: Path, settings: Settings) -> Mapping[str, list[Record]]:
    """One method's run, and what its decoder then says of held-out tables."""
    run = prepare(config, out, resume=True)
    measures = dict.fromkeys(("nll", "bleu", "rouge_l"), math.nan)
    written: list[Record] = []
    privacy, note = {}, ""
    try:
        privacy = train(run, run_rounds)["privacy"]
    except NonFinite as error:
        note = str(error)
    else:
        stored = read_weights(out / "model.safetensors")
        task, held = run.experiment.task, run.experiment.shards.held_out
        assert isinstance(task, NetworkTask)
        params = {
            name: torch.from_numpy(v).to(task.device, task.dtype) for name, v in stored.items()
        }
        # the mean negative log-likelihood of a held-out target token
        losses, _ = task.losses({name: value[None] for name, value in params.items()}, held)
        counts: Tensor = (task.targets(held.inputs, held.labels) != IGNORED).sum(1)
        measures["nll"] = float((losses[0].double() * counts).sum() / counts.sum())
        scores, written = _write_sentences(run, params, settings)
        measures |= scores
    names = ("epsilon", "delta", "noise", "blocks")
    end = {
        "recipe": config.local.recipe,
        "target": config.privacy.epsilon,
        "steps": config.federation.rounds * config.local.steps,
        "pairs": config.data.train,
        "lot": config.privacy.lot,
        **measures,
        **{name: privacy.get(name, math.nan) for name in names},
        **{name: privacy.get(name, "") for name in ("adjacency", "sampling")},
        "note": note,
    }
    curve = [
        {"step": record["round"] * config.local.steps, "loss": record["test_loss"]}
        for record in run.directory.records()
        if "test_loss" in record
    ]
    return {"ends": [end], "curves": curve, "written": written}


def _write_sentences(run: Run, params: Params, settings: Settings) -> tuple[Record, list[Record]]:
    """BLEU and ROUGE-L of sentences about held-out tables, and the first of them."""
    table, tokens = run.config.data, tokens_of(run.config.data.tokenizer)
    parts = corpus(table.name, table.folder)
    held = prompts(parts.get("test") or parts.get("dev") or parts["train"])
    encoded = {prompt: tokens.prompt(prompt) for prompt in held}
    short = [prompt for prompt, row in encoded.items() if len(row) + LEAST <= table.context]
    short = short[: settings.prompts]
    form = decoder_form(run.config, run.data.shape, run.data.vocabulary)
    task = run.experiment.task
    assert isinstance(task, NetworkTask)
    whole = fold_adapters(task.module, params)
    rows = generate(form, whole, [encoded[prompt] for prompt in short], tokens.end, settings.beams)
    sentences, wanted = [tokens.decode(row) for row in rows], [held[prompt] for prompt in short]
    shown = []
    for prompt, one, references in zip(short, sentences, wanted, strict=True):
        # An untrained decoder writes control characters, too.
        line = "".join(sign if sign.isprintable() else "\N{MIDDLE DOT}" for sign in one)
        shown.append({"table": prompt, "written": line, "reference": references[0]})
    scores = {"bleu": bleu(sentences, wanted), "rouge_l": rouge_l(sentences, wanted)}
    return scores, shown[:SHOWN]


# What it claims.

MEASURES = {"nll": "NLL per target token", "bleu": "BLEU", "rouge_l": "ROUGE-L"}
UNITS = {"nll": "nats", "bleu": "points", "rouge_l": "points"}
PAIRS = (
    ("DP-Adam", "DP-SGD", "nll"),
    ("DP-Muon", "DP-Adam", "nll"),
    ("DP-MuonBC", "DP-Muon", "nll"),
    ("DP-Muon", "DP-Adam", "bleu"),
    ("DP-Muon", "DP-Adam", "rouge_l"),
)  # better, than, in what: what 000 prints for E2E
STANDS_ON = (
    "All releases of a step are accounted jointly, by Poisson lots, zero-out; a private "
    "example is one pair of a table and a sentence, so a table with several sentences is several "
    "examples. DP-SGD and DP-Adam clip the whole gradient, the Muon methods each matrix and, as "
    "one block, all that is left, as in 000. Head and embedding are one parameter, which 000 "
    "keeps as two. Step sizes were chosen without accounting for the "
    "choice. BLEU is sacrebleu's with effective order, ROUGE-L rouge-score's F1 with stems, of the "
    "nearest reference."
)
MADE_UP = (
    " The text is made up: a small grammar writes tables and sentences in the corpus's format, and "
    "the decoder begins from public text of the same kind about something else. Numbers on it say "
    "nothing about the real corpora."
)


def report(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """The report's section, with published numbers, and a warning if the text is synthetic."""
    published = about["settings"]["published"].get(about["data"], {})
    stands_on = STANDS_ON + (MADE_UP if about["made_up"] else "")
    whole = replace(study, numbers=partial(numbers, published), stands_on=stands_on)
    found = assemble(whole, folder, about)
    return replace(found, pictures=[replace(one, read=in_words) for one in found.pictures])


def claims(ends: Columns, curves: Columns) -> Sequence[Claim]:
    """What was spent, by the ledger of every run, and 000's orders."""
    spent, target = ends["epsilon"], ends["target"]
    within = Claim(
        "Every run spends at most its ε (zero-out, Poisson lots), all releases of a step accounted "
        "jointly.",
        Effect.exact("spent over asked for", spent / target, unit="ratio"),
        AT_MOST_ONE,
        f"{spent.min():.4f} to {spent.max():.4f} of {number(float(target.max()))}, "
        f"δ = {number(ends['delta'].max(), 3)}, up to {ends['blocks'].max():.0f} blocks a step",
    )
    return [within, *(ordered(ends, *pair) for pair in PAIRS)]


def ordered(ends: Columns, better: str, than: str, measure: str) -> Claim:
    """The mean over seeds is better, beyond the interval of the differences seed by seed."""
    sign = 1 if measure == "nll" else -1
    one, other = (ends[measure][ends["method"] == name] for name in (better, than))
    word = "lower" if sign > 0 else "higher"
    sentence = f"{better} has a {word} {MEASURES[measure]} than {than}."
    if not len(one) or len(one) != len(other):
        return unknown(sentence, "one of them was not run")
    if not np.isfinite([one.mean(), other.mean()]).all():
        lost = np.isnan(one).any()
        return counted(sentence, 0.0 if lost else np.nan, "seeds", "a run diverged")
    wins = int((sign * one < sign * other).sum())
    detail = f"{number(one.mean())} against {number(other.mean())}; in {wins} of {len(one)} seeds"
    away, half = one.mean() - other.mean(), paired(list(zip(one, other, strict=True)))[1]
    name = f"{MEASURES[measure]}, {better} − {than}"
    found = Effect.around(name, away, half, unit=UNITS[measure])
    return Claim(sentence, found, NEGATIVE if sign > 0 else POSITIVE, detail)


def numbers(published: Mapping[str, Mapping[str, float]], ends: Columns, curves: Columns) -> Rows:
    """Means over seeds with standard deviations, and below each what 000 prints."""
    lines: Rows = [("method", "noise σ", "blocks", *MEASURES.values())]
    for name in distinct(ends, "method"):
        mine = ends["method"] == name
        about = (number(float(ends[key][mine].mean())) for key in ("noise", "blocks"))
        lines.append((name, *about, *(spread(ends[key][mine]) for key in MEASURES)))
        if held := published.get(name):
            lines.append(("  000, GPT-2", "", "", *(number(held.get(key)) for key in MEASURES)))
    return lines


# How it is drawn.


@styled
def learning(ends: Columns, rows: Columns, narrow: bool = False) -> Figure:
    """Held-out loss by step, from curves.csv: means over seeds, least and largest as a band."""
    figure, (axes,) = canvas(1, narrow, 3.0)
    methods = distinct(rows, "method")
    for name, (colour, marker) in zip(methods, SERIES, strict=False):
        mine = rows["method"] == name
        steps = np.unique(rows["step"][mine])
        runs = [rows["loss"][mine & (rows["step"] == step)] for step in steps]
        low, mean, high = np.array([(v.min(), v.mean(), v.max()) for v in runs]).T
        axes.plot(steps, mean, color=colour, lw=1.4, marker=marker, ms=4, mfc="none", label=name)
        if (high > low).any():
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
    axes.set_xlabel("private step")
    axes.set_ylabel("held-out NLL of a target token")
    legend_below(figure, axes, 2 if narrow else len(methods))
    return figure


def in_words(figure: Figure) -> str:
    """What a line with a band is, where there are bands."""
    (axes,) = figure.axes
    said = "A line is the mean over seeds, its band their least and largest."
    return said * bool(axes.collections)


STUDY = Study(
    "dp-text", Settings, cells, claims, partial(numbers, {}), STANDS_ON, {"dp-text": learning},
    tables=("ends", "curves"), report=report,
    summary=lambda records: {"made_up": any(record["made_up"] for record in records)},
)  # fmt: skip
