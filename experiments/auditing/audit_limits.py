"""What so many trials or guesses can show at best, known before an audit: where that is below what
is claimed, no outcome of it speaks against the claim."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fedmuon.privacy import audit
from fedmuon.privacy.accounting.composition import account, event
from fedmuon.privacy.accounting.dominating_pairs import hardest
from fedmuon.privacy.audit import CONFIDENCE, Guesses, Setting, most_counted

FEW = (
    "{} an epsilon of {:.4g} at most by counts, so this audit cannot test the {:.4g} that is "
    "claimed: use more {}."
)
TRIALS, MORE_TRIALS = "{} trials can show", "--trials, or more --noise"
GUESSES = "All of {} guesses about {} canaries, were they right, would show"
MORE_CANARIES = "canaries, or claim less by more [privacy] noise"
MORE_HONEST = f"{MORE_CANARIES}, or by a larger honest"


class Claimed(NamedTuple):
    """What an account will say of a run at `delta`: by what each client that takes part is a part
    of, whether it has canaries or not."""

    settings: Sequence[Setting]
    delta: float
    adjacency: str


def of_trials(count: int, delta: float, claimed: float) -> dict[str, Any]:
    """Of an audit that stands on counts of so many trials alone."""
    most = most_counted(count, delta)
    return _record(most, claimed, most > claimed, TRIALS.format(count), MORE_TRIALS)


def of_guesses(canaries: int, made: int, claimed: Claimed, more: str) -> dict[str, Any]:
    """Of so many guesses, which are enough if by any bound they could refute the claim."""
    best, delta = Guesses(canaries, made, made), claimed.delta
    most = max(by_counts(best, delta).values())
    spent = hardest(event(one.noise_multiplier, *one[1:]) for one in claimed.settings if one.steps)
    total = max(
        (account([one], delta, adjacency=claimed.adjacency).upper for one in spent), default=0.0
    )
    enough = most > total or audit.refuted(
        best, audit.claims_of(spent, total, delta), 1 - CONFIDENCE
    )
    return _record(most, total, enough, GUESSES.format(made, canaries), more)


def by_counts(guesses: Guesses, delta: float) -> dict[str, float]:
    """The bounds that stand on the numbers of guesses alone."""
    return {
        "binomial": audit.by_binomial(guesses, delta, CONFIDENCE),
        "trade_off": audit.by_trade_off(guesses, delta, CONFIDENCE),
    }


def _record(most: float, claimed: float, enough: bool, head: str, more: str) -> dict[str, Any]:
    """`most_by_counts` is the largest epsilon that counts can show, `note` what to know where these
    could not refute what is claimed."""
    note = "" if enough else FEW.format(head, most, claimed, more)
    return {"most_by_counts": most, "note": note}
