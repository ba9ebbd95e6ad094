"""Networks as tasks: gradients against plain autograd, runs against loops written by hand."""

import dataclasses
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick
from networks import replica
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.functional import cross_entropy

import fedmuon
from fedmuon.config.names import NAMES
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.model_routes import matrix_counts, routes
from fedmuon.optim.links import map_matrices
from fedmuon.orthogonalize import smoothed_polar
from fedmuon.tasks import work_split
from fedmuon.tasks.base import Batch, Params, Replaced
from fedmuon.tasks.dropout import Masks
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.models import (
    LEAST,
    MODELS,
    VisionTransformer,
    network,
    positions,
    reject_layers,
    wide_resnet,
    with_channels,
)
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.work_split import Chunks, try_module

TOY = (2, 6, 6)


def toy() -> nn.Module:
    """A convolution, a norm and two linear layers; built anew with torch's own numbers."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, 3),
    )  # fmt: skip


def stack_of(module: nn.Module, size: int, dtype: torch.dtype = torch.float64) -> Params:
    torch.manual_seed(0)
    return {
        name: torch.randn(size, *value.shape, dtype=dtype) * 0.3
        for name, value in module.named_parameters()
    }


def batch_of(size: int, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 72, generator=generator, dtype=dtype)
    return Batch(inputs, torch.randint(3, (size,), generator=generator))


def autograd(
    module: nn.Module, params: Params, replica: int, inputs: Tensor, labels: Tensor, shape=TOY
) -> tuple[Tensor, Params]:
    """Mean cross-entropy of one replica and its gradient, by torch alone."""
    leaves = {name: value[replica].clone().requires_grad_() for name, value in params.items()}
    outputs = functional_call(module, leaves, (inputs.view(-1, *shape),))
    loss = cross_entropy(outputs, labels)
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, slopes, strict=True))


TOLERANCE: dict[torch.dtype, dict[str, Any]] = {  # rounding of long sums
    torch.float64: {"rtol": 1e-9, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


STACKED = [*itertools.product((torch.float32, torch.float64), (True, False, None),
                              ((5, 5, 5), (9, 1, 4), (6,)), (1, 3))]  # fmt: skip


@pytest.mark.parametrize(("dtype", "vectorized", "sizes", "replicas"), quick(STACKED, STACKED[::5]))
def test_gradient_is_autograd_on_each_replica(
    dtype: torch.dtype, vectorized: bool | None, sizes: tuple[int, ...], replicas: int
) -> None:
    module = toy()
    task = NetworkTask(module, TOY, dtype, vectorized=vectorized)
    task.chunks.most = 2 * replicas if vectorized else 2  # several chunks
    params = stack_of(module, replicas * len(sizes), dtype)
    batches = [batch_of(size, k, dtype) for k, size in enumerate(sizes)]
    losses, slopes = task.gradient(params, batches)
    for k, batch in enumerate(batches):
        for r in range(k * replicas, (k + 1) * replicas):
            expected = autograd(module, params, r, batch.inputs, batch.labels)
            found = losses[r], replica(slopes, r)
            torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    # Negative control: another replica's gradient is another one.
    _, other = autograd(module, params, 0, batches[0].inputs[:1], batches[0].labels[:1])
    assert not torch.allclose(slopes["0.weight"][0], other["0.weight"], rtol=1e-2)


@pytest.mark.parametrize("vectorized", [True, False])
def test_replaced_rows_are_data_made_by_hand(vectorized: bool) -> None:
    module = toy()
    task = NetworkTask(module, TOY, torch.float64, vectorized=vectorized)
    params = stack_of(module, 4)
    news = batch_of(2, 9)
    there = Replaced(torch.tensor([3, 1]), torch.tensor([0, 4]), news.inputs, news.labels)
    batch = batch_of(6, 1)
    losses, slopes = task.gradient(params, [dataclasses.replace(batch, replaced=there)])
    shared, _ = task.gradient(params, [batch])
    for r in range(4):
        inputs, labels = batch.inputs.clone(), batch.labels.clone()
        for t in (there.replica == r).nonzero().flatten().tolist():
            inputs[there.position[t]], labels[there.position[t]] = news.inputs[t], news.labels[t]
        expected = autograd(module, params, r, inputs, labels)
        found = losses[r], replica(slopes, r)
        torch.testing.assert_close(found, expected, **TOLERANCE[torch.float64])
    moved = (losses - shared).abs() > 1e-9  # beyond what another order of adding makes
    assert moved.tolist() == [False, True, False, True]


@pytest.mark.parametrize("vectorized", [True, False])
def test_losses_are_those_of_each_sample(vectorized: bool) -> None:
    module, batch = toy(), batch_of(7, 0)
    task = NetworkTask(module, TOY, torch.float64, vectorized=vectorized)
    task.evaluation_chunks.most = 4
    params = stack_of(module, 3)
    losses, scores = task.losses(params, batch)
    right = scores["accuracy"]
    assert losses.shape == right.shape == (3, 7) and right.dtype == torch.bool
    for r in range(3):
        own = {name: value[r] for name, value in params.items()}
        outputs = functional_call(module, own, (batch.inputs.view(-1, *TOY),))
        expected = cross_entropy(outputs, batch.labels, reduction="none")
        torch.testing.assert_close(losses[r], expected, rtol=1e-10, atol=1e-12)
        assert (right[r] == (outputs.argmax(1) == batch.labels)).all()


def test_images_lie_channels_last_where_only_layers_of_torch_read_them() -> None:
    class Flat(nn.Module):
        """A user's module whose `view` needs channels before pixels."""

        def forward(self, images: Tensor) -> Tensor:
            return images.view(len(images), -1)

    own = nn.Sequential(
        *(Flat() if isinstance(one, nn.Flatten) else one for one in toy().children())
    )
    found, exact = NetworkTask(toy(), TOY), NetworkTask(toy(), TOY, dtype=torch.float64)
    assert found.channels_last
    assert not exact.channels_last
    params, rng = stack_of(toy(), 2), torch.Generator().manual_seed(1)
    images, labels = torch.rand(9, *TOY, generator=rng, dtype=torch.float64), torch.arange(9) % 3
    narrow = {name: value.float() for name, value in params.items()}
    weights = {name: value[:1] for name, value in narrow.items()}
    # In the first network's first convolution the order of memory is that of the weights.
    laid = found._laid_out({name: value[0] for name, value in narrow.items()})["0.weight"]
    assert laid.stride() == (18, 1, 6, 2)
    received: list[Tensor] = []
    first = next(found.own_module().children())
    hook = first.register_forward_pre_hook(lambda _, given: received.append(given[0]))
    single = {name: value[0] for name, value in narrow.items()}
    found._slope(single, images.float(), labels, torch.full((9,), 1 / 9), labels)
    hook.remove()
    assert received[0].is_contiguous(memory_format=torch.channels_last)
    loss, slope = exact.gradient(params, [Batch(images, labels)])
    batch = Batch(images.float(), labels)
    for task, given in ((found, narrow), (NetworkTask(own, TOY), weights)):
        near, near_slope = task.gradient(given, [batch])
        assert near.double() == pytest.approx(loss[: len(near)], rel=1e-5)
        for name, value in near_slope.items():
            assert value.is_contiguous()
            assert torch.allclose(value.double(), slope[name][: len(value)], rtol=1e-4, atol=1e-5)
        each, more = task.losses(given, batch)
        right, known = exact.losses(params, Batch(images, labels))
        assert torch.allclose(each.double(), right[: len(each)], rtol=1e-5)
        assert torch.equal(more["accuracy"], known["accuracy"][: len(each)])
    own_task = NetworkTask(own, TOY)
    object.__setattr__(own_task, "channels_last", True)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        own_task.gradient(weights, [batch])


