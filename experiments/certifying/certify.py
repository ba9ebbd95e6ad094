"""All certificates of the risk of a run's final model that apply, side by side.

`certify` returns one row for each certificate. A row is `certified` (holds for this model, with the
stated confidence), `estimated` (a limit in expectation over runs, in which the train error of this
run stands for its mean), or `refused`, with the reason and what would help.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.theory.checks import positive, share
from fedmuon.analysis.theory.held_out import change_limit, loss_limit
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, finite
from fedmuon.experiments.certifying.account import Account, of_ledger
from fedmuon.experiments.certifying.choices import Choices, choices_of, tried_settings
from fedmuon.experiments.certifying.measured import (
    INDEPENDENT,
    MeasuredRun,
    failure_of,
    measure,
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
from fedmuon.runs.directory import RunDirectory

UNTOUCHED = (
    "the held-out samples chose nothing: no setting, no checkpoint, no early stop (or --settings "
    "counts all that they could have chosen)"
)
FIXED = (
    "all settings were chosen without the training samples, or --settings counts all that could "
    "have been chosen"
)
FROM_START = "both models are fixed before the held-out samples are used"
EXPECTED = (
    "in expectation over samples and noise; the train error of this run stands for its expectation"
)
GUESSED = "the expected train error, --guess, was fixed before the samples were used"
POPULATION = "the clients are independent draws from a population of clients"
ONE_MODEL = (
    "a limit in expectation holds only for a setting that was fixed in advance. If it was, use "
    "--settings 1"
)
STOPPED = (
    "a callback ended the run early, and the account does not know on which values it decided. Run "
    "without early stopping"
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
NOT_POISSON = (
    "The account of {} lots has no amplification by sampling, so KL₀ is larger than needed. For "
    "smaller limits, set [privacy] sampling = 'poisson'."
)
OF_FINAL_MODEL = (
    "the bound is for the final model and not for an average. Certify the final model, without "
    "--average"
)
NO_TEST = "no sample is held out. Lower [data] train, or set [data] test"
PER_EXAMPLE = (
    "the run protects whole clients and not single samples. For a certificate on new samples, set "
    "[privacy] level = 'example' with a private recipe, such as dp-muon"
)
PER_CLIENT = (
    "the run protects single samples and not whole clients. For a certificate on new clients, set "
    "[privacy] level = 'client'"
)


@dataclass(frozen=True)
class Paid:
    """What each certified limit from privacy pays for, and where it is smallest.

    Attributes:
        failure: The failure probability, divided by the number of settings.
        settings: The number of settings.
        guess: The train error that was expected before the samples were used.
    """

    failure: float
    settings: int
    guess: float


def certify(
    folder: Path,
    confidence: float = 0.95,
    settings: int | None = None,
    given: UserObjects = NOTHING,
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
        given: Python objects (such as a custom task) that the caller passed.
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
    tried = tried_settings(folder)
    failure = failure_of(confidence, count := tried.paid(settings))
    if average and (probes or output_noise):
        raise InputError(
            "probes and output_noise are for the final model. Leave them out to certify the "
            "average."
        )
    measured = measure(folder, given, average)
    paid = Paid(failure, count, share("guess", guess))
    choices = choices_of(measured.run.config, stopped_by(folder), tried, settings, average)
    configured = 0.0 if average else measured.run.config.stability.output_noise
    deviation = configured if output_noise is None else output_noise
    account = account_of(folder, measured, choices)
    refusal = OF_FINAL_MODEL if average else choices.samples
    stability = Uncertified(refusal) if refusal else _stability(folder, given, failure)
    rows = [
        *_held_out(measured, failure, _change_range(stability), choices),
        *_by_samples(account, measured, paid),
        *_by_clients(account, measured, paid),
        _by_stability(stability, measured),
        *_by_output_noise(stability, measured, paid, deviation),
    ]
    return RiskCertificates(
        rows,
        {name: float(values.mean()) for name, values in measured.train.items()},
        {name: float(values.mean()) for name, values in measured.test.items()},
        len(measured.owners),
        len(measured.run.data.test_labels),
        count,
        confidence,
        _divergence(account),
        notes_of(measured, choices),
        _predicted(measured, probes),
        deviation,
        guess,
        average,
        choices.listed,
        tried.settings,
        configured,
    )


def _predicted(measured: MeasuredRun, probes: int) -> Record:
    """Return the predicted gap of the loss, or {} if there are no probes."""
    if not probes:
        return {}
    gap = predict(measured.run, probes)
    return {"gap": gap.value, "standard_error": finite(gap.standard_error), "probes": probes}


def notes_of(measured: MeasuredRun, choices: Choices) -> list[str]:
    """Return warnings about the samples."""
    notes = choices.notes
    privacy = measured.run.config.privacy
    if measured.run.experiment.recipe.private and privacy.sampling != "poisson":
        notes.append(NOT_POISSON.format(privacy.sampling))
    if not measured.repeated:
        return notes
    return [
        *notes,
        f"{measured.repeated:,} of {len(measured.owners):,} training samples repeat another one. "
        "If they are copies and not independent draws, n is smaller and the certificates that "
        "use n do not hold. Remove the copies.",
    ]


# Held-out samples


def _change_range(stability: tuple[CertifiedSetting, Certificate] | InputError) -> float:
    """Return the length of an interval that contains the change of each sample's loss."""
    return 2.0 if isinstance(stability, InputError) else change_range(*stability)


