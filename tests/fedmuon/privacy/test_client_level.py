"""Client level: whole updates clipped to C, their sum with noise once, an account of clients."""

import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from conftest import quick, small
from cut_off import dying
from safetensors.numpy import load_file
from test_data import write_idx
from test_pitfalls import unnamed
from torch import Tensor

import fedmuon
from fedmuon import recipes
from fedmuon.analysis.report.tables import read_table
from fedmuon.config.load import Config, nested, parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.experiments import spending
from fedmuon.experiments.report import gather
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability.certificates import method_of
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.suite import execute as make
from fedmuon.experiments.tables import standing
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.rounds import (
    begin,
    broadcast,
    client_updates,
    server_update,
)
from fedmuon.optim.client_privacy import ClientPrivacy
from fedmuon.optim.recipe import Recipe
from fedmuon.orthogonalize import Uncertified
from fedmuon.privacy.accounting.composition import account, epsilon
from fedmuon.privacy.accounting.pld import Event
from fedmuon.privacy.audit import Setting, both_bounds, trials
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms import lattice
from fedmuon.privacy.mechanisms.client_level import EACH, EVERYONE, ClientLevel, leaves
from fedmuon.runs.prepare import prepare

RECIPES = (
    "fedavg", "fedavgm", "fedmuon", "local-muon", "fedmuon-aligned", "sgd", "normalized-sgd",
    "muon",
)  # fmt: skip


def clients(recipe: str = "fedmuon", rounds: int = 4, **privacy: Any) -> Config:
    """Six clients, three of them a round on average."""
    given = {"level": "client", "bound": 0.2, "noise": 1.0} | privacy
    return small(
        federation={"rounds": rounds},
        local={"recipe": recipe, "lr": 0.1, "steps": 2},
        privacy=given,
    )


LOCAL = {"cohorts": "fixed", "trust": "local"}
OTHER = {"central": "local", "local": "central", "distributed": "local"}  # another ratio
REPEATABLE = {"insecure-reproducible-noise": True}


def with_recipe(config: Config, recipe: Recipe) -> Config:
    """The config, with a recipe that was passed in Python."""
    tables = {**nested(config), "local": {"recipe": "given"}}
    tables.pop("orthogonalizer", None)
    return parse(tables).with_objects(UserObjects(recipe=recipe))


def tree(rng: np.random.Generator, size: float, stack: int = 2, dtype: Any = torch.float32) -> Any:
    """A model and a momentum of uneven shapes and sizes."""

    def drawn(*shape: int) -> Tensor:
        return torch.from_numpy(size * rng.standard_normal((stack, *shape))).to(dtype)

    return {"model": {"a": drawn(3, 5), "b": drawn(7)}, "momentum": {"a": drawn(3, 5) * 1e-3}}


def exact_square(parts: Any, s: int) -> Fraction:
    """The squared norm of a replica as the rational number that it is."""
    entries = [one[s].flatten().tolist() for one in leaves(parts)]
    return sum((Fraction(x) ** 2 for held in entries for x in held), start=Fraction(0))


