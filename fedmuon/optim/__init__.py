"""torch optimizers for your own training loop: Muon, private optimizers, and parameter routing.

import torch
from fedmuon.optim import MuonWithAux, param_groups_for_muon, routing_table

ends = torch.nn.Conv2d(1, 16, 3, 2), torch.nn.Linear(1152, 10)
hidden = torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, 2), torch.nn.ReLU(), torch.nn.Flatten()
model = torch.nn.Sequential(ends[0], *hidden, ends[1])
print(routing_table(model))  # the optimizer of each parameter, and the reason
optimizer = MuonWithAux(param_groups_for_muon(model), muon={"lr": 0.02}, aux={"lr": 3e-3})
inputs, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmuon.optim.lora_muon import LoRAMuon
    from fedmuon.optim.muon import Muon, MuonWithAux
    from fedmuon.optim.private import DPSGD, DPAdam, DPMuon, DPMuonBC, DPMuonIM, Lot, Private
    from fedmuon.optim.routing import (
        Route,
        RoutingTable,
        groups,
        param_groups_for_muon,
        routing_table,
    )

_MODULES = {
    "lora_muon": ("LoRAMuon",),
    "muon": ("Muon", "MuonWithAux"),
    "private": ("DPSGD", "DPAdam", "DPMuon", "DPMuonBC", "DPMuonIM", "Lot", "Private"),
    "routing": ("Route", "RoutingTable", "groups", "param_groups_for_muon", "routing_table"),
}

__all__ = [
    "DPSGD",
    "DPAdam",
    "DPMuon",
    "DPMuonBC",
    "DPMuonIM",
    "LoRAMuon",
    "Lot",
    "Muon",
    "MuonWithAux",
    "Private",
    "Route",
    "RoutingTable",
    "groups",
    "param_groups_for_muon",
    "routing_table",
]


def __getattr__(name: str) -> Any:
    """Import the public object with this name at its first use.

    The import of schedules alone therefore does not load torch.
    """
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
