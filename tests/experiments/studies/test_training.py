"""Suites of training runs: real runs, resuming, divergence, and damaged tables."""

import html
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import without_rendering
from made_suite import summed
from made_training import TINY, read, training

from fedmuon.config.load import load
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.experiments.report import gather, write_report
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.studies.training import MEASURES, TrainingRun
from fedmuon.experiments.suites import contents, suite
from fedmuon.federated.build import resolve
from fedmuon.federated.rounds import run_rounds
from fedmuon.runs.directory import RunDirectory
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import prepare


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished suite with its report."""
    folder = tmp_path_factory.mktemp("training")
    suite.execute(training(folder), folder / "out")
    with without_rendering():
        write_report(folder / "out")
    return folder / "out"


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> tuple[Path, str]:
    """A copy of the finished suite, and its file's text."""
    shutil.copytree(done, tmp_path / "out")
    return tmp_path / "out", (done.parent / "own.toml").read_text()


def test_every_cell_is_a_run_of_its_own(done: Path) -> None:
    cells = training(done.parent).cells
    assert [one.name for one in cells] == [
        "fedmuon-e-1-seed0", "fedmuon-e-1-seed1", "fedavg-seed0", "fedavg-seed1",
    ]  # fmt: skip
    for one, row in zip(cells, read(done / "runs.csv"), strict=True):
        folder = RunDirectory(done / "runs" / one.name)
        held, summary = load(folder.path / "config.toml"), folder.summary()
        assert held == one.config and summary is not None
        assert row["run"] == one.name and int(row["seed"]) == held.federation.seed
        assert [float(row[name]) for name in MEASURES] == [summary[name] for name in MEASURES]


def test_curves_are_the_evaluated_rounds_and_the_end(done: Path) -> None:
    rows = [row for row in read(done / "curves.csv") if row["variant"] == "FedAvg"]
    assert [int(row["round"]) for row in rows] == [2, 4, 5, 2, 4, 5]  # 5 is the last, unevaluated
    records = RunDirectory(done / "runs" / "fedavg-seed0").records()
    for row in rows[:2]:
        record = records[int(row["round"]) - 1]
        assert float(row["train_loss"]) == record["train_loss"]
        assert float(row["train_seconds"]) == record["train_seconds"]


def test_training_seconds_leave_evaluation_out(done: Path) -> None:
    for folder in (done / "runs").iterdir():
        records = RunDirectory(folder).records()
        trained = [record["train_seconds"] for record in records]
        assert trained == sorted(trained) and trained[0] > 0
        assert all(record["train_seconds"] <= record["seconds"] for record in records)
        assert trained[-1] < records[-1]["seconds"]  # rounds 2 and 4 were evaluated


def test_the_summary_has_means_beside_published_values(done: Path) -> None:
    rows, runs = read(done / "summary.csv"), read(done / "runs.csv")
    assert [row["source"] for row in rows] == ["measured", "measured", "a table"]
    values = [float(row["test_loss"]) for row in runs if row["variant"] == "FedAvg"]
    assert float(rows[1]["test_loss"]) == pytest.approx(np.mean(values), rel=1e-12)
    assert float(rows[1]["test_loss_sd"]) == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert rows[2]["train_loss"] == "0.25" and rows[2]["accuracy"] == ""


def test_the_report_judges_and_draws(done: Path) -> None:
    (part,) = gather(done)
    assert [claim.holds for claim in part.claims[:2]] == [True, None]
    assert {picture.name for picture in part.pictures} == {"curves", "curves-seconds"}
    assert ("  a table (digits)", "0.25", "–", "–", "–") in part.numbers
    text = (done / "report.html").read_text()
    assert "Two recipes on digits" in text and "A note." in text and "What this" not in text
    assert json.loads((done / "suite.json").read_text())["kind"] == "training"


def test_data_scale_and_sizes(tmp_path: Path) -> None:
    assert training(tmp_path, data="mnist5k").cells[2].config.local.lr == 0.25
    assert len(training(tmp_path, scale="small").cells) == 2
    first = training(tmp_path).cells[0].config.data
    assert (first.train, first.test) == (1438, 359)  # all of 1,797 digits


def stop_after(three: int, one: TrainingRun) -> None:
    """Drive a cell's run as it would itself, up to an interrupt."""

    def engine(experiment, state):
        for finished in run_rounds(experiment, state):
            if finished.state.round > three:
                raise KeyboardInterrupt
            yield finished

    assert one.folder is not None
    train(prepare(resolve(one.config), one.folder), engine)


