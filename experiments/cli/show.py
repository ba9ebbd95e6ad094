"""The progress bar of a run, and the tables of a finished run or sweep."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import parent_process
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from fedmuon.analysis.report.numbers import count, digits, number
from fedmuon.core.errors import plain
from fedmuon.core.files import Record
from fedmuon.experiments.certifying.shown import stored_tables
from fedmuon.experiments.inspect import plots
from fedmuon.experiments.tables import (
    columns,
    facts,
    record_name,
    short,
    spelled,
    spent_words,
    standing,
    unreleased,
)
from fedmuon.runs.directory import AXES, UNTRAINED, positions

if TYPE_CHECKING:  # these load pydantic and torch
    from fedmuon.config.load import Config
    from fedmuon.experiments.inspect.status import RunStatus
    from fedmuon.runs.loop import OnRoundEnd, OnStart

TIME = len("0:00:00")
PERIOD = 3600  # seconds over which the speed is averaged; it must contain two rounds
MOST = 100  # maximum number of lines without a terminal, and half of the losses in memory
WIDE = 100  # characters of a terminal in which the bar shows a longer loss curve
RISEN = 1.1  # a warning appears if the loss exceeds this multiple of its first value
NOTES = {"client_loss": "loss {}", "accuracy": "accuracy {}", "largest": "largest {}",
         "cell": "{}", "ranking": "{}"}  # fmt: skip
HEIGHT, WIDTH, GAP = 7, 38, 2  # of a curve: lines, minimum characters, characters between two
FIRST = ("train_loss", "test_loss", "accuracy", "client_loss")  # order of the curves
SIGNED = ("test_gap", "average_test_gap")
TEST_GAP = "The test gap is the test loss minus the train loss."
CLIENT_LOSS = "The client loss is the mean loss of a round's clients before their last step."
LOOSER = " (a looser upper bound on the same ε)"
NO_CURVES = (*SIGNED, "simulated_seconds")


def brief_routes(table: str) -> str:
    """Shorten a table such as `routes.txt`: one line per group of layers with similar names."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for line in table.splitlines():
        name, *values = re.split(r"\s\s+", line.strip())
        groups.setdefault((re.sub(r"\d+", "*", name), *values), []).append(name)
    rows = [
        (f"{pattern} ({len(names)})" if len(names) > 1 else names[0], *cells)
        for (pattern, *cells), names in groups.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def step_sizes(table: str, lr: float, aux_lr: float, default: bool) -> str:
    """Return a sentence with the step sizes of the parameters in a table such as `routes.txt`.

    Args:
        table: The table.
        lr: Step size of parameters that are orthogonalized.
        aux_lr: Step size of all other parameters. Without such parameters, it is not stated.
        default: Whether `aux_lr` is the default.
    """
    rows = [re.split(r"\s\s+", line.strip()) for line in table.splitlines()]
    place = rows[0].index("optimizer")
    if all(row[place] != "aux" for row in rows):
        return f"Step size: lr = {lr:g} for all parameters, which are orthogonalized."
    why = " (the default, which does not depend on lr)" if default else ""
    return (
        f"Step sizes: lr = {lr:g} for orthogonalized parameters, aux-lr = {aux_lr:g} for all other "
        f"parameters{why}."
    )


def _noted(record: Record) -> Record:
    """Return the entries of a record that are shown next to the progress bar."""
    return {name: record[name] for name in NOTES if name in record}


def _note(measurements: Record) -> str:
    """Format the latest measurements."""
    text = {
        name: digits(value) if isinstance(value, float) else value
        for name, value in measurements.items()
    }
    return "  ".join(form.format(text[name]) for name, form in NOTES.items() if name in text)


class Progress(bars.Progress):
    """A progress bar with the latest measurements and the remaining time.

    Args:
        console: The console. The bar is shown only in a terminal.
        counted: The unit that the bar counts, such as rounds.
        lines: Whether to print lines outside of a terminal: one per round, at most about 100.
        before: The records of earlier rounds of a resumed run.
    """

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
            speed_estimate_period=PERIOD,
        )
        self._counted, self._before = counted, before
        self._bars = 10 if console.width >= WIDE else 5  # of the loss curve
        self._lines = lines and not console.is_terminal
        self._known: Record = {}  # the latest value of each measurement in a note
        self._unprinted: dict[str, Record] = {}  # measurement that no line shows yet -> its record
        self._losses_seen = Remembered()
        self._total, self._printed = 0, 0
        self._whole = True
        self._losses: list[float] = []  # the losses of the first and the last observed round

    def on_start(self, done: int, total: int) -> None:
        """Show a bar at position `done` of `total`, and remove an earlier bar."""
        for ended in self.task_ids:
            self.remove_task(ended)
        self._whole = done == 0
        self._total, self._printed = total, done
        note = self._remember(self._before[:done])
        self.add_task(self._counted, total=total, completed=done, note=note)

    def on_round_end(self, record: Record) -> None:
        """Move the bar to the round or cell of this record."""
        if "client_loss" in record:
            self._losses = [*self._losses[:1], record["client_loss"]]
        note = self._remember([record])
        completed = record["done"] if "done" in record else record["round"]
        if not self.disable:
            for bar in self.task_ids:
                self.update(bar, completed=completed, note=note)
            return
        total = max(self._total, 1)
        due = completed == self._total or completed * MOST // total > self._printed * MOST // total
        if self._lines and due:
            before = [
                f"{_note({name: earlier[name]})} in round {earlier['round']}"
                for name, earlier in self._unprinted.items()
                if name not in record and "round" in earlier
            ]
            measurements = "  ".join(filter(None, [_note(_noted(record)), *before]))
            line = f"{self._counted} {completed}/{self._total}  {measurements}".strip()
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._printed, self._unprinted = completed, {}

    def is_last(self, record: Record) -> bool:
        """Return whether a record is that of the last round."""
        return record["round"] == self._total

    def risen(self, summary: Record) -> str:
        """Return a warning if the loss grew, otherwise "".

        The warning compares the evaluated losses of the untrained and the final model. Without
        these, it compares the client losses of the first and last round, which may belong to
        different clients. The first round of a resumed run is not known.

        Args:
            summary: The summary of the run.
        """
        before, losses = summary.get(UNTRAINED) or {}, self._losses
        evaluated = next((name for name in FIRST[:2] if name in before and name in summary), "")
        first, last, words = 0.0, 0.0, "the loss"
        if evaluated:
            first, last = before[evaluated], summary[evaluated]
            words = f"the {evaluated.replace('_', ' ')}"
        elif self._whole and len(losses) == 2:
            first, last = losses
        if not 0 < RISEN * first < last:
            return ""
        return f"Note: {words} grew from {number(first)} to {number(last)}. Lower [local] lr."

    def _remember(self, records: Sequence[Record]) -> str:
        """Add these records, and return the latest measurements and the loss curve as text."""
        for record in records:
            if "client_loss" in record:
                self._losses_seen.add(record["client_loss"])
            self._known |= _noted(record)
            self._unprinted |= dict.fromkeys(_noted(record), record)
        if self.disable:
            return ""
        curve = plots.sparkline(self._losses_seen.values, self._bars)
        return f"{_note(self._known)}  {curve}".strip()


