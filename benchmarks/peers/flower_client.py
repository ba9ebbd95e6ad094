"""The ClientApp of the plain Flower peer, as a Flower user would write it in PyTorch.

It is a separate module, like `client_app.py` in Flower's quickstart. The worker processes import it
by name, so the cache of `partitions` is reused by later messages. X and M are sent transposed,
[c, d], which is the shape of the weight of a `torch.nn.Linear`.
"""

from __future__ import annotations

from functools import cache

import torch
from flower_common import introduction, partition, work_path
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn.functional import linear
from work import load_work

app = ClientApp()


@cache
def partitions(path: str) -> list[tuple[Tensor, Tensor]]:
    """Read the inputs [n_i, d] and labels [n_i] of every client, once per worker process."""
    work = load_work(path)
    rows = (work.rows(client) for client in range(work.clients))
    return [(torch.from_numpy(inputs), torch.from_numpy(labels)) for inputs, labels in rows]


def smoothed_polar(m: Tensor, lam: float) -> Tensor:
    """Return (m mᵀ + λI)^(-1/2) m for a wide m [c, d], computed from its c × c Gram matrix."""
    eigenvalues, vectors = torch.linalg.eigh(m @ m.T)
    scale = torch.rsqrt(eigenvalues.clamp(min=0) + lam)
    return (vectors * scale) @ vectors.T @ m


@app.query()
def query(message: Message, context: Context) -> Message:
    """Report the partition of this node to the server, and read the data before that."""
    partitions(work_path(message))
    return introduction(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take one full-batch FedMuon step from the server's X and M, and return the new X and M."""
    config = message.content.config_records["config"]
    lr, lam, beta = (float(config[key]) for key in ("lr", "lam", "beta"))  # type: ignore[arg-type]
    inputs, labels = partitions(work_path(message))[partition(context)]
    state = message.content.array_records["arrays"].to_torch_state_dict()
    weight = state["weight"].requires_grad_()
    p = torch.softmax(linear(inputs, weight), dim=1)
    loss = 1 - p.gather(1, labels[:, None]).mean()
    loss.backward()
    assert weight.grad is not None
    with torch.no_grad():
        momentum = beta * state["momentum"] + (1 - beta) * weight.grad
        weight = weight - lr * smoothed_polar(momentum, lam)
    arrays = ArrayRecord({"weight": weight, "momentum": momentum})
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(labels)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
