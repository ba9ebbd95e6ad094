"""What a private run is refused for: before anything is written, by the key that was set, and with
a next step that works."""

import itertools
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small

import fedmuon
from fedmuon import links
from fedmuon.config.incompatible import has_no_noise
from fedmuon.config.load import Config, dump, nested, parse
from fedmuon.config.methods import PRIVATE
from fedmuon.config.schema import NEEDS
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.experiments.cli import main
from fedmuon.experiments.report import gather
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import spent
from fedmuon.experiments.stability import neighbours
from fedmuon.experiments.studies.training import TrainingRun
from fedmuon.experiments.suites.contents import merged
from fedmuon.federated.accountant import delta_of
from fedmuon.optim.links import private_gradient
from fedmuon.optim.server_rules import replace_by_mean
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling, sensitivity, square_root
from fedmuon.privacy.mechanisms.gaussian import Mechanism, Quantile
from fedmuon.runs.directory import RunDirectory
from fedmuon.server.run_config import require_noise
from fedmuon.tasks.per_example.clipping import Clipping

CLIENT = {"level": "client", "noise": 1.0}
DP_FTRL = {"sampling": "cyclic", "noise-correlation": "sqrt-toeplitz", "band": 3}


def private(recipe: str = "dp-sgd", /, **privacy: Any) -> Config:
    given = {} if privacy.get("level") == "client" else {"noise": 1.0, "lot": 4.0}
    return small(federation={"rounds": 3}, local={"recipe": recipe}, privacy=given | privacy)


