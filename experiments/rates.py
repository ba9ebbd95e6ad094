"""`fedmuon stationarity`: evaluate the bounds of four papers. This module needs only numpy.

The papers are DP-Muon (000), Nesterov Muon (002), DiSK (003) and Newton–Schulz convergence (004).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from fedmuon.analysis.theory import private_stationarity, stationarity
from fedmuon.analysis.theory.checks import positive
from fedmuon.analysis.theory.private_stationarity import (
    GIVEN,
    TAILED,
    Disk,
    Release,
    printed_theorem_3,
)
from fedmuon.analysis.theory.stationarity import Noise, Schedule, Stationarity, nesterov_muon
from fedmuon.core.errors import InputError
from fedmuon.experiments.tables import facts, listed
from fedmuon.orthogonalize.lipschitz_constants import polar_error_bound, residual

ALL = ("--steps", "--gap", "--smoothness", "--batch", "--rank", "--lr", "--beta")
NOISE = ("--alpha", "--sigma0", "--sigma1")
NEWTON_SCHULZ = ("--delta0", "--degree", "--q")
MAP, SKETCHED = ("--coefficients", "--q"), ("--oversample", "--power")  # for Nesterov Muon (002)
READ = {
    "000": (*NEWTON_SCHULZ, "--noise", "--columns", "--tail", "--moment", "--clip", "--excess"),
    "002": (*NOISE, "--schedule", "--gamma", "--nu", "--singular", *MAP, *SKETCHED, "--sketch"),
    "003": (*NOISE, "--noise", "--columns", "--clip", "--gain", "--reach"),
    "004": (*NOISE, *NEWTON_SCHULZ),
}


NEAR = 1e-6  # excess of an operator norm over 1 that counts as rounding
OF_RUN = {"002": ("--gap", "--smoothness", *NOISE), "004": ("--gap", "--smoothness", "--sigma0")}


def require_of_run(paper: str, given: Sequence[str]) -> None:
    """Raise an error for a paper or for options that have no effect with a run folder."""
    if paper not in OF_RUN:
        raise InputError(
            f"With a run folder, --paper is {paper!r}, but it must be 002 (Nesterov Muon) or 004 "
            "(Newton–Schulz convergence)."
        )
    if idle := [option for option in given if option not in OF_RUN[paper]]:
        raise InputError(
            f"{', '.join(idle)} has no effect with a run folder, because the run determines it: "
            f"leave {', '.join(idle)} out. For this paper, use only {', '.join(OF_RUN[paper])}."
        )


def require_read(paper: str, given: Sequence[str]) -> None:
    """Raise an error for a paper without a bound, and for options that its bound does not use."""
    if paper not in READ:
        raise InputError(
            f"fedmuon has no bound for paper {paper!r}. Use 000 (DP-Muon), 002 (Nesterov Muon), "
            "003 (DiSK) or 004 (Newton–Schulz convergence)."
        )
    if idle := [option for option in given if option not in (*ALL, *READ[paper])]:
        raise InputError(
            f"{', '.join(idle)} has no effect for paper {paper}: leave {', '.join(idle)} out. "
            f"The options for this paper are {', '.join((*ALL, *READ[paper]))}."
        )
    if paper == "000" and {"--tail", "--moment"} <= set(given):
        raise InputError("--tail has no effect if --moment is set: use only one of the two options")
    if paper == "002":
        _require_one_map({*given})


def _require_one_map(options: set[str]) -> None:
    """Raise an error if the options of Nesterov Muon (002) contradict each other.

    An error is raised if two options set the quality of the orthogonalizer, or if an option has no
    effect.
    """
    if "--singular" in options and (twice := sorted({"--gamma", "--nu"} & options)):
        raise InputError(
            f"--singular already determines {twice[0]}, so {twice[0]} has no effect. Leave "
            f"{twice[0]} or --singular out."
        )
    for key, needs in {"--singular": ("--sketch", *MAP), "--sketch": SKETCHED}.items():
        if key not in options and (idle := [option for option in needs if option in options]):
            raise InputError(
                f"{idle[0]} has an effect only together with {key}: set {key}, or leave "
                f"{idle[0]} out"
            )
    if "--sketch" in options and (idle := [option for option in MAP if option in options]):
        raise InputError(f"{idle[0]} has no effect if --sketch is set: leave {idle[0]} out")


@dataclass(frozen=True)
class Problem:
    """The parameters of a problem that the bounds of the papers use.

    `sides` is min(m, n), the maximum rank.
    """

    steps: int
    gap: float
    smoothness: float
    noise: Noise
    sides: int
    lr: float | None = None
    beta: float | None = None


@dataclass(frozen=True)
class InexactMap:
    """An orthogonalizer whose quality (gamma, nu) is computed from singular values.

    If `sketch` is 0, the orthogonalizer is Newton–Schulz with `steps` steps. Otherwise, the
    orthogonalizer starts with a Gaussian sketch of rank `sketch` + `oversample`, and `steps` has no
    effect on its quality. If `power` is None, the number of power iterations is the smallest one
    for which the theorem holds.
    """

    singular: str  # numbers separated by commas
    coefficients: str = "quintic"
    steps: int = 5
    sketch: int = 0
    oversample: int = 10
    power: int | None = None

    def quality(self) -> dict[str, float]:
        """Return the quality of the orthogonalizer as the numbers gamma and nu.

        For a sketch, the result also contains the number of power iterations.
        """
        try:
            singular = tuple(float(value) for value in self.singular.split(","))
        except ValueError:
            raise InputError(
                f"--singular is {self.singular!r}, but it must be a list of numbers. Write "
                "singular values as 1,0.5,0.1."
            ) from None
        if not self.sketch:
            errors = stationarity.polynomial_quality(singular, self.coefficients, self.steps)
            return dict(zip(("gamma", "nu"), errors, strict=True))
        arguments = singular, self.sketch, self.oversample
        power = stationarity.least_power(*arguments) if self.power is None else self.power
        errors = stationarity.sketched_quality(*arguments, power)
        return {**dict(zip(("gamma", "nu"), errors, strict=True)), "power": power}


def nesterov(problem: Problem, rule: str, gamma: float = 0.0, nu: float = 0.0) -> dict[str, Any]:
    """Return a record of Nesterov Muon (002).

    The record contains the schedule, the rate, and the bound with its terms.
    """
    if rule == "alpha-free":
        plan = stationarity.alpha_free(problem.steps)
    elif rule == "heavy-tailed":
        plan = stationarity.heavy_tailed(problem.steps, problem.noise.alpha)
    else:
        raise InputError(f"--schedule is {rule!r}, but it must be 'heavy-tailed' or 'alpha-free'.")
    p, shape = problem, (problem.sides, problem.sides)
    bound = nesterov_muon(_given(plan, p), p.noise, p.gap, p.smoothness, shape, gamma, nu)
    power = None if bound.schedule.rule == "given" else -stationarity.rate(p.noise.alpha, rule)
    return {"paper": "002", **_record(bound), "power_of_steps": power}


def _require_bounded_variance(noise: Noise, paper: str) -> None:
    if noise.alpha != 2:
        raise InputError(
            f"--alpha is {noise.alpha:g}, but the bound of {paper} assumes bounded variance. Set "
            "--alpha to 2."
        )
    if noise.sigma1:
        raise InputError(
            f"--sigma1 is {noise.sigma1:g}, but the bound of {paper} assumes bounded variance. "
            "Set --sigma1 to 0."
        )


def newton_schulz(
    problem: Problem, delta0: float = 0.99, degree: int = 2, iterations: int = 5
) -> dict[str, Any]:
    """Return the bound for Muon with Newton–Schulz, and the bounds of Muon with SVD and of SGD.

    The bounds are those of the Newton–Schulz convergence paper (004).
    """
    p, noise = problem, problem.noise
    _require_bounded_variance(noise, "Newton–Schulz convergence (004)")
    q = residual(delta0, degree, iterations)
    terms = (p.gap, p.smoothness, noise.sigma0, p.sides, noise.batch)
    plan = stationarity.tuned_muon(p.steps, *terms)
    vector = stationarity.tuned_sgd(p.steps, p.gap, p.smoothness, noise.sigma0, noise.batch)
    bound = stationarity.muon(_given(plan, p), *terms, polar_error_bound(q))
    return {
        "paper": "004",
        **_record(bound),
        "power_of_steps": None if bound.schedule.rule == "given" else -0.25,
        **_residuals(bound, q),
        "others": {
            "muon-svd": _record(stationarity.muon(plan, *terms)),
            "sgd-momentum": _record(stationarity.sgd_momentum(vector, *terms)),
        },
    }


@dataclass(frozen=True)
class Private:
    """The parameters of DP-Muon (000) for noise and clipping.

    `clip` is the clipping bound C. By default, C follows from DP-Muon's rule for light tails, with
    K = `tail`. If `moment` = G_2 is positive, C follows from the rule of Corollary B.6. `excess` is
    an upper bound on E(||G||_F - C)_+, the mean length that clipping removes from a gradient G. By
    default, `excess` is computed from `tail` or `moment`.
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
    """Return the bound of DP-Muon (000) on one block. The step size is eta_0 = sqrt(D / L).

    The schedule follows Corollary 3.5, or Corollary B.6 if `private.moment` is set.
    """
    p, q = problem, residual(delta0, degree, iterations)
    if not (p.gap > 0 and p.smoothness > 0):
        raise InputError(
            f"--gap is {p.gap:g} and --smoothness is {p.smoothness:g}, but the step-size rule of "
            "DP-Muon (000) needs both above 0. Set both to positive numbers."
        )
    scale = math.sqrt(p.gap / p.smoothness)
    shape = (p.sides, private.columns or p.sides)
    if private.moment:
        alone = Release(1.0, private.noise, p.noise.batch, shape)
        first = private_stationarity.clip_scale(private.moment, alone)
        plan, cut = private_stationarity.second_moment(p.steps, scale, first)
    else:
        plan, cut = private_stationarity.light_tailed(p.steps, private.tail, scale)
    clip, excess = cut if private.clip is None else private.clip, private.excess
    if excess is None and private.moment:
        excess = private_stationarity.moment_excess(private.moment, clip)
    elif excess is None:
        excess = private_stationarity.tail_excess(private.tail, clip)
    release = Release(clip, private.noise, p.noise.batch, shape, excess)
    bound = private_stationarity.dp_muon(
        _given(plan, p), release, p.gap, p.smoothness, polar_error_bound(q)
    )
    record = _record(bound)
    assumption = private_stationarity.MOMENT if private.moment else TAILED
    record["assumptions"] += [assumption if private.excess is None else GIVEN]
    extra = {"clip": clip, "excess": excess, "noise_of_a_release": release.spread}
    return {"paper": "000", **record, **extra, **_residuals(bound, q)}


