"""The certificates of a run as tables."""

from rich.markup import escape
from rich.table import Table

from fedmuon.analysis.report.numbers import number
from fedmuon.experiments.certifying.certify import RiskCertificate, RiskCertificates
from fedmuon.experiments.tables import columns, facts, listed


def tables(certificates: RiskCertificates) -> list[Table]:
    """Return the table of certificates, and the table of their assumptions."""
    rows = [
        (
            escape(f"{row.name}: {row.measure}"),
            escape(row.refusal if row.value is None else _holds(row)),
            "-" if row.beside is None else number(row.beside, 4),
            row.status if row.value is None else number(row.value, 4),
        )
        for row in certificates.rows
    ]
    counts = f"{certificates.samples:,} training samples, {certificates.held_out:,} held out"
    title = f"Risk of the final model ({counts})"
    table = columns(title, ("certificate", "what it is", "measured", "at most"), rows, left=2)
    return [table, facts("Assumptions", _assumptions(certificates))]


def _holds(row: RiskCertificate) -> str:
    """Return how a limit holds, its method and its cost."""
    with_what = "" if row.confidence is None else f", {row.confidence:.4g}"
    return f"{row.status}{with_what}; {row.method}; costs {row.cost}"


def _assumptions(certificates: RiskCertificates) -> list[tuple[str, object]]:
    """Return each assumption once, under the certificates that use it."""
    users: dict[str, list[str]] = {}
    for row in certificates.rows:
        for sentence in row.assumptions:
            names = users.setdefault(sentence, [])
            names += [row.name] * (row.name not in names)
    by_names: dict[str, list[str]] = {}
    for sentence, names in users.items():
        by_names.setdefault(", ".join(names), []).append(sentence)
    rows = [line for names, lines in by_names.items() for line in listed(names, lines)]
    if gap := certificates.predicted:
        error = "" if gap["standard_error"] is None else f" ± {number(gap['standard_error'], 2)}"
        rows.append(("predicted gap of the loss", f"{number(gap['gap'], 4)}{error} (standard error "
                     f"over {gap['probes']} probes; first order, certifies nothing)"))  # fmt: skip
    return [*rows, *listed("note", certificates.notes)]
