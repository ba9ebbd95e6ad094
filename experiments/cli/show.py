"""What a person sees while a run lasts and when it has ended."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from fedmuon.analysis.report.numbers import digits, number
from fedmuon.core.errors import plain
from fedmuon.experiments.inspect.plots import sparkline
from fedmuon.experiments.spending import standing, unreleased
from fedmuon.experiments.tables import columns, facts
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import Begin, Watch

if TYPE_CHECKING:
    from fedmuon.analysis.report.findings import Findings
    from fedmuon.analysis.report.verdicts import Claim


@contextlib.contextmanager
def shown(counted: str) -> Iterator[tuple[Watch, Begin]]:
    """A bar for callers who have no console of their own; in a notebook, one that it can show."""
    if (console := Console()).is_jupyter:
        line = NotebookLine(counted)
        yield line.watch, line.begin
        return
    with Progress(console, counted) as progress:
        yield progress.watch, progress.begin


SIGNED = ("test_gap",)
TIME = len("0:00:00")
MOST = 100  # lines where there is no terminal, as many points of a loss that are remembered
WIDE = 100  # characters that have room for more than a short bar and course of the loss
RISEN = 1.1  # times its first value, a loss did not only waver


class Progress(bars.Progress):
    """One live bar: what is counted, what was last known, time left; where there is no terminal,
    `lines` as they come, of as many rounds as there are, or a hundred of more. Work that goes on
    knows of the rounds `before` what it is to go on from."""

    def __init__(
        self,
        console: Console,
        counted: str = "rounds",
        lines: bool = False,
        before: Sequence[Record] = (),
    ) -> None:
        super().__init__(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(max(5, min(40, console.width - 80))),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
            bars.TimeElapsedColumn(Column(no_wrap=True, min_width=TIME)),
            bars.TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=TIME)),
            console=console,
            disable=not console.is_terminal,
        )
        self._counted, self._before = counted, before
        self._bars = 10 if console.width >= WIDE else 5  # of the course of the loss
        self._lines = lines and not console.is_terminal
        self._known: Record = {}  # the last value of what a note says
        self._unsaid: dict[str, Record] = {}  # what lines have yet to say: the record that has it
        self._losses_seen = Remembered()
        self._total, self._said = 0, 0
        self._whole = True
        self._losses: list[float] = []  # of the first round that was seen, and of the last

    def begin(self, done: int, total: int) -> None:
        """Show the bar, `done` of it in, in the place of one that has ended."""
        for ended in self.task_ids:
            self.remove_task(ended)
        self._whole = done == 0
        self._total, self._said = total, done
        for record in self._before[:done]:
            self._take(record)
        self.add_task(self._counted, total=total, completed=done, note=self._note())

    def watch(self, record: Record) -> None:
        """Move the bar to what the record says is done."""
        if "client_loss" in record:
            self._losses = [*self._losses[:1], record["client_loss"]]
        self._take(record)
        done = record["done"] if "done" in record else record["round"]
        if not self.disable:
            for bar in self.task_ids:
                self.update(bar, completed=done, note=self._note())
        elif self._lines and self._due(done):
            self._said = done
            said = f"{self._counted} {done}/{self._total}  {self._measured(record)}"
            self._unsaid = {}
            self.console.print(said.strip(), highlight=False, markup=False, soft_wrap=True)

    def _take(self, record: Record) -> None:
        """Remember what the record measured."""
        if "client_loss" in record:
            self._losses_seen.add(record["client_loss"])
        self._known |= _noted(record)
        self._unsaid |= dict.fromkeys(_noted(record), record)

    def _measured(self, record: Record) -> str:
        """What the record measured, and with its round what those since the last line did."""
        before = [
            f"{_note({name: one[name]})} in round {one['round']}"
            for name, one in self._unsaid.items()
            if name not in record and "round" in one
        ]
        return "  ".join(filter(None, [_note(_noted(record)), *before]))

    def _note(self) -> str:
        """What was last known, and the course of the loss."""
        return f"{_note(self._known)}  {sparkline(self._losses_seen.values, self._bars)}".strip()

    def _due(self, done: int) -> bool:
        """Whether it is the end, or another hundredth is done."""
        total = max(self._total, 1)
        return done == self._total or done * MOST // total > self._said * MOST // total

    def risen(self) -> str:
        """What to say of a run, seen from its first round on, whose loss grew."""
        first, last = self._losses if len(self._losses) == 2 else (0.0, 0.0)
        if not (self._whole and 0 < RISEN * first < last):
            return ""
        return escape(
            f"Note: the loss grew from {number(first)} to {number(last)}: lower [local] lr."
        )


class NotebookLine:
    """A bar below a notebook's cell, written over ten times a second at most."""

    def __init__(self, counted: str) -> None:
        self._counted, self._total, self._next = counted, 0, 0.0
        self._known: Record = {}
        self._shown: Any = None

    def begin(self, done: int, total: int) -> None:
        """Show it, `done` of it in."""
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._total = total
        self._shown = display(self._line(done, ""), raw=True, display_id=True)

    def watch(self, record: Record) -> None:
        """Move it to what the record says is done."""
        self._known |= _noted(record)
        done = record["done"] if "done" in record else record["round"]
        if self._shown and (done == self._total or time.monotonic() >= self._next):
            self._next = time.monotonic() + 0.1
            self._shown.update(self._line(done, _note(self._known)), raw=True)

    def _line(self, done: int, note: str) -> dict[str, str]:
        said = f"{self._counted} {done}/{self._total}  {note}"
        bar = f'<progress value="{done}" max="{self._total}"></progress> {said}'
        return {"text/plain": said, "text/html": bar}


