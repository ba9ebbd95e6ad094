"""Clipping at a quantile of the norms: what is counted, what it costs, and where the bound goes."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from cut_off import broken_off
from torch import Tensor, nn

from fedmuon.config.load import Config
from fedmuon.core.arrays import read_tensors
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.run import execute
from fedmuon.privacy.accounting.composition import account
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.audit import Statistics, counted
from fedmuon.privacy.mechanisms.gaussian import Counting, Mechanism, Quantile
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping, slack

DRAWS = [partial(generator, 0)]


def private(recipe: str = "dp-sgd", **privacy: Any) -> Config:
    return small(
        federation={"clients": 3, "per-round": 2, "rounds": 3},
        local={"recipe": recipe, "lr": 0.1, "steps": 2},
        privacy={"noise": 1.0, "lot": 8.0, "bound": 0.5, "clipping": "flat", "delta": 1e-3,
                 "quantile": 0.6, "insecure-reproducible-noise": True} | privacy,
    )  # fmt: skip


def test_the_whole_release_has_the_multiplier_that_is_asked_for() -> None:
    """(1), and at m = 1 the formula of Andrew et al.; a count of no noise leaves nothing."""
    for noise, blocks, count_noise in ((1.0, 1, 3.2), (2.5, 4, 0.9), (0.0, 3, 0.0)):
        sums = Quantile(0.5, 0.2, count_noise).of_sums(noise, blocks)
        if noise:
            whole = blocks / sums**2 + 1 / (2 * count_noise) ** 2
            assert whole == pytest.approx(blocks / noise**2, rel=1e-13)
        else:
            assert sums == 0
    theirs = (1.0**-2 - (2 * 3.2) ** -2) ** -0.5
    assert Quantile(0.5, 0.2, 3.2).of_sums(1.0, 1) == pytest.approx(theirs, rel=1e-14)
    for count_noise in (0.0, 0.3, 0.5):
        with pytest.raises(InputError, match=r"Set count-noise above 0\.5"):
            Quantile(0.5, 0.2, count_noise).of_sums(1.0, 1)


@pytest.mark.parametrize("rule", ["flat", "block"])
def test_what_is_counted_is_what_single_gradients_say(rule: str) -> None:
    """Against autograd, sample by sample, of a network of four blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    task = NetworkTask(model, (3,), torch.float64, torch.device("cpu"))
    inputs = 2 * torch.randn(30, 3, dtype=torch.float64)
    labels = torch.arange(30) % 2
    params = {name: one.detach()[None].clone() for name, one in model.named_parameters()}
    norms = []
    for one, label in zip(inputs, labels, strict=True):
        loss = nn.functional.cross_entropy(model(one[None]), label[None])
        norms.append([float(g.norm()) for g in torch.autograd.grad(loss, list(model.parameters()))])
    each = np.array(norms)
    bound = float(np.median(np.linalg.norm(each, axis=1) if rule == "flat" else each)) * 1.0001
    kept = np.linalg.norm(each, axis=1) <= bound if rule == "flat" else (each <= bound).mean(1)
    at = Counting(rule, bound)
    sums = task.clipped([(1.0, params)], [Batch(inputs, labels)], at)[1]
    assert at.total() == pytest.approx(float((kept - 0.5).sum()), abs=1e-12)
    plain = task.clipped([(1.0, params)], [Batch(inputs, labels)], Clipping(rule, bound))[1]
    assert all(torch.equal(sums[name], plain[name]) for name in sums)


def released(
    quantile: Quantile, noise: float, samples: int, bounds: list[float], rng_seed: int = 0
) -> tuple[Any, dict[str, Tensor], list[Batch], MatrixTask]:
    """A release of as many clients as there are bounds, at the model 0, repeatably."""
    rng = torch.Generator().manual_seed(rng_seed)
    task = MatrixTask(4, 3, torch.float64, torch.device("cpu"), "torch", "zero")
    inputs = torch.rand((len(bounds), samples, 4), generator=rng, dtype=torch.float64) / 2
    labels = torch.arange(samples) % 3
    batches = [Batch(one, labels) for one in inputs]
    mechanism = Mechanism(Clipping("flat", 1.0), noise, 10.0, True, quantile=quantile)
    params = {"weight": torch.zeros(len(bounds), 4, 3, dtype=torch.float64)}
    draws = [partial(generator, 0, client=k) for k in range(len(bounds))]
    release = mechanism.releases(task, batches, draws)
    return release([(1.0, params)], torch.tensor(bounds)), params, batches, task


