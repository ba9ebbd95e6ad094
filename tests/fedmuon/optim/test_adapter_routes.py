"""Muon trains adapters. The first and the last layer are those of the model without adapters."""

import re
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.federated.model_routes import matrix_counts
from fedmuon.optim import routing_table


class Adapted(nn.Module):
    """A layer of peft: the frozen layer, and dictionaries of adapters."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class InPlace(nn.Linear):
    """A layer with its adapters as parameters of its own, as in loralib."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer)
        self.weight.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, inner))
        self.lora_B = nn.Parameter(torch.zeros(outer, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.lora_A.T @ self.lora_B.T


def mlp(first: nn.Module, middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, nn.ReLU(), middle, nn.ReLU(), nn.Linear(16, 10))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


CASES = {
    "peft, all layers": mlp(Adapted(nn.Linear(64, 16)), Adapted(nn.Linear(16, 16))),
    "peft, one layer": mlp(frozen(nn.Linear(64, 16)), Adapted(nn.Linear(16, 16))),
    "loralib": mlp(InPlace(64, 16), InPlace(16, 16)),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_go_to_muon_and_the_head_does_not(name: str) -> None:
    routes = {one.name: one for one in routing_table(CASES[name])}
    adapters = [one for key, one in routes.items() if "lora" in key]
    assert len(adapters) in (2, 4)
    assert all((one.optimizer, one.reason) == ("muon", "hidden") for one in adapters)
    assert routes["4.weight"].reason == "last layer"


def test_a_model_without_frozen_layers_is_routed_as_before() -> None:
    """The control: adapters are recognized by their frozen layer, not by their position."""
    plain = mlp(nn.Linear(64, 16), nn.Linear(16, 16))
    found = {
        one.name: one.reason for one in routing_table(plain) if one.matrices or "w" in one.name
    }
    assert found == {"0.weight": "first layer", "2.weight": "hidden", "4.weight": "last layer"}
    part = mlp(frozen(nn.Linear(64, 16)), nn.Linear(16, 16))
    found = {one.name: one.reason for one in routing_table(part)}
    assert found["2.weight"] == "hidden" and found["4.weight"] == "last layer"


def test_a_wrapped_model_keeps_its_embedding_and_head() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = nn.Sequential(
                nn.Embedding(30, 16), Adapted(nn.Linear(16, 16)), Adapted(nn.Linear(16, 16))
            )
            self.score = nn.Linear(16, 3, bias=False)

    found = {one.name: (one.optimizer, one.reason) for one in routing_table(Whole())}
    assert found.pop("score.weight") == ("aux", "last layer")
    assert found.pop("base_model.0.weight") == ("aux", "embedding")
    assert {*found.values()} == {("muon", "hidden")} and len(found) == 4


def test_patterns_replace_the_rule() -> None:
    model = CASES["peft, all layers"]
    counts = matrix_counts(model, "hidden", "split", "*lora_B*, 4.weight")
    assert [name for name, count in counts.items() if count] == [
        "0.lora_B.default.weight", "2.lora_B.default.weight", "4.weight"
    ]  # fmt: skip
    assert matrix_counts(model, "hidden", "split", "*lora*") == matrix_counts(model, "hidden")
    with pytest.raises(InputError, match=r"pattern '\*lore\*' in \[local\] muon matches no matrix"):
        matrix_counts(model, "hidden", "split", "*lora*, *lore*")
    with pytest.raises(InputError, match="matches no matrix"):  # a vector
        matrix_counts(model, "hidden", "split", "4.bias")
    for pattern in (" ", ",", " , ,*", "*lora*,"):
        with pytest.raises(InputError, match=rf"muon = '{re.escape(pattern)}' contains an empty"):
            matrix_counts(model, "hidden", "split", pattern)


def test_a_run_prints_its_routes() -> None:
    tables = {
        "data": {"name": "digits", "train": 60, "test": 20, "minimum": 1},
        "federation": {"clients": 2, "rounds": 1},
        "local": {"steps": 1, "muon": "*lora_A*"},
    }
    result = fedmuon.run(tables, task=nn.Sequential(nn.Flatten(), *CASES["peft, all layers"]))
    rows = {line.split()[0]: line for line in result.routes.splitlines()}
    assert "muon" in rows["1.lora_A.default.weight"] and "named" in rows["1.lora_B.default.weight"]
    assert result.routes == (result.path / "routes.txt").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="matches no matrix"):
        fedmuon.run(
            {**tables, "local": {"muon": "*nothing*"}},
            task=nn.Sequential(nn.Flatten(), *CASES["loralib"]),
        )


def test_the_adapters_of_the_decoder_go_to_muon() -> None:
    from fedmuon.tasks.decoder import WithAdapters

    def fixed(layer: nn.Module) -> nn.Module:
        """Turn the weight into a buffer, as `add_adapters` does after it adds adapters."""
        weight = layer.get_parameter("weight").detach()
        del layer.weight
        layer.register_buffer("weight", weight)
        return layer

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = fixed(nn.Embedding(30, 16))
            self.h = nn.ModuleList(WithAdapters(nn.Linear(16, 16, bias=False), 2) for _ in range(2))
            for one in self.h:
                fixed(one.get_submodule("base"))
            self.score = nn.Linear(16, 3)

    found = {one.name: (one.optimizer, one.reason) for one in routing_table(Body())}
    assert found.pop("score.weight")[0] == found.pop("score.bias")[0] == "aux"
    assert {*found.values()} == {("muon", "hidden")} and len(found) == 4


def test_adapters_of_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    model.bert.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        layer.attention.self.query = Adapted(layer.attention.self.query)
    found = {one.name: (one.optimizer, one.reason) for one in routing_table(model)}
    assert found.pop("classifier.weight") == ("aux", "last layer")
    found.pop("classifier.bias")
    assert {*found.values()} == {("muon", "hidden")} and len(found) == 4


def test_whole_projections_need_a_network_that_has_them() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(InputError, match="qkv = 'whole' has no effect"):
        matrix_counts(plain, "hidden", "whole")
    fused = nn.Sequential(OrderedDict(first=nn.Linear(3, 4), qkv=nn.Linear(4, 12),
                                      last=nn.Linear(12, 2)))  # fmt: skip
    assert matrix_counts(fused, "hidden", "whole")["qkv.weight"] == 1
    with pytest.raises(InputError, match="qkv = 'whole' has no effect"):  # SGD updates them
        matrix_counts(fused, "hidden", "whole", "first.weight")
