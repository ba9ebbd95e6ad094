"""DP-MuonBC in a federation: how wide its probes are, beside the noise of averaged momenta."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from cut_off import run_until

import fedmuon
from fedmuon.config.load import Config
from fedmuon.config.schema import Local, OrthogonalizerTable, Privacy
from fedmuon.core.errors import InputError
from fedmuon.core.rng import generator
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_experiment
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, server_update, simulate
from fedmuon.optim import links
from fedmuon.optim.chain import Context, Params, forbidden_gradient
from fedmuon.optim.recipe import Recipe, initial_states
from fedmuon.optim.recipes import make_recipe
from fedmuon.optim.stage import Reply, ServerState
from fedmuon.tasks.base import Released
from fedmuon.tasks.matrix import MatrixTask

MU, KAPPA, NOISE, STEPS = 0.9, 0.4, 1e6, 30
PLAIN, DISK, BY_SAMPLES = "dp-muonbc", "disk-muonbc", "by-samples"
Sizes = tuple[int, int, int]  # N clients, K of them in a round, E local steps
Shares = Callable[[np.ndarray], np.ndarray]  # numbers of samples [K] -> weights [K]
SHARES: dict[str, Shares] = {
    "mean": lambda sizes: np.ones(len(sizes)) / len(sizes),
    BY_SAMPLES: lambda sizes: sizes / sizes.sum(),
    "first-two": lambda sizes: np.array([0.5, 0.5, 0.0, 0.0]),
}


def federation(N: int, K: int, E: int, recipe: str, average: str, rows: int, form: str) -> Config:
    """N clients of K a round, beside whose noise no gradient counts; matrices of that many rows."""
    return small(
        {"privacy": {"kappa": KAPPA}},
        data={"train": 40 * N, "dimension": rows, "classes": 10},
        federation={"clients": N, "per-round": K, "rounds": STEPS // E, "aggregate": average},
        local={"recipe": recipe, "steps": E, "momentum": MU, "momentum-form": form},
        privacy={"noise": NOISE, "lot": 10.0, "insecure-reproducible-noise": True},
    )


def made(config: Config) -> Experiment:
    return build_experiment(config)


def old_rule(recipe: Recipe) -> Recipe:
    """Second moments averaged as any state is: the noise of K momenta for that of their mean."""
    links = (replace(link, averaged=None) for link in recipe.chain.links)
    return replace(recipe, chain=replace(recipe.chain, links=tuple(links)))


def forgetful(recipe: Recipe) -> Recipe:
    """As Local Muon: every round begins afresh."""
    return replace(recipe, sent=(), returned=(), kept=())


def first_two(recipe: Recipe) -> Recipe:
    """An average of one's own that says what its weights are, for rounds of four."""

    def apply(replies: Any) -> Params:
        first, second = replies[0].params, replies[1].params
        return {name: (first[name] + second[name]) / 2 for name in first}

    own = fedmuon.Aggregator(apply, shares=lambda replies: [0.5, 0.5, 0.0, 0.0])
    return replace(recipe, aggregate=own)


