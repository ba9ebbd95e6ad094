"""The CNN job with pfl-research's simulator: one process, without evaluation and callbacks.

python cnn_pfl.py JOB.npz OUT.npy
"""

# pyright: reportMissingImports=false
# pfl is only installed with the `bench` extra.

from __future__ import annotations

import copy

from cnn_work import Job, cnn, load, put, report, train
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics
from pfl_common import Means, Rounds, Scheduled, simulate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from work import paths


class Network(nn.Module):
    """The CNN with the two methods that pfl requires."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.layers = cnn()
        put(self.layers, job.start)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return cross_entropy(self.layers(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the metrics of an evaluation, which this benchmark does not use."""
        return {"loss": self.loss(inputs, labels).item()}


class FedAvg(Means):
    """FedAvg: each user trains a copy of the model and returns it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.local = job, cnn()
        self.order = iter(job.rows.reshape(-1, *job.rows.shape[2:]))

    def simulate_one_user(self, model, user_dataset, central_context):
        """Train for one local epoch from the server's model."""
        held = model.pytorch_model
        put(self.local, dict(held.layers.named_parameters()))
        inputs, labels = user_dataset.raw_data
        train(self.local, inputs, labels, next(self.order), self.job.lr)
        ends = {f"layers.{name}": p.detach() for name, p in self.local.named_parameters()}
        return MappedVectorStatistics(copy.deepcopy(ends)), Metrics()  # type: ignore[arg-type]


def users(job: Job) -> list[PyTorchTensorDataset]:
    """Return every client as a pfl dataset."""
    clients = range(len(job.offsets) - 1)
    return [PyTorchTensorDataset(job.client(i), user_id=str(i)) for i in clients]


def main() -> None:
    """Run the job and report it."""
    path, out = paths("usage: cnn_pfl.py JOB.npz OUT.npy")
    job = load(path)
    module, data = Network(job), Scheduled(users(job), job.schedule)
    stamps = simulate(FedAvg(job), Rounds(*job.schedule.shape), module, data)
    report(out, dict(module.layers.named_parameters()), stamps)


if __name__ == "__main__":
    main()
