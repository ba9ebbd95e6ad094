"""Find the result of the Stability note that covers a run, and compute its certificate.

The formulas are in `fedmuon.analysis`. A `CertifiedSetting` contains a config and known facts about
its run. `certify` computes the `Certificate` of a `CertifiedSetting`. If no result covers the run,
the certificate contains the reason instead of a bound. `report` and `table` format a certificate
for `fedmuon bound`. This module needs only NumPy. The module `finished_run.py` reads run folders.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from rich.table import Table

from fedmuon import analysis
from fedmuon.analysis import Bound, Realized, Run, Uniform
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.theory import corollaries as says
from fedmuon.analysis.theory.checks import probability, whole
from fedmuon.analysis.theory.client_neighbours import INDEPENDENT_CLIENTS, PROTOCOL
from fedmuon.analysis.theory.corollaries import sensitivity
from fedmuon.analysis.theory.generalization import (
    BESIDE_VARIANCE,
    INDEPENDENCE,
    RANGE,
    Deviations,
    Status,
    effective_size,
)
from fedmuon.analysis.theory.recursion import OVERFLOW, Method, by_samples
from fedmuon.analysis.theory.trajectories import Reach, Start, reach
from fedmuon.config.facts import FACTS
from fedmuon.config.load import Config
from fedmuon.config.methods import METHODS, PRIVATE, UNCERTIFIED, certified
from fedmuon.config.schema import Data, OrthogonalizerTable, biased_participation
from fedmuon.core.choices import is_own
from fedmuon.core.demands import Demand, Trait
from fedmuon.core.errors import InputError
from fedmuon.core.files import finite
from fedmuon.data.partition import weights
from fedmuon.data.source import Source
from fedmuon.experiments.stability.participation_bound import (
    bound_entries,
    bound_rows,
    participation_bound,
)
from fedmuon.experiments.tables import BALL_NAMES, BOUND_NAMES, facts, listed
from fedmuon.federated.plan import BIASED, RandomnessPlan
from fedmuon.federated.schedule import schedule_of
from fedmuon.orthogonalize import Uncertified, lipschitz
from fedmuon.orthogonalize.lipschitz_constants import Growth, growth, require_positive
from fedmuon.tasks.constants import Constants, constants

MUON = certified("averaged", "reset", "aligned")
MAPLESS = certified("gradients")
HEAVY = "heavy-tailed"  # during a run, constant steps replace this schedule
OTHERS = "no theorem limits how far apart this recipe can move two models"
RECURSION = "the recursion of the Stability note does not cover"
PRIVATELY = "the recursion of the Stability note does not cover clipping and Poisson lots"
SCHULZ = {"steps", "coefficients", "eps", "normalization"}  # keys of Newton–Schulz

FAR_ABOVE = 1000.0  # a certificate is sound in float64 if it exceeds the rounding by this factor
CALLER = "The value {} = {:g} was passed by the caller and is not checked."
CENTERED = (
    "Samples are centered by the mean of {} public samples. The public samples are used neither "
    "for training nor for testing, and are the same for both data sets."
)
FEATURES = (
    "The samples are features '{}', which depend only on their own image{}, so a replaced image "
    "changes only its own features."
)
ALIGNED = (
    "The model X, the momentum M and the global direction follow the three-state recursion of "
    "Remark 3.2."
)
JUMPS = (
    "The exact sign jumps where a singular value is 0, so it has no Lipschitz constant and no "
    "bound. The neighbours of one run can still have certificates, computed from the momenta of "
    "the run (Lemma D.12). These certificates need a finished run of the matrix task in float64, "
    "without alignment, with the schedule that the run drew."
)
PRINTED = (
    "The published tube (Lemma D.12) covers only FedMuon as in the Stability note. Set "
    "[stability] lipschitz = 'sharp', which is proved for other forms, too."
)
EXACT = (
    "The bound assumes exact arithmetic and does not count rounding. In float32, or in float64 "
    "with tiny steps, rounding alone may move a neighbour further than its certificate (set "
    "[engine] dtype = 'float64')."
)
BEFORE = (
    "[stability] c-hp = 'variance' needs the training losses of a finished run of the matrix "
    "task. Pass the run folder, or set c-hp to explicit or sharp."
)
VARIANCE_OF_SAMPLES = (
    "[stability] c-hp = 'variance' uses the losses of single samples, but [stability] unit names "
    "whole clients. Set c-hp to explicit or sharp."
)
UNPROVED = (
    "The constants of a network (B, L_loss, Lg, G_max) are not proved. Run the experiment and "
    "pass its run folder, from which the constants are estimated, or set [task] name = 'matrix'."
)
STOPPED = (
    "The data decided when the run ended, but the bound covers only schedules that are drawn in "
    "advance. Run without early stopping."
)
DROPPED = (
    "A participant dropped out of a round, but the bound covers only schedules that are drawn in "
    "advance. Set [faults] policy = 'strict'."
)
AUTHOR = (
    "The author of the given orthogonalizer claims L_orth = {:g}. No random pair of matrices "
    "contradicts this value, but this is not a proof."
)


CERTIFICATE = Demand(
    lambda config: "a certificate",
    {
        Trait.PROTECTS_CLIENTS: f"{RECURSION} clipped updates and noise",
        Trait.COMPRESSES_REPLIES: f"{RECURSION} compression",
        Trait.COMPRESSES_MODEL: f"{RECURSION} compression",
        Trait.CUSTOM_STAGE: f"{RECURSION} other messages than those of Algorithm 1",
        Trait.HOSTILE_CLIENTS: f"{RECURSION} clients that do not follow Algorithm 1",
        Trait.CLIPS_CHANGES: f"{RECURSION} clipped changes",
        Trait.MIXES_REPLIES: f"{RECURSION} mixed replies",
        Trait.SCALES_BY_MOMENTUM: "such a step has no Lipschitz constant",
        Trait.ROW_MEMORY: f"{RECURSION} the second moment of NorMuon",
        Trait.SCALES_WEIGHTS: f"{RECURSION} this scaling",
        Trait.SPLITS_MATRICES: f"{RECURSION} the steps of MuonBP, only steps along whole matrices",
        Trait.ROUNDS_NEWTON_SCHULZ: "this changes the result by more than the Lipschitz constant "
        "allows",
        Trait.STEP_SIZE_OF_RUN: "the bound needs the step sizes in advance",
        Trait.DIFFERENT_STEPS: "the bound needs the same number of steps for all clients",
        Trait.NO_WEIGHTED_MEAN: "the bound covers only weighted means of the participants' replies",
        Trait.SHRINKS_NETWORK: "the bound covers weight decay with a single step size",
    },
)


def has_map(config: Config) -> bool:
    """Return whether the config's recipe uses an orthogonalizer."""
    return config.local.recipe in MUON


