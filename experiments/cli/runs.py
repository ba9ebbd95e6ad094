"""Commands that run experiments: `run`, `deploy-demo`, `stability`, `suite`; first, `doctor`."""

import shlex
import time
from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

import fedmuon.experiments.cli.options as options
from fedmuon.experiments.cli.look import Watch, followed
from fedmuon.experiments.cli.options import AsJson, console, refuse, tell, where


def run(
    config: options.ConfigFile = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    resume: options.Resume = False,
    engine: options.EngineName = None,
    ray_address: options.RayAddress = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    verbose: Annotated[
        bool, Option("--verbose", help="Show what Flower and Ray have to say.")
    ] = False,
    watch: Watch = False,
) -> None:
    """Run one federated experiment and write its run directory. Every key: fedmuon config explain.

    Example: [bold]fedmuon run --set local.lr=0.02 --set data.name=fashion-mnist --out runs/a[/]
    """
    from fedmuon.experiments.cli.show import Progress, summary_table
    from fedmuon.experiments.inspect.status import RunStatus
    from fedmuon.experiments.run import execute
    from fedmuon.runs.directory import RunDirectory

    changes = options.changes_of(overrides, engine, ray_address, data, seed)
    chosen = options.chosen_config(config, changes, resume, out, named=bool(overrides))
    folder = options.chosen_folder(out, chosen, resume)
    ended = resume and (folder / "summary.json").exists()
    with options.resumable(folder, ["run"]), followed(folder, watch):
        before = RunDirectory(folder).records() if resume else []
        with Progress(console, lines=True, before=before) as progress:
            summary = execute(chosen, folder, resume, progress.watch, progress.begin, verbose)
        console.print(summary_table(summary))
        if note := progress.risen():
            console.print(note)
        said = "The run had ended before; its results are in" if ended else "Results are in"
        console.print(said, where(folder), soft_wrap=True)
        if not (left := RunStatus(folder)).ended:
            console.print(
                f"Its neighbours are left to run, go on with: {left.again}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def deploy_demo(
    config: options.ConfigFile = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    insecure: Annotated[
        bool, Option("--insecure", help="Without TLS and without SuperNode keys.")
    ] = False,
) -> None:
    """Run one experiment on a SuperLink and a SuperNode a client, started and stopped here.

    Without a config: 3 rounds of 2 of 3 clients on synthetic data.
    Example: [bold]fedmuon deploy-demo --set federation.rounds=5 --out runs/deployed[/]
    """
    from fedmuon.experiments.cli.show import Progress, summary_table
    from fedmuon.experiments.engines.deploy import DEMO, deploy

    asked = options.changes_of(overrides, data=data, seed=seed)
    changes = [*([] if config else DEMO), *asked, "engine.name=deployment"]
    chosen = options.chosen_config(config, changes, False)
    assert chosen is not None
    folder = options.chosen_folder(out, chosen)
    with options.resumable(folder, ["run"]):
        with Progress(console, lines=True) as progress:
            summary = deploy(chosen, folder, not insecure, progress.watch, progress.begin)
        console.print(summary_table(summary))
        console.print("Results are in", where(folder), soft_wrap=True)
        console.print("What each process said is in", where(folder / "logs"), soft_wrap=True)


def stability(
    config: options.ConfigFile = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    trials: Annotated[int | None, Option(help="How many random neighbours; 10 by default.")] = None,
    every: Annotated[bool, Option("--all", help="The census: replace each sample once.")] = False,
    hardest: Annotated[
        bool, Option("--worst", help="The worst of all replacements, by derivatives.")
    ] = False,
    resume: options.Resume = False,
    engine: options.EngineName = None,
    ray_address: options.RayAddress = None,
    data: options.DataName = None,
    seed: options.Seed = None,
) -> None:
    """Run an experiment beside neighbours that differ in one sample, and hold them to the bound.

    In float64 unless the config names a precision.
    Example: [bold]fedmuon stability --set local.lr=0.02 --trials 20 --out runs/s[/]
    """
    from fedmuon.experiments.cli.show import Progress, accounts
    from fedmuon.experiments.stability.bound import in_doubles
    from fedmuon.experiments.stability.neighbours import execute, verdict_table
    from fedmuon.runs.directory import RunDirectory

    if every and (hardest or trials is not None):
        options.refuse("--all runs every neighbour there is: leave --worst and --trials out")
    changes = options.changes_of(overrides, engine, ray_address, data, seed)
    changes += [f"stability.trials={trials}"] if trials is not None else []
    changes += ["stability.neighbours=all"] if every else []
    changes += ["stability.neighbours=worst"] if hardest else []
    chosen = options.chosen_config(config, changes, resume, out, named=bool(overrides))
    chosen = chosen and in_doubles(chosen)
    if chosen and chosen.engine.dtype == "float32":
        options.complain(
            "float32 hides small perturbations in rounding: prefer engine.dtype=float64"
        )
    folder = options.chosen_folder(out, chosen, resume)
    with options.resumable(folder, ["stability"]):
        with Progress(console, "neighbours", lines=True) as progress:
            record = execute(chosen, folder, resume, progress.watch, progress.begin)
        console.print(verdict_table(folder, record), *accounts(RunDirectory(folder).summary()))
        console.print("Results are in", where(folder), soft_wrap=True)


