"""`fedmuon deploy-demo`: Flower's deployment on this machine, from first process to last.

One SuperLink and one SuperNode a client run as processes of their own (with TLS and known keys,
unless told otherwise) and are stopped with all that they started, however this process ends.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from fedmuon.config.load import Config
from fedmuon.config.paths import with_files
from fedmuon.core.errors import InputError
from fedmuon.core.locks import DRIVER, held
from fedmuon.core.signals import interruptible
from fedmuon.experiments.engines.deployment import SETTINGS, Deployment
from fedmuon.experiments.engines.processes import Processes, importable
from fedmuon.federated import build
from fedmuon.runs.directory import LOGS, Record, RunDirectory
from fedmuon.runs.loop import Begin, Watch

PATIENCE = 10.0  # seconds for what a killed driver has left behind to end
logger = logging.getLogger(__name__)
DEMO = (  # one process a message and two cores: small, or nobody waits for it
    "data.name=synthetic",
    "data.train=300",
    "data.test=300",
    "local.lr=0.1",
    "federation.clients=3",
    "federation.per-round=2",
    "federation.rounds=3",
    "engine.dtype=float64",
)


@contextlib.contextmanager
def deployed(nodes: int, secure: bool = True, logs: Path | None = None) -> Iterator[Deployment]:
    """A running deployment; at the end it is gone, but for its logs if a folder is given."""
    with interruptible():
        processes = Processes({**SETTINGS, "PYTHONPATH": importable()})
        try:
            yield Deployment(processes, nodes, secure)
        finally:
            try:
                if logs is not None:
                    _keep(processes.logs, logs)
            finally:
                processes.stop()


def _keep(logs: Path, place: Path) -> None:
    """Copy the logs; where that fails, why the run ended is still the news."""
    try:
        shutil.copytree(logs, place, dirs_exist_ok=True)
    except OSError:
        logger.warning("fedmuon: the logs cannot be written to %s", place)


def deploy(
    config: Config, out: Path, secure: bool, watch: Watch, begun: Begin, resume: bool = False
) -> Record:
    """Run a config in a deployment of its own; the logs are kept in out/logs."""
    with held(out, DRIVER):
        _await_writer(out)
        RunDirectory(out).create(resume)
        config = build.resolve(with_files(config))
        try:
            with deployed(config.federation.clients, secure, out / LOGS) as deployment:
                return deployment.execute(config, out, watch, begun)
        except InputError as error:
            raise InputError(f"{error} (what each process said is in {out / LOGS})") from None


def _await_writer(out: Path) -> None:
    """Until nobody writes to the folder: the server of a driver that was killed may still do."""
    try:
        with held(out):
            return
    except InputError as error:
        logger.warning("fedmuon: waiting %g s, because %s", PATIENCE, error)
    with held(out, patience=PATIENCE):
        pass
