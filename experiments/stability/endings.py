"""Measures and certificates of a run, as if the run had ended after given rounds.

The shorter runs use the first part of the schedule of the longest run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedmuon.analysis import Realized
from fedmuon.analysis.theory.trajectories import Start
from fedmuon.config.load import Config
from fedmuon.data.federated import FederatedData
from fedmuon.data.source import Source
from fedmuon.experiments.stability.certificates import (
    Certificate,
    CertifiedSetting,
    certify,
    start_of,
)
from fedmuon.experiments.stability.finished_run import Loss, mean_squares, measured_losses
from fedmuon.experiments.stability.gap import change_range, proved_range
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import risk
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.tasks.base import Params


@dataclass(frozen=True)
class Ending:
    """The result of a run of the matrix task that ends after `round` rounds.

    Attributes:
        round: The number of rounds of the run; 0 stands for the initial model X⁰.
        accuracy: Accuracy on held-out samples.
        test_loss: Mean loss over held-out samples, without weights.
        loss: The train loss, and the gap with its interval.
        certificates: The certificate for each name in `kinds`. The mapping is empty for X⁰.
        changes: The change of the loss of each held-out sample since X⁰ [m].
        change_range: The length of an interval that contains this change for every sample.
    """

    round: int
    accuracy: float
    test_loss: float
    loss: Loss
    certificates: Mapping[str, Certificate]
    changes: np.ndarray
    change_range: float


@dataclass(frozen=True)
class Trained:
    """The models of a run of the matrix task after some of its rounds.

    Attributes:
        config: The config, with all defaults resolved.
        source: All samples of the data set.
        data: The samples of the run.
        experiment: The run.
        rounds: The rounds after which the models were stored; the first one is 0.
        models: The stack of these models.
    """

    config: Config
    source: Source
    data: FederatedData
    experiment: Experiment
    rounds: Sequence[int]
    models: Params

    @cached_property
    def squares(self) -> np.ndarray:
        """The mean squares of each model and client, as in `mean_squares`."""
        return mean_squares(self.experiment, self.data.sizes, self.models)

    @cached_property
    def start(self) -> Start | None:
        """The properties of the initial model."""
        return start_of(self.models["weight"][0].cpu().numpy(), self.source)

    def setting(self, place: int) -> CertifiedSetting:
        """Return the facts about the run as if it had ended with the model at this place."""
        round, plan = self.rounds[place], self.experiment.plan
        federation = self.config.federation.model_copy(update={"rounds": round})
        factors = plan.factors()
        return CertifiedSetting(
            self.config.model_copy(update={"federation": federation}),
            self.data.sizes,
            Realized(plan.schedule()[:round], plan.rows if plan.batch else None),
            self.models["weight"][0].shape,
            factors=None if factors is None else factors[:round],
            start=self.start,
            squares=lambda: self.squares[place],
        )


def train(config: Config, rounds: Sequence[int], source: Source | None = None) -> Trained:
    """Train once, and return the initial model and the models after the given rounds."""
    config = resolve(config)
    source = read_source(config) if source is None else source
    data = build_data(config, source)
    experiment = build_experiment(config, data)
    start = begin(experiment.recipe, experiment.task, config.federation.seed)
    ends = (result.state for result in run_rounds(experiment, start))
    weights = [end.params["weight"] for end in ends if end.round in rounds]
    models = {"weight": torch.cat([start.params["weight"], *weights])}
    return Trained(config, source, data, experiment, [0, *rounds], models)


def endings(
    config: Config,
    rounds: Sequence[int],
    kinds: Mapping[str, Mapping[str, Any]],
    source: Source | None = None,
) -> list[Ending]:
    """Return the results of a run after round 0 and after the given rounds.

    `kinds` maps the name of each certificate to changes of the table [stability]. Each result
    contains one certificate per name.
    """
    return endings_of(train(config, rounds, source), kinds)


def endings_of(run: Trained, kinds: Mapping[str, Mapping[str, Any]]) -> list[Ending]:
    """Return the results of a run after the rounds whose models are stored."""
    experiment, models = run.experiment, run.models
    held_out = experiment.shards.held_out
    test = risk(experiment.task, models, held_out.inputs, held_out.labels)
    of_samples = experiment.task.losses(models, held_out)[0].double().cpu().numpy()
    certificates, tops = [{}], [1.0]  # the gap of X0 is not used, so its range is that of any loss
    widths = [0.0]
    for place in range(1, len(run.rounds)):
        case = run.setting(place)
        cases = {name: case.under(**changes) for name, changes in kinds.items()}
        certificates.append({name: certify(case) for name, case in cases.items()})
        name, first_case = next(iter(cases.items()))
        tops.append(proved_range(first_case, certificates[-1][name]))
        widths.append(change_range(first_case, certificates[-1][name]))
    losses = measured_losses(run.config, run.data, run.source.classes, experiment, models, tops)
    return [
        Ending(round, float(test.scores["accuracy"][place]), float(test.loss[place]),
               losses[place], certificates[place], of_samples[place] - of_samples[0], widths[place])
        for place, round in enumerate(run.rounds)
    ]  # fmt: skip
