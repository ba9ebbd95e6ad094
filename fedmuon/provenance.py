"""Where a result comes from: versions, machine, commit."""

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

from fedmuon.files import Record

PROCESSOR = "model name"  # the line of Linux's /proc/cpuinfo


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    names = ("fedmuon", "torch", "numpy", "scipy", "flwr", "ray")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


@cache
def _version(name: str) -> str:
    """Read once: a suite of a thousand short runs asks for it as often."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@cache
def commit() -> str | None:
    """The git commit of this source tree when a process first asks; None for an installed
    package."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> Record:
    """The processor of the process that wrote the result, and how many threads torch was to use in
    it; clients of a cluster or a deployment may run elsewhere."""
    return {"processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def processor() -> str:
    """Its name as it calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(PROCESSOR))
    return next(named, "") or platform.processor() or platform.machine()
