"""`fedmuon bound`: Theorem 4.1 of 001 as a number, from parameters or from a run directory.

From parameters it needs numpy only; torch is loaded to read a run.
"""

import dataclasses
import zipfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedmuon.analysis import Realized, Uniform
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.theory.checks import at_least, probability, whole
from fedmuon.analysis.theory.generalization import effective_size
from fedmuon.analysis.theory.recursion import OVERFLOW
from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.config.user_objects import NAMED, NOTHING, Own, schedule_of
from fedmuon.core import files
from fedmuon.core.choices import GIVEN
from fedmuon.core.errors import InputError
from fedmuon.core.files import finite
from fedmuon.experiments.stability.certified_setting import Case
from fedmuon.experiments.stability.certify import Verdict, by_kind, judge
from fedmuon.experiments.stability.reachable_ball import source_of, start_of, start_without_a_run
from fedmuon.experiments.tables import BALL_NAMES, BOUND_NAMES, facts, listed
from fedmuon.federated.plan import RandomnessPlan

CENSUS = "neighbours.csv"

__all__ = ["Case", "Verdict", "constant_of", "find", "from_directory", "from_parameters",
           "in_doubles", "judge", "largest_moves", "read_census", "report", "table"]  # fmt: skip


def find(folder: Path | None, changes: list[str], given: dict[str, Any]) -> Case:
    """The case that the command line describes; `given` holds size, rho, l_orth and l_g."""
    named = {name: value for name, value in given.items() if value is not None}
    for name in {"l_orth", "l_g"} & set(named):
        at_least(name, named[name])
    if folder is None:
        size = named.pop("size", 200)
        config = tables.load(None, ["data.train=1_000_000_000", "data.minimum=1", *changes])
        return from_parameters(config, size, **named)
    own = [change for change in changes if not change.startswith("stability.")]
    if own or "size" in named:
        raise InputError(
            f"{folder} has its own parameters: beside a run directory give only --delta, --c-hp, "
            "--kind, --constants, --rho, --l-orth or --l-g"
        )
    rho = named.pop("rho", None)
    return dataclasses.replace(from_directory(folder, changes, rho), **named)


def in_doubles(config: Config) -> Config:
    """The config in float64, unless it names a precision: rounding hides small perturbations."""
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
) -> Case:
    """N clients of `size` samples each, on any schedule that is drawn uniformly; in float64, unless
    a precision is named."""
    size, rho = whole("size", size), probability("rho", rho)
    of = config.federation
    plan = RandomnessPlan(of.seed, of.clients, of.per_round, of.rounds, factor=schedule_of(config))
    sizes, part = np.full(of.clients, size), Uniform(of.per_round, rho)
    return Case(
        in_doubles(config), sizes, part, None, l_orth, l_g, factors=plan.factors(),
        start=start_without_a_run(config),
    )  # fmt: skip


def from_directory(
    folder: Path,
    changes: list[str] | tuple[str, ...] = (),
    rho: float | None = None,
    given: Own = NOTHING,
) -> Case:
    """A run that was made, on its schedule as drawn; with rho, on any uniform schedule."""
    from fedmuon.core.arrays import read_tensors
    from fedmuon.federated import build_recipe
    from fedmuon.federated.build import build_plan
    from fedmuon.runs import fingerprints
    from fedmuon.runs.directory import RunDirectory

    if not (folder / "config.toml").exists():
        raise InputError(f"{folder} holds no config.toml and is no run directory: check the path")
    run = RunDirectory(folder)
    run.require_sound()
    config = tables.load(folder / "config.toml", changes).beside(given)
    _require_given(config, folder)
    there = fingerprints.require_same(folder, fingerprints.described(config, folder))
    plan, _ = fingerprints.with_factors(build_plan(config), config, there)
    try:
        with np.load(files.require_regular(folder / "partition.npz")) as split:
            sizes = np.bincount(split["client"], minlength=plan.clients)
        schedule = np.load(files.require_regular(folder / "schedule.npy"))
        realized = Realized(schedule, plan.rows if plan.batch else None)
        start = read_tensors(folder / "initial.safetensors")[0]
        shape = start["weight"].shape[:2] if config.task.name == "matrix" else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{folder} is damaged ({error}): make the run afresh") from None
    part = realized if rho is None else Uniform(plan.per_round, probability("rho", rho))
    dropped = any("dropped" in record for record in run.records())
    stopped = str((run.summary() or {}).get("stopped", ""))
    l_own = None if (own_map := build_recipe.user_map(config)) is None else own_map.lipschitz
    case = Case(
        config, sizes, part, shape, l_map=l_own, dropped=dropped, stopped=stopped,
        factors=plan.factors(), moved=_largest_moves(folder, plan.clients),
        start=start_of(start["weight"].numpy(), source_of(config, folder)) if shape else None,
    )  # fmt: skip
    if config.orthogonalizer.name == "exact-sign" and config.task.name == "matrix":
        from fedmuon.experiments.stability.singular_values import smallest

        return dataclasses.replace(case, gaps=cache(partial(smallest, folder, given)))
    if config.task.name == "matrix":
        return case
    from fedmuon.experiments.stability.network_constants import with_estimates

    return with_estimates(case, folder)