def method_of(config: Config) -> Method:
    """Return the config's recipe as a `Method` of the stability recursion.

    Raises:
        Uncertified: If the stability recursion does not cover the recipe.
    """
    local = config.local
    if local.recipe not in MUON + MAPLESS:
        uncovered = UNCERTIFIED.get(local.recipe, OTHERS)
        reason = PRIVATELY if local.recipe in PRIVATE else uncovered
        raise Uncertified(
            f"Recipe {local.recipe} has no certificate: {reason}. Use one of "
            f"{', '.join(MUON + MAPLESS)}."
        )
    for problem in CERTIFICATE.problems(config, FACTS):
        raise Uncertified(problem)
    row = METHODS[local.recipe]
    if "momentum" not in row.keys:
        server = local.server_momentum if "server-momentum" in row.keys else 0.0
        return Method(0.0, decay=local.weight_decay, server=server)
    return Method(
        local.momentum,
        local.momentum_form,
        local.weight_decay,
        afresh=row.certificate == "reset",
        alignment=local.alignment if row.certificate == "aligned" else 0.0,
    )


def size_of(table: OrthogonalizerTable) -> Growth | None:
    """Return a bound on the norm of the orthogonalizer's output, or None if no bound is known."""
    return growth(table.name, lam=table.lambda_, gamma=table.clip_level, **_schulz(table))


def _schulz(table: OrthogonalizerTable) -> dict[str, Any]:
    return table.model_dump(include=SCHULZ) | {"coefficients": table.polynomials}


def start_of(weight: np.ndarray, source: Source | None) -> Start | None:
    """Return properties of X0 and of the samples of `source`. With one class, return None."""
    if weight.shape[1] < 2:
        return None
    centred = weight - weight.mean(1, keepdims=True, dtype=float)
    unsigned = (
        source is not None
        and source.center is None
        and (source.inputs.dtype.kind == "u" or bool((source.inputs >= 0).all()))
    )
    return Start(weight.shape[1], float(np.linalg.norm(centred, 2)), unsigned)


