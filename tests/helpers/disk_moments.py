"""Exact second moments of DiSK with SGD on a quadratic of one variable."""

import numpy as np

from fedmuon.analysis.theory.private_stationarity import Disk


def exact(run: Disk, smoothness: float, x: float, start: str = "first") -> float:
    """The mean of E F'(x_t)^2 for F = L x^2 / 2 on the line and full batches, from the second
    moments of (x_t, d_{t-1}, g~_{t-1}), step by step. On it Q is L d for every gamma."""
    k, eta = run.gain, run.lr
    state, first, total = np.array([[x, 0.0, 0.0]]).T, start == "first", 0.0
    moments = state @ state.T
    for _ in range(run.steps):
        total += smoothness**2 * moments[0, 0]
        gain, old = (1.0, 0.0) if first else (k, 1 - k)
        smooth = np.array([gain * smoothness, (1 - k) * smoothness, old])  # g~_t without w
        if first:
            smooth[1] = 0.0
        step = np.stack([np.array([1, 0, 0]) - eta * smooth, -eta * smooth, smooth])
        kick = gain * np.array([-eta, -eta, 1.0])
        moments = step @ moments @ step.T + run.noise * np.outer(kick, kick)
        first = False
    return total / run.steps