OCTAVES = 40  # number of tried step sizes 1/L, 1/(2 L), 1/(4 L), ...


def disk(problem: Problem, private: Private, gain: float = 0.7, reach: float = -1.0) -> dict:
    """Return the bound of DiSK (003) for SGD.

    The noise w in a gradient has E|w|^2 = m n (sigma C / B)^2. If no step size eta is given, the
    function chooses the value 2^-j/L with the smallest bound. If `reach` is -1, the record also
    contains the published bound.
    """
    p, noise = problem, problem.noise
    _require_bounded_variance(noise, "DiSK (003)")
    if p.beta is not None:
        raise InputError(
            "The momentum of DiSK is 1 - gain, so --beta has no effect. Set --gain instead."
        )
    shape, top = (p.sides, private.columns or p.sides), 1 / positive("smoothness", p.smoothness)
    clip = 1.0 if private.clip is None else private.clip
    release = Release(clip, private.noise, noise.batch, shape)
    spread = shape[0] * shape[1] * (release.clip * release.noise / release.lot) ** 2
    rates = top * 0.5 ** np.arange(OCTAVES) if p.lr is None else [p.lr]
    candidates: list[tuple[Disk, Stationarity]] = []
    failure: InputError | None = None
    for lr in rates:
        run = Disk(float(lr), p.steps, gain, reach, noise.sigma0, noise.batch, spread)
        try:
            candidates.append((run, private_stationarity.disk(run, p.gap, p.smoothness)))
        except InputError as error:
            failure = error
    if failure and not candidates:
        raise failure
    run, best = min(candidates, key=lambda pair: pair[1].value)
    plan = replace(best.schedule, rule="given" if p.lr is not None else "least of 2^-j/L")
    slope = math.sqrt(2 * p.smoothness * p.gap)
    printed = printed_theorem_3(run, p.gap, p.smoothness, slope) if reach == -1 else math.inf
    others = {"others": {"printed, from 0": {"value": printed}}} if printed < math.inf else {}
    extra = {"gain": gain, "clip": clip, "noise_of_a_release": math.sqrt(spread)}
    return {"paper": "003", **_record(replace(best, schedule=plan)), **extra, **others}


