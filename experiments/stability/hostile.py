"""How far hostile clients can move the model of a setting or a run: `fedmuon bound --hostile`.

This module needs only NumPy. The formula and its proof are in `analysis/theory/hostile.py`.
"""

from typing import Any

import numpy as np
from rich.table import Table

from fedmuon.analysis.report.numbers import count, number
from fedmuon.analysis.theory.corollaries import Realized
from fedmuon.analysis.theory.hostile import hostile_bound
from fedmuon.config.load import Config
from fedmuon.config.schema import Attacks, Robust, biased_participation
from fedmuon.core.choices import is_own
from fedmuon.core.errors import InputError, shown
from fedmuon.core.files import finite
from fedmuon.experiments.stability.certificates import (
    AUTHOR,
    DROPPED,
    IMAGES,
    STOPPED,
    CertifiedSetting,
    has_map,
    map_constant,
    method_of,
)
from fedmuon.experiments.tables import facts, listed
from fedmuon.federated.honest_ball import matrix_radius, state_radius
from fedmuon.federated.plan import BIASED
from fedmuon.orthogonalize import Uncertified
from fedmuon.tasks.constants import constants

SMOOTHED = "gaussian-smoothed-sign"
ASSUMED = (
    "The server clips the change of each client's model to the ball, and each returned momentum to "
    "its norm.",
    "Hostile clients can send any message, know all data and draws, and may differ between rounds.",
    "The other run has the same participants, batches and step sizes, and honest clients only.",
    "The constants L_loss, Lg and G_max hold for all models (matrix task).",
    "Numbers are exact. The bound does not count rounding.",
)


def hostile_report(case: CertifiedSetting, hostile: int, folder: bool = False) -> dict[str, Any]:
    """Return the bound for a number of hostile clients as one JSON object.

    Args:
        case: The setting.
        hostile: The number of hostile clients. The bound holds for any clients.
        folder: Whether the setting is that of a finished run, whose server must have clipped.

    Raises:
        InputError: If the number is out of range, or no bound covers the setting.
    """
    config, clients = case.config, len(case.sizes)
    if not 1 <= hostile < clients:
        raise InputError(
            f"--hostile is {hostile}, but it must be at least 1 and less than the {clients} "
            "clients. Pass a number in this range."
        )
    _require_covered(case, folder)
    method = method_of(config.model_copy(update={"attacks": Attacks(), "robust": Robust()}))
    global_constants = constants()
    smooth = global_constants.smoothness if case.l_g is None else case.l_g
    slope = map_constant(case) if case.l_orth is None else case.l_orth
    radius = config.robust.radius or matrix_radius(config, _shape(case))
    factors = np.ones(len(case.rates)) if config.robust.radius else case.rates / config.local.lr
    momentum = 0.0 if method.afresh or not method.beta else _momentum_radius(config)
    weights = _weights(case, hostile)
    bound = hostile_bound(
        method, case.rates, slope, smooth, radius * factors, weights, momentum, config.local.steps
    )
    change = global_constants.lipschitz * bound.last
    return {
        "hostile": hostile,
        "weight": float(weights.max()),
        "radius": radius,
        "momentum_radius": momentum,
        "l_orth": slope,
        "l_g": smooth,
        "distance": finite(bound.last),
        "recursion": finite(float(bound.distances[-1])),
        "trivial": finite(float(bound.trivial[-1])),
        "loss_change": min(global_constants.loss_bound, change),
        "vacuous": change >= global_constants.loss_bound,
        "assumptions": [*ASSUMED, *_unproved(case)],
    }


