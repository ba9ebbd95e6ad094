"""Canaries among clients: the sums that they join, who sees them, what is refuted, and of whom."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick
from scipy.stats import norm
from test_canary_injection import audited, check_audited, experiment
from test_client_level import clients
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.one_run import REMOVED, by_removing
from fedmuon.core.errors import InputError
from fedmuon.experiments import spending
from fedmuon.experiments.auditing import one_run
from fedmuon.experiments.auditing.canaries import ClientAuditor, _apart
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.federated import accountant
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, broadcast, client_updates, simulate
from fedmuon.federated.traffic import joint
from fedmuon.optim.stage import Reply
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.privacy.audit import log_ratio
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms import distributed
from fedmuon.privacy.mechanisms.client_level import ClientLevel

SMALL = {
    "data": {"name": "synthetic", "train": 80, "test": 10, "dimension": 40, "minimum": 1},
    "federation": {"clients": 40, "per-round": 20, "rounds": 2},
    "local": {"recipe": "fedmuon", "steps": 1, "lr": 0.1},
    "privacy": {"level": "client", "noise": 0.7, "bound": 0.5, "delta": 1e-4,
                "insecure-reproducible-noise": True},
    "engine": {"dtype": "float64"},
}  # fmt: skip
ENTRIES = 4 * 40
LOCAL = {"cohorts": "fixed", "trust": "local"}
ONCE = {"federation": {"clients": 80, "per-round": 80, "rounds": 1}, "local": {"recipe": "fedavg"}}


def given(privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """SMALL with other keys."""
    mixed = {name: {**SMALL.get(name, {}), **changes.get(name, {})} for name in SMALL | changes}
    return mixed | {"privacy": {**SMALL["privacy"], **(privacy or {})}}


def auditor(made: Experiment, clients: list[int], included: list[bool]) -> ClientAuditor:
    level, many = made.recipe.client_level, len(clients)
    assert level is not None
    entries, signs = 7 * np.arange(many) % ENTRIES, np.resize([1.0, -1.0], many)
    return ClientAuditor(level, np.array(clients, int), np.array(included), entries, signs)


@pytest.mark.parametrize("recipe", ["fedavg", "fedavgm", "fedmuon"])
def test_a_round_s_sum_is_that_of_the_others_and_of_canaries_that_are_there(recipe: str) -> None:
    """By a loop over the clients, of which canaries that are not there are left out; each other
    canary is as long as the bound, and a coin that is turned is seen, a control."""
    made = experiment(given({"cohorts": "fixed", "noise": 0.0}, local={"recipe": recipe}))
    start, level = begin(made.recipe, made.task, 0), made.recipe.client_level
    assert level is not None
    chosen = made.plan.participants(0).tolist()
    seen = auditor(made, chosen[:6], [True, False] * 3)
    after = next(seen.rounds(made, start)).state
    others = [(one, made.shards[one]) for one in chosen[6:]]
    sent = broadcast(made.recipe, start)
    total = torch.zeros(ENTRIES, dtype=torch.float64)
    for reply in client_updates(made.recipe, made.task, made.plan, others, sent):
        own, held = (joint(made.recipe, one.params, one.states) for one in (reply, sent))
        total += level.clipped(held, own)["model"]["weight"].flatten()
    for i in (0, 2, 4):
        total[int(seen.entries[i])] += level.bound * seen.signs[i]
    exact = start.params["weight"].flatten() + total / level.cohort
    torch.testing.assert_close(after.params["weight"].flatten(), exact, rtol=0, atol=1e-12)
    turned = auditor(made, chosen[:6], [False] * 6)
    apart = next(turned.rounds(made, start)).state.params["weight"] - after.params["weight"]
    assert float(apart.norm()) == pytest.approx(3**0.5 * level.bound / level.cohort, rel=1e-12)
    assert after.states.keys() == start.states.keys()


@pytest.mark.parametrize("bound", [1e-9, 3.0])
def test_a_canary_moves_one_entry_of_all_tensors_and_is_looked_for_there(bound: float) -> None:
    """By flat indices, in float32 beside parameters of size 1; clipped, it is as long as C."""
    rng, many = np.random.default_rng(0), 41
    level, order = ClientLevel(bound, 1.0, 4, many), rng.permutation(41)
    seen = ClientAuditor(level, np.arange(many), order > 0, order, rng.choice([-1.0, 1.0], many))
    weight = torch.from_numpy(rng.standard_normal((1, 6, 4))).float()
    params = {"a": weight.mT, "b": torch.ones(1, 3), "c": torch.zeros(1, 7, 2)}
    for i in range(many):
        after = seen._moved(params, i)
        moved = _apart(params, after)
        assert np.flatnonzero(moved.numpy()).tolist() == [order[i]]
        assert seen._along(moved)[i] == pytest.approx(2 * max(bound, 1.0), rel=1e-6)
        clipped = level.clipped({"model": params}, {"model": after})["model"]
        zeros = {name: torch.zeros_like(one) for name, one in clipped.items()}
        assert seen._along(_apart(zeros, clipped))[i] == pytest.approx(bound, rel=1e-12)


KINDS = [{}, {"cohorts": "fixed"}, LOCAL]


@pytest.mark.parametrize("privacy", quick(KINDS, KINDS[::2]))
def test_watching_changes_no_bit_of_a_run(privacy: dict[str, Any]) -> None:
    """Without canaries; a round is seen once, or under local trust never: nobody has a canary."""
    made = experiment(given(privacy))
    start, seen = begin(made.recipe, made.task, 0), auditor(made, [], [])
    plain, watched = simulate(made, start), simulate(made, start, seen.rounds)
    assert torch.equal(plain.params["weight"], watched.params["weight"])
    assert len(seen.seen) == (0 if privacy == LOCAL else 2)
    with_one = simulate(made, start, auditor(made, [*range(9)], [True] * 9).rounds)
    assert not torch.equal(plain.params["weight"], with_one.params["weight"])  # a control


@pytest.mark.parametrize("privacy", [{}, {"cohorts": "fixed"}])
def test_what_a_round_says_of_each_canary(privacy: dict[str, Any]) -> None:
    """By a loop, from the models before and after it and the law of a sum's entry, N(C b, v)."""
    made = experiment(given(privacy))
    seen = auditor(made, [*range(1, 40, 2)], [True, False] * 10)
    states = [begin(made.recipe, made.task, 0)]
    states += [one.state for one in seen.rounds(made, states[0])]
    for round, (y, s, rates) in enumerate(seen.seen):
        before, after = (states[k].params["weight"].flatten() for k in (round, round + 1))
        total = 20 * (after - before).numpy()
        v = max((0.7 * 0.5) ** 2, float(np.mean(total**2)))
        assert s == pytest.approx(0.5**2 / v, rel=1e-9)
        for i, client in enumerate(seen.clients):
            z = total[seen.entries[i]] * seen.signs[i]
            exact = norm.logpdf(z, 0.5, v**0.5) - norm.logpdf(z, 0, v**0.5)
            assert y[i] - s / 2 == pytest.approx(exact, rel=1e-9, abs=1e-12)
            there = client in made.plan.participants(round)
            assert rates[i] == (there if privacy else 0.5)


