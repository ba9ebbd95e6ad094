"""`fedmuon make-text`: tables and sentences where no corpus is at hand."""

from pathlib import Path
from typing import Annotated

import typer

from fedmuon.experiments.cli.options import console, where


def make_text(
    folder: Annotated[Path, typer.Argument(help="Where to write the train, dev and test files.")],
    form: Annotated[str, typer.Option("--format", help="e2e (CSV) or dart (JSON).")] = "e2e",
    tables: Annotated[int, typer.Option("--tables", help="How many, 10 to 5000.")] = 500,
    domain: Annotated[
        str, typer.Option("--about", help="restaurants, or lodgings with other wordings.")
    ] = "restaurants",
    seed: Annotated[int, typer.Option("--seed", help="Another seed makes up others.")] = 0,
) -> None:
    """Make up tables and sentences in the format of E2E or DART; no line is from these corpora.

    Example: [bold]fedmuon make-text data/e2e[/], then
    [bold]fedmuon run --set data.name=e2e --set data.folder=data/e2e ...[/]
    """
    from fedmuon.data.made_text import make_text as write

    for file in write(folder, form, tables, domain, seed):
        console.print("made up", where(file))
