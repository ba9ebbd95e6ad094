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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedmuon.config import Config
from fedmuon.drive import Begin, Run, Watch
from fedmuon.errors import InputError, Interrupted
from fedmuon.experiments.engines.ray_cluster import Handed, connected, kill_clients, quieten
from fedmuon.experiments.engines.signals import interruptible
from fedmuon.federated.simulate import Engine
from fedmuon.own import NOTHING
from fedmuon.storage import Record

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

Result = TypeVar("Result")
SAVING, ENDING = 20.0, 2.0  # seconds for the server to save its state, and for Flower to end


@dataclass
class Outcome(Generic[Result]):
    """What the server's thread leaves behind: its results, or the user's error."""

    results: list[Result] = field(default_factory=list)
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


def run_on_ray(
    run: Run,
    watch: Watch = lambda record: None,
    begun: Begin = lambda done, total: None,
    verbose: bool = False,
) -> Record:
    """Drive a run with Flower's ServerApp here and its ClientApps on Ray."""

    def work(grid: "Grid") -> Record:
        from fedmuon.server.server_app import serve

        return serve(run, grid, watch, begun)

    return on_grid(run.config, work, verbose)


def engine(config: Config, grid: "Grid") -> Engine:
    """Rounds of any experiment of this config, with the clients behind the grid."""
    from fedmuon.server.strategy import FedMuonStrategy

    return lambda experiment, state: FedMuonStrategy(config, experiment, state).rounds(grid)


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

    outcome, server_app = Outcome[Result](), ServerApp()

    @server_app.main()
    def main(grid: "Grid", context: Context) -> None:
        try:
            outcome.results.append(work(grid))
        except BaseException as error:
            outcome.error = error
        finally:
            outcome.done.set()

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
        if config.given != NOTHING:
            handed[0] = clients.client_app(Handed.over(config.given))
        try:
            _beside(simulate, outcome.done)
        except RuntimeError as error:
            if outcome.error is None and not outcome.results:
                raise InputError(_why(error, config)) from error
    if outcome.error is not None:
        raise outcome.error
    return outcome.results[0]


def _beside(simulate: Callable[[], None], done: threading.Event) -> None:
    """Flower in a thread; when somebody wants to stop, the server saves its state, then all end."""
    from fedmuon.server import stopping

    raised: list[Exception] = []

    def main() -> None:
        try:
            simulate()
        except Exception as error:
            raised.append(error)

    stopping.forget()
    thread = threading.Thread(target=main, name="flower", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException as wish:
        stopping.ask(wish.number if isinstance(wish, Interrupted) else signal.SIGINT)
        done.wait(SAVING)
        thread.join(ENDING)
        if thread.is_alive():  # it waits for clients that still compute
            with contextlib.suppress(Exception):  # it may leave Ray at this very moment
                kill_clients()
        thread.join(ENDING)
        raise
    if raised:
        raise raised[0]


def _resources(config: Config) -> dict[str, Any]:
    """Flower hands these to Ray's actor options: a killed worker comes back for the next try."""
    engine = config.engine
    return {
        "num_cpus": engine.cpus_per_client,
        "num_gpus": engine.gpus_per_client,
        "max_restarts": -1,
    }


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
        f"cpus-per-client = {engine.cpus_per_client} and "
        f"gpus-per-client = {engine.gpus_per_client}, or see --verbose"
    )
