"""Losses per token of each client against a loop, and what runs write about them."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_models import END, save_model, save_tokenizer
from small_suites import save_language_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmuon.config.load import parse
from fedmuon.core.rng import Draw, generator
from fedmuon.data.pretrained import model_tokens
from fedmuon.data.unseen import UNSEEN
from fedmuon.experiments.inspect.page import of_run
from fedmuon.experiments.inspect.status import run_status
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_task, resolve
from fedmuon.federated.continuations import PROMPTS
from fedmuon.federated.text_losses import client_losses, left_out_samples
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.causal_lm import causal_lm, merged
from fedmuon.tasks.generation import continued
from fedmuon.tasks.networks import NetworkTask

LENGTH = 24
OWNERS = np.array([4, 1, 4, 4, 7, 1])


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp(request.param), request.param))


def trained(folder: Path) -> tuple[NetworkTask, Params]:
    """A task with adapters that are not 0."""
    task = causal_lm(str(folder), (LENGTH + 1,), END + 1, rank=2, alpha=6.0, dtype=torch.float64)
    rng = torch.Generator().manual_seed(1)
    first = task.initial(generator(0, Draw.INITIAL))
    return task, {
        name: value + 0.3 * torch.randn(value.shape, generator=rng).double()
        for name, value in first.items()
    }


def published(folder: Path, task: NetworkTask, params: Params) -> Any:
    """The model of transformers with the adapters merged into its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float64).eval()
    weights = merged(task, {name: value[0] for name, value in params.items()})
    model.load_state_dict(weights, strict=False)
    return model


def windows() -> Tensor:
    """Windows that predict different numbers of tokens: the first tokens are prompts."""
    rows = np.random.default_rng(2).integers(0, END, (len(OWNERS), LENGTH + 1))
    for k, prompt in enumerate((0, 20, 3, 0, 11, 5)):
        rows[k, :prompt] = -1 - rows[k, :prompt]
    return torch.from_numpy(rows)


@torch.no_grad()
def test_losses_of_clients_are_sums_over_their_tokens(folder: Path) -> None:
    task, params = trained(folder)
    model, sums = published(folder, task, params), dict[int, list[float]]()
    means = dict[int, list[float]]()
    for owner, window in zip(OWNERS.tolist(), windows(), strict=True):
        tokens = torch.where(window < 0, -1 - window, window)
        losses = cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="none")
        of_window = losses[window[1:] >= 0].tolist()
        sums.setdefault(owner, []).extend(of_window)
        means.setdefault(owner, []).append(float(np.mean(of_window)))
    samples = Batch(windows().double(), torch.zeros(len(OWNERS), dtype=torch.int64))
    found = client_losses(task, params, samples, OWNERS)
    by_hand = [float(np.mean(sums[owner])) for owner in (1, 4, 7)]
    assert found.clients.tolist() == [1, 4, 7] and found.text
    assert found.tokens.tolist() == [len(sums[owner]) for owner in (1, 4, 7)]
    assert found.losses == pytest.approx(by_hand, rel=1e-9)
    fields = found.fields("unseen")
    assert fields["unseen_loss"] == pytest.approx(np.mean(by_hand), rel=1e-9)
    assert fields["unseen_loss_worst_decile"] == pytest.approx(max(by_hand), rel=1e-9)
    assert fields["unseen_perplexity"] == pytest.approx(math.exp(np.mean(by_hand)), rel=1e-9)
    # Neither the mean over windows nor the mean over all tokens.
    assert abs(found.losses[0] - np.mean(means[1])) > 1e-3
    assert abs(found.loss - np.mean([x for values in sums.values() for x in values])) > 1e-3


