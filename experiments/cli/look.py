"""Commands that show runs: `show`, `ls`, `watch`, `compare`, `report`."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.measure import Measurement
from rich.text import Text
from typer import Argument, Option

import fedmuon.experiments.cli.completion as completion
from fedmuon.core.choices import SPREAD
from fedmuon.core.errors import InputError, Interrupted, instead, plain
from fedmuon.core.files import require_sound, sums_of
from fedmuon.experiments import tables
from fedmuon.experiments.cli.options import RunFolder
from fedmuon.experiments.cli.output import console, print_path, style, tell, warn
from fedmuon.experiments.cli.show import run_parts, sweep_parts
from fedmuon.runs.directory import AXES, client_records

NEIGHBOURS = "neighbours.csv"  # has a checksum once all neighbours have run

if TYPE_CHECKING:
    from fedmuon.experiments.inspect.status import RunStatus

# Columns that `ls` leaves out, in this order, until the table fits.
DROPPED = ("train_loss", "seconds", "test_loss", "seed", "data", "recipe", "accuracy")
AXIS = "`rounds`, `seconds` (simulated), `bytes-up` (sent by clients) or `bytes` (both directions)."
HorizontalAxis = Annotated[
    str,
    Option(
        "--x",
        help=f"Horizontal axis of the curves: {AXIS}",
        autocompletion=completion.among("rounds", "seconds", "bytes-up", "bytes"),
    ),
]
Runs = Annotated[Path, Argument(help="Folder with runs.", autocompletion=completion.run_folders)]


def require_axis(x: str) -> None:
    """Raise an error if the value of --x is not an axis of curves."""
    if x not in AXES:
        raise InputError(f"--x {x} is not an axis of curves: {instead(x, AXES)}")


def show(
    run_dir: RunFolder,
    html: Annotated[
        Path | None, Option("--html", help="Also write a self-contained HTML page to this file.")
    ] = None,
    clients: Annotated[
        bool,
        Option(
            "--clients",
            help=(
                "Show how loss and accuracy vary between clients, with the mean of the worst "
                "tenth of the clients."
            ),
        ),
    ] = False,
    profile: Annotated[
        bool,
        Option(
            "--profile",
            help="Show which kinds of work took the time of the run, per process and per round.",
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        Option(
            "--figure",
            help=(
                "Also plot the curves to this .png, .pdf or .svg file. For a run with neighbours, "
                "the file shows the neighbours and their certificates instead. With --clients, "
                "the file shows the clients instead. With --profile, the file shows the kinds of "
                "work."
            ),
        ),
    ] = None,
    x: HorizontalAxis = "rounds",
) -> None:
    """Show a run, a sweep or the result of `fedmuon gap`: settings, curves and results.

    The run may be unfinished. The options --clients and --profile work only for a run that was
    started with `fedmuon run` and the same option.

    Example: [bold]fedmuon show runs/a --html a.html[/]
    """
    from fedmuon.experiments.inspect.status import run_status  # the config

    require_axis(x)
    if clients and profile:
        raise InputError(
            "--clients and --profile show different parts of a run. Use one of the two options."
        )
    if (clients or profile) and x != "rounds":
        part = "--clients" if clients else "--profile"
        raise InputError(
            f"--x sets the horizontal axis of the run's curves, so --x has no effect with {part}. "
            f"Remove --x or {part}."
        )
    options = {"html": html, "clients": clients, "profile": profile, "figure": figure}
    options["x"] = x != "rounds"
    if (run_dir / tables.SWEEP).is_file():
        _show_sweep(run_dir, [f"--{name}" for name, value in options.items() if value])
        return
    if (run_dir / tables.GAP).is_file():
        _show_gaps(run_dir, [f"--{name}" for name, value in options.items() if value])
        return
    if (run := run_status(run_dir)).damage:
        raise InputError(run.damage)
    if clients:
        _show_clients(run, figure)
        return
    if profile:
        _show_profile(run, figure)
        return
    run.curve("", x)  # the run may have no values for this axis
    parts = [] if style.as_json else list(run_parts(run, console.width, x))
    tell(_record(run), *parts)
    _print_states([run])
    if html is not None:
        from fedmuon.experiments.inspect import page  # torch, matplotlib

        print_path("The page is", page.write(run, html, x))
    if figure is not None and x == "rounds" and NEIGHBOURS in sums_of(run.path):
        from fedmuon.analysis.report.style import saved_as  # matplotlib
        from fedmuon.analysis.report.tables import TRIALS, read_csv  # numpy
        from fedmuon.experiments.stability.figure import census_figure, shifts_of

        require_sound(run.path, [NEIGHBOURS])
        neighbours = read_csv(run.path / NEIGHBOURS, TRIALS)
        shifts = shifts_of(run.path)
        saved_as(census_figure(neighbours, bound=run.bound, shifts=shifts), figure)
        print_path("The neighbours are in", figure)
    elif figure is not None:
        from fedmuon.analysis.report.style import by_round, saved_as  # matplotlib

        saved_as(by_round({run.path.name: [run.from_start]}, x=x), figure)
        print_path("The curves are in", figure)


def _record(run: "RunStatus") -> dict[str, Any]:
    """Return the record of a run that `show --json` prints."""
    from fedmuon.experiments.certifying.stored import current

    certificates = current(run.path)
    return {
        "run": run.path,
        "state": run.state,
        "resume": run.again if run.state == "unfinished" else None,
        "settings": dict(run.card()),
        "rounds": len(run.rounds),
        "measures": run.measures,
        "summary": run.summary,
        "bound": run.bound,
        "certificates": None if certificates is None else certificates.record(),
        "risk": run.risk,
        "note": run.note,
    }


def _show_sweep(folder: Path, options: Sequence[str]) -> None:
    """Print the table and the best points of a finished sweep."""
    from fedmuon.analysis.report.tables import read_json  # numpy

    _require_no_option(options, folder, "a sweep")
    summary = read_json(folder / tables.SWEEP, ("seeds", "grid", "table"))
    tell(summary, *([] if style.as_json else sweep_parts(summary)))


def _show_gaps(folder: Path, options: Sequence[str]) -> None:
    """Print the table of a finished `fedmuon gap`."""
    from fedmuon.analysis.report.tables import read_json  # numpy
    from fedmuon.experiments.studies import gap_grid  # torch, scipy, matplotlib

    drawn = f"a result of `fedmuon gap`, whose picture is {folder / gap_grid.PICTURE}"
    _require_no_option(options, folder, drawn)
    summary = read_json(folder / tables.GAP, ("seeds", "grid", "table", "words"))
    table = tables.columns(
        gap_grid.title_of(summary), *gap_grid.shown(summary["table"]), dense=True
    )
    tell(summary, table, *map(Text, summary["words"]))
    if (folder / gap_grid.PICTURE).exists():
        print_path("The picture is", folder / gap_grid.PICTURE)


def _require_no_option(options: Sequence[str], folder: Path, kind: str) -> None:
    """Raise an error if an option for single runs was given for a folder with several runs."""
    if options:
        raise InputError(
            f"{options[0]} works only for a single run, but {folder} is {kind}. Pass one of the "
            f"run folders in {folder / 'runs'}."
        )


def _show_clients(run: "RunStatus", figure: Path | None) -> None:
    """Print tables of the run's clients, and write a figure of the clients to a path."""
    from fedmuon.experiments.inspect.clients import client_tables, last_of_each  # scipy

    records = client_records(run.path)
    last = {"run": run.path, "clients": last_of_each(records)}
    tell(last, *client_tables(records, run.config.federation.clients))
    if figure is not None and records:
        from fedmuon.analysis.report.style import saved_as  # matplotlib
        from fedmuon.experiments.inspect.client_figure import clients_figure

        saved_as(clients_figure(records), figure)
        print_path("The figure is in", figure)


