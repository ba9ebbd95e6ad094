"""The processor cores that this process may use, and a note if other processes use them.

This module imports no libraries, because the number of threads must be known before numpy and torch
are imported.
"""

import contextlib
import math
import os
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allowed_cores() -> int:
    """Return the number of cores on which the system may schedule this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_of_quota(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Return the number of cores whose time the CPU quota of this process's cgroup equals.

    Containers set such quotas. A quota of an enclosing cgroup counts too. The result is infinite
    without a quota.

    Args:
        cgroups: The folder at which the cgroup file systems are mounted.
        membership: The file that lists the cgroups of this process.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            controllers, _, name = line.partition(":")[2].partition(":")
            if controllers and "cpu" not in controllers.split(","):
                continue
            mounts = [cgroups / controllers, cgroups / "cpu"] if controllers else [cgroups]
            parts = [part for part in name.split("/") if part]
            if ".." in parts:  # the cgroup is outside of the cgroups that this process can see
                parts = []
            for mount in mounts:
                folders = [mount.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
                quotas += [_quota(folder, not controllers) for folder in folders]
    return min(quotas)


def _quota(folder: Path, second_version: bool) -> float:
    """Return the quota of one cgroup in cores, or infinity if the cgroup has none."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if second_version:
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        if (cores := int(quota) / int(period)) > 0:  # "max" and -1 mean no quota
            return cores
    return math.inf


def usable_cores() -> int:
    """Return the number of cores that this process may use at the same time, at least 1.

    A fraction of a core in a CPU quota does not count, because the system would stop all threads
    for a part of each period.
    """
    return max(1, math.floor(min(allowed_cores(), cores_of_quota())))


def few_free_cores(threads: int, others: float, load: float | None = None) -> str:
    """Return a note if torch has more threads than there are free cores. Otherwise, return "".

    Threads of torch wait for each other after each operation, so a thread without a core delays all
    threads.

    Args:
        threads: The number of torch's threads.
        others: The average number of cores that other processes use now.
        load: The load average of the last minute, by default that of this machine. It also counts
            this process's earlier work. So only the smaller one of `others` and `load` is used.
    """
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.inf
    usable, cores = usable_cores(), os.cpu_count() or 1
    free = min(usable, max(0, round(cores - min(others, load))))
    if threads <= max(1, free):
        return ""
    cause = (
        f"This process may use only {usable} of {cores} cores"
        if free == usable
        else f"Other programs use about {cores - free} of {cores} cores"
    )
    return (
        f"{cause}, but torch uses {threads} threads. The run can then be many times slower. Set "
        f"the environment variable OMP_NUM_THREADS={max(1, free)}."
    )
