"""Clipped sums against naive loops, and what a release adds to them."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.privacy.mechanisms.gaussian import Mechanism, release
from fedmuon.privacy.noise import (
    KeyStream,
    keyed_streams,
    normals,
    poisson_rows,
    secret_stream,
    secret_streams,
)
from fedmuon.tasks.base import Batch, Params, Points, Released, Replaced
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.models import MODELS, VisionTransformer, network, wide_resnet, with_channels
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example import clipped_sums as clipped_module
from fedmuon.tasks.per_example.clipped_sums import ClippedSums
from fedmuon.tasks.per_example.clipping import RULES, Clipping
from fedmuon.tasks.per_example.ghost import find_ghosts

Gradient = Callable[[Params, Tensor, Tensor], Params]  # of one example, at one replica's parameters


def by_autograd(module: nn.Module, shape: tuple[int, ...]) -> Gradient:
    def gradient(params: Params, one: Tensor, label: Tensor) -> Params:
        leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
        outputs = functional_call(module, leaves, (one.reshape(1, *shape),))
        loss = functional.cross_entropy(outputs, label[None])
        slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, slopes, strict=True))

    return gradient


def shrunk(gradient: Params, rule: str, bound: float) -> Params:
    """One example's gradient, clipped as the definitions read."""
    norms = {name: float(value.norm()) for name, value in gradient.items()}
    if rule.endswith("flat"):
        norms = dict.fromkeys(norms, math.sqrt(sum(norm**2 for norm in norms.values())))

    def factor(norm: float) -> float:
        if norm == 0:
            return 0.0
        return bound / norm if rule.startswith("automatic") else min(1.0, bound / norm)

    return {name: factor(norms[name]) * value for name, value in gradient.items()}


def naive(
    gradient: Gradient, points: Points, inputs: Tensor, labels: Tensor, clipping: Clipping
) -> Params:
    """One example after the other."""
    total = {name: torch.zeros_like(value) for name, value in points[0][1].items()}
    for one, label in zip(inputs, labels, strict=True):
        found = [(c, gradient(params, one, label)) for c, params in points]
        whole = {name: sum(c * slope[name] for c, slope in found) for name in total}
        for name, value in shrunk(whole, clipping.rule, clipping.bound).items():  # type: ignore
            total[name] += value
    return total


def points_of(task: MatrixTask | NetworkTask, stack: int, weights: tuple[float, ...]) -> Points:
    """Points near each other, different in every replica."""
    noise = torch.Generator().manual_seed(1)
    start = task.initial(generator(0, Draw.INITIAL), stack)
    return [
        (c, {name: value + 0.05 * torch.randn(value.shape, generator=noise, dtype=value.dtype)
             for name, value in start.items()})
        for c in weights
    ]  # fmt: skip


def batch_of(rows: int, width: int, classes: int, seed: int, dtype=torch.float64) -> Batch:
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.standard_normal((rows, width))).to(dtype)
    return Batch(inputs, torch.from_numpy(rng.integers(classes, size=rows)))


