"""`fedmuon bound`: Theorem 4.1 of 001 as a number, from parameters or from a run directory.

`analysis` holds the formulas; here it is decided which of its results a config falls under. What
has none is refused, with the sentence that says why.
"""

import dataclasses
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

import analysis
from analysis import Bound, Realized, Run, Uniform
from analysis import corollaries as says
from analysis.checks import at_least, whole
from analysis.concentration import effective_size
from analysis.corollaries import sensitivity
from analysis.generalization import INDEPENDENCE, RANGE
from fedmuon import config as tables
from fedmuon.config import Config
from fedmuon.data.partition import weights
from fedmuon.errors import InputError
from fedmuon.federated import setup
from fedmuon.orthogonalize import Uncertified, lipschitz
from fedmuon.storage import Record, RunDirectory, read_tensors
from fedmuon.tasks.matrix import constants

ALIGNED = "(X, M) and the global direction obey the three-state recursion of Remark 3.2."
CALLER = "The caller gave {} = {:g}: nothing here proves it."


@dataclass(frozen=True)
class Case:
    """A run to judge: sizes n_i [N], the model's shape if known, and who took part.

    `l_orth` and `l_g` replace the proved constants by the caller's. `dropped` says that a
    participant was left out of some round.
    """

    config: Config
    sizes: np.ndarray
    participation: Realized | Uniform
    shape: tuple[int, int] | None = None
    l_orth: float | None = None
    l_g: float | None = None
    dropped: bool = False

    @property
    def run(self) -> Run:
        """The same in the words of `analysis`."""
        federation, local, proved = self.config.federation, self.config.local, constants()
        smoothness = proved.smoothness if self.l_g is None else self.l_g
        return Run(
            lr=local.lr,
            beta=local.momentum,
            rounds=federation.rounds,
            local_steps=local.steps,
            sizes=self.sizes,
            weights=weights(self.sizes, federation.weights),
            constants=dataclasses.replace(proved, smoothness=smoothness),
            batch=local.batch,
        )

    @property
    def given(self) -> tuple[str, ...]:
        """What rests on the caller's word."""
        named = (("L_orth", self.l_orth), ("Lg", self.l_g))
        return tuple(CALLER.format(name, value) for name, value in named if value is not None)


@dataclass(frozen=True)
class Verdict:
    """Y_i and Delta_i Y_i [N] and the bound, or the sentence that refuses them."""

    l_orth: float | None
    exposures: np.ndarray | None = None
    certificates: np.ndarray | None = None
    bound: Bound | None = None
    refusal: str = ""


def judge(case: Case) -> Verdict:
    """What the theory promises of this run."""
    l_orth = None
    try:
        _require_covered(case)
        l_orth = map_constant(case) if case.l_orth is None else case.l_orth
        return _certified(case, l_orth)
    except InputError as error:
        return Verdict(l_orth, refusal=str(error))


def map_constant(case: Case) -> float:
    """L_orth of the configured map, of the configured kind (`fedmuon.orthogonalize.lipschitz`)."""
    table, stability = case.config.orthogonalizer, case.config.stability
    if table.name == "gaussian-smoothed-sign" and case.shape is None:
        raise InputError("The smoothed sign's constant depends on the model's shape: give L_orth.")
    parameters: dict[str, dict[str, Any]] = {
        "smoothed-polar": {"lam": table.lambda_},
        "clipped-sign": {"gamma": table.gamma},
        "newton-schulz": {
            "steps": table.steps,
            "coefficients": table.coefficients,
            "eps": table.eps,
            "normalization": table.normalization,
        },
        "gaussian-smoothed-sign": {
            "sigma": table.sigma,
            "alpha": stability.alpha_smoothing,
            "calls": _calls(case.config),
            "shape": case.shape,
        },
    }
    found = lipschitz(table.name, stability.kind, **parameters.get(table.name, {}))
    if not math.isfinite(found):
        raise Uncertified("The printed constant of this map overflows: use [stability] kind sharp.")
    return found


