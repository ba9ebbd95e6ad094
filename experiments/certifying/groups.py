"""Limits of the error of each class or of each client, which hold together.

Let K be the number of groups. A limit with the failure probability b / K for each group holds for
all groups together, except with probability b (union bound, Bonferroni). So the largest of the
limits is also a limit of the error of the worst group.

- **Held-out samples.** Given the classes (or the clients) of the held-out samples, the samples of a
  group are independent, and their number is fixed. So Clopper and Pearson's limit holds.
- **Privacy of samples.** Both proofs of `fedmuon.analysis.theory.certified_risk` hold for the
  samples of one group alone, with the weights w_a = 1 / n_k for its n_k samples a and 0 for all
  others. So the divergences are means over the group, and the released train error is that of the
  group. For classes, everything is given the labels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from fedmuon.analysis.theory.held_out import loss_limit
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.errors import InputError, instead
from fedmuon.core.files import Record
from fedmuon.experiments.certifying.account import Account
from fedmuon.experiments.certifying.choices import DataChoice
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
    MeasuredRun,
    losses_of,
    released_noise,
)
from fedmuon.experiments.certifying.rows import GUESS
from fedmuon.orthogonalize import Uncertified
from fedmuon.runs.data_notes import read_client_names
from fedmuon.tasks.base import Batch

PER = ("class", "client")
HELD_OUT, PRIVACY = "held-out samples", "privacy of samples"
NO_OWNERS = (
    "the held-out samples belong to no client. Set [data] client-test, such as 0.2, so that each "
    "client holds out a part of its samples"
)
NO_CLASSES = (
    "the samples of this task have no single class, so there is no error of a class. Use --per "
    "client, or no --per"
)
OF_CLASS = (
    "given their labels, the samples are independent draws from the distributions of the classes"
)
OF_CLIENT = "the samples of each client are independent draws from the distribution of this client"
BY_LABELS = (
    "the partition depends on the labels, so a limit of a client is about samples with the label "
    "shares of its own samples"
)
TOGETHER = "{} groups; each limit has the failure probability {:.3g}, so all hold together"


@dataclass(frozen=True)
class GroupCertificate:
    """The limits of the error of one class or client.

    Attributes:
        source: What the limits stand on: "held-out samples" or "privacy of samples".
        group: The class or the client.
        samples: Number of its held-out samples, or of its training samples for privacy.
        error: The error on these samples, or None without samples.
        certified: The limit for this model, or None.
        estimated: The limit in expectation, or None.
        method: The inequality of the certified limit.
        refusal: Why there is no certified limit, and what helps.
    """

    source: str
    group: str
    samples: int
    error: float | None = None
    certified: float | None = None
    estimated: float | None = None
    method: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class GroupCertificates:
    """The limits of the error of all classes or clients.

    Attributes:
        per: "class" or "client".
        rows: The limits of each source, worst group first.
        refused: For each source without limits: why there are none, and what helps.
        confidence: The probability with which all certified limits of a source hold together.
        settings: Number of settings that are paid for.
        groups: Number of groups of each source, which share the failure probability.
        assumptions: What must be true, by source, or under "all" for all sources.
        notes: Warnings.
        choices: What touched the samples, and how the limits pay for it.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 90, "test": 60, "dimension": 7},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> limits = fedmuon.certify_groups(fedmuon.run(small), per="class")
        >>> limits.groups, sum(row.samples for row in limits.rows)
        ({'held-out samples': 4}, 60)
    """

    per: str
    rows: list[GroupCertificate]
    refused: dict[str, str]
    confidence: float
    settings: int
    groups: dict[str, int]
    assumptions: dict[str, list[str]]
    notes: list[str]
    choices: list[DataChoice] = field(default_factory=list[DataChoice])

    def record(self) -> Record:
        """Return the limits as one JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Grouped:
    """Samples with their groups: the errors [n], the group [n] of each, and all names.

    For a private run, `accounts` has the account of the samples of each group, and `noises` the
    standard normal number in its released train error.
    """

    errors: np.ndarray
    groups: np.ndarray
    names: Sequence[str]
    accounts: Sequence[Account] = ()
    noises: Sequence[float] = ()

    def parts(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each name with the mask [n] of its samples."""
        for place, name in enumerate(self.names):
            yield name, self.groups == place


def certify_groups(
    folder: Path,
    per: str,
    confidence: float = 0.95,
    settings: int | None = None,
    user_objects: UserObjects = NOTHING,
    guess: float = GUESS,
) -> GroupCertificates:
    """Return limits of the error of each class or each client.

    Args:
        folder: The run folder.
        per: "class" or "client".
        confidence: The probability with which all certified limits of a source hold together.
        settings: Number of settings from which this run's setting was chosen with the same samples.
            With None, it is the number of settings in the folder of the sweep that contains the
            run, or 1.
        user_objects: Python objects (such as a custom task) that the caller passed.
        guess: The train error that is expected, as for `certify`.

    Raises:
        InputError: If the run has not ended or is damaged, or an argument is out of range.
    """
    if per not in PER:
        raise InputError(f"per is {per!r}, which is no kind of group: {instead(str(per), PER)}")
    evidence = Evidence.of(folder, confidence, settings, guess, user_objects)
    paid = evidence.paid
    rows: list[GroupCertificate] = []
    refused: dict[str, str] = {}
    groups: dict[str, int] = {}
    for source, sorting, limits in (
        (HELD_OUT, _held_out, _by_held_out),
        (PRIVACY, _private, _by_privacy),
    ):
        try:
            samples = sorting(folder, evidence, per)
        except Uncertified as reason:
            refused[source] = str(reason)
            continue
        count = groups[source] = len(samples.names)
        rows += sorted(limits(samples, replace(paid, failure=paid.failure / count)), key=_badness)
    return GroupCertificates(
        per=per,
        rows=rows,
        refused=refused,
        confidence=confidence,
        settings=paid.settings,
        groups=groups,
        assumptions=_assumptions(evidence, per, groups),
        notes=evidence.notes,
        choices=evidence.choices.listed,
    )


def _assumptions(evidence: Evidence, per: str, groups: dict[str, int]) -> dict[str, list[str]]:
    """Return what must be true for the limits, by source."""
    if not groups:
        return {}
    failure = evidence.paid.failure
    expected = [EXPECTED] if evidence.paid.settings == 1 else []
    about = {HELD_OUT: [UNTOUCHED], PRIVACY: [FIXED, GUESSED, *expected]}
    by_labels = per == "client" and evidence.measured_run.independent != INDEPENDENT
    return {
        "all": [OF_CLASS if per == "class" else OF_CLIENT, *([BY_LABELS] if by_labels else [])],
        **{
            source: [*about[source], TOGETHER.format(count, failure / count)]
            for source, count in groups.items()
        },
    }


def _badness(row: GroupCertificate) -> tuple[bool, float, float]:
    """Return a key that sorts by the limit, the largest first, with groups without limit last."""
    if row.certified is None:
        return True, 0.0, 0.0
    return False, -row.certified, -(row.error or 0.0)


# Held-out samples


def _held_out(folder: Path, evidence: Evidence, per: str) -> Grouped:
    """Return the held-out samples by class, or by client."""
    measured_run = evidence.measured_run
    run, data = measured_run.run, measured_run.run.data
    if evidence.choices.held_out:
        raise Uncertified(evidence.choices.held_out)
    if per == "class":
        if not len(data.test_labels):
            raise Uncertified(NO_TEST)
        return Grouped(measured_run.test["error"], *_classes(measured_run, data.test_labels))
    tests = run.experiment.shards.client_test
    if tests is None or not len(tests.labels):
        raise Uncertified(NO_OWNERS)
    errors = losses_of(run, measured_run.params, Batch(tests.inputs, tests.labels))["error"]
    counts = np.diff(data.client_test_offsets)
    return _of_clients(folder, errors, np.repeat(np.arange(len(counts)), counts), len(counts))


def _by_held_out(samples: Grouped, paid: Paid) -> Iterator[GroupCertificate]:
    for name, chosen in samples.parts():
        errors = samples.errors[chosen]
        if not len(errors):
            why = "no sample of this group is held out"
            yield GroupCertificate(HELD_OUT, name, 0, refusal=why)
            continue
        value, method = loss_limit(errors, paid.failure)
        yield GroupCertificate(
            HELD_OUT, name, len(errors), float(errors.mean()), value, method=method
        )


# The privacy account


def _private(folder: Path, evidence: Evidence, per: str) -> Grouped:
    """Return the training samples by class or by client, with their divergences."""
    account, measured_run = evidence.account, evidence.measured_run
    if isinstance(account, Uncertified):
        raise account
    if account.unit != "example":
        raise Uncertified(PER_EXAMPLE)
    errors, owners = measured_run.train["error"], measured_run.owners
    clients = len(measured_run.run.data.sizes)
    if per == "class":
        samples = Grouped(errors, *_classes(measured_run, measured_run.run.data.labels))
    else:
        samples = _of_clients(folder, errors, owners, clients)
    accounts = [
        account.of(np.bincount(owners[chosen], minlength=clients)) for _, chosen in samples.parts()
    ]
    drawn = partial(released_noise, measured_run.run.config.federation.seed, "error of a group")
    noises = [drawn(group) for group in range(len(accounts))]
    return replace(samples, accounts=accounts, noises=noises)


def _by_privacy(samples: Grouped, paid: Paid) -> Iterator[GroupCertificate]:
    parts = zip(samples.parts(), samples.accounts, samples.noises, strict=True)
    for (name, chosen), account, drawn in parts:
        errors = samples.errors[chosen]
        if not len(errors):
            why = "no training sample belongs to this group"
            yield GroupCertificate(PRIVACY, name, 0, refusal=why)
            continue
        mean = float(errors.mean())
        limit = account.released_limit(paid.failure, paid.guess)
        yield GroupCertificate(
            PRIVACY,
            name,
            len(errors),
            mean,
            limit.risk(mean + limit.noise * drawn),
            account.expected_risk(mean) if paid.settings == 1 else None,
            ONE_DRAW,
        )


# Groups


def _classes(measured_run: MeasuredRun, labels: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Return the class of each sample, and the names of all classes."""
    if labels.ndim > 1 or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(f"{NO_CLASSES}.")
    known = measured_run.run.data.label_names
    return labels, [
        known[place] if known else str(place) for place in range(measured_run.run.source.classes)
    ]


def _of_clients(folder: Path, errors: np.ndarray, owners: np.ndarray, clients: int) -> Grouped:
    """Return samples with their clients."""
    known = read_client_names(folder)
    names = [known[client] if known else str(client) for client in range(clients)]
    return Grouped(errors, owners, names)