ALONE = {"federation": {"clients": 1, "per-round": 1}, "local": {"recipe": "dp-sgd"}}
TRUSTED = {"level": "client", "noise": 1.0, "cohorts": "fixed"}
BASES: dict[str, dict[str, Any]] = {
    "client": {"local": {"recipe": "fedavg"}, "privacy": CLIENT},
    "shares": {
        "local": {"recipe": "fedavg"},
        "privacy": {**TRUSTED, "trust": "distributed", "honest": 1.0},
    },
    "public": {"local": {"recipe": "dp-sgd"}, "privacy": {"epsilon": 4.0, "lot": 6.0}},
    "order": {**ALONE, "privacy": {"sampling": "cyclic", "lot": 12.0, "noise": 1.0}},
    "quantile": {**ALONE, "privacy": {"noise": 1.0, "lot": 8.0, "quantile": 0.5}},
}
CORRELATED = {"noise-correlation": "sqrt-toeplitz", "band": 3}
RAY = {"engine": {"name": "ray"}}
IMPOSSIBLE = [
    ("client", {"local": {"recipe": "dp-sgd"}}, "noise to each step to protect single examples"),
    ("client", {"local": {"recipe": "adamw"}}, "second moment negative"),
    ("client", {"federation": {"aggregate": "median"}}, "bounds the influence of each"),
    ("client", {"privacy": {"bound": math.inf}}, "clips nothing, .* needs clipped updates"),
    ("client", {"privacy": {"delta": 1e-15}}, "Raise delta"),
    ("client", {"privacy": {"trust": "local"}}, "Set cohorts = 'fixed'"),
    ("client", {"privacy": {"trust": "distributed"}}, "Set cohorts = 'fixed'"),
    ("client", {"privacy": {"lot": 3.0}}, "lot = 3.0 has no effect"),
    ("client", {"output": {"checkpoint-every": 3}},
     "checkpoint-every = 3 has no effect, .* saves every round. Leave all keys of .privacy. out"),
    ("client", {"privacy": {"trust": "local", "cohorts": "fixed"}, **RAY}, "retries = 0"),
    ("shares", {"privacy": {"cohorts": "poisson"}}, "which clients answer. Set cohorts = 'fixed'"),
    ("shares", {"privacy": {"noise": 0.0}}, "clients' updates. Set noise or epsilon"),
    ("shares", {"privacy": {"arithmetic": "continuous"}}, "Set arithmetic to auto or grid"),
    ("shares", {**RAY, "faults": {"policy": "drop", "retries": 0}}, "policy = 'strict'"),
    ("shares", RAY, "retries = 0"),
    ("shares", {"privacy": {"trust": "local"}}, "honest = 1.0 has no effect"),
    ("public", {"privacy": {"adjacency": "add-remove"}}, "default rate lot / n_i"),
    ("public", {"privacy": {"rate": 0.1, "population": 60}}, "Leave one of the two keys out"),
    ("public", {"privacy": {"population": 5}}, "lot = 6 exceeds population = 5"),
    ("public", {"privacy": {"population": 60}, "federation": {"aggregate": "by-samples"}},
     "must hide this number"),
    ("public", {"privacy": {"population": 60}, "federation": {"aggregate": "statistics:mean"}},
     "must hide this number"),
    ("public", {"privacy": {"rate": 1.5}}, "rate"),
    ("public", {"privacy": {"rate": 1e-12}}, "delta = 0 means n.-1.1, and rate = 1e-12 implies n"),
    ("public", {"privacy": {"delta": 1e-20}}, "delta = 1e-20 is below"),
    ("public", {"privacy": {"noise-source": "pcg64", "insecure-reproducible-noise": True}},
     "used only by secret noise"),
    ("order", {"privacy": {"sampling": "shuffle", **CORRELATED}}, "used only by cyclic sampling"),
    ("order", {"privacy": {"sampling": "poisson", **CORRELATED}}, "used only by cyclic sampling"),
    ("order", {"privacy": {"lot": 2.5}}, "Set lot to an integer"),
    ("order", {"privacy": {"rate": 0.1}}, "have no sampling rate"),
    ("order", {"privacy": {"population": 100}}, "have no sampling rate"),
    ("order", {"privacy": CORRELATED, "federation": {"clients": 2}},
     "'sqrt-toeplitz' needs a single client, but .* clients = 2.* clients = 1 and per-round = 1"),
    ("order", {"privacy": {"sampling": "poisson", **CORRELATED}, "federation": {"clients": 2}},
     "Set .privacy. sampling = 'cyclic'"),
    ("order", {"privacy": {"arithmetic": "grid", **CORRELATED}}, "noise-correlation = 'sqrt"),
    ("quantile", {"privacy": {"arithmetic": "grid"}}, "quantile = 0.5 .*grid.* quantile = 0, or"),
    ("quantile", {"output": {"clients": True}}, "clients = false, or leave --clients out"),
    ("quantile", {"output": {"checkpoint-every": 3}},
     "A private run saves every round. Choose an optimizer that is not private and leave the keys"),
    ("order", {"privacy": CORRELATED, "local": {"recipe": "dp-muonbc"}}, "independent between"),
    ("order", {"privacy": CORRELATED, **RAY, "faults": {"retries": 0}}, "memory of one process"),
    ("order", {"privacy": {"adjacency": "add-remove"}}, "add-remove' needs"),
    ("quantile", {"privacy": {"clipping": "automatic-flat"}}, "scales every gradient"),
    ("quantile", {"local": {"recipe": "dp-muonbc"}}, "of the same scale at every step"),
    ("quantile", {"privacy": {"bound": math.inf, "noise": 0.0}}, "to a finite number"),
    ("quantile", {"privacy": {"sampling": "cyclic", "noise-correlation": "sqrt-toeplitz"}},
     "the same scale in all steps"),
    ("quantile", {"privacy": {"quantile": 0.0, "count-noise": 1.0}}, "Set quantile above 0"),
    ("quantile", {"privacy": {"quantile-rate": 1e12}}, "quantile-rate = .* at most 10"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "why"), IMPOSSIBLE)
