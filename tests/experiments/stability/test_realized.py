"""Certificates after the run: against naive loops, dense Hessians, and real neighbours."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from conftest import quick, small
from safetensors.numpy import load_file

import fedmuon
from fedmuon import analysis, orthogonalize
from fedmuon.analysis.theory.trajectories import BEND, certificate, step_bounds
from fedmuon.analysis.theory.trajectories import Path as Steps
from fedmuon.config.load import Config
from fedmuon.config.user_objects import NOTHING
from fedmuon.core.errors import InputError
from fedmuon.data import load
from fedmuon.data.neighbours import draw
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import certificates, finished_run, realized
from fedmuon.experiments.stability.finished_run import FinishedRun, smallest_singular_values
from fedmuon.experiments.stability.neighbours import execute, perturbations, verdict_table
from fedmuon.experiments.stability.neighbours_report import findings
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.orthogonalize import exact_sign, quotient_sign
from fedmuon.tasks.base import Batch
from fedmuon.tasks.constants import constants
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


@pytest.mark.parametrize("seed", quick(range(5), [0]))
def test_forward_and_backward_are_the_loop(seed: int) -> None:
    given = path(np.random.default_rng(seed), 0.2)
    around = step_bounds(given)
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


def dense_norm(model: torch.Tensor, data: Batch) -> float:
    """The largest |eigenvalue| of the mean loss's dense Hessian."""

    def loss(flat: torch.Tensor) -> torch.Tensor:
        chances = (data.inputs @ flat.view(*model.shape)).softmax(1)
        return 1 - chances.gather(1, data.labels[:, None]).mean()

    dense: Any = torch.autograd.functional.hessian(loss, model.ravel())
    return float(torch.linalg.eigvalsh(dense).abs().max())


def test_the_norm_is_that_of_the_dense_hessian() -> None:
    torch.manual_seed(1)
    data = Batch(torch.randn(11, 5).double() / 3, torch.randint(3, (11,)))
    model = torch.randn(5, 3).double()
    found = realized.hessian_norm(MatrixTask(5, 3, torch.float64), model, data)
    # Raised by 1e-3, of a precision of 1e-4.
    assert 1 <= found / dense_norm(model, data) <= 1.002


@pytest.mark.parametrize("steps", quick([1, 3], [3]))
def test_neighbours_are_within_and_close(tmp_path: Path, steps: int) -> None:
    run(small(local={"steps": steps, "lr": 0.02}, task={"initial": "zero"}), tmp_path)
    laboratory = FinishedRun.open(tmp_path)
    verdict = certificates.certify(finished_run.from_directory(tmp_path))
    drawn = draw(laboratory.data, laboratory.source, 40, 0, "any")
    found = realized.certificates(laboratory, verdict, drawn)
    moved = perturbations(laboratory, drawn, run_rounds)
    assert verdict.certificates is not None
    assert (moved <= found).all() and (found <= verdict.certificates[drawn[:, 0]]).all()
    shares = moved[found > 0] / found[found > 0]
    assert shares.max() > 0.8  # so four fifths of it would be exceeded
    told = realized.summary(moved, verdict.certificates[drawn[:, 0]], found)
    assert told["exceeded"] == 0 and told["largest_share"] == shares.max()
    assert told["status"] == "realized"
    exceeded = realized.summary(moved, found, 0.8 * found)
    assert exceeded["exceeded"] > 0 and exceeded["status"] == "violated"


def test_the_command_writes_them(tmp_path: Path) -> None:
    config = small(task={"initial": "zero"}, stability={"realized": True, "trials": 5})
    record = execute(config, tmp_path / "run")
    columns = np.loadtxt(tmp_path / "run" / "realized.csv", delimiter=",", skiprows=1)
    assert columns.shape == (5, 5) and (columns[:, 2] <= columns[:, 4]).all()
    assert record["realized"]["exceeded"] == 0
    assert (columns[:, 4] <= columns[:, 3]).all()  # what is known after the run is never more
    assert "realized.csv" in (tmp_path / "run" / "SHA256SUMS").read_text()


