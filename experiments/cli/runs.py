"""Commands that run experiments: `run`, `plan`, `stability`, `suite`, `deploy-demo`, `unlearn`."""

import contextlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

import fedmuon.experiments.cli.options as options
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli.options import console, print_path, print_plain
from fedmuon.experiments.cli.show import (
    Progress,
    accounts,
    brief_routes,
    summary_table,
    sweep_parts,
)
from fedmuon.experiments.suites.workers import Workers
from fedmuon.runs.directory import RunDirectory

MOST_JOBS = 256


def run(
    config: options.ConfigFile = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    resume: options.Resume = False,
    engine: options.EngineName = None,
    ray_address: options.RayAddress = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    seeds: Annotated[
        int | None,
        Option(
            "--seeds",
            parser=options.count,
            metavar="INTEGER",
            help="How many seeds to run, from the seed on: means with intervals in one folder.",
        ),
    ] = None,
    jobs: options.Jobs = None,
    verbose: Annotated[
        bool, Option("--verbose", help="Show the messages of Flower and Ray.")
    ] = False,
    watch: Annotated[
        bool,
        Option("--watch", help="Print the address of a page, on this machine, that follows it."),
    ] = False,
    clients: Annotated[
        bool,
        Option("--clients", help="Write clients.jsonl: what each client measured in each round."),
    ] = False,
) -> None:
    """Run one federated experiment and write its run directory. Every key: fedmuon config explain.

    Example: [bold]fedmuon run --set local.lr=0.02 --set data.name=fashion-mnist --out runs/a[/]
    """
    from fedmuon.config.schema import reads  # the config
    from fedmuon.experiments.inspect.watch import RunStatus, watched  # the config
    from fedmuon.experiments.run import execute  # torch

    changes = options.changes_of(overrides, engine, ray_address, data, seed, clients)
    if seeds is not None:
        if watch or verbose:
            raise InputError("--watch and --verbose are for one run: leave them or --seeds out")
        _search(["run", *_config_words(config, changes)], config, changes, (), seeds, None, jobs,
                None, out, resume)  # fmt: skip
        return
    if jobs is not None:
        raise InputError("--jobs is for several runs: give the number of --seeds, too")
    chosen = options.chosen_config(config, changes, resume, out, named=bool(overrides))
    folder = options.chosen_folder(out, chosen, resume)
    ended = resume and (folder / "summary.json").exists()
    page = watched(folder, print_plain) if watch else contextlib.nullcontext()
    with options.resumable(folder, ["run"]), page:
        before = RunDirectory(folder).records() if resume else []
        with Progress(console, lines=True, before=before) as progress:

            def on_start(done: int, total: int) -> None:
                table = folder / "routes.txt"  # of a network
                if done == 0 and table.exists() and chosen and reads(chosen, "local.route"):
                    print_plain(brief_routes(table.read_text(encoding="utf-8")))
                progress.on_start(done, total)

            summary = execute(chosen, folder, resume, progress.on_round_end, on_start, verbose)
        console.print(summary_table(summary))
        if note := progress.risen():
            console.print(note)
        if chosen and chosen.local.recipe in ("fedper", "ditto") and not chosen.data.client_test:
            print_plain("Note: these are of the server's model. Set data.client-test=0.2 to test "
                        "each client's own.")  # fmt: skip
        print_path("The run had ended before; its results are in" if ended else "Results are in",
                   folder)  # fmt: skip
        if not (left := RunStatus(folder)).ended:
            print_plain(f"Its neighbours are left to run, resume with: {left.again}")


