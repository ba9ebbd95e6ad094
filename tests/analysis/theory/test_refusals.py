"""Every formula of the theory answers, or refuses in one sentence, whatever numbers it is given.

Formulas are discovered, and called with one number of one argument replaced by a bad one. What they
are called with otherwise goes by the names of their parameters: a new formula is tried if these are
known, and else this says which one is to be added.
"""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedmuon import analysis
from fedmuon.analysis import theory
from fedmuon.analysis.theory.corollaries import Run, Uniform
from fedmuon.analysis.theory.generalization import Bound, bound
from fedmuon.analysis.theory.private_stationarity import Disk, Release
from fedmuon.analysis.theory.recursion import Method
from fedmuon.analysis.theory.stationarity import Noise, Schedule
from fedmuon.analysis.theory.system_costs import Message
from fedmuon.analysis.theory.trajectories import Start
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import Uncertified
from fedmuon.tasks.constants import Constants

BAD = (0, -1, math.nan, math.inf, -math.inf, 1e308, 1e-308)
HALVES = np.array([0.5, 0.5])
CHOSEN = np.array([[0, 1], [1, 0], [0, 1]])  # R = 3, K = N = 2; E = 1
RUN = Run(0.1, 0.9, 3, 1, np.array([4, 4]), HALVES, Constants(1.0, 0.4, 0.4, 0.2))
GIVEN: dict[str, Any] = {
    # of all formulas that name them
    "steps": 400, "rounds": 3, "local_steps": 1, "clients": 2, "per_round": 2, "sizes": [4, 5],
    "weights": HALVES, "schedule": CHOSEN, "sensitivity": HALVES, "factors": np.ones(3),
    "rates": np.full(3, 0.1), "samples": 5, "batch": 2, "alpha": 1.5, "run": RUN, "name": "number",
    "participation": Uniform(2, 0.1), "noise": Noise(2.0, 1.0), "shape": (3, 4), "rank": 3,
    "one": Disk(0.01, 100, 0.5, sigma=1.0, batch=2.0), "release": Release(1.0, 1.0, 4.0, (3, 4)),
    "plan": Schedule(0.1, 0.9, 5, "given"), "method": Method(0.9), "start": Start(3),
    "coefficients": "cubic", "polynomial": {"steps": 2, "coefficients": "cubic", "eps": 0.1},
    "c_hp": "explicit", "leaving": {0: 1},
    "growth": math.sqrt, "value": 0.5, "size": 2,
    "smallest": np.full((3, 1, 2), 9.0), "norms": np.full((3, 1, 2), 9.0),
    "errors": np.full((3, 1, 2), 0.1), "given": [4.0, 5.0], "eps": HALVES, "a": np.ones(3),
    "l_g": 0.2, "scale": 1.0, "lr": 0.1,
    "exposures": HALVES, "perturbations": HALVES, "rows": lambda s, i, k, n: np.array([0]),
    "train_losses": HALVES, "test_losses": HALVES, "test_labels": [0, 1], "losses": HALVES,
    "shares": np.eye(2), "labels": np.array([0, 1]), "owner": [0, 1], "class_weight": HALVES,
    "certificates": HALVES, "found": bound(HALVES, [4, 5], HALVES, 0.1), "increment": np.eye(2),
    "amplified": np.ones(3), "factor": HALVES, "fan_out": 2, "of": Message(1, 1, 1), "q": 2,
}  # fmt: skip
ALONE: dict[str, dict[str, Any]] = {  # of one formula
    "batch_exposure": {"steps": np.ones((3, 1)), "shares": None},
    "bound": {"shares": (0.5, 0.5)},
    "clopper_pearson": {"errors": 2},
    "change_limit": {"changes": HALVES},
    "contraction": {"shape": (3, 4)}, "dp_muon": {"schedule": Schedule(0.1, 0.9, 5, "given")},
    "exposure": {"shares": None}, "tube_certificate": {"lr": 0.1, "l_g": 0.1},
    "gaussian_smoothed_sign": {"alpha": 0.5, "shape": (30, 3)},
    "moment": {"r": 2.5},
    "difference_moment": {"r": 2.5}, "heavy_tailed": {"alpha": 1.5}, "rate": {"alpha": 1.5},
    "tail_index": {"alpha": 1.5},
    "path_certificate": {"shares": None, "lr": 0.1, "l_g": 0.1, "scale": 1.0},
    "muon": {"schedule": Schedule(0.1, 0.9, 5, "given")},
    "sgd_momentum": {"schedule": Schedule(0.001, 0.9, 5, "given")},
    "theorem": {"shares": (0.5, 0.5)}, "theorem_5": {"steps": 10**6},
    "nesterov_muon": {"start": None, "schedule": Schedule(0.1, 0.9, 5, "given")},
    "disk": {"start": "first"}, "svd_flops": {"rows": 4}, "least_efficiency": {"slowdown": 2.0},
    "horner_flops": {"steps": 5, "rows": 4}, "speedup": {"steps": 5, "rows": 4},
    "largest_output": {"steps": 2}, "probe_error": {"steps": 2}, "norm_tube": {"steps": 2},
    "scalar_obstruction": {"steps": 2, "slope": 0.3, "loss_bound": 1.0},
    "corollary_4": {"steps": 10**4},
}  # fmt: skip