def test_an_interrupted_suite_goes_on(tmp_path: Path, done: Path) -> None:
    """The second run stops after three rounds, and ends as if it never had."""
    out, work = tmp_path / "out", training(tmp_path, (done.parent / "own.toml").read_text())

    def interrupted(cells):
        yield cells[0], suite.timed(cells[0])
        stop_after(3, cells[1])

    with pytest.raises(KeyboardInterrupt):
        suite.execute(work, out, by=interrupted)
    broken = RunDirectory(out / "runs" / work.cells[1].name)
    before = broken.records()[-1]
    assert before["round"] == 3
    suite.execute(work, out, resume=True)
    after = broken.records()
    assert after[2] == before and after[3]["train_seconds"] > before["train_seconds"]
    names = ("variant", "seed", "round", *MEASURES)
    one, other = (
        [[row[name] for name in names] for row in read(folder / "curves.csv")]
        for folder in (out, done)
    )
    assert one == other


def test_a_suite_goes_on_to_more_seeds(tmp_path: Path, copy: tuple[Path, str]) -> None:
    """Nothing is computed twice, and the end is as if all seeds had been asked for.

    With another setting, or from a lock that is damaged, nothing goes on."""
    (out, text), computed = copy, []

    def noted(cells):
        computed.extend(one.name for one in cells)
        yield from suite.here(cells)

    open_claims = [one for one in gather(out)[0].claims if one.command]
    for one in open_claims:
        assert one.command.endswith(f" --out {out} --resume") and " --seeds " in one.command
    assert open_claims
    three = training(tmp_path, text, seeds=3)
    suite.execute(three, out, resume=True, by=noted)
    assert len(computed) == 2 and all(name.endswith("-seed2") for name in computed)
    suite.execute(three, tmp_path / "afresh")
    whole, again = (
        [{**row, "train_seconds": "", "seconds": ""} for row in read(folder / "curves.csv")]
        for folder in (out, tmp_path / "afresh")
    )
    assert whole == again and {row["seed"] for row in whole} == {"0", "1", "2"}
    about = json.loads((out / "suite.json").read_text())
    assert about["seeds"] == [0, 1, 2] and about["again"].endswith("--scale full --seeds 3")
    before = (out / "suite.lock").read_bytes()
    for other in (
        training(tmp_path, text, seeds=4, scale="small"),
        training(tmp_path, text.replace("lr = 0.5", "lr = 0.4", 1), seeds=4),
        training(tmp_path, text.replace("FedAvg", "FEDAVG"), seeds=4),  # the same files' names
    ):
        with pytest.raises(InputError, match="does not match this suite"):
            suite.execute(other, out, resume=True)
    older = json.dumps([one for one in json.loads(before) if one != "a seal a cell"]).encode()
    for damaged in (older, before[:-9], b"[]", b"5", b"null", before.replace(b"0.5", b"0.6", 1)):
        (out / "suite.lock").write_bytes(damaged)
        with pytest.raises(InputError, match="does not match this suite"):
            suite.execute(training(tmp_path, text, seeds=4), out, resume=True)
    assert len(read(out / "curves.csv")) == len(whole)


def test_a_suite_goes_back_to_fewer_seeds_and_never_further_than_it_was_sound(
    tmp_path: Path, copy: tuple[Path, str]
) -> None:
    out, text = copy
    before = (out / "suite.lock").read_bytes()
    cell = next((out / "cells").iterdir())
    sound = cell.read_bytes()
    cell.write_bytes(sound[:-9])
    with pytest.raises(InputError, match="does not contain a valid result"):
        suite.execute(training(tmp_path, text, seeds=3), out, resume=True)
    assert (out / "suite.lock").read_bytes() == before
    cell.write_bytes(sound)

    def none(cells):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.execute(training(tmp_path, text, seeds=40), out, resume=True, by=none)
    wide = (out / "suite.lock").read_bytes()
    rows = read(out / "runs.csv")
    suite.execute(training(tmp_path, text), out, resume=True)
    assert read(out / "runs.csv") == rows and (out / "suite.lock").read_bytes() == wide != before


