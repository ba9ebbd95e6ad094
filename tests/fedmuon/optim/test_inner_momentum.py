"""Inner momentum against a loop over examples and models, its norms, its account, and bad input."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import fresh
from compared import built, ended, gap, problem_of, with_module
from conftest import small
from cut_off import killed, same_states
from reference import private_muon
from reference.private_methods import block, flat
from reference.private_muon import Settings, clip_then_average
from torch import nn

import fedmuon
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.optim import DPMuon, DPMuonIM
from fedmuon.tasks.base import Batch, Params, Points, cross_entropy
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping

LR, LOT, BOUND, NOISE, MEMORY = 0.3, 20.0, 0.3, 0.2, 0.8
RULES = {"flat": flat, "block": block}
CENTRAL = {"clients": 1, "per-round": 1, "rounds": 3}
FEDERATION = {"clients": 5, "per-round": 3, "rounds": 4}
WEIGHTS = {"1": (1.0,), "0.5, 0.3, 0.2": (0.5, 0.3, 0.2), "0.4, 0, 0.6": (0.4, 0.0, 0.6)}


def config(
    federation: dict[str, Any], network: bool = False, recipe: str = "dp-muon-im", **tables: Any
) -> Config:
    below: dict[str, dict[str, Any]] = {
        "federation": federation,
        "local": {"recipe": recipe, "lr": LR, "steps": 3, "momentum": MEMORY},
        "privacy": {"noise": NOISE, "lot": LOT, "bound": BOUND, "clipping": "block", "delta": 1e-3,
                    "insecure-reproducible-noise": True},
        "orthogonalizer": {"lambda": 0.001},
    }  # fmt: skip
    if not network:
        return small(below, **tables)
    below = below | {"task": {"name": "given"}}
    below["local"]["route"] = "all-matrices"
    return with_module(small(below, **tables), fresh())


def settings(rule: str = "block", **changed: Any) -> Settings:
    return replace(Settings(LR, RULES[rule](BOUND), NOISE * BOUND, LOT, MEMORY), **changed)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("federation", [CENTRAL, FEDERATION], ids=["central", "federation"])
def test_a_run_equals_the_loop_over_examples_and_models(
    federation: dict[str, Any], weights: str
) -> None:
    """Past models within and across rounds; the server averages them."""
    table = config(federation, privacy={"inner-weights": weights})
    problem, expected = problem_of(table), settings(weights=WEIGHTS[weights])
    model = ended(built(table)).params
    assert gap(model, private_muon.run(problem, expected)) < 1e-10
    if len(WEIGHTS[weights]) > 1:
        for wrong in (
            replace(expected, average=clip_then_average),
            replace(expected, weights=WEIGHTS[weights][::-1]),
            replace(expected, weights=(1.0,)),
        ):  # negative controls
            assert gap(model, private_muon.run(problem, wrong)) > 1e-6


@pytest.mark.parametrize("form", ["ema-nesterov", "polyak", "nesterov"])
def test_every_form_of_momentum(form: str) -> None:
    weights = "0.5, 0.3, 0.2"
    table = config(CENTRAL, local={"momentum-form": form}, privacy={"inner-weights": weights})
    expected = settings(weights=WEIGHTS[weights], form=form)
    assert gap(ended(built(table)).params, private_muon.run(problem_of(table), expected)) < 1e-10


@pytest.mark.parametrize("rule", RULES)
def test_a_network_equals_the_loop_over_examples_and_models(rule: str) -> None:
    """Norms of sums over models are computed from products of inputs and output gradients."""
    table = config(FEDERATION, True, privacy={"clipping": rule, "inner-weights": "0.6, 0.4"})
    problem, expected = problem_of(table), settings(rule, weights=(0.6, 0.4))
    model = ended(built(table)).params
    assert gap(model, private_muon.run(problem, expected)) < 1e-10
    wrong = replace(expected, average=clip_then_average)
    assert gap(model, private_muon.run(problem, wrong)) > 1e-7


class Embedded(nn.Module):
    """Tokens in an embedding that is also the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(9, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))).mean(1))


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (6,)),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)),
        (2, 5, 5),
    ),
    "tied tokens": (Embedded, (7,)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kernel_clips_the_sum_over_models(name: str) -> None:
    """The clipped sum, from full gradients by autograd of one example and model after the other."""
    torch.manual_seed(0)
    create, shape = NETWORKS[name]
    module = create().double()
    task = NetworkTask(module, shape, torch.float64, torch.device("cpu"), cross_entropy,
                       whole=name == "tied tokens")  # fmt: skip
    inputs = torch.randn(8, *shape).double() if name != "tied tokens" else torch.randint(9, (8, 7))
    labels = torch.randint(3, (8,))
    first = {key: value.detach()[None] for key, value in module.named_parameters()}
    drift: list[Params] = [first]
    for _ in range(2):
        drift.append({key: x + 0.3 * torch.randn_like(x) for key, x in drift[-1].items()})
    points: Points = [*zip((0.2, 0.3, 0.5), drift, strict=True)]
    sums = task.clipped(points, [Batch(inputs, labels)], Clipping("block", 0.1))[1]

    def gradient(params: Params, row: int) -> Params:
        leaves = {key: value[0].clone().requires_grad_() for key, value in params.items()}
        outputs = torch.func.functional_call(module, leaves, (inputs[row : row + 1],))
        nn.functional.cross_entropy(outputs, labels[row : row + 1]).backward()
        return {key: value.grad for key, value in leaves.items()}  # type: ignore[misc]

    expected = {key: torch.zeros_like(value[0]) for key, value in first.items()}
    of_bounds = {key: torch.zeros_like(value[0]) for key, value in first.items()}
    for row in range(8):
        parts = [(c, gradient(params, row)) for c, params in points]
        for key in first:
            mean = torch.stack([c * part[key] for c, part in parts]).sum(0)
            bound = sum(c * float(part[key].norm()) for c, part in parts)
            expected[key] += mean * min(1.0, 0.1 / float(mean.norm()))
            of_bounds[key] += mean * min(1.0, 0.1 / bound)
    assert gap(sums, {key: value.numpy() for key, value in expected.items()}) < 1e-12
    # The negative control: the cheap upper bound of the norm, without products between models
    assert gap(sums, {key: value.numpy() for key, value in of_bounds.items()}) > 1e-3


def test_one_weight_is_dp_muon_bit_for_bit() -> None:
    """A weight of 0 changes no bit either, because its gradient is not computed."""
    plain = ended(built(config(FEDERATION, recipe="dp-muon")))
    for weights in ("1", "1, 0, 0"):
        state = ended(built(config(FEDERATION, privacy={"inner-weights": weights})))
        assert torch.equal(state.params["weight"], plain.params["weight"])
    other = ended(built(config(FEDERATION)))
    assert not torch.equal(other.params["weight"], plain.params["weight"])


def test_past_models_are_sent_and_stored() -> None:
    state = ended(built(config(FEDERATION, privacy={"inner-weights": "0.5, 0.3, 0.2"})))
    assert {*state.states["gradient"]} == {"before-1 weight", "before-2 weight"}
    shape = state.params["weight"].shape
    assert all(value.shape == shape for value in state.states["gradient"].values())


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    """The past models are in the checkpoint, and a round that was lost is repeated."""
    table = config(CENTRAL | {"rounds": 6}, privacy={"inner-weights": "0.5, 0.3, 0.2"})
    killed(table, tmp_path / "run", range(1, 6))
    execute(table, tmp_path / "whole")
    same_states(tmp_path / "run", tmp_path / "whole")


def test_the_account_is_that_of_dp_muon(tmp_path: Path) -> None:
    """Equal to dp-accounting for as many Poisson-sampled Gaussian releases as there are steps."""
    import dp_accounting  # slow, and collecting does not need it

    weights = {"inner-weights": "0.5, 0.3, 0.2"}
    tables = {"dp-muon-im": config(CENTRAL, privacy=weights | {"noise": 2.0}),
              "dp-muon": config(CENTRAL, recipe="dp-muon", privacy={"noise": 2.0})}  # fmt: skip
    ours, plain = (
        {**execute(table, tmp_path / recipe)["privacy"], "ledger": ""}
        for recipe, table in tables.items()
    )
    reason = "past models follow from earlier releases"
    assert reason in ours["note"] and reason not in plain["note"]
    assert ours | {"note": ""} == plain | {"note": ""}
    accountant = dp_accounting.pld.PLDAccountant()
    release = dp_accounting.PoissonSampledDpEvent(LOT / 90, dp_accounting.GaussianDpEvent(2.0))
    accountant.compose(release, 9)  # the steps of three rounds, with a single matrix
    assert ours["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=0.01)
    accountant.compose(release, 9)  # the negative control: a release for each model
    assert ours["epsilon"] < 0.9 * accountant.get_epsilon(1e-3)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ("0.5, 0.4", "the sum of these weights is 0.9, but it must be 1"),
        ("1.5, -0.5", "'1.5' is no weight"),
        ("0.5; 0.5", "'0.5; 0.5' is no weight"),
        ("", "'' is no weight"),
        ("nan, 1", "'nan' is no weight"),
        (", ".join(["0.02"] * 50), "at most 32 models"),
    ],
)
def test_bad_weights_are_rejected(weights: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        small(local={"recipe": "dp-muon-im"}, privacy={"inner-weights": weights})


def test_weights_without_effect_are_rejected() -> None:
    with pytest.raises(InputError, match="inner-weights"):
        small(local={"recipe": "dp-muon"}, privacy={"inner-weights": "0.6, 0.4"})
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    privacy = {"noise": 2.0, "lot": 20.0, "inner-weights": "0.6, 0.4"}
    with pytest.raises(InputError, match="Leave inner-weights out"):
        DPMuon(model, population=100, privacy=privacy)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


INPUTS, LABELS = torch.randn(100, 4), torch.randint(2, (100,))
PRIVACY = {"bound": 0.1, "noise": 2.0, "lot": 20.0, "insecure-reproducible-noise": True}


def stepped(private: fedmuon.optim.Private, steps: int) -> list[torch.Tensor]:
    """The parameters after these steps."""
    for lot in private.lots(steps):
        private.step(lot, INPUTS[lot.rows], LABELS[lot.rows])
    return [value.detach().clone() for group in private.param_groups for value in group["params"]]


def test_the_torch_optimizer_resumes_bit_identically() -> None:
    """And with one weight, it is DPMuon."""
    weights = {"inner-weights": "0.5, 0.3, 0.2"}

    def optimizer(kind: Any = DPMuonIM, **privacy: Any) -> Any:
        return kind(network(), population=100, privacy=PRIVACY | privacy)

    whole = stepped(optimizer(**weights), 5)
    model = network()
    first = DPMuonIM(model, population=100, privacy=PRIVACY | weights)
    stepped(first, 2)
    second = DPMuonIM(model, population=100, privacy=PRIVACY | weights)
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, stepped(second, 3), whole))
    plain = stepped(optimizer(DPMuon), 5)
    assert all(map(torch.equal, stepped(optimizer(**{"inner-weights": "1"}), 5), plain))
    assert not all(map(torch.equal, whole, plain))
    spent = optimizer(DPMuon)
    stepped(spent, 5)
    assert second.epsilon(1e-3).epsilon == spent.epsilon(1e-3).epsilon


def test_the_first_models_are_all_the_first() -> None:
    """At step 0, all points are the same model, so the release is that of DP-Muon."""
    federation, local = CENTRAL | {"rounds": 1}, {"steps": 1}
    ours = ended(built(config(federation, local=local)))
    plain = ended(built(config(federation, recipe="dp-muon", local=local)))
    np.testing.assert_allclose(ours.params["weight"], plain.params["weight"], rtol=1e-12)
