"""The federated methods against loops in NumPy, written from the papers; and their reductions."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import small
from test_rounds import gradient, orth

import fedmuon
from fedmuon import links, orthogonalizers, recipes
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.build import build_experiment
from fedmuon.federated.client_data import build_data
from fedmuon.federated.client_states import ClientStates
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import begin, run_round, run_rounds, simulate
from fedmuon.optim.chain import Chain, Context
from fedmuon.optim.recipe import Recipe, initial_states
from fedmuon.optim.server_rules import replace_by_mean
from fedmuon.optim.stage import ServerState
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.base import Params
from fedmuon.tasks.per_example.clipping import Clipping

LR, STEPS, N = 0.4, 3, 5
POLAR = orthogonalizers.smoothed_polar(0.1)  # the map of `small`
Federated = Iterator[tuple[int, list[int]]]


def config(**local: Any) -> Config:
    return small(
        {"federation": {"clients": N, "per-round": 3, "rounds": 6}, "engine": {"dtype": "float64"}},
        local={"lr": LR, "steps": STEPS, "batch": 7, **local},
    )


def experiment(recipe: Recipe, table: Config, **plan: Any) -> Experiment:
    found = build_experiment(table)
    return replace(
        found, recipe=recipe, plan=replace(found.plan, **plan), client_states=ClientStates()
    )


def ended(recipe: Recipe, table: Config, **plan: Any) -> ServerState:
    made = experiment(recipe, table, **plan)
    return simulate(made, begin(recipe, made.task, table.federation.seed))


class Naive:
    """The data, draws and gradients of a config, for loops that are written out."""

    def __init__(self, table: Config, **plan: Any) -> None:
        self.table, self.data = table, build_data(table)
        self.plan: RandomnessPlan = replace(build_experiment(table).plan, **plan)
        d = self.data.inputs.shape[1]
        rng = generator(table.federation.seed, Draw.INITIAL)
        self.start = rng.standard_normal((d, self.data.classes)) / math.sqrt(d)

    def rounds(self) -> Federated:
        for r in range(self.plan.rounds):
            yield r, [int(i) for i in self.plan.participants(r)]

    def steps(self, i: int) -> int:
        size, plan = len(self.data.samples(i)[1]), self.plan
        return max(1, math.ceil(plan.epochs * size / plan.batch)) if plan.epochs else STEPS

    def gradient(self, X: np.ndarray, r: int, i: int, k: int) -> np.ndarray:
        inputs, labels = self.data.samples(i)
        rows = self.plan.rows(r, i, k, len(labels))
        rows = slice(None) if rows is None else rows
        return gradient(X, inputs[rows], labels[rows])

    def orth(self, M: np.ndarray, r: int, i: int, k: int) -> np.ndarray:
        return orth(M, self.table, r, i, k)

    def local(self, X: np.ndarray, r: int, i: int, correction: Any = 0.0) -> np.ndarray:
        x = X.copy()
        for k in range(self.steps(i)):
            x -= LR * (self.gradient(x, r, i, k) + correction)
        return x


def naive_fedprox(at: Naive) -> np.ndarray:
    X = at.start
    for r, cohort in at.rounds():
        models = []
        for i in cohort:
            x = X.copy()
            for k in range(STEPS):
                x -= LR * (at.gradient(x, r, i, k) + 0.7 * (x - X))
            models.append(x)
        X = np.mean(models, 0)
    return X


def naive_adaptive(kind: str) -> Callable[[Naive], np.ndarray]:
    def loop(at: Naive) -> np.ndarray:
        X, tau = at.start, 0.02
        m, v = np.zeros_like(X), np.full_like(X, tau**2)
        b1, b2 = (0.0, 0.0) if kind == "adagrad" else (0.9, 0.8)
        for r, cohort in at.rounds():
            D = np.mean([at.local(X, r, i) for i in cohort], 0) - X
            m = b1 * m + (1 - b1) * D
            v = {
                "adam": b2 * v + (1 - b2) * D**2,
                "yogi": v - (1 - b2) * D**2 * np.sign(v - D**2),
                "adagrad": v + D**2,
            }[kind]
            X = X + 0.05 * m / (np.sqrt(v) + tau)
        return X

    return loop


def naive_fednova(at: Naive) -> np.ndarray:
    X = at.start
    for r, cohort in at.rounds():
        steps = [at.steps(i) for i in cohort]
        unit = [(at.local(X, r, i) - X) / t for i, t in zip(cohort, steps, strict=True)]
        X = X + np.mean(steps) * np.mean(unit, 0)
    return X


def naive_scaffold(at: Naive) -> np.ndarray:
    X = at.start
    c, own = np.zeros_like(X), {i: np.zeros_like(X) for i in range(N)}
    for r, cohort in at.rounds():
        models, changes = [], []
        for i in cohort:
            x = at.local(X, r, i, c - own[i])
            after = own[i] - c + (X - x) / (STEPS * LR)
            changes.append(after - own[i])
            own[i] = after
            models.append(x)
        X = X + 0.8 * (np.mean(models, 0) - X)
        c = c + len(cohort) / N * np.mean(changes, 0)
    assert np.allclose(c, np.mean(list(own.values()), 0), atol=1e-12)  # c is the mean of all c_i
    return X


def naive_corrected(at: Naive) -> np.ndarray:
    X = at.start
    C = np.zeros_like(X)
    M, Ci = ({i: np.zeros_like(X) for i in range(N)} for _ in range(2))
    for r, cohort in at.rounds():
        moved, changed = np.zeros_like(X), np.zeros_like(X)
        for i in cohort:
            x = X.copy()
            for k in range(STEPS):
                M[i] = 0.6 * M[i] + 0.4 * at.gradient(x, r, i, k)
                x -= LR * at.orth(M[i] - Ci[i] + C, r, i, k)
            changed += M[i] - Ci[i]
            Ci[i] = M[i]
            moved += x
        C = C + changed / N
        X = (N - len(cohort)) / N * X + moved / N
    return X


def naive_adamw(x: np.ndarray, at: Naive, r: int, i: int) -> np.ndarray:
    x, m, v = x.copy(), np.zeros_like(x), np.zeros_like(x)
    for k in range(STEPS):
        g = at.gradient(x, r, i, k)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x = x - LR * (m / (1 - 0.9 ** (k + 1))) / (np.sqrt(v / (1 - 0.999 ** (k + 1))) + 1e-8)
    return x


def naive_muon(x: np.ndarray, at: Naive, r: int, i: int) -> np.ndarray:
    x, M = x.copy(), np.zeros_like(x)
    for k in range(STEPS):
        M = 0.6 * M + 0.4 * at.gradient(x, r, i, k)
        x -= LR * at.orth(M, r, i, k)
    return x


def naive_outer(local: Callable[..., np.ndarray]) -> Callable[[Naive], np.ndarray]:
    """torch.optim.SGD(nesterov=True) on X - mean, written out."""

    def loop(at: Naive) -> np.ndarray:
        X = at.start
        v = np.zeros_like(X)
        for r, cohort in at.rounds():
            g = X - np.mean([local(X, at, r, i) for i in cohort], 0)
            v = 0.5 * v + g
            X = X - 0.7 * (g + 0.5 * v)
        return X

    return loop


ADAPTIVE = {"server_lr": 0.05, "tau": 0.02}
MEMORIES = {"server_momentum": 0.9, "server_memory": 0.8}
METHODS: dict[str, tuple[Recipe, Callable[[Naive], np.ndarray], dict[str, Any]]] = {
    "fedprox": (recipes.fedprox(LR, 0.7), naive_fedprox, {}),
    "fedadam": (recipes.fedadam(LR, **ADAPTIVE, **MEMORIES), naive_adaptive("adam"), {}),
    "fedyogi": (recipes.fedyogi(LR, **ADAPTIVE, **MEMORIES), naive_adaptive("yogi"), {}),
    "fedadagrad": (recipes.fedadagrad(LR, **ADAPTIVE), naive_adaptive("adagrad"), {}),
    "fednova": (recipes.fednova(LR), naive_fednova, {"epochs": 1.5}),
    "scaffold": (recipes.scaffold(LR, 0.8, clients=N), naive_scaffold, {}),
    "fedmuon-corrected": (recipes.fedmuon_corrected(LR, 0.6, POLAR, clients=N),
                          naive_corrected, {}),
    "local-adamw": (
        recipes.local_adamw(LR),
        lambda at: naive_mean(at, naive_adamw),
        {},
    ),
    "diloco": (recipes.diloco(LR, 0.7, 0.5), naive_outer(naive_adamw), {}),
    "muloco": (recipes.muloco(LR, 0.6, POLAR, server_lr=0.7, server_momentum=0.5),
               naive_outer(naive_muon), {}),
}  # fmt: skip


def naive_mean(at: Naive, local: Callable[..., np.ndarray]) -> np.ndarray:
    X = at.start
    for r, cohort in at.rounds():
        X = np.mean([local(X, at, r, i) for i in cohort], 0)
    return X


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_its_paper_s_loop(method: str) -> None:
    recipe, loop, plan = METHODS[method]
    expected = loop(Naive(config(), **plan))
    found = ended(recipe, config(), **plan).params["weight"][0].numpy()
    assert np.abs(found - expected).max() < 1e-12
    plain = ended(recipes.fedavg(LR), config(), **plan).params["weight"][0].numpy()
    assert np.abs(plain - expected).max() > 1e-3  # and no method is FedAvg


REDUCTIONS = {
    "fedprox": (recipes.fedprox(LR, 0.0), recipes.fedavg(LR), 0.0),
    "fedavgm": (recipes.fedavgm(LR, 0.0), recipes.fedavg(LR), 1e-14),
    "fednova": (recipes.fednova(LR), recipes.fedavg(LR), 1e-14),
    "diloco": (recipes.diloco(LR, 1.0, 0.0), recipes.local_adamw(LR), 0.0),
    "muloco": (
        recipes.muloco(LR, server_lr=1.0, server_momentum=0.0), recipes.local_muon(LR), 0.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", REDUCTIONS)
def test_what_a_method_reduces_to(method: str) -> None:
    one, other, tolerance = REDUCTIONS[method]
    a, b = (ended(recipe, config()).params["weight"] for recipe in (one, other))
    assert (a - b).abs().max() <= tolerance


def test_a_stronger_pull_keeps_clients_nearer() -> None:
    def drift(weight: float) -> float:
        made = experiment(recipes.fedprox(LR, weight), config(steps=20))
        state = begin(made.recipe, made.task, 0)
        after = next(run_rounds(made, state)).state
        return float((after.params["weight"] - state.params["weight"]).norm())

    drifts = [drift(weight) for weight in (0.0, 0.1, 0.5, 1.0, 2.0)]
    assert all(b < a for a, b in itertools.pairwise(drifts))


def test_a_link_sees_its_clients_only_if_it_declares_so() -> None:
    seen: list[tuple[int, ...]] = []

    def note(direction: Params, context: Context) -> Params:
        seen.append(context.clients)
        return direction

    plain = links.stateless("plain", note)
    knowing = replace(links.stateless("knowing", note), knows_client=True)
    for both in ((plain, knowing), (plain, plain)):
        seen.clear()
        chain = Chain((links.gradient(), *both, links.descend(LR)))
        made = experiment(Recipe(chain, replace_by_mean), config(steps=1))
        next(run_rounds(made, begin(made.recipe, made.task, 0)))
        cohort = tuple(int(i) for i in made.plan.participants(0))
        assert seen == [(), cohort if both[1] is knowing else ()]


def of_custom_recipes() -> dict[str, Any]:
    """The tables of `config` with one step, without what a custom recipe does not read."""
    tables = config(steps=1).model_dump(by_alias=True, exclude_unset=True)
    return {**tables, "local": {"steps": 1, "batch": 7}, "orthogonalizer": {}}


def test_a_custom_link_may_use_the_numbers_of_its_clients() -> None:
    """Also in the trial before the run, and as one that is not told could not."""

    def scale(direction: Params, context: Context) -> Params:
        numbers = torch.tensor(context.clients, dtype=torch.float64).view(-1, 1, 1)
        return {name: value * (1 + numbers) for name, value in direction.items()}

    def model(declared: bool) -> torch.Tensor:
        link = replace(links.stateless("scale", scale), knows_client=declared)
        chain = Chain((links.gradient(), link, links.descend(LR)))
        return fedmuon.run(of_custom_recipes(), recipe=chain).model["weight"]

    at = Naive(config(steps=1, recipe="fedavg"))
    X = at.start
    for r, cohort in at.rounds():
        X = np.mean([X - LR * (1 + i) * at.gradient(X, r, i, 0) for i in cohort], 0)
    np.testing.assert_allclose(model(True).squeeze(), X, rtol=1e-12)
    with pytest.raises(
        InputError, match="no tensor with the shape and dtype of the parameter weight"
    ):
        model(False)


@pytest.mark.parametrize("make", [recipes.scaffold, recipes.fedmuon_corrected])
def test_a_recipe_made_for_other_clients_is_rejected(make: Any) -> None:
    table, clients = of_custom_recipes(), N
    with pytest.raises(InputError, match=rf"clients = {clients}, but your recipe was created with"):
        fedmuon.run(table, recipe=make(LR, clients=clients + 1))
    assert fedmuon.run(table, recipe=make(LR, clients=clients)).summary["rounds"] > 0


# Exact gradients of quadratics 1/2 <X - B_i, A_i (X - B_i)>, whose clients disagree


@dataclass(frozen=True)
class Quadratics:
    """A task: the samples of client i are its number."""

    curvature: torch.Tensor  # A [N, d, d]
    centre: torch.Tensor  # B [N, d, c]
    stack_limit: int = 1 << 20
    thread_safe: bool = False
    keyed: bool = False

    @property
    def device(self) -> torch.device:
        return self.centre.device

    def gradient(self, params: Params, batches: list[int]) -> tuple[torch.Tensor, Params]:
        value = params["weight"]
        owner = torch.tensor(batches).repeat_interleave(len(value) // len(batches))
        slope = self.curvature[owner] @ (value - self.centre[owner])
        loss = ((value - self.centre[owner]) * slope).sum((1, 2)) / 2
        return loss, {"weight": slope}

    def optimum(self) -> torch.Tensor:
        return torch.linalg.solve(self.curvature.sum(0), (self.curvature @ self.centre).sum(0))


@dataclass(frozen=True)
class Number:
    """A shard that holds its client's number."""

    number: int
    size: int = 1

    def batch(self, rows: None) -> int:
        return self.number


