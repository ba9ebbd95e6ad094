"""Your own module, loss and metric: `task.py [inline | ray]`."""

import sys

import torch

import fedmuon


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.last = torch.nn.Parameter(torch.eye(6) + 0.1)  # tied weights
        self.scale = torch.nn.Buffer(torch.tensor(0.5))  # buffers never change

    def forward(self, x):
        return self.scale * (x @ self.first).tanh() @ self.last.T


if __name__ == "__main__":
    config = {"local": {"lr": 0.01, "route": "all-matrices"}, "federation": {"rounds": 20}}
    config["engine"] = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
    worst, x = {"worst": lambda y, t: (y - t).abs().amax(1)}, torch.eye(6).repeat(40, 1)
    task = fedmuon.Task(Tied(), lambda y, t: (y - t).abs().mean(1), worst)
    print("worst error", fedmuon.run(config, data=(x, x), task=task).summary["worst"])