@pytest.mark.parametrize("size", [1e-12, 0.05, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("bound", [1e-3, 0.3, 7.0])
def test_no_clipped_update_is_longer_than_the_bound_in_exact_arithmetic(
    size: float, bound: float
) -> None:
    """Rationals: no rounding of the test's own. Short ones stay what they are, to the lattice."""
    rng, level = np.random.default_rng(0), ClientLevel(bound, 1.0, 3, 10)
    held, found = tree(rng, 1.0), tree(rng, size)
    v = level.clipped(held, found)
    for s in range(2):
        assert exact_square(v, s) <= Fraction(bound) ** 2
        moved = [(leaves(found)[k][s].double() - leaves(held)[k][s].double()) for k in range(3)]
        norm = math.sqrt(sum(float(one.square().sum()) for one in moved))
        for one, naive in zip(leaves(v), moved, strict=True):
            naive = naive * min(1.0, bound / norm)
            assert (one[s] - naive).abs().max() <= level.spacing + 1e-13 * bound


@pytest.mark.parametrize(("trust", "noise"), [("central", 1.3), ("local", 0.8), ("distributed", 2)])
def test_noise_has_the_stated_ratio_to_the_bound(trust: str, noise: float) -> None:
    """Monte Carlo over the release itself: clients without an update, so only noise is added.

    The ratio with a wrong number of clients, or with the noise of one client only, is rejected.
    """
    bound, cohort = 0.3, 7
    level = ClientLevel(bound, noise, cohort, 50, trust, poisson=False, seed=3, weight=0.5)
    zeros = {"model": {"a": torch.zeros(1, 40, 30), "b": torch.zeros(1, 9)},
             "momentum": {"a": torch.zeros(1, 40, 30)}}  # fmt: skip
    entries, squares = 2 * 1200 + 9, []
    for round in range(6):
        replies = [zeros] * cohort
        if trust != "central":
            replies = [level.perturbed(zeros, zeros, round, client) for client in range(cohort)]
        moved = level.released(zeros, replies, round)
        parts = [*moved["model"].values(), level.weight * moved["momentum"]["a"]]
        squares.append(sum(float(one.square().sum()) for one in parts))
    ratio = math.sqrt(np.mean(squares)) / bound
    near = 4 / math.sqrt(2 * entries * len(squares))  # four relative standard errors
    assert abs(level.noise_ratio(entries) / ratio - 1) < near
    for wrong in (replace(level, cohort=cohort - 1), replace(level, trust=OTHER[trust])):
        assert abs(wrong.noise_ratio(entries) / ratio - 1) > near
    enough = level.cohort_for_ratio_1(entries)
    assert replace(level, cohort=enough).noise_ratio(entries) <= 1
    assert replace(level, cohort=enough - 1).noise_ratio(entries) > 1
    words = level.swamped(entries)
    assert f"d = {entries:,}" in words and f"{enough:,} or more clients" in words
    assert float(words.partition("noise is ")[2].split()[0]) == pytest.approx(
        ratio, rel=near + 5e-3
    )
    assert not replace(level, cohort=enough).swamped(entries)


def test_the_page_has_the_number_of_clients_for_a_ratio_of_1() -> None:
    """Each number of the table is the smallest with which the formula of the page is at most 1."""
    page = Path(__file__).parents[3] / "docs" / "how-to" / "client-privacy.md"
    rows = re.findall(r"^\| ([\d,]+(?: \| [\d,]+){4}) \|$", page.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        d, *needed = (int(cell.replace(",", "")) for cell in row.split(" | "))
        for noise, k in zip((0.5, 1.0, 2.0), needed, strict=False):
            assert noise * math.sqrt(d) / k <= 1 < noise * math.sqrt(d) / (k - 1)
        assert math.sqrt(d / needed[3]) <= 1 < math.sqrt(d / (needed[3] - 1))


def test_a_run_says_before_training_that_noise_swamps_its_clients(tmp_path: Path) -> None:
    said: list[str] = []
    config = clients("fedmuon", rounds=1, noise=1.0)
    execute(config, tmp_path / "run", warn=said.append)
    summary = load_file(tmp_path / "run" / "model.safetensors")
    entries = 2 * sum(one.size for one in summary.values())  # the model and the momentum
    assert f"noise · √d / K, with noise = 1, d = {entries:,}" in " ".join(said)
    quiet: list[str] = []
    execute(clients("fedavg", rounds=1, noise=0.0), tmp_path / "none", warn=quiet.append)
    assert "noise" not in " ".join(quiet)


def test_clipping_part_by_part_is_too_long() -> None:
    """The negative control: the model and the momentum with all of C each."""
    rng, level = np.random.default_rng(1), ClientLevel(0.3, 1.0, 3, 10)
    held, found = tree(rng, 1.0), tree(rng, 5.0)
    found["momentum"]["a"] *= 1e4
    apart = {name: level.clipped({name: held[name]}, {name: found[name]})[name] for name in held}
    assert exact_square(apart, 0) > (Fraction(0.3) * Fraction(7, 5)) ** 2  # nearly C sqrt(2)
    assert exact_square(level.clipped(held, found), 0) <= Fraction(0.3) ** 2


def test_a_weight_on_momenta_is_in_the_norm_and_taken_out_of_what_is_released() -> None:
    """v is that of a federation whose momenta are measured in another unit."""
    rng, held = np.random.default_rng(4), tree(np.random.default_rng(5), 1.0, dtype=torch.float64)
    found = [tree(rng, 1.0, dtype=torch.float64) for _ in range(2)]

    def heavy(one: Any) -> Any:
        return {**one, "momentum": {"a": one["momentum"]["a"] * 16.0}}

    plain, own = (ClientLevel(0.3, 1.0, 2, 4, seed=1, weight=w) for w in (1.0, 16.0))
    one, other = own.clipped(held, found[0]), plain.clipped(heavy(held), heavy(found[0]))
    assert all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))
    assert exact_square(one, 0) <= Fraction(0.3) ** 2
    a = heavy(own.released(held, found, 0))
    b = plain.released(heavy(held), [heavy(x) for x in found], 0)
    assert all(torch.allclose(x, y, rtol=1e-12) for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e300])
