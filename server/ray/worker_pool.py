"""The workers of a Grid on Ray: as many as fit, those who do not answer yet, those at leisure."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from flwr.app import Message, RecordDict
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayError,
    WorkerCrashedError,
)

from fedmuon.core.errors import InputError
from fedmuon.server.ray.flower_internals import with_content
from fedmuon.server.ray.worker import Worker

TRIES, PAUSE = 4, 0.1  # calls that workers may fail in one place in a row; seconds between
LOOK = 5.0  # seconds between looks for machines that have joined
PATIENCE = 15.0  # seconds without any worker, after which somebody is told
MEMORY = 0.7e9  # bytes of a worker that has loaded torch and Flower
NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # of options, as Ray's machines call them

Resources = dict[str, float]


class Crew:
    """Actors of one kind, each of which takes one call at a time."""

    def __init__(
        self, resources: Resources, asked: int | None, most: int, held: tuple[Any, ...]
    ) -> None:
        """`asked` of them, or as many as fit but at most `most`, made with `held`."""
        _require_connected()
        if asked is not None and not (isinstance(asked, int) and asked >= 1):
            raise InputError(f"workers = {asked!r} is refused: give a whole number of 1 or more")
        self._resources, self._asked, self._most = resources, asked, most
        try:
            options = ray.remote(Worker).options(**resources)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InputError(
                f"resources = {resources} is refused ({error!s:.100}): name num_cpus, num_gpus or "
                "memory, with numbers"
            ) from None
        self._make, self._held = options.remote, held
        require_room(resources, _machines())
        self.all: list[Any] = []
        self.idle: list[Any] = []
        self.absent: list[tuple[float, Any, int]] = []  # when to ask whom, how often asked
        self._begun, self._looked = time.monotonic(), -math.inf
        self.grow()

    def close(self) -> None:
        """End them."""
        for worker in self.all:
            with contextlib.suppress(RayError):
                ray.kill(worker)
        self.all, self.idle, self.absent = [], [], []

    def grow(self) -> None:
        """As many as were asked for, or as fit on the machines that are there now."""
        if (now := time.monotonic()) < self._looked + LOOK:
            return
        self._looked = now
        wanted = self._asked or min(self._most, fitting(self._resources, _machines()))
        for _ in range(wanted - len(self.all)):
            worker = self._make(*self._held)
            self.all.append(worker)
            self.expect(worker)

    def expect(self, worker: Any, tries: int = 0, error: RayError | None = None) -> None:
        """Use the worker when it answers, or another one in place of one that died. After a few
        deaths in a row the place is given up; the last place raises the error."""
        unsure = isinstance(error, ActorUnavailableError)  # dead or not, the next call will tell
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

    def due(self) -> list[tuple[Any, int]]:
        """Whom to ask now whether they are there, and how often that was."""
        now, absent = time.monotonic(), self.absent
        self.absent = [one for one in absent if one[0] > now]
        return [(worker, tries) for at, worker, tries in absent if at <= now]

    def complain(self) -> None:
        """Say once that none has begun for long."""
        if time.monotonic() < self._begun + PATIENCE:
            return
        self._begun = math.inf
        free = {name: ray.available_resources().get(name, 0.0) for name in NAMES.values()}
        logging.getLogger("fedmuon").warning(
            "no worker has begun in %.0f s: one wants %s, and of Ray's machines %s are free; what "
            "else holds them?", PATIENCE, wanted(self._resources), wanted(free)
        )  # fmt: skip

    def answered(self) -> None:
        """One is there."""
        self._begun = math.inf

    def memory(self) -> list[int]:
        """The most bytes that each has held, of those that answer within a few seconds."""
        asked = [worker.memory.remote() for worker in self.all]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK)
        return [int(one) for one in ray.get(ready)]


def died(error: BaseException | None) -> bool:
    """Whether a worker's process ended, other than by failing to load the app."""
    ended = (ActorDiedError, ActorUnavailableError, WorkerCrashedError, OutOfMemoryError)
    return isinstance(error, ended) and not getattr(error, "actor_init_failed", False)


