"""A section of a report from the columns of a study's tables: judged, drawn and told."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmuon.analysis.report.columns import read_table
from fedmuon.analysis.report.findings import Findings, Rows
from fedmuon.analysis.report.verdicts import Claim
from fedmuon.experiments.studies import part


def findings(kind: str, folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of a suite's folder, whose suite.json is `about`."""
    own = part(kind, "findings")
    if hasattr(own, "findings"):
        return own.findings(folder, about)
    return assemble(kind, folder, about, own.claims, own.numbers, own.STANDS_ON)


def assemble(
    kind: str,
    folder: Path,
    about: Mapping[str, Any],
    claims: Callable[..., Sequence[Claim]],
    numbers: Callable[..., Rows],
    stands_on: str,
    tables: Sequence[str] = ("rows",),
) -> Findings:
    """What a study comes to; its functions and pictures are given the columns of each table.

    The first row that `numbers` returns is the head of the table.
    """
    columns = [read_table(folder / f"{name}.csv") for name in tables]
    head, *rows = numbers(*columns)
    return Findings.of_suite(
        folder,
        about,
        claims=claims(*columns),
        numbers_title="Numbers",
        head=head,
        numbers=rows,
        pictures=[one.of(*columns) for one in part(kind, "figure").PICTURES],
        stands_on=stands_on,
        facts=("suite", "kind", "data", "scale", "seconds"),
    )
