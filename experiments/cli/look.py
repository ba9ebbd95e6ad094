"""Commands that look at runs: `show`, `ls`, `watch`, `compare`, `report`."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.measure import Measurement
from rich.text import Text
from typer import Argument, Option

from fedmuon.core.choices import SPREAD
from fedmuon.core.errors import InputError, Interrupted, plain
from fedmuon.experiments import tables
from fedmuon.experiments.cli.options import AsJson, complain, console, print_path, print_plain, tell
from fedmuon.experiments.cli.show import run_parts, sweep_parts
from fedmuon.runs.directory import client_records

if TYPE_CHECKING:
    from fedmuon.experiments.inspect.status import RunStatus

# Columns of `ls` that are left out, in this order, until the table fits.
DROPPED = ("train_loss", "seconds", "test_loss", "seed", "data", "recipe", "accuracy")


def show(
    run_dir: Annotated[Path, Argument(help="A run directory, finished or not; or a sweep's.")],
    html: Annotated[
        Path | None, Option("--html", help="Write the same as one self-contained page.")
    ] = None,
    clients: Annotated[
        bool,
        Option("--clients", help="Show the distribution over clients, and the worst of them."),
    ] = False,
    figure: Annotated[
        Path | None,
        Option("--figure", help="With --clients: draw them into this .png, .pdf or .svg file."),
    ] = None,
    x: Annotated[
        str,
        Option(
            "--x",
            help="Axis of the curves: rounds, seconds (simulated), bytes-up (of used replies) or "
            "bytes (in both directions).",
        ),
    ] = "rounds",
) -> None:
    """Show a run: its experiment, its curves, what it measured and released.

    Records of clients are those of a run with `fedmuon run --clients`.
    Example: [bold]fedmuon show runs/a --html a.html[/]
    """
    from fedmuon.experiments.inspect.status import run_status  # the config

    if figure is not None and not clients:
        raise InputError("--figure draws the records of clients: give --clients, too")
    if clients and x != "rounds":
        raise InputError("--x is the axis of a run's curves: leave it or --clients out")
    if (run_dir / tables.SWEEP).is_file():
        given = ("html" if html else "", "clients" * clients, "x" * (x != "rounds"))
        _show_sweep(run_dir, [f"--{one}" for one in given if one])
        return
    if (run := run_status(run_dir)).damage:
        raise InputError(run.damage)
    if clients:
        _show_clients(run, figure)
        return
    for part in run_parts(run, console.width, x):
        console.print(part, soft_wrap=isinstance(part, Text))
    _print_states([run])
    if html is not None:
        from fedmuon.experiments.inspect import page  # torch, matplotlib

        print_path("The page is", page.write(run, html, x))


def _show_sweep(folder: Path, asked: Sequence[str]) -> None:
    """Print the table and the best points of a finished sweep again."""
    from fedmuon.analysis.report.tables import read_json  # numpy

    if asked:
        raise InputError(f"{asked[0]} is of one run, and {folder} is a sweep: name a run below "
                         f"{folder / 'runs'}")  # fmt: skip
    for part in sweep_parts(read_json(folder / tables.SWEEP, ("seeds", "grid", "table"))):
        console.print(part, soft_wrap=isinstance(part, Text))


def _show_clients(run: "RunStatus", figure: Path | None) -> None:
    """Print tables of the run's clients, and draw them."""
    from fedmuon.experiments.inspect.clients import client_tables  # scipy

    records = client_records(run.path)
    for part in client_tables(records, run.config.federation.clients):
        console.print(part)
    if figure is not None and records:
        from fedmuon.analysis.report.style import saved_as  # matplotlib
        from fedmuon.experiments.inspect.client_figure import clients_figure

        saved_as(clients_figure(records), figure)
        print_path("The picture is in", figure)


def ls(
    folder: Annotated[Path, Argument(help="Its runs are listed, and those below it.")] = Path(
        "runs"
    ),
    sort: Annotated[
        str, Option("--sort", help="run, recipe, data, seed, rounds, accuracy, test_loss, ...")
    ] = "run",
    reverse: Annotated[bool, Option("--reverse", help="The greatest first.")] = False,
    as_json: AsJson = False,
) -> None:
    """List all runs below a folder, and how to resume those that are not finished.

    Example: [bold]fedmuon ls runs --sort accuracy --reverse[/]
    """
    from fedmuon.experiments.inspect import listing, status  # the config

    if not (runs := status.runs_below(folder)) and not as_json:
        print_path("There are no runs below", folder)
        return
    rows = listing.in_order([listing.row(one, folder) for one in runs], sort, reverse)
    notes = [one.note for one in runs if not one.damage and one.note]
    names = [*listing.COLUMNS]
    dropped = [name for name in DROPPED if name != sort.replace("-", "_")]
    while True:
        words = sum(name in listing.WORDS for name in names)
        head = [name.replace("_", " ") for name in names]
        table = tables.columns("", head, [listing.cells(one, names) for one in rows], words)
        wide = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        if wide <= console.width or not dropped:
            break
        names.remove(dropped.pop(0))
    tell({"runs": rows}, as_json, table, *notes[:1])
    if not as_json:
        _print_states(runs)


