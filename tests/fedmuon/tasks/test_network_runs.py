"""Runs of networks: against loops written by hand, byte for byte, and beside their neighbours."""

import hashlib
import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import draw_neighbours, neighbour, quick, small
from cut_off import run_until
from networks import by_hand, replica, trained
from safetensors.numpy import load_file
from torch import Tensor, nn

from fedmuon.config.load import Config, load, parse
from fedmuon.core.errors import InputError
from fedmuon.data.source import flat_rows
from fedmuon.experiments.cli.theory import setting_of
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.neighbours import execute as stability
from fedmuon.federated import build
from fedmuon.federated.build import _network, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.model_routes import matrix_counts
from fedmuon.orthogonalize import newton_schulz, smoothed_polar
from fedmuon.tasks.base import Params
from fedmuon.tasks.models import MODELS

AUX = [("sgd", 0.05), ("adamw", 1e-3)]
RECIPES = ("fedavg", "fedavgm", "local-muon", "fedmuon", "fedmuon-aligned")


def digits(model: str = "mlp", **tables: dict) -> Config:
    """Digits on a network: 4 clients, 2 a round, 2 rounds of 2 steps, float64."""
    base: dict[str, dict] = {
        "data": {"name": "digits", "train": 80, "test": 60, "minimum": 8},
        "federation": {"clients": 4, "per-round": 2, "rounds": 2, "aggregate": "mean"},
        "task": {"name": "network", "model": model},
        "local": {"steps": 2, "lr": 0.05, "aux-lr": 0.02},
    }
    return small(base, **tables)


def assert_alike(found: Params, expected: Params) -> None:
    torch.testing.assert_close(replica(found), expected, rtol=1e-8, atol=1e-11)


def differ(one: Params, other: Params) -> bool:
    return any(not torch.allclose(one[name][0], other[name], rtol=1e-4) for name in other)


@pytest.mark.parametrize("batch", quick([0, 6], [6]))
def test_fedavg_is_a_loop_of_torch_sgd(batch: int) -> None:
    """Literally torch.optim.SGD on each client's copy."""
    config = digits("cnn", local={"recipe": "fedavg", "batch": batch, "lr": 0.01})

    def sgd(X: dict[str, Tensor], G: Params, M: Params) -> None:
        for name, value in X.items():
            value.grad = G[name]
        torch.optim.SGD(list(X.values()), lr=0.01).step()

    expected, _ = by_hand(config, sgd)
    assert_alike(trained(config)[1].params, expected)
    assert differ(
        trained(digits("cnn", local={"recipe": "fedavg", "lr": 0.02}))[1].params, expected
    )


