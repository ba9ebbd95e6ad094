"""The `fedmuon` command: it parses, shows, and turns user errors into exit code 2."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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
        str | None,
        typer.Option("--engine", help="inline, ray or deployment: who runs the clients."),
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
    folder = _folder(out, chosen, resume)
    with Progress(console) as progress:
        summary = execute(chosen, folder, resume, progress.watch, progress.begin, verbose)
    console.print(summary_table(summary))
    console.print(f"Results are in [bold]{folder}[/]")


@app.command("deploy-demo")
def deploy_demo(
    config: ConfigFile = None,
    out: OutFolder = None,
    overrides: Overrides = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and without SuperNode keys.")
    ] = False,
) -> None:
    """Run one experiment on a SuperLink and a SuperNode a client, started and stopped here.

    Without a config: 3 rounds of 2 of 3 clients on synthetic data.
    Example: [bold]fedmuon deploy-demo --set federation.rounds=5 --out runs/deployed[/]
    """
    from experiments.deploy import DEMO, deploy
    from experiments.show import Progress, summary_table

    chosen = _config(config, [*([] if config else DEMO), *(overrides or [])], False)
    assert chosen is not None
    folder = _folder(out, chosen)
    with Progress(console) as progress:
        summary = deploy(chosen, folder, not insecure, progress.watch, progress.begin)
    console.print(summary_table(summary))
    console.print(f"Results are in [bold]{folder}[/], what each process said in {folder}/logs")


@app.command()
def doctor() -> None:
    """Say what this machine has: devices, data sources and how to get the others, versions."""
    from experiments.doctor import report

    report(console)


@app.command()
def stability(
    config: ConfigFile = None,
    out: OutFolder = None,
    overrides: Overrides = None,
    trials: Annotated[
        int | None, typer.Option("--trials", help="How many random neighbours; 10 by default.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="The census: replace each sample once.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --out where it was interrupted.")
    ] = False,
) -> None:
    """Run an experiment beside neighbours that differ in one sample, and hold them to the bound.

    In float64 unless the config names a precision.
    Example: [bold]fedmuon stability --set local.lr=0.02 --trials 20 --out runs/s[/]
    """
    from experiments.stability import NeighbourProgress, execute, in_doubles, verdict_table

    if every and trials is not None:
        _refuse("--all runs every neighbour there is: leave --trials out")
    changes = [*(overrides or [])]
    changes += [f"stability.trials={trials}"] if trials is not None else []
    changes += ["stability.neighbours=all"] if every else []
    chosen = _config(config, changes, resume)
    chosen = chosen and in_doubles(chosen)
    if chosen and chosen.engine.dtype == "float32":
        _complain("float32 hides small perturbations in rounding: prefer engine.dtype=float64")
    folder = _folder(out, chosen, resume)
    with NeighbourProgress(console) as progress:
        record = execute(chosen, folder, resume, progress.watch, progress.begin)
    console.print(verdict_table(folder, record))
    console.print("Results are in", Text(str(folder), style="bold"))


@app.command()
def bound(
    run_dir: Annotated[
        Path | None, typer.Argument(help="A run directory; without one, the options below.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
    overrides: Overrides = None,
    lr: Annotated[float | None, typer.Option("--lr", help="eta")] = None,
    beta: Annotated[float | None, typer.Option("--beta", help="Memory of the momentum.")] = None,
    l_orth: Annotated[
        float | None, typer.Option("--l-orth", help="Lipschitz constant of Orth; else the map's.")
    ] = None,
    l_g: Annotated[
        float | None, typer.Option("--l-g", help="Lg; else proved, of the matrix task.")
    ] = None,
    lam: Annotated[
        float | None, typer.Option("--lambda", help="lambda of the smoothed polar map.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="R")] = None,
    local_steps: Annotated[int | None, typer.Option("--local-steps", help="E")] = None,
    clients: Annotated[int | None, typer.Option("--clients", help="N")] = None,
    per_round: Annotated[int | None, typer.Option("--per-round", help="K")] = None,
    size: Annotated[
        int | None, typer.Option("--size", help="Samples of every client; 200 by default.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="0 is the full batch.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="Failure of the bound.")] = None,
    c_hp: Annotated[
        str | None, typer.Option("--c-hp", help="explicit, sharp, or a number of yours.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Constant of the map: sharp, or paper (printed).")
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option("--rho", help="Failure of random participation; 0.01, for K < N."),
    ] = None,
) -> None:
    """The generalization bound as a number, with what it stands on.

    Example: [bold]fedmuon bound --lr 0.01 --lambda 0.1 --rounds 50 --local-steps 1 --size 1000[/]
    """
    import json

    from experiments import bound as calculator

    options = {
        "local.lr": lr, "local.momentum": beta, "local.steps": local_steps, "local.batch": batch,
        "orthogonalizer.lambda": lam, "federation.rounds": rounds, "federation.clients": clients,
        "federation.per-round": per_round, "stability.delta": delta, "stability.c-hp": c_hp,
        "stability.kind": kind,
    }  # fmt: skip
    changes = [f"{name}={value}" for name, value in options.items() if value is not None]
    given = {"size": size, "rho": rho, "l_orth": l_orth, "l_g": l_g}
    case = calculator.find(run_dir, [*changes, *(overrides or [])], given)
    record = calculator.report(case, calculator.judge(case))
    if as_json:
        typer.echo(json.dumps(record, indent=2, allow_nan=False))
    else:
        console.print(calculator.table(record))


def _config(file: Path | None, overrides: list[str], resume: bool) -> "Config | None":
    """The experiment asked for; None when a resumed run shall bring its own."""
    from fedmuon import config

    return None if resume and not (file or overrides) else config.load(file, overrides)


def _folder(out: Path | None, config: "Config | None", resume: bool = False) -> Path:
    """Where results go: the folder given, or a new one; there is nothing to resume in a new one."""
    if out is not None:
        return out
    if resume or config is None:
        _refuse("--resume needs --out: name the run directory to go on with")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.data.name}-{config.local.recipe}-seed{config.federation.seed}-{stamp}"
    return Path("runs") / name


def _refuse(sentence: str) -> NoReturn:
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
