"""Report sections for plain runs: one run with its settings and state, or several side by side."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten

from fedmuon.analysis.report.findings import Findings, Picture, circumstances
from fedmuon.analysis.report.numbers import digits
from fedmuon.analysis.report.overlay import DrawnRun
from fedmuon.analysis.report.style import SERIES, by_round, in_words
from fedmuon.analysis.report.write import write_page
from fedmuon.core.choices import SPREAD
from fedmuon.core.files import mendable, write_bytes
from fedmuon.experiments.certifying.page import with_certificates
from fedmuon.experiments.inspect.client_figure import clients_picture
from fedmuon.experiments.inspect.continuations import continuations_tables
from fedmuon.experiments.inspect.listing import LATE, head, heads, names_of
from fedmuon.experiments.inspect.profile_figure import profile_pictures
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.experiments.results import compared
from fedmuon.experiments.stability.neighbours_report import account
from fedmuon.experiments.tables import short, unreleased
from fedmuon.runs.directory import Record, losses_before

CLIENT_LOSS = "client_loss"
SHORT = 90  # maximum number of characters of the reason why a run failed


def write(run: RunStatus, file: Path, x: str = "rounds") -> Path:
    """Write a page for one run as a single file, with `x` as the horizontal axis of the curves."""
    with tempfile.TemporaryDirectory() as draft, mendable(file, "write"):
        content = write_page(Path(draft), [of_run(run, x)]).read_bytes()
        file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, content)
    return file


def of_runs(runs: Sequence[RunStatus]) -> Findings:
    """Return the section for finished plain runs: details of one run, or several side by side.

    The table of several runs shows folders, measurements, keys that differ, and spent privacy.
    """
    if len(runs) == 1:
        return of_run(runs[0])
    comparison = compared([("", run) for run in runs])
    names = names_of(comparison)
    first = ["seeds", *(measure for measure in comparison.measures if not measure.startswith(LATE))]
    others = [heading for heading in heads(comparison) if heading not in ("run", *first)]
    keys = [heading for heading in others if heading not in comparison.measures]
    late = [heading for heading in others if heading in comparison.measures]
    rows = []
    for name, row in zip(names, comparison.rows, strict=True):
        cells = []
        for column in [*first, *keys, *late]:
            value = row.get(column)
            if isinstance(value, float):
                cells.append(digits(value, 2 if column.endswith(SPREAD) else 4))
            else:
                cells.append("–" if value is None else str(value))
        rows.append((name, *cells))
    few = len(names) <= len(SERIES)
    curves = dict(zip(names, comparison.curves.values(), strict=True)) if few else {}
    return Findings(
        name="runs",
        title=f"{len(runs)} runs side by side",
        data=", ".join(dict.fromkeys(run.config.data.name for run in runs)),
        claims=[],
        numbers_title="Mean over seeds, with half of its 95% interval",
        head=("run", *map(head, first), *short(keys), *map(head, late)),
        numbers=rows,
        note=comparison.note,
        pictures=[_picture(curves)] if few else [],
        again=f"fedmuon compare {' '.join(sorted({str(run.path.parent) for run in runs}))}",
        circumstances=circumstances(runs[0].summary or {}, ("dtype", "engine", "device")),
    )


def of_run(run: RunStatus, x: str = "rounds") -> Findings:
    """Return the section for one finished or unfinished run, with `x` as the axis of the curves."""
    config = run.config
    findings = Findings(
        name=run.path.resolve().name,
        title=f"{config.local.recipe} on {config.data.name}{unreleased(run.summary)}",
        data=config.data.name,
        claims=[],
        numbers_title="Measured in the last round",
        head=("", "value"),
        numbers=[(name.replace("_", " "), digits(value)) for name, value in _measures(run).items()],
        note=account((run.summary or {}).get("privacy")) or run.note,
        pictures=[
            *([_picture({run.path.name: [run.from_start]}, x)] if run.measures else []),
            *clients_picture(run.path),
            *profile_pictures(run),
        ],
        again="fedmuon run config.toml --out FOLDER  # with the config.toml of this run",
        circumstances=[*run.card(), *circumstances(run.summary or {}, ())],
        more=continuations_tables(run.path),
    )
    return with_certificates(findings, run.path, run.risk)


def _measures(run: RunStatus) -> Record:
    """Return the measures of the last round, and the losses before training on unseen clients.

    The client loss comes last, because it is the loss of only the clients of the last round.
    """
    measures = {name: value for name, value in run.measures.items() if name != CLIENT_LOSS}
    last = {name: run.measures[name] for name in (CLIENT_LOSS,) if name in run.measures}
    return measures | losses_before(run.summary or {}) | last


def drawn(run: RunStatus) -> DrawnRun:
    """Return one run as an entry of a page with several runs.

    The run may be finished or unfinished. The entry contains settings, the number of rounds, the
    reason why the run stopped, and curves.
    """
    config = run.config
    state, _, reason = run.state.partition(": ")
    if state == "failed":  # show the reason without the advice that follows it
        state += f": {shorten(reason.partition(': ')[0], SHORT, placeholder=' …')}"
    words = (
        f"{config.local.recipe} on {config.data.name}",
        f"seed {config.federation.seed}",
        state,
        f"{run.totals['rounds']} of {config.federation.rounds} rounds",
        "not released" if run.private else "",
    )
    curves = {name.replace("_", " "): run.curve(name) for name in run.measures}
    return DrawnRun(run.path.name, ", ".join(filter(None, words)), curves)


def _picture(curves: Mapping[str, Sequence[Sequence[Record]]], x: str = "rounds") -> Picture:
    return Picture("curves", partial(by_round, curves, x=x), "Curves", "", in_words)
