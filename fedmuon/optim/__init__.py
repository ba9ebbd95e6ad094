"""The optimizers as torch.optim classes, for a training loop of your own.

import torch
from fedmuon.optim import MuonWithAux, param_groups_for_muon, routing_table

layers = [torch.nn.Linear(a, b) for a, b in ((20, 64), (64, 64), (64, 2))]
model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
print(routing_table(model))  # who takes which parameter, and why
optimizer = MuonWithAux(param_groups_for_muon(model), muon={"lr": 0.02}, aux={"lr": 3e-3})
inputs, labels = torch.randn(256, 20), torch.randint(2, (256,))
for _ in range(50):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
"""

from fedmuon.optim.auxiliary import MuonWithAux
from fedmuon.optim.muon import Muon
from fedmuon.optim.routing import Route, RoutingTable, param_groups_for_muon, routing_table

__all__ = [
    "Muon",
    "MuonWithAux",
    "Route",
    "RoutingTable",
    "param_groups_for_muon",
    "routing_table",
]
