"""Equation (5) of 003: against Gaussian conditioning, the exact error, and DiSK's own filter."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmuon.analysis.theory.kalman import Estimate, GradientModel, kalman_step
from fedmuon.core.errors import InputError
from fedmuon.core.rng import generator
from fedmuon.experiments.studies.study import run_chain
from fedmuon.optim.chain import Chain
from fedmuon.optim.links import descend, disk_filter
from fedmuon.tasks.base import Params

STEPS, SIZE = 5, 3


def spread_of(rng: np.random.Generator, size: float) -> np.ndarray:
    half = rng.standard_normal((SIZE, SIZE))
    return size * (half @ half.T / SIZE + 0.1 * np.eye(SIZE))


def conditioned(
    model: GradientModel, start: np.ndarray, moves: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of theta_T given g_1 .. g_T: the textbook's, as one Gaussian [T d].

    theta_t = theta_0 + sum of moves + sum of (errors of H and v), theta_0 ~ N(0, start).
    """
    count = len(seen)
    drift = model.hessian + model.remainder
    of_theta = np.block([
        [start + min(s, t) * drift for t in range(1, count + 1)] for s in range(1, count + 1)
    ])  # fmt: skip
    scale = np.kron(np.eye(count), np.eye(SIZE) if model.scale is None else model.scale)
    of_seen = scale @ of_theta @ scale.T + np.kron(np.eye(count), model.noise)
    mean = np.cumsum(moves, 0).ravel()
    away = seen.ravel() - scale @ mean
    across = of_theta @ scale.T
    whole = mean + across @ np.linalg.inv(of_seen) @ away
    rest = of_theta - across @ np.linalg.inv(of_seen) @ across.T
    return whole[-SIZE:], rest[-SIZE:, -SIZE:]


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_it_is_the_textbooks_filter_but_for_the_hessian_in_the_inverse(
    known: bool, clipped: bool
) -> None:
    rng = np.random.default_rng(0)
    model = GradientModel(
        spread_of(rng, 1.0), spread_of(rng, 0.3), (not known) * spread_of(rng, 0.2),
        scale=rng.standard_normal((SIZE, SIZE)) if clipped else None,
    )  # fmt: skip
    start = spread_of(rng, 2.0)
    moves, seen = rng.standard_normal((2, STEPS, SIZE))
    found = {printed: Estimate(np.zeros(SIZE), start) for printed in (True, False)}
    for step, printed in itertools.product(range(STEPS), found):
        found[printed] = kalman_step(
            model, found[printed], seen[step], moves[step], printed=printed
        )
        if not printed:
            mean, rest = conditioned(model, start, moves[: step + 1], seen[: step + 1])
            np.testing.assert_allclose(found[False].gradient, mean, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(found[False].covariance, rest, rtol=1e-9, atol=1e-12)
    apart = np.abs(found[True].gradient - found[False].gradient).max()
    assert apart == 0 if known else apart > 1e-3


def test_the_printed_gain_is_not_the_best_and_its_p_is_not_its_error() -> None:
    """In one dimension, by the exact second moment of the error with a given gain, step by step."""
    w, h, v = 1.0, 0.6, 0.3
    model = GradientModel(*(np.array([[one]]) for one in (w, v, h)))

    def end(printed: bool) -> tuple[float, float, float]:
        one, error, gain = Estimate(np.zeros(1), np.eye(1)), 1.0, 0.0
        for _ in range(200):
            one = kalman_step(model, one, [0.0], [0.0], printed=printed)
            assert one.gain is not None
            gain = float(one.gain[0, 0])
            error = (1 - gain) ** 2 * (error + h + v) + gain**2 * w
        return gain, float(one.covariance[0, 0]), error

    assert end(True) == pytest.approx((0.75, 0.3, 0.66), rel=1e-9)
    assert end(False) == pytest.approx((0.6, 0.6, 0.6), rel=1e-9)
    errors = [((1 - k) ** 2 * (h + v) + k**2 * w) / (1 - (1 - k) ** 2)
              for k in np.linspace(0.01, 1, 100)]  # fmt: skip
    assert min(errors) >= 0.6 - 1e-12  # no constant gain does better


def test_a_hessian_less_known_than_the_gradient_makes_the_printed_p_negative() -> None:
    model = GradientModel(np.eye(1), np.zeros((1, 1)), 2 * np.eye(1))
    found = kalman_step(model, Estimate(np.zeros(1), np.eye(1)), [1.0], [0.0])
    assert found.gain is not None and found.gain[0, 0] == 1.5 and found.covariance[0, 0] == -1.5
    right = kalman_step(model, Estimate(np.zeros(1), np.eye(1)), [1.0], [0.0], printed=False)
    assert right.covariance[0, 0] == 0.75


@pytest.mark.parametrize("gamma", [0.5, -1.0, 2.0])
def test_isotropic_covariances_and_the_limit_of_the_gain_are_disk(gamma: float) -> None:
    """On a quadratic, whose finite differences are exact, without clipping; 8 steps of SGD."""
    rng = np.random.default_rng(1)
    curved, noises, lr = spread_of(rng, 1.0), rng.standard_normal((8, SIZE)), 0.2
    w, h, v = 1.0, 0.6, 0.3  # the limits of p and k by A.4
    p = (math.sqrt(h + v) * math.sqrt(4 * w - 3 * h + v) - (h + v)) / 2
    kappa = (p + h + v) / (p + w + v)

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        slope = torch.from_numpy(curved) @ params["x"] + torch.from_numpy(noises[step])[:, None]
        return torch.zeros(1), {"x": slope}

    def filtered_by(gain: float) -> np.ndarray:
        chain = Chain((disk_filter(gain, gamma), descend(torch.tensor([lr], dtype=torch.float64))))
        begin = {"x": torch.ones((1, SIZE, 1), dtype=torch.float64)}
        path = run_chain(chain, begin, oracle, 8, partial(generator, 0))
        return np.array([now["x"].flatten().numpy() for _, now in path])

    one, x, path = Estimate(np.zeros(SIZE), p * np.eye(SIZE)), np.ones(SIZE), [np.ones(SIZE)]
    model = GradientModel(w * np.eye(SIZE), v * np.eye(SIZE), h * np.eye(SIZE))
    before = x
    for step in range(8):
        observed = curved @ x + noises[step]
        if step:
            one = kalman_step(model, one, observed, curved @ (x - before))
            assert one.gain is not None
            np.testing.assert_allclose(one.gain, kappa * np.eye(SIZE), rtol=1e-12, atol=1e-15)
        else:  # both begin with the first observation
            one = Estimate(observed, one.covariance)
        before, x = x, x - lr * one.gradient
        path.append(x)
    np.testing.assert_allclose(filtered_by(kappa), path, rtol=1e-10)
    assert np.abs(filtered_by(kappa - 0.05) - path).max() > 1e-3


def test_a_random_c_needs_the_moment_that_widens_its_innovation() -> None:
    """With C = c I of mean 1: (5)'s inverse by hand, in one dimension."""
    one = np.eye(1)
    model = GradientModel(one, 0.3 * one, 0 * one, spread=0.5 * one)
    found = kalman_step(model, Estimate(np.array([2.0]), one), [1.0], [0.5], moment=4 * one)
    gain = 1.3 / (1 + 0.5 * 4 + 1.3)
    assert found.gain is not None and found.gain[0, 0] == pytest.approx(gain)
    assert found.gradient[0] == pytest.approx(2.5 + gain * (1 - 2.5))
    with pytest.raises(InputError, match="needs S_t, the second moment"):
        kalman_step(model, Estimate(np.array([2.0]), one), [1.0], [0.5])


@pytest.mark.parametrize(("change", "why"), [
    ({"noise": np.ones((2, 3))}, "noise has shape"),
    ({"remainder": np.eye(3)}, r"remainder has shape \(3, 3\)"),
    ({"hessian": np.full((2, 2), np.nan)}, "hessian"),
    ({"hessian": np.array([[1.0, 1.0], [0.0, 1.0]])}, "hessian is not symmetric"),
])  # fmt: skip
def test_models_without_sense_are_rejected(change: dict[str, np.ndarray], why: str) -> None:
    given = {"noise": np.eye(2), "remainder": np.eye(2), "hessian": np.eye(2)}
    with pytest.raises(InputError, match=why):
        GradientModel(**given | change)


def test_steps_without_sense_are_rejected() -> None:
    model = GradientModel(np.eye(2), np.eye(2), np.zeros((2, 2)))
    begin = Estimate(np.zeros(2), np.eye(2))
    with pytest.raises(InputError, match="observed has shape"):
        kalman_step(model, begin, [1.0], [0.0, 0.0])
    with pytest.raises(InputError, match="carried has shape"):
        kalman_step(model, begin, [1.0, 0.0], [math.inf, 0.0])
    lost = GradientModel(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros((2, 2)))
    with pytest.raises(InputError, match=r"singular\. Use a larger noise covariance"):
        kalman_step(lost, Estimate(np.zeros(2), np.zeros((2, 2))), [1.0, 0.0], [0.0, 0.0])