def of_clients(config: Config) -> bool:
    """Return whether a neighbour differs in a whole client."""
    return config.stability.unit != "samples"


@dataclass(frozen=True)
class CertifiedSetting:
    """All known facts about a run to certify.

    Attributes:
        config: The config of the run.
        sizes: Array [N] of the numbers of samples of the clients.
        participation: The participants of each round, or how they are chosen.
        shape: The shape of the model, if known.
        l_orth: A value of L_orth that replaces the proved constant.
        l_g: A value of L_g that replaces the proved constant.
        dropped: Whether the server left out a participant in some round.
        constants: Estimated constants, in place of the task's proved constants.
        caveats: Warnings about the estimated constants.
        refusal: The reason why there is no bound.
        l_map: The Lipschitz constant that the author of a custom orthogonalizer claims.
        stopped: The reason why a callback ended the run early.
        factors: Array [R] of the factors of the step size in each round.
        moved: Array [N]. For each client, the largest perturbation among its neighbours.
        start: Known facts about the initial model X0.
        gaps: A function that repeats the run and returns an array [R, E, K] of the smallest
            singular value s_q of each momentum.
        squares: A function that reads the final model. For each client, it returns the mean of
            (loss - (1 - 1/c))^2 over the training samples.
    """

    config: Config
    sizes: np.ndarray
    participation: Realized | Uniform
    shape: tuple[int, int] | None = None
    l_orth: float | None = None
    l_g: float | None = None
    dropped: bool = False
    constants: Constants | None = None
    caveats: tuple[str, ...] = ()
    refusal: str = ""
    l_map: float | None = None
    stopped: str = ""
    factors: np.ndarray | None = None
    moved: np.ndarray | None = None
    start: Start | None = None
    gaps: Callable[[], np.ndarray] | None = None
    squares: Callable[[], np.ndarray] | None = None

    @property
    def known_start(self) -> Start | None:
        """Return the known start. With clients as neighbours, samples may have negative entries."""
        if self.start is None or not of_clients(self.config):
            return self.start
        return dataclasses.replace(self.start, nonnegative=False)

    @property
    def counts(self) -> np.ndarray:
        """The numbers of independent samples of the clients [N]: n_i, or one whole client."""
        return np.ones(len(self.sizes)) if of_clients(self.config) else self.sizes

    @cached_property
    def reach(self) -> Reach | None:
        """The constants on the ball that the models of the run cannot leave.

        The value is None if the caller sets other constants, or if no ball is known that contains
        all models. No ball is known in four cases: X0 is unknown, the run uses alignment or weight
        decay (which pulls towards 0 and not X0), the norm of the orthogonalizer's output has no
        known bound, or the recursion does not cover the recipe.
        """
        config, local = self.config, self.config.local
        fixed = self.constants is not None or self.l_g is not None
        start = self.known_start
        size = size_of(config.orthogonalizer) if has_map(config) else float
        if fixed or start is None or size is None or config.stability.constants != "ball":
            return None
        try:
            method = method_of(config)
        except Uncertified:
            return None
        if method.alignment or method.decay:
            return None
        return reach(start, self.rates, method, size, local.steps)

    @property
    def rates(self) -> np.ndarray:
        """The step size of each round [R]."""
        local, rounds = self.config.local, self.config.federation.rounds
        return local.lr * (np.ones(rounds) if self.factors is None else self.factors)

    @cached_property
    def run(self) -> Run:
        """The run as a `Run` of `fedmuon.analysis`."""
        federation, local = self.config.federation, self.config.local
        proved = self.reach.last if self.reach else self.constants or constants()
        smoothness = proved.smoothness if self.l_g is None else self.l_g
        return Run(
            lr=local.lr,
            beta=local.momentum,
            rounds=federation.rounds,
            local_steps=local.steps,
            sizes=self.sizes,
            weights=weights(self.sizes, federation.risk_weights),
            constants=dataclasses.replace(proved, smoothness=smoothness),
            batch=local.batch,
            factors=self.factors,
            reach=self.reach,
            by_samples=federation.aggregate == "by-samples",
        )

    @property
    def exact(self) -> bool:
        """Whether the run uses float64."""
        return self.config.engine.dtype == "float64"

    def under(self, **changes: Any) -> "CertifiedSetting":
        """Return the same run with changes of its [stability] table."""
        stability = self.config.stability.model_copy(update=changes)
        config = self.config.model_copy(update={"stability": stability})
        return dataclasses.replace(self, config=config)

    @property
    def given(self) -> tuple[str, ...]:
        """The assumptions that are only estimated, or that a user claims without a proof."""
        pairs = (("L_orth", None if self.constants else self.l_orth), ("Lg", self.l_g))
        notes = (CALLER.format(name, value) for name, value in pairs if value is not None)
        return (*self.caveats, *notes)


