"""The epsilon of all releases of a run, and the smallest noise for a target epsilon.

`account` converts events to an interval that contains the true epsilon. `noise_for` finds the
smallest noise for a target epsilon.

In one step, each of the m blocks is clipped to C, and all blocks share the same lot. The mode
`joint` counts one Gaussian release per step, with the sensitivity C sqrt(m), the noise sigma C and
therefore the multiplier sigma / sqrt(m) (DP-Muon, Theorem 2.1). Only this mode has a privacy
guarantee. The mode `per-release`, from DP-Muon's Table 3, counts m T releases as if each had its
own lot. An answer is valid for the adjacency that it names
(`fedmuon.privacy.accounting.dominating_pairs`).
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
    "Mode per-release counts releases that share one lot as if each release had its own lot. It "
    "reproduces a published table but is not a privacy guarantee. Only the epsilon of mode joint "
    "is valid."
)
COARSE = (
    "The lower and the upper bound of epsilon are far apart. Use the upper bound as your "
    "epsilon: it is valid. The lower bound says little."
)


@dataclass(frozen=True)
class EpsilonResult:
    """An epsilon with a lower and an upper bound, and the assumptions of the bounds.

    Attributes:
        epsilon: The upper bound, which is the guarantee.
        lower: A lower bound on the true epsilon.
        upper: An upper bound on the true epsilon.
        rdp: The epsilon by Rényi differential privacy.
        mode: "joint", or "per-release", which is not a guarantee.
        accountant: Names of the accountants.
        adjacency: The difference between two neighbouring data sets.
        sampling: The sampling of lots.
        certified: Whether the upper bound is a guarantee for a run.
        note: A note about the limits of this result, or "".

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
    """Raise an error if no accountant supports this adjacency or this sampling.

    `fedmuon.privacy.mechanisms.fixed_order` accounts for lots in a fixed order.
    """
    if adjacency not in ADJACENCIES:
        raise InputError(
            f"adjacency is '{adjacency}', but it must be one of {', '.join(ADJACENCIES)}."
        )
    if sampling != "poisson":
        raise InputError(
            f"sampling is '{sampling}', but no accountant supports it. Use 'poisson', which draws "
            "each example with probability lot / population. For lots in a fixed order, without "
            "privacy amplification by sampling, use 'shuffle' or 'cyclic'."
        )


def loose(delta: float, population: float) -> str:
    """Return a warning if delta is too large for this number of examples or clients, otherwise "".

    With delta = 1 / n, even the publication of one random example of n would count as private.
    """
    if delta * population < 1:
        return ""
    return (
        f"Delta = {delta:g} is too large for {population:,.10g} protected examples or clients, "
        f"because delta must be below 1 / {population:,.10g}. Even a mechanism that publishes "
        "one random example or client in full would satisfy this delta. Set a smaller delta."
    )


def require_delta(delta: float) -> None:
    """Raise an error if delta is out of the accountant's range."""
    if not LEAST_DELTA <= delta < 1:
        raise InputError(
            f"delta is {delta}, but it must be at least {LEAST_DELTA:g} and below 1. Use a value "
            "well below 1 / (number of examples), such as 1e-5."
        )