def _require_given(config: Config, folder: Path) -> None:
    """Refuse a run of objects that only its caller has."""
    held = [
        f"[{table}] {key}"
        for kind, (table, key) in NAMED.items()
        if getattr(getattr(config, table), key) == GIVEN and getattr(config.given, kind) is None
    ]
    if held:
        raise InputError(
            f"{' and '.join(held)} of {folder} was handed over in Python: there, "
            "fedmuon.bound(result) has the bound, of what fedmuon.run returned, or returns again "
            "with resume=True and the same objects"
        )


def _largest_moves(folder: Path, clients: int) -> np.ndarray | None:
    """The largest perturbation of each client's neighbours [N], where all of them were run."""
    if CENSUS not in files.sums_of(folder):
        return None
    files.require_sound(folder, [CENSUS])
    return largest_moves(folder / CENSUS, clients)


def read_census(census: Path, usecols: Sequence[int] | None = None) -> np.ndarray:
    """The numbers of a neighbours.csv, one row for each neighbour."""
    with open(census, encoding="utf-8", opener=files.regular) as file:
        return np.loadtxt(file, delimiter=",", skiprows=1, usecols=usecols, ndmin=2)


def largest_moves(census: Path, clients: int) -> np.ndarray:
    """The same of a neighbours.csv."""
    columns = read_census(census, usecols=(1, 4))
    moved = np.zeros(clients)
    np.maximum.at(moved, columns[:, 0].astype(int), columns[:, 1])
    return moved


def report(case: Case, verdict: Verdict) -> dict[str, Any]:
    """The verdict as one JSON object; what a refused bound has no number for is null."""
    run, stability, found = case.run, case.config.stability, verdict.bound
    top = run.constants.loss_bound
    violation = verdict.violation(case.moved)
    status = "violated" if violation else found.status if found else verdict.status
    return {
        **{name: finite(getattr(found, name, None)) for name in ("value", "h", "g", "failure")},
        "delta": stability.delta,
        "c_hp": stability.c_hp,
        "kind": stability.lipschitz if case.l_orth is None or case.constants else "given",
        "constants": "ball" if case.reach else "observed" if case.constants else "global",
        "radius": finite(case.reach.radius) if case.reach else None,
        "range": finite(top),
        "share": finite(found.value / top) if found and top else None,
        "l_orth": verdict.l_orth,
        "kinds": by_kind(case),
        "n_eff": found.n_eff if found else effective_size(run.sizes, run.weights),
        "max_exposure": _largest(verdict.exposures),
        "max_certificate": _largest(verdict.certificates),
        "status": status,
        "violation": finite(violation),
        "assumptions": list(found.assumptions) if found else [],
        "note": _note(case, verdict),
        "refusal": verdict.refusal,
    }


def _note(case: Case, verdict: Verdict) -> str:
    """What to know of a bound that says nothing, or of clients of whom nothing is known."""
    found, clients, top = verdict.bound, len(case.sizes), case.run.constants.loss_bound
    if violation := verdict.violation(case.moved):
        return (
            f"A neighbour moved the model by {number(violation)} times its certificate: what the "
            "bound assumes does not hold of this run, so it promises nothing."
        )
    if found is None or verdict.exposures is None:
        return verdict.scope
    lost = np.count_nonzero(np.isinf(verdict.exposures))
    if lost and found.value >= top:
        return (
            f"The bound is vacuous (eps_i = B for {lost} of {clients} clients), because {OVERFLOW}"
        )
    if lost:
        return f"{lost} of {clients} clients count with the trivial eps_i = B, because {OVERFLOW}"
    return f"The bound is vacuous: no gap exceeds B = {top:g}." if found.value >= top else ""


def _largest(every: np.ndarray | None) -> float | None:
    return None if every is None else finite(every.max())


def constant_of(record: dict[str, Any]) -> str:
    """The constants that a bound stands on, to stand beside it."""
    return f"C_hp = {record['c_hp']}, {record['kind']} L_orth, {record['constants']} constants"


def table(record: dict[str, Any]) -> Table:
    """The same for people."""
    named = (BOUND_NAMES | BALL_NAMES | {"status": "status"}).items()
    rows = [(words, "-" if record[name] is None else record[name]) for name, words in named]
    for kind, other in record["kinds"].items():
        if kind != record["kind"] and other["l_orth"] != record["l_orth"]:
            constant = "-" if other["l_orth"] is None else number(other["l_orth"], 6)
            value = "-" if other["value"] is None else number(other["value"], 6)
            rows.append((f"with its {kind} constant", f"bound {value}, constant {constant}"))
    rows += [*listed("assumes", record["assumptions"]), ("note", record["note"])]
    return facts(f"bound with {constant_of(record)}", [*rows, ("why", record["refusal"])])
