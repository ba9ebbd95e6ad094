"""Canaries among clients: the sums that they join, who sees them, what is refuted, and of whom."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from typer.testing import CliRunner

from benchmarks.one_run import REMOVED, by_removing
from fedmuon.config import load as tables
from fedmuon.core.errors import InputError
from fedmuon.experiments import spending
from fedmuon.experiments.auditing import one_run
from fedmuon.experiments.auditing.clients import ClientAuditor, _apart
from fedmuon.experiments.cli import app
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import Experiment, begin, broadcast, client_updates, joint, simulate
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.privacy.audit import log_ratio
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms.client_level import ClientLevel, Flat

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
    mixed = {name: {**table, **changes.get(name, {})} for name, table in SMALL.items()}
    return mixed | {"privacy": {**SMALL["privacy"], **(privacy or {})}}


def experiment(settings: dict[str, Any]) -> Experiment:
    config = resolve(tables.parse(settings))
    return build_experiment(config)


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


@pytest.mark.parametrize("privacy", [{}, {"cohorts": "fixed"}, LOCAL])
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


def audited(settings: dict[str, Any], out: Path, count: int = 30, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return one_run.execute(tables.parse(settings), out, count, rng=rng, **more)


@pytest.mark.parametrize("privacy", [{}, {"cohorts": "fixed"}, LOCAL])
def test_a_run_of_clients_is_audited(privacy: dict[str, Any], tmp_path: Path) -> None:
    record = audited(given(privacy), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert record == one_run.of_finished(tmp_path / "run")
    assert record["epsilon"] == summary["privacy"]["epsilon"] and record["below"]
    assert record["adjacency"] == summary["privacy"]["adjacency"] == (
        "zero-out" if privacy else "add-remove")  # fmt: skip
    audit_there = spending.spent(tmp_path / "run")["audit"]
    assert audit_there["epsilon_at_least"] == record["epsilon_at_least"]
    assert record["unit"] == "client" and record["right"] <= record["guesses"] <= 30
    assert bool(Ledger.read(tmp_path / "run" / "ledger.jsonl").entries)
    with np.load(one_run.coins(tmp_path / "run")) as held:
        assert len(set(held["clients"])) == 30 and held["clients"].max() < 40
        again = one_run.audit.guessed(held["scores"], held["included"], record["guesses"])
        coins = held["included"].tobytes(), np.packbits(held["included"]).tobytes()
    assert again.right == record["right"]
    files = [file.read_bytes() for file in (tmp_path / "run").iterdir()]
    assert not any(part in file for file in files for part in coins)


def test_a_run_with_too_little_noise_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clients, by the releases and by the final model alone; the honest run is not."""
    settings = given({"noise": 2.0, "delta": 1e-5}, **ONCE)
    honest = audited(settings, tmp_path / "honest", 80)
    true = ClientLevel._continuous

    def quieter(self: ClientLevel, sums: Flat, *rest: Any) -> Flat:
        return true(replace(self, noise=self.noise / 10), sums, *rest)

    monkeypatch.setattr(ClientLevel, "_continuous", quieter)
    found = audited(settings, tmp_path / "quiet", 80)
    assert found["right"] == found["guesses"] and not found["below"] and honest["below"]
    assert found["epsilon_at_least"] > found["epsilon"] > honest["epsilon_at_least"]
    of_model = audited(settings, tmp_path / "model", 80, sees="model")
    assert of_model["guesses"] == of_model["right"] == 10


@pytest.mark.parametrize("quiet", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_an_audit_by_removing_one_client(quiet: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs with and without it, by counts alone: below what is certified; above it, where
    the noise is less than is accounted for, a control. Every draw follows from a trial's number."""
    true = ClientLevel._continuous
    monkeypatch.setattr(
        ClientLevel, "_continuous",
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
    ({}, {"count": 41}, "at most the 40 clients whose places"),
    ({}, {"count": 9}, "9 canaries cannot be"),
    ({"privacy": {"noise": 0.0}}, {}, "give noise"),
    ({"engine": {"name": "ray"}}, {}, "inline"),
])  # fmt: skip
def test_what_cannot_be_audited_is_refused(
    changes: dict[str, Any], more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        audited(given(**changes), tmp_path / "run", **more)
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
    assert "unit: client, adjacency: add-remove" in said
