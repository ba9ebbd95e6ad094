"""The smaller limit in expectation, and its name."""

import numpy as np
import pytest
from scipy.special import ndtr

from fedmuon.experiments.certifying.account import BY_INFORMATION, BY_PROFILE, Account
from fedmuon.privacy.accounting.divergences import hockey_stick
from fedmuon.privacy.accounting.dominating_pairs import Event


@pytest.mark.parametrize(("mean", "method"), [(0.01, BY_PROFILE), (0.1, BY_INFORMATION)])
def test_the_smaller_limit_in_expectation_is_named(mean: float, method: str) -> None:
    noise = 2.0
    account = Account("example", [(Event(1.0, noise),)], np.full(1, 10.0))
    a = np.exp(np.linspace(0, 5, 20001))
    heights = ndtr(1 / noise - np.log(a) * noise / 2) - a * ndtr(-1 / noise - np.log(a) * noise / 2)
    by_profile = float((a * mean + heights).min())
    risks = np.linspace(mean, 1, 10**6)[1:-1]
    kl = mean * np.log(mean / risks) + (1 - mean) * np.log((1 - mean) / (1 - risks))
    by_information = float(risks[kl <= 1 / (2 * noise**2)].max())
    limit = account.expected_limit(mean)
    assert limit.method == method and limit.value == account.expected_risk(mean)
    assert limit.value == pytest.approx(min(by_profile, by_information), rel=1e-4)
    assert limit.value < 0.98 * max(by_profile, by_information)  # the control


@pytest.mark.parametrize("replaced", [False, True])
def test_the_profile_is_the_upper_curve(replaced: bool) -> None:
    events, epsilons = (Event(0.2, 1.5, 12, replaced=replaced),), np.linspace(-1, 2, 7)
    account = Account("example", [events], np.ones(1))
    lower, upper = hockey_stick([Event(0.2, 1.5, 12, replaced=True)], epsilons, 2**14)
    assert (account.profile(epsilons) == upper).all() and (lower < upper).all()
