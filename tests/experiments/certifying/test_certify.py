"""Certificates of a run: each limit, its assumptions, and the reasons why there is none."""

import json
import math
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from scipy import integrate, stats
from typer.testing import CliRunner

import fedmuon
from fedmuon.analysis.theory.certified_risk import expected_risk, released_limit
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying.certify import RiskCertificate, certify
from fedmuon.experiments.certifying.figure import figure
from fedmuon.experiments.certifying.groups import certify_groups
from fedmuon.experiments.certifying.measured import measure, released_noise
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.finished_run import FinishedRun, from_directory
from fedmuon.experiments.stability.predicted_gap import predict
from fedmuon.privacy.accounting.divergences import hockey_stick, total_variation
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.runs.observers.published_model import published

PRIVATE = {"local": {"recipe": "dp-sgd", "steps": 2}, "privacy": {"noise": 12.0, "lot": 10}}
CLIENTS = {"local": {"recipe": "fedavg"}, "privacy": {"level": "client", "noise": 9.0}}
CERTIFIED = {"local": {"lr": 1e-5}, "engine": {"dtype": "float64"}}


def finished(folder: Path, tables: dict[str, Any], **others: Any) -> Path:
    execute(small(tables, **others), folder)
    return folder


def rows(folder: Path, name: str, **arguments: Any) -> dict[tuple[str, str], RiskCertificate]:
    certificates = certify(folder, **arguments).rows
    return {(row.measure, row.status): row for row in certificates if row.name == name}


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("private") / "run", PRIVATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("plain") / "run", CERTIFIED)


def divergence(rate: float, noise: float) -> float:
    """KL((1 - q) N(0, 1) + q N(1/s, 1) || N(0, 1)) by quadrature."""

    def integrand(x: float) -> float:
        ratio = 1 - rate + rate * math.exp(x / noise - 0.5 / noise**2)
        return float(stats.norm.pdf(x)) * ratio * math.log(ratio)

    return integrate.quad(integrand, -12, 12, epsabs=1e-14)[0]


def test_held_out_errors_have_clopper_pearsons_limit(private: Path) -> None:
    row = rows(private, "held-out samples")["error", "certified"]
    accuracy = fedmuon.Result(private).summary["accuracy"]
    errors = round(60 * (1 - accuracy))
    assert row.beside == pytest.approx(1 - accuracy) and row.confidence == 0.95
    assert row.value == pytest.approx(stats.beta.ppf(0.95, errors + 1, 60 - errors))


def test_the_account_is_the_sum_over_releases_of_the_plan(private: Path) -> None:
    found = certify(private)
    with np.load(private / "partition.npz") as split:
        sizes = np.bincount(split["client"])
    rounds = np.bincount(np.load(private / "schedule.npy").ravel(), minlength=6)
    blocks = fedmuon.Result(private).summary["privacy"]["blocks"]
    noise = 12 / math.sqrt(blocks)
    total = sum(
        n * 2 * r * divergence(min(1, 10 / n), noise) for n, r in zip(sizes, rounds, strict=True)
    )
    assert found.divergence["unit"] == "example"
    assert found.divergence["mean"] * 90 == pytest.approx(total, rel=1e-5)
    shared = {"guess": 0.7, "confidence": 0.05}
    row = rows(private, "privacy of samples", **shared)["error", "certified"]

    def profile(deviation: float, epsilons: np.ndarray) -> np.ndarray:
        curve = np.zeros(len(epsilons))
        for n, r in zip(sizes, rounds, strict=True):
            own = [Event(min(1, 10 / n), noise, 2 * r, replaced=True)] if r else []
            last = Event(1.0, 2 * 90 * deviation, replaced=True)
            curve += n / 90 * hockey_stick([*own, last], epsilons, 2**15)[1]
        return curve

    limit = released_limit(profile, 2 * math.sqrt(2 * total / 90), 90, 0.95, 0.7)
    released = found.train["error"] + limit.noise * released_noise(3, "error")
    assert limit.risk(released) < 1
    assert row.value == pytest.approx(limit.risk(released), rel=1e-3)
    assert found.divergence["total_variation"] == pytest.approx(
        sum(
            n
            / 90
            * total_variation([Event(min(1, 10 / n), noise, 2 * r, replaced=True)], 2**15).upper
            for n, r in zip(sizes, rounds, strict=True)
            if r
        ),
        rel=1e-3,
    )


