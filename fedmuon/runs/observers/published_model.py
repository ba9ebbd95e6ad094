"""The final model with Gaussian noise, which a run with certificates publishes.

The noise turns the certificates of the clients into limits of an error rate (see the page
"Certificates"). It depends on the seed of the run and not on the samples.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmuon.core.arrays import tensor_bytes
from fedmuon.core.files import Record
from fedmuon.core.rng import Draw, generator
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import PUBLISHED_MODEL
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run
from fedmuon.tasks.base import Params


class PublishedModel(Observer):
    """Saves the final model with noise."""

    def __init__(self, run: Run) -> None:
        self.deviation = run.config.stability.output_noise
        self.seed = run.config.federation.seed

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the file of the published model."""
        noisy = published(state.params, self.deviation, self.seed)
        return {}, {PUBLISHED_MODEL: tensor_bytes(noisy)}


def published(params: Params, deviation: float, seed: int) -> Params:
    """Return the model with noise. The noise depends only on the seed of the run.

    Args:
        params: The final model.
        deviation: The standard deviation of the noise.
        seed: The seed of the run.
    """
    return {
        name: value + deviation * _draw(value, seed, place)
        for place, (name, value) in enumerate(params.items())
    }


def _draw(like: Tensor, seed: int, place: int) -> Tensor:
    normal = generator(seed, Draw.OUTPUT, block=place).standard_normal(tuple(like.shape))
    return torch.from_numpy(normal).to(like)
