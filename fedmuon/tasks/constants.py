"""Assumptions 4.3 and 4.4 of 001 with numbers, proved for the matrix classifier.

X [d, c], sample (u, y) with ||u||_2 <= rho, p = softmax(X^T u), loss(X, (u, y)) = 1 - p_y. For
every X and every sample:

    0 <= loss <= B = 1
    ||grad|| <= L_loss = G_max = (sqrt(2) / 4) rho
    ||grad(X) - grad(X')||_F <= Lg ||X - X'||_F,   Lg = rho^2 / (3 sqrt(3))

Proof. With s = X^T u, grad_s = -p_y (e_y - p), whose square is p_y^2 ((1-p_y)^2 + sum_{k != y}
p_k^2) <= 2 p_y^2 (1-p_y)^2 <= 1/8, and grad_X = u grad_s^T. The Hessian in s peaks when one other
class holds all the rest of the mass, where with q = p_y it is q(1-q)(1-2q) times a matrix of norm
2; max of 2 q(1-q)|1-2q| is 1/(3 sqrt(3)), and X -> s has norm rho.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Assumptions 4.3 and 4.4 of 001 with numbers: loss bound, Lipschitz, gradient, smoothness."""

    loss_bound: float
    lipschitz: float
    gradient_bound: float
    smoothness: float


def constants(radius: float = 1.0) -> Constants:
    """The proved constants for samples in the ball of the given radius."""
    slope = math.sqrt(2) / 4 * radius
    return Constants(1.0, slope, slope, radius**2 / (3 * math.sqrt(3)))
