"""The decoder against transformers' own model, loss and trajectory; its clipped sums; adapters."""

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import draw_neighbours, neighbour, quick, small
from networks import by_hand, loss_of_windows, own_model, replica, task_of, trained
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.source import flat_rows
from fedmuon.experiments.run import execute
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.suites import contents
from fedmuon.federated.build import build_task, build_worker
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.model_routes import matrix_counts, routes
from fedmuon.orthogonalize import smoothed_polar
from fedmuon.tasks.base import IGNORED, Batch, Params
from fedmuon.tasks.decoder import (
    Decoder,
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

FORM = Form(256, context=12, width=16, depth=2, heads=2)


def tiny(**tables: dict) -> Config:
    """A decoder of 16 hidden units on windows of 12 bytes; 4 clients, 2 a round, float64."""
    base: dict[str, dict] = {
        "data": {"name": "pydoc", "train": 80, "test": 40, "minimum": 8, "context": 12},
        "federation": {"clients": 4, "per-round": 2, "rounds": 2},
        "task": {"name": "network", "model": "gpt", "width": 16, "depth": 2, "heads": 2},
        "local": {"steps": 2, "batch": 6, "lr": 0.05, "aux-lr": 0.3},
    }
    return small(base, **tables)


def test_tokens_are_left_alone() -> None:
    assert tiny().data.normalize == "tokens"
    rows = flat_rows(np.array([[0, 255, 50256], [1, 2, 2**24 - 1]], np.uint32), "tokens")
    assert rows.dtype == np.float32 and rows.astype(int).tolist()[1] == [1, 2, 2**24 - 1]


# --- The decoder ----------------------------------------------------------------------------------


def test_loss_and_accuracy_of_a_window_are_those_of_transformers() -> None:
    config, model = tiny(), own_model(FORM)
    task, source = task_of(config), read_source(config)
    stored = {name: value.detach()[None] for name, value in model.named_parameters()}
    seen = torch.from_numpy(source.inputs[:5].astype(np.int64))
    losses, scores = task.losses(stored, Batch(seen.double(), torch.zeros(5, dtype=torch.int64)))
    for row, window in enumerate(seen):
        logits = model(window[None, :-1]).logits[0].detach()
        expected = torch.nn.functional.cross_entropy(logits, window[1:])
        own = model.loss_function(logits[None], None, 256, shift_labels=window[None, 1:])
        torch.testing.assert_close(losses[0, row], expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(losses[0, row].float(), own, rtol=1e-6, atol=0)  # in float32
        share = (logits.argmax(-1) == window[1:]).double().mean()
        torch.testing.assert_close(scores["accuracy"][0, row], share)
    swapped = seen[:, [1, 0, *range(2, 13)]].double()
    other, _ = task.losses(stored, Batch(swapped, torch.zeros(5, dtype=torch.int64)))
    assert not torch.allclose(losses, other, rtol=1e-6)


def test_a_token_does_not_see_those_after_it() -> None:
    task = task_of(tiny())
    params = replica(task.initial(generator(0, Draw.INITIAL)))
    window = torch.arange(13.0).double()[None]
    changed = window.clone()
    changed[0, 7] = 200
    one, other = (torch.func.functional_call(task.module, params, (x,)) for x in (window, changed))
    assert (one[0, :7] == other[0, :7]).all() and not torch.allclose(one[0, 7:], other[0, 7:])


def test_first_parameters_obey_the_law_of_transformers() -> None:
    """Spreads and constants beside those of a model that transformers itself initialized."""
    form = Form(256, context=32, width=64, depth=3, heads=4)
    module, model = decoder(form), own_model(form)
    drawn = gpt2_law(module, generator(1, Draw.INITIAL))
    theirs = {name: value.detach() for name, value in model.named_parameters()}
    assert list(drawn) == list(theirs)
    for name, value in drawn.items():
        spread = float(theirs[name].std())
        assert value.std() == pytest.approx(spread, rel=0.08, abs=1e-12), name
        assert float(theirs[name].mean()) == pytest.approx(value.mean(), abs=0.002)
    assert drawn["transformer.h.0.mlp.c_proj.weight"].std() < 0.5 * 0.02
    assert (drawn["transformer.wte.weight"] != gpt2_law(module, generator(2, Draw.INITIAL))[
        "transformer.wte.weight"
    ]).all()  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_at_hand_are_where_it_starts(tmp_path: Path, dtype: torch.dtype) -> None:
    model = own_model(FORM)
    nn.Module.to(model, dtype)
    model.save_pretrained(tmp_path)
    start = task_of(tiny(task={"weights": str(tmp_path)})).initial(generator(0, Draw.INITIAL))
    for name, value in model.named_parameters():
        torch.testing.assert_close(start[name][0], value.detach().double(), rtol=0, atol=0)
    file = tmp_path / "bare.safetensors"
    bare = {
        name.removeprefix("transformer."): v for name, v in model.transformer.state_dict().items()
    }
    from safetensors.torch import save_file

    save_file(bare, file)
    again = task_of(tiny(task={"weights": str(file)})).initial(generator(0, Draw.INITIAL))
    assert all((again[name] == value).all() for name, value in start.items())
    with pytest.raises(
        InputError, match=r"wpe.weight of shape \(9, 16\) has shape \(12, 16\) .* positions"
    ):
        task_of(tiny(task={"weights": str(file)}, data={"context": 9})).initial(
            generator(0, Draw.INITIAL)
        )


def test_clients_need_no_weights(tmp_path: Path) -> None:
    """Only the server reads them; a client fits what it receives to their shapes."""
    config = tiny(task={"weights": str(tmp_path / "elsewhere")})
    params, _ = build_worker(config, 1).template(2)
    assert params["transformer.wte.weight"].shape == (2, 256, 16)


def test_weights_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    rng = generator(0, Draw.INITIAL)
    with pytest.raises(InputError, match=r"is not a \.safetensors file"):
        task_of(tiny(task={"weights": str(tmp_path)})).initial(rng)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(InputError, match="not a readable safetensors"):
        task_of(tiny(task={"weights": str(tmp_path)})).initial(rng)


def test_a_run_can_be_read_by_transformers_and_gone_on_from(tmp_path: Path) -> None:
    execute(tiny(federation={"rounds": 1}), tmp_path / "first")
    file = tmp_path / "first" / "model.safetensors"
    start = task_of(tiny(task={"weights": str(file)})).initial(generator(9, Draw.INITIAL))
    found = own_model(FORM).load_state_dict(replica(start), strict=False)
    assert found.missing_keys == ["lm_head.weight"] and not found.unexpected_keys
    assert "3 of 16 x 16" in (tmp_path / "first" / "routes.txt").read_text()


def test_without_transformers_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install '\.\[lm\]'"):
        decoder(FORM)


# --- Routes and fused projections -----------------------------------------------------------------


def test_routes_of_the_decoder() -> None:
    """Four projections a block; embeddings, positions, norms, biases and the head go elsewhere."""
    module = decoder(FORM)
    found = {
        name.removeprefix("transformer."): count
        for name, count in matrix_counts(module, "hidden").items()
    }
    muon = {name for name, count in found.items() if count}
    assert muon == {
        f"h.{block}.{layer}.weight"
        for block in (0, 1)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert found["h.0.attn.c_attn.weight"] == 3 and found["h.0.mlp.c_fc.weight"] == 1
    assert next(one for one in routes(module, "hidden") if "wte" in one.name).reason == "embedding"


# --- Runs -----------------------------------------------------------------------------------------


def test_fedmuon_on_a_decoder_is_the_loop_by_hand() -> None:
    """Queries, keys and values are orthogonalized each alone; a tied head gets both gradients."""

    def step(X: Params, G: Params, M: Params) -> None:
        for name, value in X.items():
            M[name].mul_(0.9).add_(0.1 * G[name])
            if ".h." not in name or value.ndim < 2:
                value.sub_(0.3 * M[name])
            elif "c_attn" in name:
                for part, own in zip(value.chunk(3, 1), M[name].chunk(3, 1), strict=True):
                    part.sub_(0.05 * smoothed_polar(own, 0.1))
            else:
                value.sub_(0.05 * smoothed_polar(M[name], 0.1))

    def loss_of(X: Params, windows: Tensor, labels: Tensor) -> Tensor:
        return loss_of_windows(FORM, X, windows)

    (expected, _), found = by_hand(tiny(), step, loss_of), trained(tiny())[1].params
    torch.testing.assert_close(replica(found), expected, rtol=1e-8, atol=1e-11)
    other = replica(trained(tiny(local={"momentum": 0.8}))[1].params)
    assert not all(torch.allclose(other[name], one, rtol=1e-5) for name, one in expected.items())


@pytest.mark.slow
def test_a_stack_of_neighbours_is_a_loop_over_data_sets() -> None:
    """A neighbour has another window in place of one."""
    config = tiny(local={"batch": 0})
    source = read_source(config)
    data = build_data(config, source)
    neighbours = draw_neighbours(data, source, 2, 1, config.data.normalize)
    assert neighbours.inputs[1:].max() > 32 and (neighbours.inputs % 1 == 0).all()
    together = trained(config, data, neighbours)[1].params
    for s in range(3):
        alone = replica(trained(config, neighbour(data, neighbours, s))[1].params)
        torch.testing.assert_close(replica(together, s), alone, rtol=1e-7, atol=1e-9)
    assert not torch.allclose(
        together["transformer.wte.weight"][0], together["transformer.wte.weight"][1], rtol=1e-6
    )


@pytest.mark.slow
def test_a_decoder_learns_more_than_how_often_letters_come(tmp_path: Path) -> None:
    """Its test loss falls below the entropy of single bytes, which needs what came before."""
    config = tiny(
        data={"train": 2000, "test": 400, "context": 16, "alpha": 5.0},
        federation={"clients": 2, "per-round": 2, "rounds": 6},
        task={"width": 32}, engine={"dtype": "float32"}, output={"evaluate-every": 6},
        local={"steps": 15, "batch": 24, "lr": 0.02, "aux": "adamw", "aux-lr": 0.01,
               "adjust": "match-rms"},
        orthogonalizer={"name": "newton-schulz"},
    )  # fmt: skip
    source = read_source(config)
    share = np.bincount(source.inputs.ravel()) / source.inputs.size
    entropy = -float(sum(p * math.log(p) for p in share if p))
    summary = execute(config, tmp_path / "run")
    assert summary["test_loss"] < entropy - 0.3 < math.log(256)
    assert summary["accuracy"] > share.max()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"task": {"model": "mlp"}}, "cannot train on [data] name = 'pydoc'"),
        ({"task": {"name": "matrix"}}, "For text, set [task] name = 'network'"),
        ({"data": {"name": "digits"}}, "cannot train on [data] name = 'digits'"),
        (
            {"data": {"normalize": "unit"}},
            "normalize = 'unit' does not suit name = 'pydoc'",
        ),
        ({"task": {"heads": 3}}, "width = 16 is not divisible by heads = 3"),
        ({"data": {"context": 0}}, "[data] context = 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tables: dict, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        tiny(**tables)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_suite_is_four_optimizers_on_one_text() -> None:
    """Each at its own step size, and all else the same: 002's comparison."""
    work = find("lm", None, "small", {})
    configs = {one.variant: one.config for one in work.cells}  # type: ignore[attr-defined]
    assert [config.local.recipe for config in configs.values()] == ["sgd", "adamw", "muon", "muon"]
    assert configs["Randomized Muon"].orthogonalizer.name == "randomized-polar"
    for config in configs.values():
        assert config.federation.clients == 1
        assert config.local.momentum_form == (
            "ema" if config.local.recipe == "adamw" else "ema-nesterov"
        )
        assert config.data.name == "pydoc" and config.data.normalize == "tokens"
    assert find("lm", "pydoc", "full", {}).cells[0].config.task.width == 128  # type: ignore[attr-defined]


def test_no_guess_among_labels_is_named_where_tokens_are_predicted() -> None:
    """A text's labels say where it is from; those of images are what is predicted."""
    config = find("lm", None, "small", {}).cells[0].config  # type: ignore[attr-defined]
    assert read_source(config).classes > 1 and not contents.guess(read_source(config), config)
    images = find("cnn", "digits", "small", {}).cells[0].config  # type: ignore[attr-defined]
    assert contents.guess(read_source(images), images)["guess"][0] == 10


def test_the_decoder_is_made_without_numbers() -> None:
    module = decoder(FORM)
    assert isinstance(module, Decoder) and all(p.is_meta for p in module.parameters())
    assert module.lm_head.weight is module.transformer.wte.weight


# --- Clipped sums against loops -------------------------------------------------------------------

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


RULES = [("block", True, (1.0,)), ("flat", False, (1.0,)), ("automatic", True, (3.0, -2.0))]
CLIPPED = [(form, *rule) for form in (LONG, WIDE) for rule in RULES]


@pytest.mark.parametrize(
    ("form", "rule", "masked", "weights"), quick(CLIPPED, [CLIPPED[1], *CLIPPED[3::2]])
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


# --- Adapters (LoRA): what they compute, what is clipped, what is refused. ------------------------

RANK = 3


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


def example_gradient(file: Path, params: Params, window: Tensor) -> Params:
    """One example's, through W + A B."""
    base = {name: torch.from_numpy(v) for name, v in read_weights(file).items()}
    leaves = {name: v[0].clone().requires_grad_() for name, v in params.items()}
    for block in range(2):
        place = f"transformer.h.{block}.attn.c_attn."
        down, up = leaves[place + "down.weight"], leaves[place + "up.weight"]
        base[place + "weight"] = base[place + "weight"] + down.T @ up.T
    found = torch.autograd.grad(loss_of_windows(FORM, base, window[None]), list(leaves.values()))
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
        expected = torch.stack([loss_of_windows(FORM, weights, one[None]) for one in given.inputs])
        torch.testing.assert_close(task.losses(at, given)[0][0], expected)
    assert not torch.allclose(task.losses(start, given)[0], task.losses(params, given)[0])
    with pytest.raises(InputError, match="does not belong to the decoder"):
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
    with pytest.raises(InputError, match="the weights differ from the weights"):
        execute(lora(file), tmp_path / "run", resume=True)


def test_adapters_that_make_no_sense_are_refused(file: Path) -> None:
    with pytest.raises(InputError, match="Set weights to the file"):
        lora("")
    with pytest.raises(InputError, match="lora-rank = 17 exceeds width = 16"):
        config = lora(file, task={"lora-rank": 17})
        build_task(config, (13,), 10, 256)
