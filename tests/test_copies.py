"""Which modules several threads may call, each a copy: those whose copy computes the same by
parameters of its own, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedmuon.tasks.copies import copied
from fedmuon.tasks.models import MODELS

SHARED = nn.Linear(4, 4)


def doubled(x: Tensor) -> Tensor:
    return 2 * x


class Plain(nn.Module):
    """As users write them: layers, a list of them, values, a function, a property."""

    act: Any
    names = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.act = nn.Linear(4, 4), 2.0, functional.relu
        self.also, self.more = [self.a, doubled], nn.Parameter(torch.ones(4))

    @property
    def halved(self) -> float:
        return self.scale / 2

    def forward(self, x: Tensor) -> Tensor:
        return doubled(self.act(self.a(x)) + self.also[0](x)) * self.halved + self.more


class Elsewhere(Plain):
    """Its layer is known by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.a = SHARED

    def forward(self, x: Tensor) -> Tensor:
        return SHARED(x) + super().forward(x)


class OfTheClass(Plain):
    shared = SHARED

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.a(x) + self.more


def with_closure() -> nn.Module:
    made = Plain()
    layer = made.a
    made.a.forward = lambda x: functional.linear(x, layer.weight)  # pyright: ignore
    return made


def with_default() -> nn.Module:
    made = Plain()
    made.act = lambda x, layer=made.a: layer(x)
    return made


def thrice(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3 * output


def with_hook() -> nn.Module:
    made = Plain()
    made.a.register_forward_hook(thrice)
    return made


def through_a_function() -> nn.Module:
    made = Plain()
    made.act = indirect
    return made


def indirect(x: Tensor) -> Tensor:
    return next(SHARED(x) for _ in range(1))


def with_an_object() -> nn.Module:
    made = Plain()
    made.act = Holder(made.a)
    return made


class Holder:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)


def with_a_view() -> nn.Module:
    """What cannot be copied at all."""
    made = Plain()
    made.view = made.a.weight[:2]  # pyright: ignore
    return made


UNSURE = (Elsewhere, OfTheClass, with_closure, with_default, with_hook, through_a_function,
          with_an_object, with_a_view)  # fmt: skip


@pytest.mark.parametrize("make", UNSURE)
def test_what_may_know_the_first_ones_layers_is_not_copied(make: Callable[[], nn.Module]) -> None:
    assert copied(make()) is None


def test_a_copy_computes_the_same_by_its_own() -> None:
    first, x = Plain(), torch.randn(3, 4)
    other = copied(first)
    assert other is not None
    held = {name: torch.randn_like(value) for name, value in first.named_parameters()}
    expected, stay = functional_call(first, held, (x,)), first(x)
    assert torch.equal(functional_call(other, held, (x,)), expected)
    other.a.weight.data.zero_()  # pyright: ignore
    assert torch.equal(first(x), stay) and not torch.equal(other(x), stay)


@pytest.mark.parametrize("name", MODELS)
def test_all_models_of_ours_are(name: str) -> None:
    shape = (784,) if name == "mlp" else (3, 32, 32)
    assert copied(MODELS[name](shape, 10)) is not None
