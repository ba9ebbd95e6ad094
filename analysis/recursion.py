"""The two-state stability recursion of 001, section 4.2."""

import math

import numpy as np

from fedmuon.errors import InputError


def amplification(
    lr: float, beta: float, l_orth: float, l_g: float, rounds: int, local_steps: int = 1
) -> np.ndarray:
    """a_s of 001 (8) for s = 0 .. R-1: how far a unit perturbation in round s moves X^R.

    a_s = e1^T A^{E(R-1-s)} (sum_k A^k) b, read from the last round backwards: the row vector
    v = e1^T A^{E(R-1-s)} is multiplied by A^E once a round, so the cost is O(R + E).
    """
    step, kick = transition(lr, beta, l_orth, l_g)
    power, total = np.eye(2), np.zeros(2)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(local_steps):
            total, power = total + power @ kick, power @ step
        backwards = _rows(power, rounds) @ total
    if not np.isfinite(backwards).all():
        raise InputError(
            "the amplification a_s overflows a double: shorten the horizon, lower lr, or use an "
            "orthogonalization with a smaller Lipschitz constant"
        )
    return backwards[::-1]


def transition(lr: float, beta: float, l_orth: float, l_g: float) -> tuple[np.ndarray, np.ndarray]:
    """A and b of 001 (6), (7): one local step on (||dX||, ||dM||), and a unit gradient's kick."""
    if not all(math.isfinite(value) and value >= 0 for value in (lr, l_orth, l_g)):
        raise InputError("lr, l_orth and l_g must be finite and not negative")
    if not 0 <= beta <= 1:
        raise InputError(f"beta = {beta} is refused: the memory coefficient lies in [0, 1]")
    push = lr * l_orth
    step = np.array([[1 + push * (1 - beta) * l_g, push * beta], [(1 - beta) * l_g, beta]])
    return step, np.array([push * (1 - beta), 1 - beta])


def _rows(power: np.ndarray, rounds: int) -> np.ndarray:
    """e1^T P^j for j = 0 .. R-1, shape [R, 2]."""
    rows = np.empty((rounds, 2))
    row = np.array([1.0, 0.0])
    for j in range(rounds):
        rows[j] = row
        row = row @ power
    return rows
