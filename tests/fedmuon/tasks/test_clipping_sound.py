"""Clipped norms in floating point: at most C (1 + slack), whatever the example."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from networks import replica
from torch import Tensor, nn
from torch.nn import functional

from fedmuon.core.errors import InputError, NonFinite
from fedmuon.core.rng import Draw, generator
from fedmuon.optim.private import Private
from fedmuon.privacy.mechanisms.gaussian import Mechanism, release
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.decoder import Form, decoder, gpt2_law, next_tokens
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import (
    RULES,
    Clipping,
    inner_error,
    inner_products,
    largest_ratio,
    norms,
    scaled_norms,
    slack,
)
from fedmuon.tasks.per_example.gradients import FORMED, Explicit, Lookup, Outer, PerExample, Tied

SLACK = 4096 * 2.0**-23


def params_of(module: nn.Module) -> Params:
    return {name: value.detach()[None].clone() for name, value in module.named_parameters()}


def sums_of(module: nn.Module, x: Tensor, y: Tensor, clipping: Clipping) -> Params:
    task = NetworkTask(module, tuple(x.shape[1:]), x.dtype)
    return task.clipped([(1.0, params_of(module))], [Batch(x.flatten(1), y)], clipping)[1]


def total(sums: Sequence[Params]) -> Params:
    return {name: torch.stack([one[name] for one in sums]).sum(0) for name in sums[0]}


def overshoot(sums: Params, clipping: Clipping) -> float:
    """The longest block over C, norms in float64."""
    squares = {name: float(value.double().square().sum()) for name, value in sums.items()}
    longest = sum(squares.values()) if clipping.rule.endswith("flat") else max(squares.values())
    return math.sqrt(longest) / clipping.bound


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def running(values: Tensor) -> Tensor:
    """Their sum in float32, one after the other."""
    return torch.from_numpy(np.add.accumulate(values.numpy()))[-1]


def flat_images(big: float, wave: float, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Nearly constant images, whose mean a norm over each channel takes away."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(16, 64, 3), nn.GroupNorm(64, 64), nn.Tanh(), nn.Flatten(),
                        nn.Linear(64 * 16, 10))  # fmt: skip
    return net, big + wave * torch.randn(1, 16, 6, 6), torch.tensor([seed % 10])


def flat_words(big: float, wave: float, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The same for positions of a sequence."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(96, 128), nn.Linear(128, 10)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(torch.tanh(hidden - hidden.mean(1, keepdim=True))).mean(1)

    torch.manual_seed(seed)
    return Words(), big + wave * torch.randn(1, 32, 96), torch.tensor([seed % 10])


def saturated(margin: float, classes: int, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A softmax whose slopes have squares without digits."""
    torch.manual_seed(seed)
    layer = nn.Linear(20, classes)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()[0] = margin
    return nn.Sequential(layer), 0.3 * torch.randn(1, 20), torch.tensor([0])


CASES: dict[str, Callable[[int], tuple[nn.Module, Tensor, Tensor]]] = {
    "waves": lambda seed: flat_images(1.0, 1e-3, seed),
    "large": lambda seed: flat_images(1e4, 1.0, seed),
    "words": lambda seed: flat_words(30.0, 1e-2, seed),
    "saturated": lambda seed: saturated(48.0 + seed / 2, 3, seed),
    "underflow": lambda seed: saturated(51.6 + 0.1 * seed, 1000, seed),
}


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param(case, rule, marks=[pytest.mark.slow] * (rule != "block" and case != "waves"))
        for case in CASES
        for rule in RULES
    ],
)
def test_no_clipped_norm_exceeds_the_bound(case: str, rule: str) -> None:
    for seed in range(2):
        for bound in (1.0, 1e-3):
            clipping = Clipping(rule, bound)
            found = overshoot(sums_of(*CASES[case](seed), clipping), clipping)
            assert found <= 1 + SLACK, (seed, bound)


