"""The tests see nothing of this machine, and what they leave behind is found."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import surroundings

from fedmuon.data import available

HELPERS = Path(surroundings.__file__).parent
LEAVES = """
import subprocess, sys, surroundings
from pathlib import Path
surroundings.SECONDS = 0.3
before = surroundings.listing()
assert surroundings.leftovers(before) == [], surroundings.leftovers(before)
Path(surroundings.SESSION, "tmp", "left").touch()
surroundings.SHARED[2].joinpath("fedmuon-left").touch()
pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], **pipes)
try:
    child.stdout.readline()  # it runs: before, its environment cannot be read
    print(surroundings.SESSION, *surroundings.leftovers(before), sep="\\n")
finally:
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
"""


def test_data_sets_of_the_machine_are_hidden() -> None:
    there = {name for name, found, _ in available() if found}
    assert there == {"synthetic", "digits", "mnist5k", "pydoc"}
    assert time.timezone == 0 and Path.home().parent == surroundings.SESSION


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found in /proc")
def test_leftovers_are_found(tmp_path: Path) -> None:
    """In a session of its own, whose folder is removed at its end."""
    shared = tmp_path / "shared"
    shared.mkdir()
    program = LEAVES.replace(
        "before =",
        f"surroundings.SHARED = *surroundings.SHARED[:2], Path({str(shared)!r})\nbefore =",
        1,
    )
    own = {name: value for name, value in os.environ.items() if name != surroundings.MARK}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=HELPERS, env=own
    )
    assert ended.returncode == 0, ended.stderr
    session, process, *files = ended.stdout.splitlines()
    assert process.startswith("process ") and "input()" in process
    assert set(files) == {f"file {session}/tmp/left", f"file {shared}/fedmuon-left"}
    assert not Path(session).exists()
