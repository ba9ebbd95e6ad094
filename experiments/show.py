"""What a person sees while a run lasts and when it has ended."""

from types import TracebackType

from rich import progress as bars
from rich.console import Console
from rich.table import Table

from fedmuon.storage import Record


class Progress:
    """One live bar: rounds, loss, time left; silent where there is no terminal."""

    def __init__(self, console: Console) -> None:
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
        """Show the bar, `done` rounds in."""
        self._bar = self._bars.add_task("rounds", total=total, completed=done, note="")

    def watch(self, record: Record) -> None:
        """Move the bar to a finished round."""
        if self._bar is not None:
            note = f"loss {record['client_loss']:.4f}"
            if "accuracy" in record:
                note += f"  accuracy {record['accuracy']:.3f}"
            self._bars.update(self._bar, completed=record["round"], note=note)


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
