"""Routes of Hugging Face and PEFT models; heads and fused blocks against a loop in float64."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from reference import orthogonal
from torch import nn
from training_loops import batches, language_model, loss_of, with_adapters

from fedmuon.core.errors import InputError
from fedmuon.optim import Muon, MuonWithAux, groups, routing_table
from fedmuon.orthogonalize import smoothed_polar

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and peft warn while they load
LR, DECAY, BETA, LAMBDA, HEADS, KEYS, SIZE, WIDTH = 0.1, 0.3, 0.8, 1e-4, 4, 2, 4, 16
OPTIONS: dict[str, Any] = {
    "lr": LR, "weight_decay": DECAY, "momentum": BETA, "ns_dtype": torch.float64,
    "orthogonalizer": lambda stack: smoothed_polar(stack, LAMBDA),
}  # fmt: skip


def rows_of(model: nn.Module, capsys: Any, **options: Any) -> dict[str, str]:
    """Rows of the printed table, by the names of the parameters."""
    groups(model, **options)
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:-1]}


# --- The table ------------------------------------------------------------------------------------


def test_llama_with_tied_embeddings_and_grouped_queries(capsys: Any) -> None:
    rows, layer = rows_of(language_model(), capsys), "model.layers.0."
    assert rows["model.embed_tokens.weight"] == "40 x 16 - aux embedding, tied to lm_head.weight"
    assert rows[f"{layer}self_attn.k_proj.weight"] == "8 x 16 8 x 16 muon hidden"
    assert rows[f"{layer}input_layernorm.weight"] == "16 - aux norm"
    assert rows["model.norm.weight"] == "16 - aux norm"
    heads = rows_of(language_model(), capsys, split_heads=True)
    assert heads[f"{layer}self_attn.q_proj.weight"] == "16 x 16 4 of 4 x 16 muon 4 heads"
    assert heads[f"{layer}self_attn.k_proj.weight"] == "8 x 16 2 of 4 x 16 muon 2 heads"
    assert heads[f"{layer}self_attn.v_proj.weight"] == "8 x 16 2 of 4 x 16 muon 2 heads"
    changed = {name for name in rows if rows[name] != heads[name]}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj"}


def test_gpt2_has_fused_columns_and_tied_embeddings(capsys: Any) -> None:
    model, name = language_model("gpt2"), "transformer.h.1.attn.c_attn.weight"
    rows = rows_of(model, capsys)
    assert rows["transformer.wte.weight"] == "40 x 16 - aux embedding, tied to lm_head.weight"
    assert rows["transformer.wpe.weight"] == "12 x 16 - aux embedding"
    assert rows["transformer.h.0.ln_1.weight"] == "16 - aux norm"
    assert rows[name] == "16 x 48 3 of 16 x 16 muon fused"
    heads = rows_of(model, capsys, split_heads=True)
    assert heads[name] == "16 x 48 12 of 4 x 16 muon 12 heads"
    whole = rows_of(model, capsys, split_qkv=False)
    assert whole[name] == "16 x 48 16 x 48 muon hidden"


def test_fused_projections_with_fewer_keys_than_queries(capsys: Any) -> None:
    model, name = language_model("phi3"), "model.layers.0.self_attn.qkv_proj.weight"
    assert rows_of(model, capsys)[name] == "32 x 16 16 x 16, 8 x 16, 8 x 16 muon fused"
    assert rows_of(model, capsys, split_heads=True)[name] == "32 x 16 8 of 4 x 16 muon 8 heads"
    assert rows_of(model, capsys, split_qkv=False)[name] == "32 x 16 32 x 16 muon hidden"


def test_heads_that_lie_next_to_each_other_and_heads_of_another_size(capsys: Any) -> None:
    """GPT-NeoX stores q, k and v of one head together. T5 can have heads of any size."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, T5Config, T5EncoderModel

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 4, "vocab_size": 40}  # fmt: skip
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    assert rows_of(neox, capsys, split_heads=True)[name] == "48 x 16 12 of 4 x 16 muon 12 heads"
    assert rows_of(neox, capsys)[name] == "48 x 16 48 x 16 muon hidden"  # no three blocks of rows
    t5 = T5EncoderModel(
        T5Config(d_model=16, vocab_size=40, d_kv=6, d_ff=24, num_layers=1, num_heads=4)
    )
    name = "encoder.block.0.layer.0.SelfAttention.k.weight"
    assert rows_of(t5, capsys, split_heads=True)[name] == "24 x 16 4 of 6 x 16 muon 4 heads"


