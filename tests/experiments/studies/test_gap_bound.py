"""The measured gap beside its bound: each row is a run of its own; claims that can fail."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from study_rows import overprinted, rows_of, verdicts
from suite_files import command, table

from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.stability.endings import endings_of, train
from fedmuon.experiments.studies import find, gap_bound

SUITE = """
kind = "gap-bound"
title = "A gap and its bound"
data = "digits"
seeds = [3, 4]
base.data = { train = 90, test = 60, minimum = 5 }
base.federation = { clients = 6, per-round = 3, rounds = 4 }
base.task.initial = "zero"
base.local = { steps = 2, lr = 0.02 }
base.orthogonalizer.lambda = 0.1
base.engine = { dtype = "float64", device = "cpu" }

[vary]
"federation.rounds" = [4, 2]
"local.steps" = [2, 3]
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "suite.toml"
    file.write_text(SUITE)
    return file


def naive_gap(folder: Path) -> float:
    """F - F_hat of a run's final model: held-out classes count by each client's label shares."""
    run = finished_run.FinishedRun.open(folder)
    weight = finished_run.read_tensors(folder / "model.safetensors")[0]["weight"].numpy()

    def loss(row: np.ndarray, label: int) -> float:
        chances = np.exp(row @ weight - (row @ weight).max())
        return 1 - float(chances[label] / chances.sum())

    held = run.experiment.shards.held_out
    rows, labels = held.inputs.double().numpy(), held.labels.numpy()
    held_out = [
        np.mean([loss(row, y) for row, y in zip(rows, labels, strict=True) if y == label])
        for label in range(10)
    ]
    inputs, first, total = run.experiment.shards.inputs.double().numpy(), 0, 0.0
    for size in run.data.sizes.tolist():
        mine = range(first, first + size)
        fitted = np.mean([loss(inputs[at], run.data.labels[at]) for at in mine])
        shifted = np.mean([held_out[run.data.labels[at]] for at in mine])
        total += size / len(run.data.labels) * (shifted - fitted)
        first += size
    return float(total)


@pytest.mark.usefixtures("undrawn")
def test_every_row_is_a_run_with_its_gap_and_its_bound(suite: Path, tmp_path: Path) -> None:
    command("suite", suite, "--out", tmp_path / "out")
    rows = table(tmp_path / "out", "rows")
    assert len(rows) == 3 * 2 * len(gap_bound.FORMS)
    changes = {"explicit": "c-hp=explicit", "sharp": "c-hp=sharp", "variance": "c-hp=variance",
               "all models": "constants=global"}  # fmt: skip
    for row in (one for one in rows if one["seed"] == "3" and one["key"] != "federation.rounds"):
        folder = tmp_path / row["key"]
        if not folder.exists():
            config = small(
                data={"name": "digits"}, task={"initial": "zero"},
                local={"lr": 0.02, "steps": int(row["local.steps"])},
                federation={"seed": 3, "rounds": 4},
            )  # fmt: skip
            execute(config, folder)
        case = finished_run.from_directory(folder, [f"stability.{changes[row['form']]}"])
        record = certificates.report(case, certificates.certify(case))
        assert float(row["bound"]) == pytest.approx(record["value"], rel=1e-12)
        gap = naive_gap(folder)
        assert float(row["gap"]) == pytest.approx(gap, rel=1e-9)
        assert float(row["gap_low"]) < gap < float(row["gap_high"])
        assert row["form"] == "all models" or row["range"] == pytest.approx(str(record["range"]))


def test_what_moves_must_have_a_value_to_move_from(suite: Path) -> None:
    suite.write_text(SUITE.replace('"local.steps"', '"local.momentum"'))
    with pytest.raises(InputError, match=r"set momentum in \[base\.local\]"):
        find.find(str(suite), None, "full", {})
    suite.write_text(SUITE.replace('"local.steps"', '"federation.seed"'))
    with pytest.raises(InputError, match="set by seeds"):
        find.find(str(suite), None, "full", {})
    suite.write_text(SUITE)
    with pytest.raises(InputError, match="set by the study, which uses every value"):
        find.find(str(suite), None, "full", {"stability": {"c-hp": "sharp"}})


