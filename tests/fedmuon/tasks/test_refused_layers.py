"""Layers that draw without a key, or write into what is not theirs, are refused by what they do:
torch's generator and the versions of tensors are the oracle."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import Batch
from fedmuon.tasks.models import reject_layers
from fedmuon.tasks.networks import NetworkTask

WORDS, IMAGE = torch.zeros(2, 5, 4), torch.ones(2, 3, 8, 8)
DRAWN: dict[str, tuple[Callable[..., nn.Module], Tensor]] = {  # by how much is dropped
    "Dropout": (nn.Dropout, WORDS),
    "Dropout1d": (nn.Dropout1d, WORDS),
    "Dropout2d": (nn.Dropout2d, IMAGE),
    "Dropout3d": (nn.Dropout3d, IMAGE),
    "AlphaDropout": (nn.AlphaDropout, WORDS),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, WORDS),
    "RReLU": (lambda p: nn.RReLU(0.1, 0.1 + p), -IMAGE),
    "RNN": (lambda p: nn.RNN(4, 4, 2, dropout=p), WORDS),
    "LSTM": (lambda p: nn.LSTM(4, 4, 2, dropout=p), WORDS),
    "GRU": (lambda p: nn.GRU(4, 4, 2, dropout=p), WORDS),
    "TransformerEncoderLayer": (lambda p: nn.TransformerEncoderLayer(4, 2, 8, p), WORDS),
}


def draws(layer: nn.Module, *inputs: Tensor) -> bool:
    """Whether a call moves torch's generator."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        layer(*inputs)
        return not torch.equal(before, torch.get_rng_state())


def refused(layer: nn.Module) -> bool:
    try:
        reject_layers(nn.Sequential(layer))
    except InputError as error:
        assert "which draws from torch's global generator" in str(error)
        return True
    return False


@pytest.mark.parametrize("name", DRAWN)
def test_what_draws_is_refused_and_nothing_else(name: str) -> None:
    make, inputs = DRAWN[name]
    assert draws(make(0.5), inputs) and refused(make(0.5))
    assert not refused(make(0.0)) and (name == "RReLU" or not draws(make(0.0), inputs))


def test_so_are_attention_that_drops_and_pools_of_random_regions() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    assert draws(attention, WORDS, WORDS, WORDS) and refused(attention)
    attention = nn.MultiheadAttention(4, 2)
    assert not draws(attention, WORDS, WORDS, WORDS) and not refused(attention)
    pools = nn.FractionalMaxPool2d(2, output_size=2), nn.FractionalMaxPool3d(2, output_size=2)
    for pool, rows in zip(pools, (IMAGE, torch.ones(2, 1, 4, 4, 4)), strict=True):
        assert draws(pool, rows) and refused(pool)
    assert not refused(nn.LSTM(4, 4, dropout=0.0)) and not refused(nn.MaxPool2d(2))


def test_all_layers_of_torch_that_take_a_dropout_were_looked_at() -> None:
    """Those that are not in the lists above hold such layers as parts."""
    parts = {"MultiheadAttention", "RNNBase", "Transformer", "TransformerDecoderLayer"}
    taking = {
        name
        for name, kind in vars(nn).items()
        if isinstance(kind, type)
        and issubclass(kind, nn.Module)
        and {"dropout", "p", "dropout_p"} & set(kind.__init__.__code__.co_varnames)
        and not name.startswith("Lazy")
    }
    with_norms = {"PairwiseDistance", "TripletMarginLoss", "MultiMarginLoss"}  # p of a norm
    assert taking <= set(DRAWN) | parts | with_norms


@pytest.mark.parametrize("first", [nn.LeakyReLU(0.5, inplace=True), nn.ReLU(inplace=True)])
@pytest.mark.parametrize("before", [[], [nn.Identity()], [nn.Unflatten(1, (2, 3)), nn.Flatten()]])
def test_a_layer_that_writes_into_the_samples_is_refused(
    first: nn.Module, before: list[nn.Module]
) -> None:
    net = nn.Sequential(*before, first, nn.Linear(6, 3))
    x, kept = -torch.ones(4, 6), -torch.ones(4, 6)
    net(x)
    assert not torch.equal(x, kept)  # as it does
    with pytest.raises(InputError, match="writes into its samples"):
        NetworkTask(net, (6,))


def test_layers_that_write_into_others_outputs_are_not() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()
    task, x = NetworkTask(net, (6,), torch.float64), torch.randn(40, 6, dtype=torch.float64)
    params, kept = task.initial(np.random.default_rng(0)), x.clone()
    task.gradient(params, [Batch(x, torch.zeros(40).long())])
    assert torch.equal(x, kept)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_rescales_itself_is_refused(
    kind: Callable[..., nn.Embedding | nn.EmbeddingBag],
) -> None:
    layer = kind(9, 4, max_norm=0.5)
    before = layer.weight.detach().clone()
    layer(torch.arange(8).view(2, 4))
    assert not torch.equal(layer.weight, before)
    with pytest.raises(InputError, match="remove max_norm"):
        reject_layers(nn.Sequential(layer))
    reject_layers(nn.Sequential(kind(9, 4)))
