"""`groups`: an encoder layer, a CNN, embeddings and tokens; steps against torch's optimizers."""

import pytest
import torch
from torch import nn

from fedmuon.core.errors import InputError
from fedmuon.optim import Muon, MuonWithAux, groups


class Small(nn.Module):
    """A CNN with a class token and an embedding, whose head is the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.conv = nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.places = nn.Embedding(4, 6)
        self.token = nn.Parameter(torch.zeros(1, 1, 6))
        self.hidden = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.conv(torch.relu(self.stem(images)))).flatten(2).mT
        found = torch.cat([self.token.expand(len(found), -1, -1), found], 1)
        places = self.places(torch.arange(4))
        return self.head(torch.relu(self.hidden(found[:, :4] + places)).mean(1))


def names(found: list[dict], use_muon: bool, blocks: int | None = None) -> set[str]:
    return {
        name
        for group in found
        if group["use_muon"] == use_muon and blocks in (None, group.get("blocks"))
        for name, _ in group["params"]
    }


def test_an_encoder_layer_splits_its_projections_and_keeps_norms_apart(capsys) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = groups(layer, ends=False)
    assert names(found, True, 3) == {"self_attn.in_proj_weight"}
    assert names(found, True, 1) == {
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    }
    others = {name for name, _ in layer.named_parameters()} - names(found, True)
    assert names(found, False) == others and all("bias" in n or "norm" in n for n in others)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "self_attn.in_proj_weight 24 x 8 3 of 8 x 8 muon fused" in said
    assert "linear1.bias 16 - aux vector" in said and "norm1.weight 8 - aux norm" in said
    assert said[-1] == "muon: 4 parameters, 512 entries; aux: 8 parameters, 88 entries"
    whole = groups(layer, ends=False, split_qkv=False, show=False)
    assert names(whole, True, 1) == names(found, True) and not names(whole, True, 3)
    assert capsys.readouterr().out == ""
    outer = groups(layer, show=False)  # the control: as a whole network it has ends
    assert names(outer, True) == {"self_attn.out_proj.weight", "linear1.weight"}


def test_a_cnn_gives_muon_its_hidden_filters_and_layers(capsys) -> None:
    model = Small()
    found = groups(model)
    assert names(found, True) == {"conv.weight", "hidden.weight"}
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "stem.weight 4 x 1 x 3 x 3 - aux first layer",
        "head.weight 3 x 8 - aux last layer",
        "conv.weight 6 x 4 x 3 x 3 6 x 36 muon hidden",
        "norm.bias 6 - aux norm",
        "places.weight 4 x 6 - aux embedding",
        "token 1 x 1 x 6 - aux embedding",
    ):
        assert line in said
    assert "token" in names(groups(model, to_muon=["token"], show=False), True)
    assert "conv.weight" in names(groups(model, to_aux=["conv.*"], show=False), False)


@pytest.mark.parametrize("split", [True, False])
def test_a_step_is_that_of_muon_on_each_matrix_and_of_adamw(split: bool) -> None:
    """The oracle takes the matrices one by one, and the vectors to torch's AdamW."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    before = {name: param.detach().clone() for name, param in layer.named_parameters()}
    found = groups(layer, ends=False, split_qkv=split, show=False)
    given = {"lr": 0.02, "weight_decay": 0.0, "ns_dtype": torch.float64}
    optimizer = MuonWithAux(found, muon=given, aux={"lr": 0.01})
    layer(torch.randn(4, 5, 8, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    for name, param in layer.named_parameters():
        assert param.grad is not None
        pieces = 3 if split and name.endswith("in_proj_weight") else 1
        parts = [nn.Parameter(one.clone()) for one in before[name].chunk(pieces)]
        for part, slope in zip(parts, param.grad.chunk(pieces), strict=True):
            part.grad = slope.clone()
        muon = param.ndim == 2
        (Muon(parts, **given) if muon else torch.optim.AdamW(parts, lr=0.01)).step()
        torch.testing.assert_close(param.detach(), torch.cat([one.detach() for one in parts]))


def test_training_with_the_groups_lowers_the_loss_and_errors_say_what_to_do() -> None:
    torch.manual_seed(1)
    model, images = Small(), torch.randn(16, 1, 6, 6)
    labels = torch.randint(3, (16,))
    optimizer = MuonWithAux(groups(model, show=False), muon={"lr": 0.02, "row_memory": 0.95},
                            aux={"lr": 3e-3})  # fmt: skip
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    for patterns in ([3], None, 3):
        with pytest.raises(InputError, match=r"to_aux is .* must be a list of name patterns"):
            groups(nn.Linear(2, 2), to_aux=patterns, show=False)  # type: ignore
    with pytest.raises(InputError, match="No parameter name matches"):
        groups(model, to_aux=["nothing.*"])
    with pytest.raises(InputError, match="Muon would update nothing"):
        groups(nn.LayerNorm(3), show=False)
