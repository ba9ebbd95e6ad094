"""A config as a problem of the reference (`tests/reference`), and the distance of both results."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from adapted import adapted, bases
from reference import gradients, orthogonal
from reference.rounds import Problem
from reference.trees import Tree
from torch import Tensor, nn

from fedmuon.config.load import Config
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin, simulate
from fedmuon.optim.stage import ServerState

SHARE = 0.3  # of a batch in the running statistics of `normalized_perceptron`


def built(config: Config) -> Experiment:
    return build_experiment(resolve(config))


def ended(experiment: Experiment) -> ServerState:
    return simulate(experiment, begin(experiment.recipe, experiment.task, experiment.plan.seed))


def perceptron() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))


def normalized_perceptron(share: float = SHARE) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(4, momentum=share)
        return nn.Sequential(nn.Linear(7, 4), norm, nn.Tanh(), nn.Linear(4, 3))


def with_module(config: Config, module: nn.Module) -> Config:
    return config.with_objects(UserObjects(task=module))


def problem_of(config: Config) -> Problem:
    """The same samples, first model and settings; all else comes from the reference."""
    experiment, data, local = built(config), build_data(config), config.local
    params = begin(experiment.recipe, experiment.task, config.federation.seed).params
    start = {name: value[0].numpy().astype(float) for name, value in params.items()}
    clients = range(config.federation.clients)
    samples = [(x.astype(float), y) for x, y in map(data.samples, clients)]
    gradient = {
        "weight": gradients.of_matrix,
        "0.weight": gradients.of_perceptron,
        "1.weight": gradients.of_normalized_perceptron,
        "0.lora_A.weight": partial(gradients.of_adapters, bases=bases(adapted())),
    }["1.weight" if "1.weight" in start else next(iter(start))]
    clock, plan = experiment.plan.timetable, experiment.plan
    versions: Sequence[Any] = ()
    if clock is not None and clock.versions:
        pairs = zip(clock.answered, clock.versions, strict=True)
        versions = [list(zip(i.tolist(), v.tolist(), strict=True)) for i, v in pairs]
    problem = Problem(
        *(start, samples, gradient, partial(image, config)),
        seed=config.federation.seed,
        rounds=config.federation.rounds,
        per_round=config.federation.per_round,
        steps=local.steps,
        batch=local.batch,
        epochs=local.epochs,
        factors=[plan.factor_at(number) for number in range(plan.rounds)],
        by_samples=config.federation.aggregate == "by-samples",
        versions=versions,
        **late_weights(config),
    )
    if "1.running_mean" not in start:
        return problem
    return replace(problem, statistics=partial(gradients.batch_statistics, share=SHARE))


def late_weights(config: Config) -> dict[str, Any]:
    """How late replies count, by the mode of the devices."""
    table = config.devices
    if table.mode == "threshold":
        return {"weight": lambda late: 1.0}
    if table.mode != "fedasync":
        return {}
    share, power = table.mixing, table.staleness_power
    return {"weight": lambda late: share / (1 + late) ** power, "mixes": True}


def image(config: Config, M: np.ndarray, round: int, client: int, step: int) -> np.ndarray:
    """The configured orthogonalizer."""
    table = config.orthogonalizer
    if table.name == "gaussian-smoothed-sign":
        key = {"round": round, "client": client, "step": step}
        rng = generator(config.federation.seed, Draw.SMOOTHING, **key)
        return orthogonal.gaussian_smoothed_sign(M, table.sigma, rng)
    if table.name == "newton-schulz":
        return orthogonal.newton_schulz(M, table.steps, table.eps)
    if table.name == "clipped-sign":
        return orthogonal.clipped_sign(M, table.clip_level)
    if table.name == "exact-sign":
        return orthogonal.exact_sign(M)
    return orthogonal.smoothed_polar(M, table.lambda_)


def arrays(tree: Mapping[str, Tensor]) -> Tree:
    """The only replica of a tree."""
    return {name: value[0].double().numpy() for name, value in tree.items()}


def gap(tree: Mapping[str, Tensor], expected: Tree) -> float:
    """The largest difference of the only replica and the reference."""
    assert tree.keys() == expected.keys(), (tree.keys(), expected.keys())
    return max(float(np.abs(value - expected[name]).max()) for name, value in arrays(tree).items())
