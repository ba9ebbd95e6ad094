"""fedmuon alone in an environment of its own, in a folder with other packages of our rooms' names.

What it needs besides is taken from this environment, which is slow to make a second time; its
editable installs are not.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from .archives import ROOMS

UV = (sys.executable, "-m", "uv")
BINS = "Scripts" if os.name == "nt" else "bin"
BESIDE = ROOMS[1:]  # names that were ours at the top
# What a notebook calls.
SCRIPT = Path(__file__).with_name("calls.py")


def environment(home: Path, *install: str | Path) -> Path:
    """The folder of commands of a new environment that holds what pip is told to install."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    _run((*UV, "venv", "--quiet", "--offline", "--python", sys.executable, home), home.parent, bare)
    python = home / BINS / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(_run((python, "-c", code), home.parent, bare).strip())
    (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its .pth are not read
    pip = ("pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation")
    _run((*UV, *pip, "--python", python, *install), home.parent, bare)
    return home / BINS


def folder_of_others(folder: Path, names: Sequence[str] = BESIDE) -> Path:
    """A folder whose packages have these names, by default our rooms', and must not be imported."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    return folder


def said(command: tuple[str | Path, ...], folder: Path, path: str = "") -> str:
    held = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return _run(command, folder, held | ({"PYTHONPATH": path} if path else {}))


def _run(command: tuple[str | Path, ...], folder: Path, environment: dict[str, str]) -> str:
    ended = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(f"{command} fails: {(ended.stderr or ended.stdout)[-2000:]}")
    return ended.stdout