def test_an_update_that_is_no_number_contributes_nothing(odd: float) -> None:
    rng, level = np.random.default_rng(2), ClientLevel(0.3, 1.0, 3, 10)
    held, found = (tree(rng, 1.0, dtype=torch.float64) for _ in range(2))
    found["model"]["b"][1, 2] = odd
    v = level.clipped(held, found)
    assert exact_square(v, 1) == 0 < exact_square(v, 0)


def sums(level: ClientLevel, held: Any, found: list[Any]) -> list[Tensor]:
    """(X' - X) K, the sum that is released without noise, in float64."""
    after = level.released(held, found, 0)
    return [(b - a) * level.cohort for a, b in zip(leaves(held), leaves(after), strict=True)]


def test_removing_a_client_moves_the_sum_by_its_clipped_update_and_by_nothing_else() -> None:
    """Exactly: X = 0 and K a power of two keep the digits of the sum. The client's update is huge,
    and the order of the others is turned around."""
    rng, level = np.random.default_rng(3), ClientLevel(0.3, 0.0, 4, 1000)
    held = {k: {n: torch.zeros_like(one) for n, one in part.items()}
            for k, part in tree(rng, 1.0, dtype=torch.float64).items()}  # fmt: skip
    others = [tree(rng, 10.0 ** rng.integers(-6, 2), dtype=torch.float64) for _ in range(60)]
    huge = tree(rng, 1e9, dtype=torch.float64)
    with_it, without = sums(level, held, [huge, *others]), sums(level, held, others[::-1])
    own = leaves(level.clipped(held, huge))
    assert all(torch.equal(a - b, c) for a, b, c in zip(with_it, without, own, strict=True))
    assert exact_square({"": dict(enumerate(own))}, 0) > Fraction(0.2999) ** 2
    floats = [rng.standard_normal(50) / 7 for _ in range(61)]  # the control, of no lattice
    apart = sum(floats[1:], start=floats[0]) - sum(reversed(floats[1:-1]), start=floats[-1])
    assert (apart != floats[0]).any()


def test_secret_noise_is_on_the_lattice_and_ours_for_tests_is_not() -> None:
    """Of X = 0 and K = 4, what is released is integers of about 2^32 times g / 4, as float64 has
    them."""
    held = {"model": {"a": torch.zeros(1, 30, 10, dtype=torch.float64)}}
    for seed, whole in ((None, True), (7, False)):
        level = ClientLevel(0.3, 1.3, 4, 1000, seed=seed)
        step = lattice.spacing(0.3, 1.3, 300)
        steps = level.released(held, [], 0)["model"]["a"] * 4 / step
        assert level.on_grid == whole == bool((steps - steps.round()).abs().max() < 1e-3)
        assert (level.secrecy == "secret") == whole


