"""Text that a language model writes before and after training."""

import json
from collections.abc import Mapping

from fedmuon.core.files import Record
from fedmuon.federated.continuations import continuations
from fedmuon.federated.rounds import begin
from fedmuon.optim.stage import ServerState
from fedmuon.runs.directory import CONTINUATIONS, NO_FILES
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.prepare import Run


class Continuations(Observer):
    """Writes how the untrained and the final model continue three fixed prompts."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def end(self, state: ServerState) -> tuple[Record, Mapping[str, bytes]]:
        """Return the file with both texts of each prompt."""
        config, experiment = self.run.config, self.run.experiment
        fresh = begin(experiment.recipe, experiment.task, config.federation.seed)
        before, after = (
            continuations(config, experiment.task, params)
            for params in (fresh.params, state.params)
        )
        texts = [
            {"prompt": prompt, "before": before[prompt], "after": after[prompt]}
            for prompt in before
        ]
        if not texts:
            return {}, NO_FILES
        content = json.dumps(texts, indent=1, ensure_ascii=False) + "\n"
        return {}, {CONTINUATIONS: content.encode()}
