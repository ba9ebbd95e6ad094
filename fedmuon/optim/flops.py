"""The arithmetic of one optimizer step, by parameter: as printed, and as performed.

Nesterov Muon (section 2.2), for a matrix with d1 >= d0 and q steps of degree 2 (quintic):

    full        q (4 d1 d0^2 + 2 d0^3)
    randomized  (4 h + 6) m n l + q (4 n l^2 + 2 l^3)        l = rank + oversample

Degree k has k - 1 squares of the Gram matrix, hence 2 (k - 1) d0^3. The second formula leaves out
the QR factorization, which takes 2 m l^2 - 2/3 l^3 (its reflections, as in Table 2). A Kaczmarz
sketch replaces its product, 2 m n l, by column norms and a scaling, 2 m n + m l.

This package performs fewer products. Newton-Schulz on a long matrix iterates on its Gram matrix
alone, and nothing is sketched if l is at least a side. Performed products count 2 for each
multiply-add of a matrix product, as torch.utils.flop_counter does, and nothing else.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fedmuon.core.errors import InputError
from fedmuon.optim.routing import RoutingTable
from fedmuon.orthogonalize.coefficients import Coefficients, Schedule, schedule
from fedmuon.orthogonalize.polynomial import degree, gram_dtypes

# Flop per entry, without decay: SGD and Muon are C <- b C + G, X <- X - eta C. The normalized SGD
# adds a norm and a division. AdamW is two averages (3 + 4), a root, an eps, a division, the step.
ENTRYWISE = {"sgd": 4, "normalized-sgd": 7, "adamw": 12, "muon": 4}
_NESTEROV = 2  # G + b C
_DECAY = 2  # X - eta w X
_NORMALIZED = 3  # M / ||M||_F
_MOMENTUM = ("sgd", "normalized-sgd", "muon")


class Part(NamedTuple):
    """A parameter, or `copies` of it: `matrices` is (count, m, n) if it may be orthogonalized."""

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, int, int] | None = None
    copies: float = 1  # a fraction for what moves in some of the steps


class Cost(NamedTuple):
    """Flop of one step for one `Part`, all copies together."""

    part: Part
    optimizer: str
    products: float = 0.0  # by the paper's formulas, with the sketch
    factorization: float = 0.0
    entries: float = 0.0  # what is done entry by entry
    performed: float = 0.0  # in matrix products of this package

    @property
    def total(self) -> float:
        """All that the paper counts."""
        return self.products + self.factorization + self.entries


@dataclass(frozen=True)
class Sketch:
    """What `randomized_polar` is given: l = rank + oversample, h = power, gaussian or kaczmarz."""

    rank: int
    oversample: int = 2
    power: int = 1
    kind: str = "gaussian"

    def __post_init__(self) -> None:
        if self.kind not in ("gaussian", "kaczmarz"):
            raise InputError(f"No sketch is called {self.kind!r}: use gaussian or kaczmarz.")
        if min(self.rank - 1, self.oversample, self.power) < 0:
            raise InputError("A sketch needs rank >= 1, oversample >= 0 and power >= 0.")

    @property
    def width(self) -> int:
        """l, the columns of the sketch."""
        return self.rank + self.oversample


@dataclass(frozen=True)
class Rule:
    """One optimizer for all parameters, or muon with `aux` for those that it does not take."""

    name: str = "muon"
    nesterov: bool = True
    decay: bool = False
    steps: int = 5
    coefficients: Coefficients = "quintic"
    sketch: Sketch | None = None
    aux: "Rule | None" = None
    dtype: torch.dtype = torch.float32  # of the products performed
    normalized: int = _NORMALIZED  # flop for each entry of what is iterated
    extra: int = 0  # further flop for each entry of an orthogonalized matrix

    def __post_init__(self) -> None:
        if self.name not in ENTRYWISE:
            raise InputError(
                f"No optimizer is called {self.name!r}: use one of {', '.join(ENTRYWISE)}."
            )
        schedule(self.coefficients, self.steps)

    @property
    def polynomials(self) -> Schedule:
        """The Newton-Schulz steps."""
        return schedule(self.coefficients, self.steps)


def parts(table: RoutingTable) -> list[Part]:
    """The parameters of a model, with the matrices of its routing table."""
    return [Part(one.name, one.shape, one.matrices) for one in table]


def costs(model: Iterable[Part], rule: Rule) -> list[Cost]:
    """The cost of one step for each part."""
    found = []
    for part in model:
        if rule.name == "muon" and part.matrices:
            count, m, n = part.matrices
            flops = (count * part.copies * flop for flop in _matrix(m, n, rule))
            found.append(Cost(part, "muon", *flops))
        else:
            own = (rule.aux or Rule("adamw")) if rule.name == "muon" else rule
            entries = part.copies * math.prod(part.shape) * _an_entry(own)
            found.append(Cost(part, own.name, entries=entries))
    return found


def newton_schulz_flops(m: int, n: int, polynomials: Schedule) -> float:
    """The paper's count: per step, two products with the long side and `degree - 1` small ones."""
    short, long = sorted((m, n))
    large, small = 4 * long * short**2, 2 * short**3
    return float(sum(large + (degree(one) - 1) * small for one in polynomials if degree(one)))


