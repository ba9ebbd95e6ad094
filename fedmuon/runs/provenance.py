"""The origin of a result: versions of software, machine, and git commit."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from fedmuon.config.registered import packages_of, registered
from fedmuon.core.files import Record

try:
    import resource
except ImportError:  # on Windows
    resource = None

PROCESSOR = "model name"  # name of the line in Linux's /proc/cpuinfo


@cache
def versions() -> dict[str, str]:
    """Return the versions of all software that affects results.

    Packages that register methods are included. The versions are read only once per process.
    """
    installed = {"python": platform.python_version()}
    others = sorted({package for name in registered() for package in packages_of(name)})
    for name in ("fedmuon", "torch", "numpy", "scipy", "flwr", "ray", *others):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


@cache
def commit() -> str | None:
    """Return the git commit of the source code when this function was first called.

    Return None for an installed package.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(threads: int) -> Record:
    """Return the processor of this process, its number of cores, and torch's number of threads.

    In a cluster or a deployment, clients may run on other machines.
    """
    return {"processor": processor(), "cores": os.cpu_count(), "threads": threads}


def processor() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith(PROCESSOR))
    return next(models, "") or platform.processor() or platform.machine()


# The maximum memory of this process, and the cores that other processes use


def peak() -> int:
    """Return the maximum memory of this process so far, in bytes."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory() -> Record:
    """Return the maximum memory of this process in bytes, as an entry of a record.

    If torch has used a GPU, also return the maximum GPU memory that torch has reserved in this
    process.
    """
    usage: Record = {"memory": peak()}
    torch: Any = sys.modules.get("torch")  # do not import torch for this
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        usage["gpu_memory"] = int(torch.cuda.max_memory_reserved())
    return usage


class Others:
    """Measures how many cores other processes have used since this object was created.

    During this time, child processes of this process must not compute. The result is 0 if the
    system does not report the numbers.
    """

    def __init__(self) -> None:
        self._begun = time.perf_counter(), busy(), time.process_time()

    def cores(self) -> float:
        """Return the average number of cores that other processes have used so far."""
        start, before, own_before = self._begun
        seconds = time.perf_counter() - start
        return max(0.0, (busy() - before - time.process_time() + own_before) / max(seconds, 1e-9))


def busy() -> float:
    """Return the total busy time of all processors since the machine started, in seconds."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        ticks = [int(tick) for tick in first.split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return time.process_time()