def test_another_loss_can_be_given() -> None:
    """The matrix task's loss 1 - p_y on a network without hidden layers is the matrix task."""
    module = nn.Sequential(nn.Linear(72, 3, bias=False))

    def miss(outputs: Tensor, labels: Tensor) -> Tensor:
        return 1 - outputs.softmax(-1).gather(-1, labels[:, None])[:, 0]

    batch, params = batch_of(6, 2), stack_of(module, 2)
    loss, slope = NetworkTask(module, (72,), torch.float64, loss=miss).gradient(params, [batch])
    weight = {"weight": params["0.weight"].mT}
    expected, gradient = MatrixTask(72, 3, torch.float64).gradient(weight, [batch])
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(slope["0.weight"], gradient["weight"].mT, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_device_that_is_full_gets_smaller_chunks() -> None:
    def work(part: slice) -> tuple[int, int]:
        if part.stop - part.start > 3:
            raise torch.OutOfMemoryError("full")
        return part.start, part.stop

    chunks = Chunks(16)
    assert list(chunks.each(work, 8)) == [(0, 2), (2, 4), (4, 6), (6, 8)] and chunks.most == 2
    assert list(Chunks(16).each(work, 8, replicas=8)) == [(0, 2), (2, 4), (4, 6), (6, 8)]

    def never(part: slice) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(InputError, match="one sample of 5 replicas"):
        list(Chunks(8).each(never, 3, replicas=5))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm2d(4, track_running_stats=False), "or use GroupNorm"),
        (nn.BatchNorm2d(4, momentum=None), "Set momentum to a number"),
        (nn.RReLU(), "Use nn.ReLU"),
    ],
)
def test_layers_that_no_run_could_repeat_are_refused(layer: nn.Module, words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        NetworkTask(nn.Sequential(nn.Conv2d(2, 4, 3), layer), TOY)
    assert type(layer).__name__ in str(refusal.value)
    NetworkTask(nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4), nn.Dropout(0.5)), TOY)


