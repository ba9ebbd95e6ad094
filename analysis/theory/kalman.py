"""The Kalman filter of gradients, eq. (5) of the DiSK paper, in published and corrected form.

The gradient theta_t = grad F(x_t) in R^d changes at each step t, and a private step observes it
with noise:

    theta_t = theta_{t-1} + H_t (x_t - x_{t-1}) + v_t,        g_t = C_t theta_t + w_t.

The filter replaces the term with H_t by one product a = H~ (x_t - x_{t-1}) with a realization H~ of
the random Hessian. The error of the product a has covariance Sigma_H, and v, w and C have the
covariances Sigma_v, Sigma_w and Sigma_C. Eq. (5) of the paper is

    g_{t|t-1} = g~_{t-1} + a                        P_{t|t-1} = P_{t-1} + Sigma_H + Sigma_v
    K_t = P_{t|t-1} E[C]' (Sigma_w + E[C] (Sigma_C S_t + P_{t|t-1}) E[C]' - Sigma_H)^-1
    g~_t = g_{t|t-1} + K_t (g_t - E[C] g_{t|t-1})   P_t = (I - K_t E[C]) P_{t|t-1}

with S_t = E[g~_t g~_t']. (Appendix A.4 contains the transpose of E[C] that is missing before the
inverse in eq. (5).)

*Sigma_H in the inverse is an error.* The errors of g_{t|t-1} and of w are uncorrelated, so the
error of g~_t with any gain K has covariance (I - K C) P_{t|t-1} (I - K C)' + K Sigma_w K'. This
covariance is smallest at the gain K = P_{t|t-1} C' (C P_{t|t-1} C' + Sigma_w)^-1, where it equals
(I - K C) P_{t|t-1}. If C is known, the result is eq. (5) without the term - Sigma_H. An
example in one dimension has Sigma_w = 1, Sigma_H = 0.6 and Sigma_v = 0.3. In this example, eq. (5)
converges to K = 0.75 and P = 0.3, but the true variance of the error is then 0.66. The smallest
possible variance is 0.6, at K = 0.6. If Sigma_H > Sigma_w, the published K exceeds 1 and P_t is
negative.

*Algorithm 2 of the paper* is eq. (5) with C = I, isotropic covariances, K at its limit kappa, and a
finite difference for a. The user sets kappa, so the mistake in eq. (5) does not affect Algorithm 2.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.core.errors import InputError


@dataclass(frozen=True)
class GradientModel:
    """The matrices of DiSK, eq. (5), each of shape [d, d]. All covariances must be symmetric.

    Attributes:
        noise: Sigma_w, the covariance of the observation noise.
        remainder: Sigma_v, the covariance of the remainder of Taylor's formula.
        hessian: Sigma_H, the covariance of the error of the Hessian product. Pass zeros if the
            Hessian is known.
        scale: E[C]. Use None for the identity matrix, which means that nothing is clipped.
        spread: Sigma_C. Use None for zeros.
    """

    noise: np.ndarray
    remainder: np.ndarray
    hessian: np.ndarray
    scale: np.ndarray | None = None
    spread: np.ndarray | None = None

    def __post_init__(self) -> None:
        size = len(np.atleast_1d(self.noise))
        for name in ("noise", "remainder", "hessian", "scale", "spread"):
            if (value := getattr(self, name)) is not None:
                _square(name, value, size)
                if name != "scale" and not np.allclose(value, np.transpose(value)):
                    raise InputError(
                        f"{name} is not symmetric, but it is a covariance and must be symmetric."
                    )


@dataclass(frozen=True)
class Estimate:
    """The state of the filter after a step.

    Attributes:
        gradient: The filtered gradient g~ [d].
        covariance: The matrix P [d, d]. The filter uses P as the covariance of the error of
            `gradient`.
        gain: The gain K of the step, a matrix [d, d], or None before the first step.
    """

    gradient: np.ndarray
    covariance: np.ndarray
    gain: np.ndarray | None = None


def kalman_step(
    model: GradientModel, before: Estimate, observed: ArrayLike, carried: ArrayLike,
    moment: ArrayLike | None = None, printed: bool = True,
) -> Estimate:  # fmt: skip
    """Apply one step of the Kalman filter in DiSK, eq. (5).

    Args:
        model: The covariances of the noise and of the errors.
        before: The estimate after the previous step.
        observed: The private gradient g_t [d].
        carried: The product of the Hessian with the last step of the model, H (x_t - x_{t-1}) [d].
        moment: S_t [d, d], the second moment of g~_t. S_t is required if `model.spread` is set. The
            step itself does not know S_t, because it computes g~_t.
        printed: Whether to subtract Sigma_H in the inverse, as the published eq. (5) does. With
            False and a known C, the step is the Kalman filter.

    Returns:
        The estimate after the step.

    Raises:
        InputError: If shapes do not match, or the matrix to invert is singular.
    """
    size = len(model.noise)
    measured, moved = (
        _vector(name, vector, size)
        for name, vector in (("observed", observed), ("carried", carried))
    )
    predicted = before.gradient + moved
    wide = before.covariance + model.hessian + model.remainder
    scale = np.eye(size) if model.scale is None else model.scale
    inner = wide
    if model.spread is not None:
        if moment is None:
            raise InputError(
                "model.spread is set, so eq. (5) of DiSK needs S_t, the second moment of the "
                "estimate. Pass S_t as the argument `moment`."
            )
        inner = wide + model.spread @ _square("moment", moment, size)
    innovation = model.noise + scale @ inner @ scale.T - (model.hessian if printed else 0.0)
    try:
        gain = np.linalg.solve(innovation.T, scale @ wide.T).T  # P' = P
    except np.linalg.LinAlgError:
        raise InputError(
            "the matrix that eq. (5) of DiSK inverts is singular. Use a larger noise covariance."
        ) from None
    gradient = predicted + gain @ (measured - scale @ predicted)
    return Estimate(gradient, (np.eye(size) - gain @ scale) @ wide, gain)


def _square(name: str, matrix: ArrayLike, size: int) -> np.ndarray:
    array = np.asarray(matrix, dtype=float)
    if array.shape != (size, size) or not np.isfinite(array).all():
        raise InputError(
            f"{name} has shape {array.shape}, but it must be a finite matrix of shape [{size}, "
            f"{size}]."
        )
    return array


def _vector(name: str, vector: ArrayLike, size: int) -> np.ndarray:
    array = np.asarray(vector, dtype=float)
    if array.shape != (size,) or not np.isfinite(array).all():
        raise InputError(
            f"{name} has shape {array.shape}, but it must be a vector of {size} finite numbers."
        )
    return array
