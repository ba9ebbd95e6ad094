"""The decoder against transformers' own model, loss and trajectory."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import draw_neighbours, neighbour, small
from networks import own_model, replica, task_of, trained
from torch import Tensor, nn

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.source import flat_rows
from fedmuon.experiments.run import execute
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.suites import contents
from fedmuon.federated.build import build_plan, build_worker
from fedmuon.federated.build_recipe import matrix_counts, routes
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.optim.links import map_matrices
from fedmuon.orthogonalize import smoothed_polar
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.decoder import Decoder, Form, decoder, gpt2_law

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
    with pytest.raises(InputError, match=r"wpe.weight of shape \(9, 16\) has shape \(12, 16\)"):
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
    with pytest.raises(InputError, match=r"no \.safetensors file"):
        task_of(tiny(task={"weights": str(tmp_path)})).initial(rng)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(InputError, match="no readable safetensors"):
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
    with pytest.raises(InputError, match=r"pip install 'fedmuon\[lm\]'"):
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


def test_a_fused_projection_is_three_matrices() -> None:
    """Cut by hand along either side, with a draw of its own for each, and the scale of a part."""
    torch.manual_seed(1)
    direction = {
        "wide": torch.randn(2, 4, 12).double(), "tall": torch.randn(2, 12, 4).double(),
        "plain": torch.randn(2, 4, 12).double(), "square": torch.randn(2, 4, 4).double(),
    }  # fmt: skip
    blocks, calls = {"wide": 3, "tall": 3}, []

    def apply(stack: Tensor, context: object, block: int) -> Tensor:
        calls.append((len(stack), block))
        return smoothed_polar(stack, 0.1)

    for grouped in (False, True):
        calls.clear()
        link = map_matrices(apply, "match-rms", grouped, blocks)
        found, _ = link.update(direction, {}, None)  # type: ignore[arg-type]
        assert calls == ([(14, 0), (2, 6)] if grouped else [(2, block) for block in range(8)])
        for r in range(2):
            for name, side in (("wide", 1), ("tall", 0)):
                parts = [0.4 * smoothed_polar(p, 0.1) for p in direction[name][r].chunk(3, side)]
                torch.testing.assert_close(found[name][r], torch.cat(parts, side))
            whole = 0.2 * math.sqrt(12) * smoothed_polar(direction["wide"][r], 0.1)
            assert not torch.allclose(found["wide"][r], whole, rtol=1e-2)
            plain = 0.2 * math.sqrt(12) * smoothed_polar(direction["plain"][r], 0.1)
            torch.testing.assert_close(found["plain"][r], plain)


# --- Runs -----------------------------------------------------------------------------------------


def by_hand(config: Config, step: Callable[[str, Tensor, Tensor, Tensor], None]) -> Params:
    """001, Algorithm 1 with transformers' model and autograd, one client after the other."""
    source = read_source(config)
    data, plan, model = build_data(config, source), build_plan(config), own_model(FORM)
    X = replica(task_of(config).initial(generator(config.federation.seed, Draw.INITIAL)))
    M = {name: torch.zeros_like(value) for name, value in X.items()}
    for r in range(plan.rounds):
        ends = []
        for i in map(int, plan.participants(r)):
            model.load_state_dict(X, strict=False)
            model.tie_weights()
            Mi = {name: value.clone() for name, value in M.items()}
            windows = torch.from_numpy(data.samples(i)[0]).long()
            for k in range(plan.steps):
                rows = torch.from_numpy(plan.rows(r, i, k, len(windows)))
                seen, wanted = windows[rows, :-1], windows[rows, 1:]
                model.zero_grad()
                torch.nn.functional.cross_entropy(
                    model(seen).logits.flatten(0, 1), wanted.flatten()
                ).backward()
                with torch.no_grad():
                    for name, value in model.named_parameters():
                        assert value.grad is not None
                        step(name, value, value.grad, Mi[name])
            Xi = {name: value.detach().clone() for name, value in model.named_parameters()}
            ends.append((Xi, Mi))
        X, M = ({n: torch.stack([e[w][n] for e in ends]).mean(0) for n in X} for w in (0, 1))
    return X


def test_fedmuon_on_a_decoder_is_the_loop_by_hand() -> None:
    """Queries, keys and values are orthogonalized each alone; a tied head gets both gradients."""

    def step(name: str, value: Tensor, slope: Tensor, momentum: Tensor) -> None:
        momentum.mul_(0.9).add_(0.1 * slope)
        if ".h." not in name or value.ndim < 2:
            value.sub_(0.3 * momentum)
        elif "c_attn" in name:
            for part, own in zip(value.chunk(3, 1), momentum.chunk(3, 1), strict=True):
                part.sub_(0.05 * smoothed_polar(own, 0.1))
        else:
            value.sub_(0.05 * smoothed_polar(momentum, 0.1))

    expected, found = by_hand(tiny(), step), trained(tiny())[1].params
    torch.testing.assert_close(replica(found), expected, rtol=1e-8, atol=1e-11)
    other = replica(trained(tiny(local={"momentum": 0.8}))[1].params)
    assert not all(torch.allclose(other[name], one, rtol=1e-5) for name, one in expected.items())


def test_fedavg_on_a_decoder_is_the_loop_by_hand() -> None:
    def step(name: str, value: Tensor, slope: Tensor, momentum: Tensor) -> None:
        value.sub_(0.05 * slope)

    config = tiny(local={"recipe": "fedavg"})
    found = replica(trained(config)[1].params)
    torch.testing.assert_close(found, by_hand(config, step), rtol=1e-8, atol=1e-11)


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
        ({"task": {"model": "mlp"}}, "cannot read [data] name = 'pydoc'"),
        ({"task": {"name": "matrix"}}, "text is for [task] name = 'network'"),
        ({"data": {"name": "digits"}}, "cannot read [data] name = 'digits'"),
        ({"data": {"normalize": "unit"}}, "normalize = 'unit' is not for name = 'pydoc': use auto"),
        ({"task": {"heads": 3}}, "width = 16 cannot be shared by heads = 3"),
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
