"""Centralised recipes against torch's own optimizers, and the forms of momentum compared."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from brought import PLAIN, tables
from conftest import small
from test_rounds import trained

import fedmuon
from fedmuon import links
from fedmuon.config.load import Config
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import begin
from fedmuon.federated.wire import pack, unpack
from fedmuon.optim.chain import Chain, Context
from fedmuon.optim.links import momentum, normalize
from fedmuon.optim.schedules import heavy_tailed
from fedmuon.tasks.base import Params

NOWHERE = Context({}, lambda params: (torch.zeros(1), {}), [])
LONE = {"clients": 1, "per-round": 1, "rounds": 4}
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def central(**local: Any) -> Config:
    """One client with all data, 4 rounds of 3 steps."""
    return small({"local": {"lr": 0.3, "steps": 3, "momentum": 0.8}}, federation=LONE, local=local)


def by_torch(config: Config, make: type[torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    """The last X [d, c] of a torch optimizer on the same gradients."""
    experiment = build_experiment(config)
    X = experiment.task.initial(generator(config.federation.seed, Draw.INITIAL))["weight"]
    X = X.clone().requires_grad_()
    optimizer = make([X], **{"lr": config.local.lr, **options})
    for _ in range(config.federation.rounds * config.local.steps):
        batch = experiment.shards[0].batch(None)
        X.grad = experiment.task.gradient({"weight": X.detach()}, [batch])[1]["weight"]
        optimizer.step()
    return X.detach()[0]


@pytest.mark.parametrize(
    ("local", "make", "options"),
    [
        ({"recipe": "sgd", "momentum-form": "polyak"}, SGD, {"momentum": 0.8}),
        ({"recipe": "sgd", "momentum-form": "nesterov", "weight-decay": 0.0}, SGD,
         {"momentum": 0.8, "nesterov": True}),
        ({"recipe": "adamw", "lr": 0.02}, ADAMW, {"weight_decay": 0.0}),
        ({"recipe": "adamw", "lr": 0.02, "weight-decay": 0.3}, ADAMW, {"weight_decay": 0.3}),
    ],
)  # fmt: skip
def test_centralised_recipes_are_torchs(
    local: dict, make: type[torch.optim.Optimizer], options: dict
) -> None:
    config = central(**local)
    expected = by_torch(config, make, **options)
    found = trained(config).params["weight"][0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    other = by_torch(config, SGD)  # the control: without momentum or moments
    assert float((found - other).norm()) > 1e-3 * float(other.norm())


@pytest.mark.parametrize("ahead", [False, True])
def test_forms_agree_under_an_exact_map_and_differ_under_a_smoothed_one(ahead: bool) -> None:
    """The zero singular value of the softmax's gradients is excluded by Gaussian ones."""
    torch.manual_seed(0)
    gradients = torch.randn(6, 1, 5, 3, dtype=torch.float64)
    names = ("ema-nesterov", "nesterov") if ahead else ("ema", "polyak")
    averaged, plain = (_directions(name, gradients) for name in names)
    assert ahead == (not torch.equal(averaged, _directions("ema", gradients)))
    torch.testing.assert_close(averaged * 5, plain, rtol=1e-12, atol=1e-12)  # 1 / (1 - 0.8)
    svd = torch.linalg.svd(averaged, full_matrices=False)
    other = torch.linalg.svd(plain, full_matrices=False)
    torch.testing.assert_close(svd.U @ svd.Vh, other.U @ other.Vh, rtol=1e-9, atol=1e-9)
    soft = [s.S / (s.S.square() + 0.1).sqrt() for s in (svd, other)]
    assert float((soft[0] - soft[1]).abs().max()) > 1e-2


def _directions(form: str, gradients: torch.Tensor) -> torch.Tensor:
    link = momentum(0.8, form)
    state, found = link.init({"w": gradients[0]}), []
    for gradient in gradients:
        direction, state = link.update({"w": gradient}, state, NOWHERE)
        found.append(direction["w"])
    return torch.stack(found)


