"""A section of a report from the columns of a study's tables: judged, drawn and told."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.columns import read_table
from fedmuon.analysis.report.findings import Findings, Picture, Rows, circumstances, titled

CIRCUMSTANCES = ("suite", "kind", "data", "scale", "seconds")


def assemble(
    folder: Path,
    about: Mapping[str, Any],
    claims: Callable[..., Sequence[Claim]],
    pictures: Callable[..., Sequence[Picture]],
    numbers: Callable[..., Rows],
    tables: Sequence[str] = ("rows",),
    stands_on: str = "",
    assumptions: Sequence[str] = (),
) -> Findings:
    """A section of a report; the functions are given the columns of each table in turn.

    The first row that `numbers` returns is the head of the table.
    """
    columns: list[Columns] = [read_table(folder / f"{name}.csv") for name in tables]
    head, *rows = numbers(*columns)
    return Findings(
        name=folder.resolve().name,
        title=titled(about),
        data=str(about["data"]),
        claims=claims(*columns),
        numbers_title="Numbers",
        head=head,
        numbers=rows,
        note=str(about.get("note", "")),
        pictures=pictures(*columns),
        stands_on=stands_on,
        assumptions=assumptions,
        again=str(about["again"]),
        circumstances=circumstances(about, CIRCUMSTANCES),
    )
