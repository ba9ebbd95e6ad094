"""Count the flop of one optimizer step in two ways: published formulas, and our own products.

The formulas of Nesterov Muon (section 2.2), for a matrix with d1 >= d0 and q steps of degree 2
(quintic):

    full        q (4 d1 d0^2 + 2 d0^3)
    randomized  (4 h + 6) m n l + q (4 n l^2 + 2 l^3)        l = rank + oversample

A step of degree k computes k - 1 products of d0 x d0 Gram matrices, with 2 (k - 1) d0^3 flop. In
the second formula, h is the number of power iterations. This formula does not include the QR
factorization, which takes 2 m l^2 - 2/3 l^3 (Householder reflections, as in Table 2). A Kaczmarz
sketch replaces the product of the sketch, 2 m n l, by column norms and a scaling, 2 m n + m l.

This package performs fewer products. For a long matrix, Newton-Schulz iterates on the Gram matrix
only. A sketch is used only if l is below the shorter side of the matrix. The count of performed
products includes only matrix products, with 2 flop for each multiply-add, as in
torch.utils.flop_counter.
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
from fedmuon.orthogonalize.spectral import symmetric_share

# Flop per entry, without decay. SGD and Muon compute C <- b C + G and X <- X - eta C. Normalized
# SGD adds a norm and a division. AdamW computes two averages (3 + 4), a root, an eps, a division
# and the step.
ENTRYWISE = {"sgd": 4, "normalized-sgd": 7, "adamw": 12, "muon": 4}
_NESTEROV = 2  # G + b C
_DECAY = 2  # X - eta w X
_NORMALIZED = 3  # M / ||M||_F
_MOMENTUM = ("sgd", "normalized-sgd", "muon")


class Part(NamedTuple):
    """A parameter that occurs `copies` times. For Muon, `matrices` is (count, m, n)."""

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, int, int] | None = None
    copies: float = 1  # a fraction if the parameter changes only in some of the steps


class Cost(NamedTuple):
    """The flop of one step for one `Part`, multiplied by its number of copies."""

    part: Part
    optimizer: str
    products: float = 0.0  # by the paper's formulas, with the sketch
    factorization: float = 0.0
    entries: float = 0.0  # entrywise operations
    performed: float = 0.0  # in matrix products of this package

    @property
    def total(self) -> float:
        """The flop of the step by the paper's formulas."""
        return self.products + self.factorization + self.entries


@dataclass(frozen=True)
class Sketch:
    """Settings of `randomized_polar`. The sketch has rank + oversample columns."""

    rank: int
    oversample: int = 2
    power: int = 1
    kind: str = "gaussian"

    def __post_init__(self) -> None:
        if self.kind not in ("gaussian", "kaczmarz"):
            raise InputError(f"The sketch {self.kind!r} is unknown. Use 'gaussian' or 'kaczmarz'.")
        for name, minimum in (("rank", 1), ("oversample", 0), ("power", 0)):
            if getattr(self, name) < minimum:
                raise InputError(
                    f"{name} of the sketch is {getattr(self, name)}, but it must be an integer of "
                    f"{minimum} or more."
                )

    @property
    def width(self) -> int:
        """The number l of columns of the sketch."""
        return self.rank + self.oversample


@dataclass(frozen=True)
class Rule:
    """An optimizer for all parameters, or Muon with the optimizer `aux` for other parameters."""

    name: str = "muon"
    nesterov: bool = True
    decay: bool = False
    steps: int = 5
    coefficients: Coefficients = "quintic"
    sketch: Sketch | None = None
    aux: "Rule | None" = None
    dtype: torch.dtype = torch.float32  # of the performed products
    normalized: int = _NORMALIZED  # flop per entry to normalize the iterated matrix
    extra: int = 0  # additional flop per entry of an orthogonalized matrix

    def __post_init__(self) -> None:
        if self.name not in ENTRYWISE:
            raise InputError(
                f"The optimizer {self.name!r} is unknown. Use one of {', '.join(ENTRYWISE)}."
            )
        schedule(self.coefficients, self.steps)

    @property
    def polynomials(self) -> Schedule:
        """The polynomials of the Newton-Schulz steps."""
        return schedule(self.coefficients, self.steps)


def parts(table: RoutingTable) -> list[Part]:
    """Return the parameters in a routing table, with the matrices of each parameter."""
    return [Part(row.name, row.shape, row.matrices) for row in table]


