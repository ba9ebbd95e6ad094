"""`fedmuon bound`: the Stability note's (001) Theorem 4.1 as a number, with what it stands on.

A bound from parameters needs NumPy only. A run directory is read by `finished_run.py`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedmuon.analysis import Uniform
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.theory.checks import at_least, probability, whole
from fedmuon.analysis.theory.generalization import effective_size
from fedmuon.analysis.theory.recursion import OVERFLOW
from fedmuon.analysis.theory.trajectories import Start
from fedmuon.config.load import Config, load
from fedmuon.config.user_objects import schedule_of
from fedmuon.core.errors import InputError
from fedmuon.core.files import finite
from fedmuon.experiments.stability.certify import (
    Certificate,
    CertifiedSetting,
    certify,
)
from fedmuon.experiments.tables import BALL_NAMES, BOUND_NAMES, facts, listed
from fedmuon.federated.plan import RandomnessPlan

IMAGES = ("mnist5k", "mnist", "fashion-mnist", "cifar10", "digits")  # of ten classes

__all__ = ["Certificate", "CertifiedSetting", "certify", "constant_of", "find", "from_parameters",
           "in_doubles", "report", "table"]  # fmt: skip


def find(folder: Path | None, changes: list[str], given: dict[str, Any]) -> CertifiedSetting:
    """The setting that the command line describes; `given` holds size, rho, l_orth and l_g."""
    named = {name: value for name, value in given.items() if value is not None}
    for name in {"l_orth", "l_g"} & set(named):
        at_least(name, named[name])
    if folder is None:
        size = named.pop("size", 200)
        config = load(None, ["data.train=1_000_000_000", "data.minimum=1", *changes])
        return from_parameters(config, size, **named)
    own = [change for change in changes if not change.startswith("stability.")]
    if own or "size" in named:
        raise InputError(
            f"{folder} has its own parameters: beside a run directory give only --delta, --c-hp, "
            "--kind, --constants, --rho, --l-orth or --l-g"
        )
    # It imports torch, which a bound from parameters does without.
    from fedmuon.experiments.stability.finished_run import from_directory

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
) -> CertifiedSetting:
    """N clients of `size` samples each, on any schedule that is drawn uniformly.

    It is in float64, unless the config names a precision.
    """
    size, rho = whole("size", size), probability("rho", rho)
    of = config.federation
    plan = RandomnessPlan(of.seed, of.clients, of.per_round, of.rounds, factor=schedule_of(config))
    sizes, part = np.full(of.clients, size), Uniform(of.per_round, rho)
    classes = {**dict.fromkeys(IMAGES, 10), "synthetic": config.data.classes}.get(config.data.name)
    known = classes and config.task.name == "matrix" and config.task.initial == "zero"
    return CertifiedSetting(
        in_doubles(config), sizes, part, None, l_orth, l_g, factors=plan.factors(),
        start=Start(classes) if known else None,
    )  # fmt: skip


def report(case: CertifiedSetting, certificate: Certificate) -> dict[str, Any]:
    """The certificate as one JSON object; numbers that a refused bound lacks are null."""
    run, stability, found = case.run, case.config.stability, certificate.bound
    top = run.constants.loss_bound
    violation = certificate.violation(case.moved)
    exposures, promised = certificate.exposures, certificate.certificates
    kinds: dict[str, dict[str, float | None]] = {}
    for kind in ("paper", "sharp") if case.l_orth is None else ():
        other = certify(case.under(lipschitz=kind))
        kinds[kind] = {"l_orth": other.l_orth, "value": other.bound.value if other.bound else None}
    status = found.status if found else certificate.status
    return {
        **{name: finite(getattr(found, name, None)) for name in ("value", "h", "g", "failure")},
        "delta": stability.delta,
        "c_hp": stability.c_hp,
        "kind": stability.lipschitz if case.l_orth is None or case.constants else "given",
        "constants": "ball" if case.reach else "observed" if case.constants else "global",
        "radius": finite(case.reach.radius) if case.reach else None,
        "range": finite(top),
        "share": finite(found.value / top) if found and top else None,
        "l_orth": certificate.l_orth,
        "kinds": kinds,
        "n_eff": found.n_eff if found else effective_size(run.sizes, run.weights),
        "max_exposure": None if exposures is None else finite(exposures.max()),
        "max_certificate": None if promised is None else finite(promised.max()),
        "status": "violated" if violation else status,
        "violation": finite(violation),
        "assumptions": list(found.assumptions) if found else [],
        "note": _note(case, certificate),
        "refusal": certificate.refusal,
    }


def _note(case: CertifiedSetting, certificate: Certificate) -> str:
    """Why a bound says nothing, or of which clients nothing is known; may be empty."""
    found, clients, top = certificate.bound, len(case.sizes), case.run.constants.loss_bound
    if violation := certificate.violation(case.moved):
        return (
            f"A neighbour moved the model by {number(violation)} times its certificate: what the "
            "bound assumes does not hold of this run, so it promises nothing."
        )
    if found is None or certificate.exposures is None:
        return certificate.scope
    lost = np.count_nonzero(np.isinf(certificate.exposures))
    if lost and found.value >= top:
        return (
            f"The bound is vacuous (eps_i = B for {lost} of {clients} clients), because {OVERFLOW}"
        )
    if lost:
        return f"{lost} of {clients} clients count with the trivial eps_i = B, because {OVERFLOW}"
    return f"The bound is vacuous: no gap exceeds B = {top:g}." if found.value >= top else ""


def constant_of(record: dict[str, Any]) -> str:
    """The constants that a bound stands on."""
    return f"C_hp = {record['c_hp']}, {record['kind']} L_orth, {record['constants']} constants"


def table(record: dict[str, Any]) -> Table:
    """The record as a table to read."""
    named = (BOUND_NAMES | BALL_NAMES | {"status": "status"}).items()
    rows = [(words, "-" if record[name] is None else record[name]) for name, words in named]
    for kind, other in record["kinds"].items():
        if kind != record["kind"] and other["l_orth"] != record["l_orth"]:
            constant = "-" if other["l_orth"] is None else number(other["l_orth"], 6)
            value = "-" if other["value"] is None else number(other["value"], 6)
            rows.append((f"with its {kind} constant", f"bound {value}, constant {constant}"))
    rows += [*listed("assumes", record["assumptions"]), ("note", record["note"])]
    return facts(f"bound with {constant_of(record)}", [*rows, ("why", record["refusal"])])
