"""The command `cite`."""

from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Argument

from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import completion
from fedmuon.experiments.cli.output import tell


def cite(
    folders: Annotated[
        list[Path],
        Argument(
            help="Run folders, sweep folders, or folders that contain run or sweep folders.",
            autocompletion=completion.run_folders,
        ),
    ],
) -> None:
    """Print BibTeX entries of the methods, data and software that runs used.

    Each entry appears once. A comment above each entry gives the reason for the citation.

    Example: [bold]fedmuon cite runs/a runs/b[/]
    """
    from fedmuon.experiments.citing import references  # the config
    from fedmuon.experiments.inspect.index import runs_below  # the config
    from fedmuon.experiments.inspect.status import is_run, run_status

    used = []
    for folder in folders:
        runs = [run_status(folder)] if is_run(folder) else runs_below(folder)
        if not runs:
            raise InputError(
                f"{folder} contains no run. Pass a run folder or a folder that contains runs; "
                "`fedmuon ls` lists them."
            )
        for run in runs:
            if run.damage:
                raise InputError(run.damage)
            neighbours = (run.path / "neighbours.csv").exists()
            used.append((run.config, neighbours or run.bound is not None))
    entries = references(used)
    tell({"runs": folders, "entries": entries}, Text("\n\n".join(entries.values())))
