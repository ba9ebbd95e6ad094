"""Step size and momentum as functions of the number of steps."""


def heavy_tailed(steps: int, tail_index: float | None = None) -> tuple[float, float]:
    """(eta, beta) for gradient noise with a moment of order alpha in (1, 2] (002 Theorem 3.4):

        eta = K^(-(2 alpha - 1) / (3 alpha - 2))        beta = 1 - K^(-alpha / (3 alpha - 2))

    Without alpha they are K^(-3/4) and 1 - K^(-1/2) (002 Theorem 3.5), the same at alpha = 2. One
    step has beta = 0.
    """
    alpha = 2.0 if tail_index is None else tail_index
    width = 3 * alpha - 2
    return steps ** (-(2 * alpha - 1) / width), 1 - steps ** (-alpha / width)
