"""The `fedmuon` command: its subcommands, and its exit codes."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from fedmuon.core.errors import AGAIN, InputError, Interrupted
from fedmuon.core.registry import blame
from fedmuon.core.signals import interruptible
from fedmuon.experiments.cli.keys import app as config
from fedmuon.experiments.cli.keys import names
from fedmuon.experiments.cli.look import compare, ls, report, show, watch
from fedmuon.experiments.cli.options import WithKeys, complain
from fedmuon.experiments.cli.privacy import app as privacy
from fedmuon.experiments.cli.project import doctor, make_text, new
from fedmuon.experiments.cli.runs import deploy_demo, plan, run, stability, suite, unlearn
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
    show,
    ls,
    compare,
    report,
    bound,
    stationarity,
    flops,
    make_text,
    deploy_demo,
    new,
    doctor,
):
    app.command(cls=WithKeys)(command)
app.command("list", cls=WithKeys)(names)
app.add_typer(config, name="config")
app.add_typer(privacy, name="privacy")


def _print_version(asked: bool) -> None:
    if asked:
        from fedmuon import __version__  # `fedmuon` loads its names when they are used

        typer.echo(f"fedmuon {__version__}")
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool,
        Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options that come before a subcommand; the help is the app's own."""


def set_thread_defaults() -> None:
    """Set what numpy and torch read when they are imported, unless the user has set it.

    OpenBLAS uses AVX-512 on AMD processors, where it would choose a narrower kernel. Threads of
    torch sleep after waiting for about 20 us for each other. By default they spin for milliseconds,
    and on a busy machine take the processor from the thread they wait for.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    with contextlib.suppress(OSError):
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if "AuthenticAMD" in processor and "avx512f" in processor and "numpy" not in sys.modules:
            os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit codes: 0 when done, 2 if the user can fix it, 130 or 143 if stopped."""
    with interruptible():
        try:
            set_thread_defaults()
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
            if (why := blame(error) or _refused_by_system(error)) is None:
                raise
            complain(why)
            raise SystemExit(2) from error


def _refused_by_system(error: BaseException) -> str | None:
    """What the operating system refused, and what to do."""
    if isinstance(error, OSError):  # a full disk or terminal, a name that is too long
        place = error.filename or "the output, or the folder of temporary files (TMPDIR)"
        return f"the system refuses {place} ({error.strerror}): make room, or choose another"
    if isinstance(error, MemoryError):
        return "the memory of this machine does not suffice: make the experiment smaller"
    return None
