"""`fedmuon run --engine ray`: Flower's simulation, with clients in Ray's worker processes.

Flower runs in a thread of its own, so that signals, which the main thread hears, do not unwind its
code and Ray's from the inside: the wish to stop is handed on, and the state is saved, first.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from fedmuon.config import Config
from fedmuon.errors import InputError, Interrupted
from fedmuon.experiments.engines.ray_cluster import Handed, connected, kill_clients, quieten
from fedmuon.experiments.engines.signals import FLOWER, interruptible
from fedmuon.federated.simulate import Engine

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

Result = TypeVar("Result")
SAVING, ENDING = 20.0, 2.0  # seconds for the server to save its state, and for Flower to end


def engine(config: Config, grid: "Grid") -> Engine:
    """The clients behind the grid as an engine; flwr is imported when there is one."""
    from fedmuon.server import strategy

    return strategy.engine(config, grid)


def on_grid(
    config: Config,
    work: Callable[["Grid"], Result],
    verbose: bool = False,
    client_app: "ClientApp | None" = None,
) -> Result:
    """Do `work` as Flower's ServerApp, with a simulated node for each client of the config; clients
    are handed the objects that the config was given."""
    quieten()
    os.environ["FEDMUON_CLIENT_THREADS"] = str(max(1, int(config.engine.cpus_per_client)))
    from flwr.app import Context
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from fedmuon.clients import client_app as clients

    outcome, server_app = Future[Result](), ServerApp()

    @server_app.main()
    def main(grid: "Grid", context: Context) -> None:
        _settle(outcome, lambda: work(grid))

    handed = [clients.app]

    def simulate() -> None:
        run_simulation(
            server_app=server_app,
            client_app=client_app or handed[0],
            num_supernodes=config.federation.clients,
            backend_config={"client_resources": _resources(config)},
            verbose_logging=verbose,
        )

    address = config.engine.ray_address
    with interruptible(), _folded_logs(verbose), connected(address, verbose):
        if config.given:
            handed[0] = clients.client_app(Handed.over(config.given))
        try:
            _in_a_thread(simulate, outcome)
        except RuntimeError as error:
            if not outcome.done():
                raise InputError(_why(error, config)) from error
    return outcome.result(timeout=0)


def _settle(future: "Future[Result]", work: Callable[[], Result]) -> None:
    """Do the work, and keep what comes of it, or the user's error, for another thread."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _in_a_thread(simulate: Callable[[], None], outcome: "Future[Result]") -> None:
    """Flower in a thread; when somebody wants to stop, the server saves its state, then all end."""
    from fedmuon.server import stopping

    ended = Future[None]()
    stopping.forget()
    thread = threading.Thread(target=_settle, args=(ended, simulate), name=FLOWER, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException as wish:
        stopping.ask(wish.number if isinstance(wish, Interrupted) else signal.SIGINT)
        wait([outcome], SAVING)
        thread.join(ENDING)
        if thread.is_alive():  # it waits for clients that still compute
            with contextlib.suppress(Exception):  # it may leave Ray at this very moment
                kill_clients()
        thread.join(ENDING)
        raise
    if isinstance(error := ended.exception(), Exception):
        raise error


def _resources(config: Config) -> dict[str, Any]:
    """Flower hands these to Ray's actor options: a killed worker comes back for the next try."""
    cpus, gpus = config.engine.cpus_per_client, config.engine.gpus_per_client
    return {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": -1}


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
    cause, engine = error.__cause__ or error, config.engine
    return (
        f"the Ray engine could not run ({str(cause).splitlines()[0]}): check [engine] cpus-per-"
        f"client = {engine.cpus_per_client} and gpus-per-client = {engine.gpus_per_client}, or see "
        "--verbose"
    )