def plain_gram(one: Outer) -> tuple[Tensor, list[int]]:
    """The Gram form alone, with nothing formed."""
    grams = [values @ values.mT for values in (one.reads, one.slopes)]
    return (grams[0] * grams[1]).sum((1, 2, 3)), []


@pytest.mark.parametrize("case, least", [("waves", 1.01), ("large", 50.0)])
def test_gram_matrices_alone_exceed_it(
    case: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outer, "squares_and_lost", property(plain_gram))
    clipping = Clipping("block", 1e-3)
    found = [overshoot(sums_of(*CASES[case](seed), clipping), clipping) for seed in range(4)]
    assert max(found) > least


def test_automatic_factors_of_lost_squares_are_none() -> None:
    """The control: the factor that these squares ask for makes 5 C and more of the gradient."""
    slopes = torch.full((1, 900), 1e-23)
    square = Explicit(slopes).squares()
    clipping = Clipping("automatic", 1.0)
    assert clipping.factors({"a": square})["a"].item() == 0
    assert 0 <= square.item() < 1e-40 and slopes.double().norm() * square.rsqrt().double() > 5
    tiny = Clipping("block", 1e-25)  # the others take it for the longest it may be
    assert slopes.double().norm() * tiny.factors({"a": square})["a"] <= 1e-25


# --- Norms ---


@pytest.mark.parametrize("size", [3, 1024, 1025, 600_000, 2_500_000])
def test_long_norms_do_not_drift(size: int) -> None:
    """256 eps for each of at most three levels of pieces, which holds in any order of adding."""
    for values in (torch.full((2, size), 0.1), torch.rand(2, size, generator=seeded())):
        expected = values.double().norm(dim=1)
        torch.testing.assert_close(norms(values).double(), expected, rtol=768 * 2.0**-23, atol=0)
    drifted = running(torch.full((600_000,), 0.1).square()).sqrt().double()
    assert abs(float(drifted) / (0.1 * math.sqrt(600_000)) - 1) > SLACK  # the control


def test_scaled_norms() -> None:
    scales = torch.tensor([0.0, 1e-42, 1e-30, 1.0, 1e25, 1e37])
    values = scales[:, None] * torch.tensor([3.0, 4.0])
    expected = values.double().norm(dim=1)
    torch.testing.assert_close(scaled_norms(values).double(), expected, rtol=1e-6, atol=0)
    assert torch.linalg.vector_norm(values, dim=1)[2] == 0  # the control
    assert not scaled_norms(torch.tensor([[math.inf, 1.0], [math.nan, 0.0]])).isfinite().any()


def whole(one: PerExample, row: int, n: int) -> Tensor:
    """The gradient that a form adds, in float64."""
    total = torch.zeros(one.shape)
    one.add_to_(total, torch.eye(n)[row])
    return total.double()


def forms_of(cancel: float) -> dict[str, PerExample]:
    """Three gradients of every form; the second one's terms cancel up to `cancel`."""
    torch.manual_seed(0)
    reads, slopes = torch.randn(3, 2, 4, 96), torch.randn(3, 2, 4, 64)
    reads[1, :, 1] = reads[1, :, 0] * (1 + cancel)
    slopes[1, :, 1] = -slopes[1, :, 0]
    reads[1, :, 2:], slopes[1, :, 2:] = cancel * reads[1, :, 2:], cancel * slopes[1, :, 2:]
    tokens, falls = torch.randint(0, 5, (3, 4)), torch.randn(3, 4, 96)
    tokens[1] = torch.tensor([2, 2, 0, 1])
    falls[1] = torch.stack([v := falls[1, 0], -v * (1 + cancel), cancel * v, cancel * v])
    one, places = Outer(reads[:, :1], slopes[:, :1, :, :5]), Lookup(tokens, falls, 5)
    alone = one.explicit().values
    against = Explicit(alone.clone())
    opposite = Lookup(torch.arange(5).expand(3, 5), (cancel - 1) * alone[:, 0], 5)
    return {"outer": Outer(reads, slopes), "lookup": places, "tied": Tied(places, one),
            "formed head": Tied(opposite, against), "opposite": Tied(opposite, one)}  # fmt: skip