def test_adapters_are_whole_factors(capsys: Any) -> None:
    """A [3, 16] and B, also where the shapes of A would be those of three fused matrices."""
    rows = rows_of(with_adapters(language_model()), capsys)
    assert len(rows) == 2 * 2 * 3 and all(row.endswith("muon hidden") for row in rows.values())
    model = nn.ModuleDict({"c_attn": nn.Module(), "head": nn.Linear(6, 2)})
    model["c_attn"].base_layer = nn.Linear(6, 18).requires_grad_(False)
    model["c_attn"].lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
    model["c_attn"].lora_B = nn.ModuleDict({"default": nn.Linear(2, 18, bias=False)})
    rows = rows_of(model, capsys)
    assert rows["c_attn.lora_A.default.weight"] == "2 x 6 2 x 6 muon hidden"


def test_a_trained_head_beside_adapters_is_the_last_layer(capsys: Any) -> None:
    from peft import LoraConfig, get_peft_model

    options = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    rows = rows_of(get_peft_model(language_model(), LoraConfig(**options)), capsys)
    name = "base_model.model.lm_head.modules_to_save.default.weight"
    assert rows[name] == "40 x 16 - aux last layer"


def test_torch_attention_declares_its_heads(capsys: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    rows = rows_of(layer, capsys, ends=False, split_heads=True)
    assert rows["self_attn.in_proj_weight"] == "24 x 8 6 of 4 x 8 muon 6 heads"
    assert routing_table(layer, ends=False, split_heads=True)[0].rows == (4,) * 6


def test_heads_that_are_unknown_are_named(capsys: Any) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"split_heads is True, but no query.*num_attention_heads"):
        groups(plain, split_heads=True)
    model = language_model()
    layers = model.model.layers
    layers[0].self_attn.q_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)  # with gates, for example
    rows = rows_of(model, capsys, split_heads=True)
    assert rows["model.layers.0.self_attn.q_proj.weight"].endswith("muon hidden, heads unknown")
    assert rows["model.layers.1.self_attn.q_proj.weight"].endswith("muon 4 heads")


def test_pieces_that_do_not_fit_are_rejected() -> None:
    weight = nn.Parameter(torch.zeros(6, 4))
    for options, message in (
        ({"rows": (2, 2)}, r"rows is \(2, 2\) .* the sum of rows must be 6"),
        ({"rows": (2, 2, 2), "transposed": True}, "the sum of rows must be 4"),
        ({"rows": (3, 3), "blocks": 2}, "Use one of them"),
    ):
        with pytest.raises(InputError, match=message):
            Muon([{"params": [weight], **options}])
    with pytest.raises(InputError, match="only a parameter with two axes can be transposed"):
        Muon([{"params": [nn.Parameter(torch.zeros(2, 2, 2))], "transposed": True}])


# --- Steps ----------------------------------------------------------------------------------------


def pieces(kind: str, name: str, weight: np.ndarray, how: str) -> Iterator[np.ndarray]:
    """Views [outputs, inputs] of a weight, one for each matrix, in an explicit loop."""
    key = name.split(".")[-2]
    stored_as_outputs = weight.T if kind == "gpt2" else weight
    starts: Any = [0]
    if how == "heads" and key in ("q_proj", "k_proj", "v_proj", "c_attn", "qkv_proj"):
        starts = range(0, len(stored_as_outputs), SIZE)
    elif how == "kinds" and key == "c_attn":
        starts = [0, WIDTH, 2 * WIDTH]
    elif how == "kinds" and key == "qkv_proj":
        starts = [0, HEADS * SIZE, (HEADS + KEYS) * SIZE]
    for start, end in zip(starts, [*starts[1:], len(stored_as_outputs)], strict=True):
        yield stored_as_outputs[start:end]


