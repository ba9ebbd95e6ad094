"""Unlearning: the noise against exact integrals, removal against runs that never saw a sample."""

import json
import math
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from conftest import small
from typer.testing import CliRunner

from fedmuon.analysis import Uniform
from fedmuon.analysis.theory.corollaries import indistinguishable, noise_multiplier, removal
from fedmuon.core.arrays import read_tensors
from fedmuon.core.errors import InputError
from fedmuon.experiments import unlearning
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.unlearning import execute, noised
from fedmuon.federated.neighbour_runs import retrained
from fedmuon.federated.rounds import begin
from fedmuon.privacy.audit import Statistics, counted
from fedmuon.tasks.base import Params


def hockey_stick(shift: float, epsilon: float) -> float:
    """The integral of (p - e^epsilon q)_+ of two unit normals, in 30 digits."""
    with mpmath.workdps(30):
        edge = mpmath.mpf(epsilon) / shift - mpmath.mpf(shift) / 2  # where p = e^epsilon q

        def over(x: Any) -> Any:
            return mpmath.npdf(x) - mpmath.exp(epsilon) * mpmath.npdf(x + shift)

        found: Any = mpmath.quad(over, [edge, edge + 1, edge + 5, edge + 40])
        return float(found)


@pytest.mark.parametrize("shift", [0.01, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 5.0])
def test_the_formula_is_the_integral(shift: float, epsilon: float) -> None:
    exact = hockey_stick(shift, epsilon)  # abs: rounding of the difference of two numbers below 1
    assert indistinguishable(shift, epsilon) == pytest.approx(exact, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 0.1])
def test_no_less_noise_would_do(epsilon: float, delta: float) -> None:
    least = noise_multiplier(epsilon, delta)
    assert indistinguishable(1 / least, epsilon) <= delta
    assert indistinguishable(1 / (least * (1 - 1e-6)), epsilon) > delta


def test_a_membership_test_cannot_tell_beyond_epsilon() -> None:
    rng, delta = np.random.default_rng(0), 1e-3
    for factor, within in ((1.0, True), (0.2, False)):  # a fifth of the noise is the control
        sigma = factor * noise_multiplier(1.0, delta)
        noise = rng.standard_normal((2, 20_000))
        # The likelihood ratio of two models at a distance of the whole certificate.
        found = counted(Statistics(noise[0] + 1 / sigma, noise[1]), delta, confidence=0.9999)
        assert (found.epsilon <= 1.0) is within


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("delta", [1e-16, 1e-12])
def test_small_chances_keep_their_digits(epsilon: float, delta: float) -> None:
    least = noise_multiplier(epsilon, delta)
    assert hockey_stick(1 / least, epsilon) <= delta
    assert hockey_stick(1 / (0.99 * least), epsilon) > delta


def test_more_noise_than_there_is_is_refused() -> None:
    with pytest.raises(InputError, match="times the certificate"):
        noise_multiplier(0.0, 1e-12)


def test_models_with_and_without_a_sample_cannot_be_told_apart(tmp_path: Path) -> None:
    """By the best test, at the noise for their own distance; a fifth of it is too little."""
    laboratory = FinishedRun.open(made(tmp_path))
    model = {"weight": read_tensors(laboratory.out / "model.safetensors")[0]["weight"][None]}
    again = without(laboratory, np.array([0]))
    towards = again["weight"] - model["weight"]
    distance = float(towards.norm())
    assert distance > 0
    for factor, within in ((1.0, True), (0.2, False)):
        sigma = factor * distance * noise_multiplier(1.0, 1e-3)
        seen = [
            ((noised(one, sigma, 20_000)["weight"] - model["weight"]) * towards).sum((1, 2)).numpy()
            for one in (again, model)
        ]
        found = counted(Statistics(*seen), 1e-3, confidence=0.9999)
        assert (found.epsilon <= 1.0) is within


def test_a_sample_that_was_never_seen_needs_no_noise(tmp_path: Path) -> None:
    folder = made(tmp_path, federation={"rounds": 1})
    (seen,) = np.load(folder / "schedule.npy")
    with np.load(folder / "partition.npz") as split:
        absent = split["train_index"][~np.isin(split["client"], seen)][0]
    record = execute(folder, [int(absent)], 1.0, 1e-5, tmp_path / "out")
    assert record["distance"] == record["kinds"]["ball"]["sigma"] == 0.0
    assert record["kinds"]["ball"]["told"] == 0.0


def test_removal_adds_up() -> None:
    moved, sizes = np.array([0.5, 0.25]), np.array([4, 10])
    assert removal(moved, sizes, {0: 1}) == 0.5
    expected = 0.5 * 4 * (1 / 4 + 1 / 3) + 0.25
    assert removal(moved, sizes, {0: 2, 1: 1}) == pytest.approx(expected, rel=1e-15)
    with pytest.raises(InputError, match="would lose all of its 4 samples"):
        removal(moved, sizes, {0: 4})


def made(tmp_path: Path, **tables: dict) -> Path:
    """A finished run."""
    run(small(task={"initial": "zero"}, **tables), tmp_path / "run")
    return tmp_path / "run"


def first_sample(folder: Path) -> int:
    with np.load(folder / "partition.npz") as split:
        return int(split["train_index"][0])


def without(laboratory: FinishedRun, rows: np.ndarray) -> Params:
    """The last model of the run repeated without those rows."""
    stay = np.ones(len(laboratory.experiment.shards.labels), bool)
    stay[rows] = False
    return retrained(laboratory.experiment, stay, laboratory.config.federation.seed)


