"""What 001 promises of a run: which of its results the config falls under, and the bound they give.

`analysis` holds the formulas. What none of them covers is refused, with the sentence that says why.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedmuon import analysis
from fedmuon.analysis import Bound, Realized, Uniform
from fedmuon.analysis.theory import corollaries as says
from fedmuon.analysis.theory.corollaries import sensitivity
from fedmuon.analysis.theory.generalization import INDEPENDENCE, RANGE, Status
from fedmuon.analysis.theory.recursion import by_samples
from fedmuon.core.choices import is_own
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.certified_setting import Case
from fedmuon.experiments.stability.covered_recipes import has_map, method_of
from fedmuon.orthogonalize import Uncertified, lipschitz

FAR_ABOVE = 1000.0  # times what rounding comes to is a certificate of float64
ALIGNED = "(X, M) and the global direction obey the three-state recursion of Remark 3.2."
JUMPS = (
    "The exact sign jumps where a singular value is 0, so it has no constant, and no bound stands "
    "on it; but the neighbours of one run have certificates, from its momenta (Lemma D.12): of a "
    "finished run on the matrix task, without alignment, in float64, on its schedule as drawn."
)
PRINTED = (
    "The printed tube (Lemma D.12) is that of FedMuon as 001 has it: set [stability] lipschitz = "
    "'sharp', which is proved for other forms, too."
)
EXACT = (
    "Arithmetic is exact: the rounding of float32, or of float64 where steps are tiny, is not "
    "counted, and by itself it may move a neighbour further than its certificate (set [engine] "
    "dtype = 'float64')."
)
AUTHOR = (
    "The map was handed over with L_orth = {:g}, for which its author answers: no drawn pair of "
    "matrices exceeded it, which proves nothing."
)


@dataclass(frozen=True)
class Verdict:
    """Y_i and Delta_i Y_i [N], the bound and the range B of the loss, or what refuses them; without
    a bound, `status` says whether the certificates hold, and `scope` of what."""

    l_orth: float | None
    exposures: np.ndarray | None = None
    certificates: np.ndarray | None = None
    bound: Bound | None = None
    refusal: str = ""
    loss_bound: float = 1.0
    status: Status | Literal["realized", "refused"] = "refused"
    scope: str = ""

    def violation(self, moved: np.ndarray | None) -> float:
        """The largest perturbation [N] over its certificate, if one is above; else 0."""
        if moved is None or self.certificates is None:
            return 0.0
        above = moved > self.certificates
        with np.errstate(divide="ignore"):
            return float((moved[above] / self.certificates[above]).max(initial=0.0))


def judge(case: Case) -> Verdict:
    """What the theory promises of this run."""
    l_orth = None
    try:
        _require_covered(case)
        if _takes_signs(case):
            return _in_tube(case)
        l_orth = map_constant(case) if case.l_orth is None else case.l_orth
        return _certified(case, l_orth)
    except InputError as error:
        return Verdict(l_orth, refusal=str(error))


def _takes_signs(case: Case) -> bool:
    exact = case.config.orthogonalizer.name == "exact-sign" and has_map(case.config)
    return exact and case.l_orth is None


def by_kind(case: Case) -> dict[str, dict[str, float | None]]:
    """L_orth and the bound with the printed constant of the map, and with the proved one."""
    found: dict[str, dict[str, float | None]] = {}
    for kind in ("paper", "sharp") if case.l_orth is None else ():
        verdict = judge(case.under(lipschitz=kind))
        value = verdict.bound.value if verdict.bound else None
        found[kind] = {"l_orth": verdict.l_orth, "value": value}
    return found


def map_constant(case: Case) -> float:
    """L_orth of the configured map, of the configured kind (`fedmuon.orthogonalize.lipschitz`); 1
    where there is none."""
    table, stability = case.config.orthogonalizer, case.config.stability
    if not has_map(case.config):
        return 1.0
    if is_own(table.name):
        if case.l_map is None:
            raise Uncertified(
                "Your map comes without a Lipschitz constant, so no bound stands on it: give "
                "fedmuon.Orthogonalizer(apply, lipschitz=L) if you can prove one."
            )
        return case.l_map
    if table.name == "exact-sign":
        raise Uncertified(JUMPS)
    if table.name == "gaussian-smoothed-sign" and case.shape is None:
        raise InputError("The smoothed sign's constant depends on the model's shape: give L_orth.")
    federation = case.config.federation
    calls = federation.rounds * case.config.local.steps * federation.per_round  # T_sign = R E K
    smoothed = {"sigma": table.sigma, "alpha": stability.alpha_smoothing}  # 001, Corollary D.11
    schulz = {"steps", "coefficients", "eps", "normalization"}
    parameters: dict[str, dict[str, Any]] = {
        "smoothed-polar": {"lam": table.lambda_},
        "clipped-sign": {"gamma": table.clip_level},
        "newton-schulz": table.model_dump(include=schulz),
        "gaussian-smoothed-sign": {**smoothed, "calls": calls, "shape": case.shape},
    }
    found = lipschitz(table.name, stability.lipschitz, **parameters.get(table.name, {}))
    if not math.isfinite(found):
        raise Uncertified(
            "The printed constant of this map overflows: use [stability] lipschitz = 'sharp'."
        )
    return found


def _require_covered(case: Case) -> None:
    method_of(case.config)
    _require_constants(case)
    _require_as_planned(case)


def _require_constants(case: Case) -> None:
    if case.config.task.name != "matrix" and not (case.constants or case.refusal):
        raise Uncertified(
            "The constants of a network are not proved (B, L_loss, Lg, G_max): make the run, whose "
            "folder has estimates, or set [task] name = 'matrix'."
        )
    if case.refusal:
        raise Uncertified(case.refusal)


def _require_as_planned(case: Case) -> None:
    """Nothing that was seen of the data may have changed who took part, or for how long."""
    if case.stopped:
        raise Uncertified(
            "The run was ended by what it saw of its data, which no schedule drawn in advance "
            "covers: run without early stopping."
        )
    if case.dropped:
        raise Uncertified(
            "A participant dropped out of some round, which no schedule drawn in advance covers: "
            "run with [faults] policy strict."
        )


def _certified(case: Case, l_orth: float) -> Verdict:
    """001, Theorem 4.1 with Corollary 4.2, Corollary 4.3, Theorem J.1 or Remark 3.2; H and G have
    all of delta each, as the smaller is known before the data, or with a C_hp of the caller's the
    halves that are printed."""
    run, stability = case.run, case.config.stability
    exposures, moved = _exposed(case, l_orth)
    assumed, failure = _assumed(case)
    least, rounding = moved[moved > 0].min(initial=math.inf), _rounding(case)
    sound = case.exact and least >= FAR_ABOVE * rounding
    found = analysis.bound(
        analysis.loss_stability(moved, run.constants.lipschitz, run.constants.loss_bound),
        run.sizes,
        run.weights,
        stability.delta,
        run.constants.loss_bound,
        stability.c_hp,  # type: ignore[arg-type]
        shares=(1.0, 1.0) if isinstance(stability.c_hp, str) else (0.5, 0.5),
        status="estimated" if case.given else "certified" if sound else "real-arithmetic",
        assumptions=assumed if sound else (*assumed, EXACT),
        other_failure=failure,
    )
    promised = np.where(moved > 0, moved + rounding, 0.0)
    return Verdict(l_orth, exposures, promised, found, loss_bound=run.constants.loss_bound)


def _in_tube(case: Case) -> Verdict:
    """001, Lemma D.12 in the quotient by the ones vector: certificates of this run's neighbours."""
    part, run, method = case.participation, case.run, method_of(case.config)
    if not (case.gaps and case.exact and isinstance(part, Realized)) or method.alignment:
        raise Uncertified(JUMPS)
    each, rates = sensitivity(run), run.lr * (1.0 if run.factors is None else run.factors)
    smooth = run.reach.smoothness if run.reach else run.constants.smoothness
    of_run = case.gaps(), part.schedule, each, rates
    after = {"l_g": smooth, "local_steps": run.local_steps, "scale": says.scale_of(run)}
    if case.config.stability.lipschitz == "sharp":
        shares = by_samples(part.schedule, run.sizes) if run.by_samples else None
        tube = analysis.follow(*of_run, method, shares=shares, **after)
    elif case.plain and not run.by_samples:
        tube = analysis.certify(*of_run, run.beta, kind="paper", **after)
    else:
        raise Uncertified(PRINTED)
    status = "estimated" if case.given else "realized"
    exposures = tube.perturbation / each
    return Verdict(tube.l_orth, exposures, tube.perturbation, status=status, scope=tube.scope)


