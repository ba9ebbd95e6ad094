"""The step from stability to a generalization bound, and the measured generalization gap.

The constant
------------
The Stability note does not specify the constant of the branch H. This section proves the bound with
an explicit constant.

**What is proved.** Let replacing one sample of client i change every loss by at most eps_i,
0 <= eps_i <= B. For every r >= 2, with J = ceil(log2 n) and S = (sum_i n_i eps_i^2 / n_eff)^(1/2),

    gap <= 2 sum_i p_i eps_i + sum_a w_a g_a,                               w_a = p_i / n_i,
    || sum_a w_a g_a ||_r <= k(r) B / sqrt(n_eff) + 2 sqrt(r - 1) k(r) J S,
    k(r) = (2 Gamma(r/2 + 1))^(1/r) / sqrt(2) <= sqrt(r / 2).

*The comparison.* Let z' be an independent copy of sample a, and let S^a be the data in which z'
replaces z_a. Then g_a = E_z'[F_i(A(S^a)) - loss(A(S^a), z_a)]. Replacing S^a by S changes F_i and
the loss by at most eps_i each, which gives the term 2 eps_i. Given all samples except z_a, A(S^a)
is independent of z_a, so E[g_a | others] = 0. Replacing sample b of client j moves g_a by at most 2
eps_j.

*The moment bound k(r).* If replacing coordinate j moves H by at most c_j, McDiarmid's inequality
gives P(|H - EH| >= t) <= 2 exp(-2 t^2 / C^2), C^2 = sum c_j^2. Integrating r t^(r-1) against this
tail gives E|H - EH|^r <= 2 Gamma(r/2 + 1) (C^2 / 2)^(r/2), that is ||H - EH||_r <= k(r) C. With
m = r/2 >= 1, 2 Gamma(m + 1) <= 2 m^m <= (2m)^m. Hence k(r) <= sqrt(r / 2), with equality at r = 2.

*Rio's inequality.* Martingale differences satisfy ||sum X_j||_r^2 <= (r-1) sum ||X_j||_r^2 for r >=
2. Sums of independent centred terms are a special case. The proof applies Rio's inequality
conditionally on the other blocks. Minkowski's inequality in L_{r/2} then removes the condition.

*The dyadic tree.* Pad the number of samples to 2^J, 2^(J-1) < n <= 2^J. At level l the samples form
blocks of 2^l samples. Let g_a^l = E[g_a | z_a, all samples outside the block of a]. Then g_a is the
telescoping sum of E[g_a | z_a] and J differences D_a^l = g_a^l - g_a^(l+1).

- E[g_a | z_a] is a constant minus a number in [0, B]. These terms are independent, centred and in
  an interval of length B. The moment bound with c_a = w_a B gives k(r) B (sum w_a^2)^(1/2) =
  k(r) B / sqrt(n_eff).
- Given all samples outside the block B of a, the D_a^l with a in B are functions of one coordinate
  each. Hence they are independent, and they are centred because E[g_a | others] = 0. Given z_a and
  all samples outside the parent block, D_a^l is a function of the sibling block B* minus its mean.
  So the moment bound limits D_a^l to k(r) A_{B*} with A_B = (sum_{b in B} 4 eps^2)^(1/2).
  By Rio's inequality, the block contributes sqrt(r-1) k(r) W_B A_{B*}, with
  W_B = (sum_B w_a^2)^(1/2). By Cauchy-Schwarz over siblings, then over parents, a level contributes
  at most sqrt(r-1) k(r) W A, with W A = 2 S over all samples.

*The tail.* P(X >= delta^(-1/r) ||X||_r) <= delta for every r fixed before the data are drawn.

**Values of `c_hp`.** `sharp` uses the bound above with the best r. `explicit` uses
r = max(2, ln(1/delta)), where delta^(-1/r) <= e, with k(r) <= sqrt(r/2) and sqrt(r-1) <= sqrt(r).
Its first term uses sqrt(r) in place of sqrt(r/2), the value that follows from Rio's inequality:

    gap <= 2 sum p_i eps_i + e [B sqrt(r / n_eff) + sqrt(2) r J S].

`variance` is explained in the next section. If `c_hp` is a number, it replaces C_hp in H of the
Stability note, eq. (10). No proof covers a given number.

By variance
-----------
When a run is finished, its training losses are known. In this section, the deviations of these
losses from a number c replace B / sqrt(n_eff).

Let 0 < b, and |loss - c| <= b for a number c that is fixed in advance. With w_a, g_a, S as above,
omega_a = n_eff w_a^2 (their sum is 1), eps~ = (sum_a omega_a eps_a^2)^(1/2), L_i = ln(1/d_i) and

    N^2 = sum_a omega_a (loss(A(S), z_a) - c)^2,    c_a = eps_a + omega_a b^2 / (2 t),  t > 0,
    C^2 = sum_a c_a^2,     s = [((N^2 + t^2)^(1/2) + C (L_3 / 2)^(1/2))^2 + C^2 / 4 - t^2]^(1/2),

the following bound holds for every r >= 2 and t that are fixed in advance, except with probability
d_1 + d_2 + d_3:

    gap <= 2 sum_i p_i eps_i + e^(L_1 / r) 2 sqrt(r - 1) k(r) T S
           + (s + eps~) sqrt(2 L_2 / n_eff) + B L_2 max_a w_a / 3,
    T = min over m >= 2 of sqrt(m - 1) ceil(log_m n).

*Two parts.* sum_a w_a g_a is the sum of all E[g_a | z_a], which are independent, and of the
remaining differences, which the tree bounds. Each inequality gets its own share of delta.

*A tree of m branches.* Pad the number of samples to m^J. D_a^l is now a function of the m - 1
siblings of the block of a, so A_{B*}^2 is the sum of A^2 over these siblings. Summed over the
blocks B of one parent, sum W_B A_{B*} <= (sum W_B^2)^(1/2) (sum A_{B*}^2)^(1/2) = W (m - 1)^(1/2) A
of the parent. So a level costs (m - 1)^(1/2) times as much as in the dyadic tree, and there are
ceil(log_m n) levels.

*Bernstein.* E[g_a | z_a] is a constant minus h(z_a), h(z) = E loss(A(S), z), as S^a is independent
of z_a and has the law of S. With v = sum_a w_a^2 Var h(z_a), the sum of all terms is at most
sqrt(2 v L_2) + B L_2 max w_a / 3, except with probability d_2.

*The training losses bound the variance.* n_eff v <= sum_a omega_a E(h(z_a) - c)^2. By Jensen's
inequality, h may be replaced by the loss of A(S^a), for which z_a is a fresh sample. In L_2 over
the samples and omega, this loss differs from the loss of A(S) by at most eps~. So
(n_eff v)^(1/2) <= (E N^2)^(1/2) + eps~.

*N is close to its mean.* Let N_t = (N^2 + t^2)^(1/2). Replacing sample a moves the losses of all
other samples by at most eps_a, and N_t is a norm, so N_t moves by at most eps_a. In addition, the
square that belongs to sample a is in [0, omega_a b^2], so this square moves N_t by at most
omega_a b^2 / (2 t). The sum of both changes is c_a. McDiarmid's inequality gives
E N_t <= N_t + C (L_3 / 2)^(1/2), except with probability d_3. The Efron-Stein inequality gives
Var N_t <= C^2 / 4. So E N^2 = (E N_t)^2 + Var N_t - t^2 <= s^2.

`by_variance` uses d = (0.75, 0.15, 0.1) delta, the best r, m up to 64, and the t that is best for
N = 0. The function limits s + eps~ to B / 2, because no variance exceeds B^2 / 4. As H then depends
on the samples, H and G use separate shares of delta: 0.9 delta and 0.1 delta.

Golden-section search
---------------------
`least` finds the minimum of a function of one number. Importing SciPy's search instead would take
half a second.

The bound
---------
`bound` returns the generalization bound of the Stability note, Theorem 4.1, as a number together
with its assumptions.

The measured gap
----------------
`measured_gap` estimates F - F_hat. The estimate of F uses held-out samples, weighted like the
clients.

The law of client i is the mixture sum_y q_i(y) D(. | y) of class-conditional laws that all clients
share (label skew, as in Dirichlet partitions). So F = sum_i p_i F_i = sum_y w_y E[loss | y] with
w_y = sum_i p_i q_i(y). Each E[loss | y] is estimated by the mean over the held-out samples of
class y.

**What an interval covers.** The interval is for F - F_hat of one finished model. The interval does
not describe the mean of F - F_hat over several training sets or runs. F_hat is computed exactly, as
a mean over all training samples, so only F is estimated. Condition on the training samples, the
model and the labels of the held-out samples. Then the held-out losses are independent, and the
losses of a class have the same law, if no held-out sample was used to train or choose the model. An
interval that is valid under this condition is also valid without it. The label shares q_i are
fixed, too. If the q_i are the shares in the training data, F is the risk at these shares.
Half-widths are proportional to B, the length of an interval that contains all losses of the model
for every sample. B is 1 for the loss 1 - p_y. For a model that cannot leave a ball, B is the range
that is proved on that ball (`reach`), whatever the model has learned.

**Half-widths** at failure probability d, with T_y losses of variance V_y (unbiased) in class y. The
estimate of F is a sum of independent terms w_y loss / T_y, each in an interval of length
w_y B / T_y:

    hoeffding    B sqrt(ln(2/d)/2 sum_y w_y^2 / T_y)
    bernstein    sqrt(2 l v) + B l (2 r' + r/3),   l = ln(3/d),   v = sum_y w_y^2 V_y / T_y,
                 r = max_y w_y / T_y,   r' = max_y w_y / sqrt(T_y (T_y - 1))
    shorter      the shorter of these two at d/2 each

*Bernstein* is the inequality of Maurer and Pontil (2009, Theorem 4), extended to strata. Let s be
the variance of this sum. The centred terms are at most r B in size. So the sum exceeds its mean by
at most sqrt(2 l s) + r B l / 3, except with probability e^-l = d/3 (Bernstein's inequality). The
same bound holds below the mean. It remains to show that sqrt(s) <= sqrt(v) + r' B sqrt(2 l), except
with probability d/3. Let B = 1. Z_y = T_y V_y falls by at most 1 when one loss is replaced, and the
squares of these changes over all losses sum to at most T_y / (T_y - 1) Z_y (proof of Theorem 10 in
Maurer and Pontil). Consider Z = sum_y c_y Z_y = v / r^2 with c_y = (w_y / (T_y r))^2 <= 1; the
largest c_y is 1. Z falls by at most 1, and the squares of its changes sum to at most a Z, with
a = max_y c_y T_y / (T_y - 1) = (r' / r)^2 >= 1. Theorem 7 of Maurer and Pontil gives
P(EZ - Z > t) <= exp(-t^2 / (2 a EZ)). With t = sqrt(2 a l EZ) this is
sqrt(EZ) <= sqrt(Z) + sqrt(2 a l). Multiplied by r, with s = r^2 EZ, this inequality is the claim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory import checks
from fedmuon.analysis.theory.checks import (
    at_least,
    client_weights,
    entries,
    in_doubles,
    probability,
    values,
    whole,
)
from fedmuon.core.errors import InputError

Constant = float | Literal["explicit", "sharp", "variance"]
DEVIATIONS = (0.75, 0.15, 0.1)  # shares of delta: the tree, Bernstein, the variance
BRANCHES = range(2, 65)  # values of m that `by_variance` tries
BESIDE_VARIANCE = (0.9, 0.1)  # shares of delta for H and G, if H depends on the samples


@dataclass(frozen=True)
class Deviations:
    """Deviations of the training losses from a number c that was fixed before the run.

    Attributes:
        squares: Array [N]. For each client, the mean of (loss - c)^2 over its training samples.
        most: An upper bound b of |loss - c| for every possible sample.
    """

    squares: ArrayLike
    most: float


def effective_size(sizes: np.ndarray, weights: np.ndarray) -> float:
    """Return the effective sample size n_eff = 1 / sum_i p_i^2 / n_i."""
    return float(1 / (np.square(weights) / sizes).sum())


def levels(samples: int, branches: int = 2) -> int:
    """Return the number of levels ceil(log_m n) of a tree with m branches and n leaves.

    The function uses integers, because the rounding error of a float logarithm may give a wrong
    result if n is a power of m.
    """
    depth, reached = 0, 1
    leaves, branches = whole("samples", samples), whole("branches", branches, 2)
    while reached < leaves:
        depth, reached = depth + 1, reached * branches
    return depth


def sharp_stability(
    eps: np.ndarray,
    sizes: np.ndarray,
    weights: np.ndarray,
    delta: float,
    loss_bound: float,
    c_hp: Constant,
    deviations: Deviations | None = None,
) -> float:
    """Return the branch H of the bound at failure probability delta.

    If `c_hp` is a number, H is the Stability note, eq. (10), with this constant. Otherwise H is a
    bound that the module docstring proves.
    """
    if c_hp == "variance":
        if deviations is None:
            raise InputError(
                "c_hp is 'variance', which needs the deviations of the training losses. Pass "
                "the argument `deviations`."
            )
        return by_variance(eps, sizes, weights, delta, loss_bound, deviations)
    n_eff = effective_size(sizes, weights)
    base = loss_bound / math.sqrt(n_eff)
    scale = math.sqrt((sizes * np.square(eps)).sum() / n_eff)  # S
    samples = int(sizes.sum())
    if c_hp == "explicit":
        r = max(2.0, math.log(1 / delta))
        tree = math.sqrt(2) * r * levels(samples) * scale
        deviation = math.e * (base * math.sqrt(r) + tree)
    elif c_hp == "sharp":
        log = math.log(1 / delta)

        def tail(r: float) -> float:
            return math.exp(log / r) * moment(r, base, scale, samples)

        deviation = at_best(tail, log)
    elif isinstance(c_hp, str):
        raise InputError(
            f"c_hp is {c_hp!r}, but it must be a number, 'explicit', 'sharp' or 'variance'."
        )
    else:
        log = math.log(2 / delta)
        deviation = scale * math.log(2 * samples) * log + base * math.sqrt(log)
        deviation *= at_least("c_hp", c_hp)
    return float(2 * (weights * eps).sum() + deviation)


def bounded_differences(
    eps: np.ndarray, sizes: np.ndarray, weights: np.ndarray, delta: float, loss_bound: float
) -> float:
    """Return the branch G of the bound at failure probability delta (Stability note, eq. (11)).

    G applies McDiarmid's inequality to the generalization gap itself. All its constants are known.
    """
    share = weights / sizes
    moves = (2 - share) * eps + loss_bound * share
    root = math.sqrt(math.log(1 / delta) / 2 * (sizes * np.square(moves)).sum())
    return float((weights * eps).sum() + root)


def by_variance(
    eps: np.ndarray,
    sizes: np.ndarray,
    weights: np.ndarray,
    delta: float,
    loss_bound: float,
    deviations: Deviations,
) -> float:
    """Compute the branch H from the deviations of the training losses.

    The section "By variance" of the module docstring contains the formula and its proof.
    """
    squares = values("squares", deviations.squares, len(sizes))
    top = at_least("most", deviations.most)
    if (squares > top**2 * (1 + ROUNDING)).any():
        raise InputError(
            f"deviations.squares has a number above {top**2:g}, the square of deviations.most. "
            "Set most to an upper bound of |loss - c| for every possible sample."
        )
    n_eff, shares = effective_size(sizes, weights), weights / sizes  # w_a
    of_tree, of_sum, of_variance = (math.log(1 / (part * delta)) for part in DEVIATIONS)
    scale = math.sqrt((sizes * np.square(eps)).sum() / n_eff)  # S
    omega = n_eff * np.square(shares)  # [N], one value for all samples of a client

    samples = int(sizes.sum())
    tree = scale * min(math.sqrt(m - 1) * levels(samples, m) for m in BRANCHES)  # T S

    def tail(r: float) -> float:
        return math.exp(of_tree / r) * 2 * math.sqrt(r - 1) * difference_moment(r) * tree

    def square(t: float, squared_norm: float) -> float:
        """Return s^2 of the section "By variance", for N^2 = `squared_norm`."""
        moves = eps + omega * top**2 / (2 * t)
        c = math.sqrt((sizes * np.square(moves)).sum())
        return (
            (math.sqrt(squared_norm + t * t) + c * math.sqrt(of_variance / 2)) ** 2
            + c * c / 4
            - t * t
        )

    norm2 = float((sizes * omega * squares).sum())
    spread = 0.0
    if top > 0:
        t = top * math.exp(least(lambda u: square(top * math.exp(u), 0.0), -20.0, 1.0))
        spread = math.sqrt(square(t, norm2))
    spread += math.sqrt((sizes * omega * np.square(eps)).sum())
    spread = min(spread, loss_bound / 2)
    bernstein = spread * math.sqrt(2 * of_sum / n_eff) + loss_bound * of_sum * shares.max() / 3
    return float(2 * (weights * eps).sum() + at_best(tail, of_tree) + bernstein)


def at_best(tail: Callable[[float], float], log: float) -> float:
    """Return the smallest value of a bound `tail` over its parameter r >= 2.

    The bound is valid for every r, so the result is valid even if the search misses the best r.
    """
    return min(tail(least(tail, 2, 4 + 3 * log)), tail(2.0))


@in_doubles
def difference_moment(r: float) -> float:
    """Return k(r), the constant of the moment bound for functions with bounded differences c_j.

    For every r >= 2, such a function H satisfies ||H - EH||_r <= k(r) (sum c_j^2)^(1/2).
    """
    r = at_least("r", r, 2)
    return math.exp((math.log(2) + math.lgamma(r / 2 + 1)) / r) / math.sqrt(2)


def moment(r: float, base: float, scale: float, samples: int) -> float:
    """Return the bound on ||sum_a w_a g_a||_r that the module docstring proves.

    `base` is B / sqrt(n_eff), `scale` is S, and `samples` is n.
    """
    base, scale = at_least("base", base), at_least("scale", scale)
    return difference_moment(r) * (base + 2 * math.sqrt(r - 1) * levels(samples) * scale)


_RATIO = (math.sqrt(5) - 1) / 2


def least(value: Callable[[float], float], low: float, high: float, width: float = 1e-6) -> float:
    """Return the x in [low, high] at which a function is smallest.

    The function must fall and then rise. The method is golden-section search. If the function has
    equal values at both inner points, the search continues to the right. The function may therefore
    be infinite on the left.
    """
    left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
    at_left, at_right = value(left), value(right)
    while high - low > width:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _RATIO * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _RATIO * (high - low)
            at_right = value(right)
    return left if at_left < at_right else right


Status = Literal["certified", "real-arithmetic", "claimed", "estimated"]

INDEPENDENCE = (
    "All samples are independent, and the samples of client i have the same distribution "
    "(Assumption 4.1)."
)
STABILITY = "If any one sample of client i is replaced, every loss changes by at most eps_i."
RANGE = "Every loss lies in [0, B]."


@dataclass(frozen=True)
class Bound:
    """A generalization bound: F - F_hat <= `value`, except with probability `failure`.

    Attributes:
        value: The smaller of `h` and `g`.
        h: The branch H of the Stability note, eq. (10), for the part of δ that `shares` assigns to
            H.
        g: The branch G of the Stability note, eq. (11), for the part of δ that `shares` assigns to
            G.
        n_eff: Effective sample size, 1 / sum_i p_i^2 / n_i.
        c_hp: The constant of H.
        delta: Failure probability δ of H and G.
        failure: δ plus the probability of all other failures.
        status: "certified" if every constant is proved, and "estimated" if some constant is not
            proved. The status is "real-arithmetic" if every constant is proved, but rounding errors
            of the run may exceed the bound. The status is "claimed" if the bound relies on the
            constant of a custom orthogonalizer, which only its author knows.
        assumptions: Sentences that state what the bound assumes.

    Example:
        >>> from fedmuon.analysis import bound
        >>> found = bound([1e-4] * 10, [1000] * 10, [0.1] * 10, delta=0.05)
        >>> found.value == min(found.h, found.g)
        True
    """

    value: float
    h: float
    g: float
    n_eff: float
    c_hp: Constant
    delta: float
    failure: float
    status: Status
    assumptions: tuple[str, ...]


def bound(
    eps: ArrayLike,
    sizes: ArrayLike,
    weights: ArrayLike,
    delta: float,
    loss_bound: float = 1.0,
    c_hp: Constant = "explicit",
    *,
    shares: tuple[float, float] = (0.5, 0.5),
    status: Status = "certified",
    assumptions: tuple[str, ...] = (INDEPENDENCE, STABILITY, RANGE),
    other_failure: float = 0.0,
    deviations: Deviations | None = None,
) -> Bound:
    """Return B_δ = min(H, G), the bound of Theorem 4.1 (Stability note, eq. (12)).

    By default H and G get δ/2 each, as in the paper. You may choose other shares in advance. The
    ε_i do not depend on the sample, so H and G are fixed numbers, and the same branch is smaller
    for every sample. The bound fails only if this branch fails. The level of the bound is
    therefore δ for any shares up to (1, 1). With c_hp = "variance", H depends on the sample, so the
    shares must sum to at most 1.

    Args:
        eps: Stability ε_i of each client `[N]`.
        sizes: Number of samples n_i of each client `[N]`.
        weights: Weight p_i of each client `[N]`, which sum to 1.
        delta: Failure probability δ of the two branches of the bound.
        loss_bound: Length B of the interval that contains all losses.
        c_hp: The constant of the branch H: "explicit" or "sharp" (both proved), "variance", or a
            number.
        shares: Parts of δ for H and G, each in (0, 1].
        status: The status if all constants are proved.
        assumptions: Sentences that state what the bound assumes.
        other_failure: Probability of other failures, added to δ.
        deviations: Deviations of the training losses, for `c_hp="variance"`.

    Returns:
        The bound.

    Raises:
        InputError: If a number is out of range, or the shapes do not match.

    Example:
        >>> from fedmuon.analysis import bound
        >>> found = bound([1e-4] * 10, [1000] * 10, [0.1] * 10, delta=0.05)
        >>> round(found.value, 4), round(found.n_eff)
        (0.0408, 10000)
    """
    stable = _checked(eps, sizes, weights, loss_bound)
    delta = checks.probability("delta", delta)
    if not all(0 < share <= 1 for share in shares):
        raise InputError(
            f"shares is {shares}, but both numbers must be above 0 and at most 1. The terms H and "
            "G of the bound get these shares of delta."
        )
    if c_hp == "variance" and sum(shares) > 1:
        raise InputError(
            f"shares is {shares}, but with c_hp='variance' the two numbers must sum to at most 1. "
            "Use smaller shares, or c_hp='sharp'."
        )
    h = sharp_stability(*stable, shares[0] * delta, loss_bound, c_hp, deviations)
    g = bounded_differences(*stable, shares[1] * delta, loss_bound)
    if not isinstance(c_hp, str) and h < g:
        status = "estimated"
        assumptions = (*assumptions, f"The caller passed C_hp = {c_hp:g}, which is not proved.")
    failure = delta + checks.at_least("other_failure", other_failure)
    n_eff = effective_size(*stable[1:])
    return Bound(min(h, g), h, g, n_eff, c_hp, delta, failure, status, assumptions)


def g_alone(
    eps: ArrayLike, sizes: ArrayLike, weights: ArrayLike, delta: float, loss_bound: float = 1.0
) -> float:
    """Return the branch G with the full failure probability δ.

    The source is the Stability note, Lemmas C.1 and C.5. All constants of G are known, and δ is not
    divided between two branches.

    Args:
        eps: Stability ε_i of each client `[N]`.
        sizes: Number of samples n_i of each client `[N]`.
        weights: Weight p_i of each client `[N]`, which sum to 1.
        delta: Failure probability δ.
        loss_bound: Length B of the interval that contains all losses.

    Returns:
        The bound G.

    Raises:
        InputError: If a number is out of range, or the shapes do not match.

    Example:
        >>> from fedmuon.analysis import g_alone
        >>> round(g_alone([1e-4] * 10, [1000] * 10, [0.1] * 10, delta=0.05), 4)
        0.0368
    """
    stable, delta = _checked(eps, sizes, weights, loss_bound), checks.probability("delta", delta)
    return bounded_differences(*stable, delta, loss_bound)


def _checked(
    eps: ArrayLike, sizes: ArrayLike, weights: ArrayLike, loss_bound: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check the arguments of `bound`, and return the arrays min(B, eps_i), n_i and p_i."""
    counts = checks.sample_sizes(sizes)
    chances = checks.client_weights(weights, len(counts))
    top = checks.at_least("loss_bound", loss_bound)
    return np.minimum(top, checks.values("eps", eps, len(counts))), counts, chances


