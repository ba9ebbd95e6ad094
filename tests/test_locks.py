"""One writer a folder: refused by name while the holder lives, free as soon as it is dead."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from conftest import small

from fedmuon.errors import InputError
from fedmuon.experiments.laboratory import stability
from fedmuon.experiments.run import execute
from fedmuon.experiments.suites import suite
from fedmuon.locks import LOCK, held

HOLD = (
    "import sys, time; from pathlib import Path; from fedmuon.locks import held\n"
    "with held(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder's lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


def test_a_second_writer_is_refused_by_name_and_a_dead_one_forgotten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with holder(out) as process:
        works = (
            lambda: execute(small(), out),
            lambda: execute(small(), out, resume=True),
            lambda: stability.execute(small(), out),
        )
        for work in works:
            with pytest.raises(InputError, match=f"written by process {process.pid} on .*wait"):
                work()
        assert [file.name for file in out.iterdir()] == [LOCK]
        process.send_signal(signal.SIGKILL)
        process.wait()
        execute(small(), out)  # its lock died with it
    assert not (out / LOCK).exists() and (out / "summary.json").exists()


def test_a_lock_that_is_given_back_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        assert process.stdin
        threading.Timer(0.3, process.stdin.close).start()
        with held(tmp_path, patience=60.0):
            assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    assert not (tmp_path / LOCK).exists()


def test_another_thread_is_another_writer(tmp_path: Path) -> None:
    refused: list[str] = []

    def write() -> None:
        try:
            execute(small(), tmp_path / "out")
        except InputError as error:
            refused.append(str(error))

    with held(tmp_path / "out"):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert len(refused) == 1 and f"process {os.getpid()}" in refused[0]


def test_a_thread_may_take_its_own_lock_again(tmp_path: Path) -> None:
    with held(tmp_path), held(tmp_path):
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()
    with held(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()  # nothing was written


def _count(folder: Path, pipe: Connection) -> None:
    """Add one to a number in a file, by reading and writing it, forty times."""
    for _ in range(40):
        with held(folder, patience=60.0):
            file = folder / "number"
            file.write_text(str(int(file.read_text()) + 1))
    pipe.send("done")


def test_no_two_are_ever_inside_at_once(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=_count, args=(tmp_path, sender)) for _, sender in ends]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert (tmp_path / "number").read_text() == "80"


def test_a_suite_is_held_too(tmp_path: Path) -> None:
    from made_training import training

    work = training(tmp_path)
    with holder(tmp_path / "out"), pytest.raises(InputError, match="is being written by"):
        suite.execute(work, tmp_path / "out")


def test_two_private_runs_release_each_round_once(tmp_path: Path) -> None:
    """Two commands at once on one folder: one runs, the other is refused."""
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "fedmuon.experiments.cli", "run", "--out", str(out),
        "--set=data.name=synthetic", "--set=local.recipe=dp-sgd", "--set=privacy.noise=1.0",
        "--set=privacy.lot=20.0", "--set=data.train=400", "--set=data.test=100",
        "--set=federation.rounds=30", "--set=local.steps=2",
    ]  # fmt: skip
    root = Path(__file__).resolve().parent.parent
    pair = [
        subprocess.Popen(command, cwd=root, text=True, stdout=subprocess.DEVNULL,
                         stderr=subprocess.PIPE)
        for _ in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240)[1] for process in pair]
    assert sorted(process.returncode for process in pair) == [0, 2], said
    (refusal,) = [text for text in said if text]
    assert refusal.startswith("fedmuon: ") and refusal.count("\n") == 1
    assert "is being written by process" in refusal or "is not empty" in refusal
    lines = (out / "ledger.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["round"] for line in lines] == list(range(30))


def test_links_in_a_circle_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(InputError, match="cannot create"), held(tmp_path / "circle"):
        pass
