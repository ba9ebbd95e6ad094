"""Commands whose disk fills up: exit code 2, one sentence, and `--resume` continues.

A limit on the size of files stands for a full disk on any machine. A small file system is filled
where the test may mount one.
"""

import errno
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.jobs import suite
from chaos.nursery import Ended, Nursery
from safetensors.numpy import load_file

from fedmuon.core.errors import InputError
from fedmuon.core.files import mendable
from fedmuon.runs.directory import RunDirectory

KEYS = {
    "data.name": "synthetic", "data.train": 200, "data.test": 50, "data.validation": 0.2,
    "data.dimension": 100, "data.classes": 20, "federation.clients": 4, "federation.per-round": 4,
    "federation.rounds": 30, "output.clients": "true",
    "output.checkpoint-every": 4,
}  # fmt: skip
SET = [word for name, value in KEYS.items() for word in ("--set", f"{name}={value}")]
# Command -> bytes beyond which its files cannot grow: some are written before, some are not.
COMMANDS = {("run", *SET): 20_000, ("run", *SET, "--set", "local.recipe=scaffold"): 20_000,
            ("stability", *SET, "--set", "output.clients=false", "--trials", "3"): 20_000,
            ("sweep", *SET, "--grid", "local.lr=0.01,0.1"): 20_000,
            ("sweep", *SET, "--grid", "local.lr=0.01,0.1", "--jobs", "2"): 20_000,
            ("suite", "FILE"): 10_000}  # fmt: skip
NAMES = ["run", "run-with-client-states", "stability", "sweep", "sweep-jobs", "suite"]
# What takes time, and what is of a moment or of a process, is not compared.
COMPARED = ("*.safetensors", "*.npz", "*.npy", "neighbours.csv")


def fedmuon(forks: Nursery, *words: str | Path, **how: Any) -> Ended:
    """The command in a process of its own, with time for a busy machine."""
    return forks.run([str(word) for word in words], 280.0, **how)


def ends_in_one_sentence(done: Ended, *parts: str) -> None:
    lines = [one for one in done.err.splitlines() if one.startswith("fedmuon: ")]
    assert done.code == 2 and len(lines) == 1, done.err
    assert "Traceback" not in done.err
    assert all(part in lines[0] for part in (*parts, "--resume", "choose another place")), lines[0]


def result(out: Path) -> dict[str, str]:
    """File below the folder -> digest of its content."""
    return {
        str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
        for pattern in COMPARED
        for file in out.rglob(pattern)
    }


def records(out: Path) -> list[dict]:
    """The whole lines of rounds.jsonl, without the seconds."""
    text = (out / "rounds.jsonl").read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    untimed = [json.loads(line) for line in lines]
    for one in untimed:
        del one["seconds"], one["train_seconds"], one["check"]
    return untimed


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 72 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=72k", "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path) -> None:
    full_disk = Path("/dev/full")
    with pytest.raises(InputError) as full, mendable(tmp_path / "not" / "there", "write"):
        full_disk.write_text("anything")
    assert f"No space left on device; {tmp_path} has " in str(full.value)
    assert "bytes free): delete files to make room and run the command again" in str(full.value)
    with pytest.raises(InputError) as refused, mendable(tmp_path, "write"):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert "free" not in str(refused.value) and "that is writable" in str(refused.value)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("words", "longest"), COMMANDS.items(), ids=NAMES)
def test_commands_with_a_limit_on_files_resume(
    forks: Nursery, words: tuple[str, ...], longest: int, tmp_path: Path
) -> None:
    out, free = tmp_path / "limited", tmp_path / "free"
    if words[0] == "suite":
        words = (*suite(tmp_path / "files", "training").start(out)[:-2],)
    done = fedmuon(forks, *words, "--out", out, tamper={"longest": longest})
    ends_in_one_sentence(done, str(out), "File too large", "ulimit -f")
    grow = ("checkpoint", "neighbours.csv")
    before = {
        name: one for name, one in result(out).items() if not any(part in name for part in grow)
    }
    lines = records(out) if words == ("run", *SET) else []
    if lines:  # the run has a checkpoint, and perhaps rounds after it
        held = RunDirectory(out).newest_checkpoint()
        assert held is not None and 4 <= int(held[1]["round"]) <= len(lines) < 30
    resumed = fedmuon(forks, *words, "--out", out, "--resume")
    assert resumed.code == 0, resumed.err
    assert before.items() <= result(out).items()
    if lines:
        assert fedmuon(forks, *words, "--out", free).code == 0
        assert result(out) == result(free)
        assert records(out)[: len(lines)] == lines and records(out) == records(free)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["inline", "ray"])
def test_a_run_on_a_full_disk_resumes_with_room(
    forks: Nursery, engine: str, disk: Path, tmp_path: Path
) -> None:
    out, free = disk / "out", tmp_path / "free"
    words = ("run", *SET, "--set", f"engine.name={engine}")
    real = engine == "ray"  # what starts Ray is no fork of a process that has loaded it
    ends_in_one_sentence(
        fedmuon(forks, *words, "--out", out, real=real),
        str(out),
        "No space left on device",
        "bytes free",
    )
    held, before = RunDirectory(out).newest_checkpoint(), records(out)
    assert held is not None and 0 < int(held[1]["round"]) <= len(before)
    if engine == "inline":  # nothing is lost by trying again without any room
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        again = fedmuon(forks, *words, "--out", out, "--resume")
        ends_in_one_sentence(again, str(out), "No space left on device", f"{out} has 0 bytes free")
        kept = RunDirectory(out).newest_checkpoint()
        assert kept is not None and kept[1]["round"] == held[1]["round"]
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    resumed = fedmuon(forks, *words, "--out", out, "--resume", real=real)
    assert resumed.code == 0, resumed.err
    assert fedmuon(forks, "run", *SET, "--out", free).code == 0
    if engine == "inline":
        assert result(out) == result(free) and records(out) == records(free)
    else:  # whose clients may be rounded in other groups
        models = [load_file(run / "model.safetensors")["weight"] for run in (out, free)]
        np.testing.assert_allclose(*models, rtol=1e-4, atol=1e-6)
        assert [one["round"] for one in records(out)] == [*range(1, 31)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_of_ray_tasks_on_a_full_disk_resumes_with_room(forks: Nursery, disk: Path) -> None:
    """The worker's error arrives as its sentence, without the traceback that Ray adds."""
    words = ("sweep", *SET, "--grid", "local.lr=0.01,0.1", "--ray", "--out", str(disk / "out"))
    done = fedmuon(forks, *words, real=True)
    ends_in_one_sentence(done, "the run lr=", "No space left on device", "bytes free")
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    assert fedmuon(forks, *words, "--resume", real=True).code == 0
