"""Suites: stacks against runs made one by one, resuming, Ray, and what is refused."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import neighbour
from made_training import read
from typer.testing import CliRunner

from fedmuon.analysis.report.claims import gap_within_bound
from fedmuon.analysis.report.tables import ASIDE, RUNS, read_csv
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.core.tables import validate
from fedmuon.data.neighbours import draw, stack
from fedmuon.experiments.cli import app, main
from fedmuon.experiments.stability import neighbours
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies import stability
from fedmuon.experiments.studies.stability import Pair, Stability, Stack
from fedmuon.experiments.studies.stability_findings import findings, gap_and_bound
from fedmuon.experiments.suites import contents, suite
from fedmuon.experiments.suites.contents import Tables
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import begin, simulate

OWN = """
title = "Two by two"
seeds = [0, 1]
trials = 3

[grid]
train = [300, 600]
per-round = [2]
alpha = [0.5]
lr = [0.01, 0.05]
lambda = [1e-2, 1e-1]

[base.federation]
clients = 5
rounds = 6

[small]
seeds = [0]

[for.digits]
trials = 2
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    return str(file)


def work(
    name: str, data: str = "digits", scale: str = "full", changes: Tables | None = None
) -> Stability:
    found = kinds.find(name, data, scale, changes or {})
    assert isinstance(found, Stability)
    return found


def load(name: str, data: str, scale: str) -> stability.Suite:
    """The stability suite of that name, or in that file, for a data set at a scale."""
    return validate(stability.Suite, contents.at(contents.read(name), data, scale))


@pytest.mark.parametrize(
    ("name", "runs", "trajectories"), [("A1", 60, 660), ("A2", 30, 630), ("A3", 36, 756)]
)
def test_published_suites_have_the_published_size(name: str, runs: int, trajectories: int) -> None:
    held = load(name, "mnist", "full")
    stacks = stability.stacks(held, None, {})
    assert sum(len(one.pairs) for one in stacks) == runs == held.published["mnist"].runs
    assert sum(one.size for one in stacks) == trajectories
    assert {one.config.federation.clients for one in stacks} == {20}
    assert {one.config.federation.rounds for one in stacks} == {50}
    assert {one.config.local.momentum for one in stacks} == {0.9}
    assert {one.config.engine.dtype for one in stacks} == {"float64"}
    assert len({one.name for one in stacks}) == len(stacks)


def test_data_and_scale_change_a_suite_and_sizes_are_cut_to_the_source(own: str) -> None:
    assert load("A1", "cifar10", "full").grid.train == [10000]
    assert load(own, "digits", "full").trials == 2
    assert load(own, "mnist5k", "full").trials == 3
    assert load(own, "digits", "small").seeds == [0]
    cut = [one.config.data for one in work("A2", "mnist5k").cells]
    assert {one.train for one in cut} == {500, 1000, 2000, 4000}
    assert {one.test for one in cut} == {1000}


def one_by_one(what: Stack, pair: Pair) -> np.ndarray:
    """||X' - X||_F of a run's neighbours, every data set built and run on its own."""
    config = resolve(what.at(pair))
    source = read_source(config)
    data = build_data(config, source)
    stacked = stack(source, draw(data, source, what.trials, config.federation.seed))
    ends = []
    for s in range(1 + what.trials):
        alone = build_experiment(config, neighbour(data, stacked, s))
        fresh = begin(alone.recipe, alone.task, config.federation.seed)
        ends.append(simulate(alone, fresh).params["weight"][0].numpy())
    return np.array([np.linalg.norm(end - ends[0]) for end in ends[1:]])


def test_a_stack_says_what_becomes_of_its_gaps_after_the_changes(own: str) -> None:
    """As the same runs with them do, each on its own."""
    single, double = (
        work(own, changes={"engine": {"dtype": dtype}}).cells[0].compute()
        for dtype in ("float32", "float64")
    )
    assert "engine.dtype=float64" in single["gap_changes"] and not double["gap_changes"]
    alone = [{name: np.array([value]) for name, value in run.items()} for run in double["runs"]]
    verdicts = dict.fromkeys(gap_within_bound(run).verdict for run in alone)
    assert single["gap_then"] == double["gap_then"] == [*verdicts]