def test_under_local_trust_each_client_is_seen_alone() -> None:
    """Nearly without noise what it sends is its update, 0 or C, in the rounds of its own."""
    made = experiment(given({**LOCAL, "noise": 1e-6}))
    seen = auditor(made, [*range(20)], [True, False] * 10)
    simulate(made, begin(made.recipe, made.task, 0), seen.rounds)
    rows = [(client, round) for round in (0, 1) for client in made.plan.participants(round)]
    rows = [(client, round) for client, round in rows if client < 20]
    assert len(rows) == len(seen.seen) > 10
    for (client, _), (y, s, rates) in zip(rows, seen.seen, strict=True):
        assert rates.tolist() == [float(i == client) for i in range(20)]
        assert y[client] / s == pytest.approx(1.0 - client % 2, abs=1e-4)


def test_releases_that_a_canary_has_no_part_in_say_nothing() -> None:
    """A ratio with rates 0 and 1 is that of rows with 1; where all are alike, that of one."""
    rng = np.random.default_rng(0)
    y, s = rng.standard_normal((30, 8)) / 3, np.full(30, 0.1)
    part = rng.random((30, 8)) < 0.4
    found = log_ratio(y, s, part.astype(float))
    for i in range(8):
        assert found[i] == pytest.approx((y[part[:, i], i] - 0.05).sum(), rel=1e-12)
    np.testing.assert_array_equal(log_ratio(y, s, np.full((30, 8), 0.3)), log_ratio(y, s, 0.3))


