"""A module's tensors for a trial call that shows shapes alone."""

import torch
from torch import Tensor, nn

SMALL = 1 << 22  # parameters


def stand_ins(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, its own or zeros; of a large module on `meta`, where nothing is
    computed. To work there loads torch's compiler, which takes a process a second or two."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    large = sum(value.numel() for value in own.values()) > SMALL
    return {name: _stand_in(value.detach(), large) for name, value in own.items()}


def inputs_like(held: dict[str, Tensor], shape: tuple[int, ...], whole: bool = False) -> Tensor:
    """Samples to call it with, `whole` numbers or like the parameters."""
    first = next(iter(held.values()))
    return torch.zeros(shape, dtype=torch.long if whole else first.dtype, device=first.device)


def _stand_in(value: Tensor, large: bool) -> Tensor:
    if large:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype)
    return value.cpu().clone()


def on_meta(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters, which ask for gradients, and buffers, without numbers."""
    params = {
        name: torch.empty_like(value, device="meta").requires_grad_()
        for name, value in module.named_parameters()
    }
    return params | {name: value.to("meta") for name, value in module.named_buffers()}
