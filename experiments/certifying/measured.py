"""The losses of the initial and the final model of a run, sample by sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmuon.analysis.theory.checks import real, whole
from fedmuon.config.load import load
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.stability.finished_run import FinishedRun, require_objects
from fedmuon.federated.evaluation import of_samples
from fedmuon.runs.directory import AVERAGE_MODEL, RunDirectory
from fedmuon.tasks.base import Batch, Params

Losses = Mapping[str, np.ndarray]
INDEPENDENT = "the samples are independent draws from the distribution of future samples"
OF_LABELS = (
    "given their labels, the samples are independent draws; future samples have the label shares "
    "of the training samples, because the partition depends on labels"
)

OF_CLIENTS = (
    "given their clients, the samples are independent draws; future samples come from the same "
    "clients in the same shares, because a column of the data names the client of each sample"
)


@dataclass(frozen=True)
class MeasuredRun:
    """The losses of a run's models in [0, 1], by name.

    The names are "error" (1 - accuracy), and "loss" if the task has a bounded loss.

    Attributes:
        run: The finished run.
        train: The losses of the final model on the training samples [n], sorted by client.
        test: The losses of the final model on the held-out samples [m].
        start: The losses of the initial model on the held-out samples [m].
        repeated: Number of training samples that are copies of another one.
        trained: Number of held-out samples that are copies of a training sample.
        params: The final model, or the average of the last models.
    """

    run: FinishedRun
    train: Losses
    test: Losses
    start: Losses
    repeated: int
    trained: int
    params: Params

    @property
    def independent(self) -> str:
        """The assumption about the training samples."""
        federation = self.run.config.federation
        alone = federation.clients == 1 or federation.partition in ("iid", "quantity")
        if federation.partition == "column":
            return OF_CLIENTS
        return INDEPENDENT if alone else OF_LABELS

    @property
    def owners(self) -> np.ndarray:
        """The client of each training sample [n]."""
        return np.repeat(np.arange(len(self.run.data.sizes)), self.run.data.sizes)

    def losses(self, params: Params, held_out: bool = False) -> Losses:
        """Return the losses of another model on the training or the held-out samples."""
        shards = self.run.experiment.shards
        batch = shards.held_out if held_out else Batch(shards.inputs, shards.labels)
        return losses_of(self.run, params, batch)

    def means(self, name: str) -> np.ndarray:
        """Return the mean loss of each client that has samples."""
        sizes = self.run.data.sizes
        sums = np.bincount(self.owners, self.train[name], len(sizes))
        return sums[sizes > 0] / sizes[sizes > 0]


# Train errors that a certificate releases with noise
RELEASED = (
    "error",
    "loss",
    "error of clients",
    "error of the published model",
    "error of a group",
)


def released_noise(seed: int, name: str, group: int = 0) -> float:
    """Return the standard normal number that is part of a released train error."""
    block = RELEASED.index(name)
    return float(generator(seed, Draw.TRAIN_ERROR, client=group, block=block).standard_normal())


def failure_of(confidence: float, settings: int) -> float:
    """Return the failure probability of a limit, divided by the number of settings.

    Raises:
        InputError: If a number is out of range.
    """
    if not 0 < real("confidence", confidence) < 1:
        raise InputError(
            f"confidence is {confidence:g}, but it must be above 0 and below 1, such as 0.95."
        )
    return (1 - confidence) / whole("settings", settings)


def measure(
    folder: Path, user_objects: UserObjects = NOTHING, average: bool = False
) -> MeasuredRun:
    """Measure the models of a finished run.

    Args:
        folder: The run folder.
        user_objects: Python objects (such as a custom task) that the caller passed.
        average: Whether the average of the last models replaces the final model.

    Raises:
        InputError: If the run has not ended, is damaged, has no average, or its task reports no
            error rate.
    """
    directory = RunDirectory(folder)
    directory.finished()
    directory.require_unchanged()
    require_objects(load(folder / "config.toml").with_objects(user_objects), folder, "certify")
    if average and not (folder / AVERAGE_MODEL).exists():
        raise InputError(
            f"{folder} contains no average of models. Set [output] average, such as 0.5, and run "
            "the experiment again, or certify the final model."
        )
    run = FinishedRun.open(folder, user_objects)
    shards = run.experiment.shards
    last, first = run.model("average" if average else "model"), run.model("initial")
    train = Batch(shards.inputs, shards.labels)
    rows, held_out = _rows(train), len(run.data.test_labels) > 0
    different = {row.tobytes() for row in rows}
    tested = _rows(shards.held_out) if held_out else rows[:0]
    return MeasuredRun(
        run,
        losses_of(run, last, train),
        losses_of(run, last, shards.held_out) if held_out else {},
        losses_of(run, first, shards.held_out) if held_out else {},
        len(rows) - len(different),
        sum(row.tobytes() in different for row in tested),
        last,
    )


def _rows(batch: Batch) -> np.ndarray:
    """Return the inputs and the label of each sample in a row."""
    return np.column_stack([batch.inputs.cpu().numpy(), batch.labels.cpu().numpy()])


def losses_of(run: FinishedRun, params: Params, batch: Batch) -> Losses:
    """Return the losses of a model in [0, 1], sample by sample."""
    losses, scores = of_samples(run.experiment.task, params, batch)
    if "accuracy" not in scores:
        raise InputError(
            "this task reports no accuracy, so its models have no error rate. Certificates need a "
            "loss in [0, 1]: let the task report the metric accuracy."
        )
    by_name = {"error": 1 - scores["accuracy"][0].double().cpu().numpy()}
    if run.config.task.name == "matrix":  # its loss is 1 - p_y
        by_name["loss"] = losses[0].double().cpu().numpy()
    return by_name