@dataclass
class Remembered:
    """A series of numbers that drops every second stored number when it gets too long."""

    values: list[float] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, value: float) -> None:
        """Append a number."""
        if self._seen % self._every == 0:
            self.values.append(value)
        self._seen += 1
        if len(self.values) > 2 * MOST:
            self.values, self._every = self.values[::2], 2 * self._every


class NotebookLine:
    """A progress bar below a notebook cell, updated at most ten times per second."""

    def __init__(self, counted: str) -> None:
        self._counted, self._total, self._next = counted, 0, 0.0
        self._known: Record = {}
        self._shown: Any = None

    def on_start(self, done: int, total: int) -> None:
        """Show a bar at position `done` of `total`."""
        # IPython is optional, but every notebook has it.
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._total = total
        self._shown = display(self._line(done, ""), raw=True, display_id=True)

    def on_round_end(self, record: Record) -> None:
        """Move the bar to the round or cell of this record."""
        self._known |= _noted(record)
        completed = record["done"] if "done" in record else record["round"]
        if self._shown and (completed == self._total or time.monotonic() >= self._next):
            self._next = time.monotonic() + 0.1
            self._shown.update(self._line(completed, _note(self._known)), raw=True)

    def _line(self, completed: int, note: str) -> dict[str, str]:
        text = f"{self._counted} {completed}/{self._total}  {note}"
        bar = f'<progress value="{completed}" max="{self._total}"></progress> {text}'
        return {"text/plain": text, "text/html": bar}


def final_evaluation(config: Config) -> str:
    """Describe what a run does after its last round, if this takes long, otherwise ""."""
    if config.task.name != "causal-lm":
        return ""
    clients = count(config.federation.clients + config.data.unseen_clients, "client")
    return f"All rounds are done. Evaluating the model on the text of {clients} ..."