@pytest.mark.parametrize("trust", ["central", "local"])
def test_the_variance_of_what_is_released(trust: str) -> None:
    """(sigma C / K)^2 an entry, of one draw for all replicas; under local trust the clients' k
    draws add up to k times that. 40,000 entries: 3% is 4 standard deviations."""
    cohort, present = 4, 3
    level = ClientLevel(0.5, 1.3, cohort, 100, trust, trust == "central")
    held = {"model": {"a": torch.zeros(2, 200, 200)}}
    sent = [level.perturbed(held, held, 0, k) if trust == "local" else held for k in range(present)]
    after = level.released(held, sent, 0)["model"]["a"]
    assert torch.equal(after[0], after[1])
    draws = present if trust == "local" else 1
    expected = draws * (1.3 * 0.5 / cohort) ** 2
    assert float(after[0].var()) == pytest.approx(expected, rel=0.03)
    again = level.released(held, sent, 0)["model"]["a"]
    assert torch.equal(after, again) == (trust == "local")  # whose server adds nothing


def test_a_lattice_holds_every_sum() -> None:
    """g is a power of two, and N C / g fills at least a quarter of float64's whole numbers."""
    for bound in (1e-3, 0.3, 1.0, 4.0):
        for count in (1, 7, 1000, 10**7):
            g = ClientLevel(bound, 1.0, 1, count).spacing
            assert (
                math.frexp(g)[0] == 0.5 and 2**51 <= Fraction(bound) * count / Fraction(g) <= 2**53
            )


def test_a_poisson_cohort_is_drawn_apart_and_anew() -> None:
    plan = RandomnessPlan(0, 400, 100, 50, poisson=True)
    drawn = [plan.participants(r) for r in range(50)]
    counts = np.array([len(one) for one in drawn])
    assert abs(counts.mean() - 100) < 5 and 5 < counts.std() < 13  # 8.7 for the binomial law
    assert all(np.array_equal(plan.participants(r), one) for r, one in enumerate(drawn))
    again = RandomnessPlan(0, 400, 100, 50, poisson=True)
    assert all(np.array_equal(again.participants(r), one) for r, one in enumerate(drawn))
    secret = RandomnessPlan(0, 400, 100, 50, poisson=True, secret="secure")
    first = secret.participants(0)
    assert np.array_equal(secret.participants(0), first) and not np.array_equal(first, drawn[0])
    secret.forget(0)
    assert not np.array_equal(secret.participants(0), first)
    with pytest.raises(InputError, match="draws the clients of a round only when the round begins"):
        plan.schedule()


FIXED: list[dict[str, Any]] = [{}, {"cohorts": "fixed"}, LOCAL]
RUNS = [(recipe, privacy) for recipe in RECIPES for privacy in FIXED]


@pytest.mark.parametrize(("recipe", "privacy"), quick(RUNS, RUNS[::4]))
def test_a_run_of_every_recipe(recipe: str, privacy: dict[str, Any], tmp_path: Path) -> None:
    summary = execute(clients(recipe, rounds=2, **privacy), tmp_path)
    spent = summary["privacy"]
    poisson = not privacy
    assert spent["certified"] and spent["unit"] == "client"
    assert spent["trust"] == privacy.get("trust", "central")
    assert spent["adjacency"] == ("add-remove" if poisson else "zero-out")
    assert spent["sampling"] == ("poisson" if poisson else "none")
    taken = 2 if poisson else max(np.bincount(np.load(tmp_path / "schedule.npy").ravel()))
    assert spent["upper"] == epsilon(1.0, 0.5 if poisson else 1.0, int(taken), 1e-5).upper
    assert (
        "no seed can repeat" in spent["note"]
        and ("This epsilon holds only if the list of participants" in spent["note"]) == poisson
    )
    assert "client_loss" not in (tmp_path / "rounds.jsonl").read_text()
    said = standing(spent)
    assert spent["trust"] in said and spent["adjacency"] in said and "whole clients" in said