def descended(
    task: Quadratics, recipe: Recipe, rounds: int, steps: int, cohort: int = 0
) -> torch.Tensor:
    """X after so many rounds from 0, of all clients or of a random cohort."""
    count = len(task.centre)
    plan = RandomnessPlan(0, count, cohort or count, rounds, steps)
    made: Any = Experiment(recipe, cast(Any, task), plan, cast(Any, None))
    start = {"weight": torch.zeros_like(task.centre[:1])}
    state = ServerState(0, start, initial_states(recipe, start))
    for r in range(rounds):
        clients: Any = [(int(i), Number(int(i))) for i in plan.participants(r)]
        state, *_ = run_round(made, state, clients)
    return state.params["weight"][0]


def disagreeing(clients: int = 4, d: int = 5, c: int = 3) -> Quadratics:
    draw = torch.Generator().manual_seed(1)
    factor = torch.randn(clients, d, d, generator=draw, dtype=torch.float64)
    curvature = factor @ factor.mT / d + 0.2 * torch.eye(d, dtype=torch.float64)
    centre = 3 * torch.randn(clients, d, c, generator=draw, dtype=torch.float64)
    return Quadratics(curvature, centre)


@pytest.mark.parametrize("cohort", [4, 2])
def test_scaffold_reaches_the_optimum_where_fedavg_does_not(cohort: int) -> None:
    task, rounds = disagreeing(), 300
    best = task.optimum()
    scaffold = descended(task, recipes.scaffold(0.15, clients=4), rounds, 5, cohort)
    assert (scaffold - best).norm() < 1e-8
    fedavg = descended(task, recipes.fedavg(0.15), rounds, 5, 4)
    assert (fedavg - best).norm() > 0.1


