"""A small suite of training runs for tests."""

import csv
from pathlib import Path

from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies.training.cells import Training

TINY = """
kind = "training"
title = "Two recipes"
data = "digits"
seeds = [0, 1]
source = "a table"
note = "A note."

[base.federation]
clients = 5
per-round = 2
rounds = 5

[base.local]
steps = 1

[base.engine]
dtype = "float64"
device = "cpu"

[base.output]
evaluate-every = 2
checkpoint-every = 1

[variants."FedMuon, E = 1".local]
recipe = "fedmuon"
lr = 0.5

[variants.FedAvg.local]
recipe = "fedavg"
lr = 0.5

[claims.loss]
better = "FedMuon, E = 1"
than = "FedAvg"

[claims.reversed]
measure = "accuracy"
better = "FedAvg"
than = "FedMuon, E = 1"

[claims.time]
kind = "sooner"
better = "FedMuon, E = 1"
than = "FedAvg"

[published.digits.FedAvg]
train_loss = 0.25

[for.mnist5k.variants.FedAvg.local]
lr = 0.25

[small]
seeds = [0]
"""


def training(folder: Path, text: str = TINY, data: str | None = None, **asked: str) -> Training:
    file = folder / "own.toml"
    file.write_text(text)
    found = kinds.find(str(file), data, asked.get("scale", "full"), {})
    assert isinstance(found, Training)
    return found


def read(file: Path) -> list[dict[str, str]]:
    with file.open() as text:
        return list(csv.DictReader(text))
