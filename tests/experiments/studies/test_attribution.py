"""Study `attribution`: scores against naive loops, exact runs against a loop in NumPy."""

from functools import cache

import numpy as np
import pytest
import torch
from conftest import small
from study_rows import rows_of, verdicts
from torch import Tensor

from fedmuon.analysis.report.claims import Columns, spearman
from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import attribution
from fedmuon.experiments.studies.attribution import ScoredRun
from fedmuon.experiments.suites.contents import SuiteRequest

ASKED = attribution.Settings.model_validate({
    "tests": 4, "left-out": 6, "subsets": 3, "dampings": [1.0], "projections": 12,
    "variants": {"FedAvg": {"local": {"recipe": "fedavg", "lr": 2.0, "steps": 2}}},
})  # fmt: skip


@cache
def run(recipe: str = "fedavg", lr: float = 2.0) -> ScoredRun:
    local = {"recipe": recipe, "lr": lr, "steps": 2}
    return attribution.train(small(local=local, federation={"aggregate": "mean"}), ASKED.tests)


def gradients(run: ScoredRun, model: Tensor, of: str, margin: bool = False) -> Tensor:
    """Of each train or test sample [m, d c], of 1 - p_y, or of log p_y / (1 - p_y)."""
    samples, found = getattr(run, of), []
    for sample, label in zip(samples.inputs, samples.labels, strict=True):
        at = model.clone().requires_grad_()
        chance = torch.softmax(sample @ at, 0)[label]
        value = torch.log(chance / (1 - chance)) if margin else 1 - chance
        found.append(torch.autograd.grad(value, at)[0].flatten())
    return torch.stack(found)


def shares(run: ScoredRun) -> Tensor:
    owner = np.repeat(np.arange(6), np.diff(run.experiment.shards.offsets))
    part = [(run.experiment.plan.schedule() == i).sum() / (owner == i).sum() for i in owner]
    return torch.tensor(np.array(part))


def test_products_are_those_of_gradients() -> None:
    models = run().models
    each = [gradients(run(), at["weight"][0], "test") @ gradients(run(), at["weight"][0], "train").T
            for at in models]  # fmt: skip
    last, before = (attribution.products(run(), some) for some in (models[-1:], models[:-1]))
    torch.testing.assert_close(last, -each[-1] * shares(run()))
    torch.testing.assert_close(before, -sum(each[:-1]) * shares(run()))
    assert (before + sum(each) * shares(run())).abs().max() > 1e-3  # one model more


def test_influence_solves_with_the_whole_matrix() -> None:
    model, train = run().models[-1]["weight"][0], run().train
    chance, matrix = torch.softmax(train.inputs @ model, 1), torch.zeros(21, 21).double()
    for u, p in zip(train.inputs, chance, strict=True):
        matrix += torch.kron(torch.outer(u, u), torch.diag(p) - torch.outer(p, p)) / len(chance)
    whole = matrix + 0.5 * matrix.trace() / 21 * torch.eye(21)
    solved = torch.linalg.solve(whole, gradients(run(), model, "train").T)
    expected = -(gradients(run(), model, "test") @ solved) * shares(run())
    torch.testing.assert_close(attribution.influence(run(), 0.5), expected, rtol=1e-6, atol=1e-9)


def test_trak_is_a_regression_on_projected_gradients() -> None:
    model = run().models[-1]["weight"][0]
    drawn = attribution.generator(run().seed, attribution.Draw.PROBE).standard_normal((7, 12, 3))
    drawn = drawn.transpose(1, 0, 2).reshape(12, 21)
    own, there = (
        gradients(run(), model, of, margin=True) @ torch.from_numpy(drawn).T
        for of in ("train", "test")
    )
    chance = torch.softmax(run().train.inputs @ model, 1)
    wrong = 1 - chance.gather(1, run().train.labels[:, None])[:, 0]
    expected = -(there @ torch.linalg.inv(own.T @ own) @ own.T) * wrong * shares(run())
    torch.testing.assert_close(attribution.trak(run(), 12), expected, rtol=1e-6, atol=1e-9)


