"""Clipped sums of the decoder and of its adapters against loops, and what adapters compute."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from networks import own_model, replica, task_of
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_task
from fedmuon.tasks.base import IGNORED, Batch, Params
from fedmuon.tasks.decoder import (
    Form,
    decoder,
    fold_adapters,
    generate,
    gpt2_law,
    next_tokens,
    read_weights,
    sentence_tokens,
    weights_digest,
)
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping
from fedmuon.tasks.per_example.ghost import find_ghosts
from fedmuon.tasks.per_example.gradients import Explicit, Lookup, Outer, Tied

END = 12
LONG, WIDE = Form(13, 9, 8, 2, 2), Form(13, 4, 16, 1, 2)  # heads held as Gram matrices, and formed


def decoder_task(form: Form, masked: bool) -> NetworkTask:
    def targets(inputs: Tensor, labels: Tensor) -> Tensor:
        return sentence_tokens(END, inputs, labels) if masked else next_tokens(inputs, labels)

    return NetworkTask(
        decoder(form), (form.context + 1,), torch.float64, targets=targets, start=gpt2_law
    )


def windows_of(form: Form, rows: int) -> Tensor:
    """Each with the end of a table at its second place, and that of a sentence in all but one."""
    rng = generator(0, Draw.BATCH)
    found = torch.from_numpy(rng.integers(0, END, (rows, form.context + 1))).double()
    found[:, 1] = END
    found[1:, -1] = END
    return found


def naive(form: Form, points: list, windows: Tensor, task: NetworkTask, clip: Clipping) -> Params:
    """One example after the other through transformers' own model and autograd."""
    model = own_model(form)
    totals = {name: torch.zeros_like(v) for name, v in model.named_parameters()}
    for window in windows:
        own = {name: torch.zeros_like(v) for name, v in model.named_parameters()}
        wanted = task.targets(window[None], window[:1])[0]
        kept = wanted != IGNORED
        for c, params in points:
            model.load_state_dict({n: v[0] for n, v in params.items()}, strict=False)
            model.tie_weights()
            model.zero_grad()
            logits = model(window[None, :-1].long()).logits[0]
            functional.cross_entropy(logits[kept], wanted[kept]).backward()
            for name, value in model.named_parameters():
                assert value.grad is not None
                own[name] += c * value.grad
        factors = clip.factors({name: v.square().sum()[None] for name, v in own.items()})
        for name, value in own.items():
            totals[name] += factors[name] * value
    return totals


@pytest.mark.parametrize("form", [LONG, WIDE], ids=["grams", "formed"])
@pytest.mark.parametrize(
    ("rule", "masked", "weights"),
    [("block", True, (1.0,)), ("flat", False, (1.0,)), ("automatic", True, (3.0, -2.0))],
)
def test_clipped_sums_are_the_loops(
    form: Form, rule: str, masked: bool, weights: tuple[float, ...]
) -> None:
    task, windows = decoder_task(form, masked), windows_of(form, 4)
    together = frozenset({"transformer.wpe.weight", "transformer.ln_f.bias"})
    clip = Clipping(rule, 0.05, together)
    points = [
        (c, {n: 20 * v for n, v in task.initial(generator(k, Draw.INITIAL)).items()})
        for k, c in enumerate(weights)
    ]
    batch = Batch(windows, torch.zeros(4, dtype=torch.int64))
    assert find_ghosts(task.module, task.shape) is not None
    loss, found = task.clipped(points, [batch], clip)
    slow = dataclasses.replace(task.clipped_sums(), ghosts=None, each=None)
    _, other = slow(
        points, [dataclasses.replace(batch, labels=task.targets(windows, batch.labels))], clip
    )
    expected = naive(form, points, windows, task, clip)
    for sums in (found, other):
        torch.testing.assert_close(replica(sums), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(loss, task.gradient(points[-1][1], [batch])[0])
    whole = task.clipped(points, [batch], Clipping(rule, 0.1, together))[1]
    assert not torch.allclose(whole["transformer.wte.weight"], found["transformer.wte.weight"])


def test_the_norm_of_a_tied_gradient_has_a_mixed_term() -> None:
    """Against the gradients themselves, with tokens that come twice; squares do not add up."""
    torch.manual_seed(0)
    at, falls = torch.randint(0, 5, (3, 6)), torch.randn(3, 6, 4).double()
    reads, slopes = torch.randn(3, 1, 6, 4).double(), torch.randn(3, 1, 6, 5).double()
    looked, head = Lookup(at, falls, 5), Outer(reads, slopes)
    whole = slopes[:, 0].mT @ reads[:, 0]
    for i in range(3):
        whole[i].index_add_(0, at[i], falls[i])
    factors = torch.rand(3).double()
    for held in (head, head.explicit()):
        assert isinstance(held, Outer | Explicit)
        tied, total = Tied(looked, held), torch.zeros(5, 4).double()
        torch.testing.assert_close(tied.squares(), whole.square().sum((1, 2)))
        tied.add_to_(total, factors)
        torch.testing.assert_close(total, (factors[:, None, None] * whole).sum(0))
    alone = looked.squares() + head.squares()
    assert not torch.allclose(alone, whole.square().sum((1, 2)), rtol=1e-2)


def test_what_else_is_shared_has_no_records() -> None:
    """Two linear layers of one weight, or a weight used thrice, take torch's way."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    assert find_ghosts(Twice(), (4,)) is None


# --- Adapters (LoRA): what they compute, what is clipped, what is refused. ---

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
def test_clipped_sums_of_adapters_are_the_loops(file: Path, rule: str) -> None:
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