def test_each_client_is_clipped_at_its_own_bound_with_the_noise_of_both() -> None:
    """Against sums and noise made one by one; the count's noise is the draw after the blocks'."""
    quantile, bounds = Quantile(0.5, 0.2, 2.0), [0.05, 0.2, 3.0]
    found, params, batches, task = released(quantile, 1.5, 20, bounds)
    one = {"weight": params["weight"][:1]}
    for k, (bound, batch) in enumerate(zip(bounds, batches, strict=True)):
        total = task.clipped([(1.0, one)], [batch], Clipping("flat", bound))[1]["weight"]
        drawn = generator(0, Draw.NOISE, client=k, block=0).standard_normal((4, 3))
        scale = quantile.of_sums(1.5, 1) * bound * (1 + slack(torch.float64))
        assert torch.allclose(
            found.gradient["weight"][k], (total[0] + scale * torch.from_numpy(drawn)) / 10.0
        )
        at = Counting("flat", bound)
        task.clipped([(1.0, one)], [batch], at)
        last = float(generator(0, Draw.NOISE, client=k, block=1).standard_normal((1,))[0])
        assert float(found.kept[k]) == pytest.approx((at.total() + 2.0 * last) / 10.0 + 0.5)
    assert released(quantile, 0.0, 20, bounds)[0].kept[2] == 1.5  # all of 20, over a lot of 10
    empty = released(quantile, 0.0, 0, [1.0])[0]  # which still releases both
    assert float(empty.kept[0]) == 0.5 and not empty.gradient["weight"].any()


def test_an_audit_holds_the_joint_account_and_fails_one_without_the_count() -> None:
    """The canary moves the sum by C and the count by 1/2; the log-likelihood ratio is exact."""
    quantile, noise, delta, count = Quantile(0.5, 0.2, 0.8), 1.5, 1e-3, 40_000
    sums, rng = quantile.of_sums(noise, 1), np.random.default_rng(0)

    def statistic(there: float, low: float) -> np.ndarray:
        seen = [
            there + sums * rng.standard_normal(count),
            there / 2 + low * rng.standard_normal(count),
        ]
        return (seen[0] - 0.5) / sums**2 + (seen[1] - 0.25) / 2 / low**2

    true = account([Event(1.0, noise, 1)], delta).upper
    bound = counted(Statistics(statistic(1.0, 0.8), statistic(0.0, 0.8)), delta).epsilon
    assert account([Event(1.0, sums, 1)], delta).upper < bound < true  # what sums alone would be


def test_the_bound_goes_to_the_quantile_and_stays() -> None:
    """Norms of a log-normal law, gamma = 0.3, with the noise of a lot's count."""
    rng, quantile = np.random.default_rng(0), Quantile(0.3, 0.2, 10.0)
    log_bound, held = torch.tensor([3.0], dtype=torch.float64), []
    for step in range(400):
        norms = np.exp(rng.standard_normal(rng.binomial(2000, 0.1)))
        at = Counting("flat", float(log_bound.exp()))
        at.factors({"a": torch.from_numpy(norms**2)})
        share = (at.total() + 10.0 * rng.standard_normal()) / 200 + 0.5
        log_bound = quantile.moved(log_bound, torch.tensor([share]))
        held += [float(log_bound)] if step >= 100 else []
    exact = -0.5244005127080407  # of the standard normal law at 0.3
    assert abs(np.mean(held) - exact) < 0.02
    assert abs(np.mean(held) - 0.0) > 0.4  # negative control: the median


@pytest.mark.parametrize("recipe", ["dp-muon", "disk-sgd", "dp-adam"])
def test_runs_resume_to_the_same_bound_and_spend_no_more(tmp_path: Path, recipe: str) -> None:
    config = private(recipe=recipe)
    whole = execute(config, tmp_path / "whole")["privacy"]
    broken_off(config, tmp_path / "cut", after=2)
    assert execute(None, tmp_path / "cut", resume=True)["privacy"]["epsilon"] == whole["epsilon"]
    execute(private(recipe=recipe, quantile=0.0), tmp_path / "fixed")  # negative control
    ends = [
        read_tensors(tmp_path / name / "model.safetensors")[0]["weight"]
        for name in ("whole", "cut", "fixed")
    ]
    assert torch.equal(*ends[:2]) and not torch.equal(*ends[1:])
    assert whole["quantile"] == 0.6 and whole["count_noise"] == 1.0


def test_a_release_at_the_bounds_of_another_cohort_is_refused() -> None:
    stack = {"weight": torch.zeros(2, 4, 3, dtype=torch.float64)}
    task = MatrixTask(4, 3, torch.float64, torch.device("cpu"), "torch", "zero")
    mechanism = Mechanism(Clipping(), 1.0, 2.0, True, quantile=Quantile(0.5, 0.2, 2.0))
    batch = Batch(torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.long))
    for bounds, match in (
        (torch.ones(2), "one model"),
        (None, "needs the current clipping bounds"),
    ):
        with pytest.raises(InputError, match=match):
            mechanism.releases(task, [batch], DRAWS)([(1.0, stack)], bounds)