def _held_out(
    measured: MeasuredRun, failure: float, width: float, choices: Choices
) -> list[RiskCertificate]:
    name, count = "held-out samples", len(measured.run.data.test_labels)
    if refusal := choices.held_out if count else NO_TEST:
        return [RiskCertificate(name, "error", "refused", refusal=refusal)]
    shared: dict[str, Any] = {
        "confidence": 1 - failure,
        "cost": f"{count:,} samples that train nothing",
    }
    rows = []
    for measure_name, losses in measured.test.items():
        mean = float(losses.mean())
        value, method = loss_limit(losses, failure)
        rows.append(
            RiskCertificate(name, measure_name, "certified", value, mean, method=method,
                            assumptions=(INDEPENDENT, UNTOUCHED), **shared)
        )  # fmt: skip
    if "loss" in measured.test:
        changes = measured.test["loss"] - measured.start["loss"]
        value = change_limit(changes, failure, width)
        rows.append(
            RiskCertificate(name, "change of the loss", "certified", value, float(changes.mean()),
                            method=f"empirical Bernstein, paired with X⁰, range {width:.3g}",
                            assumptions=(INDEPENDENT, UNTOUCHED, FROM_START), **shared)
        )  # fmt: skip
    return rows


# The privacy account


def stopped_by(folder: Path) -> str:
    """Return the reason why a callback ended the run, or no text."""
    return str((RunDirectory(folder).summary() or {}).get("stopped", ""))


def account_of(folder: Path, measured: MeasuredRun, choices: Choices) -> Account | Uncertified:
    """Return the account of the run, or why nothing follows from its account."""
    if stopped_by(folder):
        return Uncertified(STOPPED)
    if choices.samples:
        return Uncertified(choices.samples)
    try:
        return of_ledger(folder, measured.run.data.sizes)
    except Uncertified as reason:
        return reason


def _divergence(account: Account | Uncertified) -> Record:
    if isinstance(account, Uncertified):
        return {}
    return {
        "unit": account.unit,
        "mean": finite(account.mean),
        "units": account.units,
        "total_variation": account.total_variation,
    }


def _by_samples(
    account: Account | Uncertified, measured: MeasuredRun, paid: Paid
) -> list[RiskCertificate]:
    """Return limits of the risk on new samples, for each loss."""
    name = "privacy of samples"
    if isinstance(account, Uncertified) or account.unit != "example":
        why = str(account) if isinstance(account, Uncertified) else PER_EXAMPLE
        return [RiskCertificate(name, "error", "refused", refusal=why)]
    seed = measured.run.config.federation.seed
    return [
        row
        for measure_name, losses in measured.train.items()
        for row in _pair(
            name, measure_name, float(losses.mean()), account, paid, measured.independent,
            released_noise(seed, measure_name),
        )
    ]  # fmt: skip


