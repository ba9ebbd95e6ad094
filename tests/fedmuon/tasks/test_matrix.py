"""The matrix classifier: its gradient against autograd, its constants against a search."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmuon.tasks.base import Batch, Replaced
from fedmuon.tasks.constants import constants
from fedmuon.tasks.matrix import KERNELS, MatrixTask, fastest, supported


def unit(rng: np.random.Generator, *shape: int) -> Tensor:
    rows = torch.from_numpy(rng.standard_normal(shape))
    return rows / rows.norm(dim=-1, keepdim=True)


def loss_of_one(weight: Tensor, u: Tensor, y: Tensor) -> Tensor:
    """1 - softmax(X^T u)_y, as the definition reads."""
    return 1 - torch.softmax(weight.T @ u, 0)[y]


def naive(weight: Tensor, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss and autograd's gradient, one sample at a time."""
    weight = weight.clone().requires_grad_()
    samples = zip(inputs, labels, strict=True)
    loss = torch.stack([loss_of_one(weight, u, y) for u, y in samples]).mean()
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


def stack_of(rng: np.random.Generator, size: int, d: int, c: int, scale: float) -> Tensor:
    return torch.from_numpy(scale * rng.standard_normal((size, c, d))).mT


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 4),
    n=st.integers(1, 9),
    d=st.integers(1, 6),
    c=st.integers(2, 5),
    scale=st.sampled_from([0.1, 3.0, 300.0]),
)
def test_gradient_is_the_naive_loop(
    seed: int, size: int, n: int, d: int, c: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    weight, inputs = stack_of(rng, size, d, c, scale), unit(rng, n, d)
    labels = torch.from_numpy(rng.integers(c, size=n))
    loss, gradient = MatrixTask(d, c, torch.float64).gradient(
        {"weight": weight}, [Batch(inputs, labels)]
    )
    for replica in range(size):
        expected_loss, expected = naive(weight[replica], inputs, labels)
        torch.testing.assert_close(loss[replica], expected_loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient["weight"][replica], expected, rtol=1e-10, atol=1e-14)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 5), n=st.integers(2, 9))
def test_replaced_samples_are_really_replaced(seed: int, size: int, n: int) -> None:
    rng, (d, c) = np.random.default_rng(seed), (5, 4)
    weight, inputs = stack_of(rng, size, d, c, 2.0), unit(rng, n, d)
    labels = torch.from_numpy(rng.integers(c, size=n))
    replica = torch.from_numpy(rng.choice(size, size=size - 1, replace=False))
    position = torch.from_numpy(rng.integers(n, size=size - 1))
    news, answers = unit(rng, size - 1, d), torch.from_numpy(rng.integers(c, size=size - 1))
    replaced = Replaced(replica, position, news, answers)
    loss, gradient = MatrixTask(d, c, torch.float64).gradient(
        {"weight": weight}, [Batch(inputs, labels, replaced)]
    )
    for s in range(size):
        own_inputs, own_labels = inputs.clone(), labels.clone()
        for t in torch.nonzero(replica == s).flatten().tolist():
            own_inputs[position[t]], own_labels[position[t]] = news[t], answers[t]
        expected_loss, expected = naive(weight[s], own_inputs, own_labels)
        torch.testing.assert_close(loss[s], expected_loss, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(gradient["weight"][s], expected, rtol=1e-10, atol=1e-14)
        if s in replica:  # negative control: the correction matters
            assert not torch.allclose(naive(weight[s], inputs, labels)[1], expected, atol=1e-14)


def test_losses_and_predictions() -> None:
    rng, (d, c) = np.random.default_rng(5), (6, 4)
    weight, inputs = stack_of(rng, 3, d, c, 3.0), unit(rng, 20, d)
    labels = torch.from_numpy(rng.integers(c, size=20))
    losses, scores = MatrixTask(d, c, torch.float64).losses(
        {"weight": weight}, Batch(inputs, labels)
    )
    for s in range(3):
        for j in range(20):
            one = loss_of_one(weight[s], inputs[j], labels[j])
            torch.testing.assert_close(losses[s, j], one)
            assert bool(scores["accuracy"][s, j]) == bool(
                (weight[s].T @ inputs[j]).argmax() == labels[j]
            )


def worst(kind: str) -> float:
    """The largest ratio that a search over logits finds: two classes matter, the rest are far."""
    task, weight = MatrixTask(1, 2, torch.float64), torch.zeros(2001, 1, 2, dtype=torch.float64)
    weight[:, 0, 0] = torch.linspace(-4, 4, 2001, dtype=torch.float64)
    batch = Batch(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
    gradient = task.gradient({"weight": weight}, [batch])[1]["weight"]
    if kind == "gradient":
        return float(gradient.norm(dim=(1, 2)).max())
    step = 1e-6 * torch.tensor([[[1.0, -1.0]]], dtype=torch.float64) / math.sqrt(2)
    moved = task.gradient({"weight": weight + step}, [batch])[1]["weight"]
    return float(((moved - gradient).norm(dim=(1, 2)) / step.norm()).max())


def test_constants_are_attained_and_not_beaten() -> None:
    proved = constants()
    assert worst("gradient") == pytest.approx(proved.gradient_bound, rel=1e-5)
    assert worst("smoothness") == pytest.approx(proved.smoothness, rel=1e-4)
    assert proved.lipschitz == pytest.approx(0.35355339) and proved.smoothness == pytest.approx(
        0.19245009
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), c=st.integers(2, 6), scale=st.floats(0.01, 10))
def test_no_sample_beats_the_constants(seed: int, c: int, scale: float) -> None:
    rng, d, proved = np.random.default_rng(seed), 4, constants()
    task = MatrixTask(d, c, torch.float64)
    batch = Batch(unit(rng, 1, d), torch.from_numpy(rng.integers(c, size=1)))
    here, there = stack_of(rng, 1, d, c, scale), stack_of(rng, 1, d, c, scale)
    (loss, slope), (other, slope_there) = (
        task.gradient({"weight": weight}, [batch]) for weight in (here, there)
    )
    distance = float((here - there).norm()) * (1 + 1e-12)
    assert 0 <= float(loss) <= proved.loss_bound
    assert float(slope["weight"].norm()) <= proved.gradient_bound * (1 + 1e-12)
    assert abs(float(loss - other)) <= proved.lipschitz * distance
    assert float((slope["weight"] - slope_there["weight"]).norm()) <= proved.smoothness * distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_agree_with_float64(dtype: torch.dtype, transposed: bool) -> None:
    a = torch.randn(37, 65, dtype=dtype)
    b = torch.randn(23, 65, dtype=dtype).T if transposed else torch.randn(65, 23, dtype=dtype)
    exact = a.double() @ b.double()
    # Each entry sums 65 products; rounding is at most 65 eps times the sum of their moduli.
    bound = 65 * torch.finfo(dtype).eps * (a.double().abs() @ b.double().abs())
    for kernel in supported(dtype, torch.device("cpu")):
        assert ((KERNELS[kernel](a, b).double() - exact).abs() <= bound).all(), kernel


def test_the_fastest_kernel_is_one_that_exists() -> None:
    assert fastest(64, 32, 16, torch.float64, torch.device("cpu")) in KERNELS
    assert "channels-last" not in supported(torch.float64, torch.device("cpu"))