def fedavg(run: ScoredRun, kept: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Test losses of FedAvg on the kept samples, one sample's gradient after the other."""
    shards, plan = run.experiment.shards, run.experiment.plan
    U, y, offsets = shards.inputs.numpy(), shards.labels.numpy(), shards.offsets
    X = run.models[0]["weight"][0].numpy()
    for row in plan.schedule():
        ends = []
        for i in row:
            at = X.copy()
            for _ in range(2):
                G = np.zeros_like(at)
                for j in range(offsets[i], offsets[i + 1]):
                    p = np.exp(U[j] @ at) / np.exp(U[j] @ at).sum()
                    G += kept[j] * np.outer(U[j], p[y[j]] * (p - np.eye(3)[y[j]]))
                at -= 2.0 * G / divisors[i]
            ends.append(at)
        X = np.mean(ends, 0)
    P = np.exp(run.test.inputs.numpy() @ X)
    return 1 - P[np.arange(len(P)), run.test.labels.numpy()] / P.sum(1)


def test_one_sample_is_left_out() -> None:
    """Its client's mean has one gradient less; the weights are those of that mean, times n_i."""
    sizes = np.diff(run().experiment.shards.offsets)
    owner = np.repeat(np.arange(6), sizes)
    changes, weights = attribution.leave_one_out(run(), ASKED)
    whole = fedavg(run(), np.ones(90), sizes)
    for change, weight in zip(changes, weights.numpy(), strict=True):
        (row,) = np.flatnonzero(weight == -1)
        left = sizes - np.bincount([owner[row]], minlength=6)
        expected = fedavg(run(), np.arange(90) != row, left) - whole
        np.testing.assert_allclose(expected, change, atol=1e-12)
        np.testing.assert_allclose(fedavg(run(), 1 + weight, sizes) - whole, change, atol=1e-12)
        assert np.abs(fedavg(run(), np.arange(90) != row, sizes) - whole - change).max() > 1e-6


def test_the_only_sample_of_a_client_stays() -> None:
    """Without it, the client would have no gradient."""
    uneven = small(data={"alpha": 0.05, "minimum": 1, "train": 40}, federation={"clients": 10})
    found = attribution.train(uneven, ASKED.tests)
    sizes = np.diff(found.experiment.shards.offsets)
    asked = ASKED.model_copy(update={"left_out": 40})
    rows, owner = attribution.chosen_rows(found, asked)
    assert (sizes == 1).any() and (sizes[owner[rows]] > 1).all()
    assert np.isfinite(attribution.leave_one_out(found, asked)[0]).all()


def test_one_sample_is_zeroed_out() -> None:
    sizes = np.diff(run().experiment.shards.offsets)
    changes, weights = attribution.zero_out(run(), ASKED)
    whole = fedavg(run(), np.ones(90), sizes)
    for change, weight in zip(changes, weights.numpy(), strict=True):
        assert sorted(np.unique(weight)) == [-1, 0] and weight.sum() == -1
        np.testing.assert_allclose(fedavg(run(), 1 + weight, sizes) - whole, change, atol=1e-12)


def test_half_of_each_client_stays() -> None:
    losses, stayed = attribution.halves(run(), ASKED)
    owner = np.repeat(np.arange(6), np.diff(run().experiment.shards.offsets))
    for loss, kept in zip(losses, stayed.numpy(), strict=True):
        left = np.bincount(owner, kept)
        assert np.array_equal(left, (np.bincount(owner) + 1) // 2)
        np.testing.assert_allclose(fedavg(run(), kept, left), loss, rtol=1e-12)
    assert len(np.unique(stayed.numpy(), axis=0)) == 3


@pytest.mark.parametrize("truth", ["leave_one_out", "zero_out"])
@pytest.mark.parametrize(("recipe", "lr"), [("fedavg", 2.0), ("fedmuon", 0.05)])
def test_derivatives_through_the_run_foretell_it(recipe: str, lr: float, truth: str) -> None:
    changes, weights = getattr(attribution, truth)(run(recipe, lr), ASKED)
    foretold = (attribution.trajectory(run(recipe, lr)) @ weights.T).numpy().T
    most = np.abs(changes).max()
    assert spearman(foretold.ravel(), changes.ravel()) >= 0.99
    assert np.abs(foretold - changes).max() < 0.1 * most  # a sample of 15 is not little
    assert np.abs(foretold - np.roll(changes, 1, 0)).max() > 0.5 * most  # of other samples


def test_what_is_refused() -> None:
    changed = {
        r"attribution needs task\.name = 'matrix'": {"task": {"name": "network", "model": "mlp"}},
        r"attribution needs full batches": {"local": {"batch": 4}},
    }
    for why, tables in changed.items():
        asked = SuiteRequest("attribution", "digits", "full", {})
        with pytest.raises(InputError, match=why):
            attribution.cells(ASKED.model_copy(update={"base": tables}), asked)


def rows(ours: float, theirs: float) -> Columns:
    return rows_of(
        lambda method, test, **_: {
            "rho": (ours if method == attribution.OURS else theirs) + 0.001 * (-1) ** test
        },
        variant=("FedAvg", "FedMuon"), truth=attribution.TRUTHS,
        method=("trajectory", "tracin", "trak"), test=range(6),
    )  # fmt: skip


def test_claims_hold_and_fail() -> None:
    for ours, theirs, foretold, ahead in (
        (0.995, 0.9, True, True), (0.98, 0.9, False, True), (0.995, 0.999, True, False)
    ):  # fmt: skip
        found = verdicts(attribution.claims(rows(ours, theirs)))
        assert found == [foretold] * 4 + [ahead] * 6
    table = attribution.numbers(rows(0.995, 0.9))
    assert table[0] == ("scores", "leave-one-out", "zero-out", "halves")
    assert table[1][0] == "FedAvg:"
    assert table[2][:2] == ("  derivative through the run (ours)", "0.995 ± 0.001")
