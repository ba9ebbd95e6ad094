"""`fedmuon run --engine ray`: Flower's simulation, with clients in Ray's worker processes.

A local Ray is started, and stopped with everything it made; a cluster is only joined and left.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedmuon.config import Config
from fedmuon.errors import InputError
from fedmuon.federated.simulate import Engine
from fedmuon.run import Begin, Run, Watch
from fedmuon.storage import Record

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

Result = TypeVar("Result")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass
class Outcome(Generic[Result]):
    """What the server's thread leaves behind: its results, or the user's error."""

    results: list[Result] = field(default_factory=list)
    error: BaseException | None = None


def run_on_ray(
    run: Run,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
    verbose: bool = False,
    client_app: "ClientApp | None" = None,
) -> Record:
    """Drive a run with Flower's ServerApp here and its ClientApps on Ray."""

    def work(grid: "Grid") -> Record:
        from server.server_app import serve

        return serve(run, grid, watch, begun)

    return on_grid(run.config, work, verbose, client_app)


def engine(config: Config, grid: "Grid") -> Engine:
    """Rounds of any experiment of this config, with the clients behind the grid."""
    from server.strategy import FedMuonStrategy

    return lambda experiment, state: FedMuonStrategy(config, experiment, state).rounds(grid)


def on_grid(
    config: Config,
    work: Callable[["Grid"], Result],
    verbose: bool = False,
    client_app: "ClientApp | None" = None,
) -> Result:
    """Do `work` as Flower's ServerApp, with a simulated node for each client of the config."""
    os.environ.update(QUIET)  # read when flwr and ray are imported
    os.environ["FEDMUON_CLIENT_THREADS"] = str(max(1, int(config.engine.cpus_per_client)))
    from flwr.app import Context
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from clients.client_app import app

    outcome, server_app = Outcome[Result](), ServerApp()

    @server_app.main()
    def main(grid: "Grid", context: Context) -> None:
        try:
            outcome.results.append(work(grid))
        except BaseException as error:
            outcome.error = error

    address = config.engine.ray_address
    with ray_arguments(address, verbose) as started, _folded_logs(verbose):
        try:
            run_simulation(
                server_app=server_app,
                client_app=client_app or app,
                num_supernodes=config.federation.clients,
                backend_config={"init_args": started, "client_resources": _resources(config)},
                verbose_logging=verbose,
            )
        except RuntimeError as error:
            if outcome.error is None and not outcome.results:
                raise InputError(_why(error, config)) from error
    if outcome.error is not None:
        raise outcome.error
    return outcome.results[0]


def _resources(config: Config) -> dict[str, Any]:
    """Flower hands these to Ray's actor options: a killed worker comes back for the next try."""
    engine = config.engine
    return {
        "num_cpus": engine.cpus_per_client,
        "num_gpus": engine.gpus_per_client,
        "max_restarts": -1,
    }


@contextlib.contextmanager
def ray_arguments(address: str, verbose: bool) -> Iterator[dict[str, Any]]:
    """Arguments for ray.init; what a local Ray wrote is removed afterwards."""
    quiet = {"log_to_driver": verbose, "logging_level": "INFO" if verbose else "ERROR"}
    if address:
        yield {"address": address, **quiet}
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


def _why(error: BaseException, config: Config) -> str:
    cause = error.__cause__ or error
    engine = config.engine
    return (
        f"the Ray engine could not run ({str(cause).splitlines()[0]}): check [engine] "
        f"cpus-per-client = {engine.cpus_per_client}, gpus-per-client = {engine.gpus_per_client} "
        f"and ray-address = '{engine.ray_address}', or see --verbose"
    )
