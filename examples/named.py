"""The objects that `named.toml` names: data, an orthogonalizer and a schedule, with options."""

import numpy as np
from torch import Tensor


def moons(noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two half circles that no straight line separates."""
    rng = np.random.default_rng(seed)
    kind, angle = rng.integers(2, size=400), rng.uniform(0, np.pi, 400)
    points = np.stack([np.cos(angle) + kind, np.sin(angle)], 1) * (1 - 2 * kind[:, None])
    return points + rng.normal(0, noise, points.shape), kind


def damped(m: Tensor, floor: float) -> Tensor:
    """m / (floor + ||m||_F)."""
    return m / (floor + m.norm(dim=(-2, -1), keepdim=True))


def power(round: int, exponent: float) -> float:
    """(round + 1)^exponent."""
    return (round + 1) ** exponent
