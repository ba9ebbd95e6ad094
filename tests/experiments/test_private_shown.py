"""What is shown of private runs: their account beside what was measured, in words and numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import small
from typer.testing import CliRunner

import fedmuon
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.experiments.report import gather
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import privacy_record, spent
from fedmuon.experiments.spending import with_privacy_columns as with_columns
from fedmuon.experiments.stability import neighbours
from fedmuon.experiments.tables import standing
from fedmuon.privacy.accounting.composition import account, loose
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling

pytestmark = pytest.mark.usefixtures("undrawn")
SETTING = ("--lot", "10", "--population", "95", "--steps", "50", "--delta", "1e-5")


def private(seed: int = 3, **privacy: Any) -> Config:
    recipe = {} if privacy.get("level") == "client" else {"recipe": "dp-sgd", "lr": 0.05}
    of = {"noise": 1.0} | ({} if "level" in privacy else {"lot": 4.0}) | privacy
    return small(federation={"rounds": 2, "seed": seed}, local=recipe, privacy=of)


def said(*command: str) -> str:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output + str(done.exception)
    return " ".join(re.sub("[│┌┐└┘─]", " ", done.output).split())


def answer(*command: str) -> dict[str, Any]:
    return json.loads(CliRunner().invoke(app, [*command, "--json"]).output)


@pytest.mark.parametrize("kind", ["example", "client", "plain"])
def test_neighbours_of_a_private_run_come_with_its_account(kind: str, tmp_path: Path) -> None:
    """On the terminal, on a report's page, in a notebook; without privacy there is none of it."""
    trials = {"stability": {"trials": 1}}
    config = {
        "example": private(),
        "client": private(level="client", cohorts="fixed"),
        "plain": small(federation={"rounds": 2}),
    }[kind].model_copy(update={"stability": small(**trials).stability})
    out, marked = tmp_path / "run", kind != "plain"
    neighbours.execute(config, out)
    terminal = said("stability", "--out", str(out), "--resume")
    (of_page,) = gather(out)
    page = f"{of_page.title} {of_page.note}"
    for words in (terminal, page, fedmuon.StabilityResult(out)._repr_html_()):
        assert ("not released" in words) == marked, words
    assert (" epsilon " in terminal) == ("The run spent ε = " in page) == marked
    for words in (terminal, page) if marked else ():
        assert standing(fedmuon.Result(out).summary["privacy"]).split(",")[1] in words


def test_words_fit_what_was_drawn() -> None:
    one = {"mode": "joint", "adjacency": "zero-out", "rate_from": "public", "noise": 2.0}
    for more, words in [
        ({"sampling": "poisson", "blocks": 1}, "poisson lots, 1 block of"),
        ({"sampling": "cyclic", "blocks": 3}, "cyclic lots, 3 blocks of"),
        ({"sampling": "none", "trust": "local"}, "public cohorts, whole clients, trust loc"),
        ({"sampling": "poisson", "trust": "central"}, "poisson cohorts, whole clients"),
    ]:
        assert words in standing(one | more)


def test_repeated_private_runs_show_their_account(tmp_path: Path) -> None:
    """Before the first run, with the results, on `show`, and from the ledgers."""
    file, out = tmp_path / "private.toml", tmp_path / "out"
    file.write_text(private().to_toml())
    seeds = ("run", str(file), "--seeds", "2")
    printed = said(*seeds, "--out", str(out))
    assert printed.index("see `fedmuon privacy tuned`") < printed.index("rounds 2/4")
    spends = [fedmuon.Result(one).summary["privacy"] for one in sorted((out / "runs").iterdir())]
    held = json.loads((out / "sweep.json").read_text())["privacy"]
    assert held["epsilon"] == max(one["epsilon"] for one in spends)
    assert held["epsilon_of_all"] == pytest.approx(sum(one["epsilon"] for one in spends))
    assert held["delta_of_all"] == pytest.approx(2 * spends[0]["delta"])
    for words in (printed, said("show", str(out))):
        assert "measured and not released" in words and "Losses and accuracies of" in words
        assert "Publishing all 2 runs spends at most epsilon" in words
    found = answer("privacy", "spent", str(out))
    assert found["epsilon_of_all"] == pytest.approx(held["epsilon_of_all"])
    assert "all runs (sum)" in said("privacy", "spent", str(out))
    with pytest.raises(InputError, match=r"such as .*seed=3"):
        spent(out / "runs")
    table = said("compare", str(out))
    assert "seed=3" not in table and " out " in table


