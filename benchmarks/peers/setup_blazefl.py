"""A published set-up with BlazeFL's recommended trainer: one thread per core.

python setup_blazefl.py JOB.npz OUT.npy
"""

# pyright: reportMissingImports=false
# BlazeFL is only installed with the `bench` extra.

from __future__ import annotations

import os
import threading
from time import perf_counter

import torch
from blazefl.core import BaseServerHandler, ThreadPoolClientTrainer
from cnn_work import Job, Model
from setup_work import NETWORKS, local_epoch, mean, read_job, started, tell
from work import paths

Sent = tuple[int, Model]  # the round and the server's model


class Server(BaseServerHandler[Model, Sent]):
    """A server that follows the schedule and computes plain means."""

    def __init__(self, job: Job) -> None:
        self.model, self.schedule, self.round = job.start, job.schedule.tolist(), 0

    def downlink_package(self) -> Sent:
        """Return the round and the model."""
        return self.round, self.model

    def sample_clients(self) -> list[int]:
        """Return the participants of this round."""
        return self.schedule[self.round]

    def if_stop(self) -> bool:
        """Return whether all rounds are finished."""
        return self.round == len(self.schedule)

    def load(self, payload: Model) -> bool:
        """Return False: nothing is aggregated before all clients have replied."""
        return False

    def global_update(self, buffer: list[Model]) -> None:
        """Average the replies; every client has weight 1/K."""
        self.model, self.round = mean(buffer), self.round + 1


class Trainer(ThreadPoolClientTrainer[Model, Sent]):
    """A trainer with one local epoch per client. Clients in parallel use separate networks."""

    def __init__(self, name: str, job: Job, parallels: int) -> None:
        self.num_parallels, self.device, self.device_count = parallels, "cpu", 0
        self.cache: list[Model] = []
        self.stop_event = threading.Event()
        self.name, self.job = name, job
        self.free: list[torch.nn.Module] = []  # networks that no client uses at the moment

    def uplink_package(self) -> list[Model]:
        """Return the results of the clients of this round."""
        package, self.cache = self.cache, []
        return package

    def worker(self, cid: int, device: str, payload: Sent, stop_event: threading.Event) -> Model:
        """Train one client for its local epoch."""
        turn, model = payload
        network = self.free.pop() if self.free else NETWORKS[self.name]()
        found = local_epoch(network, self.job, model, turn, cid)
        self.free.append(network)
        return found


def main() -> None:
    """Run the job and report it."""
    path, out = paths("usage: setup_blazefl.py JOB.npz OUT.npy")
    name, job = read_job(path)
    cores = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else os.cpu_count() or 1
    torch.set_num_threads(1)
    server, trainer, busy = Server(job), Trainer(name, job, cores), started()
    stamps = [perf_counter()]
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        server.global_update(trainer.uplink_package())
        stamps.append(perf_counter())
    tell(out, server.model, stamps, busy)


if __name__ == "__main__":
    main()