@pytest.mark.parametrize("privacy", quick(KINDS, KINDS[::2]))
def test_a_run_of_clients_is_audited(privacy: dict[str, Any], tmp_path: Path) -> None:
    record = audited(given(privacy), tmp_path / "run", 30)
    assert len(places := check_audited(tmp_path / "run", record, "clients")) == 30
    assert places.max() < 40 and record["unit"] == "client"
    assert record["adjacency"] == ("zero-out" if privacy else "add-remove")
    audit_there = spending.spent(tmp_path / "run")["audit"]
    assert audit_there["epsilon_at_least"] == record["epsilon_at_least"]
    assert bool(Ledger.read(tmp_path / "run" / "ledger.jsonl").entries)


def test_a_run_with_too_little_noise_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clients, by the releases and by the final model alone; the honest run is not."""
    settings = given({"noise": 2.0, "delta": 1e-5}, **ONCE)
    honest = audited(settings, tmp_path / "honest", 80)
    true = ClientLevel._with_noise

    def quieter(self: ClientLevel, *rest: Any) -> Any:
        return true(replace(self, noise=self.noise / 10), *rest)

    monkeypatch.setattr(ClientLevel, "_with_noise", quieter)
    found = audited(settings, tmp_path / "quiet", 80)
    assert found["right"] == found["guesses"] and not found["below"] and honest["below"]
    assert found["epsilon_at_least"] > found["epsilon"] > honest["epsilon_at_least"]
    of_model = audited(settings, tmp_path / "model", 80, sees="model")
    assert of_model["guesses"] == of_model["right"] == 10


@pytest.mark.parametrize("quiet", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_an_audit_by_removing_one_client(quiet: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs with and without it, by counts alone: below what is certified; above it, where
    the noise is less than is accounted for, a control. Every draw follows from a trial's number."""
    true = ClientLevel._with_noise
    monkeypatch.setattr(
        ClientLevel, "_with_noise",
        lambda self, *rest: true(replace(self, noise=self.noise / quiet), *rest),
    )  # fmt: skip
    settings = REMOVED | {
        "federation": {"clients": 2, "per-round": 2, "rounds": 2},
        "privacy": REMOVED["privacy"] | {"noise": 1.5},
    }
    found = by_removing(settings, 100, seed=1000)
    assert found["certified"] == epsilon(1.5, 1.0, 2, 0.01).upper
    assert found["below"] == (quiet == 1) and found["epsilon_at_least"] > 0.3


