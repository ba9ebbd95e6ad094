"""Whether what a network does with a sample depends on the other samples of its batch.

If it does, no bound on single gradients bounds what one example moves: they are no example's own.
"""

import torch
from torch import Tensor, nn

from fedmuon.errors import InputError
from fedmuon.tasks.ghost import record

ROWS = 3
ROUNDING = 1024  # eps of the largest number, by which kept rows may change
KEPT = ((0,), (1, 2))  # rows that stay while the others are replaced: 0 on the others, they on 0


def refuse_mixing(module: nn.Module, layers: dict[str, nn.Module], shape: tuple[int, ...]) -> None:
    """Refuse a network that mixes samples: tried with samples of zeros and ones (tokens, too) and
    random parameters. What layers read, their slopes, and the outputs of the kept rows must stay.
    """
    params = _numbers(module)
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 2, (ROWS, *shape), generator=rng).to(_dtype(module))
    seen = _seen(module, layers, params, inputs)
    for kept in KEPT:
        changed = 1 - inputs
        changed[list(kept)] = inputs[list(kept)]
        again = _seen(module, layers, params, changed)
        if any(_differ(a, b, list(kept)) for a, b in zip(seen, again, strict=True)):
            raise InputError(
                f"the network ({type(module).__name__}) computes with a sample what changes with "
                "the others of its batch (or from call to call), so that no clipping bounds one "
                "example: normalize each sample by itself, as GroupNorm or LayerNorm does"
            )


def _seen(
    module: nn.Module, layers: dict[str, nn.Module], params: dict[str, Tensor], inputs: Tensor
) -> list[Tensor]:
    """Outputs, and all reads and slopes."""
    outputs: list[Tensor] = []

    def loss_of(given: Tensor) -> Tensor:
        outputs.append(given.detach())
        return given.flatten(1).sin().sum(1)

    _, found = record(module, layers, params, inputs, loss_of)
    uses = [use for each in found.seen.values() for use in each]
    slopes = [use.slope for use in uses if use.slope is not None]
    return [*outputs, *(use.read for use in uses), *slopes]


def _differ(one: Tensor, other: Tensor, kept: list[int]) -> bool:
    """Beyond rounding."""
    if one.shape != other.shape:
        return True
    a, b = one[kept], other[kept]
    if not a.is_floating_point():
        return not torch.equal(a, b)
    peak = float(a.nan_to_num(0.0).abs().max()) if a.numel() else 0.0
    return not torch.allclose(
        a, b, rtol=0.0, atol=ROUNDING * torch.finfo(a.dtype).eps * peak, equal_nan=True
    )


def _numbers(module: nn.Module) -> dict[str, Tensor]:
    """Random parameters, and the module's buffers (ones for those on `meta`).

    All entries are taken from one short row of draws, entry (i, j, ...) its (i + j + ...)-th, so
    that a large network needs no memory of its own.
    """
    rng, found = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for name, value in module.named_parameters():
        shape = tuple(value.shape)
        draws = torch.rand(1 + sum(size - 1 for size in shape), generator=rng).to(value.dtype)
        scale = (3 / value[0].numel()) ** 0.5 if len(shape) > 1 else 0.0  # unit variance of outputs
        draws = scale * (2 * draws - 1) if scale else 0.5 + draws  # biases and norms' scales near 1
        found[name] = draws.as_strided(shape, [1] * len(shape))
    for name, value in module.named_buffers():
        found[name] = torch.ones_like(value, device="cpu") if value.is_meta else value.cpu()
    return found


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
