"""Canaries in real runs: the sums that they join, who sees them, and what a run's audit says."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick
from scipy.integrate import quad
from scipy.stats import norm
from typer.testing import CliRunner

from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.experiments.auditing import one_run
from fedmuon.experiments.auditing.canaries import MARK, Canaries, ExampleAuditor, TaskWithCanaries
from fedmuon.experiments.auditing.private_step import CLASSES, FEATURES, Parallel
from fedmuon.experiments.cli import app
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, simulate
from fedmuon.privacy import audit
from fedmuon.privacy.audit import Claimed, Setting, _ratio, log_ratio
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import RULES, Clipping

SMALL = {
    "data": {"name": "synthetic", "train": 80, "test": 10, "dimension": 40},
    "federation": {"clients": 2, "per-round": 2, "rounds": 2},
    "local": {"recipe": "dp-muon", "steps": 2, "lr": 0.1},
    "privacy": {"noise": 0.7, "lot": 20.0, "bound": 0.5, "delta": 1e-5,
                "insecure-reproducible-noise": True},
    "engine": {"dtype": "float64"},
}  # fmt: skip
PARTS = SMALL | {"data": SMALL["data"] | {"dimension": 2 * FEATURES, "classes": CLASSES}}
WHOLE = SMALL | {
    "federation": {"clients": 1, "per-round": 1, "rounds": 1},
    "local": {"recipe": "dp-muon", "steps": 1, "lr": 0.1},
    "privacy": {"noise": 1.0, "lot": 80.0, "delta": 1e-5},
}


def experiment(settings: dict[str, Any]) -> Experiment:
    config = resolve(parse(settings))
    return build_experiment(config)


def planted(made: Experiment, count: int, seed: int = 0) -> tuple[TaskWithCanaries, Experiment]:
    template = begin(made.recipe, made.task, 0).params
    canaries = Canaries.draw(count, made.shards, template, np.random.default_rng(seed))
    task = TaskWithCanaries(made.task, canaries)
    return task, replace(made, task=task, shards=canaries.mark(made.shards))


CASES = [*itertools.product((False, True), RULES)]


@pytest.mark.parametrize(("network", "rule"), quick(CASES, CASES[1:]))
def test_sums_are_those_of_the_others_and_the_canaries_that_are_there(
    network: bool, rule: str
) -> None:
    """By a loop over the samples of each client's lot; each canary is as long as a rule allows."""
    made, clipping = experiment(PARTS if network else SMALL), Clipping(rule, 0.5)
    if network:
        module = NetworkTask(Parallel(2), (2, FEATURES), torch.float64)
        made = replace(made, task=module)
    task, audited = planted(made, 40)
    canaries, params = task.canaries, begin(made.recipe, made.task, 0).params
    stack = {name: value.repeat_interleave(2, 0) for name, value in params.items()}
    lots = [np.arange(audited.shards.size(client)) for client in (0, 1)]
    batches = [audited.shards[client].batch(lots[client]) for client in (0, 1)]
    _, found = task.clipped([(0.3, stack), (0.7, stack)], batches, clipping)
    number = {int(row): i for i, row in enumerate(canaries.rows)}
    for client in (0, 1):
        first = int(made.shards.offsets[client])
        there = [first + row not in number for row in lots[client]]
        others = made.shards[client].batch(lots[client][there])
        exact = made.task.clipped([(0.3, params), (0.7, params)], [others], clipping)[1]
        for row in lots[client]:
            i = number.get(first + int(row))
            if i is None or not canaries.included[i]:
                continue
            own = {name: torch.zeros_like(value) for name, value in params.items()}
            for name, value in own.items():
                place = np.unravel_index(int(canaries.places[name][i]), value.shape[1:])
                value[0][place] = canaries.signs[name][i]
            squares = {name: torch.ones(1, dtype=torch.float64) for name in own}
            long = Clipping(rule, 1e-9).factors(squares)  # anything longer is cut to the bound
            for name in own:
                exact[name] += own[name] * float(long[name]) * 1e9 * clipping.bound
        for name, value in exact.items():
            torch.testing.assert_close(found[name][client], value[0], rtol=1e-9, atol=1e-9)
    lengths = np.array(list(canaries.lengths(clipping).values()))
    whole = clipping.sensitivity(list(params))
    assert np.linalg.norm(lengths) == pytest.approx(whole, rel=1e-12)


