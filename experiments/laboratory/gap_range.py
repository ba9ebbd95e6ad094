"""The length of an interval that is proved to have all losses of a run's last model, with which the
interval of its gap scales: that of the ball where it counts, else 1; why it is 1, and what has a
shorter one."""

from collections.abc import Iterable
from typing import NamedTuple

from fedmuon.experiments.laboratory.case import Case
from fedmuon.experiments.laboratory.verdict import Verdict
from fedmuon.storage import Record

NEARLY = 0.99  # of the range that any loss has: hardly shorter
ANY = "The gap's interval stands on the range 1 that any loss 1 − p_y has: {}."
UNKNOWN = "no ball is known that these iterates cannot leave; more [data] test alone shortens it"
FAR = "the ball that steps so large reach has no shorter one; lower [local] lr, or fewer rounds do"
REFUSED = "what refuses a certificate, or exceeds it, refuses the shorter range of a ball, too"
SHORTER = "the shorter one of the ball around X⁰ is proved {}; set {}"
IN_DOUBLES = "of arithmetic in float64", "engine.dtype=float64"
ON_THE_BALL = "for [stability] constants = 'ball'", "stability.constants=ball"


class Why(NamedTuple):
    """Why a gap has the range 1, and which changes of the config have a shorter one."""

    note: str
    changes: tuple[str, ...] = ()


def proved_range(case: Case, verdict: Verdict) -> float:
    """The length of an interval that is proved to have every loss 1 - p_y of the last model,
    whatever the sample: that of the ball which covered runs in float64 cannot leave, unless a
    neighbour refutes what the verdict assumes; else 1, which needs no proof."""
    counts = case.reach and case.exact and _known(case, verdict)
    return case.reach.last.loss_bound if case.reach and counts else 1.0


def why_one(case: Case, verdict: Verdict) -> Why:
    """Nothing where the range is shorter, or where no range is read, as of a network's losses."""
    if case.config.task.name != "matrix" or proved_range(case, verdict) < NEARLY:
        return Why("")
    ball = case.under(constants="ball").reach
    if ball is None:
        return Why(ANY.format(UNKNOWN))
    if not _known(case, verdict):
        return Why(ANY.format(REFUSED))
    if ball.last.loss_bound >= NEARLY:
        return Why(ANY.format(FAR))
    lacking = [] if case.exact else [IN_DOUBLES]
    lacking += [] if case.reach else [ON_THE_BALL]
    proofs, changes = zip(*lacking, strict=True)
    return Why(ANY.format(SHORTER.format(" and ".join(proofs), " and ".join(changes))), changes)


def as_record(every: Iterable[Why]) -> Record:
    """What several runs lack, each sentence and each change once."""
    found = list(every)
    notes = dict.fromkeys(one.note for one in found if one.note)
    changes = dict.fromkeys(change for one in found for change in one.changes)
    return {"gap_notes": list(notes), "gap_changes": list(changes)}


def _known(case: Case, verdict: Verdict) -> bool:
    return verdict.certificates is not None and not verdict.violation(case.moved)
