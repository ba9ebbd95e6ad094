"""The study of certified networks: each row is what `fedmuon certify` says about the same run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import without_rendering
from contrast import pale
from study_rows import overprinted, rows_of, verdicts
from suite_files import command, suite_of, table

import fedmuon
from fedmuon.analysis.report.tables import Columns
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.data.source import Source
from fedmuon.experiments.studies import certified_networks
from fedmuon.experiments.studies.tuned_apart import Tuning, set_apart, smaller
from fedmuon.experiments.suites.contents import cell
from fedmuon.federated.client_data import read_source

SUITE = """
kind = "certified-networks"
title = "Certified networks"
data = "digits"
seeds = [3]
delta = 0.06
paid = 4
tuning = { train = 300, test = 100, seeds = [0, 1] }
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


def tuned_apart() -> tuple[Source, Source]:
    """The samples of certified runs, and those of tuning."""
    return set_apart(read_source(parse({"data": {"name": "digits"}})), 400)


@pytest.mark.parametrize("method", ["DP-Muon", "DP-SGD"])
def test_every_limit_is_that_of_fedmuon_certify(method: str, suite: Path, tmp_path: Path) -> None:
    (row,) = (row for row in table(suite, "rows")
              if row["method"] == method and row["noise"] == "20.0")  # fmt: skip
    tables: dict[str, Any] = {
        "data": {"train": 900, "test": 300},
        "task": {"name": "network", "model": "linear"},
        "federation": {"clients": 3, "per-round": 3, "rounds": 5, "partition": "iid", "seed": 3},
        "local": {"recipe": method.lower(), "lr": float(row["lr"]), "momentum": 0.5},
        "privacy": {"lot": 150, "bound": 0.5, "noise": 20.0, "insecure-reproducible-noise": True},
        "output": {"average": 0.5},
        "engine": {"device": "cpu"},
    }
    certified, _ = tuned_apart()
    result = fedmuon.run(
        tables, data=(certified.inputs, certified.labels), progress=False, out=tmp_path / "run"
    )
    certificates = fedmuon.certify(result, confidence=0.94, settings=4, guess=0.4, average=True)
    limits = {
        row.status: row.value for row in certificates.rows if row.name == "privacy of samples"
    }
    assert float(row["certified"]) == pytest.approx(limits["certified"], rel=1e-9)
    assert float(row["train_error"]) == pytest.approx(certificates.train["error"], rel=1e-9)
    assert float(row["test_error"]) == pytest.approx(certificates.test["error"], rel=1e-9)
    assert float(row["divergence"]) == pytest.approx(certificates.divergence["mean"])
    alone = fedmuon.certify(result, confidence=0.94, settings=1, guess=0.4, average=True)
    expected = [row.value for row in alone.rows if row.status == "estimated"]
    assert [float(row["estimated"])] == pytest.approx(expected)


def test_tuning_uses_no_sample_of_the_certified_runs() -> None:
    everything = read_source(parse({"data": {"name": "digits"}}))
    certified, tuning = tuned_apart()
    assert len(tuning.labels) == 400 and len(certified.labels) == len(everything.labels) - 400
    together = np.concatenate([certified.inputs, tuning.inputs]).reshape(len(everything.labels), -1)
    order = np.lexsort(together.T)
    flat = everything.inputs.reshape(together.shape)
    assert np.array_equal(together[order], flat[np.lexsort(flat.T)])  # nothing is lost or copied
    official = replace(everything, official_test=1000)
    certified, tuning = set_apart(official, 400)
    assert certified.official_test == 1000 and tuning.official_test is None
    assert np.array_equal(certified.inputs[:1000], everything.inputs[:1000])
    with pytest.raises(InputError, match="lower train and test of"):
        set_apart(official, 797)


@pytest.mark.parametrize("level", ["example", "client"])
def test_smaller_runs_have_the_noise_of_the_certified_runs(level: str) -> None:
    """The deviation of the noise in a mean update is noise x bound / (lot or clients per round)."""
    tables: dict[str, Any] = {
        "data": {"train": 1000, "test": 100},
        "federation": {"clients": 50, "per-round": 25, "rounds": 3},
        "local": {"recipe": "fedavg" if level == "client" else "dp-sgd"},
        "privacy": {"level": level, "noise": 3.0, "bound": 0.5},
    }
    if level == "example":
        tables["privacy"]["lot"] = 10.0
        tables["federation"] = {"clients": 1, "per-round": 1, "rounds": 3}
    large = parse(tables)
    small = cell(tables, smaller(large, Tuning(train=200, test=50, seeds=[0])))
    assert (small.data.train, small.data.test) == (200, 50)
    counts = [config.federation.per_round if level == "client" else config.privacy.lot
              for config in (large, small)]  # fmt: skip
    assert counts[1] == counts[0] / 5
    assert small.privacy.noise / counts[1] == pytest.approx(large.privacy.noise / counts[0])
    assert small.federation.clients == (10 if level == "client" else 1)


