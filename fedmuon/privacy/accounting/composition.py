"""Events in, epsilon out: what a private run spends, with both ends of the bracket.

The m blocks of a step are clipped to C each and share their lot: together they are one Gaussian
release of sensitivity C sqrt(m) and noise sigma C, that is of multiplier sigma / sqrt(m) (000,
Theorem 2.1). This is `joint`, the only mode that certifies. `per-release` counts m T releases as if
each had drawn a lot of its own: it reproduces 000's Table 3, and no mechanism that was run. Every
answer names its adjacency: see `fedmuon.privacy.accounting.dominating_pairs`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from fedmuon.config.incompatible import LEAST_DELTA
from fedmuon.core.errors import InputError
from fedmuon.core.tables import shown
from fedmuon.privacy.accounting import pld, renyi
from fedmuon.privacy.accounting.dominating_pairs import ADJACENCIES, Event

MODES = ("joint", "per-release")
ACCOUNTANTS = ("pld", "dp-accounting")
LEAST_NOISE, MOST_NOISE, LEAST_RATE, MOST_COUNT = 1e-6, 1e16, 1e-15, 10**9
NOTHING = (
    "per-release composes releases that share one lot as if each had its own: it reproduces a "
    "printed table and certifies nothing; the joint epsilon is the one that holds"
)
COARSE = "the two ends are far apart here: the upper end holds, the lower end says little"


@dataclass(frozen=True)
class Answer:
    """An epsilon and what it stands on; `epsilon` is the upper end."""

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


def require_supported(adjacency: str = "zero-out", sampling: str = "poisson") -> None:
    """Refuse what the accountant does not cover; for lots that take turns see
    `fedmuon.privacy.mechanisms.fixed_order`."""
    if adjacency not in ADJACENCIES:
        raise InputError(
            f"adjacency '{adjacency}' is not accounted for: use {', '.join(ADJACENCIES)}"
        )
    if sampling != "poisson":
        raise InputError(
            f"sampling '{sampling}' is not accounted for: amplification holds for Poisson lots, "
            "each example with probability lot/population, and lots that take turns (shuffle, "
            "cyclic) have an account without it"
        )


def loose(delta: float, population: float) -> str:
    """What to know of a delta that protects nobody of so many examples, or clients: whoever
    publishes one of them whole, drawn at random, keeps to it."""
    if delta * population < 1:
        return ""
    return (
        f"Delta = {delta:g} is 1 / n or more for the n that are protected: at it, one of them, "
        "drawn at random, may be published whole."
    )


def require_delta(delta: float) -> None:
    """Refuse one at which the accountant does not compute."""
    if not LEAST_DELTA <= delta < 1:
        raise InputError(
            f"delta = {delta} must lie in [{LEAST_DELTA:g}, 1): well below 1 over the number of "
            "examples, say 1e-5"
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
            f"noise = {noise_multiplier} must be 0 or lie in [{LEAST_NOISE:g}, {MOST_NOISE:g}], "
            "where the accountant computes"
        )
    if not LEAST_RATE <= sampling_probability <= 1:
        raise InputError(
            f"sampling probability {sampling_probability} must lie in [{LEAST_RATE:g}, 1]: the lot "
            "may be at most the population"
        )
    for name, value in (("steps", steps), ("blocks", blocks)):
        if not 1 <= value <= MOST_COUNT or value != int(value):
            raise InputError(
                f"{name} = {shown(value)} must be a whole number from 1 to {MOST_COUNT:,}"
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
    """What T steps spend at delta; the multiplier is that of each block."""
    spent = event(noise_multiplier, sampling_probability, steps, blocks, mode)
    if spent.noise_multiplier == 0:
        raise InputError("noise = 0 releases the sums themselves, epsilon is infinite: give noise")
    return account([spent], delta, mode, accountant, adjacency)


def account(
    events: Iterable[Event],
    delta: float,
    mode: str = "joint",
    accountant: str = "pld",
    adjacency: str = "zero-out",
) -> Answer:
    """What several kinds of releases spend together, as a ledger lists them."""
    require_supported(adjacency)
    require_delta(delta)
    if accountant not in ACCOUNTANTS:
        raise InputError(f"accountant '{accountant}' is unknown: use {' or '.join(ACCOUNTANTS)}")
    merged = merge(events, adjacency)
    answer = partial(_answer, mode, accountant, adjacency)
    if not merged:
        return answer(0.0, 0.0, 0.0, "nothing was released")
    if any(spent.noise_multiplier == 0 for spent in merged):
        note = "a release without noise: epsilon is infinite"
        return answer(math.inf, math.inf, math.inf, note)
    lower, upper, rdp = _ends(merged, delta, mode, accountant)
    upper = rdp if mode == "per-release" else min(upper, rdp)
    return answer(min(lower, upper), upper, rdp)


def _ends(
    merged: Sequence[Event], delta: float, mode: str, accountant: str
) -> tuple[float, float, float]:
    if accountant == "dp-accounting":
        from fedmuon.privacy.accounting.by_dp_accounting import ends

        return ends(merged, delta)
    rdp = renyi.epsilon(merged, delta)
    grid = pld.grid_for(merged, delta, rdp)
    upper = rdp if mode == "per-release" else pld.upper(merged, delta, grid)
    return pld.lower(merged, delta, grid), upper, rdp


def merge(events: Iterable[Event], adjacency: str = "zero-out") -> list[Event]:
    """Equal releases as one kind, those that cannot hold the example left out; each asks for the
    pair of the adjacency."""
    counts: dict[tuple[float, float], int] = {}
    for spent in events:
        if spent.count > 0 and spent.sampling_probability > 0:
            kind = (spent.sampling_probability, spent.noise_multiplier)
            counts[kind] = counts.get(kind, 0) + spent.count
    replaced = adjacency == "replace-one"
    return [Event(*kind, count, replaced) for kind, count in counts.items()]


def _answer(
    mode: str,
    accountant: str,
    adjacency: str,
    lower: float,
    upper: float,
    rdp: float,
    note: str = "",
) -> Answer:
    if mode == "per-release":
        note, name = NOTHING, f"RDP, {accountant} below"
    else:
        name = f"{accountant}, RDP beside"
        note = note or (COARSE if lower < 0.5 * upper else "")
    return Answer(
        epsilon=upper,
        lower=lower,
        upper=upper,
        rdp=rdp,
        mode=mode,
        accountant=name,
        adjacency=adjacency,
        sampling="poisson",
        certified=mode == "joint" and math.isfinite(upper),
        note=note,
    )
