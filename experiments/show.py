"""What a person sees while a run lasts and when it has ended."""

from types import TracebackType

from rich import progress as bars
from rich.console import Console
from rich.table import Table

from fedmuon.storage import Record


class Progress:
    """One live bar: what is counted, a note, time left; silent where there is no terminal."""

    def __init__(self, console: Console, counted: str = "rounds") -> None:
        self._counted = counted
        self._bars = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar: bars.TaskID | None = None

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def begin(self, done: int, total: int) -> None:
        """Show the bar, `done` of it in."""
        self._bar = self._bars.add_task(self._counted, total=total, completed=done, note="")

    def watch(self, record: Record) -> None:
        """Move the bar to what the record says is done."""
        if self._bar is not None:
            done = record["done"] if "done" in record else record["round"]
            self._bars.update(self._bar, completed=done, note=_note(record))


def _note(record: Record) -> str:
    """What a finished round or stack has to say for itself."""
    said = {
        "client_loss": "loss {:.4f}",
        "accuracy": "accuracy {:.3f}",
        "largest": "largest {:.3g}",
        "stack": "{}",
    }
    return "  ".join(text.format(record[name]) for name, text in said.items() if name in record)


def summary_table(summary: Record) -> Table:
    """The numbers of a finished run."""
    title = f"{summary['recipe']} on {summary['data']}, {summary['rounds']} rounds"
    table = Table(title=title, title_justify="left")
    shown = {
        "train loss": f"{summary['train_loss']:.5f}",
        "test loss": f"{summary['test_loss']:.5f}",
        "gap": f"{summary['gap']:+.5f}",
        "accuracy": f"{summary['accuracy']:.2%}",
        "seconds": f"{summary['seconds']:.2f}",
    }
    for name in shown:
        table.add_column(name, justify="right")
    table.add_row(*shown.values())
    return table


def suite_table(record: Record) -> Table:
    """The columns of 001, Table 2, beside the published ones, and the speed."""
    title = (
        f"{record['title']} on {record['data']}: {record['trajectories']} trajectories in "
        f"{record['seconds']:.1f} s ({record['trajectories_per_second']:.1f} a second)"
    )
    table = Table(title=title, title_justify="left")
    for name in ("", "runs", "gap within bound", "mean gap", "mean bound", "mean perturbation"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in (("measured", record["measured"]), ("published", record["published"])):
        if row:
            table.add_row(
                name,
                str(row["runs"]),
                f"{row['gap_within_bound']:.0%}",
                f"{row['mean_gap']:+.5f}",
                f"{row['mean_bound']:.5f}",
                f"{row['mean_perturbation']:.3g}",
            )
    return table
