"""Study `polar-error`: 001, Proposition D.4 for maps, and what follows from it for runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.columns import Columns, read_table, where
from fedmuon.analysis.report.findings import Findings, Rows, Titled, number
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, Claim, Effect, Rule
from fedmuon.experiments.studies.findings import assemble

NAMES = {"exact-sign": "exact sign", "cubic": "five cubic steps from M / ‖M‖"}
ROUNDING = 1e-9  # a bound below is one of rounding
STANDS_ON = (
    "Maps: drawn matrices of one rank whose singular values over the divisor are at least τ; the "
    "bound is a maximum over an interval, proved by interval arithmetic. Runs: one client, full "
    "batches, the matrix classifier with its proved constants. The bound of a run with the map T "
    "is Theorem 4.1 for the same run with a smoothed polar factor S, and 2 L_ℓ times the drift D "
    "between both, computed from ‖T(M) − S(M)‖ at T's momenta. Each λ has an equal share of δ, so "
    "that the least bound of a run holds at δ. Moved is the largest distance of the neighbours "
    "that were run; certified is what T's run alone says of all its neighbours, by Weyl's "
    "inequality: it is known after that run, and needs none of theirs. An S that does not move "
    "lends a bound, too, by the length of T's path: what is more than that comes of stability."
)


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """From rows.csv, of maps, and runs.csv."""
    names = "rows", "runs"
    found = assemble("polar-error", folder, about, claims, numbers, STANDS_ON, tables=names)
    return replace(found, more=[learned(read_table(folder / "runs.csv"))])


def learned(runs: Columns) -> Titled:
    """What stands beside a bound: what each run learned, and its least bound over B = 1."""
    head = ("map, η", "accuracy", "train loss", "test loss", "gap (95%)", "least bound / B")
    lines: Rows = []
    for run in dict.fromkeys(zip(runs["map"].tolist(), runs["lr"].tolist(), strict=True)):
        part = where(runs, map=run[0], lr=run[1])
        names = ("accuracy", "train_loss", "test_loss", "gap", "gap_low", "gap_high")
        *learnt, gap, low, high = (number(float(part[k][0])) if k in part else "–" for k in names)
        within = f"{gap} ({low} to {high})" if "gap_low" in part else gap
        bound = number(float(part["bound"].min()), 3)
        lines.append((f"{NAMES[run[0]]}, η = {run[1]:g}", *learnt, within, bound))
    return "What the runs learned, beside their least bound", head, lines


def claims(rows: Columns, runs: Columns) -> Sequence[Claim]:
    """The maps' bound, that it is met, what was printed; the runs' distances, neighbours, gaps."""
    maps = [within(rows), met(rows), printed(rows)]
    return [*maps, near(runs), neighbours(runs), gaps(runs), telling(runs)]


def within(rows: Columns) -> Claim:
    """Every drawn matrix is within the bound."""
    held = rows["measured"] <= rows["bound"]
    return Claim(
        "No drawn matrix is further from its polar factor than Proposition D.4 with the proved "
        "maximum allows.",
        Effect.exact("distance over bound", rows["measured"] / rows["bound"]),
        AT_MOST_ONE,
        f"{held.sum()} of {len(held)} settings of map, steps and τ",
    )


def met(rows: Columns) -> Claim:
    """Taylor steps attain it: no smaller bound holds."""
    part = {k: v[(rows["map"] != "jordan") & (rows["bound"] > ROUNDING)] for k, v in rows.items()}
    share = part["measured"] / part["bound"]
    return Claim(
        "For Taylor steps the bound is met: with all singular values at τ the distance is within "
        "10⁻⁶ of it.",
        Effect.exact("1 − distance over bound", 1 - share),
        Rule(high=1e-6, strict=True),
        f"smallest share {share.min():.9f} in {len(share)} settings",
    )


def printed(rows: Columns) -> Claim:
    """What 001 prints for the cubic step is never smaller."""
    part = {k: v[(rows["map"] == "cubic") & (rows["bound"] > ROUNDING)] for k, v in rows.items()}
    ratio = part["printed"] / part["bound"]
    return Claim(
        "001's (1 − τ²)^(2^T) for the cubic step holds too, and is larger.",
        Effect.exact("printed over proved", ratio),
        Rule(low=1.0, strict=True),
        f"{number(ratio.min(), 3)} to {number(ratio.max(), 3)} times as large",
    )


def near(runs: Columns) -> Claim:
    """||X_T - X_S|| <= D."""
    share = runs["distance"] / runs["drift"]
    return Claim(
        "A run ends within the drift D of the run with a smoothed polar factor in its map's place.",
        Effect.exact("distance over D", share),
        AT_MOST_ONE,
        f"{(share <= 1).sum()} of {len(share)}; the largest is {share.max():.2f} of D, the "
        f"smallest {number(share.min(), 2)}",
    )


def neighbours(runs: Columns) -> Claim:
    """Perturbations within what the run alone certifies, Delta Y + 2 D, and the tube if any."""
    moved, tube = runs["perturbation"], ~np.isnan(runs["tube"])
    alone, both = moved <= runs["certificate"], moved <= runs["of_both"]
    inside = moved[tube] <= runs["tube"][tube]
    most = [float((moved / runs[name]).max()) for name in ("certificate", "of_both")]
    most += [float((moved[tube] / runs["tube"][tube]).max())] * bool(tube.any())
    least = [float((runs[name] / moved).min()) for name in ("certificate", "of_both")]
    return Claim(
        "Every neighbour moves a run by at most the certificate from that run alone, by at most "
        "S's certificate and the drifts of both runs, and by at most the norm tube's where Remark "
        "D.1 gives one.",
        Effect.exact("perturbation over certificate", most, ("alone", "with both drifts", "tube")),
        AT_MOST_ONE,
        f"{alone.sum()} of {len(alone)} alone, {both.sum()} with both drifts, tubes {inside.sum()} "
        f"of {len(inside)}; {number(least[0], 3)} times the largest perturbation at best, and "
        f"{number(least[1], 3)} times with both drifts",
    )


def gaps(runs: Columns) -> Claim:
    """The transferred bound holds: within only if the gap's interval is."""
    low, high = (runs.get(name, runs["gap"]) for name in ("gap_low", "gap_high"))
    gap, bound = runs["gap"], runs["bound"]
    held, vacuous = runs["gap"] <= runs["bound"], runs["bound"] >= 1
    return Claim(
        "Every gap is at most the bound that S's run lends.",
        Effect("gap − bound", gap - bound, low - bound, high - bound, seeded=False),
        Rule(high=0.0),
        f"{held.sum()} of {len(held)}; {vacuous.sum()} of the bounds are vacuous (≥ 1)",
    )


