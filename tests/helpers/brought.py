"""Samples and a module as a user brings them, for a small run."""

from typing import Any

import numpy as np
import pytest
from torch import nn

import fedmuon
from fedmuon.core.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
Y = X @ [1.0, 2.0, 3.0] + 1
CLASSES = (Y > 1).astype(int)
SMALL = {
    "federation": {"clients": 3, "per-round": 2, "rounds": 2},
    "local": {"steps": 1, "recipe": "fedavg"},
    "engine": {"dtype": "float64", "device": "cpu"},
}


def tables(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: SMALL.get(name, {}) | changes.get(name, {}) for name in {*SMALL, *changes}}


def linear() -> nn.Module:
    return nn.Linear(3, 1)


DATA: dict[str, Any] = {"data": (X, Y)}
PLAIN = {**DATA, "task": linear}


def refused(mend: str, config: Any, **given: Any) -> None:
    """A run of these objects ends in one sentence, which says how to mend it."""
    with pytest.raises(InputError, match=mend) as said:
        fedmuon.run(config, **given)
    assert "\n" not in str(said.value)