@pytest.mark.parametrize("name", ["outer", "lookup", "tied", "formed head", "opposite"])
@pytest.mark.parametrize("cancel", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("numbers", [1, 2**20])
def test_what_is_measured_is_what_is_added(
    name: str, cancel: float, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several gradients are formed at once, as on a GPU."""
    monkeypatch.setitem(FORMED, "cpu", numbers)
    one = forms_of(cancel)[name]
    total = torch.zeros(one.shape)
    one.add_to_(total, torch.tensor([0.5, 2.0, 3.0]))
    each = sum(f * whole(one, row, 3) for row, f in enumerate((0.5, 2.0, 3.0)))
    torch.testing.assert_close(total.double(), each, rtol=1e-5, atol=1e-4)
    squares = one.squares().double()
    for row in range(3):
        added, norm = float(whole(one, row, 3).norm()), math.sqrt(squares[row])
        assert norm * (1 - SLACK) <= added <= norm * (1 + SLACK)
    some = one.rows(torch.tensor([False, True, True]))
    torch.testing.assert_close(some.squares().double(), squares[1:])


def alike(size: int) -> list[Tensor]:
    """Vectors whose products round in all ways, and in the same one again and again."""
    rng = seeded()
    return [
        *(torch.full((32, size), value) for value in (0.1, 1 / 3, 0.7)),
        torch.rand(32, size, generator=rng),
        torch.randn(32, size, generator=rng),
    ]


def missed(found: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest error of inner products, in eps of the product of norms."""
    exact = a.double() @ b.double().mT
    scale = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    return float(((found - exact).abs() / scale).max()) / 2.0**-23


SIZES = [1, 63, 64, 65, 288, 576, 2304, 8192, 50_000]


@pytest.mark.parametrize("size", SIZES)
def test_inner_products_are_as_exact_as_is_taken(size: int) -> None:
    """Whatever order the pieces are added in: torch's own, and one number after the other."""
    for values in alike(size):
        assert missed(inner_products(values, values), values, values) <= inner_error(size)
        piece = max(64, math.isqrt(size))
        pieces = [running(one * one) for one in values[0].split(piece)]
        in_turn = running(torch.stack(pieces))
        assert missed(in_turn, values[:1], values[:1]) <= inner_error(size)


def test_the_bound_grows_as_a_root_and_not_as_a_running_sum() -> None:
    assert [inner_error(size) for size in (1, 64, 4096, 10_000)] == [1.0, 32.5, 64.0, 100.0]
    for size in SIZES[4:]:
        assert math.sqrt(size) - 1 <= inner_error(size) <= 2.1 * math.sqrt(size)
    values = torch.full((1, 50_000), 0.1)  # the control: added one after the other, without pieces
    assert missed(running(values[0].square()), values, values) > inner_error(50_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_may_be_as_much_longer_as_the_slack_has_room_for(dtype: torch.dtype) -> None:
    """error x^2 / 2 + (count / 2 + 1) x, and what is second order, stay within the slack."""
    eps = torch.finfo(dtype).eps
    for error in (2.0, 27.0, 137.0, 5e3, 1e6):
        for count in (2, 64, 1024, 10**5):
            most = largest_ratio(dtype, error, count)
            square = error * most**2 * eps
            first = 1 / math.sqrt(1 - square) - 1 + (count / 2 + 1) * most * eps
            assert 0 < most <= 8 and first <= slack(dtype) - 32 * eps
            assert most == 8 or first >= 0.9 * slack(dtype)  # nor is it a smaller one
    assert largest_ratio(torch.float32, 137.0, 2) < 8 == largest_ratio(torch.float64, 137.0, 2)


# --- Examples that are not finite ---


@pytest.mark.parametrize(
    "rule", [RULES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in RULES[1:])]
)
def test_an_example_that_overflows_is_no_part_of_the_sum(rule: str) -> None:
    for make in (flat_images, flat_words):
        net, one, _ = make(0.0, 1.0, 0)
        x, y = torch.randn(5, *one.shape[1:]), torch.tensor([0, 1, 2, 3, 4])
        keep, clipping = [0, 1, 2, 4], Clipping(rule, 0.1)
        expected = sums_of(net, x[keep], y[keep], clipping)
        for scale in (1e20, 1e38, math.inf, math.nan):
            bad = x.clone()
            bad[3] *= scale
            if make is flat_images:
                bad[3, 0] = scale  # not what a norm takes away
            found = sums_of(net, bad, y, clipping)
            other = {name: found[name] - value for name, value in expected.items()}
            most = 1 + 10 * SLACK if math.isfinite(scale) else 1e-5  # clipped or 0, and 0
            assert overshoot(other, clipping) <= most
    task = MatrixTask(2, 3)
    batch = Batch(torch.tensor([[1e20, 1.0], [0.1, 0.2]]), torch.ones(2).long())
    at = [(1.0, task.initial(generator(0, Draw.INITIAL)))]
    assert task.clipped(at, [batch], Clipping(rule, 1.0))[1]["weight"].isfinite().all()


def test_the_control_of_it() -> None:
    """Weighted by 0, an infinite row is NaN in all of the sum."""
    one = Outer(torch.tensor([[[[1.0]]], [[[math.inf]]]]), torch.ones(2, 1, 1, 1))
    total = torch.zeros(1, 1, 1)
    one.add_to_(total, torch.tensor([1.0, 0.0]))
    assert total.isnan().all() and one.squares().isfinite().tolist() == [True, False]


def test_private_steps_stop_at_what_is_public_alone() -> None:
    """At parameters, and not at a lot's loss."""
    task, normal = NetworkTask(nn.Sequential(nn.Linear(3, 2)), (3,)), [lambda what, block=0: RNG]
    mechanism = Mechanism(Clipping("block", 1.0), 1.0, 4.0, repeatable=True)
    start = task.initial(generator(0, Draw.INITIAL))
    batch = Batch(torch.tensor([[math.inf, 0.0, 0.0], [1.0, 2.0, 3.0]]), torch.tensor([0, 1]))
    loss, _ = task.clipped([(1.0, start)], [batch], mechanism.clipping)
    assert not loss.isfinite().any()
    released = mechanism.releases(task, [batch], normal)([(1.0, start)])
    assert all(v.isfinite().all() for v in released.gradient.values())
    start["0.bias"][0, 1] = math.nan
    with pytest.raises(NonFinite, match="the model is not finite in a step of a private run"):
        mechanism.releases(task, [batch], normal)([(1.0, start)])
    open_ended = Mechanism(Clipping("flat", math.inf), 0.0, 4.0, repeatable=True)
    start["0.bias"][0, 1] = 0.0
    with pytest.raises(NonFinite, match="the released gradient is not finite"):
        open_ended.releases(task, [batch], normal)([(1.0, start)])


RNG = generator(0, Draw.NOISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_drawn_for_the_slack(dtype: torch.dtype) -> None:
    sums = {"a": torch.zeros(1, 4, dtype=dtype)}
    found = release(sums, Clipping("block", 0.5), 3.0, 2.0, lambda shape, block: torch.ones(shape))
    expected = 0.75 * (1 + (4096 * 2.0**-23 if dtype is torch.float32 else 2.0**-32))
    assert found.gradient["a"].double().tolist()[0] == pytest.approx([expected] * 4, rel=1e-7)
    assert slack(torch.float32) == SLACK and slack(torch.float64) < 3e-10
    assert float(found.gradient["a"][0, 0]) > 0.75


# --- Networks that mix samples --------------------------------------------------------------------


class Mixed(nn.Module):
    """Two layers with `between` them, after `before`."""

    def __init__(self, before: Callable, between: Callable) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.before, self.between = before, between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.between(self.first(self.before(x)))))


def same(x: Tensor) -> Tensor:
    return x


def batch_norm(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, training=True) if len(x) > 1 else x


MIXING = {
    "norm": (same, batch_norm),
    "inputs": (batch_norm, same),
    "mean": (same, lambda x: x - x.mean(0)),
    "detached": (same, lambda x: x - x.detach().mean(0)),
    "order": (same, lambda x: x.cumsum(0)),
    "neighbour": (same, lambda x: x + x.roll(1, 0)),
    "number": (same, lambda x: x / len(x)),
    "many": (same, lambda x: x * (1 + (len(x) > 5))),
    "real": (lambda x: x + ((x - x.round()) != 0).sum(0), same),
}


@pytest.mark.parametrize("name", MIXING)
def test_networks_that_mix_samples_are_refused(name: str) -> None:
    net, x, y = Mixed(*MIXING[name]), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(InputError, match="GroupNorm"):
        sums_of(net, x, y, Clipping("block", 0.05))


@pytest.mark.parametrize("kept", ["calls", "samples", "nothing"])
def test_networks_that_keep_something_from_call_to_call_are_refused(kept: str) -> None:
    """A number of calls, or the samples of the last one; nothing is a control."""
    held = [0.0]

    def between(x: Tensor) -> Tensor:
        mean = 0.0 if x.is_meta else float(x.detach().mean())
        held.append(mean if kept == "samples" else float(len(held)))
        return x if kept == "nothing" else x + held[-2]

    net, x, y = Mixed(same, between), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    refused = pytest.raises(InputError, match="from call to call")
    with nullcontext() if kept == "nothing" else refused:
        assert len(sums_of(net, x, y, Clipping("block", 0.05))) > 0


class Tokens(nn.Module):
    """Words whose embeddings are summed, over samples too where `mixes`."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.table, self.head, self.mixes = nn.Embedding(7, 8), nn.Linear(8, 3), mixes

    def forward(self, x: Tensor) -> Tensor:
        words = x.long()
        if self.mixes:
            words = words.maximum(words.amax(0))
        return self.head(self.table(words).sum(1).tanh())


def test_others_are_not() -> None:
    clipping = Clipping("block", 0.05)
    x, y = torch.randint(0, 7, (6, 4)).float(), torch.tensor([0, 1, 2, 0, 1, 2])
    own = Mixed(same, lambda x: functional.layer_norm(x, x.shape[1:]))
    for net in (own, Tokens(False)):
        sums = sums_of(net, x, y, clipping)
        alone = [sums_of(net, x[k : k + 1], y[k : k + 1], clipping) for k in range(6)]
        torch.testing.assert_close(sums, total(alone))
    form = Form(13, 4, 8, 1, 2)
    words = NetworkTask(decoder(form), (5,), targets=next_tokens, start=gpt2_law)
    at = [(1.0, words.initial(generator(0, Draw.INITIAL)))]
    windows, state = torch.randint(0, 13, (3, 5)).float(), torch.get_rng_state()
    assert words.clipped(at, [Batch(windows, torch.zeros(3).long())], clipping)[1]
    assert torch.equal(state, torch.get_rng_state())  # the look makes no draw of torch's own
    with pytest.raises(InputError, match="GroupNorm"):
        sums_of(Tokens(True), x, y, clipping)


one_by_one = partial(functional.cross_entropy, reduction="none")


def flipping(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy whose sign one sample turns for all."""
    each = one_by_one(outputs, targets)
    return torch.where((targets == 2).any(), each, -each)


def branching(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same by an `if`, which vmap cannot follow."""
    return one_by_one(outputs, targets) * (1 if (targets == 2).any() else -1)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each sample against all others."""
    return (outputs @ outputs.mT).logsumexp(1) - outputs.square().sum(1)


def summed(loss: Callable, x: Tensor, y: Tensor, clipping: Clipping) -> Params:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    task = NetworkTask(net, (4,), loss=loss)
    assert task.clipped_sums().ghosts is not None
    return task.clipped([(1.0, params_of(net))], [Batch(x, y)], clipping)[1]


@pytest.mark.parametrize(
    "loss",
    [flipping, *(pytest.param(one, marks=pytest.mark.slow) for one in (branching, contrastive))],
)
def test_a_loss_that_mixes_samples_is_given_one_at_a_time(loss: Callable) -> None:
    """So that an example moves the sum by 2 C at most; given all at once, `flipping` moves it by
    twenty times that."""
    clipping, rng = Clipping("flat", 1.0), seeded()
    x, y = torch.randn(40, 4, generator=rng), torch.randint(0, 2, (40,), generator=rng)
    other = torch.cat([y[:-1], torch.tensor([2])])
    there = torch.cat([x[:-1], 30 * x[-1:]])
    one, two = summed(loss, x, y, clipping), summed(loss, there, other, clipping)
    assert sum(float((one[k] - two[k]).square().sum()) for k in one) ** 0.5 <= 2 * (1 + SLACK)
    alone = [summed(loss, x[k : k + 1], y[k : k + 1], clipping) for k in range(40)]
    torch.testing.assert_close(one, total(alone))


def test_a_loss_of_all_samples_together_is_refused() -> None:
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    with pytest.raises(InputError, match="without a mean over samples"):
        summed(functional.cross_entropy, x, y, Clipping("flat", 1.0))


# --- Layers whose records do not tell all ---------------------------------------------------------


class Twice(Mixed):
    """A weight that is used outside of its layer too, before another layer reads the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + functional.linear(x, self.first.weight)))


def thrice(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A hook on what a layer gives."""
    return 3 * output


def changed(how: str) -> nn.Module:
    """A layer that a hook changes, or whose object has a `forward` of its own."""
    first, last = nn.Linear(4, 8), nn.Linear(8, 3)
    if how == "before":
        last.register_forward_pre_hook(lambda layer, args: (args[0] ** 2,))
    elif how == "after":
        first.register_forward_hook(thrice)
    else:
        first.forward = lambda input: 2 * functional.linear(input, first.weight, first.bias)
    return nn.Sequential(first, nn.Tanh(), last)


@pytest.mark.parametrize("how", ["twice", "before", "after", "own"])
def test_gradients_are_those_of_single_examples_whatever_a_layer_does(how: str) -> None:
    torch.manual_seed(0)
    net, clipping = Twice(same, same) if how == "twice" else changed(how), Clipping("flat", 0.3)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    found, expected = sums_of(net, x, y, clipping), Params()
    for k in range(6):
        loss = functional.cross_entropy(net(x[k : k + 1]), y[k : k + 1])
        slopes = torch.autograd.grad(loss, list(net.parameters()))
        whole = torch.cat([one.flatten() for one in slopes]).norm()
        for (name, _), slope in zip(net.named_parameters(), slopes, strict=True):
            part = slope * min(1.0, 0.3 / float(whole))
            expected[name] = expected.get(name, torch.zeros_like(part)) + part
    torch.testing.assert_close(replica(found), expected)


# --- Frozen parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight"])
def test_frozen_parameters_stay_and_count_for_no_block(frozen: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    net.get_parameter(frozen).requires_grad_(False)
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    x, y = torch.randn(50, 6), torch.randint(0, 3, (50,))
    made = Private(net, population=50, recipe="dp-sgd", privacy={"noise": 1.0, "lot": 20.0})
    for lot in made.lots(2):
        made.step(lot, x[lot.rows], y[lot.rows])
    moved = {name for name, value in net.named_parameters() if not torch.equal(value, before[name])}
    assert moved == set(before) - {frozen}


@pytest.mark.parametrize("rule", ["block", "flat"])
def test_what_is_below_the_bound_stays_as_it_is(rule: str) -> None:
    """min(1, C / norm), one norm for each block."""
    norms = torch.tensor([0.0, 0.3, 0.999, 1.0, 1.001, 40.0], dtype=torch.float64)
    found = Clipping(rule, 1.0).factors({"w": norms.square()})["w"]
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, 1 / 1.001, 1 / 40], dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-14, atol=0)
    assert (found[:4] == 1).all()
