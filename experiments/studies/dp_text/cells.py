"""Study `dp-text`: private fine-tuning of a decoder on tables and sentences (000, section 5).

A cell is a seed: one decoder is trained on public text, and every method goes on from it under the
same joint epsilon. Each training is a run directory, which resumes and replays like any other. The
corpus is in [base.data] folder; where that is empty, both texts are made up (`make-text`), and the
public one has other names and wordings than the private one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural
from fedmuon.core.errors import NonFinite
from fedmuon.core.tables import Scalar, Table
from fedmuon.data.made_text import make_text
from fedmuon.data.table_text import corpus, prompts
from fedmuon.data.text import tokens_of
from fedmuon.data.weights import read_weights
from fedmuon.experiments.studies.dp_text.metrics import bleu, rouge_l
from fedmuon.experiments.suites.contents import Asked, cell, merged, require_read
from fedmuon.federated import build
from fedmuon.federated.rounds import run_rounds
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import Run, drive, prepare
from fedmuon.tasks.adapters import folded
from fedmuon.tasks.base import Params
from fedmuon.tasks.decoder import LEAST, generate
from fedmuon.tasks.losses import IGNORED
from fedmuon.tasks.networks import NetworkTask

Nested = dict[str, dict[str, Scalar]]
SHOWN = 10  # written sentences kept for a reader


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


def cells(settings: Settings, asked: Asked) -> Sequence["Tuned"]:
    """A cell for each seed."""
    named = {"data": {"name": asked.data}}
    configs = [
        cell(settings.base, own, named) for own in (settings.public, *settings.variants.values())
    ]
    require_read("--set", asked.changes, configs)
    for (name, own), config in zip(settings.variants.items(), configs[1:], strict=True):
        require_read(f"[variants.{name!r}]", own, [config])
    return [Tuned(settings, asked.data, seed) for seed in settings.seeds]


@dataclass(frozen=True)
class Tuned:
    """All methods with one seed, from one public decoder."""

    settings: Settings
    form: str
    seed: int
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.form}-seed{self.seed}"

    @property
    def size(self) -> int:
        """Trainings."""
        return 1 + len(self.settings.variants)

    def compute(self) -> Record:
        """Rows `ends`, `curves` and `written` of every method."""
        base, folder = self.settings.base, self.folder
        assert folder is not None
        weights = str(base.get("task", {}).get("weights", "")) or self._public_weights(folder)
        given = str(base.get("data", {}).get("folder", ""))
        text = Path(given or self._made_up(folder, "restaurants", self.settings.made_tables))
        record: Record = {"ends": [], "curves": [], "written": []}
        for place, (method, own) in enumerate(self.settings.variants.items()):
            config = self._config(own, text, weights)
            tables = tuned(config, folder / f"method-{place}", self.settings)
            head = {"method": method, "seed": self.seed}
            for name, rows in tables.items():
                record[name] += [head | row for row in rows]
        return record | {"made_up": not given}

    def _made_up(self, folder: Path, domain: str, count: int) -> Path:
        """Text of that domain, made up once."""
        make_text(folder / domain, self.form, count, domain, self.seed)
        return folder / domain

    def _public_weights(self, folder: Path) -> str:
        """A decoder trained on public text, without privacy."""
        text = self._made_up(folder, "lodgings", self.settings.public_tables)
        drive(
            prepare(self._config(self.settings.public, text, ""), folder / "public", True),
            run_rounds,
        )
        return str(folder / "public" / "model.safetensors")

    def _config(self, own: Nested, text: Path, weights: str) -> Config:
        """The settings of one training, on all pairs that its text has."""
        setting = merged(self.settings.base, own)
        data = {"name": self.form, "folder": str(text)}
        last = {"data": data, "task": {"weights": weights}, "federation": {"seed": self.seed}}
        source = build.source(cell(setting, last))
        held = source.official_test or len(source.labels) * 4 // 5
        asked = setting.get("data", {})
        sizes = {
            "train": min(int(asked.get("train", held)), held),
            "test": min(int(asked.get("test", len(source.labels))), len(source.labels) - held),
        }
        return build.resolve(cell(setting, last, {"data": sizes}))


def tuned(config: Config, out: Path, settings: Settings) -> Mapping[str, list[Record]]:
    """One method's run, and what its decoder then says of held-out tables."""
    run = prepare(config, out, resume=True)
    try:
        summary = drive(run, run_rounds)
    except NonFinite as error:
        return {"ends": [_end(run, {}, {}, str(error))], "curves": _curve(run), "written": []}
    stored = read_weights(out / "model.safetensors")
    task = run.experiment.task
    params = {name: torch.from_numpy(v).to(task.device, task.dtype) for name, v in stored.items()}
    scores, written = _written(run, params, settings)
    end = _end(run, {"nll": nll(run, params), **scores}, summary["privacy"], "")
    return {"ends": [end], "curves": _curve(run), "written": written}


