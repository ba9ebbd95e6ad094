"""The workers of a Grid on Ray, and batches of messages for the workers."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from flwr.app import Message, RecordDict
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayError,
    WorkerCrashedError,
)

from fedmuon.core.errors import InputError
from fedmuon.core.files import Record
from fedmuon.server.ray.flower_internals import with_content
from fedmuon.server.ray.worker import Worker

TRIES, PAUSE = 4, 0.1  # consecutive failed calls before a worker is abandoned; seconds between them
LOOK = 5.0  # seconds between checks for new machines
PATIENCE = 15.0  # seconds without any worker, after which a warning is logged
MEMORY = 0.7e9  # bytes of a worker that has loaded torch and Flower
NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # option of an actor -> resource of a machine
DIRECT = "RAY_max_direct_call_object_size"  # environment variable: maximum bytes sent in a call
WORTH = 0.05  # minimum seconds of work per call

Resources = dict[str, float]


class WorkerPool:
    """A pool of Ray actors with the same code. Each actor takes one call at a time.

    Attributes:
        all: All actors.
        idle: Actors that currently have no call.
        absent: Actors that are not ready: (time of the next query, actor, number of failures).
    """

    def __init__(
        self,
        resources: Resources,
        asked: int | None,
        most: int,
        held: tuple[Any, ...],
        spare: list[Any] | None = None,
    ) -> None:
        """Start actors.

        Args:
            resources: Options of Ray's actors.
            asked: Number of actors. None starts as many actors as fit on the machines.
            most: Maximum number of actors if `asked` is None.
            held: Arguments for the creation of each actor.
            spare: Idle actors of earlier pools, which are used first. When this pool is closed, its
                idle actors are added to this list.
        """
        if not ray.is_initialized():
            raise InputError(
                "Ray is not connected. Call ray.init() first, or use fedmuon.flower.simulate, "
                "which starts Ray."
            )
        if asked is not None and not (isinstance(asked, int) and asked >= 1):
            raise InputError(f"workers = {asked!r} is not valid. Use an integer of 1 or more.")
        self._resources, self._asked, self._most = resources, asked, most
        try:
            options = ray.remote(Worker).options(**resources)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InputError(
                f"resources = {resources} is not valid ({error!s:.100}). Set num_cpus, num_gpus "
                "or memory to numbers."
            ) from None
        self._make, self._held = options.remote, held
        require_room(resources, _machines())
        self._spare, self._earlier = spare, {*(spare or ())}
        self.all: list[Any] = []
        self.idle: list[Any] = []
        self.absent: list[tuple[float, Any, int]] = []
        self._begun, self._looked = time.monotonic(), -math.inf
        self.grow()

    def close(self) -> None:
        """End all actors. With `spare`, end only busy actors, and add idle actors to `spare`."""
        keeps = [] if self._spare is None else self.idle
        for worker in self.all:
            if worker in keeps:
                continue
            with contextlib.suppress(RayError):
                ray.kill(worker)
        if self._spare is not None:
            self._spare += keeps
        self.all, self.idle, self.absent = [], [], []

    def grow(self) -> None:
        """Start actors until the pool is complete.

        A complete pool has the requested number of actors. If no number was requested, it has as
        many actors as fit on the current machines.
        """
        if (now := time.monotonic()) < self._looked + LOOK:
            return
        self._looked = now
        if (size := self._asked) is None:
            needs = {"memory": MEMORY, **self._resources}  # default needs of a worker
            room = max(1, sum(_room(machine, needs) for machine in _machines()))
            size = min(self._most, room)
        for _ in range(size - len(self.all)):
            worker = self._spare.pop() if self._spare else self._make(*self._held)
            self.all.append(worker)
            self.expect(worker)

    def expect(self, worker: Any, tries: int = 0, error: RayError | None = None) -> None:
        """Use a worker as soon as it answers, or replace a worker that died.

        After a few consecutive failures, a worker is not started again. If no worker is left, raise
        `error`.
        """
        # The next call will show whether the actor is dead.
        unsure = isinstance(error, ActorUnavailableError)
        retries = (tries := tries - unsure) < TRIES
        if died(error) and not unsure:
            self.all.remove(worker)
            if retries := retries and bool(_machines()):
                self.all.append(worker := self._make(*self._held))
        elif not retries:
            self.all.remove(worker)
        if retries:
            self.absent.append((time.monotonic() + (PAUSE if error else 0.0), worker, tries))
        elif not self.all and error is not None:
            raise error

    def ask(self, worker: Any) -> Any:
        """Send a query that an actor answers as soon as it is ready.

        An actor of an earlier pool gets the arguments of this pool.
        """
        return worker.ready.remote(*(self._held if worker in self._earlier else ()))

    def due(self) -> list[tuple[Any, int]]:
        """Return the absent actors to query again now, and how often each of them has failed.

        The actors are removed from `absent`.
        """
        now, absent = time.monotonic(), self.absent
        self.absent = [entry for entry in absent if entry[0] > now]
        return [(worker, tries) for at, worker, tries in absent if at <= now]

    def complain(self) -> None:
        """Log a warning, only once, if no worker has started for a long time."""
        if time.monotonic() < self._begun + PATIENCE:
            return
        self.has_begun()
        free = {name: ray.available_resources().get(name, 0.0) for name in NAMES.values()}
        logging.getLogger("fedmuon").warning(
            "no worker has started within %.0f s. A worker needs %s, but only %s are free on the "
            "machines of Ray. Stop other Ray jobs, or lower [engine] cpus-per-client or "
            "gpus-per-client.",
            PATIENCE,
            wanted(self._resources),
            wanted(free),
        )

    def has_begun(self) -> None:
        """Record that a worker has answered, so that no warning is logged."""
        self._begun = math.inf

    def memory(self) -> list[Record]:
        """Return the peak memory in bytes of each actor that answers within a few seconds."""
        return self._reports("memory")

    def profiles(self) -> list[Record]:
        """Return the profile of each actor that answers within a few seconds."""
        return self._reports("profile")

    def _reports(self, method: str) -> list[Record]:
        """Return the results of a method of `Worker`, without actors that do not answer."""
        records: list[Record] = []
        with contextlib.suppress(RayError):  # a failed diagnosis must not fail a finished run
            queries = [getattr(worker, method).remote() for worker in self.all]
            ready = ray.wait(queries, num_returns=len(queries), timeout=LOOK)[0] if queries else []
            for query in ready:
                with contextlib.suppress(RayError):  # a dead worker
                    records.append(ray.get(query))
        return records


def died(error: BaseException | None) -> bool:
    """Return whether a worker's process died for another reason than a failure to load the app."""
    ended = (ActorDiedError, ActorUnavailableError, WorkerCrashedError, OutOfMemoryError)
    return isinstance(error, ended) and not getattr(error, "actor_init_failed", False)