def of_run(paper: str, facts: Any, noise: Noise, gap: float, smoothness: float) -> dict[str, Any]:
    """Return the record of a finished run: the errors of its orthogonalizer, and its bound.

    If the run is not a run of the paper's algorithm, there is no bound, and the record says why.

    Args:
        paper: "002" or "004".
        facts: `StepFacts` of the run.
        noise: The gradient noise of one sample. The batch size of the run replaces its batch size.
        gap: f(X_0) - f*.
        smoothness: L of the loss.
    """
    q, noise = facts.quality, replace(noise, batch=facts.batch)
    record = {
        "paper": paper, "gamma": q.gamma, "nu": q.nu, "delta_0": q.delta0, "eps_q": q.polar_error,
        "matrices": q.calls, "shape": list(facts.shape), "lr": facts.lr, "beta": facts.beta,
        "steps": facts.steps, "batch": facts.batch,
    }  # fmt: skip
    form = ("" if facts.lookahead else "not ") + "Nesterov's"
    against = list(facts.differences)
    if facts.lookahead != (paper == "002"):
        against.append(f"the momentum is {form} ([local] momentum-form), unlike in paper {paper}")
    if q.gamma >= 1 and paper == "002":
        against.append("γ is not below 1, as in Nesterov Muon, Assumption 2.1")
    if q.polar_error >= 1 and paper == "004":
        against.append("the polar error is not below 1")
    if q.nu > NEAR and paper == "004":
        against.append("the orthogonalizer's operator norm exceeds 1")
    if against:
        return {**record, "value": None, "no_bound_because": against}
    plan, rank = Schedule(facts.lr, facts.beta, facts.steps, "of the run"), min(facts.shape)
    if paper == "002":
        bound = nesterov_muon(plan, noise, gap, smoothness, facts.shape, q.gamma, q.nu)
    else:
        _require_bounded_variance(noise, "Newton–Schulz convergence (004)")
        terms = gap, smoothness, noise.sigma0, rank, noise.batch
        bound = stationarity.muon(plan, *terms, q.polar_error)
    return {**record, **_record(bound), "no_bound_because": []}


