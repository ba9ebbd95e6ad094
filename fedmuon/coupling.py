"""Draws that a stack's replicas share: runs that are compared must see one realization."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Normals(Protocol):
    """Such as NumPy's generators."""

    def standard_normal(self, shape: tuple[int, ...], /) -> np.ndarray:
        """N(0, 1) entries."""
        ...


def normal(rngs: Sequence[Normals], shape: tuple[int, ...]) -> Tensor:
    """Standard normal entries [K S, ...] in float64: one tensor a client, for all S replicas."""
    each = np.stack([rng.standard_normal(shape[1:]) for rng in rngs])
    return torch.from_numpy(each).repeat_interleave(shape[0] // len(rngs), 0)
