"""The `fedmuon` command: its subcommands, and its exit codes."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer import Option

import fedmuon
from fedmuon.core.errors import AGAIN, InputError, Interrupted
from fedmuon.core.files import why_and_remedy
from fedmuon.core.registry import blame
from fedmuon.core.signals import interruptible
from fedmuon.experiments.cli.options import Command, Group
from fedmuon.experiments.cli.output import complain

# Panel of the help -> command -> its file in this folder, or file:name if the function has another
# name.
PANELS = {
    "Run": {
        "run": "runs", "sweep": "runs", "plan": "runs", "deploy-demo": "runs",
    },
    "Look": {
        "show": "look", "ls": "look", "watch": "look", "compare": "look", "report": "look",
    },
    "Stability": {
        "stability": "runs", "bound": "theory", "certify": "certify", "gap": "runs",
        "unlearn": "runs",
    },
    "Privacy": {
        "privacy": "privacy:app",
    },
    "Papers": {
        "suite": "runs", "tune": "runs", "stationarity": "theory", "flops": "theory",
        "cite": "cite",
    },
    "Project": {
        "new": "project", "config": "keys:app", "list": "keys:names", "doctor": "project",
        "make-text": "project", "score-text": "project",
    },
}  # fmt: skip
PLACES = {name: place for commands in PANELS.values() for name, place in commands.items()}
EXIT_CODES = {
    0: "success",
    1: "an unexpected error, with a traceback: please report it",
    2: "an error that you can fix; a message on stderr says how",
    130: "interrupted with Ctrl-C",
    143: "stopped with SIGTERM",
}


class Commands(Mapping[str, click.Command]):
    """A mapping of names to commands.

    The file of a command is imported at the first lookup, so that `fedmuon show` does not load the
    theory.
    """

    def __init__(self) -> None:
        self._made: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._made:
            file, _, inside = PLACES[name].partition(":")
            module = import_module(f"{__name__}.{file}")
            entry = getattr(module, inside or name.replace("-", "_"))
            panel = next(panel for panel, commands in PANELS.items() if name in commands)
            wrapper = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
            if isinstance(entry, typer.Typer):
                wrapper.add_typer(entry, name=name, cls=Group, rich_help_panel=panel)
            else:
                wrapper.command(name, cls=Command, rich_help_panel=panel)(entry)
            self._made[name] = typer.main.get_group(wrapper).commands[name]
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


class Laboratory(Group):
    """The command `fedmuon`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Commands()


app = typer.Typer(
    cls=Laboratory,
    help=(
        "Simulate federated and private learning with orthogonalized momentum (Muon), and "
        "compare runs with theory.\n\nStart with [bold]fedmuon run[/]. For the help of a "
        "command, use [bold]fedmuon COMMAND --help[/]."
    ),
    epilog="Exit codes: "
    + "; ".join(f"{code}: {meaning}" for code, meaning in EXIT_CODES.items())
    + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def whole(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    """Handle the options that come before a subcommand."""
    if version:
        typer.echo(f"fedmuon {fedmuon.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line. `EXIT_CODES` lists the possible exit codes."""
    with interruptible():
        try:
            return _run(arguments)
        except Interrupted as wish:  # also while `_run` prints an error
            complain(f"interrupted: {AGAIN}")  # the command may have written some files
            raise SystemExit(wish.exit_code) from None


def _run(arguments: list[str] | None) -> Any:
    """Run the command line, and print errors that the user can fix as one sentence."""
    try:
        for argument in arguments or ():
            if "\0" in argument:  # system calls would cut the argument at the NUL
                raise InputError(
                    f"the argument {argument!r} contains a NUL character: remove this character"
                )
        return app(arguments)
    except InputError as error:
        complain(str(error))
        raise SystemExit(2) from None
    except (Exception, SystemExit) as error:
        reason = blame(error)
        if not reason and isinstance(error, OSError):  # a full disk, a name that is too long
            place = error.filename or "the output, or the folder of temporary files (TMPDIR)"
            path = Path(error.filename) if isinstance(error.filename, str) else None
            reason = f"the system rejects access to {place} {why_and_remedy(error, path)}"
        elif not reason and isinstance(error, MemoryError):
            reason = (
                "this machine has too little memory for the command. Make the experiment "
                "smaller, for example with fewer clients per round or a smaller model."
            )
        if reason is None:
            raise
        complain(reason)
        raise SystemExit(2) from error