def apart(laboratory: FinishedRun, rows: np.ndarray) -> float:
    """How far the run is from one that never saw those rows."""
    model, _ = read_tensors(laboratory.out / "model.safetensors")
    again = without(laboratory, rows)
    return math.sqrt(sum(float((model[one] - again[one][0]).square().sum()) for one in model))


def test_every_removal_is_within_its_certificate(tmp_path: Path) -> None:
    folder = made(tmp_path)
    laboratory, verdict = (
        FinishedRun.open(folder),
        certificates.certify(finished_run.from_directory(folder)),
    )
    assert verdict.certificates is not None
    data, shares = laboratory.data, []
    owner = np.repeat(np.arange(6), data.sizes)
    for row in range(0, 90, 3):
        client = int(owner[row])
        promised = removal(verdict.certificates, data.sizes, {client: 1})
        moved = apart(laboratory, np.array([row]))
        assert moved <= promised
        shares.append(moved / promised if promised else 0.0)
    assert max(shares) > 0.1  # a tenth of the certificate would not do
    first = np.flatnonzero(owner == owner[0])[:4]
    assert apart(laboratory, first) <= removal(verdict.certificates, data.sizes, {int(owner[0]): 4})


def test_a_run_without_rows_is_a_run_of_the_others(tmp_path: Path) -> None:
    laboratory = FinishedRun.open(made(tmp_path))
    shards, rows = laboratory.experiment.shards, np.array([0, 7, 50])
    kept = [row for row in range(90) if row not in rows]
    less = shards.only(np.isin(np.arange(90), kept))
    assert less.inputs.equal(shards.inputs[kept]) and less.labels.equal(shards.labels[kept])
    counts = [
        sum(a <= row < b for row in kept)
        for a, b in zip(shards.offsets, shards.offsets[1:], strict=False)
    ]
    assert np.diff(less.offsets).tolist() == counts
    assert apart(laboratory, np.array([], dtype=int)) == 0.0


def test_noise_has_the_deviation_that_was_asked_for(tmp_path: Path) -> None:
    experiment = FinishedRun.open(made(tmp_path)).experiment
    model = begin(experiment.recipe, experiment.task, 0).params
    drawn = noised(model, 0.5, 4000)["weight"] - model["weight"]
    # 84,000 numbers: the relative error of a deviation is about 1/410.
    assert float(drawn.std()) == pytest.approx(0.5, rel=0.02)
    assert abs(float(drawn.mean())) < 0.01


def test_the_command(tmp_path: Path) -> None:
    folder, out = made(tmp_path), tmp_path / "without"
    asked = ["unlearn", str(folder), "--sample", str(first_sample(folder)), "--out", str(out)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    record = json.loads((out / "unlearn.json").read_text())
    kinds = record["kinds"]
    assert record["distance"] <= kinds["ball"]["sensitivity"] < kinds["global"]["sensitivity"]
    assert record["kind"] == "ball" and kinds["ball"]["told"] <= record["delta"]
    assert kinds["ball"]["sigma"] / kinds["ball"]["sensitivity"] == noise_multiplier(1.0, 1e-5)
    kept, _ = read_tensors(folder / "model.safetensors")
    noisy, _ = read_tensors(out / "unlearned.safetensors")
    assert noisy["weight"].shape == kept["weight"].shape
    assert not noisy["weight"].equal(kept["weight"])
    before = (out / "unlearned.safetensors").read_bytes()
    again = CliRunner().invoke(app, asked)
    assert isinstance(again.exception, InputError)
    assert (out / "unlearned.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"local": {"batch": 3}}, "only for full batches"),
        (
            {"orthogonalizer": {"name": "exact-sign"}},
            "removal needs a certificate that never fails",
        ),
        ({"federation": {"aggregate": "by-samples"}}, "aggregate = 'mean'"),
        ({"engine": {"dtype": "float32"}}, r"Repeat the run with \[engine\] dtype = 'float64'"),
    ],
)
def test_what_has_no_certificate_is_refused(tmp_path: Path, tables: dict, why: str) -> None:
    folder = made(tmp_path, **tables)
    with pytest.raises(InputError, match=why):
        execute(folder, [first_sample(folder)], 1.0, 1e-5, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tiny_steps_are_refused(tmp_path: Path) -> None:
    tables = {"task": {"initial": "gaussian"}, "engine": {"dtype": "float64"}}
    run(small(tables, local={"lr": 1e-13}), tmp_path / "run")
    with pytest.raises(InputError, match=r"a larger \[local\] lr"):
        execute(tmp_path / "run", [first_sample(tmp_path / "run")], 1.0, 1e-5, tmp_path / "out")


def test_a_constant_that_nobody_checked_is_refused() -> None:
    config = small(local={"lr": 0.01}, orthogonalizer={"name": "maps:half"})
    case = certificates.CertifiedSetting(
        config, np.full(6, 15), Uniform(3, 0.01), shape=(7, 3), l_map=0.5
    )
    found = certificates.certify(case).bound
    assert found and found.status == "claimed"
    why = unlearning._uncertified(case, found.status)
    assert "removal needs `certified`" in why and "your own orthogonalizer" in why


def test_strangers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sample 100000 is not one of"):
        execute(made(tmp_path), [100_000], 1.0, 1e-5, tmp_path / "out")
