"""Parts that all jobs share in pfl-research: cohorts in schedule order, and plain means."""

# pyright: reportMissingImports=false
# pfl is only installed with the `bench` extra.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import FederatedAlgorithm
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.federated_dataset import FederatedDatasetBase
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import AlgorithmHyperParams, ModelHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


@dataclass(frozen=True)
class Rounds(AlgorithmHyperParams):
    """Number of rounds R and number of clients per round K."""

    rounds: int
    cohort_size: int


class Means(FederatedAlgorithm):
    """An algorithm in which users return their trained models and the server averages them.

    The base class calls `get_next_central_contexts` at the start of every round, and once more
    after the last round. So `stamps` finally contains R + 1 clock readings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stamps: list[float] = []

    def get_next_central_contexts(
        self, model, iteration, algorithm_params, model_train_params, model_eval_params=None
    ):
        """Return one training cohort per round, without evaluation."""
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

    def process_aggregated_statistics(self, central_context, aggregate_metrics, model, statistics):
        """Average the results. Every user has weight 1, so the mean has weights 1/K."""
        statistics.average()
        model.set_parameters(statistics)
        return model, Metrics()


class Scheduled(FederatedDatasetBase):
    """Tensors of all users, built once, with cohorts in the order of the schedule [R, K].

    pfl's `FederatedDataset` reseeds NumPy for each sampled user. This job has no randomness, so
    leaving out the seeds saves most of a millisecond per round.
    """

    def __init__(self, users: Sequence[PyTorchTensorDataset], schedule: NDArray[np.int64]) -> None:
        super().__init__()
        self._users, self._order = users, iter(schedule.ravel().tolist())

    def __next__(self) -> tuple[PyTorchTensorDataset, int]:
        """Return the next user of the schedule, with a seed that is not used."""
        return self._users[next(self._order)], 0

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[PyTorchTensorDataset, int]]:
        """Return the next `cohort_size` users of the schedule."""
        return islice(self, cohort_size)


def simulate(
    algorithm: Means, params: Rounds, module: torch.nn.Module, data: Scheduled
) -> list[float]:
    """Train the module in place, and return R + 1 clock readings."""
    algorithm.run(
        params,
        SimulatedBackend(training_data=data, val_data=data),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        ModelHyperParams(),
        send_metrics_to_platform=False,
    )
    return algorithm.stamps