def test_canaries_of_a_client_share_no_place_before_all_are_taken() -> None:
    task, _ = planted(experiment(SMALL), 80)
    canaries = task.canaries
    for client in (0, 1):
        (places,) = (of[canaries.clients == client] for of in canaries.places.values())
        assert len(places.unique()) == len(places)


def test_watching_changes_no_bit_of_a_run_and_labels_are_read_as_they_were() -> None:
    made = experiment(SMALL)
    start = begin(made.recipe, made.task, 0)
    task, audited = planted(made, 40)
    own = made.recipe.mechanism
    assert own is not None
    rates = np.array([own.rate(made.shards.size(i)) for i in (0, 1)])
    auditor = ExampleAuditor(task.canaries, own, rates)
    plain, seen = (
        simulate(one, start).params["weight"]
        for one in (made, replace(made, recipe=auditor.watching(made.recipe)))
    )
    assert torch.equal(plain, seen)
    assert len(auditor.found) == 2 * 2 * 2  # clients, rounds, steps
    assert not torch.equal(plain, simulate(audited, start).params["weight"])
    assert int(audited.shards.labels.max()) > 39 * MARK
    for name in ("gradient", "losses"):
        same = [getattr(one.task, name)(start.params, [one.shards[0].data] if name == "gradient"
                else one.shards[0].data)[0] for one in (made, audited)]  # fmt: skip
        assert torch.equal(*same)
    # By chance, a client has no canary. Its releases then tell of nobody.
    auditor = ExampleAuditor(task.canaries.of(0), own, np.array([own.rate(40)] * 2))
    simulate(replace(made, recipe=auditor.watching(made.recipe)), start)
    assert len(auditor.found) == 8 and auditor.of[1].rows.size == 0
    assert auditor.scores().all()


