"""Ctrl-C and SIGTERM: what was done is saved, one sentence says how to go on, and it is true."""

import contextlib
import importlib
import os
import shlex
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from chaos.laboratory import without_notes
from conftest import small

from fedmuon.core import locks, signals
from fedmuon.core.errors import Interrupted
from fedmuon.core.locks import held
from fedmuon.core.signals import deferred, interruptible
from fedmuon.experiments.cli import main
from fedmuon.experiments.run import execute
from fedmuon.runs.directory import RunDirectory
from fedmuon.server import stopping

DATA = ("--set=data.name=synthetic", "--set=data.train=400", "--set=data.test=100")
ROUNDS = 60
LONG = (*DATA, f"--set=federation.rounds={ROUNDS}", "--set=output.checkpoint-every=1000")


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def stopped(arguments: Sequence[str], ready: Callable[[], bool], number: signal.Signals) -> int:
    """The exit code of a command that is sent a signal as soon as it is ready."""

    def send() -> None:
        while not ready():
            time.sleep(0.002)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    sender.join()
    return int(end.value.code or 0)


def again(said: str) -> list[str]:
    """The command of the one sentence on stderr, as somebody would paste it."""
    said = without_notes(said) + "\n"
    assert said.startswith("fedmuon: interrupted: ") and said.count("\n") == 1, said
    return shlex.split(said.split("resume with: ")[1])[1:]


def same(a: Path, b: Path, *names: str) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    whole = tmp_path / "whole"
    main_ends(["run", "--out", str(whole), *LONG])
    for number in (signal.SIGINT, signal.SIGTERM):
        goes_on(tmp_path / f"my {number.name}", whole, capsys, number)


def goes_on(out: Path, whole: Path, capsys: pytest.CaptureFixture, number: signal.Signals) -> None:
    log = out / "rounds.jsonl"
    run = ["run", "--out", str(out), *LONG]
    assert stopped(run, lambda: lines(log) > 20, number) == 128 + number
    assert (out / "checkpoint.safetensors").exists() and lines(log) > 20
    command = again(capsys.readouterr().err)
    before = lines(log)
    main_ends(command)
    assert before > 20 and same(out, whole, "model.safetensors", "momentum.safetensors")
    assert lines(log) == lines(whole / "rounds.jsonl") == ROUNDS


def test_in_the_last_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the last round, and may take longer than all of them: those before it are
    saved."""
    config = small(output={"evaluate-every": 1000, "checkpoint-every": 1000})
    directory, rounds = RunDirectory(tmp_path / "run"), config.federation.rounds
    with monkeypatch.context() as patch:
        patch.setattr("fedmuon.runs.observers.evaluation.evaluate", interrupted)
        with pytest.raises(Interrupted):
            execute(config, directory.path)
    assert len(directory.records()) == rounds - 1
    assert directory.saved_round() == rounds - 1
    execute(None, directory.path, resume=True)
    execute(config, tmp_path / "whole")
    assert same(directory.path, tmp_path / "whole", "model.safetensors", "momentum.safetensors")


def test_going_on_reads_the_rounds_no_more_often_than_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To cut them back, which gives their seconds, too, and to count drops at the end."""
    config = small(output={"checkpoint-every": 3})

    def stop(record: Mapping[str, Any], state: object) -> None:
        if record["round"] == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        execute(config, tmp_path / "a", callbacks=[stop])
    before, reads, records = RunDirectory(tmp_path / "a").records(), [], RunDirectory.records
    monkeypatch.setattr(
        RunDirectory, "records", lambda self: (reads.append(self), records(self))[1]
    )
    execute(None, tmp_path / "a", resume=True)
    assert len(reads) == 1
    after = records(RunDirectory(tmp_path / "a"))
    assert after[len(before)]["train_seconds"] >= before[-1]["train_seconds"]


def test_a_wish_waits_for_who_listens() -> None:
    """It raises nothing where it comes; a second one does what the system does."""
    stopping.forget()
    with interruptible(), deferred(stopping.ask):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(Interrupted) as heard:
            stopping.pause(60)
    assert heard.value.number == signal.SIGTERM
    stopping.forget()
    stopping.pause(0.0)


