"""F - F_hat of a finished run, with its interval; why that is wide, and whether a change of the
config that shortens it would decide if the gap is within its bound."""

from fedmuon.analysis import MeasuredGap
from fedmuon.analysis.report.verdicts import UNDECIDED
from fedmuon.arrays import read_tensors
from fedmuon.errors import InputError
from fedmuon.experiments.laboratory import gap_range
from fedmuon.experiments.laboratory.case import Case
from fedmuon.experiments.laboratory.measure import Laboratory, measured_losses
from fedmuon.experiments.laboratory.verdict import Verdict
from fedmuon.storage import Record


def measured(laboratory: Laboratory, case: Case, verdict: Verdict) -> Record:
    """What bound.json says of the gap."""
    why = gap_range.why_one(case, verdict)
    found = _in_interval(laboratory, gap_range.proved_range(case, verdict))
    then = [_then(laboratory, case)] if why.changes and "gap_refusal" not in found else []
    return found | gap_range.as_record([why], then)


def _then(laboratory: Laboratory, case: Case) -> str:
    """What would become of the claim after the changes."""
    verdict, top = gap_range.after_changes(case)
    try:
        return gap_range.verdict_on(_gap(laboratory, top), verdict)
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
