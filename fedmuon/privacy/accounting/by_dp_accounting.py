"""The same accounting by dp-accounting itself, which takes longer to load than to answer.

Under add-or-remove both of its accountants are sound. Its RDP at fractional orders is a bound by a
series, 0.8% above the integral in places, and orders whose series does not converge are left out.
Under replace-one its PLD has the pair of `dominating_pairs.py`, but versions 0.5 and 0.6 leave
the RDP of a Gaussian at sensitivity 1, half of what it is: there the RDP is ours.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import reduce

from fedmuon.privacy.accounting import renyi
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.accounting.pld import GRID


def ends(events: Sequence[Event], delta: float, grid: float = GRID) -> tuple[float, float, float]:
    """(lower, upper, rdp) of epsilon at delta."""
    with _quiet():
        both = (_pld(events, delta, grid, pessimistic) for pessimistic in (False, True))
        return *both, _rdp(events, delta)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's lines on orders that it leaves out."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _pld(events: Sequence[Event], delta: float, grid: float, pessimistic: bool) -> float:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    either = NeighboringRelation.ADD_OR_REMOVE_ONE
    parts = [
        from_gaussian_mechanism(
            event.noise_multiplier,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=grid,
            sampling_prob=event.sampling_probability,
            use_connect_dots=pessimistic,
            neighboring_relation=NeighboringRelation.REPLACE_ONE if event.replaced else either,
        ).self_compose(event.count)
        for event in events
    ]
    return float(reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(delta))


def _rdp(events: Sequence[Event], delta: float) -> float:
    if any(event.replaced for event in events):
        return renyi.epsilon(events, delta)
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant()
    for event in events:
        gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        lot = dp_accounting.PoissonSampledDpEvent(event.sampling_probability, gaussian)
        accountant.compose(lot, event.count)
    return float(accountant.get_epsilon(delta))