def _residuals(bound: Stationarity, q: float) -> dict[str, float]:
    return {"delta_q": q, "eps_q": polar_error_bound(q), "chi_q": 1 / bound.contraction}


def _given(plan: Schedule, problem: Problem) -> Schedule:
    """Return the schedule. If the problem sets a step size or momentum, use these values in it."""
    arguments = {"lr": problem.lr, "beta": problem.beta}
    changes = {name: value for name, value in arguments.items() if value is not None}
    return replace(plan, **changes, rule="given") if changes else plan


def _record(bound: Stationarity) -> dict[str, Any]:
    record = asdict(bound)
    return {**record, **record.pop("schedule"), "assumptions": list(bound.assumptions)}


def table(record: dict[str, Any]) -> Table:
    """Return the record as a table for printing."""
    names = ("value", "lr", "beta", "steps", "rule", "power_of_steps", "batch", "matrices",
             "gamma", "nu", "power", "contraction", "gain", "clip", "excess",
             "noise_of_a_release", "delta_0", "delta_q", "eps_q", "chi_q")  # fmt: skip
    rows = [(name, record.get(name)) for name in names]
    rows += listed("no bound, because", record.get("no_bound_because", []))
    terms, others = record.get("terms", {}), record.get("others", {})
    rows += [(f"part of the bound: {name}", term) for name, term in terms.items()]
    rows += [(f"for comparison: {name}", other["value"]) for name, other in others.items()]
    rows += listed("assumes", record.get("assumptions", []))
    return facts(f"{record.get('measure', 'no bound')}, {record['paper']}", rows)
