"""Runs that end in the middle."""

from pathlib import Path
from typing import Any

import pytest

from fedmuon.config.load import Config
from fedmuon.experiments.run import execute


class Stop(Exception):
    """Ends a run in the middle."""


def run_until(last: int, config: Config, folder: Path, **given: Any) -> None:
    """Run a config until an error after its round `last`."""

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == last:
            raise Stop

    with pytest.raises(Stop):
        execute(config, folder, on_round_end=stop, **given)


def interrupted(record: Any, state: Any) -> None:
    """A callback that a Ctrl-C comes in."""
    raise KeyboardInterrupt
