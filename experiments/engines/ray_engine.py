"""`fedmuon run --engine ray`: Flower's server and clients, with the clients in Ray's workers.

Ray is a cluster that is joined and left, or a Ray of our own. Our own listens on loopback alone,
asks every caller for a token that is made for it, keeps its files in a folder for this user alone,
and ends with this process, however that ends. A cluster belongs to whoever runs it; its
`RAY_AUTH_MODE` and token, if it has one, are taken from the environment.
"""

import contextlib
import importlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.signals import ENDS, deferred, interruptible
from fedmuon.experiments.engines.orphan_cleanup import GuardedFolder
from fedmuon.experiments.engines.processes import importable

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from ray.exceptions import RayError

    from fedmuon.config.load import Config
    from fedmuon.federated.rounds import Engine  # which reads torch

Result = TypeVar("Result")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_task_events_report_interval_ms": "0",  # or Ray's memory grows with every task
    "RAY_worker_niceness": "0",  # beside other work its workers would hardly ever be heard
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a late call would start another Ray, open to everyone
}
THREADS = "FEDMUON_CLIENT_THREADS"  # of a worker
LOCAL = "local"  # the address that starts a Ray of our own, as none does
CONNECT = 3.0  # seconds within which a cluster's address has to take a connection
_driving = threading.Lock()
# Ray takes loopback for a node's address only where it believes that clusters do not work.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def engine(config: "Config", grid: "Grid") -> "Engine":
    """The clients behind the grid as an engine."""
    from fedmuon.server import strategy  # reads Flower, which `quieten` sets up first

    return strategy.engine(config, grid)


def on_grid(
    config: "Config",
    work: Callable[["Grid"], Result],
    verbose: bool = False,
    client_app: "ClientApp | None" = None,
) -> Result:
    """Do `work` with a simulated node for each client of the config; clients are handed the objects
    that the config was given."""
    quieten()  # before Ray and Flower are imported, which read their settings then
    from ray.exceptions import RayError

    from fedmuon.clients import client_app as clients
    from fedmuon.server import stopping
    from fedmuon.server.ray.grid import RayGrid

    stopping.forget()
    threads = max(1, int(config.engine.cpus_per_client))
    joined = connected(config.engine.ray_address, verbose, threads)
    with interruptible(), _folded_logs(verbose), joined:
        if client_app is None:
            handed = config.given and Handed.over(config.given)
            client_app = clients.Clients(handed) if handed else clients.app
        try:
            with (
                deferred(stopping.ask),
                RayGrid(
                    client_app,
                    config.federation.clients,
                    most=config.federation.per_round,
                    resources=_resources(config),
                    again=config.faults.retries > 0,
                    shows_errors=False,  # the strategy says what it refuses
                    seed=config.federation.seed,
                ) as grid,
            ):
                done = work(grid)
                stopping.pause(0.0)  # a wish that came too late to be heard there
                return done
        except RayError as error:
            raise InputError(_why(error, config)) from error


def _resources(config: "Config") -> dict[str, float]:
    """What Ray sets aside for a worker."""
    return {"num_cpus": config.engine.cpus_per_client, "num_gpus": config.engine.gpus_per_client}


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


def _why(error: "RayError", config: "Config") -> str:
    """Explain the error and say what to do."""
    # Ray is imported by now.
    from ray.exceptions import ActorUnschedulableError, TaskUnschedulableError

    from fedmuon.server.ray.worker_pool import died, why

    if died(error):
        return (
            f"the Ray engine stopped after all of its workers had died, the last one thus: "
            f"{why(error)}. Free memory or lower [federation] per-round, then resume with --resume"
        )
    said, engine = str(error.__cause__ or error).splitlines()[0], config.engine
    if isinstance(error, ActorUnschedulableError | TaskUnschedulableError):
        return (
            f"Ray has no room for a worker ({said}): lower [engine] cpus-per-client = "
            f"{engine.cpus_per_client:g} or gpus-per-client = {engine.gpus_per_client:g}"
        )
    return f"the Ray engine stopped ({said}): run it with --verbose to see why"


# The Ray that a run computes on


def quieten() -> None:
    """Tell Ray and Flower, before they are imported, what they are not wanted to do or say."""
    os.environ.update(QUIET)
    # Bytes that travel with a call; more than that are quicker by Ray's store.
    os.environ.setdefault("RAY_max_direct_call_object_size", "500000")
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)  # which it would like in notebooks


@contextlib.contextmanager
def connected(address: str, verbose: bool = False, threads: int = 1) -> Iterator[None]:
    """Ray's driver is this process; at the end it has left, and a Ray of our own is gone.

    Workers find what we can import, and have `threads` of torch's: those of our own Ray inherit
    both, from its start. A runtime environment says so to a cluster; its agent, and workers that
    were started before they knew, would cost our own a second or two.
    """
    quieten()
    address = "" if address == LOCAL else address
    given: dict[str, Any] = {
        "log_to_driver": verbose,
        "logging_level": "INFO" if verbose else "ERROR",
    }
    with contextlib.ExitStack() as until:
        until.enter_context(_only_one())
        until.enter_context(_environment({THREADS: str(threads)}))
        if address:
            _require_listener(address)
            given["address"] = address
            told = {"PYTHONPATH": importable(), THREADS: str(threads)}
            given["runtime_env"] = {"env_vars": told}
        else:
            given |= until.enter_context(_own(verbose))
        import ray  # after its environment was set
        from ray.exceptions import RayError

        try:
            with _signals_kept():
                ray.init(**given)
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            ray.shutdown()
            raise InputError(_unreachable(error, address)) from error
        until.callback(ray.shutdown)
        yield


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """A process is the driver of one Ray, which nobody else in it may end meanwhile."""
    taken = not _driving.acquire(blocking=False)
    try:
        if taken or ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
            raise InputError(
                "this program is connected to a Ray already: run one after the other, call "
                "ray.shutdown() before, or give that Ray to fedmuon.flower.RayGrid"
            )
        yield
    finally:
        if not taken:
            _driving.release()


