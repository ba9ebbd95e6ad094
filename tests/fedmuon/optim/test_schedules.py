"""Schedules: certificates against neighbours and runs (the recursion is tested in analysis)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from brought import PLAIN, tables

import fedmuon
from fedmuon import analysis
from fedmuon.core.errors import InputError
from fedmuon.tasks.constants import constants

pytestmark = pytest.mark.usefixtures("runs_apart")


SCHEDULES = {
    "cosine": {"schedule": "cosine"},
    "warm cosine": {"schedule": "cosine", "options": {"warm": 1, "floor": 0.2}},
    "step": {"schedule": "step", "options": {"every": 3, "factor": 0.1}},
    "warm-up": {"schedule": "warm-up", "options": {"warm": 4}},
    "own": {"schedule": lambda round: 4.0},
}


def census(schedule: dict[str, Any]) -> tuple[fedmuon.StabilityResult, np.ndarray, np.ndarray]:
    """All neighbours of a run with samples +-e_1, for which the constants are tight."""
    rng = np.random.default_rng(0)
    data = rng.choice([-1.0, 1.0], (40, 1)) * np.eye(1, 200), rng.integers(0, 2, 40)
    run = fedmuon.stability(
        {
            "data": {"train": 20, "test": 20, "minimum": 2},
            "federation": {"clients": 2, "per-round": 1, "rounds": 4, "partition": "iid"},
            "local": {"lr": 1e-3, "steps": 2, **schedule},
            "engine": {"device": "cpu"},
        },
        data=data, neighbours="all", orthogonalizer=fedmuon.Orthogonalizer(lambda m: m, 1.0),
    )  # fmt: skip
    found = [np.array([row[name] for row in run.neighbours]) for name in ("perturbation", "client")]
    return run, found[0], found[1].astype(int)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_scheduled_certificate_holds_and_is_not_idle(name: str) -> None:
    """Negative controls: half of the certificate, or one without the factors, is exceeded."""
    run, moved, client = census(SCHEDULES[name])
    promised = np.array([row["certificate"] for row in run.neighbours])
    assert run.bound["status"] == "claimed"
    assert (moved <= promised).all() and (moved > promised / 2).any()
    if name != "own":
        return
    with np.load(run.path / "partition.npz") as held:
        sizes = np.bincount(held["client"])
    part = analysis.Realized(np.load(run.path / "schedule.npy"))
    what = analysis.Run(1e-3, 0.9, 4, 2, sizes, sizes / 20, constants(), factors=np.full(4, 4.0))
    own = analysis.certificate(what, 1.0, part)[client]
    np.testing.assert_allclose(own, promised, rtol=1e-9)  # less rounding
    without = analysis.certificate(replace(what, factors=None), 1.0, part)[client]
    assert (moved > without).any()


def weights(lr: float, rounds: int, schedule: Any = None) -> np.ndarray:
    """Where gradient steps of that size lead."""
    config = tables(local={"lr": lr}, federation={"rounds": rounds})
    return fedmuon.run(config, **PLAIN, partition="iid", schedule=schedule).model["weight"].numpy()


def test_a_schedule_is_what_lr_is_times() -> None:
    """Half of lr in all rounds is half lr; 1, then 0, is one round."""
    half = weights(0.1, 3, lambda round: 0.5)
    np.testing.assert_allclose(half, weights(0.05, 3), rtol=1e-12)
    once = weights(0.1, 2, lambda round: 1.0 - round)
    np.testing.assert_allclose(once, weights(0.1, 1), rtol=1e-12)
    assert np.abs(once - weights(0.1, 2)).max() > 1e-6


def test_the_bound_of_a_result_knows_what_was_handed_over() -> None:
    given = {
        "federation": {"clients": 4, "per-round": 2, "rounds": 3},
        "local": {"lr": 0.01, "steps": 1},
        "data": {"name": "synthetic", "train": 60, "test": 20, "minimum": 2},
        "engine": {"dtype": "float64"},
    }
    constant = fedmuon.bound(fedmuon.run(given))
    less = fedmuon.bound(fedmuon.run(given, schedule=lambda round: 0.1))
    assert less["status"] == "certified" and less["max_certificate"] < constant["max_certificate"]


@pytest.mark.parametrize(("rounds", "warm", "floor"), [(1, 0, 0.0), (20, 1, 0.0), (7, 3, 0.25)])
def test_a_cosine_after_a_warm_up(rounds: int, warm: int, floor: float) -> None:
    """Against torch's own two schedules, one after the other; without `warm` it starts at 1."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds - warm, eta_min=floor)
    wanted = [(round + 1) / (warm + 1) for round in range(warm)]
    for _ in range(rounds - warm):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        fall.step()
    made = fedmuon.schedules.cosine(rounds, floor=floor, warm=warm)
    assert [made(round) for round in range(rounds)] == pytest.approx(wanted, abs=1e-14)
    cold = fedmuon.schedules.cosine(rounds, floor=floor)
    assert cold(0) == 1.0 and (not warm or cold(1) < 1.0)


@pytest.mark.parametrize("warm", [-1, 4, 5])
def test_a_warm_up_that_leaves_no_round_is_rejected(warm: int) -> None:
    with pytest.raises(InputError, match=f"warm = {warm} is not valid.* 4 rounds of the run"):
        fedmuon.run({"local": {"schedule": "cosine", "options": {"warm": warm}},
                     "federation": {"rounds": 4}})  # fmt: skip


@pytest.mark.parametrize("recipe", ["dp-sgd", "disk-sgd"])
def test_a_private_run_takes_its_step_size_by_round(recipe: str) -> None:
    """Of two rounds the second has half of lr: the run of a schedule that says so ends alike."""
    given = {
        "data": {"name": "synthetic", "train": 40, "test": 20, "minimum": 2},
        "federation": {"clients": 1, "per-round": 1, "rounds": 2},
        "local": {"recipe": recipe, "lr": 0.5, "steps": 2},
        "privacy": {"noise": 1.0, "lot": 8.0, "clipping": "automatic-flat",
                    "insecure-reproducible-noise": True},
        "engine": {"dtype": "float64"},
    }  # fmt: skip
    ends = [
        fedmuon.run(given, schedule=how).model["weight"].numpy()
        for how in ("cosine", lambda round: (1.0, 0.5)[round], "constant")
    ]
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-12)
    assert np.abs(ends[0] - ends[2]).max() > 1e-3
