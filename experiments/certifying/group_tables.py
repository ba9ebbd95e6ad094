"""The limits of the error of classes or clients as tables."""

from rich.markup import escape
from rich.table import Table

from fedmuon.analysis.report.numbers import at_most, number
from fedmuon.experiments.certifying.groups import GroupCertificate, GroupCertificates
from fedmuon.experiments.tables import columns, facts, listed

MOST = 40  # rows of a table or a figure; --json has all
HEAD = ("samples", "error", "estimated at most", "certified at most")


def by_source(certificates: GroupCertificates) -> dict[str, list[GroupCertificate]]:
    """Return the rows of each source, worst group first."""
    return {
        source: [row for row in certificates.rows if row.source == source]
        for source in certificates.groups
    }


def title(certificates: GroupCertificates, source: str) -> str:
    """Return the title of the table of a source."""
    count = certificates.groups[source]
    worst = f", the {MOST} worst of {count:,}" if count > MOST else ""
    return f"Error of each {certificates.per}, from {source}{worst}"


def cells(row: GroupCertificate) -> tuple[str, str, str, str, str]:
    """Return the cells of a row."""
    error = "-" if row.error is None else number(row.error, 4)
    limits = (row.estimated, row.certified)
    estimated, certified = ("-" if limit is None else at_most(limit) for limit in limits)
    return row.group, f"{row.samples:,}", error, estimated, certified


def group_tables(certificates: GroupCertificates) -> list[Table]:
    """Return a table for each source, and a table of assumptions and refusals."""
    shown = []
    for source, rows in by_source(certificates).items():
        lines = [tuple(map(escape, cells(row))) for row in rows[:MOST]]
        head = (certificates.per, *HEAD)
        if all(row.estimated is None for row in rows):
            lines, head = [(*line[:3], line[4]) for line in lines], (*head[:3], head[4])
        table = columns(title(certificates, source), head, lines)
        table.caption = (
            f"The certified limits hold together with probability {certificates.confidence:g}."
        )
        shown.append(table)
    lines = [
        line
        for source, sentences in certificates.assumptions.items()
        for line in listed(source, sentences)
    ]
    refused = [(f"{source}: refused", why) for source, why in certificates.refused.items()]
    notes = listed("note", certificates.notes)
    return [*shown, facts("Assumptions" if shown else "No limits", [*lines, *refused, *notes])]
