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

from fedmuon.config import Config
from fedmuon.data.made_text import DOMAINS, make_text
from fedmuon.data.table_text import corpus, prompts
from fedmuon.data.tokens import tokens_of
from fedmuon.data.weights import read_weights
from fedmuon.drive import Run, drive, prepare
from fedmuon.errors import NonFinite
from fedmuon.experiments.studies.dp_text.metrics import bleu, rouge_l
from fedmuon.experiments.suites.contents import Asked, cell, merged, require_read
from fedmuon.federated import setup
from fedmuon.federated.simulate import rounds
from fedmuon.settings import Count, Natural
from fedmuon.storage import Record
from fedmuon.tables import Scalar, Table
from fedmuon.tasks.base import Params
from fedmuon.tasks.generation import LEAST, generate
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
        assert self.folder is not None
        weights = str(self.settings.base.get("task", {}).get("weights", "")) or self._begun()
        found: Record = {"ends": [], "curves": [], "written": []}
        for place, (method, own) in enumerate(self.settings.variants.items()):
            config = self._config(own, self._text("restaurants"), weights)
            told = tuned(config, self.folder / f"method-{place}", self.settings)
            head = {"method": method, "seed": self.seed}
            for name, rows in told.items():
                found[name] += [head | row for row in rows]
        return found | {"made_up": not self._given}

    @property
    def _given(self) -> str:
        """The corpus's folder, if there is one."""
        return str(self.settings.base.get("data", {}).get("folder", ""))

    def _text(self, domain: str) -> Path:
        """The corpus, or text of that domain, made up once."""
        if self._given and domain == "restaurants":
            return Path(self._given)
        assert self.folder is not None
        place = self.folder / domain
        count = self.settings.made_tables if domain == DOMAINS[0] else self.settings.public_tables
        make_text(place, self.form, count, domain, self.seed)
        return place

    def _begun(self) -> str:
        """Weights of a decoder trained on public text, without privacy."""
        assert self.folder is not None
        config = self._config(self.settings.public, self._text("lodgings"), "")
        run = prepare(config, self.folder / "public", resume=True)
        drive(run, rounds)
        return str(run.directory.path / "model.safetensors")

    def _config(self, own: Nested, text: Path, weights: str) -> Config:
        """The settings of one training, on all pairs that its text has."""
        setting = merged(self.settings.base, own)
        data = {"name": self.form, "folder": str(text)}
        last = {"data": data, "task": {"weights": weights}, "federation": {"seed": self.seed}}
        read = cell(setting, last)
        source = setup.source(read)
        held = source.official_test or len(source.labels) * 4 // 5
        asked = setting.get("data", {})
        sizes = {
            "train": min(int(asked.get("train", held)), held),
            "test": min(int(asked.get("test", len(source.labels))), len(source.labels) - held),
        }
        return setup.resolve(cell(setting, last, {"data": sizes}))


def tuned(config: Config, out: Path, settings: Settings) -> Mapping[str, list[Record]]:
    """One method's run, and what its decoder then says of held-out tables."""
    run = prepare(config, out, resume=True)
    try:
        summary = drive(run, rounds)
    except NonFinite as error:
        return {"ends": [_end(run, {}, {}, str(error))], "curves": _curve(run), "written": []}
    stored = read_weights(out / "model.safetensors")
    task = run.experiment.task
    params = {name: torch.from_numpy(v).to(task.device, task.dtype) for name, v in stored.items()}
    told, written = _written(run, params, settings)
    measured = {"nll": nll(run, params), **told}
    return {
        "ends": [_end(run, measured, summary["privacy"], "")],
        "curves": _curve(run),
        "written": written,
    }


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
    asked = {told: tokens.prompt(told) for told in held}
    short = [told for told, row in asked.items() if len(row) + LEAST <= table.context]
    short = short[: settings.prompts]
    form = setup.form_of(run.config, run.data.shape, run.data.vocabulary)
    rows = generate(form, params, [asked[told] for told in short], tokens.end, settings.beams)
    found, wanted = [tokens.decode(row) for row in rows], [held[told] for told in short]
    shown = [
        {"table": told, "written": _printable(one), "reference": references[0]}
        for told, one, references in zip(short, found, wanted, strict=True)
    ]
    return {"bleu": bleu(found, wanted), "rouge_l": rouge_l(found, wanted)}, shown[:SHOWN]


def _printable(text: str) -> str:
    """The same on one line: an untrained decoder writes control characters, too."""
    return "".join(sign if sign.isprintable() else "\N{MIDDLE DOT}" for sign in text)


def _end(run: Run, measured: Record, privacy: Mapping[str, Any], note: str) -> Record:
    """A row of ends.csv."""
    unknown = dict.fromkeys(("nll", "bleu", "rouge_l"), math.nan)
    spent = {name: privacy.get(name, math.nan) for name in ("epsilon", "delta", "noise", "blocks")}
    local = run.config.local
    steps = run.config.federation.rounds * local.steps
    told = {"recipe": local.recipe, "target": run.config.privacy.epsilon, "steps": steps,
            "pairs": run.config.data.train, "lot": run.config.privacy.lot}  # fmt: skip
    return {**told, **unknown, **measured, **spent, "note": note}


def _curve(run: Run) -> list[Record]:
    """Rows of curves.csv: the held-out loss by step."""
    steps = run.config.local.steps
    return [
        {"step": record["round"] * steps, "loss": record["test_loss"]}
        for record in run.directory.records()
        if "test_loss" in record
    ]


def tables(records: list[Record]) -> Mapping[str, list[Record]]:
    """ends.csv, curves.csv and written.csv."""
    return {
        name: [row for record in records for row in record[name]]
        for name in ("ends", "curves", "written")
    }


def summary(records: list[Record]) -> Record:
    """Whether the text is made up."""
    return {"made_up": any(record["made_up"] for record in records)}
