"""What every layer of a network read, and the loss's slope in what it gave, for each example.

From these two alone follow all per-example gradients, their norms and their weighted sums
("book-keeping", Bu et al. 2023): one forward pass, one backward pass without weight gradients.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedmuon.tasks.base import Params
from fedmuon.tasks.ghost_layers import entries, known

Hook = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]


@dataclass
class Seen:
    """One use of a layer: what it read [n, ...], and the slope in its output [n, ...]."""

    read: Tensor
    slope: Tensor | None = None

    def keep(self, slope: Tensor) -> None:
        """Take down the slope; a hook."""
        self.slope = slope


@dataclass
class Record:
    """All uses of each layer, by the layer's name, in order."""

    layers: dict[str, nn.Module]
    seen: dict[str, list[Seen]] = field(default_factory=dict)
    root: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))

    def hook(self, name: str) -> Hook:
        """Notes a use; the graph begins at the outputs of the first layers."""

        def note(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            use = Seen(args[0].detach())
            if output._is_view():
                output = output.clone()  # a view's hook is lost where it is overwritten
            if not output.requires_grad:
                output = _Rooted.apply(output, self.root)
            output.register_hook(use.keep)
            self.seen.setdefault(name, []).append(use)
            return output

        return note


class _Rooted(torch.autograd.Function):
    """The identity, as a function of `root`: output and root need no gradient of their own.

    Not a view, so that an activation may still overwrite it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, None]:
        return None, None


def record(
    module: nn.Module,
    layers: dict[str, nn.Module],
    params: Params,
    inputs: Tensor,
    loss_of: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Record]:
    """Each example's loss [n] and what the layers saw; `params` need no gradient."""
    found = Record(layers)
    with torch.enable_grad(), _hooked(layers, found.hook):
        losses = loss_of(functional_call(module, params, (inputs,)))
    torch.autograd.grad(losses.sum(), found.root, allow_unused=True)
    return losses.detach(), found


@dataclass(frozen=True)
class Ghosts:
    """The layers that own parameters, by name, and how many numbers they hold for a sample.

    `tied` says of a linear layer's weight which embedding it is.
    """

    layers: dict[str, nn.Module]
    entries: int
    tied: dict[str, str] = field(default_factory=dict)


def ghostly(module: nn.Module, shape: tuple[int, ...]) -> Ghosts | None:
    """The layers that own parameters if their records tell all, else None.

    They do where every owner has a rule and is called with the samples first, nothing uses a
    parameter but its layer, nothing overwrites what a layer read, and every output has a slope.
    Tried on torch's `meta` device, where nothing is computed, with two numbers of samples.
    """
    owners = {
        name: layer
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
    }
    tied = _ties(owners)
    if not all(map(known, owners.values())) or tied is None:
        return None
    looks = [_look(module, owners, (rows, *shape)) for rows in (2, 3)]
    if not all(look.tells_all for look in looks):
        return None
    _, found = record(module, owners, _meta(module), _like((2, *shape)), lambda out: out.flatten(1))
    if any(use.slope is None for uses in found.seen.values() for use in uses):
        return None
    return Ghosts(owners, looks[1].entries - looks[0].entries, tied)


def _ties(owners: dict[str, nn.Module]) -> dict[str, str] | None:
    """Linear layers' weights that are an embedding's too; None where others are shared."""
    first: dict[int, tuple[str, nn.Module]] = {}
    tied: dict[str, str] = {}
    for name, owner in owners.items():
        for key, param in owner.named_parameters(recurse=False):
            whole = f"{name}.{key}" if name else key
            other, at = first.setdefault(id(param), (whole, owner))
            if other == whole:
                continue
            pair = isinstance(at, nn.Embedding) and isinstance(owner, nn.Linear)
            if not pair or other in tied.values():
                return None
            tied[whole] = other
    return tied


@dataclass
class _Look:
    """What one call on the meta device showed."""

    rows: int
    tells_all: bool = True
    entries: int = 0
    called: set[str] = field(default_factory=set)
    reads: list[tuple[Tensor, int]] = field(default_factory=list)

    def hook(self, name: str) -> Hook:
        def look(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            self.called.add(name)
            self.tells_all &= len(args) == 1 and len(args[0]) == len(output) == self.rows
            self.reads.extend((read, read._version) for read in args)
            self.entries += entries(layer, args[0], output) if self.tells_all else 0
            return output.detach()  # what still needs a gradient used a parameter elsewhere

        return look


def _look(module: nn.Module, owners: dict[str, nn.Module], shape: tuple[int, ...]) -> _Look:
    """A call with shape[0] samples."""
    meta, found = _meta(module), _Look(shape[0])
    for name, _ in module.named_parameters():
        meta[name].requires_grad_()
    with _hooked(owners, found.hook):
        outputs = functional_call(module, meta, (_like(shape),))
    untouched = all(read._version == version for read, version in found.reads)
    found.tells_all &= found.called == set(owners) and untouched and not outputs.requires_grad
    return found


def _meta(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters and buffers, without numbers."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: _like(tuple(value.shape), value.dtype) for name, value in own.items()}


def _like(shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextlib.contextmanager
def _hooked(layers: dict[str, nn.Module], hook: Callable[[str], Hook]) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