def test_one_damaged_run_of_a_suite_costs_no_other(tmp_path: Path, copy: tuple[Path, str]) -> None:
    out, text = copy
    run = sorted((out / "runs").iterdir())[0]
    (run / "summary.json").write_text("{}")
    rows = read(out / "runs.csv")
    with pytest.raises(InputError, match=f"remove {re.escape(str(run))} and continue with"):
        suite.execute(training(tmp_path, text), out, resume=True)
    shutil.rmtree(run)
    suite.execute(training(tmp_path, text), out, resume=True)
    assert read(out / "runs.csv") == rows


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_report_says_that_going_on_to_more_seeds_was_broken_off(
    tmp_path: Path, copy: tuple[Path, str]
) -> None:
    """With the command that goes on, on the page and in the terminal; not before and after."""
    out, text = copy
    three = training(tmp_path, text, seeds=3)

    def stopping(cells):
        yield from itertools.islice(suite.here(cells), 1)
        raise Interrupted

    def told() -> list[str]:
        said = []
        page = write_report(out, said.append).read_text(encoding="utf-8")
        assert all(html.escape(one) in page for one in said) and (
            "requested runs, which" in page
        ) == any(said)
        return said

    assert told() == []
    with pytest.raises(Interrupted):
        suite.execute(three, out, resume=True, by=stopping)
    (said,) = told()
    assert said.startswith("These are 4 of the 6 requested runs, which have 3 seeds. To")
    assert said.endswith(f" --scale full --seeds 3 --out {out} --resume")
    assert "run fedmuon suite " in said
    suite.execute(three, out, resume=True)
    assert told() == []


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_diverges_is_a_row(tmp_path: Path) -> None:
    text = TINY.replace(
        "[base.local]", '[base.task]\nname = "network"\nmodel = "mlp"\n\n[base.local]'
    )
    text = text.replace('recipe = "fedavg"\nlr = 0.5', 'recipe = "fedavg"\nlr = 1e15')
    text = text.replace('dtype = "float64"', 'dtype = "float32"')  # which overflows sooner
    text = text.replace('recipe = "fedmuon"\nlr = 0.5', 'recipe = "fedavg"\nlr = 0.05')
    work = training(tmp_path, text, scale="small")
    suite.execute(work, tmp_path / "out")
    rows = read(tmp_path / "out" / "runs.csv")
    assert rows[0]["note"] == "" and "finite" in rows[1]["note"]
    assert rows[1]["train_loss"] == "nan" and float(rows[0]["train_loss"]) > 0
    write_report(tmp_path / "out")
    (part,) = gather(tmp_path / "out")
    assert [claim.holds for claim in part.claims] == [True, False, None]
    assert "1 of 1 diverged" in part.numbers[1]


def test_damaged_tables_are_refused(done: Path, tmp_path: Path) -> None:
    for name in ("suite.json", "curves.csv", "runs.csv"):
        (tmp_path / name).write_bytes((done / name).read_bytes())
    lines = (tmp_path / "curves.csv").read_text().splitlines(keepends=True)
    (tmp_path / "curves.csv").write_text("".join(lines[:-1]))
    summed(tmp_path)
    with pytest.raises(InputError, match="do not match"):
        gather(tmp_path)


def test_a_damaged_run_of_a_finished_suite_is_refused(
    tmp_path: Path, copy: tuple[Path, str]
) -> None:
    out, text = copy
    work = training(tmp_path, text)
    suite.execute(work, out, resume=True)
    model = out / "runs" / work.cells[0].name / "model.safetensors"
    sound = model.read_bytes()
    model.write_bytes(sound[:-1] + b"?")
    with pytest.raises(InputError, match=r"model\.safetensors does not match"):
        suite.execute(work, out, resume=True)
    model.write_bytes(sound)
    model.with_name("summary.json").unlink()
    with pytest.raises(InputError, match=r"summary\.json"):
        suite.execute(work, out, resume=True)


@pytest.mark.parametrize("key", ["train", "test"])
def test_sizes_that_are_no_numbers_are_refused(key: str, tmp_path: Path) -> None:
    text = TINY.replace("[base.federation]", f'[base.data]\n{key} = "\\r\\n"\n\n[base.federation]')
    assert text != TINY
    with pytest.raises(InputError, match=rf"\[data\] {key} = .* is not valid"):
        training(tmp_path, text)


def test_sizes_are_not_checked_with_the_default_number_of_clients() -> None:
    tables: contents.Tables = {
        "data": {"name": "digits", "train": 100},
        "federation": {"clients": 1},
    }
    assert contents.sizes_that_fit(tables)["train"] == 100
    with pytest.raises(InputError, match="each of 20 clients"):  # the control
        contents.cell({"data": tables["data"]})


def test_a_claim_names_unequal_rounds(tmp_path: Path, done: Path) -> None:
    (equal,) = gather(done)
    assert not any("numbers of rounds" in claim.also for claim in equal.claims)
    text = (
        'kind = "training"\ntitle = "Unequal"\ndata = "synthetic"\nseeds = [0, 1]\n'
        "[base.data]\ntrain = 60\ntest = 30\n"
        "[base.federation]\nclients = 2\nper-round = 2\nrounds = 2\n[base.local]\nsteps = 1\n"
        '[variants.FedAvg.local]\nrecipe = "fedavg"\n[variants.FedMuon.federation]\nrounds = 3\n'
        '[claims.loss]\nbetter = "FedMuon"\nthan = "FedAvg"\nmeasure = "test_loss"\n'
        '[sweep]\nkey = "local.steps"\nvalues = [1, 2]\nlabel = "E"\n'
        '[claims.steps]\nkind = "falling"\nbetter = "FedAvg"\nmeasure = "test_loss"\n'
    )
    (tmp_path / "unequal.toml").write_text(text)
    suite.execute(find(str(tmp_path / "unequal.toml"), None, "full", {}), tmp_path / "out")
    (part,) = gather(tmp_path / "out")
    assert "The numbers of rounds differ: FedMuon 3 and FedAvg 2." in part.claims[0].also
    assert "numbers of rounds" not in part.claims[1].also  # one variant along the sweep
