"""The matrix classifier: gradients against autograd and loops, however they are cut; constants."""

import itertools
import math
from functools import reduce

import numpy as np
import pytest
import torch
from conftest import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmuon.config.load import load
from fedmuon.core.errors import InputError
from fedmuon.core.threads import parts
from fedmuon.federated.build import COMPILED, resolve
from fedmuon.tasks import matrix as cutting
from fedmuon.tasks import work_split as of_networks
from fedmuon.tasks.base import Batch, Replaced
from fedmuon.tasks.constants import constants
from fedmuon.tasks.matrix import KERNELS, MatrixTask, Member, fastest, split_members, supported
from fedmuon.tasks.models import mlp
from fedmuon.tasks.networks import NetworkTask


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


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 5),
    n=st.integers(1, 9),
    d=st.integers(1, 6),
    c=st.integers(2, 5),
    scale=st.sampled_from([0.1, 3.0, 300.0]),
    replaced=st.booleans(),
)
def test_gradient_is_that_of_autograd(
    seed: int, size: int, n: int, d: int, c: int, scale: float, replaced: bool
) -> None:
    """In all replicas, of which all but one have a sample of their own."""
    rng = np.random.default_rng(seed)
    weight = stack_of(rng, size, d, c, scale)
    batch = batch_of(rng, n, d, c, size - 1 if replaced else 0, size)
    loss, gradient = MatrixTask(d, c, torch.float64).gradient({"weight": weight}, [batch])
    for s in range(size):
        expected_loss, expected = naive(weight[s], *seen(batch, s))
        torch.testing.assert_close(loss[s], expected_loss, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(gradient["weight"][s], expected, rtol=1e-10, atol=1e-14)


def test_a_replaced_sample_matters() -> None:
    """The negative control of the above."""
    rng = np.random.default_rng(0)
    weight, batch = stack_of(rng, 2, 5, 4, 2.0), batch_of(rng, 6, 5, 4, 1)
    gradient = MatrixTask(5, 4, torch.float64).gradient({"weight": weight}, [batch])[1]["weight"]
    shared = naive(weight[0], batch.inputs, batch.labels)[1]
    assert not torch.allclose(shared, gradient[0], atol=1e-14)


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


# --- Work that is cut into pieces: the whole of it, once, and what naive loops give ---------------

SHAPES = {  # replicas, samples of each client, d, c
    "one row": (1, [1], 5, 3),
    "ragged": (1, [1, 700, 2, 3, 1500, 1], 784, 10),
    "tiny clients": (2, [2, 1] * 40, 6, 4),
    "thin and long": (3, [5000], 300, 7),
    "thick": (30, [400, 1, 399], 200, 10),
    "thick and long": (22, [4500], 40, 3),
    "many classes": (1, [300, 20], 64, 200),
    "more classes than a piece": (2, [4090], 5, 1000),
}
LOOPED = [*itertools.product(SHAPES, (False, True), ("torch", "fused"))]
# Each has its kernel compiled, in seconds, unless a session before this one has kept it.
DTYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]


def looped(weight: Tensor, inputs: Tensor, labels: Tensor) -> tuple[float, np.ndarray]:
    """Mean loss and gradient [c, d] of one model, one sample after the other, by the formula."""
    w, total, loss = weight.numpy(), np.zeros(weight.shape), 0.0
    for u, y in zip(inputs.numpy(), labels.tolist(), strict=True):
        logits = w @ u
        p = np.exp(logits - logits.max())
        p /= p.sum()
        loss += 1 - p[y]
        total += np.outer(p[y] * (p - np.eye(len(p))[y]), u)
    return loss / len(labels), total / len(labels)


