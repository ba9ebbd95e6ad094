"""What a person sees while a run lasts and when it has ended."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedmuon.drive import Begin, Watch
from fedmuon.errors import plain
from fedmuon.experiments.laboratory.facts import columns, facts
from fedmuon.experiments.laboratory.spending import standing, unreleased
from fedmuon.storage import Record

if TYPE_CHECKING:
    from fedmuon.analysis.report.findings import Findings


@contextlib.contextmanager
def shown(counted: str) -> Iterator[tuple[Watch, Begin]]:
    """A bar for callers who have no console of their own; in a notebook, one that it can show."""
    if (console := Console()).is_jupyter:
        line = NotebookLine(counted)
        yield line.watch, line.begin
        return
    with Progress(console, counted) as progress:
        yield progress.watch, progress.begin


FORMATS = {"train_loss": "{:.5f}", "test_loss": "{:.5f}", "test_gap": "{:+.5f}",
           "accuracy": "{:.2%}"}  # fmt: skip
RISEN = 1.1  # times its first value, a loss did not only waver


class Progress(bars.Progress):
    """One live bar: what is counted, a note, time left; silent where there is no terminal."""

    def __init__(self, console: Console, counted: str = "rounds") -> None:
        super().__init__(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._counted = counted
        self._whole = True
        self._losses: list[float] = []  # of the first round that was seen, and of the last

    def begin(self, done: int, total: int) -> None:
        """Show the bar, `done` of it in, in the place of one that has ended."""
        for ended in self.task_ids:
            self.remove_task(ended)
        self._whole = done == 0
        self.add_task(self._counted, total=total, completed=done, note="")

    def watch(self, record: Record) -> None:
        """Move the bar to what the record says is done."""
        if "client_loss" in record:
            self._losses = [*self._losses[:1], record["client_loss"]]
        for bar in self.task_ids:
            done = record["done"] if "done" in record else record["round"]
            self.update(bar, completed=done, note=_note(record))

    def risen(self) -> str:
        """What to say of a run, seen from its first round on, whose loss grew."""
        first, last = self._losses if len(self._losses) == 2 else (0.0, 0.0)
        if not (self._whole and 0 < RISEN * first < last):
            return ""
        return escape(f"Note: the loss grew from {first:.4g} to {last:.4g}: lower [local] lr.")


class NotebookLine:
    """A bar below a notebook's cell, written over ten times a second at most."""

    def __init__(self, counted: str) -> None:
        self._counted, self._total, self._next = counted, 0, 0.0
        self._shown: Any = None

    def begin(self, done: int, total: int) -> None:
        """Show it, `done` of it in."""
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._total = total
        self._shown = display(self._line(done, ""), raw=True, display_id=True)

    def watch(self, record: Record) -> None:
        """Move it to what the record says is done."""
        done = record["done"] if "done" in record else record["round"]
        if self._shown and (done == self._total or time.monotonic() >= self._next):
            self._next = time.monotonic() + 0.1
            self._shown.update(self._line(done, _note(record)), raw=True)

    def _line(self, done: int, note: str) -> dict[str, str]:
        said = f"{self._counted} {done}/{self._total}  {note}"
        bar = f'<progress value="{done}" max="{self._total}"></progress> {said}'
        return {"text/plain": said, "text/html": bar}


def _note(record: Record) -> str:
    """What a finished round or cell has to say for itself."""
    said = {
        "client_loss": "loss {:.4f}",
        "accuracy": "accuracy {:.3f}",
        "largest": "largest {:.3g}",
        "cell": "{}",
        "ranking": "{}",
    }
    return "  ".join(text.format(record[name]) for name, text in said.items() if name in record)


def privacy_table(private: Record) -> Table:
    """What a private run spent, and what that stands on."""
    lines = {"epsilon": "infinite"}
    if private["epsilon"] is not None:
        bracket = f"(at least {private['lower']:.3f}, RDP {private['rdp']:.3f})"
        lines = {
            "epsilon": f"{private['epsilon']:.3f} {bracket} at delta = {private['delta']:.3g}",
            "stands on": standing(private),
            "certified": "yes" if private["certified"] else "NO",
        }
    return facts("privacy", [*lines.items(), ("note", private["note"])])


def summary_table(summary: Record) -> Group:
    """The numbers of a finished run; a private one says what it spent."""
    return Group(_numbers(summary), *accounts(summary))


def accounts(summary: Record | None) -> list[Table]:
    """The account of a private run; none of others."""
    private = (summary or {}).get("privacy")
    return [privacy_table(private)] if private else []


def _numbers(summary: Record) -> Table:
    title = f"{summary['recipe']} on {summary['data']}, {summary['rounds']} rounds"
    title += unreleased(summary)
    known = list(summary)[: list(summary).index("seconds")]
    values = {
        name.replace("_", " "): FORMATS.get(name, "{:.5g}").format(summary[name])
        for name in known
        if isinstance(summary[name], float)
    }
    values["seconds"] = f"{summary['seconds']:.2f}"
    return columns(title, list(values), [list(values.values())], left=0)


def _said(text: str) -> str:
    """Words of a file as a table may hold them: no markup, no control characters."""
    return escape(plain(text, None))


COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}


def suite_tables(found: "Findings") -> list[Table | Text]:
    """A suite's claims with their verdicts, what would decide the open ones, and its numbers."""
    from fedmuon.analysis.report.verdicts import tally

    claims = [
        (_said(claim.sentence), f"[{COLOURS.get(claim.verdict, 'dim')}]{claim.verdict}[/]",
         _said(claim.in_words))
        for claim in found.claims
    ]  # fmt: skip
    numbers = [[_said(one) for one in row] for row in found.numbers]
    title = f"{_said(found.title)}: {tally(found.claims)}"
    commands = dict.fromkeys(claim.command for claim in found.claims if claim.command)
    return [
        columns(title, ("claim", "verdict", "by how much"), claims, left=3),
        *(Text(f"To decide what is open: {plain(one, None)}\n") for one in commands),
        columns(found.numbers_title, [_said(name) for name in found.head], numbers),
    ]
