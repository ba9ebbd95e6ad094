"""The stored certificates of a run in a section of a report."""

from dataclasses import replace
from pathlib import Path

from fedmuon.analysis.report.findings import Findings
from fedmuon.experiments.certifying.shown import HEAD, assumptions_of, cells, title
from fedmuon.experiments.certifying.stored import current


def with_certificates(findings: Findings, folder: Path, origin: str) -> Findings:
    """Return the section of a run with its stored certificates and their assumptions.

    Args:
        findings: The section.
        folder: The run folder.
        origin: A sentence with the command that computes the certificates, or "".
    """
    circumstances = [*findings.circumstances, *([("risk", origin)] if origin else [])]
    findings = replace(findings, circumstances=circumstances)
    certificates = current(folder)
    if certificates is None:
        return findings
    limits = [row for row in certificates.rows if row.value is not None]
    assumptions = [
        f"{names}: {sentence}"
        for names, sentences in assumptions_of(limits).items()
        for sentence in sentences
    ]
    return replace(
        findings,
        more=[*findings.more, (title(certificates), HEAD, cells(limits))],
        assumptions=[*findings.assumptions, *assumptions],
    )