def is_wanted(progress: bool | None) -> bool:
    """Return whether a function of the Python API shows its progress.

    `progress` is the argument of this function. None means that the progress is shown if somebody
    can watch, which is in a notebook, or if stdout is a terminal. Threads and child processes show
    nothing, because their bars would overwrite each other.
    """
    if progress is not None:
        return progress
    if parent_process() is not None or current_thread() is not main_thread():
        return False
    is_terminal = getattr(sys.stdout, "isatty", bool)  # rich counts a pipe if FORCE_COLOR is set
    with contextlib.suppress(ValueError):  # stdout is closed
        return Console().is_jupyter or is_terminal()
    return False


@contextlib.contextmanager
def shown(counted: str) -> Iterator[tuple[OnRoundEnd, OnStart]]:
    """Show a progress bar in a terminal or a notebook, for callers without a console."""
    if (console := Console()).is_jupyter:
        line = NotebookLine(counted)
        yield line.on_round_end, line.on_start
        return
    with Progress(console, counted) as progress:
        yield progress.on_round_end, progress.on_start


def summary_table(summary: Record) -> Group:
    """Return the results of a finished run. For a private run, add the privacy spent."""
    title = f"{summary['recipe']} on {summary['data']}, {summary['rounds']} rounds"
    title += unreleased(summary)
    measures = list(summary)[: list(summary).index("seconds")]
    values = {
        name.replace("_", " "): ("+" if name in SIGNED and summary[name] > 0 else "")
        + digits(summary[name])
        for name in [*measures, "seconds"]
        if isinstance(summary[name], float)
    }
    numbers = columns(title, list(values), [list(values.values())], left=0)
    if "test_gap" in summary:
        numbers.caption = TEST_GAP
    return Group(numbers, *accounts(summary))


SHOWN_POINTS = 40  # maximum rows of a sweep's table; points.csv contains all points


def sweep_parts(summary: Record) -> Iterator[RenderableType]:
    """Return the parts of a finished sweep to print: its points, the best points, and warnings.

    Args:
        summary: The content of sweep.json.
    """
    yield _points(summary)
    yield from map(Text, [*spent_words(summary), *_sweep_words(summary)])


def _points(summary: Record) -> Table:
    """Return a table of the sweep's points, or of the metrics of repeated runs without a grid."""
    seeds = len(summary["seeds"])
    over = f"of {count(seeds, 'seed')}" + " ± half of the 95% interval" * (seeds > 1)
    over += unreleased(summary)
    if not summary["grid"]:
        names = [spelled(row["metric"]).replace("-", " ") for row in summary["table"]]
        means = _aligned([_with_half(row, "mean", "high") for row in summary["table"]])
        return columns(f"Mean {over}", ["metric", "mean"], zip(names, means, strict=True))
    keys, metric = [*summary["grid"]], record_name(summary["select"])
    others = ("accuracy", "test_loss") if metric not in ("accuracy", "test_loss") else ()
    names = [metric, *[name for name in others if name in summary["table"][0]][:1]]
    rows, title = summary["table"], f"Mean {over}"
    if len(rows) > SHOWN_POINTS:
        sign = -1 if summary["better"] == "higher" else 1
        with_value = [row for row in rows if row[metric] is not None]
        rows = sorted(with_value, key=lambda row: sign * row[metric])[:SHOWN_POINTS]
        title = f"The best {len(rows)} of {len(summary['table'])} points, with the mean {over}"
    best = [*summary["best"].values()]
    marks = ["best" if row in best else "diverged" if row["diverged"] else "" for row in rows]
    words = [[escape(_shown_value(row[key])) for key in keys] for row in rows]
    numbers = [_aligned([_with_half(row, name, f"{name}_high") for row in rows]) for name in names]
    heads = [*short(keys), *(spelled(name).replace("-", " ") for name in names), ""]
    cells = zip(words, *numbers, marks, strict=True)
    points = [[*values, *measures, mark] for values, *measures, mark in cells]
    return columns(title, heads, points, len(keys), dense=True)


def _aligned(means: Sequence[tuple[str, str]]) -> list[str]:
    """Format means and half interval widths like `0.793 ± 0.098`, with aligned ± signs."""
    wide = max((len(half) for _, half in means), default=0)
    return [f"{mean} ± {half:>{wide}}" if half else mean for mean, half in means]


def _shown_value(value: Any) -> str:
    """Format a value of the grid. Use a dash if its key has no effect in these runs."""
    if isinstance(value, bool):
        return str(value).lower()
    return number(value, 6) if isinstance(value, int | float) else str(value) or "–"