REFUSED = [
    *({"local": one} for one in ({"batch": 3}, {"weight-decay": 0.1})),
    *({"local": {"momentum-form": form}} for form in ("polyak", "nesterov")),
    *({"local": {"recipe": name}} for name in ("fedavg", "fedavgm", "local-muon")),
    {"local": {"recipe": "fedmuon-aligned"}},
    {"federation": {"aggregate": "by-samples"}},
    {"orthogonalizer": {"name": "exact-sign"}},
    {"engine": {"dtype": "float32"}},
]  # fmt: skip


@pytest.mark.parametrize("tables", REFUSED, ids=str)
def test_what_the_recursion_is_not_about_is_refused_at_once(tables: dict, tmp_path: Path) -> None:
    """Its numbers were exceeded where other recipes were followed by it (polyak 79 times)."""
    config = small(stability={"realized": True, "trials": 5}, **tables)
    with pytest.raises(InputError, match=r"\[stability\] realized needs .*, which this config"):
        execute(config, tmp_path / "run")
    assert not (tmp_path / "run" / "neighbours.csv").exists()


# The exact sign on the matrix task: the map in the quotient by the ones vector, and runs in which
# no neighbour leaves its certificate (001, Lemma D.12).

SIGN = {"orthogonalizer": {"name": "exact-sign"}}


def centred(*shape: int) -> torch.Tensor:
    """Gaussian matrices whose rows sum to 0, up to rounding."""
    found = torch.randn(*shape, dtype=torch.float64)
    return found - found.mean(-1, keepdim=True)


