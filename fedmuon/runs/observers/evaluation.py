"""The losses and scores of the model, after the rounds that are evaluated and at the end."""

from collections.abc import Mapping

import numpy as np

from fedmuon.core.errors import NonFinite
from fedmuon.core.files import Record
from fedmuon.data.partition import weights
from fedmuon.federated.evaluation import risk, sample_weights
from fedmuon.federated.experiment import Round
from fedmuon.federated.rounds import begin
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES, UNTRAINED
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run

LOSSES = ("train_loss", "test_loss", "test_gap", "validation_loss")


class Evaluation(Observer):
    """Evaluates the model in every `[output] evaluate-every` rounds and after the last round."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.scores: Record = {}  # of the last round, if it was evaluated

    def after(self, finished: Round, record: Record) -> Record:
        """Return the losses and scores of the model, if the round is evaluated."""
        round, config = finished.state.round, self.run.config
        due = round % config.output.evaluate_every == 0 or round == config.federation.rounds
        self.scores = evaluate(self.run, finished.state) if due else {}
        return self.scores

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the results of the final model and of the untrained model.

        The final model is evaluated only if the last round was not.
        """
        scores = self.scores or evaluate(self.run, state)
        return {**scores, UNTRAINED: untrained(self.run)}, NO_FILES


def evaluate(run: Run, state: ServerState) -> Record:
    """Measure the losses and scores of a model.

    The record contains the weighted train loss. If there are test samples, it also contains the
    test loss, its difference from the train loss, and the task's other scores. Validation samples
    are measured in the same way.

    In a private run, a single example can make the loss infinite. The run then continues, and the
    record contains no loss. A private run ends only if its model, which is public, is not finite.
    """
    task, shards = run.experiment.task, run.experiment.shards
    sizes = run.data.sizes
    shares = sample_weights(sizes, weights(sizes, run.config.federation.risk_weights))
    train = risk(task, state.params, shards.inputs, shards.labels, shares.to(shards.labels.device))
    measures = {"train_loss": float(train.loss[0])}
    if len((tests := shards.held_out).labels):
        test = risk(task, state.params, tests.inputs, tests.labels)
        measures["test_loss"] = float(test.loss[0])
        measures["test_gap"] = measures["test_loss"] - measures["train_loss"]
        measures |= {name: float(score[0]) for name, score in test.scores.items()}
    if (samples := shards.validation) is not None and len(samples.labels):
        validation = risk(task, state.params, samples.inputs, samples.labels)
        measures["validation_loss"] = float(validation.loss[0])
        measures |= {f"validation_{name}": float(score[0])
                     for name, score in validation.scores.items()}  # fmt: skip
    lost = [name for name in LOSSES if not np.isfinite(measures.get(name, 0.0))]
    public = run.experiment.recipe.private and all(
        bool(value.isfinite().all()) for value in state.params.values()
    )
    if lost and not public:
        raise NonFinite("the model is not finite after the last round. Lower [local] lr.")
    return {name: value for name, value in measures.items() if name not in lost}


def untrained(run: Run) -> Record:
    """Return the results of the untrained model, so that curves start before the first round.

    If the results are not finite, return an empty record.
    """
    fresh = begin(run.experiment.recipe, run.experiment.task, run.config.federation.seed)
    try:
        return evaluate(run, fresh)
    except NonFinite:
        return {}
