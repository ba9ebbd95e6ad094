"""Nodes of a Ray cluster as `ray start` makes them: each a process group with an object store."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from chaos.processes import MARK, marked

STORE = 80_000_000  # bytes of an object store; Ray's minimum is 78,643,200
LONGEST = 90.0  # seconds until a node has started
STARTED = "Ray runtime started"


@contextlib.contextmanager
def ray_nodes(count: int, store: int = STORE) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a cluster of `count` nodes with one CPU each, and the environment of programs
    that may join it. Whatever happens within, no process of it lives afterwards."""
    with tempfile.TemporaryDirectory(prefix="fm-", dir="/tmp", ignore_cleanup_errors=True) as place:
        token = Path(place, "token")
        token.write_text(secrets.token_hex(32))
        given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), MARK: place}
        environment = {name: one for name, one in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {**given, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": place}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        always = ["start", "--block", "--num-cpus=1", f"--object-store-memory={store}"]
        first = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={place}/ray"]
        address = f"127.0.0.1:{port}"
        started: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(count):
                log = Path(place, f"{number}.log")
                where = first if number == 0 else [f"--address={address}"]
                command = [str(Path(sys.executable).with_name("ray")), *always, *where]
                with log.open("wb") as file:
                    started.append(
                        subprocess.Popen(command, env=environment, stdout=file, stderr=file)
                    )
                _await(log, started[-1])
            yield address, environment
        finally:
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            end = time.monotonic() + LONGEST
            while (left := marked(place)) and time.monotonic() < end:
                for number in left:
                    with contextlib.suppress(OSError):
                        os.kill(number, signal.SIGKILL)
                time.sleep(0.1)
            for process in started:
                process.wait(10)


def _await(log: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LONGEST
    while STARTED not in (said := log.read_text()):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"a node of Ray does not start: {said}")
        time.sleep(0.1)
