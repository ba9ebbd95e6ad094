"""Kind `training`: variants of a run over seeds, their curves, and who ends lower or sooner."""

import contextlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from fedmuon.analysis.report.chance import luck, near_chance
from fedmuon.analysis.report.columns import MEND, Columns, read_table, require
from fedmuon.analysis.report.comparisons import (
    at_level,
    ended,
    judged,
    levels,
    name_of,
    rows_of,
)
from fedmuon.analysis.report.deciding import of_all_seeds
from fedmuon.analysis.report.findings import (
    Findings,
    Picture,
    Rows,
    Titled,
    card_of,
    number,
    spread,
)
from fedmuon.analysis.report.timetables import followed, timetable
from fedmuon.analysis.report.verdicts import Claim, counted
from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text
from fedmuon.experiments.studies.training import figure
from fedmuon.privacy.client_level import EVERYONE
from fedmuon.privacy.pairs import ADJACENCIES

KEYS = ("variants", "sweep", "claims", "published", "source", "note")
HEAD = ("x", "seed", "round", "train_seconds")
MEASURES = ("train_loss", "test_loss", "accuracy")
SAMPLINGS = {"poisson": "Poisson", "shuffle": "shuffled", "cyclic": "cyclic", "none": "public"}


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of such a folder, whose suite.json is `about`."""
    require(about, KEYS, folder / "suite.json")
    curves = read_table(folder / "curves.csv", (*HEAD, *MEASURES), ("variant",))
    runs = read_table(folder / "runs.csv", (*HEAD, *MEASURES), ("variant", "note"))
    _require_matching(curves, runs, about, folder)
    label = str(about["sweep"]["label"]) if about["sweep"] else ""
    clients = _clients(folder)
    chance = luck(*about["guess"]) if "guess" in about else 0.0
    claims = [
        replace(judged(one, runs, curves, label, chance), also=one.get("also", ""))
        for one in about["claims"]
    ]
    head, numbers = _numbers(runs, about)
    return Findings.of_suite(
        folder,
        about,
        claims=[*claims, kept(runs, clients)] if targeted(clients) else claims,
        numbers_title="Terminal values, mean ± standard deviation over seeds",
        head=head,
        numbers=numbers,
        pictures=[*_pictures(curves, runs, about), *_accounts(clients, about)],
        stands_on="" if clients is None else _stands_on(clients),
        facts=("suite", "data", "scale", "runs", "seconds"),
        more=[timetable(curves, about)] if about.get("times") else (),
        card=[*card_of(about), ("accuracy at the end", _reached(runs))],
        runs=_every(runs, label),
        caution=near_chance(_accuracies(runs), *about["guess"]) if "guess" in about else "",
        pending=_pending(folder, about),
    )


def _pending(folder: Path, about: Mapping[str, Any]) -> str:
    """That more seeds were asked for than these tables have, and the command that goes on."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # for --resume to refuse
        cells = json.loads(read_text(folder / "suite.lock"))[-1]
        if len(cells) > about["runs"]:
            seeds = str(len({config["federation"]["seed"] for *_, config in cells}))
            words = of_all_seeds(shlex.split(str(about["again"])))
            again = shlex.join([*words, "--seeds", seeds, "--out", str(folder), "--resume"])
            return (
                f"These are {about['runs']} of {len(cells)} runs that were once asked for, of "
                f"{seeds} seeds: for the others go on with {again}"
            )
    return ""


def _accuracies(runs: Columns) -> np.ndarray:
    """Of every run once: one that is not swept has a row at each value."""
    every = dict(zip(runs.get("run", range(len(runs["x"]))), runs["accuracy"], strict=True))
    return np.array([*every.values()])


def _reached(runs: Columns) -> str:
    """From the least accurate variant to the most, as means over seeds."""
    every = [ended(runs, name, x, "accuracy") for name in dict.fromkeys(runs["variant"].tolist())
             for x in levels(runs)]  # fmt: skip
    known = [one for one in every if np.isfinite(one)]
    return f"{min(known):.3f} to {max(known):.3f}" if known else "–"


def _every(runs: Columns, label: str) -> Titled:
    """All runs with what they ended with."""
    names = ("seed", "round", *MEASURES, "train_seconds")
    head = ("run", *([label] if label else []), *(name_of(name) for name in names))
    lines: Rows = []
    for at, variant in enumerate(runs["variant"].tolist()):
        swept = (f"{runs['x'][at]:g}",) if label else ()
        lines.append((variant, *swept, *(number(float(runs[name][at])) for name in names)))
    return "All runs", head, lines


def _clients(folder: Path) -> Columns | None:
    """The accounts of the clients of private runs, or None."""
    file = folder / "clients.csv"
    names = ("x", "seed", "client", "epsilon", "target")
    return read_table(file, names, ("variant",)) if file.exists() else None


def _stands_on(clients: Columns) -> str:
    """What every epsilon of the section compares."""
    named = figure.adjacency_of(clients)
    means = "; ".join(f"{one}: {ADJACENCIES.get(one, '')}" for one in named.split(", "))
    return f"Every ε here is of {named} neighbours, with {drawn(clients)} ({means})."


def drawn(clients: Columns) -> str:
    """How the lots of samples, or the cohorts of whole clients, are drawn."""
    what = "cohorts" if (clients["client"] == EVERYONE).all() else "lots"
    ways = dict.fromkeys(map(str, clients.get("sampling", ["poisson"])))
    return ", ".join(f"{SAMPLINGS.get(one, one)} {what}" for one in ways if one)


def targeted(clients: Columns | None) -> TypeGuard[Columns]:
    """Whether runs were to keep to an epsilon; those of a given noise spend what they spend."""
    return clients is not None and bool((clients["target"] > 0).all())


