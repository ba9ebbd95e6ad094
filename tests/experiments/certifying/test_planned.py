"""Limits before training: those of the run that follows, and the noise for a width."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from conftest import small
from typer.testing import CliRunner

from fedmuon.config.load import flatten, unflatten
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying.certify import certify
from fedmuon.experiments.certifying.planned import PRECISION, plan
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute

EXAMPLE = {"local": {"recipe": "dp-muon", "steps": 2}, "privacy": {"noise": 12.0, "lot": 10}}
RUNS: dict[str, dict[str, Any]] = {
    "examples": EXAMPLE,
    "epsilon": {**EXAMPLE, "privacy": {"epsilon": 2.0, "lot": 10}},
    "shuffled lots": {
        **EXAMPLE,
        "privacy": {"noise": 12.0, "lot": 10, "sampling": "shuffle"},
    },
    "clients": {"local": {"recipe": "fedavg"}, "privacy": {"level": "client", "noise": 9.0}},
    "fixed cohorts": {
        "local": {"recipe": "fedavg"},
        "privacy": {"level": "client", "noise": 9.0, "cohorts": "fixed"},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_the_plan_has_the_account_of_the_run(name: str, tmp_path: Path) -> None:
    config = small(RUNS[name])
    execute(config, tmp_path / "run")
    of_run, of_plan = certify(tmp_path / "run").divergence, plan(config)
    assert of_plan["unit"] == of_run["unit"] and of_plan["units"] == of_run["units"]
    assert of_plan["divergence"] == pytest.approx(of_run["mean"], rel=1e-9)


@pytest.mark.slow
def test_the_least_noise_for_a_width() -> None:
    federation = {"clients": 2, "per-round": 2}  # of two sizes, each with its own releases
    config = small(EXAMPLE, data={"train": 3000}, federation=federation)
    found = plan(config, width=0.2)
    assert found["width"] <= 0.2
    privacy = config.privacy.model_copy(update={"noise": found["noise"] * (1 - 2 * PRECISION)})
    assert plan(config.model_copy(update={"privacy": privacy}))["width"] > 0.2
    assert plan(config, width=0.2, settings=10)["noise"] > found["noise"]


def test_limits_are_above_the_train_error_and_ordered() -> None:
    for row in plan(small(EXAMPLE))["rows"]:
        assert row["train_error"] < row["estimated"] < row["certified"] <= 1


def test_what_has_no_plan_says_why() -> None:
    for tables, why in (
        ({}, "no privacy mechanism.*dp-muon"),
        ({**EXAMPLE, "privacy": {"noise": 0.0, "lot": 10}}, "noise = 0 releases exact sums"),
        ({**EXAMPLE, "privacy": {"noise": 2.0, "lot": 10, "max-lot": 30}}, "max-lot cuts lots"),
    ):
        with pytest.raises(InputError, match=why):
            plan(small(tables))
    with pytest.raises(InputError, match=r"impossible with 90 .*even without any signal"):
        plan(small(EXAMPLE), width=0.01)


@pytest.mark.parametrize(
    ("width", "guess", "why"),
    [
        (0.9, 0.2, "a width of 0.9 says nothing with guess 0.2: choose one below 0.8"),
        (0.8, 0.2, "choose one below 0.8"),
        (1e300, 0.0, "choose one below 1$"),
        (0.1, 1.0, "Choose a smaller guess"),
        (0.0, 0.2, "must be a finite number above 0"),
    ],
)
def test_a_width_that_reaches_1_is_rejected(width: float, guess: float, why: str) -> None:
    with pytest.raises(InputError, match=why):
        plan(small(EXAMPLE), width=width, guess=guess)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_largest_width_has_a_noise() -> None:
    found = plan(small(EXAMPLE), width=0.799)
    assert found["noise"] > 0 and found["width"] <= 0.799


def test_the_command_takes_a_config_or_a_run(tmp_path: Path) -> None:
    file = tmp_path / "private.toml"
    file.write_text(tomli_w.dumps(unflatten_all(EXAMPLE)))
    done = CliRunner().invoke(app, ["certify", "--plan", str(file), "--json"])
    assert json.loads(done.output)["noise"] == 12.0
    changed = ["--set", "privacy.noise=24", "--settings", "3"]
    done = CliRunner().invoke(app, ["certify", "--plan", str(file), *changed])
    assert "noise 24" in done.output and "pay for 3 settings" in done.output
    assert "With --guess 0.2, it is " in done.output
    done = CliRunner().invoke(app, ["certify", str(file)])
    assert "a file and not a run folder" in str(done.exception)
    for words, why in (
        ([], "or --plan and a config"),
        (["--plan", str(file), "--plot", "a.svg"], "Leave it out with --plan"),
        (["--plan", str(file), "--latex", str(tmp_path / "no" / "a.tex")], "does not exist"),
        ([str(tmp_path), "--width", "0.1"], "belong to --plan"),
    ):
        done = CliRunner().invoke(app, ["certify", *words])
        assert isinstance(done.exception, InputError) and why in str(done.exception)


def unflatten_all(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a small config with these settings, as a file has them."""
    return unflatten(flatten(small(tables))).model_dump(by_alias=True, exclude_unset=True)
