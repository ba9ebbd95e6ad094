"""The CNN job with pfl-research's simulator: one process, no evaluation, no callbacks.

python cnn_pfl.py JOB.npz OUT.npy
"""

# pyright: reportMissingImports=false
# pfl comes with the `bench` extra only.

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

import torch
from cnn_work import Job, cnn, load, put, report, train
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import FederatedAlgorithm
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.federated_dataset import FederatedDatasetBase
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import AlgorithmHyperParams, ModelHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from work import paths


class Network(nn.Module):
    """The CNN with the two methods that pfl asks for."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.layers = cnn()
        put(self.layers, job.start)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return cross_entropy(self.layers(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, float]:
        """What an evaluation would report; this benchmark has none."""
        return {"loss": self.loss(inputs, labels).item()}


@dataclass(frozen=True)
class Rounds(AlgorithmHyperParams):
    """Rounds R and clients per round K."""

    rounds: int
    cohort_size: int


class FedAvg(FederatedAlgorithm):
    """A user trains a copy of the model and returns it; the server keeps the plain mean."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.local, self.stamps = job, cnn(), list[float]()
        self.order = iter(job.rows.reshape(-1, *job.rows.shape[2:]))

    def get_next_central_contexts(
        self, model, iteration, algorithm_params, model_train_params, model_eval_params=None
    ):
        """One training cohort a round, never an evaluation."""
        self.stamps.append(perf_counter())
        if iteration == algorithm_params.rounds:
            return None, model, Metrics()
        context = CentralContext(
            current_central_iteration=iteration,
            do_evaluation=False,
            cohort_size=algorithm_params.cohort_size,
            population=Population.TRAIN,
            algorithm_params=algorithm_params,
            model_train_params=model_train_params,
            seed=None,
        )
        return (context,), model, Metrics()

    def simulate_one_user(self, model, user_dataset, central_context):
        """One local epoch from the server's model."""
        held = model.pytorch_model
        put(self.local, dict(held.layers.named_parameters()))
        inputs, labels = user_dataset.raw_data
        train(self.local, inputs, labels, next(self.order), self.job.lr)
        ends = {f"layers.{name}": p.detach() for name, p in self.local.named_parameters()}
        return MappedVectorStatistics(copy.deepcopy(ends)), Metrics()  # type: ignore[arg-type]

    def process_aggregated_statistics(self, central_context, aggregate_metrics, model, statistics):
        """Every user has weight 1, so this is the mean with weight 1/K."""
        statistics.average()
        model.set_parameters(statistics)
        return model, Metrics()


class Scheduled(FederatedDatasetBase):
    """Every user's tensors, built once; cohorts replay the schedule."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job, self._order = job, iter(job.schedule.ravel().tolist())

    def __next__(self) -> tuple[PyTorchTensorDataset, int]:
        """The next user of the schedule, with a seed that nothing reads."""
        client = next(self._order)
        return PyTorchTensorDataset(self._job.client(client), user_id=str(client)), 0

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[PyTorchTensorDataset, int]]:
        """The next `cohort_size` users of the schedule."""
        return islice(self, cohort_size)


def main() -> None:
    """Run the job and report it."""
    path, out = paths("usage: cnn_pfl.py JOB.npz OUT.npy")
    job = load(path)
    module, algorithm, data = Network(job), FedAvg(job), Scheduled(job)
    algorithm.run(
        Rounds(*job.schedule.shape),
        SimulatedBackend(training_data=data, val_data=data),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        ModelHyperParams(),
        send_metrics_to_platform=False,
    )
    report(out, dict(module.layers.named_parameters()), algorithm.stamps)


if __name__ == "__main__":
    main()