def same(found: Params, expected: Params) -> None:
    """Equal up to float64 rounding of long sums."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-11, msg=name)


def replica(points: Points, row: int) -> Points:
    return [(c, {name: value[row] for name, value in params.items()}) for c, params in points]


def check(
    module: nn.Module,
    shape: tuple[int, ...],
    points: tuple[float, ...] = (1.0,),
    rule: str = "block",
    bound: float = 0.3,
    ghosts: bool | None = True,
    rows: int = 3,
    classes: int = 3,
) -> None:
    """One replica's clipped sums are the loop's; by records of layers if `ghosts`."""
    task = NetworkTask(module, shape, torch.float64)
    sums = ClippedSums(
        module, shape, task.loss, task.device, task.saved, find_ghosts(module, shape)
    )
    assert ghosts is None or (sums.ghosts is not None) == ghosts
    at = points_of(task, 1, points)
    batch, clipping = batch_of(rows, math.prod(shape), classes, 3), Clipping(rule, bound)
    expected = naive(
        by_autograd(module, shape), replica(at, 0), batch.inputs, batch.labels, clipping
    )
    for way in (sums, dataclasses.replace(sums, ghosts=None)):
        loss, found = way(at, [batch], clipping)
        same({name: value[0] for name, value in found.items()}, expected)
        task_loss = task.gradient(at[-1][1], [batch])[0]
        torch.testing.assert_close(loss, task_loss, rtol=1e-10, atol=1e-12)


# --- Whole models ---------------------------------------------------------------------------------


RULED = ("block", (1.0,)), ("automatic", (1.0,)), ("flat", (18.0, -17.0))


@pytest.mark.parametrize(
    ("name", "rule", "points"),
    [
        pytest.param(
            name,
            *one,
            id=f"{name}-{one[0]}-points{offset}",
            marks=[pytest.mark.slow] * (place % 3 != offset),
        )
        for place, name in enumerate(MODELS)
        for offset, one in enumerate(RULED)
    ],
)
def test_models_give_the_loops_sums(
    name: str, rule: str, points: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest with fewer layers."""
    monkeypatch.setitem(MODELS, "wrn-16-4", partial(wide_resnet, 10, 4))
    small = lambda shape, classes: VisionTransformer(shape[0], classes, 4, 12, 2, 3)  # noqa: E731
    monkeypatch.setitem(MODELS, "vit-small", small)
    least = {"cifarnet": (3, 9, 9), "wrn-16-2": (1, 4, 4), "wrn-16-4": (1, 4, 4),
             "tanh-cnn": (1, 15, 14)}  # fmt: skip
    shape = least.get(name, (1, 6, 5))
    check(network(name, shape, 3), with_channels(shape), points, rule, rows=2)


@pytest.mark.parametrize("points", [(1.0,), (0.857, 0.143)])
def test_cohorts_of_unlike_batches_with_neighbours(points: tuple[float, ...]) -> None:
    """K = 3 clients of S = 2 replicas: five samples, one replaced; none; two."""
    module, shape, clipping = network("mlp", (4,), 3), (4,), Clipping("block", 0.2)
    batches = [batch_of(rows, 4, 3, rows) for rows in (5, 0, 2)]
    news = batch_of(1, 4, 3, 9)
    there = Replaced(torch.tensor([1]), torch.tensor([3]), news.inputs, news.labels)
    batches[0] = dataclasses.replace(batches[0], replaced=there)
    own = batches[0].inputs.clone(), batches[0].labels.clone()
    own[0][3], own[1][3] = news.inputs[0], news.labels[0]
    net = NetworkTask(module, shape, torch.float64)
    matrix = MatrixTask(4, 3, torch.float64)
    for task, gradient in ((net, by_autograd(module, shape)), (matrix, by_definition)):
        at = points_of(task, 6, points)
        losses, sums = task.clipped(at, batches, clipping)
        for row in range(6):
            inputs, labels = (batches[row // 2].inputs, batches[row // 2].labels)
            inputs, labels = own if row == 1 else (inputs, labels)
            expected = naive(gradient, replica(at, row), inputs, labels, clipping)
            same({name: value[row] for name, value in sums.items()}, expected)
        shared = dataclasses.replace(batches[0], replaced=None)
        without = task.clipped(at, [shared, *batches[1:]], clipping)[0]
        assert (losses != without).tolist() == [False, True, False, False, False, False]
        assert losses[2:4].tolist() == [0.0, 0.0]
        changed = task.losses({k: v[1:2] for k, v in at[-1][1].items()}, Batch(*own))[0]
        torch.testing.assert_close(losses[1], changed.mean(), rtol=1e-10, atol=1e-12)


def by_definition(params: Params, one: Tensor, label: Tensor) -> Params:
    """The matrix classifier's 1 - p_y."""
    weight = params["weight"].detach().clone().requires_grad_()
    loss = 1 - torch.softmax(weight.T @ one, 0)[label]
    return {"weight": torch.autograd.grad(loss, weight)[0]}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 6),
    d=st.integers(1, 5),
    rule=st.sampled_from(RULES),
    bound=st.sampled_from([1e-3, 0.1, 1e6]),
    points=st.sampled_from([(1.0,), (2.0, -1.0), (0.5, 0.25, 0.25)]),
)
def test_matrix_sums_are_the_loops(
    seed: int, rows: int, d: int, rule: str, bound: float, points: tuple[float, ...]
) -> None:
    task, batch = MatrixTask(d, 3, torch.float64), batch_of(rows, d, 3, seed)
    at, clipping = points_of(task, 2, points), Clipping(rule, bound)
    _, sums = task.clipped(at, [batch], clipping)
    for row in range(2):
        expected = naive(by_definition, replica(at, row), batch.inputs, batch.labels, clipping)
        same({"weight": sums["weight"][row]}, expected)