def along_canaries(steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Releases [T, 600] along canaries, of which half are there, their s [T], and the ratios."""
    setting, rng = Setting(1.5, 0.1, steps, 4), np.random.default_rng(0)
    observe = audit.projected(setting, rng)
    sums = np.concatenate([observe((300, steps), there) for there in (True, False)])
    exact = audit.likelihood_ratio(setting, sums)
    return 2 * sums.T / 1.5**2, np.full(steps, 4 / 1.5**2), exact


def test_scores_are_likelihood_ratios() -> None:
    """Where nothing else is in the way, those of the audit of many runs, to the last digit."""
    y, s, exact = along_canaries(200)
    np.testing.assert_allclose(log_ratio(y, s, 0.1), exact, rtol=1e-9)
    np.testing.assert_allclose(log_ratio(y, s, 1.0), (y - s[:, None] / 2).sum(0), rtol=1e-9)


def test_scores_do_without_what_others_do_in_every_release() -> None:
    """By scipy's integral over b; and they tell canaries apart better than the sum over releases
    that takes others for noise of their own, a negative control."""
    (y, s, _), there = along_canaries(60), np.repeat([1, 0], 300)
    y = y + np.random.default_rng(1).normal(0, 3, 600)
    found = log_ratio(y, s, 0.1)
    right = lambda scores: np.mean((scores > np.median(scores)) == there)  # noqa: E731
    assert right(_ratio(y - s[:, None] / 2, 0.1)) < right(found) - 0.1
    for i in (0, 5, 400):

        def density(b: float, with_it: bool, i: int = i) -> float:
            logs = norm.logpdf(y[:, i], b, np.sqrt(s))
            if with_it:
                more = np.log(0.1) + norm.logpdf(y[:, i], b + s, np.sqrt(s))
                logs = np.logaddexp(np.log(0.9) + logs, more)
            return float(np.exp(logs.sum() + 100 + norm.logpdf(b, 0, np.std(y.mean(0)))))

        mean = float(y[:, i].mean())
        sides = [quad(density, mean - 2, mean + 1, (one,), limit=200)[0] for one in (True, False)]
        assert found[i] == pytest.approx(np.log(sides[0] / sides[1]), abs=0.1)


def audited(settings: dict[str, Any], out: Path, count: int = 70, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return one_run.execute(parse(settings), out, count, rng=rng, **more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    out = tmp_path_factory.mktemp("audit") / "run"
    yield out, audited(SMALL, out)


def check_audited(out: Path, record: dict[str, Any], places: str) -> np.ndarray:
    """The record of an audit that refutes nothing; its coins are in a folder of their own. Returns
    the places of the canaries."""
    assert record == json.loads((out / one_run.AUDIT).read_text()) == one_run.read_finished(out)
    private = json.loads((out / "summary.json").read_text())["privacy"]
    assert [record[name] for name in ("epsilon", "unit")] == [private["epsilon"], private["unit"]]
    assert record["below"] and record["right"] <= record["guesses"] <= record["canaries"]
    assert one_run.coins(out).parent != out
    with np.load(one_run.coins(out)) as held:
        found, scores, included = held[places], held["scores"], held["included"]
    assert len(set(found)) == record["canaries"]
    again = one_run.audit.guess_coins(scores, included, record["guesses"])
    assert again.right == record["right"]
    coins = included.tobytes(), np.packbits(included).tobytes()
    assert not any(part in file.read_bytes() for file in out.iterdir() for part in coins)
    return found


def test_a_run_is_audited_and_its_coins_are_not_in_its_folder(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    out, record = finished
    assert len(check_audited(out, record, "rows")) == 70
    assert "zero-out" in record["adjacency"] and record["unit"] == "example within its client"


@pytest.mark.slow
def test_of_repeated_audits_none_exceeds_what_is_certified(tmp_path: Path) -> None:
    """Bounds of 95%, of 6 runs whose noise and coins are secret: three would be one in 400."""
    chosen, above = parse(WHOLE), 0
    for k in range(6):
        found = one_run.execute(chosen, tmp_path / f"{k}", 80)
        above += max(found["epsilon_at_least"], found["declared"]) > found["epsilon"]
    assert above < 3


def test_a_run_with_too_little_noise_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: a tenth of the noise that the ledger counts."""
    true = Mechanism.releases

    def quieter(self, *rest):
        return true(replace(self, noise=self.noise / 10), *rest)

    settings = WHOLE | {"privacy": WHOLE["privacy"] | {"noise": 2.0}}
    honest = audited(settings, tmp_path / "honest", 80)
    monkeypatch.setattr(Mechanism, "releases", quieter)
    found = audited(settings, tmp_path / "quiet", 80)
    assert found["right"] == found["guesses"] and not found["below"] and honest["below"]
    assert found["epsilon_at_least"] > found["epsilon"] > honest["epsilon_at_least"]
    assert "audit refutes" in str(one_run.table(found).caption) and "audit refutes" not in str(
        one_run.table(honest).caption
    )


def test_what_cannot_be_tested_is_what_a_run_of_unequal_clients_will_claim(tmp_path: Path) -> None:
    """The one that spends most holds no canary; a control, what those that do would claim."""
    settings = SMALL | {
        "data": {**SMALL["data"], "train": 200, "alpha": 0.1, "minimum": 5},
        "privacy": {**SMALL["privacy"], "lot": 5.0},
        "federation": {"clients": 6, "per-round": 6, "rounds": 2, "seed": 4},
    }
    told = list[str]()
    record = audited(settings, tmp_path / "run", 10, say=told.append)
    assert told == [record["note"]]
    assert f"The claimed epsilon is {record['epsilon']:.4g}" in record["note"]
    every = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]["clients"]
    with np.load(tmp_path / "run" / "partition.npz") as split, np.load(
        one_run.coins(tmp_path / "run")) as held:  # fmt: skip
        clients = np.sort(split["client"])[held["rows"]]  # a client's samples lie together
    assert max(every[str(client)] for client in clients) < 0.99 * record["epsilon"]


def test_enough_guesses_for_the_clients_with_canaries_may_be_too_few_for_all() -> None:
    """What they could refute lies between both claims; a control, of the quieter clients alone."""
    quiet, loud = Setting(3.0, 0.1, 1, 1), Setting(0.7, 1.0, 1, 1)
    for settings, few in (([quiet], False), ([quiet, loud], True)):
        claimed = Claimed(settings, 1e-5, "zero-out")
        limits = audit.limits_of_guesses(20, 20, claimed, audit.MORE_CANARIES)
        assert bool(limits["note"]) == few, limits


def test_the_final_model_alone_tells_something(tmp_path: Path) -> None:
    """Of one step of gradient descent it is all that was released."""
    settings = WHOLE | {"local": {"recipe": "dp-sgd", "steps": 1, "lr": 0.1}}
    settings |= {"privacy": {"noise": 0.4, "lot": 80.0, "delta": 1e-5}}
    found = audited(settings, tmp_path / "run", 80, sees="model")
    assert found["guesses"] == 10 and found["right"] >= 9


