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
from collections.abc import Iterator, Mapping
from pathlib import Path

from chaos.processes import MARK, marked

STORE = 80_000_000  # bytes of an object store; Ray's minimum is 78,643,200
FULL = "RAY_local_fs_capacity_threshold"  # the share from which a disk is full to Ray
LONGEST = 90.0  # seconds until a node has started
STARTED = "Ray runtime started"


@contextlib.contextmanager
def ray_nodes(
    count: int, store: int = STORE, full_disk: bool = False
) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a cluster of `count` nodes with one CPU each, and the environment of programs
    that may join it. With a `full_disk`, Ray moves no object there. Whatever happens within, no
    process of it lives afterwards."""
    with tempfile.TemporaryDirectory(prefix="fm-", dir="/tmp", ignore_cleanup_errors=True) as place:
        token = Path(place, "token")
        token.write_text(secrets.token_hex(32))
        given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), MARK: place}
        environment = {name: one for name, one in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {**given, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": place}
        environment |= {FULL: "0.0001"} if full_disk else {}
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


def spilled(address: str, environment: Mapping[str, str]) -> int:
    """Bytes that the cluster's nodes have moved from their object stores to disk so far."""
    code = (
        "import sys, ray\n"
        "ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)\n"
        "from ray._private.internal_api import get_state_from_address, get_memory_info_reply\n"
        "reply = get_memory_info_reply(get_state_from_address(sys.argv[1]))\n"
        "print(reply.store_stats.spilled_bytes_total)"
    )
    command = [sys.executable, "-c", code, address]
    return int(subprocess.check_output(command, env=environment, text=True, timeout=120))


def _await(log: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LONGEST
    while STARTED not in (said := log.read_text()):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"a node of Ray does not start: {said}")
        time.sleep(0.1)
