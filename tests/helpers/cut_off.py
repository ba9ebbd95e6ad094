"""Runs that end in the middle."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fedmuon.config.load import Config
from fedmuon.experiments.run import execute
from fedmuon.federated.build import resolve
from fedmuon.federated.rounds import run_rounds
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import Run, prepare

WALL = ("seconds", "train_seconds", "check")  # fields of a record that depend on the machine


class Stop(Exception):
    """Ends a run in the middle."""


class Killed(BaseException):
    """Ends a run as `kill -9` does. Unlike after other errors, no checkpoint is saved."""


def run_until(last: int, config: Config, folder: Path, **given: Any) -> None:
    """Run a config until an error after its round `last`."""

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == last:
            raise Stop

    with pytest.raises(Stop):
        execute(config, folder, on_round_end=stop, **given)


def killed(config: Config, folder: Path, rounds: Iterable[int]) -> None:
    """Kill a run after each of these rounds, resume it each time, and let it end."""
    for last in rounds:

        def kill(record: dict[str, Any], last: int = last) -> None:
            if record["round"] == last:
                raise Killed

        with pytest.raises(Killed):
            execute(config, folder, on_round_end=kill, resume=(folder / "config.toml").exists())
    execute(config, folder, resume=True)


def same_states(folder: Path, other: Path) -> None:
    """Two runs have the same model, the same states, and the same timetable, if they have one."""
    names = {path.name for path in other.iterdir() if path.suffix in (".safetensors", ".npz")}
    assert "model.safetensors" in names
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def same_runs(folder: Path, other: Path) -> None:
    """Two runs also have the same records, except for wall times."""
    same_states(folder, other)
    assert without_wall_times(folder) == without_wall_times(other)


def without_wall_times(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, without the fields that depend on the machine."""
    records = [json.loads(line) for line in (folder / "rounds.jsonl").open()]
    return [{key: record[key] for key in record if key not in WALL} for record in records]


def dying(run: Run, at: int = 0, after: int = 0) -> None:
    """Train with an engine that dies before it has told of the round `at`, or after one."""

    def engine(experiment: Any, state: Any) -> Any:
        for done in run_rounds(experiment, state):
            if done.state.round == at:
                raise KeyboardInterrupt
            yield done
            if done.state.round == after:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, engine)


def broken_off(config: Config, out: Path, at: int = 0, after: int = 0) -> None:
    """Begin or resume a run that is `dying`."""
    dying(prepare(resolve(config), out, resume=(out / "config.toml").exists()), at, after)


def interrupted(record: Any, state: Any) -> None:
    """A callback that a Ctrl-C comes in."""
    raise KeyboardInterrupt
