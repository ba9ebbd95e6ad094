"""Measures and certificates of a run, as if the run had ended after given rounds.

The shorter runs use the first part of the schedule of the longest run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fedmuon.analysis import Realized
from fedmuon.config.load import Config
from fedmuon.data.source import Source
from fedmuon.experiments.stability.certificates import (
    Certificate,
    CertifiedSetting,
    certify,
    start_of,
)
from fedmuon.experiments.stability.finished_run import Loss, mean_squares, measured_losses
from fedmuon.experiments.stability.gap import proved_range
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.evaluation import risk
from fedmuon.federated.rounds import begin, run_rounds


@dataclass(frozen=True)
class Ending:
    """The result of a run of the matrix task that ends after `round` rounds.

    Attributes:
        round: The number of rounds of the run; 0 stands for the initial model X⁰.
        accuracy: Accuracy on held-out samples.
        test_loss: Mean loss over held-out samples, without weights.
        loss: The train loss, and the gap with its interval.
        certificates: The certificate for each name in `kinds`. The mapping is empty for X⁰.
    """

    round: int
    accuracy: float
    test_loss: float
    loss: Loss
    certificates: Mapping[str, Certificate]


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
    config = resolve(config)
    source = read_source(config) if source is None else source
    data = build_data(config, source)
    experiment = build_experiment(config, data)
    start = begin(experiment.recipe, experiment.task, config.federation.seed)
    ends = (result.state for result in run_rounds(experiment, start))
    weights = [end.params["weight"] for end in ends if end.round in rounds]
    models = {"weight": torch.cat([start.params["weight"], *weights])}
    held_out = experiment.shards.held_out
    test = risk(experiment.task, models, held_out.inputs, held_out.labels)
    squares = mean_squares(experiment, data.sizes, models)

    plan, (first, *_) = experiment.plan, models["weight"]
    ball, factors = start_of(first.cpu().numpy(), source), plan.factors()
    certificates, tops = [{}], [1.0]  # the gap of X0 is not used, so its range is that of any loss
    for place, round in enumerate(rounds, 1):
        federation = config.federation.model_copy(update={"rounds": round})
        case = CertifiedSetting(
            config.model_copy(update={"federation": federation}),
            data.sizes,
            Realized(plan.schedule()[:round], plan.rows if plan.batch else None),
            first.shape,
            factors=None if factors is None else factors[:round],
            start=ball,
            squares=partial(np.asarray, squares[place]),
        )
        cases = {name: case.under(**changes) for name, changes in kinds.items()}
        certificates.append({name: certify(case) for name, case in cases.items()})
        name, first_case = next(iter(cases.items()))
        tops.append(proved_range(first_case, certificates[-1][name]))
    losses = measured_losses(config, data, source.classes, experiment, models, tops)
    return [
        Ending(round, float(test.scores["accuracy"][place]), float(test.loss[place]),
               losses[place], certificates[place])
        for place, round in enumerate([0, *rounds])
    ]  # fmt: skip
