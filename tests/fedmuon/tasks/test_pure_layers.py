"""Which layers of a user only compute: ordinary ones, and none that stores or reads changes."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmuon.tasks import work_split
from fedmuon.tasks.base import Batch
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.pure_layers import only_computes
from fedmuon.tasks.thread_copies import copyable

SCALE, LOG, CHOICES = 1 / math.sqrt(2), list[int](), {"a": 1.0}
calls = 0


def halved(x: Tensor, power: int = 2) -> Tensor:
    return x / math.pow(2, power)


def logged(x: Tensor) -> Tensor:
    LOG.append(len(x))
    return x


class Layer(nn.Module):
    """A layer with one weight, whose subclasses differ in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Residual(Layer):
    """As users write it: helpers, a property, loops, items, constants of the module."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.sizes, self.act = 2, (2, 2), functional.gelu

    @property
    def side(self) -> int:
        return self.width // self.heads

    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    def mixed(self, x: Tensor) -> Tensor:
        parts = []
        for k, part in enumerate(x.split(self.side, -1)):
            parts.append(part * (k + 1))
        return torch.cat([halved(part) for part in parts], -1)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            raise ValueError(f"wants matrices, not {tuple(x.shape)}")
        y = torch.zeros_like(x)
        y[:, :2] = x[:, 2:]
        added = lambda z: z + SCALE * x  # noqa: E731
        return added(self.twice(self.mixed(self.act(self.inner(y)))))


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = 1
        return self.inner(x)


class CountingOutside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return self.inner(x)


class Logging(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(logged(x))


class Choosing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * CHOICES["a"]


class Caching(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen = dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] = x
        return self.inner(x)


class Remembering(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.last.copy_(x.detach()[0])


class OfTheClass(Layer):
    seen: Any = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.inner(x)


class ByDefault(Layer):
    def forward(self, x: Tensor, seen: Any = []) -> Tensor:  # noqa: B006
        seen.append(len(x))
        return self.inner(x)


class ByItsDictionary(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["calls"] = 1
        return self.inner(x)


class BySetattr(Layer):
    def forward(self, x: Tensor) -> Tensor:
        setattr(self, "calls", 1)  # noqa: B010
        return self.inner(x)


class Importing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        import tests

        return self.inner(x) * len(tests.__name__)


class CopiedByItself(Residual):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Elsewhere(Layer):
    def __getattr__(self, name: str) -> Any:
        return 1.0 if name == "factor" else super().__getattr__(name)


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        return super().__getattribute__(name)


class WithMeta(Layer, metaclass=Meta):
    pass


def counting() -> nn.Module:
    seen = 0

    class Closed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal seen
            seen += 1
            return self.inner(x)

    return Closed()


def reading(found: Any) -> nn.Module:
    class Closed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * len(found)

    return Closed()


def with_an_inner_class() -> nn.Module:
    class Outer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            class Inside:
                y = x

            return self.inner(Inside.y)

    return Outer()


UNSAFE = (
    *(Counting, CountingOutside, Logging, Choosing, Caching, Remembering, OfTheClass, ByDefault),
    *(ByItsDictionary, BySetattr, Importing, CopiedByItself, Elsewhere, WithMeta, counting),
    *(lambda: reading([1]), lambda: reading(OrderedDict()), with_an_inner_class),
)


@pytest.mark.parametrize("make", UNSAFE)
def test_a_layer_that_stores_or_reads_what_changes_is_for_one_thread(make: Any) -> None:
    layer = make()
    assert not only_computes(layer) and not copyable(nn.Sequential(layer))


@pytest.mark.parametrize("make", [Residual, lambda: reading((1, 2)), lambda: reading("ab")])
def test_an_ordinary_layer_is_copied(make: Any) -> None:
    assert only_computes(make()) and copyable(nn.Sequential(make()))


def test_a_method_of_an_instance_or_a_list_in_it_keeps_a_layer_for_one_thread() -> None:
    listed, own = Residual(), Residual()
    listed.extra = nn.ParameterList()  # a module, so it is copied
    assert only_computes(listed)
    listed.sizes = [2, 2]  # type: ignore[assignment]
    own.forward = lambda x: x
    assert not only_computes(listed) and not only_computes(own)


def test_threads_compute_what_one_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and autograd's gradient, with many small pieces for three threads."""
    monkeypatch.setattr(work_split, "WORK", 1)
    monkeypatch.setattr(work_split, "FEW", 4)
    torch.manual_seed(0)
    net = nn.Sequential(Residual(), nn.Flatten(), nn.Linear(4, 3)).double()
    task = NetworkTask(net, (4,), torch.float64)
    assert task.thread_safe and not task.channels_last
    params = task.initial(np.random.default_rng(0), 3)
    x, y = torch.randn(90, 4, dtype=torch.float64), torch.randint(3, (90,))
    batches = [Batch(x[part], y[part]) for part in (slice(0, 20), slice(20, 50), slice(50, 90))]
    found = []
    before = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(task.gradient(params, batches))
    torch.set_num_threads(before)
    for name, slope in found[0][1].items():
        assert torch.equal(slope, found[1][1][name])
    net.load_state_dict({name: value[0] for name, value in params.items()})
    for k, batch in enumerate(batches):
        loss = functional.cross_entropy(net(batch.inputs), batch.labels)
        wanted = torch.autograd.grad(loss, list(net.parameters()))
        for slope, expected in zip(found[0][1].values(), wanted, strict=True):
            torch.testing.assert_close(slope[k], expected, rtol=1e-10, atol=1e-13)