def _calls(config: Config) -> int:
    """T_sign = R E K (001, Corollary D.11)."""
    federation = config.federation
    return federation.rounds * config.local.steps * federation.per_round


def _is_aligned(case: Case) -> bool:
    return case.config.local.recipe == "fedmuon-aligned"


def _require_covered(case: Case) -> None:
    recipe = case.config.local.recipe
    if recipe not in ("fedmuon", "fedmuon-aligned"):
        raise Uncertified(
            f"The recursion of 001 follows a model and a momentum that the server averages, which "
            f"recipe {recipe} does not do: it has no certificate, use fedmuon or fedmuon-aligned."
        )
    if _is_aligned(case) and case.config.local.batch:
        raise Uncertified(
            "Alignment (Remark 3.2) is certified for full batches only: set [local] batch = 0."
        )
    if case.dropped:
        raise Uncertified(
            "A participant dropped out of some round, which no schedule drawn in advance covers: "
            "run with [faults] policy strict."
        )


def _certified(case: Case, l_orth: float) -> Verdict:
    """001, Theorem 4.1 with Corollary 4.2, Corollary 4.3, Theorem J.1 or Remark 3.2."""
    run, stability = case.run, case.config.stability
    exposures, moved = _aligned(case, l_orth) if _is_aligned(case) else _plain(case, l_orth)
    assumed, failure = _assumed(case)
    found = analysis.bound(
        analysis.loss_stability(moved, run.constants.lipschitz, run.constants.loss_bound),
        run.sizes,
        run.weights,
        stability.delta,
        run.constants.loss_bound,
        stability.c_hp,  # type: ignore[arg-type]
        status="estimated" if case.given else "certified",
        assumptions=assumed,
        other_failure=failure,
    )
    return Verdict(l_orth, exposures, moved, found)


def _assumed(case: Case) -> tuple[tuple[str, ...], float]:
    """What the bound stands on, and how often it fails beyond delta: failures add up."""
    part, failure = case.participation, 0.0
    assumed = [INDEPENDENCE, RANGE, says.LIPSCHITZ_LOSS, says.GRADIENTS, says.COUPLING]
    if case.config.orthogonalizer.name == "gaussian-smoothed-sign" and case.l_orth is None:
        assumed, failure = [*assumed, says.NO_CLIPPING], case.config.stability.alpha_smoothing
    else:
        assumed.append(says.GLOBAL_MAP)
    if isinstance(part, Uniform) and part.per_round < len(case.sizes):
        assumed, failure = [*assumed, says.UNIFORM], failure + part.rho
    return (*assumed, *([ALIGNED] if _is_aligned(case) else []), *case.given), failure


def _plain(case: Case, l_orth: float) -> tuple[np.ndarray, np.ndarray]:
    """Y_i (or Y_i^mb, or Psi) and Delta_i Y_i, each [N]."""
    run, part = case.run, case.participation
    moved = analysis.certificate(run, l_orth, part)
    drawn = isinstance(part, Realized) and part.rows is not None
    return moved / (2 * run.constants.gradient_bound if drawn else sensitivity(run)), moved


def _aligned(case: Case, l_orth: float) -> tuple[np.ndarray, np.ndarray]:
    """The same with alignment, where a_s is that of `analysis.alignment`."""
    run, part, clients = case.run, case.participation, len(case.sizes)
    a = analysis.aligned_amplification(
        run.lr, run.beta, l_orth, run.constants.smoothness, run.rounds, run.local_steps,
        case.config.local.alignment,
    )  # fmt: skip
    if isinstance(part, Realized):
        exposures = analysis.exposure(a, part.schedule, clients)
    else:
        exposures = np.full(clients, analysis.psi(a, clients, part.per_round, part.rho))
    return exposures, analysis.perturbation(sensitivity(run), exposures)