@dataclass(frozen=True)
class Certificate:
    """The guarantees for a run: certificates of its clients, and a generalization bound.

    Attributes:
        l_orth: The Lipschitz constant of the orthogonalizer.
        exposures: The exposures Y_i of the clients [N].
        certificates: The certificates Δ_i Y_i [N]. A certificate is the maximum perturbation if one
            sample of client i is replaced, or the whole client with [stability] unit.
        bound: The generalization bound, if there is one.
        refusal: The reason why there is no guarantee.
        loss_bound: The length B of an interval that contains all losses.
        status: If there is no bound, the status of the certificates.
        scope: If there is no bound, the runs for which the certificates hold.
        participation: The bound on the participation gap, if a neighbour differs in a whole client
            and the clients may be draws from one population.
    """

    l_orth: float | None
    exposures: np.ndarray | None = None
    certificates: np.ndarray | None = None
    bound: Bound | None = None
    refusal: str = ""
    loss_bound: float = 1.0
    status: Status | Literal["realized", "refused"] = "refused"
    scope: str = ""
    participation: Bound | None = None

    def violation(self, moved: np.ndarray | None) -> float:
        """Return the largest ratio perturbation / certificate if it exceeds 1, otherwise 0."""
        if moved is None or self.certificates is None:
            return 0.0
        above = moved > self.certificates
        with np.errstate(divide="ignore"):
            return float((moved[above] / self.certificates[above]).max(initial=0.0))


def certify(case: CertifiedSetting) -> Certificate:
    """Return the guarantees for a run, or the reason why there are no guarantees."""
    l_orth, exact_sign = None, case.config.orthogonalizer.name == "exact-sign"
    try:
        method = method_of(case.config)
        if case.config.task.name != "matrix" and not (case.constants or case.refusal):
            raise Uncertified(UNPROVED)
        if case.refusal:
            raise Uncertified(case.refusal)
        if biased_participation(case.config):
            raise Uncertified(BIASED)
        if case.stopped:
            raise Uncertified(STOPPED)
        if case.dropped:
            raise Uncertified(DROPPED)
        if exact_sign and has_map(case.config) and case.l_orth is None:
            return _in_tube(case, method)
        l_orth = map_constant(case) if case.l_orth is None else case.l_orth
        return _theorem(case, method, l_orth)
    except InputError as error:
        return Certificate(l_orth, refusal=str(error))


def map_constant(case: CertifiedSetting) -> float:
    """Return L_orth of the config's orthogonalizer, or 1 for a recipe without orthogonalizer.

    The config key `stability.lipschitz` chooses the kind of constant. See
    `fedmuon.orthogonalize.lipschitz`.
    """
    table, stability = case.config.orthogonalizer, case.config.stability
    if not has_map(case.config):
        return 1.0
    if is_own(table.name):
        if case.l_map is None:
            raise Uncertified(
                "Your orthogonalizer has no Lipschitz constant, so there is no bound. If you can "
                "prove a constant L, pass fedmuon.Orthogonalizer(apply, lipschitz=L)."
            )
        return case.l_map
    if table.name == "exact-sign":
        raise Uncertified(JUMPS)
    if table.name == "newton-schulz":
        require_positive(table.polynomials, table.steps)
    if table.name == "gaussian-smoothed-sign" and case.shape is None:
        raise InputError(
            "The Lipschitz constant of the smoothed sign depends on the shape of the model, but "
            "this shape is not known. Set the constant with --l-orth, or pass a run folder."
        )
    federation = case.config.federation
    calls = federation.rounds * case.config.local.steps * federation.per_round  # T_sign = R E K
    smoothed = {"sigma": table.sigma, "alpha": stability.alpha_smoothing}  # Corollary D.11
    parameters: dict[str, dict[str, Any]] = {
        "smoothed-polar": {"lam": table.lambda_},
        "clipped-sign": {"gamma": table.clip_level},
        "newton-schulz": _schulz(table),
        "gaussian-smoothed-sign": {**smoothed, "calls": calls, "shape": case.shape},
    }
    constant = lipschitz(table.name, stability.lipschitz, **parameters.get(table.name, {}))
    if not math.isfinite(constant):
        raise Uncertified(
            "The published constant of this orthogonalizer overflows. Set [stability] lipschitz "
            "= 'sharp'."
        )
    return constant