# --- Models ---------------------------------------------------------------------------------------

COUNTS = {  # by hand: weights and biases, layer after layer
    ("mlp", (28, 28)): 785 * 512 + 513 * 256 + 257 * 10,
    ("cnn", (28, 28)): 1_663_370,  # as McMahan et al. print it
    ("cnn", (3, 32, 32)): 76 * 32 + 801 * 64 + 4097 * 512 + 5130,
    ("tanh-cnn", (28, 28)): 26_010,  # as Opacus's example has it
    ("cifarnet", (3, 32, 32)): 13 * 24 + 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    + 4 * (64 + 256 + 256) + 2560,
    ("wrn-16-2", (3, 32, 32)): 691_674,  # as with BatchNorm: as many scales and shifts
    ("wrn-16-4", (3, 32, 32)): 2_748_890,
    ("vit-small", (3, 32, 32)): 49 * 384 + 12 * (12 * 384**2 + 13 * 384) + 2 * 384 + 3850,
}  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), COUNTS)
def test_models_have_the_published_sizes(name: str, shape: tuple[int, ...]) -> None:
    module = network(name, shape, 10)
    assert sum(param.numel() for param in module.parameters()) == COUNTS[name, shape]
    assert all(param.is_meta for param in module.parameters())


@pytest.mark.parametrize(("name", "shape"), [
    pytest.param(name, shape, marks=[pytest.mark.slow] * (place % 2))
    for name in MODELS
    for place, shape in enumerate(((12, 12), (3, 9, 9), (1, 13, 10), (3, 14, 14), (17, 15)))
    if min(shape[-2:]) >= LEAST.get(name, 0)
])  # fmt: skip
def test_models_adapt_to_samples_and_classes(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "wrn-16-4", partial(wide_resnet, 10, 4))
    small = lambda shape, classes: VisionTransformer(shape[0], classes, 4, 48, 2, 6)  # noqa: E731
    monkeypatch.setitem(MODELS, "vit-small", small)
    task = NetworkTask(network(name, shape, 7), with_channels(shape))
    params = task.initial(generator(0, Draw.INITIAL), 2)
    inputs = torch.from_numpy(np.random.default_rng(0).random((3, math.prod(shape)), np.float32))
    batch = Batch(inputs, torch.tensor([0, 6, 3]))
    losses, _ = task.losses(params, batch)
    assert losses.shape == (2, 3)
    # Some processors add in another order for another row of a stack: float32 loses some 1e-7.
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    moved = {name: torch.stack([v[0], v[1] * 1.01 + 0.01]) for name, v in params.items()}
    other = task.losses(moved, batch)[0]
    assert float((other[0] / other[1] - 1).abs().max()) > 1e-4  # the control
    # Nearly uniform at the start. Inputs from 0 to 1 go into the one matrix without a scale.
    assert float((losses - math.log(7)).abs().max()) < (1.5 if name == "linear" else 0.7)
    loss, slope = task.gradient(params, [batch])
    assert all(float(value.abs().sum()) > 0 for value in slope.values()) and loss.shape == (2,)


def test_models_are_what_the_config_knows() -> None:
    assert {*MODELS, "gpt"} == set(NAMES["task.model"]) and set(LEAST) < set(MODELS)
    for name, shape, words in (
        ("vgg", (28, 28), "use one of linear, mlp, cnn"),
        ("cnn", (20,), r"the samples have shape \(20,\)\. Set model = 'linear' or 'mlp'"),
        ("cifarnet", (8, 8), "at least 9 x 9 pixels"),
    ):
        with pytest.raises(InputError, match=words):
            network(name, shape, 10)


