"""A perceptron with low-rank adapters. Workers of a cluster load this file by its path."""

import numpy as np
import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """A fixed matrix with low-rank adapters, named as in PEFT. B is normal times `scale`."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            self.lora_B.weight.copy_(scale * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def adapted(scale: float = 0.5, rank: int = 2) -> nn.Sequential:
    """A perceptron of which only adapters are trained. The fixed matrices are always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, last = nn.Linear(7, 4, bias=False), nn.Linear(4, 3, bias=False)
        return nn.Sequential(Adapted(first, rank, scale), nn.Tanh(), Adapted(last, rank, scale))


def bases(module: nn.Sequential) -> list[np.ndarray]:
    """The fixed matrices of `adapted`."""
    weights = [module.get_parameter(f"{layer}.base.weight") for layer in (0, 2)]
    return [weight.double().numpy() for weight in weights]


def fresh() -> nn.Sequential:
    """The same with B = 0, as LoRA starts."""
    return adapted(scale=0.0)


def wide() -> nn.Sequential:
    """The same with adapters of rank 3."""
    return adapted(scale=0.0, rank=3)