def by_loop(kind: str, gradients: list[dict], start: dict, how: str) -> dict[str, np.ndarray]:
    """Nesterov Muon, matrix by matrix."""
    weights = {name: value.copy() for name, value in start.items()}
    momenta = {name: np.zeros_like(value) for name, value in start.items()}
    for slopes in gradients:
        for name, weight in weights.items():
            momenta[name] = BETA * momenta[name] + (1 - BETA) * slopes[name]
            direction = BETA * momenta[name] + (1 - BETA) * slopes[name]
            weight *= 1 - LR * DECAY
            targets = pieces(kind, name, weight, how)
            for target, matrix in zip(targets, pieces(kind, name, direction, how), strict=True):
                scale = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
                target -= LR * scale * orthogonal.smoothed_polar(matrix, LAMBDA)
    return weights


def by_torch(kind: str, **options: Any) -> tuple[list[dict], dict, dict[str, np.ndarray]]:
    """Three steps of MuonWithAux: the gradients, the first and the last weights of Muon."""
    model = language_model(kind).double().train()
    found = groups(model, show=False, **options)
    optimizer = MuonWithAux(found, muon=OPTIONS, aux={"lr": 0.0})
    params = {
        name: param for group in found if group["use_muon"] for name, param in group["params"]
    }
    start = {name: param.detach().numpy().copy() for name, param in params.items()}
    gradients = []
    for tokens in batches(3):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        gradients.append({name: param.grad.numpy().copy() for name, param in params.items()})
        optimizer.step()
    return gradients, start, {name: param.detach().numpy() for name, param in params.items()}


@pytest.mark.parametrize("how", ["heads", "kinds"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_steps_are_those_of_a_loop_over_heads_and_blocks(kind: str, how: str) -> None:
    gradients, start, result = by_torch(kind, split_heads=how == "heads")
    expected = by_loop(kind, gradients, start, how)
    assert len(expected) == {"llama": 14, "gpt2": 8, "phi3": 8}[kind]
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=0, atol=1e-12)
    other = by_loop(kind, gradients, start, "whole")  # the control
    attention = [name for name in other if name.split(".")[-2] in ("q_proj", "c_attn", "qkv_proj")]
    differences = [np.abs(other[name] - result[name]).max() for name in attention]
    cut = kind != "llama" or how == "heads"
    assert all((difference > 1e-2) == cut for difference in differences)


def test_columns_of_gpt2_are_its_outputs() -> None:
    """The control: a loop that takes rows for outputs takes other steps, also of whole matrices."""
    gradients, start, result = by_torch("gpt2")
    wrong = by_loop("linear", gradients, start, "kinds")
    for name in ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"):
        assert np.abs(wrong[name] - result[name]).max() > 1e-2


def test_rows_are_scaled_within_each_head() -> None:
    """NorMuon: rows of O are divided by their running root mean squares, with the norm of O."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
    options = {**OPTIONS, "momentum": 0.0, "nesterov": False, "row_memory": 0.5}
    optimizer = Muon([{"params": [weight], "rows": (4, 2, 2)}], **options)
    halves = [nn.Parameter(part.clone()) for part in weight.detach().split((4, 2, 2))]
    alone = Muon(halves, **options)
    for _ in range(3):
        slope = torch.randn(8, 6, dtype=torch.float64)
        weight.grad = slope
        for half, part in zip(halves, slope.split((4, 2, 2)), strict=True):
            half.grad = part.clone()
        optimizer.step()
        alone.step()
    expected = torch.cat([half.detach() for half in halves])
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)
