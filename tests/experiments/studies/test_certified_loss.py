"""The certified population loss: each bound is that of a run, the chosen setting the best."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import small, without_rendering
from suite_files import command, suite_of, table

from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.stability.held_out_change import held_out_change
from fedmuon.experiments.studies import certified_loss, find

SUITE = """
kind = "certified-loss"
title = "A certified loss"
data = "digits"
seeds = [3, 4]
tuning-seeds = [7]
delta = 0.06
samples = [60, 90]
lrs = [0.01, 0.02]
lambdas = [0.1]
horizons = [3, 1]
base.data = { test = 60, minimum = 5 }
base.task.initial = "zero"
base.local.steps = 2
base.engine = { dtype = "float64", device = "cpu" }
federations."all clients".federation = { clients = 3, per-round = 3 }
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certified")
    (folder / "suite.toml").write_text(SUITE)
    with without_rendering():
        command("suite", folder / "suite.toml", "--out", folder / "out")
    return folder / "out"


def test_every_bound_is_that_of_a_run(suite: Path, tmp_path: Path) -> None:
    """At delta over the number of settings: 2 step sizes, 1 lambda, 2 numbers of rounds."""
    rows = [one for one in table(suite, "rows") if (one["samples"], one["seed"]) == ("90", "3")]
    assert len(rows) == 6
    for row in rows:
        folder = tmp_path / f"{row['lr']}-{row['rounds']}"
        if not folder.exists():
            config = small(
                data={"name": "digits", "train": 90},
                task={"initial": "zero"},
                local={"lr": float(row["lr"]), "steps": 2},
                federation={"rounds": int(row["rounds"]), "seed": 3, "clients": 3, "per-round": 3},
                stability={"delta": 0.06 / 4},
            )
            execute(config, folder)
        case = finished_run.from_directory(folder, [f"stability.c-hp={row['form']}"])
        record = certificates.report(case, certificates.certify(case))
        assert float(row["bound"]) == pytest.approx(record["value"], rel=1e-12)
        assert record["status"] == "certified" and record["delta"] == 0.015
        summary = json.loads((folder / "summary.json").read_text())
        assert float(row["train_loss"]) == pytest.approx(summary["train_loss"], rel=1e-12)
        assert float(row["start_loss"]) == pytest.approx(0.9, rel=1e-12)
        decrease = 0.9 - summary["train_loss"]
        assert float(row["ratio"]) == pytest.approx(decrease / record["value"], rel=1e-9)
        certified = summary["train_loss"] + record["value"]
        assert float(row["certified_loss"]) == pytest.approx(certified, rel=1e-12)
        run = finished_run.FinishedRun.open(folder)
        held_out = held_out_change(run, 0.06 / 4, float(row["range"]))
        limit = held_out["held_out_change_limit"]
        assert float(row["held_out_decrease"]) == pytest.approx(-limit, rel=1e-9)


def test_the_chosen_setting_is_the_best_of_those_that_were_tried(suite: Path) -> None:
    tuning, rows = table(suite, "tuning"), table(suite, "rows")
    assert len(tuning) == 2 * 4 * 3 and len(rows) == 2 * 3 * 2 * 2
    for row in rows:
        tried = [
            one for one in tuning if all(one[name] == row[name] for name in ("samples", "form"))
        ]
        best = max(tried, key=lambda one: float(one[row["goal"]]))
        assert [best[name] for name in ("lr", "lambda", "rounds")] == [
            row[name] for name in ("lr", "lambda", "rounds")
        ]


def test_what_is_rejected_before_anything_is_computed(tmp_path: Path) -> None:
    """A seed that chose is no judge, the study sets some keys, and sizes must fit."""
    file = tmp_path / "suite.toml"
    with pytest.raises(InputError, match="seed 4 is in seeds and in tuning-seeds"):
        suite_of(tmp_path, SUITE, ("tuning-seeds = [7]", "tuning-seeds = [4]"))
    suite_of(tmp_path, SUITE)
    with pytest.raises(InputError, match="set by delta"):
        find.find(str(file), None, "full", {"stability": {"delta": 0.1}})
    with pytest.raises(InputError, match="the beginning of every longer run"):
        find.find(str(file), None, "full", {"local": {"schedule": "cosine"}})
    fits = suite_of(tmp_path, SUITE, ("samples = [60, 90]", "samples = [60, 1737]"))
    assert len(fits.cells) == 2  # 1,797 digits, 60 held out
    with pytest.raises(InputError, match=r"train = 1738 and test = 60 do not fit.* only 1797"):
        suite_of(tmp_path, SUITE, ("samples = [60, 90]", "samples = [60, 1738]"))