def interrupted(*given: object) -> None:
    raise Interrupted


def main_ends(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code


def test_a_signal_during_a_callback_is_heard() -> None:
    """Python drops what is raised in a callback of a weak reference."""

    class Thing:
        pass

    thing, called = Thing(), []

    def callback(reference: object) -> None:
        called.append(reference)
        signal.raise_signal(signal.SIGTERM)

    watched = weakref.ref(thing, callback)
    start = time.monotonic()
    with pytest.raises(Interrupted), interruptible():
        del thing
        while time.monotonic() < start + 10:
            time.sleep(0.005)
    assert called and watched() is None and time.monotonic() < start + 5


def test_before_anything_was_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def ready() -> bool:
        return signal.getsignal(signal.SIGTERM) is signals._unwind  # Ray may have left one

    text = ("--set=data.name=pydoc", "--set=task.name=network", "--set=task.model=gpt")
    arguments = ["run", "--out", str(tmp_path / "out"), *text]
    assert stopped(arguments, ready, signal.SIGTERM) == 143
    said = capsys.readouterr().err
    assert said.startswith("fedmuon: interrupted: ") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_lock_is_taken_and_given_back_whole(tmp_path: Path) -> None:
    """A signal at any call in it: nothing is left, and the lock can be had again."""
    moment = 0
    for moment in range(1, 900):
        folder, sent = tmp_path / "new" / str(moment), list[int]()
        with contextlib.suppress(Interrupted), interruptible(), after(moment, sent), held(folder):
            pass
        assert not folder.exists() and not locks._handles
        with held(folder):
            assert (folder / locks.LOCK).exists()
        if not sent:
            break  # it has no more calls
    assert moment > 100


@contextlib.contextmanager
def after(calls: int, sent: list[int]) -> Iterator[None]:
    """SIGTERM comes with the so manieth event of this thread's Python, and is noted in `sent`."""
    left = calls

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= event != "return"  # there Python ends a generator without its `finally`
        if left == 0 and event != "return":
            sent.append(calls)
            os.kill(os.getpid(), signal.SIGTERM)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.slow
def test_a_census_and_a_suite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = tmp_path / "s" / "neighbours.csv"
    run = ["stability", "--all", *DATA, "--set=federation.rounds=20", "--set=local.lr=0.01"]
    started = [*run, "--out", str(rows.parent)]
    assert stopped(started, lambda: lines(rows) > 1, signal.SIGTERM) == 143
    command = again(capsys.readouterr().err)
    main_ends(command)
    main_ends([*run, "--out", str(tmp_path / "whole")])
    assert same(rows.parent, tmp_path / "whole", "neighbours.csv", "model.safetensors")
    cells = tmp_path / "f" / "cells"
    study = ["suite", "dp-muon-printed", "--scale", "small", "--out", str(cells.parent)]
    assert stopped(study, lambda: any(cells.glob("*.json")), signal.SIGINT) == 130
    command = again(capsys.readouterr().err)
    assert command[:2] == ["suite", "dp-muon-printed"] and command[-1] == "--resume"


def test_a_second_signal_is_not_held_up(tmp_path: Path) -> None:
    """After the first, the system's own way of ending is back: saving may hang."""
    with interruptible():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def no_nohup() -> Iterator[None]:
    """A hangup is heard, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before or signal.SIG_DFL)


@pytest.mark.usefixtures("no_nohup")
def test_two_signals_at_once_are_one_wish() -> None:
    """On a busy machine two of them are often waiting when the program is next asked."""
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    with interruptible():
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        for end in ends:  # to this thread: others of the process do not block them
            signal.pthread_kill(threading.get_ident(), end)
        with pytest.raises(Interrupted):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
            time.sleep(0.1)
        assert all(signal.getsignal(end) is signal.SIG_DFL for end in ends)


def test_an_interruption_waits_for_the_end_of_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that hides exceptions, as torch does for numpy, is imported whole; then it ends."""
    (tmp_path / "hiding.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\n"
        "    whole = True\n"
        "except BaseException:\n"
        "    whole = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Interrupted), interruptible():
        importlib.import_module("hiding")
        time.sleep(5)  # the signal is sent again at once
    assert sys.modules["hiding"].whole