def _print_states(runs: Sequence["RunStatus"]) -> None:
    """Print why runs are not finished, and how to resume them."""
    for run in runs:
        if run.damage or not run.ended:
            state = f"damaged: {run.damage}" if run.damage else run.state
            more = f", resume with: {run.again}" if state == "unfinished" else ""
            console.print(Text(plain(f"{run.path}: {state}{more}", None)), soft_wrap=True)


def watch(
    folder: Annotated[Path, Argument(help="A run directory, or a folder of them.")] = Path("runs"),
) -> None:
    """Follow runs on a page in the browser, on this machine only, until Ctrl-C.

    Example: [bold]fedmuon watch runs[/]
    """
    from fedmuon.experiments.inspect.watch import Server  # the config

    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder: name a run directory, or a folder that holds some"
        )
    try:
        server = Server(folder)
    except OSError as error:
        raise InputError(
            f"no page can be served on 127.0.0.1 ({error.strerror}): free a port, or a socket"
        ) from None
    with server, contextlib.suppress(Interrupted):
        print_plain(f"{server.url} follows {folder} until Ctrl-C")
        server.serve_forever()


def compare(
    folders: Annotated[list[Path], Argument(help="Run directories, sweeps, or folders of them.")],
    figure: Annotated[
        Path | None, Option(help="Draw the curves into this .png or .pdf file.")
    ] = None,
    x: Annotated[
        str,
        Option(
            "--x",
            help="Axis of the figure: rounds, seconds (simulated), bytes-up (of used replies) or "
            "bytes (in both directions).",
        ),
    ] = "rounds",
) -> None:
    """Compare finished runs by the keys in which they differ, with mean and ± over seeds.

    One table if it fits, else measurements and keys in two. ± is the standard deviation of a
    sample, over n - 1.
    Example: [bold]fedmuon compare runs/a runs/b --figure curves.png[/]
    """
    from fedmuon.experiments.inspect import listing  # the config

    if figure is None and x != "rounds":
        raise InputError("--x is the axis of the figure: give --figure FILE, too")
    places = [one / "runs" if (one / tables.SWEEP).is_file() else one for one in folders]
    found, whole, measured, keys = listing.side_by_side(places)
    drawn = None if figure is None else found.plot(x)  # an error comes before the tables
    one = tables.columns("", *whole)
    apart = len(keys[0]) > 1 and not one.fits(console, console.options)
    for table in [tables.columns("", *measured), tables.columns("", *keys)] if apart else [one]:
        console.print(table)
    if any(name.endswith(SPREAD) for name in found.measures):
        console.print(
            "± is the standard deviation over seeds (of a sample, over n - 1).", highlight=False
        )
    for (name, *_), row in zip(whole[1], found.rows, strict=True):
        if "spent epsilon" in row:
            console.print(f"{name}: {listing.spent(row)}", highlight=False)
    if found.note:
        console.print(found.note)
    for why in found.left_out:
        complain(f"left out: {why}")
    if figure is not None and drawn is not None:
        from fedmuon.analysis.report.style import saved_as  # matplotlib

        saved_as(drawn, figure)
        print_path("The curves are in", figure)


def report(
    folder: Annotated[
        Path, Argument(help="What suite, stability or run wrote, or a folder of such folders.")
    ],
) -> None:
    """Write figures and one self-contained HTML page: which claims hold, and by how much.

    The page shows suites, runs with neighbours, and plain runs side by side. Damaged folders are
    left out and named, and the exit code is then 2. Unfinished folders are named, too.
    Example: [bold]fedmuon report runs/A1[/]
    """
    from fedmuon.experiments.report import LEFT_OUT, write_report  # torch, matplotlib

    lines: list[str] = []
    page = write_report(folder, lines.append)
    for line in lines:
        complain(line)
    print_path("The report is", page)
    if any(line.startswith(LEFT_OUT) for line in lines):
        raise typer.Exit(2)
