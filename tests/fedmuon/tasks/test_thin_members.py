"""Thin members by the compiled kernel: exactly its sums over the parts, added in their order."""

from functools import reduce

import numpy as np
import pytest
import torch
from test_work_split import DTYPES, batch_of
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.matrix_kernels import Member, pieces

Sums = tuple[np.ndarray, np.ndarray]
SIZES = [1, 700, 2, 3, 1500, 1]
D, C = 784, 10


def sums(one: Member) -> Sums:
    """A part's share of the mean loss and gradient, by one call of the kernel."""
    from fedmuon.tasks.batched_gradients import slope_sums  # with numba: not by every worker

    weight = one.weight.contiguous().numpy()
    skip, total = np.full(len(weight), -1), np.zeros_like(weight)
    right = np.zeros(len(weight), weight.dtype)
    rows, labels = one.batch.inputs.numpy(), one.batch.labels.numpy()
    share = weight.dtype.type(1 / one.samples)
    assert slope_sums(rows, labels, weight, skip, share, total, right)
    return (len(labels) - right) / one.samples, total


def added(total: Sums, more: Sums) -> Sums:
    return total[0] + more[0], total[1] + more[1]


def drawn(replicas: int, dtype: torch.dtype) -> tuple[Tensor, list[Batch]]:
    rng = np.random.default_rng(0)
    stack = torch.from_numpy(rng.standard_normal((len(SIZES) * replicas, C, D))).to(dtype)
    batches = [batch_of(rng, n, D, C, 0) for n in SIZES]
    return stack, [Batch(one.inputs.to(dtype), one.labels) for one in batches]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_bytes_are_those_of_the_parts_in_their_order(replicas: int, dtype: torch.dtype) -> None:
    """And not those of another order."""
    stack, batches = drawn(replicas, dtype)
    members = [Member(*each) for each in zip(stack.chunk(len(SIZES)), batches, SIZES, strict=True)]
    rows = [[[sums(one) for one in piece] for piece in row] for row in pieces(members)]
    expected, turned = ([one for row in rows for one in joined(row, k)] for k in (1, -1))
    assert max(map(len, rows)) > 2 and len(rows) < len(SIZES)  # some are cut, some put together
    loss, found = MatrixTask(D, C, dtype, kernel="fused").gradient({"weight": stack.mT}, batches)
    slope = found["weight"].mT.numpy().tobytes()
    losses, slopes = map(np.concatenate, zip(*expected, strict=True))
    assert (loss.numpy().tobytes(), slope) == (losses.tobytes(), slopes.tobytes())
    assert slope != np.concatenate([one for _, one in turned]).tobytes()


def joined(row: list[list[Sums]], order: int) -> list[Sums]:
    """The sums of a row's members: of one alone, of its parts in that order."""
    return row[0] if len(row) == 1 else [reduce(added, [one for (one,) in row[::order]])]


@pytest.mark.parametrize("wrong", range(len(SIZES)))
def test_every_members_types_are_looked_at(wrong: int) -> None:
    stack, batches = drawn(1, torch.float64)
    task = MatrixTask(D, C, torch.float64, kernel="fused")
    batches[wrong] = Batch(batches[wrong].inputs, batches[wrong].labels.double())
    with pytest.raises(InputError, match="labels whole"):
        task.gradient({"weight": stack.mT}, batches)


@pytest.mark.parametrize(("rows", "classes"), [(70, 3), (5, 10)])
def test_the_kernel_s_python_is_the_naive_loop_s_and_the_compiled_one_s(
    rows: int, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, on sizes that use and leave over its fours, fives and blocks of samples."""
    from fedmuon.tasks import batched_gradients  # with numba: not by every worker

    rng = np.random.default_rng(0)
    inputs, labels = rng.standard_normal((rows, 5)), rng.integers(0, classes, rows)
    weight, skip = rng.standard_normal((2, classes, 5)), np.array([-1, 1])
    compiled = np.zeros_like(weight), np.zeros(2)
    assert batched_gradients.slope_sums(inputs, labels, weight, skip, 0.5, *compiled)
    for name in (
        "_products",
        "_slopes",
        "_subtract",
        "_exponentials",
        "_add_products",
        "_add_fives",
    ):
        monkeypatch.setattr(batched_gradients, name, getattr(batched_gradients, name).py_func)
    whole = batched_gradients.slope_sums.py_func
    total, right = np.zeros_like(weight), np.zeros(2)
    assert whole(inputs, labels, weight, skip, 0.5, total, right)
    expected, sums = np.zeros_like(weight), np.zeros(2)
    for s in range(2):
        for i in set(range(rows)) - {skip[s]}:
            p = np.exp(weight[s] @ inputs[i])
            p /= p.sum()
            y = labels[i]
            sums[s] += p[y]
            slope = p[y] * p - p[y] * np.eye(classes)[y]
            expected[s] += 0.5 * np.outer(slope, inputs[i])
    for found in ((total, right), compiled):
        assert np.allclose(found[0], expected, rtol=0, atol=1e-12)
        assert np.allclose(found[1], sums, rtol=0, atol=1e-12)
    assert not np.allclose(total, 1.001 * expected, rtol=0, atol=1e-6)
    assert not whole(inputs, labels + classes, weight, skip, 0.5, total, right)