def test_what_no_account_covers_is_refused_by_the_config(
    base: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        small(**merged(BASES[base], changes))


@pytest.mark.parametrize(("options", "why"), [
    ({"adjacency": "add-remove"}, "needs a public sampling rate"),
    ({"adjacency": "substitute"}, "'substitute', but it must be one of"),
    ({"source": "dice"}, "is unknown. Use"),
    ({"arithmetic": "sand"}, "is unknown. Use"),
    ({"adjacency": "add-remove", "fixed_order": FixedOrderSampling()}, "moves other samples"),
    ({"lot": 2.5, "fixed_order": FixedOrderSampling()}, "is not an integer"),
    ({"arithmetic": "grid", "quantile": Quantile(0.5, 0.2, 1.0)},
     "'grid', but quantile needs continuous"),
    ({"arithmetic": "grid", "fixed_order": FixedOrderSampling("cyclic", 3)},
     "or leave fixed_order with correlated noise out"),
])  # fmt: skip
def test_a_mechanism_of_ones_own_is_held_to_it(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Mechanism(**{"clipping": Clipping(), "noise": 1.0, "lot": 4.0, **options})
    with pytest.raises(InputError, match="needs a whole epoch between"):
        FixedOrderSampling("shuffle", 2)
    with pytest.raises(InputError, match=r"Mechanism\.rows draws Poisson lots"):
        own = Mechanism(Clipping(), 1.0, 2.0, fixed_order=FixedOrderSampling())
        own.rows(lambda what: None, 10)  # type: ignore[arg-type]
    control = Mechanism(Clipping(), 1.0, 4.0, public_rate=0.1, adjacency="add-remove")
    assert control.rate(7) == 0.1


def test_the_controls_of_it_are_read() -> None:
    small(
        local={"recipe": "dp-sgd"}, federation={"aggregate": "by-samples"},
        privacy={"epsilon": 4.0, "lot": 6.0, "population": 60, "adjacency": "zero-out"},
    )  # fmt: skip
    assert private(rate=1e-9).privacy.public_population == pytest.approx(4e9)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (private(quantile=0.5, **{"count-noise": 0.4}), "count-noise = 0.4 is too small"),
        (private(noise=1e9), "too large for exact noise on a lattice"),
        (private("fedmuon", level="client", noise=1e9), "too large for exact noise on a lattice"),
        (private(noise=1e-9), "noise = 1e-09 is too small for the account.* noise = 1e-06 or more"),
        (
            private("fedmuon", level="client", noise=1e-9),
            "noise = 1e-09 is too small for the account",
        ),
        (private(rate=1e-18, delta=1e-5), "probability is 1e-18, but"),
    ],
)
def test_what_has_no_account_is_refused_before_anything_is_written(
    config: Config, why: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(InputError, match=why):
        execute(config, out)
    assert not out.exists()


def test_the_control_of_it_runs(tmp_path: Path) -> None:
    """Just within the same limits."""
    execute(private(quantile=0.5, noise=0.7, **{"count-noise": 0.4}), tmp_path / "count")
    execute(private("fedmuon", level="client", noise=1e6), tmp_path / "coarse")
    execute(private(noise=1e9, arithmetic="continuous"), tmp_path / "continuous")
    execute(private(noise=1e-6), tmp_path / "quiet")


def test_a_followed_bound_stays_a_bound() -> None:
    """Counts that are nothing but noise carry its logarithm anywhere, and exp(800) is infinite."""
    quantile, log_bound = Quantile(0.5, 10.0, 1e6), torch.zeros(1, dtype=torch.float64)
    for share in (-80.0, 1e6, -1e6):
        log_bound = quantile.moved(log_bound, torch.tensor([share], dtype=torch.float64))
        assert 1e-15 * (1 - 1e-9) <= float(log_bound.exp()) <= 1e15 * (1 + 1e-9)
    near = quantile.moved(torch.zeros(1).double(), torch.tensor([0.4]).double())
    assert float(near) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (private("fedmuon", **CLIENT), "need the same participants.* cohorts = 'fixed'"),
        (small(stability={"realized": True}, local={"recipe": "fedavg"}), "realized needs"),
        (small(stability={"neighbours": "worst"}, orthogonalizer={"name": "exact-sign"}), "jumps"),
        (
            small(stability={"neighbours": "worst"}, federation={"aggregate": "median"}),
            "a selection among replies",
        ),
        (small(stability={"neighbours": "worst"}, local={"recipe": "adamw"}), "adamw"),
        (
            small(
                stability={"neighbours": "worst"},
                local={"recipe": "dp-sgd"},
                privacy={"noise": 1.0, "lot": 4.0},
            ),
            "noise hide single",
        ),
        (small(engine={"name": "deployment"}), "a deployment runs only one model"),
    ],
)
def test_neighbours_that_cannot_be_are_refused_before_the_run(
    config: Config, why: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(InputError, match=why):
        neighbours.execute(config, out)
    assert not out.exists()


def test_a_refused_neighbourhood_leaves_a_finished_run_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(private("fedmuon", **CLIENT), tmp_path / "clients")
    before = contents(tmp_path / "clients")
    assert ended(["stability", "--out", str(tmp_path / "clients"), "--resume"]) == 2
    assert "cohorts = 'fixed'" in capsys.readouterr().err
    assert contents(tmp_path / "clients") == before
    neighbours.execute(small(stability={"trials": 1}, federation={"rounds": 1}), tmp_path / "one")
    assert len(found := gather(tmp_path)) == 2 and found[0].name == "one"  # and the plain run


def test_neighbours_that_were_broken_off_say_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "one"
    config = small(stability={"trials": 2}, federation={"rounds": 1})
    with monkeypatch.context() as patch:
        patch.setattr("fedmuon.experiments.stability.neighbours.gap.measure_gap", interrupted)
        with pytest.raises(Interrupted):
            neighbours.execute(config, out)
    with pytest.raises(InputError) as refusal:
        gather(tmp_path)
    command = re.search(r"resume with: (fedmuon .*)$", str(refusal.value))
    assert command and not ended(shlex.split(command[1])[1:])
    assert len(gather(tmp_path)) == 1


def test_a_run_whose_noise_is_lost_is_not_told_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does the resume that somebody tries all the same touch a byte."""
    out, file = tmp_path / "run", tmp_path / "config.toml"
    file.write_text(dump(dp_ftrl()))
    broken_off(["run", str(file), "--out", str(out)], monkeypatch)
    said = capsys.readouterr().err
    assert (
        "Secret noise is never stored in a file" in said
        and "another folder" in said
        and "--resume" not in said
    )
    (out / ".config.toml.x.part").write_bytes(b"a draft")
    ledger = out / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-1])  # a kill in the midst of its last line
    before = contents(out)
    for command in (
        ["run", "--out", str(out), "--resume"],
        ["stability", "--out", str(out), "--resume"],
        ["run", str(file), "--out", str(out)],
    ):
        assert ended(command) == 2
        assert "--resume" not in capsys.readouterr().err
        assert contents(out) == before
    cell = TrainingRun("DP-FTRL", None, dp_ftrl(), out)
    with pytest.raises(InputError, match=r"Remove this folder and continue with --resume"):
        cell.compute()
    assert contents(out) == before


def test_other_private_runs_are_told_to_resume_and_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "run", tmp_path / "config.toml"
    file.write_text(dump(dp_ftrl(band=1)))
    broken_off(["run", str(file), "--out", str(out)], monkeypatch)
    command = capsys.readouterr().err.split("resume with: ")[1]
    assert not ended(shlex.split(command)[1:])
    assert RunDirectory(out).summary()


@pytest.mark.parametrize("where", ["runs.loop._finish", "experiments.auditing.one_run.judge"])
def test_an_audit_that_was_interrupted_is_begun_anew(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its last round, or once the run has ended and what it refutes has not been written."""
    out, file = tmp_path / "run", tmp_path / "config.toml"
    file.write_text(dump(private()))
    again = ["privacy", "audit", "--one-run", str(file), "--canaries", "20", "--out", str(out)]
    broken_off(again, monkeypatch, where)
    said = capsys.readouterr().err
    assert "random choices of its canaries are lost" in said and "another folder" in said
    assert "--resume" not in said
    before = contents(out)
    assert "audit" not in spent(out)
    whole = ["privacy", "audit", "--one-run", str(out)]
    for command in (again, whole, ["run", "--out", str(out), "--resume"]):
        assert ended(command) == 2
        assert "--resume" not in capsys.readouterr().err
        assert contents(out) == before


def test_a_damaged_ledger_is_refused_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("fedmuon.runs.loop._finish", interrupted)
        with pytest.raises(Interrupted):
            execute(private(), out)
    ledger = out / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"noise_multiplier": 1.0', b'"noise": 9.0', 1))
    (out / "rounds.jsonl").open("ab").write(b"a line that is no line\n")
    before = contents(out)
    with pytest.raises(InputError, match="damaged or changed"):
        execute(None, out, resume=True)
    assert contents(out) == before


OTHER = {  # a value that is no default, of each key of [privacy]
    "clipping": "flat", "bound": 2.0, "quantile": 0.5, "quantile-rate": 0.1, "count-noise": 3.0,
    "noise": 1.0, "lot": 32.0, "epsilon": 3.0, "delta": 1e-6, "level": "client", "trust": "local",
    "honest": 1.0, "state-weight": 2.0, "cohorts": "fixed", "adjacency": "add-remove",
    "sampling": "cyclic",
    "noise-correlation": "sqrt-toeplitz", "band": 3, "buffers": 3, "population": 1000, "rate": 0.1,
    "max-lot": 100, "inner-weights": "0.5, 0.25, 0.25",
    "kappa": 0.5, "lookahead": 0.25, "probes": 2, "noise-source": "pcg64",
    "arithmetic": "grid", "insecure-reproducible-noise": True, "blocks": "hidden",
}  # fmt: skip


def refused(recipe: str, given: dict[str, Any]) -> str:
    try:
        parse({"local": {"recipe": recipe}, "privacy": {"noise": 0.0, **given}})
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("recipe", ["fedmuon", "dp-muon", "disk-muonbc", "adamw"])
def test_a_refusal_names_a_key_that_was_set(recipe: str) -> None:
    """Of each pair of keys: not one that followed from it, which nobody would find."""
    assert set(OTHER) == set(NEEDS["privacy"])
    said = {
        pair: why
        for pair in itertools.combinations(OTHER, 2)
        if (why := refused(recipe, {key: OTHER[key] for key in pair}))
    }
    assert len(said) > 50  # the control: many of them are refused
    for pair, why in said.items():
        assert any(re.search(rf"(?<![\w-]){key}(?![\w-])", why) for key in pair), (pair, why)


@pytest.mark.parametrize("key", ["population", "rate", "lot", "sampling", "quantile", "probes"])
def test_at_client_level_the_mend_is_the_level(key: str) -> None:
    """Choosing a private recipe alone would be refused for the level."""
    why = refused("fedmuon", CLIENT | {key: OTHER[key]})
    assert f"[privacy] {key} = " in why
    assert "Set level = 'example' and choose an optimizer whose name begins with dp-" in why
    mended = {key: OTHER[key], "noise": 1.0} | ({"lot": 8.0} if key == "rate" else {})
    assert "level" not in refused("dp-muonbc", mended)
    other = refused("dp-muon", {"noise": 1.0, "trust": "local"})
    assert (
        "Set [privacy] level = 'client' and choose an optimizer whose name does not begin with dp-"
        in other
    )


def test_no_circle_of_refusals_for_lots_that_take_turns() -> None:
    """Each sentence's mend, taken at its word, is the last one."""
    turns = {"noise": 1.0, "sampling": "cyclic"}
    why = refused("dp-muon", turns | {"adjacency": "add-remove"})
    assert "adjacency = 'zero-out', or sampling = 'poisson' with a public population or rate" in why
    assert not refused("dp-muon", turns | {"adjacency": "zero-out"})
    assert not refused("dp-muon", {"noise": 1.0, "adjacency": "add-remove", "population": 1000})
    why = refused("dp-muon", turns | {"adjacency": "add-remove", "population": 1000})
    assert "have no sampling rate, because" in why
    assert not refused("dp-muon", turns)


def recipe_of(mechanism: Mechanism) -> fedmuon.Recipe:
    chain = fedmuon.Chain((private_gradient(), links.descend(0.1)))
    return fedmuon.Recipe(chain, replace_by_mean, mechanism=mechanism)


def test_a_public_population_of_ones_own_mechanism_decides_its_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mechanism that hides how many samples there are, no delta may tell."""
    mechanism = Mechanism(Clipping(), 1.0, 4.0, public_rate=4e-6, adjacency="add-remove")
    sizes = np.array([30, 60_000_000])
    config = parse({})
    assert delta_of(config, sizes, mechanism) == pytest.approx(1e6**-1.1)
    assert delta_of(config, sizes) == pytest.approx(6e7**-1.1)  # the control: the secret number
    own = recipe_of(mechanism)
    tables = {
        "data": {"name": "synthetic", "train": 90, "test": 30, "dimension": 5, "minimum": 5},
        "federation": {"clients": 3, "rounds": 2},
    }
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("fedmuon.runs.loop._finish", interrupted)
        with pytest.raises(Interrupted):
            fedmuon.run(tables, recipe=own, out=out)
    with pytest.raises(InputError, match="Add --delta"):
        spent(out)
    assert spent(out, 1e-6)["delta"] == 1e-6
    done = fedmuon.run(tables, recipe=own, out=out, resume=True)
    assert done.summary["privacy"]["delta"] == spent(out)["delta"] == pytest.approx(1e6**-1.1)


@pytest.mark.parametrize(
    ("clients", "engine", "why"),
    [
        (2, "inline", "noise of your recipe needs a single client.* clients = 1 and per-round = 1"),
        (1, "ray", "name = 'inline', or use independent noise in your recipe"),
    ],
)
def test_correlated_noise_of_ones_own_mechanism_is_refused_before_the_run(
    clients: int, engine: str, why: str, tmp_path: Path
) -> None:
    turns = Mechanism(Clipping(), 1.0, 4.0, fixed_order=FixedOrderSampling("cyclic", 3))
    tables = {
        "data": {"name": "synthetic", "train": 60, "test": 20, "dimension": 5},
        "federation": {"clients": clients, "rounds": 2},
        "engine": {"name": engine},
        "faults": {"retries": 0} if engine == "ray" else {},
    }
    with pytest.raises(InputError, match=why):
        fedmuon.run(tables, recipe=recipe_of(turns), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_turns_of_independent_noise_in_closed_form() -> None:
    """The norm of the steps of a sample, without a column of all of them."""
    for steps, lots in ((1, 1), (7, 3), (9, 3), (10, 3), (2, 5)):
        exact = sensitivity(square_root(1), steps, lots)
        assert FixedOrderSampling().sensitivity(steps, lots) == pytest.approx(exact, rel=1e-12)
    assert FixedOrderSampling().sensitivity(10**9, 10) == pytest.approx(1e4)


def dp_ftrl(**changes: Any) -> Config:
    privacy = {**DP_FTRL, **changes}
    if privacy["band"] == 1:
        privacy = {"sampling": "cyclic"}
    return small(
        federation={"rounds": 3, "clients": 1, "per-round": 1},
        local={"recipe": "dp-sgd"},
        privacy={"noise": 1.0, "lot": 12.0} | privacy,
    )


def interrupted(*given: object, **more: object) -> None:
    raise Interrupted


def broken_off(
    command: list[str], monkeypatch: pytest.MonkeyPatch, where: str = "runs.loop._finish"
) -> None:
    """Ctrl-C once all has been released."""
    with monkeypatch.context() as patch:
        patch.setattr(f"fedmuon.{where}", interrupted)
        assert ended(command) == 130


def ended(command: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(command)
    return int(end.value.code or 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("recipe", PRIVATE)
def test_a_private_recipe_without_noise_says_what_to_set(recipe: str) -> None:
    """And a client level; noise = 0 that is given, as in the config of a stored run, is taken."""
    chosen = {"local": {"recipe": recipe}}
    with pytest.raises(InputError, match=r"epsilon = inf\)\. Set \[privacy\] epsilon") as why:
        parse(chosen)
    assert f"recipe = '{recipe}'" in str(why.value) and "\n" not in str(why.value)
    for found in ({"noise": 0.0}, {"noise": 1.0}, {"epsilon": 8.0}):
        taken = parse({**chosen, "privacy": found})
        assert parse(nested(taken)) == taken
    with pytest.raises(InputError, match=r"Set \[privacy\] epsilon"):
        parse({**chosen, "privacy": {"epsilon": 0.0}})


def test_other_runs_without_noise_say_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"level = 'client' adds no noise by default"):
        parse({"privacy": {"level": "client"}})
    assert has_no_noise(parse({"privacy": {"level": "client", "noise": 0.0}}))
    # In Flower's run config 0 is what nobody named; a run that began before goes on.
    config = parse({"local": {"recipe": "dp-sgd"}, "privacy": {"noise": 0.0}})
    with pytest.raises(InputError, match=r"Set \[privacy\] epsilon"):
        require_noise(config, tmp_path)
    (tmp_path / "config.toml").touch()
    require_noise(config, tmp_path)


def test_noise_free_runs_are_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = ["run", "--data", "synthetic", "--set", "data.train=400", "--out", str(tmp_path / "a")]
    run += ["--set", "local.recipe=dp-sgd", "--set", "federation.rounds=1"]
    run += ["--set", "privacy.lot=4"]
    assert ended(run) == 2 and not (tmp_path / "a").exists()
    assert "Set [privacy] epsilon" in capsys.readouterr().err
    assert ended([*run, "--set", "privacy.noise=0.0"]) == 0
    said = capsys.readouterr()
    assert "[privacy] noise is 0" in said.err and "epsilon is infinite" in said.err
    assert re.search(r"epsilon\W+infinite", said.out)
    assert ended(["show", str(tmp_path / "a")]) == 0
    assert re.search(r"epsilon\W+infinite", capsys.readouterr().out)


@pytest.mark.parametrize("devices", [{"mode": "deadline", "deadline": 9.0}, {"mode": "fedbuff"}])
def test_a_custom_private_recipe_needs_uniformly_sampled_clients(devices: dict[str, Any]) -> None:
    chain = fedmuon.Chain((private_gradient(), links.descend(0.1)))
    mechanism = Mechanism(Clipping("block", 1.0), 1.0, 4.0)
    recipe = fedmuon.Recipe(chain, replace_by_mean, mechanism=mechanism)
    tables = {"data": {"name": "synthetic", "train": 90, "test": 20},
              "federation": {"clients": 6, "rounds": 2, "per-round": 2}}  # fmt: skip
    with pytest.raises(InputError, match="assumes that clients are sampled uniformly"):
        fedmuon.run({**tables, "devices": devices}, recipe=recipe)
    assert fedmuon.run(tables, recipe=recipe).summary["privacy"]  # the control