def test_a_stack_is_its_runs_one_by_one(own: str) -> None:
    what = work(own).cells[0]
    record = what.compute()
    moved = [line["perturbation"] for line in record["neighbours"]]
    expected = np.concatenate([one_by_one(what, pair) for pair in what.pairs])
    np.testing.assert_allclose(moved, expected, rtol=1e-9, atol=1e-15)
    wrong = np.concatenate([one_by_one(what, pair) for pair in what.pairs[::-1]])
    assert not np.allclose(moved, wrong, rtol=1e-3)


@pytest.mark.parametrize("local", [{}, {"schedule": "warm-up"}], ids=str)
def test_a_run_of_a_suite_is_the_run_of_the_stability_command(
    own: str, tmp_path: Path, local: dict[str, str]
) -> None:
    """With its schedule, too: its certificate is not that of steps that stay."""
    what = work(own, changes={"local": local} if local else None).cells[0]
    trials = what.at(what.pairs[2], trials=what.trials)
    record = neighbours.execute(parse(trials.model_dump(by_alias=True)), tmp_path / "run")
    run = what.compute()["runs"][2]
    for name, same in (("gap", "gap"), ("bound", "value"), ("gap_low", "gap_low")):
        assert run[name] == pytest.approx(record[same], rel=1e-9)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for name in ("accuracy", "test_loss"):  # what was learned stands beside the bound
        assert run[name] == pytest.approx(summary[name], rel=1e-9), name
    assert run["test_loss"] - run["train_loss"] == pytest.approx(run["table_gap"], rel=1e-9)


def test_both_kinds_of_constants_stand_side_by_side(own: str, tmp_path: Path) -> None:
    """The second is the first of the same suite with [stability] constants = "global"."""
    zero: Tables = {"task": {"initial": "zero"}}
    ball, wide = (
        work(own, changes={**zero, "stability": {"constants": kind}}).cells[0].compute()["runs"]
        for kind in ("ball", "global")
    )
    for one, other in zip(ball, wide, strict=True):
        assert one["bound_global"] == other["bound"] == other["bound_global"]
        assert one["share_global"] == other["share"] == other["share_global"]
        assert one["bound"] < other["bound"] and one["share"] > 2 * other["share"]
        assert 0 < one["range"] < other["range"] == 1
    out = tmp_path / "out"
    suite.execute(work(own, scale="small", changes=zero), out)
    found = findings(out, json.loads((out / "suite.json").read_text()))
    named = {row[0] for row in found.numbers}
    assert {"mean bound, constants of all models", "mean bound / B", "mean accuracy"} <= named
    assert found.runs and {"accuracy", "train loss", "test loss", "bound / B"} <= {*found.runs[1]}
    settings = {name: value for name, value, *_ in found.card}
    assert settings["η: step size"] == "0.01, 0.05" and ("seeds", "0") in found.about
    drawn = gap_and_bound(read_csv(out / "runs.csv", RUNS, ASIDE)).axes[0]
    assert "bound, constants of all models" in drawn.get_legend_handles_labels()[1]


HEAD = """
suite data n lr lambda alpha per_round seed gap bound mean_perturbation max_perturbation within
"""


