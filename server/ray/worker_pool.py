"""The workers of a Grid on Ray, and the batches of messages that they get."""

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

TRIES, PAUSE = 4, 0.1  # failed calls in a row after which a worker is given up; seconds between
LOOK = 5.0  # seconds between looks for machines that have joined
PATIENCE = 15.0  # seconds without any worker, after which a warning is logged
MEMORY = 0.7e9  # bytes of a worker that has loaded torch and Flower
NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # an option of Ray -> a resource of its machines
DIRECT = "RAY_max_direct_call_object_size"  # bytes that Ray sends with a call, if set
WORTH = 0.05  # seconds of work that justify a call

Resources = dict[str, float]


class WorkerPool:
    """Actors of one kind, each of which takes one call at a time.

    Attributes:
        all: Every actor.
        idle: Actors without a call.
        absent: Actors that do not answer yet: when to ask, whom, and how often that failed.
    """

    def __init__(
        self,
        resources: Resources,
        asked: int | None,
        most: int,
        held: tuple[Any, ...],
        spare: list[Any] | None = None,
    ) -> None:
        """Start `asked` actors, or as many as fit but at most `most`, with the arguments `held`;
        first those that are `spare`, to which the idle ones return at the end."""
        if not ray.is_initialized():
            raise InputError(
                "Ray is not connected: call ray.init() first, or let fedmuon.flower.simulate "
                "start Ray"
            )
        if asked is not None and not (isinstance(asked, int) and asked >= 1):
            raise InputError(f"workers = {asked!r} is not valid: give a whole number of 1 or more")
        self._resources, self._asked, self._most = resources, asked, most
        try:
            options = ray.remote(Worker).options(**resources)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InputError(
                f"resources = {resources} is not valid ({error!s:.100}): name num_cpus, num_gpus "
                "or memory, with numbers"
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
        """End all actors, or all that are at work."""
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
        """Start the actors that were asked for, or that fit on the machines that are there now."""
        if (now := time.monotonic()) < self._looked + LOOK:
            return
        self._looked = now
        if (wanted := self._asked) is None:
            needs = {"memory": MEMORY, **self._resources}  # default needs of a worker
            room = max(1, sum(_room(one, needs) for one in _machines()))
            wanted = min(self._most, room)
        for _ in range(wanted - len(self.all)):
            worker = self._spare.pop() if self._spare else self._make(*self._held)
            self.all.append(worker)
            self.expect(worker)

    def expect(self, worker: Any, tries: int = 0, error: RayError | None = None) -> None:
        """Use the worker when it answers, or a new one if it died.

        After a few deaths in a row a worker is given up. The last one raises the error.
        """
        unsure = isinstance(
            error, ActorUnavailableError
        )  # the next call will show whether it is dead
        again = (tries := tries - unsure) < TRIES
        if died(error) and not unsure:
            self.all.remove(worker)
            if again := again and bool(_machines()):
                self.all.append(worker := self._make(*self._held))
        elif not again:
            self.all.remove(worker)
        if again:
            self.absent.append((time.monotonic() + (PAUSE if error else 0.0), worker, tries))
        elif not self.all and error is not None:
            raise error

    def ask(self, worker: Any) -> Any:
        """Ask an actor to answer as soon as it can; one of an earlier pool is handed the arguments
        of this one."""
        return worker.ready.remote(*(self._held if worker in self._earlier else ()))

    def due(self) -> list[tuple[Any, int]]:
        """The absent actors to ask now, and how often that failed; they are no longer absent."""
        now, absent = time.monotonic(), self.absent
        self.absent = [one for one in absent if one[0] > now]
        return [(worker, tries) for at, worker, tries in absent if at <= now]

    def complain(self) -> None:
        """Log once that no worker has begun for long."""
        if time.monotonic() < self._begun + PATIENCE:
            return
        self.has_begun()
        free = {name: ray.available_resources().get(name, 0.0) for name in NAMES.values()}
        logging.getLogger("fedmuon").warning(
            "no worker has started in %.0f s. A worker needs %s, and %s are free on Ray's "
            "machines: check which other jobs use them",
            PATIENCE,
            wanted(self._resources),
            wanted(free),
        )

    def has_begun(self) -> None:
        """Note that a worker answers, so that nothing is logged."""
        self._begun = math.inf

    def memory(self) -> list[Record]:
        """The maximum memory of each actor that answers within a few seconds, in bytes."""
        found: list[Record] = []
        with contextlib.suppress(RayError):  # a diagnosis: no finished run may fail by it
            asked = [worker.memory.remote() for worker in self.all]
            ready = ray.wait(asked, num_returns=len(asked), timeout=LOOK)[0] if asked else []
            for one in ready:
                with contextlib.suppress(RayError):  # a dead worker
                    found.append(ray.get(one))
        return found


def died(error: BaseException | None) -> bool:
    """Whether a worker's process died, unless it failed to load the app."""
    ended = (ActorDiedError, ActorUnavailableError, WorkerCrashedError, OutOfMemoryError)
    return isinstance(error, ended) and not getattr(error, "actor_init_failed", False)


def is_full(error: BaseException) -> bool:
    """Whether an object found no room in Ray's store, nor on the disk that Ray would move it to."""
    return isinstance(getattr(error, "cause", error), ObjectStoreFullError | OutOfDiskError)


def why(error: RayError) -> str:
    """Why a worker does not reply."""
    kind = type(error).__name__
    if is_full(error):
        return f"Ray's object store is full, and so is the disk that it moves objects to ({kind})"
    if died(error):
        return f"its worker process died ({kind}): it was killed, or ran out of memory"
    return f"{kind}: {error}"


def require_room(resources: Resources, machines: list[Mapping[str, float]]) -> None:
    """Reject workers that none of the machines could ever hold."""
    if any(_room(one, resources) for one in machines):
        return
    there = "; ".join(wanted({name: one.get(name, 0.0) for name in NAMES.values()})
                      for one in machines)  # fmt: skip
    raise InputError(
        f"no machine of the Ray cluster has room for a worker, which needs {wanted(resources)} "
        f"(there is {there}): lower [engine] cpus-per-client or gpus-per-client"
    )


def wanted(resources: Mapping[str, float]) -> str:
    """Resources in words."""
    return " and ".join(f"{NAMES.get(name, name)} = {each:g}" for name, each in resources.items())


def _room(machine: Mapping[str, float], resources: Resources) -> int:
    """How many workers with these resources fit on a machine."""
    rooms = [
        machine.get(NAMES.get(name, name), 0.0) // need for name, need in resources.items() if need
    ]
    return int(min(rooms, default=machine.get("CPU", 1.0)))


def _machines() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass
class Batch:
    """Messages of one call to a worker, when it was made, and when it must be answered."""

    messages: list[Message]
    start: float = 0.0
    end: float = math.inf
    tries: int = 0  # failed calls to a worker that is absent
    ended: bool = False  # whether its worker was ended because it took too long

    @property
    def late(self) -> bool:
        """Whether its time is up."""
        return self.ended or self.end < time.monotonic()

    @cached_property
    def nodes(self) -> frozenset[int]:
        """The nodes that get the messages: a node has one message at a time."""
        return frozenset(message.metadata.dst_node_id for message in self.messages)


def batches(messages: Sequence[Message], size: int) -> Iterator[Batch]:
    """Split messages, in order, into batches of `size`; a batch has more if they are for one node,
    which has a state from message to message."""
    by_node: dict[int, list[Message]] = {}
    for message in messages:
        by_node.setdefault(message.metadata.dst_node_id, []).append(message)
    some: list[Message] = []
    for own in by_node.values():
        some += own
        if len(some) >= size:
            yield Batch(some)
            some = []
    if some:
        yield Batch(some)


def calls(share: float, each: float, most: int) -> int:
    """In how many calls a worker gets its share of the messages, of `each` seconds per message:
    several balance the load, but each costs some milliseconds."""
    return max(1, math.ceil(min(most, share * each / WORTH)))


def apart(messages: Sequence[Message]) -> tuple[RecordDict | None, list[Message]]:
    """Split messages that share their content into the content and messages without it; None and
    the messages as they are if they do not."""
    content = messages[0].content
    if any(one.content is not content for one in messages[1:]):
        return None, list(messages)
    return content, [with_content(one, None) for one in messages]


def large(content: RecordDict) -> bool:
    """Whether Ray would copy the content into its store for each call: once is enough."""
    direct = int(os.environ.get(DIRECT, 102_400))  # Ray's default
    records = content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values()) > direct
