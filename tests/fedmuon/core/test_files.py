"""Only its owner may read what a run writes. Nobody waits for named pipes, sockets, devices,
folders and looping links where files are due."""

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import quick, small
from small_suites import TRAINING

import fedmuon
from fedmuon.config.load import load
from fedmuon.core import files
from fedmuon.core.arrays import to_numpy
from fedmuon.core.errors import InputError
from fedmuon.core.locks import LOCK, held
from fedmuon.data.readers import read_idx
from fedmuon.experiments import spending
from fedmuon.experiments.auditing import one_run
from fedmuon.experiments.cli import main
from fedmuon.experiments.inspect.index import runs_below
from fedmuon.experiments.inspect.listing import comparison, row
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.experiments.inspect.watch import about, rounds_since, runs_of
from fedmuon.experiments.report import gather
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import finished_run, neighbours
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.suites import suite
from fedmuon.federated.build import resolve
from fedmuon.federated.rounds import begin
from fedmuon.privacy.ledger import Ledger
from fedmuon.runs.directory import FAILED
from fedmuon.runs.prepare import prepare

pytestmark = pytest.mark.timeout(120)  # whoever waits for a pipe waits for ever
PRIVATE = {"local": {"recipe": "dp-muon"}, "privacy": {"lot": 5.0, "noise": 1.0}}
TO_BE = (LOCK, FAILED, "objects.json")  # which other runs have
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
def test_only_the_owner_reads_a_run(tables: dict[str, Any], ends: bool, tmp_path: Path) -> None:
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


def test_neighbours_locks_and_logs_are_for_their_owner(tmp_path: Path) -> None:
    neighbours.execute(small(stability={"trials": 2}), tmp_path / "neighbours")
    with held(tmp_path / "locked"):
        assert not open_to_others(tmp_path / "locked")
    run = prepare(resolve(small()), tmp_path / "run")
    recipe, task = run.experiment.recipe, run.experiment.task
    params = begin(recipe, task, run.config.federation.seed).params
    run.directory.checkpoint(0, to_numpy(params))  # makes a log, too
    assert not open_to_others(tmp_path) and (tmp_path / "run" / "rounds.jsonl").exists()


def stop(record: dict[str, Any]) -> None:
    if record["round"] == 5:
        raise KeyboardInterrupt


def test_a_run_with_logs_of_an_older_version_is_resumed(tmp_path: Path) -> None:
    """They were open to everyone (0644), and keep the mode that their owner left them."""
    config = small(SAMPLES)
    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path, on_round_end=stop)
    for name in LOGS:
        (tmp_path / name).chmod(0o644)
    summary = execute(None, tmp_path, resume=True)
    assert summary["rounds"] == config.federation.rounds
    assert set(open_to_others(tmp_path)) <= LOGS


def socket_at(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(file.parent):
        one.bind(file.name)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "named pipe": os.mkfifo,
    "socket": socket_at,
    "folder": Path.mkdir,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "looping link": lambda file: file.symlink_to(file.name),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    SPECIAL[kind](file := tmp_path / "one")
    said = f"{file} is a {kind}, not a regular file: choose another path"
    for use in (
        files.read_bytes,
        files.read_text,
        files.require_regular,
        load,
        read_idx,
        Ledger.read,
        lambda file: files.append(file, ["line"]),
        lambda file: held(file.parent, file.name).__enter__(),
    ):
        with pytest.raises(InputError) as refused:
            use(file)
        assert said in str(refused.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("special")
    found = {name: root / name for name in ("plain", "private", "neighbours", "cut", "suite")}
    short = {"federation": {"rounds": 3}}
    execute(small(short), found["plain"])
    execute(small(short, **PRIVATE), found["private"])
    neighbours.execute(small(short, stability={"trials": 2}), found["neighbours"])
    with pytest.raises(KeyboardInterrupt):
        execute(small(), found["cut"], on_round_end=stop)
    suite.execute(work_of(root), found["suite"])
    return found


def work_of(root: Path) -> suite.Work:
    (root / "two.toml").write_text(TRAINING)
    return find(str(root / "two.toml"), "synthetic", "small", {})


def watched(folder: Path) -> object:
    return [(about(name, one), rounds_since(one, "")) for name, one in runs_of(folder).items()]


def result(folder: Path) -> object:
    found = fedmuon.Result(folder)
    return found.summary, found.rounds, found.config, found.model


READERS: dict[str, Callable[[Path], object]] = {
    "show": lambda folder: RunStatus(folder).damage,
    "ls": lambda folder: [row(one, folder) for one in runs_below(folder)],
    "compare": lambda folder: comparison({"": [folder]}),
    "report": gather,
    "watch": watched,
    "result": result,
    "spent": spending.spent,
    "bound": finished_run.from_directory,
    "audit": one_run.read_finished,
    "resumed": lambda folder: execute(None, folder, resume=True),
    "measured": lambda folder: neighbours.execute(None, folder, resume=True),
}


@pytest.mark.parametrize(
    "kind", quick(["plain", "private", "neighbours", "cut"], ["neighbours", "cut"])
)
def test_no_reader_of_a_run_waits(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Whichever file it stands for; a finished run is damaged, and the file is named."""
    names = sorted(one.name for one in folders[kind].iterdir())
    assert len(names) >= 8
    for name in (*names, *TO_BE):
        run = shutil.copytree(folders[kind], tmp_path / name)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        if kind != "cut" and name not in TO_BE:
            assert f"{run / name} is a named pipe, not a regular file" in RunStatus(run).damage
            assert row(RunStatus(run), tmp_path)["state"] == "damaged"
        for read in READERS.values():
            with contextlib.suppress(InputError):
                read(run)


def test_no_reader_of_a_suite_waits(folders: dict[str, Path], tmp_path: Path) -> None:
    work, copy = work_of(tmp_path), tmp_path / "copy"
    for file in sorted(folders["suite"].rglob("*")):
        if file.is_dir():
            continue
        for read in (gather, lambda folder: suite.execute(work, folder, resume=True)):
            shutil.copytree(folders["suite"], copy)
            (place := copy / file.relative_to(folders["suite"])).unlink()
            os.mkfifo(place)
            with contextlib.suppress(InputError):
                read(copy)
            shutil.rmtree(copy)


@pytest.mark.parametrize("command", [["run"], ["suite"], ["plan"]])
def test_a_named_config_is_a_file(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(pipe := tmp_path / "config.toml")
    with pytest.raises(SystemExit) as ended:
        main([*command, str(pipe)])
    assert ended.value.code == 2
    assert f"{pipe} is a named pipe, not a regular file" in capsys.readouterr().err


def test_a_config_may_come_from_a_pipe_that_the_shell_opened() -> None:
    """As `fedmuon run <(command)` and `command | fedmuon run /dev/stdin` have it."""
    out, into = os.pipe()
    with os.fdopen(into, "w") as written:
        written.write("[federation]\nrounds = 7\n")
    try:
        assert load(Path(f"/dev/fd/{out}")).federation.rounds == 7
    finally:
        os.close(out)
