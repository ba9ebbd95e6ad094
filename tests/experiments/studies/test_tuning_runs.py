"""`fedmuon tune`: a tiny suite from its grids to its verdicts."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedmuon.analysis.report.tuning import Tuned
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.experiments.report import gather
from fedmuon.experiments.studies import tuning_runs
from fedmuon.experiments.studies.dp_text import TextCell
from fedmuon.experiments.studies.dp_text import tunings as tunings_of_text
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.studies.training import Training
from fedmuon.experiments.studies.tuned import Tuning, place
from fedmuon.experiments.studies.tuning_runs import store, trials, tune
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.suite import execute

TINY = """
kind = "training"
title = "Tiny"
data = "synthetic"
seeds = [0, 1]
base.data = { train = 60, test = 30 }
base.federation = { clients = 2, per-round = 2, rounds = 2 }
base.local = { steps = 1, lr = 0.7 }
variants.FedAvg.local.recipe = "fedavg"
variants.FedMuon.local.recipe = "fedmuon"

[tuning]
seeds = [100, 101]

[tuning.grids]
FedAvg = [0.1, 0.4, 1.6]
FedMuon = [0.01, 0.04, 0.16]

[claims.loss]
better = "FedMuon"
than = "FedAvg"
measure = "test_loss"
"""


def tiny(folder: Path, text: str = TINY, **changes: Any) -> Training:
    file = folder / "tiny.toml"
    file.write_text(text)
    work = find(str(file), None, "full", changes)
    assert isinstance(work, Training)
    return work


def why(work: Training, out: Path) -> str:
    execute(work, out)
    (part,) = gather(out)
    assert part.claims[0].verdict == "inconclusive"
    return part.claims[0].why


def test_tuning_from_grids_to_verdicts(tmp_path: Path) -> None:
    work = tiny(tmp_path)
    assert {one.config.local.lr for one in work.cells} == {0.7}
    assert why(work, tmp_path / "before") == "the step sizes of FedMuon and FedAvg were not tuned"
    content = tune(work, tmp_path / "trials", extensions=1)
    counts = {len(one["values"]) for one in content["methods"]}
    assert len(counts) == 1
    for one in content["methods"]:
        assert one["best"] == Tuned.of(one, content).best in one["values"]
        # each score is the mean over the tuning seeds of runs that can be computed again
        runs = [cell for cell in trials(work).cells if cell.variant.startswith(one["method"])]
        assert {cell.config.federation.seed for cell in runs} == {100, 101}
    assert store(work.request.name, content) == tmp_path / "tuned" / "tiny.json"
    after = tiny(tmp_path)
    best = {one["method"]: one["best"] for one in content["methods"]}
    assert {one.variant: one.config.local.lr for one in after.cells} == best
    for one in content["methods"]:  # now the grids are made sound by hand
        one["values"], one["scores"] = [0.5 * one["best"], one["best"], 2 * one["best"]], [2, 1, 2]
    store(work.request.name, content)
    execute(tiny(tmp_path), tmp_path / "after")
    (part,) = gather(tmp_path / "after")
    assert not part.claims[0].untuned
    assert any("Tuning of local.lr" in title for title, _, _ in part.more)
    other = tiny(tmp_path, federation={"rounds": 3})
    assert "was tuned for other settings" in why(other, tmp_path / "other")
    assert "was tuned for other settings" in why(tiny(tmp_path, local={"lr": 3.0}), tmp_path / "lr")


def test_scores_are_means_of_the_runs_and_tuning_resumes(tmp_path: Path) -> None:
    work = tiny(tmp_path)
    stopped: list[str] = []

    def stop(record: dict[str, Any]) -> None:
        stopped.append(record["cell"])
        if len(stopped) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(work, tmp_path / "a", extensions=0, on_round_end=stop)
    ran: list[str] = []
    resumed = tune(work, tmp_path / "a", True, extensions=0,
                   on_round_end=lambda record: ran.append(record["cell"]))  # fmt: skip
    assert len(ran) == 12 - 5 and not set(ran) & set(stopped)
    whole = tune(work, tmp_path / "b", extensions=0)
    assert resumed["methods"] == whole["methods"]
    rows = (tmp_path / "b" / "trials.csv").read_text().splitlines()
    head = rows[0].split(",")
    ends = [dict(zip(head, row.split(","), strict=True)) for row in rows[1:]]
    mine = [float(row["test_loss"]) for row in ends
            if row["variant"] == "FedAvg" and row["value"] == "0.4"]  # fmt: skip
    assert len(mine) == 2
    assert whole["methods"][0]["scores"][1] == pytest.approx(sum(mine) / 2)


def test_validation_samples_choose_values_and_test_samples_do_not(tmp_path: Path) -> None:
    text = TINY.replace("seeds = [100, 101]", 'measure = "validation_accuracy"')
    with pytest.raises(InputError, match=r"'validation_accuracy' needs validation samples"):
        tiny(tmp_path, text)
    work = tiny(tmp_path, text.replace("test = 30", "test = 30, validation = 20"))
    content = tune(work, tmp_path / "a", extensions=0)
    with (tmp_path / "a" / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    for one in content["methods"]:
        mine = [row for row in rows if row["variant"] == one["method"]]
        assert one["scores"] == [float(row["validation_accuracy"]) for row in mine]
        assert one["scores"] != [float(row["accuracy"]) for row in mine]  # negative control
        highest = one["values"][one["scores"].index(max(one["scores"]))]
        assert one["best"] == highest
    for file in (tmp_path / "a" / "runs").glob("*/partition.npz"):
        index = np.load(file)
        chosen_by = {*index["validation_index"].tolist()}
        assert len(chosen_by) == 20
        assert not chosen_by & {*index["test_index"].tolist(), *index["train_index"].tolist()}


@pytest.mark.slow
def test_a_sweep_is_tuned_at_each_value_or_at_one(tmp_path: Path) -> None:
    sweep = '\n[sweep]\nkey = "local.steps"\nvalues = [1, 2]\nlabel = "E"\n'
    falling = '\n[claims.steps]\nkind = "falling"\nbetter = "FedAvg"\nmeasure = "test_loss"\n'
    for at, count in (('"each"', 24), ("2", 12)):
        text = TINY.replace("seeds = [100, 101]", f"seeds = [100, 101]\nat = {at}")
        work = tiny(tmp_path, text + sweep + falling)
        assert len(trials(work).cells) == count
        store(work.request.name, tune(work, tmp_path / f"t{count}", extensions=0))
        execute(tiny(tmp_path, text + sweep + falling), out := tmp_path / f"o{count}")
        (part,) = gather(out)
        said = part.claims[1].untuned
        assert ("FedAvg was tuned only at E = 2" in said) == (at == "2")
        if at != "2":
            assert "FedAvg at E = 1's best step size" in said


def test_keys_that_follow_keep_their_share(tmp_path: Path) -> None:
    text = TINY.replace("seeds = [100, 101]", 'shares = { "local.momentum" = 0.25 }')
    cells = trials(tiny(tmp_path, text)).cells
    assert all(one.config.local.momentum == 0.25 * one.config.local.lr for one in cells
               if one.variant.startswith("FedMuon"))  # fmt: skip


@pytest.mark.parametrize(("before", "after", "words"), [
    ("[0.01, 0.04, 0.16]", "[0.01, 0.04]", "same number of different values"),
    ("[0.01, 0.04, 0.16]", "[0.01, 0.04, 0.04]", "same number of different values"),
    ("FedMuon = [", "Other = [", "no such variant"),
    ("seeds = [100, 101]", "seeds = [1]", "would be biased"),
    ("seeds = [100, 101]", "seeds = []", "at least one seed"),
    ("seeds = [100, 101]", 'stated = "the paper"', "either grids or stated"),
])  # fmt: skip
def test_wrong_tables_are_rejected(tmp_path: Path, before: str, after: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tiny(tmp_path, TINY.replace(before, after, 1))


@pytest.mark.parametrize("stated", [" ", ".", "the paper"])
def test_a_reason_is_a_sentence(stated: str) -> None:
    with pytest.raises(ValueError, match="stated must be a sentence"):
        Tuning(stated=stated)
    assert Tuning(stated="All methods use the step size of the paper.").stated


def test_a_grid_that_cannot_grow_keeps_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs with the first values are stored, although the next value would be too large."""
    said: list[str] = []
    work, first = tiny(tmp_path, TINY.replace("[0.01, 0.04, 0.16]", "[1e-9, 2e-9, 4e-9]")), trials

    def limited(suite: Training, grids: Any = None) -> Any:
        if grids is not None:
            raise InputError("[local] lr = 1e+23 is not valid")
        return first(suite, grids)

    monkeypatch.setattr(tuning_runs, "trials", limited)
    found = tune(work, tmp_path / "a", say=said.append)
    assert all(len(one["values"]) == 3 for one in found["methods"])
    (words,) = said
    assert "No wider grid is possible: [local] lr = 1e+23 is not valid" in words


