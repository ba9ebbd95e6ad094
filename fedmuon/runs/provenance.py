"""The origin of a result: versions, machine, commit."""

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

from fedmuon.core.files import Record

try:
    import resource
except ImportError:  # on Windows
    resource = None

PROCESSOR = "model name"  # the line of Linux's /proc/cpuinfo


@cache
def versions() -> dict[str, str]:
    """The versions that a result depends on; read once, as a suite has a thousand short runs."""
    found = {"python": platform.python_version()}
    for name in ("fedmuon", "torch", "numpy", "scipy", "flwr", "ray"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def commit() -> str | None:
    """The git commit of this source tree when a process first asks; None for an installed
    package."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(threads: int) -> Record:
    """The processor of the process that wrote the result, and how many threads torch was to use in
    it; clients of a cluster or a deployment may run elsewhere."""
    return {"processor": processor(), "cores": os.cpu_count(), "threads": threads}


def processor() -> str:
    """The model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(PROCESSOR))
    return next(named, "") or platform.processor() or platform.machine()


# The maximum memory of this process, and the cores that other processes use.


def peak() -> int:
    """The maximum memory of this process so far, in bytes."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory() -> Record:
    """`peak` under the name that records have for it and, if torch has used a GPU, the most bytes
    of that GPU that torch has held in this process."""
    found: Record = {"memory": peak()}
    torch: Any = sys.modules.get("torch")  # do not import torch for this
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu_memory"] = int(torch.cuda.max_memory_reserved())
    return found


class Others:
    """Cores that other processes have had since this was made, this process having no children at
    work meanwhile; 0 where the system does not say."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), busy(), time.process_time()

    def cores(self) -> float:
        """On average."""
        start, before, own = self._begun
        seconds = time.perf_counter() - start
        return max(0.0, (busy() - before - time.process_time() + own) / max(seconds, 1e-9))


def busy() -> float:
    """Seconds of all processors together that they were not idle, since the machine started."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        ticks = [int(one) for one in first.split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return time.process_time()