def widths(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The mean square of the entries of M^ of each client at each step, and the variance of its
    probes [R E, K, 2]; the model stays where it is."""
    seen: list[list[list[float]]] = []

    def spy(orthogonal: Any, unit: Params, width: Any, context: Context, probes: int) -> Params:
        (matrices,) = unit.values()
        pairs = zip(matrices, width, strict=True)
        seen.append([[float(m.square().mean()), float(w) ** 2] for m, w in pairs])
        return {name: torch.zeros_like(value) for name, value in unit.items()}

    monkeypatch.setattr(links, "unbiased", spy)
    experiment = replace(experiment, recipe=replace(experiment.recipe, thread_safe=False))
    monkeypatch.setattr(MatrixTask, "stack_limit", 1 << 40)  # one cohort
    simulate(experiment, begin(experiment.recipe, experiment.task, 0))
    return np.array(seen)


def by_weights(experiment: Experiment, kappa: float, shares: Shares) -> Iterator[list[float]]:
    """The variance of M^ of each client at each step, in units of a draw's: f and m as vectors of
    what each draw of the run counts in them, with nothing known of variances."""
    plan, shards, keeps = experiment.plan, experiment.shards, bool(experiment.recipe.sent)
    draws = iter(np.eye(plan.rounds * plan.per_round * plan.steps))
    server: tuple[Any, Any] = (0.0, 0.0)
    begun = 0
    for chosen in plan.schedule():
        if not keeps:
            server, begun = (0.0, 0.0), 0
        ends, steps = [], []
        for _ in chosen:
            (f, m), seen = server, []
            for t in range(begun + 1, begun + plan.steps + 1):
                draw = next(draws)
                f = draw if t == 1 else (1 - kappa) * f + kappa * draw
                m = MU * m + f
                seen.append(m @ m * ((1 - MU) / (1 - MU**t)) ** 2)
            ends.append((f, m))
            steps.append(seen)
        begun += plan.steps
        weights = shares(np.array([shards[int(i)].size for i in chosen]))
        f, m = (weights @ np.array(part) for part in zip(*ends, strict=True))
        server = f, m
        yield from np.transpose(steps).tolist()


@pytest.mark.parametrize(
    ("sizes", "recipe", "average", "form", "changed"),
    [
        ((1, 1, 3), PLAIN, "mean", "ema", replace),
        pytest.param((6, 6, 1), PLAIN, "mean", "polyak", replace, marks=pytest.mark.slow),
        ((9, 4, 3), PLAIN, BY_SAMPLES, "ema", replace),
        pytest.param((9, 4, 3), DISK, "mean", "ema", replace, marks=pytest.mark.slow),
        ((9, 4, 2), DISK, BY_SAMPLES, "polyak", replace),
        ((9, 4, 3), DISK, "mean", "ema", forgetful),
        ((9, 4, 2), DISK, "first-two", "ema", first_two),
    ],
)
def test_probes_are_as_wide_as_the_weights_of_all_draws(
    sizes: Sizes, recipe: str, average: str, form: str, changed: Any, monkeypatch: Any
) -> None:
    """To the last digits, at every step of every client; the control is the old rule."""
    named = "mean" if average == "first-two" else average
    experiment = made(federation(*sizes, recipe, named, 3, form))
    experiment = replace(experiment, recipe=changed(experiment.recipe))
    mechanism = experiment.recipe.mechanism
    assert mechanism is not None
    kappa = KAPPA if recipe == DISK else 1.0
    wanted = np.array(list(by_weights(experiment, kappa, SHARES[average])))
    found = widths(experiment, monkeypatch)[..., 1] / mechanism.spread**2
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    wrong = widths(replace(experiment, recipe=old_rule(experiment.recipe)), monkeypatch)
    averages = sizes[1] > 1 and changed is not forgetful
    assert ((wrong[..., 1] / mechanism.spread**2 / wanted).max() > 1.05) == averages


# (N, K, E), the chain, the average, and what the old rule makes of probe over real variance at the
# last step; in the mean without a filter 1 / (1 - b + b / K) with b = mu^(2E), but for mu^60.
SLOW = [
    ((5, 5, 1), PLAIN, "mean", 2.84), ((20, 5, 1), PLAIN, "mean", 2.84),
    ((5, 5, 5), PLAIN, "mean", 1.39), ((20, 5, 5), PLAIN, "mean", 1.39),
    ((20, 5, 1), PLAIN, BY_SAMPLES, 2.59), ((20, 5, 1), DISK, "mean", 4.35),
]  # fmt: skip
MEASURED = [
    ((1, 1, 1), PLAIN, "mean", 1.0), ((20, 5, 5), DISK, BY_SAMPLES, 1.71),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "recipe", "average", "old"), MEASURED)
def test_probes_have_the_variance_of_pure_noise(
    sizes: Sizes, recipe: str, average: str, old: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 3% at every step: 40,000 entries a client, whose mean square has a standard error of
    0.7% at most. The control is the old rule."""
    experiment = made(federation(*sizes, recipe, average, 4000, "ema"))
    real, probe = np.moveaxis(widths(experiment, monkeypatch).mean(1), -1, 0)
    np.testing.assert_allclose(probe, real, rtol=0.03)
    few = made(federation(*sizes, recipe, average, 3, "ema"))  # its probes are as wide
    wrong = widths(replace(few, recipe=old_rule(few.recipe)), monkeypatch).mean(1)[:, 1]
    assert wrong[-1] / real[-1] == pytest.approx(old, rel=0.03)


NODES = 5  # of Gauss-Hermite quadrature in each dimension: terms below the 10th power are exact


def bias_of_a_round(
    recipe: Recipe, rho: float, clients: int, monkeypatch: Any, probes: int
) -> float:
    """E O - Q(G) of a client's step behind the first average, for the constant gradient G = 1: the
    replicas of one stack are the nodes of a quadrature over the draws that count in it, one of each
    client and then its own, and over its probe."""
    points, mass = np.polynomial.hermite_e.hermegauss(NODES)
    grid = np.meshgrid(*[points] * (clients + 2), indexing="ij")
    *draws, last, probe = (torch.from_numpy(one).reshape(-1, 1, 1) for one in grid)
    weights = np.prod(np.meshgrid(*[mass / mass.sum()] * (clients + 2), indexing="ij"), 0).ravel()
    monkeypatch.setattr(links, "probe", lambda *_: probes * probe)

    def stepped(state: ServerState, draw: torch.Tensor) -> tuple[Params, Any]:
        released = Released({"weight": 1 + rho * draw})
        draws = [partial(generator, 0)]
        context = Context(state.params, forbidden_gradient, draws, lambda _: released)
        states = recipe.chain.init(state.params, state.states)
        return recipe.chain.step(state.params, states, context)

    start = {"weight": torch.zeros_like(last)}
    state = ServerState(0, start, initial_states(recipe, start))
    replies = [Reply(k, *stepped(state, draw), last[:, 0, 0]) for k, draw in enumerate(draws)]
    state = server_update(recipe, state, replies)
    moved = (state.params["weight"] - stepped(state, last)[0]["weight"]).flatten()
    return float(weights @ moved.numpy()) - 1 / math.sqrt(2)


@pytest.mark.parametrize(
    ("clients", "disk"), [(1, False), pytest.param(5, False, marks=pytest.mark.slow), (5, True)]
)
def test_the_bias_of_a_federated_step_falls_with_the_fourth_power(
    clients: int, disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q(x) = x / sqrt(x^2 + 1), whose 2nd and 4th derivatives at 1 are -3 / 2^2.5 and -15 / 2^4.5.
    Without probes the order is 2, and so it is with the old rule where there is an average."""
    rhos, kappa = (1 / 64, 1 / 32), KAPPA if disk else 1.0
    local = Local(recipe=DISK if disk else PLAIN, lr=1.0, momentum=MU)
    table = OrthogonalizerTable.model_validate({"lambda": 1.0})

    def biases(rule: Callable[[Recipe], Recipe], probes: int) -> np.ndarray:
        found = []
        for rho in rhos:
            privacy = Privacy(noise=rho, bound=1.0, lot=1.0, kappa=kappa)
            recipe = rule(make_recipe(local, table, privacy=privacy))
            found.append(bias_of_a_round(recipe, rho, clients, monkeypatch, probes))
        return np.array(found)

    def slope(found: np.ndarray) -> float:
        return float(np.polyfit(np.log(rhos), np.log(np.abs(found)), 1)[0])

    plain, corrected, old = biases(replace, 0), biases(replace, 1), biases(old_rule, 1)
    assert slope(plain) == pytest.approx(2, abs=0.02)
    assert slope(corrected) == pytest.approx(4, abs=0.05)
    assert slope(old) == pytest.approx(4 if clients == 1 else 2, abs=0.05)
    # M^ = (m_1 + f_2) / (1 + mu): the mean of the first draws, and the step's own.
    variance = ((MU + 1 - kappa) ** 2 / clients + kappa**2) / (1 + MU) ** 2
    assert plain[0] == pytest.approx(-3 / 2**2.5 / 2 * variance * rhos[0] ** 2, rel=0.01)
    assert corrected[0] == pytest.approx(15 / 2**4.5 / 4 * (variance * rhos[0] ** 2) ** 2, rel=0.01)


@pytest.mark.slow
def test_a_resumed_run_keeps_the_noise_apart(tmp_path: Path) -> None:
    """Stopped between two averages, and begun anew from its files."""
    config = federation(6, 3, 2, DISK, BY_SAMPLES, 4, "ema")
    execute(config, tmp_path / "whole")
    run_until(3, config, tmp_path / "cut")
    execute(None, tmp_path / "cut", resume=True)
    for file in ("model.safetensors", "momentum.safetensors"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("average", ["median", "trimmed-mean", "krum"])
def test_averages_that_are_no_weighted_means_are_refused(average: str) -> None:
    """The variance of a median depends on what the clients' gradients are."""
    with pytest.raises(InputError, match=r"or use a fedmuon\.Aggregator with"):
        made(federation(6, 5, 1, PLAIN, average, 3, "ema"))
    made(federation(6, 5, 1, "dp-muon", average, 3, "ema"))