def test_two_accountants_agree_on_a_run(tmp_path: Path) -> None:
    """Ours and dp-accounting's: each upper end is above the other's lower."""
    execute(clients("fedavg"), tmp_path)
    names = ("pld", "dp-accounting")
    ours, theirs = (spending.spent(tmp_path, accountant=name) for name in names)
    a, b = (told["clients"][EACH] for told in (ours, theirs))
    assert a["upper"] == pytest.approx(b["upper"], rel=0.01)
    assert a["lower"] <= b["upper"] and b["lower"] <= a["upper"]
    assert (ours["unit"], ours["trust"]) == ("client", "central")


def test_noise_is_found_for_a_target(tmp_path: Path) -> None:
    spent = execute(clients("fedavg", noise=0.0, epsilon=3.0), tmp_path)["privacy"]
    assert 2.9 < spent["epsilon"] <= 3.0
    with pytest.raises(InputError, match=r"more than \[privacy\] epsilon = 3"):
        execute(clients("fedavg", noise=0.5, epsilon=3.0), tmp_path / "loud")


def test_a_killed_round_stays_spent_and_has_another_cohort(tmp_path: Path) -> None:
    """In the same process, too, which still has the cohort that was drawn."""
    run = prepare(resolve(clients("fedavg")), tmp_path)
    dying(run, at=3)
    lost = run.experiment.plan._cohorts[2].tolist()
    for _ in range(20):  # 2^-6 of cohorts are the same
        dying(run, at=3)
        if run.experiment.plan._cohorts[2].tolist() != lost:
            break
    else:
        pytest.fail("every attempt had the same cohort")
    summary = execute(None, tmp_path, resume=True)
    ledger = Ledger.read(tmp_path / "ledger.jsonl")
    attempts = [entry.attempt for entry in ledger.entries if entry.round == 2]
    assert attempts == list(range(len(attempts))) and len(attempts) >= 3
    assert all(entry.participants == (EVERYONE,) for entry in ledger.entries)
    spent = account([Event(0.5, 1.0, len(ledger.entries))], 1e-5)
    assert summary["privacy"]["upper"] == spent.upper > epsilon(1.0, 0.5, 4, 1e-5).upper


def test_an_empty_cohort_releases_noise() -> None:
    config = resolve(clients("fedmuon", **REPEATABLE))
    data = build_data(config, read_source(config))
    experiment = build_experiment(config, data)
    state = begin(experiment.recipe, experiment.task, 0)
    after = server_update(experiment.recipe, state, [])
    moved = after.params["weight"] - state.params["weight"]
    assert float(moved.std()) == pytest.approx(0.2 / 3, rel=0.5) and after.round == 1
    assert float(after.states["momentum"]["weight"].abs().sum()) > 0
    assert client_updates(experiment.recipe, experiment.task, experiment.plan, [], broadcast(
        experiment.recipe, state)) == []  # fmt: skip


def test_a_client_of_overflowing_samples_does_not_stop_the_run(tmp_path: Path) -> None:
    """Its losses are no numbers, which stops a run without privacy; the others' go on."""
    inputs = torch.ones(60, 40)
    inputs[::3] = 3e38
    given = {"data": (inputs, torch.arange(60) % 3), "task": torch.nn.Linear(40, 3)}
    config = {name: keys for name, keys in nested(clients("fedavg", cohorts="fixed")).items()
              if name in ("federation", "privacy", "local")}  # fmt: skip
    config |= {"data": {"minimum": 1}, "federation": {"clients": 6, "rounds": 2}}
    result = fedmuon.run(config, **given, out=tmp_path / "r")
    assert all(bool(value.isfinite().all()) for value in result.model.values())
    with pytest.raises(NonFinite, match="the loss is not finite"):
        fedmuon.run(config | {"privacy": {}}, **given, out=tmp_path / "s")