def test_each_setting_is_paid_for(tmp_path: Path) -> None:
    noisy = {**PRIVATE, "privacy": {"noise": 400.0, "lot": 10}}
    folder = finished(tmp_path / "run", noisy)
    alone = rows(folder, "privacy of samples", guess=0.7)
    among = rows(folder, "privacy of samples", guess=0.7, settings=20)
    assert alone["error", "estimated"].value is not None
    assert "--settings 1" in among["error", "refused"].refusal
    first, other = (table["error", "certified"].value for table in (alone, among))
    assert first is not None and other is not None and first < other < 1


def test_a_limit_is_above_what_it_limits(private: Path, plain: Path) -> None:
    for folder in (private, plain):
        for row in certify(folder).rows:
            assert row.value is None or (row.beside is not None and row.beside <= row.value)
            assert (row.value is None) == bool(row.refusal) == (row.status == "refused")
            assert row.value is None or row.assumptions


def test_the_stability_row_is_the_bound_of_the_run(plain: Path) -> None:
    row = rows(plain, "stability")["loss", "certified"]
    bound = fedmuon.bound(plain)
    summary = fedmuon.Result(plain).summary
    assert row.value == pytest.approx(min(1.0, summary["train_loss"] + bound["value"]))
    tighter = rows(plain, "stability", confidence=0.5)["loss", "certified"]
    assert tighter.value is not None and row.value is not None and tighter.value <= row.value


def test_what_is_missing_is_refused_with_the_way_to_it(private: Path, plain: Path) -> None:
    of_plain, of_private = (
        {row.name: row.refusal for row in certify(folder).rows if row.status == "refused"}
        for folder in (plain, private)
    )
    assert of_plain.keys() == {"privacy of samples", "privacy of clients"}
    assert all("dp-muon" in why and "client" in why for why in of_plain.values())
    assert "level = 'client'" in of_private["privacy of clients"]
    assert "no certificate" in of_private["stability"]


