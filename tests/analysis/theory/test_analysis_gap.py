"""The measured gap against 50 digits, and its intervals against simulated held-out sets."""

import math
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from fedmuon.analysis import label_shares, measured_gap
from fedmuon.analysis.theory.generalization import Interval
from fedmuon.analysis.theory.trajectories import Start, reach
from fedmuon.core.errors import InputError

mp.dps = 50
SHARES = np.array([[0.7, 0.3, 0.0], [0.1, 0.4, 0.5]])
WEIGHTS = np.array([0.6, 0.4])
TRAIN = np.array([0.2, 0.35])
CLIENTS = TRAIN, WEIGHTS, SHARES
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
    variances = [sum((value - mean) ** 2 for value in group) / (len(group) - 1)
                 for group, mean in zip(groups, means, strict=True)]  # fmt: skip
    empirical = sum(mpf(p) * mpf(f) for p, f in zip(WEIGHTS, TRAIN, strict=True))
    gap = sum(a * b for a, b in zip(w, means, strict=True)) - empirical
    failure, sizes = 1 - mpf(0.9), [9, 14, 5]
    squares = sum(a**2 / t for a, t in zip(w, sizes, strict=True))
    variance = sum(a**2 * v / t for a, v, t in zip(w, variances, sizes, strict=True))
    most = max(a / t for a, t in zip(w, sizes, strict=True))
    most_free = max(a / mp.sqrt(t * (t - 1)) for a, t in zip(w, sizes, strict=True))

    def hoeffding(failure: Any) -> Any:
        return mp.sqrt(mp.log(2 / failure) / 2 * squares)

    def bernstein(failure: Any) -> Any:
        log = mp.log(3 / failure)
        return mp.sqrt(2 * log * variance) + log * (2 * most_free + most / 3)

    half: dict[Interval, Any] = {
        "hoeffding": hoeffding(failure),
        "bernstein": bernstein(failure),
        "shorter": min(hoeffding(failure / 2), bernstein(failure / 2)),
        "normal": mp.sqrt(2) * mp.erfinv(1 - failure) * mp.sqrt(variance),
    }
    for interval, width in half.items():
        found = measured_gap(*CLIENTS, losses, labels, confidence=0.9, interval=interval)
        ends = (found.gap, gap), (found.low, gap - width), (found.high, gap + width)
        for value, wanted in ends:
            assert abs(mpf(value) - wanted) <= mpf(10) ** -12 * abs(wanted)
        assert math.isclose(found.population - found.empirical, found.gap, abs_tol=1e-15)


def coverage(interval: Interval, counts: tuple, confidence: float, spread: float) -> tuple:
    """How often the true gap is inside, and the mean width, over 400 held-out sets."""
    rng, inside, width = np.random.default_rng(1), 0, 0.0
    truth = float(WEIGHTS @ SHARES @ TRUE - WEIGHTS @ TRAIN)
    for _ in range(400):
        given = held_out(rng, counts, spread)
        found = measured_gap(*CLIENTS, *given, confidence=confidence, interval=interval)
        inside += found.low <= truth <= found.high
        width += found.high - found.low
    return inside / 400, width / 400


@pytest.mark.parametrize("interval", ["hoeffding", "bernstein", "shorter", "normal"])
def test_intervals_cover(interval: Interval) -> None:
    # The normal interval is approximate: 400 trials give its 0.9 a deviation of 0.015.
    floor = 0.9 if interval != "normal" else 0.9 - 0.05
    assert coverage(interval, (80, 120, 60), 0.9, 1.0)[0] >= floor


def test_intervals_are_not_idle() -> None:
    assert coverage("normal", (80, 120, 60), 0.6, 1.0)[0] < 0.75
    wide = coverage("hoeffding", (800,) * 3, 0.9, 0.02)[1]
    tight = coverage("bernstein", (800,) * 3, 0.9, 0.02)[1]
    assert tight < wide  # losses that vary little


RANGE = 0.02  # of losses around 0.85, as of a model that is near its start
EXACT: tuple[Interval, ...] = ("hoeffding", "bernstein", "shorter")


def covered(interval: Interval, part: float) -> tuple[float, float]:
    """How often an interval cut to that part of its width has F - F_hat, and how wide it is as it
    stands: losses are at an end of [0.84, 0.86] by tosses of a coin, the hardest law for it."""
    rng, inside, width = np.random.default_rng(3), 0, 0.0
    labels = np.repeat(np.arange(3), 3000)
    truth = 0.84 + RANGE / 2 - float(WEIGHTS @ TRAIN)
    for _ in range(300):
        losses = 0.84 + RANGE * rng.integers(0, 2, len(labels))
        found = measured_gap(*CLIENTS, losses, labels, interval=interval, loss_bound=RANGE)
        half = found.high - found.gap
        inside, width = inside + (abs(found.gap - truth) <= part * half), width + 2 * half
    return inside / 300, width / 300