def test_corrected_muon_of_equal_clients_is_muon() -> None:
    one = disagreeing(1)
    equal = Quadratics(one.curvature.expand(4, -1, -1), one.centre.expand(4, -1, -1))
    corrected = recipes.fedmuon_corrected(0.02, 0.8, POLAR, clients=4)
    alone = descended(one, recipes.muon(0.02, 0.8, POLAR), 30, 3)
    assert (descended(equal, corrected, 30, 3) - alone).norm() < 1e-11
    other = recipes.local_muon(0.02, 0.8, POLAR)
    assert (descended(equal, other, 30, 3) - alone).norm() > 1e-3


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_local_muon_stalls_where_the_corrected_method_converges(degree: int) -> None:
    """Clients at D and -D with curvatures 3 and 1 pull apart at 0. The map makes both equal, so
    Local Muon stays there, where the mean gradient is far from 0; the optimum is D / 2."""
    towards = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    curvature = torch.stack([3 * torch.eye(2), torch.eye(2)]).double()
    task = Quadratics(curvature, torch.stack([towards, -towards]))
    best = task.optimum()
    assert torch.allclose(best, towards / 2)
    map_ = orthogonalizers.newton_schulz(degree)
    stalled = descended(task, recipes.local_muon(0.01, 0.5, map_), 100, 2)
    assert stalled.norm() < 1e-6  # the floor eps breaks the tie by so much

    def distance(lr: float) -> float:
        recipe = recipes.fedmuon_corrected(lr, 0.5, map_, clients=2)
        return float((descended(task, recipe, round(2 / lr), 2) - best).norm())

    assert distance(0.02) < 0.05 and distance(0.01) < 0.025


