"""What a report says of one folder: its claims, numbers, figures, assumptions, circumstances."""

import functools
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis import figures
from analysis.captions import CAPTIONS, TITLES
from analysis.claims import Claim, Columns, run_claims, suite_claims, varying
from analysis.columns import (
    MEND,
    NEIGHBOURS,
    RUNS,
    TRIALS,
    read_csv,
    read_json,
    require_consistent,
    require_matching,
)
from fedmuon.errors import InputError

SUITE_KEYS = ("suite", "data", "title", "scale", "trajectories", "seconds", "published",
              "trajectories_per_second", "compared_with", "kind", "delta", "status",
              "assumptions", "versions")  # fmt: skip
BOUND_KEYS = ("value", "h", "g", "delta", "c_hp", "kind", "l_orth", "n_eff", "gap", "gap_low",
              "gap_high", "status", "assumptions", "refusal")  # fmt: skip
TABLE_2 = {"gap_within_bound": "gap ≤ bound", "mean_gap": "mean gap",
           "mean_bound": "mean bound", "mean_perturbation": "mean perturbation"}  # fmt: skip
BOUND_NAMES = {"value": "bound", "h": "sharp-stability branch H", "g": "bounded-difference "
               "branch G", "delta": "δ", "l_orth": "Lipschitz constant of the map",
               "n_eff": "effective sample size", "gap": "measured gap",
               "gap_low": "lower end of its 95% interval",
               "gap_high": "upper end of its 95% interval"}  # fmt: skip
MODES = {"all": "census of all {} neighbours", "own": "{} random neighbours",
         "worst": "the {} neighbours predicted to be worst"}  # fmt: skip
Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Picture:
    """A figure to draw, wide or narrow, and what a reader should see in it."""

    name: str
    draw: Callable[[bool], Any]

    @property
    def title(self) -> str:
        """What it shows."""
        return TITLES[self.name]

    @property
    def caption(self) -> str:
        """What one should see."""
        return CAPTIONS[self.name]


@dataclass(frozen=True)
class Findings:
    """One section of a report; all strings are plain text."""

    name: str  # of the folder
    title: str
    data: str
    claims: Sequence[Claim]
    numbers_title: str
    head: tuple[str, ...]
    numbers: Rows
    note: str
    pictures: Sequence[Picture]
    stands_on: str
    assumptions: Sequence[str]
    again: str
    circumstances: Rows


def of_suite(folder: Path) -> Findings:
    """The findings of a suite folder."""
    about = read_json(folder / "suite.json", SUITE_KEYS)
    runs = read_csv(folder / "runs.csv", RUNS)
    neighbours = read_csv(folder / "neighbours.csv", NEIGHBOURS)
    require_matching(runs, neighbours, folder)
    require_consistent(runs, folder)
    head, numbers = _beside(runs, about["published"])
    return Findings(
        name=folder.resolve().name,
        title=f"{about['title']} on {about['data']}",
        data=str(about["data"]),
        claims=suite_claims(runs, neighbours),
        numbers_title="Measured beside published" if about["published"] else "Measured",
        head=head,
        numbers=numbers,
        note=str(about["compared_with"] or ""),
        pictures=_suite_pictures(runs, neighbours),
        stands_on=_stands_on(about | {"c_hp": "explicit"}),
        assumptions=[str(text) for text in about["assumptions"]],
        again=f"fedmuon suite {about['suite']} --data {about['data']} --scale {about['scale']}",
        circumstances=_circumstances(
            about, ("suite", "data", "scale", "trajectories", "seconds", "trajectories_per_second")
        ),
    )


def of_run(folder: Path) -> Findings:
    """The findings of a run with neighbours; a census must be whole."""
    record = read_json(folder / "bound.json", BOUND_KEYS)
    summary = read_json(folder / "summary.json", ("recipe", "data", "rounds", "seconds"))
    neighbours = read_csv(folder / "neighbours.csv", TRIALS)
    mode = _mode(folder, neighbours)
    census = mode == "all"
    count = len(neighbours["trial"])
    what = MODES.get(mode, "{} neighbours").format(count)
    return Findings(
        name=folder.resolve().name,
        title=f"{summary['recipe']} on {summary['data']}: {what}",
        data=str(summary["data"]),
        claims=run_claims(neighbours, record, census),
        numbers_title="The bound",
        head=("", "value"),
        numbers=[(text, _number(record[name])) for name, text in BOUND_NAMES.items()],
        note=f"Refused: {record['refusal']}" if record["refusal"] else "",
        pictures=[Picture("census", functools.partial(figures.census, neighbours))],
        stands_on=_stands_on(record),
        assumptions=[str(text) for text in record["assumptions"]],
        again="fedmuon stability config.toml --out FOLDER, with the run's own config.toml",
        circumstances=_circumstances(
            summary, ("recipe", "data", "rounds", "seed", "dtype", "engine", "device", "seconds")
        ),
    )