@pytest.mark.parametrize("shape", [(7, 3), (3, 3), (2, 5), (20, 10), (4, 1), (0, 3)])
def test_the_sign_in_the_quotient_is_the_sign(shape: tuple[int, int]) -> None:
    """Against an SVD of which the directions that are there are counted, not guessed."""
    stack = centred(5, *shape)
    rank = min(shape[0], shape[1] - 1)
    u, _, vh = torch.linalg.svd(stack, full_matrices=False)
    wanted = u[..., :rank] @ vh[..., :rank, :]
    torch.testing.assert_close(quotient_sign(stack), wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(quotient_sign(stack.mT.contiguous().mT), wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounding_leaves_of_the_ones_is_no_direction(dtype: torch.dtype) -> None:
    """The control is exact_sign, which takes it for one; the same for neighbours of the matrix."""
    clean = centred(6, 3).to(dtype)
    left = 1e3 * torch.finfo(dtype).eps * torch.randn(6, 1, dtype=torch.float64)
    dirty = clean + left.to(dtype)
    assert float(torch.linalg.matrix_norm(exact_sign(dirty)) ** 2) == pytest.approx(3, abs=1e-4)
    found = quotient_sign(dirty)
    assert float(torch.linalg.matrix_norm(found) ** 2) == pytest.approx(2, abs=1e-4)
    near = {torch.float32: 1e-3, torch.float64: 1e-11}[dtype]
    assert float((found - quotient_sign(clean)).abs().max()) < near
    assert float(found.sum(-1).abs().max()) < near


def ranks(config: Config, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ranks of the signs of all calls of a run."""
    seen: set[int] = set()
    for name in ("exact_sign", "quotient_sign"):
        plain = getattr(orthogonalize, name)

        def watched(matrix: torch.Tensor, plain=plain) -> torch.Tensor:
            found = plain(matrix)
            seen.update((torch.linalg.svdvals(found.double()) > 0.5).sum(-1).tolist())
            return found

        monkeypatch.setattr(orthogonalize, name, watched)
    config = resolve(config)
    source = read_source(config)
    what = build_experiment(config, build_data(config, source))
    for _ in run_rounds(what, begin(what.recipe, what.task, 3)):
        pass
    return seen


@pytest.mark.slow
def test_runs_have_no_spurious_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps leave gradients of 1e-9 beside those that momenta began with. The controls: the
    same with the map of whole matrices, as the median asks for, whose momenta's rows sum to
    anything."""
    large = {"data": {"dimension": 20, "classes": 10, "train": 200}, "local": {"lr": 0.5}}
    config = small({"orthogonalizer": {"lambda": 0.1}}, **large, **SIGN, federation={"rounds": 150})
    assert ranks(config, monkeypatch) == {9}
    monkeypatch.undo()
    monkeypatch.setattr("fedmuon.federated.build_recipe.is_centred", lambda config, what: False)
    assert ranks(config, monkeypatch) == {9, 10}
    monkeypatch.undo()
    middle = small(**SIGN, federation={"aggregate": "median", "rounds": 3})
    assert ranks(middle, monkeypatch) == {2, 3}


def calm(**tables: dict) -> Config:
    """Clients so alike and large, and steps so short, that no gap is lost."""
    few = {"clients": 3, "per-round": 2, "rounds": 4}
    base = {"federation": few, "local": {"lr": 2e-4}, "data": {"train": 1500, "alpha": 50.0}}
    merged = {name: {**base.get(name, {}), **tables.get(name, {})} for name in {*base, *tables}}
    return small(**SIGN, **merged)


VARIANTS = [
    {},
    {"local": {"steps": 2}},
    {"federation": {"clients": 1, "per-round": 1}},
    {"local": {"schedule": "cosine"}},
    {"data": {"dimension": 2}},  # fewer features than classes: q = d
    {"local": {"recipe": "local-muon", "steps": 3}},
    {"local": {"recipe": "muon", "momentum-form": "nesterov", "weight-decay": 0.2}},
    {"local": {"momentum-form": "polyak"}, "federation": {"aggregate": "by-samples"}},
    {"stability": {"constants": "global"}},
]


@pytest.mark.parametrize("tables", VARIANTS, ids=str)
def test_an_exact_sign_run_is_certified_and_its_neighbours_are_within(
    tables: dict, tmp_path: Path
) -> None:
    tables = {**tables, "stability": {"trials": 200, **tables.get("stability", {})}}
    record = execute(calm(**tables), tmp_path / "a")
    columns = np.loadtxt(tmp_path / "a" / "neighbours.csv", delimiter=",", skiprows=1)
    moved, promised = columns[:, 4], columns[:, 6]
    assert record["status"] == "realized" and not record["refusal"]
    assert record["value"] is None and "holds for this run" in record["note"]
    assert (moved <= promised).all() and (moved > promised / 30).any()
    assert record["max_certificate"] == promised.max() and record["l_orth"] > 0


def momenta(config: Config, folder: Path) -> np.ndarray:
    """s_{min(d, c-1)}(M) at all calls, by numpy: FedMuon with the sign of rank c - 1."""
    inputs, labels = load("synthetic", n=1560, dimension=7, classes=3, seed=3)
    with np.load(folder / "partition.npz") as split:
        train, client = split["train_index"], split["client"]
    X = load_file(folder / "initial.safetensors")["weight"]
    M, found = np.zeros_like(X), []
    for row in np.load(folder / "schedule.npy"):
        Xs, Ms, calls = [], [], []
        for i in row:
            U, y = inputs[train[client == i]], labels[train[client == i]]
            Xi, Mi, own = X, M, []
            for _ in range(config.local.steps):
                P = np.exp(U @ Xi)
                P /= P.sum(1, keepdims=True)
                right = P[np.arange(len(y)), y][:, None]
                Mi = 0.9 * Mi + 0.1 * U.T @ (right * (P - np.eye(3)[y])) / len(y)
                u, s, v = np.linalg.svd(Mi, full_matrices=False)
                own.append(s[1])
                Xi = Xi - config.local.lr * u[:, :2] @ v[:2]
            Xs.append(Xi)
            Ms.append(Mi)
            calls.append(own)
        X, M = np.mean(Xs, 0), np.mean(Ms, 0)
        found.append(np.transpose(calls))
    return np.array(found)


def test_the_certificate_is_that_of_the_naive_loop(tmp_path: Path) -> None:
    """Singular values of a run by numpy, and the recursion of every client's neighbours in
    mpmath."""
    config = calm(local={"steps": 2}, stability={"constants": "global"})
    record = execute(config, tmp_path / "a")
    gaps = momenta(config, tmp_path / "a")
    np.testing.assert_allclose(smallest_singular_values(tmp_path / "a", NOTHING), gaps, rtol=1e-9)
    with np.load(tmp_path / "a" / "partition.npz") as split:
        sizes = np.bincount(split["client"])
    l_g, top = mpmath.mpf(constants().smoothness), 2 * mpmath.mpf(constants().gradient_bound)
    eta, beta, ends = mpmath.mpf(2e-4), mpmath.mpf(0.9), []
    for c, size in enumerate(sizes.tolist()):
        x = m = mpmath.mpf(0)
        for r, row in enumerate(np.load(tmp_path / "a" / "schedule.npy").tolist()):
            after = []
            for place, i in enumerate(row):
                xi, mi = x, m
                for k in range(2):
                    mi = beta * mi + (1 - beta) * (l_g * xi + (top / size if i == c else 0))
                    xi += eta * 2 * mi / (2 * mpmath.mpf(gaps[r, k, place]) - mi)
                after.append((xi, mi))
            x, m = (sum(end[j] for end in after) / 2 for j in (0, 1))
        ends.append(float(x))
    assert record["max_certificate"] == pytest.approx(max(ends), rel=1e-9)
    case = finished_run.from_directory(tmp_path / "a")
    np.testing.assert_allclose(np.array(certificates.certify(case).certificates), ends, rtol=1e-9)


def test_the_whole_space_and_long_steps_have_no_tube(tmp_path: Path) -> None:
    """Negative controls: the singular value of the ones vector is none, long steps lose the gap.
    The printed form (twice the gap, L = 2 / gamma) gives more."""
    execute(calm(), tmp_path / "a")
    case = finished_run.from_directory(tmp_path / "a")
    gaps = smallest_singular_values(tmp_path / "a", NOTHING)
    none = dataclasses.replace(case, gaps=lambda: 0 * gaps)
    wide = calm(local={"lr": 1.0}, federation={"rounds": 8})
    assert gaps.min() > 1e-4 and "not have full rank" in certificates.certify(none).refusal
    assert "may have a momentum without full rank" in execute(wide, tmp_path / "b")["refusal"]
    alone = {"data": {"train": 6000}, "federation": {"clients": 1, "per-round": 1}}
    printed = execute(calm(**alone, stability={"lipschitz": "paper"}), tmp_path / "c")
    assert printed["status"] == "realized"
    sharp, paper = (printed["kinds"][kind]["l_orth"] for kind in ("sharp", "paper"))
    assert paper == printed["l_orth"] > 3 * sharp


def test_only_a_whole_run_in_doubles_has_a_tube(tmp_path: Path) -> None:
    """The status is had by nothing else, and by the caller's word it is an estimate."""
    execute(calm(), tmp_path / "a")
    case = finished_run.from_directory(tmp_path / "a")
    assert certificates.certify(case).status == "realized"
    law = dataclasses.replace(case, participation=analysis.Uniform(3, 0.01))
    alone = dataclasses.replace(case, gaps=None)
    single = dataclasses.replace(case, config=calm(engine={"dtype": "float32"}))
    aligned = dataclasses.replace(case, config=calm(local={"recipe": "fedmuon-aligned"}))
    other = calm(local={"recipe": "local-muon"}, stability={"lipschitz": "paper"})
    printed = dataclasses.replace(case, config=other)
    assert "FedMuon as in the Stability note" in certificates.certify(printed).refusal
    for other in (law, alone, single, aligned):
        assert "from the momenta of the run (Lemma D.12)" in certificates.certify(other).refusal
        assert certificates.certify(other).status == "refused"
    assert certificates.certify(dataclasses.replace(case, l_g=0.1)).status == "estimated"
    jumped = dataclasses.replace(case, moved=np.full(3, 1.0))
    assert certificates.report(jumped, certificates.certify(jumped))["status"] == "violated"


def test_pages_say_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    record = execute(calm(stability={"trials": 3}), tmp_path / "a")
    assert json.loads((tmp_path / "a" / "bound.json").read_text()) == record
    shown = verdict_table(tmp_path / "a", record)
    assert "realized" in str(shown.title) and shown.row_count
    page = findings(tmp_path / "a")
    assert page.stands_on == "Status: realized." and "holds for this run" in page.note
    assert [claim.holds for claim in page.claims][:2] == [None, True]
    assert fedmuon.bound(tmp_path / "a")["status"] == "realized"
