"""Orthogonalizers: functions of the singular values, by a dense decomposition."""

import numpy as np


def smoothed_polar(M: np.ndarray, lambda_: float) -> np.ndarray:
    U, s, V = np.linalg.svd(M, full_matrices=False)
    return (U * (s / np.sqrt(s**2 + lambda_))) @ V


def clipped_sign(M: np.ndarray, level: float) -> np.ndarray:
    U, s, V = np.linalg.svd(M, full_matrices=False)
    return (U * np.minimum(s / level, 1)) @ V


def exact_sign(M: np.ndarray) -> np.ndarray:
    """The gradients of the softmax have columns that sum to 0: a last singular value is noise."""
    U, s, V = np.linalg.svd(M, full_matrices=False)
    return (U * (s > 1e-12 * s[0])) @ V


def gaussian_smoothed_sign(M: np.ndarray, sigma: float, rng: np.random.Generator) -> np.ndarray:
    U, _, V = np.linalg.svd(M + sigma * rng.standard_normal(M.shape), full_matrices=False)
    return U @ V


def newton_schulz(M: np.ndarray, steps: int, eps: float) -> np.ndarray:
    """The cubic iteration."""
    Z = M / (np.linalg.norm(M) + eps)
    for _ in range(steps):
        Z = 1.5 * Z - 0.5 * Z @ Z.T @ Z
    return Z