def test_tables(own: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = suite.execute(work(own), out)
    runs, lines = read(out / "runs.csv"), read(out / "neighbours.csv")
    assert list(runs[0])[:13] == HEAD.split()
    assert (len(runs), len(lines), summary["trajectories"]) == (16, 32, 48)
    assert summary["guess"] == (10, 1797 // 5)
    assert {row["within"] for row in runs} == {"True"}
    assert all(float(row["perturbation"]) <= float(row["certificate"]) for row in lines)
    first = [float(row["perturbation"]) for row in lines[:2]]
    assert float(runs[0]["mean_perturbation"]) == pytest.approx(np.mean(first), rel=1e-12)
    assert float(runs[0]["max_perturbation"]) == max(first)
    beside = read(out / "summary.csv")
    assert [row["source"] for row in beside] == ["measured"]  # nothing is published of digits
    means = np.mean([float(row["table_gap"]) for row in runs])
    assert float(beside[0]["mean_gap"]) == pytest.approx(means, rel=1e-12)


TABLES = ("runs.csv", "neighbours.csv", "summary.csv")


def test_an_interrupted_suite_goes_on_to_the_same_bytes(own: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    suite.execute(work(own), whole)

    def interrupted(stacks):
        yield stacks[0], suite.timed(stacks[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.execute(work(own), broken, by=interrupted)
    counted = Mock(side_effect=suite.here)
    suite.execute(work(own), broken, resume=True, by=counted)
    assert len(counted.call_args.args[0]) == 3
    for name in TABLES:
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_tasks_give_the_same_results(
    cluster: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    suite.execute(work(own, scale="small"), tmp_path / "here")
    suite.execute(work(own, scale="small"), tmp_path / "ray", by=suite.Spread(cluster))
    monkeypatch.setattr(suite, "connected", started := Mock(side_effect=InputError("none")))
    with pytest.raises(InputError, match="none"):
        list(suite.Spread("local")(work(own).cells))
    started.assert_called_once_with("local")  # a Ray of its own, as a run's
    for name in ("runs.csv", "neighbours.csv"):
        one, other = read(tmp_path / "here" / name), read(tmp_path / "ray" / name)
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            for key in a:
                if a[key] != b[key]:
                    assert float(a[key]) == pytest.approx(float(b[key]), rel=1e-9, abs=1e-15), key


def test_the_longest_cells_begin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unlike stacks the largest would otherwise be waited for alone."""
    import ray

    begun: list[suite.Cell] = []
    task = Mock()
    task.remote = lambda one, cpus: begun.append(one) or one
    monkeypatch.setattr(suite, "connected", lambda address: contextlib.nullcontext(ray))
    monkeypatch.setattr(ray, "remote", lambda **resources: lambda function: task)
    monkeypatch.setattr(ray, "wait", lambda left, **how: (left[:1], left[1:]))
    monkeypatch.setattr(ray, "get", lambda one: {"seconds": suite.cost(one)})
    cells = kinds.find("A2", "mnist5k", "full", {}).cells
    found = list(suite.Spread("local")(cells))
    assert begun == [one for one, _ in found] and set(begun) == set(cells)
    sizes = [one.config.data.train for one in begun if isinstance(one, Stack)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    study = kinds.find("dp-bias", None, "small", {}).cells
    assert [suite.cost(one) for one in study] == [one.size for one in study]


def test_the_processes_of_a_machine_read_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedmuon.data.readers import _read_cached

    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path))
    config = parse({"data": {"name": "mnist5k"}})
    read: list[np.ndarray] = []
    cell = Mock(compute=lambda: read.append(read_source(config).inputs) or {})
    threads = torch.get_num_threads()
    _read_cached.cache_clear()
    try:
        suite.compute_apart(cell, 1.0)
    finally:
        torch.set_num_threads(threads)
        _read_cached.cache_clear()
    (inputs,) = read
    assert isinstance(inputs, np.memmap) and str(inputs.filename).startswith(str(tmp_path))
    own = read_source(config).inputs  # as before, outside
    assert not isinstance(own, np.memmap)
    np.testing.assert_array_equal(inputs, own)


@pytest.mark.slow
def test_ray_is_told_how_to_be_before_it_is_loaded() -> None:
    """It reads, when it is imported, whether a late call may start another Ray, open to all."""
    code = (
        "import sys\n"
        "from contextlib import contextmanager\n"
        "from fedmuon.experiments.suites import suite\n"
        "@contextmanager\n"
        "def connected(address):\n"
        "    sys.exit(3 if 'ray' in sys.modules else 7)\n"
        "    yield\n"
        "suite.connected = connected\n"
        "next(iter(suite.Spread('local')([None])))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 7


def test_what_is_refused(own: str, tmp_path: Path) -> None:
    def refused(sentence: str, *arguments: str) -> None:
        with pytest.raises(InputError, match=sentence):
            kinds.find(*arguments, {})  # type: ignore[call-arg]

    lacks = "suite {} does not exist, and there is no TOML file of that name: {}"
    refused(lacks.format("A9", "name one of A1, A2, A3"), "A9", "digits", "full")
    near = lacks.format("heavytail", "did you mean heavy-tail[?]$")
    refused(near, "heavytail", "", "full")
    refused("--scale big is unknown", "A1", "digits", "big")
    for old, new, said in (("trials = 3", "trails = 3", "did you mean trials"),
                           ("lr = [0.01, 0.05]", "lr = []", "lr"),
                           ("clients = 5", "clinets = 5", "did you mean clients")):  # fmt: skip
        Path(own).write_text(OWN.replace(old, new))
        refused(said, own, "digits", "full")


def test_folders_that_are_refused(own: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    suite.execute(work(own, scale="small"), out)
    with pytest.raises(InputError, match="not empty"):
        suite.execute(work(own, scale="small"), out)
    with pytest.raises(InputError, match="does not match this suite"):
        suite.execute(work(own), out, resume=True)
    before = (out / "runs.csv").read_bytes()
    file = sorted((out / "stacks").iterdir())[0]
    file.write_text(file.read_text()[:-5])
    with pytest.raises(InputError, match=r"does not contain a valid result of .*\. Remove this"):
        suite.execute(work(own, scale="small"), out, resume=True)
    assert (out / "runs.csv").read_bytes() == before
    with pytest.raises(SystemExit, match="2"):
        main(["suite", "A1", "--data", "digits", "--scale", "small", "--out", str(out)])


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_a_report(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="0"):
        main(["suite", own, "--data", "digits", "--scale", "small", "--out", str(out)])
    assert (out / "report.html").exists()
    assert json.loads((out / "suite.json").read_text())["trajectories"] == 24
    said = capsys.readouterr().out
    assert "Two by two on digits" in said
    commands = [line for line in said.splitlines() if line.startswith("To decide open claims: ")]
    assert commands  # longer than a terminal is wide, and each is one line to be pasted
    assert all(len(one) > 80 and " --out runs/" in one for one in commands)


def test_a_replacement_may_follow_anybodys_law(own: str) -> None:
    """Under `own` labels are the client's, under `any` everybody's; the census is no suite."""
    what = work(own).cells[0]
    config = resolve(what.config)
    source = read_source(config)
    data = build_data(config, source)
    foreign = {}
    for law in ("own", "any"):
        drawn = draw(data, source, 400, 0, law)  # type: ignore[arg-type]
        labels = source.labels[drawn[:, 2]]
        held = [set(data.samples(int(client))[1].tolist()) for client in drawn[:, 0]]
        foreign[law] = sum(int(y) not in own for y, own in zip(labels, held, strict=True))
    assert foreign["own"] == 0 < foreign["any"]
    with pytest.raises(InputError, match=r"Set stability\.neighbours to 'own' or 'any'"):
        work(own, changes={"stability": {"neighbours": "all"}}).cells[0].compute()


@pytest.mark.parametrize("unit", ["clients", "removed-clients"])
def test_neighbours_of_the_published_grids_differ_in_one_sample(own: str, unit: str) -> None:
    with pytest.raises(InputError, match=rf"unit = '{unit}', but .* one sample.* Leave unit out"):
        work(own, changes={"stability": {"unit": unit}})
    assert work(own, changes={"stability": {"unit": "samples"}}).cells


def test_resume_needs_something_to_resume(tmp_path: Path) -> None:
    """A folder that is missing or has no lock is refused, and is neither made nor changed."""
    for kind in (
        ["suite", "A2", "--scale=small"],
        ["sweep", "--grid=local.lr=0.1,0.2", "--select=train-loss"],
    ):
        for out, why in ((tmp_path / "none", "does not exist"), (tmp_path, "has no suite.lock")):
            found = CliRunner().invoke(app, [*kind, f"--out={out}", "--resume"])
            assert isinstance(found.exception, InputError), found.output
            assert why in str(found.exception) and "leave --resume out" in str(found.exception)
            assert not (tmp_path / "none").exists() and not [*tmp_path.iterdir()]


def test_shares_of_ray_tasks_need_ray(tmp_path: Path) -> None:
    for option in ("--cpus=2", "--gpus=1"):
        words = ["suite", "A2", "--scale=small", f"--out={tmp_path / 'a'}", option]
        found = CliRunner().invoke(app, words)
        assert isinstance(found.exception, InputError)
        assert "an effect only with --ray-address" in str(found.exception)
    assert not (tmp_path / "a").exists()
