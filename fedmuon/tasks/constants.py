"""Constants of the matrix classifier for Stability note, Assumptions 4.3 and 4.4, with proofs.

X is [d, c], a sample is (u, y) with ||u||_2 <= rho, p = softmax(X^T u), and the loss of X at (u, y)
is 1 - p_y. For every X and every sample:

    0 <= loss <= B = 1
    ||grad|| <= L_loss = G_max = (sqrt(2) / 4) rho
    ||grad(X) - grad(X')||_F <= Lg ||X - X'||_F,   Lg = rho^2 / (3 sqrt(3))

Proof. Let s = X^T u. Then grad_s = -p_y (e_y - p). Its squared norm is p_y^2 ((1-p_y)^2 + sum_{k !=
y} p_k^2) <= 2 p_y^2 (1-p_y)^2 <= 1/8, and grad_X = u grad_s^T. The Hessian in s is largest if one
other class has all the remaining probability. With q = p_y, the Hessian is then q(1-q)(1-2q) times
a matrix of norm 2. The maximum of 2 q(1-q)|1-2q| is 1/(3 sqrt(3)), and the map X -> s has norm rho.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Constants:
    """Upper bounds of the loss, its Lipschitz constant, its gradients and its smoothness."""

    loss_bound: float
    lipschitz: float
    gradient_bound: float
    smoothness: float


def constants(radius: float = 1.0) -> Constants:
    """Return the constants for samples with a norm of at most `radius`."""
    slope = math.sqrt(2) / 4 * radius
    return Constants(1.0, slope, slope, radius**2 / (3 * math.sqrt(3)))


# The same assumptions on a ball of models: upper bounds for the matrix classifier, with proofs.
#
# Let ||u||_2 <= 1, and let the logits s = X^T u, minus their mean, have ||s||_2 <= r. This holds if
# ||X - X0||_op <= rho and r = rho + ||X0 (I - 11^T/c)||_op. The loss 1 - p_y with p = softmax(s)
# does not depend on the mean. By symmetry, y is the first class. The m = c - 1 other classes share
# the mass 1 - p_y in the proportions pi.
#
# **Extreme softmaxes.** For k classes, on ||s|| <= r, sum s = 0:
#
#     max p_1 = 1 / (1 + (k-1) exp(-r sqrt(k/(k-1)))) =: P_k(r)                                (1)
#     max sum_j e^(s_j) = e^(r sqrt((k-1)/k)) + (k-1) e^(-r/sqrt(k(k-1))) =: Z_k(r)            (2)
#     max p_1 p_2 = 1 / (2 + (k-2) exp(-r sqrt(k/(2(k-2)))))^2                                 (3)
#
# (1), (3): log p_1 and log p_1 p_2 are concave and symmetric in the other classes, so averaging
# over permutations of these classes increases them. Therefore, the other logits are equal, and the
# value increases with s_1.
#
# (2): at a maximum, e^(s_j) is affine in s_j with one multiplier, so at most two values occur.
# Suppose two entries have the larger value and one the smaller: x, x, z. They are
# mu + a cos(t + 2 pi j/3) at one angle t of a circle on which the sum and the sum of squares are
# constant. On this circle, sum e^(a cos) = 3 (I_0(a) + 2 sum_n I_3n(a) cos(3 n t)) is largest at
# t = 0, with one high and two low entries. Therefore, one entry is high and all others are low.
#
# **In polar coordinates.** Let s_y = a, and the others -a/m + w, sum w = 0. Then
# r^2 >= a^2 c/m + ||w||^2. If a >= 0, there is an f in [0, pi/2] with a <= r sqrt(m/c) cos(f) and
# ||w|| <= r sin(f), and
#
#     q := p_y <= P_c(r cos f),    ||pi||^2 <= min(P_m(t), Z_m(2t) / m^2) =: S,   t = r sin f   (4)
#
# because sum e^(w_j) >= m (Jensen), ||pi||^2 <= max pi, and pi = softmax(w). A negative a makes q
# smaller.
#
# **Gradient.** The gradient is u v^T with v = q (p - e_y). Its squared norm is
# ||u||^2 q^2 (1-q)^2 (1 + ||pi||^2).
#
# **Diameter.** For unit u, u' (the norm is convex in their lengths),
# ||u v^T - u' v'^T||^2 = ||v||^2 + ||v'||^2 - 2 (u . u')(v . v'), which is at most (2 g)^2. If
# samples are non-negative, u . u' >= 0. The square is then at most 2 g^2 if v . v' >= 0, as for
# equal labels, and otherwise at most 2 g^2 - 2 v . v', with
#
#     -v . v' = q q' (p_y' + p'_y - p . p'),   p . p' >= c (prod p p')^(1/c) >= c / Z_c(r)^2.
#
# The products p_y p_y' and p'_y p'_y' satisfy (3). With B the right side of (3), q q' (...) <=
# B (q + q') - q q' c/Z^2. This is bilinear, so it is largest if each of q, q' is at an end of its
# range.
#
# **Hessian.** The Hessian is (u u^T) x H. With D = x_y - pi . x, ||(1, -pi)||^2 = 1 + ||pi||^2,
#
#     x^T H x = -q (1-q) [(1 - 2q) D^2 - Var_pi(x)],   Var_pi(x) <= min(max pi, 1/2) ||x||^2
#
# (the covariance of pi is below diag pi, and 2 max pi_j (1 - pi_j) bounds its row sums; it is 0 for
# m = 1). Therefore, ||H|| is at most q (1-q)(1-2q)(1+S), or
# q (1-q) [(2q-1)_+ (1+S) + min(P_m(t), 1/2)].
#
# **Range.** max p_y is (1); 1/min p_y - 1 = max sum_j e^(s_j - a) <= max_f e^(r sqrt(c/m) cos f)
# Z_m.
#
# **No search.** All terms increase in P_c(r cos f) and in t, with two exceptions: q (1-q) has its
# maximum at 1/2, and q (1-q) |1-2q| at (3 -+ sqrt 3)/6. On a piece [f, f'] of the quarter circle,
# the values at cos f and at sin f' therefore bound all values in between. The maximum over the
# pieces is a bound. A relative 1e-12 covers rounding. The global constants hold everywhere, so they
# limit these bounds.

PIECES = 512
PEAK = (3 - np.sqrt(3)) / 6  # position of the maximum of q (1-q)(1-2q)
ROUNDING = 1 + 1e-12
ABSOLUTE = 1e-15  # rounding error of a difference of two probabilities


@dataclass(frozen=True)
class Suprema:
    """Upper bounds for models in a ball, one for each given radius of the ball.

    Attributes:
        gradient: Norm of a sample's gradient.
        diameter: Largest distance between the gradients of two samples.
        smoothness: Norm of the Hessian of a sample.
        spread: Difference between the supremum and the infimum of the loss.
        deviation: Supremum of |loss - (1 - 1/c)|. The loss 1 - 1/c belongs to uniform predictions
            over c classes.
    """

    gradient: np.ndarray
    diameter: np.ndarray
    smoothness: np.ndarray
    spread: np.ndarray
    deviation: np.ndarray


def suprema(classes: int, radius: ArrayLike, nonnegative: bool = False) -> Suprema:
    """Return bounds for all models whose centred logits have a norm of at most `radius`.

    Args:
        classes: Number of classes c.
        radius: One or more radii r, an array of any shape.
        nonnegative: Whether samples have no negative entries, which makes `diameter` smaller.
    """
    r, m, top = np.asarray(radius, dtype=float), classes - 1, constants()
    edges = np.linspace(0, np.pi / 2, PIECES + 1)
    cos, t = np.cos(edges[:-1]), r[..., None] * np.sin(edges[1:])
    q, pi_max = _likeliest(classes, r[..., None] * cos), _likeliest(m, t)
    parts = np.minimum(pi_max, _total(m, 2 * t) / m**2)
    with np.errstate(over="ignore"):
        unlikely = np.exp(r[..., None] * np.sqrt(classes / m) * cos) * _total(m, t)
    ends = 1 / (1 + unlikely.max(-1)), q[..., 0]
    half = np.minimum(q, 0.5)
    gradient = (half * (1 - half) * np.sqrt(1 + parts)).max(-1)
    gradient = np.minimum(gradient * ROUNDING, top.gradient_bound)
    # Bound ||H||: p_y is in [ends[0], q], ||pi||^2 <= parts, and max pi <= pi_max if m > 1.
    low, high = np.clip(PEAK, ends[0][..., None], q), np.clip(q, 0.5, 1 - PEAK)
    down = low * (1 - low) * (1 - 2 * low) * (1 + parts)
    up = high * (1 - high) * (2 * high - 1) * (1 + parts)
    variance = np.minimum(pi_max if m > 1 else 0 * pi_max, 0.5)
    curved = np.maximum(down, up + half * (1 - half) * variance).max(-1)
    far = np.maximum(ends[1] - 1 / classes, 1 / classes - ends[0])
    return Suprema(
        gradient,
        _diameter(classes, r, gradient, ends) if nonnegative else 2 * gradient,
        np.minimum(curved * ROUNDING, top.smoothness),
        np.minimum((ends[1] - ends[0]) * ROUNDING + ABSOLUTE * (r > 0), top.loss_bound),
        np.minimum(far * ROUNDING + ABSOLUTE * (r > 0), 1 - 1 / classes),
    )


def _likeliest(classes: int, r: np.ndarray) -> np.ndarray:
    """Return the maximum probability P_c(r) of a class, eq. (1) of the comment above."""
    return 1 / (1 + (classes - 1) * np.exp(-r * np.sqrt(classes / max(classes - 1, 1))))


@np.errstate(over="ignore")
def _total(classes: int, r: np.ndarray) -> np.ndarray:
    """Return Z_c(r), the maximum sum of exponentials, eq. (2) of the comment above."""
    m = classes - 1
    return np.exp(r * np.sqrt(m / classes)) + m * np.exp(-r / np.sqrt(classes * max(m, 1)))


def _diameter(
    classes: int, r: np.ndarray, gradient: np.ndarray, ends: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Return the diameter of the set of all gradients if samples have no negative entries."""
    others = classes - 2
    product_bound = (2 + others * np.exp(-r * np.sqrt(classes / (2 * max(others, 1))))) ** -2.0
    with np.errstate(over="ignore"):
        common = classes / _total(classes, r) ** 2
    low, high = ends
    corners = [product_bound * (a + b) - common * a * b for a in (low, high) for b in (low, high)]
    apart = np.maximum(np.max(corners, axis=0), 0)
    return np.minimum(np.sqrt(2 * gradient**2 + 2 * apart) * ROUNDING, 2 * gradient)
