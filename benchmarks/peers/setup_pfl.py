"""A published set-up with pfl-research's simulator: one process, no evaluation, no callbacks.

python setup_pfl.py JOB.npz OUT.npy
"""

# pyright: reportMissingImports=false
# pfl is only installed with the `bench` extra.

from __future__ import annotations

from cnn_work import Job
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics
from pfl_common import Means, Rounds, Scheduled, simulate
from setup_work import NETWORKS, local_epoch, read_job, started, tell, tensors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from work import paths


class Held(nn.Module):
    """The server's tensors as parameters, because pfl averages parameters only.

    pfl also requires the methods `loss` and `metrics`.
    """

    def __init__(self, network: nn.Module, job: Job) -> None:
        super().__init__()
        self.network, self.names = network, list(job.start)
        self.values = nn.ParameterList(value.clone() for value in job.start.values())

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return cross_entropy(self.network(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the metrics of an evaluation, which this benchmark does not use."""
        return {"loss": self.loss(inputs, labels).item()}


class FedAvg(Means):
    """FedAvg: each user trains a copy of the model and returns it."""

    def __init__(self, network: nn.Module, job: Job) -> None:
        super().__init__()
        self.network, self.job = network, job

    def simulate_one_user(self, model, user_dataset, central_context):
        """Train for one local epoch from the server's model."""
        held = model.pytorch_model
        given = dict(zip(held.names, [one.detach() for one in held.values], strict=True))
        turn, client = central_context.current_central_iteration, int(user_dataset.user_id)
        ends = local_epoch(self.network, self.job, given, turn, client)
        sent = {f"values.{place}": ends[name] for place, name in enumerate(held.names)}
        return MappedVectorStatistics(sent), Metrics()  # type: ignore[arg-type]


def main() -> None:
    """Run the job and report it."""
    path, out = paths("usage: setup_pfl.py JOB.npz OUT.npy")
    name, job = read_job(path)
    held = Held(nn.Identity(), job)  # otherwise pfl's optimizer would include the network, too
    clients = range(len(job.offsets) - 1)
    users = [PyTorchTensorDataset(job.client(i), user_id=str(i)) for i in clients]
    data, network = Scheduled(users, job.schedule), NETWORKS[name]()
    busy = started()
    stamps = simulate(FedAvg(network, job), Rounds(*job.schedule.shape), held, data)
    ends = [one.detach() for one in held.values]
    assert set(held.names) == set(tensors(NETWORKS[name]()))
    tell(out, dict(zip(held.names, ends, strict=True)), stamps, busy)


if __name__ == "__main__":
    main()