# --- Layers ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 2),
    inner=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.one_of(st.integers(0, 2), st.sampled_from(["valid"])),
    flat=st.booleans(),
    wide=st.sampled_from([1, 40]),  # many channels: norms from Gram matrices
    points=st.sampled_from([(1.0,), (3.0, -2.0)]),
)
def test_convolutions(
    groups: int, inner: int, kernel: tuple[int, int], stride: int, dilation: int,
    padding: int | str, flat: bool, wide: int, points: tuple[float, ...],
) -> None:  # fmt: skip
    channels, make = groups * inner, nn.Conv1d if flat else nn.Conv2d
    shape = (channels, 7) if flat else (channels, 7, 6)
    size = kernel[0] if flat else kernel
    layer = make(channels, groups * wide, size, stride, padding, dilation, groups)  # type: ignore
    check(nn.Sequential(layer, nn.Tanh(), Pooled()), shape, points, classes=groups * wide)


class Pooled(nn.Module):
    """[n, C, ...] -> [n, C], not linear in the positions."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * x.cumsum(-1)).flatten(2).sum(-1)


class Words(nn.Module):
    """Positions that read an embedding, a linear layer twice, and a norm."""

    def __init__(self, norm: nn.Module, padding: int | None = None) -> None:
        super().__init__()
        self.table, self.mix, self.norm = nn.Embedding(5, 4, padding), nn.Linear(4, 4), norm
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        once = torch.tanh(self.mix(self.table((3 * x.abs()).long().clamp(max=4))))
        return self.head(self.norm(torch.tanh(self.mix(once)))).logsumexp(1)


SEQUENCES = [
    *itertools.product(
        (nn.LayerNorm(4), nn.RMSNorm(4), nn.LayerNorm(4, bias=False)),
        (None, 0),
        (1, 2, 9),
        ((1.0,), (18.0, -17.0)),
    )
]


@pytest.mark.parametrize(("norm", "padding", "length", "points"), quick(SEQUENCES, SEQUENCES[::7]))
def test_sequences_and_shared_layers(
    norm: nn.Module, padding: int | None, length: int, points: tuple[float, ...]
) -> None:
    check(Words(norm, padding).to("meta"), (length,), points, "flat")


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)])
def test_image_norms_and_activations_in_place(norm: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), norm, nn.SiLU(inplace=True),
                           nn.Flatten(), nn.Linear(64, 3))  # fmt: skip
    check(module.to("meta"), (2, 6, 6), (18.0, -17.0), "flat")


class Unlike(nn.Module):
    """Layers, and a forward that does more than to call one after the other."""

    def __init__(self, called: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.called = called
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self, x)


class Unknown(nn.Linear):
    """A subclass may compute anything."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square()


def overwritten(module: Any, x: Tensor) -> Tensor:
    """Changes what a layer has read."""
    inner = module.first(x).sin()
    outer = module.second(inner)
    return outer + inner.mul_(2)


PAIR = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)}
UNRECORDED = {
    "a weight outside of its layer": Unlike(
        lambda own, x: functional.linear(own.first(x).tanh(), own.first.weight), first=PAIR["first"]
    ),
    "positions first and samples second": Unlike(
        lambda own, x: own.first(x.T[..., None]).sum(0), first=nn.Linear(1, 3)
    ),
    "what a layer gave is dropped": Unlike(lambda own, x: (own.first(x), own.second(x))[1], **PAIR),
    "a subclass": nn.Sequential(Unknown(3, 3)),
}


@pytest.mark.parametrize("module", UNRECORDED.values(), ids=UNRECORDED)
def test_modules_whose_records_do_not_tell_all(module: nn.Module) -> None:
    """They go the other way and are exact too. torch refuses a module that changes what a layer has
    read, as soon as a weight needs a gradient."""
    check(module, (3,), (2.0, -1.0), ghosts=False)
    assert find_ghosts(Unlike(overwritten, **PAIR), (3,)) is None


