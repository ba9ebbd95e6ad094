"""Flower's Grid on Ray actors: messages go directly to a worker, and replies directly back.

Flower's own simulation stores messages in a table that it scans, one message per node and scan.
Here one call hands the messages of many clients to a worker, and content that they share is sent
once per call. A node that was never asked takes about 100 bytes. A node gets one message at a time,
even if several threads of a server send messages.

A worker that dies, or does not answer in time, is replaced. Its messages are sent again one by one,
so that a client at fault does not affect others. Clients that had already answered in that call do
so twice, from the state that they had before. A message's time to live counts from when a worker
takes it, so waiting for a worker costs a client nothing. When it is over, the reply is the error
MESSAGE_UNAVAILABLE, as from a SuperLink.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import ray
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from ray.exceptions import RayError

from fedmuon.core.errors import InputError
from fedmuon.core.files import Record
from fedmuon.server.messaging import Failures
from fedmuon.server.ray.flower_internals import (
    RUN,
    expired,
    flat,
    identify,
    node_ids,
    numbered,
    refusal,
    with_content,
)
from fedmuon.server.ray.worker import Together
from fedmuon.server.ray.worker_pool import (
    PAUSE,
    Batch,
    WorkerPool,
    apart,
    batches,
    calls,
    large,
    why,
)


class RayGrid(Grid):
    """A Flower Grid whose ClientApps run in worker processes of the connected Ray.

    Node ids are random numbers of 64 bits, as in Flower. `node_of` tells which node holds a
    partition.

    Args:
        client_app: The app of the clients.
        num_supernodes: Number of nodes.
        workers: Number of worker processes; as many as fit by default.
        most: Maximum number of workers, for example the messages of a round.
        pieces: Maximum number of calls per worker and round, for apps that take one message at a
            time. Several calls balance the load.
        resources: Options of Ray's actors.
        run_config: Flower's run config.
        again: Whether messages are sent again if their worker was lost with several of them. Set it
            to False if a client must not answer twice.
        shows_errors: Whether the first error of a client is logged with its traceback, and the
            others are counted.
        seed: Makes node ids reproducible. Without it they differ from grid to grid.
        spare: Idle workers of earlier grids with the same resources. They are used first, and
            workers that are idle at the end are added. Without it, all workers end.

    Example:
        >>> from fedmuon.flower import RayGrid, shared_ray
        >>> with shared_ray():  # doctest: +SKIP
        ...     grid = RayGrid(client_app, num_supernodes=100)
    """

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
        again: bool = True,
        shows_errors: bool = True,
        seed: int | None = None,
        spare: list[Any] | None = None,
    ) -> None:
        identify()
        if num_supernodes < 1:
            raise InputError(f"num_supernodes = {num_supernodes} is not valid: give 1 node or more")
        self._ids, self._run = node_ids(num_supernodes, seed), Run.create_empty(RUN)
        self._partitions = {node: place for place, node in enumerate(self._ids)}
        self._asks_again = again
        self._failures = Failures(shows_errors)
        self._pieces = 1 if isinstance(client_app, Together) else pieces
        held = (client_app, num_supernodes, flat(run_config))
        wanted = {"num_cpus": 1.0, **(resources or {})}
        self._pool = WorkerPool(wanted, workers, most or num_supernodes, held, spare)
        self._each: dict[str, float] = {}  # message type -> seconds that one took lately
        self._queue: deque[Batch] = deque()
        self._running: dict[Any, tuple[Any, Batch]] = {}
        self._wanted: set[str] = set()  # messages whose replies are awaited
        self._done: dict[str, Message] = {}
        self._states: dict[int, RecordDict] = {}
        self._change = threading.RLock()  # held to read or change any of these
        self._closed = False
        self.retried: dict[str, str] = {}  # messages since the last push sent again -> why

    def __enter__(self) -> "RayGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        with self._change:
            self._closed, self._running = True, {}
            self._pool.close()
            self._queue.clear()
            self._failures.close()

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run, as Flower knows it."""
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
        """All nodes, which are always there, ordered by partition."""
        return list(self._ids)

    @property
    def workers(self) -> int:
        """How many workers there are, or are about to be."""
        return len(self._pool.all)

    @property
    def absent(self) -> int:
        """How many workers have not begun, or are about to begin again."""
        asked = sum(not batch.messages for _, batch in self._running.values())
        return len(self._pool.absent) + asked

    def memory(self) -> list[Record]:
        """The maximum memory of each worker that answers within a few seconds, in bytes, with Ray's
        id of its node and the number of its process."""
        return self._pool.memory()

    def node_of(self, partition: int) -> int:
        """The node that holds a partition, without asking all nodes."""
        return self._ids[partition]

    def lend_state(self, partition: int, state: RecordDict) -> None:
        """Set what the context of a node holds, for the next message to it."""
        with self._change:
            self._states[self._ids[partition]] = state

    def collect_state(self, partition: int) -> RecordDict:
        """Take what the context of a node holds after its last answer out of the grid."""
        with self._change:
            return self._states.pop(self._ids[partition], None) or RecordDict()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages to the workers; returns their ids."""
        seen: set[int] = set()
        sent: list[Message] = []
        for one in messages:  # a message that is there twice is two messages
            sent.append(with_content(one, one.content) if id(one) in seen else one)
            seen.add(id(one))
        with self._change:
            if self._closed:
                raise InputError("the grid is closed: send messages before closing it")
            self._pool.grow()
            self.retried = {}
            names = [numbered(message) for message in sent]
            self._wanted.update(names)
            known = []
            for one in sent:
                if (node := one.metadata.dst_node_id) in self._partitions:
                    known.append(one)
                else:
                    self._store(
                        refusal(
                            one,
                            f"node {node} is not one of the {len(self._ids)} nodes: get their "
                            "ids from get_node_ids()",
                        )
                    )
            # An even share of the messages for each worker, or several smaller batches.
            workers = max(1, self.workers)
            types = {one.metadata.message_type for one in known}
            each = max((self._each.get(one, math.inf) for one in types), default=0.0)
            pieces = workers * calls(len(known) / workers, each, self._pieces)
            self._queue.extend(batches(known, max(1, math.ceil(len(known) / pieces))))
            self._dispatch()
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that have arrived."""
        return self.pull_within(message_ids, 0.0)

    def pull_within(self, message_ids: Iterable[str], seconds: float) -> list[Message]:
        """The replies that have arrived, after waiting at most so long for one."""
        names = list(message_ids)
        self._wait(0.0 if any(name in self._done for name in names) else seconds)
        with self._change:
            found = [name for name in names if name in self._done]
            self._wanted.difference_update(found)
            return [self._done.pop(name) for name in found]

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop the replies to these messages, and do not send those that wait for a worker."""
        with self._change:
            self._wanted.difference_update(message_ids)
            self._done = {name: one for name, one in self._done.items() if name in self._wanted}
            kept = (Batch(self._still_wanted(batch)) for batch in self._queue)
            self._queue = deque(batch for batch in kept if batch.messages)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and wait for the replies."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        names, replies = self.push_messages(messages), []
        while len(replies) < len(names) and time.monotonic() < end:
            replies += self.pull_within(names, min(1.0, end - time.monotonic()))
        self.forget(names)
        return replies

    def _wait(self, seconds: float) -> None:
        """Wait at most so long until any reply arrives; several threads may do so."""
        with self._change:
            now = time.monotonic()
            for worker, batch in list(self._running.values()):
                if batch.end < now and not batch.ended:  # longer than its messages live
                    batch.ended = True
                    ray.kill(worker, no_restart=False)
            for worker, tries in self._pool.due():
                self._running[self._pool.ask(worker)] = (worker, Batch([], tries=tries))
            seconds = max(0.0, min(seconds, PAUSE) if self._pool.absent else seconds)
            asked = list(self._running)
        if not asked:
            time.sleep(seconds)
            return
        ready, others = ray.wait(asked, timeout=seconds)
        if ready and others:
            ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
        with self._change:
            for place in ready:
                self._take(place)
            self._dispatch()
            self._pool.complain()

    def _dispatch(self) -> None:
        """Give the next batches to idle workers."""
        shared: dict[int, Any] = {}
        while self._pool.idle and (batch := self._next()):
            self._ask(self._pool.idle.pop(), batch, shared)

    def _next(self) -> Batch | None:
        """The first batch none of whose nodes has a message now."""
        busy = [batch.nodes for _, batch in self._running.values() if batch.messages]
        for place, batch in enumerate(self._queue):
            if all(batch.nodes.isdisjoint(nodes) for nodes in busy):
                del self._queue[place]
                return batch
        return None

    def _ask(self, worker: Any, batch: Batch, shared: dict[int, Any]) -> None:
        """Make one call; large content that several calls share is in Ray's store once."""
        batch.start = time.monotonic()
        ttl = min(message.metadata.ttl for message in batch.messages)
        # Half of the time is kept for asking one by one where the whole batch is late.
        batch.end = batch.start + ttl / (2 if self._can_split(batch) else 1)
        content, sent = apart(batch.messages)
        if content is not None and large(content):
            if id(content) not in shared:
                shared[id(content)] = ray.put(content)
            content = shared[id(content)]
        states = {node: state for node in batch.nodes if (state := self._states.get(node))}
        partitions = {node: self._partitions[node] for node in batch.nodes}
        asked = worker.answer.remote(content, sent, states, partitions)
        self._running[asked] = (worker, batch)

    def _take(self, place: Any) -> None:
        """Store the replies of one call, unless another thread has done so. Messages of a failed
        call are sent again one by one, or are answered with an error."""
        if place not in self._running:
            return
        worker, batch = self._running.pop(place)
        try:
            replies, states = ray.get(place)
        except RayError as error:
            self._pool.expect(worker, batch.tries + 1, error)
            self._again(batch, error)
            return
        self._pool.has_begun()
        self._pool.idle.append(worker)
        took = (time.monotonic() - batch.start) / max(1, len(replies))
        self._each |= {one.metadata.message_type: took for one in batch.messages}
        self._states |= states
        for reply in replies:
            self._failures.take(reply, self._partitions.get(reply.metadata.src_node_id))
            self._store(reply)

    def _again(self, batch: Batch, error: RayError) -> None:
        """Send the messages of a failed call again, or answer them with an error."""
        if self._can_split(batch):
            again = self._still_wanted(batch)
            self._queue.extendleft(Batch([one]) for one in reversed(again))
            cause = "its worker took too long" if batch.late else why(error)
            told = f"{cause}, and it was asked again"
            self.retried |= {one.metadata.message_id: told for one in again}
            return
        for message in batch.messages:
            self._store(expired(message) if batch.late else refusal(message, why(error)))

    def _can_split(self, batch: Batch) -> bool:
        """Whether its messages are sent again one by one if its worker fails."""
        return len(batch.messages) > 1 and self._asks_again

    def _still_wanted(self, batch: Batch) -> list[Message]:
        return [one for one in batch.messages if one.metadata.message_id in self._wanted]

    def _store(self, reply: Message) -> None:
        if (name := reply.metadata.reply_to_message_id) in self._wanted:
            self._done[name] = reply
