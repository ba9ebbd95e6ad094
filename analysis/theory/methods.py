"""The stability recursion of recipes that are not FedMuon: one for all, as far as bounds see them.

Two coupled runs differ in one sample of client c. Let x, m, v, d >= 0 bound how far apart they are
in the model, the momentum C, the server's velocity and the global direction, and within a round y,
how differently a client has moved since it began. One local step of client i, where gradients are
g = Lg x + Delta 1{i = c} apart:

    m' = beta m + f g,   t = m' or beta m' + f g        (t: the direction; f = 1 - beta, or 1)
    s  = eta (1 - alpha) L t + eta alpha d
    x' = |1 - eta decay| x + s,   y' = y + s + eta decay x                                    (1)

Proof. C' = beta C + f G; the direction is C', in Nesterov's forms beta C' + f G; the step is
X' = (1 - eta decay) X - eta ((1 - alpha) Orth(direction) + alpha D). Each line is the triangle
inequality, with ||Orth(M) - Orth(M')|| <= L ||M - M'||; without a map L = 1, without momentum
beta = 0 and f = 1. For y it is applied to X' - X.

A round begins on every client from x, d, y = 0, and m, or 0 where momentum begins afresh on both
sides (Local Muon). With the weights w_i >= 0, sum 1, of the server's average (1/K, or by n_i: the
sizes do not change) it ends in

    x+ = sum w_i x_i + b v,  v+ = b v + sum w_i y_i,  m+ = sum w_i m_i,
    d+ = sum w_i y_i / (eta E)                                                                (2)

Proof. FedAvgM has V+ = b V + (mean - X), X+ = X + V+ = mean + b V, and mean - X is the average of
what clients moved; b = 0 is the plain mean. D+ = (X - mean) / (eta E) (001, Remark 3.2).

(1) and (2) are linear with coefficients >= 0, so they stay bounds by induction; clients that are
not c all obey them without Delta. So, with a_{s,k} = the first component of what a unit Delta at
round s, step k alone becomes after all later steps and rounds,

    ||X^R(S) - X^R(S')||_F <= Delta sum_s w_{s,c} 1{c in C_s} sum_k a_{s,k}.

They are had from the end backwards, as rows (1 + x, m, v, d) times the matrices of (1) and (2);
the difference x from 1 is what is held, as it keeps the digits of small increments, or with decay,
where the row shrinks, from 0. FedMuon is the case of `recursion`.
"""

from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.theory.checks import at_least, memory
from fedmuon.analysis.theory.recursion import Steps, by_step, first_rows, saturated
from fedmuon.core.errors import InputError

FORMS = ("ema", "ema-nesterov", "polyak", "nesterov")
Row = tuple[float, float, float, float]  # of x (its difference from 1), m, v, d


@dataclass(frozen=True)
class Method:
    """beta and the form of the momentum, decay, whether momentum begins afresh every round, b of
    the server, alpha of alignment."""

    beta: float
    form: str = "ema"
    decay: float = 0.0
    afresh: bool = False
    server: float = 0.0
    alignment: float = 0.0

    def __post_init__(self) -> None:
        memory(self.beta)
        at_least("decay", self.decay)
        at_least("server", self.server)
        if self.form not in FORMS:
            raise InputError(f"form is {self.form!r}: use one of {', '.join(FORMS)}.")
        if not 0 <= self.alignment <= 1:
            raise InputError(f"alignment = {self.alignment} is refused: it is a share in [0, 1].")

    @property
    def fresh(self) -> float:
        """f: what a gradient weighs in the momentum."""
        return 1 - self.beta if self.form.startswith("ema") else 1.0

    @property
    def looks_ahead(self) -> bool:
        """Whether the direction is Nesterov's."""
        return self.form.endswith("nesterov")


def method_amplification(
    method: Method, rates: np.ndarray, l_orth: float, l_g: Steps, local_steps: int = 1
) -> np.ndarray:
    """a_{s,k} [R, E] for step sizes `rates` [R]; infinite where it overflows."""
    rounds, slope = len(rates), at_least("l_orth", l_orth)
    smooth = by_step(l_g, rounds, local_steps).reshape(rounds, -1)
    each = [at_least("lr", rate) for rate in rates.tolist()]
    if not method.decay and (rates == rates[0]).all() and (smooth == smooth[0, 0]).all():
        return saturated(_alike(method, each[0], slope, smooth[0].tolist(), rounds))
    one = 0.0 if method.decay else 1.0
    found, row = np.empty((rounds, local_steps)), (1 - one, 0.0, 0.0, 0.0)
    for r, curved in reversed(list(enumerate(smooth.tolist()))):
        found[r], row = _round(method, each[r], slope, curved, row, one)
    return saturated(found)


@np.errstate(over="ignore", invalid="ignore")
def _alike(
    method: Method, rate: float, l_orth: float, smooth: list[float], rounds: int
) -> np.ndarray:
    """The same where all rounds are alike, by doubling: what a round makes of each unit row."""
    unit = np.eye(4)
    starts = [(0.0, 0.0, 0.0, 0.0), *map(tuple, unit[1:].tolist())]
    made = [
        _round(method, rate, l_orth, smooth, row, float(j == 0)) for j, row in enumerate(starts)
    ]
    change = np.array([row for _, row in made]) - np.diag([0.0, 1.0, 1.0, 1.0])
    kicks = np.array([found for found, _ in made])
    return (kicks[0] + first_rows(change, rounds) @ kicks)[::-1]


def _round(
    method: Method, rate: float, l_orth: float, smooth: list[float], after: Row, one: float
) -> tuple[list[float], Row]:
    """a_k of a round, and the row before it, from the row after it, whose first entry is one + x,
    as is that of the row before it."""
    x, m, v, d = after
    before_v = method.server * (one + x + v)
    y = v + (d / (rate * len(smooth)) if rate else 0.0)
    push, decay = rate * (1 - method.alignment) * l_orth, rate * method.decay
    share, twice = (method.beta, 1.0) if method.looks_ahead else (1.0, 0.0)
    shrink, found, before_d = min(decay, 2 - decay), [], 0.0
    for slope in reversed(smooth):
        moved = one + x + y
        t = push * moved
        m += share * t
        g = method.fresh * (m + twice * t)
        found.append(g)
        before_d += rate * method.alignment * moved
        x, m = x - shrink * (one + x) + decay * y + slope * g, method.beta * m
    return found[::-1], (x, 0.0 if method.afresh else m, before_v, before_d)