def test_a_private_sweep_is_marked(tmp_path: Path) -> None:
    found = fedmuon.sweep(
        private(), grid={"local.lr": [0.01, 0.02]}, select="train-loss", out=tmp_path / "out"
    )
    assert "Publishing all 2 runs spends at most epsilon" in str(found)
    assert "measured and not released" in said("show", str(tmp_path / "out"))
    plain = fedmuon.sweep(
        small(federation={"rounds": 1}), grid={"local.lr": [0.01, 0.02]}, select="train-loss"
    )
    assert "privacy" not in plain.summary and "released" not in str(plain)


@pytest.mark.slow
def test_a_comparison_says_what_was_spent(tmp_path: Path) -> None:
    """Not the target alone; of several seeds the most, and of runs without privacy nothing."""
    for name, config in {
        "a": private(epsilon=4.0, noise=0.0), "b": private(4, epsilon=4.0, noise=0.0),
        "c": private(level="client"), "d": private(**{"insecure-reproducible-noise": True}),
        "e": small(federation={"rounds": 2}),
    }.items():  # fmt: skip
        execute(config, tmp_path / name)
    found = fedmuon.compare(tmp_path)
    both, client, repeatable, plain = found.rows
    ends = [fedmuon.Result(tmp_path / n).summary["privacy"]["epsilon"] for n in ("a", "b")]
    assert both["seeds"] == 2  # whose noise differs with their clients' sizes
    assert both["spent epsilon"] == max(ends) <= 4 and both["at delta"] == 1e-5
    assert (both["adjacency"], both["level"], both["certified"]) == ("zero-out", "example", True)
    assert (client["adjacency"], client["level"]) == ("add-remove", "client")
    assert not repeatable["certified"] and "spent epsilon" not in plain
    assert not {"spent epsilon", "adjacency"} & set(found.measures)
    words = said("compare", str(tmp_path))
    assert f"spent epsilon {max(ends):.4g} at delta = 1e−05, zero-out, level example" in words
    assert "add-remove, level client" in words and words.count("not certified") == 1
    assert words.count("spent epsilon") == 3


def test_noise_that_was_given_tells_rows_apart(tmp_path: Path) -> None:
    """The control of the two seeds above: here the noise does not follow from the target."""
    for seed, noise in ((3, 3.0), (4, 4.0)):
        execute(private(seed, epsilon=20.0, noise=noise), tmp_path / f"{seed}")
    assert [row["seeds"] for row in fedmuon.compare(tmp_path).rows] == [1, 1]


def test_any_client_of_a_secret_cohort_is_each(tmp_path: Path) -> None:
    config = private(level="client")
    summary = execute(config, tmp_path)
    assert summary["privacy"]["client"] == "each" and [*summary["privacy"]["clients"]] == ["each"]
    assert [*spent(tmp_path)["clients"]] == ["each"]
    for known in ("each", "-1"):  # what earlier versions wrote
        of = summary | {"privacy": summary["privacy"] | {"clients": {known: 2.0}}}
        rows = with_columns({"runs": [{}]}, [{}], [privacy_record(config, of)])["clients"]
        assert [row["client"] for row in rows] == [-1]


