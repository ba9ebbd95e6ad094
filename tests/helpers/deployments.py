"""One deployment for all tests that need SuperNodes, whose apps start at once."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fedmuon.experiments.engines.deployment import HOST, SETTINGS, Deployment, executor
from fedmuon.experiments.engines.processes import Processes, importable, processes_of

NODES = 3
FORKING = Path(__file__).with_name("forking_superexec.py")


class ForkingDeployment(Deployment):
    """Each message has a process of its own, which has everything loaded.

    test_process_life.py and test_project.py deploy with the processes that users have.
    """

    def _start_superexec(self, name: str, port: int) -> None:
        known = not hasattr(self, "supernodes")  # and not one that is admitted later or never
        command = [sys.executable, "-P", FORKING, "early" if known else "late"]
        command += ["--runtime-api-address", f"{HOST}:{port}"]
        command += ["--superexec-auth-secret-file", self.processes.folder / f"{name}.secret"]
        self.processes.start(executor(name), [*command, *self._trust])


def gone(folder: Path) -> bool:
    """Whether all that was started below the folder ends, and the folder with it: what was killed
    takes a moment of a busy machine."""
    end = time.monotonic() + 60
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes_of(folder) and not folder.exists()


@contextlib.contextmanager
def forking() -> Iterator[Deployment]:
    """Three known SuperNodes with TLS; nothing of them is left afterwards."""
    processes = Processes({**SETTINGS, "PYTHONPATH": importable(), "OMP_NUM_THREADS": "1"})
    try:
        yield ForkingDeployment(processes, NODES, secure=True)
    finally:
        processes.stop()
    assert gone(processes.folder)