def _with_half(row: Record, mean: str, high: str) -> tuple[str, str]:
    """Format a mean and half the width of its interval. Use a dash for an unknown mean."""
    if row[mean] is None:
        return "–", ""
    return digits(row[mean]), "" if row[high] is None else digits(row[high] - row[mean], 2)


CHOSE = " that chose this point, so it is too narrow: run the point again with new seeds"


def _sweep_words(summary: Record) -> Iterator[str]:
    """Describe the best points, and warn of problems with them."""
    test = " (selected on test data, so its value is optimistic)"
    for recipe, row in summary.get("best", {}).items():
        values = [f"{key}={_shown_value(row[key])}" for key in summary["grid"]
                  if key != "local.recipe" and row[key] != ""]  # fmt: skip
        name = record_name(summary["select"])
        mean, half = _with_half(row, name, f"{name}_high")
        seeds = f" (Student's 95% interval of the {count(len(summary['seeds']), 'seed')}{CHOSE})"
        interval = f"{mean} ± {half}{seeds}" if half else mean
        selection = f"{summary['select'].replace('-', ' ')} {interval}"
        selection += test if summary["selected_on_test_data"] else ""
        yield f"Best of {recipe}: {', '.join([*values, selection])}"
    for warning in summary.get("warnings", ()):
        yield f"Warning: {warning}."


def accounts(summary: Record | None) -> list[Table]:
    """Return a table of the privacy spent and its assumptions; empty for a run without privacy."""
    if not (private := (summary or {}).get("privacy")):
        return []
    lines = {"epsilon": "infinite"}
    if private["epsilon"] is not None:
        bracket = {name: f"{private[name]:.3f}" for name in ("epsilon", "lower", "rdp")}
        lines = {
            "epsilon": bracket["epsilon"],
            "at least": bracket["lower"],
            "by RDP": bracket["rdp"] + LOOSER * (bracket["rdp"] != bracket["epsilon"]),
            "at delta": number(private["delta"], 3),
            "refers to": standing(private),
            "certified": "yes" if private["certified"] else "NO",
        }
    lines["released"] = ", ".join(private.get("released", ()))
    return [facts("privacy", [*lines.items(), ("note", private["note"])])]


def profile_parts(run: RunStatus) -> Iterator[RenderableType]:
    """Return the table of a run's profile and what to do about it, if the run was profiled."""
    from fedmuon.experiments.inspect import profile  # loads pydantic

    if processes := profile.processes_of(run):
        yield profile.profile_table(processes)
        yield Text(profile.advice(run.config, processes))


def run_parts(run: RunStatus, width: int, x: str = "rounds") -> Iterator[RenderableType]:
    """Return the parts of a run to print: settings, curves, and the results so far."""
    positions(run.rounds, x, str(run.path))  # an error about the axis comes first
    lines = run.card()
    if run.summary is not None:
        machine, versions = run.summary["machine"], run.summary["versions"]
        threads = machine["threads"]
        by = f"{machine['processor']}, {threads} thread{'s' * (threads != 1)}"
        names = ("fedmuon", "torch", "python")
        packages = ", ".join(f"{package} {versions[package]}" for package in names)
        lines += [("machine", by), ("versions", packages)]
    yield facts(plain(run.path, None), lines)

    measures = [name for name in dict.fromkeys((*FIRST, *run.measures)) if name not in NO_CURVES]
    curves = {name.replace("_", " "): run.curve(name, x) for name in measures}
    across = max(1, (width + GAP) // (WIDTH + GAP))
    panel_width = (width - GAP * (across - 1)) // across
    panels = [
        plots.panel(name, curve, panel_width, HEIGHT)
        for name, curve in curves.items()
        if len(curve) > 1
    ]
    for line in plots.side_by_side(panels, across, GAP):
        yield Text(line)
    if len(curves.get("client loss", ())) > 1:
        yield Text(CLIENT_LOSS)
    if panels and x != "rounds":
        yield Text(f"Horizontal axis of the curves: {AXES[x]}.")

    if run.summary is None:
        names = [name.replace("_", " ") for name in run.measures]
        if names:
            yield columns(
                "latest measurements",
                names,
                [[digits(value) for value in run.measures.values()]],
                0,
            )
        if run.note:  # a finished run shows the note in its privacy table
            yield run.note
        return
    yield summary_table(run.summary)
    yield from profile_parts(run)
    if run.bound is not None:
        from fedmuon.experiments.stability.neighbours import verdict_table  # loads torch

        yield verdict_table(run.path, run.bound)
    yield from stored_tables(run.path)
    yield Text(run.risk)