def _rounding(case: Case) -> float:
    """What R E roundings of the whole model in float64 come to, each as large as much decay makes
    it, where |1 - lr decay| > 1, and moves off by sqrt(n) of them, as sums over n samples are whose
    roundings are a random walk. It is added to certificates, as one that is attained, by one step
    along gradients for instance, is exceeded by that; what is called certified is far above it, so
    that proved constants certify what is computed in real numbers, or all but so."""
    if case.shape is None:
        return 0.0
    run, steps = case.run, case.run.rounds * case.run.local_steps
    rates = run.lr * (np.ones(run.rounds) if run.factors is None else run.factors)
    with np.errstate(over="ignore"):
        grown = np.maximum(1, abs(1 - rates * method_of(case.config).decay)) ** run.local_steps
        moved = case.reach.radius if case.reach else run.lr * steps
        far = (case.start.reach if case.start else 1.0) + moved * math.sqrt(run.sizes.max())
        return float(np.finfo(float).eps * math.sqrt(min(case.shape)) * far * steps * grown.prod())


def _assumed(case: Case) -> tuple[tuple[str, ...], float]:
    """What the bound stands on, and how often it fails beyond delta: failures add up."""
    part, failure = case.participation, 0.0
    inside = [RANGE]
    if case.reach and case.start:
        where = says.REACHED.format(case.reach.radius, case.reach.last.loss_bound)
        inside = [where, says.NONNEGATIVE] if case.start.nonnegative else [where]
    assumed = [INDEPENDENCE, *inside, says.LIPSCHITZ_LOSS, says.GRADIENTS, says.COUPLING]
    if case.config.orthogonalizer.name == "gaussian-smoothed-sign" and case.l_orth is None:
        assumed, failure = [*assumed, says.NO_CLIPPING], case.config.stability.alpha_smoothing
    elif has_map(case.config):
        assumed.append(says.GLOBAL_MAP)
    if is_own(case.config.orthogonalizer.name) and case.l_map is not None and case.l_orth is None:
        assumed.append(AUTHOR.format(case.l_map))
    if isinstance(part, Uniform) and part.per_round < len(case.sizes):
        assumed, failure = [*assumed, says.UNIFORM], failure + part.rho
    assumed += [ALIGNED] if case.aligned else []
    return (*assumed, *case.given), failure


def _exposed(case: Case, l_orth: float) -> tuple[np.ndarray, np.ndarray]:
    """Y_i (or Y_i^mb, or Psi) and Delta_i Y_i, each [N]."""
    run, part = case.run, case.participation
    if not case.plain:
        run = dataclasses.replace(run, method=method_of(case.config))
    moved = analysis.certificate(run, l_orth, part)
    drawn = isinstance(part, Realized) and part.rows is not None
    return moved / (2 * run.constants.gradient_bound if drawn else sensitivity(run)), moved