ROUNDING = 1e-6  # rounding error of a float32 loss, relative to B

Interval = Literal["hoeffding", "bernstein", "shorter", "normal"]


@dataclass(frozen=True)
class MeasuredGap:
    """An estimate of the generalization gap F - F_hat with an interval.

    Attributes:
        gap: The estimated gap, `population` minus `empirical`.
        low: Lower end of the interval.
        high: Upper end of the interval.
        population: Estimate of F from held-out samples.
        empirical: The mean training loss F_hat.
        interval: Name of the interval: "hoeffding", "bernstein", "shorter" or "normal".

    Example:
        >>> from fedmuon.analysis import measured_gap
        >>> found = measured_gap([0.25], [1.0], [[1.0]], [0.25, 0.75], [0, 0])
        >>> found.gap, found.low <= found.gap <= found.high
        (0.25, True)
    """

    gap: float
    low: float
    high: float
    population: float
    empirical: float
    interval: Interval


def measured_gap(
    train_losses: ArrayLike,
    weights: ArrayLike,
    shares: ArrayLike,
    test_losses: ArrayLike,
    test_labels: ArrayLike,
    *,
    confidence: float = 0.95,
    interval: Interval = "hoeffding",
    loss_bound: float = 1.0,
) -> MeasuredGap:
    """Estimate the gap F - F_hat of a finished model, with an interval.

    Args:
        train_losses: Mean training loss of each client `[N]`.
        weights: Weight p_i of each client `[N]`, which sum to 1.
        shares: Label shares q_i(y) `[N, classes]`, from `label_shares`.
        test_losses: Losses of the held-out samples `[T]`.
        test_labels: Labels of the held-out samples `[T]`, integers.
        confidence: Probability with which the interval holds.
        interval: Method of the interval. "hoeffding" is exact for losses in an interval of length
            B. "bernstein" (Maurer and Pontil) is exact, too, and shorter if the losses vary little.
            "shorter" is exact and never much longer than the other two. "normal" is an
            approximation that requires many samples of each class.
        loss_bound: Length B of the interval that contains all losses. "normal" does not need B.

    Returns:
        The gap and its interval.

    Raises:
        InputError: If the shapes do not match, or a class has no held-out sample.

    Example:
        >>> from fedmuon.analysis import measured_gap
        >>> measured_gap([0.25], [1.0], [[0.5, 0.5]], [0.25, 0.75], [0, 1]).gap
        0.25
    """
    fitted = values("train_losses", train_losses)
    chances = client_weights(weights, len(fitted))
    table = np.asarray(shares, dtype=float)
    if table.ndim != 2 or len(table) != len(chances):
        raise InputError(
            f"shares has shape {table.shape}, but its shape must be [clients, classes] with "
            f"{len(chances)} clients."
        )
    if not (table >= 0).all():
        raise InputError(
            "shares contains a negative number or NaN, but every label share must be at least 0."
        )
    if (wrong := np.flatnonzero(abs(table.sum(axis=1) - 1) > 1e-9)).size:
        raise InputError(
            f"shares[{wrong[0]}] sums to {table[wrong[0]].sum():g}, but the label shares of each "
            "client must sum to 1. Compute shares with label_shares."
        )
    losses, labels = values("test_losses", test_losses), np.asarray(test_labels)
    if labels.shape != losses.shape:
        raise InputError(
            f"test_losses has shape {losses.shape} and test_labels has shape {labels.shape}, but "
            "they must have the same length."
        )
    class_weights = chances @ table  # w_y = sum_i p_i q_i(y)
    present = np.flatnonzero(class_weights)
    groups = [losses[labels == y] for y in present]
    if empty := [y for y, group in zip(present, groups, strict=True) if not len(group)]:
        raise InputError(
            f"the clients train on samples of class {empty[0]}, but no held-out sample has this "
            "class, so the loss of the class cannot be estimated. Hold out more samples."
        )
    top = at_least("loss_bound", loss_bound)
    if interval != "normal" and np.ptp(test_losses) > top * (1 + ROUNDING):
        raise InputError(
            f"loss_bound is {top:g}, but the held-out losses differ by {np.ptp(test_losses):g}. "
            "Increase loss_bound, or use interval='normal'."
        )
    present_weights = class_weights[present]
    means, counts = (np.array([f(group) for group in groups], dtype=float) for f in (np.mean, len))
    empirical, population = float(chances @ fitted), float(present_weights @ means)
    if interval not in (kinds := get_args(Interval)):
        raise InputError(f"interval is {interval!r}, but it must be one of {', '.join(kinds)}.")
    if interval in ("bernstein", "normal") and (counts < 2).any():
        raise InputError(
            f"class {present[counts < 2][0]} has only one held-out sample, but interval="
            f"{interval!r} needs at least two samples per class. Use interval='hoeffding'."
        )
    failure = probability("1 - confidence", 1 - confidence)
    half = _half_width(present_weights, groups, failure, top, interval)
    gap = population - empirical
    return MeasuredGap(gap, gap - half, gap + half, population, empirical, interval)