@pytest.mark.parametrize(("changes", "more", "said"), [
    ({}, {"count": 41}, "at most 40, because canaries replace clients"),
    ({"privacy": {"noise": 0.0}}, {}, "Set \\[privacy\\] noise above 0"),
    ({"federation": {"adapters": "freeze-a"}, "task": {"name": "network", "model": "linear"}}, {},
     "a part of the parameters.* canaries are entries of all parameters"),
])  # fmt: skip
def test_what_cannot_be_audited_is_refused(
    changes: dict[str, Any], more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        audited(given(**changes), tmp_path / "run", **{"count": 30, **more})
    assert not (tmp_path / "run").exists()


def test_the_command_audits_clients(tmp_path: Path) -> None:
    settings = ["data.name=synthetic", "data.train=40", "data.minimum=1", "federation.clients=20",
                "federation.rounds=2", "local.recipe=fedavg", "privacy.level=client",
                "privacy.noise=1"]  # fmt: skip
    settings = [part for one in settings for part in ("--set", one)]
    arguments = ["privacy", "audit", "--one-run", "--out", f"{tmp_path / 'a'}", *settings]
    done = CliRunner().invoke(app, arguments)
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "10 canaries" in said, done.output + str(done.exception)
    assert "Unit: client; adjacency: add-remove" in said


# Audits and accounts under distributed trust: of a cohort's shares of noise, those that count.

SHARED = {"cohorts": "fixed", "trust": "distributed", "honest": 0.5}


def seen_shares(seen: ClientAuditor, canaries: Any) -> Iterator[tuple[Tensor, int]]:
    """What colluders leave of a round of zeros in which these have canaries, and of how many."""
    level, zeros = seen.level, torch.zeros(1, 40_000)
    sent = [
        Reply(k, level.perturbed({"model": {"a": zeros}}, {"model": {"a": zeros}}, 0, k)["model"],
              {}, torch.zeros(1))
        for k in range(level.cohort)
    ]  # fmt: skip
    looked: list[tuple[Tensor, int]] = []
    seen._look = lambda moved, rates, share=1.0: looked.append(  # type: ignore[method-assign]
        (moved, round(share * level.cohort))
    )
    seen._look_behind(sent, np.isin(seen.clients, canaries).astype(float))
    yield from looked


@pytest.mark.parametrize(("canaries", "shares"), [([1, 5], 4), ([0, 1, 2, 4, 5, 7], 6)])
def test_colluders_leave_the_noise_of_the_shares_that_count(
    canaries: list[int], shares: int
) -> None:
    """n / K of (sigma C)^2, n = max(H, canaries in the cohort); 3% is 4 deviations. That of the
    release, a control, is K / n times as large."""
    level = ClientLevel(0.5, 0.7, 8, 20, "distributed", False, seed=3, honest=0.5)
    there = np.array(canaries)
    seen = ClientAuditor(level, there, there > 0, 7 * there, np.ones(len(there)))
    ((moved, counted),) = seen_shares(seen, canaries)
    assert counted == shares == seen.shares_seen and level.shares == 4
    assert float(moved.var()) == pytest.approx((0.7 * 0.5) ** 2 * shares / 8, rel=0.03)


def test_what_colluders_leave_is_the_sum_of_canaries_and_of_others_up_to_the_honest() -> None:
    """By a loop, behind noise of 1e-5; with one client more the sum is another, a control."""
    made, open_ = (experiment(given({**SHARED, "noise": 1e-5} if shared else {"cohorts": "fixed"}))
                   for shared in (True, False))  # fmt: skip
    start, level = begin(made.recipe, made.task, 0), made.recipe.client_level
    assert level is not None and open_.recipe.client_level is not None
    seen = auditor(made, [*range(9)], [True, False] * 4 + [True])
    next(seen.rounds(made, start))
    chosen = made.plan.participants(0).tolist()
    own, rest = ([one for one in chosen if (one < 9) == there] for there in (True, False))
    sent, ((y, s, rates),) = broadcast(made.recipe, start), seen.seen
    assert 0 < len(own) < 9 and rates.tolist() == [one in own for one in range(9)]

    def total(count: int) -> np.ndarray:
        found = np.zeros(ENTRIES)
        others = [(one, made.shards[one]) for one in rest[: count - len(own)]]
        for reply in client_updates(open_.recipe, made.task, made.plan, others, sent):
            each, held = (joint(made.recipe, one.params, one.states) for one in (reply, sent))
            found += level.clipped(held, each)["model"]["weight"].numpy().ravel()
        for i in own:
            found[seen.entries[i]] += level.bound * seen.signs[i] * seen.included[i]
        return found

    exact = [total(count) for count in (level.shares, level.shares + 1)]
    near = [float(np.abs(y / s * level.bound - one[seen.entries] * seen.signs).max())
            for one in exact]  # fmt: skip
    assert seen.shares_seen == level.shares == 10 and near[0] < 1e-4 < near[1]
    assert s == pytest.approx(level.bound**2 / np.mean(exact[0] ** 2), rel=1e-3)


@pytest.mark.parametrize("sees", [pytest.param("releases", marks=pytest.mark.slow), "model"])
def test_an_audit_says_how_many_shares_of_noise_it_sees(
    sees: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as count, where canaries are no more; of the model all. Other runs have no words. The
    sigma that it refutes is that of all shares, of whose variance it sees a part."""
    judge, least = one_run.judge, list[float]()
    monkeypatch.setattr(one_run, "judge", lambda *given: (
        least.append(judge(*given[:4])["noise_at_most"]) or judge(*given)))  # fmt: skip
    record = audited(given(SHARED, **ONCE), tmp_path / "run", 30, sees=sees)
    seen = 40 if sees == "releases" else 80
    assert (record["honest"], record["shares"], record["shares_seen"]) == (40, 80, seen)
    assert record["below"] and record["adjacency"] == "zero-out"
    most = least[0] and pytest.approx(least[0] * math.sqrt(80 / seen), rel=1e-12)
    assert record["noise_at_most"] == most and (least[0] or sees == "model")  # of which any may be
    assert record == json.loads((tmp_path / "run" / one_run.AUDIT).read_text())
    caption = str(one_run.table(record).caption)
    assert f"up to {seen} of 80 shares of noise" in caption
    assert ("epsilon counts only 40" in caption) == (sees == "model")
    plain = audited(given({"cohorts": "fixed"}, **ONCE), tmp_path / "plain", 30)
    assert "shares" not in plain and "shares of noise" not in str(one_run.table(plain).caption)


@pytest.mark.parametrize("quiet", quick([1, 20], [20]))
def test_shares_with_too_little_noise_are_caught(
    quiet: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = distributed.gaussian
    monkeypatch.setattr(distributed, "gaussian", lambda *rest: true(*rest) // quiet)
    found = audited(given({**SHARED, "noise": 4.0, "delta": 1e-5}, **ONCE), tmp_path / "run", 40)
    assert found["below"] == (quiet == 1)
    assert (found["right"] == found["guesses"] == 40) == (quiet == 20)


def test_noise_too_little_for_the_account_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """One share of three counts: sigma / sqrt(3) is below what accountants compute; of all three,
    or with the noise that is named, it is not, and under central trust neither."""
    few = {**SHARED, "honest": 0.34}
    of_shares = (
        r"noise = 1e-06 is too small for the accountant, because with honest = 0\.34 only 1 of 3 "
        r"noise shares count\. Set noise = 1\.74e-06 or more, or honest = 1\.$"
    )
    with pytest.raises(InputError, match=of_shares):
        execute(clients("fedavg", noise=1e-6, **few), tmp_path / "a")
    assert not list(tmp_path.iterdir())
    kinds = {"all": {**SHARED, "honest": 1.0}, "central": {"cohorts": "fixed"},
             "louder": {**few, "noise": 1.74e-6}}  # fmt: skip
    for name, more in kinds.items():
        execute(clients("fedavg", **{"noise": 1e-6, "rounds": 1, **more}), tmp_path / name)


@pytest.mark.parametrize(
    ("noise", "honest", "cohort"),
    [(1e-6, 0.1, 40), (3e-6, 0.01, 200), (1e-7, 0.5, 40), (1e-7, 1.0, 3)],
)
def test_too_little_noise_names_the_least_that_is_enough(
    noise: float, honest: float, cohort: int
) -> None:
    """What is named passes, and a hundredth less noise does not; honest is named where it helps."""

    def require(noise: float, **more: Any) -> None:
        level = ClientLevel(1.0, 1.0, cohort, cohort, "distributed", False)
        held = replace(level, **{"honest": honest, **more})
        object.__setattr__(held, "noise", noise)  # less than its sums can be made of
        accountant.require_counted(held, {1.0}, 1, 1, 1e-5, [])

    with pytest.raises(InputError, match=rf"noise = {noise:g} is too small.* or more") as error:
        require(noise)
    assert ("noise shares count" in str(error.value)) == (honest < 1)
    mend = str(error.value).partition(". ")[2].removesuffix(".")
    named = {key: float(value) for key, value in re.findall(r"(\w+) = (\S+)", mend)}
    assert named["noise"] > noise and ("honest" in named) == (noise >= 1e-6)
    require(named["noise"])
    if "honest" in named:
        require(noise, honest=named["honest"])
    with pytest.raises(InputError, match="too small"):
        require(0.99 * named["noise"])


@pytest.mark.parametrize(("count", "noise"), [(10, 0.7), (40, 4.0)])
def test_an_audit_that_cannot_test_its_claim_says_so_before_the_run(
    count: int, noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where nothing is hidden, so that all guesses are right, is such a claim refuted; one
    of which nothing is said is."""
    true, told = distributed.gaussian, list[tuple[str, bool]]()
    monkeypatch.setattr(distributed, "gaussian", lambda *rest: true(*rest) // 20)
    out, settings = tmp_path / "run", given({**SHARED, "noise": noise, "delta": 1e-5}, **ONCE)
    record = audited(settings, out, count, say=lambda note: told.append(
        (note, (out / "summary.json").exists())))  # fmt: skip
    few = count == 10
    assert told == [(record["note"], False)] and bool(record["note"]) == few
    assert record["below"] == few and record["right"] == record["guesses"]
    assert record["epsilon_at_least"] == pytest.approx(record["most_by_counts"], abs=1e-3)
    assert (record["note"] in str(one_run.table(record).caption)) and (
        f"at most {record['most_by_counts']:.4g}" in record["note"]) == few  # fmt: skip
    assert not few or f"The claimed epsilon is {record['epsilon']:.4g}" in record["note"]
