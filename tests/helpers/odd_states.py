"""Link states of forty odd shapes, and a recipe that returns one of each."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fedmuon
from fedmuon import links
from fedmuon.optim.chain import Context

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "one number": {"norm": (1,)},
    "no axis": {"norm": ()},
    "two": {"a": (1,), "b": (3, 2)},
    "long": {"v": (1, 1, 1, 1, 2)},
    "empty tensor": {"v": (0,)},
    "nothing": {},
    "name with a dot": {"a.b": (2,)},
    "model": {},  # replaced by the shapes of the model
}
ODD = [
    *SHAPES.values(),
    *({"t": (n,)} for n in range(2, 10)),
    *({"t": (n, m)} for n in (1, 2, 5) for m in (1, 4)),
    *({"t": (2,) * n} for n in range(3, 7)),
    *({f"t{k}": (k, 1) for k in range(n)} for n in range(1, 6)),
    {"model": (1,)}, {"": (1,)}, {"ä/ö": (2,)}, {"a b": (1,)}, {"weight": (7,)}, {"w" * 90: (1,)},
    {"X": (3,)}, {"norm": (2, 0)}, {"x.weight": (1, 2)},
]  # fmt: skip


def size(tree: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([one.flatten(1).square().sum(1) for one in tree.values()]).sum(0).sqrt()


def measured(
    shapes: Mapping[str, tuple[int, ...]], late: bool = False, name: str = "measured"
) -> fedmuon.Link:
    """A link that stores the norm of the gradient in tensors of these shapes."""

    def filled(params: Mapping[str, Tensor], value: Tensor) -> dict[str, Tensor]:
        like = shapes or {}
        return {name: value.view(-1, *[1] * len(one)).expand(-1, *one).clone()
                for name, one in like.items()}  # fmt: skip

    def init(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {} if late else filled(params, 0 * size(params))

    def update(direction: Any, state: Any, context: Context) -> Any:
        return direction, filled(direction, size(direction))

    return fedmuon.Link(name, init, update)


def every(lr: float) -> fedmuon.Recipe:
    """SGD whose server divides its step by 1 + the mean over all shapes of the clients' norms."""
    states = {f"measured-{k}": shapes for k, shapes in enumerate(ODD)}

    def rule(old: Any, mean: Any, states: Any) -> Any:
        values = [
            tensor.reshape(len(tensor), -1).mean(1)
            for state in states.values()
            for tensor in state.values()
            if tensor.numel()
        ]
        scale = 1 / (1 + torch.stack(values).mean(0))
        model = {name: param + (mean[name] - param) * scale.view(-1, *[1] * (param.ndim - 1))
                 for name, param in old.items()}  # fmt: skip
        return model, states

    middle = (measured(shapes, name=name) for name, shapes in states.items())
    chain = fedmuon.Chain((links.gradient(), *middle, links.descend(lr)))
    return fedmuon.Recipe(chain, rule, returned=tuple(states))
