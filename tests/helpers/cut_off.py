"""Runs that end in the middle."""

from pathlib import Path
from typing import Any

import pytest

from fedmuon.config.load import Config
from fedmuon.experiments.run import execute
from fedmuon.federated.build import resolve
from fedmuon.federated.rounds import run_rounds
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import Run, prepare


class Stop(Exception):
    """Ends a run in the middle."""


def run_until(last: int, config: Config, folder: Path, **given: Any) -> None:
    """Run a config until an error after its round `last`."""

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == last:
            raise Stop

    with pytest.raises(Stop):
        execute(config, folder, on_round_end=stop, **given)


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
