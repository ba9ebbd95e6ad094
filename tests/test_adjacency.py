"""The pairs of each adjacency against quadrature, group privacy, and what is not a pair."""

import mpmath
import pytest

from fedmuon.privacy.accounting import account
from fedmuon.privacy.pairs import Event

REPLACED = {"adjacency": "replace-one"}


def density(q: float, s: float, shift: float, x):
    return (1 - q) * mpmath.npdf(x, 0, s) + q * mpmath.npdf(x, shift, s)


def hockey_stick(q: float, s: float, eps: float, count: int = 1):
    """delta(eps) of one or two releases under replace-one, by quadrature in 20 digits: in the last
    release P - e^eps' Q is positive beyond a root, and the masses beyond it are normal tails."""

    def last(level):
        start = mpmath.findroot(lambda x: _loss(q, s, x) - level, (0, 1))
        tails = [
            mpmath.ncdf(-start / s),
            mpmath.ncdf((1 - start) / s),
            mpmath.ncdf((-1 - start) / s),
        ]
        return (1 - q) * tails[0] + q * tails[1], (1 - q) * tails[0] + q * tails[2]

    with mpmath.workdps(20):
        if count == 1:
            one, other = last(mpmath.mpf(eps))
            return float(one - mpmath.exp(eps) * other)

        def integrand(x):
            one, other = last(eps - _loss(q, s, x))
            weight = mpmath.exp(eps) * density(q, s, -1, x)
            return density(q, s, 1, x) * one - weight * other

        points = [-6 * s, 0, 1, 1 + 3 * s, 1 + 8 * s]
        return float(mpmath.quad(integrand, points, maxdegree=5))


def _loss(q: float, s: float, x):
    return mpmath.log(density(q, s, 1, x) / density(q, s, -1, x))


@pytest.mark.parametrize(
    ("q", "s", "eps", "count"),
    [(0.02, 1.0, 0.1, 1), (0.3, 0.7, 0.4, 1), (0.5, 3.0, 0.05, 1), (1.0, 0.8, 3.0, 1),
     (0.02, 0.4, 2.0, 1), (0.3, 0.7, 1.0, 2), (0.6, 2.0, 0.5, 2)],
)  # fmt: skip
def test_replace_one_by_quadrature(q: float, s: float, eps: float, count: int) -> None:
    delta = hockey_stick(q, s, eps, count)
    found = account([Event(q, s, count)], delta, **REPLACED)
    assert found.lower <= eps * (1 + 1e-9) and eps * (1 - 1e-9) <= found.upper <= found.rdp
    assert found.upper - found.lower < 1.1e-3 * count and found.adjacency == "replace-one"
    assert account([Event(q, s, count)], delta).upper < found.lower  # control: zero-out