class Remembered:
    """Numbers in their order; of many every second, every fourth and so on."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every, self._seen = 1, 0

    def add(self, value: float) -> None:
        """Take one more."""
        if self._seen % self._every == 0:
            self.values.append(value)
        self._seen += 1
        if len(self.values) > 2 * MOST:
            self.values, self._every = self.values[::2], 2 * self._every


NOTES = {"client_loss": "loss {}", "accuracy": "accuracy {}", "largest": "largest {}",
         "cell": "{}", "ranking": "{}"}  # fmt: skip


def _noted(record: Record) -> Record:
    """What of a record a note says."""
    return {name: record[name] for name in NOTES if name in record}


def _note(known: Record) -> str:
    """What is known of finished rounds or cells."""
    said = {name: digits(one) if isinstance(one, float) else one for name, one in known.items()}
    return "  ".join(text.format(said[name]) for name, text in NOTES.items() if name in said)


def privacy_table(private: Record) -> Table:
    """What a private run spent, and what that stands on."""
    lines = {"epsilon": "infinite"}
    if private["epsilon"] is not None:
        bracket = {name: f"{private[name]:.3f}" for name in ("epsilon", "lower", "rdp")}
        lines = {
            "epsilon": bracket["epsilon"],
            "at least": bracket["lower"],
            "by RDP": bracket["rdp"],
            "at delta": number(private["delta"], 3),
            "stands on": standing(private),
            "certified": "yes" if private["certified"] else "NO",
        }
    lines["released"] = ", ".join(private.get("released", ()))
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
        name.replace("_", " "): ("+" if name in SIGNED and summary[name] > 0 else "")
        + digits(summary[name])
        for name in [*known, "seconds"]
        if isinstance(summary[name], float)
    }
    return columns(title, list(values), [list(values.values())], left=0)


def _said(text: str) -> str:
    """Words of a file as a table may hold them: no markup, no control characters."""
    return escape(plain(text, None))


COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}


def by_how_much(claim: "Claim") -> str:
    """The effect at its worst place, its interval and what the rule asks for; then every place."""
    effect, ends = claim.shown
    reach = f", {ends} (95%)" if ends else ""
    told = f"{effect}{reach}, asked for: {claim.accepted}" if effect else ""
    return "; ".join(filter(None, (told, claim.in_words)))


def suite_tables(found: "Findings") -> list[Table | Text]:
    """A suite's claims with their verdicts, what would decide the open ones, and its numbers."""
    from fedmuon.analysis.report.verdicts import tally

    claims = [
        (_said(claim.sentence), f"[{COLOURS.get(claim.verdict, 'dim')}]{claim.verdict}[/]",
         _said(by_how_much(claim)))
        for claim in found.claims
    ]  # fmt: skip
    numbers = [[_said(one) for one in row] for row in found.numbers]
    title = f"{_said(found.title)}: {tally(found.claims)}"
    commands = dict.fromkeys(claim.command for claim in found.claims if claim.command)
    return [
        *([columns(title, ("claim", "verdict", "by how much"), claims, left=3)] if claims else []),
        *([Text(f"{plain(found.caution, None)}\n")] if found.caution else []),
        *(Text(f"To decide what is open: {plain(one, None)}\n") for one in commands),
        columns(found.numbers_title, [_said(name) for name in found.head], numbers),
    ]
