"""What one run with canaries shows: at 000's setting, and in many repetitions of a small one.

    python -m benchmarks.one_run [--repetitions 50] [--canaries 40000]

000's E2E setting: N = 42043, lots of 1024, 410 steps, sigma = 2.3395, 49 matrices, delta = 8e-6,
which prints 7.985 and is 61.98 jointly; real DP-Muon steps of small matrices. And the share of
repetitions of smaller runs, one of them with a lot that is all of the data, whose bounds exceed
what their ledgers certify: at most 5% may, each bound has a confidence of 95%.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedmuon import config as tables
from fedmuon.experiments.laboratory import one_run
from fedmuon.own import Own
from fedmuon.privacy.accounting import epsilon

WIDTH, MATRICES = 64, 49
PUBLISHED = {"noise": 2.3395, "lot": 1024.0, "delta": 8e-6}
E2E = {
    "data": {"name": "synthetic", "train": 42043, "test": 100, "dimension": WIDTH,
             "classes": WIDTH},
    "federation": {"clients": 1, "per-round": 1, "rounds": 5},
    "task": {"name": "given"},
    "local": {"recipe": "dp-muon", "steps": 82, "lr": 0.01, "route": "all-matrices"},
    "orthogonalizer": {"name": "newton-schulz"},
    "privacy": PUBLISHED,
    "output": {"evaluate-every": 5},
}  # fmt: skip
SMALL = {
    "data": {"name": "synthetic", "train": 400, "test": 10, "dimension": 200},
    "federation": {"clients": 2, "per-round": 2, "rounds": 2},
    "local": {"recipe": "dp-muon", "steps": 2, "lr": 0.1},
    "privacy": {"noise": 0.5, "lot": 40.0, "delta": 1e-5},
}
WHOLE = SMALL | {
    "federation": {"clients": 1, "per-round": 1, "rounds": 1},
    "local": {"recipe": "dp-muon", "steps": 1, "lr": 0.1},
    "privacy": {"noise": 1.0, "lot": 400.0, "delta": 1e-5},
}


class Sum(nn.Module):
    """Logits (W_1 + ... + W_m) x: m blocks of 000's table, small enough for a processor."""

    def __init__(self) -> None:
        """Linear layers without biases."""
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES))
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """The same input for all."""
        found = inputs.new_zeros(len(inputs), WIDTH)
        for layer in self.layers:
            found = found + layer(inputs)
        return found


def audited(settings: dict[str, Any], canaries: int, task: nn.Module | None = None) -> Any:
    """One run of the settings in a folder that is thrown away."""
    chosen = tables.parse(settings).beside(Own(task=task))
    with tempfile.TemporaryDirectory() as folder:
        return one_run.execute(chosen, Path(folder) / "run", canaries)


def repeated(settings: dict[str, Any], canaries: int, times: int) -> dict[str, Any]:
    """How often each bound exceeds the certified epsilon, and what it is at most and on average."""
    start, names = perf_counter(), ("binomial", "trade_off", "declared")
    every = [audited(settings, canaries) for _ in range(times)]
    values = {name: [one[name] for one in every] for name in names}
    above = {name: sum(one[name] > one["epsilon"] for one in every) for name in names}
    return {
        "repetitions": times, "certified": every[0]["epsilon"], "above": above,
        "mean": {name: float(np.mean(one)) for name, one in values.items()},
        "most": {name: max(one) for name, one in values.items()},
        "seconds": perf_counter() - start,
    }  # fmt: skip


def main() -> None:
    """Print what was found, one JSON object a line."""
    options = argparse.ArgumentParser()
    options.add_argument("--repetitions", type=int, default=50)
    options.add_argument("--canaries", type=int, default=40_000)
    given = options.parse_args()
    for name, settings in (("small", SMALL), ("whole lots", WHOLE)):
        print(json.dumps({name: repeated(settings, 300, given.repetitions)}), flush=True)
    found = audited(E2E, given.canaries, Sum())
    noise, lot, delta = PUBLISHED.values()
    printed = epsilon(noise, lot / 42043, 410, delta, MATRICES, "per-release").rdp
    print(json.dumps({"E2E": found | {"printed": printed}}), flush=True)


if __name__ == "__main__":
    main()