def is_full(error: BaseException) -> bool:
    """Return whether an error says that Ray has no room for objects in memory and on disk."""
    return isinstance(getattr(error, "cause", error), ObjectStoreFullError | OutOfDiskError)


def why(error: RayError) -> str:
    """Describe in words why a worker does not reply."""
    kind = type(error).__name__
    if is_full(error):
        return f"Ray's object store is full, and so is the disk to which Ray moves objects ({kind})"
    if died(error):
        return (
            f"the worker process of this client died ({kind}), because the process was killed or "
            "ran out of memory"
        )
    return f"{kind}: {error}"


def require_room(resources: Resources, machines: list[Mapping[str, float]]) -> None:
    """Raise an error if no machine has room for a worker."""
    if any(_room(machine, resources) for machine in machines):
        return
    available = "; ".join(wanted({name: machine.get(name, 0.0) for name in NAMES.values()})
                          for machine in machines)  # fmt: skip
    raise InputError(
        f"no machine of the Ray cluster has room for a worker, which needs {wanted(resources)} "
        f"(the machines have {available}). Lower [engine] cpus-per-client or gpus-per-client."
    )


def wanted(resources: Mapping[str, float]) -> str:
    """Format resources as text, such as `CPU = 1 and GPU = 0.5`."""
    return " and ".join(
        f"{NAMES.get(name, name)} = {amount:g}" for name, amount in resources.items()
    )


def _room(machine: Mapping[str, float], resources: Resources) -> int:
    """Return how many workers with these resources fit on a machine."""
    rooms = [
        machine.get(NAMES.get(name, name), 0.0) // need for name, need in resources.items() if need
    ]
    return int(min(rooms, default=machine.get("CPU", 1.0)))


def _machines() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass
class Batch:
    """The messages of one call to a worker, with the start and the deadline of the call."""

    messages: list[Message]
    start: float = 0.0
    end: float = math.inf
    tries: int = 0  # number of failed calls to an absent worker
    ended: bool = False  # whether the worker was killed because it took too long

    @property
    def late(self) -> bool:
        """Whether the deadline of the call has passed."""
        return self.ended or self.end < time.monotonic()

    @cached_property
    def nodes(self) -> frozenset[int]:
        """The ids of the nodes that get these messages."""
        return frozenset(message.metadata.dst_node_id for message in self.messages)


def batches(messages: Sequence[Message], size: int) -> Iterator[Batch]:
    """Split messages into batches of `size` messages, in the same order.

    All messages to the same node are in one batch, which may therefore be larger. Each message can
    change the state of its node, and the next message to this node uses the changed state.
    """
    by_node: dict[int, list[Message]] = {}
    for message in messages:
        by_node.setdefault(message.metadata.dst_node_id, []).append(message)
    group: list[Message] = []
    for of_node in by_node.values():
        group += of_node
        if len(group) >= size:
            yield Batch(group)
            group = []
    if group:
        yield Batch(group)


def calls(share: float, each: float, most: int) -> int:
    """Return the number of calls into which a worker's share of the messages is split.

    Several calls balance the load, but each call costs some milliseconds.

    Args:
        share: Number of messages per worker.
        each: Seconds per message.
        most: Maximum number of calls.
    """
    return max(1, math.ceil(min(most, share * each / WORTH)))


def apart(messages: Sequence[Message]) -> tuple[RecordDict | None, list[Message]]:
    """Return the content that all messages share, and the messages without this content.

    If the messages have different contents, return None and the unchanged messages.
    """
    content = messages[0].content
    if any(message.content is not content for message in messages[1:]):
        return None, list(messages)
    return content, [with_content(message, None) for message in messages]


def large(content: RecordDict) -> bool:
    """Return whether Ray would copy this content into its object store in each call."""
    direct = int(os.environ.get(DIRECT, 102_400))  # 102,400 is Ray's default
    records = content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values()) > direct
