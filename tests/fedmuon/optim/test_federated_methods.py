"""What federated methods reduce to, where they converge, and what they cannot be combined with."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from compared import problem_of
from conftest import quick, small
from reference import methods, rounds

import fedmuon
from fedmuon import links, orthogonalizers, recipes
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.federated.build import build_experiment
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

    def client(visit: rounds.Visit, received: Any, own: Any) -> Any:
        rate = LR * (1 + visit.client)
        return {"model": methods.local_steps(visit, received["model"], rate, 0.0, methods.plain)}

    problem = problem_of(config(steps=1, recipe="fedavg"))
    X = rounds.run(problem, rounds.Method(client)).server["model"]["weight"]
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


@pytest.mark.parametrize("cohort", quick([4, 2], [2]))
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


@pytest.mark.parametrize("degree", quick([1, 2, 3, 5], [2]))
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
        ("fednova", {"federation": {"aggregate": "median"}}, "needs the weight of each reply"),
        (
            "fednova",
            {"privacy": {"level": "client", "noise": 1.0}},
            "recipe = 'fednova' changes replies",
        ),
        (
            "scaffold",
            {"privacy": {"level": "client", "noise": 1.0}},
            "recipe = 'scaffold' stores a state of each client",
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
