"""The ledger is ahead of what was released, keeps everything, and refuses what does not fit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedmuon.core.errors import InputError
from fedmuon.privacy.accounting.composition import account, epsilon
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.ledger import Ledger

ROOT = Path(__file__).resolve().parents[3]
NOISE = {"noise_multiplier": 2.0, "blocks": 4, "steps": 5}


def filled(path: Path, rounds: int = 3) -> Ledger:
    """Clients 0 and 2 in every round, client 1 in the first."""
    ledger = Ledger.open(path, "config")
    for number in range(rounds):
        clients, rates = ([0, 1, 2], [0.1, 0.2, 0.1]) if number == 0 else ([0, 2], [0.1, 0.1])
        assert ledger.begin(number, clients, rates, **NOISE) == 0
    return ledger


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    written = filled(tmp_path / "ledger.jsonl")
    read = Ledger.open(tmp_path / "ledger.jsonl", "config")
    assert read.entries == written.entries
    assert read.head == written.head
    assert read.clients() == [0, 1, 2]
    assert read.events(1) == [Event(0.2, 1.0, 5)]
    assert read.events(0) == [Event(0.1, 1.0, 5)] * 3
    assert read.events(7) == []


def test_each_client_has_its_own_epsilon(tmp_path: Path) -> None:
    answers = filled(tmp_path / "ledger.jsonl").epsilons(1e-5)
    assert answers[0] is answers[2]
    assert answers[0].upper == epsilon(2.0, 0.1, 15, 1e-5, blocks=4).upper
    assert answers[1].upper == epsilon(2.0, 0.2, 5, 1e-5, blocks=4).upper
    assert answers[0].certified


@pytest.mark.slow
def test_a_line_is_in_the_file_before_begin_returns(tmp_path: Path) -> None:
    """A process that is killed the moment `begin` returns leaves its line behind."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fedmuon.privacy.ledger import Ledger\n"
        "ledger = Ledger.open(Path(sys.argv[1]), 'config')\n"
        "ledger.begin(0, [3], [0.5], 1.0, 1, 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    file = tmp_path / "ledger.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(file)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert Ledger.open(file, "config").events(3) == [Event(0.5, 1.0, 1)]


def test_a_resumed_round_is_a_new_attempt_and_both_are_spent(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    filled(file)
    resumed = Ledger.open(file, "config")
    resumed.require(1)  # the model is older than the ledger
    assert resumed.begin(1, [0, 2], [0.1, 0.1], **NOISE) == 1
    assert resumed.begin(1, [0, 2], [0.1, 0.1], **NOISE) == 2
    assert resumed.events(0) == [Event(0.1, 1.0, 5)] * 5
    once = account([Event(0.1, 1.0, 15)], 1e-5).upper
    assert resumed.epsilons(1e-5)[0].upper > once
    keys = {(entry.round, entry.attempt) for entry in resumed.entries}
    assert len(keys) == len(resumed.entries)  # no lot is drawn twice


def test_a_line_cut_off_by_a_kill_is_cut_away(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    filled(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    ledger = Ledger.open(file, "config")
    assert len(ledger.entries) == 2
    assert ledger.begin(2, [0, 2], [0.1, 0.1], **NOISE) == 0
    assert file.read_bytes() == whole
    os.truncate(file, 5)
    assert Ledger.open(file, "config").entries == []


def test_a_line_that_lacks_its_end_alone_is_whole(tmp_path: Path) -> None:
    """It announced a release; and one whose end is another byte is damaged."""
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger.open(file, "run")
    ledger.begin(0, [0, 1], [0.1, 0.1], 1.0, 1, 2)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert Ledger.read(file).entries == ledger.entries
    assert file.read_bytes() == whole[:-1]
    Ledger.open(file, "run").begin(1, [0, 1], [0.1, 0.1], 1.0, 1, 2)
    assert [one.round for one in Ledger.read(file).entries] == [0, 1]
    file.write_bytes(whole[:-1] + b"\x0b")
    with pytest.raises(InputError, match=r"line 2 .*damaged"):
        Ledger.read(file)


def test_a_ledger_behind_the_model_is_refused(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger.jsonl")
    ledger.require(3)
    with pytest.raises(InputError, match="round 3"):
        ledger.require(4)
    saved = ledger.head
    ledger.begin(3, [0], [0.1], **NOISE)
    ledger.require(3, saved)
    other = filled(tmp_path / "other.jsonl")
    other.require(3, saved)  # the same lines are the same ledger
    os.truncate(tmp_path / "other.jsonl", len(_lines(tmp_path / "other.jsonl", 3)))
    with pytest.raises(InputError, match="not the ledger"):
        Ledger.open(tmp_path / "other.jsonl", "config").require(2, saved)


@pytest.mark.parametrize("left", [0, 1, 300])
def test_a_refused_ledger_is_left_as_it_is(tmp_path: Path, left: int) -> None:
    """A file that is empty or cut is not begun anew or mended when the model knows of more."""
    file = filled(tmp_path / "ledger.jsonl").path
    os.truncate(file, left)
    held = file.read_bytes()
    with pytest.raises(InputError, match="says nothing of round"):
        Ledger.open(file, "config", done=3)
    assert file.read_bytes() == held


def _lines(file: Path, count: int) -> bytes:
    return b"".join(file.read_bytes().splitlines(keepends=True)[:count])


def test_another_config_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "ledger.jsonl")
    with pytest.raises(InputError, match="another run"):
        Ledger.open(tmp_path / "ledger.jsonl", "another config")


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_line_that_was_changed_or_removed_is_refused(tmp_path: Path, line: int) -> None:
    file = tmp_path / "ledger.jsonl"
    filled(file)
    lines = file.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[line])
    record["noise_multiplier"] = 50.0
    file.write_text("\n".join([*lines[:line], json.dumps(record), *lines[line + 1 :], ""]))
    with pytest.raises(InputError, match="damaged or changed"):
        Ledger.open(file, "config")
    file.write_text("\n".join([*lines[:line], *lines[line + 1 :], ""]))
    with pytest.raises(InputError):
        Ledger.open(file, "config")


def test_a_round_that_no_accountant_covers_is_refused_and_not_written(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger.jsonl", 1)
    size = ledger.path.stat().st_size
    for clients, rates in (([0], [1.5]), ([0, 0], [0.1, 0.1]), ([0, 1], [0.1])):
        with pytest.raises(InputError):
            ledger.begin(1, clients, rates, **NOISE)
    assert ledger.path.stat().st_size == size


def test_noise_nobody_added_is_said_to_be_infinite(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.jsonl", "config")
    ledger.begin(0, [0], [0.1], 0.0, 1, 1)
    answer = ledger.epsilons(1e-5)[0]
    assert answer.epsilon == float("inf")
    assert not answer.certified


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        Ledger.open(tmp_path / "missing" / "ledger.jsonl", "config")
