"""The study of certified networks: each row is what `fedmuon certify` says about the same run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import without_rendering
from contrast import pale
from study_rows import overprinted, rows_of, verdicts
from suite_files import command, suite_of, table

from fedmuon.analysis.report.tables import Columns
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying.certify import certify
from fedmuon.experiments.run import execute
from fedmuon.experiments.studies import certified_networks

SUITE = """
kind = "certified-networks"
title = "Certified networks"
data = "digits"
seeds = [3]
delta = 0.06
paid = 4
base.data = { train = 900, test = 300 }
base.task = { name = "network", model = "linear" }
base.federation = { clients = 3, per-round = 3, rounds = 5, partition = "iid" }
base.privacy = { lot = 150, bound = 0.5, insecure-reproducible-noise = true }
base.output.average = 0.5
base.engine.device = "cpu"
models.linear.guess = 0.4
models.linear.base.local.momentum = 0.5
models.linear.noises = [60.0, 20.0]
models.linear.methods.DP-Muon = { base.local.recipe = "dp-muon", lrs = [0.3, 1.0] }
models.linear.methods.DP-SGD = { base.local.recipe = "dp-sgd", lrs = [10.0] }
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certified-networks")
    (folder / "suite.toml").write_text(SUITE)
    with without_rendering():
        command("suite", folder / "suite.toml", "--out", folder / "out")
    return folder / "out"


@pytest.mark.parametrize(("method", "lr"), [("DP-Muon", 1.0), ("DP-SGD", 10.0)])
def test_every_limit_is_that_of_fedmuon_certify(
    method: str, lr: float, suite: Path, tmp_path: Path
) -> None:
    tables: dict[str, Any] = {
        "data": {"name": "digits", "train": 900, "test": 300},
        "task": {"name": "network", "model": "linear"},
        "federation": {"clients": 3, "per-round": 3, "rounds": 5, "partition": "iid", "seed": 3},
        "local": {"recipe": method.lower(), "lr": lr, "momentum": 0.5},
        "privacy": {"lot": 150, "bound": 0.5, "noise": 20.0, "insecure-reproducible-noise": True},
        "output": {"average": 0.5},
        "engine": {"device": "cpu"},
    }
    config = parse(tables)
    execute(config, tmp_path / "run")
    certificates = certify(tmp_path / "run", 0.94, 4, guess=0.4, average=True)
    chosen = {"method": method, "lr": str(lr), "noise": "20.0"}
    rows = [row for row in table(suite, "rows") if chosen.items() <= row.items()]
    assert len(rows) == 1
    limits = {
        row.status: row.value for row in certificates.rows if row.name == "privacy of samples"
    }
    assert float(rows[0]["certified"]) == pytest.approx(limits["certified"], rel=1e-9)
    assert float(rows[0]["train_error"]) == pytest.approx(certificates.train["error"], rel=1e-9)
    assert float(rows[0]["test_error"]) == pytest.approx(certificates.test["error"], rel=1e-9)
    assert float(rows[0]["divergence"]) == pytest.approx(certificates.divergence["mean"])
    estimated = certify(tmp_path / "run", 0.94, 1, guess=0.4, average=True).rows
    expected = [row.value for row in estimated if row.status == "estimated"]
    assert [float(rows[0]["estimated"])] == pytest.approx(expected)


def test_methods_are_compared_at_equal_width(suite: Path) -> None:
    """The distance of limit and train error depends on the noise alone."""
    rows = table(suite, "rows")
    assert len(rows) == 2 * 2 + 2
    for noise in ("60.0", "20.0"):
        alike = {(row["variation"], row["divergence"]) for row in rows if row["noise"] == noise}
        assert len(alike) == 1


def made(edge: float = 0.1, test: float = 0.3) -> Columns:
    """Certified errors of two methods; those of DP-SGD are larger by `edge`.

    The middle one of three step sizes and the larger noise are best.
    """

    def value(model: str, method: str, noise: float, seed: int, lr: float) -> dict[str, float]:
        certified = 0.5 + edge * (method == "DP-SGD") + 0.05 * (lr != 0.1) + 0.001 * seed
        names = ("train_error", "estimated", "held_out_limit", "test_error", "divergence")
        return dict.fromkeys(names, test) | {
            "certified": certified - 0.02 * (noise > 15), "variation": 1 / noise,
            "test_low": test - 0.02, "test_high": test + 0.02,
        }  # fmt: skip

    return rows_of(value, model=("A", "B"), method=("DP-Muon", "DP-SGD"), noise=(10.0, 20.0),
                   seed=range(3), lr=(0.05, 0.1, 0.2))  # fmt: skip


def test_claims_can_hold_and_can_fail() -> None:
    assert verdicts(certified_networks.claims(made())) == [True] * 3
    covered, *_ = certified_networks.claims(made(test=0.6))
    assert covered.holds is False
    compared = certified_networks.claims(made(edge=-0.1))[1:]
    assert verdicts(compared) == [False, False]
    rows = made()
    ends = {name: column[rows["lr"] > 0.05] for name, column in rows.items()}
    untuned = certified_networks.claims(ends)[-1]
    assert untuned.holds is None and "the smallest of its grid" in untuned.why


def test_the_best_step_size_is_chosen_for_each_seed_and_noise() -> None:
    rows = made()
    best = certified_networks.best_steps(rows)
    assert len(best["seed"]) == 2 * 2 * 2 * 3 and set(best["lr"]) == {0.1}
    head, *lines = certified_networks.numbers(rows)
    assert {len(line) for line in lines} == {len(head)}
    assert "A, DP-Muon: certified 0.481 (0.48 to 0.482 over seeds)" in lines[0][0]
    assert lines[1][0] == "  10" and lines[1][3] == "0.501"


@pytest.mark.parametrize("narrow", [False, True])
def test_the_figure_shows_the_chosen_settings(narrow: bool) -> None:
    figure = certified_networks.by_noise(made(), narrow)
    assert not overprinted(figure) and not pale(figure)
    first = np.asarray(figure.axes[0].lines[0].get_ydata()).tolist()
    assert first == pytest.approx([0.481, 0.501])


def test_what_is_rejected_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="set by lrs"):
        suite_of(tmp_path, SUITE, ("models.linear.base.local.momentum = 0.5",
                                   "models.linear.base.local.lr = 0.5"))  # fmt: skip
    with pytest.raises(InputError, match="set by noises"):
        suite_of(tmp_path, SUITE, ("lot = 150", "lot = 150, noise = 3.0"))
