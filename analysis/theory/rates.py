"""Corollaries K.2 and K.3 of 001: equal clients, where the bound reads as a rate."""

import math
from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.theory.concentration import Constant
from fedmuon.analysis.theory.corollaries import Run, Uniform, equal_clients, theorem
from fedmuon.analysis.theory.generalization import Bound
from fedmuon.analysis.theory.participation import psi
from fedmuon.analysis.theory.recursion import OVERFLOW, amplification
from fedmuon.errors import InputError


@dataclass(frozen=True)
class Rate:
    """The bound when all clients share one eps, and the sizes that its order shows.

    `bound.h` is (27) or its K.3 twin, with the log(2n) of H where (27) loosens it to log(4n).
    `amplified` is the realized constant of the rate's assumption: C_amp of K.2, with
    sum_s a_s = C_amp eta L E R, or C_a of K.3, with max_s a_s = C_a eta L E. `order` is the rate
    with that constant, without logarithms and without C_hp: for comparing, never for certifying.
    """

    bound: Bound
    eps: float
    amplified: float
    order: float


def full_participation(run: Run, l_orth: float, delta: float, c_hp: Constant = "explicit") -> Rate:
    """K.2, (27): eps = (2 G_max L_loss / n) sum_s a_s, order G L C eta L E R / n + B / sqrt(n)."""
    a, clients = _amplified(run, l_orth), len(run.sizes)
    samples, total = equal_clients(run) * clients, float(a.sum())
    slope = run.constants.gradient_bound * run.constants.lipschitz
    order = slope * total / samples + run.constants.loss_bound / math.sqrt(samples)
    # At K = N nothing about the schedule is random, so this rho enters nothing.
    found = theorem(run, l_orth, Uniform(clients, 0.5), delta, c_hp)
    pace = run.lr * l_orth * run.local_steps * run.rounds  # 0 for a run that does not move
    return Rate(found, 2 * slope / samples * total, total / pace if pace else 0.0, order)


def partial_participation(
    run: Run, l_orth: float, per_round: int, delta: float, rho: float, c_hp: Constant = "explicit"
) -> Rate:
    """K.3: eps = (2 G_max L_loss / m) Psi(rho), and the order of Psi from the largest a_s."""
    a, size, clients = _amplified(run, l_orth), equal_clients(run), len(run.sizes)
    slope = run.constants.gradient_bound * run.constants.lipschitz
    eps = 2 * slope / size * psi(a, clients, per_round, rho)
    mean, log = run.rounds / clients, math.log(clients / rho)
    wave = math.sqrt(run.rounds * (1 - per_round / clients) / (per_round * clients) * log)
    reach = float(a.max()) * (mean + wave + log / per_round)
    order = slope / size * reach + run.constants.loss_bound / math.sqrt(size * clients)
    found = theorem(run, l_orth, Uniform(per_round, rho), delta, c_hp)
    pace = run.lr * l_orth * run.local_steps
    return Rate(found, eps, float(a.max()) / pace if pace else 0.0, order)


def _amplified(run: Run, l_orth: float) -> np.ndarray:
    smoothness = run.constants.smoothness
    a = amplification(run.lr, run.beta, l_orth, smoothness, run.rounds, run.local_steps)
    if not math.isfinite(float(a.max()) * len(a)):
        raise InputError(f"There is no rate to give, because {OVERFLOW}")
    return a
