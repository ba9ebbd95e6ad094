"""Connect a run to Ray: to an existing cluster, or to a new local Ray.

A local Ray listens only on loopback, requires a new token from every caller, stores its files in a
folder that only this user can read, and ends with this process. An existing cluster keeps running
after the run. If the cluster requires a token, Ray reads `RAY_AUTH_MODE` and the token from the
environment.
"""

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.files import disk_full, mendable
from fedmuon.core.signals import ENDS
from fedmuon.experiments.engines.orphan_cleanup import GuardedFolder
from fedmuon.experiments.engines.processes import importable

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_task_events_report_interval_ms": "0",  # otherwise Ray's memory grows with every task
    "RAY_worker_niceness": "0",  # Ray's default leaves workers little time on busy machines
    "RAY_ENABLE_AUTO_CONNECT": "0",  # otherwise a late call starts another Ray without a token
}
THREADS = "FEDMUON_CLIENT_THREADS"  # number of torch threads of a worker
LOCAL = "local"  # this address starts a local Ray, and so does an empty address
CONNECT = 3.0  # seconds within which a cluster's address must accept a connection
ANSWER = 20.0  # seconds for the first bytes of a Ray that may be busy
LEAST = 1 << 18  # free bytes on the disk of Ray's folder without which Ray does not start
_driving = threading.Lock()
TAKEN = (
    "this Python process is already connected to Ray. Call ray.shutdown() first, or pass the "
    "connection to fedmuon.flower.RayGrid."
)
# Ray uses loopback as the address of a node only if this variable says that clusters do not work.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def quiet_ray() -> None:
    """Disable unwanted output and services of Ray and Flower before they are imported."""
    os.environ.update(QUIET)
    # Maximum size in bytes of data that travels with a call. Larger data use Ray's object store.
    os.environ.setdefault("RAY_max_direct_call_object_size", "500000")
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)  # no widget hint in notebooks


@contextlib.contextmanager
def connected(address: str, verbose: bool = False, threads: int = 1) -> Iterator[Any]:
    """Yield the module `ray` while this process is connected to Ray as its driver.

    At the end, disconnect. If this process started Ray, also stop Ray, unless runs share it
    (`shared_ray`).

    Workers can import the same modules as this process, and use `threads` torch threads. The
    workers of a local Ray inherit the import path and the number of threads. A cluster receives
    both as a runtime environment. A local Ray gets no runtime environment, because that would take
    one or two seconds.
    """
    quiet_ray()
    address = "" if address == LOCAL else address
    # A process can be the driver of only one Ray, and no other thread may end that Ray now.
    if not _driving.acquire(blocking=False):
        raise InputError(TAKEN)
    with contextlib.ExitStack() as until:
        until.callback(_driving.release)
        settings = address, verbose, threads
        if _shared is not None:
            ray = _shared.joined(settings)
            until.push(_shared.end_after_error)
        else:
            ray = until.enter_context(_joined(*settings))
        try:
            yield ray
        except SystemError as error:  # Ray's compiled code raises this if it is interrupted
            if isinstance(error.__cause__, Interrupted | KeyboardInterrupt):
                raise error.__cause__ from None
            raise


