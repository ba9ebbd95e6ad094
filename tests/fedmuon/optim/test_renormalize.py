"""Label smoothing and renormalized weights as keys of a config, against loops of their own."""

import math
from typing import Any

import pytest
import torch
from conftest import quick, small
from torch import nn

from fedmuon import links
from fedmuon.config.load import Config, parse
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.stability.certificates import method_of
from fedmuon.federated.build import build_experiment
from fedmuon.federated.rounds import begin, simulate
from fedmuon.optim.chain import Chain, Context
from fedmuon.orthogonalize import Uncertified
from fedmuon.tasks.base import IGNORED, cross_entropy

LONE = {"clients": 1, "per-round": 1, "rounds": 3}


def config(smoothing: float = 0.0, renormalize: bool = False, **local: object) -> Config:
    task = {"name": "network", "model": "mlp", "label-smoothing": smoothing}
    steps = {"recipe": "muon", "lr": 0.1, "steps": 2, "momentum": 0.7, "momentum-form": "polyak"}
    tables = {
        "task": task,
        "local": {**steps, "renormalize": renormalize, **local},
        "orthogonalizer": {"name": "newton-schulz", "coefficients": "quintic", "steps": 3},
    }
    return small(tables, federation=LONE)  # fmt: skip


def trained(config: Config) -> dict[str, torch.Tensor]:
    experiment = build_experiment(config)
    start = begin(experiment.recipe, experiment.task, experiment.plan.seed)
    return {name: value[0] for name, value in simulate(experiment, start).params.items()}


def by_torch(config: Config, smoothing: float, renormalize: bool) -> dict[str, torch.Tensor]:
    """The same run by a loop: the loss of torch, quintic steps by hand, scale of Jordan."""
    experiment = build_experiment(config)
    batch = experiment.shards[0].batch(None)
    start = experiment.task.initial(generator(config.federation.seed, Draw.INITIAL))
    model = nn.Sequential(nn.Linear(7, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
                          nn.Linear(256, 3)).double()  # fmt: skip
    values = {name: value[0].clone() for name, value in start.items()}
    matrices = [name for name, value in values.items() if value.ndim == 2]
    muon = matrices[1:-1]  # hidden matrices; the rest takes SGD with the same momentum
    memory = {name: torch.zeros_like(value) for name, value in values.items()}
    for _ in range(6):
        for one, value in zip(model.parameters(), values.values(), strict=True):
            one.data, one.grad = value.clone(), None
        loss = nn.functional.cross_entropy(
            model(batch.inputs.flatten(1)), batch.labels, label_smoothing=smoothing
        )
        loss.backward()
        for (name, value), one in zip(values.items(), model.parameters(), strict=True):
            assert one.grad is not None
            memory[name] = 0.7 * memory[name] + one.grad
            if name not in muon:
                values[name] = value - 0.1 * memory[name]
                continue
            z = memory[name] / memory[name].norm()
            for _ in range(3):
                a = z @ z.T
                z = (15 * z - 10 * a @ z + 3 * a @ a @ z) / 8
            value = value - 0.1 * z
            values[name] = value * (math.sqrt(len(value)) / value.norm()) if renormalize else value
    return values


@pytest.mark.parametrize(
    ("smoothing", "renormalize"),
    quick([(0.2, False), (0.0, True), (0.2, True)], [(0.2, False), (0.2, True)]),
)
def test_a_run_with_the_keys_is_a_loop_with_them(smoothing: float, renormalize: bool) -> None:
    run = config(smoothing, renormalize, **{"aux-lr": 0.1})
    found = trained(run)
    wanted = by_torch(run, smoothing, renormalize)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8)
    plain = by_torch(run, 0.0, False)  # the negative control: without the keys
    assert max(float((found[name] - plain[name]).abs().max()) for name in plain) > 1e-4
    sized = [name for name, value in found.items() if value.ndim == 2
             and abs(float(value.norm()) - math.sqrt(len(value))) < 1e-9]  # fmt: skip
    assert len(sized) == renormalize  # the one hidden matrix


def test_smoothed_cross_entropy_is_its_formula() -> None:
    outputs = torch.randn(5, 4, 3, dtype=torch.float64)  # 5 samples of 4 targets, 3 classes
    targets = torch.randint(3, (5, 4))
    targets[0, 1:] = IGNORED
    logs = outputs.log_softmax(-1)
    own = logs.gather(2, targets.clamp_min(0)[..., None])[..., 0]
    each = -(0.7 * own + 0.3 * logs.mean(-1))
    seen = targets != IGNORED
    wanted = (each * seen).sum(1) / seen.sum(1)
    torch.testing.assert_close(cross_entropy(outputs, targets, 0.3), wanted)
    assert not torch.allclose(cross_entropy(outputs, targets), wanted)
    torch.testing.assert_close(cross_entropy(outputs[:, 0], targets[:, 0], 0.3), each[:, 0])


def test_the_link_scales_each_replica_and_leaves_zeros() -> None:
    model = {"w": torch.randn(3, 4, 5), "c": torch.randn(3, 2, 3, 2, 2), "b": torch.zeros(3, 4)}
    model["w"][1] = 0.0
    update = {name: torch.zeros_like(value) for name, value in model.items()}
    context = Context(model, lambda at: (torch.zeros(3), at), [])
    chain = Chain((links.renormalize({"w": 1, "c": 1, "b": 0}),))
    moved, _ = chain.links[0].update(update, {}, context)
    new = {name: model[name] + moved[name] for name in model}
    assert new["w"].flatten(1).norm(dim=1).tolist() == pytest.approx([2, 0, 2])
    assert new["c"].flatten(1).norm(dim=1).tolist() == pytest.approx([math.sqrt(2)] * 3)
    assert torch.equal(new["b"], model["b"])
    with pytest.raises(InputError, match="a parameter is a vector"):
        links.renormalize().update(update, {}, context)


def test_where_the_keys_have_no_effect() -> None:
    with pytest.raises(
        Uncertified, match=r"renormalize = true scales the weights .* does not cover"
    ):
        momentum: dict[str, Any] = {"momentum-form": "ema"}
        method_of(config(renormalize=True, recipe="fedmuon", **momentum))
    for tables, words in (
        ({"task": {"label-smoothing": 0.1}}, "label-smoothing"),
        ({"local": {"renormalize": True}}, "renormalize"),
        ({"task": {"name": "network"}, "local": {"recipe": "fedavg", "renormalize": True}},
         "renormalize"),
        ({"task": {"name": "network", "label-smoothing": 1.0}}, "label-smoothing"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            parse(tables)
