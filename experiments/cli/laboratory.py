"""Commands of the stability laboratory: `stability`, `suite`, `report`, `bound`."""

import shlex
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedmuon.experiments.cli.options import (
    AsJson,
    ConfigFile,
    OutFolder,
    Overrides,
    Resume,
    chosen_config,
    chosen_folder,
    complain,
    console,
    refuse,
    resumable,
    tell,
    where,
)


def stability(
    config: ConfigFile = None,
    out: OutFolder = None,
    overrides: Overrides = None,
    trials: Annotated[int | None, Option(help="How many random neighbours; 10 by default.")] = None,
    every: Annotated[bool, Option("--all", help="The census: replace each sample once.")] = False,
    hardest: Annotated[
        bool, Option("--worst", help="The neighbours that influence says hurt most.")
    ] = False,
    resume: Resume = False,
) -> None:
    """Run an experiment beside neighbours that differ in one sample, and hold them to the bound.

    In float64 unless the config names a precision.
    Example: [bold]fedmuon stability --set local.lr=0.02 --trials 20 --out runs/s[/]
    """
    from fedmuon.experiments.cli.show import Progress
    from fedmuon.experiments.laboratory.stability import execute, in_doubles, verdict_table

    if every and (hardest or trials is not None):
        refuse("--all runs every neighbour there is: leave --worst and --trials out")
    changes = [*(overrides or [])]
    changes += [f"stability.trials={trials}"] if trials is not None else []
    changes += ["stability.neighbours=all"] if every else []
    changes += ["stability.neighbours=worst"] if hardest else []
    chosen = chosen_config(config, changes, resume, out)
    chosen = chosen and in_doubles(chosen)
    if chosen and chosen.engine.dtype == "float32":
        complain("float32 hides small perturbations in rounding: prefer engine.dtype=float64")
    folder = chosen_folder(out, chosen, resume)
    with resumable(folder, ["stability"]):
        with Progress(console, "neighbours") as progress:
            record = execute(chosen, folder, resume, progress.watch, progress.begin)
        console.print(verdict_table(folder, record))
        console.print("Results are in", where(folder), soft_wrap=True)


def suite(
    name: Annotated[str, Argument(help="A1, A2, A3, cnn, or a TOML file of your own.")],
    data: Annotated[
        str | None, Option(help="A source that `doctor` lists; else the suite's own.")
    ] = None,
    scale: Annotated[str, Option(help="full: the published grid; small: seconds.")] = "full",
    out: OutFolder = None,
    overrides: Overrides = None,
    resume: Resume = False,
    ray_address: Annotated[
        str | None, Option(help="Spread over a Ray cluster; `local` starts one here.")
    ] = None,
    cpus: Annotated[float, Option(help="Cores of a Ray task.")] = 1.0,
    gpus: Annotated[float, Option(help="GPUs of a Ray task.")] = 0.0,
) -> None:
    """Run what a published table or figure shows, hold its claims to it, and write a report.

    Example: [bold]fedmuon suite A1 --data fashion-mnist --out runs/A1[/]
    """
    from fedmuon.experiments.cli.show import Progress, suite_tables
    from fedmuon.experiments.report import gather, write_report
    from fedmuon.experiments.studies.find import find
    from fedmuon.experiments.suites.suite import execute, here
    from fedmuon.tables import override

    work = find(name, data, scale, override({}, overrides or []))
    parts = (work.asked.stem, work.asked.data, scale, time.strftime("%Y%m%d-%H%M%S"))
    folder = out or Path("runs") / "-".join(part for part in parts if part)
    by = here
    if ray_address:
        from fedmuon.experiments.suites.sweep import Spread

        by = Spread(ray_address, cpus, gpus)
    again = shlex.split(work.asked.again)[1:] + _spread(ray_address, cpus, gpus)
    with resumable(folder, again):
        with Progress(console, work.counted) as progress:
            execute(work, folder, resume, by, progress.watch, progress.begin)
        page = write_report(folder)
        for table in suite_tables(*gather(folder)):
            console.print(table)
        console.print("The report is", where(page), soft_wrap=True)


def _spread(address: str | None, cpus: float, gpus: float) -> list[str]:
    """The options that spread a suite, as they were given."""
    if not address:
        return []
    return ["--ray-address", address, "--cpus", f"{cpus:g}", "--gpus", f"{gpus:g}"]


def report(
    folder: Annotated[
        Path, Argument(help="What suite or stability wrote, or a folder of such folders.")
    ],
) -> None:
    """Write figures and one self-contained HTML page: which claims hold, by how much.

    Example: [bold]fedmuon report runs/A1[/]
    """
    from fedmuon.experiments.report import write_report

    console.print("The report is", where(write_report(folder)), soft_wrap=True)


def bound(
    run_dir: Annotated[
        Path | None, Argument(help="A run directory; without one, the options below.")
    ] = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
    lr: Annotated[float | None, Option(help="eta")] = None,
    beta: Annotated[float | None, Option(help="Memory of the momentum.")] = None,
    l_orth: Annotated[
        float | None, Option(help="Lipschitz constant of Orth; else the map's.")
    ] = None,
    l_g: Annotated[float | None, Option(help="Lg; else proved, of the matrix task.")] = None,
    lam: Annotated[
        float | None, Option("--lambda", help="lambda of the smoothed polar map.")
    ] = None,
    rounds: Annotated[int | None, Option(help="R")] = None,
    local_steps: Annotated[int | None, Option(help="E")] = None,
    clients: Annotated[int | None, Option(help="N")] = None,
    per_round: Annotated[int | None, Option(help="K")] = None,
    size: Annotated[int | None, Option(help="Samples of every client; 200 by default.")] = None,
    batch: Annotated[int | None, Option(help="0 is the full batch.")] = None,
    delta: Annotated[float | None, Option(help="Failure of the bound.")] = None,
    c_hp: Annotated[str | None, Option(help="explicit, sharp, or a number of yours.")] = None,
    kind: Annotated[
        str | None, Option(help="Constant of the map: sharp, or paper (printed).")
    ] = None,
    rho: Annotated[
        float | None, Option(help="Failure of random participation; 0.01, for K < N.")
    ] = None,
) -> None:
    """The generalization bound as a number, with what it stands on.

    Example: [bold]fedmuon bound --lr 0.01 --lambda 0.1 --rounds 50 --local-steps 1 --size 1000[/]
    """
    from fedmuon.experiments.laboratory import bound as calculator

    options = {
        "local.lr": lr, "local.momentum": beta, "local.steps": local_steps, "local.batch": batch,
        "orthogonalizer.lambda": lam, "federation.rounds": rounds, "federation.clients": clients,
        "federation.per-round": per_round, "stability.delta": delta, "stability.c-hp": c_hp,
        "stability.lipschitz": kind,
    }  # fmt: skip
    changes = [f"{name}={value}" for name, value in options.items() if value is not None]
    given = {"size": size, "rho": rho, "l_orth": l_orth, "l_g": l_g}
    case = calculator.find(run_dir, [*changes, *(overrides or [])], given)
    record = calculator.report(case, calculator.judge(case))
    tell(record, as_json, calculator.table(record))
