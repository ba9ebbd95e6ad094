"""Steps of language models that need less memory: activation checkpointing, weights in bfloat16,
and parts of a batch. Their gradients are those of an ordinary step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from language_models import save_model, save_texts, save_tokenizer
from networks import replica
from safetensors.numpy import load_file
from test_causal_lm import KINDS, LENGTH, batch, learned, task_for, tiny
from torch import nn
from torch.func import functional_call

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.run import execute
from fedmuon.tasks.base import Batch, Params, token_cross_entropy
from fedmuon.tasks.causal_lm import predicted_tokens
from fedmuon.tasks.checkpointing import checkpoint_blocks
from fedmuon.tasks.frozen_base import base_digest, frozen_model
from fedmuon.tasks.work_split import Chunks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp("llama-alone")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("base") / "texts")


def single(samples: Batch) -> Batch:
    """The same windows in float32."""
    return Batch(samples.inputs.float(), samples.labels)


def same(first: Params, second: Params, tolerance: float = 1e-12) -> None:
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=tolerance, atol=tolerance)


# --- Activation checkpointing ---------------------------------------------------------------------


def test_gradients_are_those_without_checkpointing(folder: Path) -> None:
    """For one replica and for three, whose blocks then run one after the other."""
    plain, checkpointed = task_for(folder), task_for(folder, checkpointing=True)
    assert checkpointed.saved < plain.saved and checkpointed.vectorized is False
    for stack in (1, 3):
        params = learned(plain, stack)
        losses, slopes = plain.gradient(params, [batch()])
        again, recomputed = checkpointed.gradient(params, [batch()])
        torch.testing.assert_close(again, losses, rtol=1e-13, atol=0)
        same(slopes, recomputed)
        assert max(slope.abs().max() for slope in slopes.values()) > 1e-3
    torch.testing.assert_close(
        checkpointed.losses(params, batch())[0], plain.losses(params, batch())[0]
    )


def test_each_block_is_computed_twice(folder: Path) -> None:
    """And its activations are not stored: the second call uses the parameters of the first."""
    for checkpointing, calls in ((True, 2), (False, 1)):
        task, counts = task_for(folder, checkpointing=checkpointing), [0]
        (layer, *_) = [v for name, v in task.module.named_modules() if name.endswith("mlp")]

        def count(*unused: object, counts: list[int] = counts) -> None:
            counts[0] += 1

        layer.register_forward_pre_hook(count)
        task.gradient(learned(task), [batch()])
        assert counts == [calls]
        with torch.no_grad():
            functional_call(task.module, replica(learned(task)), (batch().inputs,))
        assert counts == [calls + 1]


def test_private_runs_reject_checkpointing(llama: Path, texts: Path) -> None:
    with pytest.raises(InputError, match=r"checkpointing = (t|T)rue .* single examples .* false"):
        tiny(
            llama, texts, task={"checkpointing": True},
            local={"recipe": "dp-muon", "lr": 0.05, "batch": 0},
            privacy={"lot": 6.0, "bound": 0.2, "noise": 1.0, "delta": 1e-3},
        )  # fmt: skip


def test_a_model_without_blocks_is_rejected() -> None:
    with pytest.raises(InputError, match=r"no transformer blocks .* Set checkpointing = false"):
        checkpoint_blocks(nn.Sequential(nn.Linear(2, 2)))


def test_a_run_with_checkpointing_is_the_run_without(
    llama: Path, texts: Path, tmp_path: Path
) -> None:
    for name, checkpointing in (("plain", False), ("less", True)):
        config = tiny(llama, texts, task={"checkpointing": checkpointing})
        execute(config, tmp_path / name)
    plain, less = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "less"))
    assert plain.keys() == less.keys()
    for name, value in plain.items():
        assert abs(less[name] - value).max() < 1e-12


# --- Parts of a batch -----------------------------------------------------------------------------


def test_parts_of_a_batch_have_the_gradient_of_the_batch(folder: Path) -> None:
    """As many samples are computed at once as fit into memory; here 5, 2, or 1."""
    task = task_for(folder)
    params = learned(task)
    expected = task.gradient(params, [batch()])
    for size in (2, 1):
        object.__setattr__(task, "chunks", Chunks(size))
        loss, slope = task.gradient(params, [batch()])
        torch.testing.assert_close(loss, expected[0], rtol=1e-13, atol=0)
        same(expected[1], slope)
    unweighted = [task.gradient(params, [batch(count)])[0] for count in (2, 3)]
    assert abs(sum(unweighted) / 2 - expected[0]) > 1e-6  # parts count by their size


# --- Frozen weights in bfloat16 -------------------------------------------------------------------


def test_bfloat16_weights_leave_adapters_in_float32(folder: Path) -> None:
    task = task_for(folder, dtype=torch.float32, base_dtype=torch.bfloat16)
    params = {name: value.float() for name, value in learned(task).items()}
    floats = [b for b in task.module.buffers() if b.is_floating_point() and b.ndim == 2]
    assert floats and all(buffer.dtype == torch.bfloat16 for buffer in floats)
    loss, slope = task.gradient(params, [single(batch())])
    assert loss.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in slope.values())
    # The same function of the rounded weights in float64 differs by the rounding of bfloat16.
    exact = task_for(folder)
    for (_, value), (_, rounded) in zip(
        exact.module.named_buffers(), task.module.named_buffers(), strict=True
    ):
        value.data = rounded.to(value.dtype).clone()
    true_loss, true_slope = exact.gradient({k: v.double() for k, v in params.items()}, [batch()])
    assert abs(float(loss - true_loss)) < 0.03 * float(true_loss)
    together, true_together = (
        torch.cat([value.flatten().double() for value in values.values()])
        for values in (slope, true_slope)
    )
    assert torch.cosine_similarity(together, true_together, 0) > 0.99
    assert not torch.equal(together, true_together)


def test_bfloat16_weights_are_the_published_weights_rounded(llama: Path) -> None:
    rounded, full = (frozen_model(str(llama), dtype, CPU)
                     for dtype in (torch.bfloat16, torch.float32))  # fmt: skip
    head = "lm_head.weight"
    assert torch.equal(rounded.get_buffer(head), full.get_buffer(head).bfloat16())
    assert base_digest(str(llama), torch.bfloat16) != base_digest(str(llama), torch.float32)


def test_a_run_on_bfloat16_weights_learns(llama: Path, texts: Path, tmp_path: Path) -> None:
    config = tiny(llama, texts, task={"base-dtype": "bfloat16"}, engine={"dtype": "float32"})
    summary = execute(config, tmp_path / "run")
    assert summary["test_loss"] < summary["untrained"]["test_loss"]
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert {str(value.dtype) for value in model.values()} == {"float32"}


def test_losses_of_bfloat16_weights_are_float32(llama: Path) -> None:
    task = task_for(llama, dtype=torch.float32, base_dtype=torch.bfloat16)
    start = task.initial(generator(0, Draw.INITIAL))
    samples = single(batch())
    losses, _ = task.losses(start, samples)
    assert losses.dtype == torch.float32 and task.shape == (LENGTH + 1,)
    outputs = functional_call(task.module, replica(start), (samples.inputs,))
    targets = predicted_tokens(samples.inputs, samples.labels)
    torch.testing.assert_close(losses[0], token_cross_entropy(outputs, targets))
    assert replace(task, activations=7).saved == 7
