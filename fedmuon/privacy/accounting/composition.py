"""The epsilon of composed releases, and the least noise that meets a target.

`account` turns events into an epsilon with both ends of its bracket; `noise_for` finds the noise.

The m blocks of a step are clipped to C each and share their lot. Together they are one Gaussian
release of sensitivity C sqrt(m) and noise sigma C, so its multiplier is sigma / sqrt(m) (DP-Muon,
Theorem 2.1). This is the mode `joint`, the only one that certifies. The mode `per-release` counts
m T releases as if each had drawn its own lot. It reproduces DP-Muon's Table 3, but describes no
real mechanism. Every answer names its adjacency: see `fedmuon.privacy.accounting.dominating_pairs`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce

from fedmuon.config.incompatible import LEAST_DELTA
from fedmuon.core.errors import InputError, shown
from fedmuon.privacy.accounting import pld, renyi
from fedmuon.privacy.accounting.dominating_pairs import ADJACENCIES, Event
from fedmuon.privacy.accounting.pld import GRID

MODES = ("joint", "per-release")
ACCOUNTANTS = ("pld", "dp-accounting")
LEAST_NOISE, MOST_NOISE, LEAST_RATE, MOST_COUNT = 1e-6, 1e16, 1e-15, 10**9
NOTHING = (
    "per-release composes releases that share one lot as if each had its own. It reproduces a "
    "printed table but proves nothing: only the joint epsilon holds"
)
COARSE = "the two ends are far apart: the upper end holds, the lower end is not informative"


@dataclass(frozen=True)
class EpsilonResult:
    """An epsilon with both ends of its bracket, and what it assumes.

    Attributes:
        epsilon: The upper end, which holds.
        lower: Certainly at most the true epsilon.
        upper: Certainly at least the true epsilon.
        rdp: The epsilon by Rényi differential privacy.
        mode: "joint", or "per-release", which certifies nothing.
        accountant: Names of the accountants.
        adjacency: How two data sets differ.
        sampling: How lots are drawn.
        certified: Whether the upper end holds for a run.
        note: A remark; may be empty.

    Example:
        >>> import fedmuon
        >>> found = fedmuon.epsilon(noise=1.1, lot=256, population=60_000, steps=2000, delta=1e-5)
        >>> found.lower <= found.upper == found.epsilon
        True
    """

    epsilon: float
    lower: float
    upper: float
    rdp: float
    mode: str
    accountant: str
    adjacency: str
    sampling: str
    certified: bool
    note: str


Answer = EpsilonResult


def require_supported(adjacency: str = "zero-out", sampling: str = "poisson") -> None:
    """Reject what this accountant does not cover.

    For lots in a fixed order see `fedmuon.privacy.mechanisms.fixed_order`.
    """
    if adjacency not in ADJACENCIES:
        raise InputError(f"adjacency '{adjacency}' has no accountant: use {', '.join(ADJACENCIES)}")
    if sampling != "poisson":
        raise InputError(
            f"sampling '{sampling}' has no accountant: use Poisson lots, where each example is "
            "drawn with probability lot/population, or lots in a fixed order (shuffle, cyclic), "
            "which have no amplification"
        )


def loose(delta: float, population: float) -> str:
    """A note on a delta that is too large for so many examples or clients, or "".

    At delta = 1 / n, publishing one of n examples whole, drawn at random, is private.
    """
    if delta * population < 1:
        return ""
    return (
        f"Delta = {delta:g} is 1 / n or more for the n that are protected. A mechanism that "
        "publishes one of them whole, chosen at random, would satisfy this delta."
    )


def require_delta(delta: float) -> None:
    """Reject a delta at which the accountant does not compute."""
    if not LEAST_DELTA <= delta < 1:
        raise InputError(
            f"delta = {delta} is out of range: give a number in [{LEAST_DELTA:g}, 1), well below "
            "1 / (number of examples), such as 1e-5"
        )


def event(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    blocks: int = 1,
    mode: str = "joint",
) -> Event:
    """T steps of m blocks as one kind of release."""
    if mode not in MODES:
        raise InputError(f"mode '{mode}' is unknown: use {' or '.join(MODES)}")
    if noise_multiplier and not LEAST_NOISE <= noise_multiplier <= MOST_NOISE:
        raise InputError(
            f"noise = {noise_multiplier} is out of the accountant's range: give 0, or a number "
            f"in [{LEAST_NOISE:g}, {MOST_NOISE:g}]"
        )
    if not LEAST_RATE <= sampling_probability <= 1:
        raise InputError(
            f"sampling probability {sampling_probability} is out of range: it must lie in "
            f"[{LEAST_RATE:g}, 1], so the lot may be at most the population"
        )
    for name, value in (("steps", steps), ("blocks", blocks)):
        if not 1 <= value <= MOST_COUNT or value != int(value):
            raise InputError(
                f"{name} = {shown(value)} is not valid: give a whole number from 1 to "
                f"{MOST_COUNT:,}"
            )
    if mode == "per-release":
        return Event(sampling_probability, noise_multiplier, steps * blocks)
    return Event(sampling_probability, noise_multiplier / math.sqrt(blocks), steps)


def epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    blocks: int = 1,
    mode: str = "joint",
    adjacency: str = "zero-out",
    accountant: str = "pld",
) -> Answer:
    """Compute the epsilon of T equal steps; `federated.accountant.epsilons` is that of a run.

    Args:
        noise_multiplier: Noise of each block over its clipping bound.
        sampling_probability: The chance of an example to be in a lot.
        steps: T.
        delta: The delta of (epsilon, delta).
        blocks: m, how many blocks are clipped each.
        mode: `joint`, or `per-release`, which certifies nothing.
        adjacency: What two data sets differ in.
        accountant: `pld`, or the library `dp-accounting`.
    """
    spent = event(noise_multiplier, sampling_probability, steps, blocks, mode)
    if spent.noise_multiplier == 0:
        raise InputError(
            "noise = 0 releases the exact sums, so epsilon is infinite: set noise above 0"
        )
    return account([spent], delta, mode, accountant, adjacency)


def account(
    events: Iterable[Event],
    delta: float,
    mode: str = "joint",
    accountant: str = "pld",
    adjacency: str = "zero-out",
    sampling: str = "poisson",
) -> Answer:
    """The epsilon of several kinds of releases together, as a ledger lists them.

    `sampling` is named in the answer alone: events say at which rate lots are drawn.
    """
    require_supported(adjacency)
    require_delta(delta)
    if accountant not in ACCOUNTANTS:
        raise InputError(f"accountant '{accountant}' is unknown: use {' or '.join(ACCOUNTANTS)}")
    merged, note = merge(events, adjacency), ""
    if not merged:
        lower = upper = rdp = 0.0
        note = "nothing was released"
    elif any(spent.noise_multiplier == 0 for spent in merged):
        lower = upper = rdp = math.inf
        note = "a release without noise, so epsilon is infinite"
    else:
        if accountant == "dp-accounting":
            lower, upper, rdp = ends_by_library(merged, delta)
        else:
            rdp = renyi.epsilon(merged, delta)
            grid = pld.grid_for(merged, delta, rdp)
            upper = rdp if mode == "per-release" else pld.bound(merged, delta, grid)
            lower = pld.bound(merged, delta, grid, up=False)
        upper = rdp if mode == "per-release" else min(upper, rdp)
        lower = min(lower, upper)
    if mode == "per-release":
        note, name = NOTHING, f"RDP, {accountant} below"
    else:
        note = note or (COARSE if lower < 0.5 * upper else "")
        name = f"{accountant}, RDP beside"
    return Answer(
        epsilon=upper,
        lower=lower,
        upper=upper,
        rdp=rdp,
        mode=mode,
        accountant=name,
        adjacency=adjacency,
        sampling=sampling,
        certified=mode == "joint" and math.isfinite(upper),
        note=note,
    )


def merge(events: Iterable[Event], adjacency: str = "zero-out") -> list[Event]:
    """Equal releases as one kind with the pair of this adjacency.

    Releases that cannot hold the example are left out.
    """
    counts: dict[tuple[float, float], int] = {}
    for spent in events:
        if spent.count > 0 and spent.sampling_probability > 0:
            kind = (spent.sampling_probability, spent.noise_multiplier)
            counts[kind] = counts.get(kind, 0) + spent.count
    replaced = adjacency == "replace-one"
    return [Event(*kind, count, replaced) for kind, count in counts.items()]


def ends_by_library(
    events: Sequence[Event], delta: float, grid: float = GRID
) -> tuple[float, float, float]:
    """(lower, upper, rdp) of epsilon by the library dp-accounting.

    Under add-or-remove both of its accountants are sound. Its RDP at fractional orders bounds the
    integral by a series: it is up to 0.8% above it, and orders whose series does not converge are
    left out. Under replace-one, its PLD has the pair of `dominating_pairs`, but versions 0.5 and
    0.6 leave the RDP of a Gaussian at sensitivity 1, half of what it is. There the RDP is ours.
    """
    # The library takes seconds to import, and most answers do not need it. absl comes with it.
    import dp_accounting
    from absl import logging

    def by_pld(pessimistic: bool) -> float:
        relations = dp_accounting.NeighboringRelation
        parts = [
            dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
                event.noise_multiplier,
                pessimistic_estimate=pessimistic,
                value_discretization_interval=grid,
                sampling_prob=event.sampling_probability,
                use_connect_dots=pessimistic,
                neighboring_relation=(
                    relations.REPLACE_ONE if event.replaced else relations.ADD_OR_REMOVE_ONE
                ),
            ).self_compose(event.count)
            for event in events
        ]
        whole = reduce(lambda first, other: first.compose(other), parts)
        return float(whole.get_epsilon_for_delta(delta))

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # no messages about orders that it leaves out
    try:
        lower, upper = by_pld(False), by_pld(True)
        if any(event.replaced for event in events):
            return lower, upper, renyi.epsilon(events, delta)
        accountant = dp_accounting.rdp.RdpAccountant()
        for event in events:
            gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
            lot = dp_accounting.PoissonSampledDpEvent(event.sampling_probability, gaussian)
            accountant.compose(lot, event.count)
        return lower, upper, float(accountant.get_epsilon(delta))
    finally:
        logging.set_verbosity(before)


def noise_for(
    epsilon: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    blocks: int = 1,
    mode: str = "joint",
    adjacency: str = "zero-out",
    precision: float = 1e-4,
) -> tuple[float, Answer]:
    """Find the least noise multiplier of a block.

    A Renyi epsilon and an epsilon on a coarse grid are quick and never too small, so the search
    starts from the noise that meets them. It ends on the grid on which the accountant answers.

    Args:
        epsilon: The target; the other arguments are those of `epsilon`.
        precision: The relative precision of the noise.

    Returns:
        The noise and its answer, whose upper end is at most `epsilon`. With a share `precision`
        less noise, it would exceed `epsilon`.
    """
    require_supported(adjacency)
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon = {epsilon} is not valid: give a positive number, such as 8")

    def releases(noise: float) -> list[Event]:
        return merge([event(noise, sampling_probability, steps, blocks, mode)], adjacency)

    def spent(noise: float, coarsest: bool) -> float:
        """The upper end of epsilon, by Renyi, or on a grid if that is less."""
        events = releases(noise)
        about = renyi.epsilon(events, delta)
        grid = pld.grid_for(events, delta, about, coarsest)
        return min(about, pld.bound(events, delta, grid))

    noise, per_release = math.sqrt(blocks), mode == "per-release"
    rough = precision if per_release else 0.01
    account(releases(noise), delta, mode, adjacency=adjacency)  # rejects what has no account
    noise = least_noise(
        lambda sigma: renyi.epsilon(releases(sigma), delta), epsilon, noise, 2.0, rough
    )
    if not per_release:
        noise = least_noise(partial(spent, coarsest=True), epsilon, noise, 1.15, 10 * precision)
        noise = least_noise(partial(spent, coarsest=False), epsilon, noise, 1.01, precision)
    while (found := account(releases(noise), delta, mode, adjacency=adjacency)).upper > epsilon:
        noise *= 1 + precision  # the last bits of a sum may differ
    return noise, found


def least_noise(
    spent: Callable[[float], float], target: float, guess: float, ratio: float, precision: float
) -> float:
    """The least noise at which a falling function is at most `target`.

    The search begins at `guess`. Steps by `ratio`, which get longer, enclose the root. Illinois
    regula falsi in logarithms narrows it: `high` always meets the target, `low` never.
    """
    spent = cache(spent)
    low = high = guess
    while spent(high) > target:
        low, high, ratio = high, ratio * high, min(ratio**3, 4.0)
        if high > 1e9:
            raise InputError(f"no noise reaches epsilon = {target}: set a larger epsilon")
    while low == high or spent(low) <= target:
        low, high, ratio = low / ratio, low, min(ratio**3, 4.0)
        if high < 1e-3:
            return high

    def excess(noise: float) -> float:
        return math.log(max(spent(noise), 1e-300) / target)

    above, below, last = excess(low), excess(high), 0.0
    while high > low * (1 + precision):
        share = above / (above - below) if math.isfinite(above) else 0.5
        middle = low * (high / low) ** min(max(share, 0.05), 0.95)
        found = excess(middle)
        again = 0.5 if found * last > 0 else 1.0  # an end that stays twice counts half
        if found > 0:
            low, above, below = middle, found, below * again
        else:
            high, below, above = middle, found, above * again
        last = found
    return high
