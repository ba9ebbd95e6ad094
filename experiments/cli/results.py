"""Commands that look at what is finished: `compare`, `report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedmuon.experiments.cli.options import console, where


def compare(
    folders: Annotated[list[Path], Argument(help="Run directories, or folders of them.")],
    figure: Annotated[
        Path | None, Option(help="Draw the curves into this .png or .pdf file.")
    ] = None,
) -> None:
    """Finished runs side by side: mean ± standard deviation over seeds, and the keys in which they
    differ.

    Example: [bold]fedmuon compare runs/a runs/b --figure curves.png[/]
    """
    from rich.markup import escape
    from rich.table import Table

    from fedmuon.library import compare as compared

    found = compared(folders)
    names = [name for name in found.measures if not name.endswith((" ±", "gap", "seconds"))]
    table = Table("", "seeds", *(name.replace("_", " ") for name in names))
    for number, row in enumerate(found.rows, 1):
        cells = [_spread(row, name) for name in names]
        table.add_row(str(number), str(row["seeds"]), *cells)
    console.print(table)
    for number, row in enumerate(found.rows, 1):
        console.print(f"{number}  {escape(str(row['run']))}", highlight=False)
        if "spent epsilon" in row:
            console.print(f"   {_spent(row)}", highlight=False)
    if found.note:
        console.print(found.note)
    if figure is not None:
        from fedmuon.analysis.report.style import saved_as

        saved_as(found.plot(), figure)
        console.print("The curves are in", where(figure), soft_wrap=True)


def report(
    folder: Annotated[
        Path, Argument(help="What suite or stability wrote, or a folder of such folders.")
    ],
) -> None:
    """Write figures and one self-contained HTML page: which claims hold, by how much.

    It has suites and runs with neighbours; plain runs are left out: `fedmuon compare` shows them.
    Example: [bold]fedmuon report runs/A1[/]
    """
    from fedmuon.experiments.report import left_out, write_report

    console.print("The report is", where(write_report(folder)), soft_wrap=True)
    if count := left_out(folder):
        runs = "1 plain run is" if count == 1 else f"{count} plain runs are"
        console.print(f"{runs} left out, to be seen by fedmuon compare", where(folder),
                      soft_wrap=True)  # fmt: skip


def _spent(row: dict[str, object]) -> str:
    """What the private runs of a row spent at most."""
    found = "{spent epsilon:.4g} at delta = {at delta:.3g}, {adjacency}, level {level}"
    doubt = "" if row["certified"] else ", not certified"
    return f"spent epsilon {found.format_map(row)}{doubt}"


def _spread(row: dict[str, object], name: str) -> str:
    """Mean, and standard deviation over seeds if there are several."""
    if name not in row:
        return "-"
    spread = row.get(f"{name} ±")
    return f"{row[name]:.4g}" + (f" ± {spread:.2g}" if spread is not None else "")
