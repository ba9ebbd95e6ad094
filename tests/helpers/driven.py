"""`fedmuon` as a process of its own that computes with the help of others, and what is left.

`python -m tests.helpers.driven` kills every kind of driver with -9, and counts processes and key
files 2 and 10 seconds later.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fedmuon.experiments.engines.orphan_cleanup import OWNER, processes_of

ROOT = Path(__file__).resolve().parents[2]
START = 500.0  # seconds, on a busy machine
TINY = (
    *("data.name=synthetic", "data.train=60", "data.test=60", "data.minimum=5"),
    *("federation.clients=1", "federation.per-round=1", "federation.rounds=100000"),
    *("engine.device=cpu", "output.evaluate-every=100000", "output.checkpoint-every=100000"),
)
KEYS = ("*.key", "*.pem", "*.secret", "token*", "*/token-*", "home/*/credentials.yaml")


class Driver:
    """A `fedmuon` command in a process group of its own."""

    def __init__(self, *arguments: str | Path) -> None:
        self.said = Path(tempfile.mkstemp(prefix="driven-")[1])
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedmuon", *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.said.unlink()

    def until(self, ready: Callable[[], object], seconds: float = START) -> None:
        """Wait until something is the case; a driver that ended before has failed."""
        end = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, self.said.read_text(errors="replace")
            assert time.monotonic() < end, self.said.read_text(errors="replace")
            time.sleep(0.05)

    @property
    def folder(self) -> Path | None:
        """The guarded folder that it holds locked."""
        owned = [file for file in _open_files(self.process.pid) if file.name == OWNER]
        return owned[0].parent if owned else None

    def helpers(self) -> set[int]:
        """Numbers of the processes that compute for it."""
        return processes_of(self.folder) if self.folder else set()

    def end(self, number: int, group: bool = False) -> int:
        """Send a signal; how the driver ended."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        return self.process.wait(START)


def living(processes: Iterable[int]) -> set[int]:
    """Those that still run: dead ones wait, perhaps for ever, until somebody asks after them."""
    return {one for one in processes if _state(one) not in "ZX"}


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def key_files(folder: Path) -> list[Path]:
    return [file for pattern in KEYS for file in folder.glob(pattern)]


def listening(processes: set[int]) -> set[str]:
    """Local addresses, as the kernel writes them, on which these processes wait for connections."""
    held = [file.name for one in processes for file in _open_files(one)]
    inodes = {name[8:-1] for name in held if name.startswith("socket:[")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def _open_files(process: int) -> list[Path]:
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(link.readlink())
    return found


def is_loopback(address: str) -> bool:
    """127.0.0.1, also written as IPv6, or ::1; as /proc/net writes them."""
    host = address.partition(":")[0]
    return host.endswith("0100007F") or host == "0" * 24 + "01000000"


def rounds(out: Path) -> int:
    file = out / "rounds.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def settings() -> list[str]:
    return [part for one in TINY for part in ("--set", one)]


def _report(name: str, arguments: list[str], ready: Callable[[], object]) -> None:
    with Driver(*arguments) as driver:
        driver.until(ready)
        folder, helpers = driver.folder, driver.helpers()
        assert folder is not None
        keys = len(key_files(folder))
        driver.end(signal.SIGKILL)
        counts = []
        for pause in (2, 8):
            time.sleep(pause)
            left = living(helpers | processes_of(folder))
            counts.append(f"{len(left)} processes, {len(key_files(folder))} keys")
        left = "left" if folder.exists() else "gone"
        print(f"{name} | {len(helpers)} processes, {keys} keys | {' | '.join(counts)} | {left}")


def main() -> None:
    """The table: before, 2 s and 10 s after kill -9, and the folder."""
    print("driver | before | after 2 s | after 10 s | folder")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ray", "deployment"):
            out = Path(folder, name)
            command = ["run", "--engine", name, "--out", str(out), *settings()]
            _report(f"run --engine {name}", command, lambda out=out: rounds(out))
        out = Path(folder, "demo")
        _report("deploy-demo", ["deploy-demo", "--out", str(out), *settings()], lambda: rounds(out))
        out = Path(folder, "suite")
        command = ["suite", "A1", "--data", "mnist5k", "--scale", "small", "--ray-address", "local"]
        cells = lambda: list(out.glob("*/*.json"))  # noqa: E731
        _report("suite --ray-address local", [*command, "--out", str(out)], cells)


if __name__ == "__main__":
    main()
