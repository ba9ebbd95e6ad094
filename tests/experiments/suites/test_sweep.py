"""Sweeps: the grid, which point is best, worker processes, kill -9 and resume, and bad input."""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.nursery import Nursery
from conftest import quick

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.core.locks import writer
from fedmuon.experiments.cli import main
from fedmuon.experiments.studies.sweep import grid_search, parse_grid, seed_statistics
from fedmuon.experiments.suites.workers import Workers
from fedmuon.runs.directory import RunDirectory

SMALL: dict[str, Any] = {
    "data": {"name": "synthetic", "train": 60, "test": 40, "validation": 0.2, "dimension": 5},
    "federation": {"clients": 3, "per-round": 2, "rounds": 3, "seed": 4},
    "local": {"steps": 1},
    "engine": {"device": "cpu"},
    "output": {"checkpoint-every": 1},
}
STUDENT = {1: 12.706204736432095, 2: 4.302652729911275}  # t quantiles at 0.975, from a table


def first_reply(replies: Any) -> Any:
    return dict(replies[0].params)


def last_reply(replies: Any) -> Any:
    return dict(replies[-1].params)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(written(tmp_path / "small.toml", SMALL))


def written(file: Path, tables: dict[str, Any]) -> Path:
    """Write a config."""
    lines = []
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    file.write_text("\n".join(lines))
    return file


