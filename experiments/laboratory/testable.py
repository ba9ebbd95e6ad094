"""What guesses about so many canaries can show at best, known before the run: where that is below
what is claimed, no outcome of the audit speaks against the claim."""

from collections.abc import Sequence

from fedmuon.drive import Run
from fedmuon.federated import client_spending, spending
from fedmuon.privacy import one_run
from fedmuon.privacy.accounting import account, event
from fedmuon.privacy.audit import CONFIDENCE, Setting
from fedmuon.privacy.one_run import Guesses
from fedmuon.privacy.pairs import hardest
from fedmuon.storage import Record

FEW = (
    "All of {} guesses about {} canaries, were they right, would show an epsilon of {:.4g} at "
    "most, so this audit cannot test the {:.4g} that is claimed: use more canaries, or claim less "
    "by more [privacy] noise{}."
)
HONEST = ", or by a larger honest"


def limits(run: Run, settings: Sequence[Setting], canaries: int, made: int) -> Record:
    """`most_possible` is what the number of guesses shows if all are right, `note` what to know
    where these could not refute what the run will claim, by no bound."""
    spent = hardest(event(one.noise_multiplier, *one[1:]) for one in settings if one.steps)
    best, delta = Guesses(canaries, made, made), delta_of(run)
    most = max(by_counts(best, delta).values())
    level = run.experiment.recipe.client_level
    released = level or run.experiment.recipe.mechanism
    assert released is not None
    claimed = max(
        (account([one], delta, adjacency=released.adjacency).upper for one in spent), default=0.0
    )
    if most > claimed or one_run.refuted(
        best, one_run.claims_of(spent, claimed, delta), 1 - CONFIDENCE
    ):
        return {"most_possible": most, "note": ""}
    more = HONEST if level and level.shared else ""
    return {"most_possible": most, "note": FEW.format(made, canaries, most, claimed, more)}


def by_counts(guesses: Guesses, delta: float) -> dict[str, float]:
    """The bounds that stand on the numbers of guesses alone."""
    return {
        "binomial": one_run.by_binomial(guesses, delta, CONFIDENCE),
        "trade_off": one_run.by_trade_off(guesses, delta, CONFIDENCE),
    }


def delta_of(run: Run) -> float:
    """At which the run's epsilon will be told."""
    if run.config.privacy.level == "client":
        return client_spending.delta_of(run.config)
    return spending.delta_of(run.config, run.data.sizes, run.experiment.recipe.mechanism)
