"""Training without a server on Ray: each worker has some nodes, and sends messages to the others.

A worker returns its messages as one object per other worker. This process passes only references to
these objects, so the tensors travel from worker to worker. A message to a worker contains only
tensors of nodes that have a neighbour there.

After each round, the workers also return the states of their nodes to this process, for
checkpoints, records and the mean model. No node reads them, except when a run is resumed.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from fedmuon.config.load import Config, flatten, unflatten
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record
from fedmuon.core.signals import interruptible
from fedmuon.core.tables import Scalar
from fedmuon.experiments.engines.ray_cluster import THREADS, connected
from fedmuon.experiments.engines.ray_engine import Handed, explained, resources_of
from fedmuon.federated.build import build_worker
from fedmuon.federated.experiment import Experiment, Round
from fedmuon.federated.gossip import NodeGroup, end_of_round, gossip_of
from fedmuon.optim.chain import States
from fedmuon.optim.graphs import Graph
from fedmuon.optim.stage import Reply, ServerState
from fedmuon.runs.process_profile import this_process
from fedmuon.server import stopping
from fedmuon.tasks.base import Params

Result = TypeVar("Result")
Parts = Sequence[Sequence[int]]  # the nodes of each worker
CPU = torch.device("cpu")


def addressed(
    messages: Mapping[int, Params], weights: np.ndarray, parts: Parts
) -> list[dict[int, Params]]:
    """Return what each worker receives: the messages of nodes with a neighbour among its nodes."""
    return [
        {node: sent for node, sent in messages.items() if (weights[list(part), node] > 0).any()}
        for part in parts
    ]


def parts_of(nodes: int, workers: int) -> list[list[int]]:
    """Divide the nodes into consecutive parts of nearly equal size, one per worker."""
    parts = np.array_split(np.arange(nodes), max(1, min(nodes, workers)))
    return [part.tolist() for part in parts]


class NodeWorker:
    """A Ray actor with some of the nodes."""

    def __init__(
        self,
        flat: dict[str, Scalar],
        objects: Handed | None,
        parts: Parts,
        place: int,
        begin: Params,
        states: Mapping[int, States],
    ) -> None:
        torch.set_num_threads(int(os.environ.get(THREADS, "1")))
        config = unflatten(flat)
        config = config if objects is None else config.with_objects(objects())
        clients = [build_worker(config, node) for node in parts[place]]
        setup = clients[0].setup
        self._device = setup.task.device
        nodes = [(client.client, client.shard) for client in clients]
        self._group = NodeGroup(
            setup.recipe, setup.task, setup.plan, nodes, on(begin, self._device), states
        )
        self._graph: Graph = gossip_of(setup.recipe).graph
        self._parts, self._profiled = parts, config.output.profile

    def track(self, round: int, factor: float) -> tuple[Any, ...]:
        """Return the first messages to each worker."""
        plan = replace(self._group.plan, factor=lambda round: factor)  # only the driver's is called
        self._group.plan = plan
        with this_process.of_round(round, self._profiled):
            return self._addressed(round, self._group.track(round))

    def step(self, round: int, *received: Mapping[int, Params]) -> tuple[Any, ...]:
        """Return the second messages to each worker."""
        weights = self._graph.weights(round)
        with this_process.of_round(round, self._profiled):
            return self._addressed(round, self._group.step(round, weights, self._united(received)))

    def average(
        self, round: int, *received: Mapping[int, Params]
    ) -> tuple[list[Reply], dict[int, States]]:
        """Return the losses and the states of the nodes after the round."""
        with this_process.of_round(round, self._profiled):
            self._group.average(self._graph.weights(round), self._united(received))
        losses = [Reply(reply.client, {}, {}, reply.loss.cpu()) for reply in self._group.replies]
        states = {
            node: {name: on(tree, CPU) for name, tree in stored.items()}
            for node, stored in self._group.states.items()
        }
        return losses, states

    def profile(self) -> Record:
        """Return the process id and the profile of this worker, which then ends."""
        return {"pid": os.getpid(), "rounds": this_process.end()}

    def _addressed(self, round: int, messages: Mapping[int, Params]) -> tuple[Any, ...]:
        sent = {node: on(tensors, CPU) for node, tensors in messages.items()}
        return None, *addressed(sent, self._graph.weights(round), self._parts)

    def _united(self, received: Sequence[Mapping[int, Params]]) -> dict[int, Params]:
        return {
            node: on(tensors, self._device)
            for messages in received
            for node, tensors in messages.items()
        }


def on(tensors: Params, device: torch.device) -> Params:
    """Return the tensors on a device."""
    return {name: value.to(device) for name, value in tensors.items()}


@dataclass(frozen=True)
class RayGossip:
    """An engine that runs the nodes of a graph in Ray workers."""

    config: Config
    workers: list[Any] = field(default_factory=list)

    def __call__(self, experiment: Experiment, state: ServerState) -> Iterator[Round]:
        """Run and yield the remaining rounds."""
        if experiment.shards.neighbours is not None:
            raise InputError(
                "runs on neighbouring data sets need [engine] name = 'inline' if the optimizer has "
                "no server, because its workers read only the data of the run."
            )
        plan, memory = experiment.plan, experiment.client_states
        graph = gossip_of(experiment.recipe).graph
        needs = resources_of(self.config)
        parts = parts_of(plan.clients, most_workers(needs))
        self.close()
        self._start(parts, needs, state, experiment)
        workers = self.workers
        several = {"num_returns": len(workers) + 1}
        for round in range(state.round, plan.rounds):
            stopping.pause(0.0)  # handle a request to stop
            factor = plan.factor_at(round)
            sent = [worker.track.options(**several).remote(round, factor) for worker in workers]
            sent = [
                worker.step.options(**several).remote(round, *(of[1 + place] for of in sent))
                for place, worker in enumerate(workers)
            ]
            ends = [
                worker.average.remote(round, *(of[1 + place] for of in sent))
                for place, worker in enumerate(workers)
            ]
            results: list[tuple[list[Reply], dict[int, States]]] = ray.get(ends)
            replies = [reply for of_worker, _ in results for reply in of_worker]
            states = {node: stored for _, of in results for node, stored in of.items()}
            for node in sorted(states):
                memory.write(node, round, states[node])
            state, finished = end_of_round(state, states, graph.weights(round), replies)
            yield finished

    def profiles(self) -> list[Record]:
        """Return the profile of each worker, by rounds."""
        return ray.get([worker.profile.remote() for worker in self.workers])

    def close(self) -> None:
        """End the workers, while this process is still connected to Ray."""
        while self.workers:
            with contextlib.suppress(RayError):
                ray.kill(self.workers.pop())

    def _start(
        self, parts: Parts, needs: dict[str, float], state: ServerState, experiment: Experiment
    ) -> None:
        """Start a worker for each part. A resumed run passes the states of the nodes."""
        objects = Handed.over(self.config.given) if self.config.given else None
        begin = {name: value.cpu() for name, value in state.params.items()}
        remote: Any = ray.remote
        actor = remote(**needs)(NodeWorker)
        for place, part in enumerate(parts):
            stored = {node: experiment.client_states.read(node, state.round) for node in part}
            arguments = flatten(self.config), objects, parts, place, begin, stored
            self.workers.append(actor.remote(*arguments))


def most_workers(needs: Mapping[str, float]) -> int:
    """Return how many workers fit on the machines of the connected Ray."""
    there: Mapping[str, float] = ray.cluster_resources()
    counts = [
        int(there.get(kind, 0.0) / needs[key])
        for key, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU"))
        if needs[key] > 0
    ]
    return max(1, min(counts, default=1))


def with_ray_nodes(
    config: Config, work: Callable[[RayGossip], Result], verbose: bool = False
) -> Result:
    """Call `work` with an engine whose nodes run in workers of Ray."""
    stopping.forget()
    threads = max(1, int(config.engine.cpus_per_client))
    with interruptible(), connected(config.engine.ray_address, verbose, threads):
        engine = RayGossip(config)
        try:
            return work(engine)
        except RayError as error:
            cause = getattr(error, "cause", None)  # of an error that a worker raised
            if isinstance(cause, InputError):
                raise cause from None
            raise InputError(explained(error, config)) from error
        finally:
            engine.close()
