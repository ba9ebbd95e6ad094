"""Study `dp-text`: private fine-tuning of a decoder on tables and sentences.

The papers are DP-Muon (section 5) and DiSK (Tables 4 and 5). A cell is one seed. A decoder is first
trained on public text. Then every method fine-tunes this decoder on private text, with a given
joint epsilon. Each training has a run folder, which can be resumed and replayed. The key `folder`
of [base.data] names the folder of the corpus. If this key is empty, both texts are synthetic
(`make-text`), with different names and wordings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from fedmuon.analysis.report.findings import Findings, Rows, number, spread
from fedmuon.analysis.report.style import canvas, legend_below, shade, styled
from fedmuon.analysis.report.tables import Columns, read_table
from fedmuon.analysis.report.tuning import Tuned, objection
from fedmuon.analysis.report.verdicts import (
    AT_MOST_ONE,
    NEGATIVE,
    POSITIVE,
    Claim,
    Effect,
    counted,
    mean_with_interval,
    paired,
    unknown,
)
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural
from fedmuon.core.arrays import tensor_bytes
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.files import write_bytes
from fedmuon.core.tables import Scalar, Table
from fedmuon.data.text import Pair, Tokens, corpus, make_text, pair_windows, prompts, tokens_of
from fedmuon.experiments.studies import tuned
from fedmuon.experiments.studies.study import Study, assemble, distinct
from fedmuon.experiments.studies.training_findings import LINES, MOST
from fedmuon.experiments.suites.contents import SuiteRequest, cell, merged, require_read, shipped
from fedmuon.experiments.text_scores import SCORES
from fedmuon.experiments.text_scores import SHOWN as SCORES_SHOWN
from fedmuon.federated.build import decoder_form, resolve
from fedmuon.federated.client_data import read_source
from fedmuon.federated.rounds import run_rounds
from fedmuon.runs.callbacks import Callback
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import Run, prepare
from fedmuon.tasks.base import IGNORED, Batch, Params
from fedmuon.tasks.decoder import LEAST, fold_adapters, generate, read_weights
from fedmuon.tasks.networks import NetworkTask

Nested = dict[str, dict[str, Scalar]]
SHOWN = 10  # number of generated sentences that are stored as examples


class Order(Table):
    """A claim: the method `better` is better than the method `than` in a measure."""

    better: str
    than: str
    measure: str


NEWER = ("choose", "ban-newlines", "needs-files", "paper", "scores", "orders", "search")


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `public` overrides `base` for training the public decoder.

    By default, the final model writes the sentences. If `choose` is set, another rule applies: the
    model with the highest BLEU, or with the lowest NLL, on the validation part writes them. With
    `choose`, the reported NLL is the lowest NLL on the validation part, as in DP-Muon, Appendix D.

    `search` lists values of keys of [local] for each method. For every seed, each combination of
    the values is trained. The study uses the run with the lowest NLL on the validation part.
    """

    seeds: Annotated[list[Natural], Field(min_length=1)]
    base: Nested
    public: Nested
    variants: Annotated[dict[str, Nested], Field(min_length=1)]
    made_tables: Count
    public_tables: Count
    prompts: Count  # number of held-out tables about which sentences are generated
    beams: Count
    published: dict[str, dict[str, dict[str, float]]]  # format -> method -> published values
    choose: Literal["last", "bleu", "nll"] = "last"
    ban_newlines: bool = False
    needs_files: bool = False  # whether the user must provide the corpus and the weights
    paper: Literal["000", "003"] = "000"
    scores: list[str] = Field(["bleu", "rouge_l"], min_length=1)  # names of `SCORES`
    orders: list[Order] = Field(default_factory=lambda: [Order(**one) for one in ORDERS])
    search: dict[str, dict[str, Annotated[list[float], Field(min_length=1)]]] = Field(
        default_factory=dict
    )

    def candidates(self, method: str) -> dict[str, Nested]:
        """Return all combinations of a method's searched values.

        Each combination has a label and its settings.
        """
        variant, values = self.variants[method], self.search.get(method, {})
        points = [dict(zip(values, point, strict=True)) for point in product(*values.values())]
        return {
            ", ".join(f"{key} {value:g}" for key, value in point.items()): merged(
                variant, {"local": point}
            )
            for point in points
        }

    @model_serializer(mode="wrap")
    def _without_newer(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the settings without newer keys at their defaults.

        Without these keys, the settings equal those of older folders, which can then be resumed.
        """
        fields, content = type(self).model_fields, write(self)
        for name, field in fields.items():
            if field.alias in NEWER and getattr(self, name) == field.get_default(
                call_default_factory=True
            ):
                del content[field.alias]
        return content


def cells(settings: Settings, request: SuiteRequest) -> Sequence["TextCell"]:
    """Return a cell for each seed."""
    for name in {*settings.scores, *(order.measure for order in settings.orders)} - {*MEASURES}:
        raise InputError(f"The score {name!r} is not known. Use one of {', '.join(MEASURES)}.")
    data = {"data": {"name": request.data}}
    configs = [
        cell(settings.base, tables, data)
        for tables in (settings.public, *settings.variants.values())
    ]
    require_read("--set", request.changes, configs)
    for (name, variant), config in zip(settings.variants.items(), configs[1:], strict=True):
        require_read(f"[variants.{name!r}]", variant, [config])
    if not settings.search.keys() <= settings.variants.keys():
        raise InputError(
            f"[search] contains {', '.join(sorted({*settings.search} - {*settings.variants}))}, "
            "but this suite does not train such a method. Use names from this list: "
            f"{', '.join(settings.variants)}."
        )
    if settings.search and settings.choose == "last":
        raise InputError(
            '[search] needs the scores of models on the validation part, but choose = "last" '
            'takes the last model without looking at its score. Set choose = "nll" or choose = '
            '"bleu".'
        )
    for method, searched in settings.search.items():
        tried = [
            cell(settings.base, candidate, data)
            for candidate in settings.candidates(method).values()
        ]
        first = {"local": {key: values[0] for key, values in searched.items()}}
        require_read(f"[search.{method!r}]", first, tried)
    trainings = 1 + sum(len(settings.candidates(method)) for method in settings.variants)
    return [
        TextCell(f"{request.data}-seed{seed}", trainings, settings, request.data, seed)
        for seed in settings.seeds
    ]


# Measurements


@dataclass(frozen=True)
class TextCell:
    """All methods with one seed and one public decoder. `size` is the number of training runs."""

    name: str  # name of the folder
    size: int
    settings: Settings
    form: str
    seed: int
    folder: Path | None = None

    def compute(self) -> Record:
        """Train all methods. Return the tables `ends`, `curves`, `written` and `searched`."""
        base, folder = self.settings.base, self.folder
        assert folder is not None
        weights = str(base.get("task", {}).get("weights", ""))
        data_folder = str(base.get("data", {}).get("folder", ""))
        if self.settings.needs_files and not (data_folder and weights):
            raise InputError(
                "This suite needs the real corpus and stored weights, and it downloads nothing. "
                "Pass --set data.folder=..., --set data.tokenizer=... and --set task.weights=..., "
                "or use --scale small for synthetic text."
            )
        text = Path(
            data_folder or self._make_text(folder, "restaurants", self.settings.made_tables)
        )
        if self.settings.choose != "last" and not {"dev", "test"} <= {*corpus(self.form, text)}:
            raise InputError(
                f"{text} must have a dev part, which chooses the model, and a test part, which "
                'scores the model. Add the missing part, or set choose = "last" in the suite\'s '
                "file."
            )
        if not weights:  # train a decoder on public text, without privacy
            public = self._make_text(folder, "lodgings", self.settings.public_tables)
            config = self._config(self.settings.public, public, "")
            train(prepare(config, folder / "public", True), run_rounds)
            weights = str(folder / "public" / "model.safetensors")
        record: Record = {"ends": [], "curves": [], "written": []}
        for place, method in enumerate(self.settings.variants):
            tried = {
                label: self._config(candidate, text, weights)
                for label, candidate in self.settings.candidates(method).items()
            }
            places = [folder / f"method-{place}"]
            if method in self.settings.search:
                places = [folder / f"method-{place}-{index}" for index in range(len(tried))]
            best, searched = 0, []
            if len(tried) > 1:
                best, searched = search(tried, places, self.settings)
            tables = fine_tune([*tried.values()][best], places[best], self.settings)
            head = {"method": method, "seed": self.seed}
            for name, rows in {**tables, **({"searched": searched} if searched else {})}.items():
                record.setdefault(name, []).extend(head | row for row in rows)
        return record | {"made_up": not data_folder}

    def _make_text(self, folder: Path, domain: str, count: int) -> Path:
        """Write synthetic text of a domain if the file does not exist yet, and return its path."""
        make_text(folder / domain, self.form, count, domain, self.seed)
        return folder / domain

    def _config(self, tables: Nested, text: Path, weights: str) -> Config:
        """Return the config of one training run on all pairs in a text folder."""
        setting = merged(self.settings.base, tables)
        data = {"name": self.form, "folder": str(text)}
        last = {"data": data, "task": {"weights": weights}, "federation": {"seed": self.seed}}
        source = read_source(cell(setting, last))
        train_size = source.official_test or len(source.labels) * 4 // 5
        sizes = setting.get("data", {})
        limited = {
            "train": min(int(sizes.get("train", train_size)), train_size),
            "test": min(
                int(sizes.get("test", len(source.labels))), len(source.labels) - train_size
            ),
        }
        return resolve(cell(setting, last, {"data": limited}))


def search(
    tried: Mapping[str, Config], places: Sequence[Path], settings: Settings
) -> tuple[int, list[Record]]:
    """Train with each setting, and return the index of the best setting and a row per setting.

    The best setting has the model with the lowest NLL on the validation part, over all evaluated
    rounds. The DP-Muon paper does not say how its settings were chosen.
    """
    lowest: list[float] = []
    for config, out in zip(tried.values(), places, strict=True):
        models = Models(out.with_name(f"{out.name}-models"), settings.choose)
        run = prepare(config, out, resume=True, callbacks=[models])
        try:
            train(run, run_rounds)
            losses = models.losses(run)
            lowest.append(min(filter(math.isfinite, losses), default=math.inf))
        except NonFinite:
            lowest.append(math.inf)
    best = lowest.index(min(lowest))
    rows = [
        {"setting": label, "nll": nll, "chosen": place == best}
        for place, (label, nll) in enumerate(zip(tried, lowest, strict=True))
    ]
    return best, rows


def fine_tune(config: Config, out: Path, settings: Settings) -> Mapping[str, list[Record]]:
    """Train one method.

    Return two tables: the measures, and sentences about held-out tables of data.
    """
    models = Models(out.with_name(f"{out.name}-models"), settings.choose)
    run = prepare(config, out, resume=True, callbacks=[models])
    measures = dict.fromkeys(("nll", *settings.scores), math.nan)
    written: list[Record] = []
    privacy, note = {}, ""
    try:
        privacy = train(run, run_rounds)["privacy"]
    except NonFinite as error:
        note = str(error)
    else:
        if settings.choose == "last":
            params, batch = _read(run, out / "model.safetensors"), run.experiment.shards.held_out
            measures["nll"] = _nll(run, params, batch)
        else:
            params, measures["nll"] = models.chosen(run, settings)
        parts = corpus(config.data.name, config.data.folder)
        held_out = parts.get("test") or parts.get("dev") or parts["train"]
        sentences, references, written = _write_sentences(run, params, settings, held_out)
        measures |= {name: SCORES[name](sentences, references) for name in settings.scores}
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


def _read(run: Run, file: Path) -> Params:
    task = run.experiment.task
    stored = read_weights(file)
    return {name: torch.from_numpy(v).to(task.device, task.dtype) for name, v in stored.items()}


def _nll(run: Run, params: Params, batch: Batch) -> float:
    """Return the mean negative log-likelihood per target token."""
    task = run.experiment.task
    assert isinstance(task, NetworkTask)
    losses, _ = task.losses({name: value[None] for name, value in params.items()}, batch)
    counts: Tensor = (task.targets(batch.inputs, batch.labels) != IGNORED).sum(1)
    return float((losses[0].double() * counts).sum() / counts.sum())


@dataclass
class Models(Callback):
    """The models after evaluated rounds.

    The models are stored in a folder, and one of them is chosen at the end.
    """

    folder: Path
    choose: str

    def on_round(self, record: Mapping[str, Any], state: Any) -> None:
        """Save the model of an evaluated round.

        Saving costs no privacy, because the run releases this model anyway.
        """
        if self.choose != "last" and "train_loss" in record:
            self.folder.mkdir(exist_ok=True)
            write_bytes(self._file(record["round"]), tensor_bytes(state.params))

    def _file(self, number: int) -> Path:
        return self.folder / f"round-{number:07}.safetensors"

    def chosen(self, run: Run, settings: Settings) -> tuple[Params, float]:
        """Return the best model, and the lowest NLL on the validation part.

        The best model has the highest BLEU or the lowest NLL on the validation part.
        """
        losses = lows = self.losses(run)
        if self.choose == "bleu":
            pairs = corpus(run.config.data.name, run.config.data.folder)["dev"]
            lows = []
            for file in self._files():
                sentences, references, _ = _write_sentences(run, _read(run, file), settings, pairs)
                lows.append(-SCORES["bleu"](sentences, references))
        _, _, best = min(zip(lows, losses, self._files(), strict=True))
        return _read(run, best), min(losses)

    def losses(self, run: Run) -> list[float]:
        """Return the negative log-likelihood of every stored model on the validation part."""
        data, task = run.config.data, run.experiment.task
        pairs = corpus(data.name, data.folder)["dev"]
        rows, _ = pair_windows(pairs, tokens_of(data.tokenizer), data.context, data.pad_token)
        inputs = torch.from_numpy(rows.astype(np.float64)).to(task.device, task.dtype)
        batch = Batch(inputs, inputs.new_zeros(len(rows), dtype=torch.int64))
        evaluated = [
            record["round"] for record in run.directory.records() if "train_loss" in record
        ]
        if missing := [r for r in evaluated if not self._file(r).exists()]:
            raise InputError(
                f"{self.folder} has no stored model of round {missing[0]}, so the suite cannot "
                "choose the best model. Remove the suite's folder and run the suite again."
            )
        return [_nll(run, _read(run, file), batch) for file in self._files()]

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.safetensors"))


def _write_sentences(
    run: Run, params: Params, settings: Settings, pairs: Sequence[Pair]
) -> tuple[list[str], list[list[str]], list[Record]]:
    """Return sentences about the first tables of the pairs, their references, and some examples."""
    table, tokens = run.config.data, tokens_of(run.config.data.tokenizer)
    references_of = prompts(pairs)
    encoded = {prompt: tokens.prompt(prompt) for prompt in references_of}
    short = [prompt for prompt, row in encoded.items() if len(row) + LEAST <= table.context]
    short = short[: settings.prompts]
    form = decoder_form(run.config, run.data.shape, run.data.vocabulary)
    task = run.experiment.task
    assert isinstance(task, NetworkTask)
    folded = fold_adapters(task.module, params)
    inputs, banned = [encoded[prompt] for prompt in short], _banned(tokens, settings)
    rows = generate(form, folded, inputs, tokens.end, settings.beams, banned)
    sentences, all_references = (
        [tokens.decode(row) for row in rows],
        [references_of[prompt] for prompt in short],
    )
    examples = []
    for prompt, sentence, references in zip(short, sentences, all_references, strict=True):
        # An untrained decoder can also generate control characters.
        line = "".join(char if char.isprintable() else "\N{MIDDLE DOT}" for char in sentence)
        examples.append({"table": prompt, "written": line, "reference": references[0]})
    return sentences, all_references, examples[:SHOWN]


def _banned(tokens: Tokens, settings: Settings) -> Sequence[int]:
    return tokens.newlines if settings.ban_newlines else ()


# Claims

MEASURES = {"nll": ("NLL per target token", "nats"), **SCORES_SHOWN}  # measure -> name, unit
ORDERS: tuple[dict[str, str], ...] = (  # the order that DP-Muon reports for E2E
    {"better": "DP-Adam", "than": "DP-SGD", "measure": "nll"},
    {"better": "DP-Muon", "than": "DP-Adam", "measure": "nll"},
    {"better": "DP-MuonBC", "than": "DP-Muon", "measure": "nll"},
    {"better": "DP-Muon", "than": "DP-Adam", "measure": "bleu"},
    {"better": "DP-Muon", "than": "DP-Adam", "measure": "rouge_l"},
    {"better": "DP-MuonBC", "than": "DP-Muon", "measure": "bleu"},
    {"better": "DP-Muon", "than": "DP-MuonBC", "measure": "rouge_l"},
)
THROUGHOUT = tuple(product(("DP-Muon", "DP-MuonBC"), ("DP-SGD", "DP-Adam")))  # DP-Muon, Figure 1
PAPERS = {"000": "DP-Muon", "003": "DiSK"}  # short names of the papers
JOINT = (
    "All releases of a step are accounted for jointly, with Poisson lots (zero-out). A private "
    "example is one pair of a table and a sentence. A table with several sentences is several "
    "examples. "
)
CHOICE = "ε does not cover the choice of the step sizes. "
SCORED = (
    "BLEU is that of sacrebleu with effective order. ROUGE-L is the F1 score of rouge-score with "
    "stemming, for the nearest reference."
)
BLOCKS = (
    "As in the DP-Muon paper, DP-SGD and DP-Adam clip the whole gradient. The Muon methods clip "
    "each matrix separately, and all other parameters as one block. "
)
TIED = (
    "The output head and the embedding are one parameter in this suite, but two parameters in "
    "the DP-Muon paper. "
)
STANDS_ON = JOINT + BLOCKS + TIED + CHOICE + SCORED
CHOSEN = (
    " The sentences come from the evaluated model with the best {} on the validation part. The "
    "NLL is the lowest NLL on the validation part."
)
SEARCHED = (
    " For every seed, a separate search chose the settings with the lowest NLL on the validation "
    "part (see searched.csv)."
)
MORE_SCORES = (
    " METEOR is that of nltk, with words and stems but without synonyms. NIST is that of "
    "mteval-v13a, and CIDEr is that of pycocoevalcap. The DiSK paper uses another version of "
    "METEOR."
)
MADE_UP = (
    " The text is synthetic: a small grammar writes tables and sentences in the format of the "
    "corpus. The decoder is first trained on public text of the same kind about another subject. "
    "Results on synthetic text say nothing about the real corpora."
)


def report(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the report's section with published numbers, and a warning for synthetic text."""
    settings = Settings.model_validate(about["settings"])
    published = settings.published.get(about["data"], {})
    configured = replace(
        study,
        claims=partial(
            claims,
            orders=settings.orders,
            curves_of=THROUGHOUT if settings.paper == "000" else (),
            tunings=tunings(settings, folder, str(about["suite"])),
        ),
        numbers=partial(numbers, published, paper=settings.paper),
        stands_on=_stands_on(settings) + (MADE_UP if about["made_up"] else ""),
    )
    findings = assemble(configured, folder, about)
    return replace(
        findings, pictures=[replace(picture, read=in_words) for picture in findings.pictures]
    )


def _stands_on(settings: Settings) -> str:
    tied = settings.base.get("task", {}).get("head", "tied") == "tied"
    text = JOINT
    if settings.paper == "000":
        text += BLOCKS + TIED * tied + CHOICE
    text += SCORED
    if settings.search:
        text += SEARCHED
    if settings.choose != "last":
        text += CHOSEN.format(MEASURES[settings.choose][0])
    return text + MORE_SCORES * ("meteor" in settings.scores)


def tunings(settings: Settings, folder: Path, suite: str) -> dict[str, list[Tuned]] | None:
    """Return the tunings of each method, or None if the step sizes are those of a paper.

    A suite with `search` tunes at every seed. Otherwise the tuned values are stored beside the
    suite's file.
    """
    if settings.search:
        if not (file := folder / "searched.csv").exists():  # each method had a single setting
            return {}
        rows = read_table(file, ("seed", "nll"), ("method", "setting"))
        return {
            method: [_tuned_by_search(method, rows, seed) for seed in np.unique(rows["seed"])]
            for method in distinct(rows, "method")
        }
    if settings.paper != "000" or settings.needs_files:
        return None
    stored, by_method = tuned.stored(suite) if suite in shipped() else tuned.NOTHING, {}
    for record in stored.methods:
        tuning, table = Tuned.of(record, stored.about), settings.variants.get(record["method"], {})
        used = table.get("local", {}).get(tuning.key.removeprefix("local."))
        by_method[tuning.method] = [replace(tuning, fits=tuning.fits and used == tuning.best)]
    return by_method


def _tuned_by_search(method: str, rows: Columns, seed: float) -> Tuned:
    """Return the tuning of a method at one seed, with the best score of each step size."""
    mask = (rows["method"] == method) & (rows["seed"] == seed)
    best: dict[float, float] = {}
    for setting, nll in zip(rows["setting"][mask].tolist(), rows["nll"][mask], strict=True):
        words = dict(part.split() for part in setting.split(", ") if part)
        lr = float(words.get("lr", "nan"))
        best[lr] = min(best.get(lr, math.inf), float(nll))
    return Tuned(method, "local.lr", [*best], [*best.values()])


def claims(
    ends: Columns,
    curves: Columns,
    orders: Sequence[Order] | None = None,
    curves_of: Sequence[tuple[str, str]] = (),
    tunings: Mapping[str, Sequence[Tuned]] | None = None,
) -> Sequence[Claim]:
    """Return the claims of the study.

    The claims say that each run stays within its ε, and that the methods have the order of the
    paper. If `curves_of` contains pairs of methods, one more claim says that the first method of
    each pair is below the second during all of training. If `tunings` is not None, comparisons of
    methods that were not tuned equally well are inconclusive.
    """
    if orders is None:
        orders = [Order(**order) for order in ORDERS]
    spent, target = ends["epsilon"], ends["target"]
    targets = ", ".join(number(float(value)) for value in np.unique(target))
    within = Claim(
        "Every run spends at most its target ε (zero-out, Poisson lots), if all releases of a "
        "step are accounted for jointly.",
        Effect.exact("spent ε / target ε", spent / target, unit="ratio"),
        AT_MOST_ONE,
        f"ε = {spent.min():.4f} to {spent.max():.4f}, target {targets}; δ = "
        f"{number(ends['delta'].max(), 3)}; up to {ends['blocks'].max():.0f} blocks per step",
    )

    def judged(claim: Claim, *methods: str) -> Claim:
        return claim if tunings is None else replace(claim, untuned=objection(methods, tunings))

    return [
        within,
        *(
            judged(ordered(ends, order.better, order.than, order.measure), order.better, order.than)
            for order in orders
        ),
        *(
            [judged(throughout(curves, curves_of), *(name for pair in curves_of for name in pair))]
            if curves_of
            else []
        ),
    ]


def ordered(ends: Columns, better: str, than: str, measure: str) -> Claim:
    """Return the claim that the mean of `better` is better than the mean of `than`.

    Runs with the same seed are compared.
    """
    sign = 1 if measure == "nll" else -1
    scores, other = (ends[measure][ends["method"] == name] for name in (better, than))
    word, (title, unit) = "lower" if sign > 0 else "higher", MEASURES[measure]
    sentence = f"{better} has a {word} {title} than {than}."
    if not len(scores) or len(scores) != len(other):
        return unknown(sentence, "one of the two methods was not run")
    if not np.isfinite([scores.mean(), other.mean()]).all():
        diverged = np.isnan(scores).any()
        return counted(sentence, 0.0 if diverged else np.nan, "seeds", "a run diverged")
    wins = int((sign * scores < sign * other).sum())
    detail = (
        f"{number(scores.mean())} against {number(other.mean())}; in {wins} of {len(scores)} seeds"
    )
    diff, half = scores.mean() - other.mean(), paired(list(zip(scores, other, strict=True)))[1]
    name = f"{title}, {better} − {than}"
    effect = Effect.around(name, diff, half, unit=unit)
    return Claim(sentence, effect, NEGATIVE if sign > 0 else POSITIVE, detail)


def throughout(curves: Columns, pairs: Sequence[tuple[str, str]]) -> Claim:
    """Return the claim that methods are below others at every evaluated step.

    Runs with the same seed are compared.
    """
    first, second = (" and ".join(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    sentence = f"{first} have a lower NLL than {second} at every evaluated step."
    places, diffs, half = [], [], []
    for better, than in pairs:
        for step in np.unique(curves["step"]):
            losses, other = (
                curves["loss"][(curves["method"] == name) & (curves["step"] == step)]
                for name in (better, than)
            )
            if not len(losses) or len(losses) != len(other):
                return unknown(sentence, f"{better} or {than} has no loss at step {step:g}")
            value, reach = paired(list(zip(losses, other, strict=True)))
            diffs, half = [*diffs, value], [*half, reach]
            places.append(f"{better} − {than}, step {step:g}")
    effect = Effect.around("difference of NLL", diffs, half, places, unit="nats")
    lower = sum(value < 0 for value in diffs)
    return Claim(
        sentence, effect, NEGATIVE, f"the mean is lower in {lower} of {len(diffs)} comparisons"
    )


def numbers(
    published: Mapping[str, Mapping[str, float]], ends: Columns, curves: Columns, paper: str = "000"
) -> Rows:
    """Return the rows of the report's table.

    The rows contain means and standard deviations. The published values are in the rows below.
    """
    measured = [name for name in MEASURES if name in ends]
    lines: Rows = [("method", "noise σ", "blocks", *(MEASURES[name][0] for name in measured))]
    for name in distinct(ends, "method"):
        mask = ends["method"] == name
        means = (number(float(ends[key][mask].mean())) for key in ("noise", "blocks"))
        lines.append((name, *means, *(spread(ends[key][mask]) for key in measured)))
        if gpt2 := published.get(name):
            lines.append(
                (f"  {PAPERS[paper]}, GPT-2", "", "", *(number(gpt2.get(key)) for key in measured))
            )
    return lines


# Figures


@styled
def learning(ends: Columns, rows: Columns, narrow: bool = False) -> Figure:
    """Draw the held-out loss by step, with one panel for each target ε.

    Lines are means over seeds, and bands are their 95% intervals. A method has the same colour in
    all panels.
    """
    targets = np.unique(ends["target"])
    figure, panels = canvas(len(targets), narrow, 3.0)
    looks: dict[str, tuple[str, str]] = {}  # by the name of a method without its ε
    for axes, target in zip(panels, targets, strict=True):
        at_target = ends["method"][ends["target"] == target]
        methods = [name for name in distinct(rows, "method") if name in at_target]
        for method in methods:
            name = method.removesuffix(f", ε = {target:g}")
            colour, marker = looks.setdefault(name, LINES[len(looks) % len(LINES)])
            mask = rows["method"] == method
            steps = np.unique(rows["step"][mask])
            runs = [rows["loss"][mask & (rows["step"] == step)] for step in steps]
            mean, low, high = np.array([mean_with_interval(losses) for losses in runs]).T
            axes.plot(steps, mean, color=colour, lw=1.4, marker=marker, ms=4, mfc="none",
                      label=name)  # fmt: skip
            if (high > low).any():
                shade(axes, steps, low, high, colour, 0.15)
        axes.set_xlabel("private step")
        axes.set_title(f"ε = {target:g}" if len(targets) > 1 else "", loc="left")
    panels[0].set_ylabel("held-out NLL per target token")
    fullest = max(panels, key=lambda axes: len(axes.lines))
    legend_below(figure, fullest, 2 if narrow else min(len(looks), MOST))
    return figure


def in_words(figure: Figure) -> str:
    """Return a text that explains the lines and bands of the figure."""
    text = "A line is the mean over seeds. Its band is the 95% interval of the mean."
    return text * any(bool(axes.collections) for axes in figure.axes)


STUDY = Study(
    "dp-text", Settings, cells, claims, partial(numbers, {}), STANDS_ON, {"dp-text": learning},
    tables=("ends", "curves"), report=report,
    summary=lambda records: {"made_up": any(record["made_up"] for record in records)},
)  # fmt: skip
