"""Limits of the error of each class and each client, which hold together."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from scipy import stats
from test_certify import CLIENTS, PRIVATE, divergence
from typer.testing import CliRunner

import fedmuon
from fedmuon.analysis.theory.certified_risk import expected_risk, released_limit
from fedmuon.analysis.theory.held_out import change_limit, loss_limit
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying.figure import group_figure
from fedmuon.experiments.certifying.groups import HELD_OUT, PRIVACY, GroupCertificate
from fedmuon.experiments.certifying.measured import released_noise
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.privacy.accounting.divergences import hockey_stick
from fedmuon.privacy.accounting.dominating_pairs import Event


def finished(folder: Path, tables: dict[str, Any], **others: Any) -> Path:
    execute(small(tables, **others), folder)
    return folder


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private") / "run"
    return finished(folder, {**PRIVATE, "data": {"client-test": 0.3}})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("plain") / "run", {})


def rows(
    run: Path | fedmuon.Result, per: str, source: str, **options: Any
) -> dict[str, GroupCertificate]:
    limits = fedmuon.certify_groups(run, per=per, **options)
    return {row.group: row for row in limits.rows if row.source == source}


def wrong_of(run: fedmuon.Result, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return which samples the linear model of a run classifies wrongly [n]."""
    return (inputs @ run.model["weight"].double().numpy()).argmax(1) != labels


def test_each_class_has_clopper_pearsons_limit_at_a_share_of_the_failure(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs, labels = rng.standard_normal((160, 5)), rng.integers(0, 3, 160)
    tables = {"federation": {"clients": 2, "rounds": 2}, "local": {"recipe": "fedavg"},
              "data": {"normalize": "unit"}, "engine": {"dtype": "float64"}}  # fmt: skip
    run = fedmuon.run(tables, data=(inputs[:60], labels[:60]), test=(inputs[60:], labels[60:]),
                      out=tmp_path / "run")  # fmt: skip
    limits = rows(run, "class", HELD_OUT, settings=2)
    wrong = wrong_of(run, inputs[60:], labels[60:])
    for label in range(3):
        of_class = wrong[labels[60:] == label]
        errors, count = int(of_class.sum()), len(of_class)
        row = limits[str(label)]
        assert row.samples == count and row.error == pytest.approx(errors / count)
        assert row.certified == pytest.approx(
            stats.beta.ppf(1 - 0.05 / 6, errors + 1, count - errors)
        )
    values = [row.certified for row in limits.values()]
    assert values == sorted(values, key=lambda value: -(value or 0))  # worst first


def test_only_a_shared_failure_probability_covers_the_worst_group() -> None:
    """With b for each of 10 groups, some limit fails far more often than with probability b."""
    rng = np.random.default_rng(0)
    failed = dict.fromkeys((1, 10), 0)
    for _ in range(400):
        counts = rng.binomial(50, 0.3, 10)
        for share in failed:
            limits = stats.beta.ppf(1 - 0.05 / share, counts + 1, 50 - counts)
            failed[share] += bool((limits < 0.3).any())
    assert failed[10] / 400 < 0.05 < 0.2 < failed[1] / 400


def test_each_client_has_the_limit_of_its_own_test_samples(private: Path) -> None:
    limits = rows(private, "client", HELD_OUT)
    with np.load(private / "partition.npz") as split:
        counts = np.bincount(split["client_test_client"], minlength=6)
    assert {name: row.samples for name, row in limits.items()} == {
        str(client): count for client, count in enumerate(counts)
    }
    mean = sum(row.samples * (row.error or 0) for row in limits.values()) / counts.sum()
    summary = fedmuon.Result(private).summary
    of_clients = np.mean([row.error for row in limits.values() if row.error is not None])
    assert of_clients == pytest.approx(1 - summary["client_test_accuracy"])
    assert 0 < mean < 1
    for row in limits.values():
        if row.samples:
            errors = round(row.samples * (row.error or 0))
            expected = stats.beta.ppf(1 - 0.05 / 6, errors + 1, row.samples - errors)
            assert row.certified == pytest.approx(1.0 if math.isnan(expected) else expected)
        else:
            assert row.certified is None and "held out" in row.refusal


def profile(releases: list[Event], size: int, noise: float, epsilons: Any) -> Any:
    train_error = Event(1.0, 2 * size * noise, replaced=True)
    return hockey_stick([*releases, train_error], epsilons, 2**15)[1]


def test_each_client_has_the_limit_of_its_own_account(private: Path) -> None:
    limits = rows(private, "client", PRIVACY, guess=0.7, confidence=0.05)
    with np.load(private / "partition.npz") as split:
        sizes = np.bincount(split["client"], minlength=6)
    rounds = np.bincount(np.load(private / "schedule.npy").ravel(), minlength=6)
    noise = 12 / math.sqrt(fedmuon.Result(private).summary["privacy"]["blocks"])
    values = set()
    for client, (size, took_part) in enumerate(zip(sizes, rounds, strict=True)):
        row = limits[str(client)]
        divergence_of_sample = 2 * took_part * divergence(min(1, 10 / size), noise)
        assert row.samples == size and row.error is not None
        estimated = expected_risk(row.error, divergence_of_sample)
        assert row.estimated == pytest.approx(estimated, rel=1e-5)
        releases = [Event(min(1, 10 / size), noise, 2 * took_part, replaced=True)]
        shift = 2 * math.sqrt(2 * divergence_of_sample)
        limit = released_limit(partial(profile, releases, size), shift, size, 0.95 / 6, 0.7)
        drawn = released_noise(3, "error of a group", client)
        expected = limit.risk(row.error + limit.noise * drawn)
        assert row.certified == pytest.approx(expected, rel=1e-3)
        values.add(round(divergence_of_sample, 9))
    assert any((row.certified or 1) < 1 for row in limits.values())
    assert len(values) > 1  # clients differ, so the mean of the account would be wrong


def test_classes_share_the_account_of_their_samples(private: Path) -> None:
    by_class = rows(private, "class", PRIVACY)
    found = fedmuon.certify(private)
    errors = sum(row.samples * (row.error or 0) for row in by_class.values())
    assert sum(row.samples for row in by_class.values()) == found.samples
    assert errors / found.samples == pytest.approx(found.train["error"])
    several = rows(private, "class", PRIVACY, settings=3)
    for name, row in by_class.items():
        other = several[name]
        if row.samples:
            assert row.estimated is not None and other.estimated is None
            assert row.certified is not None and other.certified is not None
            assert row.estimated <= row.certified <= other.certified


def test_what_is_missing_is_refused(plain: Path, tmp_path: Path) -> None:
    of_clients = fedmuon.certify_groups(plain, per="client")
    assert not of_clients.rows and "client-test" in of_clients.refused[HELD_OUT]
    assert "dp-muon" in of_clients.refused[PRIVACY] and not of_clients.assumptions
    with pytest.raises(InputError, match=r"no limit to draw.*client-test"):
        group_figure(of_clients)
    whole_clients = finished(tmp_path / "clients", CLIENTS)
    refused = fedmuon.certify_groups(whole_clients, per="class").refused
    assert refused.keys() == {PRIVACY} and "level = 'example'" in refused[PRIVACY]
    with pytest.raises(InputError, match="no kind of group: did you mean class"):
        fedmuon.certify_groups(plain, per="clas")


def test_classes_have_their_names_and_may_lack_held_out_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 60)
    run = fedmuon.run(
        {"federation": {"clients": 2, "rounds": 1}, "local": {"recipe": "fedavg"}},
        data=(rng.standard_normal((60, 4)), np.array(["ape", "bee", "cat"])[labels]),
        test=(rng.standard_normal((20, 4)), np.array(["bee", "cat"])[labels[:20] % 2]),
        out=tmp_path / "run",
    )
    limits = rows(run, "class", HELD_OUT)
    assert limits.keys() == {"ape", "bee", "cat"}
    assert list(limits)[-1] == "ape" and limits["ape"].certified is None


