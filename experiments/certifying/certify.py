"""All certificates of the risk of a run's final model that apply, side by side.

`certify` returns one row for each certificate. A row is `certified` (holds for this model, with the
stated confidence), `estimated` (a limit in expectation over runs, in which the train error of this
run stands for its mean), or `refused`, with the reason and what would help.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.theory.checks import positive, real, whole
from fedmuon.analysis.theory.held_out import change_limit, loss_limit
from fedmuon.config.schema import LARGE
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, finite
from fedmuon.experiments.certifying.account import Account
from fedmuon.experiments.certifying.evidence import (
    EXPECTED,
    FIXED,
    GUESSED,
    NO_TEST,
    ONE_DRAW,
    PER_EXAMPLE,
    UNTOUCHED,
    Evidence,
    Paid,
)
from fedmuon.experiments.certifying.measured import (
    INDEPENDENT,
    Losses,
    MeasuredRun,
    released_noise,
)
from fedmuon.experiments.certifying.output_noise import of_certificates, published_by
from fedmuon.experiments.certifying.rows import GUESS, RiskCertificate, RiskCertificates
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.certificates import Certificate, CertifiedSetting
from fedmuon.experiments.stability.finished_run import from_directory
from fedmuon.experiments.stability.gap import change_range
from fedmuon.experiments.stability.predicted_gap import predict
from fedmuon.orthogonalize import Uncertified

FROM_START = "both models are fixed before the held-out samples are used"
POPULATION = "the clients are independent draws from a population of clients"
ONE_MODEL = (
    "a limit in expectation holds only for a setting that was fixed in advance. If it was, use "
    "--settings 1"
)
VIOLATED = (
    "a neighbour moved the model by {:.3g} times its certificate, so the assumptions of the bound "
    "do not hold for this run"
)
ESTIMATED = (
    "the constants of the bound are only estimated for this task, so nothing is proved. For the "
    "error of this model, use held-out samples or a private recipe. For a certified loss, use the "
    "matrix task in float64"
)
OF_FINAL_MODEL = (
    "the bound is for the final model and not for an average. Certify the final model, without "
    "--average"
)
PER_CLIENT = (
    "the run protects single samples and not whole clients. For a certificate on new clients, set "
    "[privacy] level = 'client'"
)


def certify(
    folder: Path,
    confidence: float = 0.95,
    settings: int | None = None,
    user_objects: UserObjects = NOTHING,
    output_noise: float | None = None,
    probes: int = 0,
    guess: float = GUESS,
    average: bool = False,
) -> RiskCertificates:
    """Return all certificates of the final model of a finished run.

    Args:
        folder: The run folder.
        confidence: The probability with which each certified row holds.
        settings: Number of settings from which this run's setting was chosen with the same samples.
            The failure probability is divided by this number (union bound). With None, it is the
            number of settings in the folder of the sweep that contains the run, or 1.
        user_objects: Python objects (such as a custom task) that the caller passed.
        output_noise: Standard deviation of the noise on a published model. With 0, no noise is
            added. With None, it is `stability.output-noise` of the run.
        probes: Number of random probes for the predicted gap. With 0, no gap is predicted.
        guess: The train error that is expected, fixed before the samples are used. The certified
            limits from privacy are smallest if the train error equals it.
        average: Whether to certify the average of the last models instead of the final model. In a
            private run, it is a function of released models, so the limits from privacy hold.

    Raises:
        InputError: If the run has not ended or is damaged, or an argument is out of range.
    """
    if average and (probes or output_noise):
        raise InputError(
            "probes and output_noise are for the final model. Leave them out to certify the "
            "average."
        )
    whole("probes", probes, 0)
    if output_noise is not None and real("output_noise", output_noise) != 0:
        _require_noise(output_noise)
    evidence = Evidence.of(folder, confidence, settings, guess, user_objects, average)
    measured_run = evidence.measured_run
    configured = 0.0 if average else measured_run.run.config.stability.output_noise
    deviation = configured if output_noise is None else output_noise
    refusal = OF_FINAL_MODEL if average else evidence.choices.samples
    stability = (
        Uncertified(refusal) if refusal else _stability(folder, user_objects, evidence.paid.failure)
    )
    return RiskCertificates(
        rows=[
            *_held_out(evidence, _change_range(stability)),
            *_by_samples(evidence),
            *_by_clients(evidence),
            _by_stability(stability, measured_run),
            *_by_output_noise(stability, evidence, deviation),
        ],
        train=_means(measured_run.train),
        test=_means(measured_run.test),
        samples=len(measured_run.owners),
        held_out=len(measured_run.run.data.test_labels),
        settings=evidence.paid.settings,
        confidence=confidence,
        divergence=_divergence(evidence.account),
        notes=evidence.notes,
        predicted=_predicted(measured_run, probes),
        output_noise=deviation,
        guess=guess,
        average=average,
        choices=evidence.choices.listed,
        counted=evidence.tried.settings,
        configured_noise=configured,
    )


def _require_noise(deviation: float) -> None:
    """Raise InputError unless `stability.output-noise` may have this value above 0."""
    if positive("output_noise", deviation) > LARGE:
        raise InputError(
            f"output_noise is {deviation:g}, but it must be above 0 and at most {LARGE:g}. Choose "
            "a smaller number."
        )


def _means(losses: Losses) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in losses.items()}


def _predicted(measured_run: MeasuredRun, probes: int) -> Record:
    """Return the predicted gap of the loss, or {} if there are no probes."""
    if not probes:
        return {}
    gap = predict(measured_run.run, probes)
    return {"gap": gap.value, "standard_error": finite(gap.standard_error), "probes": probes}


# Held-out samples


def _change_range(stability: tuple[CertifiedSetting, Certificate] | InputError) -> float:
    """Return the length of an interval that contains the change of each sample's loss."""
    return 2.0 if isinstance(stability, InputError) else change_range(*stability)


