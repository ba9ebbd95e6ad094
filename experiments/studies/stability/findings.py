"""Kind `stability`: runs of a published grid, each beside its neighbours and its bound."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report import columns
from fedmuon.analysis.report.chance import near_chance
from fedmuon.analysis.report.claims import Columns, suite_claims, varying
from fedmuon.analysis.report.deciding import with_range
from fedmuon.analysis.report.findings import Findings, Picture, Rows, Titled, number
from fedmuon.experiments.stability.findings import stands_on
from fedmuon.experiments.studies.stability import figure

KEYS = ("trajectories", "published", "trajectories_per_second", "note", "constant", "delta",
        "status", "assumptions")  # fmt: skip
ASIDE = {
    "accuracy": ("mean accuracy", np.mean),
    "train_loss": ("mean train loss", np.mean),
    "test_loss": ("mean test loss", np.mean),
    "bound_global": ("mean bound, constants of all models", np.mean),
    "range": ("mean range B of the loss", np.mean),
    "share": ("largest perturbation / certificate", np.max),
    "share_global": ("the same, constants of all models", np.max),
}
TABLE_2 = ("gap_within_bound", "mean_gap", "mean_bound", "mean_perturbation")


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of such a folder, whose suite.json is `about`."""
    columns.require(about, KEYS, folder / "suite.json")
    runs = columns.read_csv(folder / "runs.csv", columns.RUNS, columns.ASIDE)
    neighbours = columns.read_csv(folder / "neighbours.csv", columns.NEIGHBOURS)
    columns.require_matching(runs, neighbours, folder)
    columns.require_consistent(runs, folder)
    head, numbers = _beside(runs, about["published"])
    of_gap, *others = suite_claims(runs, neighbours)
    return Findings.of_suite(
        folder,
        about,
        claims=[with_range(of_gap, about), *others],
        numbers_title="Measured beside published" if about["published"] else "Measured",
        head=head,
        numbers=numbers,
        pictures=_pictures(runs, neighbours),
        stands_on=stands_on({**about, "c_hp": "explicit"}, str(about["constant"])),
        assumptions=[str(text) for text in about["assumptions"]],
        facts=("suite", "data", "scale", "trajectories", "seconds", "trajectories_per_second"),
        runs=_every(runs),
        caution=near_chance(runs["accuracy"], *about["guess"])
        if "guess" in about and "accuracy" in runs
        else "",
    )


def _every(runs: Columns) -> Titled:
    """All runs: what varies, what each learned, its gap and its bound."""
    factors = (*varying(runs), "seed")
    names = [k for k in ("accuracy", "train_loss", "test_loss") if k in runs]
    share = runs["bound"] / runs.get("range", np.ones(len(runs["bound"])))
    head = (", ".join(factors), *(k.replace("_", " ") for k in names), "gap (95%)", "bound",
            "bound / B", "mean perturbation")  # fmt: skip
    lines: Rows = []
    for at in range(len(share)):
        gap, low, high = (number(float(runs[k][at]), 3) for k in ("gap", "gap_low", "gap_high"))
        learnt = (number(float(runs[k][at])) for k in names)
        ends = runs["bound"][at], share[at], runs["mean_perturbation"][at]
        setting = ", ".join(f"{runs[k][at]:g}" for k in factors)
        lines.append((setting, *learnt, f"{gap} ({low} to {high})",
                      *(number(float(one), 3) for one in ends)))  # fmt: skip
    return "All runs", head, lines


def _pictures(runs: Columns, neighbours: Columns) -> list[Picture]:
    """The figures that what varies asks for; the gap beside its bound always."""
    factors, chosen = varying(runs), []
    if {"lr", "lambda"} <= set(factors):
        chosen.append(Picture.known("phase", figure.phase, runs))
    for factor in ("lr", "lambda", "n"):
        if factor in factors and not (factor != "n" and chosen and chosen[0].name == "phase"):
            name = f"scaling-{factor}"
            chosen.append(Picture.known(name, figure.scaling, runs, neighbours, factor))
    if {"per_round", "alpha"} & set(factors):
        chosen.append(Picture.known("exposure", figure.exposure, neighbours))
    return [*chosen, Picture.known("gap", figure.gap_and_bound, runs)]


def _beside(runs: Columns, published: Mapping[str, Any] | None) -> tuple[tuple[str, ...], Rows]:
    """The columns of 001, Table 2 over all runs, and the published line where there is one."""
    measured = {
        "runs": str(len(runs["gap"])),
        "gap ≤ bound": number(float((runs["gap"] <= runs["bound"]).mean())),
        "mean gap": number(float(runs["table_gap"].mean())),
        "mean bound": number(float(runs["bound"].mean())),
        "mean perturbation": number(float(runs["mean_perturbation"].mean())),
        "mean bound with C_hp = 1": number(float(runs["bound_one"].mean())),
        "mean gap at the clients' label shares": number(float(runs["gap"].mean())),
        **{
            words: number(float(of(runs[name])))
            for name, (words, of) in ASIDE.items()
            if name in runs
        },
        "mean bound / B": number(float((runs["bound"] / runs.get("range", 1.0)).mean())),
    }
    if not published:
        return ("", "measured"), list(measured.items())
    held = [str(published.get("runs", "–")), *(number(published.get(name)) for name in TABLE_2)]
    rows = itertools.zip_longest(measured, measured.values(), held, fillvalue="–")
    return ("", "measured", f"001, Table 2 ({published.get('data', '')})"), list(rows)
