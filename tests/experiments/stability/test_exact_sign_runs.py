"""The exact sign on the matrix task: the map in the quotient by the ones vector, and runs in which
no neighbour leaves its certificate (001, Lemma D.12)."""

import dataclasses
import json
import tempfile
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from conftest import small
from safetensors.numpy import load_file

import fedmuon
from fedmuon import analysis
from fedmuon.config.load import Config
from fedmuon.config.user_objects import NOTHING
from fedmuon.data import load
from fedmuon.experiments.stability import bound
from fedmuon.experiments.stability.findings import findings
from fedmuon.experiments.stability.neighbours import execute, verdict_table
from fedmuon.experiments.stability.singular_values import smallest
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.rounds import begin, run_rounds
from fedmuon.orthogonalize import exact_sign, quotient_sign
from fedmuon.tasks.constants import constants

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
    from fedmuon import orthogonalize

    seen: set[int] = set()
    for name in ("exact_sign", "quotient_sign"):
        plain = getattr(orthogonalize, name)

        def watched(matrix: torch.Tensor, plain=plain) -> torch.Tensor:
            found = plain(matrix)
            seen.update((torch.linalg.svdvals(found.double()) > 0.5).sum(-1).tolist())
            return found

        monkeypatch.setattr(orthogonalize, name, watched)
    config = resolve(config)
    what = build_experiment(config)
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
    monkeypatch.setattr("fedmuon.federated.build_recipe._is_centred", lambda config, what: False)
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
    np.testing.assert_allclose(smallest(tmp_path / "a", NOTHING), gaps, rtol=1e-9)
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
    case = bound.from_directory(tmp_path / "a")
    np.testing.assert_allclose(np.array(bound.judge(case).certificates), ends, rtol=1e-9)


def test_the_whole_space_and_long_steps_have_no_tube(tmp_path: Path) -> None:
    """Negative controls: the singular value of the ones vector is none, long steps lose the gap.
    The printed form (twice the gap, L = 2 / gamma) gives more."""
    execute(calm(), tmp_path / "a")
    case = bound.from_directory(tmp_path / "a")
    gaps = smallest(tmp_path / "a", NOTHING)
    none = dataclasses.replace(case, gaps=lambda: 0 * gaps)
    wide = calm(local={"lr": 1.0}, federation={"rounds": 8})
    assert gaps.min() > 1e-4 and "no full rank" in bound.judge(none).refusal
    assert "may lose the gap" in execute(wide, tmp_path / "b")["refusal"]
    alone = {"data": {"train": 6000}, "federation": {"clients": 1, "per-round": 1}}
    printed = execute(calm(**alone, stability={"lipschitz": "paper"}), tmp_path / "c")
    assert printed["status"] == "realized"
    sharp, paper = (printed["kinds"][kind]["l_orth"] for kind in ("sharp", "paper"))
    assert paper == printed["l_orth"] > 3 * sharp


def test_only_a_whole_run_in_doubles_has_a_tube(tmp_path: Path) -> None:
    """The status is had by nothing else, and by the caller's word it is an estimate."""
    execute(calm(), tmp_path / "a")
    case = bound.from_directory(tmp_path / "a")
    assert bound.judge(case).status == "realized"
    law = dataclasses.replace(case, participation=analysis.Uniform(3, 0.01))
    alone = dataclasses.replace(case, gaps=None)
    single = dataclasses.replace(case, config=calm(engine={"dtype": "float32"}))
    aligned = dataclasses.replace(case, config=calm(local={"recipe": "fedmuon-aligned"}))
    printed = calm(local={"recipe": "local-muon"}, stability={"lipschitz": "paper"})
    assert "FedMuon as 001" in bound.judge(dataclasses.replace(case, config=printed)).refusal
    for other in (law, alone, single, aligned):
        assert "from its momenta (Lemma D.12)" in bound.judge(other).refusal
        assert bound.judge(other).status == "refused"
    assert bound.judge(dataclasses.replace(case, l_g=0.1)).status == "estimated"
    jumped = dataclasses.replace(case, moved=np.full(3, 1.0))
    assert bound.report(jumped, bound.judge(jumped))["status"] == "violated"


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
