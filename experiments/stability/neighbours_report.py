"""The report of a finished `fedmuon stability`: claims and numbers."""

import contextlib
import functools
import shlex
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.claims import Columns, run_claims
from fedmuon.analysis.report.comparisons import name_of
from fedmuon.analysis.report.findings import Findings, Picture, Rows, card_of, circumstances
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.tables import RUN_AGAIN, TRIALS, read_csv, read_json
from fedmuon.analysis.report.verdicts import with_range
from fedmuon.config.load import Config, load
from fedmuon.config.user_objects import IN_PYTHON, handed_over
from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text, require_regular, require_sound
from fedmuon.experiments.stability.figure import census_figure, shifts_of
from fedmuon.experiments.stability.gap import start_words
from fedmuon.experiments.stability.held_out_change import held_out_words
from fedmuon.experiments.stability.influence import CALIBRATION
from fedmuon.experiments.stability.participation_bound import bound_rows
from fedmuon.experiments.stability.participation_gap import gap_rows
from fedmuon.experiments.stability.prediction import rows_of
from fedmuon.experiments.suites.suite import settings_card
from fedmuon.experiments.tables import BALL_NAMES, BOUND_NAMES, standing, unreleased

NAMES = BOUND_NAMES | {"gap": "measured gap", "gap_low": "lower end of its 95% interval",
                       "gap_high": "upper end of its 95% interval"}  # fmt: skip
BOUND_WORDS = ("c_hp", "kind", "status", "assumptions", "refusal")
MODES = {"all": "census of all {} neighbours", "own": "{} random neighbours",
         "worst": "the {} neighbours predicted to be worst"}  # fmt: skip
CLIENT_MODES = {"all": "each of {} clients as the neighbour", "own": "{} random client neighbours",
                "worst": "the worst found samples of {} clients"}  # fmt: skip


def findings(folder: Path) -> Findings:
    """Return the findings of a run with neighbours.

    With `stability.neighbours = "all"`, no neighbour may be missing.
    """
    record = read_json(folder / "bound.json", (*NAMES, *BOUND_WORDS))
    summary = read_json(folder / "summary.json", ("recipe", "data", "rounds", "seconds"))
    neighbours = read_csv(folder / "neighbours.csv", TRIALS)
    of_samples = "unit" not in record
    mode, name = _mode(folder, neighbours, of_samples), folder.resolve().name
    config: list[Config] = []
    with contextlib.suppress(InputError):  # the config may name files that are missing
        config = [load(folder / "config.toml")]
    trained = config[0].data.train if config else None
    if config and config[0].data.client_test:  # clients hold out a part of the training samples
        with np.load(require_regular(folder / "partition.npz")) as split:
            trained = len(split["client"])
    count, compared = len(neighbours["trial"]), record.get("influence")
    of_gap, *claims = run_claims(neighbours, record, of_samples and mode == "all")
    of_gap = with_range(of_gap, record)
    if of_gap.changes:  # these changes make the interval of the gap shorter
        of_gap = replace(of_gap, command=_command(name, config, "shorter", of_gap.changes))
    draw = functools.partial(census_figure, neighbours, bound=record, shifts=shifts_of(folder))
    facts = {
        "scale": "one run",
        "seed": summary.get("seed"),
        "training samples n": trained,
        "device": summary.get("device"),
        "threads": summary.get("machine", {}).get("threads"),
    }
    modes = MODES if of_samples else CLIENT_MODES
    label = modes.get(mode, "{} neighbours").format(count)
    return Findings(
        name=name,
        title=f"{summary['recipe']} on {summary['data']}: {label}{unreleased(summary)}",
        data=str(summary["data"]),
        claims=[of_gap, *claims],
        numbers_title="The bound",
        head=("", "value"),
        numbers=[
            (text, number(record[name]))
            for name, text in (NAMES | BALL_NAMES).items()
            if name in NAMES or name in record
        ]
        + [(text, str(value)) for text, value in rows_of(record)]
        + [(text, _cell(value)) for text, value in (*bound_rows(record), *gap_rows(record))]
        + [(text, number(compared[name])) for name, text in CALIBRATION.items() if compared]
        + learned(summary, record),
        note=" ".join(filter(None, (_note(record), account(summary.get("privacy"))))),
        pictures=[Picture.known("census", draw)],
        stands_on=stands_on(record, str(record["kind"])),
        assumptions=[str(text) for text in record["assumptions"]],
        again=_command(name, config, "again"),
        circumstances=circumstances(
            summary, ("recipe", "data", "rounds", "seed", "dtype", "engine", "device", "seconds")
        ),
        about=[(words, str(value)) for words, value in facts.items() if value is not None],
        card=card_of({"card": settings_card(config)}),
    )