def _by_clients(
    account: Account | Uncertified, measured: MeasuredRun, paid: Paid
) -> list[RiskCertificate]:
    """Return limits of the mean error of new clients."""
    name = "privacy of clients"
    if isinstance(account, Uncertified) or account.unit != "client":
        why = str(account) if isinstance(account, Uncertified) else PER_CLIENT
        return [RiskCertificate(name, "error", "refused", refusal=why)]
    mean = float(measured.means("error").mean())
    with_samples = account.of(np.minimum(1, measured.run.data.sizes))
    drawn = released_noise(measured.run.config.federation.seed, "error of clients")
    return _pair(name, "error", mean, with_samples, paid, POPULATION, drawn)


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
    expected = RiskCertificate(
        name, measure_name, "estimated", account.expected_risk(mean), mean,
        cost=cost, method="information, in expectation", assumptions=(units, FIXED, EXPECTED),
    )  # fmt: skip
    if paid.settings > 1:
        expected = RiskCertificate(name, measure_name, "refused", refusal=ONE_MODEL)
    limit = account.released_limit(paid.failure, paid.guess)
    one_draw = RiskCertificate(
        name, measure_name, "certified", limit.risk(mean + limit.noise * drawn), mean,
        1 - paid.failure, f"{cost}; noise {limit.noise:.2g} on the train error",
        "privacy profile, one draw", (units, FIXED, GUESSED),
    )  # fmt: skip
    return [expected, one_draw]


# Stability


def _stability(
    folder: Path, given: UserObjects, failure: float
) -> tuple[CertifiedSetting, Certificate] | InputError:
    """Return the certificates of the Stability note, or why there are none."""
    try:
        case = from_directory(folder, [f"stability.delta={failure!r}"], given=given)
    except InputError as reason:
        return reason
    certificate = certificates.certify(case)
    if violation := certificate.violation(case.moved):
        return Uncertified(VIOLATED.format(violation))
    return case, certificate


def _by_stability(
    stability: tuple[CertifiedSetting, Certificate] | InputError, measured: MeasuredRun
) -> RiskCertificate:
    """Return the limit of the loss by the bound of the Stability note."""
    name = "stability"
    if isinstance(stability, InputError):
        return RiskCertificate(name, "loss", "refused", refusal=str(stability))
    case, certificate = stability
    bound = certificate.bound
    if bound is None or bound.status != "certified" or "loss" not in measured.train:
        why = certificate.refusal or ESTIMATED
        return RiskCertificate(name, "loss", "refused", refusal=why.rstrip("."))
    chances = case.run.weights[measured.run.data.sizes > 0]
    mean = float(measured.means("loss") @ chances)
    return RiskCertificate(
        name, "loss", "certified", min(1.0, mean + bound.value), mean, 1 - bound.failure,
        "no samples and no noise", "Stability note, Theorem 4.1",
        (measured.independent, FIXED, *bound.assumptions),
    )  # fmt: skip


def _by_output_noise(
    stability: tuple[CertifiedSetting, Certificate] | InputError,
    measured: MeasuredRun,
    paid: Paid,
    deviation: float,
) -> list[RiskCertificate]:
    """Return limits of the error of the final model with noise, which is then published."""
    if not deviation:
        return []
    name = "noise on the output"
    seed = measured.run.config.federation.seed
    params = published_by(measured.run, measured.params, positive("output_noise", deviation))
    try:
        if isinstance(stability, InputError):
            raise stability
        account = of_certificates(*stability, deviation)
    except InputError as reason:
        return [RiskCertificate(name, "error", "refused", refusal=str(reason))]
    mean = float(measured.losses(params)["error"].mean())
    drawn = released_noise(seed, "error of the published model")
    rows = _pair(name, "error", mean, account, paid, measured.independent, drawn)
    bound = stability[1].bound
    proved = () if bound is None else bound.assumptions
    return [
        replace(row, assumptions=(*row.assumptions, *proved)) if row.value is not None else row
        for row in rows
    ]
