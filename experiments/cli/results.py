"""Commands that look at what is finished: `compare`, `report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedmuon.experiments.cli.options import complain, console, where


def compare(
    folders: Annotated[list[Path], Argument(help="Run directories, or folders of them.")],
    figure: Annotated[
        Path | None, Option(help="Draw the curves into this .png or .pdf file.")
    ] = None,
) -> None:
    """Show finished runs side by side: by the keys in which they differ, mean and ± over seeds.

    One table where there is room, else what was measured above the keys. ± is the standard
    deviation of a sample, over n - 1.
    Example: [bold]fedmuon compare runs/a runs/b --figure curves.png[/]
    """
    from fedmuon.core.choices import SPREAD
    from fedmuon.experiments.compare import comparison
    from fedmuon.experiments.inspect.listing import side_by_side
    from fedmuon.experiments.tables import columns

    found = comparison({"": folders})
    whole, measured, keys = side_by_side(found)
    one = columns("", *whole)
    apart = len(keys[0]) > 1 and not one.fits(console, console.options)
    for table in [columns("", *measured), columns("", *keys)] if apart else [one]:
        console.print(table)
    if any(name.endswith(SPREAD) for name in found.measures):
        console.print(
            "± is the standard deviation over seeds (of a sample, over n - 1).", highlight=False
        )
    for (name, *_), row in zip(whole[1], found.rows, strict=True):
        if "spent epsilon" in row:
            console.print(f"{name}: {_spent(row)}", highlight=False)
    if found.note:
        console.print(found.note)
    for why in found.left_out:
        complain(f"left out: {why}")
    if figure is not None:
        from fedmuon.analysis.report.style import saved_as

        saved_as(found.plot(), figure)
        console.print("The curves are in", where(figure), soft_wrap=True)


def report(
    folder: Annotated[
        Path, Argument(help="What suite, stability or run wrote, or a folder of such folders.")
    ],
) -> None:
    """Write figures and one self-contained HTML page: which claims hold, by how much.

    It has suites, runs with neighbours, and plain runs side by side; and says which of a folder it
    leaves out, as they are damaged, and which have neighbours still to be run.
    Example: [bold]fedmuon report runs/A1[/]
    """
    from fedmuon.experiments.report import write_report

    page = write_report(folder, complain)
    console.print("The report is", where(page), soft_wrap=True)


def _spent(row: dict[str, object]) -> str:
    """What the private runs of a row spent at most."""
    from fedmuon.analysis.report.numbers import number

    spent, delta = number(row["spent epsilon"]), number(row["at delta"], 3)
    doubt = "" if row["certified"] else ", not certified"
    of = f"{row['adjacency']}, level {row['level']}"
    return f"spent epsilon {spent} at delta = {delta}, {of}{doubt}"