def _of_data(table: Data) -> list[str]:
    """Return the assumptions about how the samples are computed from the stored samples."""
    assumed: list[str] = []
    if table.features != "none":
        public = f" and on the public data {table.public}" if table.public != "none" else ""
        assumed.append(FEATURES.format(table.features, public))
    if table.center == "public":
        assumed.append(CENTERED.format(table.center_samples))
    return assumed


def _theorem(case: CertifiedSetting, method: Method, l_orth: float) -> Certificate:
    """Apply Theorem 4.1 of the Stability note with Corollary 4.2 or 4.3, Theorem J.1, Remark 3.2.

    The bound is the smaller of two terms, H and G. If they do not depend on the data, the smaller
    term is known in advance, so each term may use the full delta. If the constant C_hp is a number,
    H and G use delta / 2 each, as in the paper. If C_hp is "variance", H depends on the training
    losses, so H and G must share delta.
    """
    shares, deviations = (0.5, 0.5), None
    if case.config.stability.c_hp == "variance":  # losses minus those of a uniform prediction
        if case.squares is None or case.shape is None:
            raise Uncertified(BEFORE)
        deviations = Deviations(case.squares(), case.reach.deviation if case.reach else 1.0)
        shares = BESIDE_VARIANCE
    elif isinstance(case.config.stability.c_hp, str):
        shares = (1.0, 1.0)
    run, stability, part = case.run, case.config.stability, case.participation
    following = run if method == Method(run.beta) else dataclasses.replace(run, method=method)
    proved, exposures = _moved(case, following, l_orth)

    inside, failure, of_map = [RANGE], 0.0, case.config.orthogonalizer.name
    if case.reach and case.known_start:
        inside = [says.REACHED.format(case.reach.radius, case.reach.last.loss_bound)]
        inside += [says.NONNEGATIVE] if case.known_start.nonnegative else []
    assumed = [*_independence(case), *inside, says.LIPSCHITZ_LOSS, says.GRADIENTS, says.COUPLING]
    if of_map == "gaussian-smoothed-sign" and case.l_orth is None:
        assumed.append(says.NO_CLIPPING)
        failure = stability.alpha_smoothing
    elif has_map(case.config):
        assumed.append(says.GLOBAL_MAP)
    status: Status = "estimated" if case.given else "certified"
    if is_own(of_map) and case.l_map is not None and case.l_orth is None:
        assumed.append(AUTHOR.format(case.l_map))
        status = "estimated" if case.given else "claimed"
    if isinstance(part, Uniform) and part.per_round < len(case.sizes):
        assumed.append(says.UNIFORM)
        failure += part.rho
    assumed += _of_data(case.config.data)
    if case.config.local.recipe in certified("aligned"):
        assumed.append(ALIGNED)
    assumed += case.given

    rounding = _rounding(case, method)
    sound = case.exact and proved[proved > 0].min(initial=math.inf) >= FAR_ABOVE * rounding
    assumed += [] if sound else [EXACT]
    if status == "certified" and not sound:
        status = "real-arithmetic"
    eps = analysis.loss_stability(proved, run.constants.lipschitz, run.constants.loss_bound)
    bound_with = partial(
        analysis.bound,
        eps,
        case.counts,
        delta=stability.delta,
        loss_bound=run.constants.loss_bound,
        c_hp=stability.c_hp,  # type: ignore[arg-type]
        shares=shares,
        status=status,
        assumptions=tuple(assumed),
        other_failure=failure,
        deviations=deviations,
    )
    bound = bound_with(run.weights)
    participation = participation_bound(case.config, len(case.sizes), bound_with)
    if stability.unit == "removed-clients":
        proved = analysis.client_certificate(following, l_orth, part, removed=True)
    promised = np.where(proved > 0, proved + rounding, 0.0)
    top = run.constants.loss_bound
    return Certificate(
        l_orth, exposures, promised, bound, loss_bound=top, participation=participation
    )


