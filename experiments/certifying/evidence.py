"""The evidence for the limits of a run: its losses, its privacy account, and what is paid for."""

from dataclasses import dataclass
from pathlib import Path

from fedmuon.analysis.theory.checks import share
from fedmuon.config.user_objects import UserObjects
from fedmuon.experiments.certifying.account import Account, of_ledger
from fedmuon.experiments.certifying.choices import (
    Choices,
    TriedSettings,
    choices_of,
    tried_settings,
)
from fedmuon.experiments.certifying.measured import MeasuredRun, failure_of, measure
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
EXPECTED = (
    "in expectation over samples and noise; the train error of this run stands for its expectation"
)
GUESSED = "the expected train error, --guess, was fixed before the samples were used"
STOPPED = (
    "a callback ended the run early, and the account does not know on which values it decided. Run "
    "without early stopping"
)
NOT_POISSON = (
    "The account of {} lots has no amplification by sampling, so KL₀ is larger than needed. For "
    "smaller limits, set [privacy] sampling = 'poisson'."
)
REPEATED = (
    "{:,} of {:,} training samples repeat another one. If they are copies and not independent "
    "draws, n is smaller and the certificates that use n do not hold. Remove the copies."
)
TRAINED = (
    "{:,} of {:,} held-out samples are also training samples. If they are copies and not "
    "independent draws, the certificates from held-out samples do not hold. Remove them from the "
    "test samples."
)
NO_TEST = "no sample is held out. Lower [data] train, or set [data] test"
PER_EXAMPLE = (
    "the run protects whole clients and not single samples. For a certificate on new samples, set "
    "[privacy] level = 'example' with a private recipe, such as dp-muon"
)
ONE_DRAW = "privacy profile, one draw"  # the method of certified limits from privacy


@dataclass(frozen=True)
class Paid:
    """The failure probability of each certified limit, and the train error that was guessed.

    Attributes:
        failure: The failure probability, divided by the number of settings.
        settings: The number of settings.
        guess: The train error that was expected before the samples were used.
    """

    failure: float
    settings: int
    guess: float


@dataclass(frozen=True)
class Evidence:
    """The losses, the choices and the privacy account of a run, from which its limits follow.

    Attributes:
        measured_run: The run with the losses of its models.
        tried: The settings that were tried on the same samples.
        choices: What touched the samples besides training.
        paid: What each certified limit pays for.
        account: The privacy account, or why nothing follows from it.
    """

    measured_run: MeasuredRun
    tried: TriedSettings
    choices: Choices
    paid: Paid
    account: Account | Uncertified

    @classmethod
    def of(
        cls,
        folder: Path,
        confidence: float,
        settings: int | None,
        guess: float,
        user_objects: UserObjects,
        average: bool = False,
    ) -> "Evidence":
        """Measure a finished run, and collect what its limits follow from and pay for.

        The arguments are those of `certify`.

        Raises:
            InputError: If the run has not ended or is damaged, or an argument is out of range.
        """
        tried = tried_settings(folder)
        failure = failure_of(confidence, count := tried.paid(settings))
        paid = Paid(failure, count, share("guess", guess))
        measured_run = measure(folder, user_objects, average)
        stopped = str((RunDirectory(folder).summary() or {}).get("stopped", ""))
        choices = choices_of(measured_run.run.config, stopped, tried, settings, average)
        if stopped or choices.samples:
            account = Uncertified(STOPPED if stopped else choices.samples)
        else:
            account = _account_of(folder, measured_run)
        return cls(measured_run, tried, choices, paid, account)

    @property
    def notes(self) -> list[str]:
        """Warnings about the samples."""
        measured_run, notes = self.measured_run, self.choices.notes
        privacy = measured_run.run.config.privacy
        if measured_run.run.experiment.recipe.private and privacy.sampling != "poisson":
            notes.append(NOT_POISSON.format(privacy.sampling))
        if measured_run.repeated:
            notes.append(REPEATED.format(measured_run.repeated, len(measured_run.owners)))
        if measured_run.trained:
            count = len(measured_run.run.data.test_labels)
            notes.append(TRAINED.format(measured_run.trained, count))
        return notes


def _account_of(folder: Path, measured_run: MeasuredRun) -> Account | Uncertified:
    try:
        return of_ledger(folder, measured_run.run.data.sizes)
    except Uncertified as reason:
        return reason
