"""The `fedmuon` command: it parses, shows, and turns user errors into exit code 2."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from fedmuon.config import Config

app = typer.Typer(
    help="A laboratory for orthogonalized-momentum (Muon) optimization in federated and private "
    "learning: simulate rounds, and check what the theory promises against what happens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

ConfigFile = Annotated[
    Path | None, typer.Argument(help="A TOML file; without one, the defaults: mnist5k, N=20, K=5.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change one key; may be repeated."),
]
OutFolder = Annotated[
    Path | None, typer.Option("--out", help="The run directory; a new one below runs/ by default.")
]


@app.command()
def run(
    config: ConfigFile = None,
    out: OutFolder = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, to the same bytes.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", help="inline, or ray: Flower's client processes.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="A running Ray cluster to use.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what Flower and Ray have to say.")
    ] = False,
) -> None:
    """Run one federated experiment and write its run directory.

    Example: [bold]fedmuon run --set local.lr=0.02 --set data.name=fashion-mnist --out runs/a[/]
    """
    from experiments.run import execute
    from experiments.show import Progress, summary_table

    changes = [*(overrides or [])]
    changes += [f"engine.name={engine}"] if engine else []
    changes += [f"engine.ray-address={ray_address}"] if ray_address else []
    chosen = _config(config, changes, resume)
    if resume and out is None:
        _refuse("--resume needs --out: name the run directory to go on with")
    folder = out or _fresh_folder(chosen)
    with Progress(console) as progress:
        summary = execute(chosen, folder, resume, progress.watch, progress.begin, verbose)
    console.print(summary_table(summary))
    console.print(f"Results are in [bold]{folder}[/]")


@app.command()
def doctor() -> None:
    """Say what this machine has: devices, data sources and how to get the others, versions."""
    from experiments.doctor import report

    report(console)


def _config(file: Path | None, overrides: list[str], resume: bool) -> "Config | None":
    """The experiment asked for; None when a resumed run shall bring its own."""
    from fedmuon import config

    return None if resume and not (file or overrides) else config.load(file, overrides)


def _fresh_folder(config: "Config | None") -> Path:
    assert config is not None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.data.name}-{config.local.recipe}-seed{config.federation.seed}-{stamp}"
    return Path("runs") / name


def _refuse(sentence: str) -> None:
    from fedmuon.errors import InputError

    raise InputError(sentence)


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


def _complain(sentence: str) -> None:
    """One sentence on stderr; its [brackets] are tables of the config, not markup."""
    text = Text.assemble(("fedmuon: ", "bold red"), sentence)
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: exit code 0 when done, 2 when the user can mend it, 130 when interrupted."""
    prefer_wide_vectors()
    from fedmuon.errors import InputError

    try:
        return app(arguments)
    except InputError as error:
        _complain(str(error))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted: go on with [bold]--resume[/]")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