def made(
    slope: float, bound: float = 1.0, noise: float = 1e-8, share: float = 0.95
) -> dict[str, np.ndarray]:
    """A gap of 1e-5 times lambda to this power, 4 seeds, and a bound that grows with lambda."""
    found = rows_of(
        lambda key, at, form, seed: {
            "orthogonalizer.lambda": (lam := 1.0 if key == "base" else at),
            "gap": 1e-6 * lam**slope + noise * lam * (seed - 1.5),
            "bound": bound * 1e-3 * lam,
            "gap_controlled": 1e-6 * lam**slope + noise * lam * (seed - 1.5),
            "predicted": (predicted := share * 1e-6 * lam**slope),
            "predicted_error": predicted / 10, "predicted_outside": 1.1 * predicted,
            "range": 2e-3, "accuracy": 0.5, "method": "FedMuon",
        },
        key=("base", "orthogonalizer.lambda"), at=(0.1, 0.5, 3.0),
        form=tuple(gap_bound.FORMS), seed=range(4),
    )  # fmt: skip
    once = (found["key"] != "base") | (found["at"] == 0.1)  # the base is one setting
    kept = {name: column[once] for name, column in found.items() if name != "at"}
    return kept | {"gap_low": kept["gap"] - 1e-7, "gap_high": kept["gap"] + 1e-7}


@pytest.mark.parametrize(("slope", "ranks"), [(1.0, True), (-1.0, False)])
def test_a_bound_ranks_gaps_that_grow_with_it(slope: float, ranks: bool) -> None:
    within, ranked, along, *_ = gap_bound.claims(made(slope))
    assert verdicts([within, ranked, along]) == [True, ranks, ranks]
    assert "λ = 3 against 0.1" in along.detail and "explicit: 12 of 16" in within.detail
    assert gap_bound.claims(made(slope, bound=1e-5))[0].holds is False
    assert gap_bound.claims(made(slope, noise=1e-5))[2].holds is None


def test_a_prediction_is_compared_with_the_gap() -> None:
    near, ranked = gap_bound.claims(made(1.0))[3:]
    assert verdicts([near, ranked]) == [True, True]
    assert near.effect.value[0] == pytest.approx(0.95) and "1.045" in near.detail
    assert verdicts(gap_bound.claims(made(1.0, share=0.5))[3:]) == [False, True]
    assert verdicts(gap_bound.claims(made(1.0, noise=1e-6))[3:]) == [None, None]


@pytest.mark.parametrize(("bound", "vacuous"), [(1.0, True), (0.1, False)])
def test_the_picture_names_vacuous_bounds_only_if_there_are_some(
    bound: float, vacuous: bool
) -> None:
    figure = gap_bound.three_curves(made(1.0, bound=bound), narrow=True)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert ("bound ≥ B: vacuous" in names) == vacuous


def test_the_interval_of_a_ratio_contains_the_true_ratio() -> None:
    """In 95% of draws, up to the error of the simulation. Half of the interval contains less."""
    rng = np.random.default_rng(0)
    inside, half = 0, 0
    for _ in range(2000):
        below = 1 + 0.2 * rng.standard_normal(12)
        above = 0.9 * below + 0.1 * rng.standard_normal(12)
        found = gap_bound.ratio(above, below)
        reach = (found.high - found.low) / 2
        inside += abs(found.value - 0.9) <= reach
        half += abs(found.value - 0.9) <= reach / 2
    assert 0.935 < inside / 2000 < 0.965 and half / 2000 < 0.8


@pytest.mark.slow
def test_a_control_variate_has_mean_0_and_less_noise() -> None:
    config = small(
        data={"name": "digits", "train": 60, "test": 400}, federation={"rounds": 4},
        local={"recipe": "fedavg", "lr": 3.0}, task={"initial": "zero"},
    )  # fmt: skip
    runs = []
    for seed in range(30):
        federation = config.federation.model_copy(update={"seed": seed})
        runs.append(train(config.model_copy(update={"federation": federation}), [4]))
    variates = gap_bound.controls(runs)
    gaps = np.array([endings_of(run, {"sharp": {}})[1].loss.gap.gap for run in runs])
    controls = np.array([variate.gap for variate in variates])
    error = controls.std(ddof=1) / np.sqrt(30)
    overlap = np.mean([variate.overlap for variate in variates])
    assert abs(controls.mean() - overlap * gaps.mean()) < 4 * error
    assert (gaps - controls).std() < 0.8 * gaps.std()
    assert gap_bound.controls(runs[:1]) == [(0.0, 0.0)]  # no other seed