def event(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    blocks: int = 1,
    mode: str = "joint",
) -> Event:
    """Return the event that represents `steps` releases of `blocks` blocks each."""
    if mode not in MODES:
        raise InputError(f"mode '{mode}' is unknown. Use {' or '.join(MODES)}.")
    if noise_multiplier and not LEAST_NOISE <= noise_multiplier <= MOST_NOISE:
        raise InputError(
            f"noise = {noise_multiplier} is out of the accountant's range. Use 0, or a number "
            f"from {LEAST_NOISE:g} to {MOST_NOISE:g}."
        )
    if not LEAST_RATE <= sampling_probability <= 1:
        raise InputError(
            f"the sampling probability is {sampling_probability}, but it must be from "
            f"{LEAST_RATE:g} to 1. The probability is lot / population. "
            f"{'Raise' if sampling_probability < LEAST_RATE else 'Lower'} the lot."
        )
    for name, value in (("steps", steps), ("blocks", blocks)):
        if not 1 <= value <= MOST_COUNT or value != int(value):
            raise InputError(
                f"{name} = {shown(value)} is not valid. Use an integer from 1 to {MOST_COUNT:,}."
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
    """Compute the epsilon of T steps with the same noise and sampling probability.

    Args:
        noise_multiplier: The noise multiplier of each block, which is the standard deviation of the
            block's noise divided by its clipping bound.
        sampling_probability: Probability that an example is in a lot.
        steps: The number T of steps.
        delta: The delta of (epsilon, delta).
        blocks: The number m of blocks that are clipped separately.
        mode: `joint`, or `per-release`, which is not a guarantee.
        adjacency: The difference between two neighbouring data sets.
        accountant: `pld`, or the library `dp-accounting`.
    """
    spent = event(noise_multiplier, sampling_probability, steps, blocks, mode)
    if spent.noise_multiplier == 0:
        raise InputError(
            "noise = 0 releases the exact sums, so epsilon is infinite. Set noise above 0."
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
    """Return the epsilon of all given releases together.

    `sampling` is only copied to the result. Each event contains its own sampling rate.
    """
    require_supported(adjacency)
    require_delta(delta)
    if accountant not in ACCOUNTANTS:
        raise InputError(f"accountant '{accountant}' is unknown. Use {' or '.join(ACCOUNTANTS)}.")
    merged, note = merge(events, adjacency), ""
    if not merged:
        lower = upper = rdp = 0.0
        note = "Nothing was released."
    elif any(spent.noise_multiplier == 0 for spent in merged):
        lower = upper = rdp = math.inf
        note = "One of the releases has no noise, so epsilon is infinite."
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
        note, name = NOTHING, f"RDP; lower bound by {accountant}"
    else:
        note = note or (COARSE if lower < 0.5 * upper else "")
        name = f"{accountant}, compared with RDP"
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
    """Merge equal releases into one event, and select the pair of distributions for the adjacency.

    Releases with a sampling probability of 0 are left out.
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
    """Compute epsilon with the library dp-accounting, and return (lower, upper, rdp).

    For zero-out and add-remove, both accountants of the library (PLD and RDP) are sound. The
    library's RDP at fractional orders is a series, which is up to 0.8% too large. Orders whose
    series does not converge are left out. For replace-one, the library's PLD uses the pair of
    `dominating_pairs`. The RDP of versions 0.5 and 0.6 for replace-one uses half of the correct
    sensitivity, so this function returns fedmuon's own RDP.
    """
    # Imported here: the library takes seconds to load, and most answers do not need it. absl is one
    # of its dependencies.
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
        composed = reduce(lambda first, other: first.compose(other), parts)
        return float(composed.get_epsilon_for_delta(delta))

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # no messages about the orders that are left out
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
    """Find the smallest noise multiplier per block for a target epsilon.

    The search uses more and more exact upper bounds on epsilon: the Rényi epsilon, an epsilon on a
    coarse grid, and an epsilon on the accountant's grid.

    Args:
        epsilon: The target epsilon. The other arguments are those of the function `epsilon`.
        precision: The relative precision of the noise multiplier.

    Returns:
        The noise and the account, whose upper bound is at most `epsilon`. The noise exceeds the
            smallest possible noise by at most the relative amount `precision`.
    """
    require_supported(adjacency)
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon = {epsilon} is not valid. Use a positive number, such as 8.")

    def releases(noise: float) -> list[Event]:
        return merge([event(noise, sampling_probability, steps, blocks, mode)], adjacency)

    def spent(noise: float, coarsest: bool) -> float:
        """Return an upper bound on epsilon.

        The bound is the smaller one of the bound by Rényi divergences and the bound by privacy
        losses.
        """
        events = releases(noise)
        by_renyi = renyi.epsilon(events, delta)
        grid = pld.grid_for(events, delta, by_renyi, coarsest)
        return min(by_renyi, pld.bound(events, delta, grid))

    noise, per_release = math.sqrt(blocks), mode == "per-release"
    rough = precision if per_release else 0.01
    account(releases(noise), delta, mode, adjacency=adjacency)  # rejects unsupported arguments
    noise = least_noise(
        lambda sigma: renyi.epsilon(releases(sigma), delta), epsilon, noise, 2.0, rough
    )
    if not per_release:
        noise = least_noise(partial(spent, coarsest=True), epsilon, noise, 1.15, 10 * precision)
        noise = least_noise(partial(spent, coarsest=False), epsilon, noise, 1.01, precision)
    while (answer := account(releases(noise), delta, mode, adjacency=adjacency)).upper > epsilon:
        noise *= 1 + precision  # the last bits of a sum may differ between runs
    return noise, answer


def least_noise(
    spent: Callable[[float], float], target: float, guess: float, ratio: float, precision: float
) -> float:
    """Find the smallest noise for which the function `spent` returns at most `target`.

    `spent` must decrease when the noise increases.

    The search starts at `guess`, and multiplies or divides by growing factors, of which `ratio` is
    the first, until the interval from `low` to `high` contains the result. The Illinois method
    (regula falsi in logarithms) then narrows the interval. The noise `high` always meets the
    target, and `low` never does.
    """
    spent = cache(spent)
    low = high = guess
    while spent(high) > target:
        low, high, ratio = high, ratio * high, min(ratio**3, 4.0)
        if high > 1e9:
            raise InputError(
                f"no amount of noise reaches epsilon = {target} at this delta. Set a larger "
                "epsilon."
            )
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
        residual = excess(middle)
        # An end that is kept twice gets half the weight.
        weight = 0.5 if residual * last > 0 else 1.0
        if residual > 0:
            low, above, below = middle, residual, below * weight
        else:
            high, below, above = middle, residual, above * weight
        last = residual
    return high