def kept(runs: Columns, clients: Columns) -> Claim:
    """Every run is certified, and no client of it spends more than the run's target."""
    sentence = (
        "Every run is certified, and no client spends more than its target ε, jointly "
        f"({figure.adjacency_of(clients)}, {drawn(clients)})."
    )
    certified = runs["certified"][~np.isnan(runs["epsilon"])] == "True"  # of the runs that ended
    over, share = clients["epsilon"] > clients["target"], clients["epsilon"] / clients["target"]
    detail = (
        f"{certified.sum()} of {len(certified)} runs are certified; {over.sum()} of {len(over)} "
        f"accounts are above their target, and the largest is {share.max():.2%} of it; "
        "each account is of one training, and choosing among several spends more "
        "(`fedmuon privacy tuned`)"
    )
    every = np.concatenate([certified, ~over])
    return counted(sentence, every, "runs and accounts", detail)


def _require_matching(
    curves: Columns, runs: Columns, about: Mapping[str, Any], folder: Path
) -> None:
    """Both tables have the suite's variants, and every run ends where its curve does."""
    ends = [
        curves["round"][rows_of(curves, variant, x) & (curves["seed"] == seed)].max(initial=-1)
        for variant, x, seed in zip(runs["variant"], runs["x"], runs["seed"], strict=True)
    ]
    same = set(runs["variant"]) == set(curves["variant"]) == set(about["variants"])
    count = len(about["variants"]) * len(levels(runs)) * len(np.unique(runs["seed"]))
    if not same or len(ends) != count or not np.array_equal(ends, runs["round"]):
        raise InputError(f"{folder}: curves.csv and runs.csv do not belong together: {MEND}")


def _numbers(runs: Columns, about: Mapping[str, Any]) -> tuple[tuple[str, ...], Rows]:
    """A line a variant and value, and its published line below it."""
    swept = bool(about["sweep"])
    names = (*MEASURES, "train_seconds", *(["epsilon"] if "epsilon" in runs else []))
    named = {"epsilon": f"{name_of('epsilon')} ({figure.adjacency_of(runs)})"}
    heads = (named.get(name, name_of(name)) for name in names)
    head = ("variant", *([about["sweep"]["label"]] if swept else []), *heads)
    rows: Rows = []
    for variant in about["variants"]:
        for x in levels(runs):
            mine = rows_of(runs, variant, x)
            cells = [_spread(runs[name][mine]) for name in names]
            rows.append((variant, *([f"{x:g}"] if swept else []), *cells))
        if (held := about["published"].get(variant)) and not swept:
            rows.append((f"  {about['source']}", *(number(held.get(name)) for name in names)))
    return head, rows


def _spread(values: np.ndarray) -> str:
    """Mean and standard deviation, or that it diverged."""
    lost = int(np.isnan(values).sum())
    return f"{lost} of {len(values)} diverged" if lost else spread(values)


def _accounts(clients: Columns | None, about: Mapping[str, Any]) -> list[Picture]:
    """Every client's epsilon, where there is more than one client."""
    if clients is None or len(np.unique(clients["client"])) == 1:
        return []
    return [
        Picture.known("clients", figure.by_client, clients, about["variants"], _drawn_at(about))
    ]


def _pictures(curves: Columns, runs: Columns, about: Mapping[str, Any]) -> list[Picture]:
    """Terminal values along the sweep, and curves by round and by seconds."""
    sweep = about["sweep"]
    ends = [_terminal(runs, about)] if sweep else []
    if sweep and sweep["key"] == "privacy.noise" and "epsilon" in runs:
        spent = runs, about["variants"]
        by = Picture.known("epsilon", figure.by_epsilon, *spent, read=figure.ends_in_words)
        ends.insert(0, by)
    along = [_followed(curves, sweep)] if sweep and sweep.get("follow") else []
    return [*ends, *_by_round_and_seconds(curves, about), *along]


def _terminal(runs: Columns, about: Mapping[str, Any]) -> Picture:
    """Where the variants end, along the sweep."""
    measures, label = ("test_loss", "accuracy"), about["sweep"]["label"]
    given = runs, about["variants"], measures, label
    return Picture.known("terminal", figure.terminal, *given, read=figure.ends_in_words)


def _by_round_and_seconds(curves: Columns, about: Mapping[str, Any]) -> list[Picture]:
    """The curves at one value of the sweep, if there is one."""
    variants, sweep, at = about["variants"], about["sweep"], _drawn_at(about)
    where = f" at {sweep['label']} = {at:g}" if sweep else ""
    rows = {name: column[at_level(curves, at)] for name, column in curves.items()}
    shown = partial(Picture.known, where=where, read=partial(figure.in_words, rows))
    return [
        shown(name, figure.curves, curves, variants, by, at)
        for by, name in (("round", "curves"), ("train_seconds", "curves-seconds"))
    ]


def _followed(curves: Columns, sweep: Mapping[str, Any]) -> Picture:
    """The curves of the variant that the suite follows, at each value of the sweep."""
    lines, names = followed(curves, sweep)
    where = sweep["follow"]
    given = lines, names, "round", np.nan
    read = partial(figure.in_words, lines)
    made = Picture.known("followed", figure.curves, *given, where=where, read=read)
    beside = " Beside them are variants that the sweep leaves alone." * bool(sweep["fixed"])
    return replace(made, caption=made.caption + beside)


def _drawn_at(about: Mapping[str, Any]) -> float:
    """The value of the sweep that curves are drawn at; nan without one."""
    sweep = about["sweep"]
    if not sweep:
        return np.nan
    return sweep["values"][-1] if sweep["curves"] is None else sweep["curves"]
