"""Flower's Grid on Ray actors: messages go straight to a worker, replies straight back.

Flower's own simulation keeps messages in a table that it scans, one message a node a scan. Here a
worker is handed the messages of many clients in one call; what they share crosses once a call. A
node is a number until it is asked, about 100 bytes; it has one message at a time, also
where several threads of a server ask.

A worker that dies, or does not answer in time, comes back; what it had is asked again one message
at a time, so that the one at fault takes no other with it: clients that had answered in that call
do so twice, from the state that they had before. A message's time to live counts from when a worker
takes it, so that waiting for a worker costs a client nothing; when it is over, the reply is the
error MESSAGE_UNAVAILABLE, as from a SuperLink.
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
from fedmuon.server.messaging import Failures
from fedmuon.server.ray.flower_internals import (
    empty_run,
    expired,
    flat,
    identify,
    node_ids,
    numbered,
    refusal,
)
from fedmuon.server.ray.worker import Together
from fedmuon.server.ray.worker_pool import (
    PAUSE,
    Batch,
    Crew,
    apart,
    batches,
    calls,
    large,
    singles,
    why,
)


class RayGrid(Grid):
    """N nodes, whose ClientApp runs in workers of the Ray that is connected.

    Node ids are random numbers of 64 bits, as Flower's are; `node_of` tells who holds a partition.
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
    ) -> None:
        """`resources` are options of Ray's actors; `workers` are as many as fit unless given, and
        never more than `most`, the messages of a round. Apps that take one message at a time
        are asked in up to `pieces` calls a worker and round, for an even load. Messages whose
        worker was lost with several are asked `again`, unless a client must not answer twice. The
        first error that a client raises is shown with its traceback, the others are counted. A
        `seed` makes node ids reproducible; without one they differ from grid to grid."""
        identify()
        if num_supernodes < 1:
            raise InputError(f"num_supernodes = {num_supernodes} is refused: give 1 node or more")
        self._ids, self._run = node_ids(num_supernodes, seed), empty_run()
        self._partitions = {node: place for place, node in enumerate(self._ids)}
        self._asks_again = again
        self._failures = Failures(shows_errors)
        self._pieces = 1 if isinstance(client_app, Together) else pieces
        held = (client_app, num_supernodes, flat(run_config))
        wanted = {"num_cpus": 1.0, **(resources or {})}
        self._crew = Crew(wanted, workers, most or num_supernodes, held)
        self._each: dict[str, float] = {}  # seconds that a message of that type took lately
        self._queue: deque[Batch] = deque()
        self._running: dict[Any, tuple[Any, Batch]] = {}
        self._wanted: set[str] = set()  # messages whose replies somebody waits for
        self._done: dict[str, Message] = {}
        self._states: dict[int, RecordDict] = {}
        self._change = threading.RLock()  # held while any of these are looked at or change
        self._closed = False
        self.mended: dict[str, str] = {}  # messages since the last push that were asked again: why

    def __enter__(self) -> "RayGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        with self._change:
            self._closed, self._running = True, {}
            self._crew.close()
            self._queue.clear()
            self._failures.close()

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
        """All nodes, which are always there, in the order of their partitions."""
        return list(self._ids)

    @property
    def workers(self) -> int:
        """How many there are, or are about to be."""
        return len(self._crew.all)

    @property
    def absent(self) -> int:
        """Workers that have not begun, or are about to begin again."""
        asked = sum(not batch.messages for _, batch in self._running.values())
        return len(self._crew.absent) + asked

    def memory(self) -> list[int]:
        """The most bytes that each worker has held, of those that answer within a few seconds."""
        return self._crew.memory()

    def node_of(self, partition: int) -> int:
        """The node that holds a partition; nobody has to ask them all."""
        return self._ids[partition]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Ask the workers; the ids of the messages."""
        sent = singles(messages)
        with self._change:
            if self._closed:
                raise InputError("the grid is closed: send messages before")
            self._crew.grow()
            self.mended = {}
            names = [numbered(message) for message in sent]
            self._wanted.update(names)
            known = []
            for one in sent:
                if (node := one.metadata.dst_node_id) in self._partitions:
                    known.append(one)
                else:
                    told = (
                        f"node {node} is none of the {len(self._ids)}: ask get_node_ids() for ids"
                    )
                    self._keep(refusal(one, told))
            self._queue.extend(batches(known, self._size(known)))
            self._dispatch()
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these that have come."""
        return self.pull_within(message_ids, 0.0)

    def pull_within(self, message_ids: Iterable[str], seconds: float) -> list[Message]:
        """The same, waiting for a reply for so long at most."""
        names = list(message_ids)
        self._wait(0.0 if any(name in self._done for name in names) else seconds)
        with self._change:
            found = [name for name in names if name in self._done]
            self._wanted.difference_update(found)
            return [self._done.pop(name) for name in found]

    def forget(self, message_ids: Iterable[str]) -> None:
        """Nobody waits for the replies to these any more: those not asked yet are not asked."""
        with self._change:
            self._wanted.difference_update(message_ids)
            self._done = {name: one for name, one in self._done.items() if name in self._wanted}
            kept = (Batch(self._still_wanted(batch)) for batch in self._queue)
            self._queue = deque(batch for batch in kept if batch.messages)

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
        """Until a reply comes, to whomever, for so long at most; other threads may do the same."""
        with self._change:
            self._end_late()
            for worker, tries in self._crew.due():
                self._running[worker.ready.remote()] = (worker, Batch([], tries=tries))
            seconds = max(0.0, min(seconds, PAUSE) if self._crew.absent else seconds)
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
            self._crew.complain()

    def _size(self, messages: list[Message]) -> int:
        """Of a batch: an even share of the messages for each worker, or several smaller ones."""
        workers = max(1, self.workers)
        types = {one.metadata.message_type for one in messages}
        each = max((self._each.get(one, math.inf) for one in types), default=0.0)
        pieces = workers * calls(len(messages) / workers, each, self._pieces)
        return max(1, math.ceil(len(messages) / pieces))

    def _dispatch(self) -> None:
        """Give the next messages to the workers that have none."""
        shared: dict[int, Any] = {}
        while self._crew.idle and (batch := self._next()):
            self._ask(self._crew.idle.pop(), batch, shared)

    def _next(self) -> Batch | None:
        """The first batch whose nodes have nothing to answer just now."""
        busy = [batch.nodes for _, batch in self._running.values() if batch.messages]
        for place, batch in enumerate(self._queue):
            if all(batch.nodes.isdisjoint(nodes) for nodes in busy):
                del self._queue[place]
                return batch
        return None

    def _ask(self, worker: Any, batch: Batch, shared: dict[int, Any]) -> None:
        """One call; large content that several calls share lies in Ray's store once."""
        batch.start = time.monotonic()
        batch.end = batch.start + batch.ttl / (2 if self._divides(batch) else 1)
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
        """The replies of one call, unless another thread has them; what failed is asked again one
        by one, or refused."""
        if place not in self._running:
            return
        worker, batch = self._running.pop(place)
        try:
            replies, states = ray.get(place)
        except RayError as error:
            self._crew.expect(worker, batch.tries + 1, error)
            self._again(batch, error)
            return
        self._crew.answered()
        self._crew.idle.append(worker)
        took = (time.monotonic() - batch.start) / max(1, len(replies))
        self._each |= {one.metadata.message_type: took for one in batch.messages}
        self._states |= states
        for reply in replies:
            self._failures.take(reply, self._partitions.get(reply.metadata.src_node_id))
            self._keep(reply)

    def _again(self, batch: Batch, error: RayError) -> None:
        if self._divides(batch):
            again = self._still_wanted(batch)
            self._queue.extendleft(Batch([one]) for one in reversed(again))
            cause = "its worker took too long" if batch.late else why(error)
            told = f"{cause}, and it was asked again"
            self.mended |= {one.metadata.message_id: told for one in again}
            return
        for message in batch.messages:
            self._keep(expired(message) if batch.late else refusal(message, why(error)))

    def _divides(self, batch: Batch) -> bool:
        """Whether its messages are asked again one by one where its worker fails."""
        return len(batch.messages) > 1 and self._asks_again

    def _still_wanted(self, batch: Batch) -> list[Message]:
        return [one for one in batch.messages if one.metadata.message_id in self._wanted]

    def _keep(self, reply: Message) -> None:
        if (name := reply.metadata.reply_to_message_id) in self._wanted:
            self._done[name] = reply

    def _end_late(self) -> None:
        """End workers that take longer than their messages live."""
        now = time.monotonic()
        for worker, batch in list(self._running.values()):
            if batch.end < now and not batch.ended:
                batch.ended = True
                ray.kill(worker, no_restart=False)
