"""Which samples are for training and which for testing."""

import numpy as np

from fedmuon.errors import InputError
from fedmuon.randomness import Draw, generator


def split(
    source_labels: np.ndarray, official_test: int | None, train: int, test: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint indices [train] and [test] into the source's order, in random order.

    If the source has an official test part and both numbers fit, train samples come from before it
    and test samples from it; otherwise both come from all samples together. A number of 0 means
    all that remain (both 0 need an official test part). With the same seed and the same kind of
    split, a larger number extends the smaller draw and leaves the other part alone.
    """
    n = len(source_labels)
    before, after = _parts(n, official_test, train, test)
    shared = before is after
    taken = train or len(before) - (test if shared else 0)
    held = test or len(after) - (train if shared else 0)
    if min(taken, held) < 1 or (shared and taken + held > n):
        raise InputError(
            f"[data] train = {train} and test = {test} do not fit in {n} samples: lower one of them"
        )
    first = generator(seed, Draw.SPLIT).permutation(before)
    last = first[::-1] if shared else generator(seed, Draw.SPLIT, block=1).permutation(after)
    return first[:taken].copy(), last[:held].copy()


def _parts(
    n: int, official_test: int | None, train: int, test: int
) -> tuple[np.ndarray, np.ndarray]:
    """Indices to draw the train and the test samples from; one array if they share it."""
    if min(train, test) < 0:
        raise InputError(f"[data] train = {train} or test = {test} is negative: use 0 or more")
    everything = np.arange(n)
    if official_test is not None and train <= official_test and test <= n - official_test:
        return everything[:official_test], everything[official_test:]
    if not (train or test):
        raise InputError("[data] train and test are both 0 and the source has no split: give one")
    return everything, everything