def test_the_command_tunes_and_stores(tmp_path: Path) -> None:
    work = tiny(tmp_path)
    name, out = work.request.name, str(tmp_path / "out")
    command = ["tune", name, "--extend", "0", "--out", out]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "tuned" / "tiny.json").exists()
    for wrong, words in (
        (command, "is not empty"),
        (["tune", "ns-steps", "--data", "digits", "--out", str(tmp_path / "x")], "nothing to tune"),
        (["tune", "A1", "--out", str(tmp_path / "x")], "kind training"),
        ([*command, "--set", "local.lr=1"], "has no effect"),
    ):
        error = CliRunner().invoke(app, wrong).exception
        assert isinstance(error, InputError) and words in str(error)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    work = tiny(tmp_path)
    file = place(work.request.name)
    file.parent.mkdir()
    file.write_text('{"methods": [{}]}')
    with pytest.raises(InputError, match="is damaged"):
        tiny(tmp_path)


NAMES = sorted(file.stem for file in (contents.FOLDER / "tuned").glob("*.json"))
FASHION = pytest.mark.needs_fashion_mnist


def marked(name: str) -> Any:
    fashion = contents.read(name)["data"] == "fashion-mnist"
    return pytest.param(name, marks=FASHION) if fashion else name


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_a_tuned_file_fits_its_suite(name: str) -> None:
    """A stored file that no longer fits would make each comparison inconclusive."""
    work, content = find(name, None, "full", {}), json.loads(place(name).read_text())
    if isinstance(work, Training):
        fits = [one["fits"] for one in (work.tuning() or {})["methods"]]
    else:  # a suite of kind `dp-text`, whose file contains the tuned values
        cell = work.within(Path("unused"))[0]
        assert isinstance(cell, TextCell)
        tunings = tunings_of_text(cell.settings, Path("unused"), name) or {}
        assert tunings.keys() == cell.settings.variants.keys()
        fits = [tuned.fits for method in tunings.values() for tuned in method]
    assert fits and all(fits)
    for one in content["methods"]:
        tuned = Tuned.of(one, content)
        assert one["best"] == tuned.best and one["inside"] == tuned.inside
    assert len({len(one["values"]) for one in content["methods"]}) == 1
