"""Commands that run experiments: `run`, `plan`, `stability`, `suite`, `deploy-demo`, `unlearn`."""

import contextlib
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

import fedmuon.experiments.cli.completion as completion
import fedmuon.experiments.cli.options as options
import fedmuon.experiments.settings as settings
from fedmuon.config.methods import PERSONALIZED
from fedmuon.core.errors import InputError, require_at_most
from fedmuon.experiments.cli.output import live, note, print_path, style, tell, warn
from fedmuon.experiments.cli.show import (
    Progress,
    accounts,
    brief_routes,
    columns,
    final_evaluation,
    profile_parts,
    step_sizes,
    summary_table,
    sweep_parts,
)
from fedmuon.experiments.suites.workers import Workers
from fedmuon.runs.directory import Record, RunDirectory

MOST_JOBS = 256
SettingName = Annotated[
    str | None,
    Option(
        "--setting",
        help=(
            "Named setting, instead of a config. `fedmuon list settings` shows the names. "
            "`--set` changes single keys of the setting."
        ),
        autocompletion=completion.settings,
    ),
]
Probes = Annotated[
    int | None,
    Option(
        min=0,
        help=(
            "Number of random probes with which derivatives through the run predict the gap. 0 "
            "means no prediction. Default: 8 for the matrix task, and 0 for networks."
        ),
    ),
]
Replacements = Annotated[
    int | None,
    Option(
        min=0,
        help=(
            "Check the prediction: train again with one sample replaced, for this number of random "
            "samples. Default: 0."
        ),
    ),
]


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
            help=(
                "Repeat the run with this number of seeds: --seed, --seed + 1, and so on. One "
                "folder contains all runs, with the means of their results and 95% intervals."
            ),
        ),
    ] = None,
    jobs: options.Jobs = None,
    verbose: Annotated[
        bool, Option("--verbose", help="Show the log messages of Flower and Ray.")
    ] = False,
    watch: Annotated[
        bool,
        Option(
            "--watch",
            help="Show the run on a page in the browser, and print the address of the page.",
        ),
    ] = False,
    clients: Annotated[
        bool,
        Option("--clients", help="Save measurements per client and round in `clients.jsonl`."),
    ] = False,
    profile: Annotated[
        bool,
        Option("--profile", help="Show which kinds of work take the time of the run."),
    ] = False,
) -> None:
    """Run one federated experiment and save it in a run folder.

    `fedmuon config explain` lists the config keys.

    Example: [bold]fedmuon run --set local.lr=0.02 --set data.name=fashion-mnist --out runs/a[/]
    """
    from fedmuon.config.schema import reads  # the config
    from fedmuon.experiments.inspect.watch import RunStatus, watched  # the config
    from fedmuon.experiments.run import execute  # torch

    changes = options.changes_of(overrides, engine, ray_address, data, seed, clients, profile)
    if seeds is not None:
        for option, used in {"--watch": watch, "--verbose": verbose}.items():
            if used:
                raise InputError(
                    f"{option} works only for a single run, but --seeds starts several runs. "
                    f"Remove {option} or --seeds."
                )
        _search(["run", *_config_words(config, changes)], config, changes, (), seeds, None, jobs,
                None, out, resume)  # fmt: skip
        return
    if jobs is not None:
        raise InputError("--jobs works only for several runs. Add --seeds, or remove --jobs.")
    run_config = options.chosen_config(config, changes, resume, out, named=bool(overrides))
    folder = options.chosen_folder(out, run_config, resume)
    ended = resume and (folder / "summary.json").exists()
    page = watched(folder, note) if watch else contextlib.nullcontext()
    with options.resumable(folder, ["run"]), page:
        before = RunDirectory(folder).records() if resume else []
        with Progress(live(), lines=True, before=before) as progress:

            def on_start(completed: int, total: int) -> None:
                table = folder / "routes.txt"  # of a network
                if (
                    completed == 0
                    and table.exists()
                    and run_config
                    and reads(run_config, "local.route")
                ):
                    text = table.read_text(encoding="utf-8")
                    note(brief_routes(text))
                    local = RunStatus(folder).config.local
                    note(step_sizes(text, local.lr, local.aux_lr, not run_config.local.aux_lr))
                progress.on_start(completed, total)

            def on_round_end(record: Record) -> None:
                progress.on_round_end(record)
                if progress.is_last(record):
                    note(final_evaluation(RunStatus(folder).config))

            summary = execute(
                run_config,
                folder,
                resume,
                on_round_end,
                on_start,
                verbose,
                say=note,
                warn=warn,
            )
        status = RunStatus(folder)
        tell({"folder": folder, **summary}, summary_table(summary), *profile_parts(status))
        note(progress.risen(summary))
        personalized = run_config and run_config.local.recipe in PERSONALIZED
        if run_config and personalized and not run_config.data.client_test:
            note("Note: these results are for the server's model. Set data.client-test=0.2 to test "
                 "each client's own model.")  # fmt: skip
        print_path("This run has already finished. Results are in" if ended else "Results are in",
                   folder)  # fmt: skip
        _tell_of_picture(folder)
        if not status.ended:
            note(
                f"The runs on neighbouring data sets are not finished, resume with: {status.again}"
            )


