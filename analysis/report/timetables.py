"""Curves side by side along a sweep, and train losses at seconds of training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedmuon.analysis.report.columns import Columns
from fedmuon.analysis.report.comparisons import levels, rows_of
from fedmuon.analysis.report.findings import Rows, number

TIMETABLE = (
    "Train loss after seconds of training, linear between evaluations; a dash is a moment before "
    "the first or after the last"
)


def followed(curves: Columns, sweep: Mapping[str, Any]) -> tuple[Columns, Sequence[str]]:
    """The curves of one variant, each value of the sweep as a variant of its own, beside those
    that are not swept; and their names."""
    values, names = levels(curves), {}
    for x in values:
        names[f"{sweep['label']} = {x:g}"] = rows_of(curves, sweep["follow"], x)
    names |= {name: rows_of(curves, name, values[-1]) for name in sweep["fixed"]}
    rows = {name: np.concatenate([column[mask] for mask in names.values()])
            for name, column in curves.items()}  # fmt: skip
    rows["variant"] = np.repeat(list(names), [mask.sum() for mask in names.values()])
    rows["x"] = np.full(len(rows["variant"]), np.nan)
    return rows, list(names)


def timetable(curves: Columns, about: Mapping[str, Any]) -> tuple[str, tuple[str, ...], Rows]:
    """Title, head and lines: a line a variant, and its published line below it."""
    asked, held = about["times"], about["times"]["published"] or {"seconds": [], "losses": {}}
    moments = parts(curves, asked["of"], asked["parts"])
    head = ("variant", *(f"{number(moment, 3)} s" for moment in moments))
    rows: Rows = []
    if held["seconds"]:
        at = [f"at {second:g} s" for second in held["seconds"]]
        rows.append((about["source"], *_as_long(at, len(moments))))
    for variant in about["variants"]:
        losses = at_seconds(curves, variant, moments)
        rows.append((variant, *map(number, losses)))
        if found := held["losses"].get(variant):
            rows.append((f"  {about['source']}", *_as_long(list(map(number, found)), len(moments))))
    return TIMETABLE, head, rows


def _as_long(cells: list[str], count: int) -> list[str]:
    return (cells + ["–"] * count)[:count]


def parts(curves: Columns, variant: str, count: int) -> np.ndarray:
    """Even parts of the training seconds of the variant's shortest run, the last being all."""
    mine = curves["variant"] == variant
    ends = [curves["train_seconds"][mine & (curves["seed"] == seed)].max()
            for seed in np.unique(curves["seed"][mine])]  # fmt: skip
    return np.linspace(0, np.min(ends), count + 1)[1:]  # whose last is the end to the last bit


def at_seconds(curves: Columns, variant: str, moments: np.ndarray) -> np.ndarray:
    """The mean over seeds of the train loss, linear between evaluations; nan outside them."""
    mine, found = curves["variant"] == variant, []
    for seed in np.unique(curves["seed"][mine]):
        rows = mine & (curves["seed"] == seed)
        order = np.argsort(curves["train_seconds"][rows])
        seconds, losses = (curves[name][rows][order] for name in ("train_seconds", "train_loss"))
        found.append(np.interp(moments, seconds, losses, left=np.nan, right=np.nan))
    return np.mean(found, axis=0)