def test_a_delta_that_protects_nobody_is_warned_of(tmp_path: Path) -> None:
    for delta, much in ((0.5, True), (1e-5, False)):
        command = ("--noise", "2", *SETTING[:-1], str(delta))
        assert (
            "would satisfy this delta" in answer("privacy", "epsilon", *command)["note"]
        ) == much
        execute(private(delta=delta), tmp_path / f"{delta}")
        note = fedmuon.Result(tmp_path / f"{delta}").summary["privacy"]["note"]
        assert ("would satisfy this delta" in note) == much
    assert "would satisfy this delta" in spent(tmp_path / "1e-05", 0.4)["note"]
    assert not loose(0.0099, 100) and loose(0.01, 100)


def test_lots_that_take_turns_are_accounted_for_by_the_command() -> None:
    """50 steps of 10 lots hold an example 5 times, and nothing is amplified."""
    command = ("privacy", "epsilon", "--noise", "4", *SETTING)
    for sampling, band in (("shuffle", 1), ("cyclic", 1), ("cyclic", 4)):
        found = answer(*command, "--sampling", sampling, "--band", str(band))
        whole = FixedOrderSampling("cyclic", band).sensitivity(50, 10)
        exact = account([Event(1.0, 4 / whole)], 1e-5).epsilon
        assert found["epsilon"] == pytest.approx(exact, rel=1e-6) and found["certified"]
        assert found["sampling"] == sampling
    assert FixedOrderSampling().sensitivity(50, 10) == pytest.approx(5**0.5)
    assert answer(*command)["epsilon"] < exact / 2  # the control: Poisson lots amplify
    least = answer(
        "privacy", "sigma", "--epsilon", "2", *SETTING, "--sampling", "cyclic", "--band", "4"
    )
    again = ("privacy", "epsilon", "--noise", str(least["noise"]), *SETTING, "--sampling", "cyclic")
    assert answer(*again, "--band", "4")["epsilon"] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            ("--sampling", "shuffle", "--adjacency", "add-remove"),
            "--adjacency is 'add-remove', but in the fixed order of --sampling shuffle",
        ),
        (("--sampling", "shuffle", "--band", "4"), "Add --sampling cyclic"),
        (("--sampling", "cyclic", "--mode", "per-release"), "supports only --sampling poisson"),
        (("--sampling", "cyclic", "--lot", "9.5"), "Set --lot to an integer"),
        (("--nesterov",), "--nesterov has an effect only on correlated noise"),
        (("--sampling", "cyclic", "--nesterov"), "Add --momentum below 1, and --band or"),
        (
            ("--sampling", "cyclic", "--band", "4", "--nesterov"),
            "--nesterov needs --momentum below",
        ),
        (
            ("--momentum", "0.5"),
            "Add --sampling cyclic, and --band or --buffers, or remove --momentum",
        ),
        (("--band", "4"), "Add --sampling cyclic"),
        (("--sampling", "cyclic", "--band", "4", "--steps", "100000000"), "steps = 1e+08"),
        (
            ("--sampling", "fixed"),
            "--sampling is 'fixed', but it must be poisson, shuffle or cyclic",
        ),
        (("--adjacency", "swap"), "--adjacency is 'swap', but it must be one of zero-out"),
        (("--lot", "96"), "--lot is 96, but it must be positive and at most --population = 95"),
    ],
)
def test_what_turns_cannot_be_is_one_sentence(more: tuple[str, ...], why: str) -> None:
    for command in (("epsilon", "--noise", "4"), ("sigma", "--epsilon", "2")):
        done = CliRunner().invoke(app, ["privacy", *command, *SETTING, *more])
        assert done.exit_code and why in str(done.exception), str(done.exception)


def test_nesterov_momentum_needs_a_momentum_below_1() -> None:
    of_1 = ["privacy", "correlated", *SETTING[:6], "--nesterov", "--momentum", "1"]
    done = CliRunner().invoke(app, of_1)
    assert done.exit_code and "Set --momentum to a number below 1" in str(done.exception)


def test_the_other_accountant_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """Its series does not converge at some orders here, of which it would write lines."""
    from absl import logging

    before = logging.get_verbosity()
    account([Event(1 / 3, 0.5, 10)], 0.01, accountant="dp-accounting")
    assert "failed to converge" not in capfd.readouterr().err
    assert logging.get_verbosity() == before
