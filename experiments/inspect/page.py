"""Plain runs as parts of a page: one with its card, or several side by side."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedmuon.analysis.report.findings import Findings, Picture, Rows, circumstances
from fedmuon.analysis.report.numbers import digits
from fedmuon.analysis.report.overlay import Run
from fedmuon.analysis.report.style import SERIES, by_round, in_words
from fedmuon.analysis.report.write import write_page
from fedmuon.core.choices import SPREAD
from fedmuon.core.files import mendable, write_bytes
from fedmuon.experiments.compare import comparison
from fedmuon.experiments.inspect.card import card
from fedmuon.experiments.inspect.listing import LATE, head, heads, names_of, short
from fedmuon.experiments.inspect.status import Seen, seen
from fedmuon.experiments.results import Comparison
from fedmuon.experiments.spending import unreleased
from fedmuon.experiments.stability.findings import account
from fedmuon.runs.directory import Record

SHORT = 90  # characters of why a run failed


def write(run: Seen, file: Path) -> Path:
    """One run as one file."""
    with tempfile.TemporaryDirectory() as draft, mendable(file, "write"):
        content = write_page(Path(draft), [of_run(run)]).read_bytes()
        file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, content)
    return file


def of_runs(folders: Sequence[Path]) -> Findings:
    """Finished plain runs: one by itself, several side by side."""
    if len(folders) == 1:
        return of_run(seen(folders[0]))
    found = comparison({"": folders})
    runs = [seen(folder) for folder in folders]
    data = ", ".join(dict.fromkeys(one.config.data.name for one in runs))
    top, rows = _beside(found)
    curves = dict(zip(names_of(found), found.curves.values(), strict=True))
    return Findings(
        name="runs",
        title=f"{len(folders)} runs side by side",
        data=data,
        claims=[],
        numbers_title="Mean and standard deviation over seeds",
        head=top,
        numbers=rows,
        note=found.note,
        pictures=[_picture(curves)] if len(curves) <= len(SERIES) else [],
        again=f"fedmuon compare {' '.join(sorted({str(one.parent) for one in folders}))}",
        circumstances=circumstances(runs[0].summary or {}, ("dtype", "engine", "device")),
    )


def _beside(found: Comparison) -> tuple[tuple[str, ...], Rows]:
    """Head and rows: folders, what was measured, then the keys that differ and what was spent."""
    first = ["seeds", *(one for one in found.measures if not one.startswith(LATE))]
    rest = [one for one in heads(found) if one not in ("run", *first)]
    keys = [one for one in rest if one not in found.measures]
    late = [one for one in rest if one in found.measures]
    rows = [
        (name, *(_said(one, row.get(one)) for one in [*first, *keys, *late]))
        for name, row in zip(names_of(found), found.rows, strict=True)
    ]
    return ("run", *map(head, first), *short(keys), *map(head, late)), rows


def of_run(run: Seen) -> Findings:
    """One run, finished or not."""
    config = run.config
    return Findings(
        name=run.path.resolve().name,
        title=f"{config.local.recipe} on {config.data.name}{unreleased(run.summary)}",
        data=config.data.name,
        claims=[],
        numbers_title="Measured in the last round",
        head=("", "value"),
        numbers=[(_words(name), digits(value)) for name, value in run.measures.items()],
        note=account((run.summary or {}).get("privacy")) or run.note,
        pictures=[_picture({run.path.name: [run.rounds]})] if run.measures else [],
        again="fedmuon run config.toml --out FOLDER, with the run's own config.toml",
        circumstances=[*card(run), *circumstances(run.summary or {}, ())],
    )


def drawn(run: Seen) -> Run:
    """A run among others, finished or not: who it is, how far it came and why no further, and its
    curves."""
    config = run.config
    words = (
        f"{config.local.recipe} on {config.data.name}",
        f"seed {config.federation.seed}",
        _standing(run.state),
        f"{len(run.rounds)} of {config.federation.rounds} rounds",
        "not released" if run.private else "",
    )
    curves = {_words(name): run.curve(name) for name in run.measures}
    return Run(run.path.name, ", ".join(filter(None, words)), curves)


def _standing(state: str) -> str:
    """The state in a word; of a run that failed with its reason, without its mend."""
    word, _, why = state.partition(": ")
    reason = shorten(why.partition(": ")[0], SHORT, placeholder=" …")
    return f"{word}: {reason}" if word == "failed" else word


def _picture(curves: Mapping[str, Sequence[Sequence[Record]]]) -> Picture:
    return Picture("curves", partial(by_round, curves), "Curves", "", in_words)


def _said(name: str, value: Any) -> str:
    if value is None:
        return "–"
    count = 2 if name.endswith(SPREAD) else 4
    return digits(value, count) if isinstance(value, float) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
