"""Adapters beside a decoder that stays: what they compute, what is clipped, what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from networks import own_model, replica, task_of
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn import functional

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_task
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.decoder import (
    Form,
    decoder,
    fold_adapters,
    generate,
    gpt2_law,
    read_weights,
    weights_digest,
)
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping

FORM, RANK = Form(256, 12, 16, 2, 2), 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Weights of a decoder, twenty times as large as its law has them."""
    numbers = gpt2_law(decoder(FORM), np.random.default_rng(0))
    save_file({name: 20 * v for name, v in numbers.items()}, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def lora(weights: Path | str, **tables: dict) -> Config:
    base: dict[str, dict] = {
        "data": {"name": "pydoc", "train": 40, "test": 20, "minimum": 8, "context": 12},
        "federation": {"clients": 2, "per-round": 1, "rounds": 2},
        "task": {"name": "network", "model": "gpt", "width": 16, "depth": 2, "heads": 2,
                 "lora-rank": RANK, "weights": str(weights)},
        "local": {"recipe": "fedavg", "steps": 1, "lr": 0.1},
    }  # fmt: skip
    return small(base, **tables)


def learned(task: NetworkTask) -> Params:
    """Adapters that are no longer 0."""
    start = task.initial(generator(0, Draw.INITIAL))
    rng = torch.Generator().manual_seed(1)
    return {name: v + 0.3 * torch.randn(v.shape, generator=rng).double()
            for name, v in start.items()}  # fmt: skip


def batch() -> Batch:
    rows = np.random.default_rng(2).integers(0, 256, (5, 13))
    return Batch(torch.from_numpy(rows).double(), torch.zeros(5, dtype=torch.int64))


def plain_loss(weights: dict[str, Tensor], window: Tensor) -> Tensor:
    """Of transformers' own model with weights W + A B."""
    model = own_model(FORM)
    given = {**weights, "lm_head.weight": weights["transformer.wte.weight"]}
    logits = torch.func.functional_call(model, given, (window[None, :-1].long(),)).logits[0]
    return functional.cross_entropy(logits, window[1:].long())


def example_gradient(file: Path, params: Params, window: Tensor) -> Params:
    """One example's, through W + A B."""
    base = {name: torch.from_numpy(v) for name, v in read_weights(file).items()}
    leaves = {name: v[0].clone().requires_grad_() for name, v in params.items()}
    for block in range(2):
        place = f"transformer.h.{block}.attn.c_attn."
        down, up = leaves[place + "down.weight"], leaves[place + "up.weight"]
        base[place + "weight"] = base[place + "weight"] + down.T @ up.T
    found = torch.autograd.grad(plain_loss(base, window), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("rule", ["block", "flat"])
def test_clipped_sums_are_the_loops(file: Path, rule: str) -> None:
    task, given = task_of(lora(file)), batch()
    params, clip = learned(task), Clipping(rule, 0.05)
    assert {name.rpartition(".c_attn.")[2] for name in params} == {"down.weight", "up.weight"}
    assert len(params) == 4
    sums = task.clipped_sums()
    assert sums.ghosts is not None and len(sums.ghosts.layers) == 4
    expected = {name: torch.zeros_like(v[0]) for name, v in params.items()}
    for window in given.inputs:
        own = example_gradient(file, params, window)
        factors = clip.factors({name: v.square().sum()[None] for name, v in own.items()})
        assert all(float(one) < 1 for one in factors.values())  # every example is clipped
        for name, value in own.items():
            expected[name] += factors[name] * value
    slow = dataclasses.replace(sums, ghosts=None, each=None)
    aimed = dataclasses.replace(given, labels=task.targets(given.inputs, given.labels))
    for found in (task.clipped([(1.0, params)], [given], clip)[1],
                  slow([(1.0, params)], [aimed], clip)[1]):  # fmt: skip
        torch.testing.assert_close(replica(found), expected, rtol=1e-7, atol=1e-10)


def test_they_begin_at_the_decoder_and_fold_into_it(file: Path) -> None:
    task, given = task_of(lora(file)), batch()
    base = {name: torch.from_numpy(v) for name, v in read_weights(file).items()}
    start, params = task.initial(generator(0, Draw.INITIAL)), learned(task)
    whole = fold_adapters(task.module, replica(params))
    assert whole.keys() - {"lm_head.weight"} == base.keys()
    for at, weights in ((start, base), (params, whole)):
        expected = torch.stack([plain_loss(weights, window) for window in given.inputs])
        torch.testing.assert_close(task.losses(at, given)[0][0], expected)
    assert not torch.allclose(task.losses(start, given)[0], task.losses(params, given)[0])
    with pytest.raises(InputError, match="the decoder has no"):
        generate(FORM, replica(params), [[1]], 0)
    plain = {"a": torch.zeros(1)}
    assert fold_adapters(decoder(FORM), plain) is plain


def test_a_run_learns_adapters_alone_and_knows_its_weights_again(
    file: Path, tmp_path: Path
) -> None:
    execute(lora(file), tmp_path / "run")
    found = read_weights(tmp_path / "run" / "model.safetensors")
    assert sum(v.size for v in found.values()) == 2 * RANK * 4 * 16
    assert any(np.abs(v).max() > 0 for name, v in found.items() if "up" in name)
    known = weights_digest(file)
    numbers = read_weights(file)
    numbers["transformer.ln_f.bias"] = numbers["transformer.ln_f.bias"] + 1e-9
    save_file(numbers, file)
    assert known != weights_digest(file)
    with pytest.raises(InputError, match="the weights are others than"):
        execute(lora(file), tmp_path / "run", resume=True)


def test_what_makes_no_sense_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match="set weights to its file"):
        lora("")
    with pytest.raises(InputError, match="lora-rank = 17 is above width = 16"):
        config = lora(file, task={"lora-rank": 17})
        build_task(config, (13,), 10, 256)