def plan(
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    engine: options.EngineName = None,
    ray_address: options.RayAddress = None,
    data: options.DataName = None,
    seed: options.Seed = None,
) -> None:
    """Estimate the time, memory and traffic of a run from a short trial.

    The command takes about as long as a short run, because it loads the data and starts the
    engine. The command saves no files. On an idle machine, the estimate is wrong by up to 25%. If
    other programs use the machine, the estimate is too large.

    Example: [bold]fedmuon plan --engine ray --set federation.rounds=1000[/]
    """
    from fedmuon.experiments.planning import cost  # torch

    changes = options.changes_of(overrides, engine, ray_address, data, seed)
    run_config = options.chosen_config(config, changes, False)
    assert run_config is not None
    # Use CPU time, which does not include the time that a wrapper of this process waited.
    record = cost.plan(run_config, time.process_time())
    tell(record, *cost.tables(record))


def stability(
    config: options.ConfigFile = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    setting: SettingName = None,
    trials: Annotated[
        int | None, Option(help="Number of neighbouring data sets to train on. Default: 10.")
    ] = None,
    every: Annotated[
        bool,
        Option(
            "--all",
            help=(
                "Train on every neighbouring data set. Each neighbouring data set replaces one "
                "sample, or one client with `--neighbours clients`."
            ),
        ),
    ] = False,
    hardest: Annotated[
        bool,
        Option(
            "--worst",
            help=(
                "Train on the neighbouring data sets with the largest predicted change of the "
                "model. Derivatives predict how much each replacement of a sample changes the "
                "model."
            ),
        ),
    ] = False,
    unit: options.NeighbourUnit = None,
    probes: Probes = None,
    replacements: Replacements = None,
    resume: options.Resume = False,
    engine: options.EngineName = None,
    ray_address: options.RayAddress = None,
    data: options.DataName = None,
    seed: options.Seed = None,
) -> None:
    """Run an experiment on neighbouring data sets, and compare the models with the bound.

    Neighbouring data sets differ in one sample, or in one client (--neighbours clients). The
    precision is float64 unless the config sets engine.dtype.

    Example: [bold]fedmuon stability --setting controlled --trials 20 --out runs/s[/]
    """
    from fedmuon.experiments.stability import (  # torch, scipy
        certificates,
        neighbours,
        prediction,
    )

    config = settings.instead_of(config, setting)
    for option, used in {"--worst": hardest, "--trials": trials is not None}.items():
        if every and used:
            raise InputError(
                f"--all trains on every neighbouring data set, so {option} has no effect. Remove "
                f"{option} or --all."
            )
    changes = options.changes_of(overrides, engine, ray_address, data, seed)
    changes += [f"stability.trials={trials}"] if trials is not None else []
    changes += ["stability.neighbours=all"] if every else []
    changes += ["stability.neighbours=worst"] if hardest else []
    changes += [f"stability.unit={unit}"] if unit is not None else []
    changes += _of_prediction(probes, replacements)
    run_config = options.chosen_config(config, changes, resume, out, named=bool(overrides))
    if run_config and probes:
        prediction.require_prediction(run_config)
    run_config = run_config and certificates.in_float64(run_config)
    if run_config and run_config.engine.dtype == "float32":
        warn(
            "engine.dtype is float32, whose rounding can hide small perturbations. Set "
            "engine.dtype=float64."
        )
    folder = options.chosen_folder(out, run_config, resume)
    with options.resumable(folder, ["stability"]):
        with Progress(live(), "neighbours", lines=True) as progress:
            record = neighbours.execute(
                run_config, folder, resume, progress.on_round_end, progress.on_start
            )
        summary = RunDirectory(folder).summary()
        tables = neighbours.verdict_table(folder, record), *accounts(summary)
        tell({"folder": folder, "bound": record, "summary": summary}, *tables)
        if setting is None and record["value"] is not None and record["value"] >= record["range"]:
            note(
                "This bound says nothing about the run. For a setting with a useful bound, run: "
                "fedmuon stability --setting controlled"
            )
        print_path("Results are in", folder)
        _tell_of_picture(folder, "stability.png")