def telling(runs: Columns) -> Claim:
    """The exact sign has a bound below B = 1 and below the trivial one at some step size."""
    best = _best(where(runs, map="exact-sign"))
    return Claim(
        "The exact sign, which has no Lipschitz constant, has at some step size a bound that is "
        "below B = 1 and below what the length of its path gives.",
        Effect.exact(
            "least bound over 1 and over the path's",
            min(value / min(1.0, trivial) for _, _, value, trivial in best),
        ),
        Rule(high=1.0, strict=True),
        "; ".join(
            f"η = {lr:g}: {number(value)} with λ = {lam:g}, by the path {number(trivial)}"
            for lr, lam, value, trivial in best
        ),
    )


def _best(runs: Columns) -> list[tuple[float, float, float, float]]:
    """Step size, lambda and bound, where it is smallest for each step size; the path's bound."""
    found = []
    for lr in np.unique(runs["lr"]):
        part = where(runs, lr=lr)
        at = int(part["bound"].argmin())
        one = (float(part[name][at]) for name in ("lambda", "bound", "still"))
        found.append((float(lr), *one))
    return found


def numbers(rows: Columns, runs: Columns) -> Rows:
    """Each run beside each S; a run's name has a line of its own."""
    names = ("distance", "drift", "perturbation", "certificate", "bound")
    lines: Rows = [("map, η: λ of S", "distance", "drift D", "moved", "certified", "bound")]
    run = None
    for at, now in enumerate(zip(runs["map"].tolist(), runs["lr"].tolist(), strict=True)):
        if now != run:
            lines.append((f"{NAMES[now[0]]}, η = {now[1]:g}:", *("" for _ in names)))
            run = now
        shown = [number(float(runs[one][at]), 3) for one in names]
        lines.append((f"  {number(float(runs['lambda'][at]))}", *shown))
    return lines
