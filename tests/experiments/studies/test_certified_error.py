"""The certified error rate: each limit is that of `fedmuon certify`, and every setting is paid."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import small, without_rendering
from contrast import pale
from study_rows import overprinted, rows_of, verdicts
from suite_files import command, suite_of, table

from fedmuon.analysis import Uniform
from fedmuon.analysis.report.tables import Columns
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying.certify import certify
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.studies import certified_error, find

SUITE = """
kind = "certified-error"
title = "A certified error rate"
data = "digits"
seeds = [3, 4]
delta = 0.06
guess = 0.6
samples = [60, 90]
scaled-mus = [1.0, 4.0]
base.data = { test = 60, minimum = 5 }
base.task.initial = "zero"
base.local.steps = 2
base.federation = { clients = 3, per-round = 3, rounds = 3, partition = "iid" }
base.engine = { dtype = "float64", device = "cpu" }
methods.FedMuon.base = { local.recipe = "fedmuon", orthogonalizer.lambda = 0.1 }
methods.FedMuon.lrs = [0.01, 0.02]
methods.FedAvg = { base.local.recipe = "fedavg", lrs = [0.1, 0.2, 0.3] }
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certified-error")
    (folder / "suite.toml").write_text(SUITE)
    with without_rendering():
        command("suite", folder / "suite.toml", "--out", folder / "out")
    return folder / "out"


