"""The `fedmuon` command: it parses, shows, and turns user errors into exit code 2."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from fedmuon.core.errors import AGAIN, InputError, Interrupted
from fedmuon.core.registry import blamed
from fedmuon.core.signals import interruptible
from fedmuon.experiments.cli.keys import app as config
from fedmuon.experiments.cli.keys import names
from fedmuon.experiments.cli.look import compare, ls, report, show, watch
from fedmuon.experiments.cli.options import WithKeys, complain, sound
from fedmuon.experiments.cli.privacy import app as privacy
from fedmuon.experiments.cli.project import make_text, new
from fedmuon.experiments.cli.runs import deploy_demo, doctor, plan, run, stability, suite, unlearn
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


def _say_version(asked: bool) -> None:
    if asked:
        from fedmuon import __version__

        typer.echo(f"fedmuon {__version__}")
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool,
        Option("--version", help="Say the version.", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    """What comes before a command; the help is the app's own."""


def prefer_wide_vectors() -> None:
    """Let OpenBLAS use AVX-512 on AMD processors, where it would choose a narrower kernel.

    It reads the variable when numpy is first imported, hence before anything else.
    """
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return
    if "AuthenticAMD" in processor and "avx512f" in processor and "numpy" not in sys.modules:
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")


def spin_briefly() -> None:
    """Let torch's threads wait for each other asleep after some 20 us: the default, milliseconds
    long, takes a busy machine's processors from whom they wait for.

    OpenMP reads the variable when torch is first imported.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: exit code 0 when done, 2 when the user can mend it, 130 or 143 when stopped."""
    with interruptible():
        try:
            prefer_wide_vectors()
            spin_briefly()
            return app(sound(arguments))
        except InputError as error:
            complain(str(error))
            raise SystemExit(2) from None
        except Interrupted as wish:
            complain(f"interrupted: {AGAIN}")  # the command may have written files
            raise SystemExit(wish.exit_code) from None
        except SystemExit as error:
            if (said := blamed(error)) is None:
                raise
            complain(said)
            raise SystemExit(2) from error
        except Exception as error:
            if (said := blamed(error) or _of_system(error)) is None:
                raise
            complain(said)
            raise SystemExit(2) from error


def _of_system(error: Exception) -> str | None:
    """What the system refuses, as a sentence."""
    if isinstance(error, OSError):  # a full or closed terminal, temporary folder, name of a file
        place = error.filename or "the output, or the folder of temporary files (TMPDIR)"
        return f"the system refuses {place} ({error.strerror}): make room, or choose another"
    if isinstance(error, MemoryError):
        return "the memory of this machine does not suffice: make the experiment smaller"
    return None