def test_patches_know_their_places() -> None:
    """Each entry by its definition; and a permutation of patches, without which a transformer gives
    the same, gives another output."""
    torch.manual_seed(0)
    found = positions(torch.zeros(1, 12, 2, 3, dtype=torch.float64))
    for patch, (row, column) in enumerate((r, c) for r in range(2) for c in range(3)):
        for k, wave in enumerate((1.0, 1e-2, 1e-4)):
            expected = [f(at * wave) for at in (row, column) for f in (math.sin, math.cos)]
            assert found[patch, k::3].tolist() == pytest.approx(expected, abs=1e-12)
    net = VisionTransformer(1, 3, 2, 12, 2, 3).double()
    image = torch.randn(2, 1, 4, 6).double()
    turned = torch.cat([image[..., 2:], image[..., :2]], -1)
    assert float((net(image) - net(turned)).abs().max().detach()) > 1e-3
    padded = functional.pad(image[..., :5, :3], (0, 1, 0, 1))[..., :4, :4]
    torch.testing.assert_close(net(image[..., :3]), net(padded))


@pytest.mark.parametrize("name", ["cnn", "wrn-16-2"])
def test_first_parameters_obey_the_laws_of_torch(name: str) -> None:
    """The same laws as torch's reset_parameters, by their bounds and moments; and keyed."""
    module = network(name, (1, 16, 16), 10)
    task = NetworkTask(module, (1, 16, 16), torch.float64)
    start = task.initial(generator(5, Draw.INITIAL), 2)
    for key, value in start.items():
        assert (value[0] == value[1]).all()
        owner = module.get_submodule(key.rpartition(".")[0])
        if isinstance(owner, nn.GroupNorm):
            assert (value == (1.0 if key.endswith("weight") else 0.0)).all()
            continue
        bound = 1 / math.sqrt(owner.weight[0].numel())  # type: ignore[index]
        assert float(value.abs().max()) <= bound
        if value[0].numel() > 1000:
            assert float(value[0].std()) == pytest.approx(bound / math.sqrt(3), rel=0.06)
    again = task.initial(generator(5, Draw.INITIAL))
    other = task.initial(generator(6, Draw.INITIAL))
    assert all((again[key][0] == value[0]).all() for key, value in start.items())
    assert not any(
        (other[key][0] == value[0]).all() for key, value in start.items() if "norm" not in key
    )


# --- Routing --------------------------------------------------------------------------------------


def test_routes_of_the_cnn() -> None:
    module = network("cnn", (28, 28), 10)
    table = routes(module, "hidden")
    muon = {one.name: one.matrices for one in table if one.optimizer == "muon"}
    assert muon == {"conv2.weight": (1, 64, 800), "hidden.weight": (1, 512, 3136)}
    assert {one.name for one in table} == {name for name, _ in module.named_parameters()}
    lines = [" ".join(line.split()) for line in str(table).splitlines()]
    assert "conv2.weight 64 x 32 x 5 x 5 64 x 800 muon hidden" in lines
    matrices = {f"{layer}.weight": 1 for layer in ("conv1", "conv2", "hidden", "head")}
    biases = {name: 0 for name, param in module.named_parameters() if param.ndim == 1}
    assert matrix_counts(module, "all-matrices") == matrices | biases


