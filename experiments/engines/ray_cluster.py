"""The Ray of a run: a cluster that is joined and left, or a local Ray.

A local Ray listens only on loopback, requires a new token from every caller, stores its files in a
folder that only this user can read, and ends with this process. A cluster belongs to whoever runs
it; its `RAY_AUTH_MODE` and token, if it has one, are taken from the environment.
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
    "RAY_task_events_report_interval_ms": "0",  # or Ray's memory grows with every task
    "RAY_worker_niceness": "0",  # its default leaves workers little time on busy machines
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a late call would start another Ray, open to everyone
}
THREADS = "FEDMUON_CLIENT_THREADS"  # threads of a worker
LOCAL = "local"  # the address that starts a Ray of our own, as none does
CONNECT = 3.0  # seconds within which a cluster's address has to take a connection
LEAST = 1 << 18  # bytes of its folder's disk without which Ray does not start
_driving = threading.Lock()
TAKEN = (
    "this program is already connected to Ray: call ray.shutdown() first, or pass that "
    "connection to fedmuon.flower.RayGrid"
)
# Ray takes loopback for a node's address only where it believes that clusters do not work.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def quiet_ray() -> None:
    """Turn off unwanted output and services of Ray and Flower before they are imported."""
    os.environ.update(QUIET)
    # Bytes that travel with a call; more than that are quicker by Ray's store.
    os.environ.setdefault("RAY_max_direct_call_object_size", "500000")
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)  # Ray would use it in notebooks


@contextlib.contextmanager
def connected(address: str, verbose: bool = False, threads: int = 1) -> Iterator[Any]:
    """Yield the module `ray`, of which this process is the driver; at the end it has left, and a
    Ray of our own is gone, unless runs share it (`shared_ray`).

    Workers find what we can import, and have `threads` of torch's: those of our own Ray inherit
    both, from its start. A runtime environment says so to a cluster; its agent, and workers that
    were started before they knew, would cost our own a second or two.
    """
    quiet_ray()
    address = "" if address == LOCAL else address
    # A process is the driver of one Ray, which no other thread may end meanwhile.
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
        except SystemError as error:  # how Ray's compiled code ends if it is interrupted
            if isinstance(error.__cause__, Interrupted | KeyboardInterrupt):
                raise error.__cause__ from None
            raise


@contextlib.contextmanager
def _joined(address: str, verbose: bool, threads: int) -> Iterator[Any]:
    """The module `ray` while this process is connected; a Ray of our own if there is no address."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        raise InputError(TAKEN)
    given: dict[str, Any] = {
        "log_to_driver": verbose,
        "logging_level": "INFO" if verbose else "ERROR",
    }
    with contextlib.ExitStack() as until:
        until.enter_context(_environment({THREADS: str(threads)}))
        if address:
            _require_listener(address)
            given["address"] = address
            told = {"PYTHONPATH": importable(), THREADS: str(threads)}
            given["runtime_env"] = {"env_vars": told}
        else:
            given |= until.enter_context(_own(verbose))
        import ray  # after its environment was set

        try:
            with _signals_kept():
                ray.init(**given)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            ray.shutdown()
            raise InputError(_unreachable(error, address)) from error
        until.callback(ray.shutdown)
        yield ray


@dataclass
class SharedRay:
    """The Ray that runs share, and the workers that wait for the next run.

    Attributes:
        spare: What workers are made with -> those that are idle.
    """

    spare: dict[Any, list[Any]] = field(default_factory=dict)
    _until: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _ray: Any = None
    _settings: tuple[Any, ...] = ()
    _begun: str = ""  # its place

    def joined(self, settings: tuple[str, bool, int]) -> Any:
        """The module `ray`, connected as the last time, or anew if this run wants another Ray or
        the caller has ended that one."""
        wanted = (*settings, importable())
        if self._ray is not None and self._ray.is_initialized():
            if self._place() != self._begun:
                raise InputError(TAKEN)
            if wanted == self._settings:
                return self._ray
        self.end()
        self._ray = self._until.enter_context(_joined(*settings))
        self._settings, self._begun = wanted, self._place()
        return self._ray

    def _place(self) -> str:
        """By which it is known from a Ray that the caller may have started meanwhile."""
        return self._ray.get_runtime_context().gcs_address

    def spare_for(self, kind: Any) -> list[Any]:
        """The idle workers of a kind. Others end, so that theirs are the cores."""
        for other in [one for one in self.spare if one != kind]:
            for worker in self.spare.pop(other):
                self._ray.kill(worker)
        return self.spare.setdefault(kind, [])

    def end_after_error(self, kind: Any, *_: object) -> None:
        """End it after a run that failed or was interrupted: its workers may still be at work."""
        if kind is not None:
            self.end()

    def end(self) -> None:
        """Leave it; the next run starts another."""
        self.spare, self._ray = {}, None
        self._until.close()


_shared: SharedRay | None = None


@contextlib.contextmanager
def shared_ray() -> Iterator[None]:
    """Let the runs in a `with` block share one Ray and its workers.

    Only the first run waits until Ray and the workers have started. Runs follow each other. A run
    that asks for other threads or another address gets a new Ray, which replaces the last one.

    Returns:
        A context manager. The shared Ray ends with the block.

    Example:
        >>> import fedmuon
        >>> with fedmuon.flower.shared_ray():  # slow: starts Ray
        ...     config = {"engine": {"name": "ray"}, "federation": {"rounds": 2}}
        ...     results = [fedmuon.run(config), fedmuon.run(config, recipe="fedavg")]
        >>> len(results)
        2
    """
    global _shared
    if _shared is not None:  # the outer block ends it
        yield
        return
    _shared = SharedRay()
    try:
        yield
    finally:
        ended, _shared = _shared, None
        ended.end()


def spare_workers(kind: Any) -> list[Any] | None:
    """Idle workers of earlier runs, for a run to take from and to give back to; None if runs share
    no Ray."""
    return None if _shared is None else _shared.spare_for(kind)


def require_cluster(address: str) -> None:
    """Reject an address where no Ray cluster answers, before a run writes any file."""
    if address not in ("", LOCAL):
        quiet_ray()
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
        return f"Ray does not start on this machine ({said}): run with --verbose for details"
    return (
        f"no Ray cluster answers at {address} ({said}). Start one with `ray start --head`, set "
        "RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH if it needs a token, or leave the address out to "
        "start Ray locally."
    )


@contextlib.contextmanager
def _own(verbose: bool) -> Iterator[dict[str, Any]]:
    """Arguments that start a Ray on loopback with a new token, which its processes inherit.

    Its folder and processes are removed afterwards. Two processes of Ray are not started, because
    they would take a second of each run: the monitor and, unless `verbose`, the log monitor.
    """
    # Ray's sockets live in this folder, and a socket's path may have 107 characters. Ray opens what
    # it makes to everyone (0777), hence a folder within the folder.
    with mendable(Path("/tmp"), "write to"):
        folder = GuardedFolder("fm-ray-", "/tmp" if os.name == "posix" else None)
    try:
        if shutil.disk_usage(folder.path).free < LEAST:  # Ray would wait for a minute
            raise InputError(
                f"Ray needs room for its logs and sockets {disk_full(folder.path.parent)}"
            )
        token = folder.path / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        environment = {
            LOOPBACK: "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "SPT_NOENV": "1",  # keeps agents from overwriting the environment that names them
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