class Alone:
    """Releases of a round's sum, of `Setting`'s kind: the client's update has norm C, the others'
    are 0; what is seen is the sum along it, in units of C."""

    def __init__(self, level: ClientLevel) -> None:
        self.level = level
        self.held = {"model": {"a": torch.zeros(1, 2, 2)}, "momentum": {"a": torch.zeros(1, 3)}}
        self.unit = {
            "model": {"a": torch.full((1, 2, 2), 0.3)},
            "momentum": {"a": torch.full((1, 3), 0.4)},
        }
        self.norm = math.sqrt(4 * 0.3**2 + 3 * 0.4**2)

    def observe(self, shape: tuple[int, int], present: bool) -> np.ndarray:
        """[trials, steps]."""
        plan = RandomnessPlan(
            0, self.level.clients, self.level.cohort, 1, poisson=True, secret="secure"
        )
        found = np.empty(shape)
        for place in np.ndindex(shape):
            plan.forget(0)
            there = present and 0 in plan.participants(0)
            after = self.level.released(self.held, [self.unit] if there else [], 0)
            pairs = zip(leaves(after), leaves(self.unit), strict=True)
            along = sum(float((a * b).sum()) for a, b in pairs) / self.norm
            found[place] = along * self.level.cohort / self.level.bound
        return found


@pytest.mark.slow
def test_an_audit_by_removing_one_client() -> None:
    """Real cohorts, clipping and releases: what is seen is below what is certified; and a release
    of half the noise is found out. The update is longer than C."""
    delta, setting = 0.01, Setting(1.0, 0.5, 1, 1)
    claimed = epsilon(*setting[:3], delta)
    for noise, holds in ((1.0, True), (0.3, False)):
        own = Alone(ClientLevel(0.25, noise, 2, 4))
        seen = trials(setting, own.observe, 600)
        counted, _ = both_bounds(seen, delta, np.random.default_rng(0))
        assert counted.epsilon > 0.1
        assert (counted.epsilon <= claimed.upper) == holds


@pytest.mark.parametrize("key", ["trust", "cohorts"])
def test_keys_of_client_level_are_not_read_elsewhere(key: str) -> None:
    other = {"trust": "local", "cohorts": "fixed"}[key]
    for recipe in ("fedavg", "dp-sgd"):
        with pytest.raises(InputError, match=f"{key} = '{other}' has no effect"):
            small(local={"recipe": recipe}, privacy={key: other})


def test_bounds_say_why_there_is_none() -> None:
    with pytest.raises(Uncertified, match="clipped updates and noise"):
        method_of(clients("fedavg"))


def test_a_recipe_of_ones_own_is_clipped_like_ours(tmp_path: Path) -> None:
    config = nested(clients("fedavg", **REPEATABLE))
    execute(parse(config), tmp_path / "a")
    config["local"] = {key: config["local"][key] for key in ("steps", "batch")}
    result = fedmuon.run(config, recipe=recipes.fedavg(lr=0.1), out=tmp_path / "b")
    assert result.summary["privacy"]["unit"] == "client"
    models = [(tmp_path / x / "model.safetensors").read_bytes() for x in "ab"]
    assert models[0] == models[1]


FIXED_LEVEL = ClientLevel(0.2, 1.0, 3, 6, poisson=False)
PASSED = {
    "all values fit": FIXED_LEVEL,
    "another cohort": replace(FIXED_LEVEL, cohort=1000, clients=2000),
    "Poisson cohorts": replace(FIXED_LEVEL, clients=500_000, poisson=True),
}


@pytest.mark.parametrize("case", PASSED)
@pytest.mark.filterwarnings("ignore:the argument")
def test_only_the_config_adds_client_privacy(case: str) -> None:
    """The ledger trusts the stage, so a stage of ones own could claim any epsilon."""
    config, level = small(), PASSED[case]
    plain = recipes.fedavg(0.1)
    own = {
        "stage": small(federation={"stage": "given"}).with_objects(
            UserObjects(stage=ClientPrivacy(level))
        ),
        "stages of a recipe": with_recipe(config, replace(plain, stages=(ClientPrivacy(level),))),
        "the argument of 1.0": with_recipe(config, replace(plain, client_level=level)),
    }
    for table in own.values():
        with pytest.raises(InputError, match=r"Set \[privacy\] level = 'client' in the config"):
            build_experiment(resolve(table))
    assert not build_experiment(resolve(with_recipe(config, plain))).recipe.private  # the control


