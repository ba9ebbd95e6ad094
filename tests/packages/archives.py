"""The wheel and the sdist: built, what they hold, and installed in an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from .pins import ROOT

PACKAGES = ("fedmuon", "clients", "server", "experiments", "analysis")
# 2026-01-01: archives of the same files are the same bytes, whenever they are built.
EPOCH = "1767225600"


def build(source: Path, folder: Path, target: str) -> Path:
    """Build the `wheel` or the `sdist` of a tree with what is installed; the archive's path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": EPOCH}
    ended = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"the {target} of {source} cannot be built: {ended.stderr}")
    return next(folder.glob("*.whl" if target == "wheel" else "*.tar.gz"))


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def names(archive: Path) -> set[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return set(opened.namelist())
    with tarfile.open(archive) as opened:
        return {entry.name.partition("/")[2] for entry in opened if entry.isfile()}


def tracked(*packages: str) -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *packages]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def installed(packages: set[str]) -> set[str]:
    """Where files of the tree lie when they are installed: below one name."""
    return {name if name.startswith("fedmuon/") else f"fedmuon/{name}" for name in packages}


def differences(wheel: set[str], packages: set[str]) -> list[str]:
    """What a wheel lacks of the packages, and what it has beside them and its own notes."""
    held = {name for name in wheel if ".dist-info/" not in name}
    return [f"without {name}" for name in sorted(packages - held)] + [
        f"with {name}" for name in sorted(held - packages)
    ]


# fedmuon alone in a new environment, run in a folder whose packages have the same names as ours.
# Dependencies come from this environment, because installing them again is slow; its editable
# installs are left out.

UV = (sys.executable, "-m", "uv")
BINS = "Scripts" if os.name == "nt" else "bin"
BESIDE = PACKAGES[1:]  # names that were ours at the top
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
    """A folder with packages of these names, by default those of ours; importing one fails."""
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
