"""The ball that the change of an honest client cannot leave, computed from a config.

`fedmuon bound --hostile` uses this file, so it does not need torch.
"""

import math
from collections.abc import Callable, Mapping

from fedmuon.config.facts import method_with
from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.core.choices import is_own
from fedmuon.core.demands import setting
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize.lipschitz_constants import growth
from fedmuon.tasks.constants import constants

HUGE = 1e15  # a norm of the momentum at which the output of an orthogonalizer is largest


def matrix_radius(
    config: Config,
    shape: tuple[int, ...],
    matrices: int = 1,
    scale: Callable[[int, int], float] = lambda rows, columns: 1.0,
) -> float:
    """Return how far the local steps of an honest client can move a parameter.

    Args:
        config: The config.
        shape: The shape of the parameter [out, ...].
        matrices: The number of matrices in the parameter, side by side.
        scale: The scale s(m, n) of an orthogonalized step.

    Returns:
        eta E c s sqrt(p q), where p is the number of matrices, q the shorter side of each matrix, s
            the scale, and c the largest singular value of an orthogonalized step.
    """
    require_ball(config)
    local, table = config.local, config.orthogonalizer
    rows, columns = shape[0], math.prod(shape[1:])
    if rows >= columns:  # matrices are cut along the longer axis
        rows //= matrices
    else:
        columns //= matrices
    largest = growth(
        table.name,
        lam=table.lambda_,
        gamma=table.clip_level,
        steps=table.steps,
        coefficients=table.polynomials,
        eps=table.eps,
        normalization=table.normalization,
    )
    assert largest is not None  # as `require_ball` ensures
    step = local.lr * largest(HUGE) * scale(rows, columns)
    return local.steps * step * math.sqrt(matrices * min(rows, columns))


def require_ball(config: Config) -> None:
    """Raise an error if the local steps of an honest client could leave every known ball."""
    local, table = config.local, config.orthogonalizer
    known = is_own(table.name) or growth(table.name) is None
    reasons: Mapping[str, bool] = {
        "local.recipe": not _takes_muon_steps(config),
        "local.weight-decay": local.weight_decay > 0,
        "local.adjust": local.adjust == "polargrad",
        "local.renormalize": local.renormalize,
        "local.epochs": local.epochs > 0,
        "orthogonalizer.name": known,
        "orthogonalizer.products": table.products != "full",
        "orthogonalizer.row-memory": table.row_memory > 0,
    }
    for key, leaves in reasons.items():
        if leaves and reads(config, key):
            raise InputError(
                f"The ball of honest clients has no radius of its own with {setting(config, key)}, "
                "because then no bound on the length of a client's change is known. Set [robust] "
                "radius, or change this key."
            )


def _takes_muon_steps(config: Config) -> bool:
    """Return whether each local step is the step size times an orthogonalized matrix."""
    if not reads(config, "orthogonalizer.name"):
        return False
    others = ("server orthogonalizes", "adapters", "bias-corrected")
    if any(method_with(fact)(config) for fact in others) or is_own(config.local.recipe):
        return False
    return config.local.recipe != "fedmuon-aligned"  # its step also has the global direction


def state_radius(config: Config) -> float:
    """Return the largest norm of a state that an honest client returns, or 0 if it is unknown.

    On the matrix task, the norm of a gradient is at most G_max. The momentum is a mean of
    gradients, or their discounted sum, whose weights add up to at most 1 / (1 - beta).
    """
    if config.robust.state_radius:
        return config.robust.state_radius
    local = config.local
    if config.task.name != "matrix" or local.recipe != "fedmuon":
        return 0.0
    bound = constants().gradient_bound
    return bound if local.momentum_form.startswith("ema") else bound / (1 - local.momentum)