def plan(
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    engine: options.EngineName = None,
    ray_address: options.RayAddress = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    as_json: options.AsJson = False,
) -> None:
    """Estimate the time, memory and traffic of a run from a short trial.

    A plan takes about as long as a short run: it reads the data, starts the engine and ends it.
    Expect seconds within 25% on an otherwise idle machine; what other programs do counts as cost.
    Nothing is written. Example: [bold]fedmuon plan --engine ray --set federation.rounds=1000[/]
    """
    from fedmuon.experiments.planning import cost  # torch

    changes = options.changes_of(overrides, engine, ray_address, data, seed)
    chosen = options.chosen_config(config, changes, False)
    assert chosen is not None
    # The processor's seconds: time that a wrapper waited in this process does not count.
    record = cost.plan(chosen, time.process_time())
    options.tell(record, as_json, *cost.tables(record))


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
    """Run an experiment with neighbours that differ in one sample, and compare with the bound.

    In float64 unless the config names a precision.
    Example: [bold]fedmuon stability --set local.lr=0.02 --trials 20 --out runs/s[/]
    """
    from fedmuon.experiments.stability import certificates, neighbours  # torch, scipy

    if every and (hardest or trials is not None):
        raise InputError("--all runs every neighbour there is: leave --worst and --trials out")
    changes = options.changes_of(overrides, engine, ray_address, data, seed)
    changes += [f"stability.trials={trials}"] if trials is not None else []
    changes += ["stability.neighbours=all"] if every else []
    changes += ["stability.neighbours=worst"] if hardest else []
    chosen = options.chosen_config(config, changes, resume, out, named=bool(overrides))
    chosen = chosen and certificates.in_float64(chosen)
    if chosen and chosen.engine.dtype == "float32":
        options.complain(
            "float32 hides small perturbations in rounding: prefer engine.dtype=float64"
        )
    folder = options.chosen_folder(out, chosen, resume)
    with options.resumable(folder, ["stability"]):
        with Progress(console, "neighbours", lines=True) as progress:
            record = neighbours.execute(
                chosen, folder, resume, progress.on_round_end, progress.on_start
            )
        spent = accounts(RunDirectory(folder).summary())
        console.print(neighbours.verdict_table(folder, record), *spent)
        print_path("Results are in", folder)


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
            help="How many: 0, 1, ..., in place of the suite's own.",
        ),
    ] = None,
    engine: options.EngineName = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    resume: Annotated[
        bool, Option("--resume", help="Compute only what --out lacks, also runs of more --seeds.")
    ] = False,
    ray_address: Annotated[
        str | None, Option(help="Spread over a Ray cluster; `local` starts one here.")
    ] = None,
    cpus: Annotated[float, Option(help="Cores of a Ray task.")] = 1.0,
    gpus: Annotated[float, Option(help="GPUs of a Ray task.")] = 0.0,
) -> None:
    """Run what a published table or figure shows, check its claims, and write a report.

    Example: [bold]fedmuon suite A1 --data fashion-mnist --out runs/A1[/]
    """
    from fedmuon.core.tables import override  # the config
    from fedmuon.experiments import report  # torch, scipy, matplotlib
    from fedmuon.experiments.studies.find import find
    from fedmuon.experiments.suites.suite import Spread, execute, here

    changes = override({}, options.changes_of(overrides, engine))
    work = find(name, data, scale, changes, seed, seeds)
    parts = (work.request.stem, work.request.data, scale, time.strftime("%Y%m%d-%H%M%S"))
    folder = out or Path("runs") / "-".join(part for part in parts if part)
    by, spread = here, []
    if ray_address:
        by = Spread(ray_address, cpus, gpus)
        spread = [f"--ray-address={ray_address}", f"--cpus={cpus:g}", f"--gpus={gpus:g}"]
    again = [*shlex.split(work.request.again)[1:], *spread]
    with options.resumable(folder, again):
        with Progress(console, work.counted, lines=True) as progress:
            execute(work, folder, resume, by, progress.on_round_end, progress.on_start)
        page = report.write_report(folder)
        for part in report.suite_tables(*report.gather(folder)):  # commands stay lines to be pasted
            console.print(part, soft_wrap=isinstance(part, Text))
        print_path("The report is", page)


def sweep(
    config: options.ConfigFile = None,
    grid: options.GivenGrid = None,
    seeds: Annotated[
        int,
        Option(
            "--seeds",
            parser=options.count,
            metavar="INTEGER",
            help="Runs per point, with the config's seed and those after it.",
        ),
    ] = 1,
    select: Annotated[
        str | None,
        Option(
            help="What chooses the best: validation-loss (the default), validation-accuracy, "
            "train-loss, test-loss, test-accuracy, or a metric of yours as max:NAME or min:NAME."
        ),
    ] = None,
    jobs: options.Jobs = None,
    out: options.OutFolder = None,
    resume: Annotated[
        bool, Option("--resume", help="Compute only what --out lacks, also more values or seeds.")
    ] = False,
    overrides: options.Overrides = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    ray: Annotated[
        bool, Option("--ray", help="Start Ray once, and run one point per core.")
    ] = False,
    ray_address: options.RayAddress = None,
) -> None:
    """Run a config at every point of a grid, and show the best values with their intervals.

    The folder gets sweep.json, cells.csv (a row per run), points.csv (means over seeds), figures.
    Example: [bold]fedmuon sweep my.toml --grid local.lr=0.01:10:log7 --seeds 3 --jobs 2[/]
    """
    changes = options.changes_of(overrides, None, None, data, seed)
    words = _config_words(config, changes)
    words += [f"--grid={one}" for one in grid or ()] + ([f"--select={select}"] if select else [])
    if ray and ray_address:
        raise InputError("--ray starts a Ray and --ray-address joins one: leave one of them out")
    _search(["sweep", *words], config, changes, grid or [], seeds, select, jobs,
            "local" if ray else ray_address, out, resume)  # fmt: skip


