"""The wheel and the sdist: built, and what they hold."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from .pins import ROOT

ROOMS = ("fedmuon", "clients", "server", "experiments", "analysis")
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


def tracked(*rooms: str) -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *rooms]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def installed(rooms: set[str]) -> set[str]:
    """Where files of the tree lie when they are installed: below one name."""
    return {name if name.startswith("fedmuon/") else f"fedmuon/{name}" for name in rooms}


def differences(wheel: set[str], rooms: set[str]) -> list[str]:
    """What a wheel lacks of the rooms, and what it has beside them and its own notes."""
    held = {name for name in wheel if ".dist-info/" not in name}
    return [f"without {name}" for name in sorted(rooms - held)] + [
        f"with {name}" for name in sorted(held - rooms)
    ]
