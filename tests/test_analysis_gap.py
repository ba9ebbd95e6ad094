"""The measured gap against 50 digits, and its intervals against simulated held-out sets."""

import math
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from fedmuon.analysis import label_shares, measured_gap
from fedmuon.analysis.theory.gap import Interval
from fedmuon.errors import InputError

mp.dps = 50
SHARES = np.array([[0.7, 0.3, 0.0], [0.1, 0.4, 0.5]])
WEIGHTS = np.array([0.6, 0.4])
TRAIN = np.array([0.2, 0.35])
TRUE = np.array([0.15, 0.5, 0.3])  # E[loss | y]


def held_out(rng: np.random.Generator, counts: tuple[int, ...], spread: float = 1.0):
    """Beta losses of mean TRUE[y], rarer or narrower with a smaller spread."""
    labels = np.repeat(np.arange(3), counts)
    strength = 2.0 / spread
    return rng.beta(strength * TRUE[labels], strength * (1 - TRUE[labels])), labels


def test_the_gap_to_twelve_digits() -> None:
    losses, labels = held_out(np.random.default_rng(0), (9, 14, 5))
    w = [sum(mpf(p) * mpf(q[y]) for p, q in zip(WEIGHTS, SHARES, strict=True)) for y in range(3)]
    groups = [[mpf(value) for value in losses[labels == y]] for y in range(3)]
    means = [sum(group) / len(group) for group in groups]
    variances = [
        sum((value - mean) ** 2 for value in group) / (len(group) - 1)
        for group, mean in zip(groups, means, strict=True)
    ]
    empirical = sum(mpf(p) * mpf(f) for p, f in zip(WEIGHTS, TRAIN, strict=True))
    gap = sum(a * b for a, b in zip(w, means, strict=True)) - empirical
    failure, sizes = 1 - mpf(0.9), [9, 14, 5]
    squares = sum(a**2 / t for a, t in zip(w, sizes, strict=True))
    log = mp.log(12 / failure)
    half: dict[Interval, Any] = {
        "hoeffding": mp.sqrt(mp.log(2 / failure) / 2 * squares),
        "bernstein": sum(
            w[y] * (mp.sqrt(2 * variances[y] * log / sizes[y]) + 7 * log / (3 * (sizes[y] - 1)))
            for y in range(3)
        ),
        "normal": mp.sqrt(2)
        * mp.erfinv(1 - failure)
        * mp.sqrt(sum(w[y] ** 2 * variances[y] / sizes[y] for y in range(3))),
    }
    for interval, width in half.items():
        found = measured_gap(
            TRAIN, WEIGHTS, SHARES, losses, labels, confidence=0.9, interval=interval
        )
        for value, wanted in (
            (found.gap, gap),
            (found.low, gap - width),
            (found.high, gap + width),
        ):
            assert abs(mpf(value) - wanted) <= mpf(10) ** -12 * abs(wanted)
        assert math.isclose(found.population - found.empirical, found.gap, abs_tol=1e-15)


def coverage(
    interval: Interval, counts: tuple[int, ...], confidence: float, spread: float
) -> tuple:
    """How often the true gap is inside, and the mean width, over 400 held-out sets."""
    rng, inside, width = np.random.default_rng(1), 0, 0.0
    truth = float(WEIGHTS @ SHARES @ TRUE - WEIGHTS @ TRAIN)
    for _ in range(400):
        found = measured_gap(
            TRAIN,
            WEIGHTS,
            SHARES,
            *held_out(rng, counts, spread),
            confidence=confidence,
            interval=interval,
        )
        inside += found.low <= truth <= found.high
        width += found.high - found.low
    return inside / 400, width / 400


@pytest.mark.parametrize("interval", ["hoeffding", "bernstein", "normal"])
def test_intervals_cover(interval: Interval) -> None:
    # The normal interval is approximate: 400 trials give its 0.9 a deviation of 0.015.
    floor = 0.9 if interval != "normal" else 0.9 - 0.05
    assert coverage(interval, (80, 120, 60), 0.9, 1.0)[0] >= floor


def test_intervals_are_not_idle() -> None:
    assert coverage("normal", (80, 120, 60), 0.6, 1.0)[0] < 0.75
    wide = coverage("hoeffding", (800,) * 3, 0.9, 0.02)[1]
    tight = coverage("bernstein", (800,) * 3, 0.9, 0.02)[1]
    assert tight < wide  # losses that vary little


def test_the_clients_weights_matter() -> None:
    """Negative control: the plain held-out mean measures another population."""
    rng = np.random.default_rng(2)
    losses, labels = held_out(rng, (200, 4000, 200))
    found = measured_gap(TRAIN, WEIGHTS, SHARES, losses, labels)
    truth = float(WEIGHTS @ SHARES @ TRUE - WEIGHTS @ TRAIN)
    assert found.low <= truth <= found.high
    assert not found.low <= losses.mean() - WEIGHTS @ TRAIN <= found.high


def test_label_shares() -> None:
    shares = label_shares([0, 1, 1, 2, 2, 2], [0, 0, 0, 1, 1, 0], 2, 3)
    np.testing.assert_allclose(shares, [[0.25, 0.5, 0.25], [0, 0, 1]])
    with pytest.raises(InputError, match="without samples"):
        label_shares([0], [0], 2, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": [0.5, 0.4]},
        {"shares": SHARES[:1]},
        {"shares": SHARES * 2},
        {"test_labels": [0, 1]},
        {"test_labels": [0, 1, 1]},  # no sample of class 2
        {"test_losses": [0.1, 1.2, 0.3]},
        {"test_losses": [0.1, math.nan, 0.3]},
        {"confidence": 1.0},
        {"interval": "bernstein"},  # one sample a class has no variance
        {"interval": "guess"},
    ],
)
def test_bad_input_is_refused(change: dict) -> None:
    good = {
        "train_losses": TRAIN,
        "weights": WEIGHTS,
        "shares": SHARES,
        "test_losses": [0.1, 0.2, 0.3],
        "test_labels": [0, 1, 2],
    }
    measured_gap(**good)
    with pytest.raises(InputError):
        measured_gap(**{**good, **change})