@contextlib.contextmanager
def _joined(address: str, verbose: bool, threads: int) -> Iterator[Any]:
    """Yield the module `ray` during a connection. An empty address starts a local Ray."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        raise InputError(TAKEN)
    arguments: dict[str, Any] = {
        "log_to_driver": verbose,
        "logging_level": "INFO" if verbose else "ERROR",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({THREADS: str(threads)}))
        if address:
            _require_listener(address)
            arguments["address"] = address
            variables = {"PYTHONPATH": importable(), THREADS: str(threads)}
            arguments["runtime_env"] = {"env_vars": variables}
        else:
            arguments |= stack.enter_context(_own(verbose))
        import ray  # only after its environment variables were set

        try:
            with _signals_kept():
                ray.init(**arguments)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            ray.shutdown()
            raise InputError(_unreachable(error, address)) from error
        stack.callback(ray.shutdown)
        yield ray


@dataclass
class SharedRay:
    """The Ray that several runs share, and the workers that are idle between runs.

    Attributes:
        spare: A dictionary from the kinds of workers to the idle workers of each kind.
    """

    spare: dict[Any, list[Any]] = field(default_factory=dict)
    _until: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _ray: Any = None
    _settings: tuple[Any, ...] = ()
    _begun: str = ""  # the address of the shared Ray

    def joined(self, settings: tuple[str, bool, int]) -> Any:
        """Return the connected module `ray`.

        Reconnect if this run needs other settings or if the caller has ended the shared Ray.
        """
        full_settings = (*settings, importable())
        if self._ray is not None and self._ray.is_initialized():
            if self._place() != self._begun:
                raise InputError(TAKEN)
            if full_settings == self._settings:
                return self._ray
        self.end()
        self._ray = self._until.enter_context(_joined(*settings))
        self._settings, self._begun = full_settings, self._place()
        return self._ray

    def _place(self) -> str:
        """Return the address of this Ray."""
        return self._ray.get_runtime_context().gcs_address

    def spare_for(self, kind: Any) -> list[Any]:
        """Return the idle workers of one kind, and kill workers of other kinds to free cores."""
        for other in [spare_kind for spare_kind in self.spare if spare_kind != kind]:
            for worker in self.spare.pop(other):
                self._ray.kill(worker)
        return self.spare.setdefault(kind, [])

    def end_after_error(self, kind: Any, *_: object) -> None:
        """End the shared Ray after a failed or interrupted run, whose workers may still be busy."""
        if kind is not None:
            self.end()

    def end(self) -> None:
        """Disconnect from the shared Ray. The next run starts another one."""
        self.spare, self._ray = {}, None
        self._until.close()


_shared: SharedRay | None = None


@contextlib.contextmanager
def shared_ray() -> Iterator[None]:
    """Let the runs in a `with` block share one Ray and its workers.

    Only the first run waits until Ray and the workers have started. The runs must not overlap in
    time. If a run sets another address or number of threads, a new Ray replaces the shared one.

    Returns:
        A context manager. The shared Ray ends with the `with` block.

    Example:
        >>> import fedmuon
        >>> with fedmuon.flower.shared_ray():  # slow: starts Ray
        ...     config = {"engine": {"name": "ray"}, "federation": {"rounds": 2}}
        ...     results = [fedmuon.run(config), fedmuon.run(config, recipe="fedavg")]
        >>> len(results)
        2
    """
    global _shared
    if _shared is not None:  # nested blocks: only the outer block ends the shared Ray
        yield
        return
    _shared = SharedRay()
    try:
        yield
    finally:
        ended, _shared = _shared, None
        ended.end()


def spare_workers(kind: Any) -> list[Any] | None:
    """Return the list of idle workers, from which a run takes workers and to which it returns them.

    If runs share no Ray, return None.
    """
    return None if _shared is None else _shared.spare_for(kind)


def require_cluster(address: str) -> None:
    """Raise an error if no Ray cluster answers at the address, before a run writes any file."""
    if address not in ("", LOCAL):
        quiet_ray()
        _require_listener(address)


def _require_listener(address: str) -> None:
    """Raise an error if no program listens at the address, or a program that cannot be Ray.

    Without this check, Ray would wait for minutes.
    """
    services: Any = importlib.import_module("ray._private.services")
    try:
        if address.startswith("ray://"):  # Ray's client server, which has its own port
            place = address.removeprefix("ray://").partition("/")[0]
        else:
            place = services.canonicalize_bootstrap_address(address) or ""
        if place and "://" not in place:
            host, _, port = place.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT) as link:
                if os.environ.get("RAY_USE_TLS", "0") == "0":  # TLS would not understand HTTP/2
                    _require_http2(link)
    except (OSError, ValueError) as error:
        raise InputError(_unreachable(error, address)) from error


def _require_http2(link: socket.socket) -> None:
    """Raise an OSError if the other side does not begin like a gRPC server, which Ray's head is.

    The first frame of every HTTP/2 server has the type SETTINGS (RFC 9113, section 3.4).
    """
    settings = 4
    link.settimeout(ANSWER)
    try:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, settings]) + bytes(5))
        header = b""
        while len(header) < 9 and (chunk := link.recv(9 - len(header))):
            header += chunk
    except TimeoutError as error:
        message = f"the program on this port did not answer within {ANSWER:g} s"
        raise OSError(message) from error
    if len(header) < 9 or header[3] != settings:
        raise OSError("the program on this port is not Ray")


def _unreachable(error: Exception, address: str) -> str:
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    if not address:
        return (
            f"Ray cannot start on this machine ({message}). Run the command with --verbose for "
            "details."
        )
    return (
        f"no Ray cluster answers at {address} ({message}). Start a cluster with `ray start "
        "--head`, set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH if the cluster needs a token, or leave "
        "the address out to start Ray on this machine."
    )


@contextlib.contextmanager
def _own(verbose: bool) -> Iterator[dict[str, Any]]:
    """Yield arguments that start a Ray on loopback with a new token, which its processes inherit.

    The folder and the processes are removed at the end. Neither Ray's monitor nor, unless
    `verbose`, its log monitor is started, because each run would wait a second for them.
    """
    # Ray's sockets are in this folder, and the path of a socket may have at most 107 characters.
    # Ray opens its own folder to everyone (0777), so it gets a folder inside this one.
    with mendable(Path("/tmp"), "write to"):
        folder = GuardedFolder("fm-ray-", "/tmp" if os.name == "posix" else None)
    try:
        if shutil.disk_usage(folder.path).free < LEAST:  # Ray itself would wait for a minute
            raise InputError(
                f"Ray needs disk space for its logs and sockets {disk_full(folder.path.parent)}"
            )
        token = folder.path / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        environment = {
            LOOPBACK: "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "SPT_NOENV": "1",  # otherwise Ray's agents overwrite their environment variables
            "PYTHONPATH": importable(),
            "RAY_AUTH_TOKEN": None,
            "RAY_ADDRESS": None,
        }
        with _environment(environment, _read_again):
            parameter: Any = importlib.import_module("ray._private.parameter")
            full = parameter.RayParams
            options = {"no_monitor": True, "include_log_monitor": verbose}
            supported = {
                name: on for name, on in options.items() if name in signature(full).parameters
            }
            parameter.RayParams = partial(full, **supported)
            try:
                yield {"_temp_dir": str(folder.path / "ray"), "include_dashboard": False}
            finally:
                parameter.RayParams = full
    finally:
        folder.close()


@contextlib.contextmanager
def _environment(
    variables: Mapping[str, str | None], changed: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Set or unset environment variables inside the block. Call `changed` after each change."""
    before = {name: os.environ.get(name) for name in variables}

    def set_to(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        changed()

    try:
        set_to(variables)
        yield
    finally:
        set_to(before)


def _read_again() -> None:
    """Make an imported Ray read the environment variables again, as Ray's own tests do."""
    if "ray" not in sys.modules:
        return
    constants: Any = importlib.import_module("ray._private.ray_constants")
    elsewhere = sys.platform in ("darwin", "win32")
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(LOOPBACK, not elsewhere)
    core = importlib.import_module("ray._raylet")
    if hasattr(core, "AuthenticationTokenLoader"):  # Ray 2.52 and later
        core.AuthenticationTokenLoader.instance().reset_cache()
        core.Config.initialize("")


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore this program's signal handlers, because Ray's SIGTERM handler exits the program."""
    before = [signal.getsignal(end) for end in ENDS]
    try:
        yield
    except SystemExit:
        raise Interrupted(signal.SIGTERM) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for end, handler in zip(ENDS, before, strict=True):
                signal.signal(end, handler)