def _show_profile(run: "RunStatus", figure: Path | None) -> None:
    """Print the run's profile, and write a figure of the profile to a path."""
    from fedmuon.experiments.inspect import profile as profiles  # the config
    from fedmuon.runs.profile_records import PROFILE

    profiles.require_profile(run)
    processes, of_workers = profiles.processes_of(run), profiles.rounds_of_workers(run.path)
    tell(
        {
            "run": run.path,
            "processes": processes,
            "rounds": {
                str(record["round"]): record[PROFILE] for record in run.rounds if PROFILE in record
            },
            "rounds_of_workers": of_workers,
        },
        profiles.profile_table(processes),
        Text(profiles.advice(run.config, processes)),
    )
    if figure is not None:
        from fedmuon.analysis.report.style import saved_as  # matplotlib
        from fedmuon.experiments.inspect.profile_figure import profile_figure

        saved_as(profile_figure(processes, run.rounds, of_workers), figure)
        print_path("The figure is in", figure)


def ls(
    folder: Runs = completion.RUNS,
    sort: Annotated[
        str,
        Option(
            "--sort",
            help=(
                "Column to sort by, such as `run`, `recipe`, `data`, `seed`, `rounds`, "
                "`accuracy` or `test_loss`."
            ),
            autocompletion=completion.among(
                "run", "state", "recipe", "data", "seed", "rounds", "accuracy", "test_loss",
                "train_loss", "seconds",
            ),
        ),
    ] = "run",
    reverse: Annotated[bool, Option("--reverse", help="Sort from largest to smallest.")] = False,
) -> None:  # fmt: skip
    """List the runs in a folder and its subfolders, with the state of each run.

    For each unfinished run, the list also shows the command that resumes this run.

    Example: [bold]fedmuon ls runs --sort accuracy --reverse[/]
    """
    from fedmuon.experiments.inspect import index, listing  # the config

    if not (runs := index.runs_below(folder)) and not style.as_json:
        print_path("There are no runs in", folder)
        return
    rows = listing.in_order([listing.row(run, folder) for run in runs], sort, reverse)
    notes = [run.note for run in runs if not run.damage and run.note]
    names = [*listing.COLUMNS]
    cells = [dict(zip(names, listing.cells(row, names), strict=True)) for row in rows]
    widest = {
        name: max((row[name] for row in cells), key=tables.width, default="") for name in names
    }
    dropped = [name for name in DROPPED if name != sort.replace("-", "_")]
    while True:
        words = sum(name in listing.WORDS for name in names)
        head = [name.replace("_", " ") for name in names]
        # A table is as wide as a table with only the widest cell of each column, and with 2,000
        # runs, measuring all cells takes seconds.
        table = tables.columns("", head, [[widest[name] for name in names]], words)
        wide = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        if wide <= console.width or not dropped:
            break
        names.remove(dropped.pop(0))
    table = tables.columns("", head, [[row[name] for name in names] for row in cells], words)
    tell({"runs": rows}, table, *notes[:1])
    for name, kind in ((tables.SWEEP, "a sweep"), (tables.GAP, "`fedmuon gap`")):
        if (folder / name).is_file() and not style.as_json:
            print_path(f"These are the runs of {kind}. To see its table, use: fedmuon show", folder)
    _print_states(runs)


