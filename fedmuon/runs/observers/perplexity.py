"""The perplexity of a language model on held-out text."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.files import Record
from fedmuon.federated.evaluation import risk
from fedmuon.federated.experiment import Round
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import NO_FILES
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run
from fedmuon.tasks.base import IGNORED
from fedmuon.tasks.networks import NetworkTask


class Perplexity(Observer):
    """Computes exp(mean loss per predicted token) on the test samples, in evaluated rounds.

    The test loss is a mean over windows. If windows predict different numbers of tokens, because
    prompts are not predicted, the loss per token is another mean, and the windows are evaluated
    again.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tokens = predicted(run)
        self.last: Record = {}

    def after(self, finished: Round, record: Record) -> Record:
        """Return the perplexity, if the record contains a test loss."""
        self.last = self._measured(finished.state, record) if "test_loss" in record else {}
        return self.last

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the perplexity of the final model."""
        return self.last or self._measured(state, {}), NO_FILES

    def _measured(self, state: ServerState, record: Record) -> Record:
        counts = self.tokens
        if not len(counts):
            return {}
        if "test_loss" in record and bool((counts == counts[0]).all()):
            return {"perplexity": float(np.exp(record["test_loss"]))}
        tests = self.run.experiment.shards.held_out
        weights = counts.double() / counts.sum()
        loss = risk(self.run.experiment.task, state.params, tests.inputs, tests.labels, weights)
        return {"perplexity": float(np.exp(loss.loss[0]))}


def predicted(run: Run) -> Tensor:
    """Return how many tokens each test window predicts [n]."""
    task, tests = run.experiment.task, run.experiment.shards.held_out
    if not isinstance(task, NetworkTask) or not len(tests.labels):
        return torch.empty(0)
    return (task.targets(tests.inputs, tests.labels) != IGNORED).sum(1)