def _held_out(evidence: Evidence, width: float) -> list[RiskCertificate]:
    measured_run, failure = evidence.measured_run, evidence.paid.failure
    name, count = "held-out samples", len(measured_run.run.data.test_labels)
    if refusal := evidence.choices.held_out if count else NO_TEST:
        return [RiskCertificate(name, "error", "refused", refusal=refusal)]
    shared: dict[str, Any] = {
        "confidence": 1 - failure,
        "cost": f"{count:,} samples that train nothing",
    }
    rows = []
    for measure_name, losses in measured_run.test.items():
        mean = float(losses.mean())
        value, method = loss_limit(losses, failure)
        rows.append(
            RiskCertificate(name, measure_name, "certified", value, mean, method=method,
                            assumptions=(INDEPENDENT, UNTOUCHED), **shared)
        )  # fmt: skip
    if "loss" in measured_run.test:
        changes = measured_run.test["loss"] - measured_run.start["loss"]
        value = change_limit(changes, failure, width)
        rows.append(
            RiskCertificate(name, "change of the loss", "certified", value, float(changes.mean()),
                            method=f"empirical Bernstein, paired with X⁰, range {width:.3g}",
                            assumptions=(INDEPENDENT, UNTOUCHED, FROM_START), **shared)
        )  # fmt: skip
    return rows


# The privacy account


def _divergence(account: Account | Uncertified) -> Record:
    if isinstance(account, Uncertified):
        return {}
    return {
        "unit": account.unit,
        "mean": finite(account.mean),
        "units": account.units,
        "total_variation": account.total_variation,
    }


def _by_samples(evidence: Evidence) -> list[RiskCertificate]:
    """Return limits of the risk on new samples, for each loss."""
    name, account, measured_run = "privacy of samples", evidence.account, evidence.measured_run
    if isinstance(account, Uncertified) or account.unit != "example":
        why = str(account) if isinstance(account, Uncertified) else PER_EXAMPLE
        return [RiskCertificate(name, "error", "refused", refusal=why)]
    seed = measured_run.run.config.federation.seed
    return [
        row
        for measure_name, losses in measured_run.train.items()
        for row in _pair(
            name, measure_name, float(losses.mean()), account, evidence.paid,
            measured_run.independent, released_noise(seed, measure_name),
        )
    ]  # fmt: skip


def _by_clients(evidence: Evidence) -> list[RiskCertificate]:
    """Return limits of the mean error of new clients."""
    name, account, measured_run = "privacy of clients", evidence.account, evidence.measured_run
    if isinstance(account, Uncertified) or account.unit != "client":
        why = str(account) if isinstance(account, Uncertified) else PER_CLIENT
        return [RiskCertificate(name, "error", "refused", refusal=why)]
    mean = float(measured_run.means("error").mean())
    with_samples = account.of(np.minimum(1, measured_run.run.data.sizes))
    drawn = released_noise(measured_run.run.config.federation.seed, "error of clients")
    return _pair(name, "error", mean, with_samples, evidence.paid, POPULATION, drawn)