@pytest.mark.parametrize(("changes", "more", "said"), [
    ({"local": {"recipe": "fedmuon"}, "privacy": {}}, {}, "makes no privacy claim"),
    ({"engine": {"name": "ray"}, "faults": {"retries": 0}}, {}, "inline"),
    ({}, {"count": 9}, "canaries is 9, but it must be at least 10"),
    ({}, {"count": 81}, "canaries is 81, but it must be at most 80"),
    ({}, {"sees": "lots"}, "--sees lots is unknown"),
    ({"data": {**SMALL["data"], "client-test": 0.2}}, {}, "client-test = 0.2 .*, but an audit"),
    ({"privacy": {"noise": 0.0, "lot": 20.0}}, {}, "Set \\[privacy\\] noise above 0"),
    ({"privacy": {"noise": 1.0, "lot": 20.0, "quantile": 0.5}}, {}, "quantile out"),
    ({"privacy": {"noise": 1.0, "lot": 20.0, "sampling": "shuffle"}}, {}, "only Poisson lots"),
])  # fmt: skip
def test_what_cannot_be_audited_is_refused(
    changes: dict[str, Any], more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        audited(SMALL | changes, tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_real_targets_are_refused() -> None:
    made = experiment(SMALL)
    shards = replace(made.shards, labels=made.shards.labels.double())
    with pytest.raises(InputError, match="integer labels"):
        planted(replace(made, shards=shards), 40)


def test_the_command(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A config is run, an audited run is shown, and so is its bound beside what was spent; one
    without canaries is refused with what to do."""
    out, record = finished
    shown = CliRunner().invoke(app, ["privacy", "audit", "--one-run", f"{out}", "--json"])
    assert json.loads(shown.output) == record
    spent = CliRunner().invoke(app, ["privacy", "spent", f"{out}", "--json"])
    assert json.loads(spent.output)["audit"]["epsilon_at_least"] == record["epsilon_at_least"]
    assert "audited" in CliRunner().invoke(app, ["privacy", "spent", f"{out}"]).output
    again = ["privacy", "audit", "--one-run", f"{out / 'config.toml'}", "--canaries", "20",
             "--out", f"{tmp_path / 'again'}"]  # fmt: skip
    done = CliRunner().invoke(app, again)
    assert done.exit_code == 0 and "20 canaries" in done.output.replace("\n", " ")
    (out / one_run.AUDIT).rename(tmp_path / "kept")
    refused = CliRunner().invoke(app, ["privacy", "audit", "--one-run", f"{out}"])
    assert "without canaries" in str(refused.exception)
    assert "audit" not in json.loads(
        CliRunner().invoke(app, ["privacy", "spent", f"{out}", "--json"]).output
    )
    (tmp_path / "kept").rename(out / one_run.AUDIT)
    missing = CliRunner().invoke(app, ["privacy", "audit", "--noise", "1"])
    assert "--lot, --population, --steps, --delta" in str(missing.exception)
    apart = CliRunner().invoke(app, ["privacy", "audit", f"{out}"])
    assert "--one-run" in str(apart.exception)
    both = CliRunner().invoke(app, [*again, "--noise", "1"])
    assert "many runs" in str(both.exception)


@pytest.mark.parametrize(("arguments", "said"), [
    ("--noise 1 --sees model", "does not accept --sees. Add --one-run"),
    ("--lot 2 --out a --set data.train=9", "does not accept --out, --set. Add"),
    ("config.toml --noise 1", "does not accept RUN. Add"),
    ("--one-run --lot 2 --blocks 1", "accept --lot, --blocks, which only audits of many runs"),
    ("--one-run config.toml --code projected", "accept --code, which only audits of many runs"),
    ("--one-run . --canaries 9 --json", ". is the folder of an audited run, so the command only "
     "shows its audit. Remove --canaries"),
])  # fmt: skip
def test_options_that_an_audit_does_not_read_are_refused(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defaults, too, when they are given: they would look as if they held."""
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["privacy", "audit", *arguments.split()])
    assert isinstance(refused.exception, InputError) and not refused.output
    assert said in str(refused.exception) and not list(tmp_path.iterdir())
