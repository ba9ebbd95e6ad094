"""CPU quotas of made-up cgroups, and the note on a busy machine."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedmuon.core import cores
from fedmuon.core import start as command
from fedmuon.core.cores import cores_of_quota, few_free_cores, usable_cores

ROOT = Path(__file__).resolve().parents[3]


def made(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A folder of cgroups, and the file that lists the cgroups of a process."""
    for name, text in files.items():
        (folder / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / name).write_text(text, encoding="ascii")
    (folder / "self").write_text(membership, encoding="utf-8")
    return folder / "cgroup", folder / "self"


@pytest.mark.parametrize(("membership", "files", "expected"), [
    ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
    ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "900000 100000\n"}, 2),
    ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3),
    ("0::/a\n", {"b/cpu.max": "100000 100000\n"}, math.inf),  # another process's cgroup
    ("0::/../x\n", {"cpu.max": "400000 100000\n"}, 4),
    ("4:cpu,cpuacct:/d/e\n2:memory:/z\n", {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/d/cpu.cfs_quota_us": "250000\n",
        "cpu,cpuacct/d/cpu.cfs_period_us": "50000\n"}, 5),
    ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
     math.inf),
    ("1:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "1\n", "cpuset/cpu.cfs_period_us": "1\n"},
     math.inf),
    ("0::/\n", {"cpu.max": "broken"}, math.inf),
    ("0::/\n", {"cpu.max": "100 0"}, math.inf),
])  # fmt: skip
def test_the_smallest_quota_of_all_enclosing_cgroups_counts(
    membership: str, files: dict[str, str], expected: float, tmp_path: Path
) -> None:
    assert cores_of_quota(*made(tmp_path, membership, files)) == expected


def test_a_system_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cores_of_quota(tmp_path / "none", tmp_path / "neither") == math.inf


@pytest.mark.parametrize(("quota", "allowed", "expected"), [
    (math.inf, 6, 6), (2.9, 6, 2), (0.4, 6, 1), (8.0, 3, 3),
])  # fmt: skip
def test_a_quota_and_the_affinity_limit_the_cores(
    quota: float, allowed: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "cores_of_quota", lambda: quota)
    monkeypatch.setattr(cores, "allowed_cores", lambda: allowed)
    assert usable_cores() == expected


@pytest.mark.parametrize(("quota", "said", "expected"), [
    ("200000", {}, "2"), ("200000", {"OMP_NUM_THREADS": "3"}, "3"), ("max", {}, "None"),
    ("900000", {}, "None"),
])  # fmt: skip
def test_the_command_starts_only_as_many_threads_as_its_quota_allows(
    quota: str, said: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """In a process that could use eight cores."""
    cgroups, membership = made(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"})
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from fedmuon.core import cores\n"
        f"found = Path({str(cgroups)!r}), Path({str(membership)!r})\n"
        "cores.cores_of_quota.__defaults__ = found\n"
        "os.sched_getaffinity = lambda pid: set(range(8))\n"
        "from fedmuon.core import start as command\n"
        "command.set_thread_defaults()\n"
        "print(os.environ.get('OMP_NUM_THREADS'))"
    )
    others = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=others | said, cwd=ROOT
    )
    assert shown.stdout.split() == [expected], shown.stderr


def test_no_number_of_threads_is_set_after_torch_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(command, "usable_cores", lambda: 1)
    monkeypatch.setattr(command, "allowed_cores", lambda: 8)
    monkeypatch.setitem(sys.modules, "torch", sys)
    command.set_thread_defaults()
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(("threads", "others", "load", "usable", "said"), [
    (4, 0.0, 0.0, 4, ""),
    (4, 0.4, 9.0, 4, ""),  # the load is that of this process's earlier work
    (4, 3.0, 0.2, 4, ""),  # a short burst
    (4, 3.1, 5.0, 4, "use about 3 of 4 cores, but torch uses 4 threads"),
    (4, 4.0, 12.0, 4, "use about 4 of 4 cores"),
    (2, 2.2, 2.4, 4, ""),
    (1, 4.0, 12.0, 4, ""),  # no setting would help
    (4, 0.0, 0.0, 2, "may use only 2 of 4 cores, but torch uses 4 threads"),
])  # fmt: skip
def test_a_note_says_that_a_machine_has_fewer_free_cores_than_threads(
    threads: int, others: float, load: float, usable: int, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cores, "usable_cores", lambda: usable)
    note = few_free_cores(threads, others, load)
    assert said in note and bool(said) == bool(note)
    if "torch uses" in note:
        advised = int(note.rpartition("OMP_NUM_THREADS=")[2].rstrip("."))
        assert few_free_cores(advised, others, load) == ""
