"""Flower's Grid on Ray actors: messages go straight to a worker, replies straight back.

Flower's own simulation keeps messages in a table that it scans, one message a node a scan. Here a
worker is handed the messages of many clients in one call; what they share crosses once a call. A
node is a number, so a client costs nothing until it is asked.

A worker that dies, or does not answer in time, comes back; what it had is asked again one message
at a time, so that the one at fault takes no other with it.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from ray.exceptions import ActorUnavailableError, RayError

from fedmuon.server.batches import Batch, apart, calls, fitting, large
from fedmuon.server.flower_parts import empty_run, identify, numbered, refusal
from fedmuon.server.ray_worker import Together, Worker

TRIES, PAUSE = 4, 0.1  # calls that a worker may fail without having answered one; seconds between
LOOK = 5.0  # seconds between looks for machines that have joined


class RayGrid(Grid):
    """The nodes 0 to N - 1, whose ClientApp runs in workers of the Ray that is connected."""

    def __init__(
        self,
        client_app: ClientApp,
        num_supernodes: int,
        *,
        workers: int | None = None,
        most: int | None = None,
        pieces: int = 4,
        resources: dict[str, float] | None = None,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        """`resources` are options of Ray's actors; `workers` are as many as fit unless given, and
        never more than `most`, the messages of a round. Apps that take one message at a time
        are asked in up to `pieces` calls a worker and round, for an even load."""
        identify()
        self.nodes, self._run = num_supernodes, empty_run()
        self._pieces = 1 if isinstance(client_app, Together) else pieces
        self._asked, self._most = workers, most or num_supernodes
        self._resources = {"num_cpus": 1.0, **(resources or {})}
        self._make = ray.remote(Worker).options(max_restarts=-1, **self._resources).remote
        self._held = (client_app, num_supernodes, run_config or {})
        self._each: dict[str, float] = {}  # seconds that a message of that type took lately
        self._queue: deque[Batch] = deque()
        self._running: dict[Any, tuple[Any, Batch]] = {}
        self._wanted: set[str] = set()  # messages whose replies somebody waits for
        self._done: dict[str, Message] = {}
        self._fresh = False  # a reply has come since somebody looked
        self._states: dict[int, RecordDict] = {}
        self._idle: list[Any] = []
        self._absent: list[tuple[float, Any, int]] = []  # when to ask which worker, how often asked
        self._workers: list[Any] = []
        self._looked = -math.inf
        self.mended: dict[str, str] = {}  # messages since the last push that were asked again: why
        self._grow()

    def __enter__(self) -> "RayGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            with contextlib.suppress(RayError):
                ray.kill(worker)
        self._workers, self._idle, self._running, self._absent = [], [], {}, []
        self._queue.clear()

    def set_run(self, run: Run) -> None:
        """Take that for the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """What Flower knows of the run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes, which are always there."""
        return range(self.nodes)

    @property
    def workers(self) -> int:
        """How many there are, or are about to be."""
        return len(self._workers)

    @property
    def absent(self) -> int:
        """Workers that have not begun, or are about to begin again."""
        return len(self._absent) + sum(not batch.messages for _, batch in self._running.values())

    def memory(self) -> list[int]:
        """The most bytes that each worker has held, of those that answer within a few seconds."""
        asked = [worker.memory.remote() for worker in self._workers]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK)
        return [int(one) for one in ray.get(ready)]

    def node_of(self, partition: int) -> int:
        """The node that holds a partition; nobody has to ask them all."""
        return partition

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Ask the workers; the ids of the messages."""
        self._grow()
        self.mended = {}
        sent = list(messages)
        names = [numbered(message) for message in sent]
        self._wanted.update(names)
        self._queue.extend(self._batches(sent))
        self._dispatch()
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these that have come."""
        return self.pull_within(message_ids, 0.0)

    def pull_within(self, message_ids: Iterable[str], seconds: float) -> list[Message]:
        """The same, waiting for a reply for so long at most."""
        self._wait(seconds)
        self._fresh = False
        found = [name for name in message_ids if name in self._done]
        self._wanted.difference_update(found)
        return [self._done.pop(name) for name in found]

    def forget(self, message_ids: Iterable[str]) -> None:
        """Nobody waits for the replies to these any more: those not asked yet are not asked."""
        self._wanted.difference_update(message_ids)
        self._done = {name: reply for name, reply in self._done.items() if name in self._wanted}
        for batch in self._queue:
            batch.messages = self._still_wanted(batch)
        self._queue = deque(batch for batch in self._queue if batch.messages)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Ask, and wait for the answers."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        names, replies = self.push_messages(messages), []
        while len(replies) < len(names) and time.monotonic() < end:
            replies += self.pull_within(names, min(1.0, end - time.monotonic()))
        self.forget(names)
        return replies

    def _wait(self, seconds: float) -> None:
        """Until a reply comes, for so long at most."""
        self._end_late()
        self._call_absent()
        seconds = max(0.0, min(seconds, PAUSE) if self._absent else seconds)
        if self._running:
            ready, _ = ray.wait(list(self._running), timeout=seconds)
            others = [one for one in self._running if one not in ready] if ready else []
            more = ray.wait(others, num_returns=len(others), timeout=0)[0] if others else []
            for place in [*ready, *more]:
                self._take(place)
            self._dispatch()
        elif not self._fresh:
            time.sleep(seconds)

    def _batches(self, messages: Sequence[Message]) -> Iterator[Batch]:
        """An even share of the messages for each worker, or several smaller ones."""
        workers = max(1, len(self._workers))
        types = {one.metadata.message_type for one in messages}
        each = max((self._each.get(one, math.inf) for one in types), default=0.0)
        pieces = workers * calls(len(messages) / workers, each, self._pieces)
        size = max(1, math.ceil(len(messages) / pieces))
        for start in range(0, len(messages), size):
            yield Batch(list(messages[start : start + size]))

    def _dispatch(self) -> None:
        """Give the next messages to the workers that have none."""
        shared: dict[int, Any] = {}
        while self._queue and self._idle:
            self._ask(self._idle.pop(), self._queue.popleft(), shared)

    def _ask(self, worker: Any, batch: Batch, shared: dict[int, Any]) -> None:
        """One call; large content that several calls share lies in Ray's store once."""
        batch.start = time.monotonic()
        batch.end = batch.start + batch.ttl / min(2, len(batch.messages))
        content, sent = apart(batch.messages)
        if content is not None and large(content):
            if id(content) not in shared:
                shared[id(content)] = ray.put(content)
            content = shared[id(content)]
        states = [self._states.get(one.metadata.dst_node_id) for one in batch.messages]
        self._running[worker.answer.remote(content, sent, states)] = (worker, batch)

    def _take(self, place: Any) -> None:
        """The replies of one call; what failed is asked again one by one, or refused."""
        worker, batch = self._running.pop(place)
        try:
            found = ray.get(place)
        except RayError as error:
            self._await(worker, batch.tries + 1, error)
            if len(batch.messages) > 1:
                again = self._still_wanted(batch)
                self._queue.extendleft(Batch([one]) for one in reversed(again))
                why = f"its worker's {type(error).__name__}, and it was asked again"
                self.mended |= {one.metadata.message_id: why for one in again}
            else:
                for message in batch.messages:
                    self._keep(refusal(message, f"{type(error).__name__}: {error}"))
            return
        self._idle.append(worker)
        took = (time.monotonic() - batch.start) / max(1, len(found))
        self._each |= {one.metadata.message_type: took for one in batch.messages}
        for reply, state in found:
            self._keep(reply)
            if state is not None:
                self._states[reply.metadata.src_node_id] = state

    def _await(self, worker: Any, tries: int = 0, error: RayError | None = None) -> None:
        """Use the worker when it answers; one that cannot start is left, and the last one tells."""
        if isinstance(error, ActorUnavailableError):  # it is starting, however long that takes
            tries -= 1
        if tries < TRIES:
            self._absent.append((time.monotonic() + (PAUSE if error else 0.0), worker, tries))
        else:
            self._workers.remove(worker)
            if not self._workers and error is not None:
                raise error

    def _call_absent(self) -> None:
        """Ask those who are waited for whether they are there."""
        now, absent = time.monotonic(), self._absent
        self._absent = [one for one in absent if one[0] > now]
        for _, worker, tries in (one for one in absent if one[0] <= now):
            self._running[worker.ready.remote()] = (worker, Batch([], tries=tries))

    def _still_wanted(self, batch: Batch) -> list[Message]:
        return [one for one in batch.messages if one.metadata.message_id in self._wanted]

    def _keep(self, reply: Message) -> None:
        if (name := reply.metadata.reply_to_message_id) in self._wanted:
            self._done[name] = reply
            self._fresh = True

    def _end_late(self) -> None:
        """End workers that take longer than their messages live."""
        now = time.monotonic()
        for worker, batch in list(self._running.values()):
            if batch.end < now:
                batch.end = math.inf
                ray.kill(worker, no_restart=False)

    def _grow(self) -> None:
        """As many workers as were asked for, or as fit on the machines that are there now."""
        if (now := time.monotonic()) < self._looked + LOOK:
            return
        self._looked = now
        wanted = self._asked or min(self._most, fitting(self._resources, ray.cluster_resources()))
        for _ in range(wanted - len(self._workers)):
            worker = self._make(*self._held)
            self._workers.append(worker)
            self._await(worker)