@pytest.mark.parametrize("interval", EXACT)
def test_intervals_scale_with_the_range_and_half_of_one_is_too_little(interval: Interval) -> None:
    """Of coins they are 2.7 to 3.1 standard deviations long on each side: half of that has the
    truth in at most 0.88 of all trials, which is no 0.95."""
    (whole, width), (cut, _) = covered(interval, 1.0), covered(interval, 0.5)
    assert whole >= 0.95 and cut < 0.92
    assert width < 0.1 * 2 * math.sqrt(math.log(40) / 2 / 9000)  # the range 1 has at its shortest


def test_the_shorter_interval_is_near_the_better_of_both() -> None:
    """Many narrow losses have Bernstein's, few wide ones Hoeffding's; the union bound costs
    what ln(6/d) has more than ln(3/d) at most: 17% at d = 0.05."""
    for spread, count, better in ((0.02, 500, "bernstein"), (1.0, 20, "hoeffding")):
        wide = {one: coverage(one, (count,) * 3, 0.95, spread)[1] for one in EXACT}
        assert wide["shorter"] <= 1.18 * min(wide.values())
        assert min(wide["hoeffding"], wide["bernstein"]) == wide[better]
    alone = measured_gap(*CLIENTS, [0.1, 0.2, 0.3], [0, 1, 2], interval="shorter")
    assert math.isfinite(alone.high)  # of single samples only Hoeffding's is known


def test_a_ball_covers_the_gap_of_models_that_depend_on_their_samples() -> None:
    """Every model is a step from 0 along its own samples' gradient, F is enumerated over the
    population: the proved range of the ball is one of all losses there, and its interval covers."""
    rng, step, classes = np.random.default_rng(4), 0.05, 3
    points = rng.standard_normal((60, 4))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    labels = np.arange(60) % classes
    ball = reach(Start(classes), np.array([step]), 0.0, lambda s: 1.0)
    top, inside, width = ball.last.loss_bound, 0, 0.0
    for _ in range(200):
        mine, other = rng.integers(0, 60, 30), rng.integers(0, 60, 240)
        shares = np.bincount(labels[mine], minlength=classes) / 30
        slope = points[mine].T @ (1 / classes - np.eye(classes)[labels[mine]])
        left, _, right = np.linalg.svd(slope, full_matrices=False)
        scores = np.exp(points @ (-step * left @ right))
        losses = 1 - scores[np.arange(60), labels] / scores.sum(1)
        assert np.ptp(losses) <= top < 0.1
        per_class = np.array([losses[labels == y].mean() for y in range(classes)])
        truth = float(shares @ per_class) - losses[mine].mean()
        found = measured_gap(
            [losses[mine].mean()], [1.0], [shares], losses[other], labels[other],
            interval="shorter", loss_bound=top,
        )  # fmt: skip
        inside, width = inside + (found.low <= truth <= found.high), width + found.high - found.low
    assert inside >= 190 and width / 200 < 0.2 * math.sqrt(2 * math.log(40) / 240)


def test_the_clients_weights_matter() -> None:
    """Negative control: the plain held-out mean measures another population."""
    rng = np.random.default_rng(2)
    losses, labels = held_out(rng, (200, 4000, 200))
    found = measured_gap(*CLIENTS, losses, labels)
    truth = float(WEIGHTS @ SHARES @ TRUE - WEIGHTS @ TRAIN)
    assert found.low <= truth <= found.high
    assert not found.low <= losses.mean() - WEIGHTS @ TRAIN <= found.high


def test_label_shares() -> None:
    shares = label_shares([0, 1, 1, 2, 2, 2], [0, 0, 0, 1, 1, 0], 2, 3)
    np.testing.assert_allclose(shares, [[0.25, 0.5, 0.25], [0, 0, 1]])
    with pytest.raises(InputError, match="has no samples"):
        label_shares([0], [0], 2, 3)


@pytest.mark.parametrize("change", [
    {"weights": [0.5, 0.4]}, {"shares": SHARES[:1]}, {"shares": SHARES * 2},
    {"test_labels": [0, 1]}, {"test_labels": [0, 1, 1]},  # no sample of class 2
    {"test_losses": [0.1, 1.2, 0.3]}, {"loss_bound": 0.1}, {"test_losses": [0.1, math.nan, 0.3]},
    {"confidence": 1.0}, {"interval": "guess"},
    {"interval": "bernstein"},  # a single sample of a class has no variance
])  # fmt: skip
def test_bad_input_is_refused(change: dict) -> None:
    good = {"train_losses": TRAIN, "weights": WEIGHTS, "shares": SHARES,
            "test_losses": [0.1, 0.2, 0.3], "test_labels": [0, 1, 2]}  # fmt: skip
    measured_gap(**good)
    with pytest.raises(InputError):
        measured_gap(**{**good, **change})