def test_the_step_size_with_the_smallest_tuning_error_is_used(suite: Path) -> None:
    tried, rows = table(suite, "tuning"), table(suite, "rows")
    assert len(tried) == 2 * 2 + 2 * 1
    for row in rows:
        mine = [other for other in tried
                if (other["method"], other["noise"]) == (row["method"], row["noise"])]  # fmt: skip
        best = min(mine, key=lambda other: float(other["tuning_error"]))
        assert row["lr"] == best["lr"]


def test_methods_are_compared_at_equal_width(suite: Path) -> None:
    """The distance of limit and train error depends on the noise alone."""
    rows = table(suite, "rows")
    assert len(rows) == 2 * 2
    for noise in ("60.0", "20.0"):
        alike = {(row["variation"], row["divergence"]) for row in rows if row["noise"] == noise}
        assert len(alike) == 1


def made(edge: float = 0.1, test: float = 0.3) -> Columns:
    """Certified errors of two methods; those of DP-SGD are larger by `edge`.

    The larger noise is better.
    """

    def value(model: str, method: str, noise: float, seed: int) -> dict[str, float]:
        certified = 0.5 + edge * (method == "DP-SGD") + 0.001 * seed
        names = ("train_error", "estimated", "held_out_limit", "test_error", "divergence")
        return dict.fromkeys(names, test) | {
            "certified": certified - 0.02 * (noise > 15), "variation": 1 / noise, "lr": 0.1,
            "test_low": test - 0.02, "test_high": test + 0.02,
        }  # fmt: skip

    return rows_of(value, model=("A", "B"), method=("DP-Muon", "DP-SGD"), noise=(10.0, 20.0),
                   seed=range(3))  # fmt: skip


def tried(lrs: tuple[float, ...] = (0.05, 0.1, 0.2)) -> Columns:
    """The tuning errors. The step size 0.1 is best."""
    return rows_of(lambda lr, **_: {"tuning_error": 0.4 + 0.1 * (lr != 0.1)}, model=("A", "B"),
                   method=("DP-Muon", "DP-SGD"), noise=(10.0, 20.0), lr=lrs)  # fmt: skip


def test_claims_can_hold_and_can_fail() -> None:
    assert verdicts(certified_networks.claims(made(), tried())) == [True] * 3
    covered, *_ = certified_networks.claims(made(test=0.6), tried())
    assert covered.holds is False
    compared = certified_networks.claims(made(edge=-0.1), tried())[1:]
    assert verdicts(compared) == [False, False]
    untuned = certified_networks.claims(made(), tried((0.1, 0.2)))[-1]
    assert untuned.holds is None and "the smallest of its grid" in untuned.why


def test_the_table_shows_means_and_the_smallest_limits() -> None:
    head, *lines = certified_networks.numbers(made(), tried())
    assert {len(line) for line in lines} == {len(head)}
    assert "A, DP-Muon: certified 0.481 (0.48 to 0.482 over seeds)" in lines[0][0]
    assert (lines[1][0], lines[1][3], lines[1][-1]) == ("  10", "0.501", "0.1")


@pytest.mark.parametrize("narrow", [False, True])
def test_the_figure_shows_the_chosen_settings(narrow: bool) -> None:
    figure = certified_networks.by_noise(made(), tried(), narrow)
    assert not overprinted(figure) and not pale(figure)
    first = np.asarray(figure.axes[0].lines[0].get_ydata()).tolist()
    assert first == pytest.approx([0.481, 0.501])


def test_what_is_rejected_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="set by lrs"):
        suite_of(tmp_path, SUITE, ("models.linear.base.local.momentum = 0.5",
                                   "models.linear.base.local.lr = 0.5"))  # fmt: skip
    with pytest.raises(InputError, match="set by noises"):
        suite_of(tmp_path, SUITE, ("lot = 150", "lot = 150, noise = 3.0"))
    with pytest.raises(InputError, match=r"\[tuning\] train = 20 .* are not valid .*3 clients"):
        suite_of(tmp_path, SUITE, ("train = 300", "train = 20"))
    with pytest.raises(InputError, match="lists a seed twice"):
        suite_of(tmp_path, SUITE, ("seeds = [0, 1]", "seeds = [0, 0]"))
