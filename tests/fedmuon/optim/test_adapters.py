"""Pairs of factors by name, and the error of averaging factors instead of products."""

import numpy as np
import pytest
import torch

from fedmuon.core.errors import InputError
from fedmuon.optim.adapters import (
    Pair,
    factors_of,
    find_pairs,
    mean_error,
    product,
    product_norm,
    relative,
    require_pairs,
    stacked_mean,
)

CASES = {
    "peft, saved": ("q.lora_A.weight", "q.lora_B.weight", "q"),
    "peft, in memory": ("m.q.lora_A.default.weight", "m.q.lora_B.default.weight", "m.q"),
    "loralib": ("0.lora_A", "0.lora_B", "0"),
    "one layer": ("lora_A.weight", "lora_B.weight", ""),
    "decoder": ("h.0.attn.c_attn.down.weight", "h.0.attn.c_attn.up.weight", "h.0.attn.c_attn"),
}
OTHERS = (
    *("mlp.down.weight", "mlp.up.weight", "x.lora_A.weight", "y.lora_B.weight"),
    *("flora_A.weight", "flora_B.weight", "head.weight"),
)
PAIR = Pair("q", "q.lora_A.weight", "q.lora_B.weight")


@pytest.mark.parametrize("name", CASES)
def test_pairs_are_found_by_name(name: str) -> None:
    a, b, layer = CASES[name]
    assert find_pairs((*OTHERS, b, a)) == (Pair(layer, a, b),)
    assert not find_pairs((*OTHERS, a))  # the negative control


def test_adapters_of_one_layer_are_separate_pairs() -> None:
    names = [f"q.lora_{factor}.{adapter}.weight" for adapter in ("x", "y") for factor in "AB"]
    assert [(pair.a, pair.b) for pair in find_pairs(names)] == [tuple(names[:2]), tuple(names[2:])]


def test_a_pattern_selects_layers_or_lists_them() -> None:
    names = [f"{layer}.lora_{factor}.weight" for layer in ("1.q", "2.k") for factor in "AB"]
    assert [pair.layer for pair in find_pairs(names, "*.q")] == ["1.q"]
    with pytest.raises(InputError, match=r"'\*\.v', which matches no layer.*are 1\.q, 2\.k"):
        require_pairs(names, "[federation] adapters = 'exact'", "*.v")
    with pytest.raises(InputError, match=r"'exact' needs low-rank adapters.*layers are 0, 2\."):
        require_pairs(["0.weight", "0.bias", "2.weight"], "[federation] adapters = 'exact'")


def models(count: int, same_a: bool = False) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    first = rng.standard_normal((2, 3, 7))
    return [
        {PAIR.a: torch.from_numpy(first if same_a else rng.standard_normal((2, 3, 7))),
         PAIR.b: torch.from_numpy(rng.standard_normal((2, 5, 3)))}
        for _ in range(count)
    ]  # fmt: skip


WEIGHTS = (0.5, 0.2, 0.3)


def test_error_of_mean_factors_equals_the_loop() -> None:
    """Each replica by itself, with full products in NumPy."""
    replies = models(3)
    error, norm = mean_error(replies, WEIGHTS, PAIR)
    for s in range(2):
        A, B = ([reply[name][s].numpy() for reply in replies] for name in (PAIR.a, PAIR.b))
        mean = sum(w * b @ a for w, a, b in zip(WEIGHTS, A, B, strict=True))
        mean_a, mean_b = (np.average(part, 0, WEIGHTS) for part in (A, B))
        assert float(error[s]) == pytest.approx(np.linalg.norm(mean - mean_b @ mean_a), rel=1e-12)
        assert float(norm[s]) == pytest.approx(np.linalg.norm(mean), rel=1e-12)
        left, right = stacked_mean(replies, WEIGHTS, PAIR)
        np.testing.assert_allclose((left @ right)[s], mean, rtol=1e-12, atol=1e-13)
        plain = sum(b @ a for a, b in zip(A, B, strict=True)) / 3  # the negative control
        assert abs(np.linalg.norm(plain) - float(norm[s])) > 1e-2
    assert (relative([(error, norm), (error, norm)]) - error / norm).abs().max() < 1e-14


def test_error_is_zero_for_a_common_factor() -> None:
    error, norm = mean_error(models(3, same_a=True), WEIGHTS, PAIR)
    assert float(error.max()) < 1e-14 < float(norm.min())
    nothing = torch.zeros(2)
    assert relative([(nothing, nothing)]).tolist() == [0.0, 0.0]


def test_norm_of_a_product_equals_that_of_the_matrix() -> None:
    (model,) = models(1)
    a, b = factors_of(model, PAIR)
    expected = torch.linalg.matrix_norm(product(model, PAIR))
    torch.testing.assert_close(product_norm(b, a), expected, rtol=1e-13, atol=0)
    wide = torch.cat([b, b, b], 2), torch.cat([a, a, a], 1)  # more columns than rows
    torch.testing.assert_close(product_norm(*wide), 3 * expected, rtol=1e-13, atol=0)


def test_factors_of_different_ranks_are_rejected() -> None:
    model = {PAIR.a: torch.zeros(1, 3, 7), PAIR.b: torch.zeros(1, 5, 2)}
    with pytest.raises(InputError, match=r"shapes \(3, 7\) and \(5, 2\).*the same rank"):
        product(model, PAIR)
