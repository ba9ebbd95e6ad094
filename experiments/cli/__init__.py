"""The `fedmuon` command: its subcommands, and its exit codes."""

from typing import Annotated, Any

import typer
from typer import Option

import fedmuon
from fedmuon.core.errors import AGAIN, InputError, Interrupted
from fedmuon.core.registry import blame
from fedmuon.core.signals import interruptible
from fedmuon.experiments.cli.keys import app as config
from fedmuon.experiments.cli.keys import names
from fedmuon.experiments.cli.look import compare, ls, report, show, watch
from fedmuon.experiments.cli.options import WithKeys, complain
from fedmuon.experiments.cli.privacy import app as privacy
from fedmuon.experiments.cli.project import doctor, make_text, new, score_text
from fedmuon.experiments.cli.runs import deploy_demo, plan, run, stability, suite, sweep, unlearn
from fedmuon.experiments.cli.theory import bound, flops, stationarity

app = typer.Typer(
    help="A laboratory for orthogonalized-momentum (Muon) optimization in federated and private "
    "learning: simulate rounds, and check what the theory promises against what happens.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run,
    watch,
    plan,
    stability,
    unlearn,
    suite,
    sweep,
    show,
    ls,
    compare,
    report,
    bound,
    stationarity,
    flops,
    make_text,
    score_text,
    deploy_demo,
    new,
    doctor,
):
    app.command(cls=WithKeys)(command)
app.command("list", cls=WithKeys)(names)
app.add_typer(config, name="config")
app.add_typer(privacy, name="privacy")


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
                why = f"the system refuses {place} ({error.strerror}): make room, or choose another"
            elif not why and isinstance(error, MemoryError):
                why = "the memory of this machine does not suffice: make the experiment smaller"
            if why is None:
                raise
            complain(why)
            raise SystemExit(2) from error