def label_shares(labels: ArrayLike, owner: ArrayLike, clients: int, classes: int) -> np.ndarray:
    """Return q_i(y), the share of label y among the samples of client i.

    Args:
        labels: Label of each sample `[n]`, integers.
        owner: Client of each sample `[n]`, integers.
        clients: Number of clients N.
        classes: Number of classes.

    Returns:
        The shares `[N, classes]`; each row sums to 1.

    Raises:
        InputError: If the lengths differ, or a client has no sample.

    Example:
        >>> from fedmuon.analysis import label_shares
        >>> label_shares([0, 1, 1], owner=[0, 0, 1], clients=2, classes=2).tolist()
        [[0.5, 0.5], [0.0, 1.0]]
    """
    shape = whole("clients", clients), whole("classes", classes)
    entries("clients times classes", shape[0] * shape[1])
    places = _indices("owner", owner, clients), _indices("labels", labels, classes)
    if len(places[0]) != len(places[1]):
        raise InputError(
            f"labels has {len(places[1])} entries and owner has {len(places[0])}, but both must "
            "have one entry per sample."
        )
    table = np.zeros(shape)
    np.add.at(table, places, 1.0)
    if (alone := np.flatnonzero(table.sum(axis=1) == 0)).size:
        raise InputError(
            f"client {alone[0]} has no samples, so it has no label shares. Remove this client."
        )
    return table / table.sum(axis=1, keepdims=True)