def command(*words: object) -> int:
    """The exit code of the command."""
    try:
        main([*map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def result_files(folder: Path) -> dict[str, bytes]:
    """The tables of a sweep."""
    return {file.name: file.read_bytes() for file in folder.glob("*.csv")}


# The grid


@pytest.mark.parametrize(("text", "values"), [
    ("local.lr=0.01,0.1", [0.01, 0.1]), ("local.recipe=fedavg, fedmuon", ["fedavg", "fedmuon"]),
    ("data.pad=true,false", [True, False]), ("local.lr=0.01:10:log4", [0.01, 0.1, 1.0, 10.0]),
    ("local.lr=0:1:lin5", [0.0, 0.25, 0.5, 0.75, 1.0]), ("local.lr=1:0:lin3", [1.0, 0.5, 0.0]),
    ("local.steps=1:16:log5", [1, 2, 4, 8, 16]), ("local.steps=1:16:log3", [1, 4, 16]),
    ("local.lr=1:10:log3", [1.0, 3.16227766017, 10.0]),
    ("local.recipe=./mine.py:made,fedavg", ["./mine.py:made", "fedavg"]),
])  # fmt: skip
def test_a_grid_is_a_list_or_a_range(text: str, values: list[Any]) -> None:
    (found,) = parse_grid([text]).values()
    assert found == values and [*map(type, found)] == [*map(type, values)]


def test_a_logarithmic_range_has_equal_quotients() -> None:
    (values,) = parse_grid(["local.lr=0.003:7:log9"]).values()
    quotients = [float(b) / float(a) for a, b in itertools.pairwise(values)]
    np.testing.assert_allclose(quotients, (7 / 0.003) ** (1 / 8), rtol=1e-10)
    (linear,) = parse_grid(["local.lr=0.003:7:lin9"]).values()
    assert not np.allclose(linear, values)


BAD = {
    "nothing": ([], "a sweep needs a grid"),
    "no values": (["--grid", "local.lr"], "does not have the form table.key=VALUES"),
    "no key": (["--grid", "lr=1,2"], "does not have the form table.key=VALUES"),
    "one point": (["--grid", "local.lr=0.1"], "has one value, 0.1, so there is nothing to compare"),
    "one value beside others": (
        ["--grid", "local.lr=0.1,1", "--grid", "local.recipe=fedavg"],
        "use --set local.recipe=fedavg",
    ),
    "twice a key": (["--grid", "local.lr=1,2", "--grid", "local.lr=3,4"], "the key local.lr twice"),
    "twice a value": (["--grid", "local.lr=1,1.0"], "the value 1 twice"),
    "empty value": (["--grid", "local.lr=1,,2"], "has an empty value"),
    "unknown key": (["--grid", "local.leraning=1,2"], "unknown key [local] leraning"),
    "unknown table": (["--grid", "locl.lr=1,2"], "unknown key"),
    "bad value": (["--grid", "local.lr=1,-2"], "[local] lr = -2 is not valid"),
    "range without a kind": (["--grid", "local.lr=1:10:7"], "as LOW:HIGH:log7 or LOW:HIGH:lin5"),
    "range without a count": (["--grid", "local.lr=1:10:log"], "as LOW:HIGH:log7 or LOW:HIGH:lin5"),
    "range of one": (["--grid", "local.lr=1:10:log1"], "must have 2 to 1000 values"),
    "range to 0": (["--grid", "local.lr=0:10:log3"], "which needs numbers above 0"),
    "range without length": (["--grid", "local.lr=1:1:lin3"], "ends with the same number"),
    "seeds in the grid": (["--grid", "federation.seed=1,2"], "set --seeds to their number"),
    "grid and set": (["--grid", "local.lr=1,2", "--set", "local.lr=3"], "--grid and --set both"),
    "no metric": (
        ["--grid", "local.lr=1,2", "--select", "validation-los"],
        "is not a metric of these runs: did you mean validation-loss",
    ),
    "unknown metric": (
        ["--grid", "local.lr=1,2", "--select", "perplexity"],
        " (for your own metric, write max:NAME or min:NAME)",
    ),
    "no way of a metric": (
        ["--grid", "local.lr=1,2", "--select", "best:train-loss"],
        "write max:train-loss or min:train-loss",
    ),
    "nothing reads it": (
        ["--grid", "local.server-momentum=0.1,0.2"], "server-momentum",
    ),
    "another engine": (
        ["--grid", "local.lr=1,2", "--set", "engine.name=deployment"], "use --jobs or --ray",
    ),
    "runs and clients on Ray": (
        ["--grid", "local.lr=1,2", "--set", "engine.name=ray", "--ray"], "already uses all workers",
    ),
    "jobs and ray": (["--grid", "local.lr=1,2", "--ray", "--jobs", "2"], "Remove --jobs, or"),
    "two rays": (
        ["--grid", "local.lr=1,2", "--ray", "--ray-address", "auto"], "Remove one of the two",
    ),
    "resume nowhere": (["--grid", "local.lr=1,2", "--resume"], "--resume needs --out"),
    "no jobs": (["--grid", "local.lr=1,2", "--jobs", "0"], "integer that is at least 1"),
    "too many runs": (
        ["--grid", "local.lr=1:10:log1000", "--seeds", "11"], "The sweep has 11000 runs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_written(
    case: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = BAD[case]
    out = [] if case == "resume nowhere" else ["--out", tmp_path / "out"]
    assert command("sweep", config, *words, *out) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_validation_metrics_need_validation_samples(config: str, tmp_path: Path) -> None:
    """With negative control: the same metric with samples is taken."""
    base = SMALL | {"data": {**SMALL["data"], "validation": 0}}
    grid = {"local.lr": [0.1, 1.0]}
    for select in (None, "validation-loss", "validation-accuracy"):
        with pytest.raises(InputError, match=r"Set data\.validation=0\.2 .*--select train-loss"):
            grid_search(base, grid, 1, select)
        assert grid_search(SMALL, grid, 1, select).metric is not None
    test = grid_search(base, grid, 1, "test-accuracy").metric
    assert test is not None and test.on_test and test.rising and test.name == "accuracy"
    own = grid_search(base, grid, 1, "max:test-loss").metric
    assert own is not None and own.rising


# What is best


def naive(tables: dict[str, Any], seeds: int, measure: str) -> tuple[float, float]:
    """Mean over seeds of runs made one by one, and half of Student's interval."""
    ends = []
    for seed in range(4, 4 + seeds):
        federation = {**SMALL["federation"], "seed": seed}
        ends.append(fedmuon.run({**SMALL, **tables, "federation": federation}).summary[measure])
    half = STUDENT[seeds - 1] * statistics.stdev(ends) / seeds**0.5
    return statistics.fmean(ends), half


@pytest.mark.usefixtures("undrawn")
def test_the_best_is_that_of_a_naive_loop(tmp_path: Path) -> None:
    rates, recipes = [0.01, 1.0, 100.0], ["fedavg", "fedmuon"]
    grid = {"local.lr": rates, "local.recipe": recipes}
    found = fedmuon.sweep(SMALL, grid=grid, seeds=3, out=tmp_path / "out")
    for recipe in recipes:
        loops = {
            lr: naive(
                {"local": {**SMALL["local"], "lr": lr, "recipe": recipe}}, 3, "validation_loss"
            )
            for lr in rates
        }
        best = min(loops, key=lambda lr: loops[lr][0])
        row = found.best[recipe]
        assert row["local.lr"] == best != max(loops, key=lambda lr: loops[lr][0])
        assert row["validation_loss"] == pytest.approx(loops[best][0], rel=1e-12)
        half = row["validation_loss_high"] - row["validation_loss"]
        assert half == pytest.approx(loops[best][1], rel=1e-9)
        assert half != pytest.approx(
            loops[best][1] * 1.959964 / STUDENT[2], rel=0.1
        )  # the normal's
    assert len(found.table) == 6 and len(found.runs) == 18
    assert [one.summary["seed"] for one in found.runs[:3]] == [4, 5, 6]


@pytest.mark.usefixtures("undrawn")
def test_accuracy_is_better_when_higher_and_test_data_are_named(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", config, "--grid", "local.lr=0.001,1", "--set", "federation.rounds=6"]
    assert command(*words, "--select", "test-accuracy", "--out", tmp_path / "a") == 0
    said = " ".join(capsys.readouterr().out.split())
    held = json.loads((tmp_path / "a" / "sweep.json").read_text())
    rates = {row["local.lr"]: row["accuracy"] for row in held["table"]}
    assert rates[1.0] > rates[0.001] and held["best"]["fedmuon"]["local.lr"] == 1.0
    assert "selected on test data" in said and held["selected_on_test_data"]
    assert command(*words, "--select", "validation-accuracy", "--out", tmp_path / "b") == 0
    assert "selected on test data" not in capsys.readouterr().out


def test_a_sweep_can_be_shown_again(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert command("sweep", config, "--grid", "local.lr=0.001,1", "--out", out) == 0
    for name in ("sweep.png", "curves.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    first = capsys.readouterr().out
    assert command("show", out) == 0
    again = capsys.readouterr().out
    assert "Best of fedmuon: local.lr=" in again and again in first
    assert command("show", out, "--clients") == 2
    assert f"--clients works only for a single run, but {out} is a sweep" in plain(
        capsys.readouterr().err
    )
    assert command("report", out) == 2
    assert "is a sweep, which has no report page" in plain(capsys.readouterr().err)
    (out / "sweep.json").write_text("{}")
    assert command("show", out) == 2


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_goes_on_with_the_same_objects_and_samples_only(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells are sealed by their configs, which name a file and not what it holds."""
    table = tmp_path / "table.csv"
    rows = ["a,b,label", *(f"{k % 7},{k % 5},{k % 2}" for k in range(80))]
    table.write_text("\n".join(rows))
    keys = ["data.name=csv", f"data.folder={table}", "data.train=60", "data.test=20",
            "federation.clients=3", "federation.rounds=2"]  # fmt: skip
    words = ["sweep", *(f"--set={one}" for one in keys), "--grid", "local.lr=0.1,1", "--select",
             "train-loss", "--out", tmp_path / "out"]  # fmt: skip
    assert command(*words) == 0 and command(*words, "--resume") == 0
    before = result_files(tmp_path / "out")
    table.write_text("\n".join([rows[0], *rows[:0:-1]]))
    capsys.readouterr()
    assert command(*words, "--resume") == 2
    assert "the data differ from the data" in plain(capsys.readouterr().err)
    assert result_files(tmp_path / "out") == before

    grid = {"local.lr": [0.1, 1.0]}
    fedmuon.sweep(
        SMALL, grid=grid, select="train-loss", aggregate=first_reply, out=tmp_path / "python"
    )
    with pytest.raises(InputError, match="the aggregate differs from the aggregate"):
        fedmuon.sweep(
            SMALL,
            grid=grid,
            select="train-loss",
            aggregate=last_reply,
            out=tmp_path / "python",
            resume=True,
        )


@pytest.mark.usefixtures("undrawn")
def test_what_python_hands_over_is_checked() -> None:
    for grid, words in (
        ({"local.lr": 1.0}, "needs a list of two or more values"),
        ({"local.lr": []}, "needs a list of two or more values"),
        (["local.lr=1,2"], "grid is .*, but it must be a dict"),
        ({"data.validation": [0.1, 0.2]}, "decides what is measured or written"),
        ({"output.clients": [True, False]}, "decides what is measured or written"),
    ):
        with pytest.raises(InputError, match=words):
            fedmuon.sweep(SMALL, grid=grid)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="select is 3, but it must be the name of a metric"):
        fedmuon.sweep(SMALL, grid={"local.lr": [0.1, 1.0]}, select=3)  # type: ignore[arg-type]
    found = fedmuon.sweep(SMALL, grid={"local.steps": [*np.arange(1, 3)]}, select="train-loss")
    assert [row["local.steps"] for row in found.table] == [1, 2]


def test_the_run_that_cannot_be_made_is_named(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--grid", "federation.aggregate=mean,krum", "--select", "train-loss"]
    assert command("sweep", config, *words, "--out", tmp_path / "out") == 2
    assert "the run aggregate=krum,seed=4: krum cannot use faulty = 1" in plain(
        capsys.readouterr().err
    )


@pytest.mark.usefixtures("undrawn")
def test_an_end_that_is_a_limit_is_not_warned_of() -> None:
    grid = {"local.steps": [1, 2], "local.server-lr": [0.0, 0.001]}
    base = SMALL | {"local": {"recipe": "fedadam"}}
    said = fedmuon.sweep(base, grid=grid, select="train-loss").warnings
    assert not any("local.server-lr of fedadam, 0," in one for one in said)
    assert not any("steps of fedadam, 1," in one for one in said)


@pytest.mark.usefixtures("undrawn")
def test_a_best_value_at_the_edge_is_warned_of() -> None:
    """Here fedmuon is best at 10 and fedavg at 100."""

    def warned(*rates: float) -> list[str]:
        grid = {"local.lr": [*rates], "local.recipe": ["fedavg", "fedmuon"]}
        return fedmuon.sweep(SMALL, grid=grid, select="train-loss").warnings

    assert warned(1.0, 10.0, 100.0, 1e4) == []
    both = warned(1.0, 10.0)
    assert len(both) == 2
    assert "the best local.lr of fedavg is 10, the largest value of the grid" in both[0]
    (smallest,) = warned(10.0, 100.0, 1e4)
    assert "the best local.lr of fedmuon is 10, the smallest value of the grid" in smallest


def test_points_that_differ_in_unread_keys_alone_are_one(tmp_path: Path) -> None:
    grid = {"local.recipe": ["fedavg", "fedmuon"], "local.momentum": [0.0, 0.5, 0.9]}
    work = grid_search(SMALL, grid, 1, "train-loss")
    assert [one.name for one in work.cells] == [
        "recipe=fedavg,seed=4",
        *(f"recipe=fedmuon,momentum={one},seed=4" for one in ("0", "0.5", "0.9")),
    ]  # fmt: skip


def test_a_point_of_which_a_seed_diverged_is_never_best() -> None:
    work = grid_search(SMALL, {"local.lr": [0.1, 1.0, 2.0]}, 2, "train-loss")
    ends = {0.1: (0.5, 0.6), 1.0: (0.1, float("nan")), 2.0: (0.7, 0.7)}
    records = [
        {"head": {"seed": 4}, "ends": {"train_loss": value}, "note": "lost" * int(np.isnan(value))}
        for values in ends.values() for value in values
    ]  # fmt: skip
    found = work.summary(records)
    assert found["best"]["fedmuon"]["local.lr"] == 0.1 and found["diverged"] == 1
    assert [row["diverged"] for row in found["table"]] == [0, 1, 0]
    (beside,) = [one for one in found["warnings"] if "diverged" in one]
    assert "best point of fedmuon lies next to local.lr = 1, where 1 of 2 runs diverged" in beside
    assert "Choose local.lr farther from 1, or tune with more seeds" in beside
    lost = work.summary(
        [{**one, "ends": {"train_loss": float("nan")}, "note": "lost"} for one in records]
    )
    assert lost["best"] == {} and "because every point of the grid diverged" in lost["warnings"][0]


def test_only_neighbours_along_one_key_of_the_best_point_are_warned_of() -> None:
    """The best point is at 0.1 and 3 steps: diverged are a neighbour, a diagonal and a far one."""
    grid = {"local.lr": [10.0, 0.01, 1.0, 0.1], "local.steps": [3, 1]}  # in any order
    work = grid_search(SMALL, grid, 1, "train-loss")
    lost = [(0.1, 1), (1.0, 1), (10.0, 3)]
    records: list[dict[str, Any]] = []
    for one in work.cells:
        lr, steps = dict(one.point).values()
        value = float("nan") if (lr, steps) in lost else 0.1 if (lr, steps) == (0.1, 3) else 0.5
        records.append({"head": {"seed": 4}, "ends": {"train_loss": value},
                        "note": "lost" * int(np.isnan(value))})  # fmt: skip
    found = [one for one in work.summary(records)["warnings"] if "diverged" in one]
    assert len(found) == 1 and "lies next to local.steps = 1, where 1 of 1 runs" in found[0]


# Processes


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_workers_give_what_one_process_gives(config: str, tmp_path: Path) -> None:
    words = ["sweep", config, "--grid", "local.lr=0.1,10", "--seeds", "2"]
    assert command(*words, "--out", tmp_path / "one") == 0
    assert command(*words, "--jobs", "2", "--out", tmp_path / "two") == 0
    assert result_files(tmp_path / "one") == result_files(tmp_path / "two") != {}
    for run in (tmp_path / "one" / "runs").iterdir():
        other = tmp_path / "two" / "runs" / run.name / "model.safetensors"
        assert (run / "model.safetensors").read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_the_libraries_are_loaded_once_for_many_runs(tmp_path: Path) -> None:
    """All cells are answered by the two processes that were forked at the beginning."""
    work = grid_search(SMALL, {"local.lr": [0.1, 0.2, 0.4, 0.8]}, 2, "train-loss")
    with Workers(2) as workers:
        assert len([*workers(work.within(tmp_path)[:1])]) == 1  # they are there by now
        nursery = workers._nursery
        assert nursery is not None
        children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children")
        before = children.read_text().split()
        assert len(before) == 2
        assert len([*workers(work.within(tmp_path)[1:])]) == 7
        assert children.read_text().split() == before
    assert not any(Path(f"/proc/{one}").exists() for one in before)


@pytest.mark.slow
def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    work = grid_search(endless(), {"local.lr": [0.1, 0.2]}, 1, "train-loss")
    with (
        pytest.raises(InputError, match=r"The worker process that computed lr=0\.\d,.* died"),
        Workers(2) as workers,
    ):
        answers = workers(work.within(tmp_path))
        nursery = workers._nursery
        assert nursery is not None
        children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children")

        def kill(number: int, frame: Any) -> None:
            os.kill(int(children.read_text().split()[0]), signal.SIGKILL)

        before = signal.signal(signal.SIGALRM, kill)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            while not children.exists() or len(children.read_text().split()) < 2:
                signal.setitimer(signal.ITIMER_REAL, 1)
            next(iter(answers))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


# A worker that gets SIGTERM while it leaves the context in which its exceptions are caught.
SIGNAL_AT_THE_END = """
import contextlib, signal
from multiprocessing import Pipe

class Late(contextlib.suppress):
    def __exit__(self, *error):
        signal.raise_signal(signal.SIGTERM)
        return super().__exit__(*error)

contextlib.suppress = Late
from fedmuon.experiments.suites import workers
parent_end, worker_end = Pipe()
parent_end.close()
workers._serve(worker_end, 1.0)
"""


def test_a_worker_that_is_told_to_end_twice_prints_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SIGNAL_AT_THE_END], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as worker:
        assert worker.wait(60) == -signal.SIGTERM
        assert worker.stderr is not None and worker.stderr.read() == b""


@pytest.mark.slow
def test_an_object_that_others_cannot_import_needs_one_job(tmp_path: Path) -> None:
    """With negative control: in one process it is taken."""
    inputs = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int64)
    tables = {"federation": {"clients": 3, "rounds": 2}, "data": {"test": 10, "train": 50}}
    given: dict[str, Any] = {"data": (inputs, labels), "grid": {"local.lr": [0.1, 1.0]}}
    one = fedmuon.sweep(tables, **given, select="train-loss")
    two = fedmuon.sweep(tables, **given, select="train-loss", jobs=2)
    assert one.table == two.table
    with pytest.raises(InputError, match="sent to another process"):
        fedmuon.sweep(tables, **given, schedule=lambda r: 1.0, select="train-loss", jobs=2)
    fedmuon.sweep(tables, **given, schedule=lambda r: 1.0, select="train-loss")


# Kill -9, and what a folder may hold


def endless() -> dict[str, Any]:
    """Runs that take some seconds."""
    return SMALL | {"federation": {**SMALL["federation"], "rounds": 600}}


def rounds_of(run: Path) -> int:
    file = run / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("jobs", quick([1, 2], [1]))
def test_a_killed_sweep_resumes_to_the_same_bytes(
    jobs: int, forks: Nursery, tmp_path: Path
) -> None:
    """Finished cells are not computed again, and begun ones continue from their checkpoint."""
    file = written(tmp_path / "long.toml", SMALL)
    words = ["sweep", str(file), "--grid", "federation.rounds=5,400"]
    assert command(*words, "--out", tmp_path / "whole") == 0
    words += ["--jobs", str(jobs)]
    out = tmp_path / "killed"
    process = forks.start([*words, "--out", str(out)])
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        done = [*out.glob("cells/*.json")]
        begun = [one for one in out.glob("runs/*") if 5 < rounds_of(one) < 200]
        if done and begun:
            break
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    process.wait()
    while any(map(writer, out.glob("runs/*"))):  # workers are dying
        time.sleep(0.01)
    done = {one: one.stat().st_mtime_ns for one in out.glob("cells/*.json")}
    run = max(out.glob("runs/*/checkpoint*.safetensors"), key=os.path.getmtime).parent
    saved = max(RunDirectory(run).saved_rounds())  # of two, as the newest may be half written
    made = (run / "initial.safetensors").stat().st_mtime_ns
    assert len(done) == 1 and saved > 1 and not (out / "sweep.json").exists()
    kept = (run / "rounds.jsonl").read_text().splitlines()[:saved]
    assert command(*words, "--out", out, "--resume") == 0
    assert all(one.stat().st_mtime_ns == when for one, when in done.items())
    assert (run / "initial.safetensors").stat().st_mtime_ns == made
    assert (run / "rounds.jsonl").read_text().splitlines()[:saved] == kept  # seconds, too
    assert result_files(out) == result_files(tmp_path / "whole") != {}


@pytest.mark.usefixtures("undrawn")
def test_a_folder_of_another_sweep_is_left_alone(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With negative control: more values and seeds of the same sweep join its folder."""
    words = ["sweep", config, "--out", tmp_path / "out", "--select", "train-loss"]
    assert command(*words, "--grid", "local.lr=0.1,1") == 0
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    for other in (
        ["--grid", "local.lr=0.1,1"],
        ["--grid", "local.lr=0.1,2", "--resume"],
        ["--grid", "local.lr=0.1,1", "--set", "local.steps=2", "--resume"],
        ["--grid", "local.momentum=0.1,0.2", "--resume"],
    ):
        assert command(*words, *other) == 2
        assert "another" in capsys.readouterr().err
        assert {file: file.read_bytes() for file in before} == before
    assert command("run", "--resume", "--out", tmp_path / "out") == 2
    assert "contains a sweep. To resume it, repeat" in plain(capsys.readouterr().err)
    runs = {file: one for file, one in before.items() if "runs" in file.parts}
    assert command(*words, "--grid", "local.lr=0.1,1,5", "--seeds", "2", "--resume") == 0
    assert {file: file.read_bytes() for file in runs} == runs
    assert len((tmp_path / "out" / "cells.csv").read_text().splitlines()) == 1 + 6


# Seeds


@pytest.mark.usefixtures("undrawn")
def test_several_seeds_are_resumed_with_the_same_config_only(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", tmp_path / "out"]
    assert command("run", config, "--seeds", "2", *out) == 0
    for words, said in (
        (
            ["--resume"],
            "contains runs with several seeds. To resume them, pass the same config, options",
        ),
        (
            [config, "--resume"],
            "contains runs with several seeds. To resume them, pass the same config",
        ),
        ([config], "is not empty. Choose another folder with --out."),
        (["--resume", "--seeds", "3"], "suite.lock does not match the config and options that"),
        ([config, "--resume", "--seeds", "1"], "You can raise --seeds."),
    ):
        capsys.readouterr()
        assert command("run", *words, *out) == 2
        assert said in plain(capsys.readouterr().err)
    assert command("run", config, "--seeds", "3", "--resume", *out) == 0
    capsys.readouterr()
    assert command("run", config, "--seeds", "2", "--out", tmp_path) == 2
    assert plain(capsys.readouterr().err).rstrip().endswith("choose another folder with --out")


@pytest.mark.usefixtures("undrawn")
def test_seeds_of_a_run_are_summarized(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("run", config, "--seeds", "3", "--out", tmp_path / "out") == 0
    ends = [
        fedmuon.run(SMALL | {"federation": {**SMALL["federation"], "seed": seed}}).summary
        for seed in (4, 5, 6)
    ]
    held = json.loads((tmp_path / "out" / "sweep.json").read_text())
    rows = {row["metric"]: row for row in held["table"]}
    assert held["seeds"] == [4, 5, 6] and held["again"].startswith("fedmuon run ")
    for metric in ("accuracy", "validation_loss"):
        values = [one[metric] for one in ends]
        half = STUDENT[2] * statistics.stdev(values) / 3**0.5
        assert rows[metric]["mean"] == pytest.approx(statistics.fmean(values), rel=1e-12)
        assert rows[metric]["high"] - rows[metric]["mean"] == pytest.approx(half, rel=1e-9)
    assert "validation loss" in capsys.readouterr().out
    assert command("run", config, "--seeds", "3", "--watch", "--out", tmp_path / "b") == 2
    assert command("run", config, "--jobs", "2", "--out", tmp_path / "b") == 2
    assert not (tmp_path / "b").exists()


def test_one_seed_has_no_interval() -> None:
    one, two = seed_statistics([0.5]), seed_statistics([0.5, 0.7])
    assert one["mean"] == 0.5 and np.isnan([one["low"], one["high"]]).all()
    half = STUDENT[1] * statistics.stdev([0.5, 0.7]) / 2**0.5
    assert two["high"] - two["mean"] == pytest.approx(half, rel=1e-9)


@pytest.mark.slow
def test_ray_is_started_once_and_gives_the_same(config: str, tmp_path: Path) -> None:
    words = ["sweep", config, "--grid", "local.lr=0.1,1", "--seeds", "2"]
    assert command(*words, "--out", tmp_path / "one") == 0
    assert command(*words, "--ray", "--out", tmp_path / "ray") == 0
    assert result_files(tmp_path / "one") == result_files(tmp_path / "ray") != {}


def test_a_sweep_over_lr_says_that_aux_lr_does_not_follow() -> None:
    network = {"data": {"name": "mnist5k", "train": 500, "test": 50},
               "task": {"name": "network", "model": "mlp"}}  # fmt: skip
    grid: dict[str, Any] = {"local.lr": [0.01, 0.02]}
    (said,) = grid_search(network, grid, 1, "train-loss").fixed_auxiliary()
    assert said.startswith("local.aux-lr is 0.05 at every point, because it does not change")
    both = grid | {"local.aux-lr": [0.01, 0.1]}
    assert grid_search(network, both, 1, "train-loss").fixed_auxiliary() == []
    assert grid_search(SMALL, grid, 1, "train-loss").fixed_auxiliary() == []  # without routes
    named = network | {"local": {"recipe": "fedavg"}}
    assert grid_search(named, grid, 1, "train-loss").fixed_auxiliary() == []  # one step size