@pytest.mark.parametrize("per", ["class", "client"])
def test_the_command_prints_draws_and_writes(private: Path, tmp_path: Path, per: str) -> None:
    picture, table = tmp_path / "groups.svg", tmp_path / "groups.tex"
    words = ["certify", str(private), "--per", per]
    done = CliRunner().invoke(app, [*words, "--plot", str(picture), "--latex", str(table)])
    assert done.exit_code == 0 and "hold together" in done.output
    assert picture.read_bytes().startswith(b"<?xml")
    record = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert record == json.loads(json.dumps(fedmuon.certify_groups(private, per=per).record()))
    limits = [row for row in record["rows"] if row["certified"] is not None]
    text = table.read_text(encoding="utf-8")
    assert text.count(r" \\") == 1 + len(limits) and rf"\label{{tab:certificates-{per}}}" in text


def test_the_picture_has_one_error_and_one_limit_per_group(private: Path) -> None:
    limits = fedmuon.certify_groups(private, per="client")
    panels = group_figure(limits).axes
    marks = [line for axis in panels for line in axis.lines if line.get_marker() == "o"]
    drawn = [row for row in limits.rows if row.certified is not None]
    assert len(panels) == 2 and sum(np.size(line.get_xdata()) for line in marks) == len(drawn)


@pytest.mark.parametrize("option", ["--probes", "--output-noise"])
def test_options_without_effect_are_rejected(plain: Path, option: str) -> None:
    done = CliRunner().invoke(app, ["certify", str(plain), "--per", "class", option, "2"])
    assert isinstance(done.exception, InputError) and "leave out --per" in str(done.exception)


# Limits of losses that are not 0 or 1


def test_a_single_loss_has_a_limit() -> None:
    value, method = loss_limit(np.array([0.5]), 0.05)
    assert method == "Chernoff (kl)" and 0.5 < value <= 1
    assert change_limit(np.array([-0.5]), 0.05) == 1.0


def test_losses_between_0_and_1_have_no_binomial_limit() -> None:
    losses = np.random.default_rng(0).uniform(0.4, 0.6, 500)
    value, method = loss_limit(losses, 0.05)
    assert method == "empirical Bernstein" and losses.mean() < value < losses.mean() + 0.06
    assert loss_limit(np.ones(10), 0.05) == (1.0, "Clopper-Pearson")