def _of_prediction(probes: int | None, replacements: int | None) -> list[str]:
    """Return the changes of the config that --probes and --replacements make."""
    numbers = {"probes": probes, "replacements": replacements}
    return [f"stability.{key}={value}" for key, value in numbers.items() if value is not None]


def _tell_of_picture(folder: Path, name: str = "run.png") -> None:
    """Name the command that draws a run: its curves, and its neighbours if it has any."""
    note(f"For a picture, use: fedmuon show {shlex.quote(str(folder))} --figure {name}")


def gap(
    config: options.ConfigFile = None,
    setting: SettingName = None,
    grid: options.GivenGrid = None,
    seeds: Annotated[
        int,
        Option(
            "--seeds",
            parser=options.count,
            metavar="INTEGER",
            help=(
                "Number of seeds per grid point: the seed of the config, this seed + 1, and so on."
            ),
        ),
    ] = 1,
    together: Annotated[
        bool,
        Option(
            "--together",
            help=(
                "Divide δ by the number of bounds, so that all bounds hold together. You cannot "
                "add values or seeds to such a grid later."
            ),
        ),
    ] = False,
    probes: Probes = None,
    replacements: Replacements = None,
    jobs: options.Jobs = None,
    out: options.OutFolder = None,
    resume: options.Resume = False,
    overrides: options.Overrides = None,
    data: options.DataName = None,
    seed: options.Seed = None,
) -> None:
    """Compare the measured generalization gap with its bound, at every point of a grid.

    The gap that derivatives predict is shown, too. It is an estimate and no bound.

    The output folder contains gap.csv (one row per run and form of the bound), gap.json, a picture,
    and the run folders. The precision is float64 unless the config sets engine.dtype.

    Example: [bold]fedmuon gap --setting controlled --grid local.lr=0.003,0.01,0.03 --seeds 3[/]
    """
    if resume and out is None:
        raise InputError("--resume needs --out. Add --out with the folder to resume.")
    changes = options.changes_of(overrides, None, None, data, seed)
    changes += _of_prediction(probes, replacements)
    setting_option = [f"--setting={setting}"] if setting else []
    words = ["gap", *_config_words(config, changes), *setting_option]
    words += [*(f"--grid={axis}" for axis in grid or ()), f"--seeds={seeds}"]
    words += ["--together"] * together + ([f"--jobs={jobs}"] if jobs else [])
    config = settings.instead_of(config, setting)
    require_at_most(MOST_JOBS, **{"--jobs": jobs})
    count = jobs or 1
    with Workers(count) if count > 1 else contextlib.nullcontext() as workers:
        from fedmuon.experiments.studies import gap_grid, sweep  # torch, scipy, matplotlib
        from fedmuon.experiments.suites.suite import here

        command = shlex.join(["fedmuon", *words])
        select = "train-loss" if grid else None  # every run records it; nothing is chosen
        search = sweep.search_of_command(config, changes, grid or (), seeds, select, command)
        if probes:
            gap_grid.require_predictions(search)
        work = gap_grid.gap_grid(search, together)
        folder = out or Path("runs") / f"gap-{time.strftime('%Y%m%d-%H%M%S')}"
        with options.resumable(folder, words), Progress(live(), work.counted, lines=True) as bar:
            summary, drawn = gap_grid.run_gaps(
                work, folder, resume, workers or here, bar.on_round_end, bar.on_start
            )
    table = columns(gap_grid.title_of(summary), *gap_grid.shown(summary["table"]), dense=True)
    refusals = gap_grid.refusals_in(folder)
    tell({"folder": folder, **summary}, table, *map(Text, refusals))
    for sentence in summary["words"]:
        if sentence not in refusals:
            note(sentence)
    if drawn:
        print_path("The picture is", folder / gap_grid.PICTURE)
    print_path("Results are in", folder)


