"""Randomized polar maps and the two forms of momentum in fedmuon.optim.Muon.

The Polyak form is compared with a float64 loop over the equations of Nesterov Muon, and with the
averaging form where both must agree: if the map ignores scale.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_muon import SHAPES, apart, everywhere, go, ours, trajectory
from test_muon import randoms as drawn
from torch import Tensor, nn

from fedmuon.core.rng import Draw, generator
from fedmuon.optim import Muon, MuonWithAux, muon, param_groups_for_muon
from fedmuon.orthogonalize import newton_schulz, randomized_polar, smoothed_polar


def randoms(seed: int, shapes: Any = SHAPES) -> list[Tensor]:
    return drawn(shapes, seed, torch.float64)


def end(steps: int = 20, shapes: Any = SHAPES, **options: Any) -> list[Tensor]:
    return trajectory(ours(ns_dtype=torch.float64, **options), steps, shapes, torch.float64)


def polyak(nesterov: bool, memory: float, lr: float, steps: int) -> list[np.ndarray]:
    """Nesterov Muon (1): C <- beta C + G, M = beta C + G or C, X <- X - eta U V^T, by SVD."""
    params = [value.numpy() for value in randoms(0)]
    sums = [np.zeros_like(value) for value in params]
    for step in range(steps):
        for i, given in enumerate(randoms(step + 1)):
            gradient = given.numpy()
            sums[i] = memory * sums[i] + gradient
            ahead = memory * sums[i] + gradient if nesterov else sums[i]
            u, _, vt = np.linalg.svd(ahead, full_matrices=False)
            rows, columns = ahead.shape
            params[i] = params[i] - lr * max(1, rows / columns) ** 0.5 * (u @ vt)
    return params


@pytest.mark.parametrize("nesterov", [True, False])
def test_polyak_momentum_is_that_of_the_paper(nesterov: bool) -> None:
    wanted = polyak(nesterov, 0.9, 0.02, 20)
    options = {"momentum": 0.9, "weight_decay": 0.0, "orthogonalizer": "exact-sign"}
    found = end(momentum_form="polyak", nesterov=nesterov, **options)
    assert apart(found, wanted) < 1e-10
    wrong = end(momentum_form="polyak", nesterov=not nesterov, **options)
    assert apart(wrong, wanted) > 1e-3


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_two_forms_agree_where_the_map_ignores_scale(nesterov: bool) -> None:
    def ends(form: str, given: Any) -> list[Tensor]:
        options = {"rank": 4, "oversample": 2, "nesterov": nesterov}
        return end(momentum_form=form, orthogonalizer=given, **options)

    for given in ("exact-sign", None, "randomized-polar"):
        assert apart(ends("ema", given), ends("polyak", given)) < 1e-9, given
    smooth = partial(smoothed_polar, lam=0.1)
    averaged = ends("ema", smooth)
    assert apart(averaged, ends("polyak", smooth)) > 1e-2
    scaled = partial(smoothed_polar, lam=0.1 / (1 - 0.95) ** 2)  # for sums, 1 / (1 - beta) larger
    assert apart(averaged, ends("polyak", scaled)) < 1e-9


@pytest.mark.parametrize("sketch", ["gaussian", "kaczmarz"])
@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_one_step_is_the_map_on_the_shorter_side(sketch: str, shape: tuple[int, int]) -> None:
    (gradient,), param = randoms(1, (shape,)), nn.Parameter(torch.zeros(shape).double())
    param.grad = gradient
    options = {"rank": 4, "oversample": 2, "power": 2, "sketch": sketch, "seed": 7}
    Muon([param], lr=1.0, weight_decay=0.0, momentum=0.0, ns_dtype=torch.float64,
         orthogonalizer="randomized-polar", **options).step()  # fmt: skip
    tall = gradient if shape[0] > shape[1] else gradient.mT
    draw = generator(7, Draw.SKETCH, step=0, block=20 * 2**20 + 12)
    wanted = randomized_polar(tall, 4, 2, 2, 5, [(3.4445, -4.7750, 2.0315)], sketch, draw)
    wanted = wanted if shape[0] > shape[1] else wanted.mT
    found = -param.detach() / max(1, shape[0] / shape[1]) ** 0.5
    torch.testing.assert_close(found, wanted)
    rank = int(torch.linalg.matrix_rank(found))
    assert rank == 6 if sketch == "gaussian" else 2 <= rank <= 6  # a column may be drawn twice


def test_a_sketch_of_the_whole_side_is_the_full_map() -> None:
    (matrix,) = randoms(3, ((30, 12),))
    drawn = randomized_polar(matrix, 10, 2, 0, 5, "quintic", generator=np.random.default_rng(0))
    full = newton_schulz(matrix, 5, "quintic", 1e-7, "max")
    torch.testing.assert_close(drawn, full, rtol=1e-8, atol=1e-8)
    options = {"rank": 8, "oversample": 2}  # l = 10 is the shorter side of two of the shapes
    mixed = end(orthogonalizer="randomized-polar", **options)
    for mine, other, shape in zip(mixed, end(), SHAPES, strict=True):
        assert torch.equal(mine, other) == (min(shape) == 10)


def test_sketches_do_not_depend_on_the_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(20, 12)] * 5
    options = {"orthogonalizer": "randomized-polar", "rank": 4, "oversample": 2}
    whole = end(5, shapes, **options)
    monkeypatch.setitem(muon._STACKED_ENTRIES, "cpu", 1)
    assert apart(end(5, shapes, **options), whole) < 1e-10
    assert apart(end(5, shapes, **options, seed=1), whole) > 1e-2


def test_a_resumed_run_draws_what_it_would_have_drawn() -> None:
    options = {"lr": 0.02, "orthogonalizer": "randomized-polar", "rank": 4, "oversample": 1,
               "seed": 3, "momentum_form": "polyak", "ns_dtype": torch.float64}  # fmt: skip
    params = [value.requires_grad_() for value in randoms(0)]
    optimizer = Muon(params, **options)
    go(optimizer, params, range(3))
    copied = [param.detach().clone().requires_grad_() for param in params]
    resumed = Muon(copied, lr=0.5, ns_dtype=torch.float64, seed=99)
    resumed.load_state_dict(everywhere(optimizer.state_dict()))
    forgetful = [param.detach().clone().requires_grad_() for param in params]
    again = Muon(forgetful, **options)
    state = everywhere(optimizer.state_dict())
    state["param_groups"][0]["draws"] = 0
    again.load_state_dict(state)
    for some, own in ((optimizer, params), (resumed, copied), (again, forgetful)):
        go(some, own, range(3, 6))
    for mine, other in zip(params, copied, strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(params[0], forgetful[0])  # the sketches of steps 0, 1, 2 once more


def test_with_a_model_and_its_rule() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in ((20, 48), (48, 48), (48, 2))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    options = {"lr": 0.02, "orthogonalizer": "randomized-polar", "rank": 12, "oversample": 4}
    optimizer = MuonWithAux(param_groups_for_muon(model), muon=options, aux={"lr": 3e-3})
    inputs, labels = torch.randn(128, 20), torch.randint(2, (128,))
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
