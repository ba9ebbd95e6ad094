"""A Flower Grid on Ray actors, which sends messages directly to workers.

Flower's own simulation stores messages in a table, and scans the table for each message. This grid
sends the messages of many clients to a worker in one call. If the messages have the same content,
the content is sent once per call. A node without messages needs about 100 bytes of memory. A node
gets one message at a time, even if several threads of a server send messages.

If a worker dies or does not answer in time, the worker is replaced. The messages of this worker are
sent again one by one, so that a faulty client does not affect other clients. Clients that had
already answered in the failed call answer again, from their earlier state. The time to live of a
message starts when a worker takes the message. The time before, in which the message waits for a
worker, does not count. After the time to live, the reply is the error MESSAGE_UNAVAILABLE, as from
a SuperLink.
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
    """A Flower Grid whose ClientApps run in worker processes of the connected Ray cluster.

    Node ids are random 64-bit numbers, as in Flower. `node_of` returns the node of a partition.

    Args:
        client_app: The app of the clients.
        num_supernodes: Number of nodes.
        workers: Number of worker processes. The default is the number of workers that fit on the
            machines.
        most: Maximum number of workers, for example the number of messages in a round.
        pieces: Maximum number of calls per worker and round, for apps that take one message at a
            time. Several calls balance the load.
        resources: Options of Ray's actors.
        run_config: Flower's run config.
        again: Whether messages are sent again if a call with several messages fails. Set it to
            False if a client must not answer twice.
        shows_errors: Whether the first error of a client is logged with its traceback, and later
            errors are counted.
        seed: Random seed of the node ids. Without a seed, the ids differ from grid to grid.
        spare: Idle workers of earlier grids with the same resources. The grid uses these workers
            first, and adds its idle workers at the end. Without `spare`, the grid ends all of its
            workers.

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
            raise InputError(f"num_supernodes = {num_supernodes} is not valid. Use 1 or more.")
        self._ids, self._run = node_ids(num_supernodes, seed), Run.create_empty(RUN)
        self._partitions = {node: place for place, node in enumerate(self._ids)}
        self._asks_again = again
        self._failures = Failures(shows_errors)
        self._pieces = 1 if isinstance(client_app, Together) else pieces
        arguments = (client_app, num_supernodes, flat(run_config))
        needs = {"num_cpus": 1.0, **(resources or {})}
        self._pool = WorkerPool(needs, workers, most or num_supernodes, arguments, spare)
        self._each: dict[str, float] = {}  # message type -> seconds of a recent message
        self._queue: deque[Batch] = deque()
        self._running: dict[Any, tuple[Any, Batch]] = {}
        self._wanted: set[str] = set()  # ids of messages that wait for a reply
        self._done: dict[str, Message] = {}
        self._states: dict[int, RecordDict] = {}
        self._change = threading.RLock()  # protects the attributes above
        self._closed = False
        # Id of a message that was sent again since the last push -> reason.
        self.retried: dict[str, str] = {}

    def __enter__(self) -> "RayGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, or return them to `spare`."""
        with self._change:
            self._closed, self._running = True, {}
            self._pool.close()
            self._queue.clear()
            self._failures.close()

    def set_run(self, run: Run) -> None:
        """Set the record of the current run."""
        self._run = run

    @property
    def run(self) -> Run:
        """Flower's record of the current run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, ordered by partition. All nodes are always available."""
        return list(self._ids)

    @property
    def workers(self) -> int:
        """The number of workers, including workers that are starting."""
        return len(self._pool.all)

    @property
    def absent(self) -> int:
        """The number of workers that are starting or restarting."""
        queries = sum(not batch.messages for _, batch in self._running.values())
        return len(self._pool.absent) + queries

    def memory(self) -> list[Record]:
        """Return the peak memory in bytes of each worker that answers within a few seconds.

        A record also contains the id of the worker's machine in Ray, and the process id.
        """
        return self._pool.memory()

    def profiles(self) -> list[Record]:
        """Return the profile of each worker that answers within a few seconds, by rounds."""
        return self._pool.profiles()

    def node_of(self, partition: int) -> int:
        """Return the id of the node that has this partition."""
        return self._ids[partition]

    def lend_state(self, partition: int, state: RecordDict) -> None:
        """Set the state of a node's context for the next message that the node gets."""
        with self._change:
            self._states[self._ids[partition]] = state

    def collect_state(self, partition: int) -> RecordDict:
        """Return the state that a node's context had after the node's last reply.

        The state is then removed from the grid.
        """
        with self._change:
            return self._states.pop(self._ids[partition], None) or RecordDict()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages to the workers, and return the ids of the messages."""
        ids: set[int] = set()
        sent: list[Message] = []
        for message in messages:  # an object that occurs twice is sent as two messages
            sent.append(with_content(message, message.content) if id(message) in ids else message)
            ids.add(id(message))
        with self._change:
            if self._closed:
                raise InputError(
                    "the RayGrid is closed, so it cannot send messages. Create a new RayGrid, or "
                    "send all messages inside its `with` block."
                )
            self._pool.grow()
            self.retried = {}
            names = [numbered(message) for message in sent]
            self._wanted.update(names)
            valid = []
            for message in sent:
                if (node := message.metadata.dst_node_id) in self._partitions:
                    valid.append(message)
                else:
                    self._store(
                        refusal(
                            message,
                            f"node {node} is not one of the {len(self._ids)} nodes of the grid. "
                            "Call get_node_ids() for valid ids.",
                        )
                    )
            # Each worker gets an even share of the messages, or several smaller batches.
            workers = max(1, self.workers)
            types = {message.metadata.message_type for message in valid}
            seconds = max((self._each.get(name, math.inf) for name in types), default=0.0)
            pieces = workers * calls(len(valid) / workers, seconds, self._pieces)
            self._queue.extend(batches(valid, max(1, math.ceil(len(valid) / pieces))))
            self._dispatch()
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived."""
        return self.pull_within(message_ids, 0.0)

    def pull_within(self, message_ids: Iterable[str], seconds: float) -> list[Message]:
        """Wait for a reply, but at most `seconds`, and return all replies that have arrived."""
        names = list(message_ids)
        self._wait(0.0 if any(name in self._done for name in names) else seconds)
        with self._change:
            arrived = [name for name in names if name in self._done]
            self._wanted.difference_update(arrived)
            return [self._done.pop(name) for name in arrived]

    def forget(self, message_ids: Iterable[str]) -> None:
        """Ignore all replies to these messages, and do not send messages that still wait."""
        with self._change:
            self._wanted.difference_update(message_ids)
            self._done = {name: reply for name, reply in self._done.items() if name in self._wanted}
            remaining = (Batch(self._still_wanted(batch)) for batch in self._queue)
            self._queue = deque(batch for batch in remaining if batch.messages)

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
        """Wait until any reply arrives, but at most `seconds`. Several threads may wait."""
        with self._change:
            now = time.monotonic()
            for worker, batch in list(self._running.values()):
                if batch.end < now and not batch.ended:  # the time to live has ended
                    batch.ended = True
                    ray.kill(worker, no_restart=False)
            for worker, tries in self._pool.due():
                self._running[self._pool.ask(worker)] = (worker, Batch([], tries=tries))
            seconds = max(0.0, min(seconds, PAUSE) if self._pool.absent else seconds)
            pending = list(self._running)
        if not pending:
            time.sleep(seconds)
            return
        ready, others = ray.wait(pending, timeout=seconds)
        if ready and others:
            ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
        with self._change:
            for place in ready:
                self._take(place)
            self._dispatch()
            self._pool.complain()

    def _dispatch(self) -> None:
        """Send the next batches to idle workers."""
        shared: dict[int, Any] = {}
        while self._pool.idle and (batch := self._next()):
            self._ask(self._pool.idle.pop(), batch, shared)

    def _next(self) -> Batch | None:
        """Remove and return the first batch whose nodes are not busy with another message."""
        busy = [batch.nodes for _, batch in self._running.values() if batch.messages]
        for place, batch in enumerate(self._queue):
            if all(batch.nodes.isdisjoint(nodes) for nodes in busy):
                del self._queue[place]
                return batch
        return None

    def _ask(self, worker: Any, batch: Batch, shared: dict[int, Any]) -> None:
        """Send a batch to a worker in one call.

        If several calls need the same large content, it is put into Ray's object store only once.
        """
        batch.start = time.monotonic()
        ttl = min(message.metadata.ttl for message in batch.messages)
        # Reserve half of the time to send the messages one by one if the whole batch is late.
        batch.end = batch.start + ttl / (2 if self._can_split(batch) else 1)
        content, sent = apart(batch.messages)
        if content is not None and large(content):
            if id(content) not in shared:
                shared[id(content)] = ray.put(content)
            content = shared[id(content)]
        states = {node: state for node in batch.nodes if (state := self._states.get(node))}
        partitions = {node: self._partitions[node] for node in batch.nodes}
        call = worker.answer.remote(content, sent, states, partitions)
        self._running[call] = (worker, batch)

    def _take(self, place: Any) -> None:
        """Store the replies of one call, unless another thread has already stored them.

        If the call failed, its messages are sent again one by one, or the replies are errors.
        """
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
        self._each |= {message.metadata.message_type: took for message in batch.messages}
        self._states |= states
        for reply in replies:
            self._failures.take(reply, self._partitions.get(reply.metadata.src_node_id))
            self._store(reply)

    def _again(self, batch: Batch, error: RayError) -> None:
        """Send the messages of a failed call again, or store an error as their reply."""
        if self._can_split(batch):
            messages = self._still_wanted(batch)
            self._queue.extendleft(Batch([message]) for message in reversed(messages))
            cause = "the worker of this client took too long" if batch.late else why(error)
            reason = f"{cause}, so the message was sent again"
            self.retried |= {message.metadata.message_id: reason for message in messages}
            return
        for message in batch.messages:
            self._store(expired(message) if batch.late else refusal(message, why(error)))

    def _can_split(self, batch: Batch) -> bool:
        """Return whether the messages of a failed batch are sent again one by one."""
        return len(batch.messages) > 1 and self._asks_again

    def _still_wanted(self, batch: Batch) -> list[Message]:
        return [
            message for message in batch.messages if message.metadata.message_id in self._wanted
        ]

    def _store(self, reply: Message) -> None:
        if (name := reply.metadata.reply_to_message_id) in self._wanted:
            self._done[name] = reply
