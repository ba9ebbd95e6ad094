"""The certificates of a run as tables. This module loads quickly, for `fedmuon show`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedmuon.analysis.report.numbers import at_most, number
from fedmuon.experiments.certifying import stored
from fedmuon.experiments.certifying.rows import RiskCertificate, RiskCertificates
from fedmuon.experiments.tables import columns, facts, listed

HEAD = ("certificate", "what it is", "measured", "at most")


def tables(certificates: RiskCertificates) -> list[Table]:
    """Return the table of certificates, and the table of their assumptions."""
    rows = [tuple(map(escape, row)) for row in cells(certificates.rows)]
    table = columns(title(certificates), HEAD, rows, left=2)
    return [table, facts("Assumptions", _assumptions(certificates))]


def stored_tables(folder: Path) -> list[Table]:
    """Return the tables of a run's stored certificates without the refused rows.

    The list is empty if no certificates are stored, or they are outdated.
    """
    certificates = stored.current(folder)
    if certificates is None:
        return []
    limits = [row for row in certificates.rows if row.value is not None]
    refused = len(certificates.rows) - len(limits)
    tables_of_limits = tables(replace(certificates, rows=limits))
    if refused:
        tables_of_limits[0].caption = f"Not shown: {refused} refused. The command says why."
    return tables_of_limits


def title(certificates: RiskCertificates) -> str:
    """Return the title of the table, with the numbers of samples."""
    counts = f"{certificates.samples:,} training samples, {certificates.held_out:,} held out"
    title = stored.TITLE
    if certificates.average:
        title = title.replace("final model", "average of the last models")
    return f"{title} ({counts})"


def cells(rows: Sequence[RiskCertificate]) -> list[tuple[str, ...]]:
    """Return the cells of the table, as plain text."""
    return [
        (
            f"{row.name}: {row.measure}",
            row.refusal if row.value is None else _holds(row),
            "-" if row.beside is None else number(row.beside, 4),
            row.status if row.value is None else at_most(row.value),
        )
        for row in rows
    ]


def _confidence(value: float) -> str:
    """Return a confidence in four digits, or as 1 − b if it is near 1."""
    return f"{value:.4g}" if value < 0.9995 else f"1 − {1 - value:.2g}"


def _holds(row: RiskCertificate) -> str:
    """Return how a limit holds, its method and its cost."""
    with_what = "" if row.confidence is None else f", {_confidence(row.confidence)}"
    return f"{row.status}{with_what}; {row.method}; costs {row.cost}"


def assumptions_of(rows: Sequence[RiskCertificate]) -> dict[str, list[str]]:
    """Return the assumptions, by the names of the certificates that use them."""
    users: dict[str, list[str]] = {}
    for row in rows:
        for sentence in row.assumptions:
            names = users.setdefault(sentence, [])
            names += [row.name] * (row.name not in names)
    by_names: dict[str, list[str]] = {}
    for sentence, names in users.items():
        by_names.setdefault(", ".join(names), []).append(sentence)
    return by_names


def _assumptions(certificates: RiskCertificates) -> list[tuple[str, object]]:
    """Return each assumption once, under the certificates that use it."""
    by_names = assumptions_of(certificates.rows)
    rows = [line for names, lines in by_names.items() for line in listed(names, lines)]
    if gap := certificates.predicted:
        error = "" if gap["standard_error"] is None else f" ± {number(gap['standard_error'], 2)}"
        rows.append(("predicted gap of the loss", f"{number(gap['gap'], 4)}{error} (standard error "
                     f"over {gap['probes']} probes; first order, certifies nothing)"))  # fmt: skip
    return [*rows, *listed("note", certificates.notes)]
