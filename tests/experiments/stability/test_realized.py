"""Certificates after the run: against naive loops, dense Hessians, and real neighbours."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small

from fedmuon.analysis.theory.trajectories import BEND, certificate, tube
from fedmuon.analysis.theory.trajectories import Path as Steps
from fedmuon.core.errors import InputError
from fedmuon.data.neighbours import draw
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import bound, realized
from fedmuon.experiments.stability.measure import Laboratory
from fedmuon.experiments.stability.neighbours import execute, perturbations
from fedmuon.federated.rounds import run_rounds
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask


def path(rng: np.random.Generator, spread: float) -> Steps:
    """3 of 5 clients in 4 rounds of 2 local steps, with factors of the step size."""
    schedule = np.stack([np.sort(rng.choice(5, 3, replace=False)) for _ in range(4)])
    shape = (4, 3, 2)
    return Steps(
        schedule, rng.uniform(0.05, 0.19, shape), spread * rng.uniform(0.1, 1, shape),
        rng.integers(5, 20, 5), 0.3 * rng.uniform(0.5, 1, 4), 0.8, 2.5, 0.19245,
    )  # fmt: skip


def by_hand(given: Steps, who: int) -> float:
    """The distance at the end, for a neighbour in one client, loop by loop."""
    x = m = 0.0
    radii = _radii(given)
    for r, chosen in enumerate(given.schedule):
        ends = []
        for k, client in enumerate(chosen):
            here, memory = x, m
            for e in range(2):
                smooth = min(given.curvature[r, k, e] + BEND * radii[r][k][e] / 2, given.l_g)
                moved = smooth * here
                if client == who:
                    moved += (given.spread[r, k, e] + 2 * given.l_g * here) / given.sizes[who]
                memory = given.beta * memory + (1 - given.beta) * moved
                here += given.steps[r] * given.l_orth * memory
            ends.append((here, memory))
        x, m = (sum(one[i] for one in ends) / 3 for i in (0, 1))
    return x


def _radii(given: Steps) -> list:
    """The largest distance of any of the 5 at each step, found by running all of them together."""
    state, out = dict.fromkeys(range(5), (0.0, 0.0)), []
    for r, chosen in enumerate(given.schedule):
        row, ends = [], {who: [] for who in range(5)}
        for k, client in enumerate(chosen):
            local, steps = dict(state), []
            for e in range(2):
                steps.append(max(x for x, _ in local.values()))
                smooth = min(given.curvature[r, k, e] + BEND * steps[-1] / 2, given.l_g)
                for who, (x, m) in local.items():
                    moved = smooth * x
                    if client == who:
                        moved += (given.spread[r, k, e] + 2 * given.l_g * x) / given.sizes[who]
                    m = given.beta * m + (1 - given.beta) * moved
                    local[who] = (x + given.steps[r] * given.l_orth * m, m)
            row.append(steps)
            for who in range(5):
                ends[who].append(local[who])
        state = {
            who: tuple(sum(one[i] for one in ends[who]) / 3 for i in (0, 1)) for who in range(5)
        }
        out.append(row)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_forward_and_backward_are_the_loop(seed: int) -> None:
    given = path(np.random.default_rng(seed), 0.2)
    around = tube(given)
    for who in np.unique(given.schedule):
        own = given.schedule == who
        found = certificate(given, around, who, given.spread[own].ravel()[None])
        assert float(found[0]) == pytest.approx(by_hand(given, int(who)), rel=1e-12)


def test_the_third_derivative_is_below_its_bound() -> None:
    torch.manual_seed(0)
    for classes, scale in ((2, 1.0), (3, 0.1), (3, 3.0), (10, 1.0), (10, 4.0)):
        s, v = torch.randn((2, 4000, classes), dtype=torch.float64)
        t = torch.zeros(4000, 1, dtype=torch.float64, requires_grad=True)
        found = (scale * s + t * v / v.norm(dim=1, keepdim=True)).softmax(1)[:, :1]
        for _ in range(3):
            (found,) = torch.autograd.grad(found.sum(), t, create_graph=True)
        assert 0.01 * BEND < float(found.detach().abs().max()) < BEND


def test_the_norm_is_that_of_the_dense_hessian() -> None:
    torch.manual_seed(1)
    task = MatrixTask(5, 3, torch.float64)
    data = Batch(torch.randn(11, 5).double() / 3, torch.randint(3, (11,)))
    model = torch.randn(5, 3).double()

    def loss(flat: torch.Tensor) -> torch.Tensor:
        p = (data.inputs @ flat.view(5, 3)).softmax(1)
        return 1 - p.gather(1, data.labels[:, None]).mean()

    dense = torch.autograd.functional.hessian(loss, model.ravel())
    largest = float(torch.linalg.eigvalsh(dense).abs().max())
    # Raised by 1e-3, of a precision of 1e-4.
    assert largest <= realized.hessian_norm(task, model, data) <= 1.002 * largest


@pytest.mark.parametrize("steps", [1, 3])
def test_neighbours_are_within_and_close(tmp_path: Path, steps: int) -> None:
    run(small(local={"steps": steps, "lr": 0.02}, task={"initial": "zero"}), tmp_path)
    laboratory, verdict = Laboratory.open(tmp_path), bound.judge(bound.from_directory(tmp_path))
    drawn = draw(laboratory.data, laboratory.source, 40, 0, "any")
    found = realized.certificates(laboratory, verdict, drawn)
    moved = perturbations(laboratory, drawn, run_rounds)
    assert verdict.certificates is not None
    assert (moved <= found).all() and (found <= verdict.certificates[drawn[:, 0]]).all()
    shares = moved[found > 0] / found[found > 0]
    assert shares.max() > 0.8  # so four fifths of it would be exceeded
    told = realized.summary(moved, verdict.certificates[drawn[:, 0]], found)
    assert told["exceeded"] == 0 and told["largest_share"] == shares.max()
    assert realized.summary(moved, found, 0.8 * found)["exceeded"] > 0


def test_the_command_writes_them(tmp_path: Path) -> None:
    config = small(task={"initial": "zero"}, stability={"realized": True, "trials": 5})
    record = execute(config, tmp_path / "run")
    columns = np.loadtxt(tmp_path / "run" / "realized.csv", delimiter=",", skiprows=1)
    assert columns.shape == (5, 5) and (columns[:, 2] <= columns[:, 4]).all()
    assert record["realized"]["exceeded"] == 0
    assert (columns[:, 4] <= columns[:, 3]).all()  # what is known after the run is never more
    assert "realized.csv" in (tmp_path / "run" / "SHA256SUMS").read_text()


REFUSED = [
    {"local": {"batch": 3}},
    {"local": {"momentum-form": "polyak"}},
    {"local": {"momentum-form": "nesterov"}},
    {"local": {"weight-decay": 0.1}},
    {"local": {"recipe": "fedavg"}},
    {"local": {"recipe": "fedavgm"}},
    {"local": {"recipe": "local-muon"}},
    {"local": {"recipe": "fedmuon-aligned"}},
    {"federation": {"aggregate": "by-samples"}},
    {"orthogonalizer": {"name": "exact-sign"}},
    {"engine": {"dtype": "float32"}},
]


@pytest.mark.parametrize("tables", REFUSED, ids=str)
def test_what_the_recursion_is_not_about_is_refused_at_once(tables: dict, tmp_path: Path) -> None:
    """Its numbers were exceeded where other recipes were followed by it (polyak 79 times)."""
    config = small(stability={"realized": True, "trials": 5}, **tables)
    with pytest.raises(InputError, match=r"\[stability\] realized follows FedMuon alone"):
        execute(config, tmp_path / "run")
    assert not (tmp_path / "run" / "neighbours.csv").exists()


def test_what_is_exceeded_is_not_called_realized() -> None:
    moved, found = np.array([1.0, 2.0]), np.array([2.0, 1.9])
    assert realized.summary(moved, found, found)["status"] == "violated"
    assert realized.summary(moved, found, 2 * found)["status"] == "realized"