def _moved(case: CertifiedSetting, run: Run, l_orth: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the certificates of replaced samples or clients [N], and the exposures [N]."""
    part, top = case.participation, 2 * run.constants.gradient_bound
    if of_clients(case.config):
        if case.config.stability.c_hp == "variance":
            raise Uncertified(VARIANCE_OF_SAMPLES)
        proved = analysis.client_certificate(run, l_orth, part)
        return proved, proved / top
    proved = analysis.certificate(run, l_orth, part)
    drawn = isinstance(part, Realized) and part.rows is not None
    return proved, proved / (top if drawn else sensitivity(run))


def _independence(case: CertifiedSetting) -> list[str]:
    return [INDEPENDENT_CLIENTS, PROTOCOL] if of_clients(case.config) else [INDEPENDENCE]


def _rounding(case: CertifiedSetting, method: Method) -> float:
    """Return a bound on the sum of the rounding errors of R E steps of the whole model in float64.

    Weight decay with |1 - lr decay| > 1 makes each rounding error grow. A gradient is a sum over n
    samples. Its rounding errors are like a random walk, so each step counts as sqrt(n) rounding
    errors. Without this bound, rounding could move a run beyond its certificate, so the bound is
    added to the certificates. Only certificates that are much larger than this bound get the status
    `certified`.
    """
    if case.shape is None:
        return 0.0
    run, steps = case.run, case.run.rounds * case.run.local_steps
    with np.errstate(over="ignore"):
        decayed = abs(1 - case.rates * method.decay)
        grown = np.maximum(1, decayed) ** run.local_steps
        radius = case.reach.radius if case.reach else run.lr * steps
        far = (case.start.reach if case.start else 1.0) + radius * math.sqrt(run.sizes.max())
        return float(np.finfo(float).eps * math.sqrt(min(case.shape)) * far * steps * grown.prod())


def _in_tube(case: CertifiedSetting, method: Method) -> Certificate:
    """Return the certificates of this run's neighbours for the exact sign as orthogonalizer.

    The certificates follow from Lemma D.12 of the Stability note, for gradients whose rows sum to
    0.
    """
    part, run = case.participation, case.run
    if not (case.gaps and case.exact and isinstance(part, Realized)) or method.alignment:
        raise Uncertified(JUMPS)
    top = 2 * run.constants.gradient_bound
    deltas = np.full(len(run.sizes), top) if of_clients(case.config) else sensitivity(run)
    smooth = run.reach.smoothness if run.reach else run.constants.smoothness
    of_run = case.gaps(), part.schedule, deltas, case.rates
    after = {"l_g": smooth, "local_steps": run.local_steps, "scale": says.scale_of(run)}
    if case.config.stability.lipschitz == "sharp":
        shares = by_samples(part.schedule, run.sizes) if run.by_samples else None
        tube = analysis.path_certificate(*of_run, method, shares=shares, **after)
    elif method == Method(run.beta) and not run.by_samples:
        tube = analysis.tube_certificate(*of_run, run.beta, kind="paper", **after)
    else:
        raise Uncertified(PRINTED)
    status = "estimated" if case.given else "realized"
    exposures = tube.perturbation / deltas
    return Certificate(tube.l_orth, exposures, tube.perturbation, status=status, scope=tube.scope)


# Output of `fedmuon bound`, for a run or for parameters alone.

IMAGES = ("mnist5k", "mnist", "fashion-mnist", "cifar10", "digits")  # data sets with ten classes


def in_float64(config: Config) -> Config:
    """Return the config with float64, unless it sets a precision.

    Rounding in float32 would hide small perturbations.
    """
    if "dtype" in config.engine.model_fields_set:
        return config
    engine = config.engine.model_copy(update={"dtype": "float64"})
    return config.model_copy(update={"engine": engine})


def from_parameters(
    config: Config,
    size: int,
    rho: float = 0.01,
    l_orth: float | None = None,
    l_g: float | None = None,
) -> CertifiedSetting:
    """Return the setting of N clients with `size` samples each, under any uniform schedule.

    The setting uses float64 unless the config sets a precision.
    """
    size, rho = whole("size", size), probability("rho", rho)
    fed = config.federation
    plan = RandomnessPlan(
        fed.seed, fed.clients, fed.per_round, fed.rounds, factor=schedule_of(config)
    )
    sizes, part = np.full(fed.clients, size), Uniform(fed.per_round, rho)
    classes = {**dict.fromkeys(IMAGES, 10), "synthetic": config.data.classes}.get(config.data.name)
    has_start = classes and config.task.name == "matrix" and config.task.initial == "zero"
    return CertifiedSetting(
        in_float64(config), sizes, part, None, l_orth, l_g, factors=plan.factors(),
        start=Start(classes) if has_start else None,
    )  # fmt: skip


def report(case: CertifiedSetting, certificate: Certificate) -> dict[str, Any]:
    """Return the certificate as one JSON object. If there is no bound, the numbers are null."""
    run, stability, bound = case.run, case.config.stability, certificate.bound
    top = run.constants.loss_bound
    violation = certificate.violation(case.moved)
    exposures, promised = certificate.exposures, certificate.certificates
    kinds: dict[str, dict[str, float | None]] = {}
    for kind in ("paper", "sharp") if case.l_orth is None else ():
        other = certify(case.under(lipschitz=kind))
        kinds[kind] = {"l_orth": other.l_orth, "value": other.bound.value if other.bound else None}
    status = bound.status if bound else certificate.status
    return {
        **{name: finite(getattr(bound, name, None)) for name in ("value", "h", "g", "failure")},
        "delta": stability.delta,
        "c_hp": stability.c_hp,
        "kind": stability.lipschitz if case.l_orth is None or case.constants else "given",
        "constants": "ball" if case.reach else "observed" if case.constants else "global",
        "radius": finite(case.reach.radius) if case.reach else None,
        "range": finite(top),
        "share": finite(bound.value / top) if bound and top else None,
        "l_orth": certificate.l_orth,
        "kinds": kinds,
        "n_eff": bound.n_eff if bound else effective_size(case.counts, run.weights),
        **(
            {
                "unit": stability.unit,
                **bound_entries(case.config, certificate.participation, certificate.refusal),
            }
            if of_clients(case.config)
            else {}
        ),
        "max_exposure": None if exposures is None else finite(exposures.max()),
        "max_certificate": None if promised is None else finite(promised.max()),
        "status": "violated" if violation else status,
        "violation": finite(violation),
        "assumptions": list(bound.assumptions) if bound else [],
        "note": _note(case, certificate),
        "refusal": certificate.refusal,
    }


def _note(case: CertifiedSetting, certificate: Certificate) -> str:
    """Return a note if the bound is vacuous, or trivial for some clients. Otherwise return ""."""
    bound, clients, top = certificate.bound, len(case.sizes), case.run.constants.loss_bound
    if violation := certificate.violation(case.moved):
        return (
            f"A neighbour moved the model by {number(violation)} times its certificate. The "
            "assumptions of the bound do not hold for this run, so the bound is not valid."
        )
    if bound is None or certificate.exposures is None:
        return certificate.scope
    count = np.count_nonzero(np.isinf(certificate.exposures))
    if count and bound.value >= top:
        return (
            f"The bound is vacuous (eps_i = B for {count} of {clients} clients), because {OVERFLOW}"
        )
    if count:
        return (
            f"For {count} of {clients} clients, the bound uses the trivial eps_i = B, because "
            f"{OVERFLOW}"
        )
    return (
        f"The bound is vacuous, because no gap can exceed B = {top:g}."
        if bound.value >= top
        else ""
    )


def constant_of(record: dict[str, Any]) -> str:
    """Return a text that names the constants of a bound."""
    return f"C_hp = {record['c_hp']}, {record['kind']} L_orth, {record['constants']} constants"


def table(record: dict[str, Any]) -> Table:
    """Return the record of `report` as a table for the terminal."""
    names = (BOUND_NAMES | BALL_NAMES | {"status": "status"}).items()
    rows = [(words, "-" if record[name] is None else record[name]) for name, words in names]
    for kind, other in record["kinds"].items():
        if kind != record["kind"] and other["l_orth"] != record["l_orth"]:
            constant = "-" if other["l_orth"] is None else number(other["l_orth"], 6)
            value = "-" if other["value"] is None else number(other["value"], 6)
            rows.append((f"with its {kind} constant", f"bound {value}, constant {constant}"))
    rows += [*listed("assumes", record["assumptions"]), *bound_rows(record)]
    rows.append(("note", record["note"]))
    return facts(f"bound with {constant_of(record)}", [*rows, ("no bound", record["refusal"])])
