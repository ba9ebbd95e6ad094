"""FedMuon with BlazeFL's simulator, written as a BlazeFL user would write it for speed.

    python blazefl_app.py WORK.npz OUT.npz

It uses the recommended trainer: one thread per core, each with one torch thread, and shared memory.
The tensors of every client are built once. The gradient has a closed form, and X and M are stored
transposed, as in `pfl_app.py`. (BlazeFL's process pool is recreated in each round, which alone
takes longer than the work.)
"""

# pyright: reportMissingImports=false
# BlazeFL is only installed with the `bench` extra.

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from time import perf_counter

import torch
from blazefl.core import BaseServerHandler, ThreadPoolClientTrainer
from torch import Tensor
from work import Work, load_work, paths, report


@dataclass
class State:
    """X and M, both transposed [c, d]. The server sends its state, and each client returns one."""

    weight: Tensor
    momentum: Tensor


def gradient(weight: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient [c, d] of the mean of 1 - softmax(Xᵀu)_y.

    The gradient with respect to the logits is -p_y (e_y - p).
    """
    p = torch.softmax(weight @ inputs.T, dim=0)
    p_true = p.gather(0, labels[None]) / len(labels)
    in_logits = p.mul_(p_true).scatter_add_(0, labels[None], -p_true)
    return in_logits @ inputs


def smoothed_polar(m: Tensor, lam: float) -> Tensor:
    """Return (m mᵀ + λI)^(-1/2) m for a wide m [c, d], computed from its c × c Gram matrix."""
    eigenvalues, vectors = torch.linalg.eigh(m @ m.T)
    scale = torch.rsqrt(eigenvalues.clamp_(min=0) + lam)
    return ((vectors * scale) @ vectors.T) @ m


class Server(BaseServerHandler[State, State]):
    """A server that follows the schedule and computes plain means."""

    def __init__(self, work: Work) -> None:
        weight = torch.from_numpy(work.x0).T.contiguous()
        self.state = State(weight, torch.zeros_like(weight))
        self.schedule, self.round = work.schedule.tolist(), 0

    def downlink_package(self) -> State:
        """Return the model and the momentum."""
        return self.state

    def sample_clients(self) -> list[int]:
        """Return the participants of this round."""
        return self.schedule[self.round]

    def if_stop(self) -> bool:
        """Return whether all rounds are finished."""
        return self.round == len(self.schedule)

    def load(self, payload: State) -> bool:
        """Return False: nothing is aggregated before all clients have replied."""
        return False

    def global_update(self, buffer: list[State]) -> None:
        """Average the replies; every client has weight 1/K."""
        weight = torch.stack([one.weight for one in buffer]).mean(dim=0)
        momentum = torch.stack([one.momentum for one in buffer]).mean(dim=0)
        self.state, self.round = State(weight, momentum), self.round + 1


class Trainer(ThreadPoolClientTrainer[State, State]):
    """A trainer with one full-batch step per client. `worker` runs in a thread of the pool."""

    def __init__(self, work: Work, parallels: int) -> None:
        self.num_parallels, self.device, self.device_count = parallels, "cpu", 0
        self.cache: list[State] = []
        self.stop_event = threading.Event()
        self.work = work
        every = (work.rows(client) for client in range(work.clients))
        self.rows = [(torch.from_numpy(u), torch.from_numpy(y)) for u, y in every]

    def uplink_package(self) -> list[State]:
        """Return the results of the clients of this round."""
        package, self.cache = self.cache, []
        return package

    @torch.inference_mode()
    def worker(self, cid: int, device: str, payload: State, stop_event: threading.Event) -> State:
        """Take the local step of one client."""
        inputs, labels = self.rows[cid]
        g = gradient(payload.weight, inputs, labels)
        m = torch.lerp(g, payload.momentum, self.work.beta)
        x = payload.weight.sub(smoothed_polar(m, self.work.lam), alpha=self.work.lr)
        return State(x, m)


def trajectory(work: Work) -> tuple[Tensor, list[float]]:
    """Return the final X [d, c] and R + 1 clock readings. In BlazeFL, users write this loop."""
    cores = os.cpu_count() or 1
    torch.set_num_threads(1)
    server, trainer = Server(work), Trainer(work, cores)
    stamps = [perf_counter()]
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        server.global_update(trainer.uplink_package())
        stamps.append(perf_counter())
    return server.state.weight.T, stamps


def main() -> None:
    """Run the work file's trajectory and report it."""
    path, out = paths("usage: blazefl_app.py WORK.npz OUT.npz")
    x, stamps = trajectory(load_work(path))
    report("blazefl", out, x.numpy(), stamps)


if __name__ == "__main__":
    main()