def made(ratio: float, gap: float = 1e-5) -> dict[str, np.ndarray]:
    """Three seeds of each form at two sizes, with this ratio by variance at the larger one."""
    forms = np.tile(["explicit", "sharp", "variance"], 6)
    samples = np.repeat([100.0, 1000.0], 9)
    large = (forms == "variance") & (samples == 1000)
    near = np.where(large, ratio + np.tile(np.repeat([-0.01, 0.0, 0.01], 3), 2), 0.1)
    one_each = {"federation": "all", "goal": "ratio", "status": "certified", "bound": 1e-3,
                "gap": gap, "gap_low": gap - 1e-5, "gap_high": gap + 1e-5}  # fmt: skip
    seeds = np.tile(np.repeat([0.0, 1.0, 2.0], 3), 2)
    drawn = {"samples": samples, "form": forms, "seed": seeds, "ratio": near}
    return drawn | {name: np.array([value] * 18) for name, value in one_each.items()}


@pytest.mark.parametrize(("ratio", "holds"), [(7.0, True), (1.0, False), (0.5, False)])
def test_a_certificate_is_worth_something_above_a_ratio_of_one(ratio: float, holds: bool) -> None:
    within, proved, worth = certified_loss.claims(made(ratio), {})
    assert within.holds is True and proved.holds is True and worth.holds is holds
    odd = made(ratio) | {"status": np.array(["certified"] * 17 + ["real-arithmetic"])}
    assert certified_loss.claims(odd, {})[1].holds is False
    assert "n = 1000" in worth.sentence and f"variance {ratio:g}" in worth.detail
    assert certified_loss.claims(made(ratio, gap=2e-3), {})[0].holds is False


def test_results_of_older_versions_have_no_hold_out_limit() -> None:
    shared = {name: np.full(18, 0.1) for name in ("lr", "lambda", "rounds", "decrease",
                                                  "difference", "accuracy")}  # fmt: skip
    old = made(2.0) | shared
    new = old | {certified_loss.HELD_OUT: np.full(18, -0.25)}
    place = certified_loss.numbers(old, {})[0].index("hold-out limit")
    assert {line[place] for line in certified_loss.numbers(old, {})[2:] if line[0][0] == " "} == {
        "–"
    }
    assert "−0.25" in certified_loss.numbers(new, {})[2][place]


def test_by_variance_needs_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    command("bound", "--json", "--c-hp", "variance", "--size", "1000")
    record = json.loads(capsys.readouterr().out)
    assert record["value"] is None and "Pass the run folder" in record["refusal"]


def test_by_variance_reads_the_losses_of_the_run(tmp_path: Path) -> None:
    """The mean squares are those of a loop over samples, and below the proved deviation."""
    execute(small(data={"name": "digits"}), tmp_path / "run")
    run = finished_run.FinishedRun.open(tmp_path / "run")
    case = finished_run.from_directory(tmp_path / "run")
    assert case.squares is not None
    weight = finished_run.read_tensors(tmp_path / "run" / "model.safetensors")[0]["weight"].numpy()
    inputs, labels = run.experiment.shards.inputs.numpy(), run.data.labels
    squares, first = [], 0
    for size in run.data.sizes.tolist():
        mine, first, total = range(first, first + size), first + size, 0.0
        for row in mine:
            logits = inputs[row] @ weight
            chances = np.exp(logits - logits.max())
            total += (1 - chances[labels[row]] / chances.sum() - 0.9) ** 2
        squares.append(total / len(mine))
    assert np.allclose(case.squares(), squares, rtol=1e-9)
    assert case.reach is not None
    every = [abs(0.9 - (1 - p)) for p in (0.0, 1.0)]
    assert math.sqrt(max(squares)) <= case.reach.deviation <= max(every)
