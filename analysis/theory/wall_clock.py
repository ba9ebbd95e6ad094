"""What an exact polar factor costs beside Newton-Schulz: 004, Lemma 11, as a number.

Of an m x n layer, m <= n (else transpose), by counts of 2 for each multiply-add:

    SVD             14 n m^2 + 8 m^3      values and both thin bases (Golub and Reinsch)
    U V^T           2 n m^2
    Newton-Schulz   2 q (k + 1) n m^2     by Horner's rule: a Gram product, then k products with Z
                    q (4 n m^2 + 2 (k - 1) m^3)     powers of the Gram matrix first, as 002 counts

Horner's way is never the cheaper: it has 2 q (k - 1) m^2 (n - m) more. Lemma 11 divides both by
what a machine does in a second, P_svd and P_gemm:

    t_SVD / t_NS = (8 + 4 m/n) / (q (k + 1))  P_gemm / P_svd.

For q = 3 and k = 2 the first factor lies between 8/9 and 4/3: as 004 says, the speedup is that of
products over factorizations and of nothing else.

*From a printed curve to P_gemm / P_svd.* What else a step does takes the same time with either, and
moves the quotient of whole steps towards 1. So if by the same number of steps both reach the same
loss, and SVD needs s > 1 times the seconds, then s <= t_SVD / t_NS, and P_gemm / P_svd is at least
s q (k + 1) / 12, for layers of any shape.
"""

from fedmuon.analysis.theory.checks import positive, whole
from fedmuon.core.errors import InputError


def svd_flops(rows: int, columns: int) -> float:
    """Of U V^T by a thin SVD, of m x n or n x m."""
    short, long = sorted((whole("rows", rows), whole("columns", columns)))
    return float(16 * long * short**2 + 8 * short**3)


def horner_flops(rows: int, columns: int, steps: int, degree: int) -> float:
    """Of q Newton-Schulz steps of degree k, as 004 counts them."""
    short, long = sorted((whole("rows", rows), whole("columns", columns)))
    return float(2 * whole("steps", steps) * (whole("degree", degree) + 1) * long * short**2)


def speedup(rows: int, columns: int, steps: int, degree: int, efficiency: float) -> float:
    """t_SVD / t_NS of Lemma 11 where products run `efficiency` = P_gemm / P_svd times as fast."""
    ratio = svd_flops(rows, columns) / horner_flops(rows, columns, steps, degree)
    return ratio * positive("efficiency", efficiency)


def least_efficiency(slowdown: float, steps: int, degree: int) -> float:
    """A floor of P_gemm / P_svd from SVD's seconds over Newton-Schulz's, to the same loss: above 1,
    as else what both spend on gradients raises the ratio instead of lowering it."""
    if not slowdown > 1:
        raise InputError(
            f"slowdown = {slowdown:g} is refused: the floor is of a slower SVD, above 1"
        )
    return (
        positive("slowdown", slowdown) * whole("steps", steps) * (whole("degree", degree) + 1) / 12
    )
