"""Recipes other than FedMuon: their recursion against products of matrices, against runs that
attain it, and their certificates against neighbours of real runs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from mpmath import matrix, mp, mpf

from fedmuon import analysis
from fedmuon.analysis.theory.recursion import Method, method_amplification
from fedmuon.analysis.theory.trajectories import Start, reach
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.data.neighbours import Neighbours
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.certificates import method_of
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import begin, simulate
from fedmuon.federated.shards import Shards
from fedmuon.optim.aggregators import by_samples
from fedmuon.optim.orthogonalizers import Orthogonalizer
from fedmuon.optim.recipes import make_recipe
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.constants import Constants

mp.dps = 50
METHODS = {
    "fedmuon": Method(0.9),
    "nesterov": Method(0.9, "nesterov"),
    "ema-nesterov": Method(0.9, "ema-nesterov"),
    "polyak": Method(0.6, "polyak"),
    "decay": Method(0.9, decay=0.3),
    "much decay": Method(0.5, decay=40.0),  # eta decay = 2.8 at times: it grows
    "local-muon": Method(0.9, afresh=True),
    "fedavg": Method(0.0),
    "fedavgm": Method(0.0, server=0.8),
    "fedavgm with decay": Method(0.0, decay=0.5, server=0.8),
    "aligned": Method(0.9, alignment=0.3),
    "everything": Method(0.7, "ema-nesterov", 0.4, afresh=True, server=0.5, alignment=0.2),
}
RATES, STEPS, L, LG = np.array([0.05, 0.02, 0.0, 0.07]), 3, 1.7, 0.8


def local_step(method: Method, eta: Any, l_g: Any) -> tuple[Any, Any]:
    """(1) as a matrix on (x, m, v, d, y), and the kick of a unit Delta."""
    beta, alpha = mpf(method.beta), mpf(method.alignment)
    f = 1 - beta if method.form.startswith("ema") else mpf(1)
    t_row, t_kick = (f * l_g, beta), f
    if "nesterov" in method.form:
        t_row, t_kick = (beta * f * l_g + f * l_g, beta * beta), beta * f + f
    push, decay = eta * (1 - alpha) * mpf(L), eta * mpf(method.decay)
    s = [push * t_row[0], push * t_row[1], 0, eta * alpha, 0]
    A = matrix([
        [abs(1 - decay) + s[0], *s[1:]], [f * l_g, beta, 0, 0, 0], [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0], [s[0] + decay, s[1], 0, s[3], 1],
    ])  # fmt: skip
    return A, matrix([push * t_kick, f, 0, 0, push * t_kick])


def whole_round(method: Method, r: int, z: Any, l_g: Any, kicked: int | None) -> Any:
    """(2) after E steps, of which one is kicked."""
    eta, b, v = mpf(RATES[r % 4]), mpf(method.server), z[2]
    z = matrix([z[0], 0 if method.afresh else z[1], v, z[3], 0])
    for k in range(STEPS):
        A, kick = local_step(method, eta, mpf(l_g[k]))
        z = A * z + int(k == kicked) * kick
    return matrix([z[0] + b * v, z[1], b * v + z[4], z[4] / (eta * STEPS) if eta else 0, 0])


def naive(method: Method, l_g: np.ndarray) -> np.ndarray:
    """What a unit kick at every (s, k) becomes, forwards, in 50 digits."""
    found = np.empty(l_g.shape)
    for s, k in np.ndindex(found.shape):
        z = matrix([0] * 5)
        for r in range(len(RATES)):
            z = whole_round(method, r, z, l_g[r], k if r == s else None)
        found[s, k] = float(z[0])
    return found


@pytest.mark.parametrize("name", list(METHODS))
def test_what_long_runs_forget_keeps_its_digits(name: str) -> None:
    """Strong decay leaves next to nothing of the first round, which no difference from 1 is."""
    z, rates = matrix([0] * 5), np.tile(RATES, 12)
    for r in range(48):
        z = whole_round(METHODS[name], r, z, [LG] * STEPS, 1 if r == 0 else None)
    found = method_amplification(METHODS[name], rates, L, LG, STEPS)[0, 1]
    assert found == pytest.approx(float(z[0]), rel=1e-12) and found > 0


@pytest.mark.parametrize("name", list(METHODS))
def test_rounds_that_are_alike_are_doubled(name: str) -> None:
    """The same as rounds one by one, which step sizes that differ by nothing much make them."""
    rates = np.full(57, 0.03)
    other = rates * (1 + 1e-15 * np.arange(57))
    found = method_amplification(METHODS[name], rates, L, LG, STEPS)
    wanted = method_amplification(METHODS[name], other, L, LG, STEPS)
    np.testing.assert_allclose(found, wanted, rtol=1e-11)
    assert not np.array_equal(rates, other)


@pytest.mark.parametrize("name", list(METHODS))
def test_the_recursion_is_the_product_of_its_matrices(name: str) -> None:
    """For one Lg, and for one of every step; the control is another momentum."""
    method, by_step = METHODS[name], LG * np.linspace(0.5, 1.5, 4 * STEPS).reshape(4, STEPS)
    for l_g in (LG, by_step):
        found = method_amplification(method, RATES, L, l_g, STEPS)
        wanted = naive(method, np.broadcast_to(l_g, (4, STEPS)))
        np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-300)
    other = replace(method, beta=method.beta + 0.05)
    assert not np.allclose(method_amplification(other, RATES, L, LG, STEPS), found, rtol=1e-3)


def test_what_overflows_is_infinite_and_nonsense_is_refused() -> None:
    huge = method_amplification(METHODS["aligned"], np.full(5, 1e200), 1e200, 1.0, 2)
    assert np.isinf(huge[0]).all() and not np.isnan(huge).any()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"beta": 1.5}, "beta"), ({"decay": -1.0}, "decay"), ({"server": -0.5}, "server"),
        ({"form": "heavy"}, "must be one of ema"), ({"alignment": 2.0}, "a share"),
    ]  # fmt: skip
    for given, why in wrong:
        with pytest.raises(InputError, match=why):
            Method(**{"beta": 0.5, **given})
    with pytest.raises(InputError, match="lr"):
        method_amplification(Method(0.5), -RATES, L, LG, STEPS)


class Repelled:
    """grad(X, z) = -Lg X - z on a row of X: two runs go apart as fast as (1) allows."""

    dtype, device, stack_limit = torch.float64, torch.device("cpu"), 1 << 18
    thread_safe = keyed = False

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        return {"weight": torch.zeros(stack, 3, 1, dtype=torch.float64)}

    def gradient(self, params: Params, batches: list[Batch]) -> tuple[torch.Tensor, Params]:
        found = []
        for weight, batch in zip(params["weight"].chunk(len(batches)), batches, strict=True):
            mean = batch.inputs.mean(0).expand(len(weight), -1).clone()
            if (there := batch.replaced) is not None:
                moved = there.inputs - batch.inputs[there.position]
                mean[there.replica] += moved / len(batch.labels)
            found.append(-LG * weight - mean[..., None])
        slope = torch.cat(found)
        return slope.new_zeros(len(slope)), {"weight": slope}


SIZES = np.array([4, 7, 5])
LOCAL = {
    "fedmuon": {}, "schedule": {}, "muon": {"recipe": "muon"}, "decay": {"weight-decay": 0.4},
    **{form: {"momentum-form": form} for form in ("nesterov", "ema-nesterov", "polyak")},
    "local-muon": {"recipe": "local-muon", "momentum-form": "ema-nesterov"},
    "fedavg": {"recipe": "fedavg", "weight-decay": 0.2},
    "fedavgm": {"recipe": "fedavgm", "server-momentum": 0.8},
    "sgd": {"recipe": "sgd", "momentum-form": "polyak"},
    "aligned": {"recipe": "fedmuon-aligned", "alignment": 0.3},
    "aligned batch": {"recipe": "fedmuon-aligned", "alignment": 0.6, "batch": 4},
}  # fmt: skip


@pytest.mark.parametrize("average", ["mean", "by-samples"])
@pytest.mark.parametrize("name", list(LOCAL))
def test_a_run_attains_its_certificate(name: str, average: str) -> None:
    """The product's own chains on gradients that repel, neighbours in one direction: what is
    promised is what happens, so 1% less would be exceeded, and 1% more would be idle."""
    local = {"steps": STEPS, "lr": 0.05, **LOCAL[name]}
    config = parse({"local": local, "federation": {"aggregate": average}})
    own_map = Orthogonalizer(lambda m: L * m, L)
    recipe = make_recipe(config.local, config.orthogonalizer, custom_map=own_map)
    if average == "by-samples":
        recipe = replace(recipe, aggregate=by_samples())
    falling = (lambda r: 1 / (1 + r)) if name == "schedule" else None
    plan = RandomnessPlan(1, 3, 2, 5, STEPS, config.local.batch, factor=falling)
    inputs = torch.randn(16, 3, dtype=torch.float64)
    offsets, far = np.concatenate([[0], SIZES.cumsum()]), 0.25
    shards = Shards(inputs, torch.zeros(16, dtype=torch.int64), offsets, Batch(inputs, inputs))
    shards = replace(shards, neighbours=each_row_moved(inputs, far))
    task: Any = Repelled()
    ends = simulate(Experiment(recipe, task, plan, shards), begin(recipe, task, 1, 17)).params
    moved = (ends["weight"][1:] - ends["weight"][:1]).norm(dim=(1, 2)).numpy()
    found = [part.max() for part in np.split(moved, offsets[1:-1])]
    run = analysis.Run(
        0.05, 0.9, 5, STEPS, SIZES, SIZES / 16, Constants(1.0, 1.0, far / 2, LG),
        batch=config.local.batch, factors=plan.factors(), method=method_of(config),
        by_samples=average == "by-samples",
    )  # fmt: skip
    part = analysis.Realized(plan.schedule(), plan.rows if config.local.batch else None)
    slope = L if "muon" in config.local.recipe else 1.0
    promised = analysis.certificate(run, slope, part)
    np.testing.assert_allclose(promised, found, rtol=1e-9)
    assert (found > 0.99 * promised).all() and min(found) > 0


def each_row_moved(inputs: torch.Tensor, far: float) -> Neighbours:
    """The data, and each sample by itself moved that far along the first axis."""
    client = np.repeat(np.arange(3), SIZES)
    position = np.concatenate([np.arange(size) for size in SIZES])
    moved = inputs.numpy() + far * np.eye(3)[0]
    none = np.zeros(17, dtype=int)
    return Neighbours(
        np.append(-1, client), np.append(0, position), none,
        np.concatenate([moved[:1], moved]), none,
    )  # fmt: skip


FAR = Start(3, 1e9)  # where gradients are at most what they are anywhere: no step changes that


@pytest.mark.parametrize("name", ["nesterov", "ema-nesterov", "polyak", "fedavg", "fedavgm"])
def test_how_far_a_recipe_gets(name: str) -> None:
    """Sums written out: a gradient counts f beta^(t-j) in the momentum of step t, a round's moves
    b^(r-q) in the velocity of round r; Orth(M) = 2 M. The control is the plain form."""
    method, top = METHODS[name], math.sqrt(2) / 4
    found = reach(FAR, RATES, method, lambda s: 2 * s, STEPS).radius
    weigh = lambda t: sum(method.fresh * method.beta ** (t - j) for j in range(t + 1))  # noqa: E731
    moves = []
    for t, rate in enumerate(np.repeat(RATES, STEPS).tolist()):
        size = weigh(t)
        size = method.beta * size + method.fresh if "nesterov" in method.form else size
        moves.append(rate * 2 * size * top)
    rounds = np.reshape(moves, (4, STEPS)).sum(1)
    wanted = sum(method.server ** (r - q) * rounds[q] for r in range(4) for q in range(r + 1))
    assert found == pytest.approx(float(wanted), rel=1e-12)
    plain = reach(FAR, RATES, method.beta, lambda s: 2 * s, STEPS).radius
    assert (found == pytest.approx(plain, rel=1e-9)) == (name == "fedavg")


@pytest.mark.parametrize(("tables", "why"), [
    ({"local": {"recipe": "dp-sgd"}, "privacy": {"noise": 1.0}}, "Poisson lots"),
    ({"federation": {"aggregate": "krum"}}, "weighted means"),
    ({"local": {"schedule": "heavy-tailed"}}, "step size during the run"),
])  # fmt: skip
def test_what_stays_refused_says_why(tables: dict[str, Any], why: str) -> None:
    case = certificates.CertifiedSetting(small(**tables), np.full(6, 15), analysis.Uniform(3, 0.01))
    assert (
        why in certificates.certify(case).refusal
        and certificates.report(case, certificates.certify(case))["n_eff"] > 0
    )


def test_weighted_averages_need_the_schedule() -> None:
    config = small(federation={"aggregate": "by-samples"})
    sizes = np.array([5, 10, 15, 20, 25, 30])
    case = certificates.CertifiedSetting(config, np.full(6, 15), analysis.Uniform(3, 0.01))
    unequal = certificates.certify(replace(case, sizes=sizes)).refusal
    assert "depends on" in unequal and "other participants" in unequal
    alike = [
        certificates.certify(one).certificates for one in (case, replace(case, config=small()))
    ]
    np.testing.assert_allclose(*map(np.array, alike), rtol=1e-13)  # each weight is 1/K
    drawn = np.array([[0, 1, 2]] * 8)
    known = replace(case, participation=analysis.Realized(drawn))
    alike = [
        certificates.certify(one).certificates for one in (known, replace(known, config=small()))
    ]
    np.testing.assert_allclose(*map(np.array, alike), rtol=1e-13)
    everyone = replace(case, sizes=sizes, participation=analysis.Uniform(6, 0.01))
    drawn = replace(everyone, participation=analysis.Realized(np.tile(np.arange(6), (8, 1))))
    alike = [certificates.certify(one).certificates for one in (everyone, drawn)]
    np.testing.assert_allclose(*map(np.array, alike), rtol=1e-13)


def test_a_network_s_step_sizes_decay_apart() -> None:
    """Only of Muon's recipes, which step some of its parameters by another one."""
    network = {"data": {"name": "digits"}, "task": {"name": "network", "model": "mlp"}}
    for recipe, refused in (("fedmuon", True), ("fedavg", False)):
        config = parse({**network, "local": {"recipe": recipe, "weight-decay": 0.1}})
        case = certificates.CertifiedSetting(config, np.full(20, 15), analysis.Uniform(5, 0.01),
                          constants=Constants(1, 1, 1, 1), l_orth=1.0)  # fmt: skip
        assert ("two step sizes" in certificates.certify(case).refusal) == refused
