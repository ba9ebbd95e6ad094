"""Statements of the DP-Muon paper (000), one by one: lemmas, Appendix C.7, and its tables."""

import itertools
import math

import numpy as np
import pytest
import torch
from test_stationarity import polar

from fedmuon.analysis.theory.private_stationarity import Release
from fedmuon.optim import links
from fedmuon.optim.chain import Context, Params
from fedmuon.orthogonalize import newton_schulz

# Lemma B.3: the private gradient is gradient + clipping bias + martingale difference.


def clipped(gradients: np.ndarray, clip: float) -> np.ndarray:
    norms = np.linalg.norm(gradients, axis=(-2, -1), keepdims=True)
    return gradients / np.maximum(1, norms / clip)


def nuclear(matrix: np.ndarray) -> float:
    return float(np.linalg.svd(matrix, compute_uv=False).sum())


@pytest.mark.parametrize("clip", [0.5, 2.0, 100.0])
def test_lemma_b3_over_all_lots(clip: float) -> None:
    """All lots of two independent samples out of five, each with probability 1/25."""
    gradients = np.random.default_rng(0).standard_normal((5, 3, 4))
    gradients *= np.array([0.1, 0.5, 1, 2, 4])[:, None, None]
    lot, noise, entries = 2, 0.7, 12
    mean, short = gradients.mean(0), clipped(gradients, clip)
    bias = short.mean(0) - mean
    means = [short[list(one)].mean(0) for one in itertools.product(range(5), repeat=lot)]
    away = np.array(means) - mean - bias  # xi without the Gaussian noise, which is independent
    assert np.abs(away.mean(0)).max() < 1e-15
    excess = np.maximum(np.linalg.norm(gradients, axis=(1, 2)) - clip, 0).mean()
    assert nuclear(bias) <= math.sqrt(3) * excess + 1e-15
    gaussian = entries * (noise * clip / lot) ** 2
    square = (away**2).sum((1, 2)).mean() + gaussian
    spread = Release(clip, noise, lot, (3, 4)).spread
    assert spread**2 == pytest.approx(clip**2 / lot + gaussian)
    assert gaussian < square <= spread**2
    if clip == 0.5:  # negative control: without its Gaussian term, v_C is too small
        assert square > clip**2 / lot


def test_lemma_b3_needs_the_root_of_r() -> None:
    """Equal gradients a I attain the bound on the bias, so no factor below √r suffices."""
    gradient, clip = 2.0 * np.eye(3), 1.5
    bias = clipped(gradient[None], clip)[0] - gradient
    excess = np.linalg.norm(gradient) - clip
    assert nuclear(bias) == pytest.approx(math.sqrt(3) * excess)


# Lemma B.4: the inner product of gradient and step.


def inner_bound(gradient: np.ndarray, momentum: np.ndarray, error: float, cost: float) -> float:
    return (1 - error) * nuclear(gradient) - cost * nuclear(momentum - gradient)


def test_lemma_b4_for_steps_near_the_polar_factor() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        gradient, momentum = rng.standard_normal((2, 3, 5)) * rng.uniform(0.01, 2, (2, 1, 1))
        momentum = gradient + momentum * rng.choice([0.01, 1.0])
        factor = polar(momentum)
        step = rng.uniform(0.3, 1) * factor
        error = float(np.linalg.norm(step - factor, 2))
        inner = float((gradient * step).sum())
        assert inner >= inner_bound(gradient, momentum, error, 2 - error) - 1e-12


def test_lemma_b4_needs_its_factor() -> None:
    """A small momentum against the gradient attains the bound for exact polar factors."""
    gradient = np.random.default_rng(2).standard_normal((3, 5))
    momentum = -1e-9 * gradient
    inner = float((gradient * polar(momentum)).sum())
    assert inner == pytest.approx(inner_bound(gradient, momentum, 0.0, 2.0), rel=1e-8)
    assert inner < inner_bound(gradient, momentum, 0.0, 1.9)


# Appendix C.7 and D: what DP-MuonBC computes on a path of equal gradients, and at what cost.


class Counted:
    """Q of Appendix C.2 with five Taylor steps of degree 2, which counts its evaluations."""

    def __init__(self) -> None:
        self.calls = 0
        self.link = links.Link("orthogonalize", lambda params: {}, self.update)

    def update(self, direction: Params, state: Params, context: Context) -> tuple[Params, Params]:
        self.calls += 1
        return {name: self.apply(value) for name, value in direction.items()}, state

    @staticmethod
    def apply(matrix: torch.Tensor) -> torch.Tensor:
        return newton_schulz(matrix, 5, "quintic", normalization="unit")


def context(params: Params) -> Context:
    def draw(what: int, block: int = 0) -> np.random.Generator:
        return np.random.default_rng((what, block))

    return Context(params, lambda at: (torch.zeros(1), at), draws=[draw])


