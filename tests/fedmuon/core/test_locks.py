"""One writer a folder: refused by name while the holder lives, free as soon as it is dead."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos.nursery import Nursery
from conftest import small
from made_training import training

from fedmuon.core.errors import InputError
from fedmuon.core.locks import LOCK, held
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import neighbours
from fedmuon.experiments.suites import suite

HOLD = (
    "import sys, time; from pathlib import Path; from fedmuon.core.locks import held\n"
    "with held(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
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
            lambda: neighbours.execute(small(), out),
            lambda: suite.execute(training(tmp_path), out),
        )
        for work in works:
            with pytest.raises(InputError, match=f"in use by process {process.pid} on .*wait"):
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


COUNT = (
    "import sys; from pathlib import Path; from fedmuon.core.locks import held\n"
    "folder = Path(sys.argv[1])\n"
    "for _ in range(40):\n"
    "    with held(folder, patience=60.0):\n"
    "        file = folder / 'number'\n"
    "        file.write_text(str(int(file.read_text()) + 1))"
)


def test_no_two_are_ever_inside_at_once(tmp_path: Path) -> None:
    """Two processes add one to a number in a file, by reading and writing it, forty times each."""
    (tmp_path / "number").write_text("0")
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert (tmp_path / "number").read_text() == "80"


@pytest.mark.slow
def test_two_private_runs_release_each_round_once(forks: Nursery, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        "run", "--out", str(out), "--set=data.name=synthetic", "--set=local.recipe=dp-sgd",
        "--set=privacy.noise=1.0", "--set=privacy.lot=20.0", "--set=data.train=400",
        "--set=data.test=100", "--set=federation.rounds=15", "--set=local.steps=2",
    ]  # fmt: skip
    pair = [forks.start(command) for _ in range(2)]
    ends = [process.wait(240) for process in pair]
    assert sorted(ended.code for ended in ends) == [0, 2], ends
    (refusal,) = [ended.err for ended in ends if ended.code]
    assert refusal.startswith("fedmuon: ") and refusal.count("\n") == 1
    assert "is in use by process" in refusal or "is not empty" in refusal
    lines = (out / "ledger.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["round"] for line in lines] == list(range(15))


def test_links_in_a_circle_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(InputError, match="cannot create"), held(tmp_path / "circle"):
        pass
