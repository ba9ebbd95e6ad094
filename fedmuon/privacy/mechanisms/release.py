"""What is released of clipped sums: they and their noise, of real numbers or on a lattice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedmuon.core.device import finite, sent
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.privacy.mechanisms import lattice
from fedmuon.privacy.noise import Normal, Streams, words_of
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.per_example.clipping import Clipping, slack


@dataclass(frozen=True)
class Released:
    """A noisy gradient [K S, ...]: the only thing that later links of a private chain may see.

    What is computed from it, and from what was released before, is post-processing. Where clipping
    follows a quantile, `kept` [K] is the noisy share of contributions that was not clipped.
    """

    gradient: Params
    kept: Tensor | None = None


def release(
    sums: Params, clipping: Clipping, noise_multiplier: float, expected_lot: float, drawn: Normal
) -> Released:
    """(sum + N(0, (sigma C')^2)) / expected lot size, block by block; C' = C (1 + slack), so that
    the multiplier sigma holds for norms as they are computed (`clipping.py`).

    The divisor is the *expected* size of a lot, which is public; the size that was drawn is not.
    An empty lot's sums are zero and release noise like any other's. All m blocks are one release
    of sensitivity C sqrt(m), whose multiplier is therefore sigma / sqrt(m).
    """
    _require_sound(clipping, noise_multiplier, expected_lot)
    if noise_multiplier == 0:
        return Released({name: value / expected_lot for name, value in sums.items()})
    scale, found = noise_multiplier * clipping.bound, Params()
    for block, (name, value) in enumerate(sums.items()):
        entries = sent(drawn(tuple(value.shape), block), value.device, value.dtype)
        found[name] = (value + scale * (1 + slack(value.dtype)) * entries) / expected_lot
    return Released(found)


def release_on_grid(
    sums: Params, clipping: Clipping, noise_multiplier: float, expected_lot: float, streams: Streams
) -> Released:
    """The same on a lattice, with noise that is exact to the last bit: `lattice.py`
    has the proof."""
    _require_sound(clipping, noise_multiplier, expected_lot)
    reach = max(clipping.bound * (1 + slack(value.dtype)) for value in sums.values())
    step, found = lattice.noisy(
        sums, reach, noise_multiplier, lambda block: [words_of(one) for one in streams(block)]
    )
    per = step / expected_lot
    return Released({name: (found[name].mul_(per)).to(sums[name].dtype) for name in sums})


def _require_sound(clipping: Clipping, noise: float, lot: float) -> None:
    if noise < 0 or not lot > 0:
        raise InputError(
            f"noise multiplier {noise} must not be negative and the expected lot size {lot} must "
            "be positive"
        )
    if noise and math.isinf(clipping.bound):
        raise InputError("noise needs a finite clipping bound: set one, or noise = 0")


def clipped_sums(
    task: Task, points: Points, batches: Sequence[Batch], clipping: Clipping
) -> Params:
    """Of clipped gradients, at a model that is finite."""
    for _, params in points:
        require_finite(params, "the model is")
    return task.clipped(points, batches, clipping)[1]


def require_finite(public: Params, what: str) -> None:
    """Stop at numbers that are not finite, where all may see them: a stop at a lot's own loss would
    tell of its examples. A sum, which one such number spoils, takes a fifth of a look at each."""
    if not all(finite(value.sum()) for value in public.values()):
        raise NonFinite(f"{what} not finite in a private step: lower [local] lr")