def suite(
    name: Annotated[str, Argument(help="A1, A2, A3, cnn, or a TOML file of your own.")],
    data: Annotated[
        str | None, Option(help="A source that `doctor` lists; else the suite's own.")
    ] = None,
    scale: Annotated[str, Option(help="full: the published grid; small: seconds.")] = "full",
    seed: Annotated[int | None, Option("--seed", help="One, in place of the suite's own.")] = None,
    seeds: Annotated[
        int | None,
        Option(
            "--seeds",
            parser=options.count,
            metavar="INTEGER",
            help="So many: 0, 1, ..., in place of its own.",
        ),
    ] = None,
    engine: options.EngineName = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    resume: Annotated[
        bool,
        Option("--resume", help="Compute only what --out lacks, runs of more --seeds, too."),
    ] = False,
    ray_address: Annotated[
        str | None, Option(help="Spread over a Ray cluster; `local` starts one here.")
    ] = None,
    cpus: Annotated[float, Option(help="Cores of a Ray task.")] = 1.0,
    gpus: Annotated[float, Option(help="GPUs of a Ray task.")] = 0.0,
) -> None:
    """Run what a published table or figure shows, hold its claims to it, and write a report.

    Example: [bold]fedmuon suite A1 --data fashion-mnist --out runs/A1[/]
    """
    from fedmuon.core.tables import override
    from fedmuon.experiments.cli.show import Progress, suite_tables
    from fedmuon.experiments.report import gather, write_report
    from fedmuon.experiments.studies.find import find
    from fedmuon.experiments.suites.suite import execute, here

    changes = override({}, options.changes_of(overrides, engine))
    work = find(name, data, scale, changes, seed, seeds)
    parts = (work.asked.stem, work.asked.data, scale, time.strftime("%Y%m%d-%H%M%S"))
    folder = out or Path("runs") / "-".join(part for part in parts if part)
    by, spread = here, []
    if ray_address:
        from fedmuon.experiments.suites.sweep import Spread

        by = Spread(ray_address, cpus, gpus)
        spread = [f"--ray-address={ray_address}", f"--cpus={cpus:g}", f"--gpus={gpus:g}"]
    again = [*shlex.split(work.asked.again)[1:], *spread]
    with options.resumable(folder, again):
        with Progress(console, work.counted, lines=True) as progress:
            execute(work, folder, resume, by, progress.watch, progress.begin)
        page = write_report(folder)
        for part in suite_tables(*gather(folder)):  # commands stay lines that can be pasted
            console.print(part, soft_wrap=isinstance(part, Text))
        console.print("The report is", where(page), soft_wrap=True)


def doctor() -> None:
    """Say what this machine has: devices, data sources and how to get the others, versions."""
    from fedmuon.experiments.cli.project import tables

    for table in tables():
        console.print(table)


# `fedmuon plan`: what a run will cost.


def plan(
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    engine: options.EngineName = None,
    ray_address: options.RayAddress = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what a run will cost, in seconds, memory and bytes: a few seconds of it are tried here.

    A plan takes about as long as a short run: it reads the data, starts the engine and ends it.
    Expect seconds within 25% on a machine that is idle otherwise; what others do counts as cost.
    Nothing is written. Example: [bold]fedmuon plan --engine ray --set federation.rounds=1000[/]
    """
    from fedmuon.experiments.planning.cost import plan as cost
    from fedmuon.experiments.planning.cost import tables

    changes = options.changes_of(overrides, engine, ray_address, data, seed)
    chosen = options.chosen_config(config, changes, False)
    assert chosen is not None
    # The processor's seconds: whoever waited in this process before, as a wrapper, does not count.
    record = cost(chosen, time.process_time())
    options.tell(record, as_json, *tables(record))


# `fedmuon unlearn`: forget samples of a finished run.


def unlearn(
    run_dir: Annotated[Path, Argument(help="A finished run, with full batches, in float64.")],
    sample: Annotated[
        list[int], Option("--sample", help="Its index in the source (train_index); once for each.")
    ],
    epsilon: Annotated[float, Option(help="How well tests may tell it from retraining.")] = 1.0,
    delta: Annotated[float, Option(help="And how often they may beyond.")] = 1e-5,
    out: Annotated[
        Path | None, Option("--out", help="A folder for the model; beside the run by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forget samples: the run's model with the noise that hides whether they were trained on.

    Nobody who sees unlearned.safetensors can tell it, beyond (epsilon, delta), from the model of a
    run without them plus the same noise: of one release, as several add up. unlearn.json is for the
    owner's eyes alone.
    Example: [bold]fedmuon unlearn runs/a --sample 17 --epsilon 1 --out runs/a-without-17[/]
    """
    from fedmuon.experiments.unlearning import execute, table

    if len(set(sample)) < len(sample):
        refuse("a sample is named twice: name each once")
    folder = out or run_dir.with_name(f"{run_dir.name}-unlearned")
    record = execute(run_dir, sample, epsilon, delta, folder)
    tell(record, as_json, table(record))
    if not as_json:
        console.print("The noisy model is in", where(folder), soft_wrap=True)
