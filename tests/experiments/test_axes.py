"""The horizontal axis of curves: rounds, simulated seconds, and megabytes sent so far."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app, main
from fedmuon.experiments.inspect.listing import side_by_side
from fedmuon.experiments.results import Result
from fedmuon.runs.directory import AXES, UNTRAINED, from_start, positions

CONFIG: dict[str, Any] = {
    "data": {"name": "synthetic", "train": 60, "test": 30, "dimension": 5, "minimum": 5},
    "federation": {"clients": 4, "per-round": 2, "rounds": 4},
    "output": {"evaluate-every": 2},
}
CLOCK = {"devices": {"mode": "deadline", "select": 3, "speeds": "log-normal"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    for name, more in (("plain", {}), ("clock", CLOCK)):
        fedmuon.run(CONFIG | more, out=folder / name)
    return folder


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("x", AXES)
def test_evaluated_rounds_lie_where_the_run_was_by_then(x: str, runs: Path) -> None:
    """Sums over all rounds, also those without a measurement; in float64 by numpy."""
    held = lines_of(runs / "clock")
    up, down = (np.array([one[name] for one in held]) for name in ("bytes_up", "bytes_down"))
    wanted = {
        "rounds": np.arange(1.0, 5.0),
        "seconds": np.array([one["simulated_seconds"] for one in held]),
        "bytes-up": np.cumsum(up) / 1e6,
        "bytes": np.cumsum(up + down) / 1e6,
    }[x]
    assert positions(held, x) == pytest.approx(wanted, rel=1e-12, abs=0)
    assert (np.diff(wanted) > 0).all() and sum(down) > sum(up)  # three are asked, two used
    loss, accuracy = Result(runs / "clock").plot(x=x).axes
    train = next(line for line in loss.lines if line.get_label() == "train loss")
    assert np.asarray(train.get_xdata()) == pytest.approx([0, *wanted[[1, 3]]], rel=1e-12, abs=0)
    assert loss.get_xlabel() == accuracy.get_xlabel() == AXES[x]


def test_curves_begin_with_the_untrained_model(tmp_path: Path) -> None:
    """Zero weights give each of two labels 1/2: a cross-entropy of log 2. Unfinished runs and those
    of earlier versions begin with their first round."""
    inputs, labels = torch.randn(90, 5), torch.arange(90) % 2
    config = CONFIG | {"data": {"train": 60, "test": 30, "minimum": 5}}
    module = torch.nn.Linear(5, 2)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    found = fedmuon.run(config, data=(inputs, labels), task=module, out=tmp_path / "a")
    start, *rest = from_start(found.rounds, found.summary)
    assert start["round"] == start["bytes_up"] == 0 and rest == found.rounds
    assert start["train_loss"] == pytest.approx(np.log(2)) == start["test_loss"]
    assert set(start) - {"round", "bytes_up", "bytes_down"} < set(rest[-1])
    old = {name: one for name, one in found.summary.items() if name != UNTRAINED}
    assert from_start(found.rounds, None) == from_start(found.rounds, old) == found.rounds
    assert from_start([], found.summary) == []
    unseen = found.summary | {"unseen_loss_before": 0.7, "unseen_loss": 0.6}
    assert from_start(found.rounds, unseen)[0] == start | {"unseen_loss": 0.7}


def test_means_over_seeds_lie_at_the_mean_place(runs: Path, tmp_path: Path) -> None:
    """Runs of two seeds end their rounds at different simulated times."""
    config = CONFIG | CLOCK | {"federation": CONFIG["federation"] | {"seed": 1}}
    other = fedmuon.run(config, out=tmp_path / "other")
    figure = fedmuon.compare([runs / "clock", other]).plot(x="seconds")
    ends = [positions(lines_of(one), "seconds")[-1] for one in (runs / "clock", other.path)]
    assert ends[0] != ends[1]
    drawn = [line for line in figure.axes[0].lines if line.get_label() == "train loss"]
    assert np.asarray(drawn[0].get_xdata())[-1] == pytest.approx(np.mean(ends), rel=1e-12)


def test_an_axis_that_a_run_does_not_have_is_an_error(runs: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"plain does not contain the value simulated_seconds .* Set \[devices\] mode",
    ):
        Result(runs / "plain").plot(x="seconds")
    with pytest.raises(
        InputError, match=r"x = 'second' is not a valid axis.* did you mean seconds"
    ):
        Result(runs / "clock").plot(x="second")
    for command in (["show", str(runs / "clock")], ["compare", str(runs / "clock")]):
        error = CliRunner().invoke(app, [*command, "--x", "foo"]).exception
        assert isinstance(error, InputError)
        assert str(error).startswith("--x foo is not") and ", ".join(AXES) in str(error)
    old = [{"round": 1, "bytes_up": 3}]
    assert positions(old, "bytes-up") == [3e-6]
    with pytest.raises(
        InputError,
        match="does not contain the value bytes_down of round 1, because an earlier version",
    ):
        positions(old, "bytes")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("words", "code", "said"), [
    (["show", "clock", "--x", "bytes-up"], 0, "axis of the curves: MB sent up"),
    (["show", "plain", "--x", "seconds"], 2, "Set [devices] mode"),
    (["show", "clock", "--x", "bytes", "--clients"], 2, "Remove --x or --clients"),
    (["compare", "clock", "--x", "seconds"], 2, "Add --figure FILE"),
    (["compare", "clock", "plain", "--x", "seconds", "--figure", "a.png"], 2, "[devices]"),
    (["compare", "clock", "plain", "--x", "bytes", "--figure", "a.png"], 0, "a.png"),
    (["show", "clock", "--x", "seconds", "--html", "a.html"], 0, "a.html"),
])  # fmt: skip
def test_commands_take_an_axis(
    words: list[str], code: int, said: str, runs: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    places = [str(runs / one) if one in ("clock", "plain") else one for one in words]
    with pytest.raises(SystemExit, match=str(code)):
        main(places)
    told = capsys.readouterr()
    assert said in " ".join((told.out + told.err).split())
    if "a.html" in words:
        assert "By simulated seconds" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_compared_runs_say_what_zero_means_for_a_clock(runs: Path, tmp_path: Path) -> None:
    """Other keys keep their zeros."""
    late = {"mode": "deadline", "deadline": 50.0, "dropout": 0.01, "speeds": "log-normal"}
    fedmuon.run(CONFIG | {"devices": late}, out=tmp_path / "late")
    _, _, _, (heads, rows, _) = side_by_side([runs / "clock", tmp_path / "late"])
    cells = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    first, second = cells.values()
    assert (first["select"], first["deadline"], first["dropout"]) == ("3", "none", "0.0")
    assert (second["select"], second["deadline"], second["dropout"]) == (
        "per-round",
        "50.0",
        "0.01",
    )
