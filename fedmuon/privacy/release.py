"""The Gaussian mechanism of one step: what leaves the data, and nothing else does (000 (4))."""

import math
from dataclasses import dataclass

from fedmuon.errors import InputError
from fedmuon.privacy.noise import Normal
from fedmuon.tasks.base import Params
from fedmuon.tasks.clipping import Clipping, slack


@dataclass(frozen=True)
class Released:
    """A noisy gradient [K S, ...]: the only thing that later links of a private chain may see.

    What is computed from it, and from what was released before, is post-processing.
    """

    gradient: Params


def release(
    sums: Params,
    clipping: Clipping,
    noise_multiplier: float,
    expected_lot: float,
    normal: Normal,
) -> Released:
    """(sum + N(0, (sigma C')^2)) / expected lot size, block by block; C' = C (1 + slack), so that
    the multiplier sigma holds for norms as they are computed (`fedmuon.tasks.clipping`).

    The divisor is the *expected* size of a lot, which is public; the size that was drawn is not.
    An empty lot's sums are zero and release noise like any other's. All m blocks are one release
    of sensitivity C sqrt(m), whose multiplier is therefore sigma / sqrt(m).
    """
    if noise_multiplier < 0 or not expected_lot > 0:
        raise InputError(
            f"noise multiplier {noise_multiplier} must not be negative and the expected lot size "
            f"{expected_lot} must be positive"
        )
    if noise_multiplier == 0:
        return Released({name: value / expected_lot for name, value in sums.items()})
    if math.isinf(clipping.bound):
        raise InputError("noise needs a finite clipping bound: set one, or noise = 0")
    scale, found = noise_multiplier * clipping.bound, Params()
    for block, (name, value) in enumerate(sums.items()):
        drawn = normal(tuple(value.shape), block).to(value.device, value.dtype)
        found[name] = (value + scale * (1 + slack(value.dtype)) * drawn) / expected_lot
    return Released(found)
