"""The stability recursion of FedMuon with local-global alignment (001, Remark 3.2).

The paper leaves the perturbation of the global direction D to "a separate recursion". It is this.
The local step is X <- X - eta ((1 - alpha) Orth(M) + alpha D), with D fixed during a round, and
D^{r+1} = (X^r - X^{r+1}) / (eta E). Write x, m, d for bounds on ||dX||, ||dM||, ||dD||.

One local step of client i: m' = beta m + (1 - beta)(Lg x + Delta 1{i = c}), as without alignment,
and x' = x + eta (1 - alpha) L m' + eta alpha d. So (x, m, d) moves by

    A = [[1 + e(1-beta)Lg, e beta, eta alpha],   b = (e (1-beta), 1 - beta, 0),
         [(1-beta)Lg,      beta,   0        ],   e = eta (1 - alpha) L.
         [0,               0,      1        ]]

D^{r+1} is the mean over the cohort and the E steps of (1 - alpha) Orth(M_i) + alpha D^r, hence
d^{r+1} <= mean over the cohort of sum_k ((1 - alpha) L m_i^{k+1} + alpha d^r) / E, which is exactly
mean_i (x_i^E - x^r) / (eta E) in the *bounds* x: the increments, not the sum x^r + x^{r+1} that a
triangle inequality on the definition of D would give. So a round multiplies (x, m, d) by Q, whose
rows are those of A^E for x and m and e1^T (A^E - I) / (eta E) for d, and adds
Delta 1{c in C_r} / K times kappa, the same rows of (sum_k A^k) b. As d^0 = 0,

    a_s = e1^T Q^{R-1-s} kappa,   ||X^R(S) - X^R(S')||_F <= Delta_i (1/K) sum_s a_s 1{i in C_s}.
"""

import numpy as np

from fedmuon.analysis.theory.checks import at_least, entries, whole
from fedmuon.analysis.theory.recursion import first_rows, increment, saturated
from fedmuon.errors import InputError


def aligned_amplification(
    lr: float,
    beta: float,
    l_orth: float,
    l_g: float,
    rounds: int,
    local_steps: int = 1,
    alignment: float = 0.0,
) -> np.ndarray:
    """a_s of the aligned run, [R], infinite where it overflows; with alignment 0 it is 001 (8)."""
    with np.errstate(over="ignore", invalid="ignore"):
        moved, kick = aligned_round(lr, beta, l_orth, l_g, local_steps, alignment)
        horizon = entries("rounds", whole("rounds", rounds))
        backwards = kick[0] + first_rows(moved, horizon) @ kick
    return saturated(backwards)[::-1]


def aligned_round(
    lr: float, beta: float, l_orth: float, l_g: float, local_steps: int, alignment: float
) -> tuple[np.ndarray, np.ndarray]:
    """Q - I [3, 3] and kappa [3]: one round on (||dX||, ||dM||, ||dD||)."""
    step, kick = _local_step(lr, beta, l_orth, l_g, alignment)
    power, total = np.zeros((3, 3)), np.zeros(3)  # A^k - I and sum_{j<k} A^j b, at first for k = 0
    left = whole("local_steps", local_steps)
    while left:  # step and kick are the same for 1, 2, 4, ... local steps
        if left % 2:
            power, total = power + step + power @ step, total + kick + power @ kick
        step, kick = 2 * step + step @ step, 2 * kick + step @ kick
        left //= 2
    power[2] = power[0] / (lr * local_steps)
    power[2, 2] -= 1
    total[2] = total[0] / (lr * local_steps)
    return power, total


def _local_step(
    lr: float, beta: float, l_orth: float, l_g: float, alignment: float
) -> tuple[np.ndarray, np.ndarray]:
    """A - I and b."""
    if not 0 <= alignment <= 1:
        raise InputError(f"alignment = {alignment} is refused: it is a share in [0, 1].")
    if at_least("lr", lr) == 0:
        raise InputError("lr = 0 is refused: the global direction divides by it.")
    step = np.zeros((3, 3))
    step[:2, :2], kick = increment(lr * (1 - alignment), beta, l_orth, l_g)
    step[0, 2] = lr * alignment
    return step, np.append(kick, 0.0)