def formulas() -> Iterator[tuple[str, Callable]]:
    """The public functions of the theory that are exported, or that numbers alone are given to."""
    for module in pkgutil.iter_modules(theory.__path__):
        home = importlib.import_module(f"{theory.__name__}.{module.name}")
        for name, value in vars(home).items():
            own = inspect.isfunction(value) and value.__module__ == home.__name__
            if own and name[0] != "_" and module.name != "checks" and is_tried(name, value):
                yield f"{module.name}.{name}", value


def is_tried(name: str, value: Callable) -> bool:
    if name in analysis.__all__ and value is getattr(analysis, name):
        return True
    return all(map(is_number, parameters(value).values()))


def parameters(formula: Callable) -> dict[str, inspect.Parameter]:
    every = inspect.signature(formula).parameters.items()
    return {name: one for name, one in every if one.kind is not one.VAR_KEYWORD}


def is_number(one: inspect.Parameter) -> bool:
    """Whether no arrays, lists, functions or finished runs go there."""
    others = ("ndarray", "Buffer", "Array", "list", "Callable", "Mapping", "Path", "Bound", "Reach")
    return not any(word in str(one.annotation) for word in others)


FORMULAS = dict(formulas())


def good(name: str) -> dict[str, Any]:
    """Arguments that it answers."""
    found = {}
    for key, one in parameters(FORMULAS[name]).items():
        if one.annotation is float:
            found[key] = 0.5
        elif key in GIVEN:
            array = one.annotation is np.ndarray
            found[key] = np.asarray(GIVEN[key]) if array else GIVEN[key]
        else:
            found[key] = 4 if one.annotation is int else one.default
    return found | ALONE.get(name.split(".")[1], {})


def spoiled(value: Any) -> Iterator[Callable[[], Any]]:
    """It with a bad number in the place of one of its own; making that may be refused, too."""
    if type(value) in (int, float):
        yield from (partial(float, bad) if bad else int for bad in BAD)
    elif isinstance(value, np.ndarray):
        first = np.arange(value.size).reshape(value.shape) == 0
        every = [np.where(first | whole, bad, value) for bad in BAD for whole in (False, True)]
        yield from (partial(np.copy, one) for one in [*every, value[:0]])
    elif not isinstance(value, Bound):
        for key, one in parts(value).items():
            for bad in spoiled(one):
                yield partial(changed, value, key, bad)


def parts(value: Any) -> dict[Any, Any]:
    if is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


def changed(value: Any, key: Any, bad: Callable[[], Any]) -> Any:
    if isinstance(value, dict):
        return value | {key: bad()}
    if isinstance(value, (list, tuple)):
        return type(value)([*value[:key], bad(), *value[key + 1 :]])
    return replace(value, **{key: bad()})


def is_nan(value: Any) -> bool:
    if found := parts(value):
        return any(map(is_nan, found.values()))
    return isinstance(value, float | np.ndarray) and bool(np.isnan(value).any())


def complaint(formula: Callable, given: dict[str, Any], name: str, bad: Callable) -> str:
    """What is wrong with its answer, if anything is."""
    try:
        with np.errstate(all="ignore"):
            return f"{name}: a NaN" if is_nan(formula(**given | {name: bad()})) else ""
    except (InputError, Uncertified) as error:
        return "" if len(str(error)) > 20 and "\n" not in str(error) else f"{name}: {error}"
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"


def complaints(formula: Callable, given: dict[str, Any]) -> set[str]:
    every = {complaint(formula, given, name, bad) for name in given for bad in spoiled(given[name])}
    return every - {""}


@pytest.mark.parametrize("name", FORMULAS)
def test_it_answers_or_says_why_not(name: str) -> None:
    given = good(name)
    assert not is_nan(FORMULAS[name](**given)), "give it, in GIVEN or ALONE, what it answers"
    assert not complaints(FORMULAS[name], given)


def test_other_exceptions_and_nan_are_found() -> None:
    assert complaints(lambda gap: 1 / gap, {"gap": 1.0}) == {
        "gap: ZeroDivisionError: division by zero", "gap: a NaN",
    }  # fmt: skip
    assert len(FORMULAS) > 70
    assert {"private_stationarity.corollary_4", "recursion.psi"} <= set(FORMULAS)
