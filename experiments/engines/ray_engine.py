"""`fedmuon run --engine ray`: Flower's server and clients, with the clients in Ray workers.

Importing this module imports Ray and Flower, which then read their settings. Call
`ray_cluster.quiet_ray` first.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import ray
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from ray.exceptions import ActorUnschedulableError, RayError, TaskUnschedulableError

from fedmuon.clients import client_app as clients
from fedmuon.config.load import NAMING, Config
from fedmuon.core.choices import is_own
from fedmuon.core.errors import InputError
from fedmuon.core.files import disk_full
from fedmuon.core.signals import deferred, interruptible
from fedmuon.experiments.engines.ray_cluster import connected, spare_workers
from fedmuon.server import stopping
from fedmuon.server.ray.grid import RayGrid
from fedmuon.server.ray.worker_pool import died, is_full, why

Result = TypeVar("Result")
STORES = "To enlarge the object store of a cluster, use `ray start --object-store-memory`."


def with_ray_grid(
    config: Config,
    work: Callable[[Grid], Result],
    verbose: bool = False,
    client_app: ClientApp | None = None,
) -> Result:
    """Call `work` with a grid that simulates one node per client of the config.

    Clients receive the Python objects that were passed with the config.
    """
    stopping.forget()
    threads = max(1, int(config.engine.cpus_per_client))
    joined = connected(config.engine.ray_address, verbose, threads)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interruptible())
        if not verbose:  # show only Flower's errors
            logger = logging.getLogger("flwr")
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        stack.enter_context(joined)
        spare = spare_workers(None if client_app else _kind_of_workers(config))
        try:
            if client_app is None:
                handed = config.given and Handed.over(config.given)
                client_app = clients.Clients(handed) if handed else clients.app
            with (
                deferred(stopping.ask),
                RayGrid(
                    client_app,
                    config.federation.clients,
                    most=config.federation.per_round,
                    resources=resources_of(config),
                    again=config.faults.retries > 0,
                    shows_errors=False,  # the strategy itself reports errors
                    seed=config.federation.seed,
                    spare=spare,
                ) as grid,
            ):
                result = work(grid)
                stopping.pause(0.0)  # handle a request to stop that arrived at the end
                return result
        except RayError as error:
            raise InputError(explained(error, config)) from error


def resources_of(config: Config) -> dict[str, float]:
    """Return the resources that Ray reserves for a worker."""
    return {"num_cpus": config.engine.cpus_per_client, "num_gpus": config.engine.gpus_per_client}


def _kind_of_workers(config: Config) -> tuple[Any, ...] | None:
    """Return a key that states which runs of this process can use the same workers.

    Runs with equal keys can share workers. The key is None if the workers load the user's own
    objects or files, which may change between runs.
    """
    names = (getattr(getattr(config, table), key) for table, key in NAMING)
    return None if any(map(is_own, names)) or config.given else (*resources_of(config).items(),)


def explained(error: RayError, config: Config) -> str:
    """Return an explanation of the error and the action that solves it."""
    if died(error):
        return (
            "the Ray engine stopped because all of its workers died. The last error: "
            f"{why(error)}. Free memory or lower [federation] per-round, then continue with "
            "--resume."
        )
    if is_full(error):
        place = None
        with contextlib.suppress(Exception):  # Ray may have stopped already
            place = Path(ray.get_runtime_context().get_temp_dir())
        return f"the Ray engine stopped: {why(error)} {disk_full(place)}. {STORES}"
    message, engine = str(error.__cause__ or error).splitlines()[0], config.engine
    if isinstance(error, ActorUnschedulableError | TaskUnschedulableError):
        return (
            f"Ray has not enough CPUs or GPUs to start a worker ({message}). Lower [engine] "
            f"cpus-per-client = {engine.cpus_per_client:g} or gpus-per-client = "
            f"{engine.gpus_per_client:g}."
        )
    return f"the Ray engine stopped ({message}). Run the command with --verbose for details."


def machines() -> int:
    """Return the number of machines of the connected Ray."""
    return sum(bool(node["Alive"]) for node in ray.nodes())


@dataclass(frozen=True)
class Handed:
    """An object of the caller in Ray's object store. A worker process fetches the object once."""

    place: Any  # a reference to the object

    @classmethod
    def over(cls, held: Any) -> "Handed":
        """Put the object into Ray's object store, or raise an error if it cannot be sent."""
        try:
            return cls(ray.put(held))
        except RayError:
            raise
        except Exception as error:  # pickling may run the user's code, which can raise anything
            raise InputError(
                "the objects that were passed in Python cannot be sent to Ray's workers "
                f"({error!s:.200}). Remove open files, locks and generators from these objects."
            ) from error

    def __call__(self) -> Any:
        """Return the object. All calls in one process return the same object."""
        return _fetched(self.place)


@lru_cache(maxsize=2)
def _fetched(place: Any) -> Any:
    return ray.get(place)
