"""Hide this machine from the tests: its folders, caches, data sets, clusters, languages and looks.

Imported before anything that reads the environment, and inherited by every process of a test. The
whole session has one folder, which holds its HOME and everything temporary. `leftovers` says what a
session has left in it, in the places that programs share, and among the processes.
"""

import atexit
import contextlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOREIGN = ("FEDMUON_", "RAY_", "FLWR_", "HYPOTHESIS_", "XDG_", "LC_", "GIT_", "MPL", "HF_")
SLOW = "PYTHONDONTWRITEBYTECODE"  # hundreds of processes would compile everything anew
LOOKS = (SLOW, "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "PYTHONWARNINGS",
         "LANGUAGE", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONHASHSEED",
         "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # fmt: skip
MARK = "SESSION_OF_FEDMUON_TESTS"  # tells the processes that a session has started
# Where programs write whatever TMPDIR and HOME say, and names that ours or their libraries use.
SHARED = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm")))
OURS = re.compile(
    r"(out-of-)?fedmuon|fm-ray-|\.?ray(_|$)|\.?flwr|plasma|psm_|sem\.(mp|loky)|pymp-|torch|loky|joblib"
)
SECONDS = 10.0  # after its end, that a session's last processes may take to stop
_HOME = Path.home()  # the real one


def _begin() -> Path:
    """The folder of this session, made by its first process."""
    if folder := os.environ.get(MARK):
        return Path(folder)
    # A short name: sockets lie in there, and their paths may have 107 letters.
    folder = tempfile.mkdtemp(prefix="fm-", dir="/tmp" if os.name == "posix" else None)
    for name in ("home", "data", "tmp"):
        Path(folder, name).mkdir()
    atexit.register(_end, os.getpid(), folder)
    return Path(folder)


def _end(owner: int, folder: str) -> None:
    if os.getpid() == owner:  # not in a process that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _hide(folder: Path) -> None:
    for name in [*os.environ]:
        if name.startswith(FOREIGN) or name in LOOKS:
            del os.environ[name]
    sys.dont_write_bytecode = False
    os.environ |= {
        MARK: str(folder),
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "home"),  # else a folder among what is temporary
        "FEDMUON_DATA": str(folder / "data"),
        "FEDMUON_SYSTEM_DATA": str(folder / "data"),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",  # in processes that tests start too: faster than two fighting
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    tempfile.tempdir = None
    if hasattr(time, "tzset"):
        time.tzset()
    if (found := importlib.util.find_spec("matplotlib")) is not None and found.origin is not None:
        os.environ["MATPLOTLIBRC"] = str(Path(found.origin).parent / "mpl-data" / "matplotlibrc")


SESSION = _begin()
_hide(SESSION)


def listing() -> set[Path]:
    """What of ours lies in the places that programs share, and in the real HOME."""
    caches = (_HOME, _HOME / ".cache", _HOME / ".config", _HOME / ".local" / "share")
    found = set()
    for place in (*SHARED, *caches):
        with contextlib.suppress(OSError):
            found |= {one for one in place.iterdir() if OURS.match(one.name.lstrip("."))}
    return found


def leftovers(before: set[Path], ended: bool = True) -> list[str]:
    """What a session that began with that listing has left, in sentences.

    A run without `out` keeps its folder as long as its process may show it, so these count only
    when the processes that ran the tests have `ended`.
    """
    end = time.monotonic() + SECONDS
    while (running := [*_processes()]) and time.monotonic() < end:
        time.sleep(0.1)
    found = [one for one in listing() - before if not _of_others(one)]
    kept = ("pytest-of",) if ended else ("pytest-of", "out-of-fedmuon-")
    temporary = [one for one in (SESSION / "tmp").iterdir() if not one.name.startswith(kept)]
    files = [*found, *temporary]
    return [f"process {one}" for one in running] + [f"file {one}" for one in sorted(files)]


def _of_others(file: Path) -> bool:
    """Whether a process that this session did not start uses that file, as another session's do."""
    mark, name = f"{MARK}={SESSION}".encode(), str(file).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name in (entry / "cmdline").read_bytes():
                return mark not in (entry / "environ").read_bytes().split(b"\0")
    return False


def _processes() -> Iterator[str]:
    """Processes that this session has started, if the system tells."""
    mark = f"{MARK}={SESSION}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                yield f"{entry.name}: {command[:150] or (entry / 'comm').read_text().strip()}"