@pytest.mark.parametrize(("method", "lr", "settings"), [("FedMuon", 0.02, 4), ("FedAvg", 0.3, 6)])
def test_every_limit_is_that_of_fedmuon_certify(
    suite: Path, tmp_path: Path, method: str, lr: float, settings: int
) -> None:
    """On the same run, with the same noise, paid for all settings of the method."""
    key = {"method": method, "samples": "90", "seed": "3", "lr": str(lr)}
    rows = [one for one in table(suite, "rows") if all(one[name] == key[name] for name in key)]
    config = small(
        data={"name": "digits", "train": 90},
        task={"initial": "zero"},
        local={"recipe": method.lower(), "lr": lr, "steps": 2},
        federation={"rounds": 3, "seed": 3, "clients": 3, "per-round": 3, "partition": "iid"},
        stability={"delta": 0.06 * 2 / settings, "c-hp": "variance"},
    )
    execute(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    case = finished_run.from_directory(tmp_path / "run")
    bound = certificates.report(case, certificates.certify(case))["value"]
    assert [row["scaled_mu"] for row in rows] == ["1.0", "4.0"]
    for row in rows:
        noise = float(row["noise"])
        found = certify(tmp_path / "run", 0.94, settings, output_noise=noise, guess=0.6).rows
        *_, certified = (one for one in found if one.name == "noise on the output")
        (tested,) = (
            one for one in found if (one.name, one.measure) == ("held-out samples", "error")
        )
        assert float(row["certified"]) == pytest.approx(certified.value, rel=1e-12)
        assert float(row["train_error"]) == pytest.approx(certified.beside, rel=1e-12)
        assert float(row["plain_error"]) == pytest.approx(tested.beside, rel=1e-12)
        assert certified.confidence == pytest.approx(1 - 0.06 / settings)
        assert float(row["settings"]) == settings
        total = summary["train_loss"] + bound
        assert float(row["certified_loss"]) == pytest.approx(total, rel=1e-12)
        assert float(row["chance"]) == 0.9


def test_the_noise_makes_the_relative_entropies_add_up_to_half_of_the_square(suite: Path) -> None:
    """Up to the share that covers the rounding of the certificates."""
    rows = table(suite, "rows")
    assert len(rows) == 2 * 2 * 2 * (2 + 3)
    for row in rows:
        half = float(row["scaled_mu"]) ** 2 / 2
        assert half < float(row["divergences"]) < half * 1.01
        assert float(row["train_error"]) <= float(row["estimated"]) <= float(row["certified"])
        ends = [float(row[name]) for name in ("test_low", "test_error", "test_high")]
        assert ends == sorted(ends)
        assert float(row["test_error"]) < float(row["held_out_limit"]) <= 1


def test_what_is_rejected_before_anything_is_computed(tmp_path: Path) -> None:
    suite_of(tmp_path, SUITE)
    file = str(tmp_path / "suite.toml")
    with pytest.raises(InputError, match="set by seeds"):
        find.find(file, None, "full", {"federation": {"seed": 1}})
    with pytest.raises(InputError, match="set by lrs"):
        suite_of(tmp_path, SUITE, ('base.local.recipe = "fedavg"', "base.local.lr = 0.1"))
    with pytest.raises(InputError, match=r"train = 1738 and test = 60 do not fit.* only 1797"):
        suite_of(tmp_path, SUITE, ("samples = [60, 90]", "samples = [60, 1738]"))


def test_a_run_without_certificates_is_named(tmp_path: Path) -> None:
    exact = ("orthogonalizer.lambda = 0.1", 'orthogonalizer.name = "exact-sign"')
    work = suite_of(tmp_path, SUITE, exact)
    with pytest.raises(InputError, match=r"has no certificates: .*exact sign"):
        work.cells[0].compute()


def made(edge: float = 0.1, drop: float = 0.2, test: float = 0.3) -> Columns:
    """Certified errors that fall by `drop` from 0.7 to n = 1000; FedAvg's are larger by `edge`.

    The middle one of three step sizes is best, and the larger one of two mus.
    """

    def value(method: str, samples: float, seed: int, lr: float, scaled_mu: float) -> dict:
        certified = 0.7 - drop * (samples > 100) + edge * (method == "FedAvg")
        certified += 0.05 * (lr != 0.1) + 0.02 * (scaled_mu < 2) + 0.001 * seed
        names = ("estimated", "train_error", "held_out_limit", "test_error", "plain_error")
        return dict.fromkeys(names, test) | {
            "certified": certified, "settings": 6, "chance": 0.9, "test_low": test - 0.02,
            "test_high": test + 0.02, "certified_loss": 0.89,
        }  # fmt: skip

    return rows_of(value, method=("FedMuon", "FedAvg"), samples=(100.0, 1000.0), seed=range(3),
                   lr=(0.05, 0.1, 0.2), scaled_mu=(1.0, 2.0))  # fmt: skip


def test_claims_can_hold_and_can_fail() -> None:
    assert verdicts(certified_error.claims(made())) == [True] * 6
    covered, *_ = certified_error.claims(made(test=0.6))
    assert covered.holds is False and "of 72 models" in covered.detail
    below, falls = certified_error.claims(made(drop=-0.21))[1:3]
    assert below.holds is False and falls.holds is False
    assert certified_error.claims(made(edge=-0.1))[-1].holds is False
    rows = made()
    for part in (rows["method"] == "FedAvg", rows["method"] == "FedMuon"):
        ends = {name: column[~part | (rows["lr"] > 0.05)] for name, column in rows.items()}
        compared = certified_error.claims(ends)[-1]
        assert compared.holds is None and "the smallest of its grid" in compared.why


def test_the_setting_with_the_smallest_certified_error_is_chosen() -> None:
    rows = made()
    best = certified_error.chosen(rows)
    assert len(best["seed"]) == 2 * 2 * 3
    assert set(best["lr"]) == {0.1} and set(best["scaled_mu"]) == {2.0}
    head, *lines = certified_error.numbers(rows)
    assert {len(line) for line in lines} == {len(head)}
    assert "6 settings paid for" in lines[0][0]
    assert lines[1][:2] == ("  100", "0.701") and lines[2][:2] == ("  1000", "0.501")


@pytest.mark.parametrize("narrow", [False, True])
def test_the_figure_shows_the_chosen_settings(narrow: bool) -> None:
    figure = certified_error.by_samples(made(), narrow)
    assert not overprinted(figure) and not pale(figure)
    for axes, (means, count) in zip(
        figure.axes, itertools.product(((0.701, 0.501), (0.521, 0.501)), (1, 2)), strict=True
    ):
        more = 0.1 * (count - 1)
        assert np.asarray(axes.lines[0].get_ydata()).tolist() == pytest.approx(
            [mean + more for mean in means]
        )


@pytest.mark.parametrize("narrow", [False, True])
def test_every_panel_contains_the_whole_interval(narrow: bool) -> None:
    drawn = dict(made())
    wide = drawn["certified"] + 0.2 * (drawn["seed"] == 2)  # a wide interval
    rows = {**drawn, "certified": wide}
    figure = certified_error.by_samples(rows, narrow)
    for axes in figure.axes:
        (band,) = axes.collections
        low, high = axes.get_ylim()
        places = np.asarray(band.get_paths()[0].vertices)[:, 1]
        assert low <= places.min() < places.max() <= high
        assert places.max() > max(np.asarray(line.get_ydata()).max() for line in axes.lines[:6])


def test_the_noise_needs_finite_certificates() -> None:
    case = certificates.CertifiedSetting(small(), np.array([1, 3]), Uniform(3, 0.1))
    found = certificates.Certificate(1.0, certificates=np.array([2.0, 4.0]))
    assert certified_error.noise_of(case, found, 0.5) == pytest.approx(math.sqrt(13))
    overflowing = certificates.Certificate(1.0, certificates=np.array([2.0, math.inf]))
    with pytest.raises(InputError, match="overflows"):
        certified_error.noise_of(case, overflowing, 0.5)