def randomized_flops(m: int, n: int, polynomials: Schedule, sketch: Sketch) -> float:
    """The paper's count of Algorithms 1 and 2, which sketch the n columns, less the factorization.

    Q has k = min(m, l) columns, so a sketch wider than m is paid for and then cut.
    """
    width, kept = sketch.width, min(m, sketch.width)
    first = 2 * m * n * width if sketch.kind == "gaussian" else 2 * m * n + m * width
    around = 4 * sketch.power * m * n * width + 4 * m * n * kept
    return first + around + newton_schulz_flops(kept, n, polynomials)


def factorization_flops(m: int, width: int) -> float:
    """Householder reflections for an orthonormal basis of m x l."""
    long, short = max(m, width), min(m, width)
    return 2 * long * short**2 - 2 / 3 * short**3


def performed_newton_schulz(m: int, n: int, polynomials: Schedule, dtype: torch.dtype) -> float:
    """The products of `newton_schulz` on a matrix of ordinary size: on Z, or on the Gram matrix."""
    short, long = sorted((m, n))
    large, small = 2 * long * short**2, 2 * short**3
    squares = sum(max(0, degree(one) - 1) for one in polynomials)
    if gram_dtypes(short, long, dtype, polynomials):
        return float(2 * large + (squares + 3 * (len(polynomials) - 1)) * small)
    return float(2 * large * sum(degree(one) > 0 for one in polynomials) + squares * small)


def _matrix(m: int, n: int, rule: Rule) -> tuple[float, float, float, float]:
    """The numbers of a `Cost` for one orthogonalized matrix."""
    sketch, steps = rule.sketch, rule.polynomials
    entries = m * n * (_an_entry(rule) + rule.extra)
    if sketch is None:
        done = performed_newton_schulz(m, n, steps, rule.dtype)
        return newton_schulz_flops(m, n, steps), 0.0, entries + m * n * rule.normalized, done
    # Muon(orthogonalizer="randomized-polar") samples the shorter side. The 1 + 2 h products inside
    # an orthonormal basis depend on its algorithm and do not count.
    short, long = sorted((m, n))
    if sketch.width >= short:
        done = performed_newton_schulz(m, n, steps, rule.dtype)
    else:
        passes = 4 * sketch.power + (6 if sketch.kind == "gaussian" else 4)
        inner = performed_newton_schulz(sketch.width, short, steps, rule.dtype)
        done = passes * long * short * sketch.width + inner
    return (
        randomized_flops(m, n, steps, sketch),
        factorization_flops(m, sketch.width),
        entries + min(m, sketch.width) * n * rule.normalized,
        done,
    )


def _an_entry(rule: Rule) -> float:
    """Flop for each entry."""
    ahead = _NESTEROV * (rule.nesterov and rule.name in _MOMENTUM)
    return ENTRYWISE[rule.name] + ahead + _DECAY * rule.decay


def total(found: Sequence[Cost]) -> float:
    """Flop of the step, as the paper counts."""
    return sum(one.total for one in found)