def costs(model: Iterable[Part], rule: Rule) -> list[Cost]:
    """Return the cost of one step for each part."""
    results = []
    for part in model:
        if rule.name == "muon" and part.matrices:
            count, m, n = part.matrices
            flops = (count * part.copies * flop for flop in _matrix(m, n, rule))
            results.append(Cost(part, "muon", *flops))
        else:
            entrywise = (rule.aux or Rule("adamw")) if rule.name == "muon" else rule
            entries = part.copies * math.prod(part.shape) * _an_entry(entrywise)
            results.append(Cost(part, entrywise.name, entries=entries))
    return results


def newton_schulz_flops(m: int, n: int, polynomials: Schedule) -> float:
    """Return the flop of Newton–Schulz by the paper's formula.

    Each step has two products of the size of the matrix and `degree - 1` products of the size of
    its Gram matrix.
    """
    short, long = sorted((m, n))
    large, small = 4 * long * short**2, 2 * short**3
    return float(sum(large + (degree(p) - 1) * small for p in polynomials if degree(p)))


def randomized_flops(m: int, n: int, polynomials: Schedule, sketch: Sketch) -> float:
    """Return the flop of the paper's Algorithms 1 and 2 by its formula, without the factorization.

    Both algorithms sketch the n columns. The sketch has l columns, and Q has min(m, l) columns.
    """
    width, inner = sketch.width, min(m, sketch.width)
    first = 2 * m * n * width if sketch.kind == "gaussian" else 2 * m * n + m * width
    around = 4 * sketch.power * m * n * width + 4 * m * n * inner
    return first + around + newton_schulz_flops(inner, n, polynomials)


def factorization_flops(m: int, width: int) -> float:
    """Return the flop of Householder reflections for an orthonormal basis of an m x l matrix."""
    long, short = max(m, width), min(m, width)
    return 2 * long * short**2 - 2 / 3 * short**3


def performed_newton_schulz(m: int, n: int, polynomials: Schedule, dtype: torch.dtype) -> float:
    """Return the flop that `newton_schulz` performs on a CPU on a matrix m x n.

    The faster method counts: the iteration on the Gram matrix, or on the matrix itself. Of a large
    symmetric product, only the computed part counts.
    """
    short, long = sorted((m, n))
    large, half = 2 * long * short**2, 1 + symmetric_share(short, long)
    small = 2 * short**3 * symmetric_share(short, short)
    squares = sum(max(0, degree(p) - 1) for p in polynomials)
    if gram_dtypes(short, long, dtype, polynomials):
        return large * half + (squares + 3 * (len(polynomials) - 1)) * small
    return large * half * sum(degree(p) > 0 for p in polynomials) + squares * small


def _matrix(m: int, n: int, rule: Rule) -> tuple[float, float, float, float]:
    """Return four flop counts for one orthogonalized matrix.

    The result is the tuple (products, factorization, entries, performed).
    """
    sketch, steps = rule.sketch, rule.polynomials
    entries = m * n * (_an_entry(rule) + rule.extra)
    if sketch is None:
        performed = performed_newton_schulz(m, n, steps, rule.dtype)
        return newton_schulz_flops(m, n, steps), 0.0, entries + m * n * rule.normalized, performed
    # Muon(orthogonalizer="randomized-polar") sketches the shorter side. The 1 + 2 h orthonormal
    # bases depend on the algorithm that computes them, so their products are not counted.
    short, long = sorted((m, n))
    if sketch.width >= short:
        performed = performed_newton_schulz(m, n, steps, rule.dtype)
    else:
        passes = 4 * sketch.power + (6 if sketch.kind == "gaussian" else 4)
        inner = performed_newton_schulz(sketch.width, short, steps, rule.dtype)
        performed = passes * long * short * sketch.width + inner
    return (
        randomized_flops(m, n, steps, sketch),
        factorization_flops(m, sketch.width),
        entries + min(m, sketch.width) * n * rule.normalized,
        performed,
    )


def _an_entry(rule: Rule) -> float:
    """Return the flop that entrywise operations take for each entry of a parameter."""
    ahead = _NESTEROV * (rule.nesterov and rule.name in _MOMENTUM)
    return ENTRYWISE[rule.name] + ahead + _DECAY * rule.decay


def total(found: Sequence[Cost]) -> float:
    """Return the flop of the step by the paper's formulas, summed over all parts."""
    return sum(cost.total for cost in found)
