"""What touched the samples: tried settings, early stops, preparation, and the initial model."""

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from conftest import small
from typer.testing import CliRunner

import fedmuon
from fedmuon.config.load import dump, load, parse
from fedmuon.config.schema import FIELDS
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying import stored
from fedmuon.experiments.certifying.certify import certify
from fedmuon.experiments.certifying.choices import (
    CENTERS,
    SCALINGS,
    DataChoice,
    TriedSettings,
    choices_of,
    tried_settings,
)
from fedmuon.experiments.certifying.groups import certify_groups
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.runs.callbacks import Callback

PRIVATE = {"local": {"recipe": "dp-sgd", "steps": 2}, "privacy": {"noise": 12.0, "lot": 10}}
DATA = {"name": "synthetic", "train": 90, "test": 60, "dimension": 7, "minimum": 2}
BASE = {**PRIVATE, "data": DATA, "federation": {"clients": 3, "per-round": 3, "rounds": 2}}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three step sizes with two seeds each."""
    out = tmp_path_factory.mktemp("sweep") / "s"
    fedmuon.sweep(BASE, grid={"local.lr": [0.1, 0.2, 0.3]}, seeds=2, select="train-loss", out=out)
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "runs" / "a"
    execute(small(PRIVATE), out)
    return out


def run_of(sweep: Path, name: str = "lr=0.1,seed=0") -> Path:
    return sweep / "runs" / name


def named(choices: list[DataChoice], name: str) -> list[DataChoice]:
    return [choice for choice in choices if choice.name == name]


def fake_run(place: Path, cells: Any, name: str = "b") -> Path:
    """Return a run folder in a sweep with these cells."""
    (place / "runs" / name).mkdir(parents=True)
    (place / "suite.lock").write_text(json.dumps(["sweep", "x", "full", "a seal a cell", cells]))
    return place / "runs" / name


def cell(name: str, source: str = "digits", **data: Any) -> list[Any]:
    return [name, name, {"data": {"name": source, **data}}]


# Settings


def test_the_settings_of_a_sweep_are_paid_for(sweep: Path) -> None:
    folder = run_of(sweep)
    assert len([*(sweep / "runs").iterdir()]) == tried_settings(folder).settings == 6
    by_default, passed = certify(folder), certify(folder, settings=6)
    assert by_default.settings == by_default.counted == 6
    assert [row.value for row in by_default.rows] == [row.value for row in passed.rows]
    certified = [row for row in by_default.rows if row.status == "certified"]
    assert certified and all(
        row.confidence == pytest.approx(1 - 0.05 / 6, abs=1e-12) for row in certified
    )
    assert not any(row.status == "estimated" for row in by_default.rows)
    (note,) = by_default.notes
    assert "one of 6 settings on the same samples" in note and "--settings 1" in note
    assert not passed.notes


@pytest.mark.parametrize(
    "words", [["gap", "--grid", "local.lr=0.1,0.2"], ["run", "--seeds", "2"]], ids=["gap", "seeds"]
)
def test_runs_of_other_commands_are_counted(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(dump(small({"federation": {"rounds": 1}})))
    command, *options = words
    done = CliRunner().invoke(app, [command, str(file), *options, "--out", str(tmp_path / "s")])
    assert done.exit_code == 0, done.output
    counts = [tried_settings(place).settings for place in (tmp_path / "s" / "runs").iterdir()]
    assert counts == [2, 2]


def test_too_few_settings_are_noted(sweep: Path) -> None:
    for settings, words in ((1, "pay for 1"), (5, "pay for 5"), (6, ""), (7, "")):
        notes = certify(run_of(sweep), settings=settings).notes
        assert len(notes) == bool(words) and all(words in note for note in notes)
        assert all("contains 6 settings" in note and "--settings 6 or more" in note
                   for note in notes)  # fmt: skip
    assert any(row.status == "estimated" for row in certify(run_of(sweep), settings=1).rows)


def test_groups_pay_for_the_settings_too(sweep: Path) -> None:
    counted, one = (certify_groups(run_of(sweep), "class", settings=n) for n in (None, 1))
    assert counted.settings == 6 and "one of 6 settings" in counted.notes[0]
    assert one.settings == 1 and "pay for 1" in one.notes[0]
    pairs = [
        (row.certified, other.certified)
        for row in counted.rows
        for other in one.rows
        if row.source == other.source == "held-out samples" and row.group == other.group
    ]
    assert len(pairs) == 4 and pairs != [(other, row) for row, other in pairs]
    assert all(row is not None and other is not None and row >= other for row, other in pairs)


def test_a_run_alone_pays_for_itself(alone: Path, sweep: Path, tmp_path: Path) -> None:
    """The negative control. The folder of the run is also called `runs`."""
    found = certify(alone)
    assert found.settings == found.counted == 1 and not found.notes
    assert all(choice.status in ("free", "assumed") for choice in found.choices)
    shutil.copytree(alone, sweep / "runs" / "other")  # not a run of the sweep
    assert tried_settings(sweep / "runs" / "other") == TriedSettings()
    shutil.rmtree(sweep / "runs" / "other")
    assert tried_settings(tmp_path) == TriedSettings()


def test_only_runs_on_the_same_data_are_counted(tmp_path: Path) -> None:
    cells = [cell("a"), cell("b"), cell("c", "mnist5k"), cell("d", folder="x")]
    assert tried_settings(fake_run(tmp_path / "s", cells)).settings == 2
    assert tried_settings(fake_run(tmp_path / "t", cells, "c")).settings == 1


def test_tuning_runs_of_a_suite_are_counted(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, [cell("a"), cell("b")])
    methods = [
        {"method": name, "x": x, "values": [0.1, 0.2, 0.4]}
        for name, x in itertools.product(("m", "n"), (1.0, 2.0))  # tuned at one value of x
    ]
    tuning = {"methods": methods, "seeds": [100, 101]}
    (tmp_path / "suite.json").write_text(json.dumps({"tuning": tuning}))
    tried = tried_settings(folder)
    assert tried.settings == 2 + 2 * 3 * 2 and "12 runs that tuned" in tried.place
    (tmp_path / "suite.json").write_text(json.dumps({"tuning": None}))
    assert tried_settings(folder).settings == 2


@pytest.mark.parametrize("content", ["", "[]", "3", '{"a": 1}', '["a", [["b"]]]', "\0"])
def test_a_damaged_lock_asks_for_the_number(content: str, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    shutil.copytree(alone, folder)
    (tmp_path / "suite.lock").write_text(content)
    with pytest.raises(InputError, match=r"suite\.lock is damaged.*--settings\.$"):
        certify(folder)
    assert "is damaged" in certify(folder, settings=3).notes[0]


def test_the_command_and_json_name_the_choices(sweep: Path) -> None:
    folder = run_of(sweep)
    done = CliRunner().invoke(app, ["certify", str(folder), "--json"])
    record = json.loads(done.output)
    assert record["settings"] == 6
    assert [choice["status"] for choice in record["choices"] if choice["name"] == "settings"] == [
        "paid"
    ]
    assert stored.command(folder, stored.current(folder)) == f"fedmuon certify {folder}"
    done = CliRunner().invoke(app, ["certify", str(folder), "--settings", "1"])
    assert "contains 6 settings" in " ".join(done.output.split()) or "6 settings" in done.output
    assert stored.command(folder, stored.current(folder)).endswith(" --settings 1")


def test_more_settings_outdate_stored_certificates(sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep, tmp_path / "s")
    folder = run_of(tmp_path / "s")
    fedmuon.certify(folder)
    assert stored.current(folder) is not None
    grid = {"local.lr": [0.1, 0.2, 0.3, 0.4]}
    fedmuon.sweep(BASE, grid=grid, seeds=2, select="train-loss", out=tmp_path / "s", resume=True)
    assert stored.current(folder) is None
    assert fedmuon.certify(folder).settings == 8


# Early stopping


def stopping(measure: str, folder: Path, **data: Any) -> Path:
    options = {"measure": measure, "patience": 1, "least": 1e9}
    output = {"callback": "early-stopping", "options": options, "evaluate-every": 1}
    execute(small(PRIVATE, output=output, data=data), folder)
    return folder


def test_held_out_samples_that_stopped_a_run_certify_nothing(tmp_path: Path) -> None:
    folder = stopping("test_loss", tmp_path / "a")
    found = certify(folder)
    first = found.rows[0]
    assert first.name == "held-out samples" and first.status == "refused"
    assert "early stopping used test_loss" in first.refusal and "validation" in first.refusal
    assert any("test_loss" in note for note in found.notes)
    refused = certify_groups(folder, "class").refused
    assert "early stopping used test_loss" in refused["held-out samples"]
    assert "privacy of samples" in refused


def test_other_measures_leave_the_held_out_samples_alone(tmp_path: Path) -> None:
    """The negative control. The limits from privacy are still refused."""
    found = certify(stopping("train_loss", tmp_path / "a"))
    by_name = {row.name: row for row in found.rows}
    assert by_name["held-out samples"].status == "certified" and not found.notes
    assert "ended the run early" in by_name["privacy of samples"].refusal


class Stop(Callback):
    def on_round(self, record: Mapping[str, Any], state: Any) -> str | None:
        return "enough"


def test_an_unknown_callback_is_noted(tmp_path: Path) -> None:
    execute(small(PRIVATE), tmp_path / "a", callbacks=[Stop()])
    found = certify(tmp_path / "a")
    assert found.rows[0].status == "certified"
    assert "(enough)" in found.notes[0] and "without early stopping" in found.notes[0]


# Preparation of samples, and the initial model


def of_config(tables: dict[str, Any]) -> Any:
    return choices_of(parse(tables), "", TriedSettings())


@pytest.mark.parametrize(
    "data",
    [
        {"normalize": "unit"},
        {"normalize": "ball"},
        {"center": "public"},
        {"features": "hog", "public": "mnist5k", "components": 20},
    ],
    ids=str,
)
def test_scaling_by_public_data_or_by_itself_is_free(data: dict[str, Any]) -> None:
    choices = of_config({"data": {"name": "fashion-mnist", **data}})
    assert not choices.notes and not choices.samples and not choices.held_out
    assert {choice.status for choice in named(choices.listed, "preparation of samples")} == {"free"}


def test_every_mode_is_known() -> None:
    """A new mode of normalize or center must be added to these tables, with its reason."""
    for key, sentences in (("normalize", SCALINGS), ("center", CENTERS)):
        assert {*get_args(FIELDS["data"][key].annotation)} - {"auto"} == {*sentences}


def test_a_mode_that_may_use_the_samples_is_refused(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {row.name for row in certify(alone).rows if row.status == "certified"}
    monkeypatch.delitem(SCALINGS, load(alone / "config.toml").data.normalize)
    found = certify(alone)
    refused = {row.name: row.refusal for row in found.rows if row.status == "refused"}
    assert "privacy of samples" in before
    for name in ("privacy of samples", "stability"):
        assert "Set [data] normalize = 'unit'" in refused[name]
    assert "normalize" in found.notes[0] and found.rows[0].status == "certified"


def test_scaled_rows_do_not_depend_on_other_samples() -> None:
    """What SCALINGS claims, checked with another sample changed."""
    from fedmuon.data.source import flat_rows

    rng = np.random.default_rng(0)
    centers = None, rng.standard_normal(6)
    for mode, center in [(mode, center) for mode in SCALINGS for center in centers]:
        rows = rng.integers(0, 9, (8, 6)).astype(float)
        other = rows.copy()
        other[3] = 77.0
        first, second = (flat_rows(samples, mode, None, center) for samples in (rows, other))
        others = np.arange(8) != 3
        assert (first[others] == second[others]).all()
        assert mode == "unit" or (first[3] != second[3]).any()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"name": "csv", "folder": "a.csv"}}, "how your data were prepared"),
        (
            {
                "data": {"name": "sst-2"},
                "task": {"name": "network", "model": "gpt", "weights": "gpt2"},
            },
            "weights in gpt2",
        ),
        ({"task": {"name": "network", "model": "my.package:Net"}}, "starts from trained weights"),
    ],
)
def test_what_cannot_be_seen_is_noted(tables: dict[str, Any], words: str) -> None:
    (note,) = of_config(tables).notes
    assert words in note
    assert any(f". {verb} " in note for verb in ("Scale", "Start", "Use")), "no remedy"


# A resumed run


@pytest.mark.parametrize("noise", [1.0, 24.0])
def test_a_run_resumed_with_other_noise_is_refused(noise: float, tmp_path: Path) -> None:
    class Fail(Callback):
        def on_round(self, record: Mapping[str, Any], state: Any) -> str | None:
            raise RuntimeError("killed")

    folder = tmp_path / "a"
    with pytest.raises(InputError, match="killed"):
        execute(small(PRIVATE), folder, callbacks=[Fail()])
    other = small({**PRIVATE, "privacy": {"noise": noise, "lot": 10}})
    with pytest.raises(InputError, match="noise"):
        execute(other, folder, resume=True)
    file = folder / "config.toml"
    changed = file.read_text().replace("noise = 12.0", f"noise = {noise}")
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(InputError):
        execute(other, folder, resume=True)