@pytest.mark.parametrize(("adjust", "scale"), [("none", 0.0), ("match-rms", 0.2)])
@pytest.mark.parametrize("grouped", [False, True])
def test_matrices_are_cut_and_those_of_one_shape_share_a_call(
    grouped: bool, adjust: str, scale: float
) -> None:
    """A tensor [S, out, ...] is [out, -1]; a fused one is cut along either side, with a draw and
    the scale of each part. Stacked or not, each matrix is mapped by itself."""
    torch.manual_seed(1)
    shapes = {"wide": (4, 12), "tall": (12, 4), "plain": (4, 12), "square": (4, 4),
              "filter": (6, 2, 3)}  # fmt: skip
    direction = {name: torch.randn(2, *shape).double() for name, shape in shapes.items()}
    calls: list[tuple[int, int]] = []

    def apply(stack: Tensor, context: object, block: int) -> Tensor:
        calls.append((len(stack), block))
        return smoothed_polar(stack, 0.1)

    def mapped(matrix: Tensor) -> Tensor:
        return (scale * math.sqrt(max(matrix.shape)) or 1.0) * smoothed_polar(matrix, 0.1)

    link = map_matrices(apply, adjust, grouped, {"wide": 3, "tall": 3})
    found, _ = link.update(direction, {}, None)  # type: ignore[arg-type]
    assert calls == ([(14, 0), (2, 6), (2, 8)] if grouped else [(2, block) for block in range(9)])
    for r in range(2):
        for name, side in (("wide", 1), ("tall", 0)):
            parts = [mapped(part) for part in direction[name][r].chunk(3, side)]
            torch.testing.assert_close(found[name][r], torch.cat(parts, side))
        assert not torch.allclose(found["wide"][r], mapped(direction["wide"][r]), rtol=1e-2)
        for name in ("plain", "square", "filter"):
            whole = mapped(direction[name][r].flatten(1)).view(shapes[name])
            torch.testing.assert_close(found[name][r], whole)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_activations_are_counted_by_trying_as_on_meta(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small modules are tried with numbers, large ones without: the matrix_counts are the same."""
    module = network(name, (3, 16, 16), 10)
    tried = try_module(module, with_channels((3, 16, 16)))
    monkeypatch.setattr(work_split, "SMALL", 0)
    assert tried == try_module(module, with_channels((3, 16, 16))) and tried.saved > 0


@pytest.mark.slow
def test_a_network_does_not_load_a_compiler() -> None:
    code = (
        "import sys\n"
        "from fedmuon.tasks.models import network, with_channels\n"
        "from fedmuon.tasks.networks import NetworkTask\n"
        "NetworkTask(network('cnn', (1, 28, 28), 10), with_channels((1, 28, 28)))\n"
        "assert not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


# --- Layers that draw get keyed masks, or are refused; so are those that write into other values --

WORDS, IMAGE = torch.zeros(2, 5, 4), torch.ones(2, 3, 8, 8)
KEYED: dict[str, tuple[Callable[..., nn.Module], Tensor]] = {  # by how much is dropped
    "Dropout": (nn.Dropout, WORDS),
    "Dropout1d": (nn.Dropout1d, WORDS),
    "Dropout2d": (nn.Dropout2d, IMAGE),
    "Dropout3d": (nn.Dropout3d, IMAGE),
    "AlphaDropout": (nn.AlphaDropout, WORDS),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, WORDS),
    "TransformerEncoderLayer": (
        lambda p: nn.TransformerEncoderLayer(4, 2, 8, p, batch_first=True), WORDS,
    ),
}  # fmt: skip
DRAWN: dict[str, tuple[Callable[..., nn.Module], Tensor]] = {
    "RReLU": (lambda p: nn.RReLU(0.1, 0.1 + p), -IMAGE),
    "RNN": (lambda p: nn.RNN(4, 4, 2, dropout=p), WORDS),
    "LSTM": (lambda p: nn.LSTM(4, 4, 2, dropout=p), WORDS),
    "GRU": (lambda p: nn.GRU(4, 4, 2, dropout=p), WORDS),
}


def draws(layer: nn.Module, *inputs: Tensor) -> bool:
    """Whether a call moves torch's generator."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        layer(*inputs)
        return not torch.equal(before, torch.get_rng_state())


def refused(layer: nn.Module) -> bool:
    try:
        reject_layers(nn.Sequential(layer))
    except InputError as error:
        assert re.search(
            "draws from the global generator|dropout .* cannot follow the seed", str(error)
        )
        return True
    return False


@pytest.mark.parametrize("name", DRAWN)
def test_what_draws_is_refused_and_nothing_else(name: str) -> None:
    make, inputs = DRAWN[name]
    assert draws(make(0.5), inputs) and refused(make(0.5))
    assert not refused(make(0.0)) and (name == "RReLU" or not draws(make(0.0), inputs))


@pytest.mark.parametrize("name", KEYED)
def test_dropout_draws_from_keys_alone(name: str) -> None:
    make, inputs = KEYED[name]
    layer = make(0.5)
    assert draws(layer, inputs) and not refused(layer)
    with Masks(torch.arange(2)):
        assert not draws(layer, inputs)


def test_so_are_attention_that_drops_and_pools_of_random_regions() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    assert draws(attention, WORDS, WORDS, WORDS) and not refused(attention)
    with Masks(torch.arange(2)):
        assert not draws(attention, *[WORDS.transpose(0, 1)] * 3)
    pools = nn.FractionalMaxPool2d(2, output_size=2), nn.FractionalMaxPool3d(2, output_size=2)
    for pool, rows in zip(pools, (IMAGE, torch.ones(2, 1, 4, 4, 4)), strict=True):
        assert draws(pool, rows) and refused(pool)
    assert not refused(nn.LSTM(4, 4, dropout=0.0)) and not refused(nn.MaxPool2d(2))


def test_all_layers_of_torch_that_take_a_dropout_were_looked_at() -> None:
    """Those that are not in the lists above hold such layers as parts."""
    parts = {"MultiheadAttention", "RNNBase", "Transformer", "TransformerDecoderLayer"}
    taking = {
        name
        for name, kind in vars(nn).items()
        if isinstance(kind, type)
        and issubclass(kind, nn.Module)
        and {"dropout", "p", "dropout_p"} & set(kind.__init__.__code__.co_varnames)
        and not name.startswith("Lazy")
    }
    with_norms = {"PairwiseDistance", "TripletMarginLoss", "MultiMarginLoss"}  # p of a norm
    assert taking <= set(DRAWN) | set(KEYED) | parts | with_norms


@pytest.mark.parametrize("first", [nn.LeakyReLU(0.5, inplace=True), nn.ReLU(inplace=True)])
@pytest.mark.parametrize("before", [[], [nn.Identity()], [nn.Unflatten(1, (2, 3)), nn.Flatten()]])
def test_a_layer_that_writes_into_the_samples_is_refused(
    first: nn.Module, before: list[nn.Module]
) -> None:
    net = nn.Sequential(*before, first, nn.Linear(6, 3))
    x, kept = -torch.ones(4, 6), -torch.ones(4, 6)
    net(x)
    assert not torch.equal(x, kept)  # as it does
    with pytest.raises(InputError, match="changes its input samples in place"):
        NetworkTask(net, (6,))


def test_layers_that_write_into_others_outputs_are_not() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()
    task, x = NetworkTask(net, (6,), torch.float64), torch.randn(40, 6, dtype=torch.float64)
    params, kept = task.initial(np.random.default_rng(0)), x.clone()
    task.gradient(params, [Batch(x, torch.zeros(40).long())])
    assert torch.equal(x, kept)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_rescales_itself_is_refused(
    kind: Callable[..., nn.Embedding | nn.EmbeddingBag],
) -> None:
    layer = kind(9, 4, max_norm=0.5)
    before = layer.weight.detach().clone()
    layer(torch.arange(8).view(2, 4))
    assert not torch.equal(layer.weight, before)
    with pytest.raises(InputError, match="Remove max_norm"):
        reject_layers(nn.Sequential(layer))
    reject_layers(nn.Sequential(kind(9, 4)))


def test_vit_small_is_the_published_one_without_token_and_learned_positions() -> None:
    """ViT-S/16 at 224 pixels and 1,000 classes has 22,050,664 parameters (timm, DeiT-small)."""
    with torch.device("meta"):
        large = VisionTransformer(3, 1000, 16, 384, 12, 6)
        other = VisionTransformer(3, 1000, 16, 384, 12, 12)  # heads share the width
        wider = VisionTransformer(3, 1000, 16, 480, 12, 6)
    token, places = 384, 197 * 384
    counts = [sum(one.numel() for one in net.parameters()) for net in (large, other, wider)]
    assert counts[0] + token + places == 22_050_664 and counts[1] == counts[0] < counts[2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), [
    ("wrn-16-4", "disk-sgd"), ("vit-small", "disk-sgd"), ("wrn-16-4", "dp-adam"),
])  # fmt: skip
def test_networks_of_003_take_two_private_steps(
    name: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At full size. With hardly any noise, SGD's steps are at most lr times the lot's mean."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    data = rng.random((12, 3, 8, 8), np.float32), np.arange(12) % 3
    found = fedmuon.run(
        {
            "task": {"name": "network", "model": name},
            "data": {"train": 8, "test": 4, "minimum": 2},
            "federation": {"clients": 1, "per-round": 1, "rounds": 2},
            "local": {"recipe": recipe, "steps": 1, "lr": 0.01},
            "privacy": {"noise": 1e-6, "lot": 4.0, "clipping": "automatic-flat",
                        "insecure-reproducible-noise": True},
        },
        data=data,
    )  # fmt: skip
    begun = load_file(found.path / "initial.safetensors")
    moved = math.sqrt(sum(float((found.model[key] - begun[key]).square().sum()) for key in begun))
    most = 2 * 0.01 * 8 / 4  # all 8 examples in each lot of 4 expected ones, each of length C = 1
    assert moved > 0 and found.summary["privacy"]["blocks"] == 1
    assert (moved <= most) == (recipe == "disk-sgd")  # Adam's steps have lr in every entry
