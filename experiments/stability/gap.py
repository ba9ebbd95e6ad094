"""F - F_hat of a finished run, with its interval; why that is wide, and whether a change of the
config that shortens it would decide if the gap is within its bound."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fedmuon.analysis import MeasuredGap
from fedmuon.analysis.report.claims import gap_within_bound
from fedmuon.analysis.report.verdicts import UNDECIDED
from fedmuon.core.arrays import read_tensors
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.certified_setting import Case
from fedmuon.experiments.stability.certify import Verdict, judge
from fedmuon.experiments.stability.measure import Laboratory, measured_losses
from fedmuon.runs.directory import Record


def measured(laboratory: Laboratory, case: Case, verdict: Verdict) -> Record:
    """What bound.json says of the gap."""
    why = why_one(case, verdict)
    found = _in_interval(laboratory, proved_range(case, verdict))
    then = [_then(laboratory, case)] if why.changes and "gap_refusal" not in found else []
    return found | as_record([why], then)


def _then(laboratory: Laboratory, case: Case) -> str:
    """What would become of the claim after the changes."""
    verdict, top = after_changes(case)
    try:
        return verdict_on(_gap(laboratory, top), verdict)
    except InputError:  # its losses, rounded otherwise, are further apart
        return UNDECIDED


def _in_interval(laboratory: Laboratory, top: float) -> Record:
    """gap, gap_low and gap_high of losses in an interval of that length, F at the clients' own
    label shares, or nulls and `gap_refusal` where no interval can be had."""
    try:
        gap = _gap(laboratory, top)
    except InputError as error:
        return {"gap": None, "gap_low": None, "gap_high": None, "gap_refusal": str(error)}
    return {"gap": gap.gap, "gap_low": gap.low, "gap_high": gap.high}


def _gap(laboratory: Laboratory, top: float) -> MeasuredGap:
    """Of the last model."""
    experiment, classes = laboratory.experiment, laboratory.source.classes
    model = read_tensors(laboratory.out / "model.safetensors")[0]
    device = experiment.shards.inputs.device
    params = {name: value[None].to(device) for name, value in model.items()}
    (loss,) = measured_losses(
        laboratory.config, laboratory.data, classes, experiment, params, [top]
    )
    return loss.gap


# The length of an interval that is proved to have all losses of a run's last model, with which the
# interval of its gap scales: that of the ball where it counts, else 1; why it is 1, and what has a
# shorter one.

NEARLY = 0.99  # of the range that any loss has: hardly shorter
ANY = "The gap's interval stands on the range 1 that any loss 1 − p_y has: {}."
NO_BALL = "no ball is known that {} cannot leave; {}raise [data] test"
FAR = "the ball that steps so large reach has no shorter one; lower [local] lr, or fewer rounds do"
REFUSED = (
    "the shorter one of a ball is proved of runs that have certificates, and this run's are "
    "refused (the bound says why); raise [data] test"
)
EXCEEDED = (
    "a neighbour exceeds its certificate, so the proof does not cover this run, nor does that of "
    "the shorter one of a ball; {}raise [data] test"
)
SHORTER = "the shorter one of the ball around X⁰ is proved {}; set {}"
IN_DOUBLES = "of arithmetic in float64", "engine.dtype=float64"
MAYBE_ROUNDING = "set engine.dtype=float64, if rounding did it, or "
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
        return Why(ANY.format(NO_BALL.format(*_without_a_ball(case))))
    if verdict.certificates is None:
        return Why(ANY.format(REFUSED))
    if not _known(case, verdict):
        return Why(ANY.format(EXCEEDED.format("" if case.exact else MAYBE_ROUNDING)))
    if ball.last.loss_bound >= NEARLY:
        return Why(ANY.format(FAR))
    lacking = [] if case.exact else [IN_DOUBLES]
    lacking += [] if case.reach else [ON_THE_BALL]
    proofs, changes = zip(*lacking, strict=True)
    return Why(ANY.format(SHORTER.format(" and ".join(proofs), " and ".join(changes))), changes)


def _without_a_ball(case: Case) -> tuple[str, str]:
    """Whose iterates have none, and which keys would have one, if any would."""
    local = case.config.local
    aligned = case.aligned and local.alignment
    names = ["weight decay"] * bool(local.weight_decay) + ["alignment"] * bool(aligned)
    keys = ["weight-decay = 0"] * bool(local.weight_decay) + ["recipe = 'fedmuon'"] * bool(aligned)
    free = {"weight_decay": 0.0} | ({"recipe": "fedmuon"} if aligned else {})
    config = case.config.model_copy(update={"local": local.model_copy(update=free)})
    if not names or dataclasses.replace(case, config=config).under(constants="ball").reach is None:
        return "these iterates", ""
    return f"iterates with {' and '.join(names)}", f"set [local] {' and '.join(keys)}, or "


def after_changes(case: Case) -> tuple[Verdict, float]:
    """What is promised of the run, and its range, after all changes that are ever named."""
    engine = case.config.engine.model_copy(update={"dtype": "float64"})
    config = case.config.model_copy(update={"engine": engine})
    case = dataclasses.replace(case, config=config).under(constants="ball")
    verdict = judge(case)
    return verdict, proved_range(case, verdict)


def verdict_on(gap: MeasuredGap, verdict: Verdict) -> str:
    """What becomes of the claim that this gap is within the bound."""
    value = verdict.bound.value if verdict.bound else math.nan
    row = {"gap": gap.gap, "gap_low": gap.low, "gap_high": gap.high, "bound": value}
    row["range"] = verdict.loss_bound
    return gap_within_bound({name: np.array([one]) for name, one in row.items()}).verdict


def as_record(every: Iterable[Why], then: Iterable[str] = ()) -> Record:
    """What several runs lack, each sentence and each change once, and what becomes of their claims
    after the changes."""
    found = list(every)
    notes = dict.fromkeys(one.note for one in found if one.note)
    changes = dict.fromkeys(change for one in found for change in one.changes)
    return {
        "gap_notes": list(notes),
        "gap_changes": list(changes),
        "gap_then": [*dict.fromkeys(then)],
    }


def _known(case: Case, verdict: Verdict) -> bool:
    return verdict.certificates is not None and not verdict.violation(case.moved)