def test_marks_stand_at_gap_and_bound(tmp_path: Path) -> None:
    """A gap that is not positive stands at the upper end of its interval, and is no point at 0."""
    rows = made(1.0)
    lowest = rows["orthogonalizer.lambda"] == 0.1
    rows["gap"] = rows["gap"] - 1.0e-6 * lowest  # from 1e-7 to below 0
    left, right = gap_bound.against_bound(rows).axes
    for axes in (left, right):
        marks: Any = [(float(x), float(y)) for line in axes.lines for x, y in line.get_xydata()]  # type: ignore[union-attr]
        assert any(x == pytest.approx(3e-6) and y == pytest.approx(3e-3) for x, y in marks)
        assert all(x > 0 for x, _ in marks if math.isfinite(x))
    (end,) = {float(x) for line in left.lines for x, y in line.get_xydata()  # type: ignore[union-attr]
              if float(y) == pytest.approx(1e-4)}  # fmt: skip
    assert end == left.get_xlim()[0]  # its whole interval is below 0
    assert not overprinted(gap_bound.against_bound(rows, narrow=True))


def test_three_curves_stand_at_gap_prediction_and_bound() -> None:
    rows = made(1.0, bound=1.0)
    axes = gap_bound.three_curves(rows).axes[0]
    lines = {str(line.get_label()): np.asarray(line.get_xydata()) for line in axes.lines}
    order = np.array([0.1, 0.5, 1.0, 3.0])  # the base, 1, is in its place
    np.testing.assert_allclose(lines["measured gap (95%)"][:, 0], 1e-6 * order)
    np.testing.assert_allclose(lines["predicted gap"][:, 0], 0.95e-6 * order)
    np.testing.assert_allclose(lines["bound (explicit)"][:, 0], 1e-3 * order[:3])  # below B
    ends = [np.asarray(one.get_segments()) for one in axes.collections  # type: ignore[attr-defined]
            if hasattr(one, "get_segments")]  # fmt: skip
    half = 3.182446 * 1e-8 * order * np.std([0, 1, 2, 3], ddof=1) / 2  # Student's t
    np.testing.assert_allclose(ends[0][:, 1, 0] - ends[0][:, 0, 0], 2 * half, rtol=1e-5)
    assert [one.get_text() for one in axes.get_yticklabels()] == ["λ = 0.1", "0.5", "1", "3"]
    for narrow in (False, True):
        assert not overprinted(gap_bound.three_curves(rows, narrow))


def test_methods_have_their_own_keys(suite: Path, tmp_path: Path) -> None:
    """Each method varies the shared keys and its own, from its own base."""
    suite.write_text(
        SUITE.replace("base.orthogonalizer.lambda = 0.1\n", "")
        + """
[methods.One]
base.orthogonalizer = { lambda = 0.1 }
vary."orthogonalizer.lambda" = [0.1, 0.2]

[methods.Two]
base.local = { recipe = "fedavg", lr = 0.3 }
vary."local.lr" = [0.3, 3.0]
"""
    )
    names = [cell.name for cell in find.find(str(suite), None, "full", {}).cells]
    assert len(names) == 2 * 4 and any("lambda-0.2" in name for name in names)
    command("suite", suite, "--out", tmp_path / "out")
    rows = table(tmp_path / "out", "rows")
    rates = {(row["method"], row["local.lr"], row["orthogonalizer.lambda"]) for row in rows}
    assert rates == {("One", "0.02", "0.1"), ("One", "0.02", "0.2"), ("Two", "0.3", "0"),
                     ("Two", "3.0", "0")}  # fmt: skip
    suite.write_text(suite.read_text("utf-8").replace('vary."local.lr"', 'vary."local.momentum"'))
    with pytest.raises(InputError, match=r"set momentum in \[base\.local\]"):
        find.find(str(suite), None, "full", {})
