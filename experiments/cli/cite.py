"""The command `cite`."""

from rich.text import Text

from fedmuon.core.errors import InputError
from fedmuon.experiments.cli.options import RunFolder
from fedmuon.experiments.cli.output import tell


def cite(run_dir: RunFolder) -> None:
    """Print BibTeX entries of the methods, data and software that a run used.

    Example: [bold]fedmuon cite runs/a[/]
    """
    from fedmuon.experiments.citing import references  # the config
    from fedmuon.experiments.inspect.status import run_status  # the config

    if (run := run_status(run_dir)).damage:
        raise InputError(run.damage)
    neighbours = (run_dir / "neighbours.csv").exists()
    found = references(run.config, neighbours or run.bound is not None)
    tell({"run": run_dir, "entries": found}, Text("\n\n".join(found.values())))
