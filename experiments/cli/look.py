"""Commands that look at runs: `show`, `ls`."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from fedmuon.core.errors import Interrupted, plain
from fedmuon.experiments.cli.options import AsJson, complain, console, refuse, tell, where

if TYPE_CHECKING:
    from fedmuon.experiments.inspect.status import RunStatus

HEIGHT, WIDTH, GAP = 7, 38, 2  # lines and least characters of a curve, and between two
FIRST = ("train_loss", "test_loss", "accuracy", "client_loss")  # of the curves
DROPPED = ("train_loss", "seconds", "test_loss", "seed", "data", "recipe", "accuracy")


def show(
    run_dir: Annotated[Path, Argument(help="A run directory, finished or not.")],
    html: Annotated[
        Path | None, Option("--html", help="Write the same as one page that needs nothing else.")
    ] = None,
) -> None:
    """Look at a run: its experiment, its curves, what it measured and released.

    Example: [bold]fedmuon show runs/a --html a.html[/]
    """
    from fedmuon.experiments.inspect.status import card, run_status
    from fedmuon.experiments.tables import facts

    if (run := run_status(run_dir)).damage:
        refuse(run.damage)
    console.print(facts(plain(run_dir, None), [*card(run), *_where(run)]))
    for line in _curves(run, console.width):
        console.print(Text(line), soft_wrap=True)
    for found in _came_of(run):
        console.print(found)
    if run.note and run.summary is None:  # else its account says so
        console.print(run.note)
    _say_how_to_go_on([run])
    if html is not None:
        from fedmuon.experiments.inspect.page import write

        console.print("The page is", where(write(run, html)), soft_wrap=True)


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
    """List all runs below a folder, and how to go on with those that are not finished.

    Example: [bold]fedmuon ls runs --sort accuracy --reverse[/]
    """
    from fedmuon.experiments.inspect.listing import in_order, row
    from fedmuon.experiments.inspect.status import runs_below

    if not (runs := runs_below(folder)) and not as_json:
        console.print("There are no runs below", where(folder), soft_wrap=True)
        return
    rows = in_order([row(one, folder) for one in runs], sort, reverse)
    notes = [one.note for one in runs if not one.damage and one.note]
    tell({"runs": rows}, as_json, _listed(rows, sort), *notes[:1])
    if not as_json:
        _say_how_to_go_on(runs)


def _listed(rows: Sequence[dict[str, Any]], sort: str) -> Table:
    """As many columns as there is room for."""
    from fedmuon.experiments.inspect.listing import COLUMNS, WORDS, cells
    from fedmuon.experiments.tables import columns

    held, left = [*COLUMNS], [name for name in DROPPED if name != sort.replace("-", "_")]
    while True:
        words = sum(name in WORDS for name in held)
        head = [name.replace("_", " ") for name in held]
        shown = columns("", head, [cells(one, held) for one in rows], words)
        wide = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
        if wide <= console.width or not left:
            return shown
        held.remove(left.pop(0))


def _curves(run: "RunStatus", width: int) -> list[str]:
    """What was measured by round, as many curves beside each other as there is room for."""
    from fedmuon.experiments.inspect.plots import panel, side_by_side

    known = [name for name in dict.fromkeys((*FIRST, *run.measures)) if name != "test_gap"]
    found = {name: run.curve(name) for name in known}
    drawn = {name.replace("_", " "): held for name, held in found.items() if len(held) > 1}
    across = max(1, (width + GAP) // (WIDTH + GAP))
    each = (width - GAP * (across - 1)) // across
    panels = [panel(name, held, each, HEIGHT) for name, held in drawn.items()]
    return side_by_side(panels, across, GAP)


def _where(run: "RunStatus") -> list[tuple[str, str]]:
    """What a finished run was computed by."""
    if run.summary is None:
        return []
    machine, versions = run.summary["machine"], run.summary["versions"]
    threads = machine["threads"]
    by = f"{machine['processor']}, {threads} thread{'s' * (threads != 1)}"
    names = ("fedmuon", "torch", "python")
    return [("machine", by), ("versions", ", ".join(f"{one} {versions[one]}" for one in names))]


def _came_of(run: "RunStatus") -> Iterator[Any]:
    """What a run says of itself and of its neighbours."""
    from fedmuon.analysis.report.numbers import digits
    from fedmuon.experiments.cli.show import summary_table
    from fedmuon.experiments.tables import columns

    if (summary := run.summary) is None:
        names = [name.replace("_", " ") for name in run.measures]
        cells = [digits(value) for value in run.measures.values()]
        if names:
            yield columns("last known", names, [cells], 0)
        return

    yield summary_table(summary)
    if run.bound is not None:
        from fedmuon.experiments.stability.neighbours import verdict_table

        yield verdict_table(run.path, run.bound)


def _say_how_to_go_on(runs: Sequence["RunStatus"]) -> None:
    for run in runs:
        if run.damage or not run.ended:
            state = f"damaged: {run.damage}" if run.damage else run.state
            more = f", go on with: {run.again}" if state == "unfinished" else ""
            console.print(Text(plain(f"{run.path}: {state}{more}", None)), soft_wrap=True)


# Commands that look at what is finished: `compare`, `report`.


def compare(
    folders: Annotated[list[Path], Argument(help="Run directories, or folders of them.")],
    figure: Annotated[
        Path | None, Option(help="Draw the curves into this .png or .pdf file.")
    ] = None,
) -> None:
    """Show finished runs side by side: by the keys in which they differ, mean and ± over seeds.

    One table where there is room, else what was measured above the keys. ± is the standard
    deviation of a sample, over n - 1.
    Example: [bold]fedmuon compare runs/a runs/b --figure curves.png[/]
    """
    from fedmuon.core.choices import SPREAD
    from fedmuon.experiments.compare import comparison
    from fedmuon.experiments.inspect.listing import side_by_side
    from fedmuon.experiments.tables import columns

    found = comparison({"": folders})
    whole, measured, keys = side_by_side(found)
    one = columns("", *whole)
    apart = len(keys[0]) > 1 and not one.fits(console, console.options)
    for table in [columns("", *measured), columns("", *keys)] if apart else [one]:
        console.print(table)
    if any(name.endswith(SPREAD) for name in found.measures):
        console.print(
            "± is the standard deviation over seeds (of a sample, over n - 1).", highlight=False
        )
    for (name, *_), row in zip(whole[1], found.rows, strict=True):
        if "spent epsilon" in row:
            console.print(f"{name}: {_spent(row)}", highlight=False)
    if found.note:
        console.print(found.note)
    for why in found.left_out:
        complain(f"left out: {why}")
    if figure is not None:
        from fedmuon.analysis.report.style import saved_as

        saved_as(found.plot(), figure)
        console.print("The curves are in", where(figure), soft_wrap=True)


def report(
    folder: Annotated[
        Path, Argument(help="What suite, stability or run wrote, or a folder of such folders.")
    ],
) -> None:
    """Write figures and one self-contained HTML page: which claims hold, by how much.

    It has suites, runs with neighbours, and plain runs side by side; and says which of a folder it
    leaves out, as they are damaged, and which have neighbours still to be run.
    Example: [bold]fedmuon report runs/A1[/]
    """
    from fedmuon.experiments.report import write_report

    page = write_report(folder, complain)
    console.print("The report is", where(page), soft_wrap=True)


def _spent(row: dict[str, object]) -> str:
    """What the private runs of a row spent at most."""
    from fedmuon.analysis.report.numbers import number

    spent, delta = number(row["spent epsilon"]), number(row["at delta"], 3)
    doubt = "" if row["certified"] else ", not certified"
    of = f"{row['adjacency']}, level {row['level']}"
    return f"spent epsilon {spent} at delta = {delta}, {of}{doubt}"


# `fedmuon watch`, and `--watch` of commands that run something: a page that follows runs.

Watch = Annotated[
    bool, Option("--watch", help="Print the address of a page, on this machine, that follows it.")
]


def watch(
    folder: Annotated[Path, Argument(help="A run directory, or a folder of them.")] = Path("runs"),
) -> None:
    """Follow runs on a page in the browser, on this machine alone, until Ctrl-C.

    Example: [bold]fedmuon watch runs[/]
    """
    from fedmuon.experiments.inspect.watch import Server

    if not folder.is_dir():
        refuse(f"{folder} is no folder: name a run directory, or a folder that holds some")
    try:
        server = Server(folder)
    except OSError as error:
        refuse(f"no page can be served on 127.0.0.1 ({error.strerror}): free a port, or a socket")
    with server, contextlib.suppress(Interrupted):
        _say(f"{server.url} follows {folder} until Ctrl-C")
        server.serve_forever()


@contextlib.contextmanager
def followed(folder: Path, wanted: bool) -> Iterator[None]:
    """Serve the page of what is within, if it is wanted."""
    from fedmuon.experiments.inspect.watch import watched

    with watched(folder, _say) if wanted else contextlib.nullcontext():
        yield


def _say(sentence: str) -> None:
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)
