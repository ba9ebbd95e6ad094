"""The certificates of a run, stored in its folder, so that they can be shown without computing.

The file contains the certificates of the latest `fedmuon certify`, the version of fedmuon, and a
digest of the checksums of the run's files. If one of them differs, the certificates are not shown.
"""

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, mendable, read_text, sums_of, write_bytes
from fedmuon.experiments.certifying.choices import TriedSettings, tried_settings
from fedmuon.experiments.certifying.rows import GUESS, RiskCertificates

FILE = "certificates.json"
TITLE = "Risk of the final model"
DAMAGED = f"{FILE} is damaged"
CHANGED = "the run has changed since they were computed"
VERSION = "fedmuon {} computed them, and this is fedmuon {}"
OPTIONS = {"confidence": 0.95, "probes": 0, "guess": GUESS, "average": False}


@dataclass(frozen=True)
class StoredCertificates:
    """The content of the file.

    Attributes:
        certificates: The certificates, or None if they cannot be read.
        outdated: Why they do not belong to the run as it is now, or "" if they do.
    """

    certificates: RiskCertificates | None
    outdated: str = ""


def state_of(folder: Path) -> str:
    """Return a digest of the checksums of a run's files, and of the settings of its sweep."""
    lines = "".join(f"{value}  {name}\n" for name, value in sorted(sums_of(folder).items()))
    if (tried := tried_settings(folder)) != TriedSettings():  # a sweep may get more settings
        lines += f"{tried.settings}  {tried.damaged}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def computed(folder: Path, compute: Callable[[], RiskCertificates]) -> tuple[RiskCertificates, str]:
    """Compute the certificates of a run and store them.

    Returns:
        The certificates, and why they could not be stored, or "".
    """
    state = state_of(folder)  # before the files are read, in case that the run changes meanwhile
    certificates = compute()
    content: Record = {
        "fedmuon": version("fedmuon"),
        "run": state,
        "certificates": certificates.record(),
    }
    sealed = content | {"check": _check(content)}
    try:
        write_bytes(folder / FILE, (json.dumps(sealed, indent=2) + "\n").encode())
    except InputError as reason:
        return certificates, f"The certificates are not stored: {reason}"
    return certificates, ""


def read(folder: Path) -> StoredCertificates | None:
    """Return the stored certificates of a run, or None if there are none.

    The caller must check that the files of the run match their checksums.
    """
    if not (folder / FILE).exists():
        return None
    try:
        with mendable(folder / FILE, "read"):
            content = json.loads(read_text(folder / FILE))
        check, writer = content.pop("check"), str(content["fedmuon"])
        if check != _check(content):
            return StoredCertificates(None, DAMAGED)
        if writer != (reader := version("fedmuon")):
            return StoredCertificates(None, VERSION.format(writer, reader))
        certificates = RiskCertificates.of_record(content["certificates"])
    except (InputError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return StoredCertificates(None, DAMAGED)
    return StoredCertificates(certificates, "" if content["run"] == state_of(folder) else CHANGED)


def current(folder: Path) -> RiskCertificates | None:
    """Return the stored certificates of a run, or None if there are none for it as it is now."""
    stored = read(folder)
    return None if stored is None or stored.outdated else stored.certificates


def _check(content: Record) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def command(folder: Path, certificates: RiskCertificates | None, in_python: bool = False) -> str:
    """Return the command that computes these certificates, or the default ones for None.

    Args:
        folder: The run folder.
        certificates: The certificates.
        in_python: Whether the run needs Python objects, so that no command can open it.
    """
    options = _options(certificates)
    if in_python:
        keywords = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"fedmuon.certify(result{keywords}) in Python, with the result of fedmuon.run"
    words = [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [value]))
    ]
    return shlex.join(["fedmuon", "certify", str(folder), *map(str, words)])


def _options(certificates: RiskCertificates | None) -> Record:
    """Return the options that differ from their defaults."""
    if certificates is None:
        return {}
    values = {
        "confidence": certificates.confidence,
        "settings": certificates.settings,
        "output_noise": certificates.output_noise,
        "probes": certificates.predicted.get("probes", 0),
        "guess": certificates.guess,
        "average": certificates.average,
    }
    defaults = {
        **OPTIONS,
        "settings": certificates.counted,
        "output_noise": certificates.configured_noise,
    }
    return {name: value for name, value in values.items() if value != defaults[name]}


def origin(folder: Path, in_python: bool = False) -> str:
    """Return a sentence with the command that computed the stored certificates, or computes them.

    The arguments are those of `command`.
    """
    stored = read(folder)
    by = command(folder, stored.certificates if stored else None, in_python)
    if stored is None:
        return f"To compute upper limits of the error on new samples, use: {by}"
    if stored.outdated:
        return (
            f"The stored limits of the error are not shown, because {stored.outdated}. Compute "
            f"them again with: {by}"
        )
    return f"Risk computed with: {by}"