def test_many_groups_of_samples_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(clipped_module.MEMORY, "cpu", 1)
    check(network("cnn", (1, 4, 4), 3), (1, 4, 4), rows=4)


# --- Bounds ---------------------------------------------------------------------------------------


def test_without_a_bound_they_are_the_gradients() -> None:
    module = network("mlp", (4,), 3)
    for task in (NetworkTask(module, (4,), torch.float64), MatrixTask(4, 3, torch.float64)):
        at, batches = points_of(task, 2, (1.0,)), [batch_of(8, 4, 3, 0), batch_of(3, 4, 3, 1)]
        losses, slopes = task.gradient(at[0][1], batches)
        for bound in (math.inf, 1e9):
            found, sums = task.clipped(at, batches, Clipping("block", bound))
            for name, value in slopes.items():
                many = torch.tensor([8.0, 3.0], dtype=torch.float64)
                many = many.view(-1, *[1] * (value.ndim - 1))
                torch.testing.assert_close(sums[name], many * value, rtol=1e-9, atol=1e-13)
            torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        exact = release(
            {k: v[:1] for k, v in sums.items()}, Clipping("flat"), 0.0, 8, normals(secret_streams())
        )
        same(exact.gradient, {k: v[:1] for k, v in slopes.items()})
        # Negative control: a bound that bites gives less.
        tight = task.clipped(at, batches, Clipping("block", 1e-3))[1]
        assert all(tight[k].norm() < 0.2 * v.norm() for k, v in sums.items())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["network", "matrix"])
def test_one_example_moves_the_sums_by_the_sensitivity_at_most(rule: str, kind: str) -> None:
    """In float32, where the coefficients nearly cancel; automatic clipping attains it."""
    shape = (1, 6, 6)
    task = MatrixTask(36, 3) if kind == "matrix" else NetworkTask(network("cnn", shape, 3), shape)
    start = task.initial(generator(0, Draw.INITIAL))
    near = {name: value * (1 + 1e-4) for name, value in start.items()}
    batch, clipping = batch_of(1, 36, 3, 0, torch.float32), Clipping(rule, 0.05)
    _, sums = task.clipped([(180.0, near), (-179.0, start)], [batch], clipping)
    moved = math.sqrt(sum(float(value.double().square().sum()) for value in sums.values()))
    assert moved <= clipping.sensitivity(start) * (1 + 2e-6)  # float32 rounding; slack is 4.9e-4
    assert not clipping.automatic or moved >= clipping.sensitivity(start) * (1 - 2e-6)
    assert clipping.blocks(start) == (1 if rule.endswith("flat") else len(start))


def test_a_gradient_of_zero_stays_zero() -> None:
    task = MatrixTask(2, 3, torch.float64)
    batch = Batch(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0]))
    for rule in RULES:
        _, sums = task.clipped(points_of(task, 1, (1.0,)), [batch], Clipping(rule))
        assert (sums["weight"] == 0).all()


@pytest.mark.parametrize("rule, bound", [("global", 1.0), ("flat", 0.0), ("flat", math.nan),
                                         ("automatic", math.inf)])  # fmt: skip
def test_impossible_rules_are_refused(rule: str, bound: float) -> None:
    with pytest.raises(InputError, match="clipping"):
        Clipping(rule, bound)


# --- Release --------------------------------------------------------------------------------------

SUMS = {"a": torch.zeros(2, 60, 50, dtype=torch.float64), "b": torch.zeros(2, 3000)}


@pytest.mark.parametrize("rule, bound", [("block", 0.5), ("flat", 3.0)])
def test_noise_has_the_variance_of_the_mechanism(rule: str, bound: float) -> None:
    """(sigma C / lot)^2 in every block, of an empty lot too; 3000 entries: 1 +- 0.026 (one sd)."""
    found = release(SUMS, Clipping(rule, bound), 2.0, 10.0, normals(secret_streams(2)))
    assert isinstance(found, Released)
    noise = {name: value / (2.0 * bound / 10.0) for name, value in found.gradient.items()}
    for name, value in noise.items():
        assert value.dtype == SUMS[name].dtype
        for client in value.flatten(1):
            assert abs(float(client.var()) - 1) < 0.13 and abs(float(client.mean())) < 0.1
    flat = [noise["a"][0].flatten(), noise["a"][1].flatten(), noise["b"][0], noise["b"][1]]
    between = torch.corrcoef(torch.stack([value.double() for value in flat])) - torch.eye(4)
    assert between.abs().max() < 0.1  # blocks and clients are independent
    # Negative control: noise on the mean, not on the sum, would be ten times as large.
    assert abs(float((10 * noise["a"]).var()) - 1) > 10