def why(error: RayError) -> str:
    """Why a worker gives no reply."""
    kind = type(error).__name__
    if died(error):
        return f"its worker process died ({kind}): it was killed, or ran out of memory"
    return f"{kind}: {error}"


def fitting(resources: Resources, machines: list[Mapping[str, float]]) -> int:
    """How many actors of these resources the machines have room for, at least one; memory that was
    not asked for is what such a worker takes."""
    return max(1, sum(_on(one, {"memory": MEMORY, **resources}) for one in machines))


def require_room(resources: Resources, machines: list[Mapping[str, float]]) -> None:
    """Refuse workers that none of the machines could ever hold."""
    if any(_on(one, resources) for one in machines):
        return
    there = "; ".join(wanted({name: one.get(name, 0.0) for name in NAMES.values()})
                      for one in machines)  # fmt: skip
    raise InputError(
        f"no machine of Ray's has room for a worker, which wants {wanted(resources)} (there is "
        f"{there}): ask for less, [engine] cpus-per-client and gpus-per-client in a config"
    )


def wanted(resources: Mapping[str, float]) -> str:
    """Resources in words."""
    return " and ".join(f"{NAMES.get(name, name)} = {each:g}" for name, each in resources.items())


def _on(machine: Mapping[str, float], resources: Resources) -> int:
    rooms = [
        machine.get(NAMES.get(name, name), 0.0) // need for name, need in resources.items() if need
    ]
    return int(min(rooms, default=machine.get("CPU", 1.0)))


def _machines() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _require_connected() -> None:
    if not ray.is_initialized():
        raise InputError(
            "no Ray is connected: call ray.init() first, or let fedmuon.flower.simulate start one"
        )


# What a worker of Ray's is asked at once.

DIRECT = "RAY_max_direct_call_object_size"  # bytes that Ray sends with a call, if it was told
WORTH = 0.05  # seconds of work that a call is worth


@dataclass
class Batch:
    """Messages that a worker is asked at once, when that was, and when it has to have answered."""

    messages: list[Message]
    start: float = 0.0
    end: float = math.inf
    tries: int = 0  # of a worker that is waited for
    ended: bool = False  # its worker was, as it took too long

    @property
    def ttl(self) -> float:
        """Seconds for which all of them live."""
        return min(message.metadata.ttl for message in self.messages)

    @property
    def late(self) -> bool:
        """Whether its time is up."""
        return self.ended or self.end < time.monotonic()

    @cached_property
    def nodes(self) -> frozenset[int]:
        """Whom it is for: a node has one message at a time."""
        return frozenset(message.metadata.dst_node_id for message in self.messages)


def batches(messages: Sequence[Message], size: int) -> Iterator[Batch]:
    """In their order, so many at once and more only where they are for one node, which remembers
    from message to message."""
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
    """In how many calls a worker gets its share of the messages, each of so many seconds: several
    make the load even, but each costs some milliseconds."""
    return max(1, math.ceil(min(most, share * each / WORTH)))


def apart(messages: Sequence[Message]) -> tuple[RecordDict | None, list[Message]]:
    """The content that all messages share, and these without it; if they do not, they keep it."""
    content = messages[0].content
    if any(one.content is not content for one in messages[1:]):
        return None, list(messages)
    return content, [with_content(one, None) for one in messages]


def large(content: RecordDict) -> bool:
    """Whether Ray would copy it into its store for each call: once is enough."""
    direct = int(os.environ.get(DIRECT, 102_400))  # Ray's own, of which nothing else tells
    records = content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values()) > direct


def singles(messages: Iterable[Message]) -> list[Message]:
    """Each a message of its own, also where one stands there twice."""
    seen: dict[int, Message] = {}
    return [with_content(one, one.content) if id(one) in seen else seen.setdefault(id(one), one)
            for one in messages]  # fmt: skip