def _cell(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _command(name: str, config: Sequence[Config], end: str, changes: Sequence[str] = ()) -> str:
    """Return the command that repeats the run with these changes in the new folder `NAME-END`."""
    if any(map(handed_over, config)):
        also = f" and {' and '.join(changes)}" if changes else ""
        call = f"fedmuon.stability({f'{name}/config.toml'!r}, ..., out={f'{name}-{end}'!r})"
        return f"{call}{IN_PYTHON}{also}"
    changed = [word for change in changes for word in ("--set", change)]
    command = ["fedmuon", "stability", f"{name}/config.toml", *changed, "--out", f"{name}-{end}"]
    return shlex.join(command)


def learned(summary: Mapping[str, Any], record: Mapping[str, Any]) -> Rows:
    """Return table rows that help to judge a bound: the bound divided by B, accuracy and losses."""
    top, value = record.get("range", 1.0), record["value"]
    share = value / top if value is not None and top else None
    rows = [] if "share" in record else [("bound over B", number(share))]
    names = ("accuracy", "train_loss", "test_loss")
    rows += [
        (f"{name_of(name)} (measured)", number(summary[name])) for name in names if name in summary
    ]
    return rows + start_words(record) + held_out_words(record)


def _note(record: Mapping[str, Any]) -> str:
    """Return a note if there is no bound, or if the bound is violated or vacuous."""
    if record["refusal"]:
        return f"No bound: {record['refusal']}"
    note = str(record.get("note", ""))
    return f"Violated: {note}" if record["status"] == "violated" else note


def account(private: Mapping[str, Any] | None) -> str:
    """Return the epsilon of a private run as text, or "" for other runs."""
    if private is None:
        return ""
    spent = "Epsilon is infinite."
    if (epsilon := private["epsilon"]) is not None:
        spent = (
            f"The run spent ε = {number(epsilon)} at δ = {number(private['delta'], 3)} "
            f"({standing(private)})."
        )
    return f"{spent} {private['note']}"


def _mode(folder: Path, neighbours: Columns, of_samples: bool) -> str:
    """Return the run's `stability.neighbours`. Raise InputError if neighbours are missing."""
    require_sound(folder, ["config.toml", "partition.npz"])
    try:
        config = tomllib.loads(read_text(folder / "config.toml"))
        mode = str(config["stability"]["neighbours"])
        with np.load(require_regular(folder / "partition.npz")) as split:
            every = split["train_index"] if of_samples else np.unique(split["client"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        raise InputError(
            f"{folder}: config.toml or partition.npz is damaged: {RUN_AGAIN}"
        ) from None
    tried = neighbours["index" if of_samples else "client"]
    if mode == "all" and not np.array_equal(np.sort(tried), np.sort(every)):
        raise InputError(
            f"{folder} does not contain all neighbours yet. Continue with `fedmuon stability "
            f"--resume --out {folder}`."
        )
    return mode


def stands_on(record: Mapping[str, Any], lipschitz: str) -> str:
    """Return a text with the status and the constants of a bound."""
    if not record["assumptions"]:
        return f"Status: {record['status']}."
    proved = isinstance(c_hp := record["c_hp"], str)
    constant = f"the {c_hp} form, which is proved" if proved else f"{c_hp}, which is not proved"
    return (
        f"Status: {record['status']}. The bound is that of the Stability note, Theorem 4.1, at δ "
        f"= {record['delta']}, with C_hp = {constant}, and the {lipschitz} Lipschitz constant of "
        "the orthogonalizer. The bound assumes:"
    )