def _suite_pictures(runs: Columns, neighbours: Columns) -> list[Picture]:
    """The figures that what varies asks for; the gap beside its bound always."""
    factors, chosen = varying(runs), []
    if {"lr", "lambda"} <= set(factors):
        chosen.append(Picture("phase", functools.partial(figures.phase, runs)))
    for factor in ("lr", "lambda", "n"):
        if factor in factors and not (factor != "n" and chosen and chosen[0].name == "phase"):
            draw = functools.partial(figures.scaling, runs, neighbours, factor)
            chosen.append(Picture(f"scaling-{factor}", draw))
    if {"per_round", "alpha"} & set(factors):
        chosen.append(Picture("exposure", functools.partial(figures.exposure, neighbours)))
    return [*chosen, Picture("gap", functools.partial(figures.gap_and_bound, runs))]


def _beside(runs: Columns, published: Mapping[str, Any] | None) -> tuple[tuple[str, ...], Rows]:
    """The columns of 001, Table 2 over all runs, and the published line where there is one."""
    measured = {
        "gap_within_bound": float((runs["gap"] <= runs["bound"]).mean()),
        "mean_gap": float(runs["table_gap"].mean()),
        "mean_bound": float(runs["bound"].mean()),
        "mean_perturbation": float(runs["mean_perturbation"].mean()),
    }
    rows: Rows = [("runs", str(len(runs["gap"])))]
    rows += [(text, _number(measured[name])) for name, text in TABLE_2.items()]
    extra: Rows = [
        ("mean bound with C_hp = 1", _number(float(runs["bound_one"].mean()))),
        ("mean gap at the clients' label shares", _number(float(runs["gap"].mean()))),
    ]
    if not published:
        return ("", "measured"), rows + extra
    held = [str(published.get("runs", "–"))]
    held += [_number(published.get(name)) for name in TABLE_2]
    both = [(*row, value) for row, value in zip(rows, held, strict=True)]
    top = ("", "measured", f"001, Table 2 ({published.get('data', '')})")
    return top, [*both, *((*row, "–") for row in extra)]


def _stands_on(record: Mapping[str, Any]) -> str:
    """Status and constants in one sentence."""
    if not record["assumptions"]:
        return f"Status: {record['status']}."
    named = isinstance(c_hp := record["c_hp"], str)
    constant = f"the {c_hp} form, which is proved" if named else f"{c_hp}, which nothing proves"
    return (
        f"Status: {record['status']}. The bound is that of 001, Theorem 4.1 at δ = "
        f"{record['delta']}, with C_hp = {constant}, and the {record['kind']} Lipschitz constant "
        "of the map. It assumes:"
    )


def _circumstances(record: Mapping[str, Any], names: Sequence[str]) -> Rows:
    rows: Rows = [(name.replace("_", " "), _text(record[name])) for name in names if name in record]
    if isinstance(share := record.get("share_of_gemm"), float):
        rows.append(("share of the machine's best matrix product", f"{share:.0%}"))
    for group in ("machine", "versions"):
        if held := record.get(group):
            rows.append((group, ", ".join(f"{name} {_text(held[name])}" for name in held)))
    return rows


def _mode(folder: Path, neighbours: Columns) -> str:
    """[stability] neighbours of the run; a census that lacks samples is refused."""
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        mode = str(config["stability"]["neighbours"])
        with np.load(folder / "partition.npz") as split:
            every = np.sort(split["train_index"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        raise InputError(f"{folder}: config.toml or partition.npz is damaged: {MEND}") from None
    if mode == "all" and not np.array_equal(np.sort(neighbours["index"]), every):
        raise InputError(f"{folder} holds an unfinished census: finish it with --resume")
    return mode


def _number(value: Any) -> str:
    unknown = value is None or not isinstance(value, int | float) or value != value
    return "–" if unknown else f"{value:.4g}".replace("-", "−")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
