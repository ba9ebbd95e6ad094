"""How much of the amplification a client's participation realizes (001 (9))."""

import numpy as np


def exposure(a: np.ndarray, schedule: np.ndarray, clients: int) -> np.ndarray:
    """Y_i(C) = (1/K) sum_s a_s 1{i in C_s}, shape [N], from a [R] and the schedule [R, K]."""
    per_round = schedule.shape[1]
    weights = np.repeat(a, per_round) / per_round
    return np.bincount(schedule.reshape(-1), weights=weights, minlength=clients)


def full_batch_sensitivity(gradient_bound: float, sizes: np.ndarray) -> np.ndarray:
    """Delta_i = 2 G_max / n_i, the replacement sensitivity of full-batch gradients, shape [N]."""
    return 2 * gradient_bound / sizes