def suite(
    name: Annotated[
        str,
        Argument(
            help=(
                "Name of a suite, or a TOML file with your own suite. `fedmuon list suites` "
                "shows the names of all suites."
            ),
            autocompletion=completion.suites,
        ),
    ],
    data: Annotated[
        str | None,
        Option(
            help="Name of the data source. Default: the data source of the suite.",
            autocompletion=completion.value_of("data.name"),
        ),
    ] = None,
    scale: Annotated[
        str,
        Option(
            help=(
                "Size of the grid. `full` is the published grid. `small` is a grid that takes "
                "seconds."
            ),
            autocompletion=completion.among("full", "small"),
        ),
    ] = "full",
    seed: Annotated[
        int | None, Option("--seed", help="Use this seed instead of the suite's seeds.")
    ] = None,
    seeds: Annotated[
        int | None,
        Option(
            "--seeds",
            parser=options.count,
            metavar="INTEGER",
            help="Use this number of seeds (0, 1, ...) instead of the suite's seeds.",
        ),
    ] = None,
    engine: options.EngineName = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help=(
                "Compute only the results that are missing in the folder of --out. For a suite "
                "of kind `training`, --seeds may be larger than before."
            ),
        ),
    ] = False,
    ray_address: Annotated[
        str | None,
        Option(
            help=(
                "Address of a Ray cluster that computes the runs. With `local`, Ray is started "
                "on this machine."
            )
        ),
    ] = None,
    cpus: Annotated[
        float | None, Option(help="CPU cores per Ray task, with --ray-address. Default: 1.")
    ] = None,
    gpus: Annotated[
        float | None, Option(help="GPUs per Ray task, with --ray-address. Default: 0.")
    ] = None,
) -> None:
    """Reproduce a published table or figure, check its claims, and write a report.

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
    per_task = {"--cpus": cpus, "--gpus": gpus}
    if ray_address:
        by = Spread(ray_address, 1.0 if cpus is None else cpus, gpus or 0.0)
        spread = [f"--ray-address={ray_address}"]
        spread += [f"{name}={share:g}" for name, share in per_task.items() if share is not None]
    elif unused := [name for name, share in per_task.items() if share is not None]:
        raise InputError(
            f"{' and '.join(unused)} {'has' if len(unused) == 1 else 'have'} an effect only with "
            "--ray-address, because only Ray tasks reserve cores. Add --ray-address local, or "
            f"remove {' and '.join(unused)}."
        )
    command = [*shlex.split(work.request.again)[1:], *spread]
    with options.resumable(folder, command):
        with Progress(live(), work.counted, lines=True) as progress:
            execute(work, folder, resume, by, progress.on_round_end, progress.on_start)
        page = report.write_report(folder)
        claims = json.loads((folder / "claims.json").read_text("utf-8")) if style.as_json else []
        tables = report.suite_tables(*report.gather(folder))
        tell({"folder": folder, "report": page, "parts": claims}, *tables)
        print_path("The report is", page)


def tune(
    name: Annotated[
        str,
        Argument(
            help="Name of a suite of kind `training` with a table \\[tuning], or its TOML file.",
            autocompletion=completion.suites,
        ),
    ],
    data: Annotated[
        str | None,
        Option(
            help="Name of the data source. Default: the data source of the suite.",
            autocompletion=completion.value_of("data.name"),
        ),
    ] = None,
    scale: Annotated[
        str,
        Option(
            help="Size of the runs: `full` or `small`.",
            autocompletion=completion.among("full", "small"),
        ),
    ] = "full",
    engine: options.EngineName = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    resume: options.Resume = False,
    jobs: options.Jobs = None,
    extend: Annotated[
        int,
        Option(
            min=0, max=20,
            help="Maximum number of times that grids are extended while a best value is at an end.",
        ),
    ] = 4,
    budget: Annotated[
        float | None,
        Option(min=0, metavar="SECONDS", help="Do not extend the grids after this time."),
    ] = None,
    store: Annotated[
        bool,
        Option(
            help=(
                "Write the best values to `tuned/SUITE.json` beside the suite's file. The suite "
                "then uses these values."
            ),
        ),
    ] = True,
) -> None:  # fmt: skip
    """Tune the step size of every variant of a suite, and store the best values.

    All variants have the same number of values. While a best value is at an end of its grid, the
    grids are extended. The suite's comparisons are inconclusive until its variants are tuned.

    Example: [bold]fedmuon tune rank --out runs/rank-tuning --jobs 2[/]
    """
    require_at_most(MOST_JOBS, **{"--jobs": jobs})
    count = jobs or 1
    with Workers(count) if count > 1 else contextlib.nullcontext() as workers:
        from fedmuon.core.tables import override  # the config
        from fedmuon.experiments.studies import tuning_runs  # torch, scipy
        from fedmuon.experiments.studies.find import find
        from fedmuon.experiments.studies.training import Training
        from fedmuon.experiments.suites.suite import here

        changes = override({}, options.changes_of(overrides, engine))
        work = find(name, data, scale, changes)
        if not isinstance(work, Training):
            raise InputError(
                f"the suite {name} is of kind {work.kind}, but `fedmuon tune` needs a suite of "
                "kind training"
            )
        folder = (
            out or Path("runs") / f"{work.request.stem}-tuning-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        command = ["tune", *shlex.split(work.request.again)[2:]]
        command += [f"--jobs={jobs}"] if jobs else []
        with options.resumable(folder, command), Progress(live(), work.counted, lines=True) as bar:
            seconds = float("inf") if budget is None else budget
            content = tuning_runs.tune(
                work, folder, resume, workers or here, extend, seconds,
                bar.on_round_end, bar.on_start, note,
            )  # fmt: skip
    rows = [
        (method["method"], "" if method["x"] is None else f"{method['x']:g}",
         f"{method['best'] or float('nan'):g}", "yes" if method["inside"] else "no")
        for method in content["methods"]
    ]  # fmt: skip
    title = f"Best {content['key']} of {len(content['methods'][0]['values'])} values each"
    table = columns(title, ["variant", "at", "best", "inside the grid"], rows)
    tell({"folder": folder, **content}, table)
    if store:
        print_path("The best values are in", tuning_runs.store(name, content))
    print_path("The runs are in", folder)


def sweep(
    config: options.ConfigFile = None,
    grid: options.GivenGrid = None,
    seeds: Annotated[
        int,
        Option(
            "--seeds",
            parser=options.count,
            metavar="INTEGER",
            help=(
                "Number of seeds per grid point: the seed of the config, this seed + 1, and so on."
            ),
        ),
    ] = 1,
    select: Annotated[
        str | None,
        Option(
            help=(
                "Metric that selects the best point: `validation-loss` (default), "
                "`validation-accuracy`, `train-loss`, `test-loss`, `test-accuracy` or "
                "`test-gap`. The first two need validation samples: set data.validation, for "
                "example with `--set data.validation=0.2`. For your own metric, write "
                "`max:NAME` or `min:NAME`."
            ),
            autocompletion=completion.among(
                "validation-loss",
                "validation-accuracy",
                "train-loss",
                "test-loss",
                "test-accuracy",
                "test-gap",
                "max:",
                "min:",
            ),
        ),
    ] = None,
    jobs: options.Jobs = None,
    out: options.OutFolder = None,
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help=(
                "Compute only the results that are missing in the folder of --out. You can also "
                "add values to --grid, or set a larger --seeds."
            ),
        ),
    ] = False,
    overrides: options.Overrides = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    ray: Annotated[
        bool,
        Option("--ray", help="Start Ray on this machine, and run one grid point per CPU core."),
    ] = False,
    ray_address: options.RayAddress = None,
) -> None:
    """Run a config at every point of a grid, and show the best values with intervals.

    The output folder contains sweep.json, cells.csv (one row per run), points.csv (means over
    seeds), and figures. For networks, a sweep over local.lr does not change local.aux-lr. To tune
    both step sizes, add `--grid local.aux-lr=VALUES`.

    Example: [bold]fedmuon sweep --data synthetic --set data.validation=0.2
    --grid local.lr=0.01:10:log7 --seeds 3 --jobs 2[/]
    """
    changes = options.changes_of(overrides, None, None, data, seed)
    words = _config_words(config, changes)
    words += [f"--grid={axis}" for axis in grid or ()] + ([f"--select={select}"] if select else [])
    if ray and ray_address:
        raise InputError(
            "--ray starts Ray, but --ray-address connects to a running Ray cluster. Remove one "
            "of the two options."
        )
    _search(["sweep", *words], config, changes, grid or [], seeds, select, jobs,
            "local" if ray else ray_address, out, resume)  # fmt: skip


def _config_words(config: Path | None, changes: list[str]) -> list[str]:
    """Return the words of a command that describe its config."""
    return [*([str(config)] if config else []), *(f"--set={change}" for change in changes)]


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
    """Run a grid with several seeds, and print its tables and its training time."""
    begun = time.monotonic()
    if words[0] == "sweep" and not grid:
        raise InputError(
            "a sweep needs a grid. Add --grid table.key=VALUES, for example --grid "
            "local.lr=0.01:10:log7. To repeat a run without a grid, use `fedmuon run --seeds`."
        )
    if ray_address and jobs is not None:
        raise InputError(
            "--jobs runs several experiments at the same time on this machine, but --ray and "
            "--ray-address run them on Ray. Remove --jobs, or remove --ray and --ray-address."
        )
    if resume and out is None:
        raise InputError("--resume needs --out. Add --out with the sweep folder to resume.")
    words += [f"--seeds={seeds}"]
    words += [f"--jobs={jobs}"] if jobs else []
    words += [f"--ray-address={ray_address}"] if ray_address else []
    require_at_most(MOST_JOBS, **{"--jobs": jobs})
    count = jobs or 1
    with Workers(count) if count > 1 else contextlib.nullcontext() as workers:
        from fedmuon.experiments.studies.sweep import run_grid, search_of_command  # torch
        from fedmuon.experiments.suites.suite import Spread, here

        command = shlex.join(["fedmuon", *words])
        work = search_of_command(config, changes, grid, seeds, select, command)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = out or Path("runs") / f"{words[0]}-{config.stem if config else 'default'}-{stamp}"
        by = Spread(ray_address) if ray_address else workers or here
        note(fixed_step_size(config, changes, grid))
        if work.private:
            note(
                "Note: each private run spends epsilon. Publishing the best, or several, of the "
                f"{len(work.cells)} runs spends more than one run: see `fedmuon privacy tuned`."
            )
        progress = Progress(live(), work.counted, lines=True)
        with options.resumable(folder, words), progress:
            summary, trained = run_grid(
                work, folder, resume, by, progress.on_round_end, progress.on_start
            )
    tell({"folder": folder, **summary}, *sweep_parts(summary))
    seconds = time.monotonic() - begun
    note(
        f"The command took {seconds:.1f} s. Its runs trained for {trained:.1f} s in total"
        + (f", {trained / count:.1f} s per job." if count > 1 else ".")
    )
    print_path("Results are in", folder)


def fixed_step_size(config: Path | None, changes: list[str], grid: Sequence[str]) -> str:
    """Return a note if a sweep over lr leaves aux-lr fixed although aux-lr has an effect."""
    from fedmuon.config.load import load  # the config
    from fedmuon.config.schema import reads  # the config

    keys = {axis.partition("=")[0].strip() for axis in grid}
    if "local.lr" not in keys or "local.aux-lr" in keys:
        return ""
    with contextlib.suppress(InputError):  # the config may be valid only with values of the grid
        if reads(load(config, changes), "local.aux-lr"):
            return (
                "Note: aux-lr, the step size of parameters that are not orthogonalized, is the "
                "same at all points. Add --grid local.aux-lr=VALUES to tune aux-lr, too."
            )
    return ""


def deploy_demo(
    config: Annotated[
        Path | None,
        Argument(
            help=(
                "Config file (TOML). Without a file, 3 clients train on synthetic data, as "
                "described above."
            )
        ),
    ] = None,
    out: options.OutFolder = None,
    overrides: options.Overrides = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    insecure: Annotated[
        bool,
        Option("--insecure", help="Connect without TLS encryption and without SuperNode keys."),
    ] = False,
) -> None:
    """Run one experiment on a SuperLink with one SuperNode per client.

    The command starts and stops the SuperLink and the SuperNodes on this machine. The default
    config has 3 clients, synthetic data, and 3 rounds. Each round trains 2 clients.

    Example: [bold]fedmuon deploy-demo --set federation.rounds=5 --out runs/deployed[/]
    """
    from fedmuon.experiments.engines.deployment import DEMO, deploy  # torch, Flower

    option_changes = options.changes_of(overrides, data=data, seed=seed)
    changes = [*([] if config else DEMO), *option_changes, "engine.name=deployment"]
    run_config = options.chosen_config(config, changes, False)
    assert run_config is not None
    folder = options.chosen_folder(out, run_config)
    with options.resumable(folder, ["run"]):
        with Progress(live(), lines=True) as progress:
            summary = deploy(
                run_config, folder, not insecure, progress.on_round_end, progress.on_start
            )
        tell({"folder": folder, **summary}, summary_table(summary))
        print_path("Results are in", folder)
        print_path("The log of each process is in", folder / "logs")


def unlearn(
    run_dir: Annotated[
        Path,
        Argument(
            help="Folder of a finished run. The run must have used full batches and float64.",
            autocompletion=completion.run_folders,
        ),
    ],
    sample: Annotated[
        list[int] | None,
        Option(
            "--sample",
            help=(
                "Index of a sample to forget. The array `train_index` in `partition.npz` "
                "contains the indices. You can repeat this option."
            ),
        ),
    ] = None,
    client: Annotated[
        list[int] | None,
        Option(
            "--client",
            help=(
                "Number of a client whose samples are all forgotten. You can repeat this option. "
                "Use it instead of `--sample`."
            ),
        ),
    ] = None,
    epsilon: Annotated[
        float,
        Option(
            help=(
                "Privacy parameter ε. A smaller ε makes the noisy model harder to distinguish "
                "from a retrained model."
            )
        ),
    ] = 1.0,
    delta: Annotated[
        float,
        Option(help="Privacy parameter δ: the probability with which the guarantee of ε may fail."),
    ] = 1e-5,
    out: Annotated[
        Path | None,
        Option(
            "--out",
            help=(
                "Folder for the noisy model. Default: the path of the run folder, followed by "
                "`-unlearned`."
            ),
        ),
    ] = None,
) -> None:
    """Forget samples or clients: add noise to a model that hides whether they were used.

    The command writes the noisy model to unlearned.safetensors. This model is (epsilon,
    delta)-indistinguishable from a model that was trained without the samples and has the same
    noise. A forgotten client takes part in the same rounds, with gradient 0. The guarantee is for
    one release; for several releases, the epsilons and deltas add up. Keep unlearn.json secret.

    Example: [bold]fedmuon unlearn runs/a --sample 17 --epsilon 1 --out runs/a-without-17[/]
    """
    from fedmuon.experiments import unlearning  # torch

    for option, numbers in {"--sample": sample or [], "--client": client or []}.items():
        if twice := [index for place, index in enumerate(numbers) if index in numbers[:place]]:
            raise InputError(f"{option} {twice[0]} is passed twice. Pass each number once.")
    if not sample and not client:
        raise InputError("nothing to forget. Pass --sample or --client.")
    folder = out or run_dir.with_name(f"{run_dir.name}-unlearned")
    record = unlearning.execute(run_dir, sample or [], epsilon, delta, folder, clients=client or [])
    tell(record, unlearning.table(record))
    print_path("The noisy model is in", folder)