@torch.no_grad()
def test_a_prompt_continues_as_transformers_continues_it(folder: Path) -> None:
    """Prompts of different lengths, together and alone; another model writes something else."""
    task, params = trained(folder)
    model, tokens = published(folder, task, params), model_tokens(str(folder))
    prompts = [tokens.encode(text) for text in ("In the", "A king", "O")]
    by_hand = []
    for prompt in prompts:
        text = torch.tensor([prompt])
        for _ in range(12):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
        by_hand.append(text[0, len(prompt) :].tolist())
    together = continued(task, params, prompts, 12)
    assert together == by_hand
    assert [continued(task, params, [prompt], 12)[0] for prompt in prompts] == by_hand
    first = task.initial(generator(0, Draw.INITIAL))
    assert continued(task, first, prompts, 12) != by_hand
    place = next(k for k in range(1, 12) if by_hand[0][k] not in by_hand[0][:k])
    ended = continued(task, params, prompts[:1], 12, end=by_hand[0][place])
    assert ended == [by_hand[0][:place]]


@torch.no_grad()
def test_a_long_text_moves_through_the_window(folder: Path) -> None:
    task, params = trained(folder)
    model, prompt = published(folder, task, params), [7] * (LENGTH - 2)
    text = [*prompt]
    for _ in range(8):
        text.append(int(model(torch.tensor([text[-LENGTH:]])).logits[0, -1].argmax()))
    assert continued(task, params, [prompt], 8) == [text[len(prompt) :]]


def test_a_run_writes_losses_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_language_model(tmp_path)
    config = parse({
        "task": {"name": "causal-lm", "weights": "tiny-model", "lora-rank": 2},
        "data": {"name": "text", "folder": "tiny-texts", "context": 12, "minimum": 1, "test": 10,
                 "unseen-clients": 2, "validation-clients": 1},
        "federation": {"partition": "column", "per-round": 2, "rounds": 2},
        "local": {"recipe": "local-adamw", "steps": 1, "lr": 0.1},
        "output": {"evaluate-every": 1},
        "engine": {"device": "cpu"},
    })  # fmt: skip
    summary = execute(config, tmp_path / "run")
    rows = list(csv.DictReader((tmp_path / "run" / "texts.csv").read_text().splitlines()))
    unseen = [float(row["loss"]) for row in rows if row["trains"] == "0"]
    names = [row["client"] for row in rows]
    assert len(unseen) == 2 and len({*names}) == len(names) <= 5
    assert summary["unseen_loss"] == pytest.approx(np.mean(unseen))
    assert summary["unseen_loss_worst_decile"] == pytest.approx(max(unseen))
    assert summary["validation_clients_loss"] > 0
    task = build_task(resolve(config), (13,), 6, END + 1)
    part = left_out_samples(resolve(config), task, UNSEEN)
    assert part is not None
    first = client_losses(task, task.initial(generator(0, Draw.INITIAL)), *part[:2])
    assert summary["unseen_loss_before"] == pytest.approx(first.loss, rel=1e-6)
    assert summary["unseen_loss_before"] != summary["unseen_loss"]
    records = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").open()]
    assert records[-1]["unseen_loss"] == summary["unseen_loss"] != records[0]["unseen_loss"]
    texts = json.loads((tmp_path / "run" / "continuations.json").read_text())
    assert [text["prompt"] for text in texts] == [*PROMPTS]
    assert any(text["before"] != text["after"] for text in texts)
    (title, head, lines), *_ = of_run(run_status(tmp_path / "run")).more
    assert title.startswith("Continuations") and len(lines) == 2 * len(PROMPTS)
    assert len(head) == 3 and all("\n" not in cell for line in lines for cell in line)


def test_a_private_run_writes_no_losses_of_single_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_language_model(tmp_path)
    config = parse({
        "task": {"name": "causal-lm", "weights": "tiny-model", "lora-rank": 2},
        "data": {"name": "text", "folder": "tiny-texts", "context": 12, "minimum": 1, "test": 10},
        "federation": {"partition": "column", "per-round": 2, "rounds": 1},
        "local": {"recipe": "dp-sgd", "steps": 1, "lr": 0.1},
        "privacy": {"noise": 1.0, "lot": 4.0, "insecure-reproducible-noise": True},
        "engine": {"device": "cpu"},
    })  # fmt: skip
    summary = execute(config, tmp_path / "run")
    assert not (tmp_path / "run" / "texts.csv").exists() and "client_text_loss" not in summary
    assert (tmp_path / "run" / "continuations.json").exists()