def _print_states(runs: Sequence["RunStatus"]) -> None:
    """Print the state of each unfinished or damaged run, and the command to resume it."""
    for run in runs if not style.as_json else ():
        if run.damage or not run.ended:
            state = f"damaged: {run.damage}" if run.damage else run.state
            hint = f", resume with: {run.again}" if state == "unfinished" else ""
            console.print(Text(plain(f"{run.path}: {state}{hint}", None)), soft_wrap=True)


def watch(folder: Runs = completion.RUNS) -> None:
    """Follow runs on a page in the browser until Ctrl-C.

    Only this machine can open the page.

    Example: [bold]fedmuon watch runs[/]
    """
    from fedmuon.experiments.inspect.watch import Server  # the config

    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder. Pass a run folder, or a folder that contains runs."
        )
    try:
        server = Server(folder)
    except OSError as error:
        raise InputError(
            "the page cannot be served, because no port of 127.0.0.1 could be opened "
            f"({error.strerror}). To see the runs without a page, "
            "use `fedmuon ls` or `fedmuon show`."
        ) from None
    with server, contextlib.suppress(Interrupted):
        console.print(
            f"{server.url} shows the runs in {folder}. Press Ctrl-C to stop.",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        server.serve_forever()


def compare(
    folders: Annotated[
        list[Path],
        Argument(
            help="Run folders, sweep folders, or folders that contain run or sweep folders.",
            autocompletion=completion.run_folders,
        ),
    ],
    figure: Annotated[
        Path | None, Option(help="Plot the curves to this .png, .pdf or .svg file.")
    ] = None,
    x: HorizontalAxis = "rounds",
) -> None:
    """Compare finished runs: their results and the keys in which they differ.

    If runs differ only in the seed, one row shows their mean ± half of its 95% interval.

    Example: [bold]fedmuon compare runs/a runs/b --figure curves.png[/]
    """
    from fedmuon.experiments.inspect import listing  # the config

    require_axis(x)
    if figure is None and x != "rounds":
        raise InputError(
            "--x sets the horizontal axis of the figure, but there is no figure. Add --figure "
            "FILE or remove --x."
        )
    groups = (tables.SWEEP, tables.GAP)
    places = [
        folder / "runs" if any((folder / name).is_file() for name in groups) else folder
        for folder in folders
    ]
    comparison, combined, measures, keys = listing.side_by_side(places)
    # An error about the figure comes before the tables.
    drawn = None if figure is None else comparison.plot(x=x).figure
    full_table = tables.columns("", *combined)
    apart = len(keys[0]) > 1 and not full_table.fits(console, console.options)
    parts: list[object] = (
        [tables.columns("", *measures), tables.columns("", *keys)] if apart else [full_table]
    )
    if any(name.endswith(SPREAD) for name in comparison.measures):
        parts.append(Text(tables.HALF_NOTE))
    for (name, *_), row in zip(combined[1], comparison.rows, strict=True):
        if "spent epsilon" in row:
            parts.append(Text(f"{name}: {listing.spent(row)}"))
    parts += [comparison.note] if comparison.note else []
    names = listing.names_of(comparison)
    rows = [{**row, "run": name} for name, row in zip(names, comparison.rows, strict=True)]
    tell({"rows": rows, "note": comparison.note, "left_out": [*comparison.left_out]}, *parts)
    for reason in comparison.left_out:
        warn(f"left out: {reason}")
    if figure is not None and drawn is not None:
        from fedmuon.analysis.report.style import saved_as  # matplotlib

        saved_as(drawn, figure)
        print_path("The curves are in", figure)


def report(
    folder: Annotated[
        Path,
        Argument(
            help=(
                "Output folder of `fedmuon suite`, `fedmuon stability` or `fedmuon run`, or a "
                "folder that contains several output folders."
            ),
            autocompletion=completion.run_folders,
        ),
    ],
) -> None:
    """Write a report page with figures and a verdict for each claim.

    The page is one self-contained HTML file. The page can show suites, runs of `fedmuon stability`,
    and plain runs. The command leaves damaged folders out, prints a warning for each damaged
    folder, and then ends with exit code 2. The command also prints a warning for each unfinished
    folder.

    Example: [bold]fedmuon report runs/A1[/]
    """
    from fedmuon.experiments.report import LEFT_OUT, write_report  # torch, matplotlib

    lines: list[str] = []
    page = write_report(folder, lines.append)
    for line in lines:
        warn(line)
    parts = json.loads((folder / "claims.json").read_text("utf-8")) if style.as_json else []
    tell({"report": page, "parts": parts, "notes": lines})
    print_path("The report is", page)
    if any(line.startswith(LEFT_OUT) for line in lines):
        raise typer.Exit(2)