def require_cluster(address: str) -> None:
    """Reject an address where no Ray cluster answers, before a run writes any file."""
    if address not in ("", LOCAL):
        quieten()
        _require_listener(address)


def _require_listener(address: str) -> None:
    """Reject an address where nothing listens: Ray would wait for minutes before it says so."""
    services: Any = importlib.import_module("ray._private.services")
    try:
        if address.startswith("ray://"):  # Ray's client, whose server has a port of its own
            place = address.removeprefix("ray://").partition("/")[0]
        else:
            place = services.canonicalize_bootstrap_address(address) or ""
        if place and "://" not in place:
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT).close()
    except (OSError, ValueError) as error:
        raise InputError(_unreachable(error, address)) from error


def _unreachable(error: Exception, address: str) -> str:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if not address:
        return f"Ray does not start on this machine ({said}): see --verbose"
    return (
        f"no Ray cluster answers at {address} ({said}): start one with `ray start --head`, set "
        "RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH if it wants a token, or let a local one be started"
    )


@contextlib.contextmanager
def _own(verbose: bool) -> Iterator[dict[str, Any]]:
    """Arguments that start a Ray on loopback with a new token, which its processes inherit; its
    folder and its processes are gone afterwards.

    It adds no machines and, unless `verbose`, nobody reads its logs: two processes that would take
    a second of each run are not started.
    """
    # Ray's sockets live in this folder, and a socket's path may have 107 characters. Ray opens what
    # it makes to everyone (0777), hence a folder within the folder.
    folder = GuardedFolder("fm-ray-", "/tmp" if os.name == "posix" else None)
    try:
        token = folder.path / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        environment = {
            LOOPBACK: "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "SPT_NOENV": "1",  # Ray's agents shall not overwrite the environment they are known by
            "PYTHONPATH": importable(),
            "RAY_AUTH_TOKEN": None,
            "RAY_ADDRESS": None,
        }
        with _environment(environment, _read_again):
            parameter: Any = importlib.import_module("ray._private.parameter")
            full = parameter.RayParams
            wanted = {"no_monitor": True, "include_log_monitor": verbose}
            known = {name: on for name, on in wanted.items() if name in signature(full).parameters}
            parameter.RayParams = partial(full, **known)
            try:
                yield {"_temp_dir": str(folder.path / "ray"), "include_dashboard": False}
            finally:
                parameter.RayParams = full
    finally:
        folder.close()


@contextlib.contextmanager
def _environment(
    wanted: Mapping[str, str | None], changed: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """These variables, or their absence, within; `changed` is called after each change."""
    before = {name: os.environ.get(name) for name in wanted}

    def set_to(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        changed()

    try:
        set_to(wanted)
        yield
    finally:
        set_to(before)


def _read_again() -> None:
    """Make an imported Ray forget what it has read of the environment (its own tests do so)."""
    if "ray" not in sys.modules:
        return
    constants: Any = importlib.import_module("ray._private.ray_constants")
    elsewhere = sys.platform in ("darwin", "win32")
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(LOOPBACK, not elsewhere)
    core = importlib.import_module("ray._raylet")
    if hasattr(core, "AuthenticationTokenLoader"):  # since Ray 2.52
        core.AuthenticationTokenLoader.instance().reset_cache()
        core.Config.initialize("")


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray installs handlers of its own for SIGTERM, which leave the program: keep ours."""
    before = [signal.getsignal(end) for end in ENDS]
    try:
        yield
    except SystemExit:
        raise Interrupted(signal.SIGTERM) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for end, handler in zip(ENDS, before, strict=True):
                signal.signal(end, handler)


def machines() -> int:
    """Those of the Ray that is connected."""
    import ray  # which is imported by now

    return sum(bool(node["Alive"]) for node in ray.nodes())


@dataclass(frozen=True)
class Handed:
    """An object of the caller's in Ray's store, of which every worker takes one copy."""

    place: Any  # a reference

    @classmethod
    def over(cls, held: Any) -> "Handed":
        """Put it there; what cannot travel is refused."""
        import ray  # which is imported by now

        try:
            return cls(ray.put(held))
        except Exception as error:  # whatever the object's own pickling does
            raise InputError(
                f"what was handed over cannot be sent to Ray's workers ({error!s:.200}): keep open "
                "files, locks and generators out of it"
            ) from error

    def __call__(self) -> Any:
        """The same object each time, in one process."""
        return _fetched(self.place)


@lru_cache(maxsize=2)
def _fetched(place: Any) -> Any:
    import ray  # which is imported by now

    return ray.get(place)