def test_a_recipe_may_have_the_stage_of_the_config() -> None:
    plain, config = recipes.fedavg(0.1), with_recipe(clients("fedavg"), recipes.fedavg(0.1))
    (stage,) = build_experiment(resolve(config)).recipe.stages
    assert isinstance(stage, ClientPrivacy)
    same = with_recipe(config, replace(plain, stages=(stage,)))
    assert build_experiment(resolve(same)).recipe.stages == (stage,)
    other = ClientPrivacy(replace(stage.level, cohort=4))
    with pytest.raises(InputError, match=r"Leave the stage out, because \[privacy\] level"):
        build_experiment(resolve(with_recipe(config, replace(plain, stages=(other,)))))


class Custom(ClientPrivacy):
    pass


def test_a_subclass_of_client_privacy_is_rejected() -> None:
    for config in (small(), clients("fedavg")):
        own = replace(recipes.fedavg(0.1), stages=(Custom(FIXED_LEVEL),))
        with pytest.raises(InputError, match="the ledger does not know what your stage sends"):
            build_experiment(resolve(with_recipe(config, own)))


def test_the_suite_draws_accuracy_at_the_epsilon_of_each_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its small scale, with two of its variants; every epsilon that it leaves says of what."""
    content, out = contents.read("dp-client"), tmp_path / "out"
    kept = {name: content["variants"][name] for name in ("FedAvg", "FedMuon")}
    content.pop("tuning", None)  # its grids name the other variants
    file = tmp_path / "dp-client.toml"
    file.write_text(tomli_w.dumps(content | {"variants": kept, "claims": {}}), encoding="utf-8")
    make(kinds.find(str(file), "digits", "small", {}), out)
    found = gather(out)[0]
    picture = next(one for one in found.pictures if one.name == "epsilon")
    (axes,) = picture.draw(False).axes
    rows = read_table(out / "runs.csv", ("epsilon", "accuracy"), ("variant", "adjacency"))
    for line, name in zip(axes.get_lines(), kept, strict=True):
        mine = rows["variant"] == name
        order = rows["epsilon"][mine].argsort()
        np.testing.assert_array_equal(line.get_xdata(), rows["epsilon"][mine][order])
        np.testing.assert_array_equal(line.get_ydata(), rows["accuracy"][mine][order])
    assert set(rows["adjacency"]) == {"add-remove"} and not unnamed(out)
    place = tmp_path / "data" / "fashion-mnist"  # as many samples as it asks for, of six pixels
    place.mkdir(parents=True)
    write_idx(place, {"train-": 60_000, "t10k-": 10_000})
    monkeypatch.setenv("FEDMUON_SYSTEM_DATA", str(place.parent))
    full = kinds.find("dp-client", "fashion-mnist", "full", {})
    assert {one.config.engine.name for one in full.cells} == {"ray"}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_who_else_takes_part_changes_no_update(tmp_path: Path) -> None:
    """Not even by the rounding of products in a stack, which large steps make large."""
    given = {
        "data": {"name": "digits", "train": 300, "test": 20},
        "federation": {"clients": 6, "per-round": 3, "rounds": 1},
        "local": {"recipe": "local-muon", "lr": 2.0, "steps": 40, "batch": 4},
        "orthogonalizer": {"name": "exact-sign"},
        "privacy": {"level": "client", "noise": 1.0},
        "engine": {"dtype": "float32", "device": "cpu"},
    }
    run = prepare(resolve(parse(given)), tmp_path / "run")
    own = run.experiment

    def moved(recipe: Any, clients: range) -> dict[int, torch.Tensor]:
        state = begin(recipe, own.task, 0)
        those = [(client, own.shards[client]) for client in clients]
        found = client_updates(recipe, own.task, own.plan, those, broadcast(recipe, state))
        return {one.client: next(iter(one.params.values())) for one in found}

    for recipe, same in ((own.recipe, True), (replace(own.recipe, stages=()), False)):
        every = moved(recipe, range(6))
        cohorts = [moved(recipe, range(first, 6)) for first in (1, 5)]  # processors differ in which
        assert same == all(
            torch.equal(every[one], fewer[one]) for fewer in cohorts for one in fewer
        )
