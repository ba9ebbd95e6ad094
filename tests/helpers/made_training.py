"""A small suite of training runs for tests."""

import csv
from pathlib import Path

from small_suites import TRAINING

from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies.training import Training

TINY = f"""{TRAINING}
[claims.time]
kind = "sooner"
better = "FedMuon, E = 1"
than = "FedAvg"
"""


def training(
    folder: Path, text: str = TINY, data: str | None = None, seeds: int | None = None, **asked: str
) -> Training:
    file = folder / "own.toml"
    file.write_text(text)
    found = kinds.find(str(file), data, asked.get("scale", "full"), {}, None, seeds)
    assert isinstance(found, Training)
    return found


def read(file: Path) -> list[dict[str, str]]:
    with file.open() as text:
        return list(csv.DictReader(text))
