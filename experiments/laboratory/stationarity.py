"""`fedmuon stationarity`: the bounds of 000, 002 and 004 as numbers; numpy is all they need."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from fedmuon.analysis.theory import (
    private_rates,
    private_stationarity,
    rank_dependence,
    schedules,
)
from fedmuon.analysis.theory.private_stationarity import GIVEN, TAILED, Release
from fedmuon.analysis.theory.schedules import Schedule
from fedmuon.analysis.theory.stationarity import Noise, Stationarity, nesterov_muon
from fedmuon.errors import InputError
from fedmuon.experiments.laboratory.facts import facts, listed
from fedmuon.orthogonalize.guarantees import polar_error_bound, residual


@dataclass(frozen=True)
class Problem:
    """What the papers ask of a problem; `sides` is min(m, n), which bounds every rank."""

    steps: int
    gap: float
    smoothness: float
    noise: Noise
    sides: int
    lr: float | None = None
    beta: float | None = None


def nesterov(problem: Problem, rule: str, gamma: float = 0.0, nu: float = 0.0) -> dict[str, Any]:
    """002: the rule's schedule, the rate it has, and the bound with its terms."""
    if rule == "alpha-free":
        plan = schedules.alpha_free(problem.steps)
    elif rule == "heavy-tailed":
        plan = schedules.heavy_tailed(problem.steps, problem.noise.alpha)
    else:
        raise InputError(f"No rule is called {rule!r}: use heavy-tailed or alpha-free.")
    p, shape = problem, (problem.sides, problem.sides)
    found = nesterov_muon(_given(plan, p), p.noise, p.gap, p.smoothness, shape, gamma, nu)
    power = None if found.schedule.rule == "given" else -schedules.rate(p.noise.alpha, rule)
    return {"paper": "002", **_record(found), "power_of_steps": power}


def newton_schulz(
    problem: Problem, delta0: float = 0.99, degree: int = 2, iterations: int = 5
) -> dict[str, Any]:
    """004: Muon with that many Newton-Schulz iterations, beside Muon with an SVD and SGD."""
    p, noise = problem, problem.noise
    if noise.alpha != 2 or noise.sigma1:
        raise InputError("004 is about bounded variance: leave alpha at 2 and sigma1 at 0.")
    q = residual(delta0, degree, iterations)
    terms = (p.gap, p.smoothness, noise.sigma0, p.sides, noise.batch)
    plan = schedules.tuned_muon(p.steps, *terms)
    vector = schedules.tuned_sgd(p.steps, p.gap, p.smoothness, noise.sigma0, noise.batch)
    found = rank_dependence.muon(_given(plan, p), *terms, polar_error_bound(q))
    return {
        "paper": "004",
        **_record(found),
        "power_of_steps": None if found.schedule.rule == "given" else -0.25,
        **_residuals(found, q),
        "others": {
            "muon-svd": _record(rank_dependence.muon(plan, *terms)),
            "sgd-momentum": _record(rank_dependence.sgd_momentum(vector, *terms)),
        },
    }


@dataclass(frozen=True)
class Private:
    """What 000 asks for beside: the noise multiplier, the larger side, and how gradients are cut.

    `clip` is C, by default that of the light-tailed rule for K = `tail`, or for `moment` = G_2 > 0
    of Corollary B.6's; `excess` bounds E(||G||_F - C)_+, by default as the tail or moment does.
    """

    noise: float = 1.0
    columns: int = 0
    tail: float = 1.0
    clip: float | None = None
    excess: float | None = None
    moment: float = 0.0


def dp_muon(
    problem: Problem, private: Private, delta0: float = 0.99, degree: int = 2, iterations: int = 5
) -> dict[str, Any]:
    """000: DP-Muon on one block, with the rule of its Corollary 3.5 or B.6 at eta_0 = sqrt(D/L)."""
    p, q = problem, residual(delta0, degree, iterations)
    if not (p.gap > 0 and p.smoothness > 0):
        raise InputError("The rule of 000 needs gap > 0 and smoothness > 0: give both.")
    scale = math.sqrt(p.gap / p.smoothness)
    shape = (p.sides, private.columns or p.sides)
    if private.moment:
        alone = Release(1.0, private.noise, p.noise.batch, shape)
        first = private_rates.clip_scale(private.moment, alone)
        plan, cut = private_rates.second_moment(p.steps, scale, first)
    else:
        plan, cut = private_stationarity.light_tailed(p.steps, private.tail, scale)
    clip, excess = cut if private.clip is None else private.clip, private.excess
    if excess is None and private.moment:
        excess = private_rates.moment_excess(private.moment, clip)
    elif excess is None:
        excess = private_stationarity.tail_excess(private.tail, clip)
    release = Release(clip, private.noise, p.noise.batch, shape, excess)
    found = private_stationarity.dp_muon(
        _given(plan, p), release, p.gap, p.smoothness, polar_error_bound(q)
    )
    record = _record(found)
    known = private_rates.MOMENT if private.moment else TAILED
    record["assumptions"] += [known if private.excess is None else GIVEN]
    more = {"clip": clip, "excess": excess, "noise_of_a_release": release.spread}
    return {"paper": "000", **record, **more, **_residuals(found, q)}


def _residuals(found: Stationarity, q: float) -> dict[str, float]:
    return {"delta_q": q, "eps_q": polar_error_bound(q), "chi_q": 1 / found.contraction}


def _given(plan: Schedule, problem: Problem) -> Schedule:
    """The rule's schedule, with what the caller sets instead."""
    named = {"lr": problem.lr, "beta": problem.beta}
    given = {name: value for name, value in named.items() if value is not None}
    return replace(plan, **given, rule="given") if given else plan


def _record(found: Stationarity) -> dict[str, Any]:
    record = asdict(found)
    return {**record, **record.pop("schedule"), "assumptions": list(found.assumptions)}


def table(record: dict[str, Any]) -> Table:
    """The same for people."""
    names = ("value", "lr", "beta", "steps", "rule", "power_of_steps", "contraction",
             "clip", "excess", "noise_of_a_release", "delta_q", "eps_q", "chi_q")  # fmt: skip
    rows = [(name, record.get(name)) for name in names]
    rows += [(f"of that, {name}", term) for name, term in record["terms"].items()]
    others = record.get("others", {})
    rows += [(f"beside it, {name}", other["value"]) for name, other in others.items()]
    rows += listed("assumes", record["assumptions"])
    return facts(f"{record['measure']}, {record['paper']}", rows)
