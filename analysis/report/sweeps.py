"""Along a sweep: whether a variant ends ever lower or higher, and its curves side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.comparisons import ended, here, levels, name_of

TRENDS = ("falling", "rising")


def trend(claim: Mapping[str, Any], runs: Columns, label: str) -> Claim:
    """The terminal mean over seeds falls, or rises, from each value of the sweep to the next."""
    variant, measure, kind = claim["better"], claim["measure"], claim["kind"]
    word = name_of(measure)
    sentence = claim["sentence"] or (
        f"The {word} of {variant} is {'lower' if kind == 'falling' else 'higher'} "
        f"at every next {label}."
    )
    if measure not in runs:
        return Claim(sentence, None, f"no run measured {word}")
    ends = np.array([ended(runs, variant, x, measure) for x in levels(runs)])
    steps = np.diff(ends) if kind == "rising" else -np.diff(ends)
    along = ", ".join(f"{end:.4g} at {x:g}" for end, x in zip(ends, levels(runs), strict=True))
    held = bool((steps > 0).all()) if len(steps) and np.isfinite(ends).all() else None
    return Claim(sentence, held, along)


def followed(curves: Columns, sweep: Mapping[str, Any]) -> tuple[Columns, Sequence[str]]:
    """The curves of one variant, each value of the sweep as a variant of its own, beside those
    that are not swept; and their names."""
    values, names = levels(curves), {}
    for x in values:
        names[f"{sweep['label']} = {x:g}"] = here(curves, sweep["follow"], x)
    names |= {name: here(curves, name, values[-1]) for name in sweep["fixed"]}
    rows = {name: np.concatenate([column[mask] for mask in names.values()])
            for name, column in curves.items()}  # fmt: skip
    rows["variant"] = np.repeat(list(names), [mask.sum() for mask in names.values()])
    rows["x"] = np.full(len(rows["variant"]), np.nan)
    return rows, list(names)