def find(folder: Path | None, changes: list[str], given: dict[str, Any]) -> Case:
    """The case that the command line describes; `given` holds size, rho, l_orth and l_g."""
    named = {name: value for name, value in given.items() if value is not None}
    for name in {"l_orth", "l_g"} & set(named):
        at_least(name, named[name])
    if folder is None:
        sizes = whole("size", named.pop("size", 200))
        config = tables.load(None, ["data.train=1_000_000_000", "data.minimum=1", *changes])
        return from_parameters(config, sizes, **named)
    own = [change for change in changes if not change.startswith("stability.")]
    if own or "size" in named:
        raise InputError(
            f"{folder} has its own parameters: beside a run directory give only --delta, --c-hp, "
            "--kind, --rho, --l-orth or --l-g"
        )
    rho = named.pop("rho", None)
    return dataclasses.replace(from_directory(folder, changes, rho), **named)


def from_parameters(
    config: Config,
    size: int,
    rho: float = 0.01,
    l_orth: float | None = None,
    l_g: float | None = None,
) -> Case:
    """N clients of `size` samples each, on any schedule that is drawn uniformly."""
    sizes, per_round = np.full(config.federation.clients, size), config.federation.per_round
    return Case(config, sizes, Uniform(per_round, rho), None, l_orth, l_g)


def from_directory(
    folder: Path, changes: list[str] | tuple[str, ...] = (), rho: float | None = None
) -> Case:
    """A run that was made, on its schedule as drawn; with rho, on any uniform schedule."""
    if not (folder / "config.toml").exists():
        raise InputError(f"{folder} holds no config.toml and is no run directory: check the path")
    config = tables.load(folder / "config.toml", changes)
    plan = setup.plan(config)
    try:
        with np.load(folder / "partition.npz") as split:
            sizes = np.bincount(split["client"], minlength=plan.clients)
        realized = Realized(np.load(folder / "schedule.npy"), plan.rows if plan.batch else None)
        weight = read_tensors(folder / "initial.safetensors")[0]["weight"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{folder} is damaged ({error}): make the run afresh") from None
    part = realized if rho is None else Uniform(plan.per_round, rho)
    dropped = any("dropped" in record for record in RunDirectory(folder).records())
    return Case(config, sizes, part, (weight.shape[0], weight.shape[1]), dropped=dropped)


def report(case: Case, verdict: Verdict) -> Record:
    """The verdict as one JSON object; what a refused bound has no number for is null."""
    run, stability, found = case.run, case.config.stability, verdict.bound
    return {
        **{name: getattr(found, name, None) for name in ("value", "h", "g", "failure")},
        "delta": stability.delta,
        "c_hp": stability.c_hp,
        "kind": stability.kind if case.l_orth is None else "given",
        "l_orth": verdict.l_orth,
        "n_eff": effective_size(run.sizes, run.weights),
        "max_exposure": _largest(verdict.exposures),
        "max_certificate": _largest(verdict.certificates),
        "status": found.status if found else "refused",
        "assumptions": list(found.assumptions) if found else [],
        "refusal": verdict.refusal,
    }


def _largest(every: np.ndarray | None) -> float | None:
    """The maximum; none where it overflowed, as JSON has no infinity."""
    return float(every.max()) if every is not None and np.isfinite(every).all() else None


def constant_of(record: Record) -> str:
    """The constants that a bound stands on, to stand beside it."""
    return f"C_hp = {record['c_hp']}, {record['kind']} L_orth"


def table(record: Record) -> Table:
    """The same for people."""
    shown = Table("", "", title=escape(f"bound with {constant_of(record)}"), title_justify="left")
    names = ("value", "h", "g", "delta", "failure", "n_eff", "l_orth", "max_exposure",
             "max_certificate", "status")  # fmt: skip
    for name in names:
        held = record[name]
        shown.add_row(name, f"{held:.6g}" if isinstance(held, float) else escape(str(held or "-")))
    for number, sentence in enumerate(record["assumptions"]):
        shown.add_row("" if number else "assumes", escape(sentence))
    if (record["value"] or 0) >= 1:
        shown.add_row("note", "vacuous: no gap exceeds 1, the largest loss")
    if record["refusal"]:
        shown.add_row("why", escape(record["refusal"]))
    return shown