@pytest.mark.parametrize(("shape", "replaced", "kernel"), quick(LOOPED, LOOPED[:-4:5]))
def test_a_cut_gradient_is_the_naive_loops(shape: str, replaced: bool, kernel: str) -> None:
    """Of a few replicas, the first and the last among them."""
    replicas, sizes, d, c = SHAPES[shape]
    rng = np.random.default_rng(0)

    def drawn(*size: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(size))

    stack = drawn(len(sizes) * replicas, c, d)
    batches = [batch_of(rng, n, d, c, replicas if replaced else 0) for n in sizes]
    task = MatrixTask(d, c, torch.float64, kernel=kernel)
    loss, found = task.gradient({"weight": stack.mT}, batches)
    for k, batch in enumerate(batches):
        for s in {0, replicas // 2, replicas - 1}:
            expected = looped(stack[k * replicas + s], *seen(batch, s))
            assert float(loss[k * replicas + s]) == pytest.approx(expected[0], rel=1e-11)
            gradient = found["weight"].mT[k * replicas + s].numpy()
            assert np.abs(gradient - expected[1]).max() <= 1e-12 * np.abs(expected[1]).max() + 1e-15


def batch_of(rng: np.random.Generator, n: int, d: int, c: int, own: int, among: int = 0) -> Batch:
    """A sample is replaced in so many replicas, the first ones or some among that many."""
    inputs, labels = torch.from_numpy(rng.standard_normal((n, d))), rng.integers(c, size=n)
    there = None
    if own:
        there = Replaced(
            torch.from_numpy(rng.permutation(among)[:own]) if among else torch.arange(own),
            torch.from_numpy(rng.integers(n, size=own)),
            torch.from_numpy(rng.standard_normal((own, d))),
            torch.from_numpy(rng.integers(c, size=own)),
        )
    return Batch(inputs, torch.from_numpy(labels), there)


def seen(batch: Batch, replica: int) -> tuple[Tensor, Tensor]:
    """The samples of one replica."""
    inputs, labels, there = batch.inputs.clone(), batch.labels.clone(), batch.replaced
    if there is not None:
        mine = there.replica == replica
        inputs[there.position[mine]] = there.inputs[mine]
        labels[there.position[mine]] = there.labels[mine]
    return inputs, labels


@pytest.mark.parametrize("shape", quick(SHAPES, {*SHAPES} - {"thick and long", "thick"}))
def test_each_sample_of_each_replica_is_in_one_piece(shape: str) -> None:
    replicas, sizes, d, c = SHAPES[shape]
    members = []
    for number, n in enumerate(sizes):
        inputs = torch.full((n, d), float(number))
        inputs[:, 0] = torch.arange(n)
        weight = torch.arange(replicas).double().view(-1, 1, 1).expand(replicas, c, d)
        members.append(Member(weight, Batch(inputs, torch.zeros(n)), n))
    cells = [
        (int(one.batch.inputs[0, -1]), int(replica), int(sample))
        for row in split_members(members)
        for piece in row
        for one in piece
        for replica in one.weight[:, 0, 0]
        for sample in one.batch.inputs[:, 0]
    ]
    wanted = {(k, s, i) for k, n in enumerate(sizes) for s in range(replicas) for i in range(n)}
    assert len(cells) == len(wanted) and set(cells) == wanted
    assert all(one.samples == sizes[0] for piece in split_members(members[:1])[0] for one in piece)


def test_large_work_is_cut_and_small_work_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(name: str) -> int:
        replicas, sizes, d, c = SHAPES[name]
        weight = torch.zeros(replicas, c, d)
        each = [Member(weight, Batch(torch.zeros(n, d), torch.zeros(n)), n) for n in sizes]
        return sum(len(row) for row in split_members(each))

    found = {name: count(name) for name in SHAPES}
    assert found["one row"] == found["tiny clients"] == 1
    assert found["thin and long"] > 4 and found["thick"] >= 3 and found["ragged"] >= 4
    monkeypatch.setattr(cutting, "FLOP", 1e18)
    assert count("thin and long") == count("ragged") == 1


def test_a_thick_piece_holds_4_mib_of_logits() -> None:
    def replicas_of_each(dtype: torch.dtype, replicas: int) -> list[int]:
        batch = Batch(torch.zeros(1000, 2, dtype=dtype), torch.zeros(1000))
        member = Member(torch.zeros(replicas, 10, 2, dtype=dtype), batch, 1000)
        return [len(piece[0].weight) for row in split_members([member]) for piece in row]

    # A stack of 220 has 2.2 million logits: 8.4 MiB in float32, twice as much in float64.
    assert replicas_of_each(torch.float32, 220) == [73, 73, 74]
    assert replicas_of_each(torch.float64, 220) == [44] * 5
    assert replicas_of_each(torch.float32, 110) == [55, 55]
    assert replicas_of_each(torch.float32, 104) == [104]  # no more than one piece's: not cut


def test_parts() -> None:
    assert parts(10, 0.2) == [slice(0, 10)]
    assert parts(10, 3) == [slice(0, 3), slice(3, 6), slice(6, 10)]
    assert parts(0, 1) == [slice(0, 0)] and parts(2, 7.0) == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize("replaced", quick([False, True], [True]))
def test_a_networks_cut_gradient_is_that_of_the_whole(
    replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, rng = NetworkTask(mlp((6,), 4), (6,), torch.float64), np.random.default_rng(0)
    batches = [batch_of(rng, n, 6, 4, 2 if replaced else 0) for n in (40, 1, 12)]
    params = {name: value.repeat_interleave(6, 0) for name, value in task.initial(rng).items()}
    params = {name: value + 0.1 * torch.randn_like(value) for name, value in params.items()}
    loss, whole = task.gradient(params, batches)
    monkeypatch.setattr(of_networks, "WORK", 1)
    again, cut = task.gradient(params, batches)
    torch.testing.assert_close(again, loss, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_the_compiled_kernel_rounds_as_a_library_does(dtype: torch.dtype, scale: float) -> None:
    rng = np.random.default_rng(0)
    batch = batch_of(rng, 3000, 784, 10, 0)
    stack = scale * torch.from_numpy(rng.standard_normal((1, 10, 784)))
    rounded = Batch(batch.inputs.to(dtype) / 28, batch.labels)
    weight = {"weight": stack.to(dtype).mT}
    exact = looped(weight["weight"].mT[0].double(), rounded.inputs.double(), batch.labels)
    for kernel in ("torch", "fused"):
        loss, found = MatrixTask(784, 10, dtype, kernel=kernel).gradient(weight, [rounded])
        error = np.abs(found["weight"].mT[0].double().numpy() - exact[1]).max()
        eps = torch.finfo(dtype).eps
        assert error <= 60 * scale * eps * np.abs(exact[1]).max() + 60 * eps * 1e-3
        assert float(loss) == pytest.approx(exact[0], rel=60 * eps * max(scale, 1.0))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_what_is_not_finite_is_told(kernel: str, value: float) -> None:
    """In a weight, and in a sample that another replaces: the shared sums have seen it."""
    task, rng = MatrixTask(5, 3, torch.float64, kernel=kernel), np.random.default_rng(0)
    weight = torch.zeros(1, 3, 5).double()
    weight[0, 1, 2] = value
    loss, _ = task.gradient({"weight": weight.mT}, [batch_of(rng, 300, 5, 3, 0)])
    assert not bool(loss.isfinite().any())
    batch = batch_of(rng, 300, 5, 3, 1)
    assert batch.replaced is not None
    batch.inputs[batch.replaced.position[0], 0] = value
    loss, slope = task.gradient({"weight": torch.randn(2, 3, 5).double().mT}, [batch])
    assert not bool(loss.isfinite().any())
    assert not bool(slope["weight"].isfinite().all((1, 2)).any())


@pytest.mark.parametrize("kernel", ["torch", "fused"])
@pytest.mark.parametrize("label", [-1, 3, 10**6, -(2**62)])
def test_a_label_that_is_no_class_is_refused(label: int, kernel: str) -> None:
    """Before memory that is another's is read; the last class is one."""
    batch, task = batch_of(np.random.default_rng(0), 300, 5, 3, 0), MatrixTask(5, 3, kernel=kernel)
    rows, labels = batch.inputs, batch.labels.clone()
    labels[:2] = torch.tensor([0, 2])
    weight = {"weight": torch.randn(1, 3, 5, dtype=torch.float64).mT}
    task.gradient(weight, [Batch(rows, labels)])
    labels[299] = label
    with pytest.raises(
        (InputError, RuntimeError), match=r"not an integer from 0 to 2|out of bounds"
    ):
        task.gradient(weight, [Batch(rows, labels)])


@pytest.mark.parametrize("kernel", ["torch", "fused"])
@pytest.mark.parametrize("name", ["samples", "labels", "weights"])
def test_mixed_types_are_refused(name: str, kernel: str) -> None:
    batch, weight = batch_of(np.random.default_rng(0), 40, 5, 3, 0), torch.randn(1, 3, 5).double()
    rows, labels = batch.inputs, batch.labels
    if name == "samples":
        rows = rows.float()
    elif name == "labels":
        labels = labels.double()
    else:
        weight = weight.float()
    with pytest.raises((InputError, RuntimeError), match=r"integer labels|type"):
        MatrixTask(5, 3, torch.float64, kernel=kernel).gradient(
            {"weight": weight.mT}, [Batch(rows, labels)]
        )


def test_labels_of_four_bytes_are_as_good() -> None:
    batch, weight = batch_of(np.random.default_rng(0), 40, 5, 3, 0), torch.randn(1, 3, 5).double()
    short, task = Batch(batch.inputs, batch.labels.int()), MatrixTask(5, 3, kernel="fused")
    both = [task.gradient({"weight": weight.mT}, [one])[1]["weight"] for one in (batch, short)]
    assert torch.equal(*both)


def test_without_the_compiler_its_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmuon.tasks.matrix.find_spec", lambda name: None)
    config = load(None, ("engine.kernel=fused", "engine.device=cpu"))
    with pytest.raises(
        InputError,
        match=r"'fused' does not support dtype float32 on device cpu\. Choose one of torch",
    ):
        resolve(config)
    long = load(None, ("engine.kernel=auto", "engine.device=cpu", "federation.rounds=1000000"))
    assert resolve(long).engine.kernel != "fused"


def test_long_runs_take_the_compiled_kernel() -> None:
    def kernel(*keys: str) -> str:
        return resolve(load(None, ("engine.kernel=auto", "engine.device=cpu", *keys))).engine.kernel

    assert kernel("federation.rounds=1000000") == "fused" and COMPILED == 20e6  # as docs say
    assert kernel("federation.rounds=3") != "fused"
    assert kernel("federation.rounds=100000", "local.batch=1", "local.steps=1") != "fused"


# Thin members by the compiled kernel: exactly its sums over the parts, added in their order.

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
    rows = [[[sums(one) for one in piece] for piece in row] for row in split_members(members)]
    expected, turned = ([one for row in rows for one in joined(row, k)] for k in (1, -1))
    assert max(map(len, rows)) > 2 and len(rows) < len(SIZES)  # some are cut, some put together
    loss, found = MatrixTask(D, C, dtype, kernel="fused").gradient({"weight": stack.mT}, batches)
    slope = found["weight"].mT.numpy().tobytes()
    losses, slopes = map(np.concatenate, zip(*expected, strict=True))
    assert (loss.numpy().tobytes(), slope) == (losses.tobytes(), slopes.tobytes())
    assert slope != np.concatenate([one for _, one in turned]).tobytes()


def joined(row: list[list[Sums]], order: int) -> list[Sums]:
    """The sums of a row's members: of one alone, of its parts in that order."""
    if len(row) == 1:
        return row[0]
    losses, totals = zip(*(one for (one,) in row[::order]), strict=True)
    return [(reduce(np.add, losses), reduce(np.add, totals))]


@pytest.mark.parametrize("wrong", range(len(SIZES)))
def test_every_members_types_are_looked_at(wrong: int) -> None:
    stack, batches = drawn(1, torch.float64)
    task = MatrixTask(D, C, torch.float64, kernel="fused")
    batches[wrong] = Batch(batches[wrong].inputs, batches[wrong].labels.double())
    with pytest.raises(InputError, match="but they must be integers"):
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
    for name, kernel in list(vars(batched_gradients).items()):
        if hasattr(kernel, "py_func") and name.startswith("_"):
            monkeypatch.setattr(batched_gradients, name, kernel.py_func)
    whole = batched_gradients.slope_sums.py_func
    total, right = np.zeros_like(weight), np.zeros(2)
    assert whole(inputs, labels, weight, skip, 0.5, total, right)
    expected, sums = np.zeros_like(weight), np.zeros(2)
    for s in range(2):
        seen_rows = [i for i in range(rows) if i != skip[s]]
        samples = (torch.from_numpy(one[seen_rows]) for one in (inputs, labels))
        loss, slope = looped(torch.from_numpy(weight[s]), *samples)
        sums[s], expected[s] = len(seen_rows) * (1 - loss), 0.5 * len(seen_rows) * slope
    for found in ((total, right), compiled):
        assert np.allclose(found[0], expected, rtol=0, atol=1e-12)
        assert np.allclose(found[1], sums, rtol=0, atol=1e-12)
    assert not np.allclose(total, 1.001 * expected, rtol=0, atol=1e-6)
    assert not whole(inputs, labels + classes, weight, skip, 0.5, total, right)