def test_fedmuon_corrected_trains_networks_with_both_auxiliary_steps() -> None:
    """Parameters that AdamW moves have no momentum, hence no correction."""
    for aux in ("sgd", "adamw"):
        table = small(
            data={"name": "digits", "train": 120, "test": 20, "minimum": 4},
            federation={"clients": 4, "per-round": 2, "rounds": 3},
            task={"name": "network", "model": "mlp"},
            local={"recipe": "fedmuon-corrected", "lr": 0.01, "steps": 2, "aux": aux},
        )
        made = build_experiment(table)
        start = begin(made.recipe, made.task, 0)
        ends = simulate(made, start)
        moved = {n: float((v - start.params[n]).abs().max()) for n, v in ends.params.items()}
        assert all(0 < one < 1 for one in moved.values()), (aux, moved)


@pytest.mark.parametrize(
    ("recipe", "tables", "words"),
    [
        ("scaffold", {"federation": {"aggregate": "by-samples"}}, "plain mean"),
        ("fednova", {"federation": {"aggregate": "median"}}, "needs a weight for each reply"),
        (
            "fednova",
            {"privacy": {"level": "client", "noise": 1.0}},
            "recipe = 'fednova' also stores or sends other data",
        ),
        (
            "scaffold",
            {"privacy": {"level": "client", "noise": 1.0}},
            "also stores or sends other data",
        ),
        ("fedavg", {"local": {"epochs": 2.0, "steps": 3}}, "no effect, because epochs"),
        (
            "fedavg",
            {"local": {"epochs": 2.0, "steps": 5, "schedule": "heavy-tailed"}},
            "computes lr from the number of steps",
        ),
    ],
)
def test_what_a_method_cannot_be_combined_with(
    recipe: str, tables: dict[str, Any], words: str
) -> None:
    local = {"recipe": recipe, **tables.get("local", {})}
    with pytest.raises(InputError, match=words):
        build_experiment(small(**{**tables, "local": local}))


