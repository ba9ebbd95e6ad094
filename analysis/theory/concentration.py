"""The two branches of the bound, and the constant that 001 leaves open.

**What is proved here.** Let replacing one sample of client i change every loss by at most eps_i,
0 <= eps_i <= B. For every r >= 2, with J = ceil(log2 n) and S = (sum_i n_i eps_i^2 / n_eff)^(1/2),

    gap <= 2 sum_i p_i eps_i + sum_a w_a g_a,                               w_a = p_i / n_i,
    || sum_a w_a g_a ||_r <= k(r) B / sqrt(n_eff) + 2 sqrt(r - 1) k(r) J S,
    k(r) = (2 Gamma(r/2 + 1))^(1/r) / sqrt(2) <= sqrt(r / 2).

*The comparison.* With z' an independent copy of sample a and S^a the data where it replaces z_a,
g_a = E_z'[F_i(A(S^a)) - loss(A(S^a), z_a)]. Swapping S^a for S moves F_i and the loss by eps_i
each, which is the 2 eps_i. Given all samples but z_a, A(S^a) is fixed or independent of z_a, so
E[g_a | others] = 0. Replacing sample b of client j moves g_a by at most 2 eps_j.

*Tool 1, k(r).* If replacing coordinate j moves H by at most c_j, McDiarmid gives
P(|H - EH| >= t) <= 2 exp(-2 t^2 / C^2), C^2 = sum c_j^2, and integrating r t^(r-1) against it
E|H - EH|^r <= 2 Gamma(r/2 + 1) (C^2 / 2)^(r/2), that is ||H - EH||_r <= k(r) C. With m = r/2 >= 1,
2 Gamma(m + 1) <= 2 m^m <= (2m)^m, hence k(r) <= sqrt(r / 2), with equality at r = 2.

*Tool 2.* Rio's inequality: martingale differences satisfy ||sum X_j||_r^2 <= (r-1) sum ||X_j||_r^2
for r >= 2. Sums of independent centred terms are a case. It is used given the other blocks, and
Minkowski in L_{r/2} then removes the condition.

*The dyadic tree.* Pad the samples to 2^J, 2^(J-1) < n <= 2^J. At level l the samples form blocks of
2^l; let g_a^l = E[g_a | z_a, all outside a's block]. g_a telescopes into E[g_a | z_a] and J
differences D_a^l = g_a^l - g_a^(l+1).

- E[g_a | z_a] is a constant minus a number in [0, B]: independent, centred, in an interval of
  length B. Tool 1 with c_a = w_a B gives k(r) B (sum w_a^2)^(1/2) = k(r) B / sqrt(n_eff).
- Given all outside a's block B, the D_a^l, a in B, are functions of one coordinate each, hence
  independent, and centred as E[g_a | others] = 0. Given z_a and all outside the parent block, D_a^l
  is a function of the sibling block B* minus its mean, so tool 1 bounds it by k(r) A_{B*} with
  A_B = (sum_{b in B} 4 eps^2)^(1/2). Tool 2: the block contributes sqrt(r-1) k(r) W_B A_{B*}, with
  W_B = (sum_B w_a^2)^(1/2). By Cauchy-Schwarz over siblings, then over parents, a level contributes
  at most sqrt(r-1) k(r) W A, with W A = 2 S over all samples.

*The tail.* P(X >= delta^(-1/r) ||X||_r) <= delta for every r fixed before the data are drawn.

**What is offered.** `sharp`: the above with the best r. `explicit`: r = max(2, ln(1/delta)), where
delta^(-1/r) <= e, with k(r) <= sqrt(r/2), sqrt(r-1) <= sqrt(r) and, in the first term, sqrt(r)
for sqrt(r/2) (what tool 2 alone would give there):

    gap <= 2 sum p_i eps_i + e [B sqrt(r / n_eff) + sqrt(2) r J S].

A number: H of 001 (10) with C_hp equal to it, which nothing proves.
"""

import math
from typing import Literal

import numpy as np

from fedmuon.analysis.theory.checks import at_least, in_doubles, whole
from fedmuon.analysis.theory.search import least
from fedmuon.core.errors import InputError

Constant = float | Literal["explicit", "sharp"]


def effective_size(sizes: np.ndarray, weights: np.ndarray) -> float:
    """n_eff = 1 / sum_i p_i^2 / n_i."""
    return float(1 / (np.square(weights) / sizes).sum())


def spread(eps: np.ndarray, sizes: np.ndarray, n_eff: float) -> float:
    """S = (sum_i n_i eps_i^2 / n_eff)^(1/2)."""
    return math.sqrt((sizes * np.square(eps)).sum() / n_eff)


def levels(samples: int) -> int:
    """J = ceil(log2 n), in whole numbers: a float logarithm may miss a power of two."""
    return (whole("samples", samples) - 1).bit_length()


def sharp_stability(
    eps: np.ndarray,
    sizes: np.ndarray,
    weights: np.ndarray,
    delta: float,
    loss_bound: float,
    c_hp: Constant,
) -> float:
    """H_delta of 001 (10), or what this module proves in its place."""
    n_eff = effective_size(sizes, weights)
    base, scale = loss_bound / math.sqrt(n_eff), spread(eps, sizes, n_eff)
    samples = int(sizes.sum())
    if c_hp == "explicit":
        r = max(2.0, math.log(1 / delta))
        tree = math.sqrt(2) * r * levels(samples) * scale
        deviation = math.e * (base * math.sqrt(r) + tree)
    elif c_hp == "sharp":
        deviation = _sharpest(base, scale, samples, delta)
    elif isinstance(c_hp, str):
        raise InputError(f"c_hp is {c_hp!r}: give a number, 'explicit' or 'sharp'.")
    else:
        log = math.log(2 / delta)
        deviation = scale * math.log(2 * samples) * log + base * math.sqrt(log)
        deviation *= at_least("c_hp", c_hp)
    return float(2 * (weights * eps).sum() + deviation)


def bounded_differences(
    eps: np.ndarray, sizes: np.ndarray, weights: np.ndarray, delta: float, loss_bound: float
) -> float:
    """G_delta of 001 (11): McDiarmid on the gap itself, with no open constant."""
    share = weights / sizes
    moves = (2 - share) * eps + loss_bound * share
    root = math.sqrt(math.log(1 / delta) / 2 * (sizes * np.square(moves)).sum())
    return float((weights * eps).sum() + root)


@in_doubles
def difference_moment(r: float) -> float:
    """k(r): ||H - EH||_r <= k(r) (sum c_j^2)^(1/2) for bounded differences c_j, r >= 2."""
    r = at_least("r", r, 2)
    return math.exp((math.log(2) + math.lgamma(r / 2 + 1)) / r) / math.sqrt(2)


def moment(r: float, base: float, scale: float, samples: int) -> float:
    """The bound on ||sum_a w_a g_a||_r, for base = B / sqrt(n_eff) and scale = S."""
    base, scale = at_least("base", base), at_least("scale", scale)
    return difference_moment(r) * (base + 2 * math.sqrt(r - 1) * levels(samples) * scale)


def _sharpest(base: float, scale: float, samples: int, delta: float) -> float:
    """The least over r of delta^(-1/r) ||.||_r; an r missed by the search is only less sharp."""
    log = math.log(1 / delta)

    def tail(r: float) -> float:
        return math.exp(log / r) * moment(r, base, scale, samples)

    return min(tail(least(tail, 2, 4 + 3 * log)), tail(2.0))