def _config_words(config: Path | None, changes: list[str]) -> list[str]:
    """The words of a command that name its config."""
    return [*([str(config)] if config else []), *(f"--set={one}" for one in changes)]


def _search(
    words: list[str],
    config: Path | None,
    changes: list[str],
    grid: Sequence[str],
    seeds: int,
    select: str | None,
    jobs: int | None,
    ray_address: str | None,
    out: Path | None,
    resume: bool,
) -> None:
    """Run a grid with several seeds, print its tables, and say how well its jobs were used."""
    begun = time.monotonic()
    if words[0] == "sweep" and not grid:
        raise InputError(
            "a sweep needs a grid: give --grid table.key=VALUES, for example "
            "--grid local.lr=0.01:10:log7; to repeat one run, use fedmuon run --seeds"
        )
    if ray_address and jobs is not None:
        raise InputError("--jobs are processes here, --ray uses its own: leave one of them out")
    if resume and out is None:
        raise InputError("--resume needs --out: name the folder of the sweep to resume")
    words += [f"--seeds={seeds}"]
    words += [f"--jobs={jobs}"] if jobs else []
    words += [f"--ray-address={ray_address}"] if ray_address else []
    options.require_at_most(MOST_JOBS, **{"--jobs": jobs})
    count = jobs or 1
    with Workers(count) if count > 1 else contextlib.nullcontext() as workers:
        from fedmuon.experiments.studies.sweep import run_grid, search_of_command  # torch
        from fedmuon.experiments.suites.suite import Spread, here

        command = shlex.join(["fedmuon", *words])
        work = search_of_command(config, changes, grid, seeds, select, command)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = out or Path("runs") / f"{words[0]}-{config.stem if config else 'default'}-{stamp}"
        by = Spread(ray_address) if ray_address else workers or here
        progress = Progress(console, work.counted, lines=True)
        with options.resumable(folder, words), progress:
            summary, trained = run_grid(
                work, folder, resume, by, progress.on_round_end, progress.on_start
            )
    for part in sweep_parts(summary):
        console.print(part, soft_wrap=isinstance(part, Text))
    seconds = time.monotonic() - begun
    print_plain(
        f"The command took {seconds:.1f} s; its runs trained for {trained:.1f} s in all"
        + (f", {trained / count:.1f} s per job." if count > 1 else ".")
    )
    print_path("Results are in", folder)


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
    """Run one experiment on a SuperLink and one SuperNode per client, started and stopped here.

    Without a config: 3 rounds of 2 of 3 clients on synthetic data.
    Example: [bold]fedmuon deploy-demo --set federation.rounds=5 --out runs/deployed[/]
    """
    from fedmuon.experiments.engines.deployment import DEMO, deploy  # torch, Flower

    asked = options.changes_of(overrides, data=data, seed=seed)
    changes = [*([] if config else DEMO), *asked, "engine.name=deployment"]
    chosen = options.chosen_config(config, changes, False)
    assert chosen is not None
    folder = options.chosen_folder(out, chosen)
    with options.resumable(folder, ["run"]):
        with Progress(console, lines=True) as progress:
            summary = deploy(chosen, folder, not insecure, progress.on_round_end, progress.on_start)
        console.print(summary_table(summary))
        print_path("Results are in", folder)
        print_path("The log of each process is in", folder / "logs")


def unlearn(
    run_dir: Annotated[Path, Argument(help="A finished run, with full batches, in float64.")],
    sample: Annotated[
        list[int], Option("--sample", help="Its index in the source (train_index); once for each.")
    ],
    epsilon: Annotated[float, Option(help="How well tests may tell it from retraining.")] = 1.0,
    delta: Annotated[float, Option(help="The probability that they tell it better.")] = 1e-5,
    out: Annotated[
        Path | None, Option("--out", help="A folder for the model; beside the run by default.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Forget samples: add noise to the run's model that hides whether they were trained on.

    Nobody who sees unlearned.safetensors can tell it, beyond (epsilon, delta), from the model of a
    run without them plus the same noise. This holds for one release; several add up. Only the owner
    may see unlearn.json.
    Example: [bold]fedmuon unlearn runs/a --sample 17 --epsilon 1 --out runs/a-without-17[/]
    """
    from fedmuon.experiments import unlearning  # torch

    if len(set(sample)) < len(sample):
        raise InputError("a sample is named twice: name each once")
    folder = out or run_dir.with_name(f"{run_dir.name}-unlearned")
    record = unlearning.execute(run_dir, sample, epsilon, delta, folder)
    options.tell(record, as_json, unlearning.table(record))
    if not as_json:
        print_path("The noisy model is in", folder)
