"""The `fedmuon` command: its subcommands, and its exit codes."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer import Option
from typer.core import TyperGroup

import fedmuon
from fedmuon.core.errors import AGAIN, InputError, Interrupted
from fedmuon.core.files import why_and_remedy
from fedmuon.core.registry import blame
from fedmuon.core.signals import interruptible
from fedmuon.experiments.cli.options import WithKeys, complain

# Command, in the order of the help -> its file here, and its name there if that is another.
PLACES = {
    "run": "runs",
    "watch": "look",
    "plan": "runs",
    "stability": "runs",
    "unlearn": "runs",
    "suite": "runs",
    "sweep": "runs",
    "show": "look",
    "ls": "look",
    "compare": "look",
    "report": "look",
    "bound": "theory",
    "stationarity": "theory",
    "flops": "theory",
    "make-text": "project",
    "score-text": "project",
    "deploy-demo": "runs",
    "new": "project",
    "doctor": "project",
    "list": "keys:names",
    "config": "keys:app",
    "privacy": "privacy:app",
}


class Commands(Mapping[str, click.Command]):
    """Name -> command. The file of a command is imported when the command is looked up, so that
    `fedmuon show` does not wait for the theory."""

    def __init__(self) -> None:
        self._made: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._made:
            file, _, inside = PLACES[name].partition(":")
            module = import_module(f"{__name__}.{file}")
            found = getattr(module, inside or name.replace("-", "_"))
            one = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
            if isinstance(found, typer.Typer):
                one.add_typer(found, name=name)
            else:
                one.command(name, cls=WithKeys)(found)
            self._made[name] = typer.main.get_group(one).commands[name]
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


class Laboratory(TyperGroup):
    """The command `fedmuon`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Commands()


app = typer.Typer(
    cls=Laboratory,
    help="A laboratory for orthogonalized-momentum (Muon) optimization in federated and private "
    "learning: simulate rounds, and check what the theory promises against what happens.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def whole(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    """Options that come before a subcommand; the help is the app's own."""
    if version:
        typer.echo(f"fedmuon {fedmuon.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit codes: 0 when done, 2 if the user can fix it, 130 or 143 if stopped."""
    with interruptible():
        try:
            for argument in arguments or ():
                if "\0" in argument:  # no system call would see it whole
                    raise InputError(
                        f"the argument {argument!r} holds a NUL character: leave it out"
                    )
            return app(arguments)
        except InputError as error:
            complain(str(error))
            raise SystemExit(2) from None
        except Interrupted as wish:
            complain(f"interrupted: {AGAIN}")  # the command may have written files
            raise SystemExit(wish.exit_code) from None
        except (Exception, SystemExit) as error:
            why = blame(error)
            if not why and isinstance(error, OSError):  # a full disk, a name that is too long
                place = error.filename or "the output, or the folder of temporary files (TMPDIR)"
                path = Path(error.filename) if isinstance(error.filename, str) else None
                why = f"the system refuses {place} {why_and_remedy(error, path)}"
            elif not why and isinstance(error, MemoryError):
                why = "the memory of this machine does not suffice: make the experiment smaller"
            if why is None:
                raise
            complain(why)
            raise SystemExit(2) from error