def nll(run: Run, params: Params) -> float:
    """The mean negative log-likelihood of a held-out target token."""
    task, held = run.experiment.task, run.experiment.shards.held_out
    assert isinstance(task, NetworkTask)
    losses, _ = task.losses({name: value[None] for name, value in params.items()}, held)
    counts: Tensor = (task.targets(held.inputs, held.labels) != IGNORED).sum(1)
    return float((losses[0].double() * counts).sum() / counts.sum())


def _written(run: Run, params: Params, settings: Settings) -> tuple[Record, list[Record]]:
    """BLEU and ROUGE-L of sentences about held-out tables, and the first of them."""
    table, tokens = run.config.data, tokens_of(run.config.data.tokenizer)
    parts = corpus(table.name, table.folder)
    held = prompts(parts.get("test") or parts.get("dev") or parts["train"])
    asked = {prompt: tokens.prompt(prompt) for prompt in held}
    short = [prompt for prompt, row in asked.items() if len(row) + LEAST <= table.context]
    short = short[: settings.prompts]
    form = build.form_of(run.config, run.data.shape, run.data.vocabulary)
    task = run.experiment.task
    assert isinstance(task, NetworkTask)
    whole = folded(task.module, params)
    rows = generate(form, whole, [asked[prompt] for prompt in short], tokens.end, settings.beams)
    sentences, wanted = [tokens.decode(row) for row in rows], [held[prompt] for prompt in short]
    shown = [
        {"table": prompt, "written": _printable(one), "reference": references[0]}
        for prompt, one, references in zip(short, sentences, wanted, strict=True)
    ]
    scores = {"bleu": bleu(sentences, wanted), "rouge_l": rouge_l(sentences, wanted)}
    return scores, shown[:SHOWN]


def _printable(text: str) -> str:
    """The same on one line: an untrained decoder writes control characters, too."""
    return "".join(sign if sign.isprintable() else "\N{MIDDLE DOT}" for sign in text)


def _end(run: Run, measured: Record, privacy: Mapping[str, Any], note: str) -> Record:
    unknown = dict.fromkeys(("nll", "bleu", "rouge_l"), math.nan)
    spent = {name: privacy.get(name, math.nan) for name in ("epsilon", "delta", "noise", "blocks")}
    config = run.config
    spent |= {name: privacy.get(name, "") for name in ("adjacency", "sampling")}
    steps = config.federation.rounds * config.local.steps
    head = {"recipe": config.local.recipe, "target": config.privacy.epsilon, "steps": steps,
            "pairs": config.data.train, "lot": config.privacy.lot}  # fmt: skip
    return {**head, **unknown, **measured, **spent, "note": note}


def _curve(run: Run) -> list[Record]:
    """Rows of curves.csv: the held-out loss by step."""
    steps = run.config.local.steps
    return [
        {"step": record["round"] * steps, "loss": record["test_loss"]}
        for record in run.directory.records()
        if "test_loss" in record
    ]


def summary(records: list[Record]) -> Record:
    """Whether the text is made up."""
    return {"made_up": any(record["made_up"] for record in records)}
