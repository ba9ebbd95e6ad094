"""LoRA-Muon: the link and the torch optimizer against a loop in NumPy, and their invariance."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from adapted import adapted
from compared import built, ended, with_module
from conftest import small
from reference import methods, orthogonal
from torch import nn

from fedmuon import recipes
from fedmuon.core.errors import InputError
from fedmuon.optim import LoRAMuon, Muon
from fedmuon.optim.chain import Context
from fedmuon.optim.lora_muon import inverse_root
from fedmuon.orthogonalize import exact_sign, smoothed_polar
from fedmuon.tasks.base import Params

M, N, R, LR, BETA, DECAY, LAMBDA = 6, 5, 3, 0.3, 0.7, 0.2, 1e-3
NAMES = "q.lora_A.weight", "q.lora_B.weight"
RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((R, N)), RNG.standard_normal((M, R))
SLOPES = RNG.standard_normal((4, M, N))  # the gradient of the weight in each of four steps


def by_loop(a: np.ndarray, b: np.ndarray, floor: float = 1e-6) -> tuple[np.ndarray, np.ndarray]:
    """Four steps of LoRA-Muon with the smoothed polar map."""
    s, m_a, m_b = np.sqrt(1 - LR * DECAY), np.zeros_like(a), np.zeros_like(b)
    for slope in SLOPES:
        m_a = BETA * m_a + (1 - BETA) * b.T @ slope
        m_b = BETA * m_b + (1 - BETA) * slope @ a.T
        root_a, root_b = methods.inverse_root(a, floor), methods.inverse_root(b.T, floor)
        d_a = root_b @ orthogonal.smoothed_polar(root_b @ m_a, LAMBDA) / 2
        d_b = orthogonal.smoothed_polar(m_b @ root_a, LAMBDA) @ root_a / 2
        a, b = s * a - LR * d_a / s, s * b - LR * d_b / s
    return a, b


def by_link(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    recipe = recipes.lora_muon(LR, BETA, lambda m: smoothed_polar(m, LAMBDA), weight_decay=DECAY)
    params: Params = dict(zip(NAMES, (torch.from_numpy(x)[None] for x in (a, b)), strict=True))
    states = recipe.chain.init(params, {})
    for slope in torch.from_numpy(SLOPES):

        def gradient(at: Any, slope: Any = slope) -> Any:
            return torch.zeros(1), {NAMES[0]: at[NAMES[1]].mT @ slope,
                                    NAMES[1]: slope @ at[NAMES[0]].mT}  # fmt: skip

        params, states = recipe.chain.step(params, states, Context(params, gradient, []))
    return params[NAMES[0]][0].numpy(), params[NAMES[1]][0].numpy()


def parameters(a: np.ndarray, b: np.ndarray) -> dict[str, nn.Parameter]:
    pairs = zip(NAMES, (a, b), strict=True)
    return {name: nn.Parameter(torch.from_numpy(x.copy())) for name, x in pairs}


def by_torch(
    a: np.ndarray, b: np.ndarray, steps: Any = SLOPES, optimizer: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    factors = parameters(a, b)
    made = (optimizer or lora_muon)(factors)
    for slope in torch.from_numpy(np.asarray(steps)):
        made.zero_grad()
        ((factors[NAMES[1]] @ factors[NAMES[0]]) * slope).sum().backward()
        made.step()
    return factors[NAMES[0]].detach().numpy(), factors[NAMES[1]].detach().numpy()


def lora_muon(factors: dict[str, nn.Parameter]) -> LoRAMuon:
    return LoRAMuon(
        factors.items(), LR, DECAY, BETA, orthogonalizer=lambda m: smoothed_polar(m, LAMBDA)
    )


STEPS = {"link": by_link, "torch": by_torch}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["any start", "B = 0"])
def test_steps_equal_the_loop(name: str, scale: float) -> None:
    expected, result = by_loop(A, scale * B), STEPS[name](A, scale * B)
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-11)
    wrong = by_loop(A, scale * B, floor=0.5)  # the negative control
    assert np.abs(wrong[1] - result[1]).max() > 1e-3


TURN = np.linalg.qr(RNG.standard_normal((R, R)))[0]
SHEAR = np.triu(np.ones((R, R)))
GAUGES = {"scaled": 7.0 * np.eye(R), "turned": TURN, "scaled and turned": 0.2 * TURN, "any": SHEAR}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("gauge", GAUGES)
def test_product_does_not_depend_on_the_scale_of_factors(name: str, gauge: str) -> None:
    """Four steps with momenta and weight decay, for the factors B T and T^-1 A."""
    T = GAUGES[gauge]
    a, b = STEPS[name](A, B)
    turned_a, turned_b = STEPS[name](np.linalg.inv(T) @ A, B @ T)
    np.testing.assert_allclose(turned_b @ turned_a, b @ a, rtol=0, atol=1e-11)
    np.testing.assert_allclose(turned_b, b @ T, rtol=0, atol=1e-10)
    assert np.abs(b @ a - B @ A).max() > 0.1


def test_muon_on_factors_depends_on_their_scale() -> None:
    """The negative controls. With a large floor, only scaled and turned factors are equivalent."""

    def muon(factors: dict[str, nn.Parameter]) -> Muon:
        return Muon(factors.values(), LR, 0.0, BETA, False, orthogonalizer=exact_sign)

    def floored(factors: dict[str, nn.Parameter]) -> LoRAMuon:
        return LoRAMuon(factors.items(), LR, orthogonalizer=exact_sign, floor=0.9)

    def moved(T: np.ndarray, optimizer: Any) -> float:
        (a, b), plain = by_torch(np.linalg.inv(T) @ A, B @ T, optimizer=optimizer), by_torch(
            A, B, optimizer=optimizer)  # fmt: skip
        return np.abs(b @ a - plain[1] @ plain[0]).max()

    assert moved(GAUGES["scaled"], muon) > 0.1
    assert moved(GAUGES["scaled and turned"], floored) < 1e-10
    assert moved(SHEAR, floored) > 1e-2


def test_weight_decay_shrinks_the_product() -> None:
    """A gradient of 0 leaves only the decay, which acts once on the product of both factors."""
    a, b = by_torch(A, B, np.zeros((1, M, N)))
    np.testing.assert_allclose(b @ a, (1 - LR * DECAY) * B @ A, rtol=1e-13)
    assert np.abs(b @ a - (1 - LR * DECAY) ** 2 * B @ A).max() > 1e-2  # the negative control


def test_roots_equal_those_of_singular_values() -> None:
    thin = np.concatenate([A[:2], 1e-9 * A[2:]])  # one eigenvalue below the floor
    for X in (A, thin, 1e-30 * A):
        root = inverse_root(torch.from_numpy(X @ X.T)).numpy()
        expected = methods.inverse_root(X)
        np.testing.assert_allclose(root, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    assert not inverse_root(torch.zeros(2, R, R)).any()
    single = inverse_root(torch.from_numpy(thin @ thin.T).float())
    assert single.isfinite().all()


def test_a_frozen_factor_keeps_its_value() -> None:
    """FFA-LoRA with LoRA-Muon: the optimizer still reads A."""
    factors = {NAMES[0]: nn.Parameter(torch.from_numpy(A.copy()), requires_grad=False),
               NAMES[1]: nn.Parameter(torch.from_numpy(B.copy()))}  # fmt: skip
    optimizer = lora_muon(factors)
    ((factors[NAMES[1]] @ factors[NAMES[0]]) * torch.from_numpy(SLOPES[0])).sum().backward()
    optimizer.step()
    assert np.array_equal(factors[NAMES[0]].detach().numpy(), A)
    s, root = np.sqrt(1 - LR * DECAY), methods.inverse_root(A)
    white = orthogonal.smoothed_polar((1 - BETA) * SLOPES[0] @ A.T @ root, LAMBDA)
    expected = s * B - LR / 2 * white @ root / s
    np.testing.assert_allclose(factors[NAMES[1]].detach().numpy(), expected, rtol=0, atol=1e-12)


def test_a_saved_state_continues_bit_identically() -> None:
    def trained(stop: int) -> list[torch.Tensor]:
        factors = parameters(A, B)
        optimizer = LoRAMuon(factors.items(), LR)
        for number, slope in enumerate(torch.from_numpy(SLOPES)):
            if number == stop:
                saved, optimizer = optimizer.state_dict(), LoRAMuon(factors.items(), lr=9.0)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            ((factors[NAMES[1]] @ factors[NAMES[0]]) * slope).sum().backward()
            optimizer.step()
        return [x.detach() for x in factors.values()]

    assert all(map(torch.equal, trained(2), trained(9)))


def test_unsuitable_parameters_and_options_are_rejected() -> None:
    layer = nn.ParameterDict({"lora_A": torch.ones(1, 3), "lora_B": torch.zeros(2, 1)})
    with pytest.raises(InputError, match=r"LoRAMuon needs low-rank adapters.*The layers are 0"):
        LoRAMuon(nn.Sequential(nn.Linear(2, 2)).named_parameters())
    for unnamed in (layer.parameters(), [{"params": [*layer.parameters()]}], layer, "ab", [3]):
        with pytest.raises(InputError, match=r"names of parameters.* model\.named_parameters\(\)"):
            LoRAMuon(cast(Any, unnamed))
    with pytest.raises(InputError, match="the parameter head is trained, but it is no factor"):
        LoRAMuon([*layer.named_parameters(), ("head", nn.Parameter(torch.ones(1)))])
    with pytest.raises(InputError, match=r"floor is 1\.5, but it must be at least 0 and below 1"):
        LoRAMuon(layer.named_parameters(), floor=1.5)
    with pytest.raises(InputError, match=r"lr = 2 times weight-decay = 0\.5 is 1, but it must"):
        LoRAMuon(layer.named_parameters(), lr=2.0, weight_decay=0.5)
    with pytest.raises(InputError, match="lr = 2 times weight-decay"):
        recipes.lora_muon(lr=2.0, weight_decay=0.5)
    with pytest.raises(InputError, match="orthogonalizer 'polar' is unknown"):
        LoRAMuon(layer.named_parameters(), orthogonalizer="polar")


def adapters_of(**tables: Any) -> Any:
    base: dict[str, dict[str, Any]] = {
        "task": {"name": "given"},
        "federation": {"clients": 3, "per-round": 2, "rounds": 2},
    }
    return with_module(small(base, **tables), adapted(0.0))


def test_a_model_without_adapters_is_rejected_before_training() -> None:
    with pytest.raises(InputError, match=r"recipe = 'lora-muon' needs low-rank adapters"):
        built(small(local={"recipe": "lora-muon"}))


def test_muon_trains_all_factors_or_b_only() -> None:
    """Factor-wise Muon by routing. A takes the auxiliary step, or the same step as in Muon."""
    for recipe in ("fedmuon", "lora-muon"):
        ends = [
            ended(built(adapters_of(local={"recipe": recipe, "lr": 0.1, **local}))).params
            for local in ({}, {"muon": "*lora_B*"}, {"muon": "*lora_B*", "aux-lr": 0.3})
        ]
        name = "0.lora_A.weight"
        assert not torch.equal(ends[0][name], ends[1][name])
        assert not torch.equal(ends[1][name], ends[2][name])
