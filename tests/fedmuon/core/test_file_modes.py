"""Whatever a run writes, only its owner may read."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import small

from fedmuon.core.locks import held
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import neighbours
from fedmuon.federated.build import resolve
from fedmuon.federated.rounds import begin
from fedmuon.runs.loop import prepare

SAMPLES: dict[str, Any] = {
    "local": {"recipe": "dp-sgd", "lr": 0.1},
    "privacy": {"noise": 1.0, "lot": 6.0, "bound": 0.2},
}
CLIENTS: dict[str, Any] = {
    "local": {"recipe": "fedmuon", "lr": 0.1},
    "privacy": {"level": "client", "noise": 1.0, "bound": 0.2},
}
LOGS = {"rounds.jsonl", "ledger.jsonl"}


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """No umask hides what a file is opened with."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> dict[str, str]:
    """Files that anyone but their owner may read or write, with their modes."""
    files = [one for one in folder.rglob("*") if one.is_file()]
    assert files
    modes = {str(one.relative_to(folder)): stat.S_IMODE(one.stat().st_mode) for one in files}
    return {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


@pytest.mark.parametrize("tables", [{}, SAMPLES, CLIENTS], ids=["plain", "samples", "clients"])
@pytest.mark.parametrize("ends", [True, False])
def test_files_of_a_run_are_for_their_owner(
    tables: dict[str, Any], ends: bool, tmp_path: Path
) -> None:
    """Those of a finished run, and of one that fails between two checkpoints."""

    def watch(record: dict[str, Any]) -> None:
        assert not open_to_others(tmp_path)  # the lock and checkpoints are there now
        if not ends and record["round"] == 5:
            raise RuntimeError("stop")

    config = small(**tables)
    if ends:
        execute(config, tmp_path, on_round_end=watch)
    else:
        with pytest.raises(RuntimeError, match="stop"):
            execute(config, tmp_path, on_round_end=watch)
    assert not open_to_others(tmp_path)
    assert (tmp_path / "ledger.jsonl").exists() == bool(tables)


def test_files_of_a_stability_run_are_for_their_owner(tmp_path: Path) -> None:
    neighbours.execute(small(stability={"trials": 2}), tmp_path)
    assert not open_to_others(tmp_path)


def test_a_lock_is_for_its_owner(tmp_path: Path) -> None:
    with held(tmp_path):
        assert not open_to_others(tmp_path)


def test_a_log_is_made_for_its_owner_whoever_makes_it(tmp_path: Path) -> None:
    """A checkpoint does, where there is none."""
    run = prepare(resolve(small()), tmp_path)
    recipe, task = run.experiment.recipe, run.experiment.task
    run.directory.checkpoint(begin(recipe, task, run.config.federation.seed))
    assert not open_to_others(tmp_path) and (tmp_path / "rounds.jsonl").exists()


def test_a_run_with_logs_of_an_older_version_is_resumed(tmp_path: Path) -> None:
    """They were open to everyone (0644), and keep the mode that their owner left them."""

    def stop(record: dict[str, Any]) -> None:
        raise RuntimeError("stop")

    config = small(SAMPLES)
    with pytest.raises(RuntimeError, match="stop"):
        execute(config, tmp_path, on_round_end=stop)
    for name in LOGS:
        (tmp_path / name).chmod(0o644)
    summary = execute(None, tmp_path, resume=True)
    assert summary["rounds"] == config.federation.rounds
    assert set(open_to_others(tmp_path)) <= LOGS