def test_client_level_limits_the_error_of_new_clients(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", CLIENTS)
    row = rows(folder, "privacy of clients")["error", "certified"]
    found = certify(folder)
    assert found.divergence["unit"] == "client" and found.divergence["units"] == 6
    poisson_cohorts = 8 * divergence(3 / 6, 9.0)
    assert found.divergence["mean"] == pytest.approx(poisson_cohorts, rel=1e-5)
    assert row.value is not None and row.beside is not None
    assert "level = 'example'" in rows(folder, "privacy of samples")["error", "refused"].refusal


def test_the_limit_of_new_clients_counts_clients_and_not_samples(tmp_path: Path) -> None:
    """A client has the weight 1/n however many samples it has, and moves the mean by 1/n."""
    noise, clients = 200.0, 6
    privacy = {**CLIENTS["privacy"], "noise": noise, "bound": 1e-4}
    folder = finished(tmp_path / "run", {**CLIENTS, "privacy": privacy})
    measured = measure(folder)
    sizes, errors = measured.run.data.sizes, measured.train["error"]
    parts = np.split(errors, np.cumsum(sizes)[:-1])
    mean = float(np.mean([part.mean() for part in parts]))
    assert len({*sizes}) > 1 and mean != pytest.approx(errors.mean(), abs=1e-6)
    row = rows(folder, "privacy of clients", guess=0.7, confidence=0.05)["error", "certified"]
    assert row.beside == pytest.approx(mean)

    def limit(units: int) -> float:
        def profile(deviation: float, epsilons: np.ndarray) -> np.ndarray:
            rounds = Event(3 / clients, noise, 8, replaced=True)
            released = Event(1.0, 2 * units * deviation, replaced=True)
            return hockey_stick([rounds, released], epsilons)[1]

        shift = 2 * math.sqrt(2 * 8 * divergence(3 / clients, noise))
        of_units = released_limit(profile, shift, units, 0.95, 0.7)
        return of_units.risk(mean + of_units.noise * released_noise(3, "error of clients"))

    assert row.value is not None and row.value < 1
    assert row.value == pytest.approx(limit(clients), rel=1e-3)
    assert row.value != pytest.approx(limit(len(errors)), rel=1e-2)


def test_cut_lots_and_runs_without_noise_are_refused(tmp_path: Path) -> None:
    privacy = PRIVATE["privacy"] | {"max-lot": 60}
    cut = finished(tmp_path / "cut", {**PRIVATE, "privacy": privacy})
    assert "max-lot = 0" in rows(cut, "privacy of samples")["error", "refused"].refusal
    silent = finished(tmp_path / "silent", {**PRIVATE, "privacy": {"noise": 0.0, "lot": 10}})
    assert "noise above 0" in rows(silent, "privacy of samples")["error", "refused"].refusal


def test_a_run_that_stopped_early_is_refused(tmp_path: Path) -> None:
    def stop(record: Any, state: Any) -> bool:
        return record["round"] == 3

    result = fedmuon.run(small(PRIVATE), out=tmp_path / "run", callbacks=[stop])
    assert result.summary["stopped"]
    assert "early" in rows(result.path, "privacy of samples")["error", "refused"].refusal


def test_lots_that_are_not_poisson_are_noted(private: Path, tmp_path: Path) -> None:
    privacy = PRIVATE["privacy"] | {"sampling": "shuffle"}
    folder = finished(tmp_path / "run", {**PRIVATE, "privacy": privacy})
    (note,) = certify(folder).notes
    assert "shuffle lots" in note and "sampling = 'poisson'" in note
    assert certify(private).notes == []


def test_equal_samples_are_noted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs, labels = rng.standard_normal((60, 5)), rng.integers(0, 3, 60)
    twice = np.concatenate([inputs, inputs[:10]]), np.concatenate([labels, labels[:10]])
    tables = {"federation": {"clients": 2, "rounds": 1}, "local": {"recipe": "fedavg"},
              "data": {"normalize": "unit"}}  # fmt: skip
    for data, count in (((inputs, labels), 0), (twice, 10)):
        result = fedmuon.run(
            tables, data=data, test=(inputs[:20] + 1, labels[:20]), out=tmp_path / f"{count} equal"
        )
        unseen, *notes = fedmuon.certify(result).notes
        assert "how your data were prepared" in unseen
        assert len(notes) == bool(count) and all(f"{count} of 70" in note for note in notes)


def test_held_out_samples_that_were_trained_on_are_noted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs, labels = rng.standard_normal((60, 5)), rng.integers(0, 3, 60)
    tables = {"federation": {"clients": 2, "rounds": 1}, "local": {"recipe": "fedavg"},
              "data": {"normalize": "unit"}}  # fmt: skip
    for count in (0, 7):
        new = inputs[count:20] + 1, labels[count:20]
        test = (np.concatenate([inputs[:count], new[0]]), np.concatenate([labels[:count], new[1]]))
        result = fedmuon.run(
            tables, data=(inputs, labels), test=test, out=tmp_path / f"{count} trained"
        )
        _, *notes = fedmuon.certify(result).notes
        assert len(notes) == bool(count)
        assert all("7 of 20 held-out samples are also training samples" in note for note in notes)


def test_a_run_without_held_out_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tables = {"federation": {"clients": 2, "rounds": 1}, "local": {"recipe": "fedavg"}}
    data = rng.standard_normal((60, 5)), rng.integers(0, 3, 60)
    halves = [range(30), range(30, 60)]
    run = fedmuon.run(tables, data=data, partition=halves, out=tmp_path / "run")
    found = fedmuon.certify(run)
    assert found.rows[0].status == "refused" and "set [data] test" in found.rows[0].refusal
    assert found.test == {}


def test_networks_have_an_error_and_no_bounded_loss(tmp_path: Path) -> None:
    task = {"name": "network", "model": "mlp"}
    folder = finished(tmp_path / "run", {**PRIVATE, "task": task})
    assert {row.measure for row in certify(folder).rows if row.value is not None} == {"error"}
    other = finished(tmp_path / "other", {"task": task, "local": {"recipe": "fedavg"}})
    assert (
        "held-out samples or a private recipe"
        in rows(other, "stability")["loss", "refused"].refusal
    )


@pytest.mark.parametrize(("name", "value"), [("confidence", 1.0), ("settings", 0)])
def test_arguments_out_of_range(private: Path, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name if name == "settings" else "confidence"):
        fedmuon.certify(private, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("confidence", "a"),
        ("confidence", True),
        ("guess", None),
        ("guess", False),
        ("settings", True),
        ("settings", "2"),
        ("output_noise", True),
        ("output_noise", False),
        ("output_noise", "0.1"),
        ("output_noise", 1e300),
        ("output_noise", math.nan),
        ("probes", "8"),
        ("probes", True),
        ("probes", -1),
    ],
)
def test_arguments_that_are_no_numbers_in_range(private: Path, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is .*must be"):
        fedmuon.certify(private, **{name: value})


@pytest.mark.parametrize("per", [None, "", 3, ["class"]])
def test_a_kind_of_group_that_does_not_exist(private: Path, per: Any) -> None:
    with pytest.raises(InputError, match="no kind of group: use one of class, client"):
        fedmuon.certify_groups(private, per=per)


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        fedmuon.certify(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["model.safetensors", "config.toml", "ledger.jsonl"])
def test_a_run_with_changed_files_is_rejected(
    private: Path, plain: Path, tmp_path: Path, name: str
) -> None:
    without_limits = shutil.ignore_patterns("certificates.json")
    damaged = shutil.copytree(private, tmp_path / "run", ignore=without_limits)
    certify_groups(damaged, "class")  # an unchanged copy is certified
    if name == "ledger.jsonl":
        (damaged / name).unlink()
    elif name == "config.toml":
        (damaged / name).write_text((damaged / name).read_text() + "\n# edited\n")
    else:
        shutil.copy(plain / name, damaged / name)
    for compute in (fedmuon.certify, partial(fedmuon.certify_groups, per="class")):
        with pytest.raises(InputError, match=f"{name}.*the folder is damaged"):
            compute(damaged)
    for words in ([], ["--per", "class"]):
        done = CliRunner().invoke(app, ["certify", str(damaged), *words])
        assert isinstance(done.exception, InputError) and name in str(done.exception)
    assert not (damaged / "certificates.json").exists()


def test_the_files_of_a_run_are_compared_with_their_checksums_once(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def require_sound(folder: Path, names: Iterable[str]) -> None:
        checked.extend(name for name in names if folder == plain)

    monkeypatch.setattr(files, "require_sound", require_sound)
    certify(plain)
    assert checked.count("model.safetensors") == checked.count("initial.safetensors") == 1


def test_the_command_prints_a_table_or_json_and_draws(private: Path, tmp_path: Path) -> None:
    picture = tmp_path / "certificates.svg"
    done = CliRunner().invoke(app, ["certify", str(private), "--plot", str(picture)])
    assert done.exit_code == 0 and "held-out samples" in done.output
    assert picture.read_bytes().startswith(b"<?xml")
    done = CliRunner().invoke(app, ["certify", str(private), "--json"])
    record = json.loads(done.output)
    assert [row["name"] for row in record["rows"]] == [row.name for row in certify(private).rows]


@pytest.mark.parametrize(
    ("option", "name", "why"),
    [
        ("--plot", "x.txt", "is not a .png, .pdf or .svg file"),
        ("--plot", ".", "is not a .png, .pdf or .svg file"),
        ("--plot", "folder.png", "is a folder. Choose the path of a file"),
        ("--plot", "missing/x.png", "missing does not exist. Create the folder"),
        ("--latex", "x.png", "is not a .tex file"),
        ("--latex", "missing/x.tex", "missing does not exist. Create the folder"),
    ],
)
def test_files_that_cannot_be_written_are_rejected_first(
    tmp_path: Path, option: str, name: str, why: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    for words in ([], ["--per", "class"]):  # the run does not exist, which is found out later
        words = [str(tmp_path / "run"), *words, option, str(tmp_path / name)]
        done = CliRunner().invoke(app, ["certify", *words])
        assert isinstance(done.exception, InputError) and why in str(done.exception)
        assert not done.output


def test_an_empty_kind_of_group_is_rejected(private: Path) -> None:
    done = CliRunner().invoke(app, ["certify", str(private), "--per", ""])
    assert isinstance(done.exception, InputError) and "no kind of group" in str(done.exception)
    assert not done.output


def test_the_picture_has_a_mark_for_each_limit(plain: Path) -> None:
    found = certify(plain)
    panels = figure(found).axes
    marked = [line for axis in panels for line in axis.lines if line.get_marker() in ("o", "D")]
    limits = [row for row in found.rows if row.value is not None and "change" not in row.measure]
    assert sum(np.size(line.get_xdata()) for line in marked) == len(limits) >= 3


def test_the_predicted_gap_is_shown_on_request(plain: Path) -> None:
    found = fedmuon.certify(plain, probes=3)
    alone = predict(FinishedRun.open(plain), 3)
    assert found.predicted["gap"] == alone.value and not fedmuon.certify(plain).predicted
    done = CliRunner().invoke(app, ["certify", str(plain), "--probes", "3"], env={"COLUMNS": "200"})
    assert "predicted gap" in done.output and done.exit_code == 0
    with pytest.raises(InputError, match="probes"):
        fedmuon.certify(plain, probes=-1)


# Noise on the output


def test_the_distance_bounds_the_divergence(plain: Path) -> None:
    distances = certificates.certify(from_directory(plain)).certificates
    assert distances is not None
    with np.load(plain / "partition.npz") as split:
        sizes = np.bincount(split["client"])
    deviation = float(distances.max())
    mean = sum(n * (c / 2) ** 2 / (2 * deviation**2) for n, c in zip(sizes, distances, strict=True))
    row = rows(plain, "noise on the output", output_noise=deviation)["error", "estimated"]
    assert row.beside is not None and row.value is not None
    assert row.value == pytest.approx(expected_risk(row.beside, mean / 90), rel=0.003)
    wrong = expected_risk(row.beside, 4 * mean / 90)  # the whole certificate instead of half of it
    assert row.value < 0.99 * wrong


def test_removing_a_sample_moves_the_model_by_half_a_certificate(tmp_path: Path) -> None:
    """A sample of weight 0 has the gradient 0. Derivatives and weights are not needed: the sample
    is replaced by zeros, whose gradient in the matrix task is 0."""
    rng = np.random.default_rng(1)
    inputs, labels = rng.standard_normal((30, 4)), rng.integers(0, 3, 30)
    inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
    tables = {
        "data": {"normalize": "ball"}, "federation": {"clients": 2, "rounds": 4},
        "local": {"lr": 0.01, "steps": 1}, "orthogonalizer": {"lambda": 0.1},
        "engine": {"dtype": "float64"},
    }  # fmt: skip
    halves = [range(15), range(15, 30)]
    run = fedmuon.run(tables, data=(inputs, labels), partition=halves, out=tmp_path / "all")
    certificate = fedmuon.bound(run)["max_certificate"]
    largest = 0.0
    for row in range(6):
        without = inputs.copy()
        without[row] = 0
        out = tmp_path / str(row)
        other = fedmuon.run(tables, data=(without, labels), partition=halves, out=out)
        moved = float((other.model["weight"] - run.model["weight"]).norm())
        largest = max(largest, moved)
    assert 0 < largest <= certificate / 2


def test_clients_as_neighbours_do_not_change_what_is_certified_about_samples(
    plain: Path, tmp_path: Path
) -> None:
    """The certificate of a removed client with one sample is half that of its replaced sample."""
    of_clients = {**CERTIFIED, "stability": {"unit": "removed-clients"}}
    other = finished(tmp_path / "run", of_clients)
    for name in ("stability", "noise on the output"):
        found, expected = (rows(folder, name, output_noise=1e-3) for folder in (other, plain))
        assert expected and found.keys() == expected.keys()
        for key in expected:
            assert found[key].value == expected[key].value
            assert found[key].assumptions == expected[key].assumptions
    halved, whole = (from_directory(folder) for folder in (other, plain))
    assert certificates.certify(halved).certificates is not None
    assert (
        certificates.certify(halved).certificates != certificates.certify(whole).certificates
    ).any()


def test_noise_on_the_output_needs_certificates(private: Path, plain: Path) -> None:
    row = rows(private, "noise on the output", output_noise=0.1)["error", "refused"]
    assert "fedmuon bound" in row.refusal and not rows(private, "noise on the output")
    with pytest.raises(InputError, match="output_noise"):
        fedmuon.certify(plain, output_noise=-1.0)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_each_noise_on_the_output_has_a_limit_without_warnings(plain: Path) -> None:
    limits = [
        rows(plain, "noise on the output", output_noise=noise)["error", "estimated"].value
        for noise in (5e-324, 1e-300, 1e-12, 1.0, 1e15)
    ]
    assert limits[:3] == [1.0, 1.0, 1.0]
    assert limits[3] is not None and limits[4] is not None
    assert limits[4] <= limits[3] < 1


def test_a_violated_certificate_certifies_nothing(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates.Certificate, "violation", lambda self, moved: 2.5)
    for name, measure_name in (("stability", "loss"), ("noise on the output", "error")):
        row = rows(plain, name, output_noise=0.1)[measure_name, "refused"]
        assert "2.5 times its certificate" in row.refusal


def test_the_noise_of_a_published_model_depends_on_the_seed_alone(plain: Path) -> None:
    params = measure(plain).params
    first, again, other = (published(params, 2.0, seed)["weight"] for seed in (3, 3, 4))
    assert (first == again).all() and (first != other).all()
    noise = (first - params["weight"]).numpy() / 2
    assert abs(noise.mean()) < 0.8 and 0.4 < noise.std() < 1.6


def test_certificates_that_hold_with_high_probability_allow_no_noise_on_the_output(
    tmp_path: Path,
) -> None:
    smoothed = {"orthogonalizer": {"name": "gaussian-smoothed-sign"}}
    folder = finished(tmp_path / "run", {**CERTIFIED, **smoothed})
    assert rows(folder, "stability")["loss", "certified"].confidence is not None
    refused = rows(folder, "noise on the output", output_noise=0.1)["error", "refused"]
    assert "high probability" in refused.refusal