def test_a_private_recipe_of_ones_own_counts_its_steps() -> None:
    """Its ledger has [local] steps, so no client may take another number."""
    chain = Chain((links.private_gradient(), links.descend(LR)))
    mine = Recipe(chain, replace_by_mean, mechanism=Mechanism(Clipping("block", 1.0), 0.5, 4.0))
    tables = {"data": {"name": "synthetic", "train": 90}, "local": {"epochs": 20.0}}
    with pytest.raises(InputError, match="different numbers of steps"):
        fedmuon.run({**tables, "federation": {"clients": 4, "rounds": 2}}, recipe=mine)


def test_a_scaffold_round_without_steps_learns_nothing() -> None:
    local = {"recipe": "scaffold", "schedule": "step", "options": {"every": 1, "factor": 0.0}}
    made = build_experiment(small(local=local))
    ends = simulate(made, begin(made.recipe, made.task, 0))
    assert ends.params["weight"].isfinite().all()


def network_gradient(P: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> Any:
    """Cross-entropy of the MLP by hand."""
    layers = ("first", "hidden", "head")
    seen = [x]
    for name in layers:
        out = seen[-1] @ P[f"{name}.weight"].T + P[f"{name}.bias"]
        seen.append(out if name == "head" else np.maximum(out, 0))
    p = np.exp(seen[-1] - seen[-1].max(1, keepdims=True))
    d = (p / p.sum(1, keepdims=True) - np.eye(p.shape[1])[y]) / len(y)
    found = {}
    for k in (2, 1, 0):
        found |= {f"{layers[k]}.weight": d.T @ seen[k], f"{layers[k]}.bias": d.sum(0)}
        d = (d @ P[f"{layers[k]}.weight"]) * (seen[k] > 0)
    return found


@pytest.mark.parametrize("lr", [0.02, 0.1])
def test_scaffold_of_a_network_is_its_loop(lr: float) -> None:
    """On digits, longer runs of SCAFFOLD diverge at 0.1; so does its loop: it is the method."""
    table = small(
        data={"name": "digits", "train": 300, "test": 20, "minimum": 8},
        federation={"clients": 8, "per-round": 3, "rounds": 4, "partition": "dirichlet",
                    "options": {"alpha": 0.2}},
        task={"name": "network", "model": "mlp"}, engine={"dtype": "float64"},
        local={"recipe": "scaffold", "lr": lr, "steps": 4, "batch": 16},
    )  # fmt: skip
    made = build_experiment(table)
    begun = begin(made.recipe, made.task, 0)
    P = {name: value[0].numpy() for name, value in begun.params.items()}
    c, own = ({name: 0 * value for name, value in P.items()} for _ in range(2))
    every = dict.fromkeys(range(8), own)
    for r in range(4):
        models, changes = [], []
        for i in (int(one) for one in made.plan.participants(r)):
            batch: Any = made.shards[i].batch(None)
            inputs, labels = batch.inputs.numpy(), batch.labels.numpy()
            inputs, y = inputs.reshape(len(labels), -1), dict(P)
            for k in range(4):
                rows: Any = made.plan.rows(r, i, k, len(labels))
                rows = slice(None) if rows is None else rows
                G = network_gradient(y, inputs[rows], labels[rows])
                y = {name: y[name] - lr * (G[name] - every[i][name] + c[name]) for name in P}
            after = {n: every[i][n] - c[n] + (P[n] - y[n]) / (4 * lr) for n in P}
            changes.append({n: after[n] - every[i][n] for n in P})
            every[i] = after
            models.append(y)
        P = {n: np.mean([one[n] for one in models], 0) for n in P}
        c = {n: c[n] + 3 / 8 * np.mean([one[n] for one in changes], 0) for n in P}
    ends = simulate(made, begun)
    away = {n: float(np.abs(ends.params[n][0].numpy() - P[n]).max()) for n in P}
    assert max(away.values()) < 1e-12, away
    changed = max(float((ends.params[n] - begun.params[n]).abs().max()) for n in P)
    assert changed > 0.01
