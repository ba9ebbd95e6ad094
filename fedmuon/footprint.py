"""What this process has taken of its machine, its most memory; and what others take."""

import contextlib
import os
import sys
import time
from pathlib import Path


def peak() -> int:
    """The most bytes of memory that this process has held."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    import resource  # which Windows lacks

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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
