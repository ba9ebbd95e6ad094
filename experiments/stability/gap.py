"""The gap F - F_hat of a finished run, with its interval.

If the interval is long, the module explains why, and names changes of the config that make the
interval shorter. The module also computes which verdict on the gap the shorter interval would give.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmuon.analysis import MeasuredGap
from fedmuon.analysis.report.claims import gap_within_bound
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.verdicts import INCONCLUSIVE
from fedmuon.config.methods import certified
from fedmuon.core.arrays import read_tensors
from fedmuon.core.errors import InputError
from fedmuon.data.partition import weights
from fedmuon.experiments.stability.certificates import Certificate, CertifiedSetting, certify
from fedmuon.experiments.stability.finished_run import FinishedRun, measured_losses
from fedmuon.federated.evaluation import risk, sample_weights
from fedmuon.runs.directory import Record

NEARLY = 0.99  # above this share of the full range, a shorter interval is not worth a note
ANY = "The interval of the gap uses the range 1, which is valid for any loss 1 − p_y, because {}."
NO_BALL = (
    "no limit is known for how far {} can move from X⁰. For a shorter interval, {}increase [data] "
    "test"
)
FAR = (
    "the step sizes are so large that the models may move far from X⁰, where the loss has no "
    "smaller range. For a "
    "shorter interval, lower [local] lr or the number of rounds"
)
REFUSED = (
    "a smaller range is proved only for runs with certificates, and this run has no certificate "
    "(the bound states the reason). For a shorter interval, increase [data] test"
)
EXCEEDED = (
    "a neighbour exceeds its certificate, so no smaller range is proved for this run. For a "
    "shorter interval, {}increase [data] test"
)
SHORTER = (
    "a smaller range, from the distance to X⁰, is proved only {}. For a shorter interval, set {}"
)
IN_DOUBLES = "for arithmetic in float64", "engine.dtype=float64"
MAYBE_ROUNDING = "set engine.dtype=float64 (if rounding is the cause), or "
ON_THE_BALL = "for [stability] constants = 'ball'", "stability.constants=ball"


def measure_gap(run: FinishedRun, case: CertifiedSetting, certificate: Certificate) -> Record:
    """Return the entries gap, gap_low and gap_high of bound.json.

    F is computed at the clients' label shares. If no interval is available, the entries are null
    and `gap_refusal` contains the reason.
    """
    reason = why_one(case, certificate)
    try:
        gap = _gap(run, proved_range(case, certificate))
    except InputError as error:
        refused = {"gap": None, "gap_low": None, "gap_high": None, "gap_refusal": str(error)}
        return refused | as_record([reason])
    entries = {"gap": gap.gap, "gap_low": gap.low, "gap_high": gap.high}
    if not reason.changes:
        return entries | as_record([reason])
    changed, top = after_changes(case)
    try:
        then = verdict_on(_gap(run, top), changed)
    except InputError:  # with other rounding, the losses of the model differ more than `top`
        then = INCONCLUSIVE
    return entries | as_record([reason], [then])


def beside_start(run: FinishedRun, value: float | None) -> Record:
    """Compare the final model with X0: their losses, distance, and certified population loss.

    The certified population loss is F_hat + bound. If this number is below the loss of X0, the run
    is certified to have learned.
    """
    experiment, sizes = run.experiment, run.data.sizes
    shards = experiment.shards
    shares = sample_weights(sizes, weights(sizes, run.config.federation.risk_weights))

    def loss(model: Mapping[str, Tensor]) -> float:
        params = {name: tensor[None].to(shards.inputs.device) for name, tensor in model.items()}
        samples = shards.inputs, shards.labels, shares.to(shards.labels.device)
        return float(risk(experiment.task, params, *samples).loss[0])

    start, end = (read_tensors(run.out / f"{name}.safetensors")[0] for name in ("initial", "model"))
    moved = [(end[name].double() - start[name].double()).norm() for name in end]
    certified = None if value is None else loss(end) + value
    return {
        "start_loss": loss(start),
        "certified_loss": certified,
        "model_moved": float(torch.stack(moved).norm()),
    }


def start_words(record: Record) -> list[tuple[str, str]]:
    """Return the result of `beside_start` as table rows.

    The list is empty for run folders of old versions, which lack these numbers.
    """
    before, certified = record.get("start_loss"), record.get("certified_loss")
    if before is None or certified is None:
        return []
    better, after = certified < before, certified - record["value"]
    decrease = before - after
    verdict = (
        f"yes, by {number(before - certified, 3)}" if better else "no: the loss of X⁰ is smaller"
    )
    if not better and decrease > 0:
        verdict += (
            f", because the bound is {number(record['value'] / decrease, 3)} times the decrease"
        )
    share = f" = {number(decrease / record['value'], 3)}" if record["value"] > 0 else ""
    quotient = f"{number(decrease, 3)} / {number(record['value'], 3)}{share}"
    return [
        ("train loss of X⁰", number(before, 6)),
        ("train loss of the final model", number(after, 6)),
        ("certified population loss: train loss + bound", number(certified, 6)),
        ("decrease of the train loss / bound", quotient),
        ("population loss certified to be below the loss of X⁰", verdict),
    ]


def _gap(run: FinishedRun, top: float) -> MeasuredGap:
    experiment = run.experiment
    model = read_tensors(run.out / "model.safetensors")[0]
    device = experiment.shards.inputs.device
    params = {name: value[None].to(device) for name, value in model.items()}
    (loss,) = measured_losses(run.config, run.data, run.source.classes, experiment, params, [top])
    return loss.gap


class Why(NamedTuple):
    """The reason why the losses have no proved range below 1, and config changes that give one."""

    note: str
    changes: tuple[str, ...] = ()


def proved_range(case: CertifiedSetting, certificate: Certificate) -> float:
    """Return the proved range of the final model's losses 1 - p_y, for every possible sample.

    The interval of the gap is proportional to this range. If the run uses float64, has
    certificates, and has a ball that its models cannot leave, the range is that of the loss on the
    ball. In all other cases, and if a neighbour exceeds its certificate, the range is 1, which
    needs no proof.
    """
    if not case.reach or not case.exact or certificate.certificates is None:
        return 1.0
    return 1.0 if certificate.violation(case.moved) else case.reach.last.loss_bound


def change_range(case: CertifiedSetting, certificate: Certificate) -> float:
    """Return the length of an interval that contains the change of each sample's loss since X⁰.

    The range of the loss on the ball holds for X⁰ and for the final model. The loss of X⁰ = 0 is
    the same for all samples.
    """
    constant = case.start is not None and case.start.reach == 0
    return min(2.0, (1 if constant else 2) * proved_range(case, certificate))


def why_one(case: CertifiedSetting, certificate: Certificate) -> Why:
    """Return why the losses have no proved range below 1.

    For a shorter range and for networks, the text is empty.
    """
    if case.config.task.name != "matrix" or proved_range(case, certificate) < NEARLY:
        return Why("")
    ball = case.under(constants="ball").reach
    if ball is None:
        return Why(ANY.format(NO_BALL.format(*_without_a_ball(case))))
    if certificate.certificates is None:
        return Why(ANY.format(REFUSED))
    if certificate.violation(case.moved):
        return Why(ANY.format(EXCEEDED.format("" if case.exact else MAYBE_ROUNDING)))
    if ball.last.loss_bound >= NEARLY:
        return Why(ANY.format(FAR))
    lacking = [] if case.exact else [IN_DOUBLES]
    lacking += [] if case.reach else [ON_THE_BALL]
    proofs, changes = zip(*lacking, strict=True)
    return Why(ANY.format(SHORTER.format(" and ".join(proofs), " and ".join(changes))), changes)


def _without_a_ball(case: CertifiedSetting) -> tuple[str, str]:
    """Return why no ball is known that contains all models, and config changes that give one.

    If no change of the config helps, the second text is empty.
    """
    local = case.config.local
    aligned = bool(local.recipe in certified("aligned") and local.alignment)
    names = ["weight decay"] * bool(local.weight_decay) + ["alignment"] * aligned
    keys = ["weight-decay = 0"] * bool(local.weight_decay) + ["recipe = 'fedmuon'"] * aligned
    free = {"weight_decay": 0.0} | ({"recipe": "fedmuon"} if aligned else {})
    config = case.config.model_copy(update={"local": local.model_copy(update=free)})
    if not names or dataclasses.replace(case, config=config).under(constants="ball").reach is None:
        return "these iterates", ""
    return f"iterates with {' and '.join(names)}", f"set [local] {' and '.join(keys)}, or "


def after_changes(case: CertifiedSetting) -> tuple[Certificate, float]:
    """Return the certificate and the loss range after the config changes that a `Why` can name."""
    engine = case.config.engine.model_copy(update={"dtype": "float64"})
    config = case.config.model_copy(update={"engine": engine})
    case = dataclasses.replace(case, config=config).under(constants="ball")
    certificate = certify(case)
    return certificate, proved_range(case, certificate)


def verdict_on(gap: MeasuredGap, certificate: Certificate) -> str:
    """Return the verdict on the claim that this gap is within the bound."""
    value = certificate.bound.value if certificate.bound else math.nan
    row = {"gap": gap.gap, "gap_low": gap.low, "gap_high": gap.high, "bound": value}
    row["range"] = certificate.loss_bound
    return gap_within_bound({name: np.array([entry]) for name, entry in row.items()}).verdict


def as_record(every: Iterable[Why], then: Iterable[str] = ()) -> Record:
    """Return the distinct reasons and config changes of several runs as one record.

    `then` contains the verdicts on the gaps after the changes.
    """
    reasons = list(every)
    return {
        "gap_notes": [*dict.fromkeys(reason.note for reason in reasons if reason.note)],
        "gap_changes": [*dict.fromkeys(change for reason in reasons for change in reason.changes)],
        "gap_then": [*dict.fromkeys(then)],
    }
