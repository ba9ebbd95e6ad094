"""`fedmuon run --engine ray`: Flower's simulation, with clients in Ray's worker processes.

A local Ray is started, and stopped with everything it made; a cluster is only joined and left.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedmuon.errors import InputError
from fedmuon.run import Begin, Run, Watch
from fedmuon.storage import Record

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass
class Outcome:
    """What the server's thread leaves behind: a summary, or the user's error."""

    summary: Record | None = None
    error: BaseException | None = None


def run_on_ray(
    run: Run,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
    verbose: bool = False,
    client_app: "ClientApp | None" = None,
) -> Record:
    """Drive a run with Flower's ServerApp here and its ClientApps on Ray."""
    os.environ.update(QUIET)  # read when flwr and ray are imported
    os.environ["FEDMUON_CLIENT_THREADS"] = str(max(1, int(run.config.engine.cpus_per_client)))
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from clients.client_app import app
    from server.server_app import serve

    outcome, server_app = Outcome(), ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            outcome.summary = serve(run, grid, watch, begun)
        except BaseException as error:
            outcome.error = error

    with _ray(run, verbose) as started, _folded_logs(verbose):
        try:
            run_simulation(
                server_app=server_app,
                client_app=client_app or app,
                num_supernodes=run.config.federation.clients,
                backend_config={"init_args": started, "client_resources": _resources(run)},
                verbose_logging=verbose,
            )
        except RuntimeError as error:
            if outcome.error is None and outcome.summary is None:
                raise InputError(_why(error, run)) from error
    if outcome.error is not None:
        raise outcome.error
    assert outcome.summary is not None
    return outcome.summary


def _resources(run: Run) -> dict[str, Any]:
    """Flower hands these to Ray's actor options: a killed worker comes back for the next try."""
    engine = run.config.engine
    return {
        "num_cpus": engine.cpus_per_client,
        "num_gpus": engine.gpus_per_client,
        "max_restarts": -1,
    }


@contextlib.contextmanager
def _ray(run: Run, verbose: bool) -> Iterator[dict[str, Any]]:
    """Arguments for ray.init; what a local Ray wrote is removed afterwards."""
    quiet = {"log_to_driver": verbose, "logging_level": "INFO" if verbose else "ERROR"}
    if run.config.engine.ray_address:
        yield {"address": run.config.engine.ray_address, **quiet}
        return
    # Ray's sockets live in this folder, and a socket's path may have 107 characters.
    folder = tempfile.mkdtemp(prefix="fm-ray-", dir="/tmp" if os.name == "posix" else None)
    try:
        yield {"_temp_dir": folder, **quiet}
    finally:
        import ray

        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _folded_logs(verbose: bool) -> Iterator[None]:
    """Flower's log below errors is kept for --verbose."""
    logger = logging.getLogger("flwr")
    before = logger.level
    if not verbose:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _why(error: BaseException, run: Run) -> str:
    cause = error.__cause__ or error
    engine = run.config.engine
    return (
        f"the Ray engine could not run ({str(cause).splitlines()[0]}): check [engine] "
        f"cpus-per-client = {engine.cpus_per_client}, gpus-per-client = {engine.gpus_per_client} "
        f"and ray-address = '{engine.ray_address}', or see --verbose"
    )
