"""Bit flips, cuts and lost files: the same bytes, or one sentence; never another result."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import quick, small
from cut_off import run_until

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.core.files import sealed, unsealed
from fedmuon.experiments import spending
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates, finished_run, neighbours
from fedmuon.runs.directory import CHECKPOINTS, CLIENT_NAMES, RunDirectory


def flipped(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << place % 8
    file.write_bytes(content)


def places(file: Path, count: int) -> list[int]:
    """First, last, and some bytes between."""
    size = file.stat().st_size
    rng = np.random.default_rng(len(file.name))
    return [0, size - 1, *rng.integers(0, size, count).tolist()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its neighbours."""
    out = tmp_path_factory.mktemp("damage") / "whole"
    neighbours.execute(small(stability={"trials": 3}), out)
    return out


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, ended within round 7; its checkpoints are of rounds 4 and 6."""
    out = tmp_path_factory.mktemp("damage") / "cut"
    run_until(7, small(stability={"trials": 3}), out)
    assert all((out / name).exists() for name in CHECKPOINTS)
    return out


def finished(folder: Path, like: Path) -> bool:
    """Resumed to the same bytes (True) or refused in one sentence (False)."""
    try:
        execute(None, folder, resume=True)
    except InputError as error:
        assert "\n" not in str(error)
        return False
    for name in ("config.toml", "partition.npz", "schedule.npy", "model.safetensors"):
        assert (folder / name).read_bytes() == (like / name).read_bytes()
    rounds = [[one["round"] for one in RunDirectory(out).records()] for out in (folder, like)]
    assert rounds[0] == rounds[1]
    return True


@pytest.mark.parametrize(
    ("kind", "count"), quick([("whole", 1), ("whole", 6), ("cut", 6)], [("whole", 1)])
)
def test_any_flipped_bit_is_refused_or_does_not_matter(
    kind: str, count: int, whole: Path, cut: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    source = {"whole": whole, "cut": cut}[kind]
    told = certificates.report(
        case := finished_run.from_directory(source), certificates.certify(case)
    )
    refused = {}
    for file in sorted(source.iterdir()):
        outcomes = []
        for place in places(file, count):
            shutil.copytree(source, tmp_path / "x")
            flipped(tmp_path / "x" / file.name, place)
            outcomes.append(not finished(tmp_path / "x", whole))
            try:
                case = finished_run.from_directory(tmp_path / "x")
                assert certificates.report(case, certificates.certify(case)) == told
            except InputError:
                pass
            shutil.rmtree(tmp_path / "x")
        refused[file.name] = outcomes
    vital = {"config.toml", "partition.npz", "schedule.npy", "initial.safetensors"}
    vital |= {"model.safetensors", "summary.json", "rounds.jsonl"} if kind == "whole" else set()
    assert all(all(refused[name]) for name in vital), refused


def test_the_checkpoint_before_a_damaged_one_is_used_and_said(
    cut: Path, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(cut, tmp_path / "x")
    last, previous = (tmp_path / "x" / name for name in CHECKPOINTS)
    flipped(last, last.stat().st_size - 3)  # within the tensors: safetensors alone sees nothing
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    assert finished(tmp_path / "x", whole)
    assert (
        "checkpoint.safetensors is damaged. The previous checkpoint is used instead" in caplog.text
    )
    flipped(tmp_path / "y" / previous.name, 200)
    caplog.clear()
    with pytest.raises(InputError, match=r"every checkpoint in .* is damaged or belongs"):
        execute(None, tmp_path / "y", resume=True)
    assert not caplog.text  # there was none before it


@pytest.mark.parametrize("names", [CHECKPOINTS, ("rounds.jsonl",)])
def test_files_of_another_run_are_refused(
    names: tuple[str, ...], cut: Path, tmp_path: Path
) -> None:
    """Sound files, of a run with another seed: they were mixed up."""
    run_until(7, small(federation={"seed": 4}), tmp_path / "other")
    shutil.copytree(cut, tmp_path / "x")
    for name in names:
        shutil.copy(tmp_path / "other" / name, tmp_path / "x" / name)
    with pytest.raises(
        InputError, match=r"(belongs to|is damaged, is missing or belongs to) another run"
    ):
        execute(None, tmp_path / "x", resume=True)


def test_a_folder_that_is_moved_away_is_written_no_more(tmp_path: Path) -> None:
    """A second run may have begun in its place, and neither would know of the other."""
    out = tmp_path / "out"

    def move(record: dict) -> None:
        if record["round"] == 3:
            out.rename(tmp_path / "moved")
            out.mkdir()

    with pytest.raises(InputError, match="was moved or replaced"):
        execute(small(), out, on_round_end=move)
    assert not out.exists() or not any(out.iterdir())
    assert execute(None, tmp_path / "moved", resume=True)["rounds"] == 8


@pytest.mark.parametrize(("execute", "file", "place", "why"), [
    (execute, "model.safetensors", 150, r"model\.safetensors does not match .*SHA256SUMS"),
    (neighbours.execute, "neighbours.csv", -4, r"neighbours\.csv does not match its checksum"),
])  # fmt: skip
def test_a_damaged_result_is_none(
    execute: Any, file: str, place: int, why: str, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "x")
    flipped(tmp_path / "x" / file, place)
    with pytest.raises(InputError, match=why):
        execute(None, tmp_path / "x", resume=True)


def test_rounds_that_a_checkpoint_has_behind_it_are_not_made_up(cut: Path, tmp_path: Path) -> None:
    shutil.copytree(cut, tmp_path / "x")
    log = tmp_path / "x" / "rounds.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:2], *lines[3:]]))
    with pytest.raises(
        InputError, match=r"line 3 of .*rounds\.jsonl is damaged, is missing or belongs to"
    ):
        execute(None, tmp_path / "x", resume=True)


@pytest.mark.parametrize("name", ["SHA256SUMS", "config.toml", "partition.npz", "rounds.jsonl"])
def test_a_lost_file_is_refused_or_made_again(name: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "x")
    (tmp_path / "x" / name).unlink()
    with pytest.raises(InputError):
        finished_run.from_directory(tmp_path / "x")
    assert finished(tmp_path / "x", whole) == (
        name == "partition.npz"
    )  # it follows from the config


def test_changed_names_of_clients_are_seen(tmp_path: Path) -> None:
    """A run that is resumed would print another client's name."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 2, 60)
    config = {"federation": {"rounds": 1, "per-round": 2}}
    sites = np.array(["ab", "cd", "ef"])[np.arange(60) % 3]
    run = fedmuon.run(config, data=data, partition=sites, out=tmp_path / "run")
    RunDirectory(run.path).require_sound()
    (run.path / CLIENT_NAMES).write_text('["cd", "ab", "ef"]\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"client-names\.json"):
        RunDirectory(run.path).require_sound()


@pytest.mark.slow
def test_a_shortened_ledger_prints_no_smaller_epsilon(tmp_path: Path) -> None:
    privacy = {"epsilon": 4.0, "lot": 6.0, "bound": 0.2, "delta": 1e-3}
    config = small(local={"recipe": "dp-sgd", "lr": 0.1}, privacy=privacy)
    run_until(7, config, tmp_path / "cut")
    summary = execute(config, tmp_path / "whole")
    assert spending.spent(tmp_path / "whole")["epsilon"] == summary["privacy"]["epsilon"]
    for out in (tmp_path / "cut", tmp_path / "whole"):
        ledger = out / "ledger.jsonl"
        head = json.loads(ledger.read_text().splitlines()[-1])["head"]
        assert head == RunDirectory(out).ledger_head() or out.name == "cut"
        for kept in (1, 3, 6):
            content = ledger.read_bytes()
            ledger.write_bytes(b"".join(content.splitlines(keepends=True)[:kept]))
            for delta in (None, 1e-3):
                with pytest.raises(InputError, match="ledger"):
                    spending.spent(out, delta)
            ledger.write_bytes(content)
        assert spending.spent(out)["epsilon"] > 0


def test_a_sealed_line() -> None:
    record = {"round": 3, "loss": 0.1, "who": [1, 2], "said": 'a "check": "b'}
    line = sealed(record).rstrip("\n")
    assert json.loads(line) == record | {"check": json.loads(line)["check"]}
    assert unsealed(line + "\n") == record
    for place in range(len(line)):
        broken = line[:place] + chr(ord(line[place]) ^ 2) + line[place + 1 :] + "\n"
        assert unsealed(broken) is None, broken


UNTOUCHED = 100  # the exit code of a run that had fewer changes to make
FAILING = """
import errno, os, sys
from pathlib import Path
left, out, number = int(sys.argv[1]), sys.argv[2], getattr(errno, sys.argv[3])
FLAGS = os.O_WRONLY | os.O_RDWR

def hook(event, given):
    global left
    writes = event == "open" and isinstance(given[2], int) and given[2] & FLAGS
    if not (writes or event in ("os.rename", "os.remove", "os.mkdir", "os.truncate")):
        return
    if out in str(given[0]):
        left -= 1
        if left == 0:
            raise OSError(number, os.strerror(number), str(given[0]))
"""


@pytest.mark.slow
def test_a_disk_that_fails_at_any_write(whole: Path, tmp_path: Path) -> None:
    """In a forked process each: the k-th change below the folder fails, for every k; afterwards
    the run goes on to the same bytes."""
    k, refused = 0, 0
    while True:
        k += 1
        out = tmp_path / f"run-{k}"
        code = _forked(k, out)
        assert code in (0, 2, UNTOUCHED), (k, code)
        if (out / "config.toml").exists():
            assert finished(out, whole)
        shutil.rmtree(out, ignore_errors=True)
        if code == UNTOUCHED:
            break
        refused += code == 2
    assert refused > 0.8 * k > 30


def _forked(k: int, out: Path) -> int:
    """The exit code of a run whose k-th change below the folder fails."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.argv = ["", str(k), str(out), ("ENOSPC", "EROFS", "EACCES")[k % 3]]
    space: dict = {}
    exec(FAILING, space)
    sys.addaudithook(space["hook"])
    try:
        execute(small(stability={"trials": 3}), out)
        code = 0
    except InputError as error:
        code = 2 if "\n" not in str(error) else 3
    except BaseException:
        code = 4
    os._exit(UNTOUCHED if space["left"] > 0 else code)