def path(gradients: list[torch.Tensor], mu: float = 0.9) -> list[torch.Tensor]:
    """Return the directions of DP-MuonBC without noise on a path of clipped mean gradients."""
    params = {"w": torch.zeros_like(gradients[0])[None]}
    heavy = links.momentum(mu, "polyak")
    correction = links.bias_correction(Counted().link, 1, 0.0, mu)
    states = heavy.init(params), correction.init(params)
    directions = []
    for gradient in gradients:
        memory, first = heavy.update({"w": gradient[None]}, states[0], context(params))
        direction, second = correction.update(memory, states[1], context(params))
        states = first, second
        directions.append(direction["w"][0])
    return directions


def test_c7_a_stationary_path_gives_the_direction_of_the_clipped_gradient() -> None:
    raw = torch.tensor([[0.3, 0.1, 0.0], [0.0, 0.2, 0.4]], dtype=torch.float64)
    short = raw / max(1.0, float(torch.linalg.matrix_norm(raw)) / 0.02)
    target = Counted.apply(short)
    for direction in path([short] * 6):
        torch.testing.assert_close(direction, target, rtol=1e-12, atol=1e-14)
    # The target is that of the clipped gradient, not of the raw one or of M_t (Algorithm 1).
    assert float((Counted.apply(raw) - target).norm()) > 0.5 * float(target.norm())
    total = (1 - 0.9**6) / 0.1
    assert float((Counted.apply(total * short) - target).norm()) > 0.5 * float(target.norm())
    # Negative control: on a path that turns around, it is not the direction of the last gradient.
    assert float((path([short, short, -short])[-1] + target).norm()) > 0.5 * float(target.norm())


@pytest.mark.parametrize(("pairs", "calls"), [(1, 3), (2, 5), (4, 9)])
def test_a_corrected_step_has_two_evaluations_for_each_pair_and_one_more(
    pairs: int, calls: int
) -> None:
    counted, params = Counted(), {"w": torch.ones(1, 2, 3, dtype=torch.float64)}
    correction = links.bias_correction(counted.link, pairs, 0.1, 0.9)
    correction.update(params, correction.init(params), context(params))
    assert counted.calls == calls


# Tables 1 and 2 from the results of every seed in Tables 4 and 5.

E2E = {
    "DP-SGD": ([0.623912, 0.623665, 0.623515], [3.4213, 3.3772, 3.4578],
               [28.5357, 28.5479, 28.5667]),
    "DP-Adam": ([0.497869, 0.492847, 0.497539], [19.3435, 18.0204, 18.0937],
                [32.1121, 31.8323, 31.8795]),
    "DP-Muon": ([0.457545, 0.452549, 0.455812], [32.6287, 33.2230, 32.8659],
                [37.7329, 37.6692, 37.5109]),
    "DP-MuonBC": ([0.449040, 0.447836, 0.450056], [34.7773, 34.8611, 35.1223],
                  [37.4699, 37.5768, 37.3661]),
}  # fmt: skip
DART = {
    "DP-SGD": ([0.628779, 0.628669, 0.628664], [6.1392, 6.1306, 6.1013],
               [33.1959, 33.2128, 33.1673]),
    "DP-Adam": ([0.473339, 0.465946, 0.469796], [7.4410, 7.4820, 7.4647],
                [34.4168, 34.3734, 34.3694]),
    "DP-Muon": ([0.452999, 0.452771, 0.453593], [7.4305, 7.4226, 7.3695],
                [34.4096, 34.3905, 34.3289]),
    "DP-MuonBC": ([0.448216, 0.446495, 0.443422], [7.4511, 7.5162, 7.5276],
                  [34.3969, 34.4366, 34.4384]),
}  # fmt: skip
TABLE_1 = {
    "DP-SGD": ("0.6237±0.0002", "3.42±0.04", "28.55±0.02"),
    "DP-Adam": ("0.4961±0.0028", "18.49±0.74", "31.94±0.15"),
    "DP-Muon": ("0.4553±0.0025", "32.91±0.30", "37.64±0.11"),
    "DP-MuonBC": ("0.4490±0.0011", "34.92±0.18", "37.47±0.11"),
}
TABLE_2 = {
    "DP-SGD": ("0.6287±0.0001", "6.12±0.02", "33.19±0.02"),
    "DP-Adam": ("0.4697±0.0037", "7.46±0.02", "34.39±0.03"),
    "DP-Muon": ("0.4531±0.0004", "7.41±0.03", "34.38±0.04"),
    "DP-MuonBC": ("0.4460±0.0024", "7.50±0.04", "34.42±0.02"),
}


def entry(values: list[float], digits: int, free: int = 1) -> str:
    spread = np.std(values, ddof=free)
    return f"{np.mean(values):.{digits}f}±{spread:.{digits}f}"


def test_means_and_deviations_are_those_of_tables_4_and_5() -> None:
    wrong = 0
    for seeds, table in ((E2E, TABLE_1), (DART, TABLE_2)):
        for method, measures in seeds.items():
            for values, digits, printed in zip(measures, (4, 2, 2), table[method], strict=True):
                assert entry(values, digits) == printed, (method, printed)
                wrong += entry(values, digits, free=0) != printed
    assert wrong > 12  # negative control: with division by 3, most deviations differ
