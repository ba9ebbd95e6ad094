"""Which modules several threads may call: those whose copy surely computes the same by parameters
of its own, and no others; and what threads give of the others."""

import functools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from fedmuon.core.errors import Guard, InputError
from fedmuon.tasks import base, user_task, work_split
from fedmuon.tasks.base import Batch, cross_entropy
from fedmuon.tasks.decoder import sentence_tokens
from fedmuon.tasks.models import MODELS
from fedmuon.tasks.networks import CPU, NetworkTask
from fedmuon.tasks.thread_copies import copyable, stateless


class Elsewhere(nn.Module):
    """Its layer is known by another name."""

    known: Any

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        Elsewhere.known = self.last

    def forward(self, x: Tensor) -> Tensor:
        return Elsewhere.known(x)


class Keeping(nn.Module):
    """What it gives changes with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(x) / self.calls


def thrice(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3 * output


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Makes a network whose layer was changed."""

    def make() -> nn.Module:
        layer = nn.Linear(4, 3)
        change(layer)
        return nn.Sequential(layer)

    return make


def forward_of_its_own(layer: Any) -> None:
    layer.forward = lambda input: functional.linear(input, layer.weight)


with_own_forward = changed(forward_of_its_own)
with_hook = changed(lambda layer: layer.register_forward_hook(thrice))
with_a_part = changed(lambda layer: setattr(layer, "pick", {0: layer}.get))
with_a_list = changed(lambda layer: setattr(layer, "others", [nn.Linear(4, 3)]))


def inside() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Keeping()))


UNSURE = (Elsewhere, Keeping, with_own_forward, with_hook, with_a_part, with_a_list, inside)


@pytest.mark.parametrize("make", UNSURE)
def test_what_may_be_another_in_a_copy_is_not_copied(make: Callable[[], nn.Module]) -> None:
    assert not copyable(make()) and not NetworkTask(make(), (4,)).thread_safe


def test_spectral_norm_is_not_copied_and_rejected() -> None:
    """Each call in training moves a buffer of it, which engines would do in another order."""
    made = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    assert not copyable(made)
    with pytest.raises(InputError, match=r"changes its buffer .*_u"):
        NetworkTask(made, (4,))


@pytest.mark.parametrize("name", MODELS)
def test_all_models_of_ours_are_copied(name: str) -> None:
    shape = (784,) if name == "mlp" else (3, 32, 32)
    assert NetworkTask(MODELS[name](shape, 10), shape).thread_safe


def test_so_are_torchs_layers() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    assert copyable(nn.Sequential(layer, nn.GELU(), nn.Linear(4, 3)))


def test_losses_and_measures_of_ones_own_are_for_one_thread() -> None:
    def mine(outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels)

    net = nn.Sequential(nn.Linear(4, 3))
    assert stateless(cross_entropy) and stateless(functional.mse_loss)
    assert stateless(partial(sentence_tokens, 0))
    assert not stateless(mine) and not stateless(partial(mine)) and not stateless(Keeping())
    assert NetworkTask(net, (4,)).thread_safe and not NetworkTask(net, (4,), loss=mine).thread_safe
    assert not NetworkTask(net, (4,), targets=lambda inputs, labels: labels).thread_safe
    assert not NetworkTask(net, (4,), metrics={"mine": mine}).thread_safe


def each(loss: Any) -> Any:
    return user_task.check_each(loss, "loss", Guard("loss", loss))


def test_so_are_those_that_ours_call_for_them() -> None:
    """In `partial`, in a closure, under another's name, by a hook of theirs."""

    @functools.wraps(cross_entropy)
    def named(outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.randn(len(labels))

    hooked = nn.CrossEntropyLoss(reduction="none")
    hooked.register_forward_hook(thrice)
    theirs = (named, each(named), base.one_at_a_time(named), partial(base.one_at_a_time, named))
    assert not any(map(stateless, (*theirs, hooked, torch.jit.ScriptModule())))
    known = (user_task.squared_error, functional.mse_loss, nn.CrossEntropyLoss(reduction="none"))
    assert all(stateless(one) and stateless(each(one)) for one in known)


def test_a_hook_on_all_modules_keeps_them_for_one_thread() -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    hook = register_module_forward_hook(lambda layer, args, output: None)
    try:
        assert not copyable(net)
    finally:
        hook.remove()
    assert copyable(net)


class Weighted:
    """A loss that keeps a running mean of itself, adds noise, and sees who calls it."""

    def __init__(self) -> None:
        self.mean, self.threads = 1.0, set[int]()

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.threads.add(threading.get_ident())
        noisy = outputs + 0.01 * torch.randn(outputs.shape, dtype=outputs.dtype)
        each = functional.cross_entropy(noisy, labels, reduction="none")
        self.mean = 0.9 * self.mean + 0.1 * float(each.detach().mean())
        return each / self.mean


@pytest.fixture
def cut_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So many threads, three unless the test says how many, and many small pieces for them."""
    monkeypatch.setattr(work_split, "WORK", 1)
    monkeypatch.setattr(work_split, "FEW", 4)
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 3))
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("cut_small", [1, 3], indirect=True)
def test_what_a_loss_of_ones_own_gives_does_not_depend_on_threads() -> None:
    """The naive loop over clients, in their order, is the oracle, to the last digits."""
    net, mine, again = nn.Sequential(nn.Linear(4, 3)).double(), Weighted(), Weighted()
    x, y = torch.randn(90, 4, dtype=torch.float64), torch.randint(3, (90,))
    batches = [Batch(x[part], y[part]) for part in (slice(0, 20), slice(20, 50), slice(50, 90))]
    task = user_task.user_network(user_task.Task(net, mine), (4,), 3, False, torch.float64, CPU)
    start = task.initial(np.random.default_rng(0), 3)
    mine.__init__()
    torch.manual_seed(1)
    loss, _ = task.gradient(start, batches)
    torch.manual_seed(1)
    expected = [again(net(one.inputs), one.labels).mean().item() for one in batches]
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    assert mine.threads == {threading.get_ident()} and mine.mean == pytest.approx(again.mean)


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("make", [Elsewhere, with_own_forward, with_hook, with_a_part])
def test_gradients_are_autograds_whoever_computes_them(make: Callable[[], nn.Module]) -> None:
    module = make().double()
    held = {name: value.detach()[None] for name, value in module.named_parameters()}
    x, y = torch.randn(90, 4, dtype=torch.float64), torch.randint(3, (90,))
    loss = functional.cross_entropy(module(x), y)
    expected = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    _, found = NetworkTask(module, (4,), torch.float64).gradient(held, [Batch(x, y)])
    for value, slope in zip(found.values(), expected, strict=True):
        wanted = torch.zeros_like(value[0]) if slope is None else slope
        torch.testing.assert_close(value[0], wanted, rtol=1e-12, atol=1e-15)