def hostile_table(record: dict[str, Any]) -> Table:
    """Return the record of `hostile_report` as a table for the terminal."""
    names = {
        "distance": "largest move of the final model",
        "loss_change": "largest change of a sample's loss",
        "recursion": "move by the recursion",
        "trivial": "move by the ball alone",
        "weight": "largest weight of hostile clients in a round",
        "radius": "radius of the ball",
        "momentum_radius": "largest norm of a momentum",
        "l_orth": "Lipschitz constant of the orthogonalizer",
        "l_g": "Lipschitz constant of the gradient",
    }
    values = {name: "-" if value is None else value for name, value in record.items()}
    if record["vacuous"]:
        values["loss_change"] = (
            f"{number(record['loss_change'])} (vacuous: no loss changes by more)"
        )
    rows = [(words, values[name]) for name, words in names.items()]
    title = f"bound for {count(record['hostile'], 'hostile client')}"
    return facts(title, [*rows, *listed("assumes", record["assumptions"])])


def _require_covered(case: CertifiedSetting, folder: bool) -> None:
    """Raise an error for settings that the bound does not cover."""
    config = case.config
    if config.task.name != "matrix":
        raise Uncertified(
            "A bound for hostile clients needs [task] name = 'matrix', because the constants of "
            f"{config.task.name!r} are not proved. Set name = 'matrix'."
        )
    if folder and config.robust.ball == "none":
        raise Uncertified(
            "The server of this run clips nothing, so one hostile client can move the model "
            "arbitrarily far. Run the config with [robust] ball = 'model'."
        )
    if config.robust.mixing:
        raise Uncertified(
            f"[robust] mixing = {config.robust.mixing} is not covered by the bound for hostile "
            "clients, which needs the mean of the clients' own replies. Set mixing = 0."
        )
    if case.l_orth is None and has_map(config) and config.orthogonalizer.name == SMOOTHED:
        raise Uncertified(
            f"The Lipschitz constant of [orthogonalizer] name = {SMOOTHED!r} holds only if the "
            "momentum does not depend on the noise, but hostile clients know the noise. Choose "
            "another orthogonalizer, such as 'smoothed-polar'."
        )
    if biased_participation(config):  # late replies, or fewer replies than the weights assume
        raise Uncertified(BIASED)
    if case.stopped:
        raise Uncertified(STOPPED)
    if case.dropped:
        raise Uncertified(DROPPED)


def _unproved(case: CertifiedSetting) -> list[str]:
    """Return the constants that nobody has checked."""
    custom_map = case.l_orth is None and is_own(case.config.orthogonalizer.name)
    return [
        *case.given,
        *([AUTHOR.format(case.l_map)] if custom_map and case.l_map is not None else []),
    ]


def _momentum_radius(config: Config) -> float:
    """Return the norm to which the server clips each returned momentum."""
    if radius := state_radius(config):
        return radius
    raise Uncertified(
        f"With [local] recipe = {shown(config.local.recipe)}, clients return a momentum, and the "
        "server clips it to no known norm. Set [robust] ball = 'model' and state-radius, such as "
        "1, and run the config again, or use the recipe 'fedmuon'."
    )


def _shape(case: CertifiedSetting) -> tuple[int, int]:
    """Return the shape of the model. If it is unknown, use a larger one with as many classes."""
    if case.shape is not None:
        return case.shape
    data = case.config.data
    if data.name in IMAGES:
        return 10**9, 10
    if data.name == "synthetic":
        return data.dimension, data.classes
    raise InputError(
        "The radius of the ball depends on the number of classes, which is not known for [data] "
        f"name = {shown(data.name)}. Set [robust] radius, or pass a run folder."
    )


def _weights(case: CertifiedSetting, hostile: int) -> np.ndarray:
    """Return the largest weight of `hostile` clients in each round [R]."""
    federation, part = case.config.federation, case.participation
    if federation.aggregate != "by-samples":
        most = min(hostile, federation.per_round)
        return np.full(federation.rounds, most / federation.per_round)
    if not isinstance(part, Realized):
        raise InputError(
            "[federation] aggregate = 'by-samples' gives clients different weights, so the bound "
            "for hostile clients needs the schedule of a run. Pass a run folder, or set aggregate "
            "= 'mean'."
        )
    sizes = np.sort(np.asarray(case.sizes)[np.asarray(part.schedule)], 1)
    return sizes[:, -hostile:].sum(1) / sizes.sum(1)