def test_lemma_3_3_of_nesterov_muon() -> None:
    """Its recursion for M-tilde, which never forms C, against the links; for k >= 1."""
    gradients = torch.randn(
        7, 1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    beta = 0.8
    for scale, forms in ((1 - beta, ("polyak", "nesterov")), (1.0, ("ema", "ema-nesterov"))):
        c, m = (scale * _directions(name, gradients) for name in forms)
        for k in range(1, len(gradients)):
            new, last = gradients[k], gradients[k - 1]
            torch.testing.assert_close(
                c[k], beta * c[k - 1] + (1 - beta) * new, rtol=1e-12, atol=1e-12
            )
            ahead = beta * m[k - 1] + (1 - beta) * (1 + beta) * new
            wanted = ahead - (1 - beta) * beta * last
            torch.testing.assert_close(m[k], wanted, rtol=1e-12, atol=1e-12)
            assert float((m[k] - ahead).abs().max()) > 1e-2  # the control: without the last term


def test_normalized_steps_have_length_one() -> None:
    params: Params = {"a": torch.randn(3, 4, 2), "b": torch.zeros(3, 5)}
    params["a"][1] = 0.0
    found, _ = normalize().update(params, {}, NOWHERE)
    assert found["a"].flatten(1).norm(dim=1).tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert Chain((normalize(),)).init(params, {}) == {"normalize": {}}


def test_the_heavy_tailed_schedule_is_resolved_into_the_config() -> None:
    config = resolve(central(schedule="heavy-tailed", **{"tail-index": 1.5}))
    assert config.local.lr == pytest.approx(0.3 * 12 ** (-2 / 2.5))
    assert config.local.momentum == pytest.approx(1 - 12 ** (-1.5 / 2.5))
    assert resolve(config) == config
    assert heavy_tailed(100) == pytest.approx((100**-0.75, 0.9))
    assert heavy_tailed(100) == heavy_tailed(100, 2.0) != heavy_tailed(100, 1.9)


def test_states_of_any_shape_travel() -> None:
    config = central(recipe="adamw")
    experiment = build_experiment(config)
    state = begin(experiment.recipe, experiment.task, 0)
    flat = pack(state.params, state.states)
    params, states = unpack(copy.copy(flat), state.params, state.states)
    assert states["adamw"]["steps"].shape == (1,)
    assert torch.equal(params["weight"], state.params["weight"])


def test_matrices_cut_unevenly_keep_their_rows() -> None:
    """Seven rows cut into 3 are 3, 3 and 1: pieces of one shape are mapped together."""
    link = links.orthogonalize(lambda stack: stack, routes={"z": 1, "a": 3})
    direction = {"z": torch.randn(1, 1, 3), "a": torch.randn(1, 7, 3)}
    found, _ = link.update(direction, {}, None)  # type: ignore[arg-type]
    assert all(torch.equal(found[name], direction[name]) for name in direction)


def test_only_chooses_by_name() -> None:
    direction = {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}
    halved = links.stateless("half", lambda d, context: {name: v / 2 for name, v in d.items()})
    half = links.only(lambda name: name == "b", halved)
    found, _ = half.update(direction, {}, None)  # type: ignore[arg-type]
    assert found["a"].eq(1).all() and found["b"].eq(0.5).all()


@pytest.mark.parametrize("whole", [False, True])
def test_links_of_one_name_have_states_of_their_own(whole: bool) -> None:
    """A weight and a bias with momenta of their own move as they would beside a plain other one."""
    first, second = links.momentum(0.9), links.momentum(0.5)

    def ends(*between: fedmuon.Link) -> dict[str, torch.Tensor]:
        chain = (links.gradient(), *between, links.descend(0.1))
        return fedmuon.run(tables(federation={"rounds": 3}), **PLAIN, recipe=chain).model

    one, other = first, second  # two filters in a row
    if not whole:
        one = links.only(lambda name: name == "weight", first)
        other = links.only(lambda name: name == "bias", second)
    found, expected = ends(one, other), ends(one, dataclasses.replace(other, name="other"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    names = [link.name for link in links.Chain((first, second, first)).links]
    assert names == ["momentum", "momentum-2", "momentum-3"]