def _pair(
    name: str,
    measure_name: str,
    mean: float,
    account: Account,
    paid: Paid,
    units: str,
    drawn: float,
) -> list[RiskCertificate]:
    """Return the limit in expectation, and the limit for this model."""
    cost = f"noise: KL₀ = {account.mean:.3g} per {account.unit}"
    limit = account.expected_limit(mean)
    expected = RiskCertificate(
        name, measure_name, "estimated", limit.value, mean,
        cost=cost, method=limit.method, assumptions=(units, FIXED, EXPECTED),
    )  # fmt: skip
    if paid.settings > 1:
        expected = RiskCertificate(name, measure_name, "refused", refusal=ONE_MODEL)
    limit = account.released_limit(paid.failure, paid.guess)
    one_draw = RiskCertificate(
        name, measure_name, "certified", limit.risk(mean + limit.noise * drawn), mean,
        1 - paid.failure, f"{cost}; noise {limit.noise:.2g} on the train error",
        ONE_DRAW, (units, FIXED, GUESSED),
    )  # fmt: skip
    return [expected, one_draw]


# Stability


def _stability(
    folder: Path, user_objects: UserObjects, failure: float
) -> tuple[CertifiedSetting, Certificate] | InputError:
    """Return the certificates of replaced samples, or why there are none.

    If [stability] unit names whole clients, their certificates are only compared with the measured
    perturbations: those of removed clients say nothing about a replaced sample.
    """
    try:
        changes = [f"stability.delta={failure!r}"]
        case = from_directory(folder, changes, given=user_objects, is_checked=True)
    except InputError as reason:
        return reason
    certificate = certificates.certify(case)
    if violation := certificate.violation(case.moved):
        return Uncertified(VIOLATED.format(violation))
    if certificates.of_clients(case.config):
        case = replace(case.under(unit="samples"), moved=None)
        certificate = certificates.certify(case)
    return case, certificate


def _by_stability(
    stability: tuple[CertifiedSetting, Certificate] | InputError, measured_run: MeasuredRun
) -> RiskCertificate:
    """Return the limit of the loss by the bound of the Stability note."""
    name = "stability"
    if isinstance(stability, InputError):
        return RiskCertificate(name, "loss", "refused", refusal=str(stability))
    case, certificate = stability
    bound = certificate.bound
    if bound is None or bound.status != "certified" or "loss" not in measured_run.train:
        why = certificate.refusal or ESTIMATED
        return RiskCertificate(name, "loss", "refused", refusal=why.rstrip("."))
    chances = case.run.weights[measured_run.run.data.sizes > 0]
    mean = float(measured_run.means("loss") @ chances)
    return RiskCertificate(
        name, "loss", "certified", min(1.0, mean + bound.value), mean, 1 - bound.failure,
        "no samples and no noise", "Stability note, Theorem 4.1",
        (measured_run.independent, FIXED, *bound.assumptions),
    )  # fmt: skip


def _by_output_noise(
    stability: tuple[CertifiedSetting, Certificate] | InputError,
    evidence: Evidence,
    deviation: float,
) -> list[RiskCertificate]:
    """Return limits of the error of the final model with noise, which is then published."""
    if not deviation:
        return []
    name, measured_run = "noise on the output", evidence.measured_run
    seed = measured_run.run.config.federation.seed
    params = published_by(measured_run.run, measured_run.params, deviation)
    try:
        if isinstance(stability, InputError):
            raise stability
        account = of_certificates(*stability, deviation)
    except InputError as reason:
        return [RiskCertificate(name, "error", "refused", refusal=str(reason))]
    mean = float(measured_run.losses(params)["error"].mean())
    drawn = released_noise(seed, "error of the published model")
    rows = _pair(name, "error", mean, account, evidence.paid, measured_run.independent, drawn)
    bound = stability[1].bound
    proved = () if bound is None else bound.assumptions
    return [
        replace(row, assumptions=(*row.assumptions, *proved)) if row.value is not None else row
        for row in rows
    ]
