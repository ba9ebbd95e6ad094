"""Kind `stability`: runs of a published grid, each beside its neighbours and its bound."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmuon.analysis.report.claims import Columns, suite_claims, varying
from fedmuon.analysis.report.columns import (
    NEIGHBOURS,
    RUNS,
    read_csv,
    require,
    require_consistent,
    require_matching,
)
from fedmuon.analysis.report.findings import Findings, Picture, Rows, circumstances, number, titled
from fedmuon.experiments.laboratory.findings import stands_on
from fedmuon.experiments.studies.stability import figure, gap_figure

KEYS = ("trajectories", "published", "trajectories_per_second", "note", "constant", "delta",
        "status", "assumptions")  # fmt: skip
TABLE_2 = {"gap_within_bound": "gap ≤ bound", "mean_gap": "mean gap",
           "mean_bound": "mean bound", "mean_perturbation": "mean perturbation"}  # fmt: skip


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of such a folder, whose suite.json is `about`."""
    require(about, KEYS, folder / "suite.json")
    runs = read_csv(folder / "runs.csv", RUNS)
    neighbours = read_csv(folder / "neighbours.csv", NEIGHBOURS)
    require_matching(runs, neighbours, folder)
    require_consistent(runs, folder)
    head, numbers = _beside(runs, about["published"])
    return Findings(
        name=folder.resolve().name,
        title=titled(about),
        data=str(about["data"]),
        claims=suite_claims(runs, neighbours),
        numbers_title="Measured beside published" if about["published"] else "Measured",
        head=head,
        numbers=numbers,
        note=str(about["note"]),
        pictures=_suite_pictures(runs, neighbours),
        stands_on=stands_on({**about, "c_hp": "explicit"}, str(about["constant"])),
        assumptions=[str(text) for text in about["assumptions"]],
        again=str(about["again"]),
        circumstances=circumstances(
            about, ("suite", "data", "scale", "trajectories", "seconds", "trajectories_per_second")
        ),
    )


def _suite_pictures(runs: Columns, neighbours: Columns) -> list[Picture]:
    """The figures that what varies asks for; the gap beside its bound always."""
    factors, chosen = varying(runs), []
    if {"lr", "lambda"} <= set(factors):
        chosen.append(Picture.known("phase", functools.partial(figure.phase, runs)))
    for factor in ("lr", "lambda", "n"):
        if factor in factors and not (factor != "n" and chosen and chosen[0].name == "phase"):
            draw = functools.partial(figure.scaling, runs, neighbours, factor)
            chosen.append(Picture.known(f"scaling-{factor}", draw))
    if {"per_round", "alpha"} & set(factors):
        chosen.append(Picture.known("exposure", functools.partial(figure.exposure, neighbours)))
    return [*chosen, Picture.known("gap", functools.partial(gap_figure.gap_and_bound, runs))]


def _beside(runs: Columns, published: Mapping[str, Any] | None) -> tuple[tuple[str, ...], Rows]:
    """The columns of 001, Table 2 over all runs, and the published line where there is one."""
    measured = {
        "gap_within_bound": float((runs["gap"] <= runs["bound"]).mean()),
        "mean_gap": float(runs["table_gap"].mean()),
        "mean_bound": float(runs["bound"].mean()),
        "mean_perturbation": float(runs["mean_perturbation"].mean()),
    }
    rows: Rows = [("runs", str(len(runs["gap"])))]
    rows += [(text, number(measured[name])) for name, text in TABLE_2.items()]
    extra: Rows = [
        ("mean bound with C_hp = 1", number(float(runs["bound_one"].mean()))),
        ("mean gap at the clients' label shares", number(float(runs["gap"].mean()))),
    ]
    if not published:
        return ("", "measured"), rows + extra
    held = [str(published.get("runs", "–"))]
    held += [number(published.get(name)) for name in TABLE_2]
    both = [(*row, value) for row, value in zip(rows, held, strict=True)]
    top = ("", "measured", f"001, Table 2 ({published.get('data', '')})")
    return top, [*both, *((*row, "–") for row in extra)]