def test_a_release_is_the_sum_over_the_expected_lot() -> None:
    drawn: list[tuple[tuple[int, ...], int]] = []

    def normal(shape: tuple[int, ...], block: int) -> Tensor:
        drawn.append((shape, block))
        return torch.full(shape, float(block + 1))

    sums = {"a": torch.ones(2, 3), "b": torch.zeros(2, 2, 2)}
    found = release(sums, Clipping("block", 0.5), 4.0, 8.0, normal).gradient
    more = 1 + 4096 * 2.0**-23  # what a norm may exceed C by in float32
    torch.testing.assert_close(
        found["a"], torch.full((2, 3), (1 + 2 * more) / 8), rtol=1e-7, atol=0
    )
    torch.testing.assert_close(found["b"], torch.full((2, 2, 2), 4 * more / 8), rtol=1e-7, atol=0)
    assert (found["b"] > 0.5).all()
    assert drawn == [((2, 3), 0), ((2, 2, 2), 1)]


def test_replicas_share_noise_and_clients_do_not() -> None:
    draws = [partial(draw_of, client) for client in (3, 5)]
    one, again = normals(keyed_streams(draws))((4, 7), 0), normals(keyed_streams(draws))((4, 7), 0)
    assert torch.equal(one, again)
    assert torch.equal(one[0], one[1]) and torch.equal(one[2], one[3])
    assert not torch.equal(one[0], one[2]) and not torch.equal(
        one, normals(keyed_streams(draws))((4, 7), 1)
    )
    fresh = normals(secret_streams(2))
    first, second = fresh((4, 7), 0), fresh((4, 7), 0)
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    assert not torch.equal(first, second) and not torch.equal(
        first, normals(secret_streams(2))((4, 7), 0)
    )


def draw_of(client: int, what: Draw, block: int = 0) -> np.random.Generator:
    return generator(0, what, client=client, block=block)


@pytest.mark.parametrize("clipping, noise, lot", [(Clipping("flat", math.inf), 1.0, 8.0),
                                                  (Clipping(), -1.0, 8.0),
                                                  (Clipping(), 1.0, 0.0)])  # fmt: skip
def test_releases_of_no_mechanism_are_refused(clipping: Clipping, noise: float, lot: float) -> None:
    with pytest.raises(InputError):
        release(SUMS, clipping, noise, lot, normals(secret_streams(2)))


def test_poisson_lots_take_each_row_independently() -> None:
    """4000 lots of 50 rows at rate 0.1: sizes of mean 5 and variance 4.5, pairs at rate 0.01. A
    mechanism's are secret: no two agree, and the seed has no say."""
    for rng in (np.random.default_rng(0), secret_stream("pcg64"), KeyStream(), "secure", "pcg64"):
        lots = np.zeros((4000, 50))
        for lot in lots:
            if isinstance(rng, str):
                drawn = Mechanism(Clipping(), 1.0, 5.0, source=rng).rows(partial(draw_of, 0), 50)
            else:
                drawn = poisson_rows(rng, 50, 0.1)
            assert (np.diff(drawn) > 0).all()
            lot[drawn] = 1
        sizes = lots.sum(1)
        assert abs(sizes.mean() - 5) < 0.2 and abs(sizes.var() - 4.5) < 0.6
        assert (sizes == 0).any()  # probability 0.9^50 = 0.005
        assert np.abs(lots.mean(0) - 0.1).max() < 0.03
        assert abs((lots[:, 0] * lots[:, 1]).mean() - 0.01) < 0.01
        assert len({lot.tobytes() for lot in lots}) > 3600
        if not isinstance(rng, str):
            assert not len(poisson_rows(rng, 0, 0.5)) and len(poisson_rows(rng, 9, 1.0)) == 9
    # Negative control: shuffled lots of fixed size have no variance.
    fixed = [len(np.random.default_rng(k).choice(50, 5, replace=False)) for k in range(20)]
    assert np.var(fixed) == 0