def _indices(name: str, raw: ArrayLike, count: int) -> np.ndarray:
    """Check that the entries are integers in 0 .. count-1, and return the array."""
    array = np.asarray(raw)
    if not (np.issubdtype(array.dtype, np.integer) and ((array >= 0) & (array < count)).all()):
        raise InputError(f"{name} must be integers from 0 to {count - 1}.")
    return array


def _half_width(
    weights: np.ndarray, groups: list[np.ndarray], failure: float, top: float, interval: Interval
) -> float:
    """Return half the length of an interval for F (module docstring, "The measured gap").

    `weights` are the class weights w_y > 0, `groups` are the held-out losses of each class, and
    `top` is B. The method "bernstein" returns infinity if a class has a single sample, because the
    variance of this class is unknown.
    """
    if interval == "shorter":  # union bound, because the losses decide which one is shorter
        kinds: tuple[Interval, ...] = "hoeffding", "bernstein"
        return min(_half_width(weights, groups, failure / 2, top, kind) for kind in kinds)
    counts = np.array([len(losses) for losses in groups], dtype=float)
    if interval == "hoeffding":
        squares = (np.square(weights) / counts).sum()
        return top * math.sqrt(math.log(2 / failure) / 2 * float(squares))
    spread = np.array([losses.var(ddof=1) if len(losses) > 1 else math.inf for losses in groups])
    variance = float((np.square(weights) * spread / counts).sum())
    if interval == "normal":
        from scipy.special import ndtri  # imported late: slow to load and rarely used

        return float(ndtri(1 - failure / 2)) * math.sqrt(variance)
    log = math.log(3 / failure)
    with np.errstate(divide="ignore"):
        scaled = weights / np.sqrt(counts * (counts - 1))
    largest = float((weights / counts).max())
    return math.sqrt(2 * log * variance) + top * log * (float(2 * scaled.max()) + largest / 3)