MAPS = {
    "smoothed-polar": lambda m: smoothed_polar(m, 0.1),
    "newton-schulz": lambda m: newton_schulz(m, 5, "cubic", 1e-7),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("recipe", quick(["fedmuon", "local-muon"], ["fedmuon"]))
def test_fedmuon_on_a_network_is_the_naive_loop(name: str, recipe: str) -> None:
    config = digits(local={"recipe": recipe}, orthogonalizer={"name": name})

    def step(X: dict[str, Tensor], G: Params, M: Params) -> None:
        for key, value in X.items():
            M[key].mul_(0.9).add_(0.1 * G[key])
            update = 0.05 * MAPS[name](M[key]) if key == "hidden.weight" else 0.02 * M[key]
            value.sub_(update)

    X, M = by_hand(config, step)
    _, state = trained(config)
    assert_alike(state.params, X)
    if recipe == "fedmuon":
        assert_alike(state.states["momentum"], M)
    other = digits(local={"recipe": recipe, "momentum": 0.8}, orthogonalizer={"name": name})
    assert differ(trained(other)[1].params, X)


def test_every_matrix_and_its_scale_can_be_asked_for() -> None:
    """route = all-matrices views a filter as [out, -1]; adjust scales by the view's shape."""
    config = digits("cnn", local={"route": "all-matrices", "adjust": "match-rms", "steps": 1})

    def step(X: dict[str, Tensor], G: Params, M: Params) -> None:
        for key, value in X.items():
            M[key].mul_(0.9).add_(0.1 * G[key])
            update = 0.02 * M[key]
            if value.ndim > 1:
                view = M[key].flatten(1)
                scale = 0.05 * 0.2 * math.sqrt(max(view.shape))
                update = scale * smoothed_polar(view, 0.1).view_as(value)
            value.sub_(update)

    expected, _ = by_hand(config, step)
    assert_alike(trained(config)[1].params, expected)
    plain = digits("cnn", local={"route": "all-matrices", "steps": 1})
    assert differ(trained(plain)[1].params, expected)


def test_adamw_beside_muon_is_that_of_torch() -> None:
    """Its moments begin afresh in every local round, and no momentum is kept where it acts."""
    config = digits(local={"aux": "adamw", "aux-lr": 0.004})
    optimizers: dict[int, torch.optim.AdamW] = {}

    def step(X: dict[str, Tensor], G: Params, M: Params) -> None:
        held = [value for key, value in X.items() if key != "hidden.weight"]
        which = id(held[0])
        if which not in optimizers:
            optimizers.clear()
            optimizers[which] = torch.optim.AdamW(held, lr=0.004)
        for key, value in X.items():
            value.grad = G[key]
        optimizers[which].step()
        M["hidden.weight"].mul_(0.9).add_(0.1 * G["hidden.weight"])
        X["hidden.weight"].sub_(0.05 * smoothed_polar(M["hidden.weight"], 0.1))

    X, M = by_hand(config, step)
    _, state = trained(config)
    assert_alike(state.params, X)
    assert_alike(state.states["momentum"], {"hidden.weight": M["hidden.weight"]})


def digest(run: Path) -> str:
    files = ("initial", "model", "momentum")
    return "".join(
        hashlib.sha256((run / f"{name}.safetensors").read_bytes()).hexdigest() for name in files
    )


@pytest.mark.parametrize("recipe", quick(RECIPES, ["fedmuon"]))
def test_one_seed_one_network(tmp_path: Path, recipe: str) -> None:
    local = {"recipe": recipe, "batch": 8}
    for name, seed in (("1", 3), ("2", 3), ("3", 4)):
        execute(digits(local=local, federation={"seed": seed}), tmp_path / name)
    assert digest(tmp_path / "1") == digest(tmp_path / "2") != digest(tmp_path / "3")
    model = load_file(tmp_path / "1" / "model.safetensors")
    assert model["hidden.weight"].shape == (256, 512) and model["head.bias"].shape == (10,)


@pytest.mark.slow
def test_an_interrupted_run_of_a_network_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    config = digits("cnn", federation={"rounds": 3}, output={"checkpoint-every": 1})
    execute(config, tmp_path / "whole")
    run_until(2, config, tmp_path / "cut")
    execute(None, tmp_path / "cut", resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    routes = (tmp_path / "cut" / "routes.txt").read_text()
    assert "conv2.weight" in routes and "first layer" in routes


@pytest.mark.parametrize(("aux", "rate"), quick(AUX, AUX[:1]))
def test_a_resolved_config_says_the_auxiliary_step_size(
    aux: str, rate: float, tmp_path: Path
) -> None:
    unset = digits(local={"aux": aux, "aux-lr": 0.0})
    execute(unset, tmp_path / "a")
    assert load(tmp_path / "a" / "config.toml").local.aux_lr == rate
    execute(digits(local={"aux": aux, "aux-lr": rate}), tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    for again in (None, unset, digits(local={"aux": aux, "aux-lr": rate})):
        execute(again, tmp_path / "a", resume=True)
    plain = resolve(digits(local={"recipe": "fedavg", "aux-lr": 0.0}))
    assert plain.local.aux_lr == 0.0  # which reads none


@pytest.mark.slow
def test_a_run_that_says_no_auxiliary_step_size_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older versions wrote it."""
    unset = digits(local={"aux-lr": 0.0})
    with monkeypatch.context() as older:
        older.setattr(build, "aux_rate", lambda local: local.aux_lr)
        for name in ("a", "b"):
            run_until(1, unset, tmp_path / name)
    execute(None, tmp_path / "a", resume=True)
    with pytest.raises(InputError, match="differ from the settings that you passed"):
        execute(digits(local={"aux-lr": 0.3}), tmp_path / "b", resume=True)
    execute(unset, tmp_path / "b", resume=True)
    execute(unset, tmp_path / "whole")
    assert digest(tmp_path / "a") == digest(tmp_path / "b") == digest(tmp_path / "whole")


@pytest.mark.slow
def test_a_network_learns(tmp_path: Path) -> None:
    """Far above chance, and better than where it began."""
    table = {"rounds": 6, "clients": 4, "per-round": 4}
    summary = execute(
        digits("cnn", data={"train": 300, "test": 200}, federation=table,
               local={"batch": 32, "steps": 5, "lr": 0.02, "aux-lr": 0.1},
               orthogonalizer={"name": "newton-schulz"}, engine={"dtype": "float32"},
               output={"evaluate-every": 1}),
        tmp_path / "run",
    )  # fmt: skip
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert summary["accuracy"] > 0.8 and summary["test_loss"] < first["test_loss"]


@pytest.mark.parametrize("model", quick(["mlp", "cnn"], ["mlp"]))
@pytest.mark.parametrize("batch", quick([0, 5], [5]))
def test_a_stack_of_neighbours_is_a_loop_over_data_sets(model: str, batch: int) -> None:
    config = digits(model, local={"batch": batch, "lr": 0.01})
    source = read_source(config)
    data = build_data(config, source)
    neighbours = draw_neighbours(data, source, 3, 1, config.data.normalize)
    together = trained(config, data, neighbours)[1].params
    for s in range(4):
        alone = replica(trained(config, neighbour(data, neighbours, s))[1].params)
        torch.testing.assert_close(replica(together, s), alone, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_stability_of_a_network_is_measured_and_never_certified(tmp_path: Path) -> None:
    config = digits(stability={"trials": 4}, federation={"per-round": 4})
    record = stability(config, tmp_path / "run")
    lines = np.loadtxt(tmp_path / "run" / "neighbours.csv", delimiter=",", skiprows=1)
    assert (lines[:, 4] > 0).all() and (lines[:, 4] <= lines[:, 6]).all()
    assert record["status"] == "estimated" and record["value"] > 0
    given = certificates.certify(
        setting_of(tmp_path / "run", [], {"l_orth": 1.0, "l_g": 2.0})
    ).bound
    assert given is not None and any(
        "Lg = 2 was passed by the caller" in line for line in given.assumptions
    )


def test_samples_reach_a_network_as_pixels() -> None:
    assert digits().data.normalize == "pixels" and parse({}).data.normalize == "unit"
    assert digits(data={"normalize": "unit"}).data.normalize == "unit"
    images = np.array([[[0, 51], [102, 255]]], np.uint8)
    found = flat_rows(images, "pixels")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[0, 0.2, 0.4, 1]], rtol=1e-7)
    assert (flat_rows(np.array([[3.0, -2.0]]), "pixels") == [[3.0, -2.0]]).all()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"normalize": "pixels"}}, "does not scale samples to a norm of at most 1"),
        ({"local": {"adjust": "original"}}, "is only for networks"),
        ({"local": {"route": "first"}}, "use one of hidden, all-matrices"),
        ({"local": {"aux": "adam"}}, "did you mean adamw"),
        ({"local": {"aux-lr": -1.0}}, "[local] aux-lr = -1.0"),
        ({"task": {"model": "vgg"}}, "mlp, cnn"),
    ],
)
def test_what_makes_no_sense_is_refused(tables: dict, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse(tables)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("hidden", [(), (12,)])
def test_muon_takes_the_largest_matrix_of_a_shallow_network(
    monkeypatch: pytest.MonkeyPatch, hidden: tuple[int, ...]
) -> None:
    """One or two layers have no hidden matrix; all other parameters take the auxiliary step."""

    def shallow(shape: tuple[int, ...], classes: int) -> nn.Module:
        sizes = [math.prod(shape), *hidden, classes]
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        return nn.Sequential(nn.Flatten(), *(part for one in layers for part in (one, nn.Tanh())))

    monkeypatch.setitem(MODELS, "mlp", shallow)
    _network.cache_clear()
    config = digits(local={"recipe": "local-muon"})

    def step(largest: str, X: dict[str, Tensor], G: Params, M: Params) -> None:
        for key, value in X.items():
            M[key].mul_(0.9).add_(0.1 * G[key])
            value.sub_(0.05 * smoothed_polar(M[key], 0.1) if key == largest else 0.02 * M[key])

    expected, _ = by_hand(config, partial(step, "1.weight"))
    found = trained(config)[1].params
    assert_alike(found, expected)
    assert differ(found, by_hand(config, partial(step, "no matrix"))[0])
    _network.cache_clear()


def test_a_network_without_a_matrix_is_rejected_by_muon_alone() -> None:
    norm = nn.Sequential(nn.Flatten(), nn.LayerNorm(64))
    for rule in ("hidden", "all-matrices"):
        with pytest.raises(
            InputError, match=r"only vectors, norms and scalars\. Set recipe = 'fedavg'"
        ):
            matrix_counts(norm, rule)
    images = nn.LayerNorm([8, 8])  # whose weight is a matrix
    with pytest.raises(InputError, match="Set route = 'all-matrices', or"):
        matrix_counts(images, "hidden")
    assert matrix_counts(images, "all-matrices")["weight"] == 1
